"""Training steps written by hand, and channels that read them without a training."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks import Attack
from lightning_fedleak.engine import Options, Run, family_of
from lightning_fedleak.engine.channels import StepChannel
from lightning_fedleak.engine.channels.steps import plan_of, results_of
from lightning_fedleak.engine.outcomes import Result
from lightning_fedleak.engine.run import Look
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import GradientSnapshot, Stage
from lightning_fedleak.model.taps import Step
from lightning_fedleak.model.taps.rounds import plain_call


def make_step(model: nn.Module, ids: Tensor, labels: Tensor | None = None) -> Step:
    """Return the step of a causal model on these texts, with all of its gradients as shared."""
    labels = ids if labels is None else labels
    model.zero_grad()
    model(input_ids=ids, labels=labels).loss.backward()
    anatomy = find_anatomy(model)
    roles = ["head.weight", "embedding.weight", *(name for name, _ in model.named_parameters())]
    parameters = {role: anatomy.parameter(role) for role in roles}
    tensors = {
        r: p.grad.clone() for r, p in parameters.items() if p is not None and p.grad is not None
    }
    call = plain_call(anatomy, TokenBatch(ids, labels, None, "causal"), None)
    gradients = GradientSnapshot(0, Stage.SHARED, tensors, anatomy.tied)
    return Step(calls=[call], gradients={Stage.SHARED: gradients})


def open_channel(attack: Attack, model: nn.Module, **options: Any) -> StepChannel:
    """Return the channel of an attack, opened and calibrated on a model that nobody trains."""
    anatomy = find_anatomy(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    run = Run(anatomy, "rank", frozenset())
    run.optimizers = [torch.optim.SGD(trained, 0.1)]
    channel = family_of(attack)([attack], Options(**options))
    channel.open(run)
    channel.plans = (plan_of(channel, attack),)
    channel.all_series = tuple(channel.series(attack, (Stage.SHARED,)))
    attack.meet(channel.plans[0].facts(run, None, 0))
    attack.prepare(anatomy)
    attack.refresh(anatomy, 0)
    return channel


def look_at(channel: StepChannel, step: Step) -> tuple[Look, Result]:
    """Return a look at a step, and the result of its first series."""
    look = Look(step.number, step, (Stage.SHARED,), (Stage.SHARED,), stepped={0})
    channel.at_stages(look)
    return look, results_of(channel, look)[channel.all_series[0]]
