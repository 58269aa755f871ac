"""The guarantee of DP-SGD, proved by games: exact AUCs, and lower bounds against the accountant.

``benchmarks/defenses/accounting.py --proof`` is the long form.
"""

import numpy as np
import pytest
import scipy.stats
import torch
from scipy import integrate
from torch import Tensor

from benchmarks.defenses import dp_sgd_games
from benchmarks.defenses.planted import PlantedNeuron
from lightning_fedleak.defenses.accounting.accounting import epsilon_of
from lightning_fedleak.evaluation.auditing import audit_scores, gaussian_epsilon
from lightning_fedleak.evaluation.metrics.clustered import auc
from tests.helpers.models import tiny_gpt2

pytest.importorskip("opacus")


def interval(scores: Tensor, members: Tensor, alpha: float = 1e-3) -> tuple[float, float]:
    score, member = scores.double().numpy(), members.numpy()
    code = np.arange(len(score))
    rate = auc(score, member, code, alpha, 100, np.random.default_rng(0))
    return rate.low, rate.high


@pytest.mark.parametrize(("sigma", "rate"), [(1.0, 1.0), (0.7, 0.2)])
def test_the_likelihood_ratio_is_that_of_the_densities(sigma: float, rate: float) -> None:
    x = torch.linspace(-4, 5, 37, dtype=torch.float64)
    out, inside = (scipy.stats.norm(mean, sigma).pdf(x.numpy()) for mean in (0, 1))
    exact = np.log(((1 - rate) * out + rate * inside) / out)
    ratios = dp_sgd_games.log_likelihood_ratios(x, sigma, rate)
    np.testing.assert_allclose(ratios.numpy(), exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("sigma", "rate"), [(1.0, 1.0), (0.7, 0.2), (3.0, 0.05)])
def test_the_auc_is_that_of_the_densities(sigma: float, rate: float) -> None:
    norm = scipy.stats.norm

    def integrand(x: float) -> float:
        tail = (1 - rate) * norm.sf(x, 0, sigma) + rate * norm.sf(x, 1, sigma)
        return float(norm.pdf(x, 0, sigma) * tail)

    area, _ = integrate.quad(integrand, -12 * sigma, 12 * sigma)
    assert dp_sgd_games.sampled_gaussian_auc(sigma, rate) == pytest.approx(area, abs=1e-7)


# ---- DPSGD itself, with a neuron in the model ----------------------------------------


def planted(sigma: float, sample_rate: float = 1.0) -> PlantedNeuron:
    from lightning_fedleak.defenses import DPSGD, ClipSettings

    ids = torch.randint(3, 97, (4, 6), generator=torch.Generator().manual_seed(0))

    def defense() -> DPSGD:
        return DPSGD(
            1e-3,
            noise_multiplier=sigma,
            target_delta=1e-5,
            accountant="rdp",
            clip=ClipSettings(loss="trusted"),
        )

    # Seeded: with fresh noise these games would fail by chance, each in one of some thousand runs.
    model = tiny_gpt2(dropout=0.0).train()
    return PlantedNeuron(model, ids, defense, sample_rate=sample_rate, seed=1)


@pytest.mark.parametrize("sigma", [0.5, pytest.param(2.0, marks=pytest.mark.slow)])
def test_a_planted_neuron_under_dpsgd_is_the_gaussian_mechanism(sigma: float) -> None:
    neuron = planted(sigma)
    assert abs(neuron.gradient) > 100 * 1e-3
    games = dp_sgd_games.play_add_remove(neuron.release, 150)
    residues = (games.scores - games.members.double()) / sigma
    assert scipy.stats.kstest(residues.numpy(), "norm").pvalue > 1e-4
    chi2 = float(residues.square().sum())
    assert 1e-4 < scipy.stats.chi2.cdf(chi2, 150) < 1 - 1e-4
    low, high = interval(games.scores, games.members, 0.05)
    assert low <= dp_sgd_games.sampled_gaussian_auc(sigma) <= high
    assert sum(d.accountant.steps for d in neuron.defenses) == 150
    members, non_members = residues[games.members], residues[~games.members]
    n = min(len(members), len(non_members))
    assert scipy.stats.pearsonr(members[:n].numpy(), non_members[:n].numpy()).pvalue > 1e-4
    bound = audit_scores(games.scores, games.members, delta=1e-5, claim="gaussian")
    one = neuron.defenses[0].accountant.history[0][:2]
    assert (
        bound.epsilon
        <= gaussian_epsilon(sigma=sigma, delta=1e-5)
        <= epsilon_of([(*one, 1)], 1e-5, "prv")
    )


def test_under_poisson_sampling_it_is_the_mixture() -> None:
    neuron = planted(0.1, sample_rate=0.5)
    games = dp_sgd_games.play_add_remove(neuron.release, 200)
    inside = games.scores[games.members] > 0.5
    assert scipy.stats.binomtest(int(inside.sum()), len(inside), 0.5).pvalue > 1e-4
    assert float(games.scores[~games.members].abs().max()) < 0.6
    low, high = interval(games.scores, games.members, 0.05)
    assert low <= dp_sgd_games.sampled_gaussian_auc(0.1, 0.5) <= high
