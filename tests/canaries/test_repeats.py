"""Runs that rows share, against a search over all pairs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedleak.canaries.repeats import RUN, TEMPLATE_ROWS, repeated_texts
from lightning_fedleak.taps.tokens import Text


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


@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=40), min_size=1, max_size=12),
    gap=st.integers(0, 30),
)
@settings(max_examples=60, deadline=None)
def test_repeats_are_those_of_a_search_over_pairs(rows: list[list[int]], gap: int) -> None:
    texts = [text(ids, [place != gap for place in range(len(ids))]) for ids in rows]
    runs = [slow_runs(each) for each in texts]
    expected = [
        any(own & other for j, other in enumerate(runs) if j != i) for i, own in enumerate(runs)
    ]
    assert repeated_texts(texts, texts).tolist() == expected


def test_a_template_does_not_count() -> None:
    system = list(range(100, 120))
    rows = [text([*system, *range(1000 + 30 * n, 1030 + 30 * n)]) for n in range(TEMPLATE_ROWS + 1)]
    assert not repeated_texts(rows, rows).any()
    assert repeated_texts(rows[:5], rows[:5]).all()  # five rows show no template


def test_a_row_repeated_sixteen_times_counts_in_small_data() -> None:
    rows = [text(list(range(30 * n, 30 * n + 30))) for n in range(50)]
    data = rows + [rows[3]] * 15
    assert repeated_texts(rows, data).nonzero()[:, 0].tolist() == [3]


def test_the_memory_is_that_of_the_pool() -> None:
    """Rows may be a stream: each is read once."""
    pool = [text(list(range(30)))]
    assert repeated_texts(pool, iter([*pool, text(list(range(5, 40)))])).tolist() == [True]


def test_runs_do_not_reach_from_row_to_row() -> None:
    """The first halves and second halves of two runs stand in other rows, one after the other."""
    rows = [text([0, *range(100, 130)]), text([0, *range(200, 230)])]
    mixed = [text([0, *range(117, 130)]), text([0, *range(200, 206)]), text([0, *range(206, 230)])]
    assert repeated_texts(rows, [*rows, *mixed]).tolist() == [True, True]
    assert repeated_texts(rows, [*rows, text([0, *range(118, 130)]), mixed[1]]).tolist() == [
        False,
        False,
    ]


def test_rows_in_many_parts_are_counted_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [text([7] * 30), *(text(list(range(40 * n, 40 * n + 30))) for n in range(1, 9))]
    data = [*rows, rows[3]]
    expected = repeated_texts(rows, data).tolist()
    assert [n for n, again in enumerate(expected) if again] == [3]  # not 0, which repeats itself
    monkeypatch.setattr("lightning_fedleak.canaries.repeats.ROWS_AT_ONCE", 2)
    assert repeated_texts(rows, data).tolist() == expected


def test_an_empty_pool() -> None:
    assert repeated_texts([], [text([1, 2, 3])]).tolist() == []
