"""The results of the rounds of a federation, read from its files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_fedleak.federation import SUM
from lightning_fedleak.records import (
    RECORD,
    RESULTS,
    STANDARD_FAMILIES,
    BeginLine,
    Family,
    GateLine,
    read_lines,
    read_results,
)
from lightning_fedleak.studies.federation.rounds import Server


@dataclass(frozen=True)
class FamilyLeakage:
    """What attacks of one family read in a round.

    Attributes:
        family: of the attacks.
        values: by client (``"sum"`` of all together) the highest headline that any attack had; NaN
            where all are unknown.
    """

    family: Family
    values: Mapping[str | int, float]

    @property
    def headline(self) -> str:
        """Return the metric as a table names it."""
        return self.family.headline.replace("_", " ").upper()

    @property
    def title(self) -> str:
        """Return the family and its headline as a table names them."""
        return f"{self.family.short_title}, {self.headline}"

    @property
    def updates(self) -> dict[str | int, float]:
        """Return the values of single clients."""
        return {client: value for client, value in self.values.items() if client != SUM}

    @property
    def total(self) -> float | None:
        """Return the value of all clients together; None where nothing looked at their sum."""
        return self.values.get(SUM)


@dataclass(frozen=True)
class Round:
    """A round as its files describe it; round 0 is the model that the first one begins with.

    Attributes:
        number: of the round.
        loss: validation loss of the model after it.
        leakage: of the families that were read.
        withheld: clients whose update a gate or an error held back.
        absent: why clients sent nothing that counts, by client.
        epsilon: what was spent so far; None without differential privacy.
        noise: its norm over the largest norm that the mean of clipped updates can have; None
            without differential privacy.
    """

    number: int
    loss: float
    leakage: Sequence[FamilyLeakage] = ()
    withheld: frozenset[str | int] = frozenset()
    absent: Mapping[int, str] = field(default_factory=dict)
    epsilon: float | None = None
    noise: float | None = None


def read_round(folder: Path, number: int, server: Server, absent: Mapping[int, str]) -> Round:
    """Return a round that was closed.

    Args:
        folder: of the files of all clients and of the server.
        number: of the round.
        server: after the round.
        absent: why clients sent nothing that counts.
    """
    return Round(
        number,
        server.loss,
        read_leakage(folder, number),
        read_withheld(folder, number),
        absent,
        server.epsilon,
        server.noise,
    )


def read_leakage(folder: Path, number: int) -> list[FamilyLeakage]:
    """Return what was read in a round, by the families that the files below ``folder`` record."""
    families = {family.name: family for family in STANDARD_FAMILIES}  # whose order is a table's
    values: dict[str, dict[str | int, float]] = {}
    for path in sorted(folder.rglob(RESULTS)):
        lines = read_lines(path.with_name(RECORD)).lines
        begin = next((line for line in lines if isinstance(line, BeginLine)), None)
        if begin is None:  # the disk is full, say
            continue
        families |= {family.name: family for family in begin.families}
        for line in read_results(path):
            if line.round != number or line.client is None or line.client == "all":
                continue
            if (family := begin.family_of(line.attack)) is None:
                continue
            by_client = values.setdefault(family.name, {})
            value = line.value_of_this_look(family.headline)
            highest = by_client.get(line.client, math.nan)
            by_client[line.client] = highest if value is None or highest > value else value
    return [FamilyLeakage(families[name], values[name]) for name in families if name in values]


def read_withheld(folder: Path, number: int) -> frozenset[str | int]:
    """Return the clients whose update was held back in a round."""
    return frozenset(
        decision.client
        for path in folder.rglob(RECORD)
        for decision in read_lines(path).lines
        if isinstance(decision, GateLine)
        and decision.step == number
        and decision.did in ("withheld", "raise")
        and decision.client is not None
    )
