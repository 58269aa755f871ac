"""Rates, intervals and tests of attacks on a released model, from fixed pools of texts.

A *look* is one measurement of the model during or after the training. Members (texts that were
trained on) and non-members (held-out texts) are the same at every look. The looks are therefore not
independent, and evidence does not add up over them. Instead, look k has its own share
``alpha / (k (k + 1))`` of the probability of error; the shares of all looks add up to alpha.

The bounds of a TPR use order statistics only, so that they hold for any distribution of scores. The
*base* is the model before training. A *blind* score does not use the trained model, so its AUC is
near 0.5 unless members and non-members are from different distributions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.stats import beta, binom, mannwhitneyu, nhypergeom, rankdata
from torch import Tensor

from lightning_fedleak.attacks.memorization.extraction import Extraction, ExtractionGuess
from lightning_fedleak.attacks.memorization.scores import MAX_BLIND_AUC, MIN_BLIND_AUC, Combined
from lightning_fedleak.evaluation.metrics.clustered import auc, columns, least_error
from lightning_fedleak.evaluation.metrics.clustered import spent_at as spent_at
from lightning_fedleak.evaluation.metrics.rates import ALPHA, UNKNOWN, Rate, flat, proportion
from lightning_fedleak.model.snapshots import References, ReleasedModel, TokenSnapshot

FPR = 0.01  # FPR of the TPR in `shown`, the usual one (Carlini et al. 2022)
FPRS = (FPR, 0.001)  # FPRs of the TPRs that a release is judged by
RESAMPLES = 1000  # resamples in the bootstrap of an AUC, as in MembershipInference; more: slower
MIN_CANARIES = 10  # canaries of a tier, and held out; fewer: very wide intervals. Not tuned
TIERS = 1, 2, 5, 17  # smallest number of rows with a tier's texts: tiers are 1, 2-4, 5-16, more
MIN_TIER_TEXTS = 10  # texts of a tier; a smaller tier joins the one below: intervals are too wide
PERMUTATIONS = 9900  # permutations of the exact test; more: slower, and smaller p-values
MIN_P_VALUE = 1e-3  # below it a reference was trained on the rows; it refuses 1 sound run in 1,000
POWER = 0.8  # probability that a look shows the rate reported as visible; the usual power


def min_non_members(look: int, alpha: float = 0.05, fpr: float = FPR) -> int:
    """Return how many non-members a look needs before its bound on the TPR can be above 0.

    The FPR above the highest of n non-members exceeds ``fpr`` with probability ``(1 - fpr)^n``,
    which may be at most half of the look's share of ``alpha``.

    Args:
        look: The number of the look, counted from 1.
        alpha: The probability of error over all looks together.
        fpr: The FPR of the TPR.

    Examples:
        >>> from lightning_fedleak.evaluation.metrics.released import min_non_members
        >>> [min_non_members(look) for look in (1, 2, 3, 4, 5)]
        [437, 546, 615, 666, 706]
        >>> min_non_members(1, fpr=0.001)
        4380
    """
    return math.ceil(math.log(spent_at(look, alpha) / 2) / math.log1p(-fpr))


def rate_name(fpr: float) -> str:
    """Return the name of the TPR at an FPR in the logs, such as ``tpr_at_fpr_0.001``."""
    return f"tpr_at_fpr_{fpr:g}"


def shown_tpr(
    scores: Tensor, members: Tensor, *, look: int = 1, alpha: float = 0.05, fpr: float = FPR
) -> Rate:
    """Return the TPR at a small FPR, with a lower and an upper bound.

    The value is the share of members above the (m + 1)-th highest of n non-members, for
    m = floor(fpr * n). Ties count against the members. Each bound is wrong with a probability of at
    most the look's share of ``alpha``; both together are wrong with at most twice that. The value
    and the lower bound are unknown (NaN) with too few non-members.

    The lower bound's threshold is a non-member's score that is high enough: its FPR exceeds ``fpr``
    with a probability of at most half of the look's share. The FPR above the j-th highest of n
    non-members has the distribution Beta(j, n - j + 1). Clopper-Pearson's bound on the share of
    members above the threshold takes the other half. The upper bound is computed likewise, from a
    score that is low enough.

    Args:
        scores: The scores (N,); a higher one is more likely a member's.
        members: Whether each text is a member, (N,) bool.
        look: The number of the look, counted from 1.
        alpha: The probability of error over all looks together.
        fpr: The FPR.

    Raises:
        ValueError: There are no members or no non-members, the lengths differ, or a score is NaN.
    """
    score, member = _pool(scores, members)
    spent = spent_at(look, alpha)
    non_members, inside = np.sort(score[~member])[::-1], score[member]
    n, ranks = len(non_members), np.arange(1, len(non_members) + 1)
    strict = binom.cdf(ranks - 1, n, fpr) <= spent / 2  # P(FPR above the j-th > fpr)
    lenient = binom.sf(ranks - 1, n, fpr) <= spent / 2  # P(FPR from the j-th on < fpr)
    value, low, high = math.nan, math.nan, 1.0
    if strict.any():
        hits = int((inside > non_members[np.flatnonzero(strict)[-1]]).sum())
        low = float(beta.ppf(spent / 2, hits, len(inside) - hits + 1)) if hits else 0.0
        # 1e-9: a product of the rate and a number may be just below an integer.
        value = float((inside > non_members[int(fpr * n + 1e-9)]).mean())
    if lenient.any():
        hits = int((inside >= non_members[np.flatnonzero(lenient)[0]]).sum())
        full = hits == len(inside)
        high = 1.0 if full else float(beta.ppf(1 - spent / 2, hits + 1, len(inside) - hits))
    return Rate(value, low, high)


def rank_test(scores: Tensor, members: Tensor) -> float:
    """Return the p-value of "members rank no higher", exact for exchangeable texts.

    Members above the (m + 1)-th highest non-member, for m = floor(FPR * n) of n, have the negative
    hypergeometric distribution if no text's membership matters. Ties count against the members.

    Args:
        scores: The scores (N,); a higher one is more likely a member's.
        members: Whether each text is a member, (N,) bool.
    """
    score, member = _pool(scores, members)
    non_members = np.sort(score[~member])[::-1]
    allowed = int(FPR * len(non_members) + 1e-9)  # 1e-9: a product may be just below m
    hits = int((score[member] > non_members[allowed]).sum())
    n_members = int(member.sum())
    null = nhypergeom(len(score), n_members, allowed + 1)
    # The sum keeps the digits of a small tail, which 1 - cdf loses.
    return min(1.0, float(null.pmf(np.arange(hits, n_members + 1)).sum()))


def visible_tpr(n_members: int, n_others: int, *, look: int = 1, alpha: float = 0.05) -> float:
    """Return the smallest TPR that a look detects with probability 0.8, by the rank test.

    It answers "how much could leak unnoticed". The threshold is assumed at its expected FPR.

    Args:
        n_members: The number of texts that were trained on.
        n_others: The number of texts that were not trained on.
        look: The number of the look, counted from 1.
        alpha: The probability of error over all looks together.
    """
    allowed = int(FPR * n_others + 1e-9)  # 1e-9: as in rank_test
    counts = np.arange(n_members + 1)
    null = nhypergeom(n_members + n_others, n_members, allowed + 1)
    at_least = null.pmf(counts)[::-1].cumsum()[::-1]  # nhypergeom.sf sums anew for each count
    significant = np.flatnonzero(at_least <= spent_at(look, alpha))
    if not len(significant):
        return 1.0
    needed = int(significant[0])
    # The smallest p with P(Binomial(n, p) >= needed) = POWER.
    return float(beta.ppf(POWER, needed, n_members - needed + 1))


def visible_excess(n_members: int, n_others: int, others_hits: int, *, alpha: float) -> float:
    """Return the smallest share of extracted members that a look detects with probability 0.8.

    A share is detected if its excess over the non-members' share has an interval above 0.

    Args:
        n_members: The number of queried texts that were trained on.
        n_others: The number of queried texts that were not trained on.
        others_hits: The number of non-members whose tokens were extracted.
        alpha: The probability of error of the look's interval.

    Returns:
        The share; 1 if no number of extracted members would be enough.
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
    """Return the one-sided p-value of "members rank no higher", by permuted memberships.

    It is exact for exchangeable texts, whatever the ties, because the observed memberships count as
    one of 9,901 permutations. So it is at least .0001.

    Args:
        scores: The scores (N,); a higher one is more likely a member's.
        members: Whether each text is a member, (N,) bool.
    """
    score, member = _pool(scores, members)
    ranks, generator = rankdata(score), np.random.default_rng(0)
    observed, n = ranks[member].sum(), int(member.sum())
    rows = np.tile(ranks, (PERMUTATIONS // 100, 1))  # a hundredth at once, which bounds the memory
    as_high = sum(
        int((generator.permuted(rows, axis=1)[:, :n].sum(1) >= observed).sum()) for _ in range(100)
    )
    return (1 + as_high) / (1 + PERMUTATIONS)


def membership_values(
    scores: Tensor, members: Tensor, *, look: int = 1, alpha: float = 0.05, exact: bool = False
) -> dict[str, float]:
    """Return rates, intervals and tests of one score on members and non-members, by logged name.

    - ``auc``, with ``_low`` and ``_high``: The AUC; ties count half. ``auc_provable`` is the lower
      end if this many texts are all ranked correctly.
    - ``p_value``: The smallest ``alpha`` with which ``auc_low`` would lie above .5; with ``exact``
      see there.
    - ``shown``: The lower bound of :func:`shown_tpr`, unknown (NaN) with too few non-members.
      ``shown_high`` is the upper bound.
    - ``shown_p_value``: The p-value of :func:`rank_test`, corrected for all looks.
    - ``tpr_at_fpr_0.01`` and ``tpr_at_fpr_0.001``, with ``_low`` and ``_high``: The TPR with the
      bounds of :func:`shown_tpr`. All three are NaN with fewer non-members than
      :func:`min_non_members`.
    - ``visible``: The TPR of :func:`visible_tpr`.

    The interval of the AUC, each bound of a TPR, and each test err with a probability of at most
    ``alpha`` over all looks together.

    Args:
        scores: The scores (N,); a higher one is more likely a member's.
        members: Whether each text is a member, (N,) bool.
        look: The number of the look, counted from 1.
        alpha: The probability of error over all looks together.
        exact: Whether ``p_value`` is the one-sided p-value of :func:`permutation_test`, corrected
            for all looks. ``auc_low`` is then above .5 only if that test confirms it at half of the
            look's share. The interval of an AUC is not exact if scores are coarse.

    Raises:
        ValueError: There are no members or no non-members, the lengths differ, or a score is NaN.
    """
    tprs = [shown_tpr(scores, members, look=look, alpha=alpha, fpr=fpr) for fpr in FPRS]
    spent = spent_at(look, alpha)
    auc_rate = _auc(scores, members, spent)
    error = permutation_test(scores, members) if exact else least_error(*_pool(scores, members))
    pairs = min(int(members.sum()), int((~members).sum()))
    provable = (spent / 2) ** (1 / pairs)  # so high an AUC ranks all disjoint pairs right
    if exact and error > spent / 2:
        auc_rate = replace(auc_rate, low=min(auc_rate.low, 0.5))
    if exact and spent / 2 < 1 / (1 + PERMUTATIONS):  # below the smallest p-value
        provable = min(provable, 0.5)
    known = (UNKNOWN if math.isnan(tpr.low) else tpr for tpr in tprs)
    rates = dict(zip(map(rate_name, FPRS), known, strict=True))
    return {
        **flat({"auc": auc_rate, **rates}),
        "auc_provable": provable,
        "p_value": min(1.0, error * alpha / spent),
        "shown": tprs[0].low,
        "shown_high": tprs[0].high,
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
    """Return how many more members than non-members are extracted, by logged name.

    - ``extracted_x1``, ``_x2``, ``_x5`` and ``_x17``, with ``_low`` and ``_high``: The share of
      members with k discoverable tokens in the attack's 10,000 samples, minus the share of
      non-members, by tier of :func:`tiers_of`. All tiers share the probability of error.
    - ``extracted``: The largest value, lower and upper end of all tiers, so that a large tier does
      not hide a small one. ``extracted_provable`` is the lower end that every tier reaches if all
      of its members are extracted and no non-member. ``extracted_x1_provable`` and so on are the
      lower ends of each tier.
    - ``greedy`` and so on: The same for greedy decoding.
    - ``extracted_others`` and ``extracted_base``: The shares of non-members, and of members with
      the base model.
    - ``visible``: The share of :func:`visible_excess` for the decoding and tier with the largest.

    The interval of a difference combines both Clopper-Pearson intervals (Newcombe 1998, method 10).
    Texts without k label tokens in a row are not counted.

    Args:
        guess: The attack's guess about N texts.
        attack: The attack, which says which texts its samples contain.
        members: Whether each text is a member, (N,) bool.
        times: The number of rows of the training data with each member, (N,). None: one row.
        look: The number of the look, counted from 1.
        alpha: The probability of error over all looks together.
    """
    inside, others = guess.has_run & members, guess.has_run & ~members
    n_others = int(others.sum())
    tiers = tiers_of(torch.ones_like(inside, dtype=torch.long) if times is None else times, inside)
    spent = spent_at(look, alpha) / len(tiers)
    hits_now, hits_base = attack.extracted(guess.log_probs), attack.extracted(guess.base_log_probs)
    sizes = [int(tier.sum()) for tier in tiers.values()]
    no_hits = proportion(0, n_others, 1 - spent)
    provable = {
        min_rows: _difference(proportion(n, n, 1 - spent), no_hits).low
        for min_rows, n in zip(tiers, sizes, strict=True)
    }
    values: dict[str, float] = {}
    for name, hits in (("extracted", hits_now), ("greedy", guess.greedy)):
        other = proportion(int(hits[others].sum()), n_others, 1 - spent)
        rates = {
            f"{name}_x{min_rows}": _difference(
                proportion(int(hits[tier].sum()), int(tier.sum()), 1 - spent), other
            )
            for min_rows, tier in tiers.items()
        }
        ends = zip(*((rate.value, rate.low, rate.high) for rate in rates.values()), strict=True)
        values |= flat({name: Rate(*map(max, ends)), **rates})
        values |= {f"{name}_x{min_rows}_provable": low for min_rows, low in provable.items()}
        values[f"{name}_provable"] = min(provable.values())
    others_hits = max(int(hits[others].sum()) for hits in (hits_now, guess.greedy))
    return values | {
        "visible": max(visible_excess(n, n_others, others_hits, alpha=spent) for n in sizes),
        "extracted_others": proportion(int(hits_now[others].sum()), n_others).value,
        "extracted_base": proportion(int(hits_base[inside].sum()), int(inside.sum())).value,
    }


def tiers_of(times: Tensor, members: Tensor) -> dict[int, Tensor]:
    """Return the members of each tier, (N,) bool by the tier's smallest number of rows.

    Members repeat in 1, 2 to 4, 5 to 16, or more rows. A tier of fewer than ten members joins the
    tier below.

    Args:
        times: The number of rows of the training data with each text, (N,).
        members: Whether each text is a member, (N,) bool.
    """
    tiers: dict[int, Tensor] = {}
    remaining = members
    for min_rows in reversed(TIERS):
        tier = remaining & (times >= min_rows)
        if int(tier.sum()) >= (MIN_TIER_TEXTS if min_rows > 1 else 1):
            tiers[min_rows], remaining = tier, remaining & ~tier
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
    """Return rates and tests of canaries that were repeated equally often, by logged name.

    The names are those of :func:`membership_values` and :func:`extraction_values`, and these:

    - ``exposure``: The exposure in bits of the median canary among n held-out canaries,
      ``log2(n + 1) - log2(rank)`` (Carlini et al. 2019, arXiv 1802.08232, section 4.2). It cannot
      exceed ``exposure_cap = log2(n + 1)``. Its interval follows from the interval of the share of
      all possible canaries that rank above the median one. If no held-out canary does, the upper
      end is infinite.
    - ``exposure_capped``: The share of the canaries that rank above all held-out ones.

    Ties count against the canary. Scores are the increase of the log probability over the base.

    Args:
        guess: The attack's guess about N canaries.
        attack: The attack, which says which texts its samples contain.
        members: The canaries that were trained on, (N,) bool.
        others: The canaries that were held out, (N,) bool.
        look: The number of the look, counted from 1.
        alpha: The probability of error over all looks together.

    Raises:
        ValueError: One of the two sides is empty, or a score is NaN.
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
    """Return the values of canaries by their number of repetitions, or why they are unknown.

    All tiers share the probability of error and the held-out canaries.

    Args:
        guess: The attack's guess about N canaries.
        attack: The attack, which says which texts its samples contain.
        times: The number of repetitions in each tier.
        repeats: The number of repetitions of each canary if it is in the data, (N,).
        members: The canaries that were trained on, (N,) bool.
        others: The canaries that were held out, (N,) bool.
        look: The number of the look, counted from 1.
        alpha: The probability of error over all looks together.

    Returns:
        The values of :func:`canary_values` with ``members``, ``others`` and ``alpha``, by tier; a
        sentence for a tier with too few canaries on either side.
    """
    n_others, alpha = int(others.sum()), alpha / len(times)
    tiers: dict[int, dict[str, float] | str] = {}
    for tier in times:
        planted = members & (repeats == tier)
        n = int(planted.sum())
        if min(n, n_others) < MIN_CANARIES:
            tiers[tier] = (
                f"{n} canaries of tier x{tier} were trained on and {n_others} were held out: "
                f"{MIN_CANARIES} of each are needed"
            )
            continue
        tiers[tier] = canary_values(guess, attack, planted, others, look=look, alpha=alpha) | {
            "members": float(n),
            "others": float(n_others),
            "alpha": spent_at(look, alpha),
        }
    return tiers


def blind_aucs(scores: Mapping[str, Tensor], members: Tensor) -> dict[str, Rate]:
    """Return the AUC of each score that does not use the trained model, with its interval.

    Args:
        scores: The scores (N,) by name, from
            :func:`~lightning_fedleak.attacks.memorization.scores.blind_scores`.
        members: Whether each text is a member, (N,) bool.
    """
    return {name: _auc(score, members, ALPHA) for name, score in scores.items()}


def check_unseen(
    references: References, base: TokenSnapshot, compressed: Tensor, trains: Tensor
) -> None:
    """Refuse reference models that distinguish both sides before any training.

    Such a reference was trained on some of the rows. If these are the held-out rows, for example,
    it would report members even for a model that was trained on no row.

    Args:
        references: The reference models' outputs on N texts; each is asked about those that it
            is said not to have seen.
        base: The outputs of the audited model before its first step.
        compressed: The compressed sizes (N,) of
            :class:`~lightning_fedleak.model.snapshots.ReleasedModel`.
        trains: Whether each text is a row of the training data, (N,) bool.

    Raises:
        ValueError: The scores of both sides differ by more than chance.
    """
    counts = references.inside.sum(0)  # by how many references each text was seen
    found = [(counts, trains)] if bool(counts.any()) else []
    for answer, inside in zip(references.answers, references.inside, strict=True):
        unseen = ReleasedModel(base, answer, compressed).rows(~inside)
        found += [] if bool(inside.all()) else [(Combined().score(unseen), trains[~inside])]
    pairs = [(x[side].numpy(), x[~side].numpy()) for x, side in found if 0 < side.sum() < len(side)]
    p_value = len(pairs) * min((float(mannwhitneyu(*pair).pvalue) for pair in pairs), default=1.0)
    if p_value < MIN_P_VALUE:
        raise ValueError(
            "Memorization: the reference distinguishes training rows from held-out rows before the "
            f"training (p = {p_value:.1g}): set reference= to a model of other rows only"
        )


def distribution_shift(aucs: Mapping[str, Rate]) -> str | None:
    """Return a sentence if members and non-members may be from different distributions, else None.

    It is None if all intervals of blind AUCs are within .45 to .55. If a whole interval is outside,
    the texts are from different distributions; otherwise they are too few to decide. The sentence
    names the AUC that is farthest away.

    Args:
        aucs: The blind AUCs by name, from :func:`blind_aucs`.
    """
    if all(rate.low >= MIN_BLIND_AUC and rate.high <= MAX_BLIND_AUC for rate in aucs.values()):
        return None

    def outside(rate: Rate) -> float:
        return max(rate.low - MAX_BLIND_AUC, MIN_BLIND_AUC - rate.high)

    name, rate = max(aucs.items(), key=lambda item: abs(item[1].value - 0.5))
    finding = "too few to decide whether they are exchangeable"
    if max(map(outside, aucs.values())) > 0:
        name, rate = max(aucs.items(), key=lambda item: outside(item[1]))
        finding = "from different distributions"
    return (
        f"{finding}: without the trained model '{name}' distinguishes them with an AUC of "
        f"{rate.value:.2f} ({rate.low:.2f} to {rate.high:.2f}), where 0.45 to 0.55 is needed"
    )


def highest_auc(scores: Mapping[str, Tensor], members: Tensor) -> float:
    """Return the highest AUC of several scores, each taken in its better direction.

    Args:
        scores: The scores (N,) by name.
        members: Whether each text is a member, (N,) bool.
    """
    pools = [_pool(score, members) for score in scores.values()]
    wins = [mannwhitneyu(score[member], score[~member]).statistic for score, member in pools]
    pairs = int(members.sum()) * int((~members).sum())
    return float(max(max(count, pairs - count) for count in wins)) / pairs


def _auc(scores: Tensor, members: Tensor, alpha: float) -> Rate:
    """Return the AUC of independent texts; its interval errs with probability ``alpha``."""
    score, member = _pool(scores, members)
    return auc(score, member, np.arange(len(score)), alpha, RESAMPLES, np.random.default_rng(0))


def _difference(first: Rate, second: Rate) -> Rate:
    """Return the difference of two independent proportions; unknown if either is unknown."""
    value = first.value - second.value
    down = math.hypot(first.value - first.low, second.high - second.value)
    up = math.hypot(first.high - first.value, second.value - second.low)
    return Rate(value, value - down, value + up)


def _pool(scores: Tensor, members: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return scores and membership as arrays.

    Raises:
        ValueError: There are no members or no non-members, the lengths differ, or a score is NaN.
    """
    score, member = columns(scores, members)
    if np.isnan(score).any():
        raise ValueError("scores: give a number for each text, not NaN")
    if not member.any() or member.all():
        raise ValueError("members: give members and non-members")
    return score, member
