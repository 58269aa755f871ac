"""The lines of the two log files: ``leakage.jsonl``, and ``run.jsonl`` after its first line.

``leakage.jsonl`` has a :class:`ResultLine` for each attack, look and stage. ``run.jsonl`` begins
with the line in :mod:`~lightning_fedleak.report.records.setup`. Lines on looks, metrics, gates and
checkpoints follow in the order of the run, and an :class:`EndLine` closes it.

A *fit* is one training run. A *look* is a measurement of leakage by all attacks at one step. A
*stage* is a place at which data are attacked, such as before or after a client's defence. A *gate*
is a rule that acts if a metric exceeds a limit. A *release* is one update with the noise of
differential privacy, which an accountant counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_fedleak.report.records import fields
from lightning_fedleak.report.records.controls import WEAK_REFERENCE

# ---- a line of leakage.jsonl --------------------------------------------------------------------

NOT_PLAYED = "not played: "
"""Beginning of ``unknown`` in the line of an attack that was not run; its reason follows."""


@dataclass(frozen=True)
class MetricValue(fields.Record):
    """A metric's value and the ends of its 95% interval; None is unknown."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class ResultLine(fields.Record):
    """The result of one attack at one look and stage.

    Attributes:
        schema: version of the line.
        run: id of the fit; empty in the first version.
        step: optimizer step or round of the look.
        stage: the data that was attacked: ``"local"`` before a client's defence, ``"shared"`` after
            it, ``"aggregate"`` for the sum over clients, ``"released"`` for the trained model.
        client: the client; ``"pooled"`` or ``"sum"`` for several.
        round: number of the round; None without rounds.
        attack: name of the attack in the logs.
        config: settings of the attack.
        n: number of tokens, texts or games that the values are computed from.
        exposed: whether the data that the attack reads was shared; None counts as shared.
        metrics: values by name; None is unknown.
        unknown: the reason why there is no result; None if there is one.
        pool: identifies the candidate texts: only results on the same ones are comparable. None if
            the attack has no pool of candidates.
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
        """Whether the data that the attack reads left the client, as assumed by default."""
        return self.exposed is not False

    @property
    def reason_not_played(self) -> str | None:
        """The reason why the attack was not run; None if it was."""
        if self.unknown is None or not self.unknown.startswith(NOT_PLAYED):
            return None
        return self.unknown.removeprefix(NOT_PLAYED)

    def metric(self, name: str) -> MetricValue | None:
        """Return a metric with its interval; None if it is unknown."""
        metric = self.metrics.get(name)
        return None if metric is None or metric.value is None else metric

    def value(self, name: str) -> float | None:
        """Return a metric's value; None if it is unknown."""
        metric = self.metric(name)
        return None if metric is None else metric.value

    @property
    def values(self) -> dict[str, float]:
        """The values of the metrics that have one."""
        values = {name: self.value(name) for name in self.metrics}
        return {name: value for name, value in values.items() if value is not None}

    def is_pooled(self, name: str) -> bool:
        """Return whether a metric covers all looks so far; the line then has both values."""
        return f"{name}_of_this_look" in self.metrics

    def value_of_this_look(self, name: str) -> float | None:
        """Return a metric's value at this look alone; None if it is unknown."""
        return self.value(f"{name}_of_this_look" if self.is_pooled(name) else name)


# ---- run.jsonl: the fields of all its lines -----------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunLine(fields.Record):
    """The fields of every line of ``run.jsonl``.

    Attributes:
        schema: version of the line.
        run: id of the fit, as in ``leakage.jsonl``.
        kind: the kind of line, by which its class is chosen.
        time: time of writing, in UTC.
    """

    schema: int = fields.SCHEMA
    run: str
    kind: str
    time: str | None = None


# ---- run.jsonl: the lines after the first -------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReferenceFacts(fields.Record):
    """The reference model with which membership scores are compared, without its training rows.

    Attributes:
        kind: the form in which the user gave it: ``"module"``, ``"folder"`` or ``"adapters"``;
            models of kind ``"auto"`` and ``"function"`` were trained before the first step.
        model: class of the model, without adapters.
        rows: number of its training rows, as the user stated it; None if unstated.
        weights: SHA-256 of all its weights.
        models: number of reference models; each scores the rows that it was not trained on.
    """

    kind: str
    model: str
    rows: int | None = None
    weights: str
    models: int = 1

    def in_words(self, strength: float | None = None, *, weak: bool = False) -> str:
        """Return a description of the reference, on one line.

        Args:
            strength: its gain over the base model, on texts that neither model was trained on, as a
                share of the trained model's gain; None if unknown.
            weak: whether it is so weak that a low result counts as unknown.
        """
        rows = "an unstated number of rows" if self.rows is None else f"{self.rows:,} rows"
        description = f"{self.model} ({self.kind}), trained on {rows}"
        if self.kind in ("auto", "function"):
            recipe = "the run's recipe" if self.kind == "auto" else "a function of the user's"
            several = f"{self.models} of {self.model}, each" if self.models > 1 else self.model
            description = f"{several} trained by {recipe} on {rows.removesuffix('rows')}other rows"
        words = f"{description}, weights {self.weights[:16]}"
        if strength is not None:
            words += f"; on texts that neither was trained on it has {strength:.0%} of the gain"
        return f"{words}; {WEAK_REFERENCE}" if weak else words


@dataclass(frozen=True, kw_only=True)
class PoolLine(RunLine):
    """The candidate texts of attacks on the trained weights.

    Attributes:
        way: source of the held-out texts: ``"not yet seen"`` in the first epoch, ``"left out"`` of
            the training data at random, or ``"given"`` by the user.
        train: number of candidates that are rows of the training data.
        others: number of held-out texts.
        repeated: number of texts excluded from membership tests, since another row repeats them in
            whole or in part.
        copied: number of texts among ``train`` that are in several rows and are tested for
            extraction alone; 0 in older records, which had none.
        short: number of texts excluded because they have too few label tokens.
        searched: share of the data's rows that was searched for repeats.
        base: SHA-256 of the texts and of the base model's scores on them; None if unknown.
        reference: the reference model; None without one.
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
    """The privacy that a defence with an accountant has spent so far.

    Attributes:
        defense: name of the defence.
        epsilon, delta: the guarantee for all its releases; None if unknown.
        noise_multiplier, sample_rate: those of its last release.
        releases: number of releases.
        history: all releases; None if they were not recorded.
        sampling: the sampling scheme: ``"poisson"`` or ``"without_replacement"``; None if no
            accountant composes the releases.
        check: verdict of the audit with planted gradients over the whole fit, on one line that
            begins with its result; None before the end, and without such an audit.
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
    """The end of a look: the measurements of all attacks at one step.

    Attributes:
        step: optimizer step or round.
        client: the client of the round; None outside of federations.
        utility: the user's own metrics.
        privacy: the privacy that each defence has spent so far.
        seconds: duration of the look.
        seconds_of: duration of each attack in it, by name.
        failures: number of unknown results so far, of attacks that apply to what was shared.
        next_look: planned step of the next look; None for a look at the trained weights.
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
    """A change of plan: the next look moves to another step, or is cancelled.

    Attributes:
        step: optimizer steps so far.
        next_look: step of the look that replaces it; None if the run ends without one.
    """

    kind: str = field(default="plan", init=False)
    step: int
    next_look: fields.Count | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointLine(RunLine):
    """A checkpoint: the training loop requested the state for it.

    Attributes:
        step: optimizer steps so far.
        weights: hash of all trained tensors; None where they were not hashed.
        trained: names of these tensors, without the parts that wrappers of the model add.
    """

    kind: str = field(default="checkpoint", init=False)
    step: int
    weights: str | None = None
    trained: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class MetricsLine(RunLine):
    """A change of the user's metrics or of a privacy account since the last look.

    Attributes:
        step: optimizer step or round.
        client: the client; None outside of federations.
        utility: the user's own metrics that changed.
        privacy: the privacy that each defence has spent so far, at the end of an epoch or run.
    """

    kind: str = field(default="metrics", init=False)
    step: int
    client: str | int | None = None
    utility: Mapping[str, fields.Limit | None] | None = None
    privacy: tuple[Spending, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class GateLine(RunLine):
    """An action of a gate.

    Attributes:
        gate: name of the gate; empty for an update withheld because it cannot be read.
        did: the action, such as ``"withheld"``.
        step: optimizer step or round.
        client: the client of the update; None outside of federations.
        metric: the metric that the gate judges.
        source: the metric of a single attack from which the judged value came.
        measured: the value; None is unknown.
        at_most: the limit.
        reason: the reason why the value is unknown, or why the gate acted.
        hardened: the settings of defences that it strengthened, each in words.
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
    """The end of a fit, and its last line.

    Attributes:
        step: total number of optimizer steps or rounds.
        outcome: ``"finished"``, or the class of the exception that ended it.
        privacy: the privacy that each defence has spent in total.
        results: number of lines that ``leakage.jsonl`` has, including those of earlier fits.
        results_head: hash of the last of these lines.
        weights: type and SHA-256 of each trained tensor by its name; None if they were not hashed:
            sharded weights, a federation, or a fit that did not finish.
        row_order: HMAC, under the key in ``row_order.key``, of the row numbers of the training data
            in the order of training; None for a federation, with differential privacy, if rows have
            no numbers, or if the fit did not finish.
    """

    kind: str = field(default="end", init=False)
    step: int
    outcome: str = fields.named("how")
    privacy: tuple[Spending, ...] | None = None
    results: fields.Count | None = None
    results_head: str | None = None
    weights: Mapping[str, str] | None = None
    row_order: str | None = None
