"""A gate: a threshold on measured leakage that stops a run, hardens defences, raises or warns.

:meth:`Threshold.watch` subscribes to an engine. A *look* is one measurement. After each look the
gate reads the watched value, judges it, and acts if it exceeds the threshold. To *harden* is to
make each defence stronger by one step, a *notch*. The main metric of the attacks of a family, such
as words, is its *headline*; ``leakage/worst/<family>`` is the highest one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

from lightning_fedleak.defenses import Defense
from lightning_fedleak.engine.gates import (
    GateEvent,
    LeakageLimitExceeded,
    announce,
    check_threshold,
    check_value,
    defenses_to_harden,
    is_worst,
    judge_worst,
    rate_of,
    why_unread,
)
from lightning_fedleak.engine.lifecycle import Engine
from lightning_fedleak.engine.outcomes import CHOOSE
from lightning_fedleak.engine.record import accounting
from lightning_fedleak.engine.results import WORST
from lightning_fedleak.messages import rank_zero_info, rank_zero_warn
from lightning_fedleak.report.records import WEAK, WEAK_REFERENCE, GateFacts, GateLine, Judgement
from lightning_fedleak.validate import check_choice, check_integer, explain_arguments

Action = Literal["stop", "harden", "raise", "warn"] | Callable[[GateEvent], Any]


@dataclass(frozen=True)
class GateActions:
    """The actions that a gate can take on a run, as functions of the integration.

    Attributes:
        log: Logs numbers by name at a step.
        save: Saves the run under a name, and returns the path; None if it cannot be saved.
        stop: Ends the training without an error.
        processes: The number of processes that train together.
        defenses: The defences of the run.
        resume: The code that resumes a saved run, with a place for its path.
        mend: Advice that makes a run leak less.
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

    :class:`~lightning_fedleak.RiskGate` is the same gate as a callback of Lightning; its docstring
    explains the arguments in detail. :class:`~lightning_fedleak.federation.RoundGate` judges a
    client's rounds. A stop sets ``should_stop`` of a :class:`~lightning_fedleak.trainers.Watch`,
    which saves no checkpoint; a Trainer of transformers saves one and ends.

    Examples:
        >>> from lightning_fedleak.trainers import Threshold
        >>> Threshold("leakage/worst/words", at_most=0.5)
        Threshold('leakage/worst/words', at_most=0.5, stop)

    Args:
        metric: The log name of the watched value, ``"leakage/<attack>/<metric>"``.
        at_most: The largest value that is allowed.
        action: ``"stop"``, ``"raise"``, ``"warn"``, ``"harden"`` if defences act, or a callable.
        patience: The number of breaches in a row that are ignored before the gate acts.
        strict: Whether an unknown value counts as a breach.
        name: The name in the logs, ``gate/<name>``; default: the metric without ``leakage/``.

    Attributes:
        fired: The event of the first time that the gate acted in the newest run; else None.
        notches: The number of times that the gate has made the defences stronger.
        on_weights: Whether it watches the trained weights, where all looks query the same texts.
        bound: ``"lower"`` if it judges the lower end of the interval, as for the trained weights;
            else ``"value"``.

    Raises:
        ValueError: An argument is out of range, or two arguments contradict each other.
    """

    actions: ClassVar[Sequence[str]] = ("stop", "harden", "raise", "warn")

    @explain_arguments("{}('leakage/worst/words', at_most=0.5)")
    def __init__(
        self,
        metric: str,
        at_most: float,
        *,
        action: Action = "stop",
        patience: int = 0,
        strict: bool = True,
        name: str | None = None,
    ) -> None:
        if not callable(action):
            check_choice("action", action, self.actions)
        check_threshold(type(self).__name__, metric, at_most)
        self.metric = metric
        self.at_most = float(at_most)
        self.action = action
        self.patience = check_integer("patience", patience, at_least=0)
        self.strict = strict
        self.name = name or metric.removeprefix("leakage/")
        self._engine: Engine | None = None
        self._forget_run()

    def _forget_run(self) -> None:
        self.on_weights = False
        self.bound: Literal["value", "lower"] = "value"
        self.fired: GateEvent | None = None
        self.notches = self._breaches = 0
        self._defenses: tuple[Defense, ...] = ()
        self._watched: tuple[str, ...] = (self.metric,)  # all headlines, if a worst is watched
        # Whether it has stopped the run, and has had a known value.
        self._stopped = self._has_result = self._has_warned = False
        # The upper end of the interval and the step of each validation, see `choice`.
        self._choices: list[tuple[float, int]] = []

    def on_train_begin(self, *_: object, **__: object) -> NoReturn:
        """Raise an error: a Trainer calls it, or asks for the key, if it is among its callbacks."""
        limit = f"('{self.metric}', at_most={self.at_most:g})"
        raise TypeError(
            f"{self._kind} is no callback of this Trainer: Lightning's takes RiskGate{limit}, and "
            f"transformers' add_callback(LeakageCallback(trainer, gates=[Threshold{limit}]))"
        )

    on_init_end, state_key = on_train_begin, property(on_train_begin)

    def __repr__(self) -> str:
        fired = "" if self.fired is None else f", fired at step {self.fired.step}"
        start = f"{self._kind}('{self.metric}', at_most={self.at_most:g}"
        return f"{start}, {self._action_name}{fired})"

    @property
    def facts(self) -> GateFacts:
        """Return the settings for the run's record.

        ``alpha`` is the probability that the judged interval is wrong at any look.
        """
        options = None if self._engine is None else self._engine.options
        return GateFacts(
            name=self.name,
            metric=self.metric,
            at_most=self.at_most,
            action=self._action_name,
            bound=self.bound,
            alpha=options.memorization.alpha if options and self.bound == "lower" else None,
            strict=self.strict,
            patience=self.patience,
        )

    @property
    def _kind(self) -> str:
        return type(self).__name__

    @property
    def _subject(self) -> str:
        return f"{self._kind} watches '{self.metric}'"

    @property
    def _action_name(self) -> str:
        name = getattr(self.action, "__name__", type(self.action).__name__)
        return self.action if isinstance(self.action, str) else name

    # ---- a run begins -----------------------------------------------------------------------

    def watch(self, engine: Engine, actions: GateActions) -> None:
        """Subscribe to an engine that logs the metric, for one run.

        Args:
            engine: The engine of the run; its families are known.
            actions: The actions on the run.

        Raises:
            ValueError: The metric cannot be judged in this run; the message says what to change.
        """
        self._engine = engine
        self._forget_run()
        if self.action == "harden":
            self._defenses = defenses_to_harden(actions.defenses)
        self._watched = engine.results.headlines_of(self.metric) or (self.metric,)
        self.on_weights = engine.results.repeats_texts(self.metric)
        is_end = self.metric.endswith(("_low", "_high"))
        self.bound = "lower" if self.on_weights and not is_end else "value"
        if not self.on_weights:
            check_value(self._kind, self.metric)
        self._check_looks(engine, actions.processes)
        engine.subscribe(
            partial(self._decide, engine, actions),
            facts=self.facts,
            before_first=partial(self._check_read, engine),
            after_training=partial(self._conclude, engine, actions),
        )

    def _check_looks(self, engine: Engine, clients: int) -> None:
        """Refuse a rate that needs more games than looks are pooled, or than a strict gate allows.

        Such a rate would always be unknown, or unknown until a strict gate stops the run.
        """
        name = self.metric.removesuffix("_worst_client")
        worst = name != self.metric and clients > 1
        if (channel := engine.results.channel_of(name)) is None:
            return
        root, _, rate = name.rpartition("/")
        if rate in channel.own_threshold:
            warnings.warn(
                f"{self._subject}, which is of the attack's own threshold: watch '{root}/auc'",
                stacklevel=2,
            )
        requirement = channel.requirement(rate, 1 if worst else clients)
        looks, pooled = requirement.looks, 1 if worst else engine.options.games.window
        if looks > pooled or (self.strict and looks > self.patience + 1):
            raise ValueError(
                f"{self._subject}: {requirement.why}, so that it is unknown before look {looks} of "
                f"a window of {pooled}: watch the AUC, or pass games=Games(targets=, window=) with "
                f"more{', or strict=False to wait for that look' * (looks <= pooled)}"
            )

    def _check_read(self, engine: Engine) -> None:
        """Refuse a metric that no attack can measure; only warn if that may change in the run.

        It may change when further parameters are unfrozen.
        """
        if self.on_weights:
            self._check_private(engine)
        if (why := why_unread(engine, self.metric)) is None:
            return
        mend = "list an attack that reads it (attacks='auto' takes all that do)"
        channel = engine.results.channel_of(self.metric)
        assert channel is not None  # else there is no reason
        root, worst = self.metric.rpartition("/")[0], f"{WORST}/{channel.family}"
        watched = {series.attack for series in engine.series if series.log_name == root}
        if self.on_weights:  # the reason names the argument
            mend = "change that"
        elif worst in engine.metric_names() and why_unread(engine, worst) is None:
            mend = f"watch '{worst}'"
        start = f"{self._subject}: {why}. That is 'unknown', not 'safe'"
        later = any(a.name in (watched or {a.name}) for a in channel.attacks)
        if later and not self.on_weights and engine.report is not None:
            counts = "a breach" if self.strict else "no breach"
            engine.report.warn_once(f"{start}, {counts} until what it reads is trained: {mend}")
        elif self.strict or is_worst(self.metric):
            raise ValueError(f"{start}: {mend}, or leave this gate out")

    def _check_private(self, engine: Engine) -> None:
        """Refuse to act on private texts under DP, and a metric that can never be determined."""
        if accounting(engine.run.defenses) and not engine.options.memorization.outside_epsilon:
            raise ValueError(
                f"{self._subject}, and the run's epsilon does not cover what a gate decides by "
                "it: leave the gate out, or accept it by Memorization(outside_epsilon=True)"
            )
        channel = engine.results.channel_of(self.metric)
        assert channel is not None
        why = channel.requirement(self.metric.rpartition("/")[2]).never if self.strict else None
        if why is not None:
            raise ValueError(f"{self._subject}: {why}; or pass strict=False, and it waits")

    # ---- after a look -----------------------------------------------------------------------

    def _decide(self, engine: Engine, actions: GateActions) -> None:
        """Judge the newest look, and act if it exceeds the threshold."""
        if self._stopped:
            return
        self._warn_of_uninformed(engine)
        # The first process decides for all: only it has the worst client's value, and durations
        # differ between processes.
        event = self._read_look(engine) if engine.run.rank == 0 else None
        event = engine.run.broadcast(None if event is None or not self._judge(event) else event)
        step = engine.results.last_step
        actions.log({f"gate/{self.name}": float(event is not None)}, step)
        if event is not None:
            self._fire(engine, actions, event)
        if self.action == "harden":
            actions.log({f"gate/{self.name}_notches": float(self.notches)}, step)

    def _warn_of_uninformed(self, engine: Engine) -> None:
        """Warn once if an answer that names everything, whatever the gradient, is a breach."""
        channel = engine.results.channel_of(self.metric)
        if channel is None or self._has_warned or rate_of(self.metric) != channel.headline:
            return
        if self.at_most < channel.uninformed:
            self._has_warned = True
            rank_zero_warn(
                f"{self._subject}: naming everything, whatever the gradient, has "
                f"{channel.uninformed:.2f} on this batch, so that at_most={self.at_most:g} cannot "
                f"decide. The lowest limit that can: {math.ceil(100 * channel.uninformed) / 100:g}"
            )

    def _conclude(self, engine: Engine, actions: GateActions) -> None:
        """Fire if a strict gate had no result in the whole run, whatever its patience.

        Announce it if ``leakage/choose`` was infinite at all validations.
        """
        if self._choices and not any(end <= self.at_most for end, _ in self._choices):
            announce(f"{self._kind} '{self.name}': {self._none_chosen()}")
        if not self.strict or self.fired is not None or engine.run.step == engine.first_step:
            return
        if not engine.run.broadcast(self._has_result):
            self._fire(engine, actions, self._event(math.nan))

    def _event(self, value: float, metric: str = "", **facts: Any) -> GateEvent:
        """Return the event of a value at the newest look; arguments as in :class:`GateEvent`."""
        assert self._engine is not None
        results = self._engine.results
        ends = (f"{self.metric}_low", f"{self.metric}_high")
        low, high = (results.latest.get(end, math.nan) for end in ends)
        if math.isnan(value) and not facts.get("why"):
            facts["why"] = results.why_unknown(self.metric)
        return GateEvent(
            *(metric or self.metric, results.last_step, value, low, high, self.at_most),
            gate=self.name,
            released=self.on_weights,
            **facts,
        )

    def _read_look(self, engine: Engine) -> GateEvent | None:
        """Return the watched value at the newest look; None if there is none yet."""
        new, values = engine.results.look_values, engine.results.latest
        if self.strict and (why := why_unread(engine, self.metric)) is not None:
            return self._event(math.nan, why=why)
        if self.on_weights:
            return self._read_interval(new)
        # A single client logs no `_worst_client`: its value is the worst.
        names = (self.metric, self.metric.removesuffix("_worst_client"))
        if not any(name in new for name in names):  # an attack of the family has no result yet
            name = f"{self.metric}_at_least"
            at_least = values.get(name, new[name]) if name in new else math.nan
            if math.isnan(at_least) or at_least <= self.at_most:
                return None
        value = next((values[name] for name in names if name in values), math.nan)
        if is_worst(self.metric):
            return self._read_worst(engine, values, value)
        counted = engine.results.judge(self.metric, value, self.at_most)
        return self._event(counted.value, why=counted.why, read=value)

    def _read_worst(self, engine: Engine, values: Mapping[str, float], value: float) -> GateEvent:
        """Return the event of the worst value of a family, with the attack that it comes from."""
        watched = {name: values[name] for name in self._watched if name in values}
        metric = self.metric
        if math.isnan(value):
            at_least = values.get(f"{self.metric}_at_least", math.nan)
            if at_least > self.at_most:
                metric, value = f"{self.metric}_at_least", at_least
        else:  # the worst value is known, so unknown values are of attacks that do not apply
            finite = {n: v for n, v in watched.items() if not math.isnan(v)}
            if counted := judge_worst(engine, finite, self.at_most):
                return self._highest_of(counted, finite)
        source = next((n for n, v in watched.items() if v == value), "")
        return self._event(value, metric=metric, source=source)

    def _highest_of(self, judged: Mapping[str, Judgement], read: Mapping[str, float]) -> GateEvent:
        """Return the event of the highest judged headline.

        If no headline is above ``at_most`` and one is unknown, it is the event of the unknown one.
        """
        watched = {name: judgement.value for name, judgement in judged.items()}
        finite = {name: value for name, value in watched.items() if not math.isnan(value)}
        source = max(finite, key=finite.__getitem__, default="")
        unknown = next((name for name in watched if name not in finite), "")
        if unknown and not (finite and finite[source] > self.at_most):
            source = unknown
        why = f"{source}: {judged[source].why}" if source == unknown else judged[source].why
        return self._event(watched[source], source=source, why=why, read=read[source])

    def _ends(self, values: Mapping[str, float], end: str) -> dict[str, float]:
        """Return the lower or upper end of each watched interval.

        For the worst of a family these are ends of joint intervals, which hold for all its attacks
        together. An end is NaN if the value is unknown. A lower end is also NaN if the interval
        reaches above ``at_most`` but not even complete leakage could have raised its lower end
        above ``at_most``, because too few texts are compared.
        """
        joint = "_joint" if is_worst(self.metric) else ""
        ends = {n: values.get(f"{n}{joint}_{end}", math.nan) for n in self._watched if n in values}
        for name, value in ends.items():
            provable = values.get(f"{name}{joint}_provable", math.inf)
            high = values.get(f"{name}{joint}_high", math.nan)
            if end == "low" and value <= self.at_most and provable <= self.at_most < high:
                ends[name] = math.nan
        return ends

    def _read_interval(self, new: Mapping[str, float]) -> GateEvent | None:
        """Return the event of the highest value or lower end; None if this look has none.

        With a weak reference a value that is not above ``at_most`` is unknown.
        """
        if self.bound == "lower":
            ends = self._ends(new, "low")
        else:
            ends = {n: new.get(n, math.nan) for n in self._watched if n in new}
        if not ends:
            return None
        weak = {n for n in ends if new.get(f"{n.rpartition('/')[0]}/{WEAK}", 0.0) > 0}
        ends |= {name: math.nan for name in weak if ends[name] <= self.at_most}
        finite = {name: value for name, value in ends.items() if not math.isnan(value)}
        source = max(finite, key=finite.__getitem__, default="")
        if not finite or (len(finite) < len(ends) and finite[source] <= self.at_most):
            highs = (new.get(f"{n}_high", math.nan) for n in ends if n not in finite)
            is_measured = any(not math.isnan(high) for high in highs)
            why = "too few texts are compared at this look to decide" if is_measured else ""
            why = WEAK_REFERENCE if weak - finite.keys() else why
            return self._event(math.nan, why=why)  # an unknown end may be above at_most
        return self._event(finite[source], source=source)

    def choice(self, loss: float) -> float:
        """Return ``leakage/choose``, the value to select a checkpoint by; lower is better.

        Args:
            loss: The validation loss of the present weights.

        Returns:
            The loss if the upper end of the interval at the present weights is at most
            ``at_most``, else infinity. With several gates it is the highest of their values.
        """
        assert self._engine is not None
        engine, weights = self._engine, self._engine.weights
        ends = self._ends(engine.results.latest, "high")
        is_read = weights is not None and weights.looked_at == engine.run.step
        is_known = is_read and bool(ends) and not any(map(math.isnan, ends.values()))
        highest = max(ends.values()) if is_known else math.nan
        self._choices.append((highest, engine.run.step))
        # An end that is unknown (NaN) allows nothing.
        loss = engine.run.broadcast(loss if highest <= self.at_most else math.inf)
        return loss if weights is None else weights.choose(loss)

    def _none_chosen(self) -> str:
        """Return the message that no weights were allowed, and which weights came nearest."""
        nearest = "The interval was never known there"
        if finite := [choice for choice in self._choices if not math.isnan(choice[0])]:
            end, step = min(finite)
            nearest = f"The nearest were those of step {step}, up to {end:.3f}"
        return (
            f"{CHOOSE} was infinite at all {len(self._choices)} validations: none was shown to "
            f"have at most {self.at_most:g}. {nearest}."
        )

    def _judge(self, event: GateEvent) -> bool:
        """Count the breaches in a row, and return whether the gate acts on this one."""
        unknown = math.isnan(event.value)
        self._has_result |= not unknown
        # An unknown value is a breach of a strict gate; for other gates it changes nothing.
        if self.strict if unknown else event.value > self.at_most:
            self._breaches += 1
            return self._breaches > self.patience
        if not unknown:
            self._breaches = 0
        return False

    # ---- actions ----------------------------------------------------------------------------

    def _fire(self, engine: Engine, actions: GateActions, event: GateEvent) -> None:
        """Take the action, record the decision, and save the run if it stops or raises."""
        changes = [defense.harden() for defense in self._defenses]
        hardened = tuple(change for change in changes if change is not None)
        stops = self.action == "stop" or (self.action == "harden" and not hardened)
        did = "hardened" if hardened else "stopped" if stops else self._action_name
        engine.record_decision(decision_of(event, did, hardened))
        saves = stops or self.action == "raise"
        name = f"gate-{self.name.replace('/', '-')}-step={event.step}"
        event = replace(
            event,
            checkpoint=actions.save(name) if saves else None,
            hardened=hardened,
            exhausted=tuple(d.name for d in self._defenses) if stops else (),
            resume=actions.resume,
            mend=actions.mend,
        )
        first, self.fired = self.fired is None, self.fired or event
        start = f"{self._kind} '{self.name}'"
        if hardened:
            self.notches += 1
            self._breaches = 0
            announce(f"{start} hardened the run {event}")
        elif stops:
            self._stopped = True
            actions.stop()
            announce(f"{start} stopped training {event}")
        elif callable(self.action):
            self.action(event)
        elif self.action == "raise":
            raise LeakageLimitExceeded(f"{start} raised {event}")
        elif first:
            announce(f"{start} warns {event}")

    # ---- checkpoints ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the number of breaches in a row, and of notches if the gate hardens defences."""
        notches = {"notches": self.notches} if self.action == "harden" else {}
        return {"breaches": self._breaches, **notches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._breaches = state_dict["breaches"]
        self.notches = state_dict.get("notches", 0)
        if self.notches:
            rank_zero_info(
                f"{self._kind} '{self.name}': the run goes on as hardened, {self.notches} "
                f"notch{'es' * (self.notches > 1)} so far"
            )


def decision_of(event: GateEvent, did: str, hardened: Sequence[str] = ()) -> GateLine:
    """Return the entry of the run's record for an action of a gate."""
    return GateLine(
        run="",
        gate=event.gate,
        did=did,
        step=event.step,
        client=event.client,
        metric=event.metric,
        source=event.source,
        measured=event.value,
        at_most=event.at_most,
        reason=event.why,
        hardened=tuple(hardened),
    )
