"""A line of ``leakage.jsonl``: what one attack read at one look, or why that is unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_fedleak.records.fields import SCHEMA, JsonObject, Record

NOT_PLAYED = "not played: "
"""Begins the reason in the lines of attacks that a run left out."""


@dataclass(frozen=True)
class MetricValue(Record):
    """A metric's value and the ends of its 95% interval; None is unknown."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class ResultLine(Record):
    """What one attack read at one look and stage.

    Attributes:
        schema: version of the line.
        run: id of the fit; empty in the first version.
        step: optimizer step, or round, of the look.
        stage: where in the data's way out it was read.
        client: whose data; ``"pooled"`` or ``"sum"`` for several.
        round: number of the round; None without rounds.
        attack: its name in the logs.
        config: its settings.
        n: how many tokens, texts or games stand behind the values.
        exposed: whether what it reads was shared; None counts as shared.
        metrics: values by name.
        unknown: why there is no result; None where there is one.
        pool: names the texts that were compared; results compare on the same ones only. None where
            no pool was.
    """

    schema: int = SCHEMA
    run: str = ""
    step: int
    stage: str
    client: str | int | None = None
    round: int | None = None
    attack: str
    config: JsonObject | None = None
    n: int | None = None
    exposed: bool | None = None
    metrics: Mapping[str, MetricValue | None]
    unknown: str | None = None
    pool: str | None = None

    @property
    def was_shared(self) -> bool:
        """Whether what the attack reads left the client; so it did unless the line denies it."""
        return self.exposed is not False

    @property
    def reason_not_played(self) -> str | None:
        """Why the run left the attack out; None where it was played."""
        if self.unknown is None or not self.unknown.startswith(NOT_PLAYED):
            return None
        return self.unknown.removeprefix(NOT_PLAYED)

    def metric(self, name: str) -> MetricValue | None:
        """Return a metric and its interval; None where it is unknown."""
        metric = self.metrics.get(name)
        return None if metric is None or metric.value is None else metric

    def value(self, name: str) -> float | None:
        """Return a metric's value; None where it is unknown."""
        metric = self.metric(name)
        return None if metric is None else metric.value

    def is_pooled(self, name: str) -> bool:
        """Return whether a metric is of all looks so far, with that of this look beside it."""
        return f"{name}_of_this_look" in self.metrics

    def value_of_this_look(self, name: str) -> float | None:
        """Return a metric's value at this look alone; None where it is unknown."""
        return self.value(f"{name}_of_this_look" if self.is_pooled(name) else name)
