"""The channel of word attacks: the word types of a batch, recovered from the client's gradients.

A *channel* plays the attacks of one family in a run, and turns their answers into rates; a *look*
is one measurement at a step. A *word type* is a token id. An attack recovers the types at one
*surface* of the model: the labels of the loss (``output``), or the ids that the model reads
(``input``). At a look the types in the batches are collected as the truth, over all processes if
they are one client. The counts of a guess against them are one trial, and those of the clients are
added.

If the settings name kinds of *values* (entities), such as phone numbers, each attack also has a
series of the types in such values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, fields, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from lightning_fedleak.attacks import Attack, WordGuess
from lightning_fedleak.engine.channels.base import kind_of
from lightning_fedleak.engine.channels.plans import Plan
from lightning_fedleak.engine.channels.steps import StepChannel
from lightning_fedleak.engine.outcomes import Series
from lightning_fedleak.engine.run import Look, Run
from lightning_fedleak.evaluation.entities import EntityFinder
from lightning_fedleak.evaluation.metrics import Counts, Rate, precision_recall_f1, word_counts
from lightning_fedleak.evaluation.metrics.clustered import naming_p_value
from lightning_fedleak.evaluation.metrics.rates import type_mask
from lightning_fedleak.model.anatomy import leaf
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.model_runs import sees_no_later
from lightning_fedleak.model.snapshots import UnusableObservation, is_shard
from lightning_fedleak.model.taps import Step
from lightning_fedleak.private_files import RevealFiles
from lightning_fedleak.report.records import WORDS, default_limit

SOFT_LABELS = (
    "the targets of the loss are no single labels (distillation, mixed labels, or smoothed ones "
    "past their target), so that the words it was computed on are not known"
)


TWINS = 1e-4
"""Largest relative distance of two embeddings whose tokens (*twins*) count as one word.

In stories15M 16,937 tokens that were never trained lie within 9.4e-5 of each other, and no further
ones within 1e-3. With a larger value a word counts as found if another one was named; with a
smaller one, certain finds count as wrong.
"""
DIRECTIONS, NEIGHBOURS = 8, 8
"""Embeddings are projected on 8 random directions, sorted by the first, and compared with the next
8. With fewer directions unlike tokens agree by chance; with fewer neighbours, unlike tokens between
two twins keep them apart."""

NAMES_ALL = (
    "under noise it names {} of {} types of the vocabulary, of which the batch uses {}: such an "
    "answer is right as often whatever the batch holds (p = 1)"
)

NO_WORD = (
    "no batch has a word with a letter in a value of kind '{}': digits are in every batch and do "
    "not count, so that only attacks on texts measure numbers"
)


class WordTruth(NamedTuple):
    """The word types of a step's batches: the truth, which only the client has.

    Attributes:
        used: Which types are labels, which ones the model reads where the loss depends on them,
            and for each kind of value which ones have a letter and lie in such a value:
            (2 + kinds, V) bool on the CPU.
        n_targets: The number of tokens that the loss was computed on; of texts for a classifier.
        is_soft: Whether some targets are no single labels, so that not all labels are known.
    """

    used: Tensor
    n_targets: int
    is_soft: bool


class WordsChannel(StepChannel):
    """The channel of attacks that recover the word types of a batch."""

    # The constants are explained in Channel and StepChannel.
    guesses = WordGuess
    reads = Attack
    leak = WORDS
    metrics = ("precision", "recall", "f1")
    columns = tuple(count.name for count in fields(Counts))  # a trial is the batch of a client
    width = len(columns)
    # What some attacks state: the error of their number of types, the share of batches of which
    # they prove that no type is missing, and how many types they can distinguish, as a multiple of
    # the true number.
    extras = ("type_count_error", "certified", "capacity")
    ranges = dict.fromkeys((*metrics, "certified"), (0.0, 1.0, 0.0))
    reads_updates: ClassVar[bool] = True
    tests_looks: ClassVar[bool] = True
    controlled: ClassVar[bool] = True
    finds_entities: ClassVar[bool] = True
    no_value = NO_WORD

    # ---- a fit ------------------------------------------------------------------------------

    def open(self, run: Run) -> None:
        """Begin a fit: find the size of the vocabulary, and tokens with equal embeddings."""
        super().open(run)
        # The embedding may have more rows than the head.
        self._size = max(run.anatomy.vocab_size, run.anatomy.embedding_rows)
        # Whether tokens of a classifier see only the tokens before them.
        self._one_way = run.anatomy.kind == "classifier" and sees_no_later(run.anatomy)
        padding = getattr(leaf(run.anatomy.embedding), "padding_idx", None)
        self._padding = -1 if padding is None else padding
        self._twins: dict[str, Tensor] = {}  # by surface, see _find_twins
        self._layers: dict[str, nn.Module] = {"input": run.anatomy.embedding}  # by surface
        if run.anatomy.head is not None and run.anatomy.kind != "classifier":
            self._layers["output"] = run.anatomy.head
        for surface, layer in self._layers.items():
            matrix = None if _is_trained(layer) else _matrix(layer)
            twins = None if matrix is None else _find_twins(matrix.detach())
            if twins is not None:
                self._twins[surface] = twins
        distinct = [len(torch.unique(twins)) for twins in self._twins.values()]
        self._n_types = min(distinct, default=self._size)
        counts = [len(t) - n for t, n in zip(self._twins.values(), distinct, strict=True)]
        if counts:
            run.say(
                f"{max(counts)} tokens have the same embedding as another one, which is not "
                "trained: they count as one word"
            )

    # ---- the truth --------------------------------------------------------------------------

    def truth(self, step: Step) -> WordTruth:
        """Return the words of this process's batches. On CUDA this waits for the device.

        A classifier's labels are classes, not words. If the decoder has another vocabulary, only
        the input of the encoder counts as input.
        """
        batches = step.batches
        one_vocabulary = self.run.anatomy.target_rows is None
        used = torch.zeros(2 + len(self.entity_kinds), self._size, dtype=torch.bool)
        n_targets = n_texts = n_live = 0
        for batch in batches:
            if batch.kind == "classifier":
                n_texts += int(batch.context_mask().any(1).sum())
            else:
                targets = batch.target_ids()
                used[0] |= type_mask(targets, self._size, "labels").cpu()
                n_targets += len(targets)
            n_live += 0 if batch.live is None else int(batch.live.sum())
            if one_vocabulary:
                inputs = batch.context_ids(one_way=self._one_way)
            else:
                inputs = batch.input_ids[batch.context_mask()].long()
            used[1] |= type_mask(inputs, self._size, "input_ids").cpu()
            if self.finder is not None:
                for text in _texts_of(batch, has_answers=one_vocabulary):
                    self._mark_values(self.finder, text, used[2:])
        is_soft = any(batch.soft_labels for batch in batches)
        return WordTruth(used, max(n_live, n_targets) + n_texts, is_soft)

    def _mark_values(self, finder: EntityFinder, text: Tensor, used: Tensor) -> None:
        """Mark the types with a letter in a text's values as used, (kinds, V) bool."""
        marks = finder.marks(text)
        for kind, row in zip(self.entity_kinds, used, strict=True):
            row[[*filter(finder.has_letter, text[marks[kind]].tolist())]] = True

    def joined(self, truth: WordTruth | None) -> WordTruth | None:
        """Return the words of the client: of all processes together if they are one client."""
        if self.run.client != "world" or self.run.processes == 1:
            return truth
        shape = 2 + len(self.entity_kinds), self._size
        used, *others = truth or (torch.zeros(shape, dtype=torch.bool), 0, False)
        numbers = torch.cat([used.flatten().long(), torch.tensor(others)])
        numbers = self.run.summed(numbers.to(self.run.device)).cpu()
        n_targets, n_soft = numbers[-2:].tolist()
        return WordTruth(numbers[:-2].view(shape) > 0, n_targets, n_soft > 0)

    def holds_nothing(self, truth: WordTruth) -> bool:
        """Return whether the loss was computed on no token."""
        return truth.n_targets == 0

    def _types(self, truth: WordTruth, surface: str, kind: str | None = None) -> Tensor:
        """Return the sorted word types at one surface.

        Args:
            truth: The words of the step.
            surface: ``"output"`` or ``"input"``.
            kind: A kind of values, to return only the types in such values; None for all.

        Raises:
            UnusableObservation: The labels are not all known.
        """
        if surface == "output" and truth.is_soft:
            raise UnusableObservation(SOFT_LABELS)
        used = truth.used[0 if surface == "output" else 1]
        if kind is not None:
            used = used & truth.used[2 + self.entity_kinds.index(kind)]
        return used.nonzero()[:, 0]

    # ---- trials and their rates -------------------------------------------------------------

    def trials(self, plan: Plan, answer: Any, truth: Any, kind: str | None = None) -> Tensor:
        """Return the counts of a guess, with one type for all tokens of equal embedding.

        If the layer is trained, its gradient distinguishes such tokens, and each counts by itself.
        The id of padding is no word that a model reads: its row of the embedding has no gradient.
        """
        surface, named = answer.surface, answer.types.cpu()
        types = self._types(truth, surface, kind)
        if surface == "input":
            types, named = types[types != self._padding], named[named != self._padding]
        twins = self._twins.get(surface)
        if twins is not None and not _is_trained(self._layers[surface]):
            twins = torch.cat([twins, torch.arange(len(twins), self._size)])
            types, named = twins[types], twins[named]
        counts = word_counts(replace(answer, types=named), types, self._size)
        return torch.tensor([astuple(counts)], dtype=torch.float64)

    def accept(self, look: Look, plan: Plan, series: Series, answer: Any, truth: Any) -> None:
        """Note the words of a guess, and what naming all words would score.

        Raises:
            UnusableObservation: Under noise the F1 is high, and no batch of as many words gives a
                lower one.
        """
        counts = _sum(self.trials(plan, answer, truth))
        right, named, used = int(counts.tp), int(counts.tp + counts.fp), int(counts.tp + counts.fn)
        self.uninformed = 2 * used / (used + self._n_types)
        is_certain = right <= named + used - self._n_types  # whichever types these are
        is_noisy = look.training_step.view(series.stage).noise_std != 0.0
        if is_noisy and is_certain and 2 * right > default_limit(0.0) * (named + used):
            raise UnusableObservation(NAMES_ALL.format(named, self._n_types, used))
        if kind_of(series) is None:
            look.notes[series] = partial(_reveal, answer, self._types(truth, answer.surface))

    def rates(self, trials: Tensor) -> dict[str, Rate]:
        """Return the rates of the sum of the counts."""
        return precision_recall_f1(_sum(trials))

    def count(self, trials: Tensor) -> int:
        """Return the number of used types, added over clients."""
        counts = _sum(trials)
        return int(counts.tp + counts.fn)

    def means(self, tables: Sequence[Tensor]) -> dict[str, float]:
        """Return the means of what attacks state on batches."""
        return _sum(torch.cat([*tables])).means()

    def p_value(self, trials: Tensor) -> float:
        """Return the p-value of naming as many types at random; twins count as one type."""
        right, wrong, missed = (int(n) for n in astuple(_sum(trials))[:3])
        return naming_p_value(right, right + wrong, right + missed, self._n_types)


def _sum(trials: Tensor) -> Counts:
    """Return the sum of the counts of trials."""
    return Counts(*trials.sum(0).tolist())


def _is_trained(layer: nn.Module) -> bool:
    """Return whether any parameter of a layer is trained, also of an adapter on it."""
    return any(p.requires_grad for p in layer.parameters())


def _matrix(layer: nn.Module) -> Tensor | None:
    """Return the (V, d) weight of a layer; None if it has none, or only a shard of it."""
    weight = leaf(layer)._parameters.get("weight")
    if weight is None or is_shard(weight):
        return None
    return weight if weight.dim() == 2 and weight.is_floating_point() else None


def _find_twins(matrix: Tensor) -> Tensor | None:
    """Return for each row of a matrix (V, d) the last row that nearly equals it, (V,).

    None if no two rows do.
    """
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(matrix.shape[1], DIRECTIONS, generator=generator)
    points = (matrix.float() @ directions.to(matrix.device)).cpu()
    order = points[:, 0].argsort()
    points, sizes = points[order], points[order].norm(dim=1)
    links = []
    for k in range(1, min(NEIGHBOURS, len(points) - 1) + 1):
        distances = (points[k:] - points[:-k]).norm(dim=1)
        close = (distances <= TWINS * torch.minimum(sizes[k:], sizes[:-k])).nonzero()[:, 0]
        links.append(torch.stack([order[close], order[close + k]]))
    pairs = torch.cat(links, 1) if links else torch.empty(2, 0, dtype=torch.long)
    if not pairs.numel():
        return None
    shape = len(matrix), len(matrix)
    graph = coo_array((np.ones(pairs.shape[1]), tuple(pairs.numpy())), shape=shape)
    classes = torch.from_numpy(connected_components(graph, directed=False)[1]).long()
    representatives = torch.zeros_like(classes).index_reduce(
        0, classes, torch.arange(len(classes)), "amax", include_self=False
    )
    return representatives[classes]


def _texts_of(batch: TokenBatch, *, has_answers: bool) -> Iterator[Tensor]:
    """Yield the ids of each text of a batch, with the masked tokens, and of each answer."""
    ids, labels = batch.input_ids.cpu(), None if batch.labels is None else batch.labels.cpu()
    if batch.kind == "masked" and labels is not None and labels.shape == ids.shape:
        ids = torch.where(labels >= 0, labels, ids)
    for places in batch.document_places().cpu():
        yield ids.flatten()[places[places >= 0]]
    if batch.kind == "seq2seq" and labels is not None and has_answers:
        yield from (row[row >= 0] for row in labels)


def _reveal(answer: WordGuess, truth: Tensor, files: RevealFiles, title: str) -> None:
    """Write the recovered, wrong and missed words of one look."""
    true_ids = set(truth.tolist())
    guessed = answer.types.tolist()
    right = [t for t in guessed if t in true_ids]
    wrong = [t for t in guessed if t not in true_ids]
    missed = sorted(true_ids.difference(guessed))
    kinds = {"recovered": right, "wrong": wrong, "missed": missed}
    lines = [f"{kind} ({len(ids)}): {files.each(ids)}" for kind, ids in kinds.items()]
    files.append("words", [title, *lines])
