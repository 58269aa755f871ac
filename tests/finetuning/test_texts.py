from __future__ import annotations

import csv
import gzip
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fedleak.finetuning.assets import SourceError
from lightning_fedleak.finetuning.texts import read_texts

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
    with pytest.raises(SourceError, match="is a folder"):
        read_texts(tmp_path)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SourceError, match="not a readable"):
        read_texts(tmp_path / "b.txt")
    (tmp_path / "b.txt.gz").write_bytes(b"not gzip")
    with pytest.raises(SourceError, match="not a readable"):
        read_texts(tmp_path / "b.txt.gz")


class Hub:
    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None, str]] = []

    def load_dataset(self, name: str, config: str | None, *, split: str) -> list[dict[str, str]]:
        self.asked.append((name, config, split))
        return [{"text": "hello", "summary": "hi"}]


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
