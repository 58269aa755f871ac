"""The reader of texts, one string each, from files or a dataset of the Hugging Face hub.

A *row* is a mapping from column names to values, such as a line of a .csv file. A *chat* is a list
of turns. Errors name files and columns, and quote no text, which may be private.
"""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning_fedleak.cli.finetuning import assets
from lightning_fedleak.extras import require_package

Rows = list[Mapping[str, object]]

_TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_FILE_SUFFIXES = (*_TABLES, ".txt", ".md", ".gz")
_CHATS = ("messages", "conversations")  # usual names of a column of chats
_TURN_TEXT = ("content", "value")  # keys that hold the text of a turn
_MAX_FIELD = 2**31 - 1  # characters of a .csv field: the csv module's largest limit
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # name or owner/name
# A name of at most 32 characters without spaces; the first line of a text rarely looks like this.
_COLUMN_NAME = re.compile(r"[^\W\d][\w.-]{,31}")


def read_texts(source: str | Path, column: str | None = None) -> list[str]:
    """Return the texts of ``source`` without empty ones.

    A chat, a list of turns with ``role`` and ``content``, is one text, with one line for each turn.

    Examples:
        >>> from pathlib import Path
        >>> from lightning_fedleak import read_texts
        >>> _ = Path("letters.txt").write_text("Dear Ann" + 2 * chr(10) + "Dear Bob")
        >>> read_texts("letters.txt")
        ['Dear Ann', 'Dear Bob']

    Args:
        source: a file, each also as ``.gz``: ``.jsonl`` (a JSON object, string or chat a line),
            ``.json`` (an array of these), ``.csv`` or ``.tsv`` with a header, ``.parquet`` (with
            the extra ``datasets``), any other text file (one text a line); a folder of ``.txt``
            files (one text a file); or a dataset of the hub as ``name:config:split:column``, where
            the last parts may be missing and others empty (``imdb``, ``imdb::test``,
            ``wikitext:wikitext-2-raw-v1``). What looks like a path is never looked for on the hub.
        column: the field that holds the text. Default: ``text``, or the only field of strings or
            chats, or ``messages``.

    Raises:
        SourceError: there is no such file or dataset, no such column, or no text in it.
    """
    if not str(source):
        raise assets.SourceError(
            "the name of the text is empty: give a file, a folder or a dataset."
        )
    rows, column_in_name = read_rows(source)
    names = list(dict.fromkeys(name for row in rows for name in row))
    name = column_of(rows, names, column or column_in_name, str(source))
    texts = ((text_of(row.get(name)) or "").strip() for row in rows)
    if not (filled := [text for text in texts if text]):
        raise assets.SourceError(f"'{source}' holds no text (of a folder, .txt files are read).")
    return filled


def read_rows(source: str | Path) -> tuple[Rows, str | None]:
    """Return the rows of ``source`` in their order, empty ones too.

    A line or a file of plain text is a row with ``text``. The second value is the column that a
    dataset's name ends with, or None.

    Args:
        source: a file, folder or dataset, see :func:`read_texts`.

    Raises:
        SourceError: there is no such source, or it cannot be read.
    """
    path = assets.as_path(source)
    if path.is_dir():
        files = sorted(path.rglob("*.txt"))
        return [{"text": _decoded(_content(file), file)} for file in files], None
    if path.is_file():
        return _file_rows(path), None
    return _hub_rows(str(source))


# ---- files ----------------------------------------------------------------------------------


def _content(path: Path) -> bytes:
    """Return the bytes of a file, or raise ``SourceError``."""
    with assets.refuse_errors(f"'{path}' cannot be read", OSError):
        return path.read_bytes()


def _file_rows(path: Path) -> Rows:
    """Return the rows of a file; each line of plain text is one."""
    if path.suffix.lower() == ".parquet":
        return _parquet_rows(path)
    packed = path.suffix.lower() == ".gz"
    kind = (Path(path.stem).suffix if packed else path.suffix).lower()
    data = _content(path)
    if packed:
        errors = OSError, EOFError, zlib.error
        with assets.refuse_errors(f"'{path}' is not a readable .gz file", *errors):
            data = gzip.decompress(data)
    text = _decoded(data, path)
    if kind not in _TABLES:
        return [{"text": line} for line in text.splitlines()]
    if kind == ".json":
        return _json_rows(text, path)
    if kind in (".csv", ".tsv"):
        return _separated_rows(text, kind, path)
    return _json_lines(text, path)


def _decoded(data: bytes, path: Path) -> str:
    """Return UTF-8 text; errors name the file and do not quote its content."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if data[:2] == b"\x1f\x8b":
        raise assets.SourceError(f"'{path}' is packed by gzip: let its name end with .gz.")
    if data[:4] in (b"PK\3\4", b"%PDF"):
        raise assets.SourceError(
            f"'{path}' is a document or an archive (.docx, .odt, .pdf, .zip), not text: export it "
            "as .txt, a paragraph on each line, or as .csv or .jsonl."
        )
    if "\0" in text:
        is_wide = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        code = "UTF-32" if data[2:4] == b"\0\0" else "UTF-16" if is_wide else "WINDOWS-1252"
        what = f"in {code}" if is_wide else "not UTF-8"
        raise assets.SourceError(
            f"'{path}' is {what}: convert it, by iconv -f {code} -t UTF-8 say."
        )
    return text


def _separated_rows(text: str, kind: str, path: Path) -> Rows:
    """Return the rows of a ``.csv`` or ``.tsv`` file, whose first line names the columns."""
    first = text.split("\n", 1)[0]
    separator = "\t" if kind == ".tsv" else ","
    if separator not in first:  # spreadsheets of many countries separate by semicolons
        separator = next((mark for mark in ";\t" if mark in first), separator)
    limit = csv.field_size_limit(_MAX_FIELD)  # texts may exceed Python's limit of 128 KiB
    message = f"'{path}' is not a readable {kind} file"
    with ExitStack() as stack, assets.refuse_errors(message, csv.Error):
        stack.callback(csv.field_size_limit, limit)
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        rows: Rows = []
        for row in reader:
            if any(row.pop(None, ())):  # DictReader's key for surplus fields
                raise assets.SourceError(
                    f"'{path}': the row that ends at line {reader.line_num} has more fields than "
                    f"the first line: put a field that holds {separator!r} in quotes."
                )
            rows.append(row)
    return rows


def _json_rows(text: str, path: Path) -> Rows:
    """Return the rows of a ``.json`` file: an array, or lines of JSON."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        rest = text[: error.pos + 1] if isinstance(error, json.JSONDecodeError) else ""
        if str(error).startswith("Extra data") and "\n" in rest:
            return _json_lines(text, path)  # lines of JSON are often named so
        raise assets.SourceError(f"'{path}' is not JSON: {error}") from None
    items = content if isinstance(content, list) else [content]
    return [_row(item, f"'{path}', element {n}") for n, item in enumerate(items, 1)]


def _json_lines(text: str, path: Path) -> Rows:
    """Return a row for each line that is not empty."""
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"'{path}', line {number}"
        with assets.refuse_errors(f"{place} is not JSON", ValueError, RecursionError):
            row = json.loads(line)
        rows.append(_row(row, place))
    return rows


def _row(content: Any, place: str) -> Mapping[str, object]:
    """Return a JSON value as a row; raise ``SourceError`` unless it is an object, text or chat."""
    if isinstance(content, str):
        return {"text": content}
    if is_chat(content):
        return {"messages": content}
    if not isinstance(content, dict):
        raise assets.SourceError(
            f'{place} is a {type(content).__name__}; it must be an object like {{"text": "..."}}.'
        )
    return content


def _parquet_rows(path: Path) -> Rows:
    """Return the rows of a ``.parquet`` file, which needs pyarrow."""
    with require_package(
        "datasets", f"'{path}' is a parquet file; install what reads those", assets.SourceError
    ):
        import pyarrow.parquet as parquet
    message = f"'{path}' is not a readable .parquet file"
    with assets.refuse_errors(message, OSError, ValueError):
        rows: Rows = parquet.read_table(path).to_pylist()
    return rows


# ---- the hub --------------------------------------------------------------------------------


def _check_name(source: str) -> None:
    """Check that a name may be the name of a dataset on the hub.

    Raises:
        SourceError: It looks like a path, or its first part is an existing folder. In the second
            case a colon in the name makes it a dataset.
    """
    path = Path(source)
    name, colon, _ = source.partition(":")
    suffix = Path(name).suffix.lower()
    spelled_as_path = assets.is_path(name) or "\\" in source or "://" in source
    is_path = spelled_as_path or suffix in _FILE_SUFFIXES or not _HUB_NAME.fullmatch(name)
    in_folder = len(path.parts) > 1 and Path(path.parts[0]).is_dir()
    if is_path or (in_folder and not colon):
        why = "" if is_path else f"; for the dataset of that name write '{source}:'"
        raise assets.SourceError(f"there is no file '{source}'{assets.nearest(path)}{why}")


def _hub_rows(source: str) -> tuple[Rows, str | None]:
    """Return the rows of a dataset, and the column in its name."""
    _check_name(source)
    absent = f"there is no file '{source}'. If it names a dataset of the hub, install what reads it"
    with require_package("datasets", absent, assets.SourceError):
        from datasets import load_dataset
    name, config, split, column, *_ = (*source.split(":"), "", "", "")
    if not assets.dataset_is_cached(name) and (why := assets.why_unreachable()) is not None:
        raise assets.SourceError(assets.unreachable(source, "file or folder of texts", why))
    neither = f"'{source}' is neither a file nor a dataset loaded as name:config:split:column"
    with assets.refuse_errors(neither, Exception):  # whatever the hub's client raises
        data = load_dataset(name, config or None, split=split or "train")
    return list(data), column or None


# ---- rows -----------------------------------------------------------------------------------


def column_of(rows: Rows, names: Sequence[str], column: str | None, source: str) -> str:
    """Return the name of the column that holds the text; empty if there are no rows.

    Args:
        rows: The rows of the source.
        names: The names of their columns.
        column: The name that the user gave; None for ``text``, the only column with text or chats,
            or ``messages``.
        source: The name of the source, for messages.

    Raises:
        SourceError: there is no such column, it holds no text, or the user must choose one.
    """
    if column is None and rows:
        column = "text" if "text" in names else _only_text(rows, names)
        if column is None:
            raise assets.SourceError(
                f"which column of '{source}' holds the text? It has {_column_list(names)}; name "
                "one with column= (--column)."
            )
    if rows and column is not None and all(text_of(row.get(column)) is None for row in rows):
        raise assets.SourceError(
            f"'{source}' has no column '{column}' with text; it has {_column_list(names)}."
        )
    return column or ""


def _only_text(rows: Rows, names: Sequence[str]) -> str | None:
    """Return the only column of texts or chats, or the usual one of chats; None if unclear."""
    texts = [n for n in names if all(text_of(row.get(n)) is not None for row in rows)]
    if len(texts) == 1:
        return texts[0]
    return next((name for name in _CHATS if name in texts), None)


def is_chat(value: Any) -> bool:
    """Return whether a value is a list of turns, each with ``content`` or ``value``."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and not turn.keys().isdisjoint(_TURN_TEXT) for turn in value)
    )


def text_of(value: Any) -> str | None:
    """Return a text, or the turns of a chat as one text; None if the value is neither."""
    if isinstance(value, str):
        return value
    if not is_chat(value):
        return None
    turns = (_turn_text(turn.get("content", turn.get("value"))) for turn in value)
    return "\n".join(turn for turn in turns if turn)


def _turn_text(content: Any) -> str:
    """Return the text of a turn, whose content may be a list of parts, or missing."""
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _column_list(names: Sequence[str]) -> str:
    """Return column names for a message, unless they look like a line of private text."""
    if all(_COLUMN_NAME.fullmatch(name) for name in names):
        return str(list(names))
    return f"{len(names)} columns, whose names (the first line of a .csv file) read like content"
