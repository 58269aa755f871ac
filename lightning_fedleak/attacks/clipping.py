"""Clipping by value: how a gradient shows that entries were cut to one size."""

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

_EQUAL = 3
"""Entries of each sign that must share the largest size: fewer may by chance; not tuned."""
ROUNDED = 1e-3
"""Rounding of an update, from stored weights, as a share of the clip value; not tuned."""
_EXACT = 4.0
"""Rounding error of an entry that was not cut, in units in the last place; not tuned."""
WHY_CUT = (
    "clipping by value has cut entries of the gradient to one size, and this attack reads "
    "gradients as they are or scaled: clip by norm (gradient_clip_algorithm='norm'), or raise "
    "gradient_clip_val, to see what the client's data would give away"
)


def cut_size(gradient: Tensor, tolerance: float = 0.0) -> float | None:
    """Return the size that entries were cut to, as the gradient shows; None if none were.

    Several entries of both signs have the largest size then.

    Args:
        gradient: of any shape.
        tolerance: largest relative difference of sizes that count as equal.
    """
    if not gradient.numel():
        return None
    low, high = (float(end) for end in torch.aminmax(gradient))
    size = max(-low, high)
    least = (1 - tolerance) * size
    if not 0 < size < math.inf or min(-low, high) < least:
        return None
    equal = min(int((gradient >= least).sum()), int((gradient <= -least).sum()))
    return size if equal >= _EQUAL else None


def shared_cut(snapshot: GradientSnapshot, roles: Iterable[str], facts: RunFacts) -> float | None:
    """Return the size that entries of a shared gradient were cut to; None if none were.

    It is NaN if a defence, or an optimizer that divides gradients, hides which ones were.

    Args:
        snapshot: the shared gradients.
        roles: those that are checked.
        facts: of the run, with its clip value.
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
    """Return standard deviations of entries' errors, infinite where an entry was cut.

    Args:
        snapshot: gradients, or an update as gradients.
        roles: the gradients that words are read from.
        facts: of the run.
        noise: standard deviation of what was added to each entry, by parameter.
        errors: standard deviations of uneven entries, by parameter; None if they are even.

    Returns:
        ``errors`` itself if no entry was cut.

    Raises:
        Inapplicable: it is unknown which entries were cut.
    """
    if errors is not None and facts.clip_value is None:
        return errors  # the largest entries of an optimizer's step have one size, cut or not
    size = shared_cut(snapshot, roles, replace(facts, optimizer=None))
    if size is None:
        return errors
    if math.isnan(size) or facts.local_steps not in (None, 1):
        raise Inapplicable(WHY_CUT)
    cut_errors = {}
    for role, tensor in snapshot.tensors.items():
        g = whole_tensor(tensor).double()
        error = (_EXACT * torch.finfo(tensor.dtype).eps * g).abs() + noise.get(role, 0.0)
        error = errors[role].to(error) if errors else error
        cut_errors[role] = error.masked_fill(g.abs() >= (1 - ROUNDED) * size, math.inf)
    return cut_errors


def check_uncut(snapshot: GradientSnapshot, roles: Iterable[str], facts: RunFacts) -> None:
    """Raise an error if entries of a gradient were cut to one size.

    Raises:
        Inapplicable: says what to change.
    """
    if shared_cut(snapshot, roles, facts) is not None:
        raise Inapplicable(WHY_CUT)
