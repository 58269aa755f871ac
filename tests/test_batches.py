""""""

import copy
import textwrap
from collections import Counter, UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import BatchEncoding, DataCollatorWithFlattening

from lightning_fedleak.model.anatomy import Kind
from lightning_fedleak.model.batches import (
    BatchError,
    TokenBatch,
    adapter_to_copy,
    other_fields,
    read_batch,
    write_batch,
)
from lightning_fedleak.model.taps.tokens import texts_in
from tests.helpers import models

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
LABELS = IDS.masked_fill(MASK == 0, -100)


@dataclass
class Fields:
    input_ids: Tensor
    labels: Tensor | None = None
    attention_mask: Tensor | None = None


Named = namedtuple("Named", ["labels", "input_ids", "attention_mask"])

FORMS: dict[str, tuple[Any, bool, bool]] = {  # batch, has labels, has mask
    "dict": ({"input_ids": IDS, "labels": LABELS, "attention_mask": MASK}, True, True),
    "dict with more": ({"input_ids": IDS, "labels": LABELS, "length": 3}, True, False),
    "dict with a class": ({"input_ids": IDS, "label": torch.tensor([1, 0])}, False, False),
    "BatchEncoding": (BatchEncoding({"input_ids": IDS, "attention_mask": MASK}), False, True),
    "UserDict": (UserDict(input_ids=IDS, labels=LABELS), True, False),
    "dataclass": (Fields(IDS, LABELS, MASK), True, True),
    "namedtuple": (Named(LABELS, IDS, MASK), True, True),
    "object": (SimpleNamespace(input_ids=IDS, labels=LABELS), True, False),
    "tuple of one": ((IDS,), False, False),
    "tuple of two": ((IDS, LABELS), True, False),
    "tuple with bool mask": ((IDS, MASK.bool()), False, True),
    "tuple of three": ((IDS, MASK, LABELS), True, True),
    "list of three": ([IDS, MASK.bool(), LABELS], True, True),
    "tensor": (IDS, False, False),
}


def test_reading_changes_nothing() -> None:
    batch = {"input_ids": IDS.clone(), "labels": LABELS.clone(), "attention_mask": MASK.clone()}
    before = copy.deepcopy(batch)
    read = read_batch(batch, "seq2seq")
    read.target_ids().fill_(1)
    read.context_ids().fill_(1)
    bare = read_batch(batch["input_ids"], "causal")
    bare.target_ids().fill_(1)
    bare.context_ids().fill_(1)
    assert batch.keys() == before.keys()
    assert all(torch.equal(batch[k], before[k]) for k in before)


NEW_IDS, NEW_LABELS = IDS + 20, LABELS.clamp(min=0) + 30


@pytest.mark.parametrize("form", FORMS)
def test_a_written_copy_reads_back_and_leaves_the_batch_alone(form: str) -> None:
    batch, has_labels, has_mask = FORMS[form]
    before = copy.deepcopy(batch)
    labels = NEW_LABELS if has_labels else None
    written = write_batch(batch, TokenBatch(NEW_IDS, labels, None, "causal"))
    assert type(written) is type(batch)
    assert written is not batch
    read, old = read_batch(written, "causal"), read_batch(batch, "causal")
    assert read.input_ids is NEW_IDS
    assert read.labels is labels
    assert read.attention_mask is old.attention_mask
    assert (old.attention_mask is not None) == has_mask
    assert not has_mask or torch.equal(old.attention_mask.bool(), MASK.bool())
    assert old.input_ids is IDS
    assert old.labels is (LABELS if has_labels else None)
    assert other_fields(written) == other_fields(batch) == other_fields(before)


def test_the_text_beside_the_tensors_is_not_copied() -> None:
    batch = BatchEncoding(
        {"input_ids": IDS}, encoding=[SimpleNamespace(tokens=["secret"], n_sequences=1)]
    )
    written = write_batch(batch, TokenBatch(NEW_IDS, None, None, "causal"))
    assert batch.tokens(0) == ["secret"]
    assert written.encodings is None


class Shared(UserDict):
    def __copy__(self) -> "Shared":
        return self


class Slotted:
    __slots__ = ("input_ids",)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Shared(input_ids=IDS), "shares its fields"),
        ((IDS,), "no place for labels"),
        ([IDS, MASK.bool()], "no place for labels"),
        (IDS, "no place for labels"),
        ({"ids": IDS}, "cannot be copied with other ids"),
        ("text", "cannot be copied with other ids"),
        ((IDS, IDS, IDS, IDS), "no known form"),
    ],
)
def test_what_cannot_be_written_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        write_batch(batch, TokenBatch(NEW_IDS, NEW_LABELS, None, "causal"))


def test_other_fields_are_named() -> None:
    assert other_fields({"input_ids": IDS, "text": ["a"], "idx": 1, "none": None}) == (
        "idx",
        "text",
    )
    assert other_fields({"input_ids": IDS, "the pin is 1": 0}) == ("str",)
    assert other_fields(SimpleNamespace(input_ids=IDS, decoder_input_ids=IDS)) == (
        "decoder_input_ids",
    )
    extended = Fields(IDS)
    extended.raw = "text"  # type: ignore[attr-defined]
    assert other_fields(extended) == ("raw",)
    with pytest.raises(BatchError, match="cannot be listed"):
        other_fields(Slotted())


SECRET = 80211
REFUSED: dict[str, tuple[Any, Kind, str]] = {
    "no ids": ({"inputs_embeds": torch.ones(2, 3)}, "causal", "inputs_embeds: float32(2, 3)"),
    "floats": ({"input_ids": torch.full((2, 3), float(SECRET))}, "causal", "integers of shape"),
    "booleans": (torch.ones(2, 3, dtype=torch.bool), "causal", "bool(2, 3)"),
    "one row": (torch.tensor([SECRET, 4]), "causal", "int64(2,)"),
    "lists": ({"input_ids": [[SECRET, 3]]}, "causal", "input_ids must be a tensor; got list"),
    "strings": ([f"the pin is {SECRET}"], "causal", "got list(str; 1 items)"),
    "a string": (f"the pin is {SECRET}", "causal", "got str"),
    "content as keys": ({f"pin {SECRET}": IDS}, "causal", "got dict(str: int64(2, 4); 1 items)"),
    "four": ((IDS, IDS, IDS, IDS), "causal", "4 items"),
    "tuple of dicts": (({"input_ids": IDS}, 0), "causal", "tuple(dict(input_ids: int64(2, 4)"),
    "targets": ({"input_ids": IDS, "targets": IDS}, "causal", "no 'labels', but 'targets'"),
    "y of an object": (SimpleNamespace(input_ids=IDS, y=IDS), "masked", "no 'labels', but 'y'"),
    "label": ({"input_ids": IDS, "label": IDS[:, 0]}, "classifier", "no 'labels', but 'label'"),
    "few labels": ((IDS, IDS[:1]), "seq2seq", "labels of a"),
    "few classes": ((IDS, IDS[:1, 0]), "classifier", "labels of a"),
    "classes": ((IDS, IDS[:, 0]), "causal", "labels of a causal model must be"),
    "soft labels": ((IDS, IDS.double()), "masked", "labels of a masked model must be"),
    "4-d mask": ((IDS, MASK[:, None, None], LABELS), "causal", "attention_mask must have"),
    "mask as a list": ({"input_ids": IDS, "attention_mask": [SECRET]}, "causal", "a tensor; got"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unknown_forms_are_refused_without_their_contents(name: str) -> None:
    batch, kind, message = REFUSED[name]
    with pytest.raises(BatchError) as caught:
        read_batch(batch, kind)
    text = str(caught.value)
    assert message in text
    assert "batch_adapter=" in text
    assert str(SECRET) not in text


def test_representation_has_no_contents() -> None:
    batch = TokenBatch(torch.full((2, 3), SECRET), None, None, "causal")
    assert repr(batch) == (
        "TokenBatch(kind='causal', input_ids=int64(2, 3), labels=NoneType, attention_mask=NoneType)"
    )


# --- against the loss itself -------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn, kind: Kind, with_labels: bool = True) -> TokenBatch:
    """Right-padded rows, some labels ignored at random."""
    rows, length = draw(st.integers(1, 3)), draw(st.integers(2, 6))
    cells = st.lists(st.integers(3, models.VOCAB - 1), min_size=length, max_size=length)
    ids = torch.tensor(draw(st.lists(cells, min_size=rows, max_size=rows)))
    ends = draw(st.lists(st.integers(1, length), min_size=rows, max_size=rows))
    mask = torch.arange(length) < torch.tensor(ends)[:, None]
    labels = None
    if with_labels:
        keeps = st.lists(st.booleans(), min_size=length, max_size=length)
        keep = torch.tensor(draw(st.lists(keeps, min_size=rows, max_size=rows)))
        text = ids
        if kind != "causal":
            text = torch.tensor(draw(st.lists(cells, min_size=rows, max_size=rows)))
        labels = text.masked_fill(~(keep & mask), -100)
    dtype = draw(st.sampled_from([torch.bool, torch.int64]))
    return TokenBatch(ids.masked_fill(~mask, 0), labels, mask.to(dtype), kind)


def used_by_the_loss(model: nn.Module, batch: TokenBatch) -> Counter[int]:
    """Ids that the model's own loss is computed on, read off the gradient of its logits.

    Cross-entropy averaged over n tokens pulls the logit of the token asked for down by less than
    1 / n and pushes every other one up, so that the only negative entry of a position that counts
    is its target, and a position that does not count is zero.
    """
    labels = batch.input_ids if batch.labels is None else batch.labels
    mask = batch.attention_mask
    if batch.labels is None and mask is not None:
        labels = labels.masked_fill(mask == 0, -100)
    with torch.no_grad():
        shape = model(input_ids=batch.input_ids, labels=labels).logits.shape
    nudge = torch.zeros(shape, requires_grad=True)
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _, __, output: output + nudge)
    try:
        loss = model(
            input_ids=batch.input_ids,
            attention_mask=None if mask is None else mask.long(),
            labels=labels,
        ).loss
    finally:
        handle.remove()
    (grad,) = torch.autograd.grad(loss, [nudge])
    if grad.isnan().any():  # the mean over no token
        return Counter()
    counted = grad.flatten(0, -2)
    counted = counted[counted.abs().sum(-1) > 0]
    assert torch.equal((counted < 0).sum(-1), torch.ones(len(counted), dtype=torch.long))
    return Counter(counted.argmin(-1).tolist())


MODELS: dict[str, tuple[Any, Kind]] = {
    "gpt2": (models.tiny_gpt2, "causal"),
    "bert": (models.tiny_bert_mlm, "masked"),
    "t5": (models.tiny_t5, "seq2seq"),
}


@pytest.mark.parametrize("name", MODELS)
def test_targets_are_those_of_the_models_loss(name: str) -> None:
    build, kind = MODELS[name]
    model = build().eval()

    plain = batches(kind, with_labels=False) if kind == "causal" else st.nothing()

    @given(batches(kind) | plain)
    def check(batch: TokenBatch) -> None:
        assert Counter(batch.target_ids().tolist()) == used_by_the_loss(model, batch)
        assert batch.n_targets == len(batch.target_ids())

    check()


def test_classes_are_the_targets_of_a_classifier() -> None:
    labels = torch.tensor([2, -100])
    batch = read_batch({"input_ids": IDS, "labels": labels}, "classifier")
    assert batch.target_ids().tolist() == [2]
    model = models.tiny_bert_classifier().eval()
    output = model(input_ids=IDS, labels=labels)
    (grad,) = torch.autograd.grad(output.loss, [output.logits])
    assert (grad.abs().sum(-1) > 0).tolist() == [True, False]
    assert int(grad[0].argmin()) == 2


# ---- values that contradict each other -----------------------------------------------------------

RIGHT = torch.tensor([[5, 6, 7, 8, 3], [9, 10, 4, 0, 0], [11, 12, 0, 0, 0]])
REAL = RIGHT != 0
LEFT, LEFT_REAL = RIGHT.flip(1), REAL.flip(1)
PROMPT = torch.arange(5) < 2  # of the longest row
CLASSES = torch.tensor([2, 0, 1])


def ignored(ids: Tensor, where: Tensor) -> Tensor:
    return ids.masked_fill(where, -100)


CONSISTENT: dict[str, tuple[Tensor, Tensor | None, Tensor | None, Kind]] = {
    "padded right": (RIGHT, ignored(RIGHT, ~REAL), REAL.long(), "causal"),
    "padded left": (LEFT, ignored(LEFT, ~LEFT_REAL), LEFT_REAL.long(), "causal"),
    "the loss reads padding too": (RIGHT, RIGHT.clone(), REAL.long(), "causal"),
    "numbers of packed documents": (RIGHT, RIGHT, torch.arange(1, 16).view(3, 5), "causal"),
    "prompts left out": (RIGHT, ignored(RIGHT, ~REAL | PROMPT), REAL.long(), "causal"),
    "rows that are nothing but padding": (
        torch.cat([RIGHT, torch.zeros_like(RIGHT)]),
        torch.cat([ignored(RIGHT, ~REAL), torch.full_like(RIGHT, -100)]),
        torch.cat([REAL, torch.zeros_like(REAL)]),
        "causal",
    ),
    "nothing but padding, not trained on": (
        torch.zeros_like(RIGHT),
        torch.full_like(RIGHT, -100),
        torch.zeros_like(RIGHT),
        "causal",
    ),
    "no rows": (RIGHT[:0], RIGHT[:0], REAL[:0], "causal"),
    "padded with an id of no word": (
        ignored(RIGHT, ~REAL), ignored(RIGHT, ~REAL), REAL.long(), "causal",
    ),
    "one word in its padding": (RIGHT[:1] * 0 + PROMPT, None, PROMPT[None], "causal"),
    "masked words": (RIGHT, ignored(RIGHT, RIGHT != 6), REAL.long(), "masked"),
    "a short target": (RIGHT, torch.tensor([[8], [9], [3]]), REAL.long(), "seq2seq"),
    "classes": (RIGHT, CLASSES, REAL.long(), "classifier"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSISTENT)
def test_batches_whose_values_agree_are_taken(name: str) -> None:
    TokenBatch(*CONSISTENT[name]).check_values(readable=13, n_labels=13)


CONTRADICTORY: dict[str, tuple[Tensor, Tensor | None, Tensor | None, Kind, str]] = {
    "1 is padding": (RIGHT, ignored(RIGHT, ~REAL), (~REAL).long(), "causal", "mask"),
    "1 is padding, no labels": (RIGHT, None, ~REAL, "causal", "mask"),
    "1 is padding of a source": (RIGHT, torch.tensor([[8], [9], [3]]), ~REAL, "seq2seq", "mask"),
    "added to scores": (
        RIGHT, ignored(RIGHT, ~REAL), torch.zeros(3, 5).masked_fill(~REAL, -1e4), "causal", "mask",
    ),
    "all zero": (RIGHT, RIGHT, torch.zeros_like(RIGHT), "causal", "mask"),
    "ids too large": (RIGHT * 10_000, None, REAL, "causal", "vocabulary"),
    "negative ids": (ignored(RIGHT, RIGHT == 6), RIGHT, REAL, "causal", "vocabulary"),
    "ids too large of a classifier": (RIGHT * 10_000, CLASSES, REAL, "classifier", "vocabulary"),
    "labels too large": (RIGHT, RIGHT * 10_000, REAL, "causal", "vocabulary"),
    "another label than -100 is left out": (
        RIGHT, RIGHT.masked_fill(~REAL, -1), REAL, "causal", "-100",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTORY)
def test_batches_whose_values_contradict_each_other_are_refused(name: str) -> None:
    *fields, word = CONTRADICTORY[name]
    batch = TokenBatch(*fields)
    with pytest.raises(BatchError, match=f"{word}.*batch_adapter") as refused:
        batch.check_values(readable=13, n_labels=13)
    assert "0000" not in str(refused.value)


def _hangs_on(model, batch, **inputs) -> torch.Tensor:
    """(B, L) bool, whether the embedding at a position has a gradient: what a label hangs on."""
    embedded = model.get_input_embeddings()(batch.input_ids).detach().requires_grad_()
    model(inputs_embeds=embedded, **inputs).loss.backward()
    return embedded.grad.abs().sum(-1) > 0


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_context_ids_are_those_whose_embedding_has_a_gradient(kind: str, counted: bool) -> None:
    """Padding too, where the loss counts it."""
    model = (models.tiny_llama() if kind == "causal" else models.tiny_bert_mlm(dropout=0.0)).eval()
    ids = torch.randint(5, 50, (4, 7))
    mask = torch.ones_like(ids)
    mask[0, 4:] = mask[1, 6:] = 0
    ids[mask == 0] = 3
    labels = ids if counted else torch.where((torch.rand(4, 7) < 0.4) & (mask == 1), ids, -100)
    labels = labels.clone()
    labels[2] = -100
    batch = TokenBatch(ids, labels, mask, kind)
    expected = _hangs_on(model, batch, attention_mask=mask, labels=labels)
    assert bool((expected & (mask == 0)).any()) == counted
    assert counted or torch.equal(batch.context_mask(), expected)
    assert sorted(batch.context_ids().tolist()) == sorted(ids[expected].tolist())


@dataclass
class Texts:
    names: list[str]
    tokens: torch.Tensor
    padding_mask: torch.Tensor
    targets: torch.Tensor


def adapted(batch: object, given: object, **code: str) -> TokenBatch:
    """What the adapter that is shown for a batch makes of one, with its fields filled in."""
    adapter = textwrap.dedent(adapter_to_copy(batch, "causal", "Watch"))
    for name in ("input_ids", "labels", "attention_mask"):
        adapter = adapter.replace(f"{name}=...", f"{name}={code.get(name)}")
    code, comment = adapter.split("  # for ")
    assert "..." not in code.split("return ")[1]
    assert comment.strip() == "Watch(..., settings=settings)"
    shown: dict[str, Any] = {}
    exec(adapter, shown)
    result = shown["settings"].batch_adapter(given)
    assert isinstance(result, TokenBatch)
    return result


def test_the_adapter_that_is_shown_reads_the_batch() -> None:
    ids = torch.arange(6).view(2, 3)
    batch = Texts(["a", "b"], ids, torch.ones(2, 3), ids + 1)
    for example in (batch, Texts):
        result = adapted(
            example,
            batch,
            input_ids="batch.tokens",
            labels="batch.targets",
            attention_mask="batch.padding_mask",
        )
        assert result.input_ids is ids
        assert result.labels is batch.targets
        assert result.attention_mask is batch.padding_mask
    named = {"x": ids, "y": ids + 1}
    result = adapted(named, named, input_ids='batch["x"]', labels='batch["y"]')
    assert result.input_ids is ids
    assert result.labels is named["y"]
    assert result.attention_mask is None


# Documents that are packed into rows: what marks them, and what each of them holds.


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
    "seq_idx": flattened(return_position_ids=False, return_seq_idx=True),
    "cu_seq_lens_q": flattened(return_position_ids=False, return_flash_attn_kwargs=True),
    "all of them": flattened(return_seq_idx=True, return_flash_attn_kwargs=True),
    "cu_seq_lens": {**PLAIN, "cu_seq_lens": [0, 3, 4, 8, 10]},
    "booleans": {**PLAIN, "attention_mask": block_diagonal()},
    "three dimensions": {**PLAIN, "attention_mask": block_diagonal()[:, 0].long()},
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


def test_reading_a_batch_and_its_marks_looks_into_no_tensor() -> None:
    """Meta tensors have no values: whatever looks at one fails."""
    ids = torch.empty(1, 4, dtype=torch.long, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool((ids == 1).all())
    for batch in ((ids, ids > 0, ids), {"input_ids": ids, "attention_mask": ids}):
        assert read_batch(batch, "causal").input_ids is ids
    for marks in ({"position_ids": ids}, {"attention_mask": ids.new_empty(1, 1, 4, 4).bool()}):
        assert read_batch({"input_ids": ids, **marks}, "causal").documents is not None


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"cu_seq_lens": torch.tensor([0, 2, 8]), "input_ids": torch.ones(2, 4).long()}, "rows"),
        ({"seq_idx": torch.ones(1, 3).long(), "input_ids": torch.ones(2, 4).long()}, "documents"),
        ({"position_ids": torch.ones(3, 4), "input_ids": torch.ones(2, 4).long()}, "position_ids"),
        # Where positions of images begin again a document may begin, or an image.
        ({"position_ids": torch.zeros(3, 2, 4).long(), "input_ids": IDS}, "leave out position_ids"),
    ],
)
def test_marks_of_another_form_are_refused(batch: dict[str, Tensor], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        read_batch(batch, "causal")


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
