"""The results of a fit, summed up by attack and stage, with what they count for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter

from lightning_fedleak.report import records
from lightning_fedleak.report.attacks import (
    NEXT_TO_NONE,
    RELEASED,
    AttackSummary,
    ClientSummary,
    Point,
    QuotedLook,
)
from lightning_fedleak.report.logs import FitLog, grouped
from lightning_fedleak.report.wording import NOT_RECORDED, interval

_BOUND = "bound/"  # begins the names of what an account of DP allows
_AUDIT = "audit/"  # begins the names of games that are played with canaries of one's own
_CHOOSES = "chooses"
"""Begins the abilities that a server has only if it is dishonest."""
_WITHHOLDING = ("withheld", "raise")
"""What a gate of rounds does to an update that does not leave."""

_SHOWN = 0.025
"""Probability of error, over all looks, with which one of them excludes guessing.

Smaller: a result needs more looks to be conclusive.
"""


def _is_list(line: records.ResultLine) -> bool:
    """Return whether a line counts the rows that a trained model gives away."""
    return line.attack == "records" and line.stage == RELEASED


def _is_of_values(line: records.ResultLine) -> bool:
    """Return whether a line counts values that were found in the texts; planted ones have ranks."""
    is_released = line.attack.startswith("entity/") and "first" not in line.metrics
    return is_released or "/entity/" in line.attack


def _values_in_words(line: records.ResultLine) -> tuple[str, str]:
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
        clients: whose results there are.
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
        self.clients = {str(x.client) for x in self.of_clients if x.client is not None}
        self.several = len(self.clients) > 1 or log.is_federation
        self.withheld = {
            (str(line.client), line.step)
            for line in log.decisions
            if line.did in _WITHHOLDING and line.client is not None
        }

    @property
    def of_clients(self) -> list[records.ResultLine]:
        """Results of single clients: without those of their sum."""
        return [line for line in self.lines if line.stage != "aggregate"]

    def without_withheld(self, lines: Iterable[records.ResultLine]) -> list[records.ResultLine]:
        """Return the lines without those of updates that did not leave."""
        return [
            line
            for line in lines
            if line.stage == "aggregate" or (str(line.client), line.step) not in self.withheld
        ]

    def _family(self, attack: str, lines: Sequence[records.ResultLine]) -> records.Family:
        """Return an attack's family; where it was not recorded, by the metrics of its lines.

        It is ``unknown`` where no family of this package has those metrics.
        """
        begin = self._log.begin
        family = None if begin is None else begin.family_of(attack)
        if family is not None:  # in this version's words for a family of this package
            families = (*records.STANDARD_FAMILIES, records.CANARIES, records.ENTITIES)
            return next((one for one in families if one.name == family.name), family)
        metrics = {name for line in lines for name in line.metrics}
        if any(line.stage == RELEASED for line in lines):
            return records.CANARIES if "exposure" in metrics else records.MEMORIZATION
        unknown = records.Family(name="unknown")
        return next((one for one in records.STANDARD_FAMILIES if one.headline in metrics), unknown)

    def attacks(self) -> list[AttackSummary]:
        """Return a summary for each attack and stage.

        Those without a result come first, then the one that read furthest above chance.
        """
        by_attack = grouped(self.lines, lambda line: (line.attack, line.stage))
        summaries = [self._attack(name, stage, lines) for (name, stage), lines in by_attack.items()]
        return sorted(summaries, key=lambda one: (one.looks > 0, -one.above_chance))

    def _attack(self, name: str, stage: str, lines: Sequence[records.ResultLine]) -> AttackSummary:
        # Canaries, values, and the checkpoint that is chosen, have a series of their own.
        played = name.removeprefix(_AUDIT).removesuffix("_chosen").partition("/")[0]
        facts = self._facts.get(played, records.AttackFacts(name=name, family=""))
        family = self._family(played, lines)
        measured = {metric for line in lines for metric in line.metrics}
        headline = family.headline_of(measured)
        # An attack on the trained model has rates of membership or of extraction.
        absent = set(family.shown_metrics) - measured if stage == RELEASED and measured else set()
        total = self._client(lines, headline)
        by_client = grouped(lines if self.several else (), lambda line: str(line.client))
        clients = {client: self._client(part, headline) for client, part in by_client.items()}
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
            **(vars(total) | {"last": last.metric(headline)}),
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
            why_unknown=next(filter(None, reversed(reasons)), None),
            n=_samples(sent, headline),
            worst_client=max(worst, default=None),
            clients=clients,
            last_n=last.n,
            last_client=str(last.client) if last.metrics and len(clients) > 1 else None,
            rates={name: last.metric(name) for name in family.shown_metrics if name not in absent},
            visible=last.value("visible"),
            p_value=_p_value(sent),
            pool=last.pool,
            allowed={
                name.removeprefix(_BOUND): value
                for name, value in last.values.items()
                if name.startswith(_BOUND)
            },
            refuted=any(refuted) if refuted else None,
            certified=_mean(_numbers(line.value("certified") for line in sent)),
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

    def _limit(self, name: str, family: records.Family, headline: str) -> float:
        """Return what an attack's number must not exceed to be low: the highest of its gates."""
        begin, chance = self._log.begin, family.chance_of(headline)
        roots = (f"leakage/{name}/{headline}", f"leakage/worst/{family.name}")
        watched = {root + end for root in roots for end in ("", "_low", "_high", "_worst_client")}
        limits = [
            gate.at_most
            for gate in (begin.gates if begin else None) or ()
            if gate.at_most is not None and gate.metric in watched
        ]
        return max(limits, default=records.default_limit(chance))

    def _client(self, lines: Sequence[records.ResultLine], headline: str) -> ClientSummary:
        sent = self.without_withheld(lines)
        values = _numbers(line.value_of_this_look(headline) for line in sent if line.was_shared)
        return ClientSummary(
            looks=len(values),
            withheld=len(lines) - len(sent),
            unknown=sum(_reason(line, headline) is not None for line in sent),
            mean=_mean(values),
            highest=max(values, default=None),
            last=_last_line(sent, headline, of_worst=False).metric(headline),
        )

    def _points(self, lines: Sequence[records.ResultLine], headline: str) -> list[Point]:
        """Return the headline over the looks; of updates that were withheld too."""
        points = []
        for line in filter(attrgetter("was_shared"), lines):
            rate = line.metric(headline) or records.MetricValue()
            client = str(line.client) if self.several else ""
            withheld = (str(line.client), line.step) in self.withheld
            points.append(
                Point(line.step, client, rate.value, rate.low, rate.high, line.n, withheld)
            )
        return sorted(points, key=attrgetter("step"))


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean; None of no values."""
    return math.fsum(values) / len(values) if values else None


def _numbers(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _judged(
    line: records.ResultLine, family: records.Family, headline: str, limit: float
) -> tuple[float, records.Judgement] | None:
    """Return what an attack read at a look, and what that counts for; None without a result."""
    value = line.value_of_this_look(headline)
    if value is None:
        return None
    if line.value(records.WEAK) and value <= limit:
        return value, records.Judgement(math.nan, records.WEAK_REFERENCE)
    control, part = (line.value(f"{headline}_of_{end}") for end in ("control", "a_part"))
    if control is None and f"{headline}_of_control" in line.metrics:
        control = math.nan  # it could not be read
    counted = records.judged(
        value,
        control,
        part=math.nan if part is None else part,
        at_most=limit,
        chance=family.chance_of(headline),
        known=family.known,
    )
    return value, counted


def _with_controls(
    attack: AttackSummary, judgements: Sequence[tuple[float, records.Judgement]]
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
        values = [_mean(counted), attack.worst_client, pooled]
    numbers = _numbers(values)
    above = (max(numbers) - attack.chance) / (1 - attack.chance) if numbers else -1.0
    notes = [one.why for one in blind or aggregated or [one for _, one in judgements] if one.why]
    return replace(
        attack,
        blind=len(blind),
        by_aggregation=len(aggregated),
        control_note=notes[-1] if notes else "",
        above_chance=above,
    )


def _p_value(lines: Sequence[records.ResultLine]) -> float | None:
    """Return the lowest p-value of several clients, times their number (Bonferroni)."""
    by_client = grouped(lines, lambda line: str(line.client))
    each = [_numbers(x.value("p_over_looks") for x in part) for part in by_client.values()]
    lowest = [min(values) for values in each if values]
    return min(1.0, len(lowest) * min(lowest)) if lowest else None


def _is_conclusive(attack: AttackSummary) -> bool | None:
    """Return whether guessing is excluded: by one look, or else by the interval."""
    if attack.p_value is not None and attack.p_value <= _SHOWN:
        return True
    if not attack.chance:  # a family without guessing: blind naming, where that was compared
        return False if attack.p_value is not None and attack.above_chance > NEXT_TO_NONE else None
    if attack.p_value is not None:
        return False
    interval = attack.last
    if interval is None or interval.low is None or interval.high is None:
        return None
    return not interval.low <= attack.chance <= interval.high


_NO_RESULT = records.ResultLine(step=0, stage="", attack="", metrics={})


def _last_line(
    lines: Sequence[records.ResultLine], headline: str, *, of_worst: bool
) -> records.ResultLine:
    """Return the last line with a result; or of each client's last line that of the worst one.

    Without a result it is a line without metrics.
    """
    measured = [line for line in lines if line.metric(headline) is not None]
    if not of_worst:
        return measured[-1] if measured else _NO_RESULT
    newest = {str(line.client): line for line in measured}
    return max(newest.values(), key=lambda line: line.value(headline) or 0.0, default=_NO_RESULT)


def _quoted(
    lines: Sequence[records.ResultLine], last: records.ResultLine, headline: str, *, by_chance: bool
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
        line.metric(headline) or records.MetricValue(),
        line.values,
        line.value(f"{headline}_of_control"),
        is_latest,
    )


def _is_dishonest(facts: records.AttackFacts) -> bool | None:
    """Return whether the server of an attack chooses something; None where it was not recorded."""
    if facts.needs is None:
        return None
    return any(need.startswith(_CHOOSES) for need in facts.needs)


def _reason(line: records.ResultLine, headline: str) -> str | None:
    """Return why a line has no result; None where it has one, or nothing was shared."""
    if line.unknown or not line.was_shared or line.metric(headline) is not None:
        return line.unknown or None
    return f"its {headline or 'value'} is no number"


def _samples(lines: Sequence[records.ResultLine], headline: str) -> int:
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
