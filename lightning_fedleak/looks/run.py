"""What the engine knows of a run, whoever trains: a Trainer, a federation, a loop of one's own."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.base import Attack, RunFacts
from lightning_fedleak.defenses import Defense, DefenseContext
from lightning_fedleak.optimizer_step import before_real_step
from lightning_fedleak.snapshots import Stage
from lightning_fedleak.threats import Capability

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}

T = TypeVar("T")

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Where launchers put a process's number, in the order in which Lightning reads them."""

if getattr(rank_zero_only, "rank", None) is None:  # unless Lightning has set which process prints
    _set = [int(os.environ[name]) for name in _RANKS if name in os.environ]
    rank_zero_only.rank = _set[0] if _set else 0  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Processes:
    """How a run is spread.

    Attributes:
        count: processes that train together.
        client: ``"rank"`` (each process is a client) or ``"world"`` (all are one).
        sharded_by: what gives each process a part of every layer; None: nothing does.
    """

    count: int
    client: str
    sharded_by: str | None


@dataclass(frozen=True)
class Run(ABC):
    """One run, as channels and attacks know it.

    Attributes:
        anatomy: the model's parts.
        client: ``"rank"`` (each process is a client) or ``"world"`` (all are one).
        assumed: what the adversary has besides what it sees.
        watcher: the class that watches the run, for messages.
        uncounted_step: the message where an optimizer stepped and :attr:`step` did not change.
    """

    watcher: ClassVar[str] = "LeakageMonitor"
    uncounted_step: ClassVar[str] = "an optimizer stepped, and the run's step is what it was"

    anatomy: Anatomy
    client: str
    assumed: frozenset[Capability]

    @property
    @abstractmethod
    def rank(self) -> int:
        """Return the number of this process."""

    @property
    @abstractmethod
    def processes(self) -> int:
        """Return the number of processes."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Return the device of the model."""

    @property
    @abstractmethod
    def optimizers(self) -> Sequence[Optimizer]:
        """Return the optimizers of the run."""

    @property
    @abstractmethod
    def defenses(self) -> tuple[Defense, ...]:
        """Return the defences of the run, in their order."""

    @property
    @abstractmethod
    def precision(self) -> str:
        """Return the precision, spelled as the Trainer spells it."""

    @property
    @abstractmethod
    def tokenizers(self) -> Sequence[Any]:
        """Return the tokenizers that the run uses; some may be None."""

    @abstractmethod
    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context in which the client runs its model, such as autocast."""

    @property
    def step(self) -> int:
        """Return the number of optimizer steps so far."""
        return 0

    @property
    def number(self) -> int:
        """Return the number of this process's client."""
        return self.rank if self.client == "rank" else 0

    @property
    def under_ddp(self) -> bool:
        """Return whether all trained parameters' gradients are shared, whatever optimizers own."""
        return False

    @property
    def shows_progress(self) -> bool:
        """Return whether bars are shown while attacks are calibrated."""
        return False

    @property
    def loss_scale(self) -> float:
        """Return the loss scale in gradients that no GradScaler has unscaled."""
        return 1.0

    def broadcast(self, value: T) -> T:
        """Return the first process's value on every process."""
        return value

    def summed(self, value: Tensor) -> Tensor:
        """Return the sum over processes."""
        return value

    def on_any_process(self, value: bool) -> bool:
        """Return whether the value is true on at least one process."""
        return value

    def on_all_processes(self, value: bool) -> bool:
        """Return whether the value is true on every process."""
        return value

    def metrics(self, names: Sequence[str]) -> Mapping[str, float]:
        """Return those of the user's own metrics that are known by now, by name."""
        return {}

    def publish(self, values: Mapping[str, float]) -> None:  # noqa: B027
        """Put values of leakage beside the user's own metrics."""

    @property
    def separates_stages(self) -> bool:
        """Whether a defended run shows local and shared gradients as ``p.grad``."""
        return False

    def watch_release(
        self,
        stage_reached: Callable[[Stage, Optimizer], None],
        before_defense: Callable[[Defense, Sequence[nn.Parameter], DefenseContext], None],
    ) -> list[Callable[[], None]]:
        """Call ``stage_reached`` while ``p.grad`` is what an optimizer is about to step with.

        Without defences on gradients that is all stages at once: ``Stage.AGGREGATE`` is reported.
        A run whose defences act between the stages overrides this, and calls
        ``before_defense(defense, parameters, context)`` right before each of them.

        Args:
            stage_reached: takes the stage and the optimizer.
            before_defense: takes what the defence is about to get.

        Returns:
            Functions that end it.
        """
        return [
            before_real_step(optimizer, partial(stage_reached, Stage.AGGREGATE, optimizer))
            for optimizer in self.optimizers
        ]

    @property
    def clip_value(self) -> float | None:
        """Size that entries of gradients are cut to before they are shared; None if not known."""
        return None


@dataclass(frozen=True)
class Plan:
    """An attack in one run.

    Attributes:
        attack: the attack.
        roles: whose gradients it reads; none where it reads layers that the server adds itself, or
            hidden states at the split.
        exposed: whether all of them are really shared.
        optimizer: the one that owns these parameters; None where they are not exposed, or no
            parameters of the client's.
    """

    attack: Attack
    roles: tuple[str, ...]
    exposed: bool
    optimizer: Optimizer | None

    def facts(self, run: Run, local_steps: int | None, step: int) -> RunFacts:
        """Return what the attack learns about the run, see :meth:`Attack.meet`.

        Args:
            run: the run.
            local_steps: optimizer steps of a round; None for single gradients.
            step: optimizer step that the run begins at.
        """
        optimizer = self.optimizer
        defended: set[Literal["gradients", "batches", "activations"]] = set()
        for defense in run.defenses:
            if defense.acts_on_gradients:
                defended.add("gradients")
            if defense.acts_on_batches:
                defended.add("batches")
            if defense.activation_layers:
                defended.add("activations")
        return RunFacts(
            precision=run.precision,
            autocast=AUTOCAST.get(run.precision),
            optimizer=None if optimizer is None else type(optimizer).__name__,
            optimizer_settings=self._settings(run),
            local_steps=local_steps,
            defended=frozenset(defended),
            step=step,
            clip_value=run.clip_value,
        )

    def _settings(self, run: Run) -> Mapping[str, object]:
        """Return the settings of the parameter group that the attack reads, without tensors."""
        if self.optimizer is None:
            return {}
        read = {id(run.anatomy.parameter(role)) for role in self.roles}
        groups = self.optimizer.param_groups
        group = next((g for g in groups if read & {id(p) for p in g["params"]}), groups[0])
        known = (int, float, bool, str, tuple, type(None))
        return {name: value for name, value in group.items() if isinstance(value, known)}
