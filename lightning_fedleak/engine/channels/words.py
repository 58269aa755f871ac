"""The channel of word attacks: the word types of a batch, recovered from the client's gradients.

A *channel* plays the attacks of one family in a run, and turns their answers into rates; a *look*
is one measurement at a step. A *word type* is a token id. An attack recovers the types at one
*surface* of the model: the labels of the loss (``output``), or the ids that the model reads
(``input``). At a look the types in the batches are collected as the truth, over all processes if
they are one client. Each guess is counted against them, and the counts of the clients are added.

If the settings name kinds of *values* (entities), such as phone numbers, each attack also has a
series of the types in such values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from lightning_fedleak.attacks import Attack, WordGuess
from lightning_fedleak.engine.channels.base import Channel, entity_series, guess, kind_of, worst_of
from lightning_fedleak.engine.channels.plans import Plan
from lightning_fedleak.engine.outcomes import Outcome, Series, Unknown, Waiting, pending
from lightning_fedleak.engine.run import Look, Run, reason
from lightning_fedleak.evaluation.metrics import Counts, precision_recall_f1, word_counts
from lightning_fedleak.evaluation.metrics.clustered import lowest_p_value, naming_p_value
from lightning_fedleak.messages import rank_zero_info
from lightning_fedleak.model.anatomy import leaf
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.model_runs import sees_no_later
from lightning_fedleak.model.snapshots import Stage, UnusableObservation, is_shard
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


@dataclass(frozen=True)
class _WordTruth:
    """The word types of a step's batches: the truth, which only the client has.

    Attributes:
        output_types: The sorted distinct ids of the labels.
        input_types: The sorted distinct ids that the model read and the loss depends on.
        n_targets: The number of tokens that the loss was computed on; of texts for a classifier.
        is_soft: Whether some targets are no single labels, so that ``output_types`` is incomplete.
        entities: By kind of value, the sorted distinct ids with a letter that lie in such a value.
    """

    output_types: Tensor
    input_types: Tensor
    n_targets: int
    is_soft: bool = False
    entities: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def from_batches(
        cls, batches: Sequence[TokenBatch], *, one_way: bool = False, source_only: bool = False
    ) -> _WordTruth:
        """Return the words of all micro-batches of one step. On CUDA this waits for the device.

        A classifier's labels are classes, not words.

        Args:
            batches: The micro-batches of the step.
            one_way: See :meth:`TokenBatch.context_mask`.
            source_only: Whether to count only the input of the encoder, because the decoder reads
                labels of another vocabulary.
        """
        targets = [b.target_ids() for b in batches if b.kind != "classifier"]
        texts = [b.context_mask() for b in batches if b.kind == "classifier"]
        if source_only:
            inputs = [b.input_ids[b.context_mask()].long() for b in batches]
        else:
            inputs = [b.context_ids(one_way=one_way) for b in batches]
        live = sum(int(b.live.sum()) for b in batches if b.live is not None)
        return cls(
            torch.unique(torch.cat(targets)) if targets else torch.empty(0, dtype=torch.long),
            torch.unique(torch.cat(inputs)) if inputs else torch.empty(0, dtype=torch.long),
            max(live, sum(int(t.numel()) for t in targets))
            + sum(int(t.any(1).sum()) for t in texts),
            any(b.soft_labels for b in batches),
        )

    def types(self, surface: str, kind: str | None = None) -> Tensor:
        """Return the sorted word types at one surface.

        Args:
            surface: ``"output"`` or ``"input"``.
            kind: A kind of values, to return only the types in such values; None for all.

        Raises:
            UnusableObservation: The labels are not all known.
        """
        if surface == "output" and self.is_soft:
            raise UnusableObservation(SOFT_LABELS)
        types = self.output_types if surface == "output" else self.input_types
        return types if kind is None else types[torch.isin(types.cpu(), self.entities[kind])]

    def mask(self, vocab_size: int) -> Tensor:
        """Return the types as (2 + kinds, V) bool, so that processes can be united by a sum."""
        rows = [self.output_types, self.input_types, *self.entities.values()]
        device = self.output_types.device
        mask = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=device)
        for row, types in zip(mask, rows, strict=True):
            row[types.to(device)] = True
        return mask

    @classmethod
    def from_mask(
        cls, mask: Tensor, n_targets: int, is_soft: bool, kinds: Sequence[str] = ()
    ) -> _WordTruth:
        """Return the words that a :meth:`mask` marks."""
        output, inputs, *entities = (row.nonzero().flatten() for row in mask)
        values = {kind: types.cpu() for kind, types in zip(kinds, entities, strict=True)}
        return cls(output, inputs, n_targets, is_soft, values)


class WordsChannel(Channel):
    """The channel of attacks that recover the word types of a batch."""

    # The constants are explained in Channel.
    guesses = WordGuess
    reads = Attack
    leak = WORDS
    metrics = ("precision", "recall", "f1")
    width = len(fields(Counts))
    # What some attacks state: the error of their number of types, the share of batches of which
    # they prove that no type is missing, and how many types they can distinguish, as a multiple of
    # the true number.
    extras = ("type_count_error", "certified", "capacity")
    ranges = dict.fromkeys((*metrics, "certified"), (0.0, 1.0, 0.0))
    reads_updates: ClassVar[bool] = True
    tests_looks: ClassVar[bool] = True
    controlled: ClassVar[bool] = True
    bounds_noise: ClassVar[bool] = True
    finds_entities: ClassVar[bool] = True

    def series(self, attack: Attack, stages: Collection[Stage]) -> list[Series]:
        """Return the series of all words, and those of values by kind."""
        return entity_series(super().series(attack, stages), self.entity_kinds)

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
            rank_zero_info(
                f"{run.watcher}: {max(counts)} tokens have the embedding of another one, which is "
                "not trained: a word counts as found where one of its twins is named"
            )

    # ---- a look -----------------------------------------------------------------------------

    def _holds_nothing(self, look: Look) -> bool:
        """Store the words of the look, and return whether the loss was computed on no token."""
        truth, step = None, look.training_step
        try:
            if step.error is None:
                truth = self._words_in(step.batches)
        except Exception as error:
            step.error = reason(error)
        truth = self._join_processes(truth)
        self._truth = None if step.error else truth  # None if it is not known
        return self._truth is None or self._truth.n_targets == 0

    def _words_in(self, batches: Sequence[TokenBatch]) -> _WordTruth:
        """Return the word types of this process's batches."""
        two_vocabularies = self.run.anatomy.target_rows is not None
        truth = _WordTruth.from_batches(
            batches, one_way=self._one_way, source_only=two_vocabularies
        )
        return truth if self.finder is None else replace(truth, entities=self._entities_in(batches))

    def _entities_in(self, batches: Sequence[TokenBatch]) -> dict[str, Tensor]:
        """Return the types with a letter in the values of the batches, by kind of value."""
        assert self.finder is not None
        types: dict[str, set[int]] = {kind: set() for kind in self.entity_kinds}
        has_answers = self.run.anatomy.target_rows is None  # otherwise labels have other ids
        for ids in (ids for batch in batches for ids in _texts_of(batch, has_answers)):
            for kind, marked in self.finder.marks(ids).items():
                types[kind] |= set(filter(self.finder.has_letter, ids[marked].tolist()))
        return {kind: torch.tensor(sorted(ids), dtype=torch.long) for kind, ids in types.items()}

    def _join_processes(self, truth: _WordTruth | None) -> _WordTruth | None:
        """Return the words of the client: of all processes together if they are one client.

        Every process must call it.
        """
        if self.run.client != "world" or self.run.processes == 1:
            return truth
        shape = 2 + len(self.entity_kinds), self._size
        mask = torch.zeros(shape, dtype=torch.int32, device=self.run.device)
        tokens = torch.zeros(2, dtype=torch.int64, device=self.run.device)
        if truth is not None:
            mask += truth.mask(self._size).to(mask.device)
            tokens += torch.tensor([truth.n_targets, truth.is_soft], device=tokens.device)
        mask = self.run.summed(mask)
        n_targets, soft = self.run.summed(tokens).tolist()
        return _WordTruth.from_mask(mask > 0, n_targets, soft > 0, self.entity_kinds)

    def rates(self, step: Step, plan: Plan, answer: object) -> Mapping[str, float]:
        """Return the rates of a guess against the words of this process so far in a step."""
        assert isinstance(answer, WordGuess)
        return self._rates(answer, self._words_in(step.batches))

    def control_rates(self, plan: Plan, control: Step) -> Mapping[str, float] | Unknown | Waiting:
        """Return the rates of an attack on the words of a control, of all processes of a client."""
        truth = self._join_processes(self._words_in(control.batches))
        answer = guess(plan, control, Stage.LOCAL, self.run)
        if isinstance(answer, Unknown | Waiting):
            return answer
        assert isinstance(answer, WordGuess)
        assert truth is not None  # since this process has one
        return self._rates(answer, truth)

    def _counts(self, answer: WordGuess, types: Tensor) -> Counts:
        """Count a guess against the true types, with one type for all tokens of equal embedding.

        If the layer is trained, its gradient distinguishes such tokens, and each counts by itself.
        The id of padding is no word that a model reads: its row of the embedding has no gradient.
        """
        if answer.surface == "input":
            types = types[types != self._padding]
            answer = replace(answer, types=answer.types[answer.types != self._padding])
        twins = self._twins.get(answer.surface)
        if twins is not None and not _is_trained(self._layers[answer.surface]):
            twins = torch.cat([twins, torch.arange(len(twins), self._size)])
            types, answer = twins[types.cpu()], replace(answer, types=twins[answer.types.cpu()])
        return word_counts(answer, types, self._size)

    def _rates(self, answer: WordGuess, truth: _WordTruth) -> dict[str, float]:
        """Return the rates of a guess against all word types, without their intervals."""
        counts = self._counts(answer, truth.types(answer.surface))
        return {name: rate.value for name, rate in precision_recall_f1(counts).items()}

    def score(self, look: Look, series: Series, answer: object) -> list[float]:
        """Count a guess against the words of the look's batches.

        Raises:
            UnusableObservation: Under noise the F1 is high, and no batch of as many words gives a
                lower one.
        """
        assert isinstance(answer, WordGuess)
        assert self._truth is not None
        types = self._truth.types(answer.surface)
        counts = self._counts(answer, types)
        right, named, used = int(counts.tp), int(counts.tp + counts.fp), int(counts.tp + counts.fn)
        self.uninformed = 2 * used / (used + self._n_types)
        is_certain = right <= named + used - self._n_types  # whichever types these are
        is_noisy = look.training_step.view(series.stage).noise_std != 0.0
        if is_noisy and is_certain and 2 * right > default_limit(0.0) * (named + used):
            raise UnusableObservation(NAMES_ALL.format(named, self._n_types, used))
        if (kind := kind_of(series)) is None:
            look.notes[series] = partial(_reveal, answer, types)
        else:
            counts = self._counts(answer, self._truth.types(answer.surface, kind))
        return [float(count) for count in astuple(counts)]

    # ---- over clients -----------------------------------------------------------------------

    def pooled(self, series: Series, rows: Mapping[int, Sequence[float]]) -> Outcome:
        """Add the counts of all clients, and compute the rates from the sums.

        The p-value is that of a guess that names as many types at random; twins count as one type.
        """
        clients = [Counts(*row) for row in rows.values()]
        pooled = sum(clients, Counts())
        rates, n = precision_recall_f1(pooled), int(pooled.tp + pooled.fn)
        if (kind := kind_of(series)) is not None:
            return Outcome({"recall": rates["recall"]}, n) if n else pending(NO_WORD.format(kind))
        values, p_values = [], []
        for counts in clients:
            values.append({name: rate.value for name, rate in precision_recall_f1(counts).items()})
            right, wrong, missed = int(counts.tp), int(counts.fp), int(counts.fn)
            p_values.append(naming_p_value(right, right + wrong, right + missed, self._n_types))
        return Outcome(
            rates,
            n,
            worst=worst_of(values),
            extra=pooled.means(),
            p_value=lowest_p_value(p_values),
        )


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


def _texts_of(batch: TokenBatch, has_answers: bool) -> Iterator[Tensor]:
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
