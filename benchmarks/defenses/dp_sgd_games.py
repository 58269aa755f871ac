"""What a step of DP-SGD must leak, exactly, and a count of how often a claim was refuted.

The sharpest test of an implementation of DP-SGD is a game that its own mathematics solves. One
sample's gradient takes the whole clip norm C along a known direction, and every other gradient is
orthogonal to it. Then the release along it, over C, is N(0, sigma^2) without the sample and
N(1, sigma^2) with it: each step is the Gaussian mechanism, and the best score is the release
itself, *signed*. With Poisson sampling the sample is in the batch with chance q only: a mixture of
both. Too little noise, a clip that lets more through, or sampling that is too frequent raises the
AUC; too much noise or too small a gradient lowers it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import bdtrc
from torch import Tensor

from lightning_fedleak.evaluation.auditing import audit_scores
from lightning_fedleak.evaluation.auditing.lower_bounds import gaussian_auc

N_RUNS, N_CUTS = 20_000, 200


@dataclass(frozen=True)
class Games:
    """Independent add/remove games.

    Attributes:
        scores: (n,) float64, higher is more likely a member.
        members: (n,) bool, whether the target was there.
    """

    scores: Tensor
    members: Tensor


@dataclass(frozen=True)
class Refutations:
    """How often a bound that may be wrong in a share ``allowed`` of audits exceeded the claim.

    Attributes:
        audits: how many were made, independent of each other.
        refuted: of these, how many showed more than was claimed.
        allowed: share in which a right claim may be refuted: one less the bounds' confidence.
        p_value: chance of so many refutations or more, were the claim right.
    """

    audits: int
    refuted: int
    allowed: float
    p_value: float


def sampled_gaussian_auc(sigma: float, sample_rate: float = 1.0) -> float:
    """AUC of the release itself as a score against one step: ``(1 - q) / 2 + q Phi(1/(s sqrt 2))``.

    The score is the best there is: the likelihood ratio of the mixture rises with it.

    Args:
        sigma: noise multiplier.
        sample_rate: q, chance of the target to be in the batch.
    """
    return (1 - sample_rate) / 2 + sample_rate * gaussian_auc(sigma)


def log_likelihood_ratios(releases: Tensor, sigma: float, sample_rate: float = 1.0) -> Tensor:
    """The privacy loss of each release: ``log(1 - q + q exp((2 x - 1) / (2 sigma^2)))``.

    Its sum over the steps of a run is the best score against the run (Neyman & Pearson).

    Args:
        releases: any shape, along the target's direction and over the clip norm.
        sigma: noise multiplier.
        sample_rate: q.

    Returns:
        Of the same shape, float64.
    """
    exponent = (2 * releases.double() - 1) / (2 * sigma**2)
    if sample_rate == 1:
        return exponent
    not_sampled = torch.full_like(exponent, math.log1p(-sample_rate))
    return torch.logaddexp(not_sampled, exponent + math.log(sample_rate))


def best_threshold(
    sigma: float, sample_rate: float, steps: int, *, games: int, delta: float,
    confidence: float = 0.95, seed: int = 0,
) -> float:  # fmt: skip
    """Return the threshold on the score that shows the largest epsilon in simulated runs.

    So it is fixed before the games that it judges, as ``audit_scores(threshold=<number>)`` asks.

    Args:
        sigma: noise multiplier.
        sample_rate: q.
        steps: releases of a run.
        games: of the audit, half of them with the target.
        delta: at which epsilon is asked for.
        confidence: of the bound.
        seed: of the simulation.
    """
    rng, half = np.random.default_rng(seed), games // 2
    noise = sigma * rng.standard_normal((2, N_RUNS, steps))
    noise[1] += rng.random((N_RUNS, steps)) < sample_rate
    ratios = log_likelihood_ratios(torch.from_numpy(noise), sigma, sample_rate).sum(2)
    non_members, members = (np.sort(side) for side in ratios.numpy())
    cuts = np.quantile(np.concatenate((non_members, members)), np.linspace(0.005, 0.995, N_CUTS))
    best, best_cut = -1.0, float(cuts[N_CUTS // 2])
    for cut in cuts.tolist():
        above = (1 - np.searchsorted(s, cut, "right") / N_RUNS for s in (non_members, members))
        fp, tp = (round(half * share) for share in above)
        guesses = torch.cat([torch.arange(half) < tp, torch.arange(half) < fp]).double()
        settings = {"delta": delta, "confidence": confidence, "threshold": 0.5}
        epsilon = audit_scores(guesses, torch.arange(2 * half) < half, **settings).epsilon
        if epsilon > best:
            best, best_cut = epsilon, cut
    return best_cut


def play_add_remove(release: Callable[[bool], float], games: int, seed: int = 0) -> Games:
    """Plays games: a fair bit adds the target or removes it, and the mechanism runs again.

    Args:
        release: runs the mechanism with (True) or without (False) the target, with noise of its
            own every time, and gives the score.
        games: how many.
        seed: of the coins.
    """
    coins = np.random.default_rng(seed).random(games) < 0.5
    scores = [float(release(bool(coin))) for coin in coins]
    return Games(torch.tensor(scores, dtype=torch.float64), torch.from_numpy(coins))


def refutations(bounds: Sequence[float], epsilon: float, confidence: float = 0.95) -> Refutations:
    """Counts the lower bounds above a claimed epsilon; a right claim allows few of them.

    Args:
        bounds: lower bounds on epsilon, of independent audits. NaN (unknown) is refused.
        epsilon: the claim.
        confidence: of each bound.

    Raises:
        ValueError: no bounds, or one that is NaN.
    """
    if not bounds or any(math.isnan(bound) for bound in bounds):
        raise ValueError("bounds must hold at least one number, and no NaN: those are unknown")
    refuted = sum(bound > epsilon for bound in bounds)
    allowed = 1 - confidence
    p_value = float(bdtrc(refuted - 1, len(bounds), allowed)) if refuted else 1.0
    return Refutations(len(bounds), refuted, allowed, p_value)
