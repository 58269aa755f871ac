"""Writes what runs showed to files, for ``fedleak report`` and at the end of a fit."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from lightning_fedleak.messages import rank_zero_info, rank_zero_warn
from lightning_fedleak.report.content import findings
from lightning_fedleak.report.html import leakage_file, model_card, page
from lightning_fedleak.report.logs import ReportError, read
from lightning_fedleak.report.records import as_json
from lightning_fedleak.validate import explain_errors

LEAKAGE = "leakage.json"
"""The file beside the weights that says what a model card says."""


def write(
    runs: Sequence[Path],
    out: Path | None = None,
    reveal: Sequence[Path] = (),
    *,
    run: str | None = None,
) -> list[Path]:
    """Write ``report.html`` and ``report.json``.

    Args:
        runs: log folders, or log files in them.
        out: folder to write to; made where it is not there. Default: the first run's.
        reveal: local reveal files, whose private text the page then holds.
        run: id of the fit that is reported alone; default all.

    Returns:
        The files.

    Raises:
        ReportError: nothing is there to report, or a file cannot be read or written.
    """
    folder = out or _folder_of(runs[0])
    content = findings(read(runs, run=run))
    texts = {str(path): _text(path) for path in reveal}
    files = {
        folder / "report.html": page(content, texts),
        folder / "report.json": json.dumps(as_json(content), indent=1, allow_nan=False) + "\n",
    }
    with _writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            _write_whole(path, text)
    return list(files)


def write_live(record: Path, run: str) -> None:
    """Write the report of a running fit next to its ``run.jsonl``; the page reloads itself.

    Args:
        record: the fit's ``run.jsonl``.
        run: the fit's id.

    Raises:
        ReportError: ``record`` cannot be read.
        OSError: the page cannot be written.
    """
    content = findings(read([record], run=run))
    _write_whole(record.parent / "report.html", page(content, live=time.time()))


def write_at_end(record: Path, run: str, watcher: str) -> Path | None:
    """Write the report of a run next to its ``run.jsonl``, and return the page's path.

    If the report cannot be written, the process warns and None is returned.

    Args:
        record: the run's ``run.jsonl``.
        run: the run's id.
        watcher: the class that watched the run, for the message.
    """
    try:
        path, *_ = write([record], run=run)
        rank_zero_info(f"{watcher}: {path}")
    except Exception as error:  # a report is no reason to lose a run
        rank_zero_warn(f"{watcher}: no report: {error}")
        return None
    return path


def print_card(runs: Sequence[Path], weights: Path | None = None) -> None:
    """Print a block for a model card, and write ``leakage.json`` beside the weights.

    Args:
        runs: log folders, or log files in them.
        weights: folder of the weights, for what the block says as JSON; None writes nothing.

    Raises:
        ReportError: as :func:`write`.
    """
    content = findings(read(runs))
    print(model_card(content), end="")
    if weights is None:
        return
    text = json.dumps(as_json(leakage_file(content)), indent=1, allow_nan=False) + "\n"
    with _writing_to(weights, "Name the folder of the weights with --out"):
        _write_whole(weights / LEAKAGE, text)
        (weights / LEAKAGE).chmod(0o644)  # it is released with the weights


def _folder_of(run: Path) -> Path:
    """Return the folder of a run's logs, of which one may be named in its place."""
    return run if run.is_dir() else run.parent


def _text(path: Path) -> str:
    with explain_errors(f"'{path}' cannot be read", OSError, UnicodeDecodeError, error=ReportError):
        return path.read_text(encoding="utf-8")


def _writing_to(
    folder: Path, hint: str = "Name another folder with --out"
) -> AbstractContextManager[None]:
    return explain_errors(f"'{folder}' cannot be written to", OSError, error=ReportError, hint=hint)


def _write_whole(path: Path, content: str) -> None:
    """Write a file whole or not at all, with mode 0600, as the logs."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".report")  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
