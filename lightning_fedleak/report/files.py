"""Writes reports to files: for ``fedleak report``, during a fit, and at its end.

Each function reads the logs, makes the content of the report from them, and writes its forms (HTML,
JSON, a block for a model card) whole or not at all. A fit is one training run.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from lightning_fedleak.messages import rank_zero_info, rank_zero_warn
from lightning_fedleak.report.content import findings
from lightning_fedleak.report.html import RELEASE, leakage_file, model_card, page
from lightning_fedleak.report.logs import ReportError, read
from lightning_fedleak.report.records import as_json
from lightning_fedleak.validate import explain_errors

REPORT_TOML = "report.toml"
LEAKAGE = "leakage.json"
"""Name of the file next to the weights with the results of the model card."""


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
        out: folder to write to, created if it is missing. Default: the first run's folder. A
            ``report.toml`` in it adds facts that no log has.
        reveal: local reveal files, whose private text is added to the page.
        run: id of the only fit to report; default all.

    Returns:
        The paths of the two files.

    Raises:
        ReportError: there is no log, a file cannot be read or written, or ``report.toml`` has an
            unknown table or name.
    """
    folder = out or _folder_of(runs[0])
    content = findings(read(runs, run=run), _facts(folder))
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
    content = findings(read([record], run=run), _facts(record.parent))
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
    """Print a block for a model card, and write ``leakage.json`` next to the weights.

    Args:
        runs: log folders, or log files in them. A ``report.toml`` in the first one's folder is
            read as by :func:`write`.
        weights: folder of the weights, to which ``leakage.json`` is written; None writes no file.

    Raises:
        ReportError: as :func:`write`.
    """
    content = findings(read(runs), _facts(_folder_of(runs[0])))
    print(model_card(content), end="")
    if weights is None:
        return
    text = json.dumps(as_json(leakage_file(content)), indent=1, allow_nan=False) + "\n"
    with _writing_to(weights, "Name the folder of the weights with --out"):
        _write_whole(weights / LEAKAGE, text)
        (weights / LEAKAGE).chmod(0o644)  # it is released with the weights


def _folder_of(run: Path) -> Path:
    """Return the folder of a run's logs; ``run`` may also be one of these logs."""
    return run if run.is_dir() else run.parent


def _facts(folder: Path) -> Mapping[str, object]:
    """Return the table of ``report.toml`` in a folder; an empty mapping without such a file."""
    path = folder / REPORT_TOML
    if not path.is_file():
        return {}
    text = _text(path)
    with explain_errors(f"'{path}' is no TOML", tomllib.TOMLDecodeError, error=ReportError):
        tables = tomllib.loads(text)
    fields = tables.get("release", {})
    names = {*tables} - {"release"} or (isinstance(fields, dict) and {*fields} - {*RELEASE})
    if names or not isinstance(fields, dict):
        raise ReportError(
            f"'{path}' has '{min(names or {'release'})}': it may have one table, [release], with "
            f"{', '.join(RELEASE)}"
        )
    return tables


def _text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ReportError: it cannot be read.
    """
    with explain_errors(f"'{path}' cannot be read", OSError, UnicodeDecodeError, error=ReportError):
        return path.read_text(encoding="utf-8")


def _writing_to(
    folder: Path, hint: str = "Name another folder with --out"
) -> AbstractContextManager[None]:
    """Raise a ``ReportError`` with a hint if files of a folder cannot be written in the block."""
    return explain_errors(f"'{folder}' cannot be written to", OSError, error=ReportError, hint=hint)


def _write_whole(path: Path, content: str) -> None:
    """Write a file with mode 0600, like the logs, whole or not at all."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".report")  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
