"""The first line of ``run.jsonl``: what a fit knows of its set-up before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypedDict

from lightning_fedleak.report.records import fields
from lightning_fedleak.report.records.families import Family, standard_family
from lightning_fedleak.report.records.lines import RunLine


class _ReleasesBefore(TypedDict):
    """The releases of a defence that were restored with a checkpoint."""

    defense: str
    history: fields.History


class _DefenseSettings(TypedDict):
    """The settings of a defence that a report uses; others are anything."""

    trust: str
    unit: str
    sampling: str
    accountant: str
    ledger: str
    target_epsilon: fields.Amount | None
    clip: fields.Amount | None
    max_grad_norm: fields.Amount | str | None  # "auto", or norms by layers
    clients: int
    poisson: bool | None


@dataclass(frozen=True, kw_only=True)
class DefenseFacts(fields.Record):
    """What a defence is and promises.

    Attributes:
        name: its name in the logs.
        class_name: its class.
        guarantee: what it promises, in a sentence; begins with "none" where it promises nothing.
        settings: by name.
    """

    name: str
    class_name: str | None = fields.named("class", default=None)
    guarantee: str | None = None
    settings: Annotated[fields.JsonObject, _DefenseSettings] | None = None


@dataclass(frozen=True, kw_only=True)
class DefenseLine(DefenseFacts, RunLine):
    """A defence that the first line does not know, such as a client's own account."""

    kind: str = field(default="defense", init=False)


class _EndedFit(TypedDict):
    """The fit whose checkpoint a fit goes on from: its id, and what its defences had released."""

    run: str
    privacy: tuple[Annotated[fields.JsonObject, _ReleasesBefore], ...]


@dataclass(frozen=True, kw_only=True)
class ModelFacts(fields.Record):
    """The model: its class, sizes in parameters, and the names of those that are trained."""

    class_name: str = fields.named("class")
    kind: str | None = None
    vocabulary: int | None = None
    parameters: int | None = None
    trained_parameters: int | None = None
    trained: tuple[str, ...] = ()
    peft: tuple[str, ...] = ()
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class MonitorFacts(fields.Record):
    """The settings of what watched the fit.

    Attributes:
        client: what a client is: ``"rank"``, ``"world"``, or one of a federation.
        clients: how many there are.
        adversary: what the adversary is taken to have; None where that was not recorded.
        local_steps: optimizer steps of a round; None where single gradients are shared.
        stages: where it measured; None where that was not recorded.
        more: its further settings.
    """

    client: str | int | None = None
    clients: int = 1
    adversary: tuple[str, ...] | None = None
    local_steps: int | None = None
    stages: tuple[str, ...] | None = None
    more: fields.JsonObject = field(default_factory=dict, metadata=fields.OTHER_KEYS)


@dataclass(frozen=True, kw_only=True)
class AttackFacts(fields.Record):
    """An attack that is played.

    Attributes:
        name: its name in the logs.
        class_name: its class.
        family: name of its family.
        adversary: its threat model, in a sentence.
        needs: what the adversary must be able to do.
        reads: names of the parameters that it reads.
        exposed: whether they are shared.
        config: its settings.
    """

    name: str
    class_name: str | None = fields.named("class", default=None)
    family: str
    adversary: str | None = None
    needs: tuple[str, ...] | None = None
    reads: tuple[str, ...] = ()
    exposed: bool | None = None
    config: fields.JsonObject | None = None


@dataclass(frozen=True, kw_only=True)
class NotPlayed(fields.Record):
    """An attack that is left out, and why."""

    name: str
    family: str | None = None
    reason: str = fields.named("why")


@dataclass(frozen=True, kw_only=True)
class GateFacts(fields.Record):
    """A gate: the metric that it watches, its limit, what it does above it, and how it judges.

    Attributes:
        strict: whether an unknown result counts as above the limit.
        patience: how many such results in a row it lets pass.
    """

    name: str
    metric: str
    at_most: fields.Limit | None = None
    action: str | None = None
    bound: str | None = None
    alpha: float | None = None
    strict: bool | None = None
    patience: int | None = None


@dataclass(frozen=True, kw_only=True)
class BeginLine(RunLine):
    """What a fit knows of itself before its first step.

    Attributes:
        fit: the same for all monitors of one fit.
        resumed: the fit that it goes on from; None where it begins with no checkpoint.
        versions: The versions of the packages that a number may depend on.
        machine: processor and device.
        model: the model.
        training: how it is trained.
        monitor: what watches it.
        families: those of its attacks.
        attacks: those that are played.
        not_played: those that are left out; None where that was not recorded.
        unread: names of the trained parameters that no attack reads; None: not recorded.
        defenses: The defenses in their order.
        gates: None where they were not recorded.
        settings_hash: SHA-256 of all settings.
        next_look: step of the first look at a step; None where none is planned.
        weights: hash of all ``trained`` and of all ``frozen`` tensors before the first step,
            but for a kind that is large; None where they are sharded or of a federation.
    """

    kind: str = field(default="begin", init=False)
    fit: str | None = None
    resumed: Annotated[fields.JsonObject, _EndedFit] | None = None
    versions: Mapping[str, str] | None = None
    machine: fields.JsonObject | None = None
    model: ModelFacts | None = None
    training: fields.JsonObject | None = None
    monitor: MonitorFacts | None = None
    families: tuple[Family, ...] = ()
    attacks: tuple[AttackFacts, ...] = ()
    not_played: tuple[NotPlayed, ...] | None = None
    unread: tuple[str, ...] | None = None
    defenses: tuple[DefenseFacts, ...] = ()
    gates: tuple[GateFacts, ...] | None = None
    settings_hash: str | None = None
    next_look: fields.Count | None = None
    weights: Mapping[str, str] | None = None

    @property
    def is_federation(self) -> bool:
        """Whether it is of a federation: it counts rounds, and has several clients."""
        return (self.training or {}).get("strategy") == "federation"

    def family_of(self, attack: str) -> Family | None:
        """Return the family of an attack by its name; None where it is not recorded."""
        name = next((facts.family for facts in self.attacks if facts.name == attack), "")
        recorded = {family.name: family for family in self.families}
        return recorded.get(name) or standard_family(name) if name else None
