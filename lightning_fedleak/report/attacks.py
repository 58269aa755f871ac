"""What each attack read in a fit: one summary for each attack and stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from lightning_fedleak.report.records import HIGH, Family, JsonObject, MetricValue

SUM = "sum"
"""The client whose update is that of all together."""
RELEASED = "released"
"""The stage of the trained model."""
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
class ClientSummary:
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
class AttackSummary(ClientSummary):
    """What an attack read at a stage, of all clients; numbers are of updates that left.

    Attributes:
        name, stage, adversary, reads, config: as recorded.
        family: what kind of leak it reads.
        headline: the metric of the means below.
        chance: its value for guessing.
        dishonest: whether its server chooses weights or layers; None where that was not recorded.
        exposed: whether what it reads was shared.
        why_unknown: the latest reason.
        n: tokens, texts or games that the numbers rest on, in all.
        worst_client: highest value of a single client.
        clients: by their names; empty where there is one.
        last_n: ``n`` of the latest value, which of several clients is that of the worst one.
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
    why_unknown: str | None
    n: int
    worst_client: float | None
    clients: Mapping[str, ClientSummary]
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
