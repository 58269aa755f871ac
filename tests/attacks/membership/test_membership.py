"""Membership from the gradients of attention and of fully connected layers."""

import csv
import gzip
import itertools
import math
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.defenses.planted import inserted
from benchmarks.papers.baselines import PublishedAttention, coordinates, lemma_gamma
from lightning_fedleak.attacks.base import Query, RunFacts, UnusableObservation
from lightning_fedleak.attacks.membership.attention import (
    WIDTHS,
    AttentionMembership,
    AttentionSettings,
)
from lightning_fedleak.attacks.membership.attention_layers import (
    PublicStates,
    attentions,
    expected_response,
    false_positive_rate,
)
from lightning_fedleak.attacks.membership.base import (
    CRAFTED,
    direction_of,
    sentence_rows,
    upstream_of,
)
from lightning_fedleak.attacks.membership.fc import SAFE_DISTANCES, FCMembership
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.attacks.row_space.atoms import fit_whitening
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage
from lightning_fedleak.model.taps.activations import ActivationTap
from tests.games.crafted import craft
from tests.helpers import models

# AttentionMembership against autograd, Algorithm 1 as written, brute force; and on real models.


def separation(hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Definition 2: each sentence's ``min_i (<x_i, x_i> - max_{j != i} <x_i, x_j>)``.

    Args:
        hidden: (n, L, d).
        mask: (n, L), 0 where padded, or None.

    Returns:
        (n,) float64; infinite for a sentence of one token.
    """
    x = hidden.double()
    real = torch.ones(x.shape[:2]) if mask is None else mask
    both = (real[:, :, None] * real[:, None, :]) != 0
    products = x @ x.transpose(1, 2)
    squared_norms = products.diagonal(dim1=1, dim2=2)
    other = both & ~torch.eye(x.shape[1], dtype=torch.bool)
    nearest = products.masked_fill(~other, -math.inf).amax(2)
    return (squared_norms - nearest).masked_fill(real == 0, math.inf).amin(1)


def attention(layer, public=None, **arguments):
    """An attack whose rare settings and constants may stand among its arguments."""
    if arguments.pop("published", False):
        return PublishedAttention(layer, public, **arguments)
    constants = {"refresh_every", "false_positive_rate"} & arguments.keys()
    values = {name: arguments.pop(name) for name in constants}
    names = {field.name for field in fields(AttentionSettings)} & arguments.keys()
    settings = AttentionSettings(**{name: arguments.pop(name) for name in names})
    attack = AttentionMembership(layer, public, attention=settings, **arguments)
    for name, value in values.items():
        setattr(attack, name, value)
    return attack


def expect(attack, *, defended, replaced=False):
    """Tells an attack which defences the run has."""
    acts = {"gradients": defended, "batches": replaced}
    attack.meet(RunFacts(defended=frozenset(name for name, does in acts.items() if does)))
    assert attack._defended is defended


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def built(whitening=None, gamma=0.7, **given):
    """Return an attack that decides at ``gamma``, as if it had been calibrated to it."""
    if given.get("published"):
        attack = attention(1, [[1, 2]], published=True)
        attack.ladder, attack._level = torch.tensor([gamma]), 0
        attack.factor, attack.d = given.get("beta", 0.3), given.get("d", 3)
    else:
        width = round(1 - gamma, 12)
        given["widths"] = (*given.get("widths", WIDTHS), width)
        attack = attention(1, [[1, 2]], **given)
        attack._whitening, attack._level = whitening, attack.widths.index(width)
    return attack


@st.composite
def games(draw):
    """(attack, targets, hidden, mask, upstream) with targets of the batch, exact or nearly."""
    seed = draw(st.integers(0, 2**20))
    b, length, d = draw(st.integers(1, 4)), draw(st.integers(1, 7)), draw(st.integers(2, 9))
    g = draw(st.integers(1, 4))
    published = draw(st.booleans())
    whitening = None
    if draw(st.booleans()):
        whitening = fit_whitening(normal(12 * d, d, seed=seed) @ normal(d, d, seed=seed) + 1)
    attack = built(
        whitening,
        **({"published": True, "d": d} if published else {}),
        gamma=draw(st.sampled_from([0.05, 0.3, 0.9])),
        beta=draw(st.sampled_from([0.1, 1.0, 5.0])),
        widths=draw(st.sampled_from([WIDTHS, (0.4,)])),
    )
    hidden = 2 * normal(b, length, d, seed=seed)
    mask = None
    if draw(st.booleans()):
        mask = torch.rand(b, length, generator=generator(seed)) < 0.7
        mask[0, 0] = True
        mask = mask.long()
    sentence = torch.randint(b, (g,), generator=generator(seed))
    if mask is not None:
        sentence = torch.where(mask[sentence].any(1), sentence, 0)
    real = torch.ones(b, length) if mask is None else mask
    query = Query(torch.zeros(g, length), real[sentence])
    targets = attack.embed(hidden[sentence], query)
    nudge = draw(st.sampled_from([0.0, 1e-6, 0.1]))
    targets[:, :d] += nudge * normal(g, d, seed=seed + 1)
    upstream = normal(b, length, seed=seed + 2)
    upstream *= torch.rand(b, length, generator=generator(seed)) < 0.8
    return attack, targets, hidden, mask, upstream


def test_closed_form_is_what_backward_gives():
    check_closed_form(games(), examples=50)


@given(st.integers(2, 7), st.integers(2, 8), st.integers(0, 99))
def test_the_expected_response_is_the_one_in_the_targets_sentence(length, d, seed):
    x = normal(3, length, d, seed=seed)
    mask = torch.ones(3, length)
    mask[0, length - 1] = mask[1, 0] = 0
    positions = torch.tensor([0, length - 1, length // 2])
    expected = expected_response(x, mask, positions, 0.7)
    for g, position in enumerate(positions.tolist()):
        (alone,) = attentions(x[g][None], mask[g][None], x[g, position][None], 0.7)
        _, _, responses = coordinates(alone)
        response = responses[alone.places.tolist().index(position)]
        torch.testing.assert_close(expected[g], response, rtol=1e-9, atol=1e-12)


def algorithm_one(v, beta, generator):
    """Queries and keys (4, d - 1, d), and W_O (2 d, 4 d), of lines 1 to 11 of Algorithm 1.

    Head 2's matrix is square here, so that it omits no random direction.
    """
    d = len(v)
    w = torch.randn(d, d, generator=generator, dtype=torch.float64)
    w[:, 0] = v
    q, _ = torch.linalg.qr(w)
    first, second = q[:, 1:].T, torch.randn(d, d, generator=generator, dtype=torch.float64)
    queries = [first, second, first, second]
    keys = [beta * torch.linalg.pinv(m).T for m in queries]
    eye, zero = torch.eye(d).double(), torch.zeros(d, d).double()
    output = [torch.cat([eye, -eye, zero, zero], 1), torch.cat([zero, zero, -eye, eye], 1)]
    return queries, keys, torch.cat(output)


@given(st.integers(1, 3), st.integers(1, 6), st.integers(2, 10), st.integers(0, 999))
def test_the_layers_compute_what_algorithm_1_does(b, length, d, seed):
    x, beta = normal(b, length, d, seed=seed), 0.9
    attack = built(published=True, gamma=0.25, beta=beta, d=d)
    target = attack.embed(x, Query(torch.zeros(b, length)))[0]
    queries, keys, output = algorithm_one(target, beta, generator(seed))
    heads = [((x @ q.T) @ (x @ k.T).mT).softmax(-1) @ x for q, k in zip(queries, keys, strict=True)]
    exact = (torch.cat(heads, -1) @ output.T - 0.25).relu()
    layers = craft(attack, target)
    torch.testing.assert_close(layers(x), exact, rtol=1e-7, atol=1e-9)
    assert [n for n, p in layers.named_parameters() if p.requires_grad] == ["bias"]


def test_a_member_responds_with_one_wherever_its_sentence_is():
    """Whatever else is in the batch, on either side of the padding."""
    x = normal(4, 6, 8)
    attack = built(gamma=0.5, widths=(1e-9,))
    query = Query(torch.zeros(1, 5), positions=torch.tensor([2]))
    target = attack.embed(x[1:2, :5], query)
    padded = torch.cat([normal(1, 2, 8, seed=5), x[1:2, :5], normal(1, 3, 8, seed=6)], 1)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0, 0, 0]])
    upstream = torch.arange(1.0, 11.0)[None].double()
    gradient = attack.gradient(target, padded, mask, upstream)
    assert gradient[0, 0, 0] == 5.0
    assert (attack.gradient(target, x[2:], None, upstream[:, :6].expand(2, 6)) == 0)[..., 0].all()


def test_a_band_is_the_difference_of_its_edges():
    """Tokens above both edges cancel, whatever their upstream gradients sum to."""
    attack = built(widths=(0.01, 0.1), gamma=0.9)
    assert attack.widths == [0.01, 0.1]
    inside, above = 0.3, 17.123456
    gradient = torch.tensor(
        [
            [above, above + inside, above, above],
            [above, above * (1 + 2e-7), above, above],
            [0.0, 0.0, 0.0, 0.0],
        ]
    )
    guess = attack.guess(gradient)
    assert gradient[1, 1] != above
    assert guess.scores.tolist() == [1.0, 0.0, 0.0]
    assert guess.members.tolist() == [True, False, False]


def test_the_last_token_is_asked_for():
    x = normal(3, 6, 5)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [0] * 3 + [1] * 3])
    query = Query(mask, mask)
    attack = built(published=True)
    assert torch.equal(attack.embed(x, query), x[torch.arange(3), torch.tensor([5, 3, 5])])


@given(st.integers(2, 5), st.integers(2, 5), st.sampled_from([0.05, 0.5, 2.0]), st.integers(0, 99))
def test_the_lemmas_gamma_is_twice_its_retrieval_error(sentences, length, beta, seed):
    hidden = normal(sentences, length, 4, seed=seed)
    mask = torch.ones(sentences, length, dtype=torch.bool)
    mask[0, 1:] = False
    mask[1, length - 1 :] = length == 2
    longest = int(mask.sum(1).max())
    largest = float(hidden[mask].norm(dim=1).max())
    apart = float(separation(hidden, mask).min())
    exact = 4 * largest * (longest - 1) * math.exp(2 / longest - beta * apart)
    assert lemma_gamma(PublicStates(hidden, mask), beta) == pytest.approx(exact, rel=1e-9)


def test_a_gamma_that_overflows_never_fires():
    hidden = 1e3 * normal(2, 3, 4)
    hidden[:, 1] = 2 * hidden[:, 0]
    states = PublicStates(hidden, torch.ones(2, 3, dtype=torch.bool))
    assert lemma_gamma(states, 1.0) == math.inf
    attack = built(published=True, gamma=math.inf, d=4)
    targets = attack.embed(hidden, Query(torch.zeros(2, 3)))
    assert not attack.gradient(targets, hidden, None, normal(2, 3)).any()
    assert not by_autograd(attack, targets, hidden, None, normal(2, 3)).any()


@given(st.integers(1, 4), st.integers(3, 7), st.integers(1, 3), st.integers(0, 99))
def test_the_public_rate_is_that_of_all_batches(targets, sentences, batch, seed):
    without = torch.rand(targets, sentences, generator=generator(seed))
    without[0, :2] = -torch.inf
    hits = []
    for row in without:
        retained = row[row > -torch.inf].tolist()
        batches = list(itertools.combinations(retained, min(batch, len(retained))))
        hits.append(sum(max(b) > 0.6 for b in batches) / len(batches))
    exact = sum(hits) / len(hits)
    assert false_positive_rate(without, 0.6, batch) == pytest.approx(exact, abs=1e-9)


def test_noise_alone_is_taken_for_a_member_at_the_stated_rate():
    attack = built(gamma=0.4, false_positive_rate=0.05)
    noise = 0.2 * torch.randn(40_000, attack.rungs, generator=generator(1))
    rate = float(attack.guess(noise, 0.2).members.float().mean())
    assert rate == pytest.approx(0.05, abs=0.006)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("published", [False, True])
def test_gradients_that_are_not_finite_are_refused(value, published):
    attack = built(published=published) if published else built()
    gradient = torch.zeros(2, attack.rungs)
    gradient[1, 0] = value
    with pytest.raises(UnusableObservation, match="not finite"):
        attack.guess(gradient)
    snapshot = GradientSnapshot(0, Stage.SHARED, {CRAFTED: gradient})
    with pytest.raises(UnusableObservation, match="not finite"):
        attack.run(Observation((snapshot,)))


def test_hidden_states_that_are_not_finite_are_not_a_no():
    attack, x = built(), normal(2, 4, 5)
    targets = attack.embed(x, Query(torch.zeros(2, 4)))
    x[1, 2, 0] = float("nan")
    gradient = attack.gradient(targets, x, None, normal(2, 4))
    assert bool(gradient[1].isnan().all())
    assert bool(gradient[0].isfinite().all())


@pytest.fixture(scope="module")
def public():
    return PublicText(torch.randint(5, models.VOCAB, (120, 12), generator=generator(6)))


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (models.tiny_bert_mlm, {}),
        (models.tiny_gpt2, {"published": True}),
        (models.tiny_llama, {}),
        (models.tiny_llama, {"gamma": "lemma", "published": True}),
    ],
)
def test_prepare_serves_every_kind_of_model_and_leaves_no_trace(make, given, public):
    anatomy = find_anatomy(make())
    before = {k: v.clone() for k, v in anatomy.model.state_dict().items()}
    rng = torch.get_rng_state()
    attack = attention(1, public, batch=20, **given)
    attack.prepare(anatomy)
    again = attention(1, public, batch=20, **given)
    again.prepare(anatomy)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(before[k], v) for k, v in anatomy.model.state_dict().items())
    assert not attack.state_dict()  # prepare calibrates again after a resume
    texts = torch.randint(5, models.VOCAB, (6, 12), generator=generator(7))
    hidden = hidden_states(anatomy, 1, texts)
    targets = attack.embed(hidden[:3], Query(texts[:3]))
    upstream = torch.randn(6, 12, generator=generator(8))
    gradients = [a.gradient(targets, hidden, None, upstream) for a in (attack, again)]
    assert gradients[0].shape == (6, 3, attack.rungs)
    assert torch.equal(*gradients)
    guesses = [a.guess(g.sum(0)) for a, g in zip((attack, again), gradients, strict=True)]
    assert torch.equal(guesses[0].members, guesses[1].members)


def test_the_rate_asked_for_holds_in_games_on_other_text(public):
    """200 batches of 20 texts and a target outside of them."""
    anatomy = find_anatomy(models.tiny_llama(d=32))
    attack = attention(1, public, batch=20, false_positive_rate=0.1)
    attack.prepare(anatomy)
    texts = torch.randint(5, models.VOCAB, (400, 12), generator=generator(9))
    hidden = hidden_states(anatomy, 1, texts)
    fires = []
    for i in range(200):
        chosen = torch.randperm(400, generator=generator(i))[:21]
        place = torch.randint(1, 12, (1,), generator=generator(i))
        targets = attack.embed(hidden[chosen[:1]], Query(texts[chosen[:1]], positions=place))
        gradient = attack.gradient(targets, hidden[chosen[1:]], None, torch.ones(20, 12))
        fires.append(attack.guess(gradient.sum(0)).members.item())
    assert sum(fires) / 200 < 0.16


def test_no_wider_band_decides_than_a_member_needs(public):
    """Whatever rate is allowed, wider ones only rank."""
    anatomy = find_anatomy(models.tiny_llama())
    for arguments, width in (({}, 0.1), ({"widths": (0.3, 0.5)}, 0.3)):
        attack = attention(1, public, batch=20, false_positive_rate=0.999, **arguments)
        attack.prepare(anatomy)
        assert attack.widths[attack._level] == width


def test_where_batches_are_replaced_bands_reach_far_below_a_members_own_response(public):
    for options, plain, replaced in (
        ({}, 0.7, 0.999),
        ({"widths": WIDTHS}, 0.7, 0.7),
        ({"widths": (0.3,)}, 0.3, 0.3),
    ):
        attack = attention(1, public, batch=20, **options)
        before = attack.config()
        assert attack.widths[-1] == plain
        expect(attack, defended=False, replaced=True)
        assert attack.widths[-1] == replaced
        assert set(before["widths"]) <= set(attack.config()["widths"])
        expect(attack, defended=False)
        assert attack.config() == before
    # The rungs that gradients are clipped with share a norm, whatever the text.
    attack = attention(1, public, batch=20)
    expect(attack, defended=True, replaced=True)
    assert attack.widths == [0.1]


@pytest.mark.parametrize(
    ("given", "width"), [({}, 0.1), ({"widths": (0.02, 0.08, 0.6)}, 0.08), ({"whiten": False}, 0.1)]
)
def test_against_defended_gradients_one_band_is_crafted(public, given, width):
    """Bands share the clip norm, and one of K carries 1 / sqrt(K) of the signal."""
    attack = attention(1, public, batch=20, **given)
    expect(attack, defended=True)
    attack.prepare(find_anatomy(models.tiny_llama()))
    assert attack.widths == [width]
    assert attack.rungs == 2
    members = attack.guess(torch.tensor([[9.0, 0.0], [0.0, 0.0]]), 1.0).members
    assert members.tolist() == [True, False]


def test_where_batches_are_replaced_beta_is_smaller_unless_it_was_given(public):
    for options, plain, replaced in (({}, 0.3, 0.01), ({"beta": 0.3}, 0.3, 0.3)):
        attack = attention(1, public, batch=20, **options)
        for defended in (False, True):
            expect(attack, defended=defended, replaced=True)
            assert attack.beta == replaced
            expect(attack, defended=defended)
            assert attack.beta == plain


def test_refresh_waits_and_follows(public):
    attack = attention(1, public, batch=20, refresh_every=10)
    attack.prepare(find_anatomy(models.tiny_gpt2()))
    before = attack._whitening.mean
    moved = find_anatomy(models.tiny_gpt2(seed=1))
    attack.refresh(moved, 9)
    assert torch.equal(attack._whitening.mean, before)
    attack.refresh(moved, 10)
    assert not torch.equal(attack._whitening.mean, before)
    attack.refresh(find_anatomy(models.tiny_gpt2()), 3)  # of another fit
    assert torch.equal(attack._whitening.mean, before)


def few(n, tokens=12):
    return PublicText(torch.randint(5, models.VOCAB, (n, tokens), generator=generator(6)))


# FCMembership by autograd, brute force, closed forms; a real model; layers really inserted.


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
def fc_games(draw):
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


def test_fc_closed_form_is_what_backward_gives():
    check_closed_form(fc_games(), examples=50)


def test_the_weights_are_those_of_equation_6():
    target = torch.tensor([0.5, -2.0, 3.0])
    attack = FCMembership(1, tau=0.25, dead_zone=0.0, ladder=(1.0,))
    layers = craft(attack, target)
    eye = torch.eye(3)
    assert torch.equal(layers.first(eye) - layers.first.bias, torch.cat([eye, -eye]).T)
    assert torch.equal(layers.first.bias, torch.cat([-target, target]))
    assert torch.equal(layers.second, -torch.ones(1, 6))
    assert layers.bias.tolist() == [0.25]
    assert [n for n, p in layers.named_parameters() if p.requires_grad] == ["bias"]
    x = target + torch.tensor([0.1, -0.05, 0.0])
    out = layers(torch.stack([target, x, x + 1])[None])[0, :, 0]
    torch.testing.assert_close(out, torch.tensor([0.25, 0.1, 0.0]))


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
        (lambda: attention(1), "needs public_text"),
        (lambda: attention(-1, [[1, 2]]), "layer"),
        (lambda: attention(1, [[1, 2]], beta=0.0), "beta"),
        (lambda: attention(1, [[1, 2]], beta=math.nan), "beta"),
        (lambda: attention(1, [[1, 2]], widths=(0.0, 0.5)), "widths"),
        (lambda: attention(1, [[1, 2]], widths=()), "widths"),
        (lambda: attention(1, [[1, 2]], batch=0), "batch"),
        (
            lambda: attention(1, few(2, 5)).prepare(find_anatomy(models.tiny_gpt2())),
            "cannot whiten 16 dimensions",
        ),
        (
            lambda: attention(1, few(60)).prepare(find_anatomy(models.tiny_gpt2())),
            "public texts to calibrate on .* at least 41, got 30",
        ),
        (lambda: craft(built(), normal(10) * math.nan), "not finite"),
    ],
)
def test_refusals_say_what_to_do(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_enough_public_texts_are_drawn_for_a_large_batch():
    attack = attention(1, few(800, 40), batch=128, tokens=32)
    attack.prepare(find_anatomy(models.tiny_gpt2()))
    assert len(attack.gammas) == attack.rungs


# --- a real model


@pytest.fixture(scope="module")
def fc_sentences(assets):
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
def asked_alone(states, fc_sentences):
    """20 sentences of a batch of 40 and 20 of none, each with its hidden states alone, unpadded."""
    _, run = states
    return [
        (padded([s], len(s)), run(*padded([s], len(s))))
        for s in (*fc_sentences[:20], *fc_sentences[40:60])
    ]


@pytest.mark.slow
@pytest.mark.assets
@pytest.mark.parametrize("granularity", ["token", "full"])
def test_every_member_and_no_other_is_named_at_every_layer(
    states, fc_sentences, asked_alone, granularity
):
    """Targets alone and unpadded; the batch padded on the right; fp32 and bf16."""
    model, run = states
    ids, mask = padded(fc_sentences[:40], 40)
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
    "bert": lambda: models.tiny_bert_mlm(layers=3, dropout=0.0),
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
