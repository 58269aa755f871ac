"""The results of all looks of a run, and their interpretation at a gate's threshold.

A *look* is one measurement at a step. A *series* is the results of one attack at one stage of the
gradient's way. At a look it gets an outcome, which may be *pending*: the attack has no result yet.
It is then retried at the next look, or in the next step if the outcome is *soon*. After too many
retries it is *unknown*. The main metric of a *family* of attacks, such as words, is its *headline*;
the highest one is the family's *worst* value. A *gate* is a threshold on a logged value. A
*control* is the same step on known words, which shows whether an attack works at all.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from lightning_fedleak.attacks import Attack
from lightning_fedleak.engine.channels.base import Channel, gives_control, highest
from lightning_fedleak.engine.channels.steps import StepChannel
from lightning_fedleak.engine.outcomes import PREFIX, Control, Outcome, Series, unknown
from lightning_fedleak.engine.run import Look
from lightning_fedleak.evaluation.metrics.clustered import over_looks
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.report import records

MAX_WAITS = 20
"""Number of looks (or rounds) for which a result may be pending before it is unknown. Also the
number of steps in a row that may share nothing while a look is due; not tuned."""
MAX_STEPS_WAITED = 1000
"""Optimizer steps in which an attack without a result yet is retried, until it is unknown (see
:class:`~lightning_fedleak.engine.outcomes.Waiting`).

A learning-rate warm-up from 0 takes two steps, or a whole epoch if the rate changes once per epoch,
as is Lightning's default. A larger value lets runs go on longer without a result; an attempt
without a result is cheap.
"""
_NOTHING_SHARED = (
    "nothing was shared in {} steps in a row: all labels of their batches were -100, or the "
    "optimizer skipped its step"
)
UNEXPLAINED = f"{PREFIX[Stage.SHARED]}/step/unexplained"
"""Log name of the share (0 to 1) of a gradient that recomputing the step does not explain."""
WORST = f"{PREFIX[Stage.SHARED]}/worst"
"""Prefix of the log names of the highest headlines, ``leakage/worst/<family>``."""


@dataclass(frozen=True)
class Listener:
    """What a gate or a report does at moments of a run, on every process.

    Attributes:
        after_look: Called after each look.
        facts: The settings of a gate for ``run.jsonl``. Controls must exceed its threshold, see
            :mod:`lightning_fedleak.engine.channels.control`.
        before_first: Called before the first step, once the plans of the attacks are known, and
            again once the attacks on the trained weights have their texts.
        after_training: Called when training ends, after the last results.
    """

    after_look: Callable[[], object] = lambda: None
    facts: records.GateFacts | None = None
    before_first: Callable[[], object] = lambda: None
    after_training: Callable[[], object] = lambda: None


class Results:
    """Collect the results of all fits of a monitor, and save them in checkpoints.

    Args:
        channels: The channel of each series, in logging order.
        max_steps_waited: The number of steps (or rounds) after which a retried attack is unknown.

    Attributes:
        playing: The series that have results in this fit.
        families: The headline metric of each family whose worst value is logged.
        untested: The families of which an applicable attack did not run for lack of texts, with the
            reason. Their worst value is unknown unless another attack is certified.
        latest: The newest value by log name; NaN is unknown. Empty before the first look.
        look_values: The values computed from the newest look only, by log name.
        controls: The newest control of each series.
        looks: The number of finished looks.
        failures: The number of unknown results, not counting attacks that do not apply to what was
            shared, or to its size.
        last_step: The optimizer step of the newest values.
        deferrals: The number of consecutive steps that were due for a look and shared nothing.
    """

    def __init__(
        self, channels: Mapping[Series, Channel], *, max_steps_waited: int = MAX_STEPS_WAITED
    ) -> None:
        self._channels = channels
        self._max_steps_waited = max_steps_waited
        self.playing = set(channels)
        self.untested: Mapping[str, str] = {}
        self.clear()
        self.latest: dict[str, float] = {}
        self.look_values: dict[str, float] = {}
        self.looks = 0
        self.failures = 0
        self.last_step = -1
        self._looks_before = 0  # looks of earlier fits

    def headlines(self, family: str) -> tuple[str, ...]:
        """Return the log names whose maximum is the family's worst value."""
        return tuple(
            f"{series.log_name}/{channel.headline}"
            for series, channel in self._channels.items()
            if channel.family == family and _counts_for_worst(series)
        )

    def names(self, some: Iterable[Series] | None = None) -> list[str]:
        """Return the log names of the values of some series (default: all), and of the worst."""
        ends = ("", "_low", "_high", "_worst_client")
        names = []
        for series in self._channels if some is None else some:
            names.append(f"{series.log_name}/exposed")
            metrics = self._channels[series].metrics_of(series)
            names += [f"{series.log_name}/{m}{end}" for m in metrics for end in ends]
            if gives_control(self._channels[series], series.attack):
                names += [
                    f"{series.log_name}/{name}"
                    for name in ("control", "control_of_a_part", "bound")
                ]
            if self._channels[series].tests_looks:
                names += [f"{series.log_name}/{p}" for p in ("p_of_this_look", "p_over_looks")]
        return names + [f"{WORST}/{family}" for family in self.families]

    # ---- the interface for gates ------------------------------------------------------------

    def channel_of(self, name: str) -> Channel | None:
        """Return the channel that a log name belongs to; None if it belongs to none."""
        root, _, family = name.rpartition("/")
        for series, channel in self._channels.items():
            if root == series.log_name or (root == WORST and channel.family == family):
                return channel
        return None

    def needs(self, gates: Iterable[records.GateFacts]) -> dict[str, float]:
        """Return what the controls of each family must exceed: its gates' highest threshold."""
        needs: dict[str, float] = {}
        for gate in gates:
            if (channel := self.channel_of(gate.metric)) is not None:
                family, at_most = channel.family, float(gate.at_most or 0)
                needs[family] = max(at_most, needs.get(family, at_most))
        return needs

    def repeats_texts(self, name: str) -> bool:
        """Return whether all looks of a value query the same texts, so are not independent."""
        channel = self.channel_of(name)
        return channel is not None and not isinstance(channel, StepChannel)

    def headlines_of(self, name: str) -> tuple[str, ...]:
        """Return the :meth:`headlines` of ``leakage/worst/<family>``; empty for another name."""
        root, _, family = name.rpartition("/")
        return self.headlines(family) if root == WORST and family in self.families else ()

    def judge(self, name: str, value: float, at_most: float) -> records.Judgement:
        """Return how a gate interprets a logged value at its threshold.

        See :func:`~lightning_fedleak.report.records.judge_value`.

        Args:
            name: The log name of the value.
            value: The value at the newest look.
            at_most: The gate's threshold.
        """
        root, _, metric = name.removesuffix("_worst_client").rpartition("/")
        metric = metric.removesuffix("_low").removesuffix("_high")
        series = next((s for s in self._channels if s.log_name == root), None)
        control = None if series is None else self.controls.get(series)
        if series is None or control is None:
            return records.Judgement(value)
        channel = self._channels[series]
        rate = control.rates.get(metric)
        is_read = rate is not None and not math.isnan(rate)
        return records.judge_value(
            value,
            rate,
            part=control.part.get(metric, math.nan),
            at_most=at_most,
            chance=channel.ranges.get(metric, (0.0, 1.0, 0.0))[2],
            known=channel.leak.known,
            cause=_of_another_source(control.unexplained) if is_read else control.why,
            bound=control.bound,
            is_proof=channel.family == records.WORDS.name,
        )

    def why_unknown(self, name: str) -> str:
        """Return why a value, or the worst of a family, is unknown; empty if no result says it."""
        family = name.removeprefix(f"{WORST}/")
        roots = {headline.rpartition("/")[0] for headline in self.headlines(family) or (name,)}
        failed = [(s, o) for s, o in self._newest.items() if s.log_name in roots and o.unknown]
        failed = [(series, outcome) for series, outcome in failed if outcome.applies] or failed
        reasons = records.by_reason({series.log_name: str(o.unknown) for series, o in failed})
        return self.untested.get(family) or "; ".join(f"{n}: {why}" for why, n in reasons.items())

    # ---- looks ------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget the waits, controls, p-values and outcomes of an earlier fit.

        The worst value is logged again of all families that have attacks on what is shared.
        """
        self.deferrals = 0
        self._waits: dict[Series, int] = {}  # looks in a row that were pending
        self._waiting_since: dict[Series, int] = {}  # first step of the retries
        self._newest: dict[Series, Outcome] = {}  # of this fit
        self._doubted: set[str] = set()  # attacks whose newest number is unknown
        self._with_result: set[Series] = set()
        self._forgotten: set[Series] = set()  # their values are kept until the next look
        self.controls: dict[Series, Control] = {}
        self._p_values: dict[Series, tuple[int, float]] = {}  # looks, lowest p-value over them
        self.families = {
            channel.family: channel.headline
            for series, channel in self._channels.items()
            if _counts_for_worst(series)
        }

    def begin(self) -> None:
        """Start a fit: forget earlier outcomes, and keep the state that a checkpoint restored."""
        self._looks_before = self.looks
        self._with_result.clear()
        self._newest.clear()
        self._doubted.clear()

    @property
    def waiting(self) -> frozenset[Series]:
        """Return the series that are retried in the next step."""
        return frozenset(s for s in self._waiting_since if not self._is_late(s, self.last_step))

    def final_outcomes(
        self, look: Look, outcomes: dict[Series, Outcome] | None
    ) -> dict[Series, Outcome] | None:
        """Return the outcomes that count; None if the next step is attacked instead.

        Args:
            look: The look. Its scope is the set of retried series, or None for a regular look.
            outcomes: The outcomes by series; None if nothing was shared. After too many such steps
                in a row all series are *unknown*.
        """
        if look.scope is not None:  # a series that is retried once more keeps its earlier outcome
            tried = (outcomes or {}).items()
            return {s: o for s, o in tried if not o.soon or self._is_late(s, look.step)} or None
        if outcomes is None:
            self.deferrals += 1
            if self.deferrals <= MAX_WAITS:
                return None
            why = _NOTHING_SHARED.format(self.deferrals)
            outcomes = self.all_unknown(why)
        self.deferrals = 0
        return outcomes

    def unknown_at_end(self, *, due: bool) -> dict[Series, Outcome]:
        """Return the outcomes that are *unknown* when a fit ends.

        Args:
            due: Whether a look was due at its last step.
        """
        looks = self.looks - self._looks_before
        if looks > 0:
            why = "training ended before the first result: "
            without_result = self._newest.keys() - self._with_result
            return {
                s: unknown(channel.metrics_of(s), f"{why}{self._newest[s].pending}")
                for s, channel in self._channels.items()
                if s in without_result
            }
        if due or self.deferrals > 0:
            n = self.deferrals
            return self.all_unknown(_NOTHING_SHARED.format(n) if n else "training ended too early")
        return {}

    def all_unknown(self, why: str) -> dict[Series, Outcome]:
        """Return an unknown outcome for every series that runs in this fit."""
        return {
            s: unknown(channel.metrics_of(s), why)
            for s, channel in self._channels.items()
            if s in self.playing
        }

    def add(
        self,
        look: Look,
        outcomes: Mapping[Series, Outcome],
        utility: Mapping[str, float],
        further: Mapping[str, float] = MappingProxyType({}),
        *,
        shared: bool = True,
    ) -> dict[Series, Outcome]:
        """Add a finished look.

        Args:
            look: The look.
            outcomes: The outcomes by series.
            utility: The user's metrics of that step, by name.
            further: Other values of that step, by log name.
            shared: Whether any parameter is trained, and therefore shared.

        Returns:
            The outcomes, *unknown* if one has been pending for too long.
        """
        self.playing |= outcomes.keys()
        waited = self._wait(outcomes, look.step)
        counted = {s: self._tested(s, self._controlled(s, o)) for s, o in waited.items()}
        self._newest |= counted
        values: dict[str, float] = {}
        values_of_look: dict[str, float] = {}
        for series, outcome in counted.items():
            now, root = outcome.now or {}, series.log_name
            values |= outcome.values(root) | control_values(series, self._channels[series], outcome)
            values_of_look |= {f"{root}/{name}": value for name, value in now.items()}
        families_read = {self._channels[s].family for s in outcomes}
        for family, headline in self.families.items():
            # A look may run only some attacks of a family; for the rest, use their newest result.
            members = [
                outcome
                for series, outcome in self._newest.items()
                if self._channels[series].family == family and _counts_for_worst(series)
            ]
            if family not in families_read:
                continue
            all_ran = family not in self.untested
            for kept, of_look in ((values, False), (values_of_look, True)):
                rates = [o.rate(headline, of_look=of_look) for o in members if o.exposed]
                kept |= _worst(f"{WORST}/{family}", members, rates, shared=shared, all_ran=all_ran)
        self.failures += sum(o.has_failed for o in counted.values())
        controls = (outcome.control for outcome in outcomes.values())
        share = highest([control.unexplained for control in controls if control is not None])
        if not math.isnan(share):
            values[UNEXPLAINED] = share
        values |= {f"utility/{name}": float(value) for name, value in utility.items()}
        values |= further
        values["monitor/failures"] = float(self.failures)
        values["monitor/seconds"] = look.seconds
        self.looks += 1
        self.last_step = look.step
        self.latest = self._values_to_keep(outcomes, families_read) | values
        self.look_values = values | values_of_look
        return counted

    def new_values(self) -> dict[str, float]:
        """Return the values that the newest look updated, by log name."""
        return {name: value for name, value in self.latest.items() if name in self.look_values}

    def doubted(self, limit: Callable[[Channel], float]) -> set[str]:
        """Return the names of the attacks whose newest number is unknown, or is by its control.

        While an attack waits, its number before counts.

        Args:
            limit: Returns the value up to which a number of a channel's attacks is low.
        """
        for series, outcome in self._newest.items():
            if outcome.pending is None and _counts_for_worst(series):
                channel = self._channels[series]
                name, value = channel.headline, outcome.rate(channel.headline, of_look=True)
                judged = self.judge(f"{series.log_name}/{name}", value, limit(channel))
                is_doubted = math.isnan(judged.value)
                (self._doubted.add if is_doubted else self._doubted.discard)(series.attack)
        return self._doubted

    def forget(self, attacks: Collection[str]) -> None:
        """Forget the newest outcomes of attacks that do not run any more, from the next look on."""
        self._forgotten = {series for series in self._channels if series.attack in attacks}
        self._with_result -= self._forgotten
        for series in self._forgotten:
            for kept in (self._newest, self._waits, self._waiting_since):
                kept.pop(series, None)

    def lose_look(self, names: Sequence[str]) -> None:
        """Count a look whose results could not be added, and set the named values to unknown."""
        self.latest = dict.fromkeys(names, math.nan)
        self.failures += len(self.playing)
        self.latest["monitor/failures"] = float(self.failures)
        self.look_values = self.latest
        self.looks += 1

    def _controlled(self, series: Series, outcome: Outcome) -> Outcome:
        """Return an outcome with the newest control of its attack."""
        if outcome.control is not None:
            self.controls[series] = outcome.control
        elif outcome.unknown is None and outcome.pending is None and outcome.exposed:
            return replace(outcome, control=self.controls.get(series))
        return outcome

    def _tested(self, series: Series, outcome: Outcome) -> Outcome:
        """Return an outcome with the lowest p-value so far, corrected for all looks."""
        looks, lowest = self._p_values.get(series, (0, 1.0))
        if not math.isnan(outcome.p_value):
            looks, lowest = looks + 1, min(lowest, over_looks(outcome.p_value, looks + 1))
            self._p_values[series] = looks, lowest
            return replace(outcome, p_over_looks=lowest)
        return outcome

    def _values_to_keep(
        self, outcomes: Mapping[Series, Outcome], families_read: Collection[str]
    ) -> dict[str, float]:
        """Return the latest values of the series and families that a look did not run."""
        kept = self._channels.keys() - outcomes.keys() - self._forgotten
        prefixes = tuple(f"{s.log_name}/" for s in kept)
        prefixes += (UNEXPLAINED,)  # kept as long as its controls
        prefixes += tuple(
            f"{WORST}/{family}" for family in self.families if family not in families_read
        )
        if any(s.stage == Stage.RELEASED and s not in outcomes for s in self._channels):
            prefixes += tuple(f"{PREFIX[Stage.RELEASED]}/{name}/" for name in ("bound", "blind"))
        return {n: v for n, v in self.latest.items() if n.startswith(prefixes)}

    def _wait(self, outcomes: Mapping[Series, Outcome], step: int) -> dict[Series, Outcome]:
        """Count the waits, and replace outcomes that were pending for too long by unknown ones."""
        for series, outcome in outcomes.items():
            waited, since = self._waits.pop(series, 0), self._waiting_since.pop(series, step)
            if outcome.pending:
                self._waits[series] = waited + 1
            if outcome.soon:
                self._waiting_since[series] = since
        late = {series for series in outcomes if self._is_late(series, step)}
        self._with_result |= {series for series in outcomes if not outcomes[series].pending} | late
        final = dict(outcomes)
        for series in late:
            why = f"{outcomes[series].pending}, for more than {self._limit(series)}"
            final[series] = unknown(self._channels[series].metrics_of(series), why)
        return final

    def _is_late(self, series: Series, step: int) -> bool:
        if series in self._waiting_since:
            return step - self._waiting_since[series] > self._max_steps_waited
        return self._waits.get(series, 0) > MAX_WAITS

    def _limit(self, series: Series) -> str:
        steps = f"{self._max_steps_waited} steps (or rounds)"
        return steps if series in self._waiting_since else f"{MAX_WAITS} measurements"

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers, strings and tensors."""
        return {
            "looks": self.looks,
            "failures": self.failures,
            "deferrals": self.deferrals,
            "last_step": self.last_step,
            "latest": dict(self.latest),
            "series": {series.log_name: self._state_of(series) for series in self._channels},
        }

    def _state_of(self, series: Series) -> dict[str, Any]:
        control, tested = self.controls.get(series), self._p_values.get(series)
        return {
            "waits": self._waits.get(series),
            "since": self._waiting_since.get(series),
            "control": None if control is None else asdict(control),
            "p_value": None if tested is None else [*tested],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.looks = state["looks"]
        self.failures = state["failures"]
        self.deferrals = state["deferrals"]
        self.last_step = state["last_step"]
        self.latest = dict(state["latest"])
        saved = {s: state["series"].get(s.log_name, {}) for s in self._channels}

        def values_of(name: str) -> dict[Series, Any]:
            return {s: values[name] for s, values in saved.items() if values.get(name) is not None}

        self._waits, self._waiting_since = values_of("waits"), values_of("since")
        self._p_values = {s: (int(n), float(p)) for s, (n, p) in values_of("p_value").items()}
        self.controls = {s: Control(**fields) for s, fields in values_of("control").items()}


def _counts_for_worst(series: Series) -> bool:
    """Return whether a series counts for the worst value of its family.

    It must be the main result of an attack on what is shared, not one on canaries or a sub-result.
    """
    return series.prefix == PREFIX[Stage.SHARED] and series.name == series.attack


def control_values(series: Series, channel: Channel, outcome: Outcome) -> dict[str, float]:
    """Return the control of an attack's headline, by log name, without unknown values."""
    if outcome.control is None:
        return {}
    headline = channel.headline_of(series)
    values = {
        f"{series.log_name}/control": outcome.control.rates.get(headline, math.nan),
        f"{series.log_name}/control_of_a_part": outcome.control.part.get(headline, math.nan),
        f"{series.log_name}/bound": outcome.control.bound,
    }
    return {name: value for name, value in values.items() if not math.isnan(value)}


def _worst(
    name: str, members: Sequence[Outcome], rates: Sequence[float], *, shared: bool, all_ran: bool
) -> dict[str, float]:
    """Return the worst value of a family by its log name, and a lower bound of it.

    - No attack of the family has run: empty.
    - The gradients that its attacks read are not shared: 0, or unknown if others are (``shared``).
    - One recovers all, or proves that nothing is missing (a certificate): the highest headline.
    - A result is pending: the lower bound alone.
    - A result is unknown, or an attack that applies did not run (not ``all_ran``): unknown, with
      the lower bound.
    - Otherwise: the highest headline.

    Args:
        name: The log name.
        members: The newest outcomes of the family's attacks.
        rates: The headlines of those that read something that is shared.
        shared: Whether any parameter is trained, and therefore shared.
        all_ran: Whether all attacks that apply ran.
    """
    exposed = [outcome for outcome in members if outcome.exposed]
    if not members:
        return {}
    if not exposed:
        return {name: math.nan if shared else 0.0}
    worst = highest(rates)
    is_known = not math.isnan(worst)
    is_pending = any(outcome.pending is not None for outcome in exposed)
    missing = any(o.has_failed for o in exposed) or not all_ran
    certified = any(outcome.extra.get("certified") == 1.0 for outcome in exposed)
    if is_known and (certified or worst == 1.0 or not (missing or is_pending)):
        return {name: worst}
    lower_bound = {f"{name}_at_least": worst} if is_known else {}
    return lower_bound if is_pending else {name: math.nan} | lower_bound


def _of_another_source(share: float) -> str:
    """Return the sentence that a share of a gradient is not its batch's; empty for none."""
    if not share > 0:
        return ""
    return (
        f"Of the gradient {share:.2g} is not its batch's: a penalty on the weights, rounding, or a "
        "change between backward and optimizer.step()"
    )


def series_of(
    attacks: Sequence[Attack], channels: Sequence[Channel], stages: Sequence[Stage]
) -> dict[Series, Channel]:
    """Return the channel of each series, in logging order, and set channels' ``all_series``."""
    channel_of = {attack.name: channel for channel in channels for attack in channel.attacks}
    series: dict[Series, Channel] = {}
    for stage in (*stages, Stage.RELEASED):
        for attack in attacks:
            channel = channel_of[attack.name]
            series |= dict.fromkeys(channel.series(attack, (stage,)), channel)
    for channel in channels:
        channel.all_series = tuple(s for s, owner in series.items() if owner is channel)
    return series
