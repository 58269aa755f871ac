"""Rows of uneven accuracy, on planted sets."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_fedleak.attacks.row_space.atoms import Atoms
from lightning_fedleak.attacks.row_space.explanation import explain_uneven
from lightning_fedleak.attacks.row_space.pursuit import PursuitResult, explain
from lightning_fedleak.attacks.row_space.shared_rows import SharedRows

TOKENS, WIDTH = 400, 48


def planted(rows: int, types: int, seed: int = 0) -> tuple[Atoms, Tensor, Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(TOKENS, WIDTH, generator=generator)
    atoms = Atoms(inputs, torch.zeros(0, WIDTH, dtype=torch.float64))
    truth = torch.randperm(TOKENS, generator=generator)[:types]
    weights = torch.randn(rows, types, generator=generator, dtype=torch.float64)
    return atoms, truth, weights @ inputs[truth].double(), generator


def finder(atoms: Atoms, counted: list[int]):
    odds = torch.full((TOKENS,), -3.0)

    def find(rows: Sequence[Tensor], noise: Sequence[float]) -> tuple[PursuitResult, Tensor]:
        shared = SharedRows.stack(rows, atoms.nuisance, rounding=1e-7, noise=noise)
        result = explain(atoms, shared, odds)
        counted.append(len(result.types))
        return result, atoms.rows(result.types)

    return find


def f1(types: Tensor, truth: Tensor) -> float:
    right = int(torch.isin(types, truth).sum())
    return 2 * right / (len(types) + len(truth))


@pytest.mark.parametrize("seed", range(4))
def test_entries_that_are_hardly_known_are_filled_in(seed: int) -> None:
    atoms, truth, rows, generator = planted(12, 22, seed)
    size = rows.abs()
    errors = 1e-6 + 1.0 * size * (size / size.max()) ** 2  # the largest are known worst
    observed = rows + errors * torch.randn(rows.shape, generator=generator, dtype=torch.float64)
    counted: list[int] = []
    find = finder(atoms, counted)
    result = explain_uneven([observed], [errors], find)
    once, _ = find([observed], [float(errors.square().mean().sqrt())])
    assert len(counted) > 2
    assert f1(result.types, truth) >= 0.9
    assert f1(result.types, truth) > f1(once.types, truth)


def test_only_the_rows_that_are_known_best_are_used() -> None:
    atoms, truth, rows, generator = planted(400, 12)
    errors = torch.full_like(rows, 1e-6)
    errors[256:] = 1e3
    observed = rows + errors * torch.randn(rows.shape, generator=generator, dtype=torch.float64)
    result = explain_uneven([observed], [errors], finder(atoms, []))
    assert set(result.types.tolist()) == set(truth.tolist())
