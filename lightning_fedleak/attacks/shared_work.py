"""Work that several attacks do alike is done once: sampled texts, and what one gradient shows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

_work: ContextVar[dict[Hashable, Any] | None] = ContextVar("_work", default=None)


@contextmanager
def share_work(work: dict[Hashable, Any] | None = None) -> Iterator[None]:
    """Let attacks within use each other's results.

    Args:
        work: results of earlier blocks, to go on with; the model's weights have not changed since.
    """
    token = _work.set({} if work is None else work)
    try:
        yield
    finally:
        _work.reset(token)


def stored_work() -> dict[Hashable, Any]:
    """Return the results of the enclosing :func:`share_work`; without one an empty mapping."""
    work = _work.get()
    return {} if work is None else work


def do_once(key: Hashable, compute: Callable[[], T]) -> T:
    """Return the stored result for a key, or compute and store it; errors are stored too.

    Args:
        key: equal for equal results within one :func:`share_work`.
        compute: returns the result.
    """
    work = stored_work()
    if key not in work:
        try:
            work[key] = compute()
        except Exception as error:
            work[key] = error
    stored: T | Exception = work[key]
    if isinstance(stored, Exception):
        raise stored
    return stored
