"""What each attack read in a fit: one summary for each attack and stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from lightning_fedleak.report.logs import FitLog, grouped
from lightning_fedleak.report.records import (
    CANARIES,
    ENTITIES,
    HIGH,
    MEMORIZATION,
    STANDARD_FAMILIES,
    AttackFacts,
    Family,
    JsonObject,
    Judgement,
    MetricValue,
    ResultLine,
    default_limit,
    judged,
)
from lightning_fedleak.report.wording import NOT_RECORDED, interval

SUM = "sum"
"""The client whose update is that of all together."""
RELEASED = "released"
"""The stage of the trained model."""
BOUND = "bound/"  # begins the names of what an account of DP allows
AUDIT = "audit/"  # begins the names of games that are played with canaries of one's own
CHOOSES = "chooses"
"""Begins the abilities that a server has only if it is dishonest."""
WITHHOLDING = ("withheld", "raise")
"""What a gate of rounds does to an update that does not leave."""

SHOWN = 0.025
"""Probability of error, over all looks, with which one of them excludes guessing.

Smaller: a result needs more looks to be conclusive.
"""

NEXT_TO_NONE = 0.1
"""An attack that reads no further above chance read next to nothing. Not tuned."""

Points = list[tuple[int, float | None]]


class Point(NamedTuple):
    """The headline of an attack at one look; values are None where it is unknown.

    Attributes:
        step: optimizer step or round.
        client: whose update; empty where results are not separated by client.
        value, low, high: the headline and the ends of its 95% interval.
        n: number of tokens, texts or games that it is computed from.
        withheld: whether a gate kept the update back.
    """

    step: int
    client: str
    value: float | None
    low: float | None
    high: float | None
    n: int | None
    withheld: bool = False

    @property
    def rate(self) -> MetricValue:
        """The value with its interval."""
        return MetricValue(self.value, self.low, self.high)


@dataclass(frozen=True)
class QuotedLook:
    """The look by which a report speaks of an attack.

    Attributes:
        step: optimizer step or round.
        n: number of tokens, texts or games that it is computed from.
        rate: the headline.
        rates: the known values of all metrics.
        control: the headline of what was read of known words or texts; None without a control.
        is_latest: whether it is the latest look; else it is the highest one.
    """

    step: int
    n: int | None
    rate: MetricValue
    rates: Mapping[str, float]
    control: float | None
    is_latest: bool


@dataclass(frozen=True)
class _ClientSummary:
    """What an attack read of one client.

    Attributes:
        looks: measurements of updates that left.
        withheld: updates that did not leave.
        unknown: measurements without a result.
        mean, highest: of the headline over the looks.
        last: the latest headline.
    """

    looks: int
    withheld: int
    unknown: int
    mean: float | None
    highest: float | None
    last: MetricValue | None


@dataclass(frozen=True)
class AttackSummary:
    """What an attack read at a stage; numbers are of updates that left.

    Attributes:
        name, stage, adversary, reads, config: as recorded.
        family: what kind of leak it reads.
        headline: the metric of the means below.
        chance: its value for guessing.
        dishonest: whether its server chooses weights or layers; None where that was not recorded.
        exposed: whether what it reads was shared.
        looks: measurements with a result.
        withheld: updates that did not leave.
        unknown: measurements without a result.
        why_unknown: the latest reason.
        n: tokens, texts or games that the numbers rest on, in all.
        mean, highest: over the looks.
        worst_client: highest value of a single client.
        clients: by their names; empty where there is one.
        last: the latest value, of several clients that of the worst one.
        last_n: its ``n``.
        last_client: whose it is.
        rates: the latest value of each metric that the family shows.
        visible: the smallest rate that the latest look could have seen; None where not recorded.
        pool: names the texts that it compared; results compare on the same ones only.
        allowed: the most that an account of DP allows it at the latest look, by metric; empty where
            no account was compared.
        refuted: whether any look refuted that account; None where none was compared.
        certified: share of the looks at which the attack's own check held; None without a check.
        control: the headline of what it read of known words or texts in the same step, at the
            latest look; None where it has no control, or none that could be read.
        control_of_a_part: the same of a part of the batch; None where none was tried.
        blind: measurements whose low number says nothing, since their control is low too.
        by_aggregation: those that are low because the batch holds more than it can distinguish.
        control_note: what its controls change, in a sentence; empty where they change nothing.
        above_chance: how far above guessing it read, up to 1, as far as controls are high; -1 where
            that is unknown.
        stale: why the weights that training ended with are unknown, where earlier ones were read.
        p_value: how probable guessing is to do so well at any look, corrected for all of them;
            None where not recorded.
        conclusive: whether guessing is excluded; None where that does not apply.
        points: the headline over the looks.
        quoted: the look by which a report speaks of the attack; None without a result.
    """

    name: str
    stage: str
    family: Family = field(metadata={"write": attrgetter("name")})
    headline: str
    chance: float
    adversary: str
    dishonest: bool | None
    reads: Sequence[str]
    config: JsonObject | None
    exposed: bool
    looks: int
    withheld: int
    unknown: int
    why_unknown: str | None
    n: int
    mean: float | None
    highest: float | None
    worst_client: float | None
    clients: Mapping[str, _ClientSummary]
    last: MetricValue | None
    last_n: int | None
    last_client: str | None
    rates: Mapping[str, MetricValue | None]
    visible: float | None
    pool: str | None
    allowed: Mapping[str, float]
    refuted: bool | None
    certified: float | None
    stale: str | None = None
    control: float | None = None
    control_of_a_part: float | None = None
    blind: int = 0
    by_aggregation: int = 0
    control_note: str = ""
    above_chance: float = -1.0
    p_value: float | None = None
    conclusive: bool | None = None
    points: Sequence[Point] = ()
    quoted: QuotedLook | None = None

    @property
    def has_control(self) -> bool:
        """Whether it has a control, also one that could not be read."""
        return self.control is not None or bool(self.control_note)

    @property
    def is_blind(self) -> bool:
        """Whether its numbers are low, and one of them says nothing since its control is low."""
        return self.blind > 0 and self.above_chance <= HIGH


def _is_list(line: ResultLine) -> bool:
    """Return whether a line counts the rows that a trained model gives away."""
    return line.attack == "records" and line.stage == RELEASED


def _is_of_values(line: ResultLine) -> bool:
    """Return whether a line counts values that were found in the texts; planted ones have ranks."""
    is_released = line.attack.startswith("entity/") and "first" not in line.metrics
    return is_released or "/entity/" in line.attack


def _values_in_words(line: ResultLine) -> tuple[str, str]:
    """Return what a line on values is about, and what it says."""
    attack, is_read, kind = line.attack.partition("/entity/")
    answer = interval(line.metric("recall" if is_read else "auc"))
    if is_read:
        title, answer = f"Values, {kind}, as {attack} reads them", f"{answer} of their tokens"
    else:
        _, kind, place = attack.split("/")
        place, again, _ = place.partition("_x2")
        title = f"Values, {kind} in the {place}{', in several rows' * bool(again)}"
        answer = f"AUC {answer} against those that were left out"
    title += f" ({line.stage})" * (line.stage in ("local", "aggregate"))
    title += f", client {line.client}" * (line.client is not None)
    return title, f"unknown: {line.unknown}" if line.unknown else f"{answer}; n {line.n}"


class FitResults:
    """The results of a fit, and which of its updates left their clients.

    Args:
        log: the fit.

    Attributes:
        lines: of attacks that were played.
        clients: whose results there are, in the order in which they came.
        several: whether results are separated by client.
        withheld: updates, by client and round, that a gate did not let leave.
        rows: the newest counts of training rows that the trained model gives away, without why they
            are unknown; None where no rows were listed.
        values: what the newest results say of values that were found in the texts.
    """

    def __init__(self, log: FitLog) -> None:
        self._log = log
        self._facts = {one.name: one for one in log.begin.attacks} if log.begin else {}
        played = [line for line in log.results if line.reason_not_played is None]
        self.lines = [one for one in played if not _is_list(one) and not _is_of_values(one)]
        self.values = dict(map(_values_in_words, filter(_is_of_values, played)))
        self.rows = next((line.values for line in reversed(played) if _is_list(line)), None)
        self.clients = list(
            dict.fromkeys(str(x.client) for x in self.of_clients if x.client is not None)
        )
        self.several = len(self.clients) > 1 or log.is_federation
        self.withheld = {
            (str(line.client), line.step)
            for line in log.decisions
            if line.did in WITHHOLDING and line.client is not None
        }

    @property
    def of_clients(self) -> list[ResultLine]:
        """Results of single clients: without those of their sum."""
        return [line for line in self.lines if line.stage != "aggregate"]

    def without_withheld(self, lines: Iterable[ResultLine]) -> list[ResultLine]:
        """Return the lines without those of updates that did not leave."""
        return [
            line
            for line in lines
            if line.stage == "aggregate" or (str(line.client), line.step) not in self.withheld
        ]

    def _family(self, attack: str, lines: Sequence[ResultLine]) -> Family:
        """Return an attack's family; where it was not recorded, by the metrics of its lines."""
        begin = self._log.begin
        family = None if begin is None else begin.family_of(attack)
        if family is not None:  # in this version's words for a family of this package
            standard = {one.name: one for one in (*STANDARD_FAMILIES, CANARIES, ENTITIES)}
            return standard.get(family.name, family)
        metrics = {name for line in lines for name in line.metrics}
        if any(line.stage == RELEASED for line in lines):
            return CANARIES if "exposure" in metrics else MEMORIZATION
        return next((one for one in STANDARD_FAMILIES if one.headline in metrics), UNKNOWN_FAMILY)

    def attacks(self) -> list[AttackSummary]:
        """Return a summary for each attack and stage.

        Those without a result come first, then the one that read furthest above chance.
        """
        by_attack = grouped(self.lines, lambda line: (line.attack, line.stage))
        summaries = [self._attack(name, stage, lines) for (name, stage), lines in by_attack.items()]
        return sorted(summaries, key=lambda one: (one.looks > 0, -one.above_chance))

    def _attack(self, name: str, stage: str, lines: Sequence[ResultLine]) -> AttackSummary:
        # Canaries, values, and the checkpoint that is chosen, have a series of their own.
        played = name.removeprefix(AUDIT).removesuffix("_chosen").partition("/")[0]
        facts = self._facts.get(played, AttackFacts(name=name, family=""))
        family = self._family(played, lines)
        measured = {metric for line in lines for metric in line.metrics}
        headline = family.headline_of(measured)
        # An attack on the trained model has rates of membership or of extraction.
        absent = set(family.shown_metrics) - measured if stage == RELEASED and measured else set()
        total = self._client(lines, headline)
        clients = self._by_client(lines, headline) if self.several else {}
        has_worst = stage != "aggregate" and len(clients) > 1
        sent = self.without_withheld(lines)
        shared = [line for line in sent if line.was_shared]
        worst = _numbers(line.value(f"{headline}_worst_client") for line in shared)
        if has_worst:
            worst += _numbers(client.mean for client in clients.values())
        last = _last_line(sent, headline, of_worst=has_worst)
        reasons = [_reason(line, headline) for line in sent]
        is_stale = stage == RELEASED and bool(last.metrics) and not self.several
        refuted = _numbers(line.value("refuted") for line in sent)
        summary = AttackSummary(
            name=name,
            stage=stage,
            family=family,
            headline=headline,
            chance=family.chance_of(headline),
            adversary=facts.adversary or NOT_RECORDED,
            dishonest=_is_dishonest(facts),
            reads=list(facts.reads),
            config=facts.config or lines[-1].config,
            exposed=any(line.was_shared for line in lines),
            looks=total.looks,
            withheld=total.withheld,
            unknown=total.unknown,
            why_unknown=next(filter(None, reversed(reasons)), None),
            n=_samples(sent, headline),
            mean=total.mean,
            highest=total.highest,
            worst_client=max(worst, default=None),
            clients=clients,
            last=last.metric(headline),
            last_n=last.n,
            last_client=str(last.client) if last.metrics and len(clients) > 1 else None,
            rates={name: last.metric(name) for name in family.shown_metrics if name not in absent},
            visible=last.value("visible"),
            p_value=_p_value(sent),
            pool=last.pool,
            allowed={
                name.removeprefix(BOUND): value
                for name, value in last.values.items()
                if name.startswith(BOUND)
            },
            refuted=any(refuted) if refuted else None,
            certified=mean(_numbers(line.value("certified") for line in sent)),
            stale=reasons[-1] if is_stale else None,
            control=last.value(f"{headline}_of_control"),
            control_of_a_part=last.value(f"{headline}_of_a_part"),
            points=self._points(lines, headline),
            quoted=_quoted(shared, last, headline, by_chance=family.chance_of(headline) > 0),
        )
        limit = self._limit(name, family, headline)
        judgements = [_judged(line, family, headline, limit) for line in shared]
        summary = _with_controls(summary, [one for one in judgements if one is not None])
        return replace(summary, conclusive=_is_conclusive(summary))

    def _limit(self, name: str, family: Family, headline: str) -> float:
        """Return what an attack's number must not exceed to be low: the highest of its gates."""
        begin, chance = self._log.begin, family.chance_of(headline)
        roots = (f"leakage/{name}/{headline}", f"leakage/worst/{family.name}")
        watched = {root + end for root in roots for end in ("", "_low", "_high", "_worst_client")}
        limits = [
            gate.at_most
            for gate in (begin.gates if begin else None) or ()
            if gate.at_most is not None and gate.metric in watched
        ]
        return max(limits, default=default_limit(chance))

    def _by_client(self, lines: Sequence[ResultLine], headline: str) -> dict[str, _ClientSummary]:
        by_client = grouped(lines, lambda line: str(line.client))
        return {client: self._client(part, headline) for client, part in by_client.items()}

    def _client(self, lines: Sequence[ResultLine], headline: str) -> _ClientSummary:
        sent = self.without_withheld(lines)
        values = _numbers(line.value_of_this_look(headline) for line in sent if line.was_shared)
        rates = [rate for line in sent if (rate := line.metric(headline)) is not None]
        return _ClientSummary(
            looks=len(values),
            withheld=len(lines) - len(sent),
            unknown=sum(_reason(line, headline) is not None for line in sent),
            mean=mean(values),
            highest=max(values, default=None),
            last=rates[-1] if rates else None,
        )

    def _points(self, lines: Sequence[ResultLine], headline: str) -> list[Point]:
        """Return the headline over the looks; of updates that were withheld too."""
        points = []
        for line in lines:
            if line.was_shared:
                rate = line.metric(headline) or MetricValue()
                client = str(line.client) if self.several else ""
                withheld = (str(line.client), line.step) in self.withheld
                points.append(
                    Point(line.step, client, rate.value, rate.low, rate.high, line.n, withheld)
                )
        return sorted(points, key=attrgetter("step"))


UNKNOWN_FAMILY = Family(name="unknown")
"""Of an attack that was not recorded, and whose metrics are of no family of this package."""


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None of no values."""
    return math.fsum(values) / len(values) if values else None


def _numbers(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _judged(
    line: ResultLine, family: Family, headline: str, limit: float
) -> tuple[float, Judgement] | None:
    """Return what an attack read at a look, and what that counts for; None without a result."""
    value = line.value_of_this_look(headline)
    if value is None:
        return None
    control, part = (_control(line, headline, end) for end in ("control", "a_part"))
    counted = judged(
        value,
        control,
        part=math.nan if part is None else part,
        at_most=limit,
        chance=family.chance_of(headline),
        known=family.known,
    )
    return value, counted


def _control(line: ResultLine, headline: str, end: str) -> float | None:
    """Return a control of a look; NaN where it could not be read, None where there is none."""
    name = f"{headline}_of_{end}"
    if name not in line.metrics:
        return None
    value = line.value(name)
    return math.nan if value is None else value


def _with_controls(
    attack: AttackSummary, judgements: Sequence[tuple[float, Judgement]]
) -> AttackSummary:
    """Return a summary with its controls, and with what its numbers count for beside them.

    Without guessing one look counts. A look at a game against guessing is of few trials, so that
    the highest of many is high by chance: there the mean counts, that of the worst client, and what
    is pooled. What was read of a look whose control is low was read, and is a lower bound.
    """
    blind = [one for _, one in judgements if math.isnan(one.value)]
    aggregated = [one for _, one in judgements if one.by_aggregation]
    counted = [value if math.isnan(one.value) else one.value for value, one in judgements]
    values = [max(counted, default=None)]
    if attack.chance:
        pooled = attack.last.value if attack.last else None
        values = [mean(counted), attack.worst_client, pooled]
    numbers = _numbers(values)
    above = (max(numbers) - attack.chance) / (1 - attack.chance) if numbers else -1.0
    note = (blind or aggregated or [one for _, one in judgements if one.why] or [Judgement(0)])[-1]
    return replace(
        attack,
        blind=len(blind),
        by_aggregation=len(aggregated),
        control_note=note.why,
        above_chance=above,
    )


def _p_value(lines: Sequence[ResultLine]) -> float | None:
    """Return the lowest p-value of several clients, times their number (Bonferroni)."""
    by_client = grouped(lines, lambda line: str(line.client))
    each = [_numbers(x.value("p_over_looks") for x in part) for part in by_client.values()]
    lowest = [min(values) for values in each if values]
    return min(1.0, len(lowest) * min(lowest)) if lowest else None


def _is_conclusive(attack: AttackSummary) -> bool | None:
    """Return whether guessing is excluded: by one look, or else by the interval."""
    if attack.p_value is not None and attack.p_value <= SHOWN:
        return True
    if not attack.chance:  # a family without guessing: blind naming, where that was compared
        return False if attack.p_value is not None and attack.above_chance > NEXT_TO_NONE else None
    if attack.p_value is not None:
        return False
    interval = attack.last
    if interval is None or interval.low is None or interval.high is None:
        return None
    return not interval.low <= attack.chance <= interval.high


_NO_RESULT = ResultLine(step=0, stage="", attack="", metrics={})


def _last_line(lines: Sequence[ResultLine], headline: str, *, of_worst: bool) -> ResultLine:
    """Return the last line with a result; or of each client's last line that of the worst one.

    Without a result it is a line without metrics.
    """
    measured = [line for line in lines if line.metric(headline) is not None]
    if not of_worst:
        return measured[-1] if measured else _NO_RESULT
    newest = {str(line.client): line for line in measured}
    return max(newest.values(), key=lambda line: line.value(headline) or 0.0, default=_NO_RESULT)


def _quoted(
    lines: Sequence[ResultLine], last: ResultLine, headline: str, *, by_chance: bool
) -> QuotedLook | None:
    """Return the latest look, or the highest where neither guessing nor pooling is a question.

    The highest of many games against guessing is high by chance.
    """
    measured = [line for line in lines if line.metric(headline) is not None]
    if not measured:
        return None
    is_latest = by_chance or last.stage == RELEASED or last.is_pooled(headline)
    line = last if is_latest else max(measured, key=lambda one: one.value(headline) or 0.0)
    return QuotedLook(
        line.step,
        line.n,
        line.metric(headline) or MetricValue(),
        line.values,
        line.value(f"{headline}_of_control"),
        is_latest,
    )


def _is_dishonest(facts: AttackFacts) -> bool | None:
    """Return whether the server of an attack chooses something; None where it was not recorded."""
    if facts.needs is None:
        return None
    return any(need.startswith(CHOOSES) for need in facts.needs)


def _reason(line: ResultLine, headline: str) -> str | None:
    """Return why a line has no result; None where it has one, or nothing was shared."""
    if line.unknown or not line.was_shared or line.metric(headline) is not None:
        return line.unknown or None
    return f"its {headline or 'value'} is no number"


def _samples(lines: Sequence[ResultLine], headline: str) -> int:
    """Return tokens, texts or games in all; of what is pooled each client's highest count."""
    pooled: dict[str, int] = {}
    single = 0
    for line in lines:
        n = line.n or 0
        if line.is_pooled(headline) or line.stage == RELEASED:  # the same texts at every look
            client = str(line.client)
            pooled[client] = max(pooled.get(client, 0), n)
        else:
            single += n
    return single + sum(pooled.values())
