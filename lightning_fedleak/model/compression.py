"""Methods of compression of shared tensors, and the error that each method adds to them.

Clients may compress a gradient before they share it: ``"topk"`` sends only the largest entries,
``"int8"`` and ``"int4"`` round the entries to few bits, ``"sign"`` sends their signs, and
``"low_rank"`` two factors (as PowerSGD does). The server sees the decompressed tensor, from which
:func:`compression_error` estimates the error that attacks must allow for. With *error feedback* a
client adds the error of one update to its next one before it compresses that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Method = Literal["topk", "int8", "int4", "sign", "low_rank"]
COMPRESSIONS: frozenset[str] = frozenset(get_args(Method))
"""The methods, which compress each tensor separately."""
LEVELS = {"int8": 127, "int4": 7}
"""Number of rounding steps between 0 and the largest entry of a tensor, by method."""
AVERAGED = "averaged"
"""The compression of a mean or sum of tensors that were compressed separately."""


def compression_error(tensor: Tensor, method: str) -> float:
    """Return the standard deviation of a compression's error in a tensor's entries.

    It is estimated from the decompressed tensor. Rounding has an error that is uniform over one
    rounding step. The zeros of ``"topk"`` have an error that is uniform between plus and minus the
    smallest entry that was sent. For ``"sign"`` the entries are taken as normal with mean 0 and the
    mean size that was sent. ``"low_rank"`` counts as exact, because
    its rows are combinations of the original rows.

    Args:
        tensor: the tensor that the server decompresses.
        method: as in :attr:`GradientSnapshot.compression`.
    """
    sizes = tensor.abs()
    if method == "low_rank" or not bool(tensor.any()):
        return 0.0
    if method == "topk":
        return float(sizes[sizes > 0].min()) / math.sqrt(3)
    if method == "sign":
        return float(sizes.max()) * math.sqrt(math.pi / 2 - 1)  # of |x|, for normal entries x
    return float(sizes.max()) / LEVELS[method] / math.sqrt(12)


@dataclass(frozen=True)
class Compression:
    """A method of compression and its setting.

    Attributes:
        method: one of :data:`COMPRESSIONS`.
        share: The share of a tensor's entries that ``"topk"`` keeps.
        rank: The rank of the factors of ``"low_rank"``.
    """

    method: Method
    share: float = 1.0
    rank: int = 1

    def __str__(self) -> str:
        setting = {"topk": f" {self.share:g}", "low_rank": f" {self.rank}"}
        return self.method + setting.get(self.method, "")

    def factors(self, values: Tensor) -> bool:
        """Return whether a tensor is sent as two factors; a narrower one is sent unchanged."""
        if self.method != "low_rank" or values.dim() < 2:
            return False
        return self.rank < min(len(values), values[0].numel())

    def reduce(self, values: Tensor, rows: int | None = None) -> Tensor:
        """Return a tensor after compression and decompression, without error feedback.

        Args:
            values: the tensor, or only those of its rows that are not nearly zero.
            rows: The number of rows of the whole tensor; None if ``values`` is the whole tensor.
        """
        if self.method == "topk":
            n_entries = self.share * values.numel() * (1 if rows is None else rows / len(values))
            index = values.abs().flatten().topk(min(values.numel(), max(1, int(n_entries)))).indices
            sparse = torch.zeros_like(values).flatten()
            sparse[index] = values.flatten()[index]
            return sparse.view_as(values)
        if self.method == "sign":
            return values.sign() * values.abs().mean()
        if self.method == "low_rank":
            return low_rank(values, self.rank)[0] if self.factors(values) else values
        if not bool(values.any()):
            return values
        step = values.abs().max() / LEVELS[self.method]
        return (values / step).round() * step


def low_rank(values: Tensor, rank: int, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the product of two factors that approximates a tensor, and the right factor.

    Args:
        values: (n, ...), read as a matrix (n, m).
        rank: columns of the factors.
        factor: (m, rank) the right factor of the previous update; None for the first update, which
            begins with random numbers of a fixed seed, the same on every client.
    """
    matrix = values.flatten(1)
    if factor is None or not bool(factor.any()):
        generator = torch.Generator().manual_seed(matrix.shape[1])
        factor = torch.randn(matrix.shape[1], rank, generator=generator)
    left = torch.linalg.qr(matrix @ factor.to(matrix)).Q
    right = matrix.T @ left
    return (left @ right.T).view_as(values), right


def explain_compression(method: str) -> str:
    """Return the reason why an attack has no result for a compressed gradient."""
    if method == AVERAGED:
        return "a sum of gradients that were compressed one by one has an unknown error"
    return (
        f"this attack reads no gradient compressed by '{method}': with stages=('local', 'shared') "
        "a monitor also attacks the gradient before compression"
    )
