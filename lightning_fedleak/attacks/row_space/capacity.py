"""How many word types the rows of an update can tell apart: a formula, and planted sets."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from lightning_fedleak.attacks.row_space.pursuit import Atoms, SharedRows, explain

_RECOVERED = 0.99  # F1 from which a planted set counts as found: one type in a hundred may miss
_DIRECTIONS = 8  # random directions in which atoms are compared; not tuned
_GRID = 200.0  # cells per unit length: atoms in one cell of all directions are equal; not tuned


@dataclass(frozen=True)
class Capacity:
    """How many types an update tells apart.

    Attributes:
        types: the largest number of planted types of which all but one in a hundred were found.
        failed: the smallest number at which they were not; None if no set failed.
        predicted: result of :func:`predict_capacity`.
    """

    types: int
    failed: int | None
    predicted: float


def predict_capacity(width: int, tokens: int, rank: int) -> float:
    """Return how many types ``rank`` rows tell apart: ``width / (1 + ln(tokens) / (2.5 rank))``.

    The formula was fitted to planted sets of equally likely types
    (``benchmarks/attacks/capacity.py``). It is no theorem, and no promise that more types are safe.

    Args:
        width: dimensions of the input, less what is no word.
        tokens: size of the vocabulary.
        rank: number of shared rows, at most ``width``.
    """
    return width / (1 + math.log(max(2, tokens)) / (2.5 * max(1, rank)))


def measure_capacity(atoms: Atoms, rank: int, *, seconds: float, seed: int = 0) -> Capacity:
    """Return the capacity that a search by bisection over planted sets of types finds.

    Tokens with (nearly) equal atoms, such as those that were never trained, are not planted: no
    update tells them apart.

    Args:
        atoms: of all tokens.
        rank: number of shared rows.
        seconds: time after which no other set is planted; the first one always is.
        seed: of the sets.
    """
    generator = torch.Generator().manual_seed(seed)
    usable = _unlike_tokens(atoms, generator)
    room = atoms.width - len(atoms.beside)
    guess = predict_capacity(room, len(usable), rank)
    low, high = 0, min(room, len(usable))
    types = max(1, min(int(guess), high - 1))
    deadline = time.monotonic() + seconds
    failed = None
    while low < types < high:
        if _recovers_planted(atoms, rank, usable, types, generator):
            low = types
        else:
            high = failed = types
        if time.monotonic() > deadline or high - low <= max(1, room // 16):
            break
        wider = min(types + max(1, room // 8), high - 1) if failed is None else (low + high) // 2
        narrower = max(1, types - max(1, room // 8)) if low == 0 else (low + high) // 2
        types = wider if low == types else narrower
    return Capacity(low, failed, guess)


def planted_set_seconds(width: int, tokens: int, rank: int) -> float:
    """Return roughly the seconds that a planted set of the predicted size takes at 10 GFLOP/s."""
    return predict_capacity(width, tokens, rank) / 8 * (4 * width * tokens / 1e10)


def _unlike_tokens(atoms: Atoms, generator: torch.Generator) -> torch.Tensor:
    """Return the (n,) tokens whose atoms equal no other's in eight random directions."""
    directions = torch.randn(atoms.width, _DIRECTIONS, generator=generator)
    cells = (atoms.screen @ directions.to(atoms.screen.device) * _GRID).round()
    _, group, size = torch.unique(cells, dim=0, return_inverse=True, return_counts=True)
    tokens: torch.Tensor = ((size[group] == 1) & atoms.usable).nonzero()[:, 0].cpu()
    return tokens


def _recovers_planted(
    atoms: Atoms, rank: int, usable: torch.Tensor, types: int, generator: torch.Generator
) -> bool:
    """Return whether a planted set of types is found in rows of single precision."""
    truth = usable[torch.randperm(len(usable), generator=generator)[:types]]
    device = atoms.screen.device
    rows = min(rank, 2 * atoms.width)
    weights = torch.randn(rows, types, generator=generator, dtype=torch.float64)
    weights *= torch.randn(types, generator=generator, dtype=torch.float64).exp()
    gradient = (weights.to(device) @ atoms.rows(truth.to(device))).float()
    single = torch.finfo(torch.float32).eps
    shared = SharedRows.stack([gradient], atoms.beside, rounding=single, noise=[0.0])
    if len(shared.principal) >= atoms.width - len(atoms.beside) - 1:
        return False
    odds = atoms.screen.new_full((len(atoms.screen),), math.log(types / len(usable)))
    recovered = set(explain(atoms, shared, odds).types.tolist())
    hits = len(recovered & set(truth.tolist()))
    return 2 * hits / (len(recovered) + types) >= _RECOVERED
