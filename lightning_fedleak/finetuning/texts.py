"""Reads texts, one string each, from a file or from a dataset of the Hugging Face hub."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from lightning_fedleak.extras import install
from lightning_fedleak.finetuning.assets import SourceError

_FILE_SUFFIXES = (".txt", ".jsonl", ".csv", ".md", ".gz")


def read_texts(source: str | Path, column: str | None = None) -> list[str]:
    """Reads the texts of ``source``, empty ones left out.

    Args:
        source: a ``.jsonl`` file (one object a line), a ``.csv`` file with a header, any other text
            file (one text a line), each also as ``.gz``; or a dataset of the hub as
            ``name:config:split:column``, where parts may be left out at the end or left empty
            (``imdb``, ``imdb::test``, ``wikitext:wikitext-2-raw-v1``).
        column: the field that holds the text. Default: ``text``, or the only field of strings.

    Raises:
        SourceError: there is no such file or dataset, no such column, or no text in it.
    """
    path = Path(source)
    if path.is_dir():
        raise SourceError(f"'{source}' is a folder; give a file or a dataset of the hub.")
    if path.is_file():
        texts = _read_file(path, column)
    elif path.suffix in _FILE_SUFFIXES or path.is_absolute() or str(source).startswith("."):
        raise SourceError(f"there is no file '{source}' (looked in {Path.cwd()}).")
    else:
        texts = _read_hub(str(source), column)
    texts = [text for text in (t.strip() for t in texts) if text]
    if not texts:
        raise SourceError(f"'{source}' holds no text.")
    return texts


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _read_file(path: Path, column: str | None) -> list[str]:
    kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    try:
        with _open(path) as file:
            if kind == ".jsonl":
                return _pick_column(_json_lines(file, path), column, str(path))
            if kind == ".csv":
                return _pick_column(list(csv.DictReader(file)), column, str(path))
            return file.read().splitlines()
    except (UnicodeDecodeError, gzip.BadGzipFile, csv.Error) as error:
        raise SourceError(f"'{path}' is not a readable {kind or 'text'} file: {error}") from error


def _json_lines(lines: Iterable[str], path: Path) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise SourceError(f"'{path}', line {number} is not JSON: {error}") from error
        if isinstance(row, str):
            row = {"text": row}
        if not isinstance(row, dict):
            raise SourceError(
                f"'{path}', line {number} is a {type(row).__name__}; each line must be an object "
                'like {"text": "..."}.'
            )
        rows.append(row)
    return rows


def _pick_column(rows: list[Mapping[str, Any]], column: str | None, source: str) -> list[str]:
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row))
    shown = _shown(names)
    if column is None:
        strings = [n for n in names if all(isinstance(row.get(n), str) for row in rows)]
        column = "text" if "text" in names else strings[0] if len(strings) == 1 else None
        if column is None:
            raise SourceError(
                f"which column of '{source}' holds the text? It has {shown}; name one with column=."
            )
    if column not in names:
        raise SourceError(f"'{source}' has no column '{column}'; it has {shown}.")
    return [value for row in rows if isinstance(value := row.get(column), str)]


def _shown(names: list[str]) -> str:
    """Column names for a message, unless they look like a line of private text."""
    if all(name is not None and name.isidentifier() and len(name) <= 32 for name in names):
        return str(names)
    return f"{len(names)} columns, whose names (the first line of a .csv file) read like content"


def _read_hub(source: str, column: str | None) -> list[str]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise SourceError(
            f"there is no file '{source}'. If it names a dataset of the hub, install what reads "
            f"those: {install('datasets')}."
        ) from error
    parts = source.split(":")
    if len(parts) > 4:
        raise SourceError(f"'{source}': a dataset is named as name:config:split:column.")
    name, config, split, named_column = (parts + [""] * 3)[:4]
    try:
        data = load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # whatever the hub client raises, the user has one thing to mend
        raise SourceError(
            f"'{source}' is neither a file nor a dataset that could be loaded as "
            f"name:config:split:column: {type(error).__name__}: {error}"
        ) from error
    return _pick_column(list(data), column or named_column or None, source)
