"""Batches of losses that prefer some answers to others.

DPO, ORPO and CPO compare pairs of a chosen and a rejected answer to one prompt. KTO has single
answers, each rated desirable or undesirable. :func:`read_pairs` reads the batches of TRL's trainers
for these losses; a user's own loss needs a ``batch_adapter`` that returns a :class:`PairBatch` or a
:class:`RatedBatch`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_fedleak.model.anatomy import Kind
from lightning_fedleak.model.batches import IGNORE_INDEX, BatchError, TokenBatch, read_batch

# The tensors of a batch, with the value that pads each of them.
_PADDING = {"input_ids": 0, "labels": IGNORE_INDEX, "attention_mask": 0}


@dataclass(frozen=True, repr=False)
class PairBatch(TokenBatch):
    """Token ids of n pairs of answers, each after its prompt.

    The first n rows have the chosen answers, the last n rows the rejected ones: rows ``i`` and
    ``n + i`` are a pair. Labels are the ids of the answers, and -100 elsewhere. Return it from a
    ``batch_adapter`` if your own loss prefers one answer to another.

    Attributes:
        preferences: always True.

    Examples:
        >>> import torch
        >>> from lightning_fedleak.model.pairs import PairBatch
        >>> ids = torch.tensor([[5, 6, 7], [5, 6, 8]])            # one pair, one token of an answer
        >>> labels = torch.tensor([[-100, -100, 7], [-100, -100, 8]])
        >>> PairBatch(ids, labels, None, "causal").preferences
        True

    Raises:
        BatchError: The number of rows is odd, there are no labels, or the model is not causal.
    """

    preferences: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind != "causal" or self.labels is None or len(self.input_ids) % 2:
            raise BatchError(
                "a PairBatch needs a causal model, labels, and an even number of rows, the chosen "
                "answers before the rejected ones: fix what batch_adapter= returns"
            )


@dataclass(frozen=True, repr=False)
class RatedBatch(TokenBatch):
    """Token ids of n prompts, each followed by an answer that is rated desirable or undesirable.

    Labels are the ids of the answers, and -100 elsewhere. Return it from a ``batch_adapter`` if
    your own loss makes some answers more likely and other answers less likely.

    Attributes:
        desirable: (n,) bool, the answers that the loss makes more likely.

    Examples:
        >>> import torch
        >>> from lightning_fedleak.model.pairs import RatedBatch
        >>> ids, desirable = torch.tensor([[5, 6, 7], [5, 6, 8]]), torch.tensor([True, False])
        >>> labels = torch.tensor([[-100, -100, 7], [-100, -100, 8]])
        >>> RatedBatch(ids, labels, None, "causal", desirable=desirable).preferences
        True

    Raises:
        BatchError: The number of ratings differs from the number of rows, there are no labels, or
            the model is not causal.
    """

    preferences: bool = True
    desirable: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        n_ratings = 0 if self.desirable is None else self.desirable.numel()
        if self.kind != "causal" or self.labels is None or n_ratings != len(self.input_ids):
            raise BatchError(
                "a RatedBatch needs a causal model, labels, and one bool per row in desirable="
            )


def read_pairs(batch: Any, kind: Kind) -> PairBatch | RatedBatch | None:
    """Return the preferences of a batch in the format of TRL's DPO, ORPO, CPO or KTO trainer.

    A batch of DPO has the chosen and then the rejected answers in ``input_ids``, and marks the
    tokens of answers by ``completion_mask``. A batch of KTO has single answers in the same form,
    and ``label`` rates them. Batches of ORPO and CPO have ``chosen_input_ids``,
    ``rejected_input_ids``, and the corresponding labels and masks. The batch is not changed.

    Args:
        batch: The argument of ``training_step``.
        kind: The kind of the model; only a causal one has preferences.

    Returns:
        The pairs or rated answers, or None if the batch has none of these formats.

    Raises:
        BatchError: The batch has one of these formats, but its tensors' shapes do not match.
    """
    if not isinstance(batch, Mapping) or kind != "causal":
        return None
    entries = [batch.get(f"{side}_{name}") for name in _PADDING for side in ("chosen", "rejected")]
    tensors = [value for value in entries if isinstance(value, Tensor)]
    if len(tensors) == len(entries):
        width = max(value.shape[-1] for value in tensors)
        pad_values = [pad_value for pad_value in _PADDING.values() for _ in ("chosen", "rejected")]
        padded = [
            functional.pad(value, (0, width - value.shape[-1]), value=pad_value)
            for value, pad_value in zip(tensors, pad_values, strict=True)
        ]
        ids, labels, mask = map(torch.cat, zip(padded[::2], padded[1::2], strict=True))
        return PairBatch(ids, labels, mask, kind)
    if "input_ids" not in batch or "completion_mask" not in batch:
        return None
    tokens = read_batch(batch, kind)
    if not tokens.preferences:
        return None
    if "label" in batch:
        return RatedBatch(**vars(tokens), desirable=torch.as_tensor(batch["label"]).bool())
    return None if len(tokens.input_ids) % 2 else PairBatch(**vars(tokens))
