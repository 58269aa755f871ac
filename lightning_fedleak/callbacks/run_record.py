"""``run.jsonl``: what a fit was, beside what ``leakage.jsonl`` says that was read off it.

One line when a fit begins (model, training, attacks and their adversaries, defences, gates), one
for each look (utility, what defences have spent), one for each decision of a gate, one when the fit
ends. Numbers and settings only. The reports read it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_fedleak.callbacks.auto import reads_of
from lightning_fedleak.callbacks.channels.base import Channel, Run
from lightning_fedleak.callbacks.fit import Fit
from lightning_fedleak.callbacks.results import Series
from lightning_fedleak.defenses import Defense, DefenseError

RECORD_SCHEMA = 1
PACKAGES = (
    *("lightning-fedleak", "torch", "lightning", "pytorch-lightning", "transformers", "peft"),
    *("opacus", "torchmetrics", "numpy"),
)


class RunRecord:
    """Appends to ``run.jsonl``; of several processes the first one does.

    Args:
        path: the file; its folder is made when the first line is written.
        run: the id that the fit's lines in ``leakage.jsonl`` have.
        warn: is told why a line could not be written; the fit goes on.
    """

    def __init__(self, path: Path, run: str, warn: Callable[[str], None]) -> None:
        self.path = path
        self.run = run
        self._warn = warn
        self._ended = False

    def begins(self, facts: Mapping[str, Any]) -> None:
        """A fit begins; ``settings_hash`` is that of everything in ``facts``."""
        text = json.dumps(facts, sort_keys=True, default=str)
        self._append("begin", **facts, settings_hash=hashlib.sha256(text.encode()).hexdigest())

    def looked(
        self,
        step: int,
        utility: Mapping[str, float],
        seconds: float,
        failures: int,
        defenses: Sequence[Defense],
    ) -> None:
        """A look is over: what it cost, and what was spent until it."""
        self._append(
            "look",
            step=step,
            utility={n: _plain(v) for n, v in utility.items()},
            privacy=[spent for d in defenses if (spent := _spent(d)) is not None],
            seconds=_plain(seconds),
            failures=failures,
        )

    def decided(self, facts: Mapping[str, Any]) -> None:
        """A gate has acted."""
        self._append("gate", **facts)

    def ends(self, step: int, how: str, defenses: Sequence[Defense]) -> None:
        """The fit is over; said once.

        Args:
            step: optimizer steps that were taken in all.
            how: ``"finished"``, or the class of what was raised.
            defenses: of the run.
        """
        if not self._ended:
            self._ended = True
            spent = [found for d in defenses if (found := _spent(d)) is not None]
            self._append("end", step=step, how=how, privacy=spent)

    def _append(self, kind: str, **facts: Any) -> None:
        line = {
            "schema": RECORD_SCHEMA,
            "run": self.run,
            "kind": kind,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            **facts,
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, default=str) + "\n")
        except OSError as error:
            self._warn(f"{self.path} cannot be written: {error.strerror}")


# ---- what is known when a fit begins ----------------------------------------------------------


def facts_of(
    run: Run,
    fit: Fit,
    series: Mapping[Series, Channel],
    *,
    gates: Sequence[Mapping[str, Any]],
    monitor: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that a fit knows of itself before its first step.

    Args:
        run: the fit.
        fit: with its attacks calibrated.
        series: the channel of each series, in the order of the logs.
        gates: what each gate says of itself.
        monitor: the monitor's own settings.
    """
    family = {one.attack: channel.family for one, channel in series.items()}
    played = {plan.attack.name: plan for plan in fit.plans}
    left_out = [row for row in fit.rows if row.why_not is not None]
    return {
        "versions": versions(),
        "machine": {"processor": platform.machine(), "device": run.device.type},
        "model": _model(run, fit.trained),
        "training": _training(run),
        "monitor": {
            "client": run.client,
            "clients": run.trainer.world_size if run.client == "rank" else 1,
            "adversary": sorted(capability.value for capability in run.assumed),
            **monitor,
        },
        "attacks": [
            {
                "name": name,
                "class": type(plan.attack).__name__,
                "family": family[name],
                "adversary": plan.attack.threat_model.summary,
                "needs": sorted(c.value for c in plan.attack.threat_model.needs),
                "reads": list(reads_of(plan, run.anatomy)),
                "exposed": plan.exposed,
                "config": dict(plan.attack.config()),
            }
            for name, plan in played.items()
        ],
        "not_played": [
            {"name": row.attack, "family": family[row.attack], "why": row.why_not}
            for row in left_out
            if row.attack not in played
        ],
        "unread": list(fit.unread),
        "defenses": [
            {
                "name": defense.name,
                "class": type(defense).__name__,
                "guarantee": defense.guarantee,
                "settings": defense.settings(),
            }
            for defense in run.defenses
        ],
        "gates": [dict(gate) for gate in gates],
    }


def versions() -> dict[str, str]:
    """What is installed of the packages that a figure may hang on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _model(run: Run, trained: Sequence[str]) -> dict[str, Any]:
    anatomy = run.anatomy
    model = anatomy.model
    parameters = dict(anatomy.root.named_parameters())
    peft = getattr(model, "peft_config", None) or {}
    return {
        "class": type(model).__name__,
        "kind": anatomy.kind,
        "vocabulary": anatomy.vocab_size,
        "parameters": sum(p.numel() for p in parameters.values()),
        "trained_parameters": sum(p.numel() for p in parameters.values() if p.requires_grad),
        "trained": list(trained),
        "peft": sorted(str(getattr(c, "peft_type", type(c).__name__)) for c in peft.values()),
        "dtype": str(next(iter(parameters.values())).dtype).removeprefix("torch."),
    }


def _training(run: Run) -> dict[str, Any]:
    trainer = run.trainer
    known = (int, float, bool, str, tuple, type(None))
    return {
        "optimizers": [
            {
                "class": type(optimizer).__name__,
                "groups": [
                    {n: v for n, v in group.items() if isinstance(v, known)}
                    for group in optimizer.param_groups
                ],
            }
            for optimizer in trainer.optimizers
        ],
        "strategy": type(trainer.strategy).__name__,
        "precision": str(trainer.precision),
        "processes": trainer.world_size,
        "max_steps": trainer.max_steps,
        "max_epochs": trainer.max_epochs,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "begins_at_step": int(trainer.global_step),
        "seed": os.environ.get("PL_GLOBAL_SEED"),
    }


def _spent(defense: Defense) -> dict[str, Any] | None:
    """What a defence that accounts has spent, and on how many releases of which kind."""
    try:
        cost = defense.privacy
    except DefenseError:  # nothing was released yet
        return None
    if cost is None:
        return None
    history = getattr(getattr(defense, "accountant", None), "history", ())
    return {
        "defense": defense.name,
        **{name: _plain(value) for name, value in asdict(cost).items()},
        "history": [list(row) for row in history],
    }


def _plain(value: float | None) -> float | str | None:
    """As strict JSON takes it: infinity is said in a word, unknown is null."""
    if value is None or math.isnan(value):
        return None
    return value if math.isfinite(value) else "infinite"


__all__ = ["RECORD_SCHEMA", "RunRecord", "facts_of", "versions"]
