"""Reports the batches of a client's local steps from its training to the observer of its update.

The training calls :func:`trained_on` for each batch, or uses :class:`TrainedOn` or
:func:`report_batches`. The receiver is :func:`recording` if the training runs in the same thread,
and :class:`HandOver` if it runs in another thread or process. The observer scores the guesses of
its attacks against these batches.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from lightning_fedleak.lightning_packages import EitherCallback
from lightning_fedleak.messages import rank_zero_warn
from lightning_fedleak.private_files import check_private, load_state, save_state

if TYPE_CHECKING:
    import lightning.pytorch as L
    import transformers

FOLDER = "FEDLEAK_LOCAL_STEPS"
"""The environment variable with the folder in which child processes of a client report batches."""


class Recorded(list[Any]):
    """The list of the reported batches of a round's local steps, not copied.

    Attributes:
        rates: the learning rate of each optimizer step so far; None if the step did not report it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float | None] = []

    @property
    def learning_rate(self) -> float | None:
        """The mean over the steps; None if no step reported a rate, NaN if only some steps did."""
        rates = [rate for rate in self.rates if rate is not None]
        if not rates:
            return None
        return math.fsum(rates) / len(rates) if len(rates) == len(self.rates) else math.nan

    def add_step(self, rate: float | None) -> None:
        """Record an optimizer step."""
        self.rates.append(rate)


# The receiver of this thread's reports inside a block of `recording`.
_BATCHES: ContextVar[Recorded | None] = ContextVar("fedleak_trained_on", default=None)


@contextmanager
def recording() -> Iterator[Recorded]:
    """Return a context that yields the list of the batches reported inside it, not copied.

    It receives only reports of the thread that runs the block. :class:`HandOver` also receives
    reports of other threads and processes.
    """
    batches = Recorded()
    token = _BATCHES.set(batches)
    try:
        yield batches
    finally:
        _BATCHES.reset(token)


class HandOver:
    """Receives the reports of :func:`trained_on` from other threads and from child processes.

    It is for federations that train in another thread or process than the one that attacks the
    update. A child process writes each batch to a file with mode 0600 in the client's folder. The
    file is removed as soon as it is read. If several processes train one model, only the optimizer
    steps of the process with ``RANK`` 0 are counted. A process can receive for one client only.

    Args:
        folder: a folder of the client that is used for nothing else.

    Attributes:
        folder: the folder.
        process: the id of the process that receives.
        recorded: the batches that other threads of this process reported since :meth:`take`.
    """

    # The object that receives in this process; None if none does.
    _active: ClassVar[HandOver | None] = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = os.getpid()
        self.recorded = Recorded()

    def open(self) -> None:
        """Begin to receive, also from processes that are started from now on.

        Raises:
            RuntimeError: another object receives in this process.
        """
        if HandOver._active not in (None, self):
            raise RuntimeError("two clients run in one process: run each in a separate process")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ[FOLDER] = str(self.folder)
        HandOver._active = self
        self.take()

    def take(self) -> Recorded:
        """Return the batches that were reported since the last call, and delete their files.

        Raises:
            ValueError: other users may access a file.
            Exception: a file, which is deleted, does not hold what a report holds.
        """
        recorded, self.recorded = self.recorded, Recorded()
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                check_private(path)
                report = load_state(path)
            finally:
                path.unlink()
            if "batch" in report:
                recorded.append(report["batch"])
            elif report["rank"] == "0":
                recorded.add_step(report["rate"])
        return recorded

    def close(self) -> None:
        """Stop receiving, and remove all reports. It never fails; a warning names what stays."""
        if HandOver._active is not self:
            return
        HandOver._active, self.recorded = None, Recorded()
        os.environ.pop(FOLDER, None)
        for path in self.folder.glob("*.safetensors*"):  # also what a killed process has begun
            with suppress(OSError):
                path.unlink()
        with suppress(OSError):
            self.folder.rmdir()
        if self.folder.exists():
            left = ", ".join(sorted(path.name for path in self.folder.glob("*")))
            rank_zero_warn(f"HandOver: '{self.folder}' stays, with '{left}'")


class _Sender:
    """Writes the reports of a process into files for the process that has started it."""

    def __init__(self) -> None:
        self._numbers = itertools.count()  # the number of the next file

    def append(self, batch: Any) -> None:
        """Write a batch, in which lists then stand for tuples."""
        self._write({"batch": batch})

    def add_step(self, rate: float | None) -> None:
        """Write that an optimizer step was taken."""
        self._write({"rate": rate})

    def _write(self, report: dict[str, Any]) -> None:
        """Write a report into a new file; sorted names give the order of the reports."""
        folder, rank = Path(os.environ[FOLDER]), os.environ.get("RANK", "0")
        if not folder.is_dir():  # nobody receives any more
            return
        # All processes of a round count files from 0, so their ids make the names unique.
        name = f"{next(self._numbers):09d}.{rank}.{os.getpid()}.safetensors"
        save_state(folder / name, report | {"rank": rank})


_SENDER = _Sender()


def _receiver_of_thread() -> Recorded | _Sender | None:
    """Return the receiver of this thread's reports; None if there is no receiver."""
    if (recorded := _BATCHES.get()) is not None:
        return recorded
    hand_over = HandOver._active
    if hand_over is not None and hand_over.process == os.getpid():
        return hand_over.recorded
    return _SENDER if FOLDER in os.environ else None


def trained_on(batch: Any, *, learning_rate: float | None = None, step: bool = True) -> None:
    """Report a batch of this round's local training to the observer of the update.

    Call it in your own training loop, for every batch of every local step. It does nothing if no
    observer receives reports. With a Lightning Trainer use the callback :class:`TrainedOn` instead,
    and with a Trainer of transformers or TRL use :func:`report_batches`.

    Args:
        batch: the batch that the model gets.
        learning_rate: the learning rate of the step, if a schedule changes it over steps or rounds;
            None for the learning rate of the observer's optimizer.
        step: whether an optimizer step follows; False for a batch whose gradient is accumulated.
    """
    receiver = _receiver_of_thread()
    if receiver is not None:
        receiver.append(batch)
        if step:
            receiver.add_step(learning_rate)


def _report_step(optimizer: Optimizer) -> None:
    """Report an optimizer step with its learning rate; NaN if parameter groups differ in it."""
    receiver = _receiver_of_thread()
    if receiver is not None:
        rates = {float(group["lr"]) for group in optimizer.param_groups}
        receiver.add_step(rates.pop() if len(rates) == 1 else math.nan)


class TrainedOn(EitherCallback):
    """A Lightning callback that reports every batch, and every optimizer step with its rate.

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
    """Make a Trainer of transformers or TRL report every batch and every optimizer step.

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
