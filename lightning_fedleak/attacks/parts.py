"""The pieces that gradients of public batches are put together from.

A batch's gradient is a mean over tokens, and sentences do not see each other, so the hidden states
and input gradients of each sentence, computed once, give the gradient of every batch that can be
made of these sentences, row by row, at the cost of one matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedleak.anatomy import HEAD_BIAS, HEAD_WEIGHT, Anatomy
from lightning_fedleak.attacks.calibration import head_gradient, log_partitions
from lightning_fedleak.attacks.logit_map import PLAIN, LogitMap
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.model_runs import (
    inputs_of,
    labels_of,
    micro_batches,
    predicting,
    run_logits,
    undisturbed,
)


@dataclass(frozen=True)
class GradientParts:
    """What N predicted tokens of some sentences add to the head's gradient.

    Attributes:
        hidden: (N, d) inputs of the head.
        labels: (N,) tokens predicted there.
        sentence: (N,) index of the sentence each belongs to.
        log_partition: (N,) log of the softmax's denominator.
        input_ids: (M,) tokens looked up in the input embedding, where it is tied to the head;
            empty otherwise.
        input_grads: (M, d) gradient of the summed loss with respect to each row looked up.
        input_sentence: (M,) index of the sentence each belongs to.
        input_first: (M,) whether it opens its sentence.
        logit_map: what the model makes of the head's product.
    """

    hidden: Tensor
    labels: Tensor
    sentence: Tensor
    log_partition: Tensor
    input_ids: Tensor
    input_grads: Tensor
    input_sentence: Tensor
    input_first: Tensor
    logit_map: LogitMap = PLAIN

    @property
    def n_sentences(self) -> int:
        """Sentences that these parts can be put together from."""
        return int(self.sentence.max()) + 1 if len(self.sentence) else 0

    def of(self, sentences: Tensor) -> GradientParts:
        """The parts of some sentences, renumbered from 0; an index may not repeat."""
        place = torch.full((self.n_sentences,), -1, dtype=torch.int64, device=self.labels.device)
        place[sentences] = torch.arange(len(sentences), device=place.device)
        tokens = place[self.sentence] >= 0
        inputs = place[self.input_sentence] >= 0
        return GradientParts(
            self.hidden[tokens],
            self.labels[tokens],
            place[self.sentence[tokens]],
            self.log_partition[tokens],
            self.input_ids[inputs],
            self.input_grads[inputs],
            place[self.input_sentence[inputs]],
            self.input_first[inputs],
            self.logit_map,
        )

    def gradient(self, weight: Tensor, bias: Tensor | None, rows: Tensor | None = None) -> Tensor:
        """The gradient of the mean cross-entropy: (V, d), or only ``rows`` of it, (k, d).

        Of a tied matrix the sum of head and embedding parts, as a client shares it.
        """
        out = head_gradient(
            self.hidden,
            self.labels,
            weight,
            bias,
            rows=rows,
            log_partition=self.log_partition,
            logit_map=self.logit_map,
        )
        at, grads = self.input_ids, self.input_grads
        if rows is not None:
            place = torch.full((len(weight),), -1, dtype=torch.int64, device=at.device)
            place[rows] = torch.arange(len(rows), device=at.device)
            at = place[at]
            grads, at = grads[at >= 0], at[at >= 0]
        return out.index_add_(0, at, grads).div_(max(1, len(self.labels)))

    @classmethod
    def joined(cls, parts: Sequence[GradientParts]) -> GradientParts:
        """All sentences of several parts."""
        first, shifted = 0, []
        for part in parts:
            shifted.append((part.sentence + first, part.input_sentence + first))
            first += part.n_sentences
        joined = _joined(parts)
        joined["sentence"] = torch.cat([s for s, _ in shifted])
        joined["input_sentence"] = torch.cat([s for _, s in shifted])
        return cls(**joined, logit_map=_map_of(parts))


def _joined(parts: Sequence[GradientParts]) -> dict[str, Tensor]:
    names = [f.name for f in fields(GradientParts) if f.name != "logit_map"]
    return {name: torch.cat([getattr(p, name) for p in parts]) for name in names}


def _map_of(parts: Sequence[GradientParts]) -> LogitMap:
    """That of the most tokens, off which it was read best."""
    return max(parts, key=lambda p: len(p.labels)).logit_map


def gradient_parts(anatomy: Anatomy, batch: TokenBatch, *, inputs: bool = True) -> GradientParts:
    """The parts of each row of ``batch``. One forward, and one backward where the head is tied.

    Leaves no trace on the model, as :func:`~lightning_fedleak.attacks.calibration.gradient_of`.

    Args:
        anatomy: the model.
        batch: token ids, labels and mask.
        inputs: whether to compute the embedding's part of a tied matrix (the backward).

    Raises:
        ValueError: the model has no head, a tied embedding that does more than look up rows, or
            logits that are more than scale, shift and softcap of what the head gives.
    """
    if anatomy.head is None:
        raise ValueError("this model has no output head whose gradient could be read")
    weight, bias = head_of(anatomy)
    frozen = {name: p.detach() for name, p in anatomy.model.named_parameters()}
    found, first = [], 0
    tied = inputs and anatomy.tied
    with undisturbed(anatomy) as model, torch.set_grad_enabled(tied):
        for part in micro_batches(anatomy, batch):
            with inputs_of(anatomy.head) as seen, _lookups(anatomy, tied) as lookups:
                logits = run_logits(model, part, frozen)
            kept, labels = predicting(logits, part)
            states, _ = predicting(seen[-1].detach(), part)
            hidden = states.float()
            logit_map = LogitMap.of(
                model, states, kept, lambda h: F.linear(h.float(), weight, bias)
            )
            input_ids, grads, input_rows, opening = _input_parts(lookups, kept, labels)
            found.append(
                GradientParts(
                    hidden,
                    labels,
                    _rows_of(part) + first,
                    log_partitions(hidden, weight, bias, logit_map),
                    input_ids.to(labels.device),
                    grads.to(labels.device).reshape(-1, weight.shape[1]),
                    input_rows.to(labels.device) + first,
                    opening.to(labels.device),
                    logit_map,
                )
            )
            first += len(part.input_ids)
    return GradientParts(**_joined(found), logit_map=_map_of(found))


def head_of(anatomy: Anatomy) -> tuple[Tensor, Tensor | None]:
    """The head's weight (V, d) and bias (V,) or None, detached, in float32.

    Raises:
        ValueError: the model has no head.
    """
    weight, bias = anatomy.parameter(HEAD_WEIGHT), anatomy.parameter(HEAD_BIAS)
    if weight is None:
        raise ValueError("this model has no output head whose gradient could be read")
    return weight.detach().float(), None if bias is None else bias.detach().float()


def _rows_of(batch: TokenBatch) -> Tensor:
    rows = torch.arange(len(batch.input_ids), device=batch.input_ids.device)
    return predicting(rows[:, None, None].expand(-1, labels_of(batch).shape[1], 1), batch)[0][:, 0]


@contextmanager
def _lookups(
    anatomy: Anatomy, tied: bool
) -> Iterator[list[tuple[nn.Embedding, Tensor, Tensor, Tensor]]]:
    """Collects (module, ids, leaf, factor) of every lookup in a matrix tied to the head."""
    found: list[tuple[nn.Embedding, Tensor, Tensor, Tensor]] = []
    shared = anatomy.parameter(HEAD_WEIGHT)
    tables = [
        m
        for m in anatomy.model.modules()
        if tied and isinstance(m, nn.Embedding) and m.weight is shared
    ]

    def swap(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        assert isinstance(module, nn.Embedding)
        leaf = out.detach().requires_grad_()
        plain = F.embedding(args[0], module.weight.detach())
        factor = (plain * leaf.detach()).sum() / (plain * plain).sum()
        if not torch.allclose(plain * factor, leaf.detach(), rtol=1e-2, atol=1e-4):
            raise ValueError(
                f"the input embedding ({type(module).__name__}) does more than look up rows of "
                "the matrix it shares with the head, so its part of the gradient is unknown"
            )
        found.append((module, args[0], leaf, factor))
        return leaf

    handles = [m.register_forward_hook(swap) for m in tables]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _input_parts(
    lookups: Sequence[tuple[nn.Embedding, Tensor, Tensor, Tensor]], logits: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, gradients, batch rows and openings of the lookups that the loss depends on."""
    if not lookups:
        none = labels[:0]
        return none, logits.new_zeros(0, dtype=torch.float32), none, none.bool()
    loss = F.cross_entropy(logits.float(), labels, reduction="sum")
    leaves = [leaf for _, _, leaf, _ in lookups]
    grads: Sequence[Tensor | None] = torch.autograd.grad(loss, leaves, allow_unused=True)
    columns: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for (module, ids, _, factor), grad in zip(lookups, grads, strict=True):
        if grad is None:
            continue
        grad = grad.float() * factor
        moved = (grad != 0).any(-1) & (
            ids != (-1 if module.padding_idx is None else module.padding_idx)
        )
        where = moved.nonzero()
        columns.append((ids[moved], grad[moved], where[:, 0], where[:, 1] == 0))
    ids, found, rows, opening = (torch.cat(c) for c in zip(*columns, strict=True))
    return ids, found, rows, opening
