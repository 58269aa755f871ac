"""The output head's gradient in closed form, for any batch of public sentences.

With hidden states ``h_i``, predicted probabilities ``p_i`` and labels ``y_i`` it is the mean over
tokens of ``(p_i - onehot(y_i)) h_i^T``. A matrix that is tied to the embedding also gets the
gradients of the input rows that were looked up.

The gradient is a mean over tokens, and sentences do not attend to each other. So
:func:`gradient_parts` runs the model once and stores the hidden states and input gradients of each
sentence. :meth:`GradientParts.gradient` then computes the gradient of a batch of any of these
sentences, or some of its rows, at the cost of one matrix product.

A :class:`LogitMap` maps the product of head and hidden states to the logits. Gemma 2 caps its
logits, ``c tanh(x / c)``, Cohere and Granite scale them, BART and Marian shift them by a buffer.
Attacks that compute this gradient need this map; it is found by comparing the logits of one run
with the head's product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedleak.model import model_runs
from lightning_fedleak.model.anatomy import (
    HEAD_BIAS,
    HEAD_WEIGHT,
    Anatomy,
    Place,
    head_adapter,
    head_surface,
    without_peft,
)
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import whole_tensor
from lightning_fedleak.progress import track

CHECKED_ROWS = 16  # rows of logits that the map is fitted to and checked on; not tuned
_ROUNDINGS = 4  # largest error of a map in roundings of the coarsest dtype; not tuned
_STRICT, _LOOSE = 2e-5, 1e-3
"""Largest error of a map as a share of the largest logit, in float32 and with TF32 products."""
_UNCAPPED = 0.95  # share of the softcap up to which a logit can be inverted; not tuned


@dataclass(frozen=True)
class LogitMap:
    """``logits = cap(scale * product + shift)`` with ``cap(x) = softcap * tanh(x / softcap)``.

    Attributes:
        scale: factor of the product ``W h + b``.
        shift: (V,) term that is added, or None.
        softcap: bound on the magnitude of a logit, or None.
    """

    scale: float = 1.0
    shift: Tensor | None = None
    softcap: float | None = None

    def __call__(self, product: Tensor, types: Tensor | None = None) -> Tensor:
        """Return the logits of products (..., V), or (..., k) for the k ``types``."""
        logits = product if self.scale == 1.0 else product * self.scale
        if self.shift is not None:
            logits = logits + (self.shift if types is None else self.shift[types])
        if self.softcap is None:
            return logits
        return self.softcap * (logits / self.softcap).tanh()

    def steepness(self, logits: Tensor) -> Tensor | float:
        """Return the cap's derivative at ``logits``; that of the map is ``scale`` times it."""
        return 1.0 if self.softcap is None else 1 - (logits / self.softcap).square()

    @classmethod
    def fit(
        cls, model: nn.Module, states: Tensor, logits: Tensor, product: Callable[[Tensor], Tensor]
    ) -> LogitMap:
        """Return the map from the head's product with (N, d) ``states`` to (N, V) ``logits``.

        The softcap comes from the model's configuration, scale and shift are fitted to some rows.
        The result is checked against the logits.

        Args:
            model: the model that computed the logits.
            states: inputs of its head.
            logits: the model's output.
            product: the head, from (n, d) to (n, V).

        Raises:
            ValueError: no such map gives the logits.
        """
        rounding = max(torch.finfo(t.dtype).eps for t in (states, logits))
        kind = logits.device.type
        if torch.is_autocast_enabled(kind):
            rounding = max(rounding, torch.finfo(torch.get_autocast_dtype(kind)).eps)
        rows = torch.linspace(0, len(logits) - 1, min(CHECKED_ROWS, len(logits))).long()
        rows = rows.to(logits.device)
        x, y = product(states[rows]).detach().double(), logits.detach()[rows].double()
        finite = (x.isfinite() & y.isfinite()).all(1)
        x, y = x[finite], y[finite]
        if not len(x):
            return PLAIN
        size = float(y.abs().max())
        tried: list[tuple[float, LogitMap]] = []
        strict, loose = (max(t, _ROUNDINGS * rounding) * size for t in (_STRICT, _LOOSE))
        for candidate in cls._candidates(model, x, y):  # most models have the first
            tried.append((float((candidate(x) - y).abs().max()), candidate))
            if tried[-1][0] <= strict:
                return candidate
        for error, candidate in tried:
            if error <= loose:
                return candidate
        raise ValueError("the logits are no scale, shift or softcap of the head's: use FlatChat")

    @classmethod
    def _candidates(cls, model: nn.Module, x: Tensor, y: Tensor) -> Iterator[LogitMap]:
        """Yield maps to try, fitted to products x and logits y; the simplest first."""
        for cap in (*_softcaps(model), None):
            yield cls(softcap=cap)
            inverse = y if cap is None else cap * (y / cap).clamp(-1, 1).atanh()
            usable = torch.ones_like(y, dtype=torch.bool)
            if cap is not None:
                usable = y.abs() < _UNCAPPED * cap
            squares = float(x[usable].square().sum())
            if squares > 0:  # the scale by least squares
                yield cls(float((x[usable] * inverse[usable]).sum()) / squares, softcap=cap)
        if len(x) >= 4:
            # Fitted to every second row; the other rows check it.
            mean, level = x[::2].mean(0), y[::2].mean(0)
            yield cls(shift=(level - mean).float())
            deviation = x[::2] - mean
            squares = float(deviation.square().sum())
            if squares > 0:
                scale = float((deviation * (y[::2] - level)).sum()) / squares
                yield cls(scale, (level - scale * mean).float())


PLAIN = LogitMap()  # the identity: logits are the head's product


def _softcaps(model: nn.Module) -> list[float]:
    """Return the values in the model's configuration that its logits may be capped at."""
    config = getattr(without_peft(model), "config", None)
    configs: list[Any] = [config]
    if config is not None and hasattr(config, "get_text_config"):
        configs.append(config.get_text_config())
    caps = [
        float(value)
        for config in configs
        for name, value in getattr(config, "__dict__", {}).items()
        if "logit" in name and "cap" in name and "att" not in name
        if isinstance(value, int | float) and value > 0
    ]
    return list(dict.fromkeys(caps))


def head_gradient(
    hidden: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    log_partition: Tensor | None = None,
    logit_map: LogitMap = PLAIN,
    known: Tensor | None = None,
) -> Tensor:
    """Return the head's part of the gradient in closed form, summed over tokens.

    It is ``sum_i f'(z_i) (softmax(f(z_i)) - onehot(y_i)) h_i^T`` with ``z_i = W h_i + b``.

    Args:
        hidden: (N, d) inputs of the head.
        labels: (N,) the token that is to be predicted from each.
        weight: (V, d), the head's weight.
        bias: (V,), the head's bias, or None.
        rows: (k,) types whose rows are returned; all by default.
        log_partition: (N,) log of the softmax's denominator; computed if it is None.
        logit_map: f, the map from the product to the logits; the identity by default.
        known: (N, K) from :func:`weighted_probabilities` for the first K of ``rows``, if they were
            computed before.

    Returns:
        (V, d) or (k, d), in float32.
    """
    weight, hidden = weight.float(), hidden.float()
    bias = None if bias is None else bias.float()
    if log_partition is None:
        log_partition = log_partitions(hidden, weight, bias, logit_map)
    k = 0 if known is None else known.shape[1]
    others = None if rows is None else rows[k:]
    row_weight = weight if others is None else weight[others]
    row_bias = bias if bias is None or others is None else bias[others]
    gradient = weight.new_zeros(len(weight) if rows is None else len(rows), weight.shape[1])
    step = model_runs.rows_at_once(hidden.device, len(gradient))
    for a in range(0, len(hidden), step):
        h, partition = hidden[a : a + step], log_partition[a : a + step]
        p = weighted_probabilities(h, partition, row_weight, row_bias, logit_map, others)
        gradient[k:].addmm_(p.T, h, alpha=logit_map.scale)
        if known is not None:
            gradient[:k].addmm_(known[a : a + step].T, h, alpha=logit_map.scale)
    scaled = hidden
    if logit_map.softcap is not None:
        parts = torch.split(torch.arange(len(labels), device=labels.device), step)
        product = torch.cat([(hidden[i] * weight[labels[i]]).sum(1) for i in parts])
        product = product if bias is None else product + bias[labels]
        scaled = hidden * logit_map.steepness(logit_map(product, labels)[:, None])
    if rows is None:
        return gradient.index_add_(0, labels, scaled, alpha=-logit_map.scale)
    places = _places(rows, len(weight))[labels]
    in_rows = places >= 0
    return gradient.index_add_(0, places[in_rows], scaled[in_rows], alpha=-logit_map.scale)


def weighted_probabilities(
    hidden: Tensor,
    log_partition: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    logit_map: LogitMap,
    types: Tensor | None = None,
) -> Tensor:
    """Return (N, k) ``f'(z) exp(f(z)) / Z``, by which the head's gradient weighs hidden states.

    Args:
        hidden: (N, d) inputs of the head.
        log_partition: (N,) log of Z, the softmax's denominator.
        weight: (k, d) the head's rows of ``types``.
        bias: (k,) its biases, or None.
        logit_map: f, the map from the product z to the logits.
        types: (k,), or None for all types.
    """
    logits = logit_map(F.linear(hidden, weight, bias), types)
    probabilities = (logits - log_partition[:, None]).exp_()
    return probabilities.mul_(logit_map.steepness(logits)) if logit_map.softcap else probabilities


def _places(rows: Tensor, n: int) -> Tensor:
    """Return (n,) the position of each index in ``rows``, or -1 if it is not among them."""
    places = torch.full((n,), -1, dtype=torch.int64, device=rows.device)
    places[rows] = torch.arange(len(rows), device=rows.device)
    return places


def log_partitions(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, logit_map: LogitMap = PLAIN
) -> Tensor:
    """Return (N,) logarithms of the softmax's denominator for (N, d) hidden states."""
    step = model_runs.rows_at_once(hidden.device, len(weight))
    parts = [logit_map(F.linear(h, weight, bias)).logsumexp(1) for h in torch.split(hidden, step)]
    return torch.cat(parts) if parts else hidden.new_zeros(0)


@dataclass(frozen=True)
class GradientParts:
    """What the head's gradient is computed from: N predicted and M input tokens of some sentences.

    Input tokens have a part only if the embedding is tied to the head; otherwise M is 0. Rows of
    the gradient are sums of :attr:`states`; logits are computed from ``hidden``. The two differ
    only for a LoRA on the head.

    Attributes:
        hidden: (N, d) inputs of the head.
        labels: (N,) the token that is to be predicted from each.
        sentence: (N,) index of the sentence of each predicted token.
        input_ids: (M,) tokens that are looked up in the tied embedding.
        input_grads: (M, d) gradient of the summed loss with respect to each looked-up row.
        input_sentence: (M,) index of the sentence of each input token.
        input_first: (M,) whether an input token is the first of its sentence.
        logit_map: the map from the head's product to the logits.
        log_partition: (N,) log of the softmax's denominator, or None if it is not computed yet.
        known: (N, K) from :func:`weighted_probabilities` for some types, or None.
        projection: (r, d), the scaled factor A of a LoRA on the head, or None; see
            :func:`~lightning_fedleak.model.anatomy.head_surface`.
    """

    hidden: Tensor
    labels: Tensor
    sentence: Tensor
    input_ids: Tensor
    input_grads: Tensor
    input_sentence: Tensor
    input_first: Tensor
    logit_map: LogitMap = PLAIN
    log_partition: Tensor | None = None
    known: Tensor | None = None
    projection: Tensor | None = None

    @property
    def states(self) -> Tensor:
        """Return what the gradient's rows are sums of: hidden states, or for a LoRA A's outputs."""
        return self.hidden if self.projection is None else self.hidden @ self.projection.T

    @property
    def n_sentences(self) -> int:
        """Return the number of sentences."""
        return int(self.sentence.max()) + 1 if len(self.sentence) else 0

    def select(self, sentences: Tensor) -> GradientParts:
        """Return the parts of some distinct sentences, which are renumbered from 0."""
        place = _places(sentences.to(self.labels.device), self.n_sentences)
        tokens = place[self.sentence] >= 0
        inputs = place[self.input_sentence] >= 0
        return replace(
            self,
            hidden=self.hidden[tokens],
            labels=self.labels[tokens],
            sentence=place[self.sentence[tokens]],
            log_partition=None if self.log_partition is None else self.log_partition[tokens],
            known=None if self.known is None else self.known[tokens],
            input_ids=self.input_ids[inputs],
            input_grads=self.input_grads[inputs],
            input_sentence=place[self.input_sentence[inputs]],
            input_first=self.input_first[inputs],
        )

    def gradient(self, weight: Tensor, bias: Tensor | None, rows: Tensor | None = None) -> Tensor:
        """Return the gradient of the mean cross-entropy: (V, d), or only ``rows`` of it, (k, d).

        A tied matrix gives the sum of head and embedding parts, as a client shares it; a LoRA on
        the head gives the gradient (V, r) of its B. ``rows`` begin with the types of :attr:`known`.
        """
        gradient = head_gradient(
            self.hidden,
            self.labels,
            weight,
            bias,
            rows=rows,
            log_partition=self.log_partition,
            logit_map=self.logit_map,
            known=None if rows is None else self.known,
        )
        if self.projection is not None:
            gradient = gradient @ self.projection.T
        ids, grads = self.input_ids, self.input_grads
        if rows is not None:
            ids = _places(rows, len(weight))[ids]
            grads, ids = grads[ids >= 0], ids[ids >= 0]
        return gradient.index_add_(0, ids, grads).div_(max(1, len(self.labels)))

    def with_known(self, types: Tensor, weight: Tensor, bias: Tensor | None) -> GradientParts:
        """Return the parts with :attr:`known` for some types (K,): their rows cost less then."""
        assert self.log_partition is not None
        row_bias = None if bias is None else bias[types]
        head = weight[types], row_bias, self.logit_map, types
        known = weighted_probabilities(self.hidden, self.log_partition, *head)
        return replace(self, known=known)

    @classmethod
    def concatenate(cls, parts: Sequence[GradientParts]) -> GradientParts:
        """Return the parts of all sentences of several batches."""
        start, renumbered = 0, []
        for part in parts:
            sentence, input_sentence = part.sentence + start, part.input_sentence + start
            renumbered.append(replace(part, sentence=sentence, input_sentence=input_sentence))
            start += part.n_sentences
        return _join(renumbered)

    @classmethod
    def compute(
        cls, anatomy: Anatomy, batches: Sequence[TokenBatch], *, inputs: bool = True
    ) -> GradientParts:
        """Return the parts of all rows of several batches; see :func:`gradient_parts`."""
        parts: list[GradientParts] = []
        known: LogitMap | None = None
        for batch in track(batches, "gradients of public text"):
            parts.append(gradient_parts(anatomy, batch, inputs=inputs, logit_map=known))
            if known is None and len(parts[-1].labels) >= CHECKED_ROWS:
                known = parts[-1].logit_map
        return cls.concatenate(parts)


def _join(parts: Sequence[GradientParts]) -> GradientParts:
    """Join parts whose sentences have different numbers.

    The logit map is that of the part with most tokens, which it was checked on.
    """
    names = [f.name for f in fields(GradientParts) if f.default is MISSING]
    columns = {name: torch.cat([getattr(p, name) for p in parts]) for name in names}
    longest = max(parts, key=lambda p: len(p.labels))
    return GradientParts(**columns, logit_map=longest.logit_map, projection=longest.projection)


def gradient_parts(
    anatomy: Anatomy, batch: TokenBatch, *, inputs: bool = True, logit_map: LogitMap | None = None
) -> GradientParts:
    """Return the parts of the sentences of ``batch``, by one forward, and one backward if tied.

    Args:
        anatomy: the model.
        batch: token ids, labels and mask.
        inputs: whether to compute the embedding's part of a tied matrix (the backward).
        logit_map: the model's map from the head's product to the logits, if it is known; otherwise
            it is fitted to some logits of the batch.

    Raises:
        ValueError: the model has no head, a tied embedding that does more than look up rows, or
            logits that differ from the head's output by more than scale, shift and softcap.
    """
    weight, bias = head_parameters(anatomy)
    assert anatomy.head is not None
    projection = head_surface(anatomy).projection
    width = weight.shape[1] if projection is None else len(projection)
    frozen = {name: p.detach() for name, p in anatomy.model.named_parameters()}
    parts, start = list[GradientParts](), 0
    tied = inputs and anatomy.tied and projection is None
    with model_runs.undisturbed(anatomy) as model, torch.set_grad_enabled(tied):
        for part in model_runs.micro_batches(anatomy, batch):
            head_calls: list[Tensor] = []
            collects = Place("", anatomy.head, "input").on_states(head_calls.append)
            with collects, _lookups(anatomy, tied) as lookups:
                if tied or logit_map is None:
                    all_logits = model_runs.run_logits(model, part, frozen)
                else:  # the head is the largest part of many models, and its output is known
                    with model_runs.only_needed_hooks(anatomy.root):
                        head_calls.append(model_runs.run_to(model, anatomy.head, part))
                    all_logits = head_calls[-1]
            logits, labels = model_runs.predicting(all_logits, part)
            states, _ = model_runs.predicting(head_calls[-1].detach(), part)
            if logit_map is None and len(logits):
                logit_map = LogitMap.fit(
                    model, states, logits, lambda h: F.linear(h.float(), weight, bias)
                )
            input_ids, grads, input_rows, opening = _input_parts(lookups, logits, labels)
            parts.append(
                GradientParts(
                    states.float(),
                    labels,
                    _label_rows(part) + start,
                    input_ids.to(labels.device),
                    grads.to(labels.device).reshape(-1, width),
                    input_rows.to(labels.device) + start,
                    opening.to(labels.device),
                    logit_map or PLAIN,
                    projection=projection,
                )
            )
            start += len(part.input_ids)
    return _join(parts)


def head_parameters(anatomy: Anatomy) -> tuple[Tensor, Tensor | None]:
    """Return the head's weight (V, d) and bias (V,) or None, detached, in float32.

    The weight includes what a LoRA on the head adds to it.

    Raises:
        ValueError: the model has no head.
    """
    weight, bias = anatomy.parameter(HEAD_WEIGHT), anatomy.parameter(HEAD_BIAS)
    if anatomy.head is None or weight is None:
        raise ValueError("this model has no output head whose gradient could be read")
    whole = whole_tensor(weight).float()
    adapter = head_adapter(anatomy)
    if adapter is not None and not getattr(anatomy.head, "merged", False):
        b, projection = map(whole_tensor, adapter)
        whole = whole + b.float() @ projection
    return whole, None if bias is None else whole_tensor(bias).float()


def _label_rows(batch: TokenBatch) -> Tensor:
    """Return (N,) the row of the batch of each predicted label."""
    rows = torch.arange(len(batch.input_ids), device=batch.input_ids.device)
    return model_runs.predicting(
        rows[:, None, None].expand(-1, model_runs.labels_of(batch).shape[1], 1), batch
    )[0][:, 0]


@contextmanager
def _lookups(
    anatomy: Anatomy, tied: bool
) -> Iterator[list[tuple[nn.Embedding, Tensor, Tensor, Tensor]]]:
    """Collect the lookups of the runs inside, in embeddings that share the head's matrix.

    Each is (module, ids, leaf, factor): the embedding, the token ids, its output as a leaf that
    gets a gradient, and the ratio of the output to the matrix's rows (a scaled embedding).
    """
    lookups: list[tuple[nn.Embedding, Tensor, Tensor, Tensor]] = []
    shared = anatomy.parameter(HEAD_WEIGHT)
    tables = [
        m
        for m in anatomy.model.modules()
        if tied and isinstance(m, nn.Embedding) and m.weight is shared
    ]

    def swap(module: nn.Module, args: tuple[Any, ...], rows: Tensor) -> Tensor:
        assert isinstance(module, nn.Embedding)
        leaf = rows.detach().requires_grad_()
        plain = F.embedding(args[0], module.weight.detach())
        factor = (plain * leaf.detach()).sum() / (plain * plain).sum()
        if not torch.allclose(plain * factor, leaf.detach(), rtol=1e-2, atol=1e-4):
            raise ValueError("the input embedding does more than look up the head's rows")
        lookups.append((module, args[0], leaf, factor))
        return leaf

    with ExitStack() as stack:
        for table in tables:
            stack.enter_context(table.register_forward_hook(swap))
        yield lookups


def _input_parts(
    lookups: Sequence[tuple[nn.Embedding, Tensor, Tensor, Tensor]], logits: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the input tokens that the loss depends on.

    Returns:
        Their ids (M,), the gradients (M, d) of the summed loss, their rows in the batch (M,), and
        whether they are the first of their row (M,).
    """
    if not lookups:
        no_tokens = labels[:0]
        return no_tokens, logits.new_zeros(0, dtype=torch.float32), no_tokens, no_tokens.bool()
    loss = F.cross_entropy(logits.float(), labels, reduction="sum")
    leaves = [leaf for _, _, leaf, _ in lookups]
    grads: Sequence[Tensor | None] = torch.autograd.grad(loss, leaves, allow_unused=True)
    columns: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for (module, ids, _, factor), grad in zip(lookups, grads, strict=True):
        if grad is None:
            continue
        grad = grad.float() * factor
        used = (grad != 0).any(-1) & (  # the padding token's row is never trained
            ids != (-1 if module.padding_idx is None else module.padding_idx)
        )
        places = used.nonzero()
        columns.append((ids[used], grad[used], places[:, 0], places[:, 1] == 0))
    ids, gradients, rows, opening = (torch.cat(c) for c in zip(*columns, strict=True))
    return ids, gradients, rows, opening
