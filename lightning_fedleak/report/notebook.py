"""What a notebook shows of a run that is watched: its report, and the report's sentences."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from lightning_fedleak import report


class Displayed:
    """What is watched by an engine, as a notebook displays it."""

    engine: Any

    def _newest_run(self) -> tuple[list[Path], str] | None:
        """Return the record and the id of the newest run; None before the first."""
        jsonl = self.engine.jsonl
        return None if jsonl is None else ([jsonl.path.parent / "run.jsonl"], jsonl.run)

    def show(self, height: int = 900) -> None:
        """Display the report of the newest run in a notebook, while it goes on too.

        Args:
            height: of the frame, in pixels.

        Raises:
            ImportError: IPython is not installed.
            RuntimeError: no run has begun.
            ReportError: its logs cannot be read.
        """
        from IPython.display import HTML, display

        if (newest := self._newest_run()) is None:
            raise RuntimeError("show() is about a run: train first")
        records, run = newest
        document = escape(report.page(report.findings(report.read(records, run=run))))
        style = f"width:100%;height:{height}px;border:0"
        display(HTML(f'<div><iframe srcdoc="{document}" style="{style}"></iframe></div>'))

    def _repr_html_(self) -> str:
        """Return what the newest run gave away, in the report's sentences."""
        lines = [repr(self)]
        if (newest := self._newest_run()) is not None:
            records, run = newest
            try:
                [overview] = report.findings(report.read(records, run=run)).overviews
                lines += ["", report.explain(overview)]
            except report.NothingToReport:
                lines += ["", "Nothing has been measured yet."]
        return f"<pre>{escape(chr(10).join(lines))}</pre>"
