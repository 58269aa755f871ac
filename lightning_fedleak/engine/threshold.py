"""A gate: a threshold on measured leakage that stops a run, hardens defences, raises or warns.

:meth:`Threshold.watch` subscribes to an engine. A *look* is one measurement. After each look the
gate reads the watched value, judges it, and acts if it exceeds the threshold. To *harden* is to
make each defence stronger by one step, a *notch*. The main metric of the attacks of a family, such
as words, is its *headline*; ``leakage/worst/<family>`` is the highest one.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

from lightning_fedleak.defenses import Defense
from lightning_fedleak.engine import gates
from lightning_fedleak.engine.channels.base import Channel
from lightning_fedleak.engine.lifecycle import Engine
from lightning_fedleak.engine.outcomes import CHOOSE
from lightning_fedleak.engine.record import accounting
from lightning_fedleak.engine.results import WORST
from lightning_fedleak.messages import rank_zero_info, rank_zero_warn
from lightning_fedleak.report.records import WEAK, WEAK_REFERENCE, GateFacts, Judgement
from lightning_fedleak.validate import check_choice, check_integer, explain_arguments

Action = Literal["stop", "harden", "raise", "warn"] | Callable[[gates.GateEvent], Any]


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
    resume: str = gates.GateEvent.resume
    mend: str = gates.GateEvent.mend


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
    _engine: Engine  # of the newest run, from `watch` on
    _host: GateActions

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
        gates.check_threshold(type(self).__name__, metric, at_most)
        self.metric = metric
        self.at_most = float(at_most)
        self.action = action
        self.patience = check_integer("patience", patience, at_least=0)
        self.strict = strict
        self.name = name or metric.removeprefix("leakage/")
        self._forget_run()

    def _forget_run(self) -> None:
        self.on_weights = False
        self.bound: Literal["value", "lower"] = "value"
        self.fired: gates.GateEvent | None = None
        self.notches = self._breaches = 0
        self._defenses: tuple[Defense, ...] = ()
        # Whether it has stopped the run, has had a known value, and has warned of its limit.
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
        return GateFacts(
            name=self.name,
            metric=self.metric,
            at_most=self.at_most,
            action=self._action_name,
            bound=self.bound,
            alpha=self._engine.options.memorization.alpha if self.bound == "lower" else None,
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
        self._engine, self._host = engine, actions
        self._forget_run()
        if self.action == "harden":
            self._defenses = gates.defenses_to_harden(actions.defenses)
        self.on_weights = engine.results.repeats_texts(self.metric)
        if not self.on_weights:
            self._check_value()
        elif not self.metric.endswith(("_low", "_high")):
            self.bound = "lower"
        self._check_looks()
        engine.subscribe(self._decide, self.facts, self._check_read, self._conclude)

    def check_logged(self, names: Sequence[str], watcher: str) -> None:
        """Refuse a metric that is not logged.

        Args:
            names: The names that are logged.
            watcher: The name of the class that runs the attacks.

        Raises:
            ValueError: It is not among the names; the message suggests another one.
        """
        if self.metric not in names:
            hint = gates.names_there_are(self.metric, names, watcher)
            raise ValueError(f"{self._subject}, which this {watcher} does not log.{hint}")

    def _check_value(self) -> None:
        """Refuse the lower end of an interval, because it is also low if few texts were queried."""
        if self.metric.endswith("_low"):
            raise ValueError(
                f"{self._subject}, which is also low if few texts were queried: watch "
                f"'{self.metric.removesuffix('_low')}', with patience= where single values scatter"
            )

    def _check_looks(self) -> None:
        """Refuse a rate that needs more games than looks are pooled, or than a strict gate allows.

        Such a rate would always be unknown, or unknown until a strict gate stops the run.
        """
        name, clients = self.metric.removesuffix("_worst_client"), self._host.processes
        worst = name != self.metric and clients > 1
        if (channel := self._engine.results.channel_of(name)) is None:
            return
        root, _, rate = name.rpartition("/")
        if rate in channel.own_threshold:
            warnings.warn(
                f"{self._subject}, which is of the attack's own threshold: watch '{root}/auc'",
                stacklevel=2,
            )
        requirement = channel.requirement(rate, 1 if worst else clients)
        looks, pooled = requirement.looks, 1 if worst else self._engine.options.games.window
        if looks > pooled or (self.strict and looks > self.patience + 1):
            raise ValueError(
                f"{self._subject}: {requirement.why}, so that it is unknown before measurement "
                f"{looks} of a window of {pooled}: watch the AUC, or pass games=Games(targets=, "
                f"window=) with more{', or strict=False to wait for that one' * (looks <= pooled)}"
            )

    def _check_read(self) -> None:
        """Refuse a metric that no attack can measure; only warn if that may change in the run.

        It may change when further parameters are unfrozen.
        """
        engine, channel = self._engine, self._engine.results.channel_of(self.metric)
        if channel is None:
            return  # no attack measures it, such as the duration of a look
        if self.on_weights:
            self._check_private(channel)
        if (why := gates.why_unread(engine, self.metric)) is None:
            return
        mend = "list an attack that reads it (attacks='auto' takes all that do)"
        root, worst = self.metric.rpartition("/")[0], f"{WORST}/{channel.family}"
        watched = {series.attack for series in engine.series if series.log_name == root}
        if self.on_weights:  # the reason names the argument
            mend = "change that"
        elif worst in engine.metric_names() and gates.why_unread(engine, worst) is None:
            mend = f"watch '{worst}'"
        start = f"{self._subject}: {why}. That is 'unknown', not 'safe'"
        later = any(a.name in (watched or {a.name}) for a in channel.attacks)
        if later and not self.on_weights and engine.report is not None:
            counts = "a breach" if self.strict else "no breach"
            engine.report.warn_once(f"{start}, {counts} until what it reads is trained: {mend}")
        elif self.strict or gates.is_worst(self.metric):
            raise ValueError(f"{start}: {mend}, or leave this gate out")

    def _check_private(self, channel: Channel) -> None:
        """Refuse to act on private texts under DP, and a metric that can never be determined."""
        engine = self._engine
        if accounting(engine.run.defenses) and not engine.options.memorization.outside_epsilon:
            raise ValueError(
                f"{self._subject}, and the run's epsilon does not cover what a gate decides by "
                "it: leave the gate out, or accept it by Memorization(outside_epsilon=True)"
            )
        why = channel.requirement(self.metric.rpartition("/")[2]).never if self.strict else None
        if why is not None:
            raise ValueError(f"{self._subject}: {why}; or pass strict=False, and it waits")

    # ---- what a look says -------------------------------------------------------------------

    def judge(
        self, engine: Engine, values: Mapping[str, float], unknown: Mapping[str, str]
    ) -> gates.GateEvent:
        """Return the event of the value that decides.

        That is the highest value above the threshold; without one, an unknown value; else the
        highest value. For the worst of a family the values are its headlines.

        Args:
            engine: The engine of the look.
            values: The values of the look by log name.
            unknown: The names whose values are unknown unless they are above the threshold, with
                the reasons; an empty reason if the engine's results have it.
        """
        judged = self._judgements(engine, values)
        doubted = {n: w for n, w in unknown.items() if not self._is_breach(judged.get(n))}
        judged |= {name: Judgement(math.nan, why) for name, why in doubted.items()}
        known = {name: j.value for name, j in judged.items() if not math.isnan(j.value)}
        source = max(known, key=known.__getitem__, default="")
        if not self._is_breach(judged.get(source)):  # an unknown value may be one
            source = next((name for name in judged if name not in known), source)
        value, why = judged[source].value, judged[source].why
        is_of_family = gates.is_worst(self.metric) and source != self.metric
        if math.isnan(value):
            why = f"{source}: {why}" if why and is_of_family else why
            why = why or engine.results.why_unknown(self.metric)
        is_least = is_of_family and not math.isnan(value) and self.metric in unknown
        low, high = (values.get(f"{self.metric}_{end}", math.nan) for end in ("low", "high"))
        return gates.GateEvent(
            f"{self.metric}_at_least" if is_least else self.metric,
            engine.results.last_step,
            value,
            low,
            high,
            self.at_most,
            source=source if is_of_family else "",
            why=why,
            released=self.on_weights,
            read=values.get(source, math.nan),
            gate=self.name,
        )

    def _judgements(self, engine: Engine, values: Mapping[str, float]) -> dict[str, Judgement]:
        """Return how each watched value counts at this threshold, by log name."""
        names = self._watched(engine, values)
        if self.on_weights:
            return {name: self._judge_end(name, values) for name in names}
        known = {name: values[name] for name in names if not math.isnan(values[name])}
        return gates.judge_together(engine, known, self.at_most)

    def _is_breach(self, judgement: Judgement | None) -> bool:
        return judgement is not None and judgement.value > self.at_most

    def _watched(self, engine: Engine, values: Mapping[str, float]) -> list[str]:
        """Return the logged names that are judged: of the worst of a family, all headlines."""
        names = engine.results.headlines_of(self.metric) or (self._name_in(values),)
        return [name for name in names if name in values]

    def _name_in(self, values: Mapping[str, float]) -> str:
        """Return the name of the metric. A single client logs no `_worst_client`: it is its own."""
        return self.metric if self.metric in values else self.metric.removesuffix("_worst_client")

    def _judge_end(self, name: str, values: Mapping[str, float]) -> Judgement:
        """Return how a value of an attack on the trained weights counts, by its lower end.

        If that is not above ``at_most``, it is unknown with a weak reference, and if the interval
        reaches above ``at_most`` although not even complete leakage could have raised its lower end
        above ``at_most``, because too few texts are compared.
        """
        low = self._end(name, values, "low") if self.bound == "lower" else values[name]
        if low > self.at_most:
            return Judgement(low)
        if values.get(f"{name.rpartition('/')[0]}/{WEAK}", 0.0) > 0:
            return Judgement(math.nan, WEAK_REFERENCE)
        provable = self._end(name, values, "provable") <= self.at_most
        if math.isnan(low) or (provable and self._end(name, values, "high") > self.at_most):
            is_measured = not math.isnan(values.get(f"{name}_high", math.nan))
            why = "too few texts are compared here to decide" if is_measured else ""
            return Judgement(math.nan, why)
        return Judgement(low)

    def _end(self, name: str, values: Mapping[str, float], end: str) -> float:
        """Return an end of a watched interval; NaN if it is unknown.

        For the worst of a family it is that of the joint interval, which holds for all its attacks
        together.
        """
        joint = "_joint" if gates.is_worst(self.metric) else ""
        return values.get(f"{name}{joint}_{end}", math.nan)

    def _read_look(self) -> gates.GateEvent | None:
        """Return the event of the newest look; None if it has no value yet."""
        engine, results = self._engine, self._engine.results
        new, values = results.look_values, results.latest
        if self.strict and (why := gates.why_unread(engine, self.metric)) is not None:
            return self.judge(engine, {}, {self.metric: why})
        name = self._name_in(values)
        has_value = name in new
        if not has_value and f"{name}_at_least" not in new:
            return None
        is_unknown = math.isnan(values.get(name, math.nan)) and not self.on_weights
        event = self.judge(engine, values, {name: ""} if is_unknown else {})
        # Without a value, an attack of the family has no result yet, which may be higher.
        return event if has_value or event.value > self.at_most else None

    def choice(self, loss: float) -> float:
        """Return ``leakage/choose``, the value to select a checkpoint by; lower is better.

        Args:
            loss: The validation loss of the present weights.

        Returns:
            The loss if the upper end of the interval at the present weights is at most
            ``at_most``, else infinity. With several gates it is the highest of their values.
        """
        engine, weights, values = self._engine, self._engine.weights, self._engine.results.latest
        is_read = weights is not None and weights.looked_at == engine.run.step
        ends = [self._end(n, values, "high") for n in self._watched(engine, values) if is_read]
        highest = math.nan if any(map(math.isnan, ends)) else max(ends, default=math.nan)
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

    # ---- after a look -----------------------------------------------------------------------

    def _decide(self) -> None:
        """Judge the newest look, and act if it exceeds the threshold."""
        if self._stopped:
            return
        engine = self._engine
        self._warn_of_uninformed(engine)
        # The first process decides for all: only it has the worst client's value, and durations
        # differ between processes.
        event = self._read_look() if engine.run.rank == 0 else None
        event = engine.run.broadcast(None if event is None or not self._acts_on(event) else event)
        step = engine.results.last_step
        self._host.log({f"gate/{self.name}": float(event is not None)}, step)
        if event is not None:
            self._fire(event)
        if self.action == "harden":
            self._host.log({f"gate/{self.name}_notches": float(self.notches)}, step)

    def _warn_of_uninformed(self, engine: Engine) -> None:
        """Warn once if an answer that names everything, whatever the gradient, is a breach."""
        channel = engine.results.channel_of(self.metric)
        if channel is None or self._has_warned or gates.rate_of(self.metric) != channel.headline:
            return
        if self.at_most < channel.uninformed:
            self._has_warned = True
            rank_zero_warn(
                f"{self._subject}: naming everything, whatever the gradient, has "
                f"{channel.uninformed:.2f} on this batch, so that at_most={self.at_most:g} cannot "
                f"decide. The lowest limit that can: {math.ceil(100 * channel.uninformed) / 100:g}"
            )

    def _acts_on(self, event: gates.GateEvent) -> bool:
        """Count the breaches in a row, and return whether the gate acts on this event."""
        is_unknown = math.isnan(event.value)
        self._has_result |= not is_unknown
        is_breach = self.strict if is_unknown else event.value > self.at_most
        # An unknown value that is no breach changes nothing.
        self._breaches = self._breaches + 1 if is_breach else self._breaches * is_unknown
        return is_breach and self._breaches > self.patience

    def _conclude(self) -> None:
        """Fire if a strict gate had no result in the whole run, whatever its patience.

        Announce it if ``leakage/choose`` was infinite at all validations.
        """
        engine = self._engine
        if self._choices and not any(end <= self.at_most for end, _ in self._choices):
            gates.announce(f"{self._kind} '{self.name}': {self._none_chosen()}")
        if not self.strict or self.fired is not None or engine.run.step == engine.first_step:
            return
        if not engine.run.broadcast(self._has_result):
            self._fire(self.judge(engine, {}, {self.metric: ""}))

    # ---- actions ----------------------------------------------------------------------------

    def _fire(self, event: gates.GateEvent) -> None:
        """Take the action, record the decision, and save the run if it stops or raises."""
        host, changes = self._host, [defense.harden() for defense in self._defenses]
        hardened = tuple(change for change in changes if change is not None)
        stops = self.action == "stop" or (self.action == "harden" and not hardened)
        did = "hardened" if hardened else "stopped" if stops else self._action_name
        self._engine.record_decision(event.decision(did, hardened))
        saves = stops or self.action == "raise"
        name = f"gate-{self.name.replace('/', '-')}-step={event.step}"
        event = replace(
            event,
            checkpoint=host.save(name) if saves else None,
            hardened=hardened,
            exhausted=tuple(d.name for d in self._defenses) if stops else (),
            resume=host.resume,
            mend=host.mend,
        )
        first, self.fired = self.fired is None, self.fired or event
        start = f"{self._kind} '{self.name}'"
        if hardened:
            self.notches += 1
            self._breaches = 0
            gates.announce(f"{start} hardened the run {event}")
        elif stops:
            self._stopped = True
            host.stop()
            gates.announce(f"{start} stopped training {event}")
        elif callable(self.action):
            self.action(event)
        elif self.action == "raise":
            raise gates.LeakageLimitExceeded(f"{start} raised {event}")
        elif first:
            gates.announce(f"{start} warns {event}")

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
