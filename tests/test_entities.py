"""Values that patterns and word lists find, against check digits and counts of one's own."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from lightning_fedleak.cli.finetuning.module import load_tokenizer
from lightning_fedleak.evaluation.entities import (
    KINDS,
    EntityFinder,
    finders_of,
    is_card_number,
    is_iban,
    spans_of,
)

TOKENIZER = ByT5Tokenizer()
GAPS = st.sampled_from(["", " "])


def found(text: str, kinds: Any = KINDS) -> list[tuple[str, str]]:
    finders = kinds if isinstance(kinds, dict) else finders_of([*kinds])
    return [(kind, text[start:end]) for kind, start, end in spans_of(text, finders)]


def luhn_digit(digits: str) -> str:
    table = "0246813579"  # of twice a digit the sum of its digits
    total = sum(
        int(table[int(one)] if place % 2 == 0 else one) for place, one in enumerate(digits[::-1])
    )
    return str(-total % 10)


def iban_of(country: str, account: str) -> str:
    number = "".join(
        str(string.ascii_uppercase.index(one) + 10) if one.isalpha() else one
        for one in account + country + "00"
    )
    return f"{country}{98 - int(number) % 97:02d}{account}"


@given(st.text("0123456789", min_size=12, max_size=18), st.integers(0, 17), st.integers(1, 9))
def test_a_check_digit_decides_what_is_a_card_number(body: str, place: int, step: int) -> None:
    number = body + luhn_digit(body)
    assert is_card_number(number)
    place %= len(number)
    changed = str((int(number[place]) + step) % 10)
    assert not is_card_number(number[:place] + changed + number[place + 1 :])
    grouped = " ".join(number[n : n + 4] for n in range(0, len(number) - 1, 4))
    if len(number) % 4 != 1:  # a last group of one digit is no group
        assert ("card", grouped) in found(f"Pay by {grouped}, please.", ["card"])


@given(
    st.text(string.ascii_uppercase, min_size=2, max_size=2),
    st.text("0123456789" + string.ascii_uppercase, min_size=11, max_size=30),
    st.integers(4, 33),
    GAPS,
)
def test_check_digits_decide_what_is_an_account_number(country, account, place, gap) -> None:
    number = iban_of(country, account)
    assert is_iban(number)
    place = 4 + place % len(account)
    # Mod 97 sees a change of one digit, or of a letter to its neighbour, whose value differs by 1.
    other = chr(ord(number[place]) + (-1 if number[place] in "9Z" else 1))
    assert not is_iban(number[:place] + other + number[place + 1 :])
    written = gap.join(number[n : n + 4] for n in range(0, len(number), 4)) if gap else number
    assert found(f"From {written}.", ["iban"]) == [("iban", written)]


@pytest.mark.parametrize(
    ("kind", "text", "values"),
    [
        ("phone", "Call 555-0123 or +49 (30) 1234 5678, not 1234567 and not 42", 2),
        ("email", "jo.doe+x@mail.example.com and Ann@ex.de, not @home or a@b", 2),
        ("date", "On 2024-01-15, 3 March 2021, May 4, 2020 and 12.03.2024; not 3.14 or 2024", 4),
        ("code", "AB1234 and sk-a1b2c3; neither covid-19 nor 1990s nor 123456", 2),
        ("card", "4111 1111 1111 1111, not 4111 1111 1111 1112", 1),
        ("iban", "DE89 3704 0044 0532 0130 00 FOR ANN", 1),
    ],
)
def test_patterns_find_what_they_say(kind: str, text: str, values: int) -> None:
    assert [name for name, _ in found(text, [kind])] == [kind] * values


def test_overlapping_values_are_of_the_first_kind(tmp_path: Path) -> None:
    text = "Pay DE89 3704 0044 0532 0130 00 on 2024-01-15"
    assert found(text, ["phone", "card"]) == []
    assert [kind for kind, _ in found(text)] == ["iban", "date"]
    (tmp_path / "days.txt").write_text("2024-01-15\n")
    assert found(text, [tmp_path / "days.txt", "date"]) == [("days", "2024-01-15")]


def test_a_word_list_finds_whole_words_in_a_row(tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("Jo\nAnna-Maria Müller\n\n")
    values = found("Jo met Anna Maria Müller and Joan; jo did not.", [names])
    assert values == [("names", "Jo"), ("names", "Anna Maria Müller")]


@pytest.mark.parametrize("name", ["fone", "phone.txt", "a b.txt", "empty.txt"])
def test_kinds_that_cannot_be_found_are_refused(tmp_path: Path, name: str) -> None:
    files = {"phone.txt": "Jo\n", "a b.txt": "Jo\n", "empty.txt": "Jo\n--\n"}
    kind: Any = name
    if name in files:
        kind = tmp_path / name
        kind.write_text(files[name])
    with pytest.raises(ValueError, match="entities") as error:
        finders_of([kind])
    assert "Jo" not in str(error.value)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, load_tokenizer(None)], ids=["bytes", "bpe"])
def test_tokens_of_a_value_are_those_that_write_it(tokenizer: Any) -> None:
    text = "Müller ☃: call +49 30 5550123 or write to jo@example.com today."
    ids = tokenizer(text)["input_ids"]
    finder = EntityFinder(["phone", "email"], [None, tokenizer])
    values = finder.find(ids)
    written = [tokenizer.decode(ids[one.start : one.end]).strip() for one in values]
    assert written == ["+49 30 5550123", "jo@example.com"]
    assert [one.key for one in values] == ["49305550123", "joexamplecom"]
    marks = finder.marks(torch.tensor(ids))
    assert int(marks["phone"].sum()) == values[0].end - values[0].start
    assert not bool((marks["phone"] & marks["email"]).any())
    assert not finder.has_letter(tokenizer("5", add_special_tokens=False)["input_ids"][-1])
    assert finder.has_letter(tokenizer("m", add_special_tokens=False)["input_ids"][-1])


def test_dates_have_one_key_only_where_they_are_the_same_date() -> None:
    finder = EntityFinder(["date", "phone"], [TOKENIZER])
    text = "On 1-11-2020, 11-1-2020 or 1.11.2020 call 555-0123 or 5550-123."
    keys = [one.key for one in finder.find(TOKENIZER(text)["input_ids"])]
    assert keys == ["1-11-2020", "11-1-2020", "1-11-2020", "5550123", "5550123"]


def test_a_tokenizer_is_needed_that_writes_texts_back() -> None:
    class Lower:
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [ord(one) for one in text.lower()]}

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(map(chr, ids))

    for tokenizer in (None, Lower()):
        with pytest.raises(ValueError, match=r"needs settings=WatchSettings\(tokenizer="):
            EntityFinder(["phone"], [tokenizer])
