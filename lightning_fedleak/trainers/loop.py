"""The user's training loop, in the form in which the engine reads it.

The engine runs attacks at some optimizer steps, to measure what the updates leak. :class:`Loop`
holds the loop's model, optimizers and progress. :class:`LoopRun` makes a
:class:`~lightning_fedleak.engine.Run` from it, from which the engine and the attacks read facts.
A *gate* is a threshold on a measured metric, which may stop the run.
The functions below them refuse models and optimizers whose gradients cannot be read, and find out
whether the optimizers have gradients for a step.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from lightning_utilities.core import rank_zero
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_fedleak import engine as core
from lightning_fedleak.attacks import Capability
from lightning_fedleak.defenses.host import rank_and_world_size
from lightning_fedleak.defenses.release import UpdateRelease, release_of
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.model_runs import is_observed
from lightning_fedleak.model.model_state import Hook
from lightning_fedleak.model.taps import real_optimizer
from lightning_fedleak.model.whole_models import explain_shards
from lightning_fedleak.trainers.zero import ZeROStep

# Parts of the names of optimizers that step during the backward pass, and keep no gradient.
_STEPS_IN_BACKWARD = ("lomo", "layerwise")


@dataclass
class Loop:
    """A loop's model, optimizers and progress.

    Attributes:
        model: The trained model.
        optimizers: The optimizers, unwrapped from Accelerate. A DP optimizer of another library
            stays wrapped, see ``inner_optimizers``.
        loader: The loader of the training data; None if it is unknown.
        facts: What else is known of the run: attributes of
            :class:`~lightning_fedleak.engine.Run` by name.
        utility: The user's metrics by name.
        steps: The number of optimizer steps so far, skipped ones included.
        batches: The number of batches so far.
        announces_gradients: Whether the integration calls ``stage_reached`` before each step, as
            that with transformers' Trainer does.
        stage_reached: The function that it calls when ``p.grad`` holds the gradient of the next
            step. The run sets it; None if hooks on the optimizers call the function.
        zero: The only optimizer, if DeepSpeed's engine trains the model; None otherwise.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    loader: Any = None
    facts: Mapping[str, object] = field(default_factory=dict)
    utility: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    batches: int = 0
    announces_gradients: bool = False
    stage_reached: core.StageReached | None = None
    zero: ZeROStep | None = None

    @property
    def inner_optimizers(self) -> list[Optimizer]:
        """Return the torch optimizers that step, unwrapped from DP optimizers."""
        return [real_optimizer(optimizer) for optimizer in self.optimizers]

    @property
    def inner_model(self) -> nn.Module:
        """Return the model, unwrapped from Fabric, DDP and DeepSpeed's engine."""
        # Fabric keeps the model that it has prepared as `_forward_module`.
        model: Any = self.model._modules.get("_forward_module", self.model)
        wraps = isinstance(model, DistributedDataParallel) or self.zero is not None
        return model.module if wraps else model  # type: ignore[no-any-return]

    @property
    def sharded_by(self) -> str:
        """Return the method that shards gradients over processes; empty if they are whole."""
        if self.zero is not None:
            return f"ZeRO-{self.zero.stage}"
        return "FSDP2" if any(isinstance(p, DTensor) for p in self.model.parameters()) else ""

    @property
    def release(self) -> UpdateRelease | None:
        """Return the object that applies defences before each step; None without defences."""
        releases = map(release_of, self.optimizers)
        return next((release for release in releases if release is not None), None)


class LoopRun(core.Run):
    """One run of a loop, with the facts that the engine and the attacks need.

    Args:
        loop: The training loop.
        watcher: The user's class that measures the run, for messages.
        anatomy: The parts of the loop's model.
        client: ``"rank"`` if each process is a client, ``"world"`` if all are one.
        assumed: The capabilities of the adversary.

    Attributes:
        loop: The training loop.

    Raises:
        ValueError: Defences act in the loop, and its optimizer is a DP optimizer of another
            library.
    """

    step = property(attrgetter("loop.steps"), doc="Optimizer steps so far, skipped ones included.")

    def __init__(
        self,
        loop: Loop,
        watcher: str,
        anatomy: Anatomy,
        client: str,
        assumed: frozenset[Capability],
    ) -> None:
        super().__init__(anatomy, client, assumed)
        self.loop, self.watcher = loop, watcher
        self.rank, self.processes = rank_and_world_size()
        self.shows_progress = self.rank == 0
        self.optimizers = loop.inner_optimizers
        self.under_ddp = any(isinstance(m, DistributedDataParallel) for m in loop.model.modules())
        self.defenses = core.declared(loop.optimizers, under_ddp=self.under_ddp)
        if (release := loop.release) is not None:
            if self.defenses:
                raise ValueError(
                    f"{self.defenses[0].name} computes its gradient from per-example ones, and so "
                    "discards what the defenses do to gradients: use one of the two"
                )
            self.release, self.defenses = release, release.defenses
        self.separates_stages = bool(self.defenses)
        self.precision = precision_of(None, anatomy.model)
        self.training_loader, self.utility = loop.loader, loop.utility
        vars(self).update(loop.facts)
        if (zero := loop.zero) is not None:
            self.gradient_of, self.casts = zero.gradient_of, zero.policies

    def watch_release(
        self, stage_reached: core.StageReached, before_defense: core.BeforeDefense
    ) -> list[Callable[[], None]]:
        """Call the functions at the stages; see :class:`Run`.

        A loop that announces its gradients does that before its own step. With defences or ZeRO
        this would be too early, and a hook on the optimizer's step is used.
        """
        loop = self.loop
        if not loop.announces_gradients or self.defenses or loop.zero:
            return super().watch_release(stage_reached, before_defense)
        loop.stage_reached = stage_reached
        return [partial(setattr, loop, "stage_reached", None)]

    @property
    def is_sharded(self) -> bool:
        """Return whether weights or gradients are sharded over the processes."""
        return self.loop.zero is not None or super().is_sharded

    @property
    def progress(self) -> tuple[int, float] | None:  # type: ignore[override]
        """Return the epoch, from 0, and the processed fraction of its batches; None if unknown."""
        try:
            length = len(self.loop.loader)
        except TypeError:
            return None
        epoch, batch = divmod(max(0, self.loop.batches - 1), max(1, length))
        return epoch, (batch + 1) / max(1, length)

    def check_first_forward(self) -> Callable[[], None]:
        """Check in the first forward pass with gradients that autocast matches ``precision``.

        Forward passes without gradients are ignored, because TRL's trainers generate texts there.

        Returns:
            A function that removes the check.

        Raises:
            ValueError: The two differ. It is raised later, by the forward pass.
        """

        def check(*_: object) -> None:
            if not torch.is_grad_enabled():
                return
            handle.remove()
            check_autocast(self.watcher, self.device, self.precision)

        handle = self.anatomy.embedding.register_forward_pre_hook(Hook(check))
        return handle.remove


def check_autocast(
    owner: str, device: torch.device, precision: str, error: type[ValueError] = ValueError
) -> None:
    """Raise an error if autocast on a device is not as a precision says.

    Args:
        owner: The name of the class that has the precision, for the message.
        device: The device of the model.
        precision: The precision, in Lightning's spelling.
        error: The class of the error.
    """
    enabled = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if enabled else None
    if dtype != core.AUTOCAST.get(precision):
        raise error(
            f"the model runs under autocast to {dtype}, but {owner} has precision={precision!r}: "
            "pass precision='bf16-mixed' or '16-mixed' under autocast, and none without autocast"
        )


def precision_of(mixed: str | None, model: nn.Module) -> str:
    """Return the precision of a model, in Lightning's spelling.

    Args:
        mixed: The mixed precision in Accelerate's spelling: ``"bf16"`` or ``"fp16"``. With any
            other value the dtype of the weights is the precision.
        model: The model.
    """
    weights = {torch.bfloat16: "bf16-true", torch.float16: "16-true", torch.float64: "64-true"}
    by_weights = weights.get(next(model.parameters()).dtype, "32-true")
    return {"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(mixed or "", by_weights)


def show_messages() -> None:
    """Show INFO messages on stderr, as Lightning does for its Trainer.

    Nothing is changed if logging is configured.
    """
    log = rank_zero.log
    if not (log.isEnabledFor(logging.INFO) or logging.getLogger().handlers):
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)


def check_whole(
    model: nn.Module,
    owner: str,
    wrappers: Collection[str] = (),
    *,
    takes_fsdp2: bool = False,
    error: type[ValueError] = ValueError,
) -> None:
    """Refuse a model whose gradients are sharded over processes, or that DataParallel replicates.

    Args:
        model: The model that the loop trains.
        owner: The name of the class that watches or defends it, for the message.
        wrappers: The names of classes that will wrap it.
        takes_fsdp2: Whether gradients may be shards of FSDP2 over one mesh of all processes.
        error: The class of the error.

    Raises:
        ValueError: The model is one of these. If ``error`` is another class, that is raised. The
            message says why, and what to do.
    """
    names = {*wrappers, *(type(module).__name__ for module in model.modules())}
    is_fsdp2 = takes_fsdp2 and any(isinstance(module, FSDPModule) for module in model.modules())
    is_sharded = not is_fsdp2 and any(isinstance(p, DTensor) for p in model.parameters())
    wraps = names & {"DeepSpeedEngine", "FullyShardedDataParallel", "DataParallel"}
    reason = explain_shards(model, rank_and_world_size()[1]) if is_fsdp2 and not wraps else None
    if wraps or is_sharded:
        reason = (
            f"Under {' and '.join(sorted(wraps)) or 'tensor parallelism'} the shared gradient is "
            "not whole in p.grad: load it whole and use DDP, one process per GPU by torchrun"
        )
        if takes_fsdp2:
            reason += "; or FSDP2 (fully_shard, fsdp_version 2), or pass DeepSpeed's engine itself"
    if reason:
        raise error(f"{owner} cannot take this model. {reason}")


def wrappers_of(trainer: Any, *, takes_fsdp2: bool = False) -> list[str]:
    """Return the names of unsupported classes that transformers' Trainer will wrap its model in.

    Args:
        trainer: The Trainer.
        takes_fsdp2: Whether FSDP2 is supported.
    """
    is_fsdp2 = takes_fsdp2 and getattr(trainer.accelerator, "is_fsdp2", False)
    wrappers = {
        "FullyShardedDataParallel": trainer.is_fsdp_enabled and not is_fsdp2,
        "DeepSpeedEngine": trainer.is_deepspeed_enabled and not takes_fsdp2,
        "DataParallel": trainer.args.n_gpu > 1,
    }
    return [name for name, wraps in wrappers.items() if wraps]


def steps_in_backward(optim: object) -> bool:
    """Return whether the optimizer of ``TrainingArguments(optim=...)`` steps during backward."""
    return any(name in str(optim).lower() for name in _STEPS_IN_BACKWARD)


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the optimizer, unwrapped from Accelerate."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    torch_optimizer: Optimizer = optimizer
    return torch_optimizer


def torch_optimizers(optimizer: Any) -> list[Optimizer]:
    """Return the optimizers of a loop as a list, unwrapped from Accelerate.

    Raises:
        ValueError: Accelerate steps them under fp16 with its own GradScaler.
    """
    optimizers = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
    if any(getattr(wrapper, "scaler", None) is not None for wrapper in optimizers):
        raise ValueError(
            "Watch cannot read gradients in an optimizer step that Accelerate patches for fp16: "
            "use mixed_precision='bf16', or transformers' Trainer with LeakageCallback"
        )
    return [unwrapped(wrapper) for wrapper in optimizers]


def holds_unreduced(model: nn.Module) -> bool:
    """Return whether FSDP2 holds accumulated gradients that it has not reduced yet."""
    states: Any = (m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule))
    groups = (  # a state has several parameter groups since torch 2.13, and one before
        group
        for state in states
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    )
    shards = (shard for group in groups if group is not None for shard in group.fsdp_params)
    return any(
        shard.unsharded_accumulated_grad is not None
        or getattr(getattr(shard, "_unsharded_param", None), "grad", None) is not None
        for shard in shards
    )


def has_gradients(optimizers: Sequence[Optimizer], *, zeros: bool) -> bool:
    """Return whether a parameter of the optimizers has a gradient.

    Args:
        optimizers: The optimizers. The ``summed_grad`` in which Opacus accumulates a virtual batch
            counts as a gradient too.
        zeros: Whether a gradient of only zeros counts. If not, the values are read, which waits for
            the device.
    """
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    gradients = [(p.grad, getattr(p, "summed_grad", None)) for g in groups for p in g["params"]]
    if any(summed is not None for _, summed in gradients):
        return True
    return any(zeros or bool(grad.any()) for grad, _ in gradients if grad is not None)


@contextmanager
def before_backward(on_backward: Callable[[], object]) -> Iterator[None]:
    """Return a context that calls ``on_backward`` before every ``torch.autograd.backward`` in it.

    Backward passes inside another one, and those of the engine itself, are left out.
    """
    original = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        # Activation checkpointing calls it again inside the backward pass.
        torch.autograd.backward = original
        try:
            if not is_observed():
                on_backward()
            original(tensors, *args, **kwargs)
        finally:
            torch.autograd.backward = backward

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original
