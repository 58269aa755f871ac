from __future__ import annotations

import csv
import gzip
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fedleak.cli.finetuning import hub as real_hub
from lightning_fedleak.cli.finetuning.assets import SourceError
from lightning_fedleak.cli.finetuning.texts import check_text_source, read_labelled, read_texts

WORDS = ["one, two", 'a "quoted" word', "zwölf Äpfel"]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".txt"])
def test_reads_each_kind_of_file(tmp_path: Path, kind: str, suffix: str) -> None:
    path = tmp_path / f"private{kind}{suffix}"
    if kind == ".jsonl":
        content = "\n".join(json.dumps({"id": i, "text": w}) for i, w in enumerate(WORDS))
    elif kind == ".csv":
        rows = [["text", "label"], *([w, "x"] for w in WORDS)]
        plain = tmp_path / "plain.csv"
        with plain.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
        content = plain.read_text(encoding="utf-8")
    else:
        content = "\n\n".join(WORDS) + "\n"
    if suffix:
        path.write_bytes(gzip.compress(content.encode()))
    else:
        path.write_text(content, encoding="utf-8")
    assert read_texts(path) == WORDS
    assert read_texts(str(path)) == WORDS


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=8))
def test_json_lines_keep_any_text(tmp_path_factory: pytest.TempPathFactory, given: list[str]):
    path = tmp_path_factory.mktemp("texts") / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": t}) for t in given), encoding="utf-8")
    assert read_texts(path) == [t.strip() for t in given]


def test_a_table_without_a_header_is_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("Dear Dr Smith my test,Anna Miller\nsecond,row\n")
    for column in (None, "text"):
        with pytest.raises(SourceError, match="first line") as error:
            read_texts(path, column)
        assert "Smith" not in str(error.value)
        assert "Anna" not in str(error.value)


def test_column_is_named_or_the_only_one_of_strings(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "hello", "n": 1}\n{"body": "there", "n": 2}\n')
    assert read_texts(path) == ["hello", "there"]
    path.write_text('{"body": "hello", "title": "x"}\n')
    assert read_texts(path, column="title") == ["x"]
    with pytest.raises(SourceError, match=r"\['body', 'title'\]; name one with column="):
        read_texts(path)
    with pytest.raises(SourceError, match="no column 'test'"):
        read_texts(path, column="test")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "fine"}\n{oops', "line 2 is not JSON"),
        ("a.jsonl", "[1, 2]", "line 1 is a list"),
        ("a.jsonl", "", "holds no text"),
        ("a.txt", " \n\n", "holds no text"),
        ("a.csv", "text\n", "holds no text"),
    ],
)
def test_says_what_is_wrong_with_a_file(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SourceError, match=message):
        read_texts(tmp_path / name)


def test_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="there is no file"):
        read_texts("./no/such")
    with pytest.raises(SourceError, match="there is no file"):
        read_texts("letters.jsonl")
    with pytest.raises(SourceError, match="name of the text is empty"):
        read_texts("")
    (tmp_path / "b.txt.gz").write_bytes(b"not gzip")
    with pytest.raises(SourceError, match="not a readable"):
        read_texts(tmp_path / "b.txt.gz")


CHAT = [
    {"role": "user", "content": "Where is my card?"},
    {"role": "assistant", "content": None, "tool_calls": []},
    {"role": "assistant", "content": [{"type": "text", "text": "On its way."}, {"type": "image"}]},
]
SHARED = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
SAID = ["Where is my card?\nOn its way.", "Hi\nHello"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", "id\ttext\n1\tone, two\n2\tthree; four\n"),
        ("a.csv", 'id;text\r\n1;one, two\r\n2;"three; four"\r\n'),
        ("a.csv", '\ufeffid,text\n1,"one, two"\n2,three; four\n'),
        ("a.CSV", 'id,text\n1,"one, two"\n2,three; four\n'),
        ("a.json", '[{"id": 1, "text": "one, two"},\n {"id": 2, "text": "three; four"}]'),
        ("a.json", '["one, two", "three; four"]'),
        ("a.json", '{"text": "one, two"}\n{"text": "three; four"}\n'),
        ("a.ndjson", '"one, two"\n\n"three; four"\n'),
        ("a.csv", 'id, text\n1,"one, two",\n\n2,three; four\n3'),
        ("a.csv", 'id,text,text\n1,"one, two",x\n2,three; four,\n'),
    ],
)
def test_reads_tables_as_they_are_written(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    assert read_texts(tmp_path / name) == ["one, two", "three; four"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", [{"id": "x", "messages": CHAT}, {"id": "y", "messages": SHARED}]),
        ("a.jsonl", [{"conversations": CHAT}, {"conversations": SHARED}]),
        ("a.jsonl", [CHAT, SHARED]),
        ("a.json", [{"prompt": "x", "messages": CHAT}, {"prompt": "y", "messages": SHARED}]),
    ],
)
def test_a_chat_is_one_text(tmp_path: Path, name: str, content: list[object]) -> None:
    whole = json.dumps(content)
    lines = "\n".join(json.dumps(one) for one in content)
    (tmp_path / name).write_text(whole if name.endswith(".json") else lines)
    assert read_texts(tmp_path / name) == SAID


def test_a_quote_that_nothing_closes_swallows_no_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('id,text\n1,"one\ntwo"\n2,"three\n3,four\n')
    with pytest.raises(SourceError, match="row at line 4 begins with a quote") as error:
        read_texts(path)
    assert "three" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "text\none\ntwo, three\n", "line 3 has 2 fields, and the first line names 1. "),
        ("a.csv", 'id,text\n1,"a\nb"\n2,c,,d\n', "line 4 has 4 fields, and the first line names 2"),
        ("a.csv", "id;text\n1;a;b\n", "that holds a semicolon in quotes"),
        ("a.tsv", "id\ttext\n1\ta\tb\n", "that holds a tab in quotes"),
    ],
)
def test_a_separator_in_a_text_cuts_nothing_off(
    tmp_path: Path, name: str, content: str, said: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SourceError, match=said) as error:
        read_texts(tmp_path / name)
    assert "three" not in str(error.value)


def test_columns_of_one_name_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,text,text.1,text\na,b,c,d\n")
    assert [read_texts(path, column) for column in ("text", "text.1", "text.2")] == [
        ["a"],
        ["b"],
        ["d"],
    ]


def test_a_field_may_be_long(tmp_path: Path) -> None:
    long = "word " * 40_000
    limit = csv.field_size_limit()
    (tmp_path / "a.csv").write_text(f"text,n\n{long},1\n")
    assert read_texts(tmp_path / "a.csv") == [long.strip()]
    assert csv.field_size_limit() == limit


def test_a_folder_has_a_text_in_each_file(tmp_path: Path) -> None:
    (tmp_path / "pos").mkdir()
    (tmp_path / "pos" / "1.txt").write_text("one\ntwo\n")
    (tmp_path / "0.txt").write_text("zero")
    (tmp_path / "notes.csv").write_text("not,read")
    assert read_texts(tmp_path) == ["zero", "one\ntwo"]
    with pytest.raises(SourceError, match="has no columns: leave --column out"):
        read_texts(tmp_path, "text", option="--column")
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.csv").write_text("text\n")
    with pytest.raises(SourceError, match=r"no \.txt files \(its files end in \.csv"):
        read_texts(other)


def test_a_column_must_hold_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "private", "n": 1}\n{"text": "more", "n": null}\n')
    with pytest.raises(SourceError, match=r"'n' of .* holds no text but NoneType, int") as error:
        read_texts(tmp_path / "a.jsonl", "n")
    assert "private" not in str(error.value)
    (tmp_path / "a.txt").write_text("private")
    with pytest.raises(SourceError, match="plain text, which has no columns"):
        read_texts(tmp_path / "a.txt", "n")
    (tmp_path / "a.json").write_text('{"text": "private"}')
    with pytest.raises(SourceError, match="is a dict; it must be an array"):
        read_texts(tmp_path / "a.json")
    (tmp_path / "b.csv").write_text("id,review\n1,x\n")
    with pytest.raises(SourceError, match=r"\['id', 'review'\]; name one with --column\."):
        read_texts(tmp_path / "b.csv", option="--column")
    (tmp_path / "b.csv").write_text("review-id,tweet.text\n1,x\n")
    with pytest.raises(SourceError, match=r"\['review-id', 'tweet\.text'\]"):
        read_texts(tmp_path / "b.csv")


LETTER = "Grüße aus Köln, Müller, 50 €"


@pytest.mark.parametrize("encoding", ["windows-1252", "utf-16", "utf-16-le", "utf-16-be"])
def test_another_encoding_is_named_with_what_converts_it(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "my letters.txt"
    path.write_bytes(LETTER.encode(encoding))
    with pytest.raises(SourceError) as error:
        read_texts(path)
    told = str(error.value)
    guess = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
    assert f"'{path}' is not UTF-8 but, as it seems, {guess}" in told
    assert "ller" not in told
    assert error.value.__cause__ is None  # a decoder's error holds the text
    assert error.value.__suppress_context__ or error.value.__context__ is None
    if shutil.which("iconv"):
        command = told.partition("convert it with: ")[2]
        subprocess.run(command, shell=True, check=True, timeout=60)
        new = Path(shlex.split(command)[-1])
        assert read_texts(new) == [LETTER]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"PK\x03\x04rest", "a zip archive, as .docx"),
        (b"%PDF-1.7", "a PDF"),
        (gzip.compress(b"text", mtime=0), "must be named .gz"),
        (b"PAR1\x15", "must be named .parquet"),
        (b"\x00\x01\x02\x03text", "bytes that no text has"),
        (b"text \x00", "bytes that no text has"),
        (bytes(range(256)), "bytes that no text has"),
    ],
)
def test_what_is_no_text_is_refused_by_its_name(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "letters.txt"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=rf"letters\.txt' is no text file: it .*{what}"):
        read_texts(path)


def test_parquet_without_its_reader_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(SourceError, match=r"is a parquet file; .*pip install .*\[datasets\]"):
        read_texts(tmp_path / "a.parquet")


def test_rows_of_parquet_are_read_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"id": 1, "body": "one"}, {"id": 2, "body": "two"}]
    parquet = ModuleType("pyarrow.parquet")
    parquet.read_table = lambda path: SimpleNamespace(to_pylist=lambda: rows)
    arrow = ModuleType("pyarrow")
    arrow.parquet = parquet
    monkeypatch.setitem(sys.modules, "pyarrow", arrow)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert read_texts(tmp_path / "a.parquet") == ["one", "two"]


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"id": [1, 2], "text": ["one", "two"]}), path)
    assert read_texts(path) == ["one", "two"]
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(SourceError, match=r"not a readable \.parquet file"):
        read_texts(path)


@pytest.mark.parametrize(
    "source",
    [
        "./letters",
        "../letters",
        "~/no/such",
        "/no/such",
        "letters.csv",
        "letters.csv:body",
        "org/letters.jsonl",
        "a/b/c",
        "letters/",
        "here/letters",
        "C:\\letters",
        "here/a.tsv:body",
    ],
)
def test_what_looks_like_a_path_is_not_looked_for_on_the_hub(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub()
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a.tsv").write_text("id\tbody\n1\tx\n")
    for read in (read_texts, check_text_source):
        with pytest.raises(SourceError, match="there is no file") as error:
            read(source, option="--column")
        if source.endswith("a.tsv:body"):
            assert "name it with --column body" in str(error.value)
    assert hub.asked == []


@pytest.mark.usefixtures("reached")
def test_a_name_of_the_hub_is_not_checked_and_stays_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub()
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    for source in ("imdb", "owner/name", "owner/name::test", "org/name:"):
        check_text_source(source)
        assert hub.asked == []
        read_texts(source)
        hub.asked.clear()
    with pytest.raises(SourceError, match=r"folder 'org' is here, .* write 'org/name:'"):
        check_text_source("org/name")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("/no/such", "(there is no folder '/no' either"),
        ("letters.csv ", "did you mean 'letters.csv'?"),
        ("https://host/letters.csv", "is an address: download it"),
        ("My dear Anna, " * 30, "what has 420 characters is no name"),
        ("~nobody-of-this-name/letters", "no user of the name behind ~"),
        ("pipe", "'pipe' is neither a file nor a folder"),
        ("pipe/letters", "'pipe/letters' cannot be looked for (Permission denied)"),
    ],
)
def test_what_is_no_file_is_told_for_what_it_is(
    source: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exists(path: Path) -> bool:
        if path.parent.name == "pipe":
            raise PermissionError(13, "Permission denied")
        return there(path)

    there = Path.exists
    monkeypatch.setattr(Path, "exists", exists)
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letters.csv").touch()
    os.mkfifo("pipe")
    for read in (read_texts, check_text_source):
        with pytest.raises(SourceError) as error:
            read(source)
        assert told in str(error.value)
        assert "on the hub" not in str(error.value)
        assert "Anna" not in str(error.value)


def test_what_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(Path, "read_bytes", refuses)
    (tmp_path / "a.txt").touch()
    with pytest.raises(SourceError, match=r"a\.txt' cannot be read \(Permission denied\)"):
        read_texts(tmp_path / "a.txt")


def test_a_name_nearby_is_proposed(tmp_path: Path) -> None:
    (tmp_path / "letters.csv").write_text("text\nx\n")
    with pytest.raises(SourceError, match=r"did you mean 'letters\.csv'\?"):
        check_text_source(str(tmp_path / "leters.csv"))


class Hub:
    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None, str]] = []

    def load_dataset(self, name: str, config: str | None, *, split: str) -> list[dict[str, str]]:
        self.asked.append((name, config, split))
        return [{"text": "hello", "summary": "hi"}]


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_hub, "why_unreachable", lambda: None)


@pytest.mark.usefixtures("reached")
def test_hub_names(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert read_texts("imdb") == ["hello"]
    assert read_texts("imdb::test") == ["hello"]
    assert read_texts("org/name:small:validation:summary") == ["hi"]
    assert read_texts("imdb", column="summary") == ["hi"]
    assert hub.asked == [
        ("imdb", None, "train"),
        ("imdb", None, "test"),
        ("org/name", "small", "validation"),
        ("imdb", None, "train"),
    ]
    with pytest.raises(SourceError, match="name:config:split:column"):
        read_texts("a:b:c:d:e")


def test_without_datasets_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SourceError, match=r"pip install .*\[datasets\]"):
        read_texts("imdb")


def test_labelled_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("who,text\nann, one \nbob,two\nann,\n")
    assert read_labelled(path, "who") == [("one", "ann"), ("two", "bob")]
    for label, match in (("whom", r"no column 'whom' \(label=\); it has \['who', 'text'\]"),):
        with pytest.raises(SourceError, match=match):
            read_labelled(path, label)
    path.write_text("who,text\nann,one\n,two\n")
    with pytest.raises(SourceError, match=r"column 'who' of .* is empty for 1 of 2 texts"):
        read_labelled(path, "who")
    plain = tmp_path / "a.txt"
    plain.write_text("one\ntwo\n")
    with pytest.raises(SourceError, match="plain text, which has no columns: leave label= out"):
        read_labelled(plain, "who")
