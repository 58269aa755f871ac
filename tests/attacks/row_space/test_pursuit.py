"""The pursuit against planted problems, and against the span test where the rank is full."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_fedleak.attacks.row_space import atoms as atoms_module
from lightning_fedleak.attacks.row_space import pursuit
from lightning_fedleak.attacks.row_space.atoms import Atoms
from lightning_fedleak.attacks.row_space.certificate import exchange_twins, prune
from lightning_fedleak.attacks.row_space.explanation import measure_capacity
from lightning_fedleak.attacks.row_space.pursuit import PursuitResult, explain
from lightning_fedleak.attacks.row_space.shared_rows import SharedRows

SINGLE = torch.finfo(torch.float32).eps
V, D = 400, 64
NOTHING = torch.zeros(0, D, dtype=torch.float64)


def dictionary(seed: int = 0, *, common: float = 3.0) -> Tensor:
    """Inputs that share most of their direction, as those of a language model do."""
    g = torch.Generator().manual_seed(seed)
    spread = torch.exp(torch.linspace(0, -2, D))
    return torch.randn(V, D, generator=g) * spread + common * torch.randn(1, D, generator=g)


def planted(rows: Tensor, types: int, rank: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A gradient (rank, D) in single precision, and the types (types,) that it is made of."""
    g = torch.Generator().manual_seed(seed)
    truth = torch.randperm(len(rows), generator=g)[:types]
    weights = torch.randn(rank, types, generator=g, dtype=torch.float64)
    weights *= torch.exp(torch.randn(types, generator=g, dtype=torch.float64))
    return (weights @ rows[truth].double()).float(), truth


def solve(rows: Tensor, gradient: Tensor, noise: float = 0.0) -> PursuitResult:
    shared = SharedRows.stack([gradient], NOTHING, rounding=SINGLE, noise=[noise])
    return explain(Atoms(rows, NOTHING), shared, torch.full((len(rows),), math.log(20 / V)))


@pytest.mark.parametrize("rank", [8, D, 3 * D])
def test_the_singular_rows_have_the_inner_products_of_all_rows(rank: int) -> None:
    gradient, _ = planted(dictionary(), 24, rank)
    nuisance = torch.linalg.qr(dictionary(1)[:3].double().T).Q.T
    shared = SharedRows.stack([gradient], nuisance, rounding=SINGLE, noise=[0.0])
    assert shared.singular.shape == (min(rank, D - 3), D)
    products = shared.whole.T @ shared.whole
    error = float((shared.singular.T @ shared.singular - products).norm() / products.norm())
    assert error < 1e-12
    assert torch.equal(shared.principal, shared.singular[: len(shared.principal)])


@given(st.integers(2, 24), st.integers(0, 1000))
def test_below_full_rank_the_planted_types_are_found_and_certified(types: int, seed: int) -> None:
    rows = dictionary(seed % 5)
    gradient, truth = planted(rows, types, 8, seed)
    result = solve(rows, gradient)
    assert set(result.types.tolist()) == set(truth.tolist())
    assert result.certified
    assert result.expected == types
    assert set(result.scores.topk(types).indices.tolist()) == set(truth.tolist())


@given(st.integers(2, 28), st.integers(0, 1000), st.integers(20, 80))
def test_a_pool_between_scorings_of_the_vocabulary_changes_no_certified_answer(types, seed, pool):
    rows = dictionary(seed % 5)
    gradient, truth = planted(rows, types, 8, seed)
    whole = solve(rows, gradient)
    with patch.multiple(pursuit, POOL=pool, SCREENED=16):
        result = solve(rows, gradient)
    assert result.certified or not whole.certified
    if result.certified:
        assert set(result.types.tolist()) == set(truth.tolist())


@given(st.integers(1, D - 6), st.integers(0, 1000))
def test_at_full_rank_it_is_the_span_test(types: int, seed: int) -> None:
    rows = dictionary(seed % 5)
    gradient, truth = planted(rows, types, D + 10, seed)
    result = solve(rows, gradient)
    basis = torch.linalg.svd(gradient.double(), full_matrices=False)[2][:types]
    unit = rows.double() / rows.double().norm(dim=1, keepdim=True)
    distance = (unit - (unit @ basis.T) @ basis).norm(dim=1)
    nearest = set(distance.argsort()[:types].tolist())
    assert nearest == set(truth.tolist())
    assert set(result.types.tolist()) == nearest
    assert result.certified


@pytest.mark.parametrize("rank", [4, 12, 40])
def test_a_set_that_lacks_a_type_is_not_certified(rank: int) -> None:
    """The token that is missing has another atom, as in a dictionary that is stale."""
    wrong = 0
    for seed in range(10):
        rows = dictionary(seed % 5)
        gradient, truth = planted(rows, 12, rank, seed)
        lacking = rows.clone()
        lacking[truth[0]] = dictionary(seed % 5 + 5)[0]
        wrong += solve(lacking, gradient).silent is not None
    assert wrong == 0


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-8])
@pytest.mark.parametrize("rank", [4, 12, 40])
def test_a_token_that_leaves_no_trace_ends_a_certificate(rank: int, size: float) -> None:
    """Whether it was there or not, the shared rows are the same up to rounding."""
    for seed in range(4):
        rows = dictionary(seed % 5)
        rows[7] *= size
        gradient, truth = planted(rows, 8, rank, seed)
        result = solve(rows, gradient)
        assert set(result.types.tolist()) == set(truth.tolist()) - {7}
        assert not result.certified
        assert result.silent.tolist() == [7]


@pytest.mark.parametrize("factor", [1.0, -0.5, 3.0])
def test_a_multiple_of_a_types_input_ends_a_certificate_and_one_of_others_does_not(factor) -> None:
    for seed in range(4):
        rows = dictionary(seed % 5)
        truth = planted(rows, 8, 12, seed)[1].tolist()
        absent = [i for i in range(V) if i not in truth]
        rows[absent[0]] = factor * rows[absent[1]]
        assert solve(rows, planted(rows, 8, 12, seed)[0]).certified
        rows[absent[0]] = factor * rows[truth[0]]
        result = solve(rows, planted(rows, 8, 12, seed)[0])
        assert not result.certified
        assert {*result.types.tolist(), *result.silent.tolist()} == {*truth, absent[0]}


def test_more_types_than_can_be_distinguished_are_not_certified() -> None:
    for seed in range(4):
        rows = dictionary(seed % 5)
        gradient, truth = planted(rows, 55, 4, seed)
        result = solve(rows, gradient)
        assert not result.certified
        assert set(result.types.tolist()) != set(truth.tolist())


def test_equal_atoms_are_one_type() -> None:
    rows = dictionary()
    gradient, truth = planted(rows, 10, 6)
    rows[truth[3]] = rows[(int(truth[3]) + 1) % V] = rows[truth[3]].clone()
    result = solve(rows, gradient)
    twins = {int(truth[3]), (int(truth[3]) + 1) % V}
    assert not result.certified
    assert set(result.types.tolist()) - twins == set(truth.tolist()) - twins
    assert len(set(result.types.tolist()) & twins) == 1
    assert {*result.types.tolist(), *result.silent.tolist()} == {*truth.tolist(), *twins}


def test_nearly_equal_atoms_are_distinguished_as_far_as_rounding_lets_them() -> None:
    """Tokens that were never trained: 200 atoms within 1e-5 of each other."""
    rows = dictionary()
    g = torch.Generator().manual_seed(1)
    rows[200:] = rows[200:201] + 1e-4 * torch.randn(200, D, generator=g)
    weights = torch.randn(12, 10, generator=g, dtype=torch.float64)
    truth = torch.tensor([*range(8), 250, 303])
    result = solve(rows, (weights @ rows[truth].double()).float())
    assert set(result.types.tolist()) == set(truth.tolist())


def test_many_tokens_that_equal_a_type_do_not_hide_the_others(monkeypatch) -> None:
    """All types lie in the span of the rows, and 200 atoms that equal one of them."""
    rows = dictionary()
    g = torch.Generator().manual_seed(1)
    rows[200:] = rows[200:201] + 1e-4 * torch.randn(200, D, generator=g)
    weights = torch.randn(12, 9, generator=g, dtype=torch.float64)
    truth = torch.tensor([*range(8), 250])
    monkeypatch.setattr(pursuit, "SCREENED", 50)
    gradient = (weights @ rows[truth].double()).float()
    shared = SharedRows.stack([gradient], NOTHING, rounding=SINGLE, noise=[0.0])
    path = pursuit._Pursuit(Atoms(rows, NOTHING), shared, torch.zeros(V))
    assert path.run(early=True)
    assert path.certain == len(path.chosen) == len(truth)  # none one by one, which is slow
    assert set(path.chosen) >= set(range(8))
    assert set(solve(rows, gradient).types.tolist()) == set(truth.tolist())


@pytest.mark.parametrize("apart", [3e-6, 1e-4])
def test_equals_are_exchanged_as_least_squares_for_each_place_say(apart: float) -> None:
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        rows = dictionary(seed)
        rows[:40] = rows[torch.arange(40) % 4] * (1 + apart * torch.randn(40, D, generator=g))
        truth = torch.cat([torch.randperm(40, generator=g)[:6], torch.arange(100, 106)])
        weights = torch.randn(30, len(truth), generator=g, dtype=torch.float64)
        gradient = (weights @ rows[truth].double()).float()
        shared = SharedRows.stack([gradient], NOTHING, rounding=SINGLE, noise=[0.0])
        atoms = Atoms(rows, NOTHING)
        wrong = torch.cat([(truth[:6] + 4) % 40, truth[6:]]).unique()
        others = torch.arange(40)[~torch.isin(torch.arange(40), wrong)]
        exchanged = exchange_twins(atoms, shared, wrong, others)

        def left(types: Tensor, atoms: Atoms = atoms, shared: SharedRows = shared) -> float:
            chosen = atoms.rows(types).T
            solved = torch.linalg.lstsq(chosen, shared.principal.T, driver="gelsd").solution
            return float((chosen @ solved - shared.principal.T).norm())

        types = wrong.clone()
        for _ in range(4):
            before = types.clone()
            for place, earlier in enumerate(before.tolist()):
                least = left(types)
                for other in others[others % 4 == earlier % 4].tolist() if earlier < 40 else ():
                    tried = types.clone()
                    tried[place] = other
                    if other not in types and left(tried) < least:
                        types, least = tried, left(tried)
            types = prune(atoms, shared, types.unique())
            if torch.equal(types.unique(), before.unique()):
                break
        assert left(exchanged) < left(wrong)
        assert left(exchanged) == pytest.approx(left(types), rel=1e-3)


def nearly_twins(apart, rank, seed, *, both) -> tuple[PursuitResult, set[int]]:
    """What is found where two types differ by a share of their norm; both are there, or one."""
    rows = dictionary(seed % 5)
    truth = planted(rows, 10, rank, seed)[1].tolist()
    one = truth[0]
    other = truth[1] if both else next(i for i in range(V) if i not in truth)
    step = torch.randn(D, generator=torch.Generator().manual_seed(seed)) / D**0.5
    rows[other] = rows[one] + apart * rows[one].norm() * step
    return solve(rows, planted(rows, 10, rank, seed)[0]), set(truth)


@pytest.mark.parametrize("rank", [4, 30])
@pytest.mark.parametrize("apart", [3e-6, 1e-5, 3e-5])
def test_no_certificate_stands_in_types_for_one_that_nearly_equals_another(apart, rank) -> None:
    """Unlike types may explain what one of two nearly equal ones explains beside the other."""
    for seed in range(5):
        result, truth = nearly_twins(apart, rank, seed, both=True)
        assert not result.certified or set(result.types.tolist()) <= truth
        result, truth = nearly_twins(apart, rank, seed, both=False)
        assert result.certified
        assert set(result.types.tolist()) == truth


@pytest.mark.parametrize("level", [1e-3, 1e-2, 1e-1])
def test_noise_leaves_the_loudest_types_and_no_certificate(level: float) -> None:
    right = named = 0
    for seed in range(10):
        rows = dictionary(seed % 5)
        gradient, truth = planted(rows, 8, 12, seed)
        std = level * float(gradient.square().mean().sqrt())
        g = torch.Generator().manual_seed(seed)
        noisy = gradient + std * torch.randn(gradient.shape, generator=g)
        result = solve(rows, noisy, std)
        assert not result.certified
        right += len(set(result.types.tolist()) & set(truth.tolist()))
        named += len(result.types)
    assert right >= (60 if level < 0.05 else 20)
    assert right / named > 0.6


@pytest.mark.parametrize("level", [1e-5, 1e-3, 1e-1])
def test_undeclared_noise_is_not_certified(level: float) -> None:
    for seed in range(6):
        rows = dictionary(seed % 5)
        gradient, _ = planted(rows, 8 + seed % 12, 12, seed)
        g = torch.Generator().manual_seed(seed)
        noise = level * float(gradient.square().mean().sqrt())
        noisy = gradient + noise * torch.randn(gradient.shape, generator=g)
        assert not solve(rows, noisy).certified


def test_noise_alone_names_next_to_nothing() -> None:
    rows = dictionary()
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        shared = SharedRows.stack(
            [torch.randn(8, D, generator=g)], NOTHING, rounding=SINGLE, noise=[1.0]
        )
        result = explain(Atoms(rows, NOTHING), shared, torch.full((V,), math.log(20 / V)))
        assert len(result.types) <= 2
        assert not result.certified


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_whitened_unit_atoms(dtype, monkeypatch) -> None:
    monkeypatch.setattr(atoms_module, "_NUMBERS_AT_ONCE", 7 * 150)  # blocks of 7 rows, and a rest
    generator = torch.Generator().manual_seed(3)
    rows = (torch.randn(200, 150, generator=generator) + 2).to(dtype)
    further = torch.randn(5, 150, generator=generator).to(dtype)
    beside = torch.linalg.qr(torch.randn(150, 3, generator=generator).double()).Q.T
    atoms = Atoms(rows, beside, further)
    flat = torch.cat([rows, further]).double()
    flat = torch.nn.functional.normalize(flat - flat @ beside.T @ beside, dim=1)
    covariance = flat.T @ flat / len(flat)
    covariance += 0.1 * covariance.diagonal().mean() * torch.eye(150)
    white = flat @ torch.linalg.inv(torch.linalg.cholesky(covariance)).T
    white = torch.nn.functional.normalize(white, dim=1)
    directions = torch.linalg.qr(torch.randn(150, 4, generator=generator).double()).Q.T
    types = torch.tensor([0, 199, 200, 204, 17])
    assert torch.allclose(atoms.products(directions).double(), white @ directions.T, atol=3e-6)
    part = atoms.products(directions, atoms.subset(types))
    assert torch.allclose(part.double(), white[types] @ directions.T, atol=3e-6)
    assert torch.allclose(atoms.whitened(types), white[types], atol=1e-5)


def test_where_positions_fill_all_directions_nothing_is_distinguished() -> None:
    rows = torch.randn(30, 6)
    atoms = Atoms(rows, torch.eye(6, dtype=torch.float64))
    assert not bool(atoms.usable.any())
    assert not bool(atoms.products(torch.eye(6)).any())
    assert measure_capacity(atoms, 4, sets=1)[0] == 0


@pytest.mark.parametrize("types", [6, 20])
@pytest.mark.parametrize("units", [5.0, 12.0, 36.0])
def test_what_the_right_types_leave_above_the_noise_is_not_certified(types, units) -> None:
    """A certificate is for rows that are explained to the rounding, not to 40 times of it."""
    rows = dictionary()
    gradient, truth = planted(rows, types, 8, seed=types)
    shared = SharedRows.stack([gradient], NOTHING, rounding=SINGLE, noise=[0.0])
    g = torch.Generator().manual_seed(7)
    beyond = torch.randn(shared.whole.shape, generator=g, dtype=torch.float64)
    spoilt = replace(shared, whole=shared.whole + units * beyond)
    odds = torch.full((len(rows),), math.log(20 / V))
    for what, certified in ((shared, True), (spoilt, False)):
        result = explain(Atoms(rows, NOTHING), what, odds)
        assert set(result.types.tolist()) >= set(truth.tolist())
        assert result.certified == certified
        assert (result.residual > 4) != certified


@pytest.mark.parametrize(("noise", "found", "false"), [(3e-6, 65, 20), (1e-2, 0, 12)])
def test_types_are_kept_while_later_choices_explain_the_rows(noise, found, false) -> None:
    """A few choices without evidence end it only where the later ones explain only noise."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6000, 128, generator=generator) * torch.logspace(0, -1.5, 128)
    rows += 2 * torch.randn(1, 128, generator=generator)
    atoms = Atoms(rows, torch.zeros(0, 128, dtype=torch.float64))
    types = torch.randperm(6000, generator=generator)[:70]
    weights = torch.randn(8, 70, generator=generator).double()
    weights *= torch.randn(70, generator=generator).double().exp()
    gradient = weights @ atoms.rows(types)
    changes = torch.randn(gradient.shape, generator=generator).double() * gradient.std()
    eps = torch.finfo(torch.float32).eps
    changed = (gradient + noise * changes).float()
    shared = SharedRows.stack([changed], atoms.nuisance, rounding=eps, noise=[0.0])
    named = explain(atoms, shared, torch.full((6000,), math.log(256 / 6000))).types
    hits = int(torch.isin(named, types).sum())
    assert hits >= found  # of 70
    assert len(named) - hits <= false
