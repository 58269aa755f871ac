"""A threshold on measured leakage that stops, hardens, raises, warns or calls, whoever trains."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning_fedleak.defenses import Defense
from lightning_fedleak.engine.engine import Engine
from lightning_fedleak.engine.gates import (
    Evidence,
    GateEvent,
    LeakageLimitExceeded,
    Verdict,
    announce,
    check_threshold,
    defenses_to_harden,
    harden,
    is_worst,
    rate_of,
)
from lightning_fedleak.engine.log import accounting
from lightning_fedleak.engine.run import Trials
from lightning_fedleak.messages import rank_zero_info
from lightning_fedleak.report.records import GateDecision, Judgement
from lightning_fedleak.validate import check_choice, check_integer, check_number

Action = Literal["stop", "harden", "raise", "warn"] | Callable[[GateEvent], Any]


@dataclass(frozen=True)
class GateActions:
    """What a gate can do to a run.

    Attributes:
        log: takes numbers by name, and the step they are of.
        save: saves the run under a name, and returns where; None where it does not.
        stop: ends training in order.
        processes: that train together.
        defenses: of the run.
        resume: how a saved run goes on, with the place for its path.
        mend: what makes a run leak less.
    """

    log: Callable[[dict[str, float], int], object]
    save: Callable[[str], Path | None]
    stop: Callable[[], object]
    processes: int = 1
    defenses: tuple[Defense, ...] = ()
    resume: str = GateEvent.resume
    mend: str = GateEvent.mend


class Threshold:
    """Act when a metric exceeds a threshold, in any loop.

    :class:`~lightning_fedleak.RiskGate` is this as a callback of Lightning, and says there what the
    arguments mean. A stop sets ``should_stop`` of a :class:`~lightning_fedleak.trainers.Watch`,
    which saves no checkpoint; a Trainer of transformers saves one and ends.

    Examples:
        >>> from lightning_fedleak.trainers import Threshold
        >>> Threshold("leakage/worst/words", at_most=0.5)
        Threshold('leakage/worst/words', at_most=0.5, stop)

    Args:
        metric: a name in the logs, ``"leakage/<attack>/<metric>"``.
        at_most: the largest value that is allowed.
        action: ``"stop"``, ``"raise"``, ``"warn"``, ``"harden"`` where defences act, or a callable.
        patience: breaches in a row that are let pass before the gate acts.
        strict: an unknown value counts as a breach.
        name: in the logs, ``gate/<name>``; default the metric without ``leakage/``.
        bound: ``"value"`` or ``"lower"``.
        alpha: probability of a wrong decision over the whole run, for the latter.

    Attributes:
        fired: the event of the first time that it acted in the newest run; None so far.
        notches: how often it has turned the defences up.
        verdict: what the looks so far show; None with ``bound="value"`` and before the first.
        on_weights: it watches the trained weights, at whose looks the same texts are.

    Raises:
        ValueError: an argument is out of range, or two arguments contradict each other.
    """

    def __init__(
        self,
        metric: str,
        *,
        at_most: float,
        action: Action = "stop",
        patience: int = 0,
        strict: bool = True,
        name: str | None = None,
        bound: Literal["value", "lower"] | None = None,
        alpha: float = 0.05,
    ) -> None:
        if not callable(action) and action not in ("stop", "harden", "raise", "warn"):
            raise ValueError(
                f"action must be 'stop', 'harden', 'raise', 'warn' or a callable, got {action!r}"
            )
        self.patience = check_integer("patience", patience, at_least=0)
        chosen = check_choice("bound", bound or "value", ("value", "lower"))
        check_number("alpha", alpha, above=0, below=1)
        check_threshold(type(self).__name__, metric, at_most, reachable=chosen == "value")
        self.metric = metric
        self.at_most = float(at_most)
        self.action = action
        self.strict = strict
        self.name = name or metric.removeprefix("leakage/")
        self.bound = chosen
        self._bound_chosen = bound is not None
        self.on_weights = False
        self.alpha = alpha
        self.fired: GateEvent | None = None
        self.verdict: Verdict | None = None
        self.notches = 0
        self._defenses: tuple[Defense, ...] = ()
        self._watched: tuple[str, ...] = (metric,)
        self._breaches = 0
        self._evidence: dict[str, Evidence] | None = None
        self._engine: Engine | None = None
        self._stopped = False
        self._has_result = False

    def __repr__(self) -> str:
        bound = "" if self.bound == "value" else f", bound='{self.bound}'"
        fired = "" if self.fired is None else f", fired at step {self.fired.step}"
        start = f"{self._kind}('{self.metric}', at_most={self.at_most:g}"
        return f"{start}, {_name_of(self.action)}{bound}{fired})"

    def watch(self, engine: Engine, actions: GateActions) -> None:
        """Subscribe to an engine that logs the metric, for one run.

        Args:
            engine: of the run; its families are known.
            actions: what acts on the run.

        Raises:
            ValueError: the metric cannot be judged in this run; the message says what to change.
        """
        self._engine = engine
        self.fired, self.verdict = None, None
        self._check_clients(actions.processes)
        harden_it = self.action == "harden"
        self._defenses = defenses_to_harden(actions.defenses) if harden_it else ()
        self.notches = self._breaches = 0
        self._watched = engine.headlines_of(self.metric) or (self.metric,)
        self.on_weights = engine.is_looks_dependent(self.metric)
        if self.on_weights:
            self._check_dependent(engine)
        self._check_looks(engine, actions.processes)
        self._evidence = self._new_evidence()
        self._has_result = self._stopped = False
        notches = [f"gate/{self.name}_notches"] if harden_it else []
        engine.subscribe(
            partial(self._decide, engine, actions),
            [f"gate/{self.name}", *notches],
            threshold=(self.metric, self.at_most),
            facts=self._describe(),
            before_first=partial(self._check_read, engine),
            after_training=partial(self._conclude, engine, actions),
        )

    def choice(self, loss: float) -> float:
        """Return ``leakage/choose``: what to keep a checkpoint by, the lower the better.

        Args:
            loss: the validation loss of the weights as they are.

        Returns:
            The loss where the upper end of the interval at these very weights is at most
            ``at_most``, and infinity elsewhere; of several gates the highest.
        """
        assert self._engine is not None
        engine = self._engine
        ends = self._ends(engine.results.latest, self._end("high"))
        weights = engine.weights
        is_read = weights is not None and weights.looked_at == engine.run.step
        # An end that is unknown (NaN) allows nothing.
        allowed = is_read and bool(ends) and all(end <= self.at_most for end in ends.values())
        loss = engine.run.broadcast(loss if allowed else math.inf)
        return loss if weights is None else weights.choose(loss)

    @property
    def _kind(self) -> str:
        return type(self).__name__

    @property
    def _subject(self) -> str:
        return f"{self._kind} watches '{self.metric}'"

    def _check_clients(self, clients: int) -> None:
        if self.bound == "lower" and clients > 1 and self.metric.endswith("_worst_client"):
            raise ValueError(
                f"{self._kind}(bound='lower') cannot watch '{self.metric}' with {clients} "
                "processes: the largest of several clients' values lies above every client's mean, "
                "so that a run that is really below would be stopped. Watch the pooled value."
            )

    def _check_dependent(self, engine: Engine) -> None:
        """Judge by the interval's ends, which hold at all looks together.

        Raises:
            ValueError: an end of an interval, or another alpha than the intervals have.
        """
        is_end = self.metric.endswith(("_low", "_high"))
        if not self._bound_chosen:
            self.bound = "value" if is_end else "lower"
        if is_end and self.bound != "value":
            raise ValueError(
                f"{self._subject}: bound='{self.bound}' reads that end of "
                f"'{self.metric.rpartition('_')[0]}', so watch this one"
            )
        alpha = engine.options.memorization.alpha
        if self.bound != "value" and self.alpha != alpha:
            raise ValueError(
                f"{self._kind}(alpha={self.alpha:g}) watches '{self.metric}', whose intervals hold "
                f"at all looks together but for {alpha:g}: give Memorization(alpha={self.alpha:g})"
            )

    def _check_read(self, engine: Engine) -> None:
        """Refuse a metric that reads nothing of this run, unless hardening may cause that later."""
        if self.on_weights:
            self._check_private(engine)
        why = engine.unread(self.metric)
        if why is None or self.action == "harden" or not (self.strict or is_worst(self.metric)):
            return
        others = engine.others_on(self.metric)
        mend = f"list an attack that reads it: {others}" if others else "no other attack reads it"
        raise ValueError(
            f"{self._subject}: {why}. That is 'unknown', not 'safe': {mend}; or leave this gate out"
        )

    def _check_private(self, engine: Engine) -> None:
        """Refuse to act on private texts under DP, and a metric that cannot become known.

        Raises:
            ValueError: the message names the argument to change.
        """
        if accounting(engine.run.defenses) and not engine.options.memorization.outside_epsilon:
            raise ValueError(
                f"{self._subject}, which is read off private texts, and the run's "
                "epsilon does not cover what a gate decides by it: leave the gate out, or accept "
                "it by Memorization(outside_epsilon=True)"
            )
        channel = engine.channel_of(self.metric)
        assert channel is not None
        why = channel.never_known(self.metric.rpartition("/")[2]) if self.strict else None
        if why is not None:
            raise ValueError(
                f"{self._subject}, which a strict gate needs to know: {why}; or "
                "pass strict=False, and the gate waits"
            )

    def _describe(self) -> dict[str, Any]:
        """Return the settings that the run's record holds."""
        return {
            "name": self.name,
            "metric": self.metric,
            "at_most": self.at_most,
            "action": _name_of(self.action),
            "bound": self.bound,
            "alpha": None if self.bound == "value" else self.alpha,
            "strict": self.strict,
            "patience": self.patience,
        }

    def _check_looks(self, engine: Engine, clients: int) -> None:
        """Refuse a rate that is never known, or only after the gate has acted on its absence."""
        name = self.metric.removesuffix("_worst_client")
        worst = name != self.metric and clients > 1
        root, _, rate = name.rpartition("/")
        if (channel := engine.channel_of(name)) is None:
            return
        if rate in channel.own_threshold:
            warnings.warn(
                f"{self._subject}, which is of the attack's own threshold, and "
                f"may be low though the attack orders all texts rightly: watch '{root}/auc'",
                stacklevel=2,
            )
        if (requirement := channel.looks_until_known(rate, 1 if worst else clients)) is None:
            return
        looks, why = requirement
        pooled = 1 if worst or self.bound != "value" else engine.options.games.window
        why = f"{self._subject}: {why}"
        if looks > pooled:
            raise ValueError(
                f"{why}; with bound='{self.bound}' this value is of {pooled} "
                f"look{'s' * (pooled > 1)}, and never known. Watch the AUC, or "
                "give the monitor more targets= or (for a value pooled over looks, with "
                "bound='value') a longer window=, in games=Games(...)."
            )
        if self.strict and looks > self.patience + 1:
            raise ValueError(
                f"{why}, so that it is unknown at the first {looks - 1} looks, which a strict "
                "gate treats as breaches. Watch the AUC, give the monitor more "
                "targets= in games=Games(...), or pass strict=False: then the gate does nothing "
                "until it is known."
            )

    def _new_evidence(self) -> dict[str, Evidence] | None:
        """Return evidence on each watched value, with its share of the probability of error."""
        if self.bound == "value" or self.on_weights:
            return None
        rate, alpha = rate_of(self.metric), self._alpha_now
        try:
            return {
                name: Evidence(self.at_most, alpha / len(self._watched), rate)
                for name in self._watched
            }
        except ValueError as refusal:
            raise ValueError(f"{self._subject}: {refusal}") from None

    @property
    def _alpha_now(self) -> float:
        return self.alpha / 2 ** (self.notches + 1) if self.action == "harden" else self.alpha

    def _decide(self, engine: Engine, actions: GateActions) -> None:
        if self._stopped:
            return
        # The first process has what no other has, its clock's seconds and the worst client's value:
        # it decides, and the others get what it acts on.
        measurement = self._read_look(engine) if engine.run.rank == 0 else None
        acts = (
            (measurement, self.verdict)
            if measurement is not None and self._judge(measurement, engine.results.trials)
            else None
        )
        breach = engine.run.broadcast(acts)
        step = engine.results.last_step
        actions.log({f"gate/{self.name}": float(breach is not None)} | self._progress(), step)
        if breach is not None:
            measurement, self.verdict = breach
            self._fire(engine, actions, measurement)
        if self.action == "harden":
            actions.log({f"gate/{self.name}_notches": float(self.notches)}, step)

    def _conclude(self, engine: Engine, actions: GateActions) -> None:
        """Fire if a strict gate had no result in the whole run, whatever its patience."""
        if not self.strict or self.fired is not None or engine.run.step == engine.first_step:
            return
        if not engine.run.broadcast(self._has_result):
            self._fire(engine, actions, _Measurement(self.metric, math.nan, {}))

    def _read_look(self, engine: Engine) -> _Measurement | None:
        """Return the watched value at the newest look; None where there is none yet."""
        new = engine.results.look_values
        values = engine.results.latest if self._evidence is None else new
        if self.strict and (why := engine.unread(self.metric)) is not None:
            unknown = dict.fromkeys(self._watched, math.nan)
            return _Measurement(self.metric, math.nan, unknown, why=why)
        # One client alone is its own worst.
        names = (self.metric, self.metric.removesuffix("_worst_client"))
        if self.on_weights:
            return self._read_interval(new)
        if not any(name in new for name in names):
            # An attack of the family waits. Evidence is collected from complete looks only.
            at_least = new.get(f"{self.metric}_at_least", math.nan)
            if self._evidence is not None or not at_least > self.at_most:
                return None
        value = next((values[name] for name in names if name in values), math.nan)
        if is_worst(self.metric):
            return self._read_worst(engine, values, value)
        counted = engine.judge(self.metric, value, self.at_most)
        watched = {self.metric: counted.value}
        return _Measurement(self.metric, counted.value, watched, why=counted.why, read=value)

    def _end(self, end: str) -> str:
        """Return what the name of an interval's end ends with; of a family's worst a joint one."""
        return f"_joint_{end}" if is_worst(self.metric) else f"_{end}"

    def _ends(self, values: Mapping[str, float], end: str) -> dict[str, float]:
        """Return an end of each watched interval, NaN where what was asked is unknown."""
        return {n: values.get(f"{n}{end}", math.nan) for n in self._watched if n in values}

    def _read_interval(self, new: Mapping[str, float]) -> _Measurement | None:
        """Return the end of the interval that the bound asks for, where this look has one."""
        ends = self._ends(new, self._end("low") if self.bound == "lower" else "")
        if not ends:
            return None
        if self.bound == "lower":
            ends = {
                n: math.nan if low <= self.at_most and self._too_few(n, new) else low
                for n, low in ends.items()
            }
        known = {name: value for name, value in ends.items() if not math.isnan(value)}
        source = max(known, key=known.__getitem__, default="")
        if not known or (len(known) < len(ends) and known[source] <= self.at_most):
            read = any(
                n not in known and not math.isnan(new.get(f"{n}_high", math.nan)) for n in ends
            )
            why = "too few texts are compared at this look to decide" if read else ""
            return _Measurement(self.metric, math.nan, ends, why=why)  # it may be above
        return _Measurement(self.metric, known[source], ends, source)

    def _too_few(self, name: str, new: Mapping[str, float]) -> bool:
        """Return whether not even the clearest leak would show more than ``at_most`` in an interval
        that reaches above it.
        """
        provable = new.get(f"{name}{self._end('provable')}", math.inf)
        return provable <= self.at_most < new.get(f"{name}{self._end('high')}", math.nan)

    def _read_worst(
        self, engine: Engine, values: Mapping[str, float], value: float
    ) -> _Measurement:
        """Return the worst of a family, with the values that it is the highest of."""
        watched = {name: values[name] for name in self._watched if name in values}
        name = self.metric
        if math.isnan(value):
            at_least = values.get(f"{self.metric}_at_least", math.nan)
            if at_least > self.at_most:
                name, value = f"{self.metric}_at_least", at_least
        else:  # what is unknown then is of methods that do not apply
            known = {n: v for n, v in watched.items() if not math.isnan(v)}
            if counted := engine.judge_worst(known, self.at_most):
                return self._worst_of(counted, known)
        source = next((n for n, v in watched.items() if v == value), "")
        why = engine.untested(self.metric) if math.isnan(value) else ""
        return _Measurement(name, value, watched, source, why)

    def _worst_of(
        self, counted: Mapping[str, Judgement], read: Mapping[str, float]
    ) -> _Measurement:
        """Return the highest of judged headlines; one that is unknown, where none is too high."""
        watched = {name: one.value for name, one in counted.items()}
        known = {name: value for name, value in watched.items() if not math.isnan(value)}
        source = max(known, key=known.__getitem__, default="")
        blind = next((name for name in watched if name not in known), "")
        if blind and not (known and known[source] > self.at_most):
            source = blind
        why = counted[source].why
        why = f"{source}: {why}" if source == blind else why
        return _Measurement(self.metric, watched[source], watched, source, why, read[source])

    def _judge(self, measurement: _Measurement, trials: Mapping[str, Trials]) -> bool:
        """Return whether the gate acts, with this look counted."""
        unknown = math.isnan(measurement.value)
        self._has_result |= not unknown
        breach = self.strict if unknown else measurement.value > self.at_most
        fires = False
        if self._evidence is not None:
            for name, value in measurement.watched.items():
                self._evidence[name].update(value, trials.get(name.removesuffix("_worst_client")))
            self.verdict = self._nearest(self._evidence).verdict()
            fires = self.verdict.fires
            unknown |= (
                measurement.name != self.metric
            )  # what is read at least, of a worst that is unknown
            unknown |= any(math.isnan(value) for value in measurement.watched.values())
            breach = unknown and self.strict
        if breach:
            self._breaches += 1
        elif not unknown:
            self._breaches = 0
        return fires or (breach and self._breaches > self.patience)

    @staticmethod
    def _nearest(evidence: Mapping[str, Evidence]) -> Evidence:
        """Return the evidence that fires, or else the one nearest to firing."""
        return max(evidence.values(), key=lambda each: (each.progress, each.verdict().looks))

    def _progress(self) -> dict[str, float]:
        if self._evidence is None:
            return {}
        return {f"gate/{self.name}_evidence": self._nearest(self._evidence).progress}

    def _fire(self, engine: Engine, actions: GateActions, measurement: _Measurement) -> None:
        hardened = tuple(harden(self._defenses))
        stops = self.action == "stop" or (self.action == "harden" and not hardened)
        step = engine.results.last_step
        low, high = math.nan, math.nan
        if self._evidence is None:
            ends = (f"{self.metric}_low", f"{self.metric}_high")
            low, high = (engine.results.latest.get(end, math.nan) for end in ends)
        engine.record_decision(
            GateDecision(
                gate=self.name,
                did="hardened" if hardened else "stopped" if stops else _name_of(self.action),
                step=step,
                metric=measurement.name,
                source=measurement.source,
                measured=measurement.value,
                at_most=self.at_most,
                reason=measurement.why,
                hardened=hardened,
            )
        )
        saves = stops or self.action == "raise"
        name = f"gate-{self.name.replace('/', '-')}-step={step}"
        event = GateEvent(
            measurement.name,
            step,
            measurement.value,
            low,
            high,
            self.at_most,
            actions.save(name) if saves else None,
            self.verdict,
            hardened,
            tuple(d.name for d in self._defenses) if stops else (),
            measurement.source,
            measurement.why,
            actions.resume,
            actions.mend,
            self.on_weights,
            measurement.read,
        )
        first, self.fired = self.fired is None, self.fired or event
        if hardened:
            self.notches += 1
            self._breaches = 0
            self._evidence = self._new_evidence()
            announce(f"{self._kind} '{self.name}' hardened the run {event}")
        elif stops:
            self._stopped = True
            actions.stop()
            announce(f"{self._kind} '{self.name}' stopped training {event}")
        else:
            self._act(event, first=first)

    def _act(self, event: GateEvent, *, first: bool) -> None:
        """Raise, warn or call as the user asks."""
        if callable(self.action):
            self.action(event)
        elif self.action == "raise":
            raise LeakageLimitExceeded(f"{self._kind} '{self.name}' raised {event}")
        elif first:
            announce(f"{self._kind} '{self.name}' warns {event}")

    def state_dict(self) -> dict[str, Any]:
        """Return the breaches counted so far, the notches and the evidence."""
        state: dict[str, Any] = {"breaches": self._breaches}
        if self.action == "harden":
            state["notches"] = self.notches
        if self._evidence is not None:
            state["evidence"] = {n: e.state_dict() for n, e in self._evidence.items()}
        return state

    @staticmethod
    def _restore_evidence(evidence: Mapping[str, Evidence], saved: Mapping[str, Any]) -> bool:
        """Restore the evidence; return False where some of it is about another question."""
        return evidence.keys() == saved.keys() and all(
            item.load_state_dict(saved[name]) for name, item in evidence.items()
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, except evidence on another question."""
        self._breaches = state_dict["breaches"]
        self.notches = state_dict.get("notches", 0)
        if self.notches:
            self._evidence = self._new_evidence()
            rank_zero_info(
                f"{self._kind} '{self.name}': the run goes on as hardened, {self.notches} "
                f"notch{'es' * (self.notches > 1)} so far"
            )
        saved = state_dict.get("evidence")
        if saved is None and self._evidence is None:
            return
        if not saved or self._evidence is None or not self._restore_evidence(self._evidence, saved):
            announce(
                f"{self._kind} '{self.name}': the checkpoint's evidence is for another metric, "
                "threshold or bound, and is not used; this gate begins again without evidence"
            )


@dataclass(frozen=True)
class _Measurement:
    """Hold the values that a gate watches, at one look.

    Attributes:
        name: log name of the value.
        value: NaN where it is unknown.
        watched: the values that evidence is collected on, by name.
        source: the attack with the highest value, where the worst of a family is watched.
        why: why the value is unknown, or is not what was read, where the gate itself can say.
        read: what the attack read, before its control counts; NaN where that was not recorded.
    """

    name: str
    value: float
    watched: Mapping[str, float]
    source: str = ""
    why: str = ""
    read: float = math.nan


def _name_of(action: Action) -> str:
    if isinstance(action, str):
        return action
    return getattr(action, "__name__", type(action).__name__)
