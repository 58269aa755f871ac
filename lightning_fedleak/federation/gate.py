"""A threshold on the leakage of a round's update, judged before the update leaves the client.

In a *look* the attacks run on the update that a client is about to send. The gate reads one logged
metric of the look: of one attack, or the worst value of a family of attacks. A value above the
threshold is a breach, and so is an unknown one. A *control* is the same attack on words that are
known; if it fails, the attack does not work here, and its low value proves nothing.
"""

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
    """A threshold on the leakage of a round's update, which decides before the update leaves.

    Each round is judged by the value of that round, not by a value that is pooled over rounds. An
    *unknown* value counts as a breach: the attack failed, waits for its first result, does not run,
    or reads parameters that are not shared. A rate at or below the threshold also counts as a
    breach if it is measured on fewer than 16 texts of the round or fewer than 16 non-members. A
    metric that no update of this federation can have is refused at setup.

    In the first round of a LoRA, its matrix B is zero, and no words can be recovered *yet*. A gate
    on words lets one such update of each client pass, but not a second one.

    Examples:
        >>> from lightning_fedleak import RoundGate
        >>> RoundGate("leakage/worst/words", at_most=0.3)
        RoundGate('leakage/worst/words', at_most=0.3, withhold)

    Args:
        metric: The name in the logs, ``"leakage/<attack>/<metric>"`` or
            ``"leakage/worst/<family>"``. Of a membership attack only the AUC can be watched, not
            the rates at the threshold that the attack sets.
        at_most: The largest value that is allowed.
        action: The action after a breach.

            - ``"withhold"``: The update does not leave. Under a :class:`ClientDP` whose noise the
              client adds, it is replaced by zero with that noise. Under a secure aggregation it is
              replaced by zero. Otherwise nothing leaves, which *reveals one bit* about the data.
            - ``"harden"``: The noise of the client's ClientDP is increased until the update passes.
              If that is impossible, or the value is unknown, the update is withheld: more noise
              does not make an unknown value known.
            - ``"raise"``: :class:`~lightning_fedleak.LeakageLimitExceeded` is raised. The client
              fails, and the server sees that. So this is refused if the client adds noise.
            - ``"warn"``: The update leaves, and a warning is logged.
        patience: The number of consecutive unknown values of a client that may pass.
        name: The name in the logs, ``gate/<name>``; by default the metric without ``leakage/``.

    Raises:
        ValueError: The arguments are out of range or contradict each other.
    """

    # All possible actions, where a threshold of a training run has others.
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
        """Check that the observer logs the metric, and that the metric can judge an update.

        Raises:
            ValueError: One of these is false. The message names the metrics that can be watched.
        """
        names = observer.engine.metric_names()
        if self.metric not in names:
            raise ValueError(
                f"RoundGate watches '{self.metric}', which this RoundObserver does not log."
                f"{names_there_are(self.metric, names, 'RoundObserver')}"
            )
        if (reason := observer.never_judged(self.metric)) is not None:
            usable = [n for n in observer.headlines() if observer.never_judged(n) is None]
            raise ValueError(
                f"RoundGate watches '{self.metric}': {reason}. It would withhold every update: "
                f"watch one of {usable}, or remove the gate if there is none"
            )
        check_value("RoundGate", self.metric)
        self._watched = observer.engine.results.headlines_of(self.metric) or (self.metric,)

    def read(self, look: RoundLook) -> GateEvent:
        """Return the event of a look: the value that the gate judges, or why it is unknown."""
        self._warn_of_uninformed(look.engine)
        value, source, reason = self._value(look)
        source = source if is_worst(self.metric) else ""
        event = GateEvent(self.metric, look.round_, value, math.nan, math.nan, self.at_most)
        logged = look.now.get(source or self.metric, math.nan)
        return replace(
            event, source=source, why=reason, read=logged, gate=self.name, client=look.client
        )

    def why_not_yet(self, look: RoundLook) -> str | None:
        """Return why nothing can be recovered from the update yet; None if something can."""
        return look.not_yet.get(self.metric) or look.not_yet.get(self.metric.rpartition("/")[0])

    def _value(self, look: RoundLook) -> tuple[float, str, str]:
        """Return the value to judge, the log name of the breach, and why the value is unknown.

        If values are above the threshold, the highest of them decides, even if others are unknown.
        If none is, the watched metric must be known, no attack may have too few candidates, and no
        control (the same attack on known words) may show that the attack does not work.
        """
        roots = [name.rpartition("/")[0] for name in self._watched]
        if not is_worst(self.metric) and look.now.get(f"{roots[0]}/exposed") == 0:
            return math.nan, "", "the update does not contain the parameters that the attack reads"
        readings = {name: look.now.get(name, math.nan) for name in self._watched}
        readings = {name: value for name, value in readings.items() if not math.isnan(value)}
        judged = judge_worst(look.engine, readings, self.at_most)
        if breaches := [
            name for name, judgement in judged.items() if judgement.value > self.at_most
        ]:
            source = max(breaches, key=lambda name: judged[name].value)
            return judged[source].value, source, judged[source].why
        value = look.now.get(self.metric, math.nan)
        doubts = [look.too_few[root] for root in roots if root in look.too_few]
        doubts += [j.why for j in judged.values() if math.isnan(j.value)]  # a failed control
        if not math.isnan(value) and not doubts:
            return value, "", ""
        failures = [look.unknown[root] for root in roots if root in look.unknown]
        pending = [look.not_yet[root] for root in roots if root in look.not_yet]
        default = "no result yet, or an attack that does not run here"
        return math.nan, "", [*doubts, *failures, *pending, *look.unknown.values(), default][0]
