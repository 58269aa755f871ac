"""AttentionMembership against autograd, Algorithm 1 as written, brute force; and on real models."""

import itertools
import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.lemma import retrieval_error
from lightning_fedleak.attacks.base import Query, RunFacts, UnusableObservation
from lightning_fedleak.attacks.membership.attention import (
    WIDTHS,
    AttentionMembership,
    AttentionSettings,
)
from lightning_fedleak.attacks.membership.attention_layers import (
    Calibration,
    PublicStates,
    _PublicScores,
    attentions,
    expected_response,
    lemma_gamma,
)
from lightning_fedleak.attacks.membership.base import CRAFTED
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.attacks.row_space.atoms import fit_whitening
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage
from tests.attacks.membership.test_fc_membership import by_autograd, check_closed_form, generator
from tests.games.crafted import craft
from tests.helpers import models

PUBLISHED = AttentionSettings(beta="authors", whiten=False, score="coordinates")


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
    if given.get("score") == "coordinates":
        attack = attention(1, [[1, 2]], gamma="lemma", **given)
        attack._calibration = Calibration(whitening, torch.tensor([gamma]), 0)
    else:
        width = round(1 - gamma, 12)
        given["widths"] = (*given.get("widths", WIDTHS), width)
        attack = attention(1, [[1, 2]], **given)
        attack._calibration = Calibration(whitening, torch.zeros(0), attack.widths.index(width))
    attack._d = None if whitening is None else len(whitening.mean)
    return attack


@st.composite
def games(draw):
    """(attack, targets, hidden, mask, upstream) with targets of the batch, exact or nearly."""
    seed = draw(st.integers(0, 2**20))
    b, length, d = draw(st.integers(1, 4)), draw(st.integers(1, 7)), draw(st.integers(2, 9))
    g = draw(st.integers(1, 4))
    score = draw(st.sampled_from(["band", "coordinates"]))
    whitening = None
    if draw(st.booleans()):
        whitening = fit_whitening(normal(12 * d, d, seed=seed) @ normal(d, d, seed=seed) + 1)
    attack = built(
        whitening,
        score=score,
        gamma=draw(st.sampled_from([0.05, 0.3, 0.9])),
        beta=draw(st.sampled_from(["authors", 0.1, 1.0, 5.0])),
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
        _, _, responses = alone.coordinates()
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
    attack = built(score="coordinates", gamma=0.25, beta=beta)
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
    attack = built(score="coordinates")
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
    exact = 2 * float(retrieval_error(beta, longest, apart, largest))
    assert lemma_gamma(PublicStates(hidden, mask), beta) == pytest.approx(exact, rel=1e-9)


def test_a_gamma_that_overflows_never_fires():
    hidden = 1e3 * normal(2, 3, 4)
    hidden[:, 1] = 2 * hidden[:, 0]
    states = PublicStates(hidden, torch.ones(2, 3, dtype=torch.bool))
    assert lemma_gamma(states, 1.0) == math.inf
    attack = attention(1, [[1, 2]], whiten=False, gamma="lemma", score="coordinates")
    attack._calibration, attack._d = Calibration(None, torch.tensor([math.inf]), level=0), 4
    targets = attack.embed(hidden, Query(torch.zeros(2, 3)))
    assert not attack.gradient(targets, hidden, None, normal(2, 3)).any()
    assert not by_autograd(attack, targets, hidden, None, normal(2, 3)).any()


@given(st.integers(1, 4), st.integers(3, 7), st.integers(1, 3), st.integers(0, 99))
def test_the_public_rate_is_that_of_all_batches(targets, sentences, batch, seed):
    without = torch.rand(targets, sentences, generator=generator(seed))
    without[0, :2] = -torch.inf
    scores = _PublicScores(without, torch.ones(targets))
    hits = []
    for row in without:
        retained = row[row > -torch.inf].tolist()
        batches = list(itertools.combinations(retained, min(batch, len(retained))))
        hits.append(sum(max(b) > 0.6 for b in batches) / len(batches))
    exact = sum(hits) / len(hits)
    assert scores.false_positive_rate(0.6, batch) == pytest.approx(exact, abs=1e-9)


def test_noise_alone_is_taken_for_a_member_at_the_stated_rate():
    for score in ("band", "coordinates"):
        attack = built(score=score, gamma=0.4, false_positive_rate=0.05)
        attack._d = 3
        noise = 0.2 * torch.randn(40_000, attack.rungs, generator=generator(1))
        rate = float(attack.guess(noise, 0.2).members.float().mean())
        assert rate == pytest.approx(0.05, abs=0.006), score


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("score", ["band", "coordinates"])
def test_gradients_that_are_not_finite_are_refused(value, score):
    attack = built(score=score)
    attack._d = 3
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
        (models.tiny_gpt2, {"score": "coordinates"}),
        (models.tiny_llama, {}),
        (models.tiny_llama, {"gamma": "lemma", "score": "coordinates"}),
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
    state = attack.state_dict()
    assert all(isinstance(v, torch.Tensor) for v in state.values())
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor.nan_to_num(), state[name].nan_to_num()), name
    other = attention(1, public, batch=20, **given)
    other.load_state_dict({k: v.clone() for k, v in state.items()})
    texts = torch.randint(5, models.VOCAB, (6, 12), generator=generator(7))
    hidden = hidden_states(anatomy, 1, texts)
    targets = attack.embed(hidden[:3], Query(texts[:3]))
    upstream = torch.randn(6, 12, generator=generator(8))
    gradients = [a.gradient(targets, hidden, None, upstream) for a in (attack, other)]
    assert gradients[0].shape == (6, 3, attack.rungs)
    assert torch.equal(*gradients)
    guesses = [a.guess(g.sum(0)) for a, g in zip((attack, other), gradients, strict=True)]
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
        assert attack.widths[attack._calibration.level] == width


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
    published = AttentionMembership(1, public, attention=PUBLISHED)
    expect(published, defended=False, replaced=True)
    assert published.beta == "authors"


def test_refresh_waits_and_follows(public):
    attack = attention(1, public, batch=20, refresh_every=10)
    attack.prepare(find_anatomy(models.tiny_gpt2()))
    before = attack.state_dict()
    moved = find_anatomy(models.tiny_gpt2(seed=1))
    attack.refresh(moved, 9)
    assert torch.equal(attack.state_dict()["whitening.mean"], before["whitening.mean"])
    attack.refresh(moved, 10)
    assert not torch.equal(attack.state_dict()["whitening.mean"], before["whitening.mean"])
    assert int(attack.state_dict()["prepared_at"]) == 10
    attack.refresh(find_anatomy(models.tiny_gpt2()), 3)  # of another fit
    assert torch.equal(attack.state_dict()["whitening.mean"], before["whitening.mean"])
    assert int(attack.state_dict()["prepared_at"]) == 3


def test_state_of_other_settings_is_refused(public):
    attack = attention(1, public, batch=20)
    attack.prepare(find_anatomy(models.tiny_gpt2()))
    state = attack.state_dict()
    texts = [row.tolist() for row in public.sentences]
    attention(1, texts, batch=20).load_state_dict(state)
    texts[3][2] += 1
    for other in (
        attention(1, public, batch=20, whiten=False),
        attention(1, public, batch=20, score="coordinates"),
        attention(1, public, batch=20, refresh_every=7),
        attention(2, public, batch=20),
        attention(1, texts, batch=20),
        attention(1, "sampled", batch=20),
    ):
        with pytest.raises(ValueError, match="the state is of other settings"):
            other.load_state_dict(state)
        assert other.config() != attack.config()  # by which a monitor sees it
    del state["fingerprint"]
    with pytest.raises(ValueError, match="the state is of other settings"):
        attention(1, public, batch=20).load_state_dict(state)


def few(n, tokens=12):
    return PublicText(torch.randint(5, models.VOCAB, (n, tokens), generator=generator(6)))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: attention(1), "needs public_text"),
        (lambda: attention(-1, [[1, 2]]), "layer"),
        (lambda: attention(1, [[1, 2]], beta=0.0), "beta"),
        (lambda: attention(1, [[1, 2]], beta=math.nan), "beta"),
        (lambda: attention(1, [[1, 2]], gamma="high"), "gamma"),
        (lambda: attention(1, [[1, 2]], score="norm"), "score"),
        (lambda: attention(1, [[1, 2]], widths=(0.0, 0.5)), "widths"),
        (lambda: attention(1, [[1, 2]], widths=()), "widths"),
        (lambda: attention(1, [[1, 2]], batch=0), "batch"),
        (lambda: attention(1, [[1, 2]], score="band", gamma="lemma"), "one threshold"),
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
