"""Results: of one client at one look, and over all clients, under their names in the logs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_fedleak.evaluation.metrics.rates import UNKNOWN, Rate, flat
from lightning_fedleak.model.snapshots import Stage

PREFIX = {
    Stage.LOCAL: "leakage_local",
    Stage.SHARED: "leakage",
    Stage.AGGREGATE: "leakage_aggregate",
    Stage.RELEASED: "leakage",
}
AUDIT = "audit"
"""The prefix of series on the user's canaries."""
CHOOSE = f"{PREFIX[Stage.SHARED]}/choose"
"""The loss that a checkpoint is chosen by: infinite where the weights leak too much."""


@dataclass(frozen=True)
class Series:
    """One attack's results at one stage, under one name in the logs.

    Attributes:
        prefix: the name's first part.
        name: its second part: the attack's name, or what its channel makes of it.
        attack: the attack's name.
        stage: where what it reads was seen.
    """

    prefix: str
    name: str
    attack: str
    stage: Stage

    @classmethod
    def at(cls, stage: Stage, attack: str) -> Series:
        """Return the series of an attack at a stage."""
        return cls(PREFIX[stage], attack, attack, stage)

    @property
    def log_name(self) -> str:
        """Return what the names of its values begin with: ``leakage/flatchat``."""
        return f"{self.prefix}/{self.name}"

    @property
    def record_name(self) -> str:
        """Return its name in lines of results: that of the logs for a prefix of one's own."""
        apart = self.prefix not in PREFIX.values() and self.name == self.attack
        return self.log_name if apart else self.name


# ---- of one client --------------------------------------------------------------------------


@dataclass(frozen=True)
class Control:
    """What an attack reads where the words are known.

    See :mod:`lightning_fedleak.engine.channels.control`.

    Attributes:
        rates: by metric; NaN where the control could not be read.
        part: the same of a part of the batch, where the whole holds more than the attack can tell
            apart; empty where no part was tried.
        why: why the control could not be read; empty where it was.
        unexplained: share of the gradient that the step made again does not explain, from 0 to 1;
            NaN where it was not made again.
    """

    rates: Mapping[str, float]
    part: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    unexplained: float = math.nan


@dataclass(frozen=True)
class Found:
    """What an attack's guess is worth.

    Attributes:
        numbers: in the order and number that its channel packs them.
        control: of this look; None where there is none.
    """

    numbers: Sequence[float]
    control: Control | None = None


@dataclass(frozen=True)
class Unknown:
    """There is no result: not safe, unknown.

    Attributes:
        why: for the logs; holds no private text.
        applies: whether the attack's method is made for what was shared.
    """

    why: str
    applies: bool = True


@dataclass(frozen=True)
class Waiting:
    """No result yet; not a failure.

    Attributes:
        why: what is waited for.
        soon: the next step may bring it, so that the attack is tried again there.
        zeros: roles with a zero gradient; there is no result until one is not zero.
    """

    why: str
    soon: bool = True
    zeros: tuple[str, ...] = ()


@dataclass(frozen=True)
class NothingShared:
    """Nothing left the client in this step."""


Result = Found | Unknown | Waiting | NothingShared


# ---- over all clients -----------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One attack at one stage, over all clients.

    Attributes:
        rates: by name, pooled over clients (and, where that kind of result does so, over the last
            looks); NaN where unknown.
        n: what was counted: true word types added over clients, games, or texts.
        exposed: whether the attack's surface leaves the client at all.
        worst: each rate's value at the client where it is highest; empty for one client.
        extra: numbers that have no interval; NaN where there is none.
        now: each rate's value at this look alone; None where ``rates`` is of this look alone.
        p_value: how probable guessing is to do so well at this look alone; NaN where not known.
        p_over_looks: the lowest so far, corrected for all looks; NaN where not known.
        too_few: why this look alone says too little to be judged by; None where it does not.
        unknown: why there is no value; None where there is one.
        applies: false where there is none since the method is not made for what was shared.
        pending: why there is no value *yet*; None otherwise.
        soon: where it is pending, the next step may bring one.
        pool: names the texts that were compared, where results compare on the same ones only.
        control: the newest control of the attack, the lowest of all clients; None without one.
    """

    rates: Mapping[str, Rate]
    n: int
    exposed: bool = True
    worst: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, float] = field(default_factory=dict)
    now: Mapping[str, float] | None = None
    p_value: float = math.nan
    p_over_looks: float = math.nan
    too_few: str | None = None
    unknown: str | None = None
    applies: bool = True
    pending: str | None = None
    soon: bool = False
    pool: str | None = None
    control: Control | None = None

    def values(self, root: str) -> dict[str, float]:
        """Return the numbers by log name, all beginning with ``root``; none where pending."""
        if self.pending is not None:
            return {}
        log = {f"{root}/exposed": float(self.exposed)}
        log |= flat({f"{root}/{name}": rate for name, rate in self.rates.items()})
        log |= {f"{root}/{name}_worst_client": value for name, value in self.worst.items()}
        for name, value in self.extra.items():
            if not math.isnan(value):
                # Bounds of an account, and of blind baselines, belong to no single attack.
                shared = name.startswith(("bound/", "blind/"))
                log[f"{root.partition('/')[0] if shared else root}/{name}"] = value
        return log | {f"{root}/{name}": value for name, value in self.p_values.items()}

    @property
    def p_values(self) -> dict[str, float]:
        """Return how probable guessing is to do so well, by name; none where it is not known."""
        named = {"p_of_this_look": self.p_value, "p_over_looks": self.p_over_looks}
        return {name: value for name, value in named.items() if not math.isnan(value)}

    def values_now(self, root: str) -> dict[str, float]:
        """Return the values by log name, each pooled rate replaced by this look's."""
        values = self.values(root)
        if self.now is not None and values:
            values = {n: v for n, v in values.items() if not n.endswith(("_low", "_high"))}
            values |= {f"{root}/{name}": value for name, value in self.now.items()}
        return values


def unknown(metrics: Iterable[str], why: str, *, applies: bool = True) -> Outcome:
    """Return an outcome without a value: unknown, which is not safe."""
    return Outcome(dict.fromkeys(metrics, UNKNOWN), 0, unknown=why, applies=applies)


def not_shared(metrics: Iterable[str]) -> Outcome:
    """Return the outcome of a surface that does not leave the client: 0, ``exposed`` 0."""
    return Outcome(dict.fromkeys(metrics, Rate(0.0, 0.0, 0.0)), 0, exposed=False)


def pending(why: str, *, soon: bool = False) -> Outcome:
    """Return an outcome whose value comes at a later look, maybe in the next step."""
    return Outcome({}, 0, pending=why, soon=soon)
