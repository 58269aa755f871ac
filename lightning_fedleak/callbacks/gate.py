"""RiskGate: a threshold on measured leakage that stops, hardens, raises, warns or calls."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_fedleak.callbacks.monitor import LeakageMonitor
from lightning_fedleak.defenses import Defense
from lightning_fedleak.lightning_packages import EitherCallback
from lightning_fedleak.looks import Engine, GateDecision, LeakageLimitExceeded
from lightning_fedleak.looks.gates import (
    Evidence,
    GateEvent,
    Verdict,
    announce,
    check_threshold,
    defenses_to_harden,
    harden,
    is_worst,
    names_there_are,
    rate_of,
)
from lightning_fedleak.strategies import DefendedStrategy
from lightning_fedleak.validate import check_choice, check_integer, check_number

if TYPE_CHECKING:
    import lightning.pytorch as L

Action = Literal["stop", "harden", "raise", "warn"] | Callable[[GateEvent], Any]


class RiskGate(EitherCallback):
    """Act when a metric of a :class:`LeakageMonitor` exceeds a threshold.

    Looks at every result of the monitor, at the level of steps. With several processes the first
    one judges, and the others get a value only where the gate acts on it. Before it stops or raises
    it saves a checkpoint (not under ``fast_dev_run``). Other metrics and attacks do not affect it.

    What "exceeds" means is ``bound``. A gate that compares every look by itself acts sooner or
    later on any noisy metric; the other two spend one probability of error, ``alpha``, on all
    looks of a run together, however many
    (see :class:`~lightning_fedleak.looks.gates.Evidence`):

    - ``"value"``: the newest value in the logs is above ``at_most``. No probability is promised.
    - ``"lower"``: the looks so far *show* that the mean is above. A system that is really below at
      every look is ever acted on with probability at most ``alpha``.
    - ``"upper"``: fail-closed. After ``warmup`` looks the run goes on only where the looks so far
      show that the mean is below. A system that is really above at every look goes on with
      probability at most ``alpha``; a safe one may be stopped, the likelier the closer it is to
      the threshold.

    ``"lower"`` and ``"upper"`` read the value of each look by itself, also where the logs pool it
    over looks, and need a metric with a known range: precision, recall, F1, accuracy, AUC,
    advantage, a TPR, token accuracy, exact sentences, texts found, ROUGE, or one of them with
    ``_worst_client``. That one is the largest of what was measured on the clients, whose mean lies
    above the worst client's own mean, the more so the more clients and the fewer games: ``"upper"``
    keeps its promise about each client then, ``"lower"`` would not, and is refused with several
    clients.

    **The worst of a family**, ``"leakage/worst/words"``, is watched like any other value. Where one
    attack is unknown, what the others read at least counts as the value if it is a breach by
    itself. ``"lower"`` and ``"upper"`` keep evidence on each attack of the family: the former
    splits ``alpha`` among them; the latter lets a run go on only if every one is shown to be below,
    which costs no more than one of them does. A run in which no attack of the family is played is
    refused before it trains.

    **A surface that is not shared** reads 0. That says nothing about what is shared instead. Where
    no attack of the same family reads any of it, a strict gate refuses the run before it trains. It
    treats the value as unknown where that happens during the run (a layer that is frozen).

    An *unknown* value counts, unless ``strict=False``, as a breach towards ``patience`` for
    ``"value"`` and ``"lower"`` (for ``"lower"`` it is no evidence, so that these stops come on top
    of ``alpha``), and as the largest possible value for ``"upper"``. A fit in which a strict gate
    never had a result ends as *unknown*: the gate acts then, whatever ``patience`` and ``warmup``.

    Examples:
        >>> import lightning as L
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lightning_fedleak import BagOfWords, LeakageMonitor, RiskGate
        >>> from lightning_fedleak.finetuning import CausalLMFineTuning
        >>> config = GPT2Config(vocab_size=64, n_embd=8, n_head=1, tie_word_embeddings=False)
        >>> module = CausalLMFineTuning(GPT2LMHeadModel(config))  # stands for your own
        >>> monitor = LeakageMonitor([BagOfWords()], every_n_steps=1)
        >>> gate = RiskGate("leakage/bag_of_words/f1", at_most=0.5)
        >>> trainer = L.Trainer(max_steps=9, callbacks=[monitor, gate])
        >>> rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64).view(8, 8)]
        >>> trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
        >>> trainer.global_step
        1

    Args:
        metric: a name in the logs, ``"leakage/<attack>/<metric>"``.
        at_most: the largest value that is allowed; of rates a share, at most 1.
        action: ``"stop"`` ends training in order, ``"raise"`` raises
            :class:`LeakageLimitExceeded`, ``"warn"`` warns once and goes on; a callable gets the
            :class:`GateEvent` each time the gate fires, on every process, and training goes on.
            ``"harden"`` turns every defence of the run's DefendedStrategy that can be turned up
            (:meth:`~lightning_fedleak.defenses.Defense.harden`) up by one notch and goes on,
            judging again from the next look; once all are as strong as they get, it stops the run
            like ``"stop"``. The decision is taken in sight of private data: an accounted epsilon
            covers neither it nor the leakage logs. A run that resumes has the notches of its
            checkpoint; those taken since are forgotten until its first look, at its first step.
        patience: breaches in a row that are let pass before the gate fires; with ``"lower"``
            unknown values in a row.
        strict: an unknown value counts as a breach. Otherwise it counts as nothing.
        name: in the logs, ``gate/<name>``; default the metric without ``leakage/``.
        bound: ``"value"``, ``"lower"`` or ``"upper"``. Default ``"value"``; of the trained weights
            (``leakage/combined/auc``, say), which are looked at on the same texts again and again,
            ``"lower"``: the gate acts where the lower end of the interval, which holds at all looks
            together, is above ``at_most``. ``"upper"`` acts where the upper end is. Their
            ``shown`` is not known with few others, and then the gate waits.
        alpha: probability of a wrong decision over the whole run, for the latter two. With
            ``action="harden"`` the run is judged again after each notch, at half the probability of
            the time before: alpha / 2, alpha / 4, ..., together alpha.
        warmup: looks that ``"upper"`` lets pass before it judges. Default: twice as many as a run
            needs whose value stays half-way between ``at_most`` and that of an attack that knows
            nothing (20 looks for an F1 of at most 0.5, 40 for 0.3, 140 for 0.1, 64 for an AUC of
            at most 0.6, at the default ``alpha``); more where the values of single looks scatter,
            as those of few games do, so that a run of such a mean passes all the same.

    Attributes:
        fired: the event of the first time that the gate fired in the newest fit; None so far.
        notches: how often it has turned the defences up.
        verdict: what the looks so far show; None with ``bound="value"`` and before the first. On
            processes but the first, what they showed when the gate last fired.

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
        bound: Literal["value", "lower", "upper"] | None = None,
        alpha: float = 0.05,
        warmup: int | None = None,
    ) -> None:
        if not callable(action) and action not in ("stop", "harden", "raise", "warn"):
            raise ValueError(
                f"action must be 'stop', 'harden', 'raise', 'warn' or a callable, got {action!r}"
            )
        check_integer("patience", patience, at_least=0)
        chosen = bound or "value"
        _check_bound(chosen, alpha, warmup, patience, strict)
        check_threshold("RiskGate", metric, at_most, reachable=chosen == "value")
        self.metric = metric
        self.at_most = float(at_most)
        self.action = action
        self.patience = patience
        self.strict = strict
        self.name = name or metric.removeprefix("leakage/")
        self.bound = chosen
        self._bound_chosen = bound is not None
        self._dependent = False
        self.alpha = alpha
        self.warmup = warmup
        self.fired: GateEvent | None = None
        self.verdict: Verdict | None = None
        self.notches = 0
        self._defenses: tuple[Defense, ...] = ()
        self._watched: tuple[str, ...] = (metric,)
        self._breaches = 0
        self._evidence: dict[str, Evidence] | None = None
        self._engine: Engine | None = None
        self._first_step = 0
        self._stopped = False
        self._has_result = False

    def __repr__(self) -> str:
        bound = "" if self.bound == "value" else f", bound='{self.bound}'"
        fired = "" if self.fired is None else f", fired at step {self.fired.step}"
        start = f"RiskGate('{self.metric}', at_most={self.at_most:g}"
        return f"{start}, {_name_of(self.action)}{bound}{fired})"

    @property
    def state_key(self) -> str:
        """Return the key that distinguishes several gates of one run in a checkpoint."""
        return f"RiskGate[{self.name}]"

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a metric that no monitor logs, and a stop that Lightning would ignore.

        Raises:
            ValueError: the message names the metrics that exist, or the argument to change.
        """
        if stage != "fit":
            return
        self.fired = None
        self._engine = self._find_engine(trainer)
        self._check_stop(trainer)
        self._defenses = defenses_to_harden(_defenses(trainer)) if self.action == "harden" else ()
        self.notches = 0
        self._watched = self._engine.headlines_of(self.metric) or (self.metric,)
        self._dependent = self._engine.is_looks_dependent(self.metric)
        if self._dependent:
            self._check_dependent(self._engine)
        self._check_looks(self._engine, trainer.world_size)
        self._evidence, self.verdict = self._new_evidence(), None
        self._breaches = 0
        notches = [f"gate/{self.name}_notches"] if self.action == "harden" else []
        logs = [f"gate/{self.name}", *notches]
        self._has_result = self._stopped = False
        self._engine.subscribe(
            partial(self._decide, trainer),
            logs,
            facts=self._describe(),
            before_first=self._check_read,
            after_training=partial(self._conclude, trainer),
        )

    def _find_engine(self, trainer: L.Trainer) -> Engine:
        """Return the engine of the monitor that logs the metric.

        Raises:
            ValueError: no monitor does, or several do.
        """
        monitors = [c for c in _callbacks(trainer) if isinstance(c, LeakageMonitor)]
        if not monitors:
            raise ValueError(
                f"RiskGate('{self.metric}') needs a LeakageMonitor among the Trainer's callbacks"
            )
        logged_by = [m for m in monitors if self.metric in m.metric_names()]
        if len(logged_by) > 1:
            raise ValueError(
                f"RiskGate watches '{self.metric}', which {len(logged_by)} LeakageMonitors of this "
                "run log: give all attacks to one monitor"
            )
        if not logged_by:
            names = [n for m in monitors for n in m.metric_names()]
            message = f"RiskGate watches '{self.metric}', which no LeakageMonitor of this run logs."
            raise ValueError(message + names_there_are(self.metric, names))
        return logged_by[0].engine

    def _check_stop(self, trainer: L.Trainer) -> None:
        """Refuse a gate of the same name, and one that cannot do what it promises.

        Raises:
            ValueError: the message names the argument to change.
        """
        gates = [c for c in _callbacks(trainer) if isinstance(c, RiskGate) and c is not self]
        if any(gate.name == self.name for gate in gates):
            raise ValueError(f"two RiskGates are named '{self.name}': give one of them name=...")
        if self.action in ("stop", "harden") and (trainer.min_epochs or trainer.min_steps):
            raise ValueError(
                f"RiskGate(action='{self.action}') could not stop this run: the Trainer's "
                "min_epochs or min_steps makes Lightning train on. Drop them, or use "
                "action='raise'."
            )
        clients, worst = trainer.world_size, self.metric.endswith("_worst_client")
        if self.bound == "lower" and clients > 1 and worst:
            raise ValueError(
                f"RiskGate(bound='lower') cannot watch '{self.metric}' with {clients} processes: "
                "the largest of several clients' values lies above every client's mean, so that a "
                "run that is really below would be stopped. Watch the pooled value, or use "
                "bound='upper'."
            )

    def _check_dependent(self, engine: Engine) -> None:
        """Judge by the interval's ends, which hold at all looks together.

        Raises:
            ValueError: another alpha than the intervals have, or a private choice under DP.
        """
        if not self._bound_chosen:
            self.bound = "lower"
        alpha = engine.options.memorization.alpha
        if self.bound != "value" and self.alpha != alpha:
            raise ValueError(
                f"RiskGate(alpha={self.alpha:g}) watches '{self.metric}', whose intervals hold at "
                f"all looks together but for {alpha:g}: give Memorization(alpha={self.alpha:g})"
            )

    def _check_read(self) -> None:
        """Refuse a metric that reads nothing of this run, unless hardening may cause that later."""
        assert self._engine is not None
        if self._dependent:
            self._check_private(self._engine)
        why = self._engine.unread(self.metric)
        if why is None or self.action == "harden" or not (self.strict or is_worst(self.metric)):
            return
        others = self._engine.others_on(self.metric)
        mend = f"list an attack that reads it: {others}" if others else "no other attack reads it"
        raise ValueError(
            f"RiskGate watches '{self.metric}': {why}. That is 'unknown', not 'safe': {mend}; or "
            "leave this gate out"
        )

    def _check_private(self, engine: Engine) -> None:
        """Refuse to act on private texts under DP, and a metric that cannot become known.

        Raises:
            ValueError: the message names the argument to change.
        """
        if engine.accounts() and not engine.options.memorization.outside_epsilon:
            raise ValueError(
                f"RiskGate watches '{self.metric}', which is read off private texts, and the run's "
                "epsilon does not cover what a gate decides by it: leave the gate out, or accept "
                "it by Memorization(outside_epsilon=True)"
            )
        why = engine.never_known(self.metric) if self.strict else None
        if why is not None:
            raise ValueError(
                f"RiskGate watches '{self.metric}', which a strict gate needs to know: {why}; or "
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

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember the step at which this fit starts."""
        self._first_step = trainer.global_step

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log ``leakage/choose``, for a gate on the trained weights: what to keep a checkpoint by.

        It is the validation loss where the upper end of the interval at these very weights is at
        most ``at_most``, and infinite elsewhere.
        """
        if not self._dependent or self._engine is None or trainer.sanity_checking:
            return
        engine, metrics = self._engine, trainer.callback_metrics
        losses = (metrics.get(name) for name in engine.options.utility if name.startswith("val"))
        loss = next((float(value) for value in losses if value is not None), None)
        if loss is None:
            return
        ends = [engine.results.latest.get(f"{name}_high", math.nan) for name in self._watched]
        known = [end for end in ends if not math.isnan(end)]
        allowed = engine.weights_are_read() and bool(known) and max(known) <= self.at_most
        chosen = trainer.strategy.broadcast(loss if allowed else math.inf)
        metrics["leakage/choose"] = torch.tensor(chosen)
        for logger in trainer.loggers:
            logger.log_metrics({"leakage/choose": chosen}, step=trainer.global_step)

    def _check_looks(self, engine: Engine, clients: int) -> None:
        """Refuse a rate that is never known, or only after the gate has acted on its absence."""
        name = self.metric.removesuffix("_worst_client")
        worst = name != self.metric and clients > 1
        if engine.is_of_own_threshold(name):
            root = name.rpartition("/")[0]
            warnings.warn(
                f"RiskGate watches '{self.metric}', which is of the attack's own threshold, and "
                f"may be low though the attack orders all texts rightly: watch '{root}/auc'",
                stacklevel=2,
            )
        requirement = engine.looks_until_known(name, 1 if worst else clients)
        if requirement is None:
            return
        looks, why = requirement
        pooled = 1 if worst or self.bound != "value" else engine.options.games.window
        why = f"RiskGate watches '{self.metric}': {why}"
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
        if self.bound == "value" or self._dependent:
            return None
        rate, alpha = rate_of(self.metric), self._alpha_now
        if self.bound == "lower":
            alpha /= len(self._watched)
        try:
            return {
                name: Evidence(self.bound, self.at_most, alpha, self.warmup, rate)
                for name in self._watched
            }
        except ValueError as refusal:
            raise ValueError(f"RiskGate watches '{self.metric}': {refusal}") from None

    @property
    def _alpha_now(self) -> float:
        return self.alpha / 2 ** (self.notches + 1) if self.action == "harden" else self.alpha

    def _decide(self, trainer: L.Trainer) -> None:
        engine = self._engine
        assert engine is not None
        if self._stopped:
            return
        # The first process has what no other has, its clock's seconds and the worst client's value:
        # it decides, and the others get what it acts on.
        measurement = self._read_look(engine) if trainer.is_global_zero else None
        acts = (
            (measurement, self.verdict)
            if measurement is not None and self._judge(measurement)
            else None
        )
        breach = trainer.strategy.broadcast(acts)
        step = engine.results.last_step
        for logger in trainer.loggers:
            logged = {f"gate/{self.name}": float(breach is not None)} | self._progress()
            logger.log_metrics(logged, step=step)
        if breach is not None:
            measurement, self.verdict = breach
            self._fire(trainer, engine, measurement)
        if self.action == "harden":
            notches = {f"gate/{self.name}_notches": float(self.notches)}
            for logger in trainer.loggers:
                logger.log_metrics(notches, step=step)

    def _conclude(self, trainer: L.Trainer) -> None:
        """Fire if a strict gate had no result in the whole fit, whatever its patience."""
        if not self.strict or self.fired is not None or trainer.global_step == self._first_step:
            return
        if not trainer.strategy.broadcast(self._has_result):
            assert self._engine is not None
            self._fire(trainer, self._engine, _Measurement(self.metric, math.nan, {}))

    def _read_look(self, engine: Engine) -> _Measurement | None:
        """Return the watched value at the newest look; None where there is none yet."""
        new = engine.results.look_values
        values = engine.results.latest if self._evidence is None else new
        if self.strict and (why := engine.unread(self.metric)) is not None:
            unknown = dict.fromkeys(self._watched, math.nan)
            return _Measurement(self.metric, math.nan, unknown, why=why)
        # One client alone is its own worst.
        names = (self.metric, self.metric.removesuffix("_worst_client"))
        if self._dependent:
            return self._read_interval(new)
        if not any(name in new for name in names):
            # An attack of the family waits. Evidence is collected from complete looks only.
            at_least = new.get(f"{self.metric}_at_least", math.nan)
            if self._evidence is not None or not at_least > self.at_most:
                return None
        value = next((values[name] for name in names if name in values), math.nan)
        if not is_worst(self.metric):
            return _Measurement(self.metric, value, {self.metric: value})
        return self._read_worst(engine, values, value)

    def _read_interval(self, new: Mapping[str, float]) -> _Measurement | None:
        """Return the end of the interval that the bound asks for, where this look has one."""
        end = {"value": "", "lower": "_low", "upper": "_high"}[self.bound]
        ends = {n: new[f"{n}{end}"] for n in self._watched if f"{n}{end}" in new}
        if not ends:
            return None
        known = {name: value for name, value in ends.items() if not math.isnan(value)}
        if not known and self.metric.endswith("/shown"):
            area = new.get(f"{self.metric.removesuffix('/shown')}/auc", math.nan)
            if not math.isnan(area):
                return None  # later looks need more others than earlier ones
        if not known:
            return _Measurement(self.metric, math.nan, ends)
        source = max(known, key=known.__getitem__)
        return _Measurement(self.metric, known[source], ends, source)

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
            elif self.bound == "upper" and engine.untested(self.metric):
                watched = dict.fromkeys(watched, math.nan)  # what is not played may read more
        else:  # what is unknown then is of methods that do not apply
            watched = {n: v for n, v in watched.items() if not math.isnan(v)}
        source = next((n for n, v in watched.items() if v == value), "")
        why = engine.untested(self.metric) if math.isnan(value) else ""
        return _Measurement(name, value, watched, source, why)

    def _judge(self, measurement: _Measurement) -> bool:
        """Return whether the gate acts, with this look counted."""
        unknown = math.isnan(measurement.value)
        self._has_result |= not unknown
        breach = self.strict if unknown else measurement.value > self.at_most
        fires = False
        if self._evidence is not None:
            for name, value in measurement.watched.items():
                if not math.isnan(value) or self.strict:
                    self._evidence[name].update(value)
            self.verdict = self._verdict_of(self._evidence)
            fires = self.verdict.fires
            unknown |= (
                measurement.name != self.metric
            )  # what is read at least, of a worst that is unknown
            unknown |= any(math.isnan(value) for value in measurement.watched.values())
            breach = unknown and self.strict and self.bound == "lower"
        if breach:
            self._breaches += 1
        elif not unknown:
            self._breaches = 0
        return fires or (breach and self._breaches > self.patience)

    def _verdict_of(self, evidence: Mapping[str, Evidence]) -> Verdict:
        """Return the verdict on the value that fires, or else on the one nearest to firing."""
        firing = next((e for e in self._counted(evidence) if e.verdict().fires), None)
        return (firing or self._nearest(evidence)).verdict()

    @staticmethod
    def _counted(evidence: Mapping[str, Evidence]) -> list[Evidence]:
        return [e for e in evidence.values() if e.verdict().looks] or list(evidence.values())

    def _nearest(self, evidence: Mapping[str, Evidence]) -> Evidence:
        nearest = max if self.bound == "lower" else min
        return nearest(self._counted(evidence), key=lambda e: e.progress)

    def _progress(self) -> dict[str, float]:
        if self._evidence is None:
            return {}
        return {f"gate/{self.name}_evidence": self._nearest(self._evidence).progress}

    def _fire(self, trainer: L.Trainer, engine: Engine, measurement: _Measurement) -> None:
        hardened = tuple(harden(self._defenses))
        stops = self.action == "stop" or (self.action == "harden" and not hardened)
        step, checkpoint = engine.results.last_step, None
        if (stops or self.action == "raise") and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            folder = Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints"
            checkpoint = folder / f"gate-{self.name.replace('/', '-')}-step={step}.ckpt"
        low, high = math.nan, math.nan
        if self._evidence is None:
            ends = (f"{self.metric}_low", f"{self.metric}_high")
            low, high = (engine.results.latest.get(end, math.nan) for end in ends)
        event = GateEvent(
            measurement.name,
            step,
            measurement.value,
            low,
            high,
            self.at_most,
            checkpoint,
            self.verdict,
            hardened,
            tuple(d.name for d in self._defenses) if stops else (),
            measurement.source,
            measurement.why,
        )
        first, self.fired = self.fired is None, self.fired or event
        engine.record_decision(
            GateDecision(
                gate=self.name,
                did="hardened" if hardened else "stopped" if stops else _name_of(self.action),
                step=event.step,
                metric=event.metric,
                source=event.source,
                measured=event.value,
                at_most=event.at_most,
                reason=event.why,
                hardened=event.hardened,
            )
        )
        if checkpoint is not None:
            trainer.save_checkpoint(checkpoint)
        if hardened:
            self.notches += 1
            self._breaches = 0
            self._evidence = self._new_evidence()
            announce(f"RiskGate '{self.name}' hardened the run {event}")
        elif stops:
            trainer.should_stop = self._stopped = True
            announce(f"RiskGate '{self.name}' stopped training {event}")
        else:
            self._act(event, first=first)

    def _act(self, event: GateEvent, *, first: bool) -> None:
        """Raise, warn or call as the user asks."""
        if callable(self.action):
            self.action(event)
        elif self.action == "raise":
            raise LeakageLimitExceeded(f"RiskGate '{self.name}' raised {event}")
        elif first:
            announce(f"RiskGate '{self.name}' warns {event}")

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
                f"RiskGate '{self.name}': the run goes on as hardened, {self.notches} "
                f"notch{'es' * (self.notches > 1)} so far"
            )
        saved = state_dict.get("evidence")
        if saved is None and self._evidence is None:
            return
        if saved is not None and "question" in saved:  # of a version that knew no worst
            saved = {self.metric: saved}
        if not saved or self._evidence is None or not self._restore_evidence(self._evidence, saved):
            announce(
                f"RiskGate '{self.name}': the checkpoint's evidence is for another metric, "
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
        why: why the value is unknown, where the gate itself can say.
    """

    name: str
    value: float
    watched: Mapping[str, float]
    source: str = ""
    why: str = ""


def _name_of(action: Action) -> str:
    if isinstance(action, str):
        return action
    return getattr(action, "__name__", type(action).__name__)


def _callbacks(trainer: L.Trainer) -> list[L.Callback]:
    return list(trainer.callbacks)  # type: ignore[attr-defined]


def _check_bound(bound: str, alpha: float, warmup: int | None, patience: int, strict: bool) -> None:
    check_choice("bound", bound, ("value", "lower", "upper"))
    check_number("alpha", alpha, above=0, below=1)
    if warmup is not None:
        if bound != "upper":
            raise ValueError(f"warmup is for bound='upper' alone; bound is '{bound}'")
        check_integer("warmup", warmup)
    if bound == "upper" and (patience or not strict):
        raise ValueError(
            "bound='upper' is fail-closed: it takes no patience (warmup is what it lets pass), and "
            "unknown values count as worst, so that strict=False is refused"
        )


def _defenses(trainer: L.Trainer) -> tuple[Defense, ...]:
    strategy = trainer.strategy
    return tuple(strategy.defenses) if isinstance(strategy, DefendedStrategy) else ()
