"""Words from gradients that are no exact combinations of inputs: noise, dropout, small changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from lightning_fedleak.attacks.base import UnusableObservation, WordGuess
from lightning_fedleak.attacks.row_space import Atoms, SharedRows, explain, linear_maps
from lightning_fedleak.attacks.words.subspace import SubspaceWords
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage
from tests.attacks.row_space.models import (
    backward,
    exposed_types,
    gpt2,
    llama,
    observed,
    prepared,
    ready,
    texts,
    with_lora,
)

MAPS = ["q_proj", "v_proj"]


def f1(guess: WordGuess, ids: Tensor) -> float:
    truth = exposed_types(ids, causal=True)
    named = set(guess.types.tolist())
    return 2 * len(named & truth) / (len(named) + len(truth))


def with_noise(attack: SubspaceWords, anatomy: Anatomy, std: float) -> Observation:
    (view,) = observed(attack, anatomy).gradients
    noisy = {r: g + std * torch.randn_like(g) for r, g in view.tensors.items()}
    return Observation((GradientSnapshot(0, Stage.SHARED, noisy, noise_std=std),))


@pytest.mark.parametrize(
    ("family", "targets", "rank", "std"),
    [
        *((llama, MAPS, 24, std) for std in (1e-12, 1e-8, 1e-6, 1e-5)),
        *((gpt2, ["c_attn"], 48, std) for std in (1e-8, 1e-6, 1e-5)),
    ],
)
def test_b_is_read_where_the_gradient_of_a_is_noise(family, targets, rank, std) -> None:
    torch.manual_seed(1)
    config = LoraConfig(r=rank, target_modules=targets)
    model = get_peft_model(ready(family()), config).eval()
    attack, anatomy = prepared(model)
    ids = texts(1, 9)
    backward(model, ids)
    guess = attack.run(with_noise(attack, anatomy, std))
    assert f1(guess, ids) == 1
    assert guess.n_types == pytest.approx(len(guess.types), abs=0.5)
    assert not guess.certified


def test_b_is_followed_while_a_moves_and_adds_to_it() -> None:
    torch.manual_seed(2)
    model = get_peft_model(ready(llama()), LoraConfig(r=24, target_modules=MAPS)).eval()
    attack, anatomy = prepared(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(4):  # B is small, so that the gradient of A is far below the noise
        ids = texts(1, 9)
        attack.refresh(anatomy, step)
        backward(model, ids)
        assert f1(attack.run(with_noise(attack, anatomy, 1e-5)), ids) == 1
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_A" in name:
                    parameter += 0.01 * torch.randn_like(parameter)
        optimizer.step()


@pytest.mark.parametrize(("family", "targets"), [(llama, MAPS), (gpt2, ["c_attn"])])
def test_the_dictionary_of_b_is_the_input_that_the_model_gives_b(family, targets) -> None:
    model = with_lora(ready(family()), 6, targets)
    attack, anatomy = prepared(model)
    every = torch.arange(anatomy.vocab_size)[:, None]
    factors = [r for r in attack._readable if r.factor is not None]
    assert len(factors) == len(targets)
    for readable in factors:
        dictionary = readable.dictionary.through(readable.factor)
        states = linear_maps.input_rows(anatomy, readable.known_input, every)[:, 0]
        torch.testing.assert_close(dictionary.rows, states, rtol=1e-4, atol=1e-6)
        if dictionary.positions is not None:  # the positions' part in the inputs, after the norm
            spans = [dictionary.constants, dictionary.positions]
            text = torch.full((1, 9), 7)
            moved = linear_maps.input_rows(anatomy, readable.known_input, text)[0].double()
            basis = torch.linalg.qr(torch.cat([*spans, moved[:1]])[:, :].T).Q
            assert float((moved - (moved @ basis) @ basis.T).norm()) < 1e-4 * float(moved.norm())


@pytest.mark.parametrize("p", [0.05, 0.1])
def test_dropout_hides_no_words_within_the_rank(p: float) -> None:
    scores = []
    for seed in range(6):
        torch.manual_seed(seed)
        model = with_lora(ready(llama()), 16, MAPS, lora_dropout=p).train()
        attack, anatomy = prepared(model)
        ids = texts(2, 8)
        backward(model, ids)
        guess = attack.run(observed(attack, anatomy))
        assert not guess.certified
        scores.append(f1(guess, ids))
    assert min(scores) >= 0.9
    assert sum(scores) / len(scores) >= 0.95


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "rows centralized": lambda g: g - g.mean(1, keepdim=True),
    "columns centralized": lambda g: g - g.mean(0, keepdim=True),
    "a column masked": lambda g: g * (torch.arange(g.shape[1]) != 3),
    "rounded to half precision": lambda g: (g * 1024).half().float() / 1024,
}


@pytest.mark.parametrize("rank", [0, 8, 16])
@pytest.mark.parametrize("change", CHANGES)
def test_small_changes_hide_no_words(change: str, rank: int) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        model = with_lora(ready(llama()), rank, MAPS) if rank else ready(llama())
        attack, anatomy = prepared(model)
        ids = texts(2, 8)
        backward(model, ids)
        guess = attack.run(observed(attack, anatomy, CHANGES[change]))
        assert f1(guess, ids) >= 0.9
        if "columns" not in change:  # whose rows still are combinations of the inputs
            assert not guess.certified


@pytest.mark.parametrize("rank", [0, 8, 16])
def test_rows_of_no_words_name_none(rank: int) -> None:
    torch.manual_seed(3)
    model = with_lora(ready(llama()), rank, MAPS) if rank else ready(llama())
    attack, anatomy = prepared(model)
    backward(model, texts(2, 8))
    named = 0
    for _ in range(5):
        try:
            named += len(attack.run(observed(attack, anatomy, torch.randn_like)).types)
        except UnusableObservation:
            continue
    assert named <= 5


def planted(types: int, rows: int, changed: bool) -> tuple[Atoms, Tensor, Tensor]:
    """Return atoms, types and rows that they span, without one coordinate if ``changed``."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4000, 64, generator=generator)
    truth = torch.randperm(4000, generator=generator)[:types]
    gradient = torch.randn(rows, types, generator=generator) @ inputs[truth]
    gradient[:, 0] *= not changed
    return Atoms(inputs, torch.zeros(0, 64, dtype=torch.float64)), truth, gradient


@pytest.mark.parametrize("changed", [False, True])
def test_a_change_is_not_certified_as_words(changed: bool) -> None:
    """What a missing coordinate leaves is one direction, which many other atoms fit."""
    atoms, truth, gradient = planted(8, 12, changed)
    shared = SharedRows.stack([gradient], atoms.nuisance, rounding=1e-7, noise=[0.0])
    result = explain(atoms, shared, torch.full((4000,), -3.0))
    assert set(result.types.tolist()) == set(truth.tolist())
    assert result.evident == len(truth)
    assert result.certified is not changed


def test_the_rows_above_a_gap() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(12, 5, generator=generator) @ torch.randn(5, 40, generator=generator)
    none = torch.zeros(0, 40, dtype=torch.float64)

    def stacked(size: float) -> SharedRows:
        noise = size * torch.randn(12, 40, generator=generator)
        return SharedRows.stack([rows + noise], none, rounding=1e-7, noise=[0.0])

    assert stacked(0.0).above_gap() is None
    assert stacked(10.0).above_gap() is None
    above = stacked(1e-3).above_gap()
    assert above is not None
    assert not above.exact
    assert len(above.principal) == 5
    values = torch.linalg.svdvals(rows.double())
    sizes = above.principal.norm(dim=1)
    torch.testing.assert_close(sizes / sizes[0], values[:5] / values[0], rtol=1e-2, atol=1e-4)
    # The unit is the noise: in (12, 40) standard noise, singular values are at most about 9.8.
    assert 0.5 < float(above.singular[5].norm()) / 9.8 < 1.5
