"""Measures the time of work on a device, and shows progress bars of long work."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import TypeVar

import torch
from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Item = TypeVar("Item")

# The display of the enclosing :func:`bars`; None if no bars are shown.
_display: ContextVar[Progress | None] = ContextVar("_display", default=None)


@contextmanager
def bars(show: bool) -> Iterator[None]:
    """Show a bar for each :func:`track` in the block, unless another live display is running.

    Args:
        show: Whether to show bars.
    """
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    display: Progress | None = None
    if show:
        with suppress(LiveError):
            progress.start()
            display = progress
    token = _display.set(display)
    try:
        yield
    finally:
        _display.reset(token)
        if display is progress:
            progress.stop()


class Stopwatch:
    """Measures what work takes of this process: the smaller of its time and its processor time.

    A pause in which the process does not run (a busy machine, swapping, a stopped job) adds no
    processor time, and threads that work at the same time add no more than the time that passes.
    All budgets, prices and cadences use it.

    Args:
        device: A device for which the process may wait. On a GPU all the time that passes counts.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._waits = device is not None and device.type != "cpu"
        self._begin, self._processor = time.perf_counter(), time.process_time()

    @property
    def seconds(self) -> float:
        """Return the seconds so far."""
        passed = time.perf_counter() - self._begin
        return passed if self._waits else min(passed, time.process_time() - self._processor)


def measure_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the duration of work, by a :class:`Stopwatch` or in seconds of a GPU.

    On a GPU the load by other programs changes it.

    Args:
        work: The function to measure, which is called once.
        device: The device that it runs on.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) / 1000
    watch = Stopwatch()
    work()
    return watch.seconds


@cache
def operations_per_second(device: torch.device) -> float:
    """Return the floating-point operations per second of a float32 matrix product, measured once.

    Args:
        device: The device of the product.
    """
    matrix = torch.ones(512, 512, dtype=torch.float32, device=device)
    float((matrix @ matrix)[0, 0])  # the first product, which includes set-up, is not timed
    products = 4  # short, but longer than the overhead of a measurement; not tuned
    seconds = measure_seconds(lambda: [matrix @ matrix for _ in range(products)], device)
    # A product of n x n matrices has n ** 3 multiplications and as many additions.
    return products * 2 * len(matrix) ** 3 / max(seconds, 1e-9)


def track(
    items: Collection[Item], task_name: str, describe: Callable[[Item], str] | None = None
) -> Iterator[Item]:
    """Yield the items, with a progress bar if :func:`bars` shows them.

    Args:
        items: The items.
        task_name: The name of the work, shown before the bar.
        describe: A function that returns a few words on the current item.
    """
    progress = _display.get()
    if progress is None:
        yield from items
        return
    task = progress.add_task(task_name, total=len(items))
    try:
        for item in items:
            if describe is not None:
                progress.update(task, description=f"{task_name} {describe(item)}")
            yield item
            progress.advance(task)
    finally:
        progress.remove_task(task)
