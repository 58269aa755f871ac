"""RLG against linear programs without any shortcut, on random softmax models in float64."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from transformers import CohereConfig, CohereForCausalLM, GPT2LMHeadModel

from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.attacks.words.public_gradients import gradient_of
from lightning_fedleak.attacks.words.reveal_labels import RevealLabels, _row_space, reveal_labels
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import GradientSnapshot, Inapplicable, Observation, Stage
from tests.attacks.test_logit_map import SIZES
from tests.helpers.models import own_rng, tiny_gpt2, tiny_llama


def softmax_model(
    vocab: int, d: int, tokens: int, seed: int, *, spread: float = 1.0, used: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Head gradient (vocab, d) by autograd, and the labels (tokens,)."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, d, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, d, generator=generator, dtype=torch.float64) * spread / d**0.5
    labels = torch.randint(used or vocab // 2, (tokens,), generator=generator)
    weight.requires_grad_()
    loss = torch.nn.functional.cross_entropy(hidden @ weight.T, labels)
    return torch.autograd.grad(loss, weight)[0], labels


def separable_by_hand(gradient: torch.Tensor) -> set[int]:
    """One full program for each of the V types, in the gradient's own coordinates."""
    matrix = gradient.double().numpy()
    matrix = matrix / np.abs(matrix).max(axis=1, keepdims=True)
    result = set()
    for t in range(len(matrix)):
        sign = np.where(np.arange(len(matrix)) == t, 1.0, -1.0)[:, None]
        bound = np.where(np.arange(len(matrix)) == t, -1.0, 0.0)
        solution = linprog(
            np.zeros(matrix.shape[1]), A_ub=sign * matrix, b_ub=bound, bounds=(None, None)
        )
        if solution.status == 0:
            result.add(t)
    return result


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 8), spread=st.floats(0.1, 3))
def test_same_types_as_a_program_for_every_row(seed: int, tokens: int, spread: float) -> None:
    gradient, labels = softmax_model(24, 10, tokens, seed, spread=spread)
    guess = reveal_labels(gradient)
    assert set(guess.types.tolist()) == separable_by_hand(gradient)
    assert set(labels.tolist()) <= set(guess.types.tolist())
    assert _row_space(gradient).shape[1] == tokens


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), tokens=st.integers(10, 30))
def test_same_types_as_a_program_for_every_row_at_full_rank(seed: int, tokens: int) -> None:
    gradient, _ = softmax_model(24, 8, tokens, seed)
    guess = reveal_labels(gradient, allow_full_rank=True)
    assert set(guess.types.tolist()) == separable_by_hand(gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits_are_unknown(dtype: torch.dtype) -> None:
    """Their rank cannot be told from rounding: with many tokens no label would be named."""
    with pytest.raises(Inapplicable, match="needs a head in float32"):
        reveal_labels(torch.randn(40, 8).to(dtype))


def test_full_rank_is_refused_unless_asked_for() -> None:
    gradient, labels = softmax_model(400, 24, 60, 6, spread=0.1, used=15)
    with pytest.raises(UnusableObservation, match="full rank 24"):
        reveal_labels(gradient)
    result = reveal_labels(gradient, allow_full_rank=True).types.tolist()
    assert result == labels.unique().tolist()


def test_an_undecided_program_does_not_name_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient, labels = softmax_model(400, 32, 28, 7)
    undecided = SimpleNamespace(status=4, message="numerical difficulties")
    monkeypatch.setattr(
        "lightning_fedleak.attacks.words.reveal_labels.linprog", lambda *_, **__: undecided
    )
    with pytest.raises(UnusableObservation, match="neither solved nor shown infeasible") as error:
        reveal_labels(gradient)
    assert not {str(t) for t in labels.tolist()} & set(re.findall(r"\d+", str(error.value)))


def test_no_time_is_no_answer() -> None:
    gradient, _ = softmax_model(400, 32, 28, 7)
    with pytest.raises(UnusableObservation, match="Raise max_seconds"):
        reveal_labels(gradient, max_seconds=1e-9)


def test_what_is_no_softmax_gradient_is_refused() -> None:
    gradient, _ = softmax_model(50, 12, 5, 8)
    with pytest.raises(UnusableObservation, match="do not sum to zero"):
        reveal_labels(gradient + gradient.abs().mean() * 0.1)


def test_a_tied_head_is_refused_at_setup_and_in_the_observation() -> None:
    attack = RevealLabels()
    with pytest.raises(ValueError, match="the head's own gradient, and this model ties"):
        attack.needs(find_anatomy(tiny_gpt2(tied=True)))
    untied = find_anatomy(tiny_gpt2(tied=False))
    assert attack.needs(untied).gradients == ("head.weight",)
    attack.prepare(untied)
    gradient, labels = softmax_model(120, 16, 7, 9)
    view = Observation((GradientSnapshot(0, Stage.SHARED, {"head.weight": gradient}),))
    assert attack.run(view).types.tolist() == labels.unique().tolist()


def test_time_must_be_positive() -> None:
    with pytest.raises(ValueError, match="max_seconds"):
        RevealLabels(max_seconds=0)


def random_ids(n: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 400, (n, length), generator=torch.Generator().manual_seed(seed))


def tiny_cohere() -> CohereForCausalLM:
    """Its LayerNorms have a gain and no bias."""
    config = CohereConfig(
        **SIZES | {"vocab_size": 400, "hidden_size": 24}, tie_word_embeddings=False
    )
    with own_rng(0):
        return CohereForCausalLM(config)


def gpt2_with_a_bias() -> GPT2LMHeadModel:
    model = tiny_gpt2(tied=False, vocab=400, d=24)
    model.transformer.ln_f.bias.data.normal_(generator=torch.Generator().manual_seed(3))
    return model


MODELS = {
    "GPT-2, bias 0": (lambda: tiny_gpt2(tied=False, vocab=400, d=24), 23),
    "GPT-2": (gpt2_with_a_bias, 24),
    "Cohere": (tiny_cohere, 23),
    "Llama": (lambda: tiny_llama(tied=False, vocab=400, d=24), 24),
}


@pytest.mark.parametrize("name", MODELS)
def test_more_tokens_than_dimensions_of_the_hidden_states_read_unknown(name: str) -> None:
    make, dimensions = MODELS[name]
    anatomy = find_anatomy(make())
    attack = RevealLabels()

    def observed(n: int, length: int) -> tuple[Observation, list[int]]:
        batch = TokenBatch(random_ids(n, length, 7), None, None, "causal")
        gradient = gradient_of(anatomy, batch, ["head.weight"])
        view = Observation((GradientSnapshot(0, Stage.SHARED, gradient),))
        return view, batch.target_ids().unique().tolist()

    for shape in ((2, 7), (2, 11)):  # up to 20 tokens in 23 or 24 dimensions
        view, labels = observed(*shape)
        guess = attack.run(view)
        assert guess.types.tolist() == labels
        rank = _row_space(view.gradient("head.weight")).shape[1]
        assert rank == shape[0] * (shape[1] - 1) < dimensions
    for shape in ((2, 14), (8, 12)):
        with pytest.raises(UnusableObservation, match=f"full rank {dimensions}"):
            attack.run(observed(*shape)[0])
