"""Fully connected layers that a dishonest server inserts, as modules."""

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks.membership.fc import select_inputs


class CraftedFC(nn.Module):
    """Two fully connected layers whose second has K neurons that differ only in their bias.

    ``bias`` (K,), b2 of Eq. 6, is the only parameter. ``first`` and ``second``, the row (1, width)
    of W2 that all neurons share, are frozen. The module computes in its own dtype, also under
    autocast.

    Args:
        first: The first layer, a module that maps (..., D) to (..., width).
        second: The row of W2 that all neurons share, (1, width).
        biases: The initial ``bias``, (K,).
        tokens: The number of token positions that are concatenated into one input; None if each
            token is one input.
    """

    def __init__(
        self, first: nn.Module, second: Tensor, biases: Tensor, tokens: int | None
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


class FrozenLinear(nn.Module):
    """``W x + b`` without parameters to train; unlike ``nn.Linear`` it draws no random numbers.

    Args:
        weight: The frozen W, (width, D).
        bias: The frozen b, (width,).
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
    """Eq. 6's first layer: W1 = [I; -I], (2 D, D), and b1 = [-T - dead_zone; T - dead_zone].

    W1 is not stored: it has 4.8 GB for a sentence of 32 x 768 numbers. The rows of zeros in the
    paper's W1 are omitted, because they have no effect.

    Args:
        target: The target T, (D,).
        dead_zone: The dead zone, a scalar tensor.
    """

    def __init__(self, target: Tensor, dead_zone: Tensor) -> None:
        super().__init__()
        self.register_buffer("bias", torch.cat([-target, target]) - dead_zone)
        self.bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., 2 D) for (..., D)."""
        return torch.cat([x, -x], -1) + self.bias
