"""The fast mixture fit against scikit-learn's, from the same start."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from sklearn.mixture import GaussianMixture

from lightning_fedleak.attacks.words.flatchat import _Mixture, fit_two_gaussians, tail_start


def normal(n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator, dtype=torch.float64)


def peaked(n: int, seed: int = 0) -> torch.Tensor:
    """Log-normal unused rows and a few wide used ones, as the row sums of a real model."""
    x = normal(n, seed).mul(2).exp() * 1e-6
    used = n // 50
    x[:used] = normal(used, seed + 1) * 2e-3 - 3e-3
    return x / x.norm()


SAMPLES = {
    "two gaussians": torch.cat([normal(5000, 0) * 1e-4, normal(120, 1) * 3e-2 - 0.01]),
    "peaked": peaked(6000),
    "heavy tails": normal(6000, 2) / normal(6000, 3).abs().sqrt(),
    "offset": normal(3000, 4) * torch.where(normal(3000, 5) > 1, 20.0, 1.0) + 1e4,
    "spike": torch.cat([normal(2000, 8) * 1e-7, normal(2000, 9) * 1e-3, normal(80, 10)]),
    "few": torch.cat([normal(50, 6), normal(10, 7) * 30]),
}


def log_likelihood(x: torch.Tensor, mixture: _Mixture) -> float:
    """The mean log density of values, one by one."""
    parts = torch.distributions.Normal(mixture.means, mixture.variances.sqrt())
    each = mixture.weights.log() + parts.log_prob(x.double()[:, None])
    return float(each.logsumexp(1).mean())


def sklearn_fit(x: torch.Tensor, start: _Mixture, reg_covar: float = 0.0) -> GaussianMixture:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GaussianMixture(
            2,
            tol=1e-13,
            max_iter=50_000,
            reg_covar=reg_covar,
            weights_init=start.weights.numpy(),
            means_init=start.means.numpy()[:, None],
            precisions_init=(1 / start.variances).numpy()[:, None, None],
        ).fit(x.numpy()[:, None])


@pytest.mark.parametrize("name", SAMPLES)
def test_reaches_the_optimum_that_scikit_learn_reaches_from_the_same_start(name: str) -> None:
    x = SAMPLES[name]
    fitted = fit_two_gaussians(x, start=0.05)
    other = sklearn_fit(x, tail_start(x.numpy(), 0.05))
    reached = other.score(x.numpy()[:, None])
    assert abs(log_likelihood(x, fitted) - reached) <= 1e-6 * abs(reached)
    order = other.covariances_.ravel().argsort()
    np.testing.assert_allclose(fitted.weights, other.weights_[order], rtol=2e-3)
    np.testing.assert_allclose(fitted.variances, other.covariances_.ravel()[order], rtol=5e-3)
    spread = other.covariances_.ravel()[order] ** 0.5
    assert (abs(fitted.means.numpy() - other.means_.ravel()[order]) <= 3e-3 * spread).all()


def test_scale_order_and_dtype_do_not_matter() -> None:
    x = SAMPLES["peaked"]
    fitted = fit_two_gaussians(x)
    scaled = fit_two_gaussians(x.flip(0) * 1e-9)
    torch.testing.assert_close(scaled.weights, fitted.weights, rtol=1e-6, atol=0)
    torch.testing.assert_close(scaled.variances * 1e18, fitted.variances, rtol=1e-6, atol=0)
    single = fit_two_gaussians(x.float())
    torch.testing.assert_close(single.weights, fitted.weights, rtol=1e-3, atol=0)


def test_values_that_are_mostly_one_number() -> None:
    x = torch.zeros(1000, dtype=torch.float64)
    x[:40] = normal(40, 0)
    fitted = fit_two_gaussians(x)
    assert float(fitted.weights[1]) == pytest.approx(0.04, rel=0.01)
    assert bool((fitted.variances > 0).all())
    assert math.isfinite(log_likelihood(x, fitted))


def test_tail_start_splits_by_distance_from_the_median() -> None:
    start = tail_start(np.array([0.0, 1.0, 2.0, 3.0, 100.0]), 0.2)
    assert start.weights.tolist() == [0.8, 0.2]
    assert start.means.tolist() == [1.5, 100.0]
    assert start.variances.tolist() == [1.25, 98.5**2]
