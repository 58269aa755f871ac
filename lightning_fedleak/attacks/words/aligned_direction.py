"""Turning the direction of public text towards the hidden states that one gradient was made of."""

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

_ROWS = 512
_FEWEST = 64
_STEPS = 12
_RATE = 0.25
_LARGE = 0.3
_UNUSED = 0.1
_SHORT = 0.02
_SAMPLED = 128
_NEGATIVE = 0.1


def turned(
    gradient: Tensor, summary: RowSummary, u: Tensor, among: Tensor | None = None
) -> tuple[RowSummary, Tensor]:
    """A direction on which the hidden states of this very gradient are positive.

    The row of an unused type is a positive combination of the hidden states, so a direction that
    is positive on all these rows takes the place of one that is positive on all hidden states:
    text unlike the public text, or a model that training has moved, leave the latter on both
    sides of ``u``. Rows are taken as unused where they are small beside that of one used token,
    and left out where noise could have made them.

    Args:
        gradient: (V, d), or some of its rows.
        summary: of ``gradient`` along ``u``.
        u: (d,) of public text; kept where too few rows can be read, or where the large rows would
            come out positive, which those of used types are not.
        among: the rows to choose from; all by default.

    Returns:
        the summary along the new direction, and the direction.
    """
    after, own, _ = _turned(gradient, summary, u, among)
    return after, own


def turned_on_long_rows(gradient: Tensor, u: Tensor) -> tuple[RowSummary, Tensor]:
    """:func:`turned`, reading little more than the norms of most rows.

    Rows of used types are long. Those shorter than a fiftieth of one used token's are not
    projected on the new direction (unless the others are too many to be worth picking out): they
    get their length, as unused rows. Nor are they projected on ``u``, unless a sample of the rows
    shows that noise or label smoothing has made many negative, or ``u`` is kept.

    Args:
        gradient: (V, d).
        u: (d,) of public text.

    Raises:
        UnusableObservation: the gradient has NaN or infinity, or is all zero.
    """
    norms = checked_norms(gradient)
    least, places, n_sampled = _longest_and_some(norms)
    along = projections(gradient.detach().index_select(0, places), u)
    if int((along[-n_sampled:] < 0).sum()) <= _NEGATIVE * n_sampled:
        summary = RowSummary(norms.index_copy(0, places, along), norms, torch.zeros_like(u))
        after, own, token = _turned(gradient, summary, u, long_rows_only=True)
        if own is not u and token is not None and bool(least < _LARGE * token):
            return after, own
    after, own, _ = _turned(gradient, RowSummary.of(gradient, u, norms), u, long_rows_only=True)
    return after, own


def _longest_and_some(norms: Tensor) -> tuple[Tensor, Tensor, int]:
    """About the sixteenth that is longest, and after it a sample of all.

    Returns:
        The least norm of the former, the rows, and how many of them are the sample.
    """
    some = torch.arange(0, len(norms), max(1, len(norms) // _SAMPLED), device=norms.device)
    sample = norms[:: max(1, len(norms) // (4 * _SAMPLED))]
    least = sample.kthvalue(max(1, len(sample) * 15 // 16)).values
    return least, torch.cat([(norms > least).nonzero()[:, 0], some]), len(some)


def _turned(
    gradient: Tensor,
    summary: RowSummary,
    u: Tensor,
    among: Tensor | None = None,
    long_rows_only: bool = False,
) -> tuple[RowSummary, Tensor, Tensor | None]:
    """Summary, direction, and the norm of the row of one used token where it is known."""
    if among is not None and len(among) < _FEWEST:
        return summary, u, None
    noise = (summary if among is None else summary.at(among)).noise()
    token = token_norm(summary, noise)
    if token is None:
        return summary, u, None
    clear = (summary.norms > 2 * noise * summary.width**0.5) & (summary.norms < _UNUSED * token)
    places = clear.nonzero()[:, 0] if among is None else among[clear[among]]
    if len(places) < _FEWEST:
        return summary, u, token
    longest = summary.norms.index_select(0, places).topk(min(_ROWS, len(places))).indices
    rows = gradient.detach().index_select(0, places[longest]).float() - summary.common
    own = separating_direction(rows, steps=_STEPS, rate=_RATE)
    along = _along_long_rows(gradient, own, summary, token) if long_rows_only else None
    if along is None:
        along = projections(gradient, own) - summary.common @ own
    large = (summary.norms > _LARGE * token).nonzero()[:, 0]
    if not bool((along[large].sign() * summary.norms[large]).sum() < 0):
        return summary, u, token
    return replace(summary, along=along), own, token


def _along_long_rows(
    gradient: Tensor, u: Tensor, summary: RowSummary, token: Tensor
) -> Tensor | None:
    """Projections of the long rows; None where they are too many to be worth picking out."""
    long = (summary.norms > _SHORT * token).nonzero()[:, 0]
    if len(long) > len(summary.norms) // 5:
        return None
    along = projections(gradient.detach().index_select(0, long), u) - summary.common @ u
    return summary.norms.index_copy(0, long, along)
