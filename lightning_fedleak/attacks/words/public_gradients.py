"""The gradients that public text would give, whole and in the pieces they are made of.

The adversary knows the model and has text of its own, so it can compute the update a client
*would* share for a batch whose words are known, and fit its attack on that. Everything here leaves
no trace on the model: parameters, ``.grad``, hooks on parameters, modes and the global random
numbers stay as they were.

A batch's gradient is a mean over tokens, and sentences do not see each other, so the hidden states
and input gradients of each sentence, computed once, give the gradient of every batch that can be
made of these sentences, row by row, at the cost of one matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedleak.anatomy import HEAD_BIAS, HEAD_WEIGHT, Anatomy
from lightning_fedleak.anatomy.text_layers import Place
from lightning_fedleak.anatomy.wrappers import unwrap
from lightning_fedleak.attacks.logit_map import PLAIN, LogitMap
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.model_runs import (
    LOGITS_AT_ONCE,
    call_with,
    inputs_of,
    labels_of,
    micro_batches,
    only_needed_hooks,
    predicting,
    run_logits,
    stop_at,
    token_logits,
    undisturbed,
)

_BEGUN = 0.01


def gradient_of(
    anatomy: Anatomy,
    batch: TokenBatch,
    roles: Sequence[str],
    *,
    instead: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """The gradient that a client would share for ``batch``: of the mean token cross-entropy.

    Computed in eval mode on detached views of the parameters, a few rows of the batch at a time,
    so that the live model is only read. A tied matrix gives the sum of its head and embedding
    parts under either role, as in an update.

    Args:
        anatomy: the model.
        batch: token ids, labels (-100 ignored) and mask; moved to the model's device.
        roles: ``"head.weight"``, ``"embedding.weight"``, ... or names of parameters.
        instead: values in place of the model's own, by their names in ``anatomy.model``.

    Returns:
        role -> gradient, detached, shaped as the parameter.

    Raises:
        ValueError: the model has no parameter of that role, or no label is left to predict.
    """
    views, leaf_of = _leaves(anatomy, roles, instead)
    distinct = {id(leaf): leaf for leaf in leaf_of.values()}
    total = {key: torch.zeros_like(leaf, dtype=torch.float32) for key, leaf in distinct.items()}
    n_tokens = 0
    with undisturbed(anatomy) as model, torch.enable_grad():
        for part in micro_batches(anatomy, batch):
            logits, labels = token_logits(model, part, views)
            loss = F.cross_entropy(logits.float(), labels, reduction="sum")
            grads = torch.autograd.grad(loss, list(distinct.values()), allow_unused=True)
            for key, grad in zip(distinct, grads, strict=True):
                if grad is not None:
                    total[key] += grad
            n_tokens += len(labels)
    if n_tokens == 0:
        raise ValueError("no label in this batch is left to predict (all are -100)")
    mean = {key: (total[key] / n_tokens).to(leaf.dtype) for key, leaf in distinct.items()}
    return {role: mean[id(leaf)] for role, leaf in leaf_of.items()}


def gradient_through_blocks(
    anatomy: Anatomy,
    ids: Tensor,
    roles: Sequence[str],
    generator: torch.Generator,
    *,
    instead: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """The gradient of a random linear function of the last block's output: no head, no labels.

    Args:
        anatomy: the model, with blocks.
        ids: (B, L) texts, moved to the model's device.
        roles: as of :func:`gradient_of`; what the blocks do not hang on has a gradient of zero.
        generator: CPU generator, of the function.
        instead: as of :func:`gradient_of`.

    Returns:
        role -> gradient, detached, shaped as the parameter.

    Raises:
        ValueError: as of :func:`gradient_of`.
    """
    views, leaf_of = _leaves(anatomy, roles, instead)
    place = Place("", unwrap(anatomy.blocks[-1]), "output")
    with undisturbed(anatomy) as model, torch.enable_grad(), only_needed_hooks(anatomy.root):

        def run(**text: Any) -> Any:
            return call_with(model, views, **text)

        states: Tensor = stop_at(run, place)(input_ids=ids.to(anatomy.device))
        weights = torch.randn(states.shape, generator=generator).to(states)
        leaves = list(leaf_of.values())
        grads = torch.autograd.grad((states * weights).sum(), leaves, allow_unused=True)
    return {
        role: torch.zeros_like(leaf) if grad is None else grad
        for (role, leaf), grad in zip(leaf_of.items(), grads, strict=True)
    }


def _leaves(
    anatomy: Anatomy, roles: Sequence[str], instead: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Views of the model's parameters by name, and those of roles, which take a gradient.

    Raises:
        ValueError: the model has no parameter of a role.
    """
    targets = {}
    for role in roles:
        parameter = anatomy.parameter(role)
        if parameter is None:
            raise ValueError(f"this model has no parameter of role '{role}' to take a gradient of")
        targets[role] = parameter
    named = dict(anatomy.model.named_parameters())
    wanted = {id(p) for p in targets.values()}
    views = {
        name: instead.get(name, p).detach().requires_grad_(id(p) in wanted)
        for name, p in named.items()
    }
    leaves = {id(named[name]): views[name] for name in named}
    absent = [role for role, p in targets.items() if id(p) not in leaves]
    if absent:
        raise ValueError(
            f"the parameters of {absent} are not inside the language model ({type(anatomy.model)})"
        )
    return views, {role: leaves[id(p)] for role, p in targets.items()}


def begun(anatomy: Anatomy, generator: torch.Generator) -> dict[str, Tensor]:
    """Small values for trained matrices that are all zero, as a LoRA's B is before its first step.

    Args:
        anatomy: the model.
        generator: CPU generator.

    Returns:
        By name in ``anatomy.model``, as :func:`gradient_of` takes them.
    """
    return {
        name: torch.randn(p.shape, generator=generator).to(p) * _BEGUN
        for name, p in anatomy.model.named_parameters()
        if p.requires_grad and p.dim() == 2 and not bool(p.detach().any())
    }


def hidden_states_of(anatomy: Anatomy, batch: TokenBatch) -> Tensor:
    """Inputs of the output head at the positions that predict a label, (N, d).

    In the order of the flattened labels. One eval-mode forward per few rows, no gradients.

    Raises:
        ValueError: the model has no head.
    """
    head = _head(anatomy)
    states: list[Tensor] = []
    with undisturbed(anatomy) as model, torch.no_grad():
        for part in micro_batches(anatomy, batch):
            with inputs_of(head) as seen:
                run_logits(model, part)
            hidden, _ = predicting(seen[-1], part)
            states.append(hidden)
    return torch.cat(states)


def head_gradient(
    hidden: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    log_partition: Tensor | None = None,
    logit_map: LogitMap = PLAIN,
) -> Tensor:
    """The head's own part of the gradient in closed form, summed over tokens.

    ``sum_i f'(z_i) (softmax(f(z_i)) - onehot(y_i)) h_i^T`` with ``z_i = W h_i + b``.

    Args:
        hidden: (N, d) inputs of the head.
        labels: (N,) the tokens predicted there.
        weight: (V, d).
        bias: (V,) or None.
        rows: (k,) only these types' rows; all by default.
        log_partition: (N,) log of the softmax's denominator, computed when missing.
        logit_map: f, what the model makes of the product; by default nothing.

    Returns:
        (V, d) or (k, d), in float32.
    """
    weight, hidden = weight.float(), hidden.float()
    bias = None if bias is None else bias.float()
    if log_partition is None:
        log_partition = log_partitions(hidden, weight, bias, logit_map)
    kept = weight if rows is None else weight[rows]
    kept_bias = bias if bias is None or rows is None else bias[rows]
    out = torch.zeros_like(kept)
    step = max(1, LOGITS_AT_ONCE // max(1, len(kept)))
    for a in range(0, len(hidden), step):
        h = hidden[a : a + step]
        logits = logit_map(F.linear(h, kept, kept_bias), rows)
        pull = (logits - log_partition[a : a + step, None]).exp_()
        if logit_map.softcap is not None:
            pull *= logit_map.steepness(logits)
        out.addmm_(pull.T, h, alpha=logit_map.scale)
    pushed = hidden
    if logit_map.softcap is not None:
        parts = torch.split(torch.arange(len(labels), device=labels.device), step)
        product = torch.cat([(hidden[i] * weight[labels[i]]).sum(1) for i in parts])
        product = product if bias is None else product + bias[labels]
        pushed = hidden * logit_map.steepness(logit_map(product, labels)[:, None])
    if rows is None:
        return out.index_add_(0, labels, pushed, alpha=-logit_map.scale)
    place = torch.full((len(weight),), -1, dtype=torch.int64, device=hidden.device)
    place[rows] = torch.arange(len(rows), device=hidden.device)
    at = place[labels]
    return out.index_add_(0, at[at >= 0], pushed[at >= 0], alpha=-logit_map.scale)


def log_partitions(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, logit_map: LogitMap = PLAIN
) -> Tensor:
    """Log of the softmax's denominator at each of (N, d) hidden states, (N,)."""
    step = max(1, LOGITS_AT_ONCE // max(1, len(weight)))
    parts = [logit_map(F.linear(h, weight, bias)).logsumexp(1) for h in torch.split(hidden, step)]
    return torch.cat(parts) if parts else hidden.new_zeros(0)


def _head(anatomy: Anatomy) -> nn.Module:
    if anatomy.head is None:
        raise ValueError("this model has no output head, so it has no states that feed one")
    return anatomy.head


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
        into: of :class:`HeadSurface`.
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
    into: Tensor | None = None

    @property
    def read(self) -> Tensor:
        """What the gradient's rows are made of: (N, d) hidden states, or (N, r) behind LoRA's A."""
        return self.hidden if self.into is None else self.hidden @ self.into.T

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
            self.into,
        )

    def gradient(self, weight: Tensor, bias: Tensor | None, rows: Tensor | None = None) -> Tensor:
        """The gradient of the mean cross-entropy: (V, d), or only ``rows`` of it, (k, d).

        Of a tied matrix the sum of head and embedding parts, as a client shares it. Of a LoRA on
        the head that of B, (V, r).
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
        if self.into is not None:
            out = out @ self.into.T
        at, grads = self.input_ids, self.input_grads
        if rows is not None:
            place = torch.full((len(weight),), -1, dtype=torch.int64, device=at.device)
            place[rows] = torch.arange(len(rows), device=at.device)
            at = place[at]
            grads, at = grads[at >= 0], at[at >= 0]
        return out.index_add_(0, at, grads).div_(max(1, len(self.labels)))

    def clipped(
        self,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor | None,
        clip_value: float | None,
        steps: int = 1,
    ) -> Tensor:
        """As :meth:`gradient`; with entries cut to a size, the mean over steps of equal shares."""
        if clip_value is None:
            return self.gradient(weight, bias, rows)
        number = min(steps, self.n_sentences)
        shares = torch.arange(self.n_sentences, device=self.labels.device).tensor_split(number)
        gradients = (self.of(share).gradient(weight, bias, rows) for share in shares)
        total, *others = (g.clamp_(-clip_value, clip_value) for g in gradients)
        for other in others:
            total += other
        return total.div_(number)

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
        return cls(**joined, logit_map=_map_of(parts), into=parts[0].into)


def _joined(parts: Sequence[GradientParts]) -> dict[str, Tensor]:
    names = [f.name for f in fields(GradientParts) if f.name not in ("logit_map", "into")]
    return {name: torch.cat([getattr(p, name) for p in parts]) for name in names}


def _map_of(parts: Sequence[GradientParts]) -> LogitMap:
    """That of the most tokens, off which it was read best."""
    return max(parts, key=lambda p: len(p.labels)).logit_map


def gradient_parts(anatomy: Anatomy, batch: TokenBatch, *, inputs: bool = True) -> GradientParts:
    """The parts of each row of ``batch``. One forward, and one backward where the head is tied.

    Leaves no trace on the model, as
    :func:`~lightning_fedleak.attacks.words.public_gradients.gradient_of`.

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
    into = head_surface(anatomy).into
    width = weight.shape[1] if into is None else len(into)
    frozen = {name: p.detach() for name, p in anatomy.model.named_parameters()}
    found, first = [], 0
    tied = inputs and anatomy.tied and into is None
    with undisturbed(anatomy) as model, torch.set_grad_enabled(tied):
        for part in micro_batches(anatomy, batch):
            with inputs_of(anatomy.head) as seen, _lookups(anatomy, tied) as lookups:
                logits = run_logits(model, part, frozen)
            kept, labels = predicting(logits, part)
            states, _ = predicting(seen[-1].detach(), part)
            hidden = states.float()
            logit_map = LogitMap.fit(
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
                    grads.to(labels.device).reshape(-1, width),
                    input_rows.to(labels.device) + first,
                    opening.to(labels.device),
                    logit_map,
                )
            )
            first += len(part.input_ids)
    return GradientParts(**_joined(found), logit_map=_map_of(found), into=into)


def head_of(anatomy: Anatomy) -> tuple[Tensor, Tensor | None]:
    """The head's weight (V, d) and bias (V,) or None, detached, in float32.

    With what a LoRA on the head adds to the weight.

    Raises:
        ValueError: the model has no head.
    """
    weight, bias = anatomy.parameter(HEAD_WEIGHT), anatomy.parameter(HEAD_BIAS)
    if weight is None:
        raise ValueError("this model has no output head whose gradient could be read")
    whole = weight.detach().float()
    if (adapter := _head_adapter(anatomy)) is not None and not getattr(
        anatomy.head, "merged", False
    ):
        whole = whole + adapter.b.detach().float() @ adapter.into
    return whole, None if bias is None else bias.detach().float()


@dataclass(frozen=True)
class HeadSurface:
    """The trained matrix with a row for each type.

    Attributes:
        role: of the parameter, or its name.
        into: (r, d) that hidden states are multiplied by before they meet it, where it is the B of
            a LoRA on the head; None where it is the head's own weight.
    """

    role: str
    into: Tensor | None = None


def head_surface(anatomy: Anatomy) -> HeadSurface:
    """What of the head is trained: its weight, or the B of a LoRA on it, whose rows are types'."""
    adapter = _head_adapter(anatomy)
    if adapter is None or anatomy.trainable(HEAD_WEIGHT) or not adapter.b.requires_grad:
        return HeadSurface(HEAD_WEIGHT)
    name = next(n for n, p in anatomy.root.named_parameters() if p is adapter.b)
    return HeadSurface(name, adapter.into)


@dataclass(frozen=True)
class _HeadAdapter:
    """A LoRA on the head: ``W h + B (into h)``.

    Attributes:
        b: (V, r).
        into: (r, d), A times LoRA's scale.
    """

    b: nn.Parameter
    into: Tensor


def _head_adapter(anatomy: Anatomy) -> _HeadAdapter | None:
    head: Any = anatomy.head  # a layer of PEFT, or none
    if not isinstance(getattr(head, "lora_B", None), nn.ModuleDict):
        return None
    for name in head.active_adapters:
        if name in head.lora_B:
            into = head.scaling[name] * head.lora_A[name].weight.detach().float()
            return _HeadAdapter(head.lora_B[name].weight, into)
    return None


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
