"""The words of a batch: which of its ids are randomised, and how they go back into it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_fedleak.anatomy import Anatomy, Kind
from lightning_fedleak.batches import IGNORE_INDEX, TokenBatch

_SPECIAL = ("bos", "eos", "pad", "cls", "sep", "mask", "decoder_start")
_HIDDEN = 0
"""Written over ids that neither the model's attention nor the loss reads."""


class TextError(ValueError):
    """The text cannot be randomised as it is; says what to change, never contents."""


@dataclass(frozen=True)
class Words:
    """What counts as a word.

    Attributes:
        kind: what the labels mean.
        special: (s,) int64 ids that are no words.
        domain: (k,) int64 ascending ids that words are replaced by; None where each batch has its
            own.
        size: of the vocabulary, None where it is unknown.
    """

    kind: Kind
    special: Tensor
    domain: Tensor | None
    size: int | None
    _table: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        table = torch.full((0,), -1)
        if self.domain is not None:
            table = torch.full((int(self.domain.max()) + 1,), -1)
            table[self.domain] = torch.arange(len(self.domain))
        object.__setattr__(self, "_table", table)

    def index_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Index of each id in the domain, and whether it is in there; (n,) each.

        Raises:
            TextError: an id that the model does not have.
        """
        low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, -1)
        if self.size is not None and not 0 <= low <= high + 1 <= self.size:
            raise TextError(
                f"the batch holds ids outside of the model's {self.size} words: it was made with "
                "another model's tokenizer"
            )
        if low >= 0 and high < len(self._table):
            index = self._table[ids]
        else:
            near = (ids >= 0) & (ids < len(self._table))
            index = torch.where(near, self._table[torch.where(near, ids, 0)], -1)
        return index, index >= 0


@dataclass(frozen=True, repr=False)
class Text:
    """The true text of a batch, on the CPU.

    Attributes:
        ids: (B, T) int64; of an encoder-decoder both texts side by side.
        words: (B, T) bool, what is randomised.
        hidden: (B, T) bool, what is no word and overwritten.
        kind: what the labels mean.
        special: (s,) ids.
    """

    ids: Tensor
    words: Tensor
    hidden: Tensor
    kind: Kind
    special: Tensor

    def written(self, tokens: TokenBatch, drawn: Tensor, replace_labels: bool) -> TokenBatch:
        """``tokens`` with other words, and labels to them.

        Args:
            tokens: what the text was read from.
            drawn: (n,) the words in reading order.
            replace_labels: False leaves labels out of the result.
        """
        new = self.ids.masked_fill(self.hidden, _HIDDEN)
        new[self.words] = drawn
        width = tokens.input_ids.shape[1]
        inputs, labels = new[:, :width], tokens.labels
        if self.kind == "masked":
            old = tokens.input_ids.to("cpu", torch.int64)
            inputs = torch.where(torch.isin(old, self.special), old, inputs)
        if not replace_labels or self.kind == "classifier":
            labels = None
        if labels is not None:
            text = new[:, width:] if self.kind == "seq2seq" else new
            looked_at = labels.cpu() != IGNORE_INDEX
            labels = torch.where(looked_at, text, IGNORE_INDEX).to(labels)
        return replace(tokens, input_ids=inputs.to(tokens.input_ids), labels=labels)


def text_of(tokens: TokenBatch, words: Words, keep_special: bool) -> Text:
    """The true text of a batch.

    Raises:
        TextError: labels of a causal model that are not its inputs.
    """
    ids = tokens.input_ids.to("cpu", torch.int64)
    seen = torch.ones_like(ids, dtype=torch.bool)
    if tokens.attention_mask is not None:
        seen = tokens.attention_mask.cpu() != 0
    if tokens.labels is not None and words.kind != "classifier":
        labels = tokens.labels.to("cpu", torch.int64)
        looked_at = labels != IGNORE_INDEX
        if words.kind == "seq2seq":
            ids, seen = torch.cat([ids, labels], dim=1), torch.cat([seen, looked_at], dim=1)
        elif words.kind == "masked":
            ids, seen = torch.where(looked_at, labels, ids), seen | looked_at
        elif bool((looked_at & (labels != ids)).any()):
            raise TextError(
                "the labels of a causal model must be its inputs (-100 where the loss looks away), "
                "so that both are replaced alike. Labels that are shifted already need "
                "batch_adapter= and batch_writer=, which join and part the two"
            )
        else:
            seen = seen | looked_at
    if not keep_special:
        everything = torch.ones_like(seen)
        return Text(ids, everything, ~everything, words.kind, words.special[:0])
    if not len(words.special):
        return Text(ids, seen, ~seen, words.kind, words.special)
    word = ~torch.isin(ids, words.special)
    return Text(ids, word & seen, word & ~seen, words.kind, words.special)


def public_set(domain: Iterable[int] | Tensor) -> Tensor:
    """(k,) int64 ascending.

    Raises:
        TextError: these are no distinct token ids.
    """
    ids = torch.as_tensor(domain if isinstance(domain, Tensor) else list(domain)).cpu()
    if ids.dim() != 1 or not len(ids) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise TextError("domain must be 'vocabulary', 'batch' or a list of token ids")
    if int(ids.min()) < 0 or len(torch.unique(ids)) < len(ids):
        raise TextError("domain must hold token ids of at least 0, each once")
    return torch.sort(ids.long()).values


def special_of_config(anatomy: Anatomy | None) -> set[int]:
    """Ids that a Hugging Face config names."""
    config = getattr(anatomy.model, "config", None) if anatomy else None
    found: set[int] = set()
    for name in _SPECIAL:
        value = getattr(config, f"{name}_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return {int(i) for i in found if int(i) >= 0}


def special_of_tokenizer(tokenizer: Any) -> set[int]:
    """A tokenizer's special ids without the unknown one, which stands for words."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    others = {getattr(tokenizer, f"{name}_token_id", None) for name in _SPECIAL}
    return {int(i) for i in tokenizer.all_special_ids if i != unknown or i in others}


__all__ = [
    "Text",
    "TextError",
    "Words",
    "public_set",
    "special_of_config",
    "special_of_tokenizer",
    "text_of",
]
