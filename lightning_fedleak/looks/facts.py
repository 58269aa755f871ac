"""What a fit knows of itself before its first step: the first line of ``run.jsonl``."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch.optim import Optimizer

from lightning_fedleak.defenses import Defense
from lightning_fedleak.looks.channels.base import Channel
from lightning_fedleak.looks.choice import reads_of
from lightning_fedleak.looks.lineup import Lineup
from lightning_fedleak.looks.look import Series
from lightning_fedleak.looks.run import Run

PACKAGES = (
    *("lightning-fedleak", "torch", "lightning", "pytorch-lightning", "transformers", "peft"),
    *("opacus", "torchmetrics", "numpy"),
)


def facts_of(
    run: Run,
    lineup: Lineup,
    series: Mapping[Series, Channel],
    *,
    fit: str,
    training: Mapping[str, Any],
    gates: Sequence[Mapping[str, Any]],
    monitor: Mapping[str, Any],
    resumed: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that a fit knows of itself before its first step.

    Args:
        run: the fit.
        lineup: its attacks, calibrated.
        series: the channel of each series, in the order of the logs.
        fit: what all monitors of one fit say alike, and those of no other.
        training: how the model is trained.
        gates: what each gate says of itself.
        monitor: the monitor's own settings.
        resumed: of the fit whose checkpoint it goes on from: its run id, and what its defences had
            spent; empty where it begins anew.
    """
    family = {one.attack: channel.family for one, channel in series.items()}
    played = {plan.attack.name: plan for plan in lineup.plans}
    left_out = [row for row in lineup.rows if row.why_not is not None]
    return {
        "fit": fit,
        "resumed": dict(resumed),
        "versions": versions(),
        "machine": {"processor": platform.machine(), "device": run.device.type},
        "model": _model(run, lineup.trained),
        "training": dict(training),
        "monitor": {
            "client": run.client,
            "clients": run.processes if run.client == "rank" else 1,
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
        "unread": list(lineup.unread),
        "defenses": [about_defense(defense) for defense in run.defenses],
        "gates": [dict(gate) for gate in gates],
    }


def about_defense(defense: Defense) -> dict[str, Any]:
    """What the record says of a defence."""
    return {
        "name": defense.name,
        "class": type(defense).__name__,
        "guarantee": defense.guarantee,
        "settings": defense.settings(),
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
        "peft": sorted(
            str(getattr(getattr(c, "peft_type", None), "value", type(c).__name__))
            for c in peft.values()
        ),
        "dtype": str(next(iter(parameters.values())).dtype).removeprefix("torch."),
    }


def optimizers_of(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """Classes and settings."""
    known = (int, float, bool, str, tuple, type(None))
    return [
        {
            "class": type(optimizer).__name__,
            "groups": [
                {n: v for n, v in group.items() if isinstance(v, known)}
                for group in optimizer.param_groups
            ],
        }
        for optimizer in optimizers
    ]
