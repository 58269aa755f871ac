"""Whitening against numpy's covariance, by itself and folded into weights."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fedleak.attacks.row_space.atoms import fit_whitening


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def states(n, d, seed=0):
    """Hidden states with a mean of their own and variances over four orders of magnitude."""
    g = generator(seed)
    mix = torch.randn(d, d, generator=g, dtype=torch.float64)
    scales = torch.logspace(-1, 1, d, dtype=torch.float64)
    x = torch.randn(n, d, generator=g, dtype=torch.float64) * scales
    return x @ mix + 5 * torch.randn(d, generator=g, dtype=torch.float64)


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


@pytest.mark.parametrize(
    ("hidden", "ridge", "words"),
    [
        (states(8, 8), 0.1, "8 tokens of public text cannot whiten 8 dimensions"),
        (torch.ones(50, 4), 0.1, "cannot whiten 4 dimensions"),
        (torch.cat([torch.randn(50, 1), torch.zeros(50, 3)], 1), 0.1, "at least 8"),
    ],
)
def test_refusals_say_what_to_do(hidden, ridge, words):
    with pytest.raises(ValueError, match=words):
        fit_whitening(hidden, ridge)
