"""Preference batches: pairs of answers (DPO, ORPO, CPO) or rated single answers (KTO)."""

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

    Rows ``i`` and ``n + i`` are the chosen and the rejected answer of the same pair. Labels are the
    ids of the answers, and -100 elsewhere. Return it from a ``batch_adapter`` if your own loss
    prefers one answer to another.

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
            missing = " without labels" if self.labels is None else ""
            raise BatchError(
                "a PairBatch needs a causal model, labels, and an even number of rows, the chosen "
                f"answers before the rejected ones; got {len(self.input_ids)} rows of a "
                f"{self.kind} model{missing}: fix what batch_adapter= returns"
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
        rated = 0 if self.desirable is None else self.desirable.numel()
        if self.kind != "causal" or self.labels is None or rated != len(self.input_ids):
            raise BatchError(
                "a RatedBatch needs a causal model, labels, and one bool per row in desirable=; "
                f"got {len(self.input_ids)} rows of a {self.kind} model, {rated} ratings"
            )


def read_pairs(batch: Any, kind: Kind) -> PairBatch | RatedBatch | None:
    """Return the preferences of a batch in the format of TRL's DPO, ORPO, CPO or KTO trainer.

    DPO has both halves in ``input_ids`` and marks answers by ``completion_mask``; KTO has single
    answers in the same form, each with a ``label``. ORPO and CPO have ``chosen_input_ids``,
    ``rejected_input_ids``, and the corresponding labels and masks. The batch is not changed.

    Args:
        batch: The argument of ``training_step``.
        kind: The meaning of the labels.

    Returns:
        The pairs or rated answers, or None if the batch has none of these formats.

    Raises:
        BatchError: It has one of these formats, but the shapes of its tensors do not match.
    """
    if not isinstance(batch, Mapping) or kind != "causal":
        return None
    halves = [batch.get(f"{half}_{name}") for name in _PADDING for half in ("chosen", "rejected")]
    values = [value for value in halves if isinstance(value, Tensor)]
    if len(values) == len(halves):
        width = max(value.shape[-1] for value in values)
        fills = [fill for fill in _PADDING.values() for _ in ("chosen", "rejected")]
        padded = [
            functional.pad(value, (0, width - value.shape[-1]), value=fill)
            for value, fill in zip(values, fills, strict=True)
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
