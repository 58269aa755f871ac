"""Changes of a training step that do not follow from the gradient that it releases.

The optimizers explain a part of what a step changes: they compute it from the released gradient. A
*side effect* is the difference that remains in weights, buffers and states of optimizers, such as a
weight decay outside the optimizer, a running average in a buffer, or a leak. In a sound training,
side effects depend on weights and noise only, and not on the examples.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

ROUNDING = 8.0  # units in the last place of a tensor's norm, up to which a change may be rounding
MIN_NUMBERS = 16  # numbers in a tensor; the norm of a smaller tensor of noise varies more
CHANCE = 10.0, 1e4
"""Allowed difference of two draws of the same noise, in norms of the first draw.

The first is for tensors of at least :data:`MIN_NUMBERS` numbers. The second is for smaller ones,
because a draw of a single number is often near 0, so that the next draw is many times as long.
"""


SideEffects = dict[str, tuple[Tensor, float]]
"""The changes of tensors in a step that its released gradient does not explain, by name.

Each is the difference of the tensor's numbers, in the tensor's shape, and the largest norm of a
change that may be rounding.
"""


def read_tensors(model: nn.Module, stateful: Iterable[Any]) -> dict[str, Tensor]:
    """Return copies of the weights, buffers and states of a training, by a name for messages.

    Args:
        model: The model with the weights and buffers.
        stateful: The optimizers, and other objects with a ``state_dict``.
    """
    tensors: dict[str, Tensor] = {f"the weight {n}": p for n, p in model.named_parameters()}
    tensors |= {f"the buffer {name}": value for name, value in model.named_buffers()}
    for index, owner in enumerate(stateful):
        for path, value in tree_flatten_with_path(owner.state_dict())[0]:
            if isinstance(value, Tensor | int | float):
                name = f"{type(owner).__name__} {index}{keystr(path)}"
                tensors[name] = torch.as_tensor(value, dtype=getattr(value, "dtype", torch.float64))
    return {name: value.detach().clone() for name, value in tensors.items()}


def side_effects(after: dict[str, Tensor], explained: dict[str, Tensor]) -> SideEffects:
    """Return the side effects of a step, by the names of the tensors that have one.

    A tensor that exists on one side only, or has another shape there, is compared with zeros.

    Args:
        after: The tensors after the step.
        explained: The tensors after the optimizers only stepped on the released gradient, from the
            same state.
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
            numbers = _numbers(first)
            rounding = ROUNDING * unit * float(numbers.norm())
            effects[name] = numbers - _numbers(second), rounding
    return effects


def _numbers(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers as finite floats that keep their digits.

    Small stand-ins replace infinities and NaN: their positions count, and the norm of the other
    numbers stays finite. Integers and float64, which float32 would round, are compared in float64
    on the CPU, because MPS has no float64.
    """
    fits = tensor.is_floating_point() and tensor.element_size() <= 4
    numbers = tensor.float() if fits else tensor.to("cpu", torch.float64)
    return numbers.nan_to_num(nan=0.5, posinf=1.0, neginf=-1.0)


def far_apart(
    first: SideEffects, second: SideEffects, share: float, share_of_few: float | None = None
) -> list[str]:
    """Return the names of the tensors whose side effects differ between two steps.

    Args:
        first: The side effects of a step.
        second: The side effects of another step from the same weights.
        share: The allowed norm of the difference in norms of the first side effect, in addition to
            rounding.
        share_of_few: The same for tensors below :data:`MIN_NUMBERS`. None: ``share``.
    """
    names = []
    for name, (present, _) in (first | second).items():
        zero = torch.zeros_like(present), 0.0
        (reference, rounding), (effect, error) = first.get(name, zero), second.get(name, zero)
        small = share if share_of_few is None else share_of_few
        allowed = float(reference.norm()) * (small if present.numel() < MIN_NUMBERS else share)
        if float((reference - effect).norm()) > allowed + max(rounding, error):
            names.append(name)
    return names
