"""Turning the direction of public text towards the hidden states that one gradient was made of."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.attacks.expected import separating_direction
from lightning_fedleak.attacks.features import RowSummary, projections, token_norm

_ROWS = 512
_FEWEST = 64
_STEPS = 40
_UNUSED = 0.1
_SHORT = 0.02


def turned(
    gradient: Tensor,
    summary: RowSummary,
    u: Tensor,
    among: Tensor | None = None,
    *,
    long_rows_only: bool = False,
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
        long_rows_only: rows shorter than a fiftieth of one used token's are not projected anew:
            nothing of a used type is left in them, and they get their length, as unused rows.

    Returns:
        the summary along the new direction, and the direction.
    """
    if among is not None and len(among) < _FEWEST:
        return summary, u
    noise = (summary if among is None else summary.at(among)).noise()
    token = token_norm(summary, noise)
    if token is None:
        return summary, u
    lowest = 2 * noise * summary.width**0.5
    clear = (summary.norms > lowest) & (summary.norms < _UNUSED * token)
    places = clear.nonzero()[:, 0] if among is None else among[clear[among]]
    if len(places) < _FEWEST:
        return summary, u
    places = places[summary.norms[places].topk(min(_ROWS, len(places))).indices]
    rows = F.normalize(gradient.detach()[places].float() - summary.common, dim=1)
    own = separating_direction(rows, steps=_STEPS)
    along = _along(gradient, own, summary, token) if long_rows_only else None
    if along is None:
        along = projections(gradient, own, summary.common)
    large = summary.norms > 0.3 * token
    if not bool((along[large].sign() * summary.norms[large]).sum() < 0):
        return summary, u
    return replace(summary, along=along), own


def _along(gradient: Tensor, u: Tensor, summary: RowSummary, token: Tensor) -> Tensor | None:
    """Projections of the long rows; None where they are too many to be worth picking out."""
    long = (summary.norms > _SHORT * token).nonzero()[:, 0]
    if len(long) > len(summary.norms) // 5:
        return None
    along = summary.norms.clone()
    along[long] = projections(gradient.detach()[long], u, summary.common)
    return along
