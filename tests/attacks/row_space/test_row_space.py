"""Atoms of a dictionary in a row space: the search, its certificates, and inexact rows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import AdaLoraConfig, IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional

from lightning_fedleak.attacks import SubspaceWords, row_space
from lightning_fedleak.attacks.row_space import atoms as atoms_module
from lightning_fedleak.attacks.row_space import pursuit
from lightning_fedleak.attacks.row_space.atoms import (
    Atoms,
    explain_sparse,
    fit_whitening,
    select_densest,
)
from lightning_fedleak.attacks.row_space.certificate import exchange_twins, prune
from lightning_fedleak.attacks.row_space.dictionary import (
    NotAdditive,
    build_dictionary,
    factor_rows,
)
from lightning_fedleak.attacks.row_space.explanation import (
    explain_uneven,
    measure_capacity,
    predict_capacity,
)
from lightning_fedleak.attacks.row_space.linear_maps import (
    find_known_inputs,
    find_linear_maps,
    input_rows,
)
from lightning_fedleak.attacks.row_space.pursuit import PursuitResult, explain
from lightning_fedleak.attacks.row_space.shared_rows import SharedRows
from lightning_fedleak.model.anatomy import find_anatomy
from tests.attacks.row_space import models
from tests.attacks.row_space.models import FAMILIES, LENGTH, llama, ready, t5, texts

# The pursuit against planted problems, and against the span test where the rank is full.


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


@pytest.mark.parametrize(("rank", "size"), [(4, 0.0), (12, 1e-12), (40, 1e-8)])
def test_a_token_that_leaves_no_trace_ends_a_certificate(rank: int, size: float) -> None:
    """Whether it was there or not, the shared rows are the same up to rounding."""
    for seed in range(2):
        rows = dictionary(seed)
        rows[7] *= size
        gradient, truth = planted(rows, 8, rank, seed)
        result = solve(rows, gradient)
        assert set(result.types.tolist()) == set(truth.tolist()) - {7}
        assert not result.certified
        assert result.silent.tolist() == [7]


@pytest.mark.parametrize("factor", [1.0, -0.5, 3.0])
def test_a_multiple_of_a_types_input_ends_a_certificate_and_one_of_others_does_not(factor) -> None:
    for seed in range(2):
        rows = dictionary(seed)
        truth = planted(rows, 8, 12, seed)[1].tolist()
        absent = [i for i in range(V) if i not in truth]
        rows[absent[0]] = factor * rows[absent[1]]
        assert solve(rows, planted(rows, 8, 12, seed)[0]).certified
        rows[absent[0]] = factor * rows[truth[0]]
        result = solve(rows, planted(rows, 8, 12, seed)[0])
        assert not result.certified
        assert {*result.types.tolist(), *result.silent.tolist()} == {*truth, absent[0]}
        assert len({*result.types.tolist()} & {truth[0], absent[0]}) == 1


@pytest.mark.parametrize("level", [1e-5, 1e-3, 1e-1])
def test_undeclared_noise_is_not_certified(level: float) -> None:
    rows = dictionary(0)
    gradient, _ = planted(rows, 8, 12, 0)
    noise = level * float(gradient.square().mean().sqrt())
    noisy = gradient + noise * torch.randn(gradient.shape, generator=torch.Generator())
    assert not solve(rows, noisy).certified


@pytest.mark.parametrize("rank", [4, 12, 40])
def test_a_set_that_lacks_a_type_is_not_certified(rank: int) -> None:
    """The token that is missing has another atom, as in a dictionary that is stale."""
    rows = dictionary(0)
    gradient, truth = planted(rows, 12, rank, 0)
    rows[truth[0]] = dictionary(5)[0]
    assert solve(rows, gradient).silent is None


def test_more_types_than_can_be_distinguished_are_not_certified() -> None:
    for seed in range(2):
        rows = dictionary(seed)
        gradient, truth = planted(rows, 55, 4, seed)
        result = solve(rows, gradient)
        assert not result.certified
        assert set(result.types.tolist()) != set(truth.tolist())


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
    for seed in range(2):
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
    for seed in range(3):
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


@pytest.mark.parametrize(("types", "units"), [(6, 36.0), (20, 5.0)])
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


# How many types can be distinguished: the formula, and what planted sets say.


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


# A dictionary of token inputs follows whatever an input is computed from.


PROJECTIONS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}


class TrainedRows(nn.Module):
    """A frozen table, and trained rows for some of its tokens."""

    def __init__(self, table: nn.Embedding, tokens: list[int]) -> None:
        super().__init__()
        self.table = table.requires_grad_(False)
        self.embedding_dim, self.num_embeddings = table.embedding_dim, table.num_embeddings
        self.tokens = torch.tensor(tokens)
        self.rows = nn.Parameter(table.weight[self.tokens].clone())

    @property
    def weight(self) -> Tensor:
        return self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.table.weight.index_copy(0, self.tokens, self.rows)
        return functional.embedding(ids, weight)


def with_rows(model: nn.Module) -> nn.Module:
    model.set_input_embeddings(TrainedRows(model.get_input_embeddings(), [250, 251]))
    return models.with_lora(model, 12, PROJECTIONS["llama"])


def table(model: nn.Module) -> Tensor:
    return model.get_input_embeddings().weight


def parameter(model: nn.Module, part: str) -> Tensor:
    return next(p for n, p in model.named_parameters() if part in n)


@torch.no_grad()
def write(weight: Tensor, rows: slice = slice(None)) -> None:
    weight[rows] += 0.5 * weight.std() * torch.randn_like(weight[rows])


def scale(model: nn.Module) -> None:
    """Scale inputs by factors that are in a closure, and in no module."""
    layer, factors = model.get_input_embeddings(), torch.linspace(0.5, 2.0, models.WIDTH)
    layer.forward = lambda ids: functional.embedding(ids, layer.weight) * factors


LLAMA: dict[str, Callable[[nn.Module], None]] = {
    "a few rows": lambda m: write(table(m), slice(250, 252)),
    "rows behind the version counter": lambda m: write(table(m).data, slice(250, 252)),
    "most rows": lambda m: write(table(m), slice(40, None)),
    "the norm's gain": lambda m: write(parameter(m, "layers.0.input_layernorm")),
    "a factor that no module holds": scale,
}
GPT2: dict[str, Callable[[nn.Module], None]] = {
    "a few words": lambda m: write(parameter(m, "wte"), slice(250, 252)),
    "later positions alone": lambda m: write(parameter(m, "wpe"), slice(3, None)),
    "the first position": lambda m: write(parameter(m, "wpe"), slice(1)),
    "the norm's bias": lambda m: write(parameter(m, "h.0.ln_1.bias")),
}


def adapted(family: Callable[[], nn.Module], **more: Any) -> nn.Module:
    targets = PROJECTIONS[family.__name__]
    return models.with_lora(models.ready(family()), 12, targets, **more)


FOLLOWED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], None]]] = {
    **{how: (partial(adapted, models.llama), change) for how, change in LLAMA.items()},
    **{how: (partial(adapted, models.gpt2), change) for how, change in GPT2.items()},
    "trained tokens of PEFT": (
        lambda: adapted(models.llama, trainable_token_indices=[250, 251]),
        lambda m: write(parameter(m, "trainable_tokens_delta")),
    ),
    "rows that a module of one's own trains": (
        lambda: with_rows(models.ready(models.llama())),
        lambda m: write(parameter(m, "embed_tokens.rows")),
    ),
    "an embedding that was replaced": (
        lambda: models.ready(models.llama()),
        lambda m: m.set_input_embeddings(nn.Embedding(*table(m).shape)),
    ),
}


@pytest.mark.parametrize("how", FOLLOWED)
def test_whatever_moved_is_followed(how: str) -> None:
    build, change = FOLLOWED[how]
    model = build()
    attack, anatomy = models.prepared(model)
    change(model)
    attack.refresh(anatomy, 1)
    ids = torch.cat([models.texts(2, 8), torch.tensor([[250, 251, 250, 60, 61, 62, 63, 64]])])
    models.backward(model, ids)
    guess = attack.run(models.observed(attack, anatomy))
    assert set(guess.types.tolist()) == models.exposed_types(ids, causal=True)
    assert guess.certified


@settings(max_examples=8)
@given(
    family=st.sampled_from([models.llama, models.gpt2]),
    tokens=st.sets(st.integers(0, models.VOCABULARY - 1), max_size=60),
    seed=st.integers(0, 9),
)
def test_a_dictionary_that_follows_is_one_that_is_built_again(family, tokens, seed) -> None:
    torch.manual_seed(seed)
    attack, anatomy = models.prepared(model := adapted(family))
    (readable,) = (r for r in attack._readable if not r.is_factor_b)
    write(parameter(model, "wte" if family is models.gpt2 else "embed_tokens"), sorted(tokens))
    followed, moved = readable.dictionary.refresh(anatomy, readable.known_input)
    again = row_space.build_dictionary(anatomy, readable.known_input)
    torch.testing.assert_close(followed.rows, again.rows, rtol=0, atol=0)
    if again.positions is None:
        assert set(moved.nonzero()[:, 0].tolist()) == tokens
    else:
        torch.testing.assert_close(followed.positions, again.positions)
        assert bool(moved.all()) == bool(tokens)
    ids = models.texts(2, 8)
    models.backward(model, ids)
    attack.refresh(anatomy, 1)
    fresh = SubspaceWords(capacity_seconds=0)
    fresh.prepare(anatomy)
    one, other = (a.run(models.observed(a, anatomy)) for a in (attack, fresh))
    assert one.types.sort().values.equal(other.types.sort().values)
    assert one.certified == other.certified


def test_tokens_without_an_input_are_named_and_nothing_is_certified() -> None:
    model = models.with_lora(models.ready(models.llama(pad_token_id=9)), 12, PROJECTIONS["llama"])
    attack, anatomy = models.prepared(model)
    ids = models.texts(2, 8)
    ids[0, 3] = 9
    models.backward(model, ids)
    guess = attack.run(models.observed(attack, anatomy))
    assert set(guess.types.tolist()) == models.exposed_types(ids, causal=True) - {9}
    assert guess.silent.tolist() == [9]
    assert guess.certified is False


# Rows of which only the largest entries were sent, against least squares on what was kept.


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
    for seed in range(2):
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


# Which maps read an input that is known, and what every token looks like there.


FIRST = {
    "llama": {"q_proj", "k_proj", "v_proj"},
    "gpt2": {"c_attn"},
    "bert": {"query", "key", "value"},
    "roberta": {"query", "key", "value"},
    "opt": {"q_proj", "k_proj", "v_proj"},
    "gemma": {"q_proj", "k_proj", "v_proj"},
    "neox": {"query_key_value"},
    "albert": {"embedding_hidden_mapping_in"},
}


def known_of(model: nn.Module):
    anatomy = find_anatomy(model)
    return anatomy, find_known_inputs(anatomy, find_linear_maps(anatomy))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_projections_are_found_and_their_input_is_its_word(family: str) -> None:
    """Once what is beside it is projected out."""
    anatomy, result = known_of(ready(FAMILIES[family]()).double())
    maps = next(k for k in result if k.width == anatomy.hidden_size or family == "albert").maps
    assert {m.name.split(".")[-2] for m in maps} == FIRST[family]
    assert all(".1." not in m.name for m in maps)
    assert {m.axis for m in maps} == ({0} if family == "gpt2" else {1})
    ids = texts(3, 9)
    for known in result:
        dictionary = build_dictionary(anatomy, known)
        rows, beside, _ = dictionary.atoms(9)
        assert known.positional == (len(beside) > 0)
        x = input_rows(anatomy, known, ids)
        word = rows[ids]
        x, word = (y - (y @ beside.T) @ beside for y in (x, word))
        cosine = torch.cosine_similarity(x, word, dim=-1)
        assert float(cosine.abs().min()) > 1 - 1e-9


@pytest.mark.parametrize("family", [*FAMILIES, "t5"])
def test_queries_and_keys_do_not_show_a_token_that_stands_alone(family: str) -> None:
    build = FAMILIES.get(family, t5)
    _, result = known_of(ready(build()))
    for known in result:
        blind = {m.name.split(".")[-2] for m in known.maps if m.name not in known.lone_token_maps}
        assert blind in ({"q_proj", "k_proj"}, {"query", "key"}, {"q", "k"}, set())
        assert bool(blind) == (family not in ("gpt2", "neox", "albert"))
        assert known.lone_token_maps


def test_encoder_and_decoder_are_distinguished() -> None:
    _, result = known_of(t5().eval())
    assert [len(k.maps) for k in result] == [3, 3]
    assert {m.name.split(".")[0] for m in result[0].maps} == {result[0].maps[0].name.split(".")[0]}


def test_adapters_are_found_by_their_factors_and_show_what_their_layers_do() -> None:
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    _, result = known_of(model.eval())
    wide, *narrow = result
    assert sum(m.factor == "A" for m in wide.maps) == 2
    assert all(m.factor == "B" and k.width == 4 for k in narrow for m in k.maps)
    shown = {m.name for known in result for m in known.maps if m.name in known.lone_token_maps}
    assert shown == {m.name for known in result for m in known.maps if ".v_proj." in m.name}


def test_adalora_regularises_its_factors() -> None:
    config = AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["q_proj"])
    anatomy, result = known_of(get_peft_model(llama(), config).eval())
    (mine,) = (m for m in result[0].maps if m.factor == "A")
    assert mine.regularised
    rows = factor_rows(anatomy, result[0].maps)[mine.name]
    assert torch.equal(rows, anatomy.parameter(mine.name).detach().double())


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[1]),
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    ],
    ids=["deeper", "ia3", "prompt"],
)
def test_what_reads_nothing_known_trains_nothing_that_is_read(config: object) -> None:
    anatomy, result = known_of(get_peft_model(llama(), config).eval())
    assert result
    assert not any(k.trainable_maps(anatomy) for k in result)


def test_virtual_tokens_are_excluded() -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = llama()
    anatomy, result = known_of(get_peft_model(model, config).eval())
    bare, without = known_of(model)
    ids = texts(2, 5)
    torch.testing.assert_close(
        input_rows(anatomy, result[0], ids), input_rows(bare, without[0], ids)
    )


def test_a_map_that_is_called_again_is_not_read() -> None:
    class Twice(nn.Module):
        """One map for two layers: its gradient holds inputs that are not known."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 16)
            self.inner = nn.Linear(16, 16)
            self.head = nn.Linear(16, 50)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.inner(self.embedding(input_ids))
            x = self.inner(x + x.cumsum(1))
            return self.head(x)

    _anatomy, result = known_of(Twice().eval())
    assert result == []


def test_a_matrix_of_two_maps_is_not_read() -> None:
    model = llama()
    first = model.model.layers[0].self_attn
    first.q_proj.weight = model.model.layers[1].self_attn.q_proj.weight
    _, result = known_of(model.eval())
    assert {m.name.split(".")[-2] for m in result[0].maps} == {"k_proj", "v_proj"}


def test_positions_that_multiply_are_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 16)
            self.scale = nn.Parameter(torch.rand(LENGTH, 16) + 0.5)
            self.first = nn.Linear(16, 16)
            self.head = nn.Linear(16, 50)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(input_ids) * self.scale[: input_ids.shape[1]]
            return self.head(self.first(x).cumsum(1))

    anatomy, result = known_of(Scaled().eval())
    anatomy.model.config = transformers.PretrainedConfig(max_position_embeddings=LENGTH)
    with pytest.raises(NotAdditive, match="no sum of a part of the word"):
        build_dictionary(anatomy, result[0])


# Rows of uneven accuracy, on planted sets.


TOKENS, WIDTH = 400, 48


def uneven_planted(
    rows: int, types: int, seed: int = 0
) -> tuple[Atoms, Tensor, Tensor, torch.Generator]:
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


@pytest.mark.parametrize("seed", range(2))
def test_entries_that_are_hardly_known_are_filled_in(seed: int) -> None:
    atoms, truth, rows, generator = uneven_planted(12, 22, seed)
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
    atoms, truth, rows, generator = uneven_planted(400, 12)
    errors = torch.full_like(rows, 1e-6)
    errors[256:] = 1e3
    observed = rows + errors * torch.randn(rows.shape, generator=generator, dtype=torch.float64)
    result = explain_uneven([observed], [errors], finder(atoms, []))
    assert set(result.types.tolist()) == set(truth.tolist())


# Whitening against numpy's covariance, by itself and folded into weights.


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def states(n, d, seed=0):
    """Hidden states with a mean of their own and variances over four orders of magnitude."""
    g = generator(seed)
    mix = torch.randn(d, d, generator=g, dtype=torch.float64)
    scales = torch.logspace(-1, 1, d, dtype=torch.float64)
    x = torch.randn(n, d, generator=g, dtype=torch.float64) * scales
    return x @ mix + 5 * torch.randn(d, generator=g, dtype=torch.float64)


@given(st.integers(2, 12), st.floats(0.0, 2.0), st.integers(0, 999))
def test_the_matrix_is_the_inverse_root_of_the_covariance_plus_ridge(d, ridge, seed):
    x = states(20 * d, d, seed)
    values, vectors = np.linalg.eigh(np.cov(x.numpy().T))
    median = np.sort(values)[(d - 1) // 2]
    wanted = (vectors / np.sqrt(values + ridge * median)) @ vectors.T
    matrix = fit_whitening(x, ridge).matrix.numpy()
    np.testing.assert_allclose(matrix, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("hidden", "ridge", "words"),
    [
        (states(8, 8), 0.1, "8 tokens of public text cannot whiten 8 dimensions"),
        (torch.ones(50, 4), 0.1, "cannot whiten 4 dimensions"),
        (torch.cat([torch.randn(50, 1), torch.zeros(50, 3)], 1), 0.1, "at least 8"),
    ],
)
def test_refusals_say_what_to_do(hidden, ridge, words):
    with pytest.raises(ValueError, match=words):
        fit_whitening(hidden, ridge)


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
