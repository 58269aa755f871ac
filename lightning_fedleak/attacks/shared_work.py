"""A cache of results that several attacks share, such as sampled texts or words of one gradient.

An engine runs attacks during a training. It does so inside :func:`share_work`, which holds the
cache. An attack calls :func:`do_once` with a key and a function: the function runs only if no
attack has stored a result for that key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from lightning_fedleak.model.snapshots import UnusableObservation

T = TypeVar("T")

_work: ContextVar[dict[Hashable, Any] | None] = ContextVar("_work", default=None)


@contextmanager
def share_work(work: dict[Hashable, Any] | None = None) -> Iterator[None]:
    """Let the attacks that run inside use each other's results.

    Args:
        work: results of an earlier block that may be used too. The model's weights must not have
            changed since then.
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


def do_once(key: Hashable, compute: Callable[[], T], *, subject: object = None) -> T:
    """Return the stored result for a key, or compute and store it.

    An :class:`UnusableObservation` is stored and raised again; other errors are not stored.

    Args:
        key: must be equal for equal results within one :func:`share_work`.
        compute: computes the result.
        subject: the object that the result belongs to. It is kept alive, so that its id may be part
            of the key.
    """
    work = stored_work()
    if key not in work:
        try:
            work[key] = compute(), subject
        except UnusableObservation as error:
            work[key] = type(error)(*error.args), subject
    stored: T | UnusableObservation = work[key][0]
    if isinstance(stored, UnusableObservation):
        raise type(stored)(*stored.args)  # a new one: a raised error keeps its stack frames alive
    return stored
