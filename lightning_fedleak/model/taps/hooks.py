"""Hooks in the user's own forward and backward, which must not end them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def raised_when_read(
    hook: Callable[Concatenate[Any, _P], _R],
) -> Callable[Concatenate[Any, _P], _R | None]:
    """Return a hook that changes nothing where it fails: its tap keeps the ``error``."""

    @wraps(hook)
    def run(tap: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        try:
            return hook(tap, *args, **kwargs)
        except Exception as error:
            tap.error = tap.error or error
            return None

    return run


def raise_kept(tap: Any) -> None:
    """Raise what a hook of a tap has raised, once."""
    error, tap.error = tap.error, None
    if error is not None:
        raise error
