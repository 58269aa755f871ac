"""Mechanisms of local DP against enumeration, quadrature and multi-freq-ldpy's clients."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.defenses.token_ldp import decoded_epsilon
from benchmarks.papers.reference import CLIENTS, reference_sample, seeded
from lightning_fedleak.defenses.token_ldp.mechanisms import (
    Randomizer,
    argmax_keep,
    bit_rates,
    grr_keep,
    the_rates,
    the_threshold,
    uniform_keep,
)
from tests.helpers.ldp import transition_of

RULES = [
    ("grr", "uniform"),
    ("rappor", "uniform"),
    ("rappor", "first"),
    ("the", "argmax"),
    ("the", "uniform"),
    ("the", "first"),
    ("dbitflip", "uniform"),
    ("dbitflip", "first"),
]
ALIKE = 1e-4
"""A true distribution is rejected once in 10,000 runs; all draws are seeded."""


def by_enumeration(randomizer: Randomizer, p: float, q: float) -> Tensor:
    """The distribution of the decoded value from all reported vectors, subset by subset."""
    b, d = randomizer.k, randomizer.bits
    distribution = torch.zeros(b, b, dtype=torch.float64)
    subsets = list(itertools.combinations(range(b), d))
    for x, subset in itertools.product(range(b), subsets):
        for bits in itertools.product([0, 1], repeat=d):
            probability = 1.0 / len(subsets)
            for place, bit in zip(subset, bits, strict=True):
                rate = p if place == x else q
                probability *= rate if bit else 1 - rate
            result = [place for place, bit in zip(subset, bits, strict=True) if bit]
            if randomizer.decode == "first":
                distribution[x, min(result, default=0)] += probability
            else:
                for place in result or range(b):
                    distribution[x, place] += probability / len(result or range(b))
    return distribution


def draws(randomizer: Randomizer, x: int, epsilon: float, n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand((n, 2), generator=generator, dtype=torch.float64)
    return randomizer.sample(torch.full((n,), x), epsilon, uniforms)


def chi_square(drawn: Tensor, distribution: Tensor) -> float:
    """p-value of the draws under the distribution; rare outcomes are pooled."""
    n = len(drawn)
    observed = torch.bincount(drawn, minlength=len(distribution)).double()
    assert len(observed) == len(distribution)
    assert not bool((observed[distribution == 0] > 0).any())
    common = distribution * n >= 5
    observed = torch.cat([observed[common], observed[~common].sum()[None]])
    expected = torch.cat([distribution[common], distribution[~common].sum()[None]]) * n
    selected = expected > 1e-9
    distance = ((observed[selected] - expected[selected]) ** 2 / expected[selected]).sum()
    return float(scipy.stats.chi2.sf(distance, len(expected[selected]) - 1))


@st.composite
def randomizers(draw: st.DrawFn, largest: int, rules: list[tuple[str, str]] = RULES) -> Randomizer:
    """Return one of a rule for at most so many words; dBitFlipPM may sample its bits."""
    (mechanism, decode), k = draw(st.sampled_from(rules)), draw(st.integers(2, largest))
    if mechanism == "dbitflip" and draw(st.booleans()):
        return Randomizer.with_defaults(mechanism, k, None, draw(st.integers(1, k)))
    return Randomizer.with_defaults(mechanism, k, decode)


@given(
    randomizers(6, [r for r in RULES if r[0] != "grr" and r[1] != "argmax"]), st.floats(0.05, 12)
)
@settings(max_examples=40)
def test_the_law_is_that_of_the_decoded_vector(randomizer: Randomizer, epsilon: float) -> None:
    rates = the_rates(epsilon) if randomizer.mechanism == "the" else bit_rates(epsilon)
    expected = by_enumeration(randomizer, *rates)
    torch.testing.assert_close(transition_of(randomizer, epsilon), expected, rtol=1e-10, atol=1e-13)


@given(randomizers(40), st.floats(0.01, 20))
@settings(max_examples=200)
def test_epsilon_holds_exactly(randomizer: Randomizer, epsilon: float) -> None:
    k = randomizer.k
    distribution = transition_of(randomizer, epsilon)
    torch.testing.assert_close(
        distribution.sum(1), torch.ones(k, dtype=torch.float64), rtol=1e-12, atol=0
    )
    assert float(distribution.min()) > 0
    worst = float((distribution.amax(0) / distribution.amin(0)).max().log())
    assert worst <= epsilon * (1 + 1e-6) + 1e-9
    assert decoded_epsilon(randomizer, epsilon) == pytest.approx(worst, rel=1e-5, abs=1e-7)
    if randomizer.mechanism == "grr":
        assert worst == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize("k", [2, 3, 17, 1000, 50257])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0, 7.5, 10.0, 30.0])
def test_the_largest_of_noised_numbers(k: int, epsilon: float) -> None:
    scale = 2 / epsilon

    def density(t: float) -> float:
        """Return Laplace's density at t - 1, times its chance to be below t to the k - 1."""
        below = math.log(0.5) + t / scale if t < 0 else math.log1p(-0.5 * math.exp(-t / scale))
        return math.exp((k - 1) * below - abs(t - 1) / scale) / (2 * scale)

    breaks = [-np.inf, 0.0, 0.5, 1.0, *(1 + 2 / epsilon * np.arange(1, 40)), np.inf]
    parts = [
        scipy.integrate.quad(density, a, b, epsabs=1e-14, epsrel=1e-11, limit=200)[0]
        for a, b in itertools.pairwise(breaks)
    ]
    assert argmax_keep(k, epsilon) == pytest.approx(sum(parts), rel=1e-8)


def test_closed_forms() -> None:
    assert grr_keep(50257, 10.0) == pytest.approx(math.exp(10) / (math.exp(10) + 50256), rel=1e-12)
    assert grr_keep(50257, 2000.0) == 1.0
    p, q = bit_rates(3.0)
    assert (p / q) ** 2 == pytest.approx(math.exp(3.0), rel=1e-12)
    assert p + q == 1.0
    binomial = scipy.stats.binom(999, q)
    n = np.arange(1000)
    expected = p * float((binomial.pmf(n) / (1 + n)).sum()) + (1 - p) * binomial.pmf(0) / 1000
    assert uniform_keep(1000, p, q) == pytest.approx(expected, rel=1e-10)
    assert uniform_keep(10, 1.0, 0.0) == 1.0
    assert math.isfinite(uniform_keep(50257, *bit_rates(1e-9)))
    assert uniform_keep(50257, *bit_rates(1e-9)) == pytest.approx(1 / 50257, rel=1e-6)
    assert argmax_keep(50257, 1e-9) == pytest.approx(1 / 50257, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 5.0, 10.0, 40.0])
def test_the_threshold_is_that_of_the_aggregator(epsilon: float) -> None:
    from multi_freq_ldpy.pure_frequency_oracles.HE import find_tresh

    result = scipy.optimize.minimize_scalar(
        find_tresh.py_func,
        bounds=[0.5, 1],
        method="bounded",
        args=(epsilon,),
        options={"xatol": 1e-9},
    )
    assert the_threshold(epsilon) == pytest.approx(result.x, abs=1e-5)
    theta = the_threshold(epsilon)
    laplace = scipy.stats.laplace(scale=2 / epsilon)
    expected = (laplace.sf(theta - 1), laplace.sf(theta))
    assert the_rates(epsilon) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("mechanism", "decode", "k", "x", "bits"),
    [
        *((*rule, k, x, None) for rule in RULES for k, x in ((2, 1), (7, 0), (7, 4), (300, 120))),
        *(("dbitflip", None, k, x, d) for k, d, x in ((11, 4, 5), (11, 2, 0), (6, 1, 5))),
    ],
)
def test_draws_follow_the_law(
    mechanism: str, decode: str | None, k: int, x: int, bits: int | None
) -> None:
    randomizer = Randomizer.with_defaults(mechanism, k, decode, bits)
    for epsilon in (0.7, 5.0):
        drawn = draws(randomizer, x, epsilon, 60_000, seed=k + x)
        assert chi_square(drawn, transition_of(randomizer, epsilon)[x]) > ALIKE


@pytest.mark.parametrize(("mechanism", "decode"), RULES)
def test_each_draw_has_its_own_epsilon(mechanism: str, decode: str) -> None:
    randomizer = Randomizer.with_defaults(mechanism, 9, decode)
    epsilon = torch.tensor([0.5, 8.0], dtype=torch.float64).repeat(40_000)
    index = torch.tensor([3, 6]).repeat(40_000)
    generator = torch.Generator().manual_seed(4)
    uniforms = torch.rand((80_000, 2), generator=generator, dtype=torch.float64)
    drawn = randomizer.sample(index, epsilon, uniforms)
    assert chi_square(drawn[::2], transition_of(randomizer, 0.5)[3]) > ALIKE
    assert chi_square(drawn[1::2], transition_of(randomizer, 8.0)[6]) > ALIKE
    assert randomizer.sample(index[:0], epsilon[:0], uniforms[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("mechanism", "decode", "bits"), [*((*rule, None) for rule in RULES), ("dbitflip", None, 2)]
)
def test_the_reference_path_has_the_same_law(
    mechanism: str, decode: str | None, bits: int | None
) -> None:
    for k, x, epsilon in ((5, 1, 1.0), (20, 19, 5.0)):
        randomizer = Randomizer.with_defaults(mechanism, k, decode, bits)
        drawn = reference_sample(randomizer, torch.full((6_000,), x), epsilon, seed=11 * k + x)
        assert chi_square(drawn, transition_of(randomizer, epsilon)[x]) > ALIKE
        ours = draws(randomizer, x, epsilon, 6_000)
        table = torch.stack([torch.bincount(d, minlength=k) for d in (drawn, ours)])
        table = table[:, table.sum(0) >= 10]
        assert scipy.stats.chi2_contingency(table.numpy()).pvalue > ALIKE


def test_longitudinal_rappor_reports_once_with_the_same_law() -> None:
    """``L_SUE_Client(2 eps, eps)``, what the published code of Vu et al. calls."""
    longitudinal, epsilon = CLIENTS["longitudinal"], 2.0
    randomizer = Randomizer.with_defaults("rappor", 8, "first")
    with seeded(0):
        drawn = [int(longitudinal(5, 8, 2 * epsilon, epsilon).argmax()) for _ in range(10_000)]
    assert chi_square(torch.tensor(drawn), transition_of(randomizer, epsilon)[5]) > ALIKE
