"""How many types can be distinguished: the formula, and what planted sets say."""

from __future__ import annotations

import pytest
import torch

from lightning_fedleak.attacks.row_space.atoms import Atoms
from lightning_fedleak.attacks.row_space.explanation import measure_capacity, predict_capacity

V, D = 400, 64


@pytest.fixture(scope="module")
def atoms() -> Atoms:
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(V, D, generator=g) + 3 * torch.randn(1, D, generator=g)
    return Atoms(rows, torch.zeros(0, D, dtype=torch.float64))


def test_it_ends_between_the_largest_found_and_the_smallest_missed(atoms: Atoms) -> None:
    types, failed, _ = measure_capacity(atoms, 4, sets=20)
    assert failed is not None
    assert 0 < failed - types <= 4


def test_the_formula_follows_what_was_measured(atoms: Atoms) -> None:
    for rank in (2, 8, 32):
        types, _, _ = measure_capacity(atoms, rank, sets=20)
        assert types == pytest.approx(predict_capacity(D, V, rank), rel=0.35)


def test_equal_atoms_are_not_planted(atoms: Atoms) -> None:
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(V, D, generator=g)
    rows[V // 2 :] = rows[V // 2] + 1e-6 * torch.randn(V - V // 2, D, generator=g)
    alike = Atoms(rows, torch.zeros(0, D, dtype=torch.float64))
    assert measure_capacity(alike, 8, sets=20)[0] > 15
