"""Progress of what takes seconds, shown where somebody watches."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Item = TypeVar("Item")

_shown: ContextVar[Progress | Console | None] = ContextVar("_shown", default=None)


@contextmanager
def bars(shown: bool) -> Iterator[None]:
    """Shows a bar for each :func:`track` within; none where another live display is running.

    A notebook without ipywidgets cannot draw bars: a line says what is done instead.

    Args:
        shown: whether to.
    """
    console = Console(stderr=True)
    if shown and console.is_jupyter and importlib.util.find_spec("ipywidgets") is None:
        token = _shown.set(console)
        try:
            yield
        finally:
            _shown.reset(token)
        return
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    try:
        if shown:
            progress.start()
    except LiveError:
        shown = False
    token = _shown.set(progress if shown else None)
    try:
        yield
    finally:
        _shown.reset(token)
        if shown:
            progress.stop()


def track(items: Collection[Item], what: str) -> Iterator[Item]:
    """The items, with a bar of how many are done where bars are shown.

    Args:
        items: of a known number.
        what: is done, a few words.
    """
    progress = _shown.get()
    if progress is None:
        yield from items
        return
    if not isinstance(progress, Progress):
        print(f"{what} ...", file=sys.stderr, flush=True)
        yield from items
        return
    task = progress.add_task(what, total=len(items))
    try:
        for item in items:
            yield item
            progress.advance(task)
    finally:
        progress.remove_task(task)


__all__ = ["bars", "track"]
