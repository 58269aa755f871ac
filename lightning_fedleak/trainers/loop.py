"""A training loop as an engine Run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

import torch
from lightning_utilities.core import rank_zero
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_fedleak.attacks import Capability
from lightning_fedleak.defenses.release import UpdateRelease, release_of
from lightning_fedleak.engine import (
    AUTOCAST,
    BeforeDefense,
    Run,
    StageReached,
    chosen_metrics,
    declared,
)
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.model_runs import is_compiled, is_observed
from lightning_fedleak.model.taps import real_optimizer
from lightning_fedleak.model.whole_models import explain_shards
from lightning_fedleak.trainers.zero import ZeROStep

T = TypeVar("T")


@dataclass
class Loop:
    """A loop's model, optimizers and progress.

    Attributes:
        model: the trained model.
        optimizers: unwrapped from Accelerate; a DP optimizer of another library stays wrapped, see
            ``inner_optimizers``.
        loader: of the training data; None: not known.
        precision: as in :class:`WatchSettings`.
        scaler: the GradScaler, if there is one.
        tokenizer: the run's.
        epochs: of the run; None: not known.
        planned_steps: of the run; None: not known.
        utility: the user's metrics by name.
        steps: optimizer steps so far, skipped ones included.
        batches: batches so far.
        watched: metrics that something other than a gate stops training or selects checkpoints by.
        stage_reached: called by an integration when ``p.grad`` holds the gradient of the next
            optimizer step.
        zero: the only optimizer, where DeepSpeed's engine trains the model.
        temperature: that the loss divides logits by.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    loader: Any = None
    precision: str | None = None
    scaler: Any = None
    tokenizer: Any = None
    epochs: int | None = None
    planned_steps: int | None = None
    utility: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    batches: int = 0
    watched: tuple[str, ...] = ()
    stage_reached: StageReached | None = None
    zero: ZeROStep | None = None
    temperature: float = 1.0

    @property
    def inner_optimizers(self) -> list[Optimizer]:
        """Return the torch optimizers that step, unwrapped from DP optimizers."""
        return [real_optimizer(optimizer) for optimizer in self.optimizers]

    @property
    def inner_model(self) -> nn.Module:
        """Return the model, unwrapped from Fabric, DDP and DeepSpeed's engine."""
        model: Any = self.model._modules.get("_forward_module", self.model)  # of Fabric
        wraps = isinstance(model, DistributedDataParallel) or self.zero is not None
        return model.module if wraps else model  # type: ignore[no-any-return]

    @property
    def sharded_by(self) -> str:
        """Return the engine that leaves a part of each gradient to each process; empty for none."""
        if self.zero is not None:
            return f"ZeRO-{self.zero.stage}"
        return "FSDP2" * any(hasattr(p, "full_tensor") for p in self.model.parameters())

    @property
    def release(self) -> UpdateRelease | None:
        """Return where defences act before the optimizers' updates; None without any."""
        releases = map(release_of, self.optimizers)
        return next((release for release in releases if release is not None), None)


@dataclass(frozen=True, kw_only=True)
class LoopRun(Run):
    """One run of a loop.

    Attributes:
        loop: the training loop.
    """

    watcher: ClassVar[str] = "Watch"

    loop: Loop

    @classmethod
    def of_loop(
        cls, loop: Loop, anatomy: Anatomy, client: str, assumed: frozenset[Capability]
    ) -> LoopRun:
        """Return the run of a loop on a model, against an adversary with these capabilities.

        Raises:
            ValueError: defences, and a DP optimizer of another library beside them.
        """
        rank, processes = place()
        under_ddp = any(isinstance(m, DistributedDataParallel) for m in loop.model.modules())
        noising = declared(loop.optimizers, under_ddp=under_ddp)
        if noising and loop.release is not None:
            raise ValueError(
                f"{noising[0].name} makes its gradient of single examples', so that what the "
                "defenses do to gradients would be lost: use one of both"
            )
        defenses = noising if loop.release is None else loop.release.defenses
        zero = loop.zero
        return cls(
            anatomy=anatomy,
            client=client,
            assumed=assumed,
            loop=loop,
            device=anatomy.device,
            precision=loop.precision or precision_of(None, anatomy.model),
            rank=rank,
            processes=processes,
            tokenizers=[loop.tokenizer],
            watched=loop.watched,
            defenses=defenses,
            under_ddp=under_ddp,
            separates_stages=bool(defenses),
            shows_progress=rank == 0,
            gradient_of=cls.gradient_of if zero is None else zero.gradient_of,
            casts={} if zero is None else zero.policies,
        )

    def watch_release(
        self, stage_reached: StageReached, before_defense: BeforeDefense
    ) -> list[Callable[[], None]]:
        """Call the functions as the release reaches its stages; see :class:`Run`."""
        if (release := self.loop.release) is None:
            return super().watch_release(stage_reached, before_defense)
        return [release.add_tap(stage_reached), release.add_canaries(before_defense)]

    temperature = property(attrgetter("loop.temperature"), doc="Divisor of logits in the loss.")
    optimizers = property(attrgetter("loop.inner_optimizers"), doc="Optimizers, unwrapped.")
    step = property(attrgetter("loop.steps"), doc="Optimizer steps so far, skipped ones included.")
    training_loader = property(attrgetter("loop.loader"), doc="Loader of the training data.")
    epochs = property(attrgetter("loop.epochs"), doc="Planned number of epochs, if known.")
    planned_steps = property(attrgetter("loop.planned_steps"), doc="Planned steps, if known.")

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return autocast if the loop uses it."""
        dtype = AUTOCAST.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    @property
    def is_sharded(self) -> bool:
        """Return whether each process holds a part of every layer, or of its gradient."""
        return self.loop.zero is not None or super().is_sharded

    @property
    def progress(self) -> tuple[int, float] | None:
        """Return the epoch and the processed share of its batches; None: not known."""
        try:
            length = len(self.loop.loader)
        except TypeError:
            return None
        epoch, batch = divmod(max(0, self.loop.batches - 1), max(1, length))
        return epoch, (batch + 1) / max(1, length)

    @property
    def loss_scale(self) -> float:
        """Return the scale of the loop's GradScaler, 1 without one."""
        scaler = self.loop.scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    @property
    def is_compiled(self) -> bool:
        """Return whether torch.compile runs the model, so that hooks would compile it again."""
        return is_compiled(self.loop.model)

    def check_first_forward(self) -> Callable[[], None]:
        """Check on the next forward with a graph that autocast matches ``precision``.

        Forwards before it, such as those of TRL's trainers that write texts, may have none.

        Returns:
            A function that removes the check.

        Raises:
            ValueError: raised in that forward if they differ; the message names the argument.
        """
        kind = self.device.type

        def check(*_: object) -> None:
            if not torch.is_grad_enabled():
                return
            handle.remove()
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            if dtype != AUTOCAST.get(self.precision):
                raise ValueError(
                    f"the model runs under autocast to {dtype}, and {self.watcher} has precision="
                    f"{self.precision!r}: pass 'bf16-mixed' or '16-mixed' under autocast, else "
                    "nothing"
                )

        handle = self.anatomy.embedding.register_forward_pre_hook(check)
        return handle.remove

    def broadcast(self, value: T) -> T:
        """Return the first process's value on every process."""
        values = [value]
        if _is_distributed():
            distributed.broadcast_object_list(values, device=self.device)
        return values[0]

    def summed(self, value: Tensor) -> Tensor:
        """Return the sum over processes."""
        if _is_distributed():
            value = value.clone()
            distributed.all_reduce(value)
        return value

    def on_any_process(self, value: bool) -> bool:
        """Return whether the value is true on at least one process."""
        return bool(self.summed(torch.tensor(int(value), device=self.device)))

    def metrics(self, names: Sequence[str] | None) -> Mapping[str, Any]:
        """Return the user's metrics logged so far; None: all."""
        return chosen_metrics(self.loop.utility, names)


def precision_of(mixed: str | None, model: nn.Module) -> str:
    """Return a precision as Lightning spells it.

    Args:
        mixed: as Accelerate spells it: ``"bf16"``, ``"fp16"``, or anything for none.
        model: whose weights decide where none is mixed.
    """
    weights = {torch.bfloat16: "bf16-true", torch.float16: "16-true", torch.float64: "64-true"}
    by_weights = weights.get(next(model.parameters()).dtype, "32-true")
    return {"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(mixed or "", by_weights)


def place() -> tuple[int, int]:
    """Return the number of this process, and how many there are."""
    return (distributed.get_rank(), distributed.get_world_size()) if _is_distributed() else (0, 1)


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def show_messages() -> None:
    """Show INFO messages on stderr, as Lightning does for its Trainer.

    Nothing is changed if logging is configured.
    """
    log = rank_zero.log
    if not (log.isEnabledFor(logging.INFO) or logging.getLogger().handlers):
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)


def check_whole(
    model: nn.Module, watcher: str, wrappers: Collection[str] = (), *, takes_fsdp2: bool = False
) -> None:
    """Refuse a model whose gradients are sharded over processes, or that each step replicates.

    Args:
        model: as the loop trains it.
        watcher: the class that watches it, for the message.
        wrappers: names of classes that will wrap it.
        takes_fsdp2: whether gradients may be shards of FSDP2 over one mesh of all processes.

    Raises:
        ValueError: says why, and what to do.
    """
    names = {*wrappers, *(type(module).__name__ for module in model.modules())}
    layers = [module for module in model.modules() if isinstance(module, FSDPModule)]
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    fsdp2 = takes_fsdp2 and bool(layers) and "FullyShardedDataParallel" not in names
    instead = (
        "use FSDP2 (fully_shard, or fsdp_version 2 of accelerate)"
        if takes_fsdp2
        else "use DDP, or Lightning's Trainer with ModelParallelStrategy"
    )
    reasons = {
        "DeepSpeed keeps gradients in internal buffers and reduces them during backward, so that "
        "p.grad is not the shared gradient: "
        + ("give the engine itself" if takes_fsdp2 else "use DDP"): "DeepSpeedEngine" in names,
        f"FSDP and tensor parallelism keep a part of each gradient in every process: {instead}": (
            "FullyShardedDataParallel" in names or (sharded and not fsdp2)
        ),
        (why := explain_shards(model, place()[1]) if fsdp2 else ""): bool(why),
        "DataParallel copies the model at each step: start one process a card by torchrun": (
            "DataParallel" in names
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"{watcher} cannot take this model. {reason}")


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the optimizer, unwrapped from Accelerate.

    Raises:
        TypeError: this is no optimizer.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
    return optimizer


def torch_optimizers(optimizer: Any) -> list[Optimizer]:
    """Return the optimizers of a loop, unwrapped from Accelerate.

    Raises:
        ValueError: Accelerate steps them under fp16.
    """
    optimizers = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
    if any(getattr(each, "scaler", None) is not None for each in optimizers):
        raise ValueError(
            "Watch cannot observe the optimizer step that Accelerate patches under fp16: use "
            "mixed_precision='bf16', or transformers' Trainer with LeakageCallback"
        )
    return [unwrapped(each) for each in optimizers]


def holds_unreduced(model: nn.Module) -> bool:
    """Return whether FSDP2 holds gradients that are accumulated and not yet reduced."""
    states: Any = (m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule))
    groups = (  # several since torch 2.13
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
    """Return whether there is a gradient.

    With ``zeros`` an all-zero gradient counts, so values are not read. Opacus' accumulated
    ``summed_grad`` of a virtual batch counts.
    """
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    gradients = [(p.grad, getattr(p, "summed_grad", None)) for g in groups for p in g["params"]]
    if any(summed is not None for _, summed in gradients):
        return True
    return any(zeros or bool(grad.any()) for grad, _ in gradients if grad is not None)


@contextmanager
def before_backward(on_backward: Callable[[], object]) -> Iterator[None]:
    """Call ``on_backward`` before every torch.autograd.backward of the loop within."""
    original = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        torch.autograd.backward = original  # a checkpoint's backward calls it again
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
