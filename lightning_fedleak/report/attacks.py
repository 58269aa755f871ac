"""The results of the attacks in a fit: one :class:`AttackSummary` for each attack and stage.

A stage is the data that was attacked: an update before or after a client's defence, the sum over
clients, or the trained model. A *look* is a measurement of leakage at one step, and a *gate* may
withhold an update, so that it does not leave its client. ``results`` makes the summaries from the
lines of the log.

Opinion 28/2024 of the European Data Protection Board names in paragraph 55 the attacks by which a
model that is said to be anonymous should be tested. :func:`named_attacks` lists for each of them
the results on the trained model and on shared updates, and the smallest rate that was detectable:
an attack that found nothing excludes only rates above it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from lightning_fedleak.report import records
from lightning_fedleak.report.wording import NOT_RECORDED, interval, share

SUM = "sum"
"""The client name of results on the sum over all clients."""
RELEASED = "released"
"""The stage of the trained model."""
NEXT_TO_NONE = 0.1
"""Distance above chance up to which a result counts as next to nothing. Not tuned."""

# Pairs of a step, or round, and a value; None is unknown.
Points = list[tuple[int, float | None]]


class Point(NamedTuple):
    """The headline, the main metric of an attack, at one look.

    Attributes:
        step: Optimizer step or round.
        client: The client of the update; empty if results are not separated by client.
        value, low, high: The headline and the ends of its 95% interval; None if unknown.
        n: The number of tokens, texts or games that it is computed from.
        withheld: Whether a gate withheld the update.
    """

    step: int
    client: str
    value: float | None
    low: float | None
    high: float | None
    n: int | None
    withheld: bool = False

    @property
    def rate(self) -> records.MetricValue:
        """The value with its interval."""
        return records.MetricValue(self.value, self.low, self.high)


@dataclass(frozen=True)
class QuotedLook:
    """The look whose values a report quotes for an attack.

    Attributes:
        step: Optimizer step or round.
        n: The number of tokens, texts or games that it is computed from.
        rate: The headline.
        rates: The values of all metrics that have one.
        control: The headline on the positive control, words or texts that are known to be in the
            step; None without a control.
        is_latest: Whether it is the latest look; otherwise it is the highest one.
    """

    step: int
    n: int | None
    rate: records.MetricValue
    rates: Mapping[str, float]
    control: float | None
    is_latest: bool


@dataclass(frozen=True)
class ClientSummary:
    """The results of an attack on one client.

    Attributes:
        looks: The number of results on updates that left.
        withheld: The number of results on updates that did not leave.
        unknown: The number of measurements of updates that left without a result.
        mean, highest: The mean and the highest headline over the looks.
        last: The latest headline.
    """

    looks: int
    withheld: int
    unknown: int
    mean: float | None
    highest: float | None
    last: records.MetricValue | None


@dataclass(frozen=True)
class AttackSummary(ClientSummary):
    """The results of an attack at one stage, over all clients, on updates that left.

    Attributes:
        name, stage, adversary, reads, config: The attack as recorded.
        family: The kind of leak that it measures.
        headline: The main metric, that of the numbers below.
        chance: The value of the headline that guessing reaches.
        dishonest: Whether its server chooses weights or layers; None if not recorded.
        exposed: Whether the data that it reads were shared.
        why_unknown: The latest reason for a missing result; None if there is none.
        n: The total number of tokens, texts or games behind the numbers.
        worst_client: The highest value of a single client; None if not recorded.
        clients: The summary of each client by name; empty if results are not separated by client.
        last_n: ``n`` of the latest look; of several clients, of the one with the highest value.
        last_client: The client of that look; None for a single client.
        rates: The values of the family's metrics at that look.
        visible: The smallest rate that the latest look could detect; None if not recorded.
        pool: Identifies the candidate texts: only results on the same ones are comparable.
        allowed: The largest values that a DP account allows at the latest look, by metric; empty if
            no account was compared.
        refuted: Whether any look refuted that account; None if none was compared.
        certified: Share of the looks at which the attack verified its own result; None if it has no
            such check.
        control: The headline on the positive control at the latest look: words or texts known to be
            in the same step. None if there is no control, or it could not be measured.
        control_of_a_part: The control on a part of the batch; None if none was measured.
        blind: The number of looks whose low value is no evidence, since the control is low too.
        by_aggregation: The number of looks with a low value because the batch holds more than the
            attack can distinguish.
        control_note: The effect of the controls, in a sentence; empty without an effect.
        above_chance: The distance above guessing, scaled so that certainty has 1 and corrected by
            the controls; -1 if unknown.
        stale: The reason why the final weights were not measured, if earlier ones were; else None.
        p_value: The probability that guessing does as well at any look, corrected for all looks;
            None if not recorded.
        conclusive: Whether guessing is excluded; None if that does not apply.
        points: The headline at each look, withheld updates included.
        quoted: The look whose values a report quotes; None without a result.
    """

    name: str
    stage: str
    family: records.Family = field(metadata={"write": attrgetter("name")})
    headline: str
    chance: float
    adversary: str
    dishonest: bool | None
    reads: Sequence[str]
    config: records.JsonObject | None
    exposed: bool
    why_unknown: str | None
    n: int
    worst_client: float | None
    clients: Mapping[str, ClientSummary]
    last_n: int | None
    last_client: str | None
    rates: Mapping[str, records.MetricValue | None]
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
        """Whether it has a positive control, also one that could not be measured."""
        return self.control is not None or bool(self.control_note)

    @property
    def is_blind(self) -> bool:
        """Whether its values are low, and at least one look is blind: its control is low too."""
        return self.blind > 0 and self.above_chance <= records.HIGH


NOT_TRIED = "not tried"
_ATTACKS = (
    ("membership inference", "auc", ("membership",), "TPR at 1% FPR"),
    ("regurgitation", "greedy", (), "share of the training texts"),
    ("exfiltration", "extracted", (), "share of the training texts"),
    ("attribute inference", "", (), ""),
    ("model inversion", "", (), ""),
    ("reconstruction", "", ("words", "texts"), ""),
)
"""Each attack has its name in the Opinion, the metric that tests it on the trained model, the
families that test it on shared updates, and the unit of the smallest detectable rate on the
trained model."""


@dataclass(frozen=True)
class NamedAttack:
    """An attack that the Opinion names, and the attacks of a run that tested it.

    Attributes:
        name: The name in the Opinion.
        tried: What it was tried on, or that it was not tried, or that its result is unknown.
        results: The result of each attack of the run.
        visible: The smallest rate that each of them could detect.
    """

    name: str
    tried: str
    results: list[str]
    visible: list[str]


def named_attacks(attacks: Sequence[AttackSummary]) -> list[NamedAttack]:
    """Return a row for each attack that the Opinion names."""
    rows = []
    # An attack on canaries, which are planted, tests no text of the data.
    on_texts = [a for a in attacks if a.stage == RELEASED and a.family.name not in records.PLANTED]
    on_updates = [a for a in attacks if a.stage not in (RELEASED, "local") and a.looks]
    silent = ", ".join(a.name for a in on_texts if not a.looks)
    for name, metric, families, unit in _ATTACKS:
        tests = [(a, metric, unit) for a in on_texts if a.rates.get(metric) is not None]
        targets = ["the trained model"] * bool(tests)
        if silent and metric and not tests:
            targets.append(f"unknown for the trained model: no result of {silent}")
        if shared := [(a, a.headline, "") for a in on_updates if a.family.name in families]:
            targets.insert(bool(tests), "what clients shared")
        row = NamedAttack(name, "; ".join(targets) or NOT_TRIED, [], [])
        for attack, shown, of in tests + shared:
            row.results.append(_result(attack, shown))
            row.visible.append(f"{attack.name}: {_visible(attack, of)}")
        rows.append(row)
    return rows


def tiers(attacks: Sequence[AttackSummary]) -> list[AttackSummary]:
    """Return the attacks on canaries (planted texts), those on the least repeated ones first.

    A tier is the canaries that were planted equally often; each tier has its own attack.
    """
    canaries = [attack for attack in attacks if attack.family.name == records.CANARIES.name]
    return sorted(canaries, key=lambda attack: (len(attack.name), attack.name))  # as x4 before x16


def _result(attack: AttackSummary, metric: str) -> str:
    """Return the latest value of a metric of an attack, with its interval and notes."""
    rate = attack.last if metric == attack.headline else attack.rates.get(metric)
    n = NOT_RECORDED if attack.last_n is None else attack.last_n
    late = f"; of earlier weights, later ones are unknown: {attack.stale}" if attack.stale else ""
    note = f"; {attack.control_note}" if attack.control_note and metric == attack.headline else ""
    return f"{attack.name} ({attack.stage}): {metric} {interval(rate)}, n {n}{late}{note}"


# Standard errors above chance that a two-sided 95% interval detects with 80% power.
SHOWN_IN_FOUR_OF_FIVE = 1.960 + 0.842


def smallest_rate(attack: AttackSummary) -> float | None:
    """Return the smallest rate that the latest look detects with 80% power.

    For an attack on the trained model, the rate was recorded. The AUC of n games, half of them with
    members, has a standard error of sqrt((n + 1) / 3) / n without leakage (Mann and Whitney 1947).
    If each of n words or tokens is recovered with probability p, at least one of them is recovered
    in 4 of 5 looks for p = 1 - 0.2^(1 / n). If the attack recovers only a share of its positive
    control, p is divided by this share.

    Returns:
        The rate. It is 1 or more if no rate is detectable, and None if it was not recorded.
    """
    n, control = attack.last_n, attack.control
    if attack.stage == RELEASED:
        return attack.visible
    if not n or attack.last is None:
        return None
    if attack.headline == "auc":
        return attack.chance + SHOWN_IN_FOUR_OF_FIVE * math.sqrt((n + 1) / 3) / n
    if attack.chance:
        return None
    recall = 1.0 if not attack.has_control else control or 0.0
    return (1 - 0.2 ** (1 / n)) / recall if recall > 0 else math.inf


def _visible(attack: AttackSummary, unit: str) -> str:
    """Return the smallest rate that an attack could detect, in words."""
    rate = smallest_rate(attack)
    if rate is None:
        return NOT_RECORDED
    if rate >= 1:
        return "none: too few, or its control was not read"
    unit = unit or ("AUC" if attack.headline == "auc" else "share of words or tokens")
    return f"{unit} of {share(rate)}"
