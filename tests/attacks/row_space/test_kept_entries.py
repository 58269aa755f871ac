"""Rows of which only the largest entries were sent, against least squares on what was kept."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fedleak.attacks.row_space.atoms import explain_sparse, select_densest
from tests.attacks.row_space.test_pursuit import NOTHING, D, V, dictionary, planted

ODDS = torch.full((V,), math.log(20 / V))


def sparse(gradient: Tensor, share: float) -> Tensor:
    """The largest entries of a gradient, the others zero."""
    order = np.argsort(-gradient.abs().numpy().ravel())
    retained = np.zeros(gradient.numel(), dtype=np.float32)
    best = order[: int(share * len(order))]
    retained[best] = gradient.numpy().ravel()[best]
    return torch.from_numpy(retained.reshape(gradient.shape))


def misfit(rows: Tensor, atoms: Tensor) -> float:
    """What least squares leave of the kept entries, row by row, as a share of the rows' norm."""
    residual = 0.0
    for row in rows.double().numpy():
        places = row.nonzero()[0]
        columns = atoms.double().numpy().T[places]
        fit = np.linalg.lstsq(columns, row[places], rcond=None)[0]
        residual += float(((row[places] - columns @ fit) ** 2).sum())
    return math.sqrt(residual) / float(rows.double().norm())


@pytest.mark.parametrize("share", [0.2, 0.5])
@pytest.mark.parametrize("types", [1, 4, 9])
def test_the_planted_types_are_found_and_each_is_needed(types: int, share: float) -> None:
    atoms = dictionary()
    for seed in range(5):
        gradient, truth = planted(atoms, types, 40, seed)
        rows = select_densest(sparse(gradient, share))
        result = explain_sparse(rows, atoms, NOTHING, ODDS)
        assert result is not None
        assert set(result.tolist()) == set(truth.tolist())
        rows = rows[(rows != 0).sum(1) > 2 * types]
        assert misfit(rows, atoms[result]) < 1e-6
        for gone in result.tolist() if types > 1 else ():
            assert misfit(rows, atoms[[t for t in result.tolist() if t != gone]]) > 1e-3


def test_directions_that_are_no_word_are_no_types() -> None:
    atoms = dictionary()
    gradient, truth = planted(atoms, 3, 40)
    generator = torch.Generator().manual_seed(7)
    beside = torch.nn.functional.normalize(torch.randn(2, D, generator=generator).double(), dim=1)
    mixed = gradient.double() + 20 * torch.randn(40, 2, generator=generator).double() @ beside
    rows = select_densest(sparse(mixed.float(), 0.4))
    result = explain_sparse(rows, atoms, beside, ODDS)
    assert result is not None
    assert set(result.tolist()) == set(truth.tolist())
    alone = explain_sparse(rows, atoms, NOTHING, ODDS)
    assert alone is None or set(alone.tolist()) != set(truth.tolist())


def test_a_type_that_only_came_first_is_taken_back() -> None:
    atoms = dictionary(common=0.0)
    generator = torch.Generator().manual_seed(3)
    # Nearly the sum of two others, and so what explains most of rows that hold both alike.
    atoms[2] = atoms[0] + atoms[1] + 0.2 * torch.randn(D, generator=generator)
    weights = 1 + 0.2 * torch.randn(40, 2, generator=generator)
    rows = select_densest(sparse(weights @ atoms[:2], 0.5))
    assert misfit(rows, atoms[2:3]) < misfit(rows, atoms[0:1])
    assert misfit(rows, atoms[2:3]) < misfit(rows, atoms[1:2])
    result = explain_sparse(rows, atoms, NOTHING, ODDS)
    assert result is not None
    assert set(result.tolist()) == {0, 1}


def test_the_vocabulary_may_be_read_in_parts(monkeypatch) -> None:
    atoms = dictionary()
    rows = select_densest(sparse(planted(atoms, 4, 40)[0], 0.3))
    whole = explain_sparse(rows, atoms, NOTHING, ODDS)
    monkeypatch.setattr("lightning_fedleak.attacks.row_space.atoms._TOKENS_AT_ONCE", 7)
    parts = explain_sparse(rows, atoms, NOTHING, ODDS)
    assert whole is not None
    assert parts is not None
    assert torch.equal(whole, parts)


def test_equal_atoms_count_once() -> None:
    atoms = dictionary()
    gradient, truth = planted(atoms, 4, 40)
    equal = [t for t in range(100, 160) if t not in truth.tolist()]
    atoms[equal] = atoms[truth[0]].clone()
    result = explain_sparse(select_densest(sparse(gradient, 0.2)), atoms, NOTHING, ODDS)
    assert result is not None
    names = {int(truth[0]) if t in equal else t for t in result.tolist()}
    assert len(result) == 4
    assert names == set(truth.tolist())
