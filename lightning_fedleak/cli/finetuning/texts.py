"""The reader of texts, one string each, from files or a dataset of the Hugging Face hub."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import shlex
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_fedleak.cli.finetuning import hub
from lightning_fedleak.cli.finetuning.assets import SourceError, as_path, is_path, nearest
from lightning_fedleak.extras import install

Rows = list[Mapping[str, object]]

_SPELLED = {",": "comma", ";": "semicolon", "\t": "tab"}
_TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_FILE_SUFFIXES = (*_TABLES, ".txt", ".md", ".gz")
_CHATS = ("messages", "conversations")
_TURN_TEXT = ("content", "value")
_NO_TEXT = {
    b"PK\x03\x04": "a zip archive, as .docx and .xlsx are",
    b"%PDF": "a PDF",
    b"\x1f\x8b": "compressed with gzip, and must be named .gz then",
    b"PAR1": "a parquet file, and must be named .parquet then",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"\xd0\xcf\x11\xe0": "a file of an office program",
}
_LONGEST_FIELD = 2**31 - 1  # characters of a .csv field: the csv module's largest limit
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_COLUMN_NAME = re.compile(r"[^\W\d][\w.-]{,31}")
_END = "end"  # a last row, which a quote without an end takes into its field


def read_texts(
    source: str | Path, column: str | None = None, *, option: str = "column="
) -> list[str]:
    """Return the texts of ``source`` without empty ones.

    A chat, a list of turns with ``role`` and ``content``, is one text, with one line for each turn.

    Args:
        source: a file, each also as ``.gz``: ``.jsonl`` (a JSON object, string or chat a line),
            ``.json`` (an array of these), ``.csv`` or ``.tsv`` with a header, ``.parquet`` (with
            the extra ``datasets``), any other text file (one text a line); a folder of ``.txt``
            files (one text a file); or a dataset of the hub as ``name:config:split:column``, where
            the last parts may be missing and others empty (``imdb``, ``imdb::test``,
            ``wikitext:wikitext-2-raw-v1``). A name like a path is never looked for on the hub.
        column: the field that holds the text. Default: ``text``, or the only field of strings or
            chats, or ``messages``. A second column of the same name in a ``.csv`` is ``name.1``.
        option: how the user spells ``column``, for messages.

    Raises:
        SourceError: there is no such file or dataset, no such column, or no text in it.
    """
    if not str(source):
        raise SourceError("the name of the text is empty: give a file, a folder or a dataset.")
    path = as_path(source)
    if path.is_dir():
        texts = _read_folder(path, column, option)
    else:
        rows, named = _source_rows(source, path, option)
        if isinstance(rows, str):
            _no_columns(path, column, option)
            texts = rows.splitlines()
        else:
            name = str(path if path.is_file() else source)
            texts = _pick_column(rows, column or named, name, option)
    texts = [text for text in (t.strip() for t in texts) if text]
    if not texts:
        raise SourceError(f"'{source}' holds no text.")
    return texts


def read_labelled(
    source: str | Path,
    label: str,
    column: str | None = None,
    *,
    option: str = "column=",
    label_option: str = "label=",
) -> list[tuple[str, str]]:
    """Return texts as :func:`read_texts` does, each with its value in another column.

    Args:
        source: a file or dataset with columns.
        label: the other column, such as the text's author.
        column: the field that holds the text, see :func:`read_texts`.
        option: how the user spells ``column``, for messages.
        label_option: how the user spells ``label``.

    Raises:
        SourceError: the texts cannot be read, there is no such column, or a text has no value.
    """
    path = as_path(source)
    rows, named = ("", None) if path.is_dir() else _source_rows(source, path, option)
    if isinstance(rows, str):
        raise SourceError(
            f"'{source}' is plain text, which has no columns: leave {label_option} out."
        )
    names = list(dict.fromkeys(name for row in rows for name in row))
    if label not in names:
        raise SourceError(
            f"'{source}' has no column '{label}' ({label_option}); it has {_column_list(names)}."
        )
    text = _column_of(rows, column or named, str(source), option)
    pairs = [
        (content.strip(), row.get(label))
        for row in rows
        if (content := _text_of(row.get(text))) is not None and content.strip()
    ]
    nothing = sum(value in (None, "") for _, value in pairs)
    if nothing:
        raise SourceError(
            f"column '{label}' of '{source}' is empty for {nothing} of {len(pairs)} texts "
            f"({label_option}): fill it, or take another column."
        )
    return [(content, str(value)) for content, value in pairs]


def _source_rows(source: str | Path, path: Path, option: str) -> tuple[Rows | str, str | None]:
    """Return the rows of a file or dataset, or a file's plain text, and a column in its name."""
    if path.is_file():
        return _file_rows(path), None
    _check_hub_name(str(source), option)
    return _hub_rows(str(source))


def check_text_source(source: str, column: str | None = None, *, option: str = "column=") -> None:
    """Raise the errors of :func:`read_texts` that do not need data from the hub.

    Raises:
        SourceError: the texts cannot be read.
    """
    if as_path(source).exists():
        read_texts(source, column, option=option)
    else:
        _check_hub_name(source, option)
        _check_reach(source)


def _check_hub_name(source: str, option: str) -> None:
    """Raise an error for a name that is spelled like a path but is none."""
    path = Path(source)
    file, colon, column = source.partition(":")
    if as_path(source).exists():
        raise SourceError(f"'{source}' is neither a file nor a folder: copy its text to a file.")
    if "://" in source:
        raise SourceError(f"'{source}' is an address: download it, and name the file.")
    if colon and Path(file).suffix.lower() in _FILE_SUFFIXES and Path(file).exists():
        raise SourceError(
            f"there is no file '{source}'. If you mean a column of '{file}', name it with {option}"
            f"{' ' * option.startswith('-')}{column or '...'}."
        )
    spelled = is_path(file) or "\\" in source or Path(file).suffix.lower() in _FILE_SUFFIXES
    if spelled or not _HUB_NAME.fullmatch(file):
        raise SourceError(f"there is no file '{source}'{nearest(path)}")
    owner = path.parts[0]
    if not colon and len(path.parts) > 1 and Path(owner).is_dir():
        raise SourceError(
            f"there is no file '{source}'. The folder '{owner}' is here, so that this was not "
            f"looked for on the hub; for the dataset of that name write '{source}:'{nearest(path)}"
        )


def _check_reach(source: str) -> None:
    name = source.partition(":")[0]
    if not hub.dataset_is_cached(name) and (why := hub.why_unreachable()) is not None:
        raise SourceError(hub.unreachable(source, "file or folder of texts", why))


# ---- files ----------------------------------------------------------------------------------


def _read_folder(folder: Path, column: str | None, option: str) -> list[str]:
    files = sorted(folder.rglob("*.txt"))
    if not files:
        kinds = sorted({p.suffix for p in folder.iterdir() if p.is_file() and p.suffix})
        ends = f" (its files end in {', '.join(kinds)}: name one of them)" if kinds else ""
        raise SourceError(f"the folder '{folder}' holds no .txt files{ends}.")
    _no_columns(folder, column, option)
    return [_decoded(_content(file), file) for file in files]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceError(f"'{path}' cannot be read ({error.strerror}).") from error


def _file_rows(path: Path) -> Rows | str:
    """Return the rows of a file, or its plain text."""
    if path.suffix.lower() == ".parquet":
        return _parquet_rows(path)
    packed = path.suffix.lower() == ".gz"
    kind = (Path(path.stem).suffix if packed else path.suffix).lower()
    data = _content(path)
    if packed:
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise SourceError(f"'{path}' is not a readable .gz file: {error}") from error
    text = _decoded(data, path)
    if kind not in _TABLES:
        return text
    if kind == ".json":
        return _json_rows(text, path)
    if kind in (".csv", ".tsv"):
        return _separated_rows(text, kind, path)
    return _json_lines(text, path)


def _no_columns(path: Path, column: str | None, option: str) -> None:
    if column is not None:
        raise SourceError(f"'{path}' is plain text, which has no columns: leave {option} out.")


def _decoded(data: bytes, path: Path) -> str:
    """Return text in UTF-8; errors name the file, and quote nothing of its content."""
    kind = next((kind for magic, kind in _NO_TEXT.items() if data.startswith(magic)), None)
    if kind is not None:
        raise SourceError(f"'{path}' is no text file: it is {kind}.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = None
    if text is not None and "\0" not in text:
        return text
    encoding = _encoding(data)
    if encoding is None:
        raise SourceError(f"'{path}' is no text file: it holds bytes that no text has.")
    new = path.with_name(f"{path.stem}.utf8{path.suffix}")
    raise SourceError(
        f"'{path}' is not UTF-8 but, as it seems, {encoding}; convert it with: iconv -f {encoding} "
        f"-t UTF-8 {shlex.quote(str(path))} > {shlex.quote(str(new))}"
    )


def _encoding(data: bytes) -> str | None:
    """Return a likely encoding of bytes that are not UTF-8; None where they are no text."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    start = data[:4096]
    pairs = len(start) // 2
    for encoding, high in (("UTF-16LE", start[1::2]), ("UTF-16BE", start[::2])):
        if pairs and high.count(0) > 0.7 * pairs:
            return encoding
    control = sum(byte < 32 and byte not in b"\t\n\v\f\r\x1b" for byte in start)
    return "WINDOWS-1252" if b"\0" not in data and not control else None


@contextmanager
def _long_fields() -> Iterator[None]:
    """Allow fields above 128 KiB, Python's limit, which texts may exceed."""
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _separated_rows(text: str, kind: str, path: Path) -> Rows:
    first = text.split("\n", 1)[0]
    separator = "\t" if kind == ".tsv" else ","
    if separator not in first:  # spreadsheets of many countries separate by semicolons
        separator = next((one for one in ";\t" if one in first), separator)
    lines = io.StringIO(f"{text}\n{_END}", newline="")
    try:
        with _long_fields():
            reader = csv.reader(lines, delimiter=separator)
            *rows, (_, last) = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise SourceError(f"'{path}' is not a readable {kind} file: {error}") from error
    if last != [_END]:
        start = rows[-1][0] + 1 if rows else 1
        raise SourceError(
            f"'{path}': a field of the row at line {start} begins with a quote (\") that nothing "
            "closes, so that all rows behind it would be a part of it: close it, or double the "
            "quote and put the field in quotes."
        )
    (_, header), *fields = [(end, row) for end, row in rows if row] or [(0, [])]
    names = _distinct([name.strip() for name in header])
    for end, row in fields:
        if any(row[len(names) :]):
            raise SourceError(
                f"'{path}': the row that ends at line {end} has {len(row)} fields, and the first "
                f"line names {len(names)}. Put a field that holds a {_SPELLED[separator]} in "
                'quotes ("...").'
            )
    return [{**dict.fromkeys(names), **dict(zip(names, row, strict=False))} for _, row in fields]


def _distinct(names: Sequence[str]) -> list[str]:
    """Return names where, as in pandas, the second of a name gets ``.1``, the next ``.2``."""
    distinct: list[str] = []
    for name in names:
        count, unique = 0, name
        while unique in distinct:
            count += 1
            unique = f"{name}.{count}"
        distinct.append(unique)
    return distinct


def _json_rows(text: str, path: Path) -> Rows:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and "\n" in text[: error.pos + 1]:
            return _json_lines(text, path)  # lines of JSON are often named so
        raise SourceError(f"'{path}' is not JSON: {error}") from None
    if not isinstance(content, list):
        raise SourceError(
            f"'{path}' is a {type(content).__name__}; it must be an array of objects, like "
            '[{"text": "..."}].'
        )
    return [_row(one, f"'{path}', element {n}", "element") for n, one in enumerate(content, 1)]


def _json_lines(text: str, path: Path) -> Rows:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise SourceError(f"'{path}', line {number} is not JSON: {error}") from None
        rows.append(_row(row, f"'{path}', line {number}", "line"))
    return rows


def _row(content: Any, place: str, unit: str) -> Mapping[str, object]:
    if isinstance(content, str):
        return {"text": content}
    if _is_chat(content):
        return {"messages": content}
    if not isinstance(content, dict):
        raise SourceError(
            f"{place} is a {type(content).__name__}; each {unit} must be an object like "
            '{"text": "..."}.'
        )
    return content


def _parquet_rows(path: Path) -> Rows:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise SourceError(
            f"'{path}' is a parquet file; install what reads those: {install('datasets')}."
        ) from error
    try:
        rows: Rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise SourceError(f"'{path}' is not a readable .parquet file: {error}") from error
    return rows


# ---- the hub --------------------------------------------------------------------------------


def _hub_rows(source: str) -> tuple[Rows, str | None]:
    """Return the rows of a dataset, and the column in its name."""
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
    _check_reach(source)
    try:
        data = load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # whatever the hub client raises, the user has one thing to mend
        raise SourceError(
            f"'{source}' is neither a file nor a dataset that could be loaded as "
            f"name:config:split:column: {type(error).__name__}: {error}"
        ) from error
    return list(data), named_column or None


# ---- rows -----------------------------------------------------------------------------------


def _pick_column(rows: Rows, column: str | None, source: str, option: str) -> list[str]:
    if not rows:
        return []
    name = _column_of(rows, column, source, option)
    return [text for row in rows if (text := _text_of(row.get(name))) is not None]


def _column_of(rows: Rows, column: str | None, source: str, option: str) -> str:
    """Return the name of the column that holds the text."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    names_shown = _column_list(names)
    if column is None:
        column = "text" if "text" in names else _only_text(rows, names)
        if column is None:
            raise SourceError(
                f"which column of '{source}' holds the text? It has {names_shown}; name one with "
                f"{option}."
            )
    if column not in names:
        raise SourceError(f"'{source}' has no column '{column}'; it has {names_shown}.")
    values = [row.get(column) for row in rows]
    if all(_text_of(value) is None for value in values):
        kinds = sorted({type(value).__name__ for value in values})
        raise SourceError(
            f"column '{column}' of '{source}' holds no text but {', '.join(kinds)}; it has "
            f"{names_shown}."
        )
    return column


def _only_text(rows: Rows, names: list[str]) -> str | None:
    texts = [n for n in names if all(_text_of(row.get(n)) is not None for row in rows)]
    if len(texts) == 1:
        return texts[0]
    return next((name for name in _CHATS if name in texts), None)


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and not turn.keys().isdisjoint(_TURN_TEXT) for turn in value)
    )


def _text_of(value: Any) -> str | None:
    """Return a text, or the turns of a chat; None where the value is neither."""
    if isinstance(value, str):
        return value
    if not _is_chat(value):
        return None
    turns = (_turn_text(turn.get("content", turn.get("value"))) for turn in value)
    return "\n".join(turn for turn in turns if turn)


def _turn_text(content: Any) -> str:
    """Return the text of a turn, whose content may be a list of parts, or missing."""
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _column_list(names: list[str]) -> str:
    """Return column names for a message, unless they look like a line of private text."""
    if all(_COLUMN_NAME.fullmatch(name) for name in names):
        return str(names)
    return f"{len(names)} columns, whose names (the first line of a .csv file) read like content"
