"""The text of a batch: which of its ids are randomised, and how they go back into it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_fedleak.anatomy import Kind
from lightning_fedleak.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.defenses.token_words import TextError, Words

_HIDDEN = 0
"""Written over ids that neither the model's attention nor the loss reads."""


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


__all__ = ["Text", "text_of"]
