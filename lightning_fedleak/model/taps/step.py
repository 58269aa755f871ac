"""One training step as a value: what the model was called with, its labels, and its gradients.

A :class:`Step` is made while the user's forward and backward run
(:mod:`~lightning_fedleak.model.taps.step_tap`). A control is another ``Step``, whose words are
known. A round of a federation is another one, of several local steps. A test writes one by hand::

    Step(calls=[ModelCall(batch=batch)], gradients={Stage.SHARED: snapshot})
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from lightning_fedleak.model.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.model.snapshots import GradientSnapshot, Stage, UnusableObservation
from lightning_fedleak.model.taps.row_labels import HeadCall, RowLabels


@dataclass(frozen=True)
class PlacedRows:
    """Rows of a call's logits, and where in its texts they are.

    Attributes:
        rows: N rows.
        text: (N,) the number of each row's text.
        place: (N,) the column of each row in its text (of the decoder, in an encoder-decoder).
        width: columns of a text.
        index: (N,) the number of each row among all of the head, of which virtual tokens are left
            out.
        n_rows: number of all rows of the head.
    """

    rows: RowLabels
    text: Tensor
    place: Tensor
    width: int
    index: Tensor
    n_rows: int

    def grid(self, texts: int, values: Tensor, fill: int, shift: int = 0) -> Tensor:
        """Return (texts, width + shift) the values of the rows, each ``shift`` columns later."""
        shape, place = (texts, self.width + shift), self.place + shift
        grid = torch.full(shape, fill, dtype=values.dtype, device=values.device)
        grid[self.text, place] = values
        return grid


@dataclass(eq=False)
class ModelCall:
    """One call of the model in a step, as the user made it, and the truth of it.

    Attributes:
        module: what was called: the model, or the part of it that a step calls alone; None where
            the embedding was, outside of any of these.
        arguments: of the call, by name.
        ids: (B, L) ids that arrived at the input embedding first; None where none did.
        heads: the calls of the head within.
        training: the modules of the model that were in train mode.
        autocast: dtype that autocast computed in; None without.
        text_logits: the model's logits have a row for each text.
        reached: (B, L) bool, where the embedding, or a causal model's first block, got a gradient.
        states: (B, L, d) last hidden states; None where the head is called, or none have a graph.
        gradient: (B, L, d) of these; None before the backward.
        random: the states of torch's generators at its begin, on the CPU and the model's device.
        batch: its ids, labels and mask, once they are read.
        placed: the rows of its logits, with the size and the sign of each label's gradient; None
            where neither the graph nor the batch shows them.
        shapes: of a control, (3, N) the shapes of these rows, see ``RowLabels.shapes``; 0 where
            there is no label. None in the step itself.
    """

    module: nn.Module | None = None
    arguments: Mapping[str, object] = field(default_factory=dict)
    ids: Tensor | None = None
    heads: list[HeadCall] = field(default_factory=list)
    training: frozenset[int] = frozenset()
    autocast: torch.dtype | None = None
    text_logits: bool = False
    reached: Tensor | None = None
    states: Tensor | None = None
    gradient: Tensor | None = None
    random: tuple[Tensor, ...] = ()
    batch: TokenBatch | None = None
    placed: PlacedRows | None = None
    shapes: Tensor | None = None

    @property
    def read_heads(self) -> list[HeadCall]:
        """Return the calls of the head that got a gradient."""
        return [head for head in self.heads if head.rows is not None]

    @property
    def has_gradient(self) -> bool:
        """Return whether the call, made again, may have a gradient."""
        return self.shapes is None or bool(self.shapes[0].any())

    @property
    def texts(self) -> TokenBatch:
        """Return its ids, labels and mask, once they are read."""
        assert self.batch is not None
        return self.batch

    @property
    def known_rows(self) -> PlacedRows:
        """Return the rows of its logits.

        Raises:
            UnusableObservation: neither the step's graph nor its batch shows them.
        """
        if self.placed is None:
            raise UnusableObservation(
                "neither the step's graph nor its batch shows which labels have which gradient"
            )
        return self.placed

    def with_live_labels(self) -> ModelCall:
        """Return the call of a control with those labels alone whose gradient is not 0."""
        assert self.shapes is not None
        batch, placed = self.texts, self.known_rows
        labels, live = batch.labels, self.shapes[0] != 0
        assert labels is not None
        if labels.dim() == 1:  # classes of texts
            texts = torch.zeros_like(labels).index_add(0, placed.text, live.to(labels.dtype))
            batch = replace(batch, labels=labels.masked_fill(texts == 0, IGNORE_INDEX))
            return replace(self, batch=batch)
        shift = int(batch.kind == "causal")
        grid = placed.grid(len(labels), live, 0, shift)
        grid = functional.pad(grid, (0, labels.shape[1] - grid.shape[1] + shift))
        kept = grid[:, : labels.shape[1]]
        batch = replace(batch, labels=labels.masked_fill(~kept, IGNORE_INDEX))
        if batch.live is not None:
            batch = replace(batch, live=grid[:, shift:])
        return replace(self, batch=batch)


@dataclass
class LocalRound:
    """What a round of local steps is made again from.

    Attributes:
        weights: of the trained parameters before its first step, by the ``id`` of each.
        clients: whose steps follow one another here; each begins with the same weights, and their
            mean is shared.
        optimizer: of its steps; None before the first one.
        rates: of the optimizer's groups at each step.
        n_calls: calls of the model up to each step's end.
        why_not: why it cannot be made again; None where it can.
    """

    weights: Mapping[int, Tensor]
    clients: int = 1
    optimizer: Optimizer | None = None
    rates: list[list[float]] = field(default_factory=list)
    n_calls: list[int] = field(default_factory=list)
    why_not: str | None = None

    @classmethod
    def begin(cls, parameters: Sequence[nn.Parameter]) -> LocalRound:
        """Return the round that begins now.

        Args:
            parameters: of the model, which nothing trains until the round is made again.
        """
        if any(hasattr(p, "full_tensor") for p in parameters):
            return cls({}, why_not="the rounds of a sharded model are not made again")
        return cls({id(p): p.detach() for p in parameters if p.requires_grad})

    def add_step(self, optimizer: Optimizer, n_calls: int, rate: float | None = None) -> None:
        """Note a step that an optimizer takes after so many calls of the model.

        Args:
            optimizer: that steps.
            n_calls: calls of the model in the round so far.
            rate: of the step; None: those that the optimizer has now.
        """
        if self.optimizer not in (None, optimizer):
            self.why_not = "several optimizers step in a round, which is not made again"
        self.optimizer = optimizer
        rates = (group["lr"] if rate is None else rate for group in optimizer.param_groups)
        self.rates.append([float(group_rate) for group_rate in rates])
        self.n_calls.append(n_calls)

    def fresh_optimizer(self, leaves: Mapping[int, nn.Parameter]) -> Optimizer:
        """Return an optimizer of the same class and settings without a state, of other leaves.

        Raises:
            UnusableObservation: it is no class of torch.optim, whose groups hold all settings.
        """
        assert self.optimizer is not None
        name = type(self.optimizer).__name__
        if type(self.optimizer) is not getattr(torch.optim, name, None):
            raise UnusableObservation(
                f"{name} is no class of torch.optim, and its steps are not made again"
            )
        groups = [
            {**group, "params": [leaves[id(p)] for p in group["params"] if id(p) in leaves]}
            for group in self.optimizer.param_groups
        ]
        made: Callable[[Any], Optimizer] = getattr(torch.optim, name)
        return made(groups)

    def rates_of(self, keys: Collection[int]) -> list[float]:
        """Return the rate of each step for some parameters, by their ``id``.

        Raises:
            UnusableObservation: they have different rates, or 0 in all steps.
        """
        assert self.optimizer is not None
        groups = self.optimizer.param_groups
        indices = [i for i, g in enumerate(groups) if any(id(p) in keys for p in g["params"])]
        rates_by_step = [{rates[i] for i in indices} for rates in self.rates]
        learning_rates = [rates.pop() for rates in rates_by_step if len(rates) == 1]
        if len(learning_rates) < len(rates_by_step) or not sum(learning_rates) > 0:
            raise UnusableObservation("what is read is trained at several learning rates, or at 0")
        return learning_rates


Gradients = Callable[[], GradientSnapshot]
"""Returns the gradients as they are at the moment of its first call."""


@dataclass(eq=False)
class Step:
    """One training step, or what is known of it so far; a control; a round.

    Attributes:
        number: the optimizer step, counted from 0, or the round.
        calls: the calls of the model that got a gradient, with their truth.
        gradients: by stage: the snapshot, the function that takes it, or the error of this.
        batch: the micro-batch at work as it was read before any defence, which may yet turn out to
            train nothing; None where its form is not known.
        batch_error: why the micro-batch at work could not be read; None where it was.
        error: why the words of the step are not known; None where they are.
        n_ended: the number of the calls whose micro-batches have ended.
        placeholders: ids that keep the place of an image or a sound, and are no words.
        round: what a round is made again from; None where it is one step.
        undefended: the local gradient that attacks read, where defences or a reduction change it
            before the optimizer steps; None where nothing does, or it is not seen.
        unexplained: share of it that the step made again does not explain; NaN where it was not
            made again.
        noise_std: of what defences have added to each number of this client's update so far; NaN
            where one of them did not say.
        compression: what compressed this client's update so far, see ``GradientSnapshot``.
        is_part: whether it is a part of a control, see :meth:`part`.
    """

    number: int = 0
    calls: list[ModelCall] = field(default_factory=list)
    gradients: dict[Stage, GradientSnapshot | Gradients | Exception] = field(default_factory=dict)
    batch: TokenBatch | None = None
    batch_error: str | None = None
    error: str | None = None
    n_ended: int = 0
    placeholders: frozenset[int] = frozenset()
    round: LocalRound | None = None
    undefended: GradientSnapshot | None = None
    unexplained: float = math.nan
    noise_std: float = 0.0
    compression: str = ""
    is_part: bool = False

    @property
    def batches(self) -> list[TokenBatch]:
        """Return the texts of the step so far, without what is no word."""
        batches = [call.texts for call in self.calls]
        if not self.placeholders:
            return batches
        return [_without_placeholders(batch, self.placeholders) for batch in batches]

    def view(self, stage: Stage) -> GradientSnapshot:
        """Return the gradients at a stage, which are taken once.

        Raises:
            KeyError: the step has not reached the stage.
            Exception: they could not be taken.
        """
        gradients = take = self.gradients[stage]
        if not isinstance(take, GradientSnapshot | Exception):
            try:
                gradients = take()
            except Exception as error:
                gradients = error
            same = [other for other, value in self.gradients.items() if value is take]
            self.gradients |= dict.fromkeys(same, gradients)
        if isinstance(gradients, Exception):
            raise gradients
        assert isinstance(gradients, GradientSnapshot)
        return gradients

    def part(self, n_labels: int) -> Step:
        """Return a control with its first ``n_labels`` labels alone."""
        calls = []
        for call in self.calls:
            assert call.shapes is not None
            rows = call.shapes[0].nonzero()[:, 0][:n_labels]
            n_labels -= len(rows)
            shapes = torch.zeros_like(call.shapes).index_copy(1, rows, call.shapes[:, rows])
            calls.append(replace(call, shapes=shapes).with_live_labels())
        return replace(self, calls=calls, gradients={}, is_part=True)


def _without_placeholders(batch: TokenBatch, held: Collection[int]) -> TokenBatch:
    """Return a batch in which what keeps a place for an image or a sound is no word."""
    ids, mask, live = batch.input_ids, batch.attention_mask, batch.live
    places = torch.isin(ids, ids.new_tensor(sorted(held)))
    mask = (torch.ones_like(ids) if mask is None else mask).masked_fill(places, 0)
    live = None if live is None else live & ~places.to(live.device)
    reached = None if batch.reached is None else batch.reached & ~places.to(batch.reached.device)
    return replace(batch, attention_mask=mask, live=live, reached=reached)
