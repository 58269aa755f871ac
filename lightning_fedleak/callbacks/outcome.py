"""What a look found of one attack at one stage: on one client, and over all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_fedleak.metrics import Rate


@dataclass(frozen=True)
class Waiting:
    """No result yet; not a failure.

    Attributes:
        why: what is waited for.
    """

    why: str


Result = Sequence[float] | str | Waiting | None
"""Of one client: packed numbers, why there are none, why not yet, or None: nothing was shared."""


@dataclass(frozen=True)
class Outcome:
    """One attack at one stage, over all clients.

    Attributes:
        rates: by name, pooled over clients (and, where that kind of result does so, over the last
            looks); NaN where unknown.
        n: what was counted: true word types added over clients, or games.
        exposed: whether the attack's surface leaves the client at all.
        worst: each rate's value at the client where it is highest; empty for one client.
        extra: numbers that have no interval; NaN where there is none.
        now: each rate's value at this look alone; None where ``rates`` is of this look alone.
        unknown: why there is no value; None where there is one.
        pending: why there is no value *yet*; None otherwise.
        by_position: of reconstructed texts: (right, all) tokens by range of places in their text.
    """

    rates: Mapping[str, Rate]
    n: int
    exposed: bool = True
    worst: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, float] = field(default_factory=dict)
    now: Mapping[str, float] | None = None
    unknown: str | None = None
    pending: str | None = None
    by_position: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def values(self, prefix: str, attack: str) -> dict[str, float]:
        """The numbers under the names of the logs; none where the result is pending."""
        if self.pending is not None:
            return {}
        root = f"{prefix}/{attack}"
        out = {f"{root}/exposed": float(self.exposed)}
        for name, rate in self.rates.items():
            out[f"{root}/{name}"] = rate.value
            out[f"{root}/{name}_low"] = rate.low
            out[f"{root}/{name}_high"] = rate.high
        for name, value in self.worst.items():
            out[f"{root}/{name}_worst_client"] = value
        for name, value in self.extra.items():
            if not math.isnan(value):
                out[f"{root}/{name}"] = value
        return out

    def values_now(self, prefix: str, attack: str) -> dict[str, float]:
        """The numbers of this look alone, under the names of the logs."""
        values = self.values(prefix, attack)
        if self.now is not None and values:
            values = {n: v for n, v in values.items() if not n.endswith(("_low", "_high"))}
            values |= {f"{prefix}/{attack}/{name}": value for name, value in self.now.items()}
        return values


def unknown(metrics: Iterable[str], why: str) -> Outcome:
    """An outcome without a value: not safe, unknown."""
    nothing = Rate(math.nan, math.nan, math.nan)
    return Outcome(dict.fromkeys(metrics, nothing), 0, unknown=why)


def not_shared(metrics: Iterable[str]) -> Outcome:
    """The attack's surface does not leave the client: metrics 0, ``exposed`` 0."""
    return Outcome(dict.fromkeys(metrics, Rate(0.0, 0.0, 0.0)), 0, exposed=False)


def pending(why: str) -> Outcome:
    """There will be a value at a later look."""
    return Outcome({}, 0, pending=why)
