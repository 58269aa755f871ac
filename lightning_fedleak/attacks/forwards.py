"""Runs of a language model on a batch: logits where a label is predicted, and the head's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.batches import IGNORE_INDEX, TokenBatch

LOGITS_AT_ONCE = 1 << 26


def micro_batches(anatomy: Anatomy, batch: TokenBatch) -> Iterator[TokenBatch]:
    """``batch`` in runs of rows whose logits stay within a few hundred megabytes."""
    device = anatomy.device
    labels = labels_of(batch)
    length = max(labels.shape[-1], batch.input_ids.shape[-1])
    step = max(1, LOGITS_AT_ONCE // max(1, length * anatomy.vocab_size))
    for a in range(0, len(batch.input_ids), step):
        mask = batch.attention_mask
        yield TokenBatch(
            input_ids=batch.input_ids[a : a + step].to(device),
            labels=labels[a : a + step].to(device),
            attention_mask=None if mask is None else mask[a : a + step].to(device),
            kind=batch.kind,
        )


def labels_of(batch: TokenBatch) -> Tensor:
    """The batch's labels; of a causal batch without, its own ids (-100 where padded).

    Raises:
        ValueError: a batch of another kind has no labels.
    """
    if batch.labels is not None:
        return batch.labels
    if batch.kind != "causal":
        raise ValueError(f"a batch of a {batch.kind} model needs labels to have a gradient")
    if batch.attention_mask is None:
        return batch.input_ids
    return batch.input_ids.masked_fill(batch.attention_mask == 0, IGNORE_INDEX)


def token_logits(
    model: nn.Module, batch: TokenBatch, parameters: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Logits (N, V) at the predicting positions and the labels (N,) predicted there.

    Args:
        model: the language model, in the mode it is to run in.
        batch: on the model's device.
        parameters: used in place of the model's own, by name.
    """
    return predicting(run_logits(model, batch, parameters), batch)


def predicting(values: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Of values per position (B, L, k), those that predict a label, (N, k), and the labels (N,).

    A causal model predicts the label of the *next* position; the others that of their own.
    """
    labels = labels_of(batch)
    if batch.kind == "causal":
        values, labels = values[:, -labels.shape[1] : -1], labels[:, 1:]
    kept = labels != IGNORE_INDEX
    return values[kept], labels[kept]


def run_logits(
    model: nn.Module, batch: TokenBatch, parameters: Mapping[str, Tensor] | None = None
) -> Tensor:
    """The model's logits at every position, (B, L, V)."""
    kwargs: dict[str, Tensor] = {"input_ids": batch.input_ids}
    if batch.attention_mask is not None:
        kwargs["attention_mask"] = batch.attention_mask
    if batch.kind == "seq2seq":
        kwargs["labels"] = labels_of(batch)
    if parameters is None:
        out = model(**kwargs)
    else:
        out = torch.func.functional_call(model, dict(parameters), kwargs=kwargs)
    return logits_in(out)


def logits_in(out: Any) -> Tensor:
    """Logits in whatever a model returns: a tensor, the first of a tuple, or ``.logits``."""
    logits = getattr(out, "logits", out)
    if isinstance(logits, Mapping):
        logits = logits["logits"]
    if isinstance(logits, (tuple, list)):
        logits = logits[0]
    if not isinstance(logits, Tensor):
        raise ValueError(
            f"the model returned {type(out).__name__}; expected logits as a tensor, as the first "
            "of a tuple, or as `.logits`"
        )
    return logits


class inputs_of:
    """Context: collects the inputs a module is called with."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.seen: list[Tensor] = []

    def __enter__(self) -> list[Tensor]:
        self.handle = self.module.register_forward_pre_hook(
            lambda _, args: self.seen.append(args[0])
        )
        return self.seen

    def __exit__(self, *_: object) -> None:
        self.handle.remove()
