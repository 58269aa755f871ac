"""Results of an attack: of one client at one look, and over all clients, with their log names.

A *look* is one measurement at a step. A *stage* is the point at which an attack reads: the client's
gradient before defences (local), as it is sent (shared), or reduced over clients (aggregate); or
the trained weights (released). The object that scores the attacks of one family is their *channel*.
At a look each client has a :class:`Found` score, or a reason why it has none. The channel pools the
scores of all clients into an :class:`Outcome`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_fedleak.evaluation.metrics.rates import UNKNOWN, Rate, flat
from lightning_fedleak.model.snapshots import Stage

# The first part of log names, by stage.
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
    """The results of one attack at one stage, under one name in the logs.

    Attributes:
        prefix: The first part of the log name.
        name: The second part: the name of the attack, or a name that its channel forms from it.
        attack: The name of the attack.
        stage: The stage at which the attack reads.
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
        """Return the start of the names of its values, such as ``leakage/flatchat``."""
        return f"{self.prefix}/{self.name}"

    @property
    def record_name(self) -> str:
        """Return its name in lines of results, with the prefix if a stage has no such prefix.

        Lines have a field for the stage, which replaces the prefix.
        """
        has_other_prefix = self.prefix not in PREFIX.values() and self.name == self.attack
        return self.log_name if has_other_prefix else self.name


# ---- results of one client ------------------------------------------------------------------


@dataclass(frozen=True)
class Control:
    """The rates of an attack on known words, see :mod:`lightning_fedleak.engine.channels.control`.

    Attributes:
        rates: The rates by metric; NaN if the control could not be read.
        part: The same for a part of the batch, if the full batch holds more than the attack can
            distinguish; empty if no part was measured.
        why: Why the control could not be read; empty if it was.
        unexplained: The share of the gradient that the step made again does not explain, from 0 to
            1; NaN if it was not made again.
        bound: The headline that a reader who knows all else can have behind the declared defences,
            1 if nothing bounds it; NaN if no defence has to be bounded.
    """

    rates: Mapping[str, float]
    part: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    unexplained: float = math.nan
    bound: float = math.nan


@dataclass(frozen=True)
class Found:
    """The trials by which an attack's guess is scored.

    Attributes:
        trials: The trials, with the columns of the attack's channel, (n, columns); or other numbers
            in an order that the channel knows.
        control: The control of this look; None if it has none.
    """

    trials: Tensor | Sequence[float]
    control: Control | None = None


@dataclass(frozen=True)
class Unknown:
    """The attack gave no result. It is logged as unknown, never as 0.

    Attributes:
        why: The reason, for the logs. It holds no private text.
        applies: Whether the attack's method is made for the gradients that were shared.
    """

    why: str
    applies: bool = True


@dataclass(frozen=True)
class Waiting:
    """The attack has no result yet. This is not a failure.

    Attributes:
        why: What the attack waits for.
        soon: Whether the next step may bring a result, so that the attack is retried there.
        zeros: The roles of parameters with a zero gradient. A retry needs one that is not zero.
    """

    why: str
    soon: bool = True
    zeros: tuple[str, ...] = ()


@dataclass(frozen=True)
class NothingShared:
    """Nothing left the client in this step."""


Result = Found | Unknown | Waiting | NothingShared


# ---- results over all clients ---------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result of one attack at one stage, over all clients.

    Attributes:
        rates: The rates by name, pooled over clients, and for games also over the last looks; NaN
            is unknown.
        n: The number of counted items: true word types (added over clients), games, or texts.
        exposed: Whether the gradients that the attack reads leave the client at all.
        worst: The highest value of each rate over clients; empty for one client.
        extra: Values without an interval; NaN values are not logged.
        now: The value of each rate at this look, if ``rates`` is pooled over looks; else None.
        p_value: The probability that guessing does as well at this look; NaN if not known.
        p_over_looks: The lowest p-value so far, corrected for all looks; NaN if not known.
        too_few: Why this look has too few items for a decision; None if it has enough.
        unknown: Why there is no value; None if there is one.
        applies: False if there is no value because the attack's method is not made for the
            gradients that were shared.
        pending: Why there is no value *yet*; else None.
        soon: Whether the next step may bring a pending value.
        pool: The name of the compared texts, if only results on the same texts may be compared.
        control: The newest control of the attack, the lowest over clients; None without one.
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
        """Return the values by log name, with ``root`` before their names; none if pending.

        Bounds by a privacy account and by blind baselines belong to no single attack, so their
        names begin with the first part of ``root`` only.
        """
        if self.pending is not None:
            return {}
        log = {f"{root}/exposed": float(self.exposed)}
        log |= flat({f"{root}/{name}": rate for name, rate in self.rates.items()})
        log |= {f"{root}/{name}_worst_client": value for name, value in self.worst.items()}
        for name, value in self.extra.items():
            if not math.isnan(value):
                shared = name.startswith(("bound/", "blind/"))
                log[f"{root.partition('/')[0] if shared else root}/{name}"] = value
        return log | {f"{root}/{name}": value for name, value in self.p_values.items()}

    @property
    def has_failed(self) -> bool:
        """Return whether an attack that applies gave no value."""
        return self.unknown is not None and self.applies

    @property
    def p_values(self) -> dict[str, float]:
        """Return the known p-values by name."""
        named = {"p_of_this_look": self.p_value, "p_over_looks": self.p_over_looks}
        return {name: value for name, value in named.items() if not math.isnan(value)}

    def rate(self, name: str, *, of_look: bool) -> float:
        """Return a rate, of this look alone or as it is pooled over looks; NaN without one."""
        pooled = self.rates.get(name, UNKNOWN).value
        return self.now.get(name, pooled) if of_look and self.now is not None else pooled


def unknown(metrics: Iterable[str], why: str, *, applies: bool = True) -> Outcome:
    """Return an outcome whose metrics are all unknown (NaN), with the reason."""
    return Outcome(dict.fromkeys(metrics, UNKNOWN), 0, unknown=why, applies=applies)


def not_shared(metrics: Iterable[str]) -> Outcome:
    """Return the outcome if the attacked gradients are not shared: metrics of 0, not exposed."""
    return Outcome(dict.fromkeys(metrics, Rate(0.0, 0.0, 0.0)), 0, exposed=False)


def pending(why: str, *, soon: bool = False) -> Outcome:
    """Return an outcome whose value comes at a later look, maybe in the next step."""
    return Outcome({}, 0, pending=why, soon=soon)
