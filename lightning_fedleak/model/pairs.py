"""Batches of preferences: pairs of answers, as DPO, ORPO and CPO have them, or rated ones (KTO)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_fedleak.model.anatomy import Kind
from lightning_fedleak.model.batches import IGNORE_INDEX, BatchError, TokenBatch, read_batch

_PADDING = {"input_ids": 0, "labels": IGNORE_INDEX, "attention_mask": 0}


@dataclass(frozen=True, repr=False)
class PairBatch(TokenBatch):
    """Token ids of n pairs: n rows of prompt and chosen answer, then n of prompt and rejected one.

    Row ``n + i`` is the rejected answer of the pair whose chosen one is row ``i``. Labels are the
    ids of the answers, and -100 elsewhere. A ``batch_adapter`` returns it where a loss of one's own
    prefers one answer to another.

    Examples:
        >>> import torch
        >>> from lightning_fedleak.model.pairs import PairBatch
        >>> ids = torch.tensor([[5, 6, 7], [5, 6, 8]])            # one pair, one token of an answer
        >>> labels = torch.tensor([[-100, -100, 7], [-100, -100, 8]])
        >>> PairBatch(ids, labels, None, "causal").preferences
        True

    Raises:
        BatchError: the rows are odd in number or have no labels, or the model is not causal.
    """

    preferences: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind != "causal" or self.labels is None or len(self.input_ids) % 2:
            raise BatchError(
                "pairs are an even number of rows of a causal model, the chosen answers before the "
                f"rejected ones, with labels; got {len(self.input_ids)} rows of a {self.kind} model"
                f"{' without labels' * (self.labels is None)}: return them so from batch_adapter="
            )


@dataclass(frozen=True, repr=False)
class RatedBatch(TokenBatch):
    """Token ids of n answers behind their prompts, each of them desirable or not.

    Labels are the ids of the answers, and -100 elsewhere. A ``batch_adapter`` returns it where a
    loss of one's own makes some answers more likely and others less.

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
        BatchError: there is not one rating for each row, or no labels, or the model is not causal.
    """

    preferences: bool = True
    desirable: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rated = 0 if self.desirable is None else self.desirable.numel()
        if self.kind != "causal" or self.labels is None or rated != len(self.input_ids):
            raise BatchError(
                "rated answers are rows of a causal model with labels, and desirable= has one bool "
                f"for each; got {len(self.input_ids)} rows of a {self.kind} model, {rated} ratings"
            )


def read_pairs(batch: Any, kind: Kind) -> PairBatch | RatedBatch | None:
    """Return the preferences of a batch in the form of TRL's DPO, of its ORPO and CPO, or its KTO.

    DPO has both halves in ``input_ids`` and marks answers by ``completion_mask``; KTO has single
    answers so, each with a ``label``. ORPO and CPO have ``chosen_input_ids``,
    ``rejected_input_ids`` and so on. Nothing of the batch is changed.

    Args:
        batch: the argument of ``training_step``.
        kind: meaning of the labels.

    Returns:
        The pairs or rated answers, or None where the batch has no such form.

    Raises:
        BatchError: it has the form, and its tensors do not fit each other.
    """
    if not isinstance(batch, Mapping) or kind != "causal":
        return None
    halves = [batch.get(f"{half}_{name}") for name in _PADDING for half in ("chosen", "rejected")]
    values = [value for value in halves if isinstance(value, Tensor)]
    if len(values) == len(halves):
        width = max(value.shape[-1] for value in values)
        fills = [fill for fill in _PADDING.values() for _ in ("chosen", "rejected")]
        padded = (
            functional.pad(value, (0, width - value.shape[-1]), value=fill)
            for value, fill in zip(values, fills, strict=True)
        )
        ids, labels, mask = (torch.cat([chosen, next(padded)]) for chosen in padded)
        return PairBatch(ids, labels, mask, kind)
    if "input_ids" not in batch or "completion_mask" not in batch:
        return None
    read = read_batch(batch, kind)
    if not read.preferences:
        return None
    if "label" in batch:
        return RatedBatch(**vars(read), desirable=torch.as_tensor(batch["label"]).bool())
    return None if len(read.input_ids) % 2 else PairBatch(**vars(read))
