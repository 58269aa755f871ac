"""Layers of A_attack as modules (Vu et al. 2024), whose gradients the attacks have in closed form.

A module maps hidden states (B, L, d) and a mask (B, L), or None where nothing is padded, to
(B, R, K): one number per rung for each of R inputs (L tokens, or one sentence). Its only trainable
parameter is ``bias``, (K,). No global random numbers are drawn.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks import AttentionMembership, FCMembership
from lightning_fedleak.attacks.membership.fc import select_inputs
from lightning_fedleak.attacks.row_space import Whitening
from lightning_fedleak.labs.trained_membership import TrainedMembership

MAX_STORED_WEIGHTS = 1 << 26
"""Weights of the first layer that are stored (256 MiB); more are applied without being stored."""


class CraftedFC(nn.Module):
    """Two fully connected layers whose second has K neurons that differ in their bias alone.

    ``bias`` (K,), b2 of Eq. 6, is the only parameter. ``first`` and ``second``, the row (1, width)
    of W2 that all neurons share, are frozen. The module computes in its own dtype, also under
    autocast.

    Args:
        first: maps (..., D) to (..., width).
        second: (1, width).
        biases: (K,).
        tokens: positions of a sentence that are read as one input; None: each token is one.
    """

    def __init__(
        self, first: TwoIdentities | Frozen, second: Tensor, biases: Tensor, tokens: int | None
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.first = first
        self.register_buffer("second", second.detach().clone())
        self.second: Tensor
        self.bias = nn.Parameter(biases.detach().clone())

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return (B, R, K) for hidden states (B, L, d); 0 where padded."""
        inputs, real = select_inputs(hidden, mask, self.tokens)
        with torch.autocast(hidden.device.type, enabled=False):
            x = inputs.to(self.bias.dtype)
            z = nn.functional.relu(self.first(x)) @ self.second.T
            z = nn.functional.relu(z + self.bias)
        return z if real is None else z * real[..., None].to(z.dtype)


class Frozen(nn.Module):
    """``W x + b`` without parameters to train; unlike ``nn.Linear`` it draws no random numbers.

    Args:
        weight: (width, D).
        bias: (width,).
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach())
        self.register_buffer("bias", bias.detach())
        self.weight: Tensor
        self.bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., width) for (..., D)."""
        return nn.functional.linear(x, self.weight, self.bias)


class TwoIdentities(nn.Module):
    """Eq. 6's first layer: W1 = [I; -I], b1 = [-T - dead_zone; T - dead_zone], zero below.

    W1 is stored up to :data:`MAX_STORED_WEIGHTS` weights. A larger one is applied without being
    stored (for a sentence of 32 x 768 it would take 4.8 GB), with the same result.

    Args:
        target: T, (D,).
        dead_zone: a scalar.
    """

    def __init__(self, target: Tensor, dead_zone: Tensor) -> None:
        super().__init__()
        d = len(target)
        self.register_buffer("bias", torch.cat([-target, target]) - dead_zone)
        self.bias: Tensor
        weight = None
        if 2 * d * d <= MAX_STORED_WEIGHTS:
            eye = torch.eye(d).to(target)
            weight = torch.cat([eye, -eye])
        self.register_buffer("weight", weight)
        self.weight: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., width) for (..., d)."""
        if self.weight is not None:
            return nn.functional.linear(x, self.weight, self.bias)
        return torch.cat([x, -x], -1) + self.bias


class CraftedAttention(nn.Module):
    """Self-attention of Eq. 1, W_O and ReLU for one target. Only ``bias`` (K,), b_O, is trained.

    The buffers are ``w_q``, ``w_k`` (2, d, d) with biases ``b_q``, ``b_k`` (2, d), ``w_v``
    (2, d, d) and ``w_o`` (r, 2 d). The third and the fourth head of Algorithm 1 are copies of the
    two, and not needed. Every row of W_O represents ``K / r`` equal rows with different biases: a
    ladder of gammas. The module computes in its own dtype, also under autocast. No token attends to
    padded positions, whose output is 0.

    Args:
        target: (d,) the token v, whitened.
        beta: factor of the products.
        whitening: folded into W_Q, W_K and their biases.
        rows: (r, d) of W_O along which Z1 - Z2 is read.
        gammas: (K,) the ladders of all rows, row after row.
    """

    def __init__(
        self, target: Tensor, beta: float, whitening: Whitening, rows: Tensor, gammas: Tensor
    ) -> None:
        super().__init__()
        d = len(target)
        basis, mean = whitening.matrix.to(target), whitening.mean.to(target)
        unit = nn.functional.normalize(target, dim=0, eps=torch.finfo(target.dtype).tiny)
        queries = torch.stack([basis - torch.outer(unit, unit @ basis), basis])
        keys = (beta * math.sqrt(d) * basis).expand(2, d, d)
        for name, value in {
            "w_q": queries,
            "b_q": -(queries @ mean),
            "w_k": keys,
            "b_k": -(keys @ mean),
            "w_v": basis.expand(2, -1, -1),
            "w_o": torch.cat([rows, -rows], 1),
        }.items():
            self.register_buffer(name, value.detach().contiguous())
        self.w_q: Tensor
        self.b_q: Tensor
        self.w_k: Tensor
        self.b_k: Tensor
        self.w_v: Tensor
        self.w_o: Tensor
        self.bias = nn.Parameter(-gammas.detach().to(target))

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return (B, L, K) for hidden states (B, L, d)."""
        with torch.autocast(hidden.device.type, enabled=False):
            x = hidden.to(self.bias.dtype)
            projections = (self._heads(x, mask) @ self.w_o.T)[..., None]
            z = nn.functional.relu(projections + self.bias.view(len(self.w_o), -1)).flatten(2)
        return z if mask is None else z * (mask.to(z.device) != 0)[..., None].to(z.dtype)

    def _heads(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return Z of all heads side by side, (B, L, H d)."""
        q = torch.einsum("bld,hkd->bhlk", x, self.w_q) + self.b_q[:, None]
        k = torch.einsum("bld,hkd->bhlk", x, self.w_k) + self.b_k[:, None]
        logits = q @ k.mT / math.sqrt(self.w_q.shape[1])
        length = x.shape[1]
        blocked = torch.zeros(1, length, length, dtype=torch.bool, device=x.device)
        if mask is not None:
            blocked = blocked | (mask.to(x.device) == 0)[:, None]
        # A padded token attends to itself: a softmax over no token would be NaN.
        blocked = blocked & ~torch.eye(length, dtype=torch.bool, device=x.device)
        attention = logits.masked_fill(blocked[:, None], -torch.inf).softmax(-1)
        values = torch.einsum("bld,hkd->bhlk", x, self.w_v)
        return (attention @ values).transpose(1, 2).flatten(2)


def craft(attack: Any, target: Tensor) -> nn.Module:
    """Run A_attack: return the layers of an attack for one target, as ``embed`` returns it.

    Args:
        attack: of this package, or one that has a method ``craft``.
        target: (D,).

    Raises:
        ValueError: the target is not finite, or all zeros.
    """
    if isinstance(attack, FCMembership):
        taus, zones = attack.settings(target[None])
        target = target.detach().to(taus.dtype)
        second = target.new_full((1, 2 * len(target)), -1.0)
        return CraftedFC(TwoIdentities(target, zones[0]), second, taus[0], attack.read_together)
    if isinstance(attack, TrainedMembership):
        neuron = attack.neuron(target)
        first = Frozen(neuron.weight, neuron.bias)
        return CraftedFC(first, neuron.second, attack.biases(neuron), attack.read_together)
    if type(attack) is AttentionMembership:
        v, rows = attack.split_targets(target[None])
        whitening, edges = attack.calibration.whitening, attack.edges(v)
        return CraftedAttention(v[0], attack.beta, whitening, rows, edges)
    layers: nn.Module = attack.craft(target)
    return layers
