"""FLATCHAT against Algorithm 1 by scikit-learn; its mixture fit against the one there."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.mixture import GaussianMixture
from torch import distributed as dist

from lightning_fedleak.attacks import FlatChat, PublicText, UnusableObservation, gradient_of
from lightning_fedleak.attacks.words.flatchat import (
    _Mixture,
    fit_two_gaussians,
    fit_type_counts,
    flatchat,
    flatten,
    separate_clusters,
    tail_start,
)
from lightning_fedleak.model.anatomy import HEAD_WEIGHT, find_anatomy
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage
from tests.helpers.models import tiny_gpt2, tiny_llama

SHAPES = ((1, 8), (2, 8), (4, 16), (8, 16))


def randn(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def gradient(vocab: int = 3000, d: int = 24, used: int = 60, seed: int = 0) -> torch.Tensor:
    """A gradient whose first ``used`` rows are wide and whose others are narrow."""
    rows = randn(vocab, d, seed=seed) * 1e-5
    rows[:used] = randn(used, d, seed=seed + 1) * 1e-2 - 2e-2
    return rows


def observation(tensor: torch.Tensor) -> Observation:
    return Observation((GradientSnapshot(0, Stage.SHARED, {HEAD_WEIGHT: tensor}),))


def algorithm_1(grad: torch.Tensor, k: int, scorer: str) -> set[int]:
    """The paper's Algorithm 1 with scikit-learn's mixture at its default regularisation."""
    s = grad.double().numpy().sum(axis=1)
    s = s / np.linalg.norm(s)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = GaussianMixture(2, tol=1e-12, max_iter=10_000, random_state=0).fit(s[:, None])
    p = int(fit.covariances_.ravel().argmax())
    mean, sd = fit.means_.ravel(), fit.covariances_.ravel() ** 0.5
    rank = ((s - mean[1 - p]) / sd[1 - p]) ** 2 - ((s - mean[p]) / sd[p]) ** 2
    return set((rank if scorer == "gmm" else abs(s)).argsort()[::-1][:k].tolist())


@pytest.mark.parametrize("scorer", ["gmm", "abs"])
@pytest.mark.parametrize("k", [30, 60, 100])
def test_names_the_types_of_algorithm_1(scorer: str, k: int) -> None:
    guess = flatchat(gradient(), k, scorer)
    assert set(guess.types.tolist()) == algorithm_1(gradient(), k, scorer)
    assert guess.n_types == k
    assert guess.surface == "output"


def test_finds_the_used_types_and_their_share() -> None:
    guess = flatchat(gradient(), torch.tensor([0.0, 3000.0]))
    assert len(guess.types) == pytest.approx(60, abs=6)
    assert len(set(guess.types.tolist()) & set(range(60))) >= 52
    assert guess.scores is not None
    ordered = guess.scores[guess.types]
    assert bool((ordered[:-1] >= ordered[1:]).all())
    assert float(ordered.min()) >= float(guess.scores.topk(len(guess.types)).values.min())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_row_sums_are_accumulated_widely(dtype: torch.dtype) -> None:
    rows = randn(70, 3000, seed=4).to(dtype)
    sums = flatten(rows)
    assert sums.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(sums.double(), rows.double().sum(1), rtol=1e-5, atol=1e-4)


def test_a_sharded_gradient_is_gathered_after_the_sum() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for dtype in (torch.float32, torch.bfloat16):
            rows = gradient(200).to(dtype)
            for placement in (Shard(0), Shard(1), Replicate()):
                torch.testing.assert_close(
                    flatten(distribute_tensor(rows, mesh, [placement])), flatten(rows)
                )
    finally:
        dist.destroy_process_group()


def test_sums_that_are_equal_are_unknown() -> None:
    with pytest.raises(UnusableObservation, match="are equal"):
        flatchat(torch.ones(50, 4), 5)


def test_the_regression_is_least_squares() -> None:
    x = (randn(20, seed=7).abs() * 0.1).tolist()
    y = [30 + 900 * w + 5000 * w * w + e for w, e in zip(x, randn(20, seed=8), strict=True)]
    constant, slope = fit_type_counts(x, [float(v) for v in y]).tolist()
    other = LinearRegression().fit(np.array(x)[:, None], np.array([float(v) for v in y]))
    for weight in (0.01, 0.2):
        expected = other.predict([[weight]])[0]
        assert constant + slope * weight == pytest.approx(expected, rel=1e-6)


def test_the_regression_needs_distinct_weights() -> None:
    with pytest.raises(ValueError, match="one positive weight"):
        fit_type_counts([0.1, 0.1], [3, 4])


def public_text(vocab: int) -> PublicText:
    generator = torch.Generator().manual_seed(9)
    return PublicText(torch.randint(3, vocab, (30, 20), generator=generator))


@pytest.mark.parametrize("tied", [True, False])
def test_prepare_fits_the_regression_on_public_gradients(tied: bool) -> None:
    anatomy = find_anatomy(tiny_llama(tied=tied, vocab=400))
    attack = FlatChat(public_text(400), shapes=SHAPES * 2, seed=5)
    rng = torch.get_rng_state()
    attack.prepare(anatomy)
    assert torch.equal(rng, torch.get_rng_state())
    assert all(p.grad is None for p in anatomy.model.parameters())

    generator = torch.Generator().manual_seed(5)
    weights, counts = [], []
    for size, length in SHAPES * 2:
        batch = public_text(400).batch(size, length, generator)
        s = gradient_of(anatomy, batch, [HEAD_WEIGHT])[HEAD_WEIGHT].double().sum(1)
        mixture = separate_clusters(s / s.norm())
        weights.append([float(mixture.weights[1])])
        counts.append(len({int(t) for row in batch.labels[:, 1:] for t in row}))
    by_hand = LinearRegression().fit(weights, counts)
    assert attack.regressor is not None
    np.testing.assert_allclose(attack.regressor, [by_hand.intercept_, by_hand.coef_[0]], rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_that_sum_to_zero_are_unknown_not_a_guess(dtype: torch.dtype) -> None:
    """GPT-2's last LayerNorm starts with gain one and no bias: its output sums to zero."""
    model = tiny_gpt2(vocab=400).to(dtype)
    model.transformer.ln_f.weight.data.fill_(1)
    anatomy = find_anatomy(model)
    batch = public_text(400).batch(8, 16, torch.Generator())
    rows = gradient_of(anatomy, batch, [HEAD_WEIGHT])[HEAD_WEIGHT]
    with pytest.raises(UnusableObservation, match="hidden states sum to zero"):
        flatchat(rows, 10)
    attack = FlatChat(public_text(400), shapes=SHAPES)
    attack.prepare(anatomy)
    with pytest.raises(UnusableObservation, match="could not be fitted"):
        attack.run(observation(gradient(400)))

    model.transformer.ln_f.weight.data.mul_(torch.linspace(0.5, 1.5, 16))
    attack.refresh(anatomy, step=10)
    assert attack.regressor is not None
    moved = gradient_of(anatomy, batch, [HEAD_WEIGHT])[HEAD_WEIGHT]
    assert len(flatchat(moved, 10).types) == 10


def test_the_state_carries_the_regression() -> None:
    anatomy = find_anatomy(tiny_llama(vocab=300))
    first = FlatChat(public_text(300), shapes=SHAPES)
    first.prepare(anatomy)
    second = FlatChat(name="again")
    with pytest.raises(UnusableObservation, match="call prepare"):
        second.run(observation(gradient(300)))
    second.load_state_dict(first.state_dict())
    one, two = (a.run(observation(gradient(300))) for a in (first, second))
    assert torch.equal(one.types, two.types)
    assert one.n_types == two.n_types is not None


def test_another_word_for_the_number_of_types_is_refused() -> None:
    with pytest.raises(ValueError, match="'predicted'"):
        FlatChat(n_types="oracle")


def test_a_prediction_without_public_text_is_refused_at_setup() -> None:
    with pytest.raises(ValueError, match="public_text="):
        FlatChat().prepare(find_anatomy(tiny_gpt2()))


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
