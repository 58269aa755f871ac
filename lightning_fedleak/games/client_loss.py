"""The client's loss in a game, where the user passes none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.games.pool import GameError
from lightning_fedleak.model_runs import predicting

Loss = Callable[[nn.Module, Tensor, Tensor | None], Tensor]
"""(model, ids (B, L), mask (B, L) or None) to a scalar; the mean over what it is computed on."""

RANDOM_HEAD_CLASSES = 8  # of the loss for a model without a head; not tuned


def default_loss(anatomy: Anatomy) -> Loss:
    """Return the loss that fine-tuning a model of this kind minimises.

    - Causal: cross-entropy of the next tokens.
    - Masked: cross-entropy of the batch's own tokens. None is masked, because the masks are the
      client's own random numbers, with which the server could not embed its target.
    - Classifier: cross-entropy of class i mod the number of classes for sentence i.
    - A model without a head, as encoders are published: the same with a fixed random linear head of
      8 classes over the mean of its last hidden states.

    Raises:
        GameError: when called, for an encoder-decoder or a model that returns neither logits nor
            hidden states.
    """

    def loss(model: nn.Module, ids: Tensor, mask: Tensor | None) -> Tensor:
        inputs = {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}
        output = model(**inputs)
        logits, last = _output_tensor(output, "logits"), _output_tensor(output, "last_hidden_state")
        if logits is not None and logits.dim() == 3 and anatomy.kind in ("causal", "masked"):
            labels = ids if mask is None else ids.masked_fill(mask == 0, IGNORE_INDEX)
            values, targets = predicting(logits, TokenBatch(ids, labels, mask, anatomy.kind))
            return functional.cross_entropy(values, targets)
        if logits is None and last is not None:
            logits = _pooled(last, mask) @ _random_head(last)
        if logits is None or logits.dim() != 2:
            raise GameError(
                f"{type(model).__name__} has no loss that a game could use: pass loss=, a function "
                "of (model, ids, mask)"
            )
        labels = torch.arange(len(ids), device=logits.device) % logits.shape[1]
        return functional.cross_entropy(logits, labels)

    return loss


def _output_tensor(output: Any, name: str) -> Tensor | None:
    value = getattr(output, name, None)
    return value if isinstance(value, Tensor) else None


def _pooled(states: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return states.mean(1)
    weight = mask.to(states)[..., None]
    pooled: Tensor = (states * weight).sum(1) / weight.sum(1)
    return pooled


def _random_head(states: Tensor) -> Tensor:
    d = states.shape[-1]
    head = torch.randn(
        d, RANDOM_HEAD_CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    scaled: Tensor = head / d**0.5
    return scaled.to(states)
