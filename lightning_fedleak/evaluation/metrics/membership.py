"""Accuracy, AUC, advantage and TPR at a small FPR of a membership attack, with intervals."""

import math
from typing import Any

import numpy as np
import torch
from scipy.special import bdtr
from torch import Tensor

from lightning_fedleak.evaluation.metrics import clustered
from lightning_fedleak.evaluation.metrics.clustered import Bools, Floats, Ints
from lightning_fedleak.evaluation.metrics.rates import UNKNOWN, Rate, RateMetric
from lightning_fedleak.validate import check_integer, check_number

FPRS = (0.01, 0.001)  # FPRs of the reported TPRs, the usual ones (Carlini et al. 2022)
RATES = ("accuracy", "f1", "auc", "advantage", *(f"tpr_at_fpr_{fpr:g}" for fpr in FPRS))
"""Names of the rates, in the order in which they are reported."""

COLUMNS = ("scores", "members", "clusters", "decisions")
"""The numbers of a game in the metric."""
NEGATIVES_PER_FPR = 10  # expected false alarms below which a TPR is unknown; not tuned
NO_DECISION = -1  # value in the metric's states if the adversary made no decision
FOLDS = 10  # folds of the cross-fitted thresholds, the usual number; more: slower


def membership_rates(
    scores: Tensor,
    members: Tensor,
    clusters: Tensor | None = None,
    decisions: Tensor | None = None,
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Rate]:
    """Return the rates of a membership attack over n games, each with its interval.

    In each game, a secret bit b says whether a text is a member. A cluster is a set of dependent
    games, such as those of one step or client.

    - ``accuracy``: the share of games with a correct guess b'.
    - ``f1``: the F1 score of the members; it depends on the share of games with b = 1.
    - ``advantage``: TPR + TNR - 1, in [-1, 1]. It equals ``2 Pr[b' = b] - 1`` for a fair bit, also
      if members and non-members are not equally many.
    - ``auc``: the AUC of the scores; ties count half.
    - ``tpr_at_fpr_0.01`` and ``tpr_at_fpr_0.001``.

    *Thresholds* are fitted on other games than those they score: the clusters are split into at
    most 10 folds, and each fold uses a threshold from the others. It is the one with the largest
    TPR + TNR for accuracy, F1 and advantage, and the negatives' quantile for a TPR. With
    ``decisions`` the adversary's own decisions give accuracy, F1 and advantage.

    *Intervals* of accuracy, F1 and advantage are Clopper-Pearson's on the effective number of
    games (Korn & Graubard 1998: the number of games over the design effect of the clusters, with
    Student's correction for few clusters), and plain Clopper-Pearson if each game is its own
    cluster. The interval of the AUC is ``expit(logit(auc) +- t s)``: s comes from a bootstrap that
    draws clusters, and Student's t has degrees of freedom from the kurtosis of the clusters' shares
    of the error. If each game is its own cluster, the interval is cut to Hoeffding's. 95% intervals
    covered the true AUC in 92 to 98% of simulated cases. The interval of a TPR combines two errors
    (Zou & Donner 2008): Clopper-Pearson's interval over members, and the range of the TPR over the
    thresholds that are consistent with the non-members (order statistics).

    *Near 0 and 1* the clusters do not show how their games depend on each other. If fewer than five
    clusters have a wrong game, the lower end is capped at ``(alpha / 2) ** (1 / k)``: the lower end
    of k clusters that are all correct, if all games of a cluster have one outcome (and upper ends
    likewise). For the AUC, k is the number of disjoint pairs of a cluster with a member and one
    with a non-member. For perfect scores no bound that allows any dependence within a cluster can
    be higher. So a perfect AUC of ten steps has the interval [.48, 1], of a hundred steps [.93, 1],
    and of a thousand games that are each a cluster [.993, 1].

    Games of a single cluster count as independent: the interval then describes that step alone.

    Args:
        scores: (n,) The scores, higher for likelier members; infinities are allowed.
        members: (n,) bool, the secret bit b.
        clusters: (n,) int, the step or client of each game; by default each game is a cluster.
        decisions: (n,) bool, the adversary's guess b'; None: thresholds on the scores decide.
        confidence: The confidence of the intervals, between 0 and 1.
        resamples: The number of resamples of the bootstrap.
        seed: The seed of the bootstrap and of the folds; no global random numbers are used.

    Returns:
        Rates by the names in ``RATES``. *Unknown* (NaN) are: all rates if a score is NaN; rates
        that need members or non-members if there are none; a TPR at FPR f with fewer than
        10 / f non-members.

    Raises:
        ValueError: The lengths differ, or ``confidence`` is outside (0, 1).
    """
    check_number("confidence", confidence, above=0, below=1)
    check_integer("resamples", resamples, at_least=100)
    score, member, code, decision = _columns(scores, members, clusters, decisions)
    unknown = dict.fromkeys(RATES, UNKNOWN)
    if score.size == 0 or np.isnan(score).any():
        return unknown
    alpha = 1 - confidence
    rng = np.random.default_rng(seed)
    folds = rng.permutation(int(code.max()) + 1)[code] % FOLDS
    rates: dict[str, Rate] = {}
    if decision is None:
        decision = _fitted_decisions(score, member, folds)
    if decision is not None:
        rates |= _decision_rates(decision, member, code, alpha)
    if member.any() and not member.all():
        rates["auc"] = clustered.auc(score, member, code, alpha, resamples, rng)
        for fpr in FPRS:
            rates[f"tpr_at_fpr_{fpr:g}"] = _tpr(score, member, code, folds, fpr, alpha)
    return unknown | rates


class MembershipInference(RateMetric):
    """Compute :func:`membership_rates` over the games that all processes have added.

    All scores are stored (float64), because neither an AUC nor a threshold follows from sums.
    ``compute()`` returns the rates in ``RATES``, each also with ``_low`` and ``_high``: scalars on
    the CPU, NaN if unknown.

    Args:
        resamples: The number of resamples of the bootstrap.
        kwargs: Further arguments of :class:`torchmetrics.Metric`.

    Examples:
        >>> import torch
        >>> from lightning_fedleak.evaluation.metrics import MembershipInference
        >>> metric = MembershipInference()
        >>> scores, members = torch.tensor([0.9, 0.2, 0.7, 0.4]), torch.tensor([1, 0, 1, 0])
        >>> metric.update(scores, members, clusters=torch.arange(4))
        >>> metric.compute()["auc"].item()
        1.0
    """

    n_columns = len(COLUMNS)

    def __init__(self, *, resamples: int = 1000, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.resamples = resamples

    def update(
        self,
        scores: Tensor,
        members: Tensor,
        clusters: Tensor | int,
        decisions: Tensor | None = None,
    ) -> None:
        """Add games.

        Args:
            scores: (n,) The scores, higher for likelier members.
            members: (n,) bool, whether each game has a member.
            clusters: (n,) int, the step of each game, or one number for all games. Games with the
                same number are one cluster, whichever process added them.
            decisions: (n,) bool, the adversary's decisions; pass them always or never.

        Raises:
            ValueError: The lengths differ.
        """
        n = scores.numel()
        if not isinstance(clusters, Tensor):
            clusters = torch.full((n,), clusters)
        if decisions is None:
            decisions = torch.full((n,), NO_DECISION)
        games = (scores, members, clusters, decisions)
        for name, column in zip(COLUMNS, games, strict=True):
            clustered.check_length(name, column.numel(), n)
        self._add(torch.stack([column.flatten().to(self.device).double() for column in games], 1))

    def rates(self) -> dict[str, Rate]:
        """Return the rates in ``RATES`` over all games, on this process.

        Raises:
            ValueError: Only some updates had decisions.
        """
        scores, members, clusters, decisions = self._trials().unbind(1)
        has_decision = decisions != NO_DECISION
        if bool(has_decision.any()) and not bool(has_decision.all()):
            raise ValueError("give the adversary's decisions to every update, or to none")
        return membership_rates(
            scores,
            members == 1,
            clusters,
            decisions == 1 if bool(has_decision.any()) else None,
            resamples=self.resamples,
        )


# ---- input ----------------------------------------------------------------------------------


def _columns(
    scores: Tensor, members: Tensor, clusters: Tensor | None, decisions: Tensor | None
) -> tuple[Floats, Bools, Ints, Bools | None]:
    """Return flat numpy arrays; clusters are numbered from 0 in the order of their ids."""
    score, member = clustered.columns(scores, members)
    code = np.arange(score.size, dtype=np.int64)
    if clusters is not None:
        clustered.check_length("clusters", clusters.numel(), score.size)
        _, numbers = np.unique(clusters.detach().reshape(-1).cpu().numpy(), return_inverse=True)
        if numbers.size and numbers.max() > 0:
            code = numbers.astype(np.int64)
    if decisions is None:
        return score, member, code, None
    clustered.check_length("decisions", decisions.numel(), score.size)
    return score, member, code, decisions.detach().reshape(-1).bool().cpu().numpy()


# ---- accuracy, F1, advantage ----------------------------------------------------------------


def _decision_rates(decisions: Bools, member: Bools, code: Ints, alpha: float) -> dict[str, Rate]:
    """Return accuracy, F1 and advantage of the decisions b'."""
    right = decisions == member
    all_games = np.ones_like(member)
    rates = {"accuracy": clustered.share_rate(right, all_games, code, alpha)}
    union = decisions | member
    if union.any():
        jaccard = clustered.share_rate(decisions & member, union, code, alpha)
        ends = (jaccard.value, jaccard.low, jaccard.high)
        rates["f1"] = Rate(*(2 * j / (1 + j) for j in ends))
    if member.any() and not member.all():
        rates["advantage"] = clustered.advantage_rate(right, member, code, alpha)
    return rates


# ---- thresholds -----------------------------------------------------------------------------


def _fitted_decisions(score: Floats, member: Bools, folds: Ints) -> Bools | None:
    """Return decisions by a threshold from the other folds; None where that needs more games."""
    decisions = np.zeros_like(member)
    for fold in np.unique(folds):
        other = folds != fold
        if not member[other].any() or member[other].all():
            return None
        decisions[~other] = score[~other] > _best_threshold(score[other], member[other])
    return decisions


def _best_threshold(score: Floats, member: Bools) -> float:
    """Return the cut, half-way between scores, with the largest TPR + TNR of ``score > cut``."""
    values, group = np.unique(score, return_inverse=True)
    hits = np.bincount(group, member / member.sum(), values.size)
    alarms = np.bincount(group, ~member / (~member).sum(), values.size)
    gain = np.cumsum(alarms - hits)
    best = int(np.argmax(gain))
    if best == values.size - 1:
        return float(values[best])
    low, high = float(values[best]), float(values[best + 1])
    middle = low / 2 + high / 2
    return middle if np.isfinite(middle) and middle < high else low


def _tpr(score: Floats, member: Bools, code: Ints, folds: Ints, fpr: float, alpha: float) -> Rate:
    """Return the TPR at an FPR; thresholds come from non-members alone."""
    negatives = score[~member]
    # 1e-9, here and below: a product of a rate and a number may be just below an integer.
    if negatives.size * fpr < NEGATIVES_PER_FPR - 1e-9:
        return UNKNOWN
    hits = np.zeros_like(member)
    for fold in np.unique(folds):
        inside = folds == fold
        other = np.sort(score[~inside & ~member])[::-1]
        if other.size == 0:
            return UNKNOWN
        hits[inside] = score[inside] > other[int(other.size * fpr + 1e-9)]
    value = float(hits[member].mean())

    descending = np.sort(negatives)[::-1]
    alarms = score[~member] > descending[int(negatives.size * fpr + 1e-9)]
    rate = float(alarms.mean())
    trials = clustered.effective_trials(
        rate, (alarms - rate) / alarms.size, code[~member], alarms.size, alpha
    )
    scale, positives = negatives.size / max(trials, 1), score[member]
    # P(at most k false alarms), for k up to far beyond the expected number.
    chances = bdtr(np.arange(int(3 * trials * fpr) + 50), int(trials), fpr)
    strict_rank, loose_rank = (int(k) for k in np.searchsorted(chances, [alpha / 2, 1 - alpha / 2]))
    strict_rank, loose_rank = int(strict_rank * scale), math.ceil((loose_rank + 1) * scale)
    lowest = float((positives > descending[strict_rank - 1]).mean()) if strict_rank > 0 else 0.0
    highest = (
        float((positives >= descending[loose_rank - 1]).mean())
        if loose_rank <= descending.size
        else 1.0
    )
    interval = clustered.share_rate(hits, member, code, alpha)
    return clustered.rate_with_value(
        value,
        max(0.0, value - float(np.hypot(value - interval.low, max(0.0, value - lowest)))),
        min(1.0, value + float(np.hypot(interval.high - value, max(0.0, highest - value)))),
    )
