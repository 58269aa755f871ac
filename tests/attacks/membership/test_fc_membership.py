"""FCMembership by autograd, brute force, closed forms; a real model; layers really inserted."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.defenses import crafted
from benchmarks.defenses.planted import inserted
from lightning_fedleak.attacks.base import Query, RunFacts, UnusableObservation
from lightning_fedleak.attacks.membership.base import (
    CRAFTED,
    direction_of,
    sentence_rows,
    upstream_of,
)
from lightning_fedleak.attacks.membership.fc import SAFE_DISTANCES, FCMembership
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage
from lightning_fedleak.model.taps.activations import ActivationTap
from tests.games.crafted import craft
from tests.helpers import models


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def by_autograd(attack, targets, hidden, mask, upstream):
    """(B, G, K): one backward per sample through the crafted layers of one target."""
    rows = []
    for b in range(len(hidden)):
        grads = []
        for target in targets:
            layers = craft(attack, target)
            part = None if mask is None else mask[b : b + 1]
            out = layers(hidden[b : b + 1], part)
            (out * upstream[b : b + 1, :, None]).sum().backward()
            grads.append(layers.bias.grad)
        rows.append(torch.stack(grads))
    return torch.stack(rows)


@st.composite
def games(draw):
    """(attack, targets, hidden, mask, upstream) with some targets planted, exactly or nearly."""
    seed = draw(st.integers(0, 2**20))
    b, length, d = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 9))
    g, tokens = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    granularity = draw(st.sampled_from(["token", "full"]))
    tau = draw(st.sampled_from(["auto", 0.5, 3.0]))
    zone = draw(st.sampled_from(["auto", 0.0, 0.1]))
    ladder = draw(st.sampled_from(["auto", (1.0,), (0.25, 1.0, 8.0)]))
    attack = FCMembership(1, granularity, tau, zone, tokens=tokens, ladder=ladder)
    attack.set_precision(draw(st.sampled_from(["fp32", "bf16"])))
    rng = generator(seed)
    hidden = torch.randn(b, length, d, generator=rng, dtype=torch.float64)
    mask = None
    if draw(st.booleans()):
        mask = torch.rand(b, length, generator=rng) < 0.6
        mask[:, 0] |= draw(st.booleans())
        mask = mask.long()
    inputs = (
        hidden.reshape(-1, d) if granularity == "token" else sentence_rows(hidden, mask, tokens)
    )
    targets = inputs[torch.randint(len(inputs), (g,), generator=rng)].clone()
    targets += draw(st.sampled_from([0.0, 1e-3, 0.1, 1.0])) * torch.randn(
        targets.shape, generator=rng, dtype=torch.float64
    )
    targets[0] += 1e-9  # never all zeros
    inputs_each = length if granularity == "token" else 1
    upstream = torch.randn(b, inputs_each, generator=rng, dtype=torch.float64)
    upstream *= torch.rand(b, inputs_each, generator=rng) < 0.8
    return attack, targets, hidden, mask, upstream


def check_closed_form(games, examples):
    """Of games of which a fifth at least have rungs that fire and rungs that do not."""
    fired = []

    @given(games)
    @settings(max_examples=examples)
    def check(game):
        attack, targets, hidden, mask, upstream = game
        if bool((targets == 0).all(1).any()):
            return
        exact = by_autograd(attack, targets, hidden, mask, upstream)
        ours = attack.gradient(targets, hidden, mask, upstream)
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-14)
        one, two = attack.guess(ours.sum(0)), attack.guess(exact.sum(0))
        assert torch.equal(one.members, two.members)
        assert torch.equal(one.scores, two.scores)
        fired.append((ours != 0).double().mean().item())

    check()
    assert sum(0 < share < 1 for share in fired) > examples / 5


def test_closed_form_is_what_backward_gives():
    check_closed_form(games(), examples=50)


def test_the_weights_are_those_of_equation_6():
    target = torch.tensor([0.5, -2.0, 3.0])
    attack = FCMembership(1, tau=0.25, dead_zone=0.0, ladder=(1.0,))
    layers = craft(attack, target)
    eye = torch.eye(3)
    assert torch.equal(layers.first.weight, torch.cat([eye, -eye]))
    assert torch.equal(layers.first.bias, torch.cat([-target, target]))
    assert torch.equal(layers.second, -torch.ones(1, 6))
    assert layers.bias.tolist() == [0.25]
    assert [n for n, p in layers.named_parameters() if p.requires_grad] == ["bias"]
    x = target + torch.tensor([0.1, -0.05, 0.0])
    out = layers(torch.stack([target, x, x + 1])[None])[0, :, 0]
    torch.testing.assert_close(out, torch.tensor([0.25, 0.1, 0.0]))


def test_a_first_layer_too_large_to_store_gives_the_same_numbers(monkeypatch):
    attack = FCMembership(1, "full", tau=30.0, dead_zone=0.02, tokens=4)
    target = torch.randn(32, generator=generator(1))
    hidden = torch.randn(3, 4, 8, generator=generator(2))
    stored = craft(attack, target)
    monkeypatch.setattr(crafted, "MAX_STORED_WEIGHTS", 10)
    applied = craft(attack, target)
    assert [name for name, _ in applied.first.named_buffers()] == ["bias"]
    torch.testing.assert_close(applied(hidden), stored(hidden))


def test_crafting_draws_nothing_and_computes_in_its_own_precision():
    state = torch.get_rng_state()
    target = torch.randn(8, generator=generator())
    layers = craft(FCMembership(1), target.bfloat16())
    assert torch.equal(torch.get_rng_state(), state)
    assert layers.bias.dtype == torch.float32
    hidden = target.bfloat16()[None, None]
    plain = layers(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layers(hidden), plain)
    assert (plain > 0).all()


# --- distances


def test_a_batch_that_is_not_finite_cannot_be_read():
    attack = FCMembership(1)
    hidden = torch.randn(2, 3, 8, generator=generator())
    targets = hidden[:, 1].clone()
    hidden[1, 2, 0] = torch.nan
    gradient = attack.gradient(targets, hidden, None, torch.ones(2, 3))
    assert gradient[0].isfinite().all()
    with pytest.raises(UnusableObservation):
        attack.guess(gradient.sum(0))
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert attack.gradient(targets, hidden, mask, torch.ones(2, 3)).isfinite().all()


# --- what counts, and what does not


def test_duplicates_add_up_and_a_gradient_of_zero_cannot_tell():
    attack = FCMembership(1, ladder=(1.0,))
    hidden = torch.randn(1, 4, 8, generator=generator())
    hidden[0, 3] = hidden[0, 0]
    targets = hidden[0, :3].clone()
    upstream = torch.tensor([[0.5, 0.0, -1.0, 0.25]])
    gradient = attack.gradient(targets, hidden, None, upstream).sum(0)
    assert gradient[:, 0].tolist() == [0.75, 0.0, -1.0]
    assert attack.guess(gradient).members.tolist() == [True, False, True]


def test_scores_order_by_distance():
    attack = FCMembership(1)
    target = torch.randn(64, generator=generator())
    taus, _ = attack.settings(target[None])
    e = F.normalize(torch.randn(64, generator=generator(1)), dim=0, p=1)
    scores = []
    for tau in taus[0]:
        x = target + e * float(tau) * 0.9
        one = attack.gradient(target[None], x[None, None], None, torch.ones(1, 1))
        scores.append(attack.guess(one.sum(0)).scores.item())
    assert scores[0] == attack.rungs
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) > 8
    far = attack.gradient(target[None], -target[None, None], None, torch.ones(1, 1))
    assert attack.guess(far.sum(0)).scores.item() == 0


def test_half_precision_is_read_as_it_is():
    attack = FCMembership(1)
    hidden = torch.randn(2, 3, 8, generator=generator()).bfloat16()
    upstream = torch.ones(2, 3, dtype=torch.bfloat16)
    ours = attack.gradient(hidden[0], hidden, None, upstream)
    assert ours.dtype == torch.float32
    assert attack.guess(ours.sum(0)).members.all()
    assert not torch.equal(attack.settings(hidden[0])[0], attack.settings(hidden[0].float())[0])
    explicit = FCMembership(1)
    explicit.set_precision("bf16")
    same = explicit.gradient(hidden[0].float(), hidden.float(), None, upstream.float())
    assert torch.equal(same, ours)


def test_tau_follows_the_precision_and_the_size_of_the_target():
    target = torch.randn(1, 32, generator=generator())
    size = float(target.abs().sum())

    def tau(attack, scale=1.0):
        return float(attack.settings(scale * target)[0][0, attack.guess_rung])

    attack = FCMembership(1)
    assert tau(attack) == pytest.approx(SAFE_DISTANCES["fp32"][0] * size)
    assert tau(attack, 1000.0) == pytest.approx(1000 * SAFE_DISTANCES["fp32"][0] * size)
    explicit = FCMembership(1)
    explicit.set_precision("bf16")
    assert tau(explicit) == pytest.approx(SAFE_DISTANCES["bf16"][0] * size)
    attack.prepare(find_anatomy(models.tiny_gpt2()))
    for trainers, ours in (("32-true", "fp32"), ("16-mixed", "fp16"), ("bf16-mixed", "bf16")):
        attack.set_precision(trainers)
        taus, zones = attack.settings(target)
        assert float(taus[0, attack.guess_rung]) == pytest.approx(SAFE_DISTANCES[ours][0] * size)
        assert float(zones[0]) == pytest.approx(SAFE_DISTANCES[ours][1] * size / 32)
        assert (taus[0].diff() > 0).all()
        assert float(taus[0, -1]) == pytest.approx(0.5 * size)
    fixed = FCMembership(1, tau=0.3, dead_zone=0.0)
    assert tau(fixed) == pytest.approx(0.3)
    assert tau(fixed, 9.0) == pytest.approx(0.3)


# --- noise


def auc(scores, truth):
    return roc_auc_score(truth.numpy(), scores.numpy())


@pytest.mark.parametrize("ladder", ["auto", (1.0,)])
def test_under_noise_the_false_positive_rate_is_one_percent(ladder):
    attack = FCMembership(1, ladder=ladder)
    noise = 0.7 * torch.randn(40_000, attack.rungs, generator=generator(4))
    rate = attack.guess(noise, noise_std=0.7).members.double().mean().item()
    assert abs(rate - 0.01) < 4 * math.sqrt(0.01 * 0.99 / 40_000)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_one_rung_is_the_gaussian_mechanism_without_its_sign(sigma):
    attack = FCMembership(1, ladder=(1.0,))
    n = 40_000
    truth = torch.arange(n) < n // 2
    gradient = -truth[:, None].float() + sigma * torch.randn(n, 1, generator=generator(5))
    # |x| of a member is above that of a non-member: both of x + y, x - y have one sign.
    one_way = 0.5 * math.erfc(-1 / (2 * sigma))
    expected = one_way**2 + (1 - one_way) ** 2
    assert auc(attack.guess(gradient, sigma).scores, truth) == pytest.approx(expected, abs=0.01)


def test_against_defended_gradients_the_rung_tau_alone_is_crafted():
    target = torch.randn(1, 32, generator=generator())
    attack = FCMembership(1, ladder=(0.25, 0.5, 1, 2, 4))
    taus, _ = attack.settings(target)
    attack.meet(RunFacts(defended=frozenset({"gradients"})))
    assert (attack.rungs, attack.guess_rung) == (1, 0)
    assert torch.equal(attack.settings(target)[0], taus[:, [2]])


def test_run_reads_the_newest_crafted_gradient_and_its_noise():
    attack = FCMembership(1)
    gradient = torch.zeros(3, attack.rungs)
    gradient[0] = 1e-3
    for noise, members in ((0.0, [True, False, False]), (1.0, [False] * 3)):
        snapshot = GradientSnapshot(0, Stage.SHARED, {CRAFTED: gradient}, noise_std=noise)
        assert attack.run(Observation((snapshot,))).members.tolist() == members


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: FCMembership(-1), "layer"),
        (lambda: FCMembership(1, "word"), "granularity"),
        (lambda: FCMembership(1, tau=0.0), "tau"),
        (lambda: FCMembership(1, tau=float("nan")), "tau"),
        (lambda: FCMembership(1, dead_zone=-0.1), "dead_zone"),
        (lambda: FCMembership(1, ladder=(0.5, 2.0)), "ladder must be"),
        (lambda: FCMembership(1, ladder=(2.0, 1.0)), "ascending"),
        (lambda: FCMembership(1, ladder=()), "ladder"),
        (lambda: FCMembership(1).set_precision("int8"), "precision"),
        (lambda: craft(FCMembership(1), torch.zeros(4)), "all zeros"),
        (lambda: craft(FCMembership(1), torch.full((4,), torch.nan)), "not finite"),
        (lambda: FCMembership(9).prepare(find_anatomy(models.tiny_gpt2())), "layer must be"),
    ],
)
def test_refusals_say_what_to_do(build, words):
    with pytest.raises(ValueError, match=words):
        build()


# --- a real model


@pytest.fixture(scope="module")
def sentences(assets):
    """Sentences of bank customers, token ids by stories15M's tokenizer with its BOS."""
    with gzip.open(assets / "data/banking77/train.csv.gz", "rt") as lines:
        rows = [row[0] for row in csv.reader(lines)][1:]
    tokenizer = AutoTokenizer.from_pretrained(assets / "models/stories15M")
    picks = torch.randperm(len(rows), generator=generator(7))[:110].tolist()
    ids = [[1, *tokenizer(rows[i], add_special_tokens=False)["input_ids"]][:32] for i in picks]
    return list(dict.fromkeys(map(tuple, ids)))


def padded(sentences, length, left=False):
    ids = torch.zeros(len(sentences), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, s in enumerate(sentences):
        place = slice(length - len(s), length) if left else slice(0, len(s))
        ids[i, place], mask[i, place] = torch.tensor(s), 1
    return ids, mask


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def states(request, assets):
    """hidden states of padded sentences at every layer, in one precision."""
    folder = assets / "models/stories15M"
    dtype = getattr(torch, request.param)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.no_grad()
    def run(ids, mask):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = model.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, output_hidden_states=True
        )
        return out.hidden_states

    return model, run


@pytest.fixture(scope="module")
def asked_alone(states, sentences):
    """20 sentences of a batch of 40 and 20 of none, each with its hidden states alone, unpadded."""
    _, run = states
    return [
        (padded([s], len(s)), run(*padded([s], len(s))))
        for s in (*sentences[:20], *sentences[40:60])
    ]


@pytest.mark.slow
@pytest.mark.assets
@pytest.mark.parametrize("granularity", ["token", "full"])
def test_every_member_and_no_other_is_named_at_every_layer(
    states, sentences, asked_alone, granularity
):
    """Targets alone and unpadded; the batch padded on the right; fp32 and bf16."""
    model, run = states
    ids, mask = padded(sentences[:40], 40)
    hidden = run(ids, mask)
    truth = torch.arange(len(asked_alone)) < 20
    upstream = torch.randn(40, 40 if granularity == "token" else 1, generator=generator(8))
    for layer in range(1, 7):
        attack = FCMembership(layer, granularity)
        attack.prepare(find_anatomy(model))
        rows = []
        for alone, states_of_one in asked_alone:
            rows.append(attack.embed(states_of_one[layer], Query(*alone))[0])
        gradient = attack.gradient(torch.stack(rows), hidden[layer], mask, upstream)
        guess = attack.guess(gradient.sum(0))
        assert torch.equal(guess.members, truth), layer
        assert auc(guess.scores, truth) == 1.0


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: models.tiny_gpt2(layers=3, dropout=0.0),
    "llama": lambda: models.tiny_llama(layers=3),
    "bert": lambda: models.tiny_bert_mlm(layers=3, dropout=0.0),
    "distilbert": lambda: models.tiny_distilbert_mlm(layers=3, dropout=0.0),
    "roberta": lambda: models.tiny_roberta_mlm(layers=3, dropout=0.0),
    "t5 encoder": lambda: models.tiny_t5(layers=3, dropout=0.0),
}
LADDER = (0.1, 1.0, 4.0, 10.0, 30.0, 60.0, 80.0, 90.0, 200.0)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, models.VOCAB, (4, 7), generator=generator)
    ends = torch.randint(3, 8, (4, 1), generator=generator)
    ends[0] = 7
    mask = (torch.arange(7) < ends).long()
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def attack_and_target(anatomy, layer, granularity, inputs) -> tuple[FCMembership, Tensor]:
    """Its widest rungs reach many tokens of the batch, and its target is one of them."""
    attack = FCMembership(
        layer, granularity, tau=1.0, dead_zone=1e-9, ladder=LADDER, tokens=5, name="fc"
    )
    hidden = hidden_states(anatomy, layer, inputs["input_ids"], inputs["attention_mask"])
    if granularity == "token":
        return attack, hidden[2, 1]
    real = inputs["attention_mask"][2, :5, None].to(hidden)
    return attack, (hidden[2, :5] * real).reshape(-1)


@pytest.mark.parametrize("granularity", ["token", "full"])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_the_closed_form_is_the_gradient_of_autograd(name: str, layer: int, granularity: str):
    """Where little is added, from the hidden states and gradients of the model as it is."""
    model = MODELS[name]().double().train()
    anatomy = find_anatomy(model)
    inputs, scale = batch(), 1e-18
    mask = inputs["attention_mask"]
    attack, target = attack_and_target(anatomy, layer, granularity, inputs)
    tap = ActivationTap(anatomy, [layer])
    tap.arm()
    model(**inputs).loss.backward()
    hidden, (delta,) = tap.states(layer)[0], tap.gradients(layer)
    tap.close()
    whole = granularity == "full"
    upstream = upstream_of(delta, direction_of(models.DIM), scale, whole_sentence=whole, mask=mask)
    closed = attack.gradient(target[None], hidden, mask, upstream).sum(0)[0]
    crafted = craft(attack, target)
    with inserted(anatomy, layer, crafted, scale=scale, mask=mask):
        model(**inputs).loss.backward()
    assert closed.abs().min() > 0
    assert len(closed.unique()) > 1
    torch.testing.assert_close(crafted.bias.grad, closed, rtol=1e-10, atol=0)


def test_the_direction_is_a_unit_vector_of_its_own_generator() -> None:
    state = torch.get_rng_state()
    first, second = direction_of(models.DIM), direction_of(models.DIM, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert float(first.norm()) == pytest.approx(1.0, abs=1e-15)
    assert abs(float(first @ second)) < 0.9
    assert torch.equal(direction_of(models.DIM), first)
