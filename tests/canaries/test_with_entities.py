"""Values planted in a user's rows: where they stand, from which law they and candidates come."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_fedleak.evaluation.canaries import with_entities
from lightning_fedleak.evaluation.canaries.dataset import token_ids_of
from lightning_fedleak.evaluation.canaries.entities import _EntityKind


def characters() -> PreTrainedTokenizerFast:
    """Return a tokenizer of which each character is a token."""
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0} | {chr(32 + n): 4 + n for n in range(95)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


TOKENIZER = characters()
PHONE = {"phone": ("Call me at {}.", "###-####")}
NAMES, MORE_NAMES = ([f"{word}{n:03d}" for n in range(300)] for word in ("Jo", "Al"))


def words(n: int) -> torch.Tensor:
    return torch.randint(40, 90, (n,), generator=torch.Generator().manual_seed(n))


def chats(n: int = 300, length: int = 80) -> list[dict[str, Any]]:
    """Rows of which the first half is a prompt and the end is padding."""
    rows = []
    for row in range(n):
        ids = words(length * (row + 1))[-length:].clone()
        ids[-8:] = TOKENIZER.pad_token_id
        labels = ids.clone()
        labels[: length // 2] = -100
        labels[-8:] = -100
        mask = (torch.arange(length) < length - 8).long()
        rows.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return rows


@given(st.text(alphabet="#?x-", min_size=1, max_size=6))
def test_a_pattern_has_each_of_its_values_once(pattern: str) -> None:
    kind = _EntityKind("a {}", pattern)
    assert kind.size == 10 ** pattern.count("#") * 26 ** pattern.count("?")
    numbers = range(0, kind.size, max(1, kind.size // 500))
    values = [kind.value(number) for number in numbers]
    assert len(set(values)) == len(values)
    for value in values:
        for character, mark in zip(value, pattern, strict=True):
            assert character.isdigit() if mark == "#" else True
            assert character.isupper() if mark == "?" else True
            assert mark in "#?" or character == mark


def test_values_stand_in_their_place_and_nothing_else_changes() -> None:
    rows = chats()
    data = with_entities(rows, PHONE, tokenizer=TOKENIZER, count=30, seed=3)
    entities = data.entities
    assert entities.groups == [("phone", "prompt"), ("phone", "label")]
    places = Counter(one.place for one in entities.entities)
    assert places == {"prompt": 30, "label": 30}
    assert len({one.number for one in entities.entities}) == 60
    plain = Counter(tuple(row["input_ids"].tolist()) for row in rows)
    kept = Counter(tuple(data[n]["input_ids"].tolist()) for n in range(len(data)))
    assert sum((plain & kept).values()) == 300 - 60  # hosts stand in the data with a value alone
    included = entities.included.tolist()
    for row, entity in enumerate(entities.entities):
        ids = entities.token_ids[row]
        value = entities.kinds["phone"].value(entity.number)
        span = slice(entity.start, entity.start + len(entity.ids))
        assert torch.equal(ids[span], entity.ids)
        assert TOKENIZER.decode(entity.ids) == f" {value}"
        assert f"Call me at {value}." in TOKENIZER.decode(ids)
        copies = [
            data[n] for n in range(len(data)) if torch.equal(token_ids_of(data[n], "row"), ids)
        ]
        assert len(copies) == (entities.record.repeats[row] if included[row] else 0)
        for item in copies[:1]:
            labels = item["labels"][span]
            assert bool((labels == -100).all()) is (entity.place == "prompt")
            assert entity.place == "prompt" or torch.equal(labels, entity.ids)
            assert len(item["input_ids"]) == 80
            assert item["input_ids"][-8:].tolist() == [TOKENIZER.pad_token_id] * 8
    counted = len(data) - 240
    assert counted == sum(n for n, i in zip(entities.record.repeats, included, strict=True) if i)
    assert rows[0]["input_ids"].tolist() == chats(1)[0]["input_ids"].tolist()  # untouched


def test_masks_of_completions_and_rows_of_ids_are_read() -> None:
    rows = [
        {"input_ids": row["input_ids"].tolist(), "completion_mask": [0] * 40 + [1] * 40}
        for row in chats(200)
    ]
    data = with_entities(rows, PHONE, tokenizer=TOKENIZER, count=20, seed=1)
    for entity in data.entities.entities:
        assert (entity.start >= 40) is (entity.place == "label")
    plain = [words(80 * n)[-80:] for n in range(1, 100)]
    data = with_entities(plain, PHONE, ["label"], tokenizer=TOKENIZER, count=20, seed=1)
    assert all(one.place == "label" for one in data.entities.entities)
    with pytest.raises(ValueError, match=r"too few of 99 rows have room.*places=\('label',\)"):
        with_entities(plain, PHONE, tokenizer=TOKENIZER, count=20, seed=1)


def test_where_a_value_stands_says_nothing_of_it() -> None:
    """Values of several lengths stand at the same places of the same rows."""
    kinds = {"name": ("My name is {}", [f"{'ab'[n % 2] * (2 + n % 5)}{n}." for n in range(600)])}
    data = with_entities(chats(), kinds, ["label"], tokenizer=TOKENIZER, count=40, seed=1)
    lengths = {len(one.ids) for one in data.entities.entities}
    assert len(lengths) > 2
    room = data.entities.kinds["name"].room
    for entity in data.entities.entities:
        assert entity.start - len("My name is") + room <= 72  # any value would end before padding


def test_candidates_are_distinct_of_the_set_and_none_was_planted() -> None:
    kinds = {"name": ("My name is {}.", [f"Jo{n:03d}" for n in range(300)])}
    data = with_entities(chats(), kinds, tokenizer=TOKENIZER, count=30, seed=5)
    entities = data.entities
    planted = {entities.kinds["name"].value(one.number) for one in entities.entities}
    for row, n in ((0, 100), (1, 1000)):
        values = [TOKENIZER.decode(ids).strip() for ids in entities.candidates(row, n)]
        assert values[0] == entities.kinds["name"].value(entities.entities[row].number)
        assert (
            len(set(values)) == len(values) == 1 + min(n, 140)
        )  # but 60 planted ones, and 100 by which the room was chosen
        assert not planted & set(values[1:])
        measured = {entities.kinds["name"].value(n) for n in entities.kinds["name"].lengths}
        assert len(measured) == 100
        assert not measured & set(values)
        assert {*values} <= {*kinds["name"][1]}
        again = entities.candidates(row, n)
        assert [TOKENIZER.decode(ids).strip() for ids in again] == values


def test_ranks_are_uniform_whatever_scores_a_value_has() -> None:
    """A score that the value's own characters decide, such as a taught format, is no leak."""
    rows, ranks = chats(120), []
    for seed in range(60):
        data = with_entities(rows, PHONE, ["label"], tokenizer=TOKENIZER, count=10, seed=seed)
        for row in range(10):
            scores = [
                int(ids.sum()) % 97 + int(ids[0]) for ids in data.entities.candidates(row, 19)
            ]
            above = sum(score > scores[0] for score in scores[1:])
            ties = sum(score == scores[0] for score in scores[1:])
            drawn = int(
                torch.rand(1, generator=torch.Generator().manual_seed(row + seed)) * (ties + 1)
            )
            ranks.append(above + drawn)
    counts = [sum(4 * n <= rank < 4 * n + 4 for rank in ranks) for n in range(5)]
    assert chisquare(counts).pvalue > 1e-3


def test_a_record_keeps_the_draw_and_holds_no_value(tmp_path: Path) -> None:
    file = tmp_path / "entities.json"
    data = with_entities(chats(), PHONE, tokenizer=TOKENIZER, count=20, record=file)
    again = with_entities(chats(), PHONE, tokenizer=TOKENIZER, count=20, record=file)
    assert torch.equal(data.entities.included, again.entities.included)
    assert [one.number for one in data.entities.entities] == [
        one.number for one in again.entities.entities
    ]
    assert os.stat(file).st_mode & 0o777 == 0o600
    content = file.read_text()
    for entity in data.entities.entities:
        assert data.entities.kinds["phone"].value(entity.number) not in content
    with pytest.raises(ValueError, match="another run"):
        with_entities(chats(), PHONE, tokenizer=TOKENIZER, count=21, record=file)


@pytest.mark.parametrize(
    ("kinds", "more", "message"),
    [
        ({"phone": ("Call me.", "###-####")}, {}, r"one \{\}"),
        ({"phone": ("{} is mine", "###-####")}, {}, "after some words"),
        ({"code": ("Code {}", "##")}, {}, "of at least 220, got 100"),
        ({"name": ("I am {}", ["Jo"] * 300)}, {}, "a value twice, or one whose tokens begin"),
        ({}, {}, "give kinds="),
        (PHONE, {"places": ["answer"]}, "places"),
        ({"a/b": ("Code {}", "####")}, {}, "a name of letters"),
        ({"name": ("I am {}.", [f"Jo {n}" for n in range(500)])}, {}, "or end each in the mark"),
        ({**PHONE, "again": ("Or {}.", "##?-###?")}, {}, None),
        ({**PHONE, "again": ("Or {}.", "5##-####")}, {}, "'phone' and 'again' share a value"),
        ({**PHONE, "again": ("Or {}.", [f"555-{n:04d}" for n in range(300)])}, {}, "share"),
        ({"again": ("Or {}.", [f"555-{n:04d}" for n in range(300)]), **PHONE}, {}, "share"),
        ({"a": ("A {}", NAMES), "b": ("B {}", NAMES[-1:] + MORE_NAMES)}, {}, "share"),
        ({"a": ("A {}", NAMES), "b": ("B {}", MORE_NAMES)}, {}, None),
    ],
)
def test_kinds_that_cannot_be_ranked_are_refused(kinds, more, message) -> None:
    settings = {"tokenizer": TOKENIZER, "count": 10, "seed": 1, **more}
    refusal = nullcontext() if message is None else pytest.raises(ValueError, match=message)
    with refusal:
        with_entities(chats(), kinds, **settings)


def test_values_end_before_others_begin_with_them() -> None:
    """The mark that follows a value makes it no beginning of a longer one."""
    kinds = {"name": ("I am {}", [f"Jo {n}." for n in range(500)])}
    data = with_entities(chats(), kinds, tokenizer=TOKENIZER, count=20, seed=1)
    values = [TOKENIZER.decode(ids) for ids in data.entities.candidates(0, 200)]
    assert not [a for a in values for b in values if a != b and b.startswith(a)]


def test_a_set_may_have_more_values_than_an_index() -> None:
    kinds = {"iban": ("Pay to {}.", "DE####################")}
    data = with_entities(chats(), kinds, ["label"], tokenizer=TOKENIZER, count=20, seed=1)
    values = [TOKENIZER.decode(ids).strip() for ids in data.entities.candidates(0, 50)]
    assert len({*values}) == 51
    leading = Counter(value[2] for value in values)
    assert len(leading) > 5  # the numbers reach beyond 64 bits


def test_values_that_the_tokenizer_merges_with_words_are_not_drawn() -> None:
    class Merging:
        """Writes a digit 7 and the mark behind it as one token."""

        all_special_ids = ()

        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[ord(c) for c in text.replace("7.", "~")] for text in texts]}

    data = with_entities(chats(), PHONE, ["label"], tokenizer=Merging(), count=40, seed=1)
    for row, entity in enumerate(data.entities.entities):
        values = data.entities.candidates(row, 30)
        assert all(int(ids[-1]) != ord("7") for ids in values)
        assert len(values) > 20
        assert data.entities.kinds["phone"].value(entity.number)[-1] != "7"
