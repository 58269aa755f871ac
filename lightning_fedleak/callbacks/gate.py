"""RiskGate: a threshold on measured leakage that stops, raises, warns or calls."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as L
from lightning.pytorch.utilities import rank_zero_warn

from lightning_fedleak.callbacks.monitor import LeakageMonitor


class LeakageLimitExceeded(RuntimeError):
    """A RiskGate with ``action="raise"`` found more leakage than it allows."""


@dataclass(frozen=True)
class GateEvent:
    """What a gate found when it fired.

    Attributes:
        metric: the watched name.
        step: optimizer step that was looked at.
        value: what was measured; NaN where it is unknown.
        low, high: 95% interval of the value where there is one, else NaN.
        at_most: the threshold.
        checkpoint: where the run was saved; None where it was not.
    """

    metric: str
    step: int
    value: float
    low: float
    high: float
    at_most: float
    checkpoint: Path | None

    def __str__(self) -> str:
        """What happened, in the words that users see."""
        if math.isnan(self.value):
            found = (
                f"{self.metric} is unknown (the attack gave no result; see monitor/failures and "
                "the monitor's warning). A strict gate treats unknown as a breach"
            )
        else:
            interval = "" if math.isnan(self.low) else f" (95% {self.low:.3f} to {self.high:.3f})"
            found = f"{self.metric} = {self.value:.3f}{interval}"
        saved, go_on = "", ""
        if self.checkpoint is not None:
            saved = f"\n  saved:    {self.checkpoint}"
            go_on = " To go on from here: trainer.fit(..., ckpt_path='<the file saved>')."
        return (
            f"at step {self.step}\n  measured: {found}\n  allowed:  at most {self.at_most:g}{saved}"
            "\n  what now: the update of this step gives away more than you allow. Use larger "
            "batches, add a defence with Trainer(strategy=DefendedStrategy('auto', "
            f"defenses=[...])), or raise at_most.{go_on}"
        )


Action = Literal["stop", "raise", "warn"] | Callable[[GateEvent], Any]


class RiskGate(L.Callback):
    """Acts when a metric of a :class:`LeakageMonitor` exceeds a threshold.

    Looks at every result of the monitor, at the level of steps. All processes of a run decide
    alike. Before it stops or raises it saves a checkpoint.

    Args:
        metric: a name in the logs, ``"leakage/<attack>/<metric>"``.
        at_most: the largest value that is allowed.
        action: ``"stop"`` ends training in order, ``"raise"`` raises
            :class:`LeakageLimitExceeded`, ``"warn"`` warns once and goes on; a callable gets the
            :class:`GateEvent` each time the gate fires, and training goes on.
        patience: breaches in a row that are let pass before the gate fires.
        strict: an unknown value counts as a breach. Otherwise it counts as nothing.
        name: in the logs, ``gate/<name>``; default the metric without ``leakage/``.

    Attributes:
        fired: what the gate found when it first fired in the newest fit; None so far.

    Raises:
        ValueError: arguments that cannot be meant.
    """

    def __init__(
        self,
        metric: str,
        *,
        at_most: float,
        action: Action = "stop",
        patience: int = 0,
        strict: bool = True,
        name: str | None = None,
    ) -> None:
        if isinstance(at_most, bool) or not math.isfinite(at_most):
            raise ValueError(f"at_most must be a finite number, got {at_most!r}")
        if not callable(action) and action not in ("stop", "raise", "warn"):
            raise ValueError(
                f"action must be 'stop', 'raise', 'warn' or a callable, got {action!r}"
            )
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 0:
            raise ValueError(f"patience must be 0 or a positive integer, got {patience!r}")
        self.metric = metric
        self.at_most = float(at_most)
        self.action = action
        self.patience = patience
        self.strict = strict
        self.name = name or metric.removeprefix("leakage/")
        self.fired: GateEvent | None = None
        self._breaches = 0
        self._monitor: LeakageMonitor | None = None

    @property
    def state_key(self) -> str:
        """Distinguishes several gates of one run in a checkpoint."""
        return f"RiskGate[{self.name}]"

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuses a metric that no monitor logs, and a stop that could not stop.

        Raises:
            ValueError: with the names that exist, or the argument to change.
        """
        if stage != "fit":
            return
        self.fired = None
        monitors = [c for c in _callbacks(trainer) if isinstance(c, LeakageMonitor)]
        if not monitors:
            raise ValueError(
                f"RiskGate('{self.metric}') needs a LeakageMonitor among the Trainer's callbacks"
            )
        logging = [m for m in monitors if self.metric in m.metric_names()]
        if len(logging) > 1:
            raise ValueError(
                f"RiskGate watches '{self.metric}', which {len(logging)} LeakageMonitors of this "
                "run log: give all attacks to one monitor"
            )
        if not logging:
            names = [n for m in monitors for n in m.metric_names()]
            close = difflib.get_close_matches(self.metric, names, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise ValueError(
                f"RiskGate watches '{self.metric}', which no LeakageMonitor of this run logs."
                f"{hint} These exist: {', '.join(names)}"
            )
        twins = [
            c
            for c in _callbacks(trainer)
            if isinstance(c, RiskGate) and c is not self and c.name == self.name
        ]
        if twins:
            raise ValueError(f"two RiskGates are named '{self.name}': give one of them name=...")
        if self.action == "stop" and (trainer.min_epochs or trainer.min_steps):
            raise ValueError(
                "RiskGate(action='stop') could not stop this run: the Trainer's min_epochs or "
                "min_steps makes Lightning train on. Drop them, or use action='raise'."
            )
        self._monitor = logging[0]
        self._monitor.subscribe(self._decide)

    def _decide(self, trainer: L.Trainer) -> None:
        monitor = self._monitor
        assert monitor is not None
        # One client alone is its own worst.
        pooled = monitor.latest.get(self.metric.removesuffix("_worst_client"), math.nan)
        value = monitor.latest.get(self.metric, pooled)
        if math.isnan(value):
            breach = self.strict
        else:
            breach = value > self.at_most
            if not breach:
                self._breaches = 0
        if breach:
            self._breaches += 1
        fires = trainer.strategy.reduce_boolean_decision(
            breach and self._breaches > self.patience, all=False
        )
        step = monitor.last_step
        for logger in trainer.loggers:
            logger.log_metrics({f"gate/{self.name}": float(fires)}, step=step)
        if fires:
            self._fire(trainer, monitor, value)

    def _fire(self, trainer: L.Trainer, monitor: LeakageMonitor, value: float) -> None:
        checkpoint = None
        if self.action in ("stop", "raise"):
            folder = Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints"
            checkpoint = (
                folder / f"gate-{self.name.replace('/', '-')}-step={monitor.last_step}.ckpt"
            )
        event = GateEvent(
            self.metric,
            monitor.last_step,
            value,
            monitor.latest.get(f"{self.metric}_low", math.nan),
            monitor.latest.get(f"{self.metric}_high", math.nan),
            self.at_most,
            checkpoint,
        )
        first, self.fired = self.fired is None, self.fired or event
        if checkpoint is not None:
            trainer.save_checkpoint(checkpoint)
        if self.action == "raise":
            raise LeakageLimitExceeded(f"RiskGate '{self.name}' raised {event}")
        if self.action == "stop":
            trainer.should_stop = True
            rank_zero_warn(f"RiskGate '{self.name}' stopped training {event}")
        elif self.action == "warn":
            if first:
                rank_zero_warn(f"RiskGate '{self.name}' warns {event}")
        elif callable(self.action):
            self.action(event)

    def state_dict(self) -> dict[str, Any]:
        """The breaches counted so far."""
        return {"breaches": self._breaches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave."""
        self._breaches = state_dict["breaches"]


def _callbacks(trainer: L.Trainer) -> list[L.Callback]:
    return list(trainer.callbacks)  # type: ignore[attr-defined]
