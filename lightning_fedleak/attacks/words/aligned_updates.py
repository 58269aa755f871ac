"""Word types from updates of the output head by Adam and similar optimizers.

A type is a distinct token of the vocabulary, used if it is a label in the batch. In a round a
client takes one or more optimizer steps and shares the update, the change of its weights. After one
step of Adam every entry is ``g / (|g| + eps)``. It shows the sign of the gradient g, and its size
only if g is not much larger than eps. So the size of a row, which distinguishes used from unused
types, is mostly lost. Three hints remain. Rows of used types point against the hidden states, rows
of unused types along them. Rows of types that no hidden state predicts are small enough to show
their size. And types that are predicted in the same way change in the same way, unless one of them
is used: each row is compared with the mean of its group.

:func:`rehearse_updates` fits a classifier of these features on public updates, which the
optimizer's class computes: from gradients of public text for rounds of one step, from training on
public text for longer rounds. :func:`update_features` computes the features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedleak.attacks.local_steps import LocalSteps
from lightning_fedleak.attacks.public_text import gradient_of
from lightning_fedleak.attacks.words.aligned_readout import HeadCalibration, fit_readout
from lightning_fedleak.attacks.words.aligned_rows import Directions, ExpectedRows, cluster_centres
from lightning_fedleak.attacks.words.head_gradients import GradientParts, head_parameters
from lightning_fedleak.model.anatomy import HEAD_WEIGHT, Anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.progress import track

_CLUSTERS = 32  # clusters of hidden states whose mass is expected of a type; not tuned
_GROUPS = 128  # groups of types that are compared with each other; not tuned
_ROWS_AT_ONCE = 4096  # rows whose features are computed at once, which bounds the memory
_UNUSED = 2000  # unused types drawn from each public update, on average at most; not tuned
_MAX_IMPORTANCE = 50.0  # largest weight of a drawn type in the loss; not tuned
_NOISE = 3e-3  # size that rounding explains, as a share of an entry's largest change; not tuned
_SATURATED = 1e-5  # distance to an entry's largest change that float32 resolves; not tuned
_PRINCIPAL = 32  # principal directions on which projections are features; not tuned
_PASSES = 6  # passes of the fit over the rows; more cost time, not tuned
_UPDATES = 80  # number of public updates; more cost time, not tuned
_TEXTS = (1, 2, 4, 8, 16, 32)  # texts in a public batch of a step, drawn at random; not tuned
_QUANTILES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9)  # of a row's entries, as features; not tuned


_PublicUpdate = tuple[Tensor, Tensor]
"""An update of the head from public text: the (V, d) mean change per step, in units of an entry's
largest possible change, and (V,) bool, the types that the losses were computed on."""


def one_step_updates(
    parts: GradientParts,
    weight: Tensor,
    bias: Tensor | None,
    steps: LocalSteps,
    generator: torch.Generator,
) -> Iterator[_PublicUpdate]:
    """Yield updates of one step, from the gradients of public sentences.

    Args:
        parts: The hidden states and gradients of public sentences.
        weight: (V, d), the head's weight.
        bias: (V,), the head's bias, or None.
        steps: the round.
        generator: CPU generator.
    """
    by_length = torch.bincount(parts.sentence, minlength=parts.n_sentences).argsort().cpu()
    while True:
        size = min(_draw_size(generator), parts.n_sentences)
        third = max(size, len(by_length) // 3)
        start = int(torch.rand((), generator=generator) * (len(by_length) - third + 1))
        pool = by_length[start : start + third]  # sentences of similar lengths
        sentences = pool[torch.randperm(len(pool), generator=generator)[:size]]
        batch = parts.select(sentences.to(parts.labels.device))
        parameter = nn.Parameter(weight.clone())
        parameter.grad = batch.gradient(weight, bias)
        steps.make_optimizer([parameter]).step()
        yield _public_update(weight, parameter.detach(), batch.labels, steps)


def training_updates(
    anatomy: Anatomy,
    batch: Callable[[int], TokenBatch],
    steps: LocalSteps,
    generator: torch.Generator,
) -> Iterator[_PublicUpdate]:
    """Yield updates of rounds of training on public text, with copies of the weights.

    Args:
        anatomy: the model, which is not changed.
        batch: draws a batch of a given number of texts, all of one length.
        steps: the round.
        generator: CPU generator.
    """
    weight = head_parameters(anatomy)[0]
    names = {id(p): name for name, p in anatomy.root.named_parameters()}
    head = names[id(anatomy.parameter(HEAD_WEIGHT))]
    while True:
        size = _draw_size(generator)
        batches = [batch(size) for _ in range(steps.steps)]
        after = _train_copies(anatomy, batches, steps)[head].float()
        labels = torch.cat([public.target_ids() for public in batches])
        yield _public_update(weight, after, labels, steps)


def _train_copies(
    anatomy: Anatomy, batches: Sequence[TokenBatch], steps: LocalSteps
) -> dict[str, Tensor]:
    """Return the trained parameters after a round of training, by name in ``anatomy.root``.

    Copies of the weights are trained, so that the model, its gradients and the random generators do
    not change. The model runs in eval mode, without dropout.

    Args:
        anatomy: the model.
        batches: The batch of each step.
        steps: the round; its optimizer begins fresh.
    """
    names = {id(p): name for name, p in anatomy.root.named_parameters()}
    trained = {n: p for n, p in anatomy.model.named_parameters() if p.requires_grad}
    copies = {n: nn.Parameter(p.detach().clone()) for n, p in trained.items()}
    roles = [names[id(p)] for p in trained.values()]
    optimizer = steps.make_optimizer(list(copies.values()))
    for batch in batches:
        gradients = gradient_of(anatomy, batch, roles, instead=copies)
        for role, copy in zip(roles, copies.values(), strict=True):
            copy.grad = gradients[role]
        optimizer.step()
    return {role: copy.detach() for role, copy in zip(roles, copies.values(), strict=True)}


def _draw_size(generator: torch.Generator) -> int:
    """Return a random number of texts of a public batch."""
    return _TEXTS[int(torch.randint(len(_TEXTS), (), generator=generator))]


def _public_update(
    before: Tensor, after: Tensor, labels: Tensor, steps: LocalSteps
) -> _PublicUpdate:
    used = torch.zeros(len(before), dtype=torch.bool, device=before.device)
    used[labels.to(before.device)] = True
    rows = normalize_update((before - after) / steps.rate, before, steps.rate, steps)
    return rows, used


def normalize_update(update: Tensor, before: Tensor, rate: float, steps: LocalSteps) -> Tensor:
    """Return an update per step, without decay, in units of an entry's largest possible change.

    Args:
        update: (V, d), ``(before - after) / rate``.
        before: (V, d) weights.
        rate: learning rate that the update was divided by.
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
) -> HeadCalibration:
    """Return a readout fitted on public updates.

    For rounds of one step, expectations come from one half of the sentences and updates from the
    other half, and then the reverse, because an attacked text is another one than the public text.

    Args:
        anatomy: the model, which is not changed.
        parts: The hidden states and gradients of at least 4 public sentences.
        steps: the round.
        batch: draws a batch of a given number of texts, all of one length.
        generator: CPU generator.
    """
    weight, bias = head_parameters(anatomy)
    directions = Directions.fit(parts, generator)
    clusters = cluster_centres(F.normalize(parts.hidden, dim=1), _CLUSTERS, generator)
    halves = [parts]
    if steps.steps == 1:
        order = torch.randperm(parts.n_sentences, generator=generator).to(parts.labels.device)
        halves = [parts.select(half) for half in order.tensor_split(2)]
    computed = [ExpectedRows.compute(h, weight, bias, directions, clusters) for h in halves]
    expected, halves = map(list, zip(*computed, strict=True))
    if steps.steps == 1:
        sources = [
            (half_expected, source)
            for half, half_expected in zip(halves, reversed(expected), strict=True)
            for source in [one_step_updates(half, weight, bias, steps, generator)] * (_UPDATES // 2)
        ]
    else:
        training = training_updates(anatomy, batch, steps, generator)
        sources = [(expected[0], training)] * _UPDATES
    rehearsals = []
    for source_expected, source in track(sources, "rehearsing updates of the optimizer"):
        update, used = next(source)
        rows, importance = _draw_rows(used, source_expected, generator)
        features = update_features(update, weight, directions, source_expected)
        rehearsals.append((features[rows], used[rows], importance))
    features, used, importance = (torch.cat(column) for column in zip(*rehearsals, strict=True))
    readout = fit_readout(features, used, importance, generator, passes=_PASSES)
    mean = expected[0] if len(expected) == 1 else ExpectedRows.average(*expected)
    return HeadCalibration(directions, clusters, mean, readout)


def _draw_rows(
    used: Tensor, expected: ExpectedRows, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the types whose rows the classifier is fitted on, and their weights in the loss.

    They are all used types and a sample of unused ones. Half of the sample is drawn in proportion
    to the square root of a type's mean probability, the other half evenly.
    """
    unused = (~used).nonzero()[:, 0]
    likely = expected.probability[unused].sqrt() + 1e-6
    share = _UNUSED / 2 * (likely / likely.sum() + 1 / max(1, len(unused)))
    share = share.clamp(max=1.0)
    sample = torch.rand(len(unused), generator=generator).to(share.device) < share
    types = used.nonzero()[:, 0]
    weights = (1 / share[sample]).clamp(max=_MAX_IMPORTANCE)
    return torch.cat([types, unused[sample]]), torch.cat([torch.ones_like(types).float(), weights])


def update_features(
    update: Tensor, weight: Tensor, directions: Directions, expected: ExpectedRows
) -> Tensor:
    """Return the features of all rows, (V, F).

    Args:
        update: (V, d), see :func:`normalize_update`.
        weight: (V, d), the head's weight.
        directions: directions that rows are projected on.
        expected: expectations of all types, from public text.
    """
    groups = _Groups.build(update, expected)
    features = []
    for i in torch.split(torch.arange(len(update), device=update.device), _ROWS_AT_ONCE):
        row_features = _row_features(update[i], weight[i], directions, expected.rows(i))
        features.append(torch.cat([row_features, groups.features(i, update[i])], 1))
    return torch.cat(features)


def _soft_sign(update: Tensor) -> Tensor:
    """Return the signs of entries, damped towards 0 for entries that rounding explains."""
    return update / (update.abs() + _NOISE)


def _odds(size: Tensor) -> Tensor:
    """Return the log size of an entry's gradient in units of Adam's eps, clamped to its rounding.

    It is the logit of the size of the update: ``s = |g| / (|g| + eps)`` gives ``s / (1 - s)``.
    """
    size = size.clamp(max=1.0)
    odds: Tensor = (size / (1 - size).clamp(min=_SATURATED) + 1e-6).log()
    return odds


def _row_features(rows: Tensor, weight: Tensor, d: Directions, expected: ExpectedRows) -> Tensor:
    """Return the (k, F) features that need no other row: of the row and its type's expectations.

    The row is compared with directions ``d`` in three forms: as it is, as signs, and as the
    gradients that one step of Adam would turn into it, in units of eps.
    """
    size = rows.abs()
    odds = _odds(size)
    norm = rows.norm(dim=1, keepdim=True) + 1e-12
    gradients = rows.sign() * odds.exp()
    length = gradients.norm(dim=1, keepdim=True) + 1e-12
    shares = torch.tensor(_QUANTILES, device=rows.device)
    quantiles = odds.quantile(shares, dim=1).T
    columns = [quantiles, norm.log(), length.log(), size.mean(1, keepdim=True)]
    columns += [(size > s).float().mean(1, keepdim=True) for s in (0.5, 0.99, 0.999)]
    unit_weight = F.normalize(weight.float(), dim=1)
    last = len(d.centres) - 1
    ranks = [min(i, last) for i in (0, 1, 3, 7, len(d.centres) // 2, last)]
    for unit in (rows / norm, _soft_sign(rows) / rows.shape[1] ** 0.5, gradients / length):
        near = (unit @ d.centres.T).sort(dim=1).values
        white = unit @ d.whitening
        template = expected.whitened
        agreement = (white * template).sum(1) / (white.norm(dim=1) * template.norm(dim=1) + 1e-30)
        principal = white * d.deviations
        columns += [
            (unit @ d.u)[:, None],
            near[:, ranks],
            (near < 0).float().mean(1, keepdim=True),
            agreement[:, None],
            principal.square().sum(1, keepdim=True),
            (unit @ d.opening).square(),
            (unit * unit_weight).sum(1, keepdim=True),
            principal[:, :_PRINCIPAL],
        ]
    likely = (expected.probability * d.norm + 1e-12).log()
    expectations = [
        likely,
        (expected.energy + 1e-12).log(),
        expected.energy / (expected.probability + 1e-30),
        (expected.frequency + 1e-5).log(),
        (expected.opening + 1e-4).log(),
        quantiles[:, 3] - likely,  # the median
    ]
    return torch.cat([*columns, torch.stack(expectations, 1)], 1)


@dataclass(frozen=True)
class _Groups:
    """Groups of types that are predicted in the same way, and the mean changes of their rows.

    Attributes:
        group: (V,) index of each type's group.
        size: (G,) number of types in each group.
        rows: (G, d) sums of the rows of each group.
        signs: (G, d) sums of the rows' signs.
        mean: (G, 4) means, over the types of a group, of the first four numbers of
            :meth:`_compare`; the fifth is nearly the same in the whole group.
        deviation: (G, 4) standard deviations of these numbers.
    """

    group: Tensor
    size: Tensor
    rows: Tensor
    signs: Tensor
    mean: Tensor
    deviation: Tensor

    @classmethod
    def build(cls, update: Tensor, expected: ExpectedRows) -> _Groups:
        """Return groups of types by the direction of their expected rows."""
        unit = F.normalize(expected.whitened, dim=1)
        start = torch.Generator().manual_seed(0)
        centres = cluster_centres(unit, _GROUPS, start)
        group = (unit @ centres.T).argmax(1)
        n, d = len(centres), update.shape[1]
        size = torch.bincount(group, minlength=n).float()
        rows = update.new_zeros(n, d).index_add_(0, group, update)
        signs = update.new_zeros(n, d)
        parts = torch.split(torch.arange(len(update), device=update.device), _ROWS_AT_ONCE)
        for i in parts:
            signs.index_add_(0, group[i], _soft_sign(update[i]))
        groups = cls(group, size, rows, signs, update[:0], update[:0])
        comparisons = torch.cat([groups._compare(i, update[i])[:, :4] for i in parts])
        counts = size.clamp(min=1)[:, None]
        mean = update.new_zeros(n, 4).index_add_(0, group, comparisons) / counts
        square = update.new_zeros(n, 4).index_add_(0, group, comparisons.square()) / counts
        deviation = (square - mean.square()).clamp(min=1e-6).sqrt()
        return replace(groups, mean=mean, deviation=deviation)

    def _compare(self, types: Tensor, rows: Tensor) -> Tensor:
        """Return (k, 5) comparisons of rows with the mean of the remaining rows of their group.

        These are the cosines to its mean sign and its mean row, the distance to the mean row, the
        mean size of the row's entries, and the norm of the mean row.
        """
        group = self.group[types]
        n_others = (self.size[group] - 1).clamp(min=1)[:, None]
        signs = _soft_sign(rows)
        template = (self.signs[group] - signs) / n_others
        mean = (self.rows[group] - rows) / n_others
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

    def features(self, types: Tensor, rows: Tensor) -> Tensor:
        """Return (k, 10) features: the comparisons, four of them standardised, and group sizes."""
        group = self.group[types]
        comparisons = self._compare(types, rows)
        scores = (comparisons[:, :4] - self.mean[group]) / self.deviation[group]
        return torch.cat([comparisons, scores, self.size[group].log()[:, None]], 1)
