"""A run of a training loop, as the engine knows it, and how it is watched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from lightning_utilities.core import rank_zero
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_fedleak.attacks import Capability
from lightning_fedleak.engine import AUTOCAST, Run, StageReached, chosen_metrics, declared
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.model_runs import is_compiled
from lightning_fedleak.model.taps import real_optimizer

T = TypeVar("T")


@dataclass
class Loop:
    """What a loop trains, and how far it is.

    Attributes:
        model: what is trained.
        optimizers: without what Accelerate wraps them in; a DP optimizer of another library as it
            is, see ``steps_by``.
        loader: of the training data; None: not known.
        precision: as :class:`WatchSettings` has it.
        scaler: the GradScaler, if there is one.
        tokenizer: that the run uses.
        epochs: of the run; None: not known.
        utility: the user's own numbers by name.
        steps: optimizer steps so far, skipped ones included.
        batches: batches so far.
        watched: names of values that something besides gates stops or chooses by.
        stage_reached: is called while ``p.grad`` is what an optimizer is about to step with, by a
            face that knows when that is.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    loader: Any = None
    precision: str | None = None
    scaler: Any = None
    tokenizer: Any = None
    epochs: int | None = None
    utility: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    batches: int = 0
    watched: tuple[str, ...] = ()
    stage_reached: StageReached | None = None

    @property
    def steps_by(self) -> list[Optimizer]:
        """Return the optimizers that take the steps, inside those that make their gradient."""
        return [real_optimizer(optimizer) for optimizer in self.optimizers]


@dataclass(frozen=True, kw_only=True)
class LoopRun(Run):
    """One run of a loop.

    Attributes:
        loop: what it trains.
    """

    watcher: ClassVar[str] = "Watch"

    loop: Loop

    @classmethod
    def of_loop(
        cls, loop: Loop, anatomy: Anatomy, client: str, assumed: frozenset[Capability]
    ) -> LoopRun:
        """Return the run of a loop on a model, against an adversary with these capabilities.

        No defence acts in it but a DP optimizer of another library: others act in Lightning's
        DefendedStrategy.
        """
        dtypes = {torch.bfloat16: "bf16-true", torch.float16: "16-true"}
        by_weights = dtypes.get(next(anatomy.model.parameters()).dtype, "32-true")
        rank = distributed.get_rank() if _is_distributed() else 0
        under_ddp = any(isinstance(m, DistributedDataParallel) for m in loop.model.modules())
        defenses = declared(loop.optimizers, under_ddp=under_ddp)
        return cls(
            anatomy=anatomy,
            client=client,
            assumed=assumed,
            loop=loop,
            device=anatomy.device,
            precision=loop.precision or by_weights,
            rank=rank,
            processes=distributed.get_world_size() if _is_distributed() else 1,
            tokenizers=[loop.tokenizer],
            watched=loop.watched,
            defenses=defenses,
            under_ddp=under_ddp,
            separates_stages=bool(defenses),
            shows_progress=rank == 0,
        )

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Return the optimizers of the loop, unwrapped."""
        return self.loop.steps_by

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return autocast where the loop uses it."""
        dtype = AUTOCAST.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    @property
    def step(self) -> int:
        """Return the optimizer steps so far, skipped ones included."""
        return self.loop.steps

    @property
    def training_loader(self) -> object:
        """Return the loader that the loop was said to read."""
        return self.loop.loader

    @property
    def progress(self) -> tuple[int, float] | None:
        """Return the epoch and the share of its batches that is done; None: not known."""
        try:
            length = len(self.loop.loader)
        except TypeError:
            return None
        epoch, batch = divmod(max(0, self.loop.batches - 1), max(1, length))
        return epoch, (batch + 1) / max(1, length)

    @property
    def epochs(self) -> int | None:
        """Return the number of epochs that the run is to have; None: not known."""
        return self.loop.epochs

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
        """Compare what is cast in the next forward with the precision; return what ends this.

        Raises:
            ValueError: in that forward: they differ; names the argument.
        """
        kind = self.device.type

        def check(*_: object) -> None:
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
        """Return those of the user's own numbers that are known by now; None: all."""
        return chosen_metrics(self.loop.utility, names)


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def show_messages() -> None:
    """Show on stderr what is logged for information, as Lightning does for its own Trainer.

    Nothing is changed where somebody has set up logging.
    """
    log = rank_zero.log
    if not (log.isEnabledFor(logging.INFO) or logging.getLogger().handlers):
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)


def check_whole(model: nn.Module, watcher: str, wrappers: Collection[str] = ()) -> None:
    """Refuse a model whose gradients no process holds whole, or that is copied at each step.

    Args:
        model: as the loop trains it.
        watcher: the class that watches it, for the message.
        wrappers: names of classes that are about to wrap it.

    Raises:
        ValueError: says why, and what to do.
    """
    names = {*wrappers, *(type(module).__name__ for module in model.modules())}
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    reasons = {
        "DeepSpeed keeps gradients in buffers of its own and reduces them inside of backward, so "
        "that no p.grad is what leaves: use DDP": "DeepSpeedEngine" in names,
        "FSDP and tensor parallelism keep a part of each gradient in every process: use DDP, or "
        "LeakageMonitor with Lightning's ModelParallelStrategy": (
            sharded or "FullyShardedDataParallel" in names
        ),
        "DataParallel copies the model at each step: start one process a card by torchrun": (
            "DataParallel" in names
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"{watcher} cannot watch this model. {reason}")


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the optimizer inside what Accelerate prepared.

    Raises:
        TypeError: no optimizer.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
    return optimizer


def torch_optimizers(optimizer: Any) -> list[Optimizer]:
    """Return the optimizers of a loop, without what Accelerate wraps them in.

    Raises:
        ValueError: Accelerate steps them under fp16.
    """
    optimizers = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
    if any(getattr(each, "scaler", None) is not None for each in optimizers):
        raise ValueError(
            "Accelerate's fp16 steps by a function of its own, at which Watch cannot look: use "
            "mixed_precision='bf16', or transformers' Trainer with LeakageCallback"
        )
    return [unwrapped(each) for each in optimizers]


def has_gradients(optimizers: Sequence[Optimizer], *, zeros: bool) -> bool:
    """Return whether a gradient is there; ``zeros`` counts zeros, which need not be read then.

    What Opacus keeps of the parts of a virtual batch is one too.
    """
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    gradients = [(p.grad, getattr(p, "summed_grad", None)) for g in groups for p in g["params"]]
    if any(summed is not None for _, summed in gradients):
        return True
    return any(zeros or bool(grad.any()) for grad, _ in gradients if grad is not None)


@contextmanager
def before_backward(begins: Callable[[Any], object]) -> Iterator[None]:
    """Call a function with the losses whose backward is run inside, by torch's own function."""
    original = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        torch.autograd.backward = original  # a checkpoint's backward calls it again
        try:
            begins(tensors)
            original(tensors, *args, **kwargs)
        finally:
            torch.autograd.backward = backward

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original
