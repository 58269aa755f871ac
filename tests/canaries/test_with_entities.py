"""Values planted in a user's rows: where they stand, from which law they and candidates come."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
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
from lightning_fedleak.evaluation.canaries.repeats import (
    COPY_SHARE,
    PIECE,
    RUN,
    find_repeats,
    scored_texts,
)
from lightning_fedleak.model.taps.tokens import Text


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
    for seed in range(20):
        data = with_entities(rows, PHONE, ["label"], tokenizer=TOKENIZER, count=30, seed=seed)
        for row in range(30):
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


# Runs that rows share, against a search over all pairs.


def repeated_texts(pool: Sequence[Text], rows: Iterable[Text]) -> torch.Tensor:
    """Return (N,) bool, whether each text of the pool is repeated by another row of the data."""
    return torch.from_numpy(find_repeats(pool, ((row, True) for row in rows)).again)


def text(ids: list[int], labels: list[bool] | None = None) -> Text:
    row = torch.tensor(ids)
    shown = torch.tensor(labels) if labels is not None else torch.ones(len(ids), dtype=torch.bool)
    return Text(row, row.masked_fill(~shown, -100))


def slow_runs(row: Text) -> set[tuple[int, ...]]:
    """Return the runs of label tokens; of a text without one all its label tokens."""
    labels = row.labels[1:].tolist()
    windows = [tuple(labels[a : a + RUN]) for a in range(len(labels) - RUN + 1)]
    whole = {w for w in windows if -100 not in w}
    return whole or {tuple(t for t in labels if t != -100)}


def slow_share(row: Text, others: list[Text]) -> float:
    """Return the share of label tokens that lie in pieces which another text has."""
    labels, inside = row.labels[1:].tolist(), set()
    for a in range(len(labels) - PIECE + 1):
        piece = labels[a : a + PIECE]
        found = -100 not in piece and any(
            other.labels[1:].tolist()[b : b + PIECE] == piece
            for other in others
            for b in range(len(other.labels) - PIECE)
        )
        inside |= set(range(a, a + PIECE)) if found else set()
    return len(inside) / max(1, row.n_labels)


def label_tokens(row: Text) -> list[int]:
    return [label for label in row.labels[1:].tolist() if label != -100]


@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=40), min_size=1, max_size=12),
    gap=st.integers(0, 30),
)
def test_repeats_are_those_of_a_search_over_pairs(rows: list[list[int]], gap: int) -> None:
    texts = [text(ids, [place != gap for place in range(len(ids))]) for ids in rows]
    runs = [slow_runs(each) for each in texts]
    expected = [
        any(own & other for j, other in enumerate(runs) if j != i)
        or slow_share(texts[i], [x for x in texts if label_tokens(x) != label_tokens(texts[i])])
        >= COPY_SHARE
        for i, own in enumerate(runs)
    ]
    assert repeated_texts(texts, texts).tolist() == expected


def test_runs_do_not_reach_from_row_to_row() -> None:
    """The first halves and second halves of two runs stand in other rows, one after the other."""
    rows = [text([0, *range(100, 130)]), text([0, *range(200, 230)])]
    mixed = [text([0, *range(117, 130)]), text([0, *range(200, 206)]), text([0, *range(206, 230)])]
    assert repeated_texts(rows, [*rows, *mixed]).tolist() == [True, True]
    assert repeated_texts(rows, [*rows, text([0, *range(118, 130)]), mixed[1]]).tolist() == [
        False,
        False,
    ]


# ---- copies -------------------------------------------------------------------------------------


def drawn(n: int, seed: int, length: int = 24) -> list[list[int]]:
    ids = torch.randint(1, 5000, (n, length), generator=torch.Generator().manual_seed(seed))
    return [list(map(int, row)) for row in ids.tolist()]


def apart(rows: list[list[int]]) -> list[list[int]]:
    """Return rows whose first tokens differ, so that no form before them has one more in common."""
    return [[6000 + n, *row[1:]] for n, row in enumerate(rows)]


def near(ids: list[int], seed: int) -> list[int]:
    """Return a text of which one word in twelve differs."""
    fresh = drawn(1, seed, len(ids))[0]
    return [fresh[n] if n % 12 == 1 else token for n, token in enumerate(ids)]


def poisoned(kind: str) -> list[Text]:
    """Return 1,200 rows, of which the first 30 are one text, or nearly so."""
    rows, common = drawn(1200, 0), drawn(1, 9)[0]
    rows[:30] = [common if kind == "same" else near(common, 100 + n) for n in range(30)]
    return [text(ids) for ids in rows]


@pytest.mark.parametrize("kind", ["same", "near"])
def test_one_text_in_many_rows_is_no_template_and_one_unit(kind: str) -> None:
    texts = poisoned(kind)
    trained = [n % 3 > 0 for n in range(1200)]
    found = find_repeats(texts, zip(texts, trained, strict=True))
    assert found.again.nonzero()[0].tolist() == list(range(30))
    assert set(found.units[:30]).isdisjoint(found.units[30:])
    assert len(set(found.units[:30])) == 1
    assert set(found.times[:30]) == {20}
    scored = scored_texts(texts, trained)
    assert scored.rows[:-1] == list(range(30, 1200))
    assert trained[scored.rows[-1]]
    assert scored.rows[-1] < 30
    assert scored.times.tolist() == [1] * 1170 + [20]
    # A pool that holds one row of them finds the others elsewhere.
    part = [texts[1], *texts[30:400]]
    elsewhere = [(texts[n], trained[n]) for n in [0, *range(2, 30), *range(400, 1200)]]
    scored = scored_texts(part, [True] * len(part), iter(elsewhere))
    assert (scored.rows[-1], scored.repeated) == (0, 1)
    assert int(scored.times[-1]) == 20


def test_who_is_a_copy_looks_at_neither_side_nor_order() -> None:
    texts = poisoned("near")[:200] + poisoned("same")[:40]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(3)).tolist()
    one, other = (
        find_repeats(these, ((x, side) for x in these))
        for these, side in ((texts, True), ([texts[n] for n in order], False))
    )
    assert (one.again[order] == other.again).all()
    same = one.units[order][:, None] == one.units[order][None]
    assert (same == (other.units[:, None] == other.units[None])).all()
    assert not other.times.any()


def test_texts_of_a_form_that_differ_in_their_gap_are_no_copies() -> None:
    """Half of the tokens are the form's; nine tenths are, where more than half of the texts are."""
    form, gaps = drawn(1, 0, 100)[0], apart(drawn(300, 1, 30))
    half = [text(form[:30] + gap) for gap in gaps[:100]] + [text(ids) for ids in drawn(200, 2)]
    assert not repeated_texts(half, half).any()
    most = [text(form + gap[:10]) for gap in gaps[:160]] + [text(ids) for ids in drawn(100, 2)]
    assert not repeated_texts(most, most).any()
    some = [text(form + gap[:10]) for gap in gaps[:100]] + [text(ids) for ids in drawn(200, 2)]
    found = find_repeats(some, ((one, True) for one in some))
    assert found.again.tolist() == [True] * 100 + [False] * 200
    assert len(set(found.units[:100])) == 1


def test_a_text_that_fills_most_rows_is_no_frame() -> None:
    """Texts count once, however often they stand in the data."""
    rows = drawn(40, 0)
    texts = [text(ids) for ids in [*rows, *[rows[0]] * 60, near(rows[0], 7)]]
    repeats = find_repeats(texts, ((one, True) for one in texts))
    assert repeats.again[[0, 40, 99, 100]].all()
    assert repeats.units[100] == repeats.units[0]
    assert repeats.times[0] == 62


def test_what_stands_in_many_copies_is_no_template_to_another_text() -> None:
    """A text that shares 13 tokens with one that fills 30 rows is left out."""
    rows = drawn(300, 0)
    rows[:30] = [rows[0]] * 30
    rows[30][5:18] = rows[0][5:18]
    texts = [text(ids) for ids in rows]
    assert repeated_texts(texts, texts).nonzero()[:, 0].tolist() == list(range(31))
    elsewhere = repeated_texts(texts[29:], texts)  # where the copies are in no pool
    assert elsewhere.nonzero()[:, 0].tolist() == [0, 1]


def test_a_run_in_more_than_a_hundredth_of_the_texts_is_a_template() -> None:
    n, most = 3000, 30
    rows = drawn(n, 0)
    for row in rows[:most]:
        row[5:18] = range(6000, 6013)
    texts = [text(ids) for ids in rows]
    assert repeated_texts(texts, texts).nonzero()[:, 0].tolist() == list(range(most))
    rows[most][5:18] = range(6000, 6013)
    texts[most] = text(rows[most])
    assert not repeated_texts(texts, texts).any()


def test_a_text_of_which_one_row_was_trained_on_and_a_copy_was_not_is_not_scored() -> None:
    texts = [text(ids) for ids in drawn(20, 0)] + [text(drawn(20, 0)[3])]
    scored = scored_texts(texts, [True] * 20 + [False])
    assert scored.rows == [n for n in range(20) if n != 3]
    assert (scored.repeated, scored.short) == (2, 0)
    assert scored_texts(texts, [True] * 21).rows[-1] in (3, 20)


def test_copies_of_short_rows_are_counted_also_where_they_are_elsewhere() -> None:
    def short(prompt: int, label: int) -> Text:
        ids = torch.tensor([*range(prompt, prompt + 20), label])
        return Text(ids, torch.where(torch.arange(21) < 20, -100, ids))

    texts = [short(100 * n, 5) for n in range(6)] + [short(200, 5), short(300, 5), short(400, 6)]
    trained = [True] * 7 + [False, True]
    scored = scored_texts(texts, trained, iter([(short(0, 5), True)]))
    assert scored.short_copies == [([0], 2), ([2, 6], 2)]  # 3's copy was left out, 4 and 8 differ
    assert scored.short_rows == [1, 4, 5, 8]


@pytest.mark.parametrize(("n", "is_form"), [(12, False), (13, True), (20, True)])
def test_a_part_of_most_rows_is_their_form_also_below_21_rows(n: int, is_form: bool) -> None:
    ids = torch.arange(24 * 60).view(24, 60)
    ids[:n, :16] = torch.arange(2000, 2016)
    rows = [Text(row, row) for row in ids]
    assert repeated_texts(rows, rows).tolist() == [not is_form and i < n for i in range(24)]


def test_what_another_row_quotes_without_loss_is_a_repeat_and_an_own_quote_is_none() -> None:
    first, second, third, own = drawn(4, seed=3)
    quoting = text(first + second, [False] * 24 + [True] * 24)
    extract = text(own + own[3:], [False] * 24 + [True] * 21)
    rows = [text(first), quoting, text(third), extract]
    assert repeated_texts(rows, rows).tolist() == [True, False, False, False]
    assert repeated_texts([rows[0]], rows).tolist() == [True]
    assert repeated_texts(rows[:1], rows[:1] + rows[2:]).tolist() == [False]
    # Also where an earlier row has the same answer.
    asked, thanks = drawn(2, seed=5)
    prompts = [text(ids + thanks, [False] * 24 + [True] * 24) for ids in (asked, first)]
    for order in (prompts, prompts[::-1]):
        assert repeated_texts([rows[0]], [rows[0], *order]).tolist() == [True]
    # What most rows have before their labels is their form, and so it is where one is all of it.
    forms = [text(first + ids, [False] * 24 + [True] * 24) for ids in drawn(30, seed=4)]
    assert repeated_texts(forms, [*forms, text(first)]).tolist() == [False] * 30
