"""What the client knows of a batch: token ids, labels, masks."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_fedleak.anatomy import Kind

IGNORE_INDEX = -100
"""Label that the cross-entropy of torch and Hugging Face leaves out."""

_LABELS: dict[Kind, str] = {
    "causal": "(B, L) beside their ids, not shifted; -100: not trained on",
    "masked": "(B, L), -100 where the loss looks away",
    "seq2seq": "(B, L') of the decoder, -100 where the loss looks away",
    "classifier": "(B,) of texts, or (B, L) of tokens",
}
_INNER = '"]["'  # between the names of a mapping and of a field of it, as code has them
_OTHER_LABELS = ("label", "target", "targets", "y", "lm_labels", "decoder_input_ids")


class BatchError(ValueError):
    """A batch could not be read; tells types and shapes, never contents."""


@dataclass(frozen=True, repr=False)
class TokenBatch:
    """Token ids of one batch. Tensors are references to the batch's own, never copies.

    Labels follow the convention of Hugging Face: they stand beside the ids they belong to, and a
    causal model's loss shifts them itself. Labels that are shifted already (``x, y = text[:, :-1],
    text[:, 1:]``) cannot be told from these; such a batch needs an adapter that joins the two:
    ``text = torch.cat([x[:, :1], y], dim=1)`` and ``TokenBatch(text, text, None, "causal")``.

    Attributes:
        input_ids: (B, L) integers.
        labels: (B, L) integers, -100 where the loss looks away; (B, L') of a decoder; (B,) or more
            of a classifier. None where the batch has none.
        attention_mask: (B, L) integers or booleans, 0 where padded, or None.
        kind: what the labels mean (:data:`lightning_fedleak.anatomy.Kind`).
        position_ids: (B, L) or (1, L), of packed texts that attend to themselves alone: one begins
            where they do not go on by one. None: every row is one text. Batches do not say which.

    Raises:
        BatchError: the tensors do not have these shapes and dtypes.
    """

    input_ids: Tensor
    labels: Tensor | None
    attention_mask: Tensor | None
    kind: Kind
    position_ids: Tensor | None = None

    def __post_init__(self) -> None:
        ids, labels, mask = self.input_ids, self.labels, self.attention_mask
        for name, value in (("input_ids", ids), ("labels", labels), ("attention_mask", mask)):
            if value is not None and not isinstance(value, Tensor):
                raise _refused(f"{name} must be a tensor", value)
        if ids.dim() != 2 or not _holds_ids(ids):
            raise _refused("input_ids must be integers of shape (B, L)", ids)
        if mask is not None and mask.shape != ids.shape:
            raise _refused(f"attention_mask must have input_ids' shape {tuple(ids.shape)}", mask)
        if labels is None:
            return
        if self.kind == "classifier":
            if labels.shape[:1] != ids.shape[:1]:
                raise _refused(f"labels must have one row for each of {len(ids)} inputs", labels)
        elif labels.dim() != 2 or not _holds_ids(labels):
            raise _refused(f"labels of a {self.kind} model must be integers (B, L)", labels)
        elif self.kind == "seq2seq" and len(labels) != len(ids):
            raise _refused(f"labels must have one row for each of {len(ids)} inputs", labels)
        elif self.kind != "seq2seq" and labels.shape != ids.shape:
            raise _refused(f"labels must have input_ids' shape {tuple(ids.shape)}", labels)

    def target_ids(self) -> Tensor:
        """Ids on which the loss is computed, (n,) int64 in reading order, repeats included.

        Causal: labels without each row's first, -100 dropped; where the batch has no labels, the
        input ids instead, those dropped that ``attention_mask`` pads. Masked, seq2seq and
        classifier (whose ids are classes): all labels but -100. On CUDA this waits for the device.

        Raises:
            BatchError: a model that is not causal has no labels, or they are no integers.
        """
        if self.labels is None and self.kind != "causal":
            raise BatchError(
                f"the batch of a {self.kind} model has no labels, so that the tokens its loss is "
                "computed on are unknown. Give 'labels' in the batch, or pass batch_adapter=."
            )
        if self.labels is None:
            return _kept(self.input_ids, self.attention_mask, start=1)
        if not _holds_ids(self.labels):
            raise _refused("the labels are no ids", self.labels)
        targets = self.labels[:, 1:] if self.kind == "causal" else self.labels
        return targets[targets != IGNORE_INDEX].long()

    def read_ids(self) -> Tensor:
        """Ids whose embedding is read and not masked out, (n,) int64, repeats included.

        Of an encoder-decoder the encoder's ids, then those its decoder reads: labels without each
        row's last (``shift_right``), -100 dropped. The start and pad tokens that ``shift_right``
        inserts are no words of the batch and left out. On CUDA this waits for the device.
        """
        read = _kept(self.input_ids, self.attention_mask)
        if self.kind != "seq2seq" or self.labels is None:
            return read
        decoded = self.labels[:, :-1]
        return torch.cat([read, decoded[decoded != IGNORE_INDEX].long().to(read.device)])

    def context_ids(self, *, one_way: bool = False) -> Tensor:
        """Those of :meth:`read_ids` that a label hangs on, (n,) int64, repeats included.

        So does padding whose own prediction the loss counts. Of an encoder-decoder those that its
        decoder reads come behind. On CUDA this waits for the device.

        Args:
            one_way: as of :meth:`context_mask`.
        """
        ids, labels = self.input_ids, self.labels
        reached = self.context_mask(one_way=one_way)
        beside = labels is not None and labels.shape == ids.shape and _holds_ids(labels)
        if labels is not None and beside and self.kind != "seq2seq":
            counted = labels != IGNORE_INDEX
            reached = reached | (_before(counted) if self.kind == "causal" else counted)
        read = ids[reached].long()
        if self.kind != "seq2seq" or labels is None:
            return read
        asked = labels != IGNORE_INDEX
        return torch.cat([read, labels[asked & before_last(asked)].long().to(read.device)])

    def context_mask(self, *, one_way: bool = False) -> Tensor:
        """(B, L) bool, which of the ``input_ids`` a label hangs on.

        A causal text's last token predicts nothing, and nothing predicts from it: no layer's
        gradient hangs on it, so that it is given away as a label only. So it is with all that
        stands behind the last token whose label counts, and with that one. Nor has a text without
        a label a part in any gradient.

        Args:
            one_way: whether a classifier's tokens see none that come later; where each has a class
                of its own, what stands behind the last that counts has no part then.
        """
        mask, labels = self.attention_mask, self.labels
        kept = torch.ones_like(self.input_ids, dtype=torch.bool) if mask is None else mask != 0
        asked = kept if labels is None else labels != IGNORE_INDEX
        if self.kind == "causal":
            return kept & self._before_last_of_text(asked)
        if one_way and asked.shape == kept.shape:
            return kept & (asked.flip(1).cumsum(1).flip(1) > 0)
        some = asked.flatten(1).any(1) if asked.dim() > 1 else asked
        return kept & some.to(kept.device)[:, None]

    def _before_last_of_text(self, asked: Tensor) -> Tensor:
        """As :func:`before_last`, of each of the texts that are packed in a row."""
        places = self.position_ids
        if places is None or self.input_ids.shape[1] == 0:
            return before_last(asked)
        begins = functional.pad(places.diff(dim=1) != 1, (1, 0)).expand_as(asked)
        text = begins.cumsum(1)
        behind = _before(asked).flip(1).cumsum(1).flip(1)
        ends = torch.searchsorted(text.contiguous(), text.contiguous(), right=True)
        return behind > functional.pad(behind, (0, 1)).gather(1, ends)

    def check_values(self, readable: int | None, n_labels: int) -> None:
        """Refuses ids that the model does not know, and a mask that hides what is trained on.

        A mask is taken for the wrong way round (1 where padded, or 0 where it is added to scores)
        where it keeps no token that a label asks for, none at all, or only one id over and over
        while it hides several others. What a mask hides may be any number, and a label may stand
        where there is padding. On CUDA this waits for the device.

        Args:
            readable: rows of the input embedding; None leaves ``input_ids`` unchecked.
            n_labels: rows of the head, which a classifier's labels are not compared with.

        Raises:
            BatchError: says what contradicts what, never which ids.
        """
        words = self.labels is not None and self.kind != "classifier"
        targets = self.target_ids() if words or self.kind == "causal" else None
        if words and targets is not None and _any_outside(targets, n_labels):
            raise _contradicts(
                f"labels hold ids outside the vocabulary of {n_labels} (what the loss leaves out "
                f"is {IGNORE_INDEX})"
            )
        kept = _kept(self.input_ids, self.attention_mask)
        if readable is not None and _any_outside(kept, readable):
            raise _contradicts(f"input_ids hold ids outside the vocabulary of {readable}")
        if self.attention_mask is None or self.input_ids.numel() == 0:
            return
        if self._hides_words(self.attention_mask != 0, kept, targets):
            raise _contradicts(
                "attention_mask hides the tokens that are trained on: it must be 1 (or True) for a "
                "token and 0 for padding"
            )

    def _hides_words(self, keeps: Tensor, kept: Tensor, targets: Tensor | None) -> bool:
        """Whether a mask (B, L) must be the wrong way round; ``kept`` are the ids that it keeps."""
        labels = self.labels
        if len(kept) == 0:
            return labels is None or targets is None or len(targets) > 0
        if labels is not None and self.kind in ("causal", "masked"):
            asked = labels != IGNORE_INDEX
            if self.kind == "causal":
                asked, keeps = asked[:, 1:], keeps[:, 1:]
            if bool(asked.any()) and not bool((asked & keeps).any()):
                return True
        assert self.attention_mask is not None
        hidden = _kept(self.input_ids, self.attention_mask == 0)
        return not bool((kept != kept[0]).any()) and bool((hidden != hidden[:1]).any())

    @property
    def n_targets(self) -> int:
        """Number of tokens (of a classifier: labels) that the loss is computed on."""
        return int(self.target_ids().numel())

    def __repr__(self) -> str:
        labels, mask = (_shape_of(v) for v in (self.labels, self.attention_mask))
        return (
            f"TokenBatch(kind={self.kind!r}, input_ids={_shape_of(self.input_ids)}, "
            f"labels={labels}, attention_mask={mask})"
        )


BatchAdapter = Callable[[Any], TokenBatch]
"""Turns a user's own batch into a :class:`TokenBatch`."""


def read_batch(batch: Any, kind: Kind) -> TokenBatch:
    """Reads ids, labels and mask off a batch without looking into its tensors.

    Known forms:

    - mappings (dict, ``BatchEncoding``, ``UserDict``) and objects (dataclasses, named tuples) with
      ``input_ids`` and, where they have them, ``labels`` and ``attention_mask``. Labels under
      another usual name (``targets``, ``y``) are refused rather than overlooked;
    - ``(input_ids,)``, ``(input_ids, labels)``, ``(input_ids, attention_mask, labels)`` as tuple or
      list; of two, a second of dtype bool is the mask;
    - one integer tensor (B, L).

    Which tensor of a tuple is the mask is told by place and dtype alone: looking at its values
    would make the host wait for the device. Nothing is copied, moved or changed.

    Args:
        batch: what ``training_step`` is given.
        kind: what the model's labels mean, see :class:`~lightning_fedleak.anatomy.Anatomy`.

    Raises:
        BatchError: the form is none of these. Says what was got, in types and shapes.
    """
    if isinstance(batch, Tensor):
        return TokenBatch(batch, None, None, kind)
    if isinstance(batch, Mapping):
        if "input_ids" not in batch:
            raise _refused("the batch has no 'input_ids'", batch)
        return _from_names(batch, batch.get, kind)
    if hasattr(batch, "input_ids"):
        return _from_names(batch, lambda name: getattr(batch, name, None), kind)
    if not isinstance(batch, tuple | list) or not all(isinstance(v, Tensor) for v in batch):
        raise _refused("the batch has no known form", batch)
    match tuple(batch):
        case (ids,):
            return TokenBatch(ids, None, None, kind)
        case (ids, mask) if mask.dtype == torch.bool:
            return TokenBatch(ids, None, mask, kind)
        case (ids, labels):
            return TokenBatch(ids, labels, None, kind)
        case (ids, mask, labels):
            return TokenBatch(ids, labels, mask, kind)
    raise _refused("the batch has no known form", batch)


BatchWriter = Callable[[Any, TokenBatch], Any]
"""Makes a copy of a user's own batch that holds the ids and labels of a :class:`TokenBatch`."""


def write_batch(batch: Any, tokens: TokenBatch) -> Any:
    """A copy of ``batch`` with the ids and labels of ``tokens``; ``batch`` stays what it is.

    Takes the forms that :func:`read_batch` takes, and gives the same form back. Everything else
    (mask, other fields) is the same object in both, except the text that a ``BatchEncoding`` of a
    fast tokenizer carries beside its tensors: the copy has none.

    Args:
        batch: what :func:`read_batch` was given.
        tokens: the ids, and the labels where ``tokens.labels`` is not None.

    Raises:
        BatchError: the form is not known, cannot be copied, or has no place for the labels.
    """
    new: dict[str, Tensor] = {"input_ids": tokens.input_ids}
    if tokens.labels is not None:
        new["labels"] = tokens.labels
    if isinstance(batch, Tensor):
        return _only_ids(new, batch)
    if isinstance(batch, MutableMapping) and "input_ids" in batch:
        old, written = batch["input_ids"], copy.copy(batch)
        if getattr(written, "_encodings", None) is not None:
            written._encodings = None  # type: ignore[attr-defined]
        written.update(new)
        return _apart(batch, written, batch["input_ids"] is old)
    if isinstance(batch, tuple) and hasattr(batch, "_replace") and hasattr(batch, "input_ids"):
        return batch._replace(**new)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(batch, **new)
    if hasattr(batch, "input_ids"):
        old, written = batch.input_ids, copy.copy(batch)
        for name, value in new.items():
            setattr(written, name, value)
        return _apart(batch, written, batch.input_ids is old)
    if type(batch) not in (tuple, list):
        raise _refused("the batch cannot be copied with other ids", batch)
    match tuple(batch):
        case (_,):
            parts = [_only_ids(new, batch)]
        case (_, mask) if mask.dtype == torch.bool:
            parts = [_only_ids(new, batch), mask]
        case (_, labels):
            parts = [tokens.input_ids, new.get("labels", labels)]
        case (_, mask, labels):
            parts = [tokens.input_ids, mask, new.get("labels", labels)]
        case _:
            raise _refused("the batch has no known form", batch)
    return type(batch)(parts)


def other_fields(batch: Any) -> tuple[str, ...]:
    """Names of what a batch holds beside ids, labels and mask, where it has names.

    Fields that are None do not count. Batches without names (tensors, plain tuples and lists) hold
    nothing else.

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
    elif hasattr(batch, "__dict__"):
        items = list(vars(batch).items())
    else:
        raise _refused("the fields of the batch cannot be listed", batch)
    known = ("input_ids", "labels", "attention_mask")
    return tuple(sorted(_key(name) for name, v in items if v is not None and name not in known))


def adapter_to_copy(batch: Any, kind: Kind) -> str:
    """A ``batch_adapter`` for a batch of one's own form, with its fields' names where it has some.

    Args:
        batch: one, or the class of it: a dataclass or a named tuple.
        kind: of the model.
    """
    if isinstance(batch, Mapping):
        values, place = _inner(batch), 'batch["{}"]'
    else:
        listed = getattr(batch, "__dataclass_fields__", getattr(batch, "_fields", None))
        fields = getattr(batch, "__dict__", ()) if listed is None else listed
        values, place = {name: getattr(batch, name, None) for name in fields}, "batch.{}"
    names = [name for name in values if all(_key(part) == part for part in name.split(_INNER))]
    masks = [n for n in names if "mask" in n.split(_INNER)[-1].lower()]
    flat = [n for n in masks if not isinstance(values[n], Tensor) or values[n].dim() == 2]
    mask = next(iter(flat), None)
    labels = next((n for n in names if re.search(r"label|target|\by$", n.lower())), None)
    others = [n for n in names if n not in (*masks, labels)]
    packed = bool(masks) and not flat
    places = next((n for n in others if packed and n.split(_INNER)[-1] == "position_ids"), None)
    others = [n for n in others if n != places]
    no_mask = "; not one of attention scores" if packed else ""

    def unlikely(name: str) -> tuple[bool, bool]:
        value = values[name]
        rows = isinstance(value, Tensor) and value.dim() == 2 and _holds_ids(value)
        last = name.split(_INNER)[-1].lower()
        return not rows, not re.search("id|tok|input|^x$", last)

    ids = min(others, key=unlikely, default=None)
    shown = [None if n is None else place.format(n) for n in (ids, labels, mask)]
    inside = ""
    if places is not None:
        inside = f"\n            position_ids={place.format(places)},  # of texts packed into a row"
    return f"""
    from lightning_fedleak.batches import TokenBatch

    def batch_adapter(batch):
        return TokenBatch(
            input_ids={shown[0] or "batch.YOUR_IDS"},  # (B, L) integers
            labels={shown[1]},  # {_LABELS[kind]}
            attention_mask={shown[2]},  # (B, L), 0 where padded{no_mask}
            kind="{kind}",{inside}
        )

    LeakageMonitor(..., batch_adapter=batch_adapter)
"""


def _inner(batch: Mapping[Any, Any]) -> dict[str, Any]:
    """Fields by name; those of a mapping inside by both names, as its place is written."""
    found: dict[str, Any] = {}
    for name, value in batch.items():
        if not isinstance(name, str):
            continue
        if isinstance(value, Mapping):
            found |= {f"{name}{_INNER}{n}": of for n, of in _inner(value).items()}
        else:
            found[name] = value
    return found


def _apart(batch: Any, written: Any, untouched: bool) -> Any:
    """Refuses a copy that writes through to what it was copied from."""
    if written is batch or not untouched:
        raise _refused("a copy of the batch shares its fields with it", batch)
    return written


def _only_ids(new: dict[str, Tensor], batch: Any) -> Tensor:
    if "labels" in new:
        raise _refused("the batch has no place for labels", batch)
    return new["input_ids"]


def _from_names(batch: object, get: Callable[[str], Any], kind: Kind) -> TokenBatch:
    labels = get("labels")
    if labels is None:
        dims = (1, 2) if kind == "classifier" else (2,)
        other = [
            name
            for name in _OTHER_LABELS
            if isinstance(value := get(name), Tensor) and value.dim() in dims
        ]
        if other:
            raise _refused(f"the batch has no 'labels', but '{other[0]}', which may be", batch)
    return TokenBatch(get("input_ids"), labels, get("attention_mask"), kind)


def _kept(ids: Tensor, mask: Tensor | None, start: int = 0) -> Tensor:
    """Ids from column ``start`` on that the mask keeps, (n,) int64, never a view of ``ids``."""
    ids = ids[:, start:]
    kept = ids.reshape(-1) if mask is None else ids[mask[:, start:] != 0]
    return kept.to(torch.int64, copy=True)


def before_last(asked: Tensor) -> Tensor:
    """(B, L) the positions before the last one of each row that is set."""
    return _before(asked.flip(1).cumsum(1).flip(1) > 0)


def _before(asked: Tensor) -> Tensor:
    """(B, L) the positions right before one of each row that is set."""
    return torch.cat([asked[:, 1:], torch.zeros_like(asked[:, :1])], dim=1)


def _any_outside(ids: Tensor, n: int) -> bool:
    return bool(((ids < 0) | (ids >= n)).any())


def _contradicts(what: str) -> BatchError:
    return BatchError(
        f"{what}. The words of such a batch are unknown. Mend it, or pass batch_adapter=, a "
        "function from your batch to a TokenBatch that says what is trained on."
    )


def _holds_ids(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _refused(what: str, got: object) -> BatchError:
    return BatchError(
        f"{what}; got {_shape_of(got)}. Known are dicts and objects with input_ids (and labels, "
        "attention_mask), tuples (input_ids, labels) or (input_ids, attention_mask, labels), and "
        "one integer tensor (B, L). For anything else pass batch_adapter=, a function from your "
        "batch to a TokenBatch."
    )


def _shape_of(value: object, depth: int = 2) -> str:
    """Type and shapes of a value, never its contents."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}"
    name = type(value).__name__
    if value is None or depth == 0:
        return name
    if isinstance(value, Mapping):
        items = [f"{_key(k)}: {_shape_of(v, depth - 1)}" for k, v in list(value.items())[:8]]
    elif isinstance(value, tuple | list):
        items = [_shape_of(v, depth - 1) for v in value[:8]]
    else:
        return name
    more = ", ..." if len(items) < len(value) else ""
    return f"{name}({', '.join(items)}{more}; {len(value)} items)"


def _key(key: object) -> str:
    """A mapping's key if it is a field's name; its type where it might be content."""
    is_name = isinstance(key, str) and key.isidentifier() and len(key) <= 32
    return str(key) if is_name else type(key).__name__
