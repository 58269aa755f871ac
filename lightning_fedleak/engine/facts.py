"""What a fit knows of itself before its first step: the first line of ``run.jsonl``."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version

from torch.optim import Optimizer

from lightning_fedleak.defenses import Defense
from lightning_fedleak.engine.channels.base import Channel
from lightning_fedleak.engine.choice import reads_of
from lightning_fedleak.engine.lineup import Lineup
from lightning_fedleak.engine.options import Options
from lightning_fedleak.engine.run import Run, Series
from lightning_fedleak.report import records

PACKAGES = (
    *("lightning-fedleak", "torch", "lightning", "pytorch-lightning", "transformers", "peft"),
    *("opacus", "torchmetrics", "numpy"),
)


def facts_of(
    run: Run,
    lineup: Lineup,
    series: Mapping[Series, Channel],
    *,
    training: records.JsonObject,
    gates: Sequence[records.JsonObject],
    options: Options,
    watch: records.JsonObject,
    resumed: records.JsonObject,
) -> records.BeginLine:
    """Return everything that a fit knows of itself before its first step.

    Args:
        run: the fit.
        lineup: its attacks, calibrated.
        series: the channel of each series, in the order of the logs.
        training: how the model is trained.
        gates: what each gate says of itself.
        options: how it is watched.
        watch: further settings of what watches it.
        resumed: the fit whose checkpoint it goes on from: its run id, and what its defences had
            released; empty where it begins with no checkpoint.
    """
    leaks = {one.attack: channel.leak for one, channel in series.items()}
    plans = list(lineup.plans)
    for channel in dict.fromkeys(series.values()):
        if channel.at_weights:  # whom these compare is found out after the line-up
            plans += [channel.plan(attack) for attack in channel.attacks]
    played = {plan.attack.name: plan for plan in plans}
    return records.BeginLine(
        run="",
        resumed=_ended_fit(resumed) if resumed else None,
        versions=versions(),
        machine={"processor": platform.machine(), "device": run.device.type},
        model=_model(run, lineup.trained),
        training=training,
        monitor=records.MonitorFacts(
            client=run.client,
            clients=run.processes if run.client == "rank" else 1,
            adversary=tuple(sorted(capability.value for capability in run.assumed)),
            local_steps=options.local_steps,
            stages=tuple(str(stage) for stage in options.stages),
            more={"looks": options.cadence.argument, **watch},
        ),
        families=tuple({leak.name: leak for leak in leaks.values()}.values()),
        attacks=tuple(
            records.AttackFacts(
                name=name,
                class_name=type(plan.attack).__name__,
                family=leaks[name].name,
                adversary=plan.attack.threat_model.summary,
                needs=tuple(sorted(c.value for c in plan.attack.threat_model.needs)),
                reads=tuple(reads_of(plan, run.anatomy)),
                exposed=plan.exposed,
                config=plan.attack.config(),
            )
            for name, plan in played.items()
        ),
        not_played=tuple(
            records.NotPlayed(name=row.attack, family=leaks[row.attack].name, reason=row.why_not)
            for row in lineup.rows
            if row.why_not is not None and row.attack not in played
        ),
        unread=lineup.unread,
        defenses=tuple(defense_facts(defense) for defense in run.defenses),
        gates=tuple(_gate(gate) for gate in gates),
    )


def _ended_fit(state: records.JsonObject) -> records.EndedFit:
    """Return what a checkpoint says of the fit that wrote it."""
    return records.EndedFit(
        run=state["run"],
        privacy=tuple(
            records.ReleasesBefore(
                defense=one["defense"],
                history=tuple(records.Releases(*row) for row in one["history"]),
            )
            for one in state["privacy"]
        ),
    )


def _gate(settings: records.JsonObject) -> records.GateFacts:
    """Return what the record says of a gate; other settings of one's own gate are left out."""
    names = {one.name for one in fields(records.GateFacts)}
    return records.GateFacts(**{name: value for name, value in settings.items() if name in names})


def defense_facts(defense: Defense) -> records.DefenseFacts:
    """Return what the record says of a defence."""
    return records.DefenseFacts(
        name=defense.name,
        class_name=type(defense).__name__,
        guarantee=defense.guarantee,
        settings=defense.settings(),
    )


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that a figure may depend on."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def _model(run: Run, trained: Sequence[str]) -> records.ModelFacts:
    anatomy = run.anatomy
    model = anatomy.model
    parameters = dict(anatomy.root.named_parameters())
    configs = (getattr(model, "peft_config", None) or {}).values()
    kinds = (getattr(config, "peft_type", None) or type(config).__name__ for config in configs)
    return records.ModelFacts(
        class_name=type(model).__name__,
        kind=anatomy.kind,
        vocabulary=anatomy.vocab_size,
        parameters=sum(p.numel() for p in parameters.values()),
        trained_parameters=sum(p.numel() for p in parameters.values() if p.requires_grad),
        trained=tuple(trained),
        peft=tuple(sorted(str(getattr(kind, "value", kind)) for kind in kinds)),
        dtype=str(next(iter(parameters.values())).dtype).removeprefix("torch."),
    )


def optimizers_of(optimizers: Sequence[Optimizer]) -> list[dict[str, object]]:
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
