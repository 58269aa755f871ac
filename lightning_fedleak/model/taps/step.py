"""One training step as a value: what the model was called with, its labels, and its gradients.

Hooks record a :class:`Step` while the user's forward and backward run
(:mod:`~lightning_fedleak.model.taps.step_tap`). A *control* is also a ``Step``: a copy with known,
shuffled tokens, on which attacks are checked. A round of a federation is a ``Step`` with several
local optimizer steps. A *stage* is a place at which its gradients are recorded: ``local`` before a
client's defences, ``shared`` after them, ``aggregate`` over clients. A test can create a step::

    Step(calls=[ModelCall(batch=batch)], gradients={Stage.SHARED: snapshot})
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
    """The rows of dL/dlogits of a call, each for one predicted token, and their positions in texts.

    Attributes:
        rows: The N rows, without those at which a virtual token (prompt tuning) is predicted.
        text: (N,) the index of each row's text in the batch.
        place: (N,) the column of each row in its text (of the decoder, in an encoder-decoder).
        width: The number of columns of a text.
        index: (N,) the index of each row among all ``n_rows`` of the head.
        n_rows: The number of rows of the head, with those of all virtual tokens.
    """

    rows: RowLabels
    text: Tensor
    place: Tensor
    width: int
    index: Tensor
    n_rows: int

    def grid(self, texts: int, values: Tensor, fill: int, shift: int = 0) -> Tensor:
        """Return (texts, width + shift) the rows' values, ``shift`` columns after their rows.

        Positions without a row have the value ``fill``.
        """
        shape, place = (texts, self.width + shift), self.place + shift
        grid = torch.full(shape, fill, dtype=values.dtype, device=values.device)
        grid[self.text, place] = values
        return grid


@dataclass(eq=False)
class ModelCall:
    """One call of the model in a step, as the user made it, and its ground truth.

    Attributes:
        module: The called module: the model, with or without its PEFT wrapper, or its backbone;
            None if the embedding was called outside of these.
        arguments: The arguments of the call, by name.
        ids: (B, L) the first ids that arrived at the input embedding; None if there were none.
        heads: The calls of the head within this call.
        training: The ``id`` of each module that was in train mode.
        autocast: The dtype of autocast; None without autocast.
        text_logits: Whether the model's logits have one row per text.
        reached: (B, L) bool, the positions where the output of the embedding, or of a causal
            model's first block, got a gradient.
        states: (B, L, d) the last hidden states; None if the head was called, or without a graph.
        gradient: (B, L, d) the gradient of ``states``; None before the backward.
        accumulates: Whether its backward pass adds to the gradient of a parameter, unlike that of
            ``autograd.grad``; None before the backward.
        is_trained: Whether a state that it returned got a gradient, in a model without a head.
        random: The states of torch's generators of the CPU and the model's device at the beginning
            of the call.
        batch: The ids, labels and mask of the call; None until they are read.
        placed: The rows of dL/dlogits, with the size and the sign of each label's gradient; None if
            neither the recorded gradients nor the batch show them.
        shapes: In a control, (3, N) the shapes of these rows, see ``RowLabels.shapes``; 0 for a row
            without a label. None in the step itself.
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
    accumulates: bool | None = None
    is_trained: bool = False
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
        """Return whether the call can have a gradient when it is repeated."""
        return self.shapes is None or bool(self.shapes[0].any())

    @property
    def texts(self) -> TokenBatch:
        """Return the ids, labels and mask of the call, which must have been read."""
        assert self.batch is not None
        return self.batch

    @property
    def known_rows(self) -> PlacedRows:
        """Return the rows of dL/dlogits.

        Raises:
            UnusableObservation: Neither the step's graph nor its batch shows them.
        """
        if self.placed is None:
            raise UnusableObservation("which labels have which gradient is not known")
        return self.placed

    def with_live_labels(self) -> ModelCall:
        """Return the call of a control with only those labels whose gradient is not 0."""
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
        is_live = grid[:, : labels.shape[1]]
        batch = replace(batch, labels=labels.masked_fill(~is_live, IGNORE_INDEX))
        if batch.live is not None:
            batch = replace(batch, live=grid[:, shift:])
        return replace(self, batch=batch)

    def without_dead_texts(self) -> ModelCall:
        """Return the call of a control without the texts after its last label (:meth:`Step.part`).

        A repeated call then takes only the time of the texts that it needs. The call stays as it is
        if texts have different numbers of rows, or if it is not known which arguments are theirs.
        """
        assert self.shapes is not None
        placed, texts = self.known_rows, len(self.texts.input_ids)
        # The number of texts up to the last one with a label.
        n = int(placed.text[self.shapes[0] != 0].max()) + 1 if self.has_gradient else texts
        labels, width = self.texts.labels, max(1, placed.n_rows // texts)
        is_plain = labels is not None and labels.dim() == 2 and self.texts.kind != "seq2seq"
        is_plain &= len(self.read_heads) <= 1 and torch.equal(placed.index // width, placed.text)
        values = [v for v in self.arguments.values() if not isinstance(v, _SETTINGS)]
        by_text = all(isinstance(v, Tensor) and _is_by_text(v, self.ids) for v in values)
        if n == texts or not (is_plain and by_text):
            return self
        first_texts = partial(_first_texts, texts=texts, n=n)
        ids, is_first = first_texts(self.ids), placed.text < n
        arguments = {name: first_texts(value) for name, value in self.arguments.items()}
        arguments |= {name: ids for name, value in self.arguments.items() if value is self.ids}
        fields = {name: first_texts(value) for name, value in vars(self.texts).items()}
        rows = RowLabels(*(column[is_first] for column in placed.rows))
        indices = {name: getattr(placed, name)[is_first] for name in ("text", "place", "index")}
        placed = replace(placed, rows=rows, n_rows=n * width, **indices)
        batch, shapes = replace(self.texts, **fields), self.shapes[:, is_first]
        new = {"ids": ids, "arguments": arguments, "reached": first_texts(self.reached)}
        return replace(self, batch=batch, placed=placed, shapes=shapes, **new)


def _is_by_text(values: Tensor, ids: Tensor | None) -> bool:
    """Return whether values are those of each token of ids (B, L), or the same for all texts."""
    is_shared = values.dim() > 0 and len(values) == 1
    return is_shared or (ids is not None and values.shape[:2] == ids.shape)


def _first_texts(value: Any, texts: int, n: int) -> Any:
    """Return the first n of the texts of a tensor; any other value stays as it is."""
    return value[:n] if isinstance(value, Tensor) and len(value) == texts else value


_SETTINGS = (type(None), bool, int, float, str)
"""Types of a call's arguments that belong to no text."""


@dataclass
class LocalRound:
    """The start and the settings of a round of local steps, from which it can be repeated.

    Attributes:
        weights: The trained parameters before the first step, by the ``id`` of each.
        clients: The number of clients. Their steps follow one another here; each client begins with
            the same weights, and the mean of their updates is shared.
        optimizer: The optimizer; None before the first step.
        rates: For each step, the learning rate of each group of the optimizer.
        n_calls: For each step, the number of calls of the model up to its end.
        why_not: The reason why the round cannot be repeated; None if it can.
    """

    weights: Mapping[int, Tensor]
    clients: int = 1
    optimizer: Optimizer | None = None
    rates: list[list[float]] = field(default_factory=list)
    n_calls: list[int] = field(default_factory=list)
    why_not: str | None = None

    @classmethod
    def begin(cls, parameters: Sequence[nn.Parameter]) -> LocalRound:
        """Return a round that begins now.

        Args:
            parameters: The parameters of the model. They are not copied, so the caller must not
                write to them in place until the round has been repeated.
        """
        if any(hasattr(p, "full_tensor") for p in parameters):
            return cls({}, why_not="the rounds of a sharded model are not repeated")
        return cls({id(p): p.detach() for p in parameters if p.requires_grad})

    def add_step(self, optimizer: Optimizer, n_calls: int, rate: float | None = None) -> None:
        """Record a step of an optimizer.

        Args:
            optimizer: The optimizer that steps.
            n_calls: The number of calls of the model in the round so far.
            rate: The learning rate of the step; None for the optimizer's current rates.
        """
        if self.optimizer not in (None, optimizer):
            self.why_not = "several optimizers step in a round, which is therefore not repeated"
        self.optimizer = optimizer
        rates = (group["lr"] if rate is None else rate for group in optimizer.param_groups)
        self.rates.append([float(group_rate) for group_rate in rates])
        self.n_calls.append(n_calls)

    def fresh_optimizer(self, leaves: Mapping[int, nn.Parameter]) -> Optimizer:
        """Return an optimizer of the same class and settings for other leaves, without a state.

        Raises:
            UnusableObservation: The optimizer is not one of torch.optim, so that its groups may not
                hold all of its settings.
        """
        assert self.optimizer is not None
        name = type(self.optimizer).__name__
        if type(self.optimizer) is not getattr(torch.optim, name, None):
            raise UnusableObservation(f"{name}, no class of torch.optim, is not repeated")
        groups = [
            {**group, "params": [leaves[id(p)] for p in group["params"] if id(p) in leaves]}
            for group in self.optimizer.param_groups
        ]
        factory: Callable[[Any], Optimizer] = getattr(torch.optim, name)
        return factory(groups)

    def rates_of(self, keys: Collection[int]) -> list[float]:
        """Return the learning rate of some parameters, given by their ``id``, at each step.

        Raises:
            UnusableObservation: Their rates differ in a step, or are 0 in all steps.
        """
        assert self.optimizer is not None
        groups = self.optimizer.param_groups
        indices = [i for i, g in enumerate(groups) if any(id(p) in keys for p in g["params"])]
        rates_by_step = [{rates[i] for i in indices} for rates in self.rates]
        learning_rates = [rates.pop() for rates in rates_by_step if len(rates) == 1]
        if len(learning_rates) < len(rates_by_step) or not sum(learning_rates) > 0:
            raise UnusableObservation("observed parameters have several learning rates, or only 0")
        return learning_rates


Gradients = Callable[[], GradientSnapshot]
"""A function that returns the gradients at the time of its first call."""


@dataclass(eq=False)
class Step:
    """One training step (also while it runs), a control, or a round of local steps.

    Attributes:
        number: The index of the optimizer step, from 0, or of the round.
        calls: The calls of the model that got a gradient, with their ground truth.
        gradients: For each stage the snapshot, a function that takes it, or the error it raised.
        batch: The current micro-batch as it was read before any defence; None if its form is
            unknown. Only its backward shows whether it is trained on.
        batch_error: The reason why the current micro-batch could not be read, or None.
        error: The reason why the words of the step are unknown; None if they are known.
        n_ended: The number of calls whose micro-batches have ended.
        placeholders: Ids that stand for an image or a sound and are no words.
        round: The data from which a round is repeated; None for a single step.
        undefended: The local gradient that attacks read, if defences or a reduction change it
            before the optimizer steps; None if nothing changes it, or if it is not recorded.
        unexplained: The share of ``undefended`` that the repeated step does not explain; NaN if the
            step was not repeated.
        noise_std: The standard deviation of the noise that defences have added to each number of
            this client's update so far; NaN if a defence does not declare it.
        sizes: The norm of each gradient before the first defence that adds noise to it, by the
            ``id`` of its parameter; empty without such a defence.
        example_norm: The largest norm of what one text adds to this client's update, to which a
            defence clips it; infinite if that is not known, NaN if no defence clips texts.
        compression: The compression of this client's update so far, see ``GradientSnapshot``.
        written: The calls on the tokens that a defence wrote in place of the batch's, with their
            labels; empty if none replaces tokens.
        acted: Copies of the defences on gradients that add no noise, from before they acted, each
            with the parameters and the context that it got.
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
    sizes: dict[int, float] = field(default_factory=dict)
    example_norm: float = math.nan
    compression: str = ""
    written: list[ModelCall] = field(default_factory=list)
    acted: list[tuple[Any, Sequence[nn.Parameter], Any]] = field(default_factory=list)

    @property
    def batches(self) -> list[TokenBatch]:
        """Return the texts of the step so far, with placeholders masked."""
        batches = [call.texts for call in self.calls]
        if not self.placeholders:
            return batches
        return [_without_placeholders(batch, self.placeholders) for batch in batches]

    def view(self, stage: Stage) -> GradientSnapshot:
        """Return the gradients at a stage; they are taken at the first call.

        Raises:
            KeyError: The step has not reached the stage.
            Exception: The error that was raised when they were taken.
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
        """Return a control with the first ``n_labels`` labels of this one, and only their texts."""
        calls = []
        for call in self.calls:
            assert call.shapes is not None
            rows = call.shapes[0].nonzero()[:, 0][:n_labels]
            n_labels -= len(rows)
            shapes = torch.zeros_like(call.shapes).index_copy(1, rows, call.shapes[:, rows])
            calls.append(replace(call, shapes=shapes).with_live_labels().without_dead_texts())
        return replace(self, calls=calls, gradients={})


def _without_placeholders(batch: TokenBatch, placeholders: Collection[int]) -> TokenBatch:
    """Return the batch with placeholders of images and sounds masked like padding."""
    ids, mask, live = batch.input_ids, batch.attention_mask, batch.live
    places = torch.isin(ids, ids.new_tensor(sorted(placeholders)))
    mask = (torch.ones_like(ids) if mask is None else mask).masked_fill(places, 0)
    live = None if live is None else live & ~places.to(live.device)
    reached = None if batch.reached is None else batch.reached & ~places.to(batch.reached.device)
    return replace(batch, attention_mask=mask, live=live, reached=reached)
