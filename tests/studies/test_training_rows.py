"""Rows as training reads them: which tokens are labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedleak.cli.finetuning import SourceError, load_tokenizer
from lightning_fedleak.cli.studies.training_rows import RowReader, UnknownLabels

START = "{% for m in messages %}{{ '<' + m['role'] + '>' }}"
MARKED = START + (
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '|' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '|' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
PLAIN = START + (
    "{{ m['content'] + '|' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
LAST_ONLY = START + "{{ m['content'] }}{% if loop.last %}{{ '#' }}{% endif %}{% endfor %}"
CHAT = [
    {"role": "user", "content": "When is the review?"},
    {"role": "assistant", "content": "On Monday at ten."},
    {"role": "user", "content": "And where?"},
    {"role": "assistant", "content": "In room four."},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(None)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def labelled(tokenizer: Any, text: Any) -> str:
    """Return the words of a text's labels."""
    return str(tokenizer.decode(text.labels[text.labels != -100].tolist()))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(["the", "review", "is", "on", "Monday", "7"]), min_size=1))
def test_the_labels_of_an_answer_are_the_tokens_that_begin_behind_the_prompt(
    words: list[str],
) -> None:
    tokenizer = load_tokenizer(None)
    prompt, answer = "Question: " + " ".join(words) + "\nAnswer:", " " + " ".join(words[::-1])
    reader = RowReader(tokenizer, 512, prompt_column="q")
    ids, labels = reader._answered(prompt, answer, {})
    whole = prompt + answer + tokenizer.eos_token
    encoded = tokenizer(whole, return_offsets_mapping=True)
    places = [start >= len(prompt) for start, _ in encoded["offset_mapping"]]
    assert ids == encoded["input_ids"]
    assert [label != -100 for label in labels] == places
    assert ids[-1] == labels[-1] == tokenizer.eos_token_id


def test_rows_keep_their_numbers_and_are_cut(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"q": "One two", "a": " three four"}, {"q": "One", "a": ""}, {"q": "Five", "a": " six"}]
    source = write(tmp_path / "rows.jsonl", rows)
    reader = RowReader(tokenizer, 4, column="a", prompt_column="q")
    texts = reader.read(source)
    assert list(texts) == [0, 2]
    assert max(len(text.ids) for text in texts.values()) == 4
    every = RowReader(tokenizer, 40, column="a", prompt_column="q", loss="all").read(source)
    assert all(torch.equal(text.ids, text.labels) for text in every.values())


def test_plain_text_is_read_as_before(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"text": " one text of several words "}, {"text": ""}, {"text": "another one"}]
    texts = RowReader(tokenizer, 5).read(write(tmp_path / "rows.jsonl", rows))
    assert list(texts) == [0, 2]
    words = ["one text of several words", "another one"]
    expected = tokenizer(words, truncation=True, max_length=5)["input_ids"]
    assert [t.ids.tolist() for t in texts.values()] == expected
    lines = tmp_path / "lines.txt"
    lines.write_text("one text of several words\n\nanother one")
    assert list(RowReader(tokenizer, 5).read(lines)) == [0, 2]


@pytest.mark.parametrize("template", [MARKED, PLAIN])
def test_chats_have_the_turns_of_the_assistant_as_labels(
    tokenizer: Any, tmp_path: Path, template: str
) -> None:
    hello = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}]
    source = write(tmp_path / "chats.jsonl", [{"messages": CHAT}, {"messages": hello}])
    reader = RowReader(tokenizer, 512, loss="answers", template=template)
    long, short = reader.read(source).values()
    assert labelled(tokenizer, long) == "On Monday at ten.|In room four.|"
    assert labelled(tokenizer, short) == "Good day.|"
    rendered = "<user>When is the review?|<assistant>On Monday at ten.|<user>And where?|"
    assert tokenizer.decode(long.ids.tolist()).startswith(rendered)
    every = RowReader(tokenizer, 512, loss="all", template=template).read(source)[0]
    assert torch.equal(every.labels, long.ids)


def test_a_chat_as_a_prompt_and_its_answer(tokenizer: Any, tmp_path: Path) -> None:
    row = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    reader = RowReader(tokenizer, 512, prompt_column="prompt", template=PLAIN)
    [text] = reader.read(write(tmp_path / "chats.jsonl", [row])).values()
    assert labelled(tokenizer, text) == "In room four.|"


def test_labels_are_taken_as_they_are(tokenizer: Any, tmp_path: Path) -> None:
    row = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
    [text] = RowReader(tokenizer, 3).read(write(tmp_path / "ids.jsonl", [row])).values()
    assert (text.ids.tolist(), text.labels.tolist()) == ([5, 6, 7], [-100, -100, 7])


@pytest.mark.parametrize(
    ("row", "options", "error", "words"),
    [
        ({"prompt": "a", "completion": "b"}, {}, UnknownLabels, "--prompt-column"),
        ({"text": "a b", "question": "a", "answer": "b"}, {}, UnknownLabels, "--loss all"),
        ({"messages": CHAT}, {}, UnknownLabels, "--loss answers"),
        ({"messages": CHAT}, {"loss": "answers", "template": LAST_ONLY}, UnknownLabels, "labels"),
        ({"messages": CHAT}, {"loss": "all"}, SourceError, "chat template"),
        ({"input_ids": [1, 2]}, {}, UnknownLabels, "write the labels"),
        ({"input_ids": [1, 2], "labels": [1]}, {}, SourceError, "row 0"),
        ({"input_ids": [1], "labels": [1]}, {"loss": "all"}, UnknownLabels, "leave out --loss"),
        ({"text": "secret words"}, {"loss": "answers"}, SourceError, "needs --prompt-column"),
        ({"prompt": "secret", "text": "b"}, {"prompt_column": "prompt"}, SourceError, "--column"),
        ({"prompt": 4, "answer": "secret"}, {"prompt_column": "prompt"}, SourceError, "row 0"),
    ],
)
def test_what_cannot_be_known_is_refused(
    tokenizer: Any, tmp_path: Path, row: Any, options: Any, error: type, words: str
) -> None:
    source = write(tmp_path / "rows.jsonl", [row])
    with pytest.raises(error, match=words) as refusal:
        RowReader(tokenizer, 64, **options).read(source)
    assert "secret" not in str(refusal.value)


def test_classes_of_a_csv_are_numbers_and_each_word_has_one(tokenizer: Any, tmp_path: Path) -> None:
    classes = {"LABEL_0": 0, "LABEL_1": 1}
    source = tmp_path / "rows.csv"
    source.write_text("text,label\nGood morning,1\nGood night,0\n")
    texts = RowReader(tokenizer, 9, head="row", classes=classes).read(source)
    assert [int(text.labels[-1]) for text in texts.values()] == [1, 0]
    source.write_text("text,label\nGood morning,2\n")
    with pytest.raises(UnknownLabels, match="class that is not in the model's config"):
        RowReader(tokenizer, 9, head="row", classes=classes).read(source)
    row = {"tokens": ["secret", "words"], "labels": [0, 1]}
    rows = write(tmp_path / "rows.jsonl", [row, row | {"labels": [0]}])
    with pytest.raises(SourceError, match=r"row 1 of .* as many labels as words"):
        RowReader(tokenizer, 9, head="token", classes=classes).read(rows)


@pytest.mark.parametrize("settings", [{}, {"prompt_column": "prompt"}, {"loss": "all"}])
@pytest.mark.parametrize("end", ["", "_input_ids"])
def test_preferences_are_unknown(
    tokenizer: Any, tmp_path: Path, settings: dict[str, Any], end: str
) -> None:
    row = {"prompt": "When?", "chosen": " At ten.", f"rejected{end}": " Never."}
    reader = RowReader(tokenizer, 40, **settings)
    with pytest.raises(UnknownLabels, match="holds preferences"):
        reader.read(write(tmp_path / "rows.jsonl", [row]))
    del row[f"rejected{end}"]
    alone = RowReader(tokenizer, 40, prompt_column="prompt")
    assert labelled(tokenizer, alone.read(write(tmp_path / "rows.jsonl", [row]))[0]) == (
        " At ten." + tokenizer.eos_token
    )
