"""A round of local steps that is made again on known words, for its control."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from lightning_fedleak.model import model_runs
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.model.snapshots import Stage, UnusableObservation, UpdateSnapshot
from lightning_fedleak.model.taps.control import Draw, fresh_leaves, run_backward
from lightning_fedleak.model.taps.graph import GraphCall, PlacedRows, ReadCall
from lightning_fedleak.model.taps.row_labels import RowLabels


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
        self.rates.append([float(one) for one in rates])
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
        places = [i for i, g in enumerate(groups) if any(id(p) in keys for p in g["params"])]
        rates_by_step = [{rates[i] for i in places} for rates in self.rates]
        learning_rates = [rates.pop() for rates in rates_by_step if len(rates) == 1]
        if len(learning_rates) < len(rates_by_step) or not sum(learning_rates) > 0:
            raise UnusableObservation("what is read is trained at several learning rates, or at 0")
        return learning_rates


def control_update(
    anatomy: Anatomy,
    draw: Draw,
    roles: Sequence[str],
    local: LocalRound,
    *,
    step: int,
    scale: float = 1.0,
    clip_value: float | None = None,
) -> UpdateSnapshot:
    """Return the update of a round on the known words, with the round's weights and optimizer.

    Args:
        anatomy: of the model.
        draw: the known words, of the calls of all steps.
        roles: whose updates are returned.
        local: the round.
        step: optimizer step of the look.
        scale: loss scale that is in the sizes; divided out.
        clip_value: size that entries of each step's gradient are cut to; None: they are not.

    Raises:
        UnusableObservation: the round cannot be made again.
    """
    trained = {id(p) for p in anatomy.root.parameters() if p.requires_grad}
    is_more = not trained <= local.weights.keys()
    if local.why_not is not None or local.optimizer is None or is_more:
        unseen = "no step of the round was seen, or more is trained at its end than at its begin"
        raise UnusableObservation(local.why_not or unseen)
    parameters = {role: anatomy.parameter(role) for role in roles}
    wanted = {r: id(p) for r, p in parameters.items() if p is not None and id(p) in trained}
    learning_rate = sum(local.rates_of({*wanted.values()})) / len(local.rates)
    n_steps, sums, first = len(local.rates) // local.clients, dict[str, Tensor](), 0
    for client in range(local.clients):
        steps = slice(client * n_steps, (client + 1) * n_steps)
        with (
            model_runs.undisturbed(anatomy) as model,
            torch.enable_grad(),
            fresh_leaves(anatomy.root, local.weights) as leaves,
            model_runs.only_needed_hooks(anatomy.root),
        ):
            optimizer = local.fresh_optimizer(leaves)
            for rates, last in zip(local.rates[steps], local.n_calls[steps], strict=True):
                calls = zip(draw.reads[first:last], draw.shapes[first:last], strict=True)
                for read, shapes in calls:
                    if draw.trains(shapes):
                        again = anatomy, model, read, shapes
                        run_backward(*again, scale=scale, is_step=draw.is_step)
                first = last
                if clip_value is not None:
                    nn.utils.clip_grad_value_(leaves.values(), clip_value)
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate
                # Without the hooks that a user has put on the steps of all optimizers.
                step_alone = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
                step_alone(optimizer)
                optimizer.zero_grad(set_to_none=False)  # a step without words still is a step
            for role, key in wanted.items():
                change = (local.weights[key] - leaves[key].detach()) / learning_rate
                sums[role] = sums[role] + change if role in sums else change
    return UpdateSnapshot(
        step,
        Stage.SHARED,
        {role: change / local.clients for role, change in sums.items()},
        anatomy.tied,
        local_steps=n_steps,
        learning_rate=learning_rate,
    )


def plain_call(
    anatomy: Anatomy,
    batch: TokenBatch,
    autocast: torch.dtype | None,
    random: tuple[Tensor, ...] = (),
    *,
    trained_elsewhere: bool = False,
) -> ReadCall:
    """Return the call on a batch whose step's graph was not read, as a plain loss would have it.

    Args:
        anatomy: of the model.
        batch: its ids and labels.
        autocast: dtype that the step computes in; None without.
        random: the random states that the step began with; empty where they are not known.
        trained_elsewhere: the step was another model's, all of whose modules were in training mode.
    """
    arguments: dict[str, object] = {"input_ids": batch.input_ids}
    for name in ("attention_mask", "position_ids"):
        if (value := getattr(batch, name)) is not None and model_runs.accepts(anatomy.model, name):
            arguments[name] = value
    modules = anatomy.root.modules()
    training = frozenset(id(m) for m in modules if m.training or trained_elsewhere)
    call = GraphCall(
        anatomy.model, arguments, batch.input_ids, [], training, autocast, random=random
    )
    if batch.kind == "classifier" or (batch.labels is None and batch.kind != "causal"):
        return ReadCall(call, None, batch)
    labels, shift = model_runs.labels_of(batch), int(batch.kind == "causal")
    targets = functional.pad(labels, (0, shift), value=IGNORE_INDEX)[:, shift:].flatten().long()
    counted = targets != IGNORE_INDEX
    sizes = counted / counted.sum().clamp(min=1)
    none, index = torch.zeros_like(counted), torch.arange(len(targets), device=targets.device)
    nothing = torch.zeros_like(targets)
    values = sizes.new_zeros(len(sizes), 2)
    shape = sizes, sizes, torch.zeros_like(sizes), none
    rows = RowLabels(targets, *shape, counted, none, none, nothing, nothing, none, values)
    width = labels.shape[1]
    placed = PlacedRows(rows, index // width, index % width, width, index, len(index))
    return ReadCall(call, placed, batch)
