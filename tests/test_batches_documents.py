"""Documents that are packed into rows: what marks them, and what each of them holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DataCollatorWithFlattening

from lightning_fedleak.model.batches import BatchError, TokenBatch, read_batch
from lightning_fedleak.model.taps.tokens import texts_in

LENGTHS = (3, 1, 4, 2)


def flattened(lengths: tuple[int, ...] = LENGTHS, **options: Any) -> dict[str, Any]:
    """What transformers' own collator makes of texts of these lengths."""
    features, first = [], 10
    for length in lengths:
        ids = list(range(first, first + length))
        features.append({"input_ids": ids, "labels": ids})
        first += length
    return DataCollatorWithFlattening(**options)(features, return_tensors="pt")


def number_of_each(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]


def block_diagonal(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    number = number_of_each(lengths)
    return (number[:, :, None] == number[:, None]).tril()[:, None]


def additive(sees: Tensor, least: float) -> Tensor:
    return torch.zeros(sees.shape).masked_fill(~sees, least)


PLAIN = flattened(return_position_ids=False)
MARKS: dict[str, dict[str, Any]] = {
    "position_ids": flattened(),
    "positions from 2": flattened(position_ids_start=2),
    "seq_idx": flattened(return_position_ids=False, return_seq_idx=True),
    "cu_seq_lens_q": flattened(return_position_ids=False, return_flash_attn_kwargs=True),
    "all of them": flattened(return_seq_idx=True, return_flash_attn_kwargs=True),
    "cu_seq_lens": {**PLAIN, "cu_seq_lens": [0, 3, 4, 8, 10]},
    "booleans": {**PLAIN, "attention_mask": block_diagonal()},
    "heads": {**PLAIN, "attention_mask": block_diagonal().expand(-1, 3, -1, -1)},
    "three dimensions": {**PLAIN, "attention_mask": block_diagonal()[:, 0].long()},
    "-inf": {**PLAIN, "attention_mask": additive(block_diagonal(), -torch.inf)},
    "-10,000": {**PLAIN, "attention_mask": additive(block_diagonal(), -1e4)},
    "both ways": {**PLAIN, "attention_mask": block_diagonal() | block_diagonal().mT},
}


@pytest.mark.parametrize("name", MARKS)
def test_documents_are_where_any_mark_says(name: str) -> None:
    batch = read_batch(MARKS[name], "causal")
    assert batch.documents is not None
    assert torch.equal(batch.documents, number_of_each())
    assert batch.is_packed
    assert [text.ids.tolist() for text in texts_in(batch)] == [
        [10, 11, 12], [13], [14, 15, 16, 17], [18, 19],
    ]  # fmt: skip


def test_a_mask_of_four_dimensions_says_what_is_padded() -> None:
    ids = torch.arange(5, 10)[None]
    sees = torch.ones(5, 5).tril().bool()
    sees[:, :2] = False  # padding on the left: nobody sees it
    batch = read_batch({"input_ids": ids, "attention_mask": sees[None, None]}, "causal")
    assert batch.attention_mask is not None
    assert batch.attention_mask.tolist() == [[False, False, True, True, True]]
    assert not batch.is_packed


@pytest.mark.parametrize("marks", ["positions", "numbers", "mask"])
def test_reading_marks_looks_into_no_tensor(marks: str) -> None:
    ids = torch.empty(1, 4, dtype=torch.long, device="meta")
    batch = {
        "positions": {"input_ids": ids, "position_ids": ids},
        "numbers": {"input_ids": ids, "seq_idx": ids.int()},
        "mask": {"input_ids": ids, "attention_mask": ids.new_empty(1, 1, 4, 4).bool()},
    }[marks]
    assert read_batch(batch, "causal").documents is not None


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"cu_seq_lens": torch.tensor([0, 2, 8]), "input_ids": torch.ones(2, 4).long()}, "rows"),
        ({"seq_idx": torch.ones(1, 3).long(), "input_ids": torch.ones(2, 4).long()}, "documents"),
        ({"position_ids": torch.ones(3, 4), "input_ids": torch.ones(2, 4).long()}, "position_ids"),
    ],
)
def test_marks_of_another_form_are_refused(batch: dict[str, Tensor], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        read_batch(batch, "causal")


def test_positions_of_images_are_refused() -> None:
    """Where they begin again a document may begin, or an image."""
    ids = torch.ones(2, 4).long()
    for positions in (torch.zeros(3, 2, 4), torch.arange(4)):
        with pytest.raises(BatchError, match="leave out position_ids"):
            read_batch({"input_ids": ids, "position_ids": positions.long()}, "causal")


# ---- the boundary logic, by brute force ---------------------------------------------------------


@st.composite
def packed(draw: st.DrawFn, kinds: tuple[str, ...] = ("causal", "masked")) -> TokenBatch:
    """Rows of documents, padded on either side or not at all, some labels ignored."""
    rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    ids = torch.arange(rows * length).view(rows, length) + 10
    flags = st.lists(
        st.lists(st.booleans(), min_size=length, max_size=length), min_size=rows, max_size=rows
    )
    starts = torch.tensor(draw(flags))
    starts[:, 0] = True
    columns = torch.arange(length)
    begins = torch.where(starts, columns, 0).cummax(1).values
    mask = None
    if draw(st.booleans()):
        mask = columns >= draw(st.integers(0, length - 1))
        mask = (mask.flip(0) if draw(st.booleans()) else mask).expand(rows, -1).long()
    labels = ids.masked_fill(~torch.tensor(draw(flags)), -100) if draw(st.booleans()) else None
    kind = draw(st.sampled_from(kinds)) if labels is not None else "causal"
    return TokenBatch(ids, labels, mask, kind, columns - begins)  # type: ignore[arg-type]


def documents_by_hand(batch: TokenBatch) -> list[list[int]]:
    """Flat places of each document's tokens."""
    found: list[list[int]] = []
    assert batch.position_ids is not None
    length = batch.input_ids.shape[1]
    for row, positions in enumerate(batch.position_ids.tolist()):
        current: list[list[int]] = []
        for column, position in enumerate(positions):
            if position == 0:
                current.append([])
            if batch.attention_mask is None or batch.attention_mask[row, column]:
                current[-1].append(row * length + column)
        found += [places for places in current if places]
    return found


@given(packed())
def test_places_are_those_of_a_loop(batch: TokenBatch) -> None:
    expected = documents_by_hand(batch)
    places = batch.document_places()
    assert [row[row >= 0].tolist() for row in places] == expected
    numbers = torch.randn(*batch.input_ids.shape, 2)
    if not batch.is_packed:
        assert batch.per_document(numbers) is numbers
        return
    for row, document in zip(batch.per_document(numbers), expected, strict=True):
        assert torch.equal(row[: len(document)], numbers.flatten(0, 1)[document])
        assert not row[len(document) :].any()


@given(packed(), st.booleans())
def test_a_token_is_read_if_a_label_behind_it_can_see_it(batch: TokenBatch, crossing: bool) -> None:
    object.__setattr__(batch, "crossing", crossing)
    assert batch.position_ids is not None
    rows, length = batch.input_ids.shape
    number = (batch.position_ids == 0).cumsum(1)
    real = torch.ones(rows, length) if batch.attention_mask is None else batch.attention_mask
    counted = real > 0 if batch.labels is None else batch.labels != -100
    expected = torch.zeros(rows, length, dtype=torch.bool)
    for row in range(rows):
        for column in range(length):
            if not counted[row, column]:
                continue
            reader = column - 1 if batch.kind == "causal" else column
            for seen in range(length):
                together = crossing or number[row, seen] == number[row, reader]
                before = batch.kind != "causal" or seen <= reader
                if reader >= 0 and together and before and real[row, seen]:
                    expected[row, seen] = True
    assert torch.equal(batch.context_mask(), expected)


@given(packed(("causal",)))
def test_each_document_becomes_a_row(batch: TokenBatch) -> None:
    expected = documents_by_hand(batch)
    assert batch.position_ids is not None
    begins = {int(batch.position_ids.flatten()[places[0]]) for places in expected}
    if len(expected) == len({places[0] // batch.input_ids.shape[1] for places in expected}):
        assert batch.by_document() is batch
        return
    if len(begins) > 1:  # padding hides where one begins
        with pytest.raises(BatchError, match="begin again"):
            batch.by_document()
        return
    rows = batch.by_document()
    assert rows.attention_mask is not None
    assert rows.by_document() is rows
    for row, places in enumerate(expected):
        n = len(places)
        assert rows.attention_mask[row].tolist() == [1] * n + [0] * (len(rows.input_ids[0]) - n)
        assert rows.input_ids[row, :n].tolist() == batch.input_ids.flatten()[places].tolist()
        if batch.labels is not None and rows.labels is not None:
            assert rows.labels[row, :n].tolist() == batch.labels.flatten()[places].tolist()
            assert (rows.labels[row, n:] == -100).all()


def test_documents_that_are_no_texts_of_their_own_are_refused() -> None:
    ids = torch.arange(6)[None]
    marks = torch.tensor([[0, 0, 0, 1, 1, 1]])
    places = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(BatchError, match="attend to the others"):
        TokenBatch(ids, ids, None, "causal", places, crossing=True).by_document()
    with pytest.raises(BatchError, match="position_ids that begin again"):
        TokenBatch(ids, ids, None, "causal", documents=marks).by_document()
    with pytest.raises(BatchError, match="position_ids that begin again"):
        TokenBatch(ids, ids, None, "causal", places + marks).by_document()
    with pytest.raises(BatchError, match="give each document a row"):
        TokenBatch(ids, torch.tensor([1]), None, "classifier", places).by_document()
