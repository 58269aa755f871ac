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

    Every round is judged by its own value, not by one that is pooled over rounds. An *unknown*
    value counts as a breach: the attack failed, waits for its first result, does not run, or reads
    something that is not shared. So does a rate at or below the threshold that is measured on fewer
    than 16 texts of the round or fewer than 16 non-members. A metric that no update of this
    federation can have is refused beforehand.

    In the first round of a LoRA no words can be read *yet*, as long as its B is zero. A gate on
    words lets one such update of a client pass, and no second one.

    Examples:
        >>> from lightning_fedleak import RoundGate
        >>> RoundGate("leakage/worst/words", at_most=0.3)
        RoundGate('leakage/worst/words', at_most=0.3, withhold)

    Args:
        metric: a name in the logs, ``"leakage/<attack>/<metric>"`` or ``"leakage/worst/<family>"``.
            Of membership the AUC, not what the attack's own threshold gives.
        at_most: the largest value that is allowed.
        action: ``"withhold"``: the update does not leave. Under a :class:`ClientDP` whose noise the
            client adds, zero with that noise leaves in its place; under a secure aggregation zero
            does; else nothing does, which *reveals one bit*. ``"harden"``: the noise of the
            client's ClientDP is increased until the update passes. If it cannot be, or the value is
            unknown, the update is withheld: no noise makes an unknown value known.
            ``"raise"`` raises :class:`~lightning_fedleak.LeakageLimitExceeded`: the client fails,
            which the server sees, so it is refused with noise that the client adds. ``"warn"`` lets
            the update leave.
        patience: the number of unknown values in a row of a client that pass.
        name: the name in the logs, ``gate/<name>``; by default the metric without ``leakage/``.

    Raises:
        ValueError: the arguments are out of range or contradict each other.
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
        round_action: Any = action  # Threshold is annotated with the actions of a run
        super().__init__(metric, at_most, action=round_action, patience=patience, name=name)

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
            usable = [n for n in observer.headlines() if observer.never_judged(n) is None]
            raise ValueError(
                f"RoundGate watches '{self.metric}': {why}. It would withhold every one. "
                + (
                    f"Watch {' or '.join(usable)}."
                    if usable
                    else "Nor can it judge by another value."
                )
            )
        check_value("RoundGate", self.metric)
        self._watched = observer.engine.results.headlines_of(self.metric) or (self.metric,)

    def read(self, look: RoundLook) -> GateEvent:
        """Return the value of a look by which the gate decides, and why it is unknown."""
        value, source, why = self._value(look)
        source = source if is_worst(self.metric) else ""
        event = GateEvent(self.metric, look.round_, value, math.nan, math.nan, self.at_most)
        read = look.now.get(source or self.metric, math.nan)
        return replace(event, source=source, why=why, read=read, gate=self.name, client=look.client)

    def why_not_yet(self, look: RoundLook) -> str | None:
        """Return why nothing can be read of the update yet; None if something can."""
        return look.not_yet.get(self.metric) or look.not_yet.get(self.metric.rpartition("/")[0])

    def _value(self, look: RoundLook) -> tuple[float, str, str]:
        """Return the value that counts, the log name of a breach, and the reason of an unknown."""
        roots = [name.rpartition("/")[0] for name in self._watched]
        if not is_worst(self.metric) and look.now.get(f"{roots[0]}/exposed") == 0:
            return math.nan, "", "what the attack reads is not shared, and something else is"
        readings = {name: look.now.get(name, math.nan) for name in self._watched}
        readings = {name: value for name, value in readings.items() if not math.isnan(value)}
        judged = judge_worst(look.engine, readings, self.at_most)
        if breaches := [
            name for name, judgement in judged.items() if judgement.value > self.at_most
        ]:
            source = max(breaches, key=lambda name: judged[name].value)
            return judged[source].value, source, judged[source].why  # whatever else is unknown
        value = look.now.get(self.metric, math.nan)
        few = [look.too_few[root] for root in roots if root in look.too_few]
        few += [j.why for j in judged.values() if math.isnan(j.value)]  # the control is low
        if not math.isnan(value) and not few:
            return value, "", ""
        failures = [look.unknown[root] for root in roots if root in look.unknown]
        waits = [look.not_yet[root] for root in roots if root in look.not_yet]
        nothing = "no result yet, or an attack that does not run here"
        return math.nan, "", next(iter([*few, *failures, *waits, *look.unknown.values()]), nothing)
