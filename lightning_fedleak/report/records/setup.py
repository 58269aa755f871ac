"""The first line of ``run.jsonl``: the set-up of a fit, written before its first step.

A *fit* is one training run, or one federation. Its *monitor* runs the attacks, at *looks* (steps at
which leakage is measured); a *gate* acts if a metric exceeds a limit.
:class:`BeginLine` is the first line. The other classes are its parts: model, monitor, attacks,
defences and gates. A :class:`DefenseLine` adds a defence that was not known then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypedDict

from lightning_fedleak.report.records import fields
from lightning_fedleak.report.records.families import Family, standard_family
from lightning_fedleak.report.records.lines import RunLine


class _ReleasesBefore(TypedDict):
    """The releases of a defence before a fit, restored from a checkpoint."""

    defense: str
    history: fields.History


class _DefenseSettings(TypedDict):
    """The types of the settings of defences that a report uses; further settings are unchecked."""

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
    """A defence, its guarantee and its settings.

    Attributes:
        name: name of the defence in the logs.
        class_name: name of its class.
        guarantee: its privacy guarantee, in a sentence that begins with "none" if it has none.
        settings: its settings by name.
    """

    name: str
    class_name: str | None = fields.named("class", default=None)
    guarantee: str | None = None
    settings: Annotated[fields.JsonObject, _DefenseSettings] | None = None


@dataclass(frozen=True, kw_only=True)
class DefenseLine(DefenseFacts, RunLine):
    """A defence that is not in the first line, such as that of a client with its own account."""

    kind: str = field(default="defense", init=False)


class _EndedFit(TypedDict):
    """The fit that a fit resumes from a checkpoint: its id, and the releases of its defences."""

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
    """The settings of the monitor of a fit.

    Attributes:
        client: what counts as a client: ``"rank"`` for each process, ``"world"`` for all together,
            or the name of a client of a federation.
        clients: number of clients.
        adversary: the capabilities that the adversary is assumed to have; None if not recorded.
        local_steps: optimizer steps in a round; None if the gradient of each step is shared.
        stages: the stages at which it measured; None if not recorded.
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
    """An attack that a fit runs.

    Attributes:
        name: name of the attack in the logs.
        class_name: name of its class.
        family: name of its family.
        adversary: its threat model, in a sentence.
        needs: the capabilities that its adversary must have.
        reads: names of the parameters that it reads.
        exposed: whether these are shared.
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
    """An attack that a fit does not run, and the reason."""

    name: str
    family: str | None = None
    reason: str = fields.named("why")


@dataclass(frozen=True, kw_only=True)
class GateFacts(fields.Record):
    """A gate, which acts if a metric exceeds a limit.

    Attributes:
        name: name of the gate.
        metric: the metric that it judges.
        at_most: the limit.
        action: what it does above the limit.
        bound: whether it judges the ``"value"`` or the ``"lower"`` end of its interval.
        alpha: error probability of this interval.
        strict: whether an unknown result counts as above the limit.
        patience: number of such results in a row that it lets pass.
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
    """The set-up of a fit, before its first step.

    Attributes:
        fit: name that all monitors of the fit share.
        resumed: the fit whose checkpoint it resumes; None if it starts without a checkpoint.
        versions: versions of the packages on which results may depend.
        machine: processor and device.
        model: the model.
        training: the strategy and the settings of training.
        monitor: the settings of the monitor.
        families: the families of its attacks.
        attacks: the attacks that it runs.
        not_played: the attacks that it does not run; None if not recorded.
        unread: names of the trained parameters that no attack reads; None if not recorded.
        defenses: the defences in their order.
        gates: the gates; None if not recorded.
        settings_hash: SHA-256 of all settings.
        next_look: step of the first look; None if none is planned.
        weights: one hash of all ``trained`` and one of all ``frozen`` tensors before the first
            step; a group that is too large is left out. None for sharded weights and federations,
            and where both are too large.
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
        """Whether the fit is a federation, which counts rounds instead of steps."""
        return (self.training or {}).get("strategy") == "federation"

    def family_of(self, attack: str) -> Family | None:
        """Return the family of an attack by the attack's name; None if it is not recorded."""
        name = next((facts.family for facts in self.attacks if facts.name == attack), "")
        recorded = {family.name: family for family in self.families}
        return recorded.get(name) or standard_family(name) if name else None
