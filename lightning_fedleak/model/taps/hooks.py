"""Helpers for the hooks of taps.

A *tap* is a set of hooks that record tensors of the user's training and change nothing. A hook that
fails must not end the user's forward or backward: its error is stored, and raised when the tap is
read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from lightning_fedleak.model.model_state import Hook as Hook

_P = ParamSpec("_P")
_R = TypeVar("_R")
# A key for each open :func:`taps_paused` block.
#
# It is global and no context variable, because on a GPU autograd runs hooks in other threads.
_pauses: set[object] = set()


def raised_when_read(
    hook: Callable[Concatenate[Any, _P], _R],
) -> Callable[Concatenate[Any, _P], _R | None]:
    """Return a hook that never raises: the first exception is stored as its tap's ``error``.

    Within :func:`taps_paused` it does nothing.
    """

    @wraps(hook)
    def run(tap: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        if _pauses:
            return None
        try:
            return hook(tap, *args, **kwargs)
        except Exception as error:
            tap.error = tap.error or error
            return None

    return run


@contextmanager
def taps_paused() -> Iterator[None]:
    """Pause the hooks of taps inside the block, for backwards that do not train.

    For example, a check of a loss runs a backward through the step's graph.
    """
    key = object()
    _pauses.add(key)
    try:
        yield
    finally:
        _pauses.remove(key)


def are_taps_paused() -> bool:
    """Return whether a :func:`taps_paused` block is open."""
    return bool(_pauses)


def raise_kept(tap: Any) -> None:
    """Raise the error that a hook of a tap has stored, and clear it."""
    error, tap.error = tap.error, None
    if error is not None:
        raise error


def random_states(device: torch.device) -> tuple[Tensor, ...]:
    """Return the states of torch's generators of the CPU and of a CUDA device; () for others."""
    if device.type == "cuda":
        return torch.get_rng_state(), torch.cuda.get_rng_state(device)
    return (torch.get_rng_state(),) if device.type == "cpu" else ()


def set_random_states(states: tuple[Tensor, ...], device: torch.device) -> None:
    """Set torch's generators to the states that :func:`random_states` returned."""
    if states:
        torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)
