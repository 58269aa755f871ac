"""A threshold on what a round's update leaks, judged before the update leaves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

from lightning_fedleak.engine import GateEvent, Threshold, is_worst, names_there_are
from lightning_fedleak.engine.gates import check_value, judge_worst
from lightning_fedleak.federation.observer import RoundObserver
from lightning_fedleak.federation.round_look import RoundLook
from lightning_fedleak.validate import check_choice

Action = Literal["withhold", "harden", "raise", "warn"]


class RoundGate(Threshold):
    """A threshold on what a round's update leaks, judged before the update leaves.

    Every round is judged by its own value, not by one that is pooled over rounds. What is
    *unknown* counts as a breach: an attack that failed, that waits for its first result, that is
    not played, or whose surface is not shared; and a rate at or below the threshold of fewer than
    16 texts of the round and 16 non-members. A value that no update here can have is refused
    beforehand.

    In the first round of a LoRA nothing can be read of its words *yet*, as long as its B is zero:
    one update of a client is let pass by a gate on words for that, and a second one is not.

    Args:
        metric: a name in the logs, ``"leakage/<attack>/<metric>"`` or ``"leakage/worst/<family>"``.
            Of membership the AUC, not what the attack's own threshold gives.
        at_most: the largest value that is allowed.
        action: ``"withhold"``: the update does not leave. Under a :class:`ClientDP` whose noise the
            client adds, zero with that noise leaves in its place; under a secure aggregation zero
            does; else nothing does, which *tells one bit*. ``"harden"``: the noise of the client's
            ClientDP is turned up until the update passes. If it cannot be, or the value is
            unknown, the update is withheld: no noise makes an unknown value known.
            ``"raise"`` raises :class:`~lightning_fedleak.LeakageLimitExceeded`: the client fails,
            which is seen outside, so it is refused beside noise that the client adds. ``"warn"``
            lets it leave.
        patience: unknown values in a row of a client that are let pass.
        name: in the logs, ``gate/<name>``; default the metric without ``leakage/``.

    Raises:
        ValueError: arguments that cannot be meant.
    """

    actions = ("withhold", "harden", "raise", "warn")

    def __init__(
        self,
        metric: str,
        at_most: float,
        *,
        action: Action = "withhold",
        patience: int = 0,
        name: str | None = None,
    ) -> None:
        check_choice("action", action, self.actions)
        act: Any = action  # of a round; a Threshold's types name those of a run
        super().__init__(metric, at_most, action=act, patience=patience, name=name)

    def watch_rounds(self, observer: RoundObserver) -> None:
        """Refuse a metric that the observer does not log, or by which no update can be judged.

        Raises:
            ValueError: with the names that exist, or that can be watched.
        """
        names = observer.engine.metric_names()
        if self.metric not in names:
            raise ValueError(
                f"RoundGate watches '{self.metric}', which this RoundObserver does not log."
                f"{names_there_are(self.metric, names, 'RoundObserver')}"
            )
        if (why := observer.never_judged(self.metric)) is not None:
            can = [name for name in observer.headlines() if observer.never_judged(name) is None]
            raise ValueError(
                f"RoundGate watches '{self.metric}': {why}. It would withhold every one. "
                + (f"Watch {' or '.join(can)}." if can else "Nor can it judge by another value.")
            )
        check_value("RoundGate", self.metric)
        self._watched = observer.engine.results.headlines_of(self.metric) or (self.metric,)

    def read(self, look: RoundLook) -> GateEvent:
        """Return what counts of a look at an update, and why it is unknown."""
        value, source, why = self._value(look)
        source = source if is_worst(self.metric) else ""
        place, ends = (self.metric, look.round_), (math.nan, math.nan)
        event = GateEvent(*place, value, *ends, self.at_most, source=source, why=why)
        read = look.now.get(source or self.metric, math.nan)
        return replace(event, read=read, gate=self.name, client=look.client)

    def why_not_yet(self, look: RoundLook) -> str | None:
        """Return why nothing can be read of the update so far; None where something can."""
        return look.not_yet.get(self.metric) or look.not_yet.get(self.metric.rpartition("/")[0])

    def _value(self, look: RoundLook) -> tuple[float, str, str]:
        """Return what the watched value counts for, whose it is if it is too high, and why."""
        roots = [name.rpartition("/")[0] for name in self._watched]
        if not is_worst(self.metric) and look.now.get(f"{roots[0]}/exposed") == 0:
            return math.nan, "", "what the attack reads is not shared, and something else is"
        readings = {name: look.now.get(name, math.nan) for name in self._watched}
        readings = {name: value for name, value in readings.items() if not math.isnan(value)}
        judged = judge_worst(look.engine, readings, self.at_most)
        if breaches := [name for name, one in judged.items() if one.value > self.at_most]:
            source = max(breaches, key=lambda name: judged[name].value)
            return judged[source].value, source, judged[source].why  # whatever else is unknown
        value = look.now.get(self.metric, math.nan)
        few = [look.too_few[root] for root in roots if root in look.too_few]
        few += [one.why for one in judged.values() if math.isnan(one.value)]  # a control is low
        if not math.isnan(value) and not few:
            return value, "", ""
        failures = [look.unknown[root] for root in roots if root in look.unknown]
        waits = [look.not_yet[root] for root in roots if root in look.not_yet]
        nothing = "no result yet, or an attack that does not run here"
        return math.nan, "", next(iter([*few, *failures, *waits, *look.unknown.values()]), nothing)
