"""Two crafted fully connected layers as real modules, and the inputs they read from a batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks.membership.base import check_batch, sentence_rows

MOST_STORED_WEIGHTS = 1 << 26
"""Weights of the first layer that are stored (256 MiB); more are applied without being stored."""


class CraftedFC(nn.Module):
    """Two fully connected layers whose second has K neurons that differ in their bias alone.

    ``bias`` (K,), b2 of Eq. 6, is the only parameter. ``first`` and ``second``, the row (1, width)
    of W2 that all neurons share, are frozen. The module computes in its own dtype, also under
    autocast.

    Args:
        first: maps (..., D) to (..., width); has ``in_features``.
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
        inputs, real = _select_inputs(hidden, mask, self.tokens)
        if inputs.shape[-1] != self.first.in_features:
            raise ValueError(
                f"these layers were crafted for inputs of {self.first.in_features} numbers, "
                f"got {inputs.shape[-1]}"
            )
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
        self.in_features = weight.shape[1]
        self.register_buffer("weight", weight.detach())
        self.register_buffer("bias", bias.detach())
        self.weight: Tensor
        self.bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., width) for (..., D)."""
        return nn.functional.linear(x, self.weight, self.bias)


class TwoIdentities(nn.Module):
    """Eq. 6's first layer: W1 = [I; -I], b1 = [-T - dead_zone; T - dead_zone], zero below.

    W1 is stored up to :data:`MOST_STORED_WEIGHTS` weights. A larger one is applied without being
    stored (for a sentence of 32 x 768 it would take 4.8 GB), with the same result.

    Args:
        target: T, (D,).
        dead_zone: a scalar.
        width: neurons; with fewer than 2D only the first ``width // 2`` numbers are compared.
    """

    def __init__(self, target: Tensor, dead_zone: Tensor, width: int) -> None:
        super().__init__()
        d = self.in_features = len(target)
        part = self.part = min(d, width // 2)
        self.width = width
        bias = target.new_zeros(width)
        bias[:part] = -target[:part] - dead_zone
        bias[part : 2 * part] = target[:part] - dead_zone
        self.register_buffer("bias", bias)
        self.bias: Tensor
        weight = None
        if d * width <= MOST_STORED_WEIGHTS:
            weight = target.new_zeros((width, d))
            weight[:part].fill_diagonal_(1.0)
            weight[part : 2 * part].fill_diagonal_(-1.0)
        self.register_buffer("weight", weight)
        self.weight: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., width) for (..., d)."""
        if self.weight is not None:
            return nn.functional.linear(x, self.weight, self.bias)
        compared = x[..., : self.part]
        signs = torch.cat([compared, -compared], -1)
        return nn.functional.pad(signs, (0, self.width - signs.shape[-1])) + self.bias


def batch_inputs(
    hidden: Tensor, mask: Tensor | None, upstream: Tensor, tokens: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs that crafted layers read from a batch, without padding.

    Args:
        hidden: (B, L, d).
        mask: (B, L) or None.
        upstream: (B, L); with ``tokens`` (B, 1).
        tokens: positions of a sentence that are read as one input; None: each token is one.

    Returns:
        Inputs (N, D), the sample of each (N,), the upstream gradient of each (N,).

    Raises:
        ValueError: shapes that do not fit.
    """
    check_batch(hidden, mask, upstream, whole_sentence=tokens is not None)
    inputs, real = _select_inputs(hidden, mask, tokens)
    b, r, d = inputs.shape
    samples = torch.arange(b, device=hidden.device)[:, None].expand(b, r)
    if real is None:
        return inputs.reshape(b * r, d), samples.reshape(-1), upstream.reshape(-1)
    return inputs[real], samples[real], upstream[real]


def _select_inputs(
    hidden: Tensor, mask: Tensor | None, tokens: int | None
) -> tuple[Tensor, Tensor | None]:
    """Return inputs (B, R, D), and which of them are not only padding, (B, R)."""
    real = None if mask is None else mask.to(hidden.device) != 0
    if tokens is None:
        return hidden, real
    rows = sentence_rows(hidden, mask, tokens)[:, None]
    return rows, None if real is None else real.any(1, keepdim=True)
