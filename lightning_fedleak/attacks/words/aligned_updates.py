"""Word types from the output head's update by Adam and its kin: a readout fitted on such updates.

After one step of Adam every entry is ``g / (|g| + eps)``: the sign of a gradient, and how far it is
from a size of eps. What a row's entries have in common is gone, and with it the size that tells
used types from others. Three things are left. Rows of used types point against the hidden states,
and rows of others along them. Rows of types that no hidden state predicts are small enough to show
their size. And types that are predicted alike move alike, unless one of them is used: each row is
compared with the mean of those that public text groups it with.

The classifier is fitted on public updates made by the optimizer's own class: from gradients of
public text where a round is one step, from training on it where it is more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedleak.anatomy import HEAD_WEIGHT, Anatomy
from lightning_fedleak.attacks.local_steps import LocalSteps
from lightning_fedleak.attacks.words.aligned_readout import Readout, Rehearsed
from lightning_fedleak.attacks.words.aligned_rows import (
    Directions,
    ExpectedRows,
    cluster_centres,
)
from lightning_fedleak.attacks.words.public_gradients import (
    GradientParts,
    gradient_of,
    head_of,
)
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.progress import track

_CLUSTERS = 32
_GROUPS = 128
_ROWS_AT_ONCE = 4096
_UNUSED = 2000
_MOST = 50.0
_NOISE = 3e-3
_SATURATED = 1e-5
_PRINCIPAL = 32
_PASSES = 6
_QUANTILES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9)


@dataclass(frozen=True)
class PublicUpdate:
    """An update of the head that public text made.

    Attributes:
        rows: (V, d) per step, in units of what an entry can move.
        used: (V,) bool, the types that its losses were computed on.
    """

    rows: Tensor
    used: Tensor


def one_step(
    parts: GradientParts,
    weight: Tensor,
    bias: Tensor | None,
    steps: LocalSteps,
    generator: torch.Generator,
    texts: Sequence[int],
) -> Iterator[PublicUpdate]:
    """Updates of one step, from the gradients of public sentences.

    Args:
        parts: of public sentences.
        weight: (V, d) of the head.
        bias: (V,) or None.
        steps: the round.
        generator: CPU generator.
        texts: numbers of texts in a batch.
    """
    by_length = torch.bincount(parts.sentence, minlength=parts.n_sentences).argsort().cpu()
    while True:
        size = min(_one_of(texts, generator), parts.n_sentences)
        third = max(size, len(by_length) // 3)
        first = int(torch.rand((), generator=generator) * (len(by_length) - third + 1))
        among = by_length[first : first + third]
        chosen = among[torch.randperm(len(among), generator=generator)[:size]]
        batch = parts.of(chosen.to(parts.labels.device))
        moved = nn.Parameter(weight.clone())
        moved.grad = batch.clipped(weight, bias, None, steps.clip_value)
        steps.over([moved]).step()
        yield _of(weight, moved.detach(), batch.labels, steps)


def several_steps(
    anatomy: Anatomy,
    batch: Callable[[int], TokenBatch],
    steps: LocalSteps,
    generator: torch.Generator,
    texts: Sequence[int],
) -> Iterator[PublicUpdate]:
    """Updates of rounds of training on public text, of copies of the weights.

    Args:
        anatomy: the model; it is read only.
        batch: gives a batch of so many texts of like length, another each time.
        steps: the round.
        generator: CPU generator.
        texts: numbers of texts in a batch.
    """
    weight = head_of(anatomy)[0]
    named = dict(anatomy.model.named_parameters())
    within = {id(p): name for name, p in anatomy.root.named_parameters()}
    trained = {n: within[id(p)] for n, p in named.items() if p.requires_grad}
    head = next(n for n, p in named.items() if p is anatomy.parameter(HEAD_WEIGHT))
    while True:
        size = _one_of(texts, generator)
        copies = {name: nn.Parameter(named[name].detach().clone()) for name in trained}
        optimizer = steps.over(list(copies.values()))
        labels = []
        for _ in range(steps.steps):
            public = batch(size)
            gradients = gradient_of(anatomy, public, list(trained.values()), instead=copies)
            for name, copy in copies.items():
                copy.grad = gradients[trained[name]]
                if steps.clip_value is not None:
                    copy.grad.clamp_(-steps.clip_value, steps.clip_value)
            optimizer.step()
            labels.append(public.target_ids())
        yield _of(weight, copies[head].detach().float(), torch.cat(labels), steps)


def _one_of(numbers: Sequence[int], generator: torch.Generator) -> int:
    return numbers[int(torch.randint(len(numbers), (), generator=generator))]


def _of(before: Tensor, after: Tensor, labels: Tensor, steps: LocalSteps) -> PublicUpdate:
    used = torch.zeros(len(before), dtype=torch.bool, device=before.device)
    used[labels.to(before.device)] = True
    rows = comparable((before - after) / steps.rate, before, steps.rate, steps)
    return PublicUpdate(rows, used)


def comparable(update: Tensor, before: Tensor, rate: float, steps: LocalSteps) -> Tensor:
    """An update per step, without decay, in units of what an entry can move.

    Args:
        update: (V, d), ``(before - after) / rate``.
        before: (V, d) weights.
        rate: that the update is divided by.
        steps: the round.
    """
    plain = steps.without_decay(update.float(), before.float(), rate)
    return plain / (steps.largest * steps.steps)


def rehearse_updates(
    anatomy: Anatomy,
    parts: GradientParts,
    steps: LocalSteps,
    batch: Callable[[int], TokenBatch],
    generator: torch.Generator,
    *,
    updates: int,
    texts: Sequence[int],
    n_directions: int,
    n_principal: int = 64,
) -> Rehearsed:
    """Fits a readout on public updates.

    Of rounds of one step two halves of the sentences take turns: what is expected of types comes
    from one, the updates from the other, as in the attack itself.

    Args:
        anatomy: the model; it is read only.
        parts: of at least 4 public sentences.
        steps: the round.
        batch: gives a batch of so many texts of like length, another each time.
        generator: CPU generator.
        updates: how many.
        texts: numbers of texts in a batch.
        n_directions: centres of hidden states that rows are projected on.
        n_principal: principal directions of hidden states that types are told apart by.

    Raises:
        ValueError: too few sentences.
    """
    if parts.n_sentences < 4:
        raise ValueError(
            f"a learned readout needs at least 4 public texts, got {parts.n_sentences}: give more"
        )
    weight, bias = head_of(anatomy)
    directions = Directions.of(parts, n_directions, n_principal, generator)
    clusters = cluster_centres(F.normalize(parts.hidden, dim=1), _CLUSTERS, generator)

    def expect(public: GradientParts) -> ExpectedRows:
        return ExpectedRows.of(public, weight, bias, directions, clusters)

    if steps.steps == 1:
        order = torch.randperm(parts.n_sentences, generator=generator).to(parts.labels.device)
        halves = [parts.of(half) for half in order.tensor_split(2)]
        by_half = [expect(half) for half in halves]
        expected = ExpectedRows.averaged(*by_half)
        made = [
            (other, update)
            for half, other in zip(halves, reversed(by_half), strict=True)
            for update in [one_step(half, weight, bias, steps, generator, texts)] * (updates // 2)
        ]
    else:
        expected = expect(parts)
        rounds = several_steps(anatomy, batch, steps, generator, texts)
        made = [(expected, rounds)] * updates
    found = []
    for known, source in track(made, "rehearsing updates of the optimizer"):
        public = next(source)
        rows, importance = _sampled(public.used, known, generator)
        features = update_features(public.rows, weight, directions, known)
        found.append((features[rows], public.used[rows], importance))
    features, used, importance = (torch.cat(column) for column in zip(*found, strict=True))
    readout = Readout.fit(features, used, importance, generator, passes=_PASSES)
    return Rehearsed(directions, clusters, expected, readout)


def _sampled(
    used: Tensor, expected: ExpectedRows, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rows of all used types and of some others, likely ones more often, and their weights."""
    others = (~used).nonzero()[:, 0]
    likely = expected.probability[others].sqrt() + 1e-6
    share = _UNUSED / 2 * (likely / likely.sum() + 1 / max(1, len(others)))
    share = share.clamp(max=1.0)
    draw = torch.rand(len(others), generator=generator).to(share.device) < share
    sure = used.nonzero()[:, 0]
    weights = (1 / share[draw]).clamp(max=_MOST)
    return torch.cat([sure, others[draw]]), torch.cat([torch.ones_like(sure).float(), weights])


def update_features(
    update: Tensor, weight: Tensor, directions: Directions, expected: ExpectedRows
) -> Tensor:
    """Features of all rows, (V, F).

    Args:
        update: (V, d), see :func:`comparable`.
        weight: (V, d) of the head.
        directions: to project on.
        expected: of all types.
    """
    groups = _Groups.of(update, expected)
    parts = torch.split(torch.arange(len(update), device=update.device), _ROWS_AT_ONCE)
    return torch.cat(
        [
            torch.cat(
                [
                    _own(update[i], weight[i], directions, expected.rows(i)),
                    groups.beside(i, update[i]),
                ],
                1,
            )
            for i in parts
        ]
    )


def _soft_sign(update: Tensor) -> Tensor:
    """Signs, of entries that are more than rounding."""
    return update / (update.abs() + _NOISE)


def _odds(size: Tensor) -> Tensor:
    """Logarithm of an entry's gradient in units of Adam's eps, as far as rounding leaves it."""
    size = size.clamp(max=1.0)
    odds: Tensor = (size / (1 - size).clamp(min=_SATURATED) + 1e-6).log()
    return odds


def _own(rows: Tensor, weight: Tensor, d: Directions, expected: ExpectedRows) -> Tensor:
    """What a row says by itself, and what is expected of its type."""
    size = rows.abs()
    odds = _odds(size)
    norm = rows.norm(dim=1, keepdim=True) + 1e-12
    back = rows.sign() * odds.exp()
    length = back.norm(dim=1, keepdim=True) + 1e-12
    places = torch.tensor(_QUANTILES, device=rows.device)
    quantiles = odds.quantile(places, dim=1).T
    columns = [quantiles, norm.log(), length.log(), size.mean(1, keepdim=True)]
    columns += [(size > s).float().mean(1, keepdim=True) for s in (0.5, 0.99, 0.999)]
    own = F.normalize(weight.float(), dim=1)
    last = len(d.centres) - 1
    ranks = [min(i, last) for i in (0, 1, 3, 7, len(d.centres) // 2, last)]
    for unit in (rows / norm, _soft_sign(rows) / rows.shape[1] ** 0.5, back / length):
        near = (unit @ d.centres.T).sort(dim=1).values
        white = unit @ d.whitening
        template = expected.whitened
        agreement = (white * template).sum(1) / (white.norm(dim=1) * template.norm(dim=1) + 1e-30)
        inside = white * d.deviations
        columns += [
            (unit @ d.u)[:, None],
            near[:, ranks],
            (near < 0).float().mean(1, keepdim=True),
            agreement[:, None],
            inside.square().sum(1, keepdim=True),
            (unit @ d.opening).square(),
            (unit * own).sum(1, keepdim=True),
            inside[:, :_PRINCIPAL],
        ]
    likely = (expected.probability * d.norm + 1e-12).log()
    known = [
        likely,
        (expected.energy + 1e-12).log(),
        expected.energy / (expected.probability + 1e-30),
        (expected.frequency + 1e-5).log(),
        (expected.opening + 1e-4).log(),
        quantiles[:, 3] - likely,
    ]
    return torch.cat([*columns, torch.stack(known, 1)], 1)


@dataclass(frozen=True)
class _Groups:
    """Types that are predicted alike, and how their rows moved together.

    Attributes:
        of_type: (V,) number of its group.
        size: (G,) types in each.
        rows: (G, d) sums of their rows.
        signs: (G, d) sums of their signs.
        measured: (V, M) numbers on which each type is compared with its group.
        mean: (G, M).
        deviation: (G, M).
    """

    of_type: Tensor
    size: Tensor
    rows: Tensor
    signs: Tensor
    measured: Tensor
    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, update: Tensor, expected: ExpectedRows) -> _Groups:
        """Groups by the direction that hidden states give a type's expected row."""
        unit = F.normalize(expected.whitened, dim=1)
        start = torch.Generator().manual_seed(0)
        centres = cluster_centres(unit, _GROUPS, start)
        of_type = (unit @ centres.T).argmax(1)
        n, d = len(centres), update.shape[1]
        size = torch.bincount(of_type, minlength=n).float()
        rows = update.new_zeros(n, d).index_add_(0, of_type, update)
        signs = update.new_zeros(n, d)
        parts = torch.split(torch.arange(len(update), device=update.device), _ROWS_AT_ONCE)
        for i in parts:
            signs.index_add_(0, of_type[i], _soft_sign(update[i]))
        begun = cls(of_type, size, rows, signs, update[:0], update[:0], update[:0])
        measured = torch.cat([begun._compared(i, update[i])[:, :4] for i in parts])
        each = size.clamp(min=1)[:, None]
        mean = update.new_zeros(n, 4).index_add_(0, of_type, measured) / each
        square = update.new_zeros(n, 4).index_add_(0, of_type, measured.square()) / each
        deviation = (square - mean.square()).clamp(min=1e-6).sqrt()
        return cls(of_type, size, rows, signs, measured, mean, deviation)

    def _compared(self, types: Tensor, rows: Tensor) -> Tensor:
        """(k, 5): agreement with the others of its group, what is left, mean size, their norm."""
        group = self.of_type[types]
        others = (self.size[group] - 1).clamp(min=1)[:, None]
        signs = _soft_sign(rows)
        template = (self.signs[group] - signs) / others
        mean = (self.rows[group] - rows) / others
        width = rows.shape[1] ** 0.5
        return torch.stack(
            [
                F.cosine_similarity(signs, template, dim=1),
                F.cosine_similarity(rows, mean, dim=1),
                (rows - mean).norm(dim=1) / width,
                rows.abs().mean(1),
                mean.norm(dim=1) / width,
            ],
            1,
        )

    def beside(self, types: Tensor, rows: Tensor) -> Tensor:
        """(k, 10) what a row says beside others of its group."""
        group = self.of_type[types]
        plain = self._compared(types, rows)
        apart = (plain[:, :4] - self.mean[group]) / self.deviation[group]
        return torch.cat([plain, apart, self.size[group].log()[:, None]], 1)
