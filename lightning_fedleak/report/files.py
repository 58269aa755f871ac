"""Writes what runs showed to files, for ``fedleak report`` and at the end of a fit."""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_fedleak.messages import rank_zero_info, rank_zero_warn
from lightning_fedleak.report.content import findings
from lightning_fedleak.report.html import model_card, page
from lightning_fedleak.report.logs import ReportError, read
from lightning_fedleak.report.records import as_json
from lightning_fedleak.report.registry import entry

REPORT_TOML = "report.toml"


def write(
    runs: Sequence[Path],
    out: Path | None = None,
    about: Path | None = None,
    reveal: Sequence[Path] = (),
    *,
    run: str | None = None,
) -> list[Path]:
    """Write ``report.html``, ``report.json``, and with differential privacy ``report.yaml``.

    Args:
        runs: log folders, or log files in them.
        out: folder to write to; made where it is not there. Default: the first run's.
        about: what only people know, in TOML; by default ``report.toml`` in ``out``.
        reveal: local reveal files, whose private text the page then holds.
        run: id of the fit that is reported alone; default all.

    Returns:
        The files.

    Raises:
        ReportError: nothing is there to report, a file cannot be read or written, or ``about``
            says what an entry cannot hold.
    """
    folder = out or (runs[0] if runs[0].is_dir() else runs[0].parent)
    logs, people = read(runs, run=run), _people(about, folder)
    try:
        content = findings(logs, people)
        registered = entry(content)
    except ValueError as error:
        raise ReportError(str(error)) from None
    texts = {str(path): _text(path) for path in reveal}
    files = {
        folder / "report.html": page(content, texts),
        folder / "report.json": json.dumps(as_json(content), indent=1, allow_nan=False) + "\n",
    }
    if any(account.holds for fit in content.runs for account in fit.privacy):
        files[folder / "report.yaml"] = registered
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            _write_whole(path, text)
    except OSError as error:
        raise ReportError(
            f"'{folder}' cannot be written to ({error.strerror}): name another folder with --out"
        ) from None
    return list(files)


def write_live(record: Path, run: str) -> None:
    """Write the page of a run that goes on beside its record; it loads itself again.

    Args:
        record: its ``run.jsonl``.
        run: its id.

    Raises:
        ReportError: it cannot be read.
        OSError: the page cannot be written.
    """
    content = findings(read([record], run=run), _people(None, record.parent))
    _write_whole(record.parent / "report.html", page(content, live=True))


def write_at_end(record: Path, run: str, watcher: str) -> Path | None:
    """Write the report of a run beside its record, and return its page; if it cannot, warn.

    Args:
        record: its ``run.jsonl``.
        run: its id.
        watcher: the class that watched it, for the message.
    """
    try:
        path, *_ = write([record], run=run)
        rank_zero_info(f"{watcher}: {path}")
    except Exception as error:  # a report is no reason to lose a run
        rank_zero_warn(f"{watcher}: no report: {error}")
        return None
    return path


def print_card(runs: Sequence[Path], about: Path | None = None) -> None:
    """Print a block for a model card, and write nothing.

    Args:
        runs: log folders, or log files in them.
        about: as for :func:`write`; by default ``report.toml`` in the first run's folder.

    Raises:
        ReportError: as :func:`write`.
    """
    logs, people = read(runs), _people(about, runs[0])
    content = findings(logs, people)
    try:
        entry(content)  # which checks what people wrote
        print(model_card(content), end="")
    except ValueError as error:
        raise ReportError(str(error)) from None


def _people(about: Path | None, folder: Path) -> Mapping[str, object]:
    """Return the tables of a file of TOML, by default of ``report.toml`` in a folder."""
    if about is None:
        about = folder / REPORT_TOML
        if not about.is_file():
            return {}
    try:
        return tomllib.loads(_text(about))
    except tomllib.TOMLDecodeError as error:
        raise ReportError(f"'{about}' is no TOML: {error}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ReportError(f"'{path}' cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ReportError(f"'{path}' is not UTF-8 text") from None


def _write_whole(path: Path, content: str) -> None:
    """Write a file whole or not at all, for its owner alone as the logs are."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".report")  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
