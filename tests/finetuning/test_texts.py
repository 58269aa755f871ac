from __future__ import annotations

import csv
import gzip
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fedleak.cli.finetuning import assets as real_hub
from lightning_fedleak.cli.finetuning.assets import SourceError
from lightning_fedleak.cli.finetuning.texts import read_texts

WORDS = ["one, two", 'a "quoted" word', "zwölf Äpfel"]


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=8))
def test_json_lines_keep_any_text(tmp_path_factory, texts) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text("\n".join(json.dumps({"text": t}) for t in texts), encoding="utf-8")
    assert read_texts(path) == [t.strip() for t in texts]


@pytest.mark.parametrize("packed", [False, True])
def test_plain_text_is_one_text_per_line(tmp_path: Path, packed: bool) -> None:
    data = ("\n\n".join(WORDS) + "\n").encode()
    path = tmp_path / ("a.txt.gz" if packed else "a.txt")
    path.write_bytes(gzip.compress(data) if packed else data)
    assert read_texts(path) == WORDS


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", "id\ttext\n1\tone, two\n2\tthree; four\n"),
        ("a.csv", 'id;text\r\n1;one, two\r\n2;"three; four"\r\n'),
        ("a.csv", '\ufeffid,text\n1,"one, two"\n2,three; four\n'),
        ("a.CSV", 'id, text\n1,"one, two"\n\n2,three; four\n3\n'),
        ("a.json", '[{"id": 1, "text": "one, two"},\n {"id": 2, "text": "three; four"}]'),
        ("a.json", '["one, two", "three; four"]'),
        ("a.json", '{"text": "one, two"}\n{"text": "three; four"}\n'),
        ("a.ndjson", '"one, two"\n\n"three; four"\n'),
    ],
)
def test_tables(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    assert read_texts(tmp_path / name) == ["one, two", "three; four"]


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and no more")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(SourceError, match=r"is a parquet file; .*pip install .*\[datasets\]"):
            read_texts(path)
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    with pytest.raises(SourceError, match=r"not a readable \.parquet file"):
        read_texts(path)
    parquet.write_table(arrow.table({"id": [1, 2], "text": ["one", "two"]}), path)
    assert read_texts(path) == ["one", "two"]


def test_text_column_is_given_or_the_only_string_column(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "hello", "n": 1}\n{"body": "there", "n": 2}\n')
    assert read_texts(path) == ["hello", "there"]
    path.write_text('{"body": "hello", "tweet.text": "x"}\n')
    assert read_texts(path, column="tweet.text") == ["x"]
    with pytest.raises(SourceError, match=r"\['body', 'tweet\.text'\]; name one with column="):
        read_texts(path)
    with pytest.raises(SourceError, match="no column 'test' with text"):
        read_texts(path, column="test")


CHAT = [
    {"role": "user", "content": "Where is my card?"},
    {"role": "assistant", "content": None, "tool_calls": []},
    {"role": "assistant", "content": [{"type": "text", "text": "On its way."}, {"type": "image"}]},
]
SHAREGPT_CHAT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


@pytest.mark.parametrize(
    "content",
    [
        [{"id": "x", "messages": CHAT}, {"id": "y", "messages": SHAREGPT_CHAT}],
        [{"conversations": CHAT}, {"conversations": SHAREGPT_CHAT}],
        [CHAT, SHAREGPT_CHAT],
    ],
)
def test_a_chat_is_one_text(tmp_path: Path, content: list[object]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(content))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, content)))
    for name in ("a.json", "a.jsonl"):
        assert read_texts(tmp_path / name) == ["Where is my card?\nOn its way.", "Hi\nHello"]


def test_a_folder_has_a_text_in_each_file(tmp_path: Path) -> None:
    (tmp_path / "pos").mkdir()
    (tmp_path / "pos" / "1.txt").write_text("one\ntwo\n")
    (tmp_path / "0.txt").write_text("zero")
    (tmp_path / "notes.csv").write_text("not,read")
    assert read_texts(tmp_path) == ["zero", "one\ntwo"]
    with pytest.raises(SourceError, match=r"no column 'body' with text; it has \['text'\]"):
        read_texts(tmp_path, "body")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "Smith"}\n{oops', "line 2 is not JSON"),
        ("a.jsonl", "[1, 2]", "line 1 is a list"),
        ("a.jsonl", "", "holds no text"),
        ("a.csv", "text\n", "holds no text"),
        ("a.json", "5", "element 1 is a int; it must be an object"),
        ("a.csv", 'id,text\n1,one\n2,"Smith\n3,four\n', "not a readable .csv file"),
        ("a.csv", "text\none\nSmith, three\n", "line 3 has more fields than the first line"),
        ("a.csv", "id;text\n1;Smith;b\n", "a field that holds ';' in quotes"),
        ("a.csv", "Dear Dr Smith my test,Anna\nsecond,row\n", "first line"),
        ("a.txt.gz", "Smith", "not a readable .gz file"),
    ],
)
def test_file_errors_give_the_line_but_no_content(tmp_path, name, content, message) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SourceError, match=message) as error:
        read_texts(tmp_path / name)
    assert "Smith" not in str(error.value)


@pytest.mark.parametrize(
    "data", ["Müller".encode("cp1252"), "Müller".encode("utf-16"), b"\x00\x01\x02", b"%PDF\xff"]
)
def test_non_utf8_files_are_refused_without_quoting_them(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "letters.txt"
    path.write_bytes(data)
    with pytest.raises(
        SourceError, match=r"letters\.txt' is (not UTF-8|in UTF-16|a document)"
    ) as error:
        read_texts(path)
    assert "ller" not in str(error.value)
    assert error.value.__cause__ is None  # a decoder's error holds the text
    assert error.value.__context__ is None


def test_a_field_may_be_long(tmp_path: Path) -> None:
    long = "word " * 40_000
    limit = csv.field_size_limit()
    (tmp_path / "a.csv").write_text(f"text,n\n{long},1\n")
    assert read_texts(tmp_path / "a.csv") == [long.strip()]
    assert csv.field_size_limit() == limit


class Hub:
    def __init__(self) -> None:
        self.requests: list[tuple[str, str | None, str]] = []

    def load_dataset(self, name: str, config: str | None, *, split: str) -> list[dict[str, str]]:
        self.requests.append((name, config, split))
        return [{"text": "hello", "summary": "hi"}]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    created = Hub()
    monkeypatch.setitem(sys.modules, "datasets", created)
    monkeypatch.setattr(real_hub, "why_unreachable", lambda: None)
    return created


@pytest.mark.parametrize(
    "source",
    [
        *("./letters", "../letters", "~/no/such", "/no/such", "letters.csv", "letters.csv:body"),
        *("org/letters.jsonl", "a/b/c", "letters/", "here/letters", "C:\\letters"),
        "https://host/letters.csv",
    ],
)
def test_a_name_like_a_path_is_not_looked_for_on_the_hub(source, tmp_path, monkeypatch, hub):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(SourceError, match="there is no file"):
        read_texts(source)
    assert hub.requests == []


def test_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    with pytest.raises(SourceError, match="of that name write 'org/name:'"):
        read_texts("org/name")
    assert read_texts("imdb") == ["hello"]
    assert read_texts("imdb::test") == ["hello"]
    assert read_texts("org/name:small:validation:summary") == ["hi"]
    assert read_texts("imdb", column="summary") == ["hi"]
    assert hub.requests == [
        ("imdb", None, "train"),
        ("imdb", None, "test"),
        ("org/name", "small", "validation"),
        ("imdb", None, "train"),
    ]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SourceError, match=r"pip install .*\[datasets\]"):
        read_texts("imdb")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "the name of the text is empty"),
        ("/no/such", r"\(there is no folder '/no' either"),
        ("leters.csv", r"did you mean 'letters\.csv'\?"),
        ("My dear Anna, " * 30, "a name of 420 characters is no file, folder or dataset"),
        ("~nobody-of-this-name/letters", "no user has the name after ~"),
    ],
)
def test_errors_of_names(source, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letters.csv").touch()
    with pytest.raises(SourceError, match=message) as error:
        read_texts(source)
    assert "Anna" not in str(error.value)


@pytest.mark.parametrize("start", [b"PK\3\4", b"%PDF"])
def test_a_document_that_is_no_text_is_named_with_what_to_do(start, tmp_path) -> None:
    path = tmp_path / "letters.docx"
    path.write_bytes(start + bytes(30))
    with pytest.raises(
        SourceError, match=r"letters\.docx' is a document .*, not text: export it as"
    ):
        read_texts(path)


def test_unreadable_files_raise_source_error(tmp_path, monkeypatch) -> None:
    def refuses(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(Path, "read_bytes", refuses)
    (tmp_path / "a.txt").touch()
    with pytest.raises(SourceError, match=r"a\.txt' cannot be read: Permission denied"):
        read_texts(tmp_path / "a.txt")
