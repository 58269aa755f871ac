"""Progress of what takes seconds, shown where somebody watches."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
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


def measure_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that some work takes, without those in which other programs hold up the processor.

    Args:
        work: is done once.
        device: that is waited for.
    """
    started, busy = time.perf_counter(), time.process_time()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return min(time.perf_counter() - started, time.process_time() - busy)


def track(
    items: Collection[Item], what: str, each: Callable[[Item], str] | None = None
) -> Iterator[Item]:
    """The items, with a bar of how many are done where bars are shown.

    Args:
        items: of a known number.
        what: is done, a few words.
        each: words on the item at work.
    """
    progress = _shown.get()
    if progress is None:
        yield from items
        return
    if not isinstance(progress, Progress):
        if each is None:
            print(f"{what} ...", file=sys.stderr, flush=True)
        for item in items:
            if each is not None:
                print(f"{what} {each(item)} ...", file=sys.stderr, flush=True)
            yield item
        return
    task = progress.add_task(what, total=len(items))
    try:
        for item in items:
            if each is not None:
                progress.update(task, description=f"{what} {each(item)}")
            yield item
            progress.advance(task)
    finally:
        progress.remove_task(task)
