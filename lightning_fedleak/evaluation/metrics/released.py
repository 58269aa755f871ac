"""What fixed pools of texts show of a released model over any number of looks.

Members and non-members are the same texts at every look, so that the looks are not independent and
no evidence adds up over them. Each look k has its own share ``alpha / (k (k + 1))`` of the
probability of error instead; the shares of all looks add up to alpha.

The bounds of a TPR follow from order statistics alone, so that they hold for any distribution of
scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.stats import beta, binom, mannwhitneyu, nhypergeom, rankdata
from torch import Tensor

from lightning_fedleak.attacks.memorization.blind import LEAST_AUC, MOST_AUC
from lightning_fedleak.attacks.memorization.extraction import Extraction, ExtractionGuess
from lightning_fedleak.attacks.memorization.scores import CombinedReference
from lightning_fedleak.evaluation.metrics.clustered import auc, columns, least_error
from lightning_fedleak.evaluation.metrics.rates import ALPHA, UNKNOWN, Rate, flat, proportion
from lightning_fedleak.evaluation.metrics.within import spent_at as spent_at
from lightning_fedleak.model.snapshots import ReleasedModel, TokenSnapshot

FPR = 0.01  # of the TPR that is shown, the usual one (Carlini et al. 2022)
FPRS = (FPR, 0.001)  # of the TPRs that a release is judged by
RESAMPLES = 1000  # of the bootstrap of an AUC, as MembershipInference has it; more: slower
LEAST_CANARIES = 10  # of a tier, and held out; fewer: intervals say next to nothing. Not tuned
TIERS = 1, 2, 5, 17  # least rows of the data that hold a tier's texts: 1, 2-4, 5-16, more
LEAST_REPEATED = 10  # texts of a tier; fewer join the one below, as intervals say next to nothing
PERMUTATIONS = 9900  # of the exact test; more: slower, and smaller p-values
CHANCE = 1e-3  # p-value below which a reference has seen rows; 1 sound run in 1,000 is refused
POWER = 0.8  # chance that a look shows the rate that is printed as visible; the usual one


def others_needed(look: int, alpha: float = 0.05, fpr: float = FPR) -> int:
    """Return how many non-members a look needs before its bound on the TPR can be above 0.

    The highest non-member leaves an FPR of at most ``fpr`` but for a probability ``(1 - fpr)^n``.

    Examples:
        >>> from lightning_fedleak.evaluation.metrics.released import others_needed
        >>> [others_needed(look) for look in (1, 2, 3, 4, 5)]
        [437, 546, 615, 666, 706]
        >>> others_needed(1, fpr=0.001)
        4380
    """
    return math.ceil(math.log(spent_at(look, alpha) / 2) / math.log1p(-fpr))


def rate_name(fpr: float) -> str:
    """Return the name of the TPR at an FPR in the logs, such as ``tpr_at_fpr_0.001``."""
    return f"tpr_at_fpr_{fpr:g}"


def shown_tpr(
    scores: Tensor, members: Tensor, *, look: int = 1, alpha: float = 0.05, fpr: float = FPR
) -> Rate:
    """Return bounds of the TPR at a small FPR, each with half of the look's ``alpha``.

    ``low`` is unknown (NaN) with too few non-members; ``value`` is ``low``.

    The threshold is a non-member's score, high enough that its FPR is at most ``fpr`` but for half
    of the look's alpha: the FPR above the j-th highest of n non-members has the distribution
    Beta(j, n - j + 1). Clopper-Pearson's bound on the members above it takes the other half. The
    upper bound mirrors this.

    Args:
        scores: (N,) higher is more likely a member.
        members: (N,) bool.
        look: counted from 1.
        alpha: probability of error over all looks together.
        fpr: the FPR.

    Raises:
        ValueError: no members, no non-members, lengths that differ, or a score that is NaN.
    """
    score, member = _pool(scores, members)
    spent = spent_at(look, alpha)
    others, inside = np.sort(score[~member])[::-1], score[member]
    n, ranks = len(others), np.arange(1, len(others) + 1)
    below = binom.cdf(ranks - 1, n, fpr) <= spent / 2  # P(FPR above the j-th > fpr)
    above = binom.sf(ranks - 1, n, fpr) <= spent / 2  # P(FPR from the j-th on < fpr)
    low, high = math.nan, 1.0
    if below.any():
        hits = int((inside > others[np.flatnonzero(below)[-1]]).sum())
        low = float(beta.ppf(spent / 2, hits, len(inside) - hits + 1)) if hits else 0.0
    if above.any():
        hits = int((inside >= others[np.flatnonzero(above)[0]]).sum())
        most = hits == len(inside)
        high = 1.0 if most else float(beta.ppf(1 - spent / 2, hits + 1, len(inside) - hits))
    return Rate(low, low, high)


def _judged_tpr(scores: Tensor, members: Tensor, *, look: int, alpha: float, fpr: float) -> Rate:
    """Return the TPR at an FPR between its bounds; all is unknown with too few non-members.

    The value is the share of members above the (m + 1)-th highest of n non-members, for
    m = floor(fpr * n). Ties count against the members.
    """
    bounds = shown_tpr(scores, members, look=look, alpha=alpha, fpr=fpr)
    if math.isnan(bounds.low):
        return UNKNOWN
    score, member = _pool(scores, members)
    others = np.sort(score[~member])[::-1]
    above = score[member] > others[int(fpr * len(others) + 1e-9)]
    return Rate(float(above.mean()), bounds.low, bounds.high)


def rank_test(scores: Tensor, members: Tensor) -> float:
    """Return the p-value of "members rank no higher", exact for exchangeable texts.

    Members above the (m + 1)-th highest non-member, for m = floor(FPR * n) of n, have the negative
    hypergeometric distribution if no text's membership matters. Ties count against the members.

    Args:
        scores: (N,) higher is more likely a member.
        members: (N,) bool.
    """
    score, member = _pool(scores, members)
    others = np.sort(score[~member])[::-1]
    allowed = int(FPR * len(others) + 1e-9)
    hits = int((score[member] > others[allowed]).sum())
    n_members = int(member.sum())
    null = nhypergeom(len(score), n_members, allowed + 1)
    # The sum keeps the digits of a small tail, which 1 - cdf loses.
    return min(1.0, float(null.pmf(np.arange(hits, n_members + 1)).sum()))


def visible_tpr(n_members: int, n_others: int, *, look: int = 1, alpha: float = 0.05) -> float:
    """Return the least TPR that a look shows to be above 0 with probability 0.8, by the rank test.

    It answers "how much could leak unnoticed". The threshold is taken at its expected FPR.

    Args:
        n_members: texts that were trained on.
        n_others: texts that were not.
        look: counted from 1.
        alpha: probability of error over all looks together.
    """
    allowed = int(FPR * n_others + 1e-9)
    counts = np.arange(n_members + 1)
    null = nhypergeom(n_members + n_others, n_members, allowed + 1)
    rare = np.flatnonzero(null.sf(counts - 1) <= spent_at(look, alpha))
    if not len(rare):
        return 1.0
    needed = int(rare[0])
    # The least p with P(Binomial(n, p) >= needed) = POWER.
    return float(beta.ppf(POWER, needed, n_members - needed + 1))


def visible_excess(n_members: int, n_others: int, others_hits: int, *, alpha: float) -> float:
    """Return the least share of members whose excess is shown above 0 with probability 0.8.

    Args:
        n_members: queried texts that were trained on.
        n_others: queried texts that were not trained on.
        others_hits: non-members of which the tokens were extracted.
        alpha: probability of error of the look's interval.

    Returns:
        The share; 1 if no number of members would be enough.
    """
    if not n_members or not n_others:
        return 1.0
    other = proportion(others_hits, n_others, 1 - alpha)
    needed = next(
        (
            hits
            for hits in range(n_members + 1)
            if _difference(proportion(hits, n_members, 1 - alpha), other).low > 0
        ),
        None,
    )
    return 1.0 if needed is None else float(beta.ppf(POWER, needed, n_members - needed + 1))


def permutation_test(scores: Tensor, members: Tensor) -> float:
    """Return the p-value of "members rank no higher than others", by permuted memberships.

    It is exact for exchangeable texts, whatever the ties, since the pool as it is counts as one of
    9,901 permutations; so it is at least .0001.

    Args:
        scores: (N,) higher is more likely a member.
        members: (N,) bool.
    """
    score, member = _pool(scores, members)
    ranks, generator = rankdata(score), np.random.default_rng(0)
    seen, n = ranks[member].sum(), int(member.sum())
    as_high = sum(
        int((generator.permuted(np.tile(ranks, (part, 1)), axis=1)[:, :n].sum(1) >= seen).sum())
        for part in [PERMUTATIONS // 100] * 100
    )
    return (1 + as_high) / (1 + PERMUTATIONS)


def membership_values(
    scores: Tensor, members: Tensor, *, look: int = 1, alpha: float = 0.05, exact: bool = False
) -> dict[str, float]:
    """Return what a look at two pools shows of one score, by the names of the logs.

    - ``auc``, with ``_low`` and ``_high``: ties count half. ``auc_provable`` is the lower end where
      so many texts are all ranked right.
    - ``p_value``: the least ``alpha`` with which ``auc_low`` would lie above .5.
    - ``shown``: the lower bound of :func:`shown_tpr`, unknown (NaN) with too few non-members;
      ``shown_high`` is its upper bound.
    - ``shown_p_value``: of :func:`rank_test`, corrected for all looks.
    - ``tpr_at_fpr_0.01`` and ``tpr_at_fpr_0.001``, with ``_low`` and ``_high``: the bounds are of
      :func:`shown_tpr`, and all is unknown with fewer non-members than :func:`others_needed`.
    - ``visible``: of :func:`visible_tpr`.

    The bounds of a rate hold at all looks together but for a probability ``alpha``, and so do both
    tests.

    Args:
        scores: (N,) higher is more likely a member.
        members: (N,) bool.
        look: counted from 1.
        alpha: probability of error over all looks together.
        exact: ``p_value`` is that of :func:`permutation_test`, and ``auc_low`` is above .5 only
            where that shows it too. The interval of an AUC is not exact where scores are coarse.

    Raises:
        ValueError: as :func:`shown_tpr` does.
    """
    shown = shown_tpr(scores, members, look=look, alpha=alpha)
    spent = spent_at(look, alpha)
    area = _auc(scores, members, spent)
    error = permutation_test(scores, members) if exact else least_error(*_pool(scores, members))
    fewest = min(int(members.sum()), int((~members).sum()))
    provable = (spent / 2) ** (1 / fewest)
    if exact and error > spent / 2:
        area = replace(area, low=min(area.low, 0.5))
    if exact and spent / 2 < 1 / (1 + PERMUTATIONS):  # less than the least p-value
        provable = min(provable, 0.5)
    tprs = (_judged_tpr(scores, members, look=look, alpha=alpha, fpr=fpr) for fpr in FPRS)
    rates = dict(zip(map(rate_name, FPRS), tprs, strict=True))
    return {
        **flat({"auc": area, **rates}),
        "auc_provable": provable,
        "p_value": min(1.0, error * alpha / spent),
        "shown": shown.low,
        "shown_high": shown.high,
        "shown_p_value": min(1.0, rank_test(scores, members) * alpha / spent),
        "visible": visible_tpr(int(members.sum()), int((~members).sum()), look=look, alpha=alpha),
    }


def extraction_values(
    guess: ExtractionGuess,
    attack: Extraction,
    members: Tensor,
    times: Tensor | None = None,
    *,
    look: int = 1,
    alpha: float = 0.05,
) -> dict[str, float]:
    """Return how many more members than non-members are extracted, by the names of the logs.

    - ``extracted_x1``, ``_x2``, ``_x5`` and ``_x17``, with ``_low`` and ``_high``: by
      :func:`tiers_of`, the share of members of which k tokens are discoverable in the attack's
      10,000 samples, minus that of non-members. All tiers share the probability of error.
    - ``extracted``: that of the tier where it is highest; of no one tier hides another.
      ``extracted_provable`` is the lower end that every tier shows where all of it is extracted
      and no non-member, and ``extracted_x1_provable`` and so on that of one tier.
    - ``greedy`` and so on: the same for greedy decoding.
    - ``extracted_others`` and ``extracted_base``: the shares of non-members, and of members at the
      base.
    - ``visible``: of :func:`visible_excess`, of the decoding and tier that is least visible.

    The interval of a difference joins both Clopper-Pearson intervals (Newcombe 1998, method 10).
    Texts without k label tokens in a row are not counted.

    Args:
        guess: of the attack.
        attack: says which texts its samples contain.
        members: (N,) bool.
        times: (N,) rows of the training data that hold each member; None: one.
        look: counted from 1.
        alpha: probability of error over all looks together.
    """
    inside, others = guess.has_run & members, guess.has_run & ~members
    n_others = int(others.sum())
    tiers = tiers_of(torch.ones_like(inside, dtype=torch.long) if times is None else times, inside)
    spent = spent_at(look, alpha) / len(tiers)
    now, base = attack.extracted(guess.log_probs), attack.extracted(guess.base_log_probs)
    sizes = [int(tier.sum()) for tier in tiers.values()]
    nothing = proportion(0, n_others, 1 - spent)
    provable = {
        least: _difference(proportion(n, n, 1 - spent), nothing).low
        for least, n in zip(tiers, sizes, strict=True)
    }
    values: dict[str, float] = {}
    for name, hits in (("extracted", now), ("greedy", guess.greedy)):
        other = proportion(int(hits[others].sum()), n_others, 1 - spent)
        rates = {
            f"{name}_x{least}": _difference(
                proportion(int(hits[tier].sum()), int(tier.sum()), 1 - spent), other
            )
            for least, tier in tiers.items()
        }
        ends = zip(*((rate.value, rate.low, rate.high) for rate in rates.values()), strict=True)
        values |= flat({name: Rate(*map(max, ends)), **rates})
        values |= {f"{name}_x{least}_provable": low for least, low in provable.items()}
        values[f"{name}_provable"] = min(provable.values())
    others_hits = max(int(hits[others].sum()) for hits in (now, guess.greedy))
    return values | {
        "visible": max(visible_excess(n, n_others, others_hits, alpha=spent) for n in sizes),
        "extracted_others": proportion(int(now[others].sum()), n_others).value,
        "extracted_base": proportion(int(base[inside].sum()), int(inside.sum())).value,
    }


def tiers_of(times: Tensor, members: Tensor) -> dict[int, Tensor]:
    """Return the members by how often they repeat, (N,) bool by the least number of rows.

    Tiers are of 1, 2 to 4, 5 to 16 and more rows. One of fewer than ten members joins the one
    below.

    Args:
        times: (N,) rows of the training data that hold each text.
        members: (N,) bool.
    """
    tiers: dict[int, Tensor] = {}
    rest = members
    for least in reversed(TIERS):
        tier = rest & (times >= least)
        if int(tier.sum()) >= (LEAST_REPEATED if least > 1 else 1):
            tiers[least], rest = tier, rest & ~tier
    return tiers or {1: members}


def canary_values(
    guess: ExtractionGuess,
    attack: Extraction,
    members: Tensor,
    others: Tensor,
    *,
    look: int = 1,
    alpha: float = 0.05,
) -> dict[str, float]:
    """Return what a look shows of canaries that were repeated equally often.

    The names are those of :func:`membership_values` and :func:`extraction_values`, and

    - ``exposure``: in bits, ``log2(n + 1) - log2(rank)`` of the median canary among n held-out ones
      (Carlini et al. 2019, arXiv 1802.08232, section 4.2). It cannot be above ``exposure_cap =
      log2(n + 1)``. Its interval is that of the share of all possible canaries above that one;
      if none of the n is, there is no upper end (infinite).
    - ``exposure_capped``: the share of the canaries above all held-out ones.

    Ties are counted against the canary. Scores are the rise of the log probability since the base.

    Args:
        guess: about N canaries.
        attack: says which texts its samples contain.
        members: (N,) bool, canaries that were trained on.
        others: (N,) bool, canaries that were held out.
        look: counted from 1.
        alpha: probability of error over all looks together.

    Raises:
        ValueError: as :func:`shown_tpr` does.
    """
    pool, scores = members | others, guess.log_probs - guess.base_log_probs
    controls, planted = scores[others], scores[members]
    above = int((controls >= planted.median()).sum())
    share = proportion(above, len(controls), 1 - spent_at(look, alpha))
    cap = math.log2(len(controls) + 1)
    highest = -math.log2(share.low) if above else math.inf
    exposure = Rate(cap - math.log2(above + 1), -math.log2(share.high), highest)
    return {
        **membership_values(scores[pool], members[pool], look=look, alpha=alpha),
        **extraction_values(replace(guess, has_run=pool), attack, members, look=look, alpha=alpha),
        **flat({"exposure": exposure}),
        "exposure_cap": cap,
        "exposure_capped": float((planted > controls.max()).double().mean()),
    }


def canary_tiers(
    guess: ExtractionGuess,
    attack: Extraction,
    times: Sequence[int],
    repeats: Tensor,
    members: Tensor,
    others: Tensor,
    *,
    look: int = 1,
    alpha: float = 0.05,
) -> dict[int, dict[str, float] | str]:
    """Return what a look shows of canaries by how often they were repeated, or why it is unknown.

    All tiers share the probability of error, and the held-out canaries.

    Args:
        guess: about N canaries.
        attack: says which texts its samples contain.
        times: the tiers.
        repeats: (N,) how often each canary is repeated in the data, if it is there.
        members: (N,) bool, canaries that were trained on.
        others: (N,) bool, canaries that were held out.
        look: counted from 1.
        alpha: probability of error over all looks together.

    Returns:
        By tier the values of :func:`canary_values` with ``members``, ``others`` and ``alpha``; a
        sentence if either side is too small.
    """
    n_others, alpha = int(others.sum()), alpha / len(times)
    tiers: dict[int, dict[str, float] | str] = {}
    for tier in times:
        planted = members & (repeats == tier)
        n = int(planted.sum())
        if min(n, n_others) < LEAST_CANARIES:
            tiers[tier] = (
                f"{n} canaries of tier x{tier} were trained on and {n_others} were held out: "
                f"{LEAST_CANARIES} of each are needed"
            )
            continue
        tiers[tier] = canary_values(guess, attack, planted, others, look=look, alpha=alpha) | {
            "members": float(n),
            "others": float(n_others),
            "alpha": spent_at(look, alpha),
        }
    return tiers


def blind_aucs(scores: Mapping[str, Tensor], members: Tensor) -> dict[str, Rate]:
    """Return the AUC of each score that knows nothing of the training, with its interval.

    Args:
        scores: (N,) by name, of
            :func:`~lightning_fedleak.attacks.memorization.blind.blind_scores`.
        members: (N,) bool.
    """
    return {name: _auc(score, members, ALPHA) for name, score in scores.items()}


def check_unseen(
    reference: TokenSnapshot, base: TokenSnapshot, compressed: Tensor, trains: Tensor
) -> None:
    """Refuse a reference that tells both sides apart before any training: it has seen some rows.

    Trained on the rows that are left out, for example, it would show members of a model that was
    trained on none.

    Args:
        reference: what it says of N texts.
        base: what the model says before its first step.
        compressed: (N,) see :class:`~lightning_fedleak.model.snapshots.ReleasedModel`.
        trains: (N,) bool, rows of the training data.

    Raises:
        ValueError: the scores of both sides differ by more than chance.
    """
    untrained = ReleasedModel(base, base, compressed, reference=reference)
    scores = CombinedReference().score(untrained)
    p_value = float(mannwhitneyu(scores[trains].numpy(), scores[~trains].numpy()).pvalue)
    if p_value < CHANCE:
        raise ValueError(
            "Memorization(reference=): before any training it scores the rows that are trained on "
            f"otherwise than those that are not (p = {p_value:.1g}), so that it has seen some of "
            "them: give a model that was trained on other rows alone"
        )


def other_law(aucs: Mapping[str, Rate]) -> str | None:
    """Return which blind AUC may lie outside .45 to .55, the farthest one; None: none of them.

    It begins with what that says of the texts: that they are from different distributions if a
    whole interval lies outside; else that they are too few to decide.
    """
    if all(rate.low >= LEAST_AUC and rate.high <= MOST_AUC for rate in aucs.values()):
        return None

    def outside(rate: Rate) -> float:
        return max(rate.low - MOST_AUC, LEAST_AUC - rate.high)

    name, rate = max(aucs.items(), key=lambda one: abs(one[1].value - 0.5))
    finding = "too few to decide whether they are exchangeable"
    if max(map(outside, aucs.values())) > 0:
        name, rate = max(aucs.items(), key=lambda one: outside(one[1]))
        finding = "from different distributions"
    return (
        f"{finding}: without the trained model '{name}' distinguishes them with an AUC of "
        f"{rate.value:.2f} ({rate.low:.2f} to {rate.high:.2f}), where 0.45 to 0.55 is needed"
    )


def highest_auc(scores: Mapping[str, Tensor], members: Tensor) -> float:
    """Return the highest AUC of several scores, each taken in its better direction.

    Args:
        scores: (N,) by name.
        members: (N,) bool.
    """
    pools = [_pool(score, members) for score in scores.values()]
    wins = [mannwhitneyu(score[member], score[~member]).statistic for score, member in pools]
    pairs = int(members.sum()) * int((~members).sum())
    return float(max(max(count, pairs - count) for count in wins)) / pairs


def _auc(scores: Tensor, members: Tensor, alpha: float) -> Rate:
    """Return the AUC with an interval that errs with probability ``alpha``."""
    score, member = _pool(scores, members)
    return auc(score, member, np.arange(len(score)), alpha, RESAMPLES, np.random.default_rng(0))


def _difference(first: Rate, second: Rate) -> Rate:
    """Return the difference of two independent proportions; unknown where one is."""
    value = first.value - second.value
    if math.isnan(value):
        return UNKNOWN
    down = math.hypot(first.value - first.low, second.high - second.value)
    up = math.hypot(first.high - first.value, second.value - second.low)
    return Rate(value, value - down, value + up)


def _pool(scores: Tensor, members: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return scores and membership as arrays, checked."""
    score, member = columns(scores, members)
    if np.isnan(score).any():
        raise ValueError(f"{len(score)} scores hold NaN: give a number for each text")
    if not member.any() or member.all():
        raise ValueError(f"{member.sum()} members of {len(member)}: non-members are needed as well")
    return score, member
