"""A run of a training loop, as the engine knows it, and how it is watched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_fedleak.attacks import Attack, TextSource
from lightning_fedleak.defenses import Defense
from lightning_fedleak.looks import (
    AUTOCAST,
    Games,
    LookSettings,
    Memorization,
    Options,
    Run,
    Selection,
    cadence_of,
    known_stages,
    selected,
)
from lightning_fedleak.model_runs import is_compiled
from lightning_fedleak.validate import check_choice, check_number

T = TypeVar("T")

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")


@dataclass(frozen=True)
class WatchSettings(LookSettings):
    """The settings of a :class:`Watch`, which takes each of them by its name.

    Attributes:
        every_n_steps: look at optimizer steps 0, n, 2n, ... Default with listed attacks: 50.
        max_overhead: largest share of the training time that looks take; either this or
            ``every_n_steps``. Default with ``attacks="auto"``: 0.005.
        stages: where to measure: ``"shared"``, and under DDP ``"local"`` or ``"aggregate"``.
        reveal: write what was recovered to local files of mode 0600.
        local_steps: attack the weight change of so many optimizer steps.
        tokenizer: decodes what is revealed, and reads the texts of ``public_text``.
        games: how membership games are played.
        public_text: for ``attacks="auto"``: text like the client's, to calibrate on.
        report: write ``report.html`` and ``report.json`` beside the logs at the end.
        utility: names in :attr:`Watch.utility` to log beside leakage.
        memorization: how the trained weights are tested; needs ``loader=``.
        client: who is a client: ``"rank"`` (each process) or ``"world"``.
        precision: how the loop runs its model: ``"bf16-mixed"`` or ``"16-mixed"`` under autocast.
            None: by the dtype of the weights, without autocast.
        scaler: the GradScaler of the loop; matters under DDP alone.
        tensorboard: log to TensorBoard, where it is installed.
        chooses: the loop keeps the weights where :meth:`Watch.choose` is lowest. Some texts are put
            aside then, on which they are scored when the loop ends.
    """

    every_n_steps: int | None = None
    max_overhead: float | None = None
    stages: Sequence[str] = ("shared",)
    reveal: bool = False
    local_steps: int | None = None
    tokenizer: Any = None
    games: Games = field(default_factory=Games)
    public_text: TextSource | None = None
    report: bool = False
    utility: Sequence[str] = ("train_loss", "val_loss")
    memorization: Memorization = field(default_factory=Memorization)
    client: Literal["rank", "world"] = "rank"
    precision: str | None = None
    scaler: Any = None
    tensorboard: bool = True
    chooses: bool = False

    def chosen(
        self, attacks: Sequence[Attack] | Attack | Literal["auto"]
    ) -> tuple[Selection, Options]:
        """Return what an engine is made of.

        Args:
            attacks: the attacks, or ``"auto"``.

        Raises:
            ValueError: a setting out of its range, or two that contradict each other.
        """
        check_number("look_seconds", self.look_seconds, above=0)
        check_choice("client", self.client, ("rank", "world"))
        check_choice("precision", self.precision, PRECISIONS, optional=True)
        rounds = self.local_steps is not None
        selection = selected(attacks, self.assume, self.public_text, self.tokenizer, rounds=rounds)
        return selection, Options(
            cadence=cadence_of(self.every_n_steps, self.max_overhead, auto=selection.auto),
            stages=known_stages(self.stages),
            batch_adapter=self.batch_adapter,
            utility=tuple(self.utility),
            local_steps=self.local_steps,
            tokenizer=self.tokenizer,
            games=self.games,
            texts=self.texts,
            look_seconds=self.look_seconds,
            cache=self.cache,
            reveal=self.reveal,
            memorization=self.memorization,
        )


@dataclass
class Loop:
    """What a loop trains, and how far it is.

    Attributes:
        model: what is trained.
        optimizers: without what Accelerate wraps them in.
        loader: of the training data; None: not known.
        precision: as :class:`WatchSettings` has it.
        scaler: the GradScaler, if there is one.
        tokenizer: that the run uses.
        epochs: of the run; None: not known.
        utility: the user's own numbers by name.
        steps: optimizer steps so far, skipped ones included.
        batches: batches so far.
        watched: names of values that something besides gates stops or chooses by.
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


@dataclass(frozen=True)
class LoopRun(Run):
    """One run of a loop.

    Attributes:
        loop: what it trains.
    """

    watcher: ClassVar[str] = "Watch"

    loop: Loop

    @property
    def rank(self) -> int:
        """Return the number of this process."""
        return distributed.get_rank() if _is_distributed() else 0

    @property
    def processes(self) -> int:
        """Return the number of processes."""
        return distributed.get_world_size() if _is_distributed() else 1

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return self.anatomy.device

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Return the optimizers of the loop, unwrapped."""
        return self.loop.optimizers

    @property
    def defenses(self) -> tuple[Defense, ...]:
        """Return none: defences act in Lightning's DefendedStrategy."""
        return ()

    @property
    def precision(self) -> str:
        """Return the precision, as Lightning spells it."""
        dtypes = {torch.bfloat16: "bf16-true", torch.float16: "16-true"}
        by_weights = dtypes.get(next(self.anatomy.model.parameters()).dtype, "32-true")
        return self.loop.precision or by_weights

    @property
    def tokenizers(self) -> Sequence[Any]:
        """Return the tokenizer of the settings."""
        return [self.loop.tokenizer]

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
    def watched(self) -> tuple[str, ...]:
        """Return the names of values that something besides gates stops or chooses by."""
        return self.loop.watched

    @property
    def epochs(self) -> int | None:
        """Return the number of epochs that the run is to have; None: not known."""
        return self.loop.epochs

    @property
    def under_ddp(self) -> bool:
        """Return whether DistributedDataParallel reduces the gradients."""
        return any(isinstance(m, DistributedDataParallel) for m in self.loop.model.modules())

    @property
    def loss_scale(self) -> float:
        """Return the scale of the loop's GradScaler, 1 without one."""
        scaler = self.loop.scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    @property
    def is_compiled(self) -> bool:
        """Return whether torch.compile runs the model, so that hooks would compile it again."""
        return is_compiled(self.loop.model)

    def check_autocast(self) -> None:
        """Compare what is cast now, inside of the model's forward, with the precision.

        Raises:
            ValueError: they differ; names the argument.
        """
        kind = self.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if dtype != AUTOCAST.get(self.precision):
            raise ValueError(
                f"the model runs under autocast to {dtype}, and {self.watcher} has precision="
                f"{self.precision!r}: pass 'bf16-mixed' or '16-mixed' under autocast, else nothing"
            )

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

    def on_all_processes(self, value: bool) -> bool:
        """Return whether the value is true on every process."""
        return not self.on_any_process(not value)

    def metrics(self, names: Sequence[str]) -> Mapping[str, float]:
        """Return those of the user's own numbers that are known by now."""
        return {name: self.loop.utility[name] for name in names if name in self.loop.utility}


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()
