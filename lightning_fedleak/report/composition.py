"""What releases cost together, and the most that they allow any test of membership."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

from lightning_fedleak.report import records
from lightning_fedleak.report.wording import rounded_up

if TYPE_CHECKING:
    from lightning_fedleak.defenses.accounting import AccountantKind, SamplingScheme

FPR = 0.01  # the low false positive rate at which membership attacks are compared (LiRA, 2022)
MAX_SHOWN_EPSILON = 50.0  # a larger epsilon limits nothing, and its exponential overflows
MIN_EXPLAINED = 0.9  # share of a recorded epsilon that its releases must cost to be all of it:
# logs round up to 2% more releases; at 1 nothing would be, at 0 a history with gaps would count
Curve = tuple[tuple[float, float], ...]
"""Pairs (epsilon, delta) that all hold."""


def composed_epsilon(
    history: Sequence[records.Releases], delta: float | None, accountant: str, sampling: str | None
) -> float | str | None:
    """Return the epsilon of releases, or in words why it is no number; None without noise."""
    if not history or not delta or any(not releases.noise_multiplier for releases in history):
        return None
    try:
        from lightning_fedleak.defenses.accounting.accounting import MAX_EPSILON, epsilon_of

        kind: AccountantKind = "prv" if accountant == "prv" else "rdp"
        epsilon = epsilon_of(history, delta, kind, cast("SamplingScheme", sampling))
    except (ImportError, ValueError) as error:
        return f"not computed: {error}"
    return f"more than {MAX_EPSILON:g}" if math.isinf(epsilon) else rounded_up(epsilon)


def largest_rates(epsilon: float, delta: float, curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the largest TPR and AUC of any test of two neighbouring data sets.

    One pair (epsilon, delta) limits a test by Kairouz, Oh and Viswanath 2015. Releases have such a
    pair for every delta, and all of them limit it together.

    Args:
        epsilon: what was spent, against whoever sees all clients.
        delta: at which it holds.
        curves: the pairs of each client's releases, which count where they are all that was spent.
    """
    from lightning_fedleak.evaluation.auditing import curve_auc, curve_tpr, dp_auc, dp_tpr

    pair = min(epsilon, MAX_SHOWN_EPSILON), delta
    tprs, aucs = [dp_tpr(FPR, *pair)], [dp_auc(*pair)]
    min_epsilon = MIN_EXPLAINED * epsilon
    if any(all(pair[0] >= min_epsilon for pair in curve if pair[1] <= delta) for curve in curves):
        tprs.append(max(curve_tpr(FPR, curve) for curve in curves))
        aucs.append(max(curve_auc(curve) for curve in curves))
    return min(tprs), min(aucs)


def curves_of(
    histories: Sequence[Sequence[records.Releases]], accountant: str, sampling: str | None
) -> list[Curve]:
    """Return the pairs of each client's releases; none where an accountant cannot compose all.

    Args:
        histories: the releases at each look, of each client.
        accountant: which composed them in the run.
        sampling: how they were drawn; None: not recorded.
    """
    largest = _largest_histories(histories)
    if accountant not in ("prv", "rdp") or sampling is None or not all(largest):
        return []
    kind = accountant if len(largest) == 1 else "rdp"  # which takes microseconds
    curves = [_curve(history, kind, sampling) for history in largest]
    return curves if all(curves) else []


def _largest_histories(
    histories: Sequence[Sequence[records.Releases]],
) -> list[tuple[records.Releases, ...]]:
    """Return the histories that are no part of another."""
    largest: list[tuple[records.Releases, ...]] = []
    for history in dict.fromkeys(map(tuple, reversed(histories))):
        if not any(_is_part(history, other) for other in largest):
            largest = [other for other in largest if not _is_part(other, history)]
            largest.append(history)
    return largest


def _is_part(history: Iterable[records.Releases], other: Iterable[records.Releases]) -> bool:
    counts = {releases[:2]: releases.number for releases in other}
    return all(releases.number <= counts.get(releases[:2], 0) for releases in history)


@functools.lru_cache(maxsize=64)
def _curve(history: tuple[records.Releases, ...], accountant: str, sampling: str) -> Curve:
    """Return the pairs of releases; none where an accountant cannot compose them."""
    if any(not releases.noise_multiplier for releases in history):
        return ()
    try:
        from lightning_fedleak.defenses.accounting.accounting import curve_of

        kind, scheme = cast("AccountantKind", accountant), cast("SamplingScheme", sampling)
        return tuple(curve_of(history, kind, scheme))
    except (ImportError, ValueError):
        return ()
