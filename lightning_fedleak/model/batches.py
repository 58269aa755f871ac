"""The client's batch as token ids, labels and masks, whatever form the user's code gives it.

Texts packed into one row are its *documents*. A user's function that reads a batch is an *adapter*.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_fedleak.model.anatomy import Kind

IGNORE_INDEX = -100
"""Label that the cross-entropy of torch and Hugging Face ignores."""

_LABELS: dict[Kind, str] = {
    "causal": "(B, L) beside their ids, not shifted; -100: not trained on",
    "masked": "(B, L), -100 where the loss ignores a token",
    "seq2seq": "(B, L') of the decoder, -100 where the loss ignores a token",
    "classifier": "(B,) of texts, or (B, L) of tokens",
}
HIDDEN = -5e3  # an additive mask hides positions at or below it: libraries use -10,000 or less
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens", "cu_seqlens")  # fields with the ends of documents
# Fields that may be labels, but perhaps shifted: a batch with one, and no ``labels``, is refused.
_OTHER_LABELS = ("label", "target", "targets", "y", "lm_labels", "decoder_input_ids")
ADAPTER = " Else give settings= a batch_adapter=, a function from your batch to a TokenBatch."
"""The last sentence of an error about a batch: set an adapter."""


class BatchError(ValueError):
    """A batch could not be read; the message has types and shapes, never contents."""


@dataclass(frozen=True, repr=False)
class TokenBatch:
    """Token ids of one batch. Its tensors are those of the batch, never copies.

    Labels follow the convention of Hugging Face: each is at the position of its id, and a causal
    model's loss shifts them. Labels that are shifted already (``x, y = text[:, :-1], text[:, 1:]``)
    look the same, so that such a batch needs an adapter that joins the two:
    ``text = torch.cat([x[:, :1], y], dim=1)`` and ``TokenBatch(text, text, None, "causal")``.

    Attributes:
        input_ids: (B, L) integers.
        labels: (B, L) integers, -100 where the loss ignores a token; (B, L') of a decoder; (B,) or
            more of a classifier; or None.
        attention_mask: (B, L) integers or booleans, 0 where padded, or None.
        kind: meaning of the labels (:data:`lightning_fedleak.model.anatomy.Kind`).
        position_ids: (B, L) or (1, L) integers, or None. A document begins where they do not
            increase by one.
        documents: (B, L) integers that number the documents of a row. A document begins where the
            number changes, and where ``position_ids`` begin one. Stored as 0, 1, ... in each row.
            None means one document per row.
        crossing: whether the documents of a row attend to each other. None: unknown, so that it is
            tested (:func:`~lightning_fedleak.model.taps.calls.crosses`).
        preferences: whether the loss prefers some answers to others, as that of DPO does. The
            gradients of rejected answers then have the opposite sign.
        live: (B, L) bool, the positions whose logits have a gradient, read from the autograd graph
            of the step. None: the positions that predict a label.
        soft_labels: whether the loss also has targets that are no single labels (distillation).
        reached: (B, L) bool, the ids that any term of the loss depends on; None: unknown.

    Raises:
        BatchError: the tensors do not have these shapes and dtypes.
    """

    input_ids: Tensor
    labels: Tensor | None
    attention_mask: Tensor | None
    kind: Kind
    position_ids: Tensor | None = None
    documents: Tensor | None = None
    crossing: bool | None = None
    preferences: bool = False
    live: Tensor | None = None
    soft_labels: bool = False
    reached: Tensor | None = None

    def __post_init__(self) -> None:
        ids, labels, mask = self.input_ids, self.labels, self.attention_mask
        for name in ("input_ids", "labels", "attention_mask", "position_ids", "documents"):
            value = getattr(self, name)
            is_tensor = value is None or isinstance(value, Tensor)
            _check(is_tensor, f"{name} must be a tensor", value)
        is_ids = ids.dim() == 2 and _holds_ids(ids)
        _check(is_ids, "input_ids must be integers of shape (B, L)", ids)
        is_mask = mask is None or mask.shape == ids.shape
        _check(is_mask, f"attention_mask must have input_ids' shape {tuple(ids.shape)}", mask)
        self._number_documents()
        if labels is None:
            return
        # A decoder's texts have lengths of their own.
        by_row = self.kind in ("classifier", "seq2seq")
        shape = tuple(ids.shape[:1] if by_row else ids.shape)
        fits = labels.shape[: len(shape)] == shape
        fits &= self.kind == "classifier" or (labels.dim() == 2 and _holds_ids(labels))
        _check(fits, f"labels of a {self.kind} model must be {_LABELS[self.kind]}", labels)

    def target_ids(self) -> Tensor:
        """Return the ids that the loss is computed on, (n,) int64 in order, repeats included.

        For a causal batch they are its labels, or without labels its unpadded input ids, without
        the first of each row. For other models they are all labels (classes, for a classifier).
        Labels of -100 are excluded. On CUDA this waits for the device.

        Raises:
            BatchError: a batch that is not causal has no labels, or they are no integers.
        """
        if self.labels is None and self.kind != "causal":
            raise BatchError(f"the batch of a {self.kind} model has no labels.{ADAPTER}")
        if self.labels is None:
            return _unmasked(self.input_ids, self.attention_mask, start=1)
        _check(_holds_ids(self.labels), "the labels are no ids", self.labels)
        # Only virtual tokens (prompt tuning) predict a row's first token; ``live`` shows them.
        skips_first = self.kind == "causal" and self.live is None
        targets = self.labels[:, 1:] if skips_first else self.labels
        return targets[targets != IGNORE_INDEX].long()

    def context_ids(self, *, one_way: bool = False) -> Tensor:
        """Return the input ids that the loss depends on, (n,) int64, with repeats.

        Padding is among them if a term of the loss reaches it. The inputs of an encoder-decoder's
        decoder come last, without its start tokens. On CUDA this waits for the device.

        Args:
            one_way: see :meth:`context_mask`.
        """
        ids, labels = self.input_ids, self.labels
        context = self.context_mask(one_way=one_way)
        aligned = labels is not None and labels.shape == ids.shape and _holds_ids(labels)
        if self.reached is not None or (aligned and self.kind != "seq2seq"):
            context |= self._predicting(context if labels is None else labels != IGNORE_INDEX)
        context_ids = ids[context].long()
        if self.kind != "seq2seq" or labels is None:
            return context_ids
        counted = labels != IGNORE_INDEX
        decoder_ids = labels[counted & before_last(counted)].long()
        return torch.cat([context_ids, decoder_ids.to(context_ids.device)])

    def context_mask(self, *, one_way: bool = False) -> Tensor:
        """Return (B, L) bool, which of the ``input_ids`` the loss depends on, without padding.

        A causal text's last token predicts nothing. No layer's gradient depends on it as an input,
        so it leaks as a label only. The same holds for the last token with a label and all that
        follow it, and for a text without a label, unless another term of the loss reaches them.

        Args:
            one_way: whether a classifier's tokens attend to no later ones. If each token has a
                class, tokens after the last one with a label are then excluded.
        """
        mask, labels, ids = self.attention_mask, self.labels, self.input_ids
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
        counted = real if labels is None else (labels != IGNORE_INDEX).to(real.device)
        if self.reached is None and (counted.shape != real.shape or self.kind == "seq2seq"):
            return real & (counted.flatten(1).any(1) if counted.dim() > 1 else counted)[:, None]
        counted = self._predicting(counted)
        # The last column of each document that predicts a label; -1 where none does.
        columns = torch.arange(ids.shape[1], device=real.device).expand_as(real)
        numbers = self.documents if self.documents is not None and not self.crossing else None
        numbers = torch.zeros_like(columns) if numbers is None else numbers.to(real.device)
        ends = torch.full_like(columns, -1).scatter_reduce(
            1, numbers, columns.masked_fill(~counted, -1), "amax"
        )
        ends = ends.gather(1, numbers)
        return real & (columns <= ends if one_way or self.kind == "causal" else ends >= 0)

    def _predicting(self, counted: Tensor) -> Tensor:
        """Return (B, L) bool: positions with a gradient; if unknown, those that predict labels."""
        if (observed := self.live if self.reached is None else self.reached) is not None:
            return observed.to(counted.device)
        return _preceding(counted) if self.kind == "causal" else counted

    def _number_documents(self) -> None:
        """Store each token's document number within its row, if the batch marks documents."""
        ids = self.input_ids
        starts = torch.zeros_like(ids, dtype=torch.bool)[:, 1:]
        for name, step in (("position_ids", 1), ("documents", 0)):
            marks = getattr(self, name)
            if marks is None:
                continue
            fits = marks.shape in (ids.shape, (1, ids.shape[1])) and _holds_ids(marks)
            _check(fits, f"{name} must be integers of shape {tuple(ids.shape)}", marks)
            starts = starts | (marks.to(ids.device).diff(dim=1) != step)
        if self.position_ids is not None or self.documents is not None:
            documents = functional.pad(starts.cumsum(1), (1, 0)) if ids.shape[1] else ids.long()
            object.__setattr__(self, "documents", documents)

    @property
    def is_packed(self) -> bool:
        """Return whether a row holds several documents. On CUDA this waits for the device."""
        if self.documents is None:
            return False
        places = self.document_places()
        rows = places[:, :1] // max(1, self.input_ids.shape[1])
        return len(places) > len(set(rows.flatten().tolist()))

    def document_places(self) -> Tensor:
        """Return (N, L') int64: each document's indices in the flattened batch, filled with -1.

        Padding belongs to no document. On CUDA this waits for the device.
        """
        ids, mask = self.input_ids, self.attention_mask
        rows = torch.arange(len(ids), device=ids.device)[:, None] * ids.shape[1]
        keys = (rows if self.documents is None else rows + self.documents).expand_as(ids).flatten()
        real = torch.ones_like(keys) if mask is None else mask.to(keys.device).flatten()
        places = (real != 0).nonzero()[:, 0]
        lengths = torch.unique_consecutive(keys[places], return_counts=True)[1].tolist()
        if not lengths:
            return places.view(0, 0)
        documents = torch.split(places, lengths)
        return nn.utils.rnn.pad_sequence(list(documents), batch_first=True, padding_value=-1)

    def by_document(self) -> TokenBatch:
        """Return the batch with one document per row, padded on the right; itself if not packed.

        Raises:
            BatchError: a document's text, labels or positions are not its own alone.
        """
        if not self.is_packed:
            return self
        problem = None
        if self.crossing:
            problem = (
                "and each may attend to the others: keep them apart, in transformers by "
                "use_cache=False, position_ids that begin again, and no attention_mask"
            )
        elif self.kind == "seq2seq" or (self.labels is not None and self.labels.dim() != 2):
            problem = f"and a {self.kind} model's labels are not divided: give each document a row"
        ids, positions = self.input_ids, self.position_ids
        if positions is not None:
            positions = self.per_document(positions.expand_as(ids))
        if positions is None or bool((positions[:, 0] != positions[0, 0]).any()):
            problem = problem or "without position_ids that begin again: pass position_ids"
        if positions is None or problem:
            raise BatchError(f"several documents are packed into a row, {problem}")
        return TokenBatch(
            self.per_document(ids),
            None if self.labels is None else self.per_document(self.labels, IGNORE_INDEX),
            self.per_document(torch.ones_like(ids)),
            self.kind,
            positions,
            preferences=self.preferences,
            live=None if self.live is None else self.per_document(self.live),
            soft_labels=self.soft_labels,
            reached=None if self.reached is None else self.per_document(self.reached),
        )

    def per_document(self, values: Tensor, fill: int = 0) -> Tensor:
        """Return values (B, L, ...) of tokens, rearranged to the rows of :meth:`by_document`.

        Args:
            values: The values of each token of the batch.
            fill: The value after the end of a document.
        """
        if not self.is_packed:
            return values
        places = self.document_places().to(values.device)
        parts = values.flatten(0, 1)[places.clamp(min=0)]
        return parts.masked_fill((places < 0).view(*places.shape, *[1] * (parts.dim() - 2)), fill)

    def check_values(self, readable: int, n_labels: int) -> None:
        """Raise an error for ids outside the vocabulary, or a mask that hides the trained tokens.

        A mask counts as inverted (1 where padded, or 0 where it is added to scores) if it keeps no
        token that has a label, or no token at all, or only repeats of one id while it hides several
        ids. It may hide any other tokens, and padding may have labels. On CUDA this waits.

        Args:
            readable: rows of the input embedding.
            n_labels: rows of the head; a classifier's labels are not compared with it.

        Raises:
            BatchError: ids or mask are inconsistent; the message contains no ids.
        """
        has_ids = self.labels is not None and self.kind != "classifier"
        targets = self.target_ids() if has_ids or self.kind == "causal" else None
        problem = None
        ids, mask = _unmasked(self.input_ids, self.attention_mask), self.attention_mask
        if has_ids and targets is not None and _any_outside(targets, n_labels):
            problem = f"labels hold ids outside the vocabulary of {n_labels} (ignored are -100)"
        elif _any_outside(ids, readable):
            problem = f"input_ids hold ids outside the vocabulary of {readable}"
        elif (
            mask is not None
            and self.input_ids.numel()
            and self._hides_words(mask != 0, ids, targets)
        ):
            problem = "attention_mask, 1 for a token and 0 for padding, hides what is trained on"
        if problem:
            raise BatchError(f"{problem}.{ADAPTER}")

    def _hides_words(self, mask: Tensor, visible: Tensor, targets: Tensor | None) -> bool:
        """Return whether a mask (B, L) is inverted; ``visible`` are the ids that it keeps."""
        labels = self.labels
        if len(visible) == 0:
            return labels is None or targets is None or len(targets) > 0
        if labels is not None and self.kind in ("causal", "masked"):
            counted = labels != IGNORE_INDEX
            if self.kind == "causal":
                counted, mask = counted[:, 1:], mask[:, 1:]
            if bool(counted.any()) and not bool((counted & mask).any()):
                return True
        assert self.attention_mask is not None
        hidden = _unmasked(self.input_ids, self.attention_mask == 0)
        return not bool((visible != visible[0]).any()) and bool((hidden != hidden[:1]).any())

    @property
    def n_targets(self) -> int:
        """Return the number of tokens (of a classifier: labels) that the loss is computed on."""
        return int(self.target_ids().numel())

    def __repr__(self) -> str:
        labels, mask = (_describe(v) for v in (self.labels, self.attention_mask))
        return (
            f"TokenBatch(kind={self.kind!r}, input_ids={_describe(self.input_ids)}, "
            f"labels={labels}, attention_mask={mask})"
        )


BatchAdapter = Callable[[Any], TokenBatch]
"""Turns a user's own batch into a :class:`TokenBatch`."""


def read_batch(batch: Any, kind: Kind) -> TokenBatch:
    """Return ids, labels and mask of a batch, without reading values of its tensors.

    Known forms:

    - mappings (dict, ``BatchEncoding``, ``UserDict``) and objects (dataclasses, named tuples) with
      ``input_ids`` and, if they have them, ``labels`` and ``attention_mask``. Labels under another
      usual name (``targets``, ``y``) raise an error. Packed documents are separated by
      ``position_ids`` that begin again, ``seq_idx``, ``cu_seq_lens`` or ``cu_seq_lens_q`` (for a
      single row), and attention masks (B, H, L, L) or (B, L, L).
      ``completion_mask`` without ``labels`` is that of TRL's chosen and rejected answers;
    - ``(input_ids,)``, ``(input_ids, labels)``, ``(input_ids, attention_mask, labels)`` as tuple or
      list; of two, a second of dtype bool is the mask;
    - one integer tensor (B, L).

    Position and dtype decide which tensor of a tuple is the mask, because reading its values would
    make the host wait for the device. Nothing is copied, moved or changed.

    Args:
        batch: the argument of ``training_step``.
        kind: meaning of the labels, see :class:`~lightning_fedleak.model.anatomy.Anatomy`.

    Raises:
        BatchError: the form is not known; the message has types and shapes.
    """
    if isinstance(batch, Tensor):
        return TokenBatch(batch, None, None, kind)
    if isinstance(batch, Mapping):
        _check("input_ids" in batch, "the batch has no 'input_ids'", batch)
        return _from_names(batch, batch.get, kind)
    if hasattr(batch, "input_ids"):
        return _from_names(batch, lambda name: getattr(batch, name, None), kind)
    parts = tuple(batch) if isinstance(batch, tuple | list) else ()
    match parts if all(isinstance(v, Tensor) for v in parts) else ():
        case (ids,):
            return TokenBatch(ids, None, None, kind)
        case (ids, mask) if mask.dtype == torch.bool:
            return TokenBatch(ids, None, mask, kind)
        case (ids, labels):
            return TokenBatch(ids, labels, None, kind)
        case (ids, mask, labels):
            return TokenBatch(ids, labels, mask, kind)
    raise _form_error("the batch has no known form", batch)


def write_batch(batch: Any, tokens: TokenBatch) -> Any:
    """Return a copy of ``batch`` with the ids and labels of ``tokens``, in the same form.

    It takes the forms of :func:`read_batch`. Everything else (mask, other fields) is the same
    object in both. Only the text that a fast tokenizer's ``BatchEncoding`` holds is not copied.

    Args:
        batch: the argument of :func:`read_batch`.
        tokens: the ids, and the labels unless ``tokens.labels`` is None.

    Raises:
        BatchError: the form is not known, cannot be copied, or has no place for the labels.
    """
    new: dict[str, Tensor] = {"input_ids": tokens.input_ids}
    if tokens.labels is not None:
        new["labels"] = tokens.labels
    if isinstance(batch, MutableMapping) and "input_ids" in batch:
        old, new_batch = batch["input_ids"], copy.copy(batch)
        if getattr(new_batch, "_encodings", None) is not None:
            new_batch._encodings = None  # type: ignore[attr-defined]
        new_batch.update(new)
        return _check_copy(batch, new_batch, batch["input_ids"] is old)
    if isinstance(batch, tuple) and hasattr(batch, "_replace") and hasattr(batch, "input_ids"):
        return batch._replace(**new)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(batch, **new)
    if hasattr(batch, "input_ids"):
        old, new_batch = batch.input_ids, copy.copy(batch)
        for name, value in new.items():
            setattr(new_batch, name, value)
        return _check_copy(batch, new_batch, batch.input_ids is old)
    is_plain = isinstance(batch, Tensor) or type(batch) in (tuple, list)
    _check(is_plain, "the batch cannot be copied with other ids", batch)
    old_labels = read_batch(batch, tokens.kind).labels
    _check(
        "labels" not in new or old_labels is not None, "the batch has no place for labels", batch
    )
    if isinstance(batch, Tensor):
        return tokens.input_ids
    _, *further = batch
    if "labels" in new:
        further[-1] = new["labels"]
    return type(batch)([tokens.input_ids, *further])


def other_fields(batch: Any) -> tuple[str, ...]:
    """Return the names of a batch's fields other than ids, labels and mask.

    Fields that are None do not count. Batches without names (tensors, plain tuples and lists) have
    no other fields.

    Raises:
        BatchError: an object whose fields cannot be listed.
    """
    if isinstance(batch, Mapping):
        items = list(batch.items())
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [f.name for f in dataclasses.fields(batch)]
        items = [(n, getattr(batch, n)) for n in {*names, *getattr(batch, "__dict__", ())}]
    elif isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        items = list(batch._asdict().items())
    elif isinstance(batch, Tensor) or type(batch) in (tuple, list):
        return ()
    else:
        _check(hasattr(batch, "__dict__"), "the fields of the batch cannot be listed", batch)
        items = list(vars(batch).items())
    standard = ("input_ids", "labels", "attention_mask")
    return tuple(sorted(_key(name) for name, v in items if v is not None and name not in standard))


def adapter_to_copy(batch: object, kind: Kind, watcher: str) -> str:
    """Return a template of a ``batch_adapter`` for this form of batch; ``watcher`` takes it."""
    return f"""
    from lightning_fedleak.engine import WatchSettings
    from lightning_fedleak.model.batches import TokenBatch

    def batch_adapter(batch):  # {_describe(batch)}
        return TokenBatch(
            input_ids=...,  # (B, L) integers
            labels=...,  # {_LABELS[kind]}
            attention_mask=...,  # (B, L), 0 where padded; or None
            kind="{kind}",
        )
    settings = WatchSettings(batch_adapter=batch_adapter)  # for {watcher}(..., settings=settings)
"""


def _check_copy(batch: Any, new_batch: Any, unchanged: bool) -> Any:
    """Return a copy, or raise an error if the original changed with it."""
    shares = new_batch is batch or not unchanged
    _check(not shares, "a copy of the batch shares its fields with it", batch)
    return new_batch


def _from_names(batch: object, get: Callable[[str], Any], kind: Kind) -> TokenBatch:
    """Return the batch whose fields ``get`` returns by name, None for a missing one."""
    ids, mask, positions = get("input_ids"), get("attention_mask"), get("position_ids")
    labels, preferences = _labels(batch, get, kind)
    _check(
        not isinstance(positions, Tensor) or positions.dim() == 2,
        "leave out position_ids that are not (B, L), where each row is one text",
        positions,
    )
    documents: Tensor | None = None
    if isinstance(ids, Tensor) and ids.dim() == 2:
        documents = _marked_documents(ids, get)
        if (
            isinstance(mask, Tensor)
            and mask.dim() in (3, 4)
            and mask.shape[-2:] == 2 * ids.shape[1:]
        ):
            attends = mask > HIDDEN if mask.is_floating_point() else mask != 0
            attends = (attends.any(1) if mask.dim() == 4 else attends).expand(len(ids), -1, -1)
            starts = ~attends.diagonal(-1, 1, 2)  # a token that does not attend to the one before
            numbers = functional.pad(starts, (1, 0)).cumsum(1) if ids.shape[1] else ids
            documents = numbers if documents is None else documents + numbers
            mask = attends.diagonal(0, 1, 2)
    return TokenBatch(ids, labels, mask, kind, positions, documents, preferences=preferences)


def _labels(batch: object, get: Callable[[str], Any], kind: Kind) -> tuple[Any, bool]:
    """Return the labels, and whether the loss prefers some of the answers they mark (TRL)."""
    labels, ids, answers = get("labels"), get("input_ids"), get("completion_mask")
    if labels is not None:
        return labels, False
    dims = (1, 2) if kind == "classifier" else (2,)  # ranks of tensors that may be labels
    for name in _OTHER_LABELS:
        is_candidate = isinstance(value := get(name), Tensor) and value.dim() in dims
        _check(not is_candidate, f"the batch has no 'labels', but '{name}', which may be", batch)
    if kind != "causal" or not isinstance(answers, Tensor) or not isinstance(ids, Tensor):
        return None, False
    return ids.masked_fill(answers == 0, IGNORE_INDEX), True


def _marked_documents(ids: Tensor, get: Callable[[str], Any]) -> Tensor | None:
    """Return (B, L) numbers that change where ``seq_idx`` or ``cu_seq_lens`` begin a document."""
    lengths = next((v for name in _LENGTHS if (v := get(name)) is not None), None)
    if lengths is None:
        numbers = get("seq_idx")
        return numbers if isinstance(numbers, Tensor) else None
    problem = f"cu_seq_lens of {len(ids)} rows: of which tokens they are is unknown"
    _check(len(ids) == 1, problem, lengths)
    ends = torch.as_tensor(lengths, device=ids.device).flatten()
    places = torch.arange(ids.shape[1], device=ids.device, dtype=ends.dtype)
    return torch.searchsorted(ends, places, right=True)[None]


def _unmasked(ids: Tensor, mask: Tensor | None, start: int = 0) -> Tensor:
    """Return ids from column ``start`` on that the mask keeps, (n,) int64, never a view."""
    ids = ids[:, start:]
    visible = ids.reshape(-1) if mask is None else ids[mask[:, start:] != 0]
    return visible.to(torch.int64, copy=True)


def before_last(flags: Tensor) -> Tensor:
    """Return (B, L) bool: the positions before the last True of their row."""
    return _preceding(flags.flip(1).cumsum(1).flip(1) > 0)


def _preceding(flags: Tensor) -> Tensor:
    """Return (B, L) bool: the positions right before a True of their row."""
    return torch.cat([flags[:, 1:], torch.zeros_like(flags[:, :1])], dim=1)


def _any_outside(ids: Tensor, n: int) -> bool:
    return bool(((ids < 0) | (ids >= n)).any())


def _holds_ids(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _check(holds: bool, text: str, value: object) -> None:
    """Raise an error with the form of a value unless a condition on it holds."""
    if not holds:
        raise _form_error(text, value)


def _form_error(text: str, value: object) -> BatchError:
    return BatchError(
        f"{text}; got {_describe(value)}. A batch has input_ids (and labels, attention_mask), or "
        f"is a tuple (input_ids, labels) or (input_ids, attention_mask, labels).{ADAPTER}"
    )


def _describe(value: object, depth: int = 2) -> str:
    """Return type and shapes of a value, never its contents."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}"
    name = type(value).__name__
    if value is None or depth == 0:
        return name
    if isinstance(value, Mapping):
        items = [f"{_key(k)}: {_describe(v, depth - 1)}" for k, v in list(value.items())[:8]]
    elif isinstance(value, tuple | list):
        items = [_describe(v, depth - 1) for v in value[:8]]
    else:
        return name
    more = ", ..." if len(items) < len(value) else ""
    return f"{name}({', '.join(items)}{more}; {len(value)} items)"


def _key(key: object) -> str:
    """Return a mapping's key if it is a field's name, or its type if it may be content."""
    is_name = isinstance(key, str) and key.isidentifier() and len(key) <= 32
    return str(key) if is_name else type(key).__name__
