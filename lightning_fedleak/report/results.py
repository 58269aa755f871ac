"""The results of a fit by attack and stage, judged by the attacks' positive controls.

:class:`FitResults` takes the lines of ``leakage.jsonl`` of one fit. It sets aside the lines that
count training rows and entities, groups the remaining ones by attack and stage, and summarizes each
group as an :class:`AttackSummary`. Updates that a gate withheld are in no summary number.

Each line is one attack's result at one *look*, a measurement of leakage at a step. The *headline*
is an attack's main metric, *chance* its value by guessing, and a *family* all attacks on one kind
of leak. A *positive control* is the same attack at the same look on data whose content is known: if
it recovers little too, the look is *blind*. A *pooled* value covers all looks so far.
"""

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

_BOUND_PREFIX = "bound/"  # begins the metrics that hold the largest value that a DP account allows
_AUDIT_PREFIX = "audit/"  # begins the names of attacks that are run on canaries
_DISHONEST_PREFIX = "chooses"  # begins the capabilities that only a dishonest server has
_WITHHOLDING = ("withheld", "raise")  # actions of a gate after which an update does not leave
_ALPHA = 0.025
"""p-value over all looks up to which guessing is excluded. Lower: needs more looks."""


def _lists_records(line: records.ResultLine) -> bool:
    """Return whether a line counts the training rows that a trained model reveals."""
    return line.attack == "records" and line.stage == RELEASED


def _counts_entities(line: records.ResultLine) -> bool:
    """Return whether a line is on entities found in the texts.

    Lines on planted entities have the metric ``first``.
    """
    is_released = line.attack.startswith("entity/") and "first" not in line.metrics
    return is_released or "/entity/" in line.attack


def _describe_entities(line: records.ResultLine) -> tuple[str, str]:
    """Return the title and the result of a line on entities, as text.

    An attack on updates recovers tokens of entities; on the trained model it ranks whole entities.
    """
    attack, is_of_words, kind = line.attack.partition("/entity/")
    answer = interval(line.metric("recall" if is_of_words else "auc"))
    if is_of_words:
        title, answer = f"Values, {kind}, as {attack} reads them", f"{answer} of their tokens"
    else:
        _, kind, place = attack.split("/")
        place, is_repeated, _ = place.partition("_x2")
        title = f"Values, {kind} in the {place}{', in several rows' * bool(is_repeated)}"
        answer = f"AUC {answer} against those that were left out"
    title += f" ({line.stage})" * (line.stage in ("local", "aggregate"))
    title += f", client {line.client}" * (line.client is not None)
    return title, f"unknown: {line.unknown}" if line.unknown else f"{answer}; n {line.n}"


class FitResults:
    """The results of a fit, and the updates that its gates withheld.

    Args:
        log: The log of the fit.

    Attributes:
        lines: The results of the attacks that ran.
        clients: The names of the clients that have results.
        is_by_client: Whether results are separated by client.
        withheld: The client and round of each update that a gate withheld.
        rows: The newest counts of training rows that the trained model reveals, without unknown
            ones; None if these rows were not requested.
        values: The newest result on entities in the texts, as text, by title.
    """

    def __init__(self, log: FitLog) -> None:
        self._log = log
        self._facts = {facts.name: facts for facts in log.begin.attacks} if log.begin else {}
        results = [line for line in log.results if line.reason_not_played is None]
        self.lines = [x for x in results if not _lists_records(x) and not _counts_entities(x)]
        self.values = dict(map(_describe_entities, filter(_counts_entities, results)))
        self.rows = next((line.values for line in reversed(results) if _lists_records(line)), None)
        self.clients = {str(x.client) for x in self.client_lines if x.client is not None}
        self.is_by_client = len(self.clients) > 1 or log.is_federation
        self.withheld = {
            (str(line.client), line.step)
            for line in log.decisions
            if line.did in _WITHHOLDING and line.client is not None
        }

    @property
    def client_lines(self) -> list[records.ResultLine]:
        """The results of single clients, without those of their sum."""
        return [line for line in self.lines if line.stage != "aggregate"]

    def without_withheld(self, lines: Iterable[records.ResultLine]) -> list[records.ResultLine]:
        """Return the lines of updates that left their client, and of the sum."""
        return [
            line
            for line in lines
            if line.stage == "aggregate" or (str(line.client), line.step) not in self.withheld
        ]

    def _family(self, attack: str, lines: Sequence[records.ResultLine]) -> records.Family:
        """Return an attack's family as recorded, or else by the metrics of its lines.

        It is ``unknown`` if no family of this package has those metrics.
        """
        begin = self._log.begin
        family = None if begin is None else begin.family_of(attack)
        if family is not None:  # the current wording of a family replaces the recorded one
            families = (*records.STANDARD_FAMILIES, records.CANARIES, records.ENTITIES)
            return next((current for current in families if current.name == family.name), family)
        metrics = {name for line in lines for name in line.metrics}
        if any(line.stage == RELEASED for line in lines):
            return records.CANARIES if "exposure" in metrics else records.MEMORIZATION
        unknown = records.Family(name="unknown")
        return next((x for x in records.STANDARD_FAMILIES if x.headline in metrics), unknown)

    def attacks(self) -> list[AttackSummary]:
        """Return a summary for each attack and stage.

        Attacks without a result come first, then those furthest above chance.
        """
        by_attack = grouped(self.lines, lambda line: (line.attack, line.stage))
        summaries = [self._summarize(*key, lines) for key, lines in by_attack.items()]
        return sorted(summaries, key=lambda attack: (attack.looks > 0, -attack.above_chance))

    def _summarize(
        self, name: str, stage: str, lines: Sequence[records.ResultLine]
    ) -> AttackSummary:
        """Return the summary of one attack at one stage from all of its lines."""
        # Results on canaries, entities and a chosen checkpoint have names derived from an attack's.
        root = name.removeprefix(_AUDIT_PREFIX).removesuffix("_chosen").partition("/")[0]
        facts = self._facts.get(root, records.AttackFacts(name=name, family=""))
        family = self._family(root, lines)
        measured = {metric for line in lines for metric in line.metrics}
        headline = family.headline_of(measured)
        # An attack on the trained model measures either membership or extraction.
        absent = set(family.shown_metrics) - measured if stage == RELEASED and measured else set()
        total = self._summarize_client(lines, headline)
        by_client = grouped(lines if self.is_by_client else (), lambda line: str(line.client))
        clients = {name: self._summarize_client(part, headline) for name, part in by_client.items()}
        has_worst = stage != "aggregate" and len(clients) > 1
        sent = self.without_withheld(lines)
        shared = [line for line in sent if line.was_shared]
        worst = _numbers(line.value(f"{headline}_worst_client") for line in shared)
        if has_worst:
            worst += _numbers(client.mean for client in clients.values())
        last = _last_line(sent, headline, by_worst_client=has_worst)
        reasons = [_reason(line, headline) for line in sent]
        is_stale = stage == RELEASED and bool(last.metrics) and not self.is_by_client
        refuted = _numbers(line.value("refuted") for line in sent)
        needs = facts.needs
        dishonest = None if needs is None else any(x.startswith(_DISHONEST_PREFIX) for x in needs)
        seen = [need.removeprefix("sees ") for need in needs or () if need.startswith("sees ")]
        summary = AttackSummary(
            **(vars(total) | {"last": last.metric(headline)}),
            name=name,
            stage=stage,
            family=family,
            headline=headline,
            chance=family.chance_of(headline),
            adversary=facts.adversary or NOT_RECORDED,
            dishonest=dishonest,
            reads=list(facts.reads) or seen,
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
                name.removeprefix(_BOUND_PREFIX): value
                for name, value in last.values.items()
                if name.startswith(_BOUND_PREFIX)
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
        judgements = [_judge_line(line, family, headline, limit) for line in shared]
        summary = _with_controls(summary, [x for x in judgements if x is not None])
        return replace(summary, conclusive=_is_conclusive(summary))

    def _limit(self, name: str, family: records.Family, headline: str) -> float:
        """Return the value up to which a result is low: the highest gate on it, or the default."""
        begin, chance = self._log.begin, family.chance_of(headline)
        roots = (f"leakage/{name}/{headline}", f"leakage/worst/{family.name}")
        metrics = {root + end for root in roots for end in ("", "_low", "_high", "_worst_client")}
        limits = [
            gate.at_most
            for gate in (begin.gates if begin else None) or ()
            if gate.at_most is not None and gate.metric in metrics
        ]
        return max(limits, default=records.default_limit(chance))

    def _summarize_client(
        self, lines: Sequence[records.ResultLine], headline: str
    ) -> ClientSummary:
        """Return the summary of the lines of one client, or of all clients together."""
        sent = self.without_withheld(lines)
        values = _numbers(line.value_of_this_look(headline) for line in sent if line.was_shared)
        return ClientSummary(
            looks=len(values),
            withheld=len(lines) - len(sent),
            unknown=sum(_reason(line, headline) is not None for line in sent),
            mean=_mean(values),
            highest=max(values, default=None),
            last=_last_line(sent, headline, by_worst_client=False).metric(headline),
        )

    def _points(self, lines: Sequence[records.ResultLine], headline: str) -> list[Point]:
        """Return the headline at each look, withheld updates included."""
        points = []
        for line in filter(attrgetter("was_shared"), lines):
            rate = line.metric(headline) or records.MetricValue()
            client = str(line.client) if self.is_by_client else ""
            withheld = (str(line.client), line.step) in self.withheld
            points.append(
                Point(line.step, client, rate.value, rate.low, rate.high, line.n, withheld)
            )
        return sorted(points, key=attrgetter("step"))


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean; None without values."""
    return math.fsum(values) / len(values) if values else None


def _numbers(values: Iterable[float | None]) -> list[float]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]


def _judge_line(
    line: records.ResultLine, family: records.Family, headline: str, limit: float
) -> tuple[float, records.Judgement] | None:
    """Return a look's result and its judgement by the control; None without a result."""
    value = line.value_of_this_look(headline)
    if value is None:
        return None
    if line.value(records.WEAK) and value <= limit:
        return value, records.Judgement(math.nan, records.WEAK_REFERENCE)
    names = f"{headline}_of_control", f"{headline}_of_a_part", "bound"
    control, part, bound = map(line.value, names)
    if control is None and f"{headline}_of_control" in line.metrics:
        control = math.nan  # it could not be read
    judgement = records.judge_value(
        value,
        control,
        part=math.nan if part is None else part,
        bound=math.nan if bound is None else bound,
        is_proof=family.name == records.WORDS.name,
        at_most=limit,
        chance=family.chance_of(headline),
        known=family.known,
    )
    return value, judgement


def _with_controls(
    attack: AttackSummary, judgements: Sequence[tuple[float, records.Judgement]]
) -> AttackSummary:
    """Return the summary with its ``above_chance`` and the effect of the positive controls.

    For a metric without guessing (chance 0), the highest look counts. A look at a membership game
    has few trials, so that the highest of many looks is high by chance: there the largest of the
    mean, the worst client's value and the latest value counts. A value whose control is low counts
    uncorrected, as a lower bound.

    Args:
        attack: The summary.
        judgements: The value of each look and its judgement by the control.
    """
    blind = [x for _, x in judgements if math.isnan(x.value)]
    aggregated = [x for _, x in judgements if x.by_aggregation]
    counted = [value if math.isnan(x.value) else x.value for value, x in judgements]
    values = [max(counted, default=None)]
    if attack.chance:
        pooled = attack.last.value if attack.last else None
        values = [_mean(counted), attack.worst_client, pooled]
    numbers = _numbers(values)
    above = (max(numbers) - attack.chance) / (1 - attack.chance) if numbers else -1.0
    notes = [x.why for x in blind or aggregated or [x for _, x in judgements] if x.why]
    return replace(
        attack,
        blind=len(blind),
        by_aggregation=len(aggregated),
        control_note=notes[-1] if notes else "",
        above_chance=above,
    )


def _p_value(lines: Sequence[records.ResultLine]) -> float | None:
    """Return the lowest p-value of several clients, times their number (Bonferroni)."""
    by_client = grouped(lines, lambda line: str(line.client)).values()
    p_values = [_numbers(line.value("p_over_looks") for line in part) for part in by_client]
    lowest = [min(values) for values in p_values if values]
    return min(1.0, len(lowest) * min(lowest)) if lowest else None


def _is_conclusive(attack: AttackSummary) -> bool | None:
    """Return whether guessing is excluded; None if that does not apply.

    The p-value over all looks decides if it was recorded, otherwise the latest interval. For a
    metric without guessing (chance 0) guessing is never excluded by an interval; a high value is
    inconclusive if the p-value does not exclude randomly named words.
    """
    if attack.p_value is not None and attack.p_value <= _ALPHA:
        return True
    if not attack.chance:  # without guessing, the p-value compares with randomly named words
        return False if attack.p_value is not None and attack.above_chance > NEXT_TO_NONE else None
    if attack.p_value is not None:
        return False
    interval = attack.last
    if interval is None or interval.low is None or interval.high is None:
        return None
    return not interval.low <= attack.chance <= interval.high


_NO_RESULT = records.ResultLine(step=0, stage="", attack="", metrics={})


def _last_line(
    lines: Sequence[records.ResultLine], headline: str, *, by_worst_client: bool
) -> records.ResultLine:
    """Return the latest line with a result; a line without metrics if there is none.

    Args:
        lines: The lines of an attack, in order.
        headline: The metric that must have a value.
        by_worst_client: Whether to return the highest of the clients' latest lines instead.
    """
    measured = [line for line in lines if line.metric(headline) is not None]
    if not by_worst_client:
        return measured[-1] if measured else _NO_RESULT
    newest = {str(line.client): line for line in measured}
    return max(newest.values(), key=lambda line: line.value(headline) or 0.0, default=_NO_RESULT)


def _quoted(
    lines: Sequence[records.ResultLine], last: records.ResultLine, headline: str, *, by_chance: bool
) -> QuotedLook | None:
    """Return the look whose value a report quotes; None without a result.

    It is the latest look of membership games, of which the highest of many is high by chance, of
    the trained model, and of values pooled over looks. Otherwise it is the highest look.

    Args:
        lines: The lines on shared data.
        last: The latest of them with a result, or that of the worst client.
        headline: The metric.
        by_chance: Whether guessing reaches a value above 0.
    """
    measured = [line for line in lines if line.metric(headline) is not None]
    if not measured:
        return None
    is_latest = by_chance or last.stage == RELEASED or last.is_pooled(headline)
    line = last if is_latest else max(measured, key=lambda x: x.value(headline) or 0.0)
    return QuotedLook(
        line.step,
        line.n,
        line.metric(headline) or records.MetricValue(),
        line.values,
        line.value(f"{headline}_of_control"),
        is_latest,
    )


def _reason(line: records.ResultLine, headline: str) -> str | None:
    """Return why a line has no result; None if it has one, or nothing was shared."""
    if line.unknown or not line.was_shared or line.metric(headline) is not None:
        return line.unknown or None
    return f"its {headline or 'value'} is no number"


def _samples(lines: Sequence[records.ResultLine], headline: str) -> int:
    """Return the number of tokens, texts or games that the values rest on.

    Pooled looks, and those at the trained model, repeat the same texts: of these, each client's
    highest count is taken. All other counts are added up.
    """
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
