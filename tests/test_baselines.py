"""The papers' baselines in benchmarks/: closed forms, autograd, and programs without shortcuts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor

from benchmarks.papers import baselines
from lightning_fedleak.attacks import DescentSettings
from lightning_fedleak.attacks.membership.base import sentence_rows
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.attacks.texts.base import NOTHING, Sent, WorkLimit
from lightning_fedleak.attacks.texts.embedding_descent import _Descent
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.model.snapshots import UnusableObservation
from tests.attacks.membership.test_fc_membership import by_autograd, generator
from tests.attacks.texts.test_embedding_descent import MODELS
from tests.helpers.inputs import padded_text
from tests.helpers.models import VOCAB, tiny_gpt2

# ---- RLG ---------------------------------------------------------------------------------------


def softmax_gradient(vocab, d, tokens, seed, spread=1.0) -> tuple[Tensor, Tensor]:
    """Head gradient (vocab, d) by autograd, and the labels (tokens,)."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, d, generator=draw, dtype=torch.float64)
    weight = torch.randn(vocab, d, generator=draw, dtype=torch.float64) * spread / d**0.5
    labels = torch.randint(vocab // 2, (tokens,), generator=draw)
    weight.requires_grad_()
    loss = torch.nn.functional.cross_entropy(hidden @ weight.T, labels)
    return torch.autograd.grad(loss, weight)[0], labels


def separable_by_hand(gradient: Tensor) -> set[int]:
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
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 30), spread=st.floats(0.1, 3))
def test_rlg_names_the_types_of_a_program_for_every_row(seed, tokens, spread) -> None:
    gradient, labels = softmax_gradient(24, 10, tokens, seed, spread)
    types = set(baselines.reveal_labels(gradient).tolist())
    assert types == separable_by_hand(gradient)
    assert baselines.row_space(gradient).shape[1] == min(tokens, 10)
    if tokens <= 8:
        assert set(labels.tolist()) <= types


def test_rlg_has_no_answer_without_time() -> None:
    gradient, _ = softmax_gradient(400, 32, 28, 7)
    with pytest.raises(UnusableObservation, match="not in time"):
        baselines.reveal_labels(gradient, seconds=1e-9)


# ---- AMI FC ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def anatomy() -> Anatomy:
    return find_anatomy(tiny_gpt2())


@pytest.fixture(scope="module", params=["token", "full"])
def attack(request: pytest.FixtureRequest, anatomy: Anatomy) -> baselines.TrainedMembership:
    public = PublicText(torch.randint(3, VOCAB, (30, 10), generator=generator(1)))
    made = baselines.TrainedMembership(
        1, public, request.param, tokens=8, hidden_units=24, steps=40, public_rows=64
    )
    made.prepare(anatomy)
    return made


def texts(anatomy: Anatomy, n: int, length: int, seed: int) -> Tensor:
    ids = torch.randint(3, VOCAB, (n, length), generator=generator(seed))
    return hidden_states(anatomy, 1, ids).double()


def test_the_network_fires_on_the_target_and_stops_at_the_margin(monkeypatch) -> None:
    draw = generator(5)
    samples = 50 + torch.randn(300, 12, generator=draw) * torch.logspace(-1, 3, 12)
    target = samples[0] + torch.randn(12, generator=draw) * torch.logspace(-1, 3, 12)
    monkeypatch.setattr(baselines, "LEARNING_RATE", 1e-2)
    monkeypatch.setattr(baselines, "BATCH", 999)
    taken = {}
    for margin in (2.0, 5.0, 99.0):
        monkeypatch.setattr(baselines, "MARGIN", margin)
        network = baselines.train_network(target, samples, generator(), hidden_units=32, steps=200)
        taken[margin] = network.steps
        if margin == 2.0:
            output = baselines.outputs_of(network.parameters, torch.cat([target[None], samples]))
            assert output[0] > 1.99
            assert output[1:].max() < -1.99
            torch.testing.assert_close((output[0] + output[1:].max()) / 2, network.decision)
            torch.testing.assert_close(output[0] - network.decision, network.distance)
    assert taken[2.0] < 200
    assert taken[2.0] < taken[5.0] <= taken[99.0] == 200


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**20), length=st.integers(1, 9), masked=st.booleans())
def test_the_closed_form_is_what_backward_gives(attack, anatomy, seed, length, masked) -> None:
    hidden = texts(anatomy, 3, length, seed)
    mask = None
    if masked:
        mask = (torch.rand(3, length, generator=generator(seed)) < 0.7).long()
        mask[:, 0] = 1
    full = attack.granularity == "full"
    rows = sentence_rows(hidden, mask, 8) if full else hidden[:, 0]
    other = texts(anatomy, 1, 8, seed + 1)
    targets = torch.cat([rows[:1], sentence_rows(other, None, 8) if full else other[:, 3]])
    upstream = torch.randn(3, 1 if full else length, generator=generator(seed)).double()
    ours = attack.gradient(targets, hidden, mask, upstream)
    exact = by_autograd(attack, targets, hidden, mask, upstream)
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-14)
    guess = attack.guess(ours.sum(0))
    assert torch.equal(guess.scores, attack.guess(exact.sum(0)).scores)
    assert guess.members[0]


# ---- the relaxation of tokens ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_relaxations_gradient_is_that_of_the_plain_model(name: str) -> None:
    model = MODELS[name]().double().eval()
    ids, mask = padded_text()
    sent = hidden_states(find_anatomy(model), 2, ids, mask)
    weights = torch.randn(*ids.shape, VOCAB, generator=torch.Generator().manual_seed(0)).double()
    leaf = weights.clone().requires_grad_()
    shares = leaf.exp() / leaf.exp().sum(-1, keepdim=True)
    words = shares @ model.get_input_embeddings().weight.detach()
    out = model(inputs_embeds=words, attention_mask=mask, output_hidden_states=True)
    difference = (out.hidden_states[2] - sent).square().sum(-1)
    (difference * mask).sum().backward()
    attack = baselines.TokenRelaxation(
        2, initial="mean", descent=DescentSettings(weighting="paper")
    )
    attack.prepare(find_anatomy(model))
    observed = Sent.from_states(sent, mask)
    gradient, _ = _Descent(attack, observed, WorkLimit())._gradient(weights, observed)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-8, atol=1e-12)


@pytest.mark.slow
def test_the_relaxation_recovers_texts() -> None:
    model = MODELS["llama"]().train()
    ids, mask = padded_text()
    sent = hidden_states(find_anatomy(model), 1, ids, mask)
    attack = baselines.TokenRelaxation(1, 400, 0.5, initial="mean")
    attack.prepare(find_anatomy(model))
    guess = attack.reconstruct(sent, mask, None)
    assert guess.finished
    assert float((guess.tokens == ids)[mask == 1].float().mean()) > 0.9
    assert bool((guess.tokens[mask == 0] == NOTHING).all())
