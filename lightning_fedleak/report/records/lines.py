"""The lines of ``leakage.jsonl`` (what attacks read) and of ``run.jsonl`` (what the fit was)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, TypedDict

from lightning_fedleak.report.records.families import Family, standard_family
from lightning_fedleak.report.records.fields import (
    OTHER_KEYS,
    SCHEMA,
    Amount,
    Count,
    History,
    JsonObject,
    Limit,
    Record,
    Share,
    keys_of,
    named,
)

# ---- a line of leakage.jsonl --------------------------------------------------------------------

NOT_PLAYED = "not played: "
"""Begins the reason in the lines of attacks that a run left out."""


@dataclass(frozen=True)
class MetricValue(Record):
    """A metric's value and the ends of its 95% interval; None is unknown."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class ResultLine(Record):
    """What one attack read at one look and stage.

    Attributes:
        schema: version of the line.
        run: id of the fit; empty in the first version.
        step: optimizer step, or round, of the look.
        stage: where in the data's way out it was read.
        client: whose data; ``"pooled"`` or ``"sum"`` for several.
        round: number of the round; None without rounds.
        attack: its name in the logs.
        config: its settings.
        n: number of tokens, texts or games that the values are computed from.
        exposed: whether what it reads was shared; None counts as shared.
        metrics: values by name.
        unknown: why there is no result; None where there is one.
        pool: names the texts that were compared; results compare on the same ones only. None where
            no pool was.
    """

    schema: int = SCHEMA
    run: str = ""
    step: int
    stage: str
    client: str | int | None = None
    round: int | None = None
    attack: str
    config: JsonObject | None = None
    n: int | None = None
    exposed: bool | None = None
    metrics: Mapping[str, MetricValue | None]
    unknown: str | None = None
    pool: str | None = None

    @property
    def was_shared(self) -> bool:
        """Whether what the attack reads left the client; so it did unless the line denies it."""
        return self.exposed is not False

    @property
    def reason_not_played(self) -> str | None:
        """Why the run left the attack out; None where it was played."""
        if self.unknown is None or not self.unknown.startswith(NOT_PLAYED):
            return None
        return self.unknown.removeprefix(NOT_PLAYED)

    def metric(self, name: str) -> MetricValue | None:
        """Return a metric and its interval; None where it is unknown."""
        metric = self.metrics.get(name)
        return None if metric is None or metric.value is None else metric

    def value(self, name: str) -> float | None:
        """Return a metric's value; None where it is unknown."""
        metric = self.metric(name)
        return None if metric is None else metric.value

    @property
    def values(self) -> dict[str, float]:
        """The values of all metrics that are known."""
        known = {name: self.value(name) for name in self.metrics}
        return {name: value for name, value in known.items() if value is not None}

    def is_pooled(self, name: str) -> bool:
        """Return whether a metric is of all looks so far, with that of this look beside it."""
        return f"{name}_of_this_look" in self.metrics

    def value_of_this_look(self, name: str) -> float | None:
        """Return a metric's value at this look alone; None where it is unknown."""
        return self.value(f"{name}_of_this_look" if self.is_pooled(name) else name)


# ---- run.jsonl: what all its lines hold ---------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunLine(Record):
    """What every line of ``run.jsonl`` holds.

    Attributes:
        schema: version of the line.
        run: id of the fit, as in ``leakage.jsonl``.
        kind: which line it is.
        time: when it was written, in UTC.
    """

    schema: int = SCHEMA
    run: str
    kind: str
    time: str | None = None


# ---- a fit begins -------------------------------------------------------------------------------


class _DefenseSettings(TypedDict):
    """The settings of a defence that a report uses; others are anything."""

    trust: str
    unit: str
    sampling: str
    accountant: str
    ledger: str
    target_epsilon: Amount | None
    clip: Amount | None
    max_grad_norm: Amount | str | None  # "auto", or norms by layers
    clients: int
    poisson: bool | None


@dataclass(frozen=True, kw_only=True)
class DefenseFacts(Record):
    """What a defence is and promises.

    Attributes:
        name: its name in the logs.
        class_name: its class.
        guarantee: what it promises, in a sentence; begins with "none" where it promises nothing.
        settings: by name.
    """

    name: str
    class_name: str | None = named("class", default=None)
    guarantee: str | None = None
    settings: Annotated[JsonObject, keys_of(_DefenseSettings)] | None = None


@dataclass(frozen=True, kw_only=True)
class DefenseLine(DefenseFacts, RunLine):
    """A defence that the first line does not know, such as a client's own account."""

    kind: str = field(default="defense", init=False)


@dataclass(frozen=True, kw_only=True)
class ReleasesBefore(Record):
    """The releases of a defence that were restored with a checkpoint."""

    defense: str
    history: History


@dataclass(frozen=True, kw_only=True)
class EndedFit(Record):
    """The fit whose checkpoint a fit goes on from: its id, and what its defences had released."""

    run: str = ""
    privacy: tuple[ReleasesBefore, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelFacts(Record):
    """The model: its class, sizes in parameters, and the names of those that are trained."""

    class_name: str = named("class")
    kind: str | None = None
    vocabulary: int | None = None
    parameters: int | None = None
    trained_parameters: int | None = None
    trained: tuple[str, ...] = ()
    peft: tuple[str, ...] = ()
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class MonitorFacts(Record):
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
    more: JsonObject = field(default_factory=dict, metadata=OTHER_KEYS)


@dataclass(frozen=True, kw_only=True)
class AttackFacts(Record):
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
    class_name: str | None = named("class", default=None)
    family: str
    adversary: str | None = None
    needs: tuple[str, ...] | None = None
    reads: tuple[str, ...] = ()
    exposed: bool | None = None
    config: JsonObject | None = None


@dataclass(frozen=True, kw_only=True)
class NotPlayed(Record):
    """An attack that is left out, and why."""

    name: str
    family: str | None = None
    reason: str = named("why")


@dataclass(frozen=True, kw_only=True)
class GateFacts(Record):
    """A gate: the metric that it watches, its limit, what it does above it, and how it judges.

    Attributes:
        strict: whether an unknown result counts as above the limit.
        patience: how many such results in a row it lets pass.
    """

    name: str
    metric: str
    at_most: Limit | None = None
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
        versions: of the packages that a number may depend on.
        machine: processor and device.
        model: the model.
        training: how it is trained.
        monitor: what watches it.
        families: those of its attacks.
        attacks: those that are played.
        not_played: those that are left out; None where that was not recorded.
        unread: names of the trained parameters that no attack reads; None: not recorded.
        defenses: in their order.
        gates: None where they were not recorded.
        settings_hash: SHA-256 of all settings.
        next_look: step of the first look at a step; None where none is planned.
        weights: hash of all ``trained`` and of all ``frozen`` tensors before the first step,
            but for a kind that is large; None where they are sharded or of a federation.
        evidence: which steps are kept, from the ``first``: ``steps``, or their ``share`` and the
            SHA-256 ``seed_hash`` of what draws them; None: none.
    """

    kind: str = field(default="begin", init=False)
    fit: str | None = None
    resumed: EndedFit | None = None
    versions: Mapping[str, str] | None = None
    machine: JsonObject | None = None
    model: ModelFacts | None = None
    training: JsonObject | None = None
    monitor: MonitorFacts | None = None
    families: tuple[Family, ...] = ()
    attacks: tuple[AttackFacts, ...] = ()
    not_played: tuple[NotPlayed, ...] | None = None
    unread: tuple[str, ...] | None = None
    defenses: tuple[DefenseFacts, ...] = ()
    gates: tuple[GateFacts, ...] | None = None
    settings_hash: str | None = None
    next_look: Count | None = None
    weights: Mapping[str, str] | None = None
    evidence: JsonObject | None = None

    @property
    def is_federation(self) -> bool:
        """Whether it is of a federation: it counts rounds, and has several clients."""
        return (self.training or {}).get("strategy") == "federation"

    def family_of(self, attack: str) -> Family | None:
        """Return the family of an attack by its name; None where it is not recorded."""
        name = next((one.family for one in self.attacks if one.name == attack), "")
        recorded = {family.name: family for family in self.families}
        return recorded.get(name) or standard_family(name) if name else None


@dataclass(frozen=True, kw_only=True)
class PoolLine(RunLine):
    """The candidate texts of attacks on the trained weights.

    Attributes:
        way: where those come from that were not trained on: ``"not yet seen"`` in the first epoch,
            ``"left out"`` by a draw, or ``"given"``.
        train: how many are rows of the training data.
        others: number of held-out texts.
        repeated: texts of which another row repeats the whole or a part, so that they are not told
            from others.
        copied: texts among ``train`` that stand in several rows, which are asked for extraction
            alone; 0 in older records, which had none.
        short: texts that were left out because they have too few label tokens.
        searched: share of the data's rows that was searched for repeats.
        base: SHA-256 of the texts and what the base model says of them; None: not known.
    """

    kind: str = field(default="pool", init=False)
    way: str
    train: int
    others: int
    repeated: int
    short: int
    searched: Share
    copied: int = 0
    base: str | None = None


# ---- while it goes on ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spending(Record):
    """What a defence that accounts has spent so far.

    Attributes:
        defense: its name.
        epsilon, delta: of all its releases; None where it is unknown.
        noise_multiplier, sample_rate: of its last release.
        releases: how many there were.
        history: all of them, where they were recorded.
        sampling: how they were drawn: ``"poisson"``, ``"without_replacement"``, or
            ``"at-most-N-of-n"`` for truncated batches; None where that was not recorded.
    """

    defense: str
    epsilon: Amount | None = None
    delta: Share | None = None
    noise_multiplier: Amount | None = None
    sample_rate: Share | None = None
    releases: int | None = None
    history: History | None = None
    sampling: str | None = None


@dataclass(frozen=True, kw_only=True)
class LookLine(RunLine):
    """A look is over.

    Attributes:
        step: optimizer step or round.
        client: whose round it was; None outside of federations.
        utility: the user's own metrics.
        privacy: what each defence has spent until then.
        seconds: what the look took.
        seconds_of: what each attack took of it, by name.
        failures: results so far that are unknown.
        next_look: step of the next look at a step, as planned now; None for one at the weights.
    """

    kind: str = field(default="look", init=False)
    step: int
    client: str | int | None = None
    utility: Mapping[str, Limit | None] | None = None
    privacy: tuple[Spending, ...] | None = None
    seconds: float | None = None
    seconds_of: Mapping[str, Amount] | None = None
    failures: int | None = None
    next_look: Count | None = None


@dataclass(frozen=True, kw_only=True)
class PlanLine(RunLine):
    """The look that was planned next is at another step, or is not made.

    Attributes:
        step: optimizer steps so far.
        next_look: step of the look that takes its place; None where the run ends without.
    """

    kind: str = field(default="plan", init=False)
    step: int
    next_look: Count | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointLine(RunLine):
    """The state for a checkpoint was asked for.

    Attributes:
        step: optimizer steps so far.
        weights: hash of all trained tensors; None where they were not hashed.
        trained: names of these tensors, without what wraps the model.
    """

    kind: str = field(default="checkpoint", init=False)
    step: int
    weights: str | None = None
    trained: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class KeptLine(RunLine):
    """A step that was to be kept is over. Codes are HMACs with a key in the kept file.

    Attributes:
        step: optimizer steps before it.
        file: SHA-256 of the kept file; None where the step could not be kept.
        batch: code of the step's batches.
        loss: what each backward began with.
        weights: code of the trained tensors after the step.
        bytes: size of the file.
        seconds: what keeping took.
    """

    kind: str = field(default="kept", init=False)
    step: Count
    file: str | None = None
    batch: str | None = None
    loss: tuple[Limit | None, ...] = ()
    weights: str | None = None
    bytes: Count | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class MetricsLine(RunLine):
    """The user's metrics or an account have changed since the last look.

    Attributes:
        step: optimizer step or round.
        client: whose they are; None outside of federations.
        utility: those of the user's own metrics that changed.
        privacy: what each defence has spent until then; none where no epoch or run has ended.
    """

    kind: str = field(default="metrics", init=False)
    step: int
    client: str | int | None = None
    utility: Mapping[str, Limit | None] | None = None
    privacy: tuple[Spending, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class GateDecision(Record):
    """What a gate did.

    Attributes:
        gate: its name; empty for an update that cannot be read, which leaves with no gate's leave.
        did: what it did.
        step: optimizer step or round.
        client: whose update; None outside of federations.
        metric: what it judged.
        source: the metric of one attack whose value that was.
        measured: the value; None is unknown.
        at_most: the limit.
        reason: why the value is unknown, or why the gate acted.
        hardened: what it turned up, each in words.
    """

    gate: str
    did: str
    step: int
    client: str | int | None = None
    metric: str | None = None
    source: str | None = named("of", default=None)
    measured: float | None = None
    at_most: Limit | None = None
    reason: str | None = named("why", default=None)
    hardened: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class GateLine(GateDecision, RunLine):
    """A gate has acted."""

    kind: str = field(default="gate", init=False)

    @property
    def decision(self) -> GateDecision:
        """What the gate did."""
        return GateDecision(**{one.name: getattr(self, one.name) for one in fields(GateDecision)})


@dataclass(frozen=True, kw_only=True)
class SentLine(RunLine):
    """An answer of a client is about to leave, with a code of this line's hash.

    Attributes:
        step: round.
        client: whose answer.
        results, results_head: as :class:`EndLine` has them.
    """

    kind: str = field(default="sent", init=False)
    step: int
    client: str | int | None = None
    results: Count | None = None
    results_head: str | None = None


@dataclass(frozen=True, kw_only=True)
class ClientLine(RunLine):
    """The server got an answer of a client.

    Attributes:
        step: round.
        client: whose answer, as the server names it.
        code: :func:`code_of` the :class:`SentLine` in the client's log.
    """

    kind: str = field(default="client", init=False)
    step: int
    client: str | int | None = None
    code: str


@dataclass(frozen=True, kw_only=True)
class EndLine(RunLine):
    """A fit is over. No line of it comes later.

    Attributes:
        step: optimizer steps or rounds in all.
        outcome: ``"finished"``, or the class of what was raised.
        privacy: what each defence has spent in all.
        results: how many lines ``leakage.jsonl`` has by then, those of earlier fits too.
        results_head: hash of the last of them.
        weights: type and SHA-256 of each trained tensor by its name; None where they were not
            hashed: sharded, of a federation, or of a fit that did not finish.
        row_order: HMAC of the numbers of all rows of the training data as they were taken, with the
            key in ``row_order.key``; None of a federation, with differential privacy, where rows
            have no numbers, or the fit did not finish.
        seed: what drew the kept steps; None where none were drawn.
    """

    kind: str = field(default="end", init=False)
    step: int
    outcome: str = named("how")
    privacy: tuple[Spending, ...] | None = None
    results: Count | None = None
    results_head: str | None = None
    weights: Mapping[str, str] | None = None
    row_order: str | None = None
    seed: str | None = None


RUN_LINES: Mapping[str, type[RunLine]] = {
    line.kind: line
    for line in (
        *(BeginLine, PoolLine, DefenseLine, LookLine, PlanLine, MetricsLine, GateLine),
        *(CheckpointLine, KeptLine, SentLine, ClientLine, EndLine),
    )
}
"""By the kind of the line."""
