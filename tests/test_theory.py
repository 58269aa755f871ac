from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from benchmarks.papers import lemma
from benchmarks.papers.synthetic import box_probability, projection_probability, simulate_bound

probability = st.floats(0, 1)
length = st.integers(2, 64)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(0))
    return e / e.sum(0)


def separation_by_loops(tokens: list[np.ndarray]) -> float:
    return min(
        float(x @ x - x @ y) for i, x in enumerate(tokens) for j, y in enumerate(tokens) if i != j
    )


def draw(law: str, rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    if law == "one_hot":
        return np.eye(d)[rng.permutation(d)[:n]]
    x = rng.standard_normal((n, d))
    return x if law == "gaussian" else x / np.linalg.norm(x, axis=1, keepdims=True)


# The formulas


def test_eq_4_by_hand() -> None:
    expected = 2 / (10 * 5) + math.log(2 * 4 * 5 * 10 * 3**2) / 10
    assert lemma.condition(10, 5, 3) == pytest.approx(expected, rel=1e-14)
    assert lemma.retrieval_error(10, 5, 0.8, 3) == pytest.approx(
        2 * 3 * 4 * math.exp(2 / 5 - 8), rel=1e-14
    )
    assert lemma.retrieval_error(1, 5, -1e6, 1) == math.inf
    assert lemma.projection_radius(10, 5, 3) == pytest.approx(1 / 150)


@pytest.mark.parametrize("law", ["one_hot", "spherical", "gaussian"])
def test_delta_bar_bounds_the_retrieval_error(law: str) -> None:
    """Lemma 3: any xi within the radius of x_i is mapped to x_i up to Delta-bar."""
    rng = np.random.default_rng(0)
    tested = 0
    for _ in range(200):
        l_x, d = int(rng.integers(2, 8)), 60
        x = draw(law, rng, l_x, d)
        delta, norm = separation_by_loops(list(x)), float(np.linalg.norm(x, axis=1).max())
        if delta <= 0:
            continue
        beta = lemma.smallest_beta(delta, l_x, norm) * float(rng.uniform(1, 1.5))
        shift = rng.standard_normal((l_x, d)) if rng.random() < 0.3 else -x
        shift *= float(lemma.projection_radius(beta, l_x, norm)) / np.linalg.norm(
            shift, axis=1, keepdims=True
        )
        found = softmax(beta * x @ (x + shift).T).T @ x
        errors = np.linalg.norm(found - x, axis=1)
        assert errors.max() <= lemma.retrieval_error(beta, l_x, delta, norm) * (1 + 1e-9)
        tested += 1
    assert tested > 100


@given(
    share=st.floats(1e-12, 1), l_x=length, norm=st.floats(1e-3, 1e3), factor=st.floats(1.001, 1e3)
)
def test_smallest_beta_is_where_condition_4_begins_to_hold(share, l_x, norm, factor) -> None:
    delta = share * 2 * norm**2
    beta = lemma.smallest_beta(delta, l_x, norm)
    assert lemma.condition(beta * 1.0000001, l_x, norm) <= delta
    assert lemma.condition(beta * factor, l_x, norm) <= delta
    assert lemma.condition(beta * 0.9999, l_x, norm) > delta


# The closed parts


@pytest.mark.parametrize("d", [2, 3, 4, 10, 301])
@pytest.mark.parametrize("r", [0.0, 0.01, 0.2, 0.9, 1.0, 1.7])
def test_spherical_projections_against_the_integral_of_their_density(d: int, r: float) -> None:
    # The component has density proportional to (1 - t^2)^((d - 3)/2); with t = sin(a), cos^(d - 2).
    total, _ = integrate.quad(lambda a: math.cos(a) ** (d - 2), -math.pi / 2, math.pi / 2)
    edge = math.asin(min(r, 1.0))
    part, _ = integrate.quad(lambda a: math.cos(a) ** (d - 2), -edge, edge)
    found = projection_probability("spherical", d, r)
    assert found == pytest.approx(part / total, abs=1e-9)
    assert found == pytest.approx(stats.beta.cdf(min(r, 1) ** 2, 0.5, (d - 1) / 2), abs=1e-14)
    assert lemma.direction_probability(d, r * 7, 7.0) == pytest.approx(found, abs=1e-14)


def test_gaussian_parts_against_scipy() -> None:
    for r in (0.0, 1e-9, 0.3, 2.0, 40.0):
        one = stats.norm.cdf(r) - stats.norm.cdf(-r)
        assert projection_probability("gaussian", 7, r) == pytest.approx(one, rel=1e-6)
        assert box_probability("gaussian", 7, r).value == pytest.approx(one**7, rel=1e-6)
    # Without the absolute value of the components it would be the one-sided probability.
    assert box_probability("gaussian", 7, 0.3).value < stats.norm.cdf(0.3) ** 7


@pytest.mark.parametrize("half_width", [0.72, 0.8, 0.95])
def test_spherical_box_against_geometry(half_width: float) -> None:
    c = half_width
    arc = (math.asin(c) - math.acos(c)) / (math.pi / 2)
    caps = 1 - 3 * (1 - c)  # Archimedes: six caps that do not meet
    for d, exact in ((2, arc), (3, caps)):
        rate = box_probability("spherical", d, c, draws=100_000, seed=3)
        assert abs(rate.value - exact) < 4 * math.sqrt(exact * (1 - exact) / 100_000)
        assert rate.low < rate.value < rate.high < rate.low + 0.01


# Simulated data


@pytest.mark.parametrize(("law", "beta"), [("spherical", 6.0), ("gaussian", 1.0)])
def test_simulated_bound_against_brute_force(law: str, beta: float) -> None:
    """Every part from drawn vectors alone, at a d where P_box is neither 0 nor 1."""
    d, l_x = 12, 4
    found = simulate_bound(law, d, l_x, beta, runs=400, seed=0)
    rng = np.random.default_rng(9)
    pool = draw(law, rng, 4000, d)
    component = np.abs((pool[:2000] * pool[2000:]).sum(1)) / np.linalg.norm(pool[2000:], axis=1)
    largest = np.abs(pool).max(1)
    bounds, boxes = [], []
    for _ in range(400):
        x = draw(law, rng, l_x, d)
        delta, norm = separation_by_loops(list(x)), np.linalg.norm(x, axis=1).max()
        delta_bar = 2 * norm * (l_x - 1) * math.exp(2 / l_x - beta * delta)
        p = (component <= 1 / (beta * l_x * norm)).mean()
        boxes.append((largest <= 3 * delta_bar).mean())
        bounds.append(p + p ** (2 * l_x) - boxes[-1] - 1)
    assert 0.05 < np.mean(boxes) < 0.95
    for ours, values in ((found.bound, bounds), (found.p_box, boxes)):
        error = math.hypot(ours.standard_error, float(np.std(values)) / 20)
        assert abs(ours.value - np.mean(values)) < 4 * error + 0.01
        assert ours.low < ours.value < ours.high


def test_one_hot_is_1_as_the_paper_says_but_its_second_head_is_not() -> None:
    found = simulate_bound("one_hot", 1000, 10, 10.0)
    assert (found.bound.value, found.bound.low, found.bound.high) == (1.0, 1.0, 1.0)
    assert found.condition_ratio.value == pytest.approx(1 / float(lemma.condition(10, 10, 1.0)))
    assert found.condition_holds.value == 1.0
    q = stats.beta.cdf(0.01**2, 0.5, 999 / 2)
    assert found.random_direction.value == pytest.approx(q + q**10 - 1)
    assert found.random_direction.value < 0
    assert simulate_bound("one_hot", 10**7, 10, 10.0).random_direction.value > 0.999
