"""The published attention adversary of the papers' tables, against Algorithm 1 and autograd."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.lemma import retrieval_error, separation
from benchmarks.papers.published_attention import (
    PublishedAttention,
    coordinates,
    identity,
    lemma_gamma,
)
from lightning_fedleak.attacks.base import Query
from lightning_fedleak.attacks.membership.attention_calibration import Calibration, PublicStates
from lightning_fedleak.attacks.membership.attention_layers import attentions
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from tests.attacks.membership.test_attention_membership import normal
from tests.attacks.membership.test_fc_membership import by_autograd, generator
from tests.helpers import models


def built(d, gamma=0.25, **settings):
    """Return an attack that decides at ``gamma``, as if it had been calibrated to it."""
    attack = PublishedAttention(1, [[1, 2]], gamma="lemma", **settings)
    attack.set_width(d)
    attack.gammas, attack._calibration = torch.tensor([gamma]), Calibration(identity(d), 0)
    return attack


@given(st.integers(1, 8), st.integers(1, 6), st.floats(0.0, 3.0), st.integers(0, 99))
def test_tokens_that_are_excluded_exceed_no_gamma(length, d, gamma, seed):
    x = normal(1, length, d, seed=seed)
    (attention,) = attentions(x, None, normal(3, d, seed=seed + 1), 2.0)
    target, token, z = coordinates(attention)
    some, their_tokens, their_z = coordinates(attention, gamma)
    assert len(target) == 3 * length
    dense = torch.zeros(3, length, d, dtype=torch.float64)
    dense[target, token] = z
    torch.testing.assert_close(their_z, dense[some, their_tokens])
    dense[some, their_tokens] = 0.0
    assert bool((dense.abs() <= gamma).all())


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
def test_layers_compute_what_algorithm_1_does_and_the_closed_form_their_gradient(
    b, length, d, seed
):
    x, beta = normal(b, length, d, seed=seed), 0.9
    attack = built(d, beta=beta)
    targets = attack.embed(x, Query(torch.zeros(b, length)))
    queries, keys, output = algorithm_one(targets[0], beta, generator(seed))
    heads = [((x @ q.T) @ (x @ k.T).mT).softmax(-1) @ x for q, k in zip(queries, keys, strict=True)]
    exact = (torch.cat(heads, -1) @ output.T - 0.25).relu()
    layers = attack.craft(targets[0])
    torch.testing.assert_close(layers(x), exact, rtol=1e-7, atol=1e-9)
    assert [n for n, p in layers.named_parameters() if p.requires_grad] == ["bias"]
    upstream = normal(b, length, seed=seed + 1)
    gradient = attack.gradient(targets, x, None, upstream)
    by_backward = by_autograd(attack, targets, x, None, upstream)
    torch.testing.assert_close(gradient, by_backward, rtol=1e-10, atol=1e-14)


def test_the_authors_beta_is_2_over_the_root_of_d_minus_1():
    v = normal(10)
    layers = built(10).craft(v)
    product = layers.w_k[0].T @ layers.w_q[0] / 10**0.5
    exact = (torch.eye(10).double() - torch.outer(v, v) / (v @ v)) * 2 / 3
    torch.testing.assert_close(product, exact)


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
    attack = built(4, gamma=math.inf, beta=1.0)
    targets = attack.embed(hidden, Query(torch.zeros(2, 3)))
    assert not attack.gradient(targets, hidden, None, normal(2, 3)).any()
    assert not by_autograd(attack, targets, hidden, None, normal(2, 3)).any()


@pytest.mark.parametrize("gamma", ["calibrated", "lemma"])
def test_prepare_chooses_gammas_and_noise_alone_is_a_member_at_the_stated_rate(gamma):
    public = PublicText(torch.randint(5, models.VOCAB, (60, 8), generator=generator(6)))
    anatomy = find_anatomy(models.tiny_gpt2())
    attack = PublishedAttention(1, public, gamma=gamma, batch=20, false_positive_rate=0.05)
    attack.prepare(anatomy)
    assert len(attack.gammas) == (16 if gamma == "calibrated" else 1)
    assert torch.equal(attack.gammas, attack.gammas.sort(descending=True).values)
    texts = torch.randint(5, models.VOCAB, (6, 8), generator=generator(7))
    hidden = hidden_states(anatomy, 1, texts)
    targets = attack.embed(hidden[:3], Query(texts[:3]))
    gradient = attack.gradient(targets, hidden, None, torch.ones(6, 8))
    assert gradient.shape == (6, 3, attack.rungs)
    assert attack.guess(gradient.sum(0)).members.shape == (3,)
    noise = 0.2 * torch.randn(20_000, attack.rungs, generator=generator(1))
    assert float(attack.guess(noise, 0.2).members.float().mean()) == pytest.approx(0.05, abs=0.008)
