"""Whitening against numpy's covariance, by itself and folded into weights."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fedleak.attacks.row_space.whitening import Whitening, fit_whitening


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def states(n, d, seed=0):
    """Hidden states with a mean of their own and variances over four orders of magnitude."""
    g = generator(seed)
    mix = torch.randn(d, d, generator=g, dtype=torch.float64)
    scales = torch.logspace(-1, 1, d, dtype=torch.float64)
    x = torch.randn(n, d, generator=g, dtype=torch.float64) * scales
    return x @ mix + 5 * torch.randn(d, generator=g, dtype=torch.float64)


def test_without_a_ridge_the_covariance_is_the_identity():
    x = states(500, 8)
    white = fit_whitening(x, ridge=0.0)(x).numpy()
    np.testing.assert_allclose(np.cov(white.T), np.eye(8), atol=1e-3)
    np.testing.assert_allclose(white.mean(0), 0, atol=1e-3)


@given(st.integers(2, 12), st.floats(0.0, 2.0), st.integers(0, 999))
def test_the_matrix_is_the_inverse_root_of_the_covariance_plus_ridge(d, ridge, seed):
    x = states(20 * d, d, seed)
    values, vectors = np.linalg.eigh(np.cov(x.numpy().T))
    median = np.sort(values)[(d - 1) // 2]
    wanted = (vectors / np.sqrt(values + ridge * median)) @ vectors.T
    matrix = fit_whitening(x, ridge).matrix.numpy()
    np.testing.assert_allclose(matrix, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


def test_a_massive_direction_does_not_drown_the_others():
    """One variance a billion times the others, as of the first token in some causal models."""
    g = generator(3)
    x = torch.randn(400, 6, generator=g, dtype=torch.float64)
    x[:, 0] *= 3e4
    variances = fit_whitening(x)(x).var(0)
    assert bool(((variances > 0.8) & (variances < 1.01)).all())


def test_a_direction_without_variance_stays_small():
    """As behind a LayerNorm, whose outputs lie in a hyperplane."""
    x = torch.randn(300, 5, generator=generator(4), dtype=torch.float64)
    x[:, 4] = 1.0
    whitening = fit_whitening(x)
    other = x.clone()
    other[:, 4] += 1e-4
    assert float((whitening(other) - whitening(x)).abs().max()) < 1e-3
    assert bool(fit_whitening(x, ridge=0.0).matrix.isfinite().all())


def test_tensors_come_back():
    one = fit_whitening(states(50, 4))
    two = Whitening.from_tensors({k: v.clone() for k, v in one.tensors().items()})
    assert torch.equal(one.matrix, two.matrix)
    assert torch.equal(one.mean, two.mean)


@pytest.mark.parametrize(
    ("hidden", "ridge", "words"),
    [
        (states(8, 8), 0.1, "8 tokens of public text cannot whiten 8 dimensions"),
        (torch.ones(50, 4), 0.1, "fewer than half of the 4 dimensions"),
        (torch.cat([torch.randn(50, 1), torch.zeros(50, 3)], 1), 0.1, "more varied text"),
    ],
)
def test_refusals_say_what_to_do(hidden, ridge, words):
    with pytest.raises(ValueError, match=words):
        fit_whitening(hidden, ridge)
