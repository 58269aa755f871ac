"""The lines of the two log files: ``leakage.jsonl``, and ``run.jsonl`` after its first line.

``leakage.jsonl`` has a :class:`ResultLine` for each attack, look and stage. ``run.jsonl`` begins
with the line in :mod:`~lightning_fedleak.report.records.setup`. Lines on looks, metrics, gates and
checkpoints follow in the order of the run, and an :class:`EndLine` closes it.

A *fit* is one training run. A *look* is a measurement of leakage by all attacks at one step. A
*stage* is a place at which data are attacked, such as before or after a client's defence. A *gate*
is a rule that acts if a metric exceeds a limit. A *release* is one update with the noise of
differential privacy, which an accountant counts.

A low value is judged by the positive control of the same look: the attack on data whose content is
known. If it also recovers little there, a low value is no evidence that nothing leaks, and
:func:`judge_value` returns NaN (unknown). Of a user's own metric, the name shows on which data it
is, and whether lower is better (:func:`is_validation`, :func:`is_lower_better`).
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lightning_fedleak.report.records import fields

HIGH = 0.5
"""Share of the distance from chance to certainty above which a value is high.

A report marks values above it, and it is the default limit if no gate sets one. Lower: more values
are called high, and lower controls suffice. Not tuned.
"""

WEAK = "weak_reference"
"""Name of a metric: 1 if the reference model that a score is compared with is weak, else 0."""
STRENGTH = "reference_strength"
"""Name of a metric: the reference's gain on held-out texts as a share of the trained model's."""
WEAK_REFERENCE = "weak reference: it shows less than there is, and a low number is unknown"


def default_limit(chance: float) -> float:
    """Return the limit up to which a value is low if no gate sets one.

    Args:
        chance: the value that guessing reaches.
    """
    return chance + HIGH * (1 - chance)


@dataclass(frozen=True)
class Judgement:
    """A value judged by its positive control.

    Attributes:
        value: the value to compare with the limit; NaN is unknown.
        why: the value and its control in a sentence, if the control changes the value or it is low
            by aggregation; else empty.
        by_aggregation: whether it is low because the batch holds more than the attack can
            distinguish.
    """

    value: float
    why: str = ""
    by_aggregation: bool = False


def judge_value(
    value: float,
    control: float | None,
    *,
    at_most: float,
    chance: float,
    part: float = math.nan,
    known: str = "words",
    cause: str = "",
    bound: float = math.nan,
    is_proof: bool = True,
) -> Judgement:
    """Return a value as it counts at a limit, judged by the control.

    A value above the limit is not changed. Neither is any value without a control. A lower value is
    judged as follows:

    - Behind declared defences it is unknown, unless a bound on every reader is at most the limit.
    - If the control is above the limit, the value is scaled up as if the control were 1.
    - Otherwise, if the control on a part of the batch is high, the value is not changed: the whole
      batch holds more than the attack can distinguish.
    - Otherwise it is unknown.

    Args:
        value: The value of a metric; NaN is unknown.
        control: The metric on the positive control in the same step; NaN if it could not be
            measured, None if the attack has no control.
        at_most: The limit; 1 allows everything.
        chance: The value that guessing reaches.
        part: The control on a part of the batch; NaN if none was measured.
        known: The content of the control for the sentence, a plural such as "words".
        cause: The reason why the control could not be measured, or may be low.
        bound: The value that a reader who knows all else can have behind declared defences; 1 if
            nothing bounds it, NaN without such defences.
        is_proof: Whether it holds for every reader of all that is counted, so that no control is
            needed; False for one text among others, and for words that are counted differently.
    """
    if at_most >= 1 or control is None or math.isnan(value) or value > at_most:
        return Judgement(value)
    if bound > at_most:
        most = "nothing bounds what a reader who knows all else recovers"
        if bound < 1:
            most = f"a reader who knows all else may reach {bound:.2f}"
        return Judgement(math.nan, f"it reads {value:.2f}, but behind the declared defences {most}")
    if control >= 1:
        return Judgement(value)
    measured = f"it reads {value:.2f}, and {control:.2f} of known {known} in the same step"
    if math.isnan(control):
        measured = f"it reads {value:.2f}, and could not be checked on known {known}"
        measured += f" ({cause})" if cause else ""
    if control > at_most:
        share = (value - chance) / (control - chance)
        counted = chance + share * (1 - chance)
        return Judgement(counted, f"{measured}, so that it counts as {counted:.2f}")
    if bound <= at_most and is_proof:
        return Judgement(value, f"{measured}; no reader can have more than {bound:.2f}")
    if part > max(at_most, default_limit(chance)):
        why = (
            f"low by aggregation: {measured}, but {part:.2f} of known {known} of a part of the "
            "batch, which holds more than this attack can distinguish"
        )
        return Judgement(value, why, by_aggregation=True)
    if math.isnan(control):
        return Judgement(math.nan, measured)
    why = f"{measured}: this attack cannot show more than {control:.2f} here"
    why += f". {cause}" if cause else ""
    return Judgement(math.nan, why)


_HELD_OUT = re.compile(r"(^|[_/.\- ])(val|valid|validation|eval|test|dev)([_/.\- ]|$)", re.I)
_TRAINING = re.compile(r"^(train|training)([_/.\- ]|$)|^loss$", re.I)
_LOWER_IS_BETTER = re.compile(r"loss|perplexity|ppl|error|nll|wer", re.I)


def is_lower_better(metric: str) -> bool:
    """Return whether lower values of a metric are better, by its name."""
    return bool(_LOWER_IS_BETTER.search(metric))


def is_validation(metric: str) -> bool:
    """Return whether a metric is of held-out data, by its name."""
    return bool(_HELD_OUT.search(metric))


def is_training(metric: str) -> bool:
    """Return whether a metric is of training batches, by its name."""
    return bool(_TRAINING.search(metric)) and not is_validation(metric)


def title_of(metric: str) -> str:
    """Return a metric's name; for a training metric, with the number of batches it is of.

    ``loss`` in transformers and ``train_loss_epoch`` in Lightning are means of several batches.
    """
    if not is_training(metric):
        return metric
    name, comma, client = metric.partition(", ")  # the records of a federation name the client
    mean = name.lower() == "loss" or name.endswith("_epoch")
    what = "loss" if "loss" in name.lower() else "metric"
    description = f"mean training {what}" if mean else f"training {what} of one batch"
    return f"{name} ({description}){comma}{client}"


def best_of(metric: str, values: Iterable[float]) -> float:
    """Return the best value: the lowest if lower is better for the metric, else the highest.

    Args:
        metric: The name of the metric.
        values: Its values, at least one.
    """
    return (min if is_lower_better(metric) else max)(values)


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
        pool: names the candidate texts within one process, by a keyed hash: only results on the
            same ones are comparable. None if the attack has no pool of candidates.
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
        rows: number of its training rows, as the user stated it, of several the smallest; None if
            unstated.
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
        several = f"{self.models} of {self.model}" if self.models > 1 else self.model
        description = f"{several} ({self.kind}), trained on {rows}"
        if self.kind in ("auto", "function"):
            recipe = "the run's recipe" if self.kind == "auto" else "a function of the user's"
            several += ", each" * (self.models > 1)
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
