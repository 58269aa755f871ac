"""Crafted layers as modules, and their gradients where they are really inserted.

:func:`craft` runs A_attack of Vu et al. 2024. The gradient of the module's ``bias`` in training is
what :meth:`~lightning_fedleak.attacks.MembershipAttack.gradient` computes without it.
"""

import math

import torch
from torch import Tensor, nn

from benchmarks.defenses.crafted import CraftedFC, FrozenLinear, TwoIdentities
from benchmarks.defenses.planted import inserted
from benchmarks.papers.baselines import PublishedAttention, TrainedMembership
from lightning_fedleak.attacks import AttentionMembership, FCMembership, MembershipAttack
from lightning_fedleak.attacks.membership.base import check_targets
from lightning_fedleak.attacks.row_space import Whitening
from lightning_fedleak.model.model_runs import undisturbed


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
        whitening: folded into W_Q, W_K and their biases; None for hidden states as they are.
        rows: (r, d) of W_O along which Z1 - Z2 is read; None for line 11 of Algorithm 1: every
            coordinate, with both signs.
        gammas: (K,) the ladders of all rows, row after row.
    """

    def __init__(
        self,
        target: Tensor,
        beta: float,
        whitening: Whitening | None,
        rows: Tensor | None,
        gammas: Tensor,
    ) -> None:
        super().__init__()
        d = len(target)
        basis = torch.eye(d).to(target) if whitening is None else whitening.matrix.to(target)
        mean = target.new_zeros(d) if whitening is None else whitening.mean.to(target)
        unit = nn.functional.normalize(target, dim=0, eps=torch.finfo(target.dtype).tiny)
        queries = torch.stack([basis - torch.outer(unit, unit @ basis), basis])
        keys = (beta * math.sqrt(d) * basis).expand(2, d, d)
        if rows is None:
            eye = torch.eye(d).to(target)
            rows = torch.cat([eye, -eye])
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


def craft(attack: MembershipAttack, target: Tensor) -> CraftedFC | CraftedAttention:
    """Return real layers for one target (D,), as ``attack.embed`` returns it.

    They map hidden states (B, L, d) and a mask (B, L), or None where nothing is padded, to
    (B, R, K): one number per rung for each of R inputs (L tokens, or one sentence). Their only
    trainable parameter is ``bias``, (K,). No global random numbers are drawn.
    """
    if isinstance(attack, FCMembership):  # Algorithm 2: the layers of Eq. 6
        taus, zones = attack.settings(target[None])
        target = target.detach().to(taus.dtype)
        first = TwoIdentities(target, zones[0])
        second = target.new_full((1, 2 * len(target)), -1.0)
        return CraftedFC(first, second, taus[0], attack.read_together)
    if isinstance(attack, TrainedMembership):
        network = attack.network(target)
        weight, bias, second, _ = network.parameters
        first = FrozenLinear(weight, bias)
        return CraftedFC(first, second, attack.biases(network), attack.read_together)
    assert isinstance(attack, AttentionMembership)  # Algorithm 1
    check_targets(target)
    if isinstance(attack, PublishedAttention):
        gammas = attack.ladder.repeat(2 * len(target))
        return CraftedAttention(target, attack.factor, None, None, gammas)
    token, rows = target[None].tensor_split(2, dim=1)
    return CraftedAttention(
        attack._whiten(token)[0], attack.beta, attack._whitening, rows, attack.gammas
    )


def autograd_gradient(anatomy, attack, target, ids, mask) -> tuple[Tensor, Tensor]:
    """Gradients of the biases (K,) and of the outputs (B, R) of really inserted crafted layers."""
    crafted, outputs = craft(attack, target), []
    bias = crafted.get_parameter("bias")
    inputs = {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})
    with (
        crafted.register_forward_hook(lambda _, args, output: outputs.append(output)),
        inserted(anatomy, attack.layer, crafted, mask=mask),
        undisturbed(anatomy) as model,
        torch.enable_grad(),
    ):
        output = model(**inputs)
        chances = getattr(output, "logits", output).log_softmax(-1)[..., 5]
        loss = chances.mean() if mask is None else (chances * mask).sum() / mask.sum()
        gradient, upstream = torch.autograd.grad(loss, [bias, outputs[-1]])
    return gradient, upstream[..., 0]
