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
LUCK = 10.0  # noise of 16 numbers or more is not shorter than its mean by this factor by chance
LUCK_OF_FEW = 1e4  # the same of fewer numbers: two of them in 3,000 sound probes may be by chance
FEW = 16  # numbers; below, a norm of noise varies much


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
                number_or_tensor = value if isinstance(value, Tensor) else float(value)
                tensors[f"{type(one).__name__} {number}{keystr(path)}"] = torch.as_tensor(
                    number_or_tensor
                )
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


def differing(first: SideEffects, second: SideEffects, tolerance: float) -> list[str]:
    """Return the names of the tensors whose side effects differ between two steps.

    Args:
        first: side effects of a step.
        second: side effects of another step, of the same weights and random state.
        tolerance: share of a side effect by which two may differ.
    """
    return [
        name
        for name, distance, size, rounding, _ in _compared(first, second)
        if distance > tolerance * size + rounding
    ]


def enlarged(small: SideEffects, large: SideEffects, bound: float) -> list[str]:
    """Return the names of the tensors whose side effects follow the length of the gradients.

    Args:
        small: side effects of a step with gradients of about zero.
        large: side effects of a step with gradients far above the clip norm.
        bound: by what factor clipped gradients may enlarge a side effect that is noise.
    """
    return [
        name
        for name, distance, _, rounding, numbers in _compared(small, large)
        if distance
        > bound * (LUCK if numbers >= FEW else LUCK_OF_FEW) * _size(small.get(name)) + rounding
    ]


def _compared(
    first: SideEffects, second: SideEffects
) -> Iterable[tuple[str, float, float, float, int]]:
    """Yield the name, distance, larger size, rounding and number count of each pair that is finite.

    Numbers that are not finite are compared by the release, whose test says so.
    """
    for name in first | second:
        one, other = first.get(name), second.get(name)
        present = one or other
        assert present is not None
        zeros = SideEffect(torch.zeros_like(present.change), 0.0)
        one, other = one or zeros, other or zeros
        if one.change.shape == other.change.shape:
            distance = float((one.change - other.change).norm())
            size = max(_size(one), _size(other))
            yield name, distance, size, max(one.rounding, other.rounding), one.change.numel()


def _size(effect: SideEffect | None) -> float:
    return 0.0 if effect is None else float(effect.change.norm())
