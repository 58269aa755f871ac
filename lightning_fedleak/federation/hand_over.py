"""Reports of the batches of a client's local steps, from its training to the observer.

The training may run in the observer's thread, in another thread, or in another process.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors import safe_open
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_fedleak.lightning_packages import EitherCallback
from lightning_fedleak.private_files import check_private, save_private

if TYPE_CHECKING:
    import lightning.pytorch as L
    import transformers

FOLDER = "FEDLEAK_LOCAL_STEPS"
"""Environment variable: the folder in which processes that a client starts report batches."""


class Recorded(list[Any]):
    """The batches of a round's local steps, by reference.

    Attributes:
        rates: the learning rate of each optimizer step; None if it was not reported.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float | None] = []

    @property
    def learning_rate(self) -> float | None:
        """The mean over the local steps; None if no step reported one, NaN if not all did."""
        rates = [rate for rate in self.rates if rate is not None]
        if not rates:
            return None
        return math.fsum(rates) / len(rates) if len(rates) == len(self.rates) else math.nan

    def add_step(self, rate: float | None) -> None:
        """Record an optimizer step."""
        self.rates.append(rate)


_BATCHES: ContextVar[Recorded | None] = ContextVar("fedleak_trained_on", default=None)


@contextmanager
def recording() -> Iterator[Recorded]:
    """Keep every batch that :func:`trained_on` reports inside the block, by reference.

    It gets reports of the thread that runs the block. :class:`HandOver` also gets those of other
    threads and processes.
    """
    batches = Recorded()
    token = _BATCHES.set(batches)
    try:
        yield batches
    finally:
        _BATCHES.reset(token)


class HandOver:
    """Takes the reports of :func:`trained_on` from other threads and from child processes.

    It is for an engine that does not run the training where it looks at updates. A batch of another
    process passes through a file of mode 0600 in a folder of this client. The file is removed as
    soon as it is read. If several processes train one model, that of ``RANK`` 0 counts the
    optimizer steps. A process serves one client.

    Args:
        folder: a folder of the client that is used for nothing else.
    """

    _served: ClassVar[HandOver | None] = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = os.getpid()
        self.recorded = Recorded()

    def open(self) -> None:
        """Begin to listen. Processes that are started from now on report to this object.

        Raises:
            RuntimeError: another object listens in this process.
        """
        if HandOver._served not in (None, self):
            raise RuntimeError("two clients run in one process: give each a process of its own")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ[FOLDER] = str(self.folder)
        HandOver._served = self
        self.take()

    def take(self) -> Recorded:
        """Return the batches that were reported since the last call, and forget them.

        Raises:
            ValueError: other users may access a file, or it holds no batch.
        """
        recorded, self.recorded = self.recorded, Recorded()
        for path in sorted(self.folder.glob("*.safetensors")):
            check_private(path)
            with safe_open(path, "pt") as file:
                facts = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            path.unlink()
            if "rate" not in facts:
                leaves = {**tensors, **json.loads(facts["values"])}
                ordered = [leaves[str(n)] for n in range(len(leaves))]
                tree = pytree.treespec_loads(facts["tree"])
                recorded.append(pytree.tree_unflatten(ordered, tree))
            elif facts["rank"] == "0":
                recorded.add_step(json.loads(facts["rate"]))
        return recorded

    def close(self) -> None:
        """Stop listening, and remove reports that were not read."""
        if HandOver._served is self:
            self.take()
            self.folder.rmdir()
            HandOver._served = None
            os.environ.pop(FOLDER, None)


class _Sender:
    """Reports the batches of a process to the process that has started it."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def append(self, batch: Any) -> None:
        """Write a batch."""
        leaves, tree = pytree.tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
        tensors = {
            str(n): leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
            for n, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor)
        }
        plain = {str(n): leaf for n, leaf in enumerate(leaves) if str(n) not in tensors}
        self._write(tensors, {"values": json.dumps(plain), "tree": pytree.treespec_dumps(tree)})

    def add_step(self, rate: float | None) -> None:
        """Write that an optimizer step was taken."""
        self._write({}, {"rate": json.dumps(rate)})

    def _write(self, tensors: Mapping[str, Tensor], facts: dict[str, str]) -> None:
        rank = os.environ.get("RANK", "0")
        # The process id distinguishes processes of one round, which all count from 0.
        name = f"{next(self._numbers):09d}.{rank}.{os.getpid()}.safetensors"
        save_private(Path(os.environ[FOLDER]) / name, tensors, facts | {"rank": rank})


_SENDER = _Sender()


def _listener() -> Recorded | _Sender | None:
    """Return the receiver of this thread's reports; None if there is no receiver."""
    if (recorded := _BATCHES.get()) is not None:
        return recorded
    hand_over = HandOver._served
    if hand_over is not None and hand_over.process == os.getpid():
        return hand_over.recorded
    return _SENDER if FOLDER in os.environ else None


def trained_on(batch: Any, *, learning_rate: float | None = None, step: bool = True) -> None:
    """Report a batch of this round's local training to the observer of the update.

    Call it in your own training loop, for every batch of every local step. It does nothing if there
    is no observer. A Lightning Trainer takes the callback :class:`TrainedOn` instead, and the
    Trainers of transformers and TRL take :func:`report_batches`.

    Args:
        batch: the batch that the model takes.
        learning_rate: the learning rate of the step, if a schedule changes it over steps or rounds;
            None for that of the observer's optimizer.
        step: whether an optimizer step follows; False for a batch whose gradient is accumulated.
    """
    listener = _listener()
    if listener is not None:
        listener.append(batch)
        if step:
            listener.add_step(learning_rate)


def _report_step(optimizer: Optimizer) -> None:
    """Report an optimizer step with its learning rate; NaN if parameter groups differ in it."""
    listener = _listener()
    if listener is not None:
        rates = {float(group["lr"]) for group in optimizer.param_groups}
        listener.add_step(rates.pop() if len(rates) == 1 else math.nan)


class TrainedOn(EitherCallback):
    """A callback that reports every batch and every optimizer step of a fit, with its rate.

    Examples:
        >>> import lightning as L
        >>> from lightning_fedleak import TrainedOn
        >>> trainer = L.Trainer(max_steps=10, callbacks=[TrainedOn()])
    """

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Report the batch that is about to be trained on."""
        trained_on(batch, step=False)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """Report the step with its learning rate."""
        _report_step(optimizer)


def report_batches(trainer: transformers.Trainer) -> None:
    """Have a Trainer of transformers or TRL report every batch and every optimizer step.

    It wraps ``training_step``, because a callback does not get the batch.

    Args:
        trainer: the Trainer, before it trains.
    """
    from transformers import TrainerCallback

    class _ReportedSteps(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            if trainer.optimizer is not None:
                _report_step(trainer.optimizer)

    train = trainer.training_step

    def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        trained_on(inputs, step=False)
        return train(model, inputs, *args, **kwargs)

    trainer.training_step = training_step  # type: ignore[method-assign]
    trainer.add_callback(_ReportedSteps())
