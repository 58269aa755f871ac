"""Errors and events against jax-privacy: ``pip install lightning-fedleak[jax-privacy]``."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_fedleak.labs.correlated_noise import Factorization, NoisePlan, banded

pytestmark = pytest.mark.slow

pytest.importorskip("jax_privacy", reason="jax-privacy is an extra of its own: [jax-privacy]")
jax = pytest.importorskip("jax")


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64():
        yield


def theirs(own: Factorization):
    from jax_privacy.matrix_factorization.banded import ColumnNormalizedBanded

    steps, bands = own.rows.shape
    params = np.zeros((steps, bands))
    for k in range(bands):
        params[: steps - k, k] = own.rows[k:, k]
    return ColumnNormalizedBanded(params=jax.numpy.asarray(params))


def error_of(factorization: Factorization) -> float:
    from jax_privacy.matrix_factorization.banded import per_query_error

    return float(per_query_error(theirs(factorization)).mean())


@pytest.mark.parametrize(("steps", "bands"), [(24, 3), (64, 4)])
def test_the_error_is_within_two_percent_of_the_best_that_jax_privacy_finds(
    steps: int, bands: int
) -> None:
    from jax_privacy.matrix_factorization.banded import optimize, per_query_error

    best = optimize(steps, bands=bands, max_optimizer_steps=1000)
    error = float(per_query_error(best).mean())
    assert error <= error_of(banded(steps, bands)) <= 1.04 * error


@pytest.mark.parametrize(("steps", "bands"), [(2000, 8)])
def test_a_long_run_has_the_error_of_its_best_toeplitz_matrix(steps: int, bands: int) -> None:
    from jax_privacy.matrix_factorization import banded as dense
    from jax_privacy.matrix_factorization import toeplitz

    column = toeplitz.optimize_banded_toeplitz(n=steps, bands=bands, max_optimizer_steps=500)
    best = dense.ColumnNormalizedBanded.from_banded_toeplitz(steps, column)
    error = float(dense.per_query_error(best).mean())
    assert error_of(banded(steps, bands)) == pytest.approx(error, rel=1e-6)


@pytest.mark.parametrize(("releases", "bands"), [(1, 4), (8, 4), (9, 4), (7, 1)])
def test_rounds_are_the_events_of_jax_privacy(releases: int, bands: int) -> None:
    from jax_privacy.experimental.accounting import amplified_bandmf_event

    event = amplified_bandmf_event(2.0, releases, num_bands=bands, sampling_prob=0.1)
    assert event.count == NoisePlan(bands, releases, bands, 100).rounds
    assert event.event.sampling_probability == 0.1
    assert event.event.event.noise_multiplier == 2.0
