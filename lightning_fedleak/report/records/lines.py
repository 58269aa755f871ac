"""The lines of ``leakage.jsonl``, what attacks read, and of ``run.jsonl`` after its first line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_fedleak.report.records import fields
from lightning_fedleak.report.records.controls import WEAK_REFERENCE

# ---- a line of leakage.jsonl --------------------------------------------------------------------

NOT_PLAYED = "not played: "
"""Begins the reason in the lines of attacks that a run left out."""


@dataclass(frozen=True)
class MetricValue(fields.Record):
    """A metric's value and the ends of its 95% interval; None is unknown."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class ResultLine(fields.Record):
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

    schema: int = fields.SCHEMA
    run: str = ""
    step: int
    stage: str
    client: str | int | None = None
    round: int | None = None
    attack: str
    config: fields.JsonObject | None = None
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
class RunLine(fields.Record):
    """What every line of ``run.jsonl`` holds.

    Attributes:
        schema: version of the line.
        run: id of the fit, as in ``leakage.jsonl``.
        kind: which line it is.
        time: when it was written, in UTC.
    """

    schema: int = fields.SCHEMA
    run: str
    kind: str
    time: str | None = None


# ---- run.jsonl: after its first line ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReferenceFacts(fields.Record):
    """The reference model that scores were compared with; nothing of the rows that trained it.

    Attributes:
        kind: what was given: ``"module"``, ``"folder"`` or ``"adapters"``; ``"auto"`` and
            ``"function"`` were trained before the first step.
        model: class of the model, without adapters.
        rows: how many it was trained on, as the user says; None where nobody said it.
        weights: SHA-256 of all its weights.
        models: how many there are, each of which scores the rows that it was not trained on.
    """

    kind: str
    model: str
    rows: int | None = None
    weights: str
    models: int = 1

    def in_words(self, strength: float | None = None, *, weak: bool = False) -> str:
        """Return which reference it is, on one line.

        Args:
            strength: share of the model's gain on other texts that it has; None: not known.
            weak: a low number beside it is unknown.
        """
        rows = "an unstated number of rows" if self.rows is None else f"{self.rows:,} rows"
        how = f"{self.model} ({self.kind}), trained on {rows}"
        if self.kind in ("auto", "function"):
            recipe = "the run's recipe" if self.kind == "auto" else "a function of the user's"
            several = f"{self.models} of {self.model}, each" if self.models > 1 else self.model
            how = f"{several} trained by {recipe} on {rows.removesuffix('rows')}other rows"
        words = f"{how}, weights {self.weights[:16]}"
        if strength is not None:
            words += f"; on texts that neither was trained on it has {strength:.0%} of the gain"
        return f"{words}; {WEAK_REFERENCE}" if weak else words


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
        reference: the model that scores are compared with; None where none was given.
    """

    kind: str = field(default="pool", init=False)
    way: str
    train: int
    others: int
    repeated: int
    short: int
    searched: fields.Share
    copied: int = 0
    base: str | None = None
    reference: ReferenceFacts | None = None


@dataclass(frozen=True, kw_only=True)
class Spending(fields.Record):
    """What a defence that accounts has spent so far.

    Attributes:
        defense: its name.
        epsilon, delta: of all its releases; None where it is unknown.
        noise_multiplier, sample_rate: of its last release.
        releases: how many there were.
        history: all of them, where they were recorded.
        sampling: how they were drawn: ``"poisson"`` or ``"without_replacement"``; None where no
            accountant composes them.
        check: what gradients showed that the defence planted in the whole fit, in one line that
            begins with the verdict's result; None before its end, and where there were none.
    """

    defense: str
    epsilon: fields.Amount | None = None
    delta: fields.Share | None = None
    noise_multiplier: fields.Amount | None = None
    sample_rate: fields.Share | None = None
    releases: int | None = None
    history: fields.History | None = None
    sampling: str | None = None
    check: str | None = None


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
        failures: results so far that are unknown, where the attack is made for what was shared.
        next_look: step of the next look at a step, as planned now; None for one at the weights.
    """

    kind: str = field(default="look", init=False)
    step: int
    client: str | int | None = None
    utility: Mapping[str, fields.Limit | None] | None = None
    privacy: tuple[Spending, ...] | None = None
    seconds: float | None = None
    seconds_of: Mapping[str, fields.Amount] | None = None
    failures: int | None = None
    next_look: fields.Count | None = None


@dataclass(frozen=True, kw_only=True)
class PlanLine(RunLine):
    """The look that was planned next is at another step, or is not made.

    Attributes:
        step: optimizer steps so far.
        next_look: step of the look that takes its place; None where the run ends without.
    """

    kind: str = field(default="plan", init=False)
    step: int
    next_look: fields.Count | None = None


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
    utility: Mapping[str, fields.Limit | None] | None = None
    privacy: tuple[Spending, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class GateLine(RunLine):
    """A gate has acted.

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

    kind: str = field(default="gate", init=False)
    gate: str
    did: str
    step: int
    client: str | int | None = None
    metric: str | None = None
    source: str | None = fields.named("of", default=None)
    measured: float | None = None
    at_most: fields.Limit | None = None
    reason: str | None = fields.named("why", default=None)
    hardened: tuple[str, ...] | None = None


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
    """

    kind: str = field(default="end", init=False)
    step: int
    outcome: str = fields.named("how")
    privacy: tuple[Spending, ...] | None = None
    results: fields.Count | None = None
    results_head: str | None = None
    weights: Mapping[str, str] | None = None
    row_order: str | None = None
