"""Repeat a round of local steps, on its own tokens or on the shuffled tokens of a control.

In a round of federated learning (FedAvg) each client takes several local optimizer steps and shares
the change of its weights. A *control* is a copy of a step or round whose tokens are known, because
they are shuffled over their positions: attacks that fail on it prove nothing about a defence. A new
optimizer repeats each client's steps from the weights at the start of the round.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_fedleak.model import model_runs
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.model.snapshots import Stage, UnusableObservation, UpdateSnapshot
from lightning_fedleak.model.taps.control import fresh_leaves, run_backward
from lightning_fedleak.model.taps.row_labels import RowLabels
from lightning_fedleak.model.taps.step import ModelCall, PlacedRows, Step


def control_update(
    anatomy: Anatomy,
    step: Step,
    roles: Sequence[str],
    *,
    scale: float = 1.0,
    clip_value: float | None = None,
) -> UpdateSnapshot:
    """Repeat a round from its first weights with an optimizer of its class; return its update.

    Args:
        anatomy: The parts of the model.
        step: The round itself, or a control, with the calls of all local steps.
        roles: The roles of the parameters whose updates are returned.
        scale: The loss scale that the recorded gradients contain; it is divided out.
        clip_value: The absolute value to which entries of each gradient are clipped, or None.

    Raises:
        UnusableObservation: The round cannot be repeated.
    """
    local = step.round
    assert local is not None
    trained = {id(p) for p in anatomy.root.parameters() if p.requires_grad}
    trains_more = not trained <= local.weights.keys()
    if local.why_not is not None or local.optimizer is None or trains_more:
        reason = "no step of the round was observed, or it began to train further parameters"
        raise UnusableObservation(local.why_not or reason)
    parameters = {role: anatomy.parameter(role) for role in roles}
    ids_by_role = {r: id(p) for r, p in parameters.items() if p is not None and id(p) in trained}
    learning_rate = sum(local.rates_of({*ids_by_role.values()})) / len(local.rates)
    n_steps, sums = len(local.rates) // local.clients, dict[str, Tensor]()
    for client in range(local.clients):
        steps = range(client * n_steps, (client + 1) * n_steps)
        with _steps_again(anatomy, step, steps, scale, clip_value) as leaves:
            for role, key in ids_by_role.items():
                client_update = (local.weights[key] - leaves[key].detach()) / learning_rate
                sums[role] = sums[role] + client_update if role in sums else client_update
    return UpdateSnapshot(
        step.number,
        Stage.SHARED,
        {role: client_update / local.clients for role, client_update in sums.items()},
        anatomy.tied,
        local_steps=n_steps,
        learning_rate=learning_rate,
    )


@contextmanager
def _steps_again(
    anatomy: Anatomy, step: Step, numbers: Iterable[int], scale: float, clip_value: float | None
) -> Iterator[Mapping[int, nn.Parameter]]:
    """Repeat local steps of a round, and yield the trained parameters after them by ``id``.

    ``numbers`` are the indices of the steps among those of all clients, in order.
    """
    local = step.round
    assert local is not None
    with (
        model_runs.undisturbed(anatomy) as model,
        torch.enable_grad(),
        fresh_leaves(anatomy.root, local.weights) as leaves,
        model_runs.only_needed_hooks(anatomy.root),
    ):
        optimizer = local.fresh_optimizer(leaves)
        for number in numbers:
            start = local.n_calls[number - 1] if number else 0
            for call in step.calls[start : local.n_calls[number]]:
                if call.has_gradient:
                    run_backward(anatomy, model, call, scale=scale)
            if clip_value is not None:
                nn.utils.clip_grad_value_(leaves.values(), clip_value)
            for group, rate in zip(optimizer.param_groups, local.rates[number], strict=True):
                group["lr"] = rate
            # The unwrapped step, without hooks of the user on the steps of all optimizers.
            step_alone = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
            step_alone(optimizer)
            # Zeros and not None, so that a step without a gradient counts too.
            optimizer.zero_grad(set_to_none=False)
        yield leaves


def plain_call(
    anatomy: Anatomy,
    batch: TokenBatch,
    autocast: torch.dtype | None,
    random: tuple[Tensor, ...] = (),
    *,
    trained_elsewhere: bool = False,
) -> ModelCall:
    """Return the call that a plain cross-entropy makes on a batch, if no graph was read.

    Args:
        anatomy: The parts of the model.
        batch: The ids and labels of the call.
        autocast: The dtype of autocast; None without autocast.
        random: The random states at the beginning of the step; empty if they are unknown.
        trained_elsewhere: Whether another copy of the model took the step, all in train mode.
    """
    arguments: dict[str, object] = {"input_ids": batch.input_ids}
    for name in ("attention_mask", "position_ids"):
        if (value := getattr(batch, name)) is not None and model_runs.accepts(anatomy.model, name):
            arguments[name] = value
    modules = anatomy.root.modules()
    training = frozenset(id(m) for m in modules if m.training or trained_elsewhere)
    call = ModelCall(
        anatomy.model,
        arguments,
        batch.input_ids,
        training=training,
        autocast=autocast,
        random=random,
        batch=batch,
    )
    if batch.kind == "classifier" or (batch.labels is None and batch.kind != "causal"):
        return call
    labels, shift = model_runs.labels_of(batch), int(batch.kind == "causal")
    targets = functional.pad(labels, (0, shift), value=IGNORE_INDEX)[:, shift:].flatten().long()
    has_label = targets != IGNORE_INDEX
    # The fields of RowLabels for the mean cross-entropy over labels; ``no``: a flag no row has.
    sizes = has_label / has_label.sum().clamp(min=1)
    no, index = torch.zeros_like(has_label), torch.arange(len(targets), device=targets.device)
    no_ids = torch.zeros_like(targets)
    values = sizes.new_zeros(len(sizes), 2)
    shape = sizes, sizes, torch.zeros_like(sizes), no
    rows = RowLabels(targets, *shape, has_label, no, no, no_ids, no_ids, no, values)
    width = labels.shape[1]
    placed = PlacedRows(rows, index // width, index % width, width, index, len(index))
    return replace(call, placed=placed)
