"""Clipping by value: entries of a gradient that were cut to one size, and how it shows that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_fedleak.attacks.base import RunFacts
from lightning_fedleak.snapshots import (
    GradientSnapshot,
    Inapplicable,
    Stage,
    UpdateSnapshot,
    whole_tensor,
)

_ALIKE = 3
"""Entries of each sign that share the largest size where they were cut: no fewer by chance."""
ROUNDED = 1e-3
"""How far rounded weights may take an update from the size it was cut to, as a share of that."""

_EXACT = 4.0
"""Rounding error of an entry that was not cut, in units in the last place."""
WHY_CUT = (
    "clipping by value has cut entries of the gradient to one size, and this attack reads "
    "gradients as they are or scaled: clip by norm (gradient_clip_algorithm='norm'), or raise "
    "gradient_clip_val, to see what the client's data would give away"
)


def cut_size(gradient: Tensor, tolerance: float = 0.0) -> float | None:
    """The size that entries were cut to, as the gradient itself shows; None where none were.

    Several entries of both signs have the largest size then, which no others do.

    Args:
        gradient: of any shape.
        tolerance: how far sizes that were one may be apart, as a share of them.
    """
    if not gradient.numel():
        return None
    low, high = (float(end) for end in torch.aminmax(gradient))
    size = max(-low, high)
    least = (1 - tolerance) * size
    if not 0 < size < math.inf or min(-low, high) < least:
        return None
    alike = min(int((gradient >= least).sum()), int((gradient <= -least).sum()))
    return size if alike >= _ALIKE else None


def shared_cut(snapshot: GradientSnapshot, roles: Iterable[str], facts: RunFacts) -> float | None:
    """The size that entries of what was shared were cut to; None where none were.

    NaN where a defence, or an optimizer that divides gradients, leaves it open which were.

    Args:
        snapshot: what was shared.
        roles: of its gradients that are asked about.
        facts: of the run, which says to what size it cuts, if it does.
    """
    declared = facts.clip_value
    update = isinstance(snapshot, UpdateSnapshot)
    divided = update and facts.optimizer not in (None, "SGD")
    changed = "gradients" in facts.defended and snapshot.stage is not Stage.LOCAL
    if divided or (changed and declared is not None):
        return None if declared is None else math.nan
    tolerance = ROUNDED if update else 0.0
    for role in roles:
        g = whole_tensor(snapshot.tensors[role])
        g = g.coalesce().values() if g.is_sparse else g
        if declared is None and (size := cut_size(g, tolerance)) is not None:
            return size
        least = math.inf if declared is None else declared * (1 - ROUNDED)
        if g.numel() and float(torch.stack(torch.aminmax(g)).abs().amax()) >= least:
            return declared
    return None


def entry_errors(
    snapshot: GradientSnapshot,
    roles: Sequence[str],
    facts: RunFacts,
    noise: Mapping[str, float],
    errors: Mapping[str, Tensor] | None,
) -> Mapping[str, Tensor] | None:
    """Standard deviations of entries' errors, infinite where an entry was cut: of its sign alone.

    Args:
        snapshot: gradients, or an update as gradients.
        roles: of the gradients that words are read off.
        facts: of the run.
        noise: standard deviation of what was added to each entry, by parameter.
        errors: of uneven entries, by parameter, as known so far; None where they are alike.

    Returns:
        ``errors`` itself where no entry was cut.

    Raises:
        Inapplicable: it is open which entries were cut.
    """
    if errors is not None and facts.clip_value is None:
        return errors  # the largest entries of an optimizer's step are of one size, cut or not
    size = shared_cut(snapshot, roles, replace(facts, optimizer=None))
    if size is None:
        return errors
    if math.isnan(size) or facts.local_steps not in (None, 1):
        raise Inapplicable(WHY_CUT)
    known = {}
    for role, tensor in snapshot.tensors.items():
        g = whole_tensor(tensor).double()
        error = (_EXACT * torch.finfo(tensor.dtype).eps * g).abs() + noise.get(role, 0.0)
        error = errors[role].to(error) if errors else error
        known[role] = error.masked_fill(g.abs() >= (1 - ROUNDED) * size, math.inf)
    return known


def check_uncut(snapshot: GradientSnapshot, roles: Iterable[str], facts: RunFacts) -> None:
    """Refuses a gradient whose entries were cut to one size.

    Raises:
        Inapplicable: says what to change.
    """
    if shared_cut(snapshot, roles, facts) is not None:
        raise Inapplicable(WHY_CUT)
