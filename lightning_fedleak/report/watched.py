"""The report of a watched run: written live or at its end, and displayed in notebooks.

A *look* is a measurement of leakage by the attacks of a run at one training step. The run's
:class:`~lightning_fedleak.engine.Engine` makes the looks, and calls :class:`Reported` after each.
"""

import importlib
import math
import time
from html import escape
from typing import Any, NoReturn

from lightning_fedleak import report
from lightning_fedleak.messages import rank_zero_warn

SECONDS = 0.02
"""Mean CPU seconds per look that the live page may take.

Higher: the page is written after more of the looks of a long run. Lower: after fewer of them.
"""


class _Latest(dict[str, float]):
    """The newest values by log name; the error for a missing name explains why it has no value."""

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(
            f"{name} has no value: nothing has been measured yet, or none of this run reads it. "
            f"latest.get({name!r}) is None then"
        )


class Reported:
    """A base class of the monitors: it writes the report, and displays it in notebooks.

    Subclasses set ``engine``, the :class:`~lightning_fedleak.engine.Engine` of the run.
    """

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
        """Write a live page after each look from now on, if the user asked for one.

        A page that takes longer than :data:`SECONDS` is written after fewer looks, so that the mean
        stays below. If one cannot be written, it warns and stops.
        """
        record, looks_left = self.engine.record, 1  # looks until the next page
        if record is None or self.engine.options.report != "live":
            return

        def write() -> None:
            nonlocal looks_left
            looks_left -= 1
            if looks_left:
                return
            start = time.thread_time()
            try:
                report.write_live(record.path, record.run)
            except Exception as error:
                looks_left = -1  # never 0 again
                rank_zero_warn(f"{self.engine.run.watcher}: no live report: {error}")
                return
            looks_left = max(1, math.ceil((time.thread_time() - start) / SECONDS))

        self.engine.subscribe(write)

    def _write_report(self, record: Any) -> None:
        """Write the report of a finished run, and upload its page if the user asked for that."""
        page = report.write_at_end(record.path, record.run, self.engine.run.watcher)
        log = self.engine.report
        if page is not None and self.engine.options.upload_report and log is not None:
            log.upload(page)

    def show(self, height: int = 900) -> None:
        """Display the report of the newest run in a notebook, even before it ends.

        Args:
            height: The height of the frame, in pixels.

        Raises:
            ImportError: IPython is not installed.
            RuntimeError: No run has begun.
            ReportError: The logs of the run cannot be read.
        """
        if (jsonl := self.engine.jsonl) is None:
            raise RuntimeError("show() displays a run, and none has begun: train first")
        logs = report.read([jsonl.path.parent / "run.jsonl"], run=jsonl.run)
        document = escape(report.page(report.findings(logs)))
        style = f"width:100%;height:{height}px;border:0"
        frame = f'<div><iframe srcdoc="{document}" style="{style}"></iframe></div>'
        notebook: Any = importlib.import_module("IPython.display")
        notebook.display(notebook.HTML(frame))
