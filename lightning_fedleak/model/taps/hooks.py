"""Hooks in the user's own forward and backward, which must not end them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class HoldsError(Protocol):
    """A tap that keeps what one of its hooks raised, and raises it when it is read."""

    error: Exception | None


_T = TypeVar("_T", bound=HoldsError)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def raised_when_read(
    hook: Callable[Concatenate[_T, _P], _R],
) -> Callable[Concatenate[_T, _P], _R | None]:
    """Return a hook that changes nothing where it fails: the tap keeps the error."""

    @wraps(hook)
    def run(tap: _T, /, *args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        try:
            return hook(tap, *args, **kwargs)
        except Exception as error:
            tap.error = tap.error or error
            return None

    return run


def raise_kept(tap: HoldsError) -> None:
    """Raise what a hook of a tap has raised, once."""
    error, tap.error = tap.error, None
    if error is not None:
        raise error
