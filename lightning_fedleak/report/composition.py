"""The composition of recorded releases, and the bounds on membership tests that follow from it.

A *release* is one update with the noise of differential privacy. An accountant composes releases:
it returns the epsilon of all together. :func:`composed_epsilon` composes releases at one delta.
:func:`curves_of` composes them at many deltas, and :func:`largest_rates` takes the tightest bounds
on TPR and AUC from these pairs.
"""

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
MAX_SHOWN_EPSILON = 50.0  # larger ones are cut: they limit nothing, and exp(epsilon) may overflow
MIN_EXPLAINED = 0.9  # share of the recorded epsilon that the recorded releases must add up to.
# Logs round up to 2% more releases: at 1 no history would pass, at 0 one with gaps would.
Curve = tuple[tuple[float, float], ...]
"""Pairs (epsilon, delta), each of which is a guarantee of the same releases."""


def composed_epsilon(
    history: Sequence[records.Releases], delta: float | None, accountant: str, sampling: str | None
) -> float | str | None:
    """Return the epsilon of releases, or in words why there is no number; None without noise."""
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

    One pair (epsilon, delta) bounds a test by Kairouz, Oh and Viswanath 2015. Releases have such a
    pair for every delta; all pairs together give a tighter bound.

    Args:
        epsilon: the epsilon spent, against an adversary who sees all clients.
        delta: the delta at which it holds.
        curves: the pairs of each client's releases. They are used only if they account for the
            whole epsilon (:data:`MIN_EXPLAINED`).
    """
    from lightning_fedleak.evaluation.auditing import curve_auc, curve_tpr, dp_auc, dp_tpr

    pair = min(epsilon, MAX_SHOWN_EPSILON), delta
    tprs, aucs = [dp_tpr(FPR, *pair)], [dp_auc(*pair)]
    # A curve accounts for the whole epsilon if no pair with a delta up to this one is far below.
    min_epsilon = MIN_EXPLAINED * epsilon
    if any(all(pair[0] >= min_epsilon for pair in curve if pair[1] <= delta) for curve in curves):
        tprs.append(max(curve_tpr(FPR, curve) for curve in curves))
        aucs.append(max(curve_auc(curve) for curve in curves))
    return min(tprs), min(aucs)


def curves_of(
    histories: Sequence[Sequence[records.Releases]], accountant: str, sampling: str | None
) -> list[Curve]:
    """Return the pairs (epsilon, delta) of each client's releases; [] if some do not compose.

    Args:
        histories: the releases until each look, of all clients.
        accountant: the accountant of the run.
        sampling: the sampling scheme; None if no accountant composes the releases.
    """
    largest = _largest_histories(histories)
    if accountant not in ("prv", "rdp") or sampling is None or not all(largest):
        return []
    kind = accountant if len(largest) == 1 else "rdp"  # RDP composes in microseconds
    curves = [_curve(history, kind, sampling) for history in largest]
    return curves if all(curves) else []


def _largest_histories(
    histories: Sequence[Sequence[records.Releases]],
) -> list[tuple[records.Releases, ...]]:
    """Return the histories that are not part of another one, as those of earlier looks are."""
    largest: list[tuple[records.Releases, ...]] = []
    for history in dict.fromkeys(map(tuple, reversed(histories))):
        if not any(_is_part(history, other) for other in largest):
            largest = [other for other in largest if not _is_part(other, history)]
            largest.append(history)
    return largest


def _is_part(history: Iterable[records.Releases], other: Iterable[records.Releases]) -> bool:
    """Return whether the other history has at least as many releases of each kind."""
    counts = {releases[:2]: releases.number for releases in other}
    return all(releases.number <= counts.get(releases[:2], 0) for releases in history)


@functools.lru_cache(maxsize=64)
def _curve(history: tuple[records.Releases, ...], accountant: str, sampling: str) -> Curve:
    """Return the pairs (epsilon, delta) of releases; () if no accountant composes them."""
    if any(not releases.noise_multiplier for releases in history):
        return ()
    try:
        from lightning_fedleak.defenses.accounting.accounting import curve_of

        kind, scheme = cast("AccountantKind", accountant), cast("SamplingScheme", sampling)
        return tuple(curve_of(history, kind, scheme))
    except (ImportError, ValueError):
        return ()
