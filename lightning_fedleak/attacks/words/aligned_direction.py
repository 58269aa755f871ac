"""Turning the direction of public text towards the hidden states behind one gradient."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_fedleak.attacks.words.aligned_rows import (
    RowSummary,
    checked_norms,
    projections,
    separating_direction,
    token_norm,
)

_ROWS = 512  # unused rows that the direction is fitted to, the longest: a limit of time, not tuned
_FEWEST = 64  # rows below which the direction of public text is kept; not tuned
_STEPS = 12  # directions tried; more cost time at every look, not tuned
_RATE = 0.25  # length of a move of the direction; not tuned
_LARGE = 0.3  # norm, in used tokens, from which a row is that of a used type; not tuned
_UNUSED = 0.1  # norm, in used tokens, up to which a row is that of an unused type; not tuned
_SHORT = 0.02  # norm, in used tokens, up to which a row need not be projected; not tuned
_SAMPLED = 128  # rows of the sample that shows noise or label smoothing; not tuned
_NEGATIVE = 0.1  # share of negative rows of that sample from which all rows are read; not tuned


def turn(
    gradient: Tensor, summary: RowSummary, u: Tensor, rows: Tensor | None = None
) -> tuple[RowSummary, Tensor]:
    """Return a direction on which the hidden states behind this gradient are positive.

    The row of an unused type is a positive combination of the hidden states. If the text differs
    from the public text, or the model was trained on, ``u`` has hidden states on both sides; a
    direction that is positive on all unused rows then replaces it. A row counts as unused if it is
    small beside the row of one used token, and is left out if noise could explain it.

    Args:
        gradient: (V, d), or some of its rows.
        summary: of ``gradient`` along ``u``.
        u: (d,) of public text. It stays if too few rows are usable, or if the new direction made
            the large rows positive, because rows of used types are negative.
        rows: indices of the rows to choose from; all by default.

    Returns:
        the summary along the new direction, and the direction.
    """
    turned_summary, direction, _ = _turn(gradient, summary, u, rows)
    return turned_summary, direction


def turn_on_long_rows(gradient: Tensor, u: Tensor) -> tuple[RowSummary, Tensor]:
    """Return the result of :func:`turn`, from little more than the norms of most rows.

    Rows of used types are long. Rows shorter than a fiftieth of a used token's are not projected:
    they get their length, as unused rows. All rows are read if a sample of them shows that noise or
    label smoothing made many negative, if ``u`` stays, or if too many rows are long.

    Args:
        gradient: (V, d).
        u: (d,) of public text.

    Raises:
        UnusableObservation: the gradient has NaN or infinity, or is all zero.
    """
    norms = checked_norms(gradient)
    least, places, n_sampled = _long_and_sampled_rows(norms)
    projection = projections(gradient.detach().index_select(0, places), u)
    if int((projection[-n_sampled:] < 0).sum()) <= _NEGATIVE * n_sampled:
        summary = RowSummary(norms.index_copy(0, places, projection), norms, torch.zeros_like(u))
        result, direction, token = _turn(gradient, summary, u, long_rows_only=True)
        if direction is not u and token is not None and bool(least < _LARGE * token):
            return result, direction
    summary = RowSummary.read(gradient, u, norms)
    result, direction, _ = _turn(gradient, summary, u, long_rows_only=True)
    return result, direction


def _long_and_sampled_rows(norms: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the longest sixteenth of the rows, followed by a sample of all rows.

    Returns:
        The least norm of the long rows, the rows, and the size of the sample.
    """
    some = torch.arange(0, len(norms), max(1, len(norms) // _SAMPLED), device=norms.device)
    sample = norms[:: max(1, len(norms) // (4 * _SAMPLED))]
    least = sample.kthvalue(max(1, len(sample) * 15 // 16)).values
    return least, torch.cat([(norms > least).nonzero()[:, 0], some]), len(some)


def _turn(
    gradient: Tensor,
    summary: RowSummary,
    u: Tensor,
    rows: Tensor | None = None,
    long_rows_only: bool = False,
) -> tuple[RowSummary, Tensor, Tensor | None]:
    """Return the summary, the direction, and the norm of one used token's row if it is known."""
    if rows is not None and len(rows) < _FEWEST:
        return summary, u, None
    noise = (summary if rows is None else summary.select(rows)).noise()
    token = token_norm(summary, noise)
    if token is None:
        return summary, u, None
    clear = (summary.norms > 2 * noise * summary.width**0.5) & (summary.norms < _UNUSED * token)
    places = clear.nonzero()[:, 0] if rows is None else rows[clear[rows]]
    if len(places) < _FEWEST:
        return summary, u, token
    longest = summary.norms.index_select(0, places).topk(min(_ROWS, len(places))).indices
    unused = gradient.detach().index_select(0, places[longest]).float() - summary.common
    direction = separating_direction(unused, steps=_STEPS, rate=_RATE)
    projection = _project_long_rows(gradient, direction, summary, token) if long_rows_only else None
    if projection is None:
        projection = projections(gradient, direction) - summary.common @ direction
    large = (summary.norms > _LARGE * token).nonzero()[:, 0]
    if not bool((projection[large].sign() * summary.norms[large]).sum() < 0):
        return summary, u, token
    return replace(summary, projection=projection), direction, token


def _project_long_rows(
    gradient: Tensor, u: Tensor, summary: RowSummary, token: Tensor
) -> Tensor | None:
    """Return the projections of the long rows; None if more than a fifth of the rows is long."""
    long = (summary.norms > _SHORT * token).nonzero()[:, 0]
    if len(long) > len(summary.norms) // 5:
        return None
    projection = projections(gradient.detach().index_select(0, long), u) - summary.common @ u
    return summary.norms.index_copy(0, long, projection)
