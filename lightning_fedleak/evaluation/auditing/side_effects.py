"""What a training step changes beside the gradient that it releases.

After a step, weights, buffers and the states of optimizers differ from what the optimizers make of
the released gradient by a *side effect*: a weight decay of one's own, an average in a buffer, or a
leak. In a sound training it follows from weights and noise alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

ROUNDING = 8.0  # units in the last place, of a tensor's norm, below which a change is rounding
FEW = 16  # numbers; below, a norm of noise varies much
CHANCE = 10.0, 1e4
"""Factors by which noise of 16 numbers, and of fewer, is not shorter than its mean by chance."""


class SideEffect(NamedTuple):
    """What a step changed in one tensor beside its release.

    Attributes:
        change: of the tensor's numbers.
        rounding: norm of a change that may be rounding.
    """

    change: Tensor
    rounding: float


SideEffects = dict[str, SideEffect]


def read_tensors(model: nn.Module, stateful: Iterable[Any]) -> dict[str, Tensor]:
    """Return copies of all numbers that a training holds, by what they are.

    Args:
        model: whose weights and buffers are read.
        stateful: optimizers, and other objects with a ``state_dict``.
    """
    tensors: dict[str, Tensor] = {f"the weight {n}": p for n, p in model.named_parameters()}
    tensors |= {f"the buffer {name}": value for name, value in model.named_buffers()}
    for number, one in enumerate(stateful):
        for path, value in tree_flatten_with_path(one.state_dict())[0]:
            if isinstance(value, Tensor | int | float):
                name = f"{type(one).__name__} {number}{keystr(path)}"
                tensors[name] = torch.as_tensor(value, dtype=getattr(value, "dtype", torch.float64))
    return {name: value.detach().clone() for name, value in tensors.items()}


def side_effects(after: dict[str, Tensor], explained: dict[str, Tensor]) -> SideEffects:
    """Return what differs between the tensors after a step and those that the release explains.

    Args:
        after: the tensors after the step.
        explained: the tensors after a step of the optimizers alone, from the same beginning.
    """
    effects: SideEffects = {}
    for name in after | explained:
        first, second = after.get(name), explained.get(name)
        if first is None or second is None or first.shape != second.shape:
            present = first if first is not None else second
            assert present is not None
            first, second = present, torch.zeros_like(present)
        if not torch.equal(first, second):
            unit = torch.finfo(first.dtype).eps if first.is_floating_point() else 0.0
            change = first.float() - second.float()
            effects[name] = SideEffect(change, ROUNDING * unit * float(first.float().norm()))
    return effects


def far_apart(
    first: SideEffects, second: SideEffects, share: float, share_of_few: float | None = None
) -> list[str]:
    """Return the names of the tensors whose side effects differ between two steps.

    Args:
        first: side effects of a step.
        second: side effects of another step from the same weights.
        share: of the first's norm by which they may differ, beside rounding.
        share_of_few: the same for tensors of fewer than 16 numbers; None: as of all.
    """
    names = []
    for name, present in (first | second).items():
        none = SideEffect(torch.zeros_like(present.change), 0.0)
        one, other = first.get(name, none), second.get(name, none)
        few = share if share_of_few is None else share_of_few
        allowed = float(one.change.norm()) * (few if present.change.numel() < FEW else share)
        if float((one.change - other.change).norm()) > allowed + max(one.rounding, other.rounding):
            names.append(name)
    return names
