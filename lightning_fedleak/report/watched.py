"""What whoever watches a run writes and shows of it: its report, live or at its end."""

from __future__ import annotations

import importlib
import math
import time
from html import escape
from typing import Any, NoReturn

from lightning_fedleak import report
from lightning_fedleak.messages import rank_zero_warn

SECONDS = 0.02
"""Seconds of processor that a live page may take a look, on average.

More: pages of long runs are newer. Less: they wait for more looks.
"""


class _Latest(dict[str, float]):
    """Values by log name, with an error that says why there is none."""

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(
            f"{name} has no value: no look has ended yet, or none of this run reads it. "
            f"latest.get({name!r}) is None then"
        )


class Reported:
    """What is watched by an engine: it writes a report, and a notebook displays it."""

    engine: Any

    @property
    def latest(self) -> dict[str, float]:
        """The newest value by log name; NaN is unknown. Empty before the first look."""
        return _Latest(self.engine.results.latest)

    def __repr__(self) -> str:
        selection, options = self.engine.selection, self.engine.options
        names = ", ".join(attack.name for attack in selection.attacks)
        attacks = "'auto'" if selection.auto else f"[{names}]"
        stages = options.stages
        shown = "" if stages == ("shared",) else f", stages={[*map(str, stages)]}"
        looks = f", looks={self.engine.results.looks}" if self.engine.results.looks else ""
        return f"{type(self).__name__}({attacks}, {options.cadence.argument}{shown}{looks})"

    def _report_begins(self) -> None:
        """Write a live page after each look from now on, where it is asked for.

        One that takes more than :data:`SECONDS` is written at so few looks that it takes as much
        on average; one that cannot be written warns, and ends.
        """
        record, wait = self.engine.record, 1
        if record is None or self.engine.options.report != "live":
            return

        def write() -> None:
            nonlocal wait
            wait -= 1
            if wait:
                return
            start = time.thread_time()
            try:
                report.write_live(record.path, record.run)
            except Exception as error:
                wait = -1
                rank_zero_warn(f"{self.engine.run.watcher}: no live report: {error}")
                return
            wait = max(1, math.ceil((time.thread_time() - start) / SECONDS))

        self.engine.subscribe(write)

    def _write_report(self, record: Any) -> None:
        """Write the report of a run whose record has ended, and upload its page if asked to."""
        page = report.write_at_end(record.path, record.run, self.engine.run.watcher)
        log = self.engine.report
        if page is not None and self.engine.options.upload_report and log is not None:
            log.upload(page)

    def show(self, height: int = 900) -> None:
        """Display the report of the newest run in a notebook, while it goes on too.

        Args:
            height: The height of the frame, in pixels.

        Raises:
            ImportError: IPython is not installed.
            RuntimeError: no run has begun.
            ReportError: its logs cannot be read.
        """
        if (jsonl := self.engine.jsonl) is None:
            raise RuntimeError("show() is about a run: train first")
        logs = report.read([jsonl.path.parent / "run.jsonl"], run=jsonl.run)
        document = escape(report.page(report.findings(logs)))
        style = f"width:100%;height:{height}px;border:0"
        frame = f'<div><iframe srcdoc="{document}" style="{style}"></iframe></div>'
        notebook: Any = importlib.import_module("IPython.display")
        notebook.display(notebook.HTML(frame))
