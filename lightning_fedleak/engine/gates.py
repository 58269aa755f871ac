"""Functions for gates: check a threshold, judge a value against it, and write the message.

A *gate* is a threshold on a logged value, which it *watches*. If the value is above, it acts, for
example by a stop. :class:`~lightning_fedleak.engine.threshold.Threshold` and the gates of
federations use these functions. Attacks of one *family*, such as words, have the same main metric,
the *headline*; the highest one is logged as ``leakage/worst/<family>``. A *control* is the same
step on known words: if an attack recovers little of it, its low number is unknown.
"""

import difflib
import logging
import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_fedleak.defenses import Defense
from lightning_fedleak.engine.channels.base import Channel
from lightning_fedleak.engine.channels.steps import StepChannel, never_read
from lightning_fedleak.engine.lifecycle import Engine
from lightning_fedleak.engine.outcomes import PREFIX, Unknown
from lightning_fedleak.engine.results import WORST
from lightning_fedleak.messages import is_first_process
from lightning_fedleak.report.records import GateLine, Judgement, standard_family
from lightning_fedleak.validate import check_number

log = logging.getLogger(__name__)


def announce(text: str) -> None:
    """Log what a gate did, in the first process; without the user's own handlers it is shown."""
    if is_first_process():
        log.warning(text)


class LeakageLimitExceeded(RuntimeError):
    """A gate with ``action="raise"`` found more leakage than it allows.

    Examples:
        >>> import lightning as L
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lightning_fedleak import BagOfWords, LeakageLimitExceeded, LeakageMonitor, RiskGate
        >>> from lightning_fedleak.cli.finetuning import CausalLMFineTuning
        >>> config = GPT2Config(vocab_size=64, n_embd=8, n_head=1, tie_word_embeddings=False)
        >>> module = CausalLMFineTuning(GPT2LMHeadModel(config))  # stands for your own
        >>> monitor = LeakageMonitor([BagOfWords()], every_n_steps=1)
        >>> gate = RiskGate("leakage/bag_of_words/f1", at_most=0.5, action="raise")
        >>> trainer = L.Trainer(max_steps=9, callbacks=[monitor, gate])
        >>> rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64).view(8, 8)]
        >>> try:
        ...     trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
        ... except LeakageLimitExceeded as error:
        ...     print("The update leaks too much:", str(error).splitlines()[0])
        The update leaks too much: RiskGate 'bag_of_words/f1' raised at step 0
    """


# ---- names and ranges of logged values ------------------------------------------------------


def check_threshold(gate: str, metric: str, at_most: float) -> None:
    """Refuse a threshold below chance, or one that the metric can never exceed.

    Args:
        gate: The class of the gate, for the message.
        metric: The log name of the value.
        at_most: The threshold.

    Raises:
        TypeError: The metric is no string.
        ValueError: The threshold is not finite, between the lowest value and chance, or above the
            highest value.
    """
    if not isinstance(metric, str):
        raise TypeError(
            f"{gate} takes the name of a metric first, not a {type(metric).__name__}: "
            f"{gate}('leakage/worst/words', at_most=0.5). It finds its monitor itself"
        )
    check_number("at_most", at_most)
    rate = rate_of(metric)
    # The span is that of the metric, also if the name is an end of its interval. Ends have no
    # chance level.
    span = range_of(rate.removesuffix("_low").removesuffix("_high"))
    if span is None:
        return
    lowest, highest, chance = span
    if (range_of(rate) is not None and lowest <= at_most < chance) or at_most > highest:
        raise ValueError(
            f"{gate} watches '{metric}', which is {chance:g} by chance and at most {highest:g}: "
            f"at_most={at_most:g} must lie between these (rates are shares, not percent)"
        )


def names_there_are(metric: str, names: Sequence[str], watcher: str) -> str:
    """Return a suggestion for a name that is not logged, and how to list all names.

    A single attack is suggested only if its name is nearly the same, because it is not known yet
    which attacks can read the run. The worst of a family covers those that can.

    Args:
        metric: The name that is not logged.
        names: The names that are logged.
        watcher: The name of the class that runs the attacks.
    """
    hint, worst = "", [name for name in names if is_worst(name)]
    stage = next((s for s, start in PREFIX.items() if metric.startswith(f"{start}/")), None)
    in_rounds, family = watcher == "RoundObserver", metric.rpartition("/")[-1]
    if close := [n for n in names if n == f"leakage/{metric}"] or difflib.get_close_matches(
        metric, names, n=1, cutoff=0.9
    ):
        hint = f" Did you mean '{close[0]}'?"
    elif stage and not any(name.startswith(f"{PREFIX[stage]}/") for name in names):
        hint = f" Stage '{stage}' is not measured: settings=WatchSettings(stages=('{stage}', ...))."
    elif is_worst(metric) and not in_rounds and (mend := standard_family(family).untested):
        hint = f" {mend}"
    elif worst:
        hint = f" Of the attacks that can read the run, the highest: {', '.join(worst)}."
    return f"{hint} All names: {watcher}(...).engine.metric_names()"


def is_worst(metric: str) -> bool:
    """Return whether a logged name is the highest headline of a family."""
    return metric.startswith(f"{WORST}/")


def rate_of(metric: str) -> str:
    """Return the rate of a log name; for the worst of a family its headline."""
    name = metric.rpartition("/")[-1]
    if not is_worst(metric):
        return name
    return next((c.headline for c in Channel.registry.values() if c.family == name), name)


def range_of(metric: str) -> tuple[float, float, float] | None:
    """Return the lowest and the highest value of a metric, and its value by chance.

    Args:
        metric: The last part of a log name, such as ``"f1"`` or ``"auc_worst_client"``.

    Returns:
        The three values; None if they are not known, as for most ends of intervals.
    """
    name = metric.removesuffix("_worst_client")
    ranges = ChainMap(*(dict(channel.ranges) for channel in Channel.registry.values()))
    start = next((key for key in ranges if key.endswith("_") and name.startswith(key)), name)
    return ranges.get(start)


def why_never_judged(engine: Engine, name: str, *, fresh: bool) -> str | None:
    """Return why a value can never judge an update of this run; None if it can.

    That depends on the optimizer, the steps of a round, the trained parameters, and the games. For
    the worst of a family it holds if no attack's value can judge an update, or if an attack that
    is made for such updates cannot read them.

    Args:
        engine: The engine that logs the value.
        name: The log name of the value.
        fresh: Whether clients begin each round with a fresh optimizer.
    """
    root, _, rate = name.rpartition("/")
    names = engine.results.headlines_of(name) if root == WORST else (name,)
    verdicts = [
        (
            channel.requirement(headline.rpartition("/")[-1]).never_alone,
            never_read(channel, series.attack, fresh=fresh),
        )
        for headline in names
        for series, channel in engine.step_series.items()
        if headline.rpartition("/")[0] == series.log_name and rate != "exposed"
    ]
    is_judged = any(why is None and answer is None for why, answer in verdicts)
    unread = [answer for _, answer in verdicts if isinstance(answer, Unknown)]
    # As in Results: an attack that is made for these updates, and fails, leaves the worst open.
    if not verdicts or (is_judged and not any(answer.applies for answer in unread)):
        return None
    reasons = [why for why, _ in verdicts if why] or [answer.why for answer in unread]
    return "; ".join(dict.fromkeys(reasons or ["what it reads is not trained, so not shared"]))


def why_unread(engine: Engine, name: str) -> str | None:
    """Return why a logged value says nothing about the shared gradients; None if it does.

    Either the attack does not run, or no attack of its family reads anything that is shared. In the
    latter case their values are 0, although other parameters are shared, which no attack tests.

    Args:
        engine: The engine that logs the value.
        name: The log name of the value.
    """
    lineup, root = engine.current.lineup, name.rpartition("/")[0]
    attack = next((s.attack for s in engine.series if s.log_name == root), None)
    channel = engine.results.channel_of(name)
    if channel is None:
        return None
    if engine.weights is not None and not isinstance(channel, StepChannel):
        return engine.weights.why_unread(None if attack is None else {attack})
    if attack is not None and attack not in lineup.playing:
        why = {row.attack: row.why_not for row in lineup.rows}[attack]
        return f"'{attack}' is not run here: {why}"
    return lineup.unread_family(channel.family)


def judge_together(
    engine: Engine, values: Mapping[str, float], at_most: float
) -> dict[str, Judgement]:
    """Return how known values of a family count at the threshold of a gate, by log name.

    A value whose control is low is unknown (NaN). It is excluded if its attack reads a gradient
    that another attack with a known value reads too.

    Args:
        engine: The engine that logs the values.
        values: The known values, by log name.
        at_most: The threshold of the gate.
    """
    judgements = {n: engine.results.judge(n, value, at_most) for n, value in values.items()}
    roles = {plan.attack.name: set(plan.roles) for plan in engine.current.lineup.plans}
    attacks = {series.log_name: series.attack for series in engine.series}
    reads = {n: roles.get(attacks.get(n.rpartition("/")[0], ""), set()) for n in judgements}
    known = {n for n, judgement in judgements.items() if not math.isnan(judgement.value)}
    roles_read = set[str]().union(*(reads[n] for n in known))
    return {n: j for n, j in judgements.items() if n in known or not reads[n] & roles_read}


# ---- defences that a gate makes stronger ----------------------------------------------------


def defenses_to_harden(defenses: Sequence[Defense]) -> tuple[Defense, ...]:
    """Return the defences of a run that can be made stronger during the run.

    Raises:
        ValueError: The run has none.
    """
    adjustable = tuple(defense for defense in defenses if defense.can_harden)
    if not adjustable:
        names = ", ".join(d.name for d in defenses) or "no defence"
        raise ValueError(
            f"RiskGate(action='harden') has nothing to turn up: this run has {names}. Give "
            "DefendedStrategy a GradientNoise or ActivationNoise with sigma above 0, "
            "Freeze(when='hardened'), or DPSGD(accountant='filter', ...)"
        )
    return adjustable


# ---- what a gate measured -------------------------------------------------------------------


@dataclass(frozen=True)
class GateEvent:
    """The measurement by which a gate fired, and what the gate did.

    Attributes:
        metric: The watched log name.
        step: The optimizer step of the look; in a federation the round.
        value: The value that counted: what the attack read if its control is high enough
            (:func:`~lightning_fedleak.report.records.judge_value`); NaN if it is unknown.
        low, high: The ends of the 95% interval of the value; NaN if it has none.
        at_most: The threshold.
        checkpoint: The path of the saved run; None if it was not saved.
        hardened: The changes to the defences that were made instead of stopping.
        exhausted: The defences that cannot be made stronger, so that the gate stopped the run;
            else empty.
        source: The log name that the value is taken from, if the worst of a family is watched; else
            empty.
        why: Why the value is unknown, or differs from what was read; empty if the gate cannot say.
        resume: The code that resumes a saved run, with a place for its path.
        mend: Advice that makes a run leak less.
        released: Whether the trained weights were measured, and not the gradients of a step.
        read: What the attack read, whatever its control says; NaN if it gave no result.
        gate: The name of the gate.
        client: The client whose update it was; None outside of federations.
    """

    metric: str
    step: int
    value: float
    low: float
    high: float
    at_most: float
    checkpoint: Path | None = None
    hardened: tuple[str, ...] = ()
    exhausted: tuple[str, ...] = ()
    source: str = ""
    why: str = ""
    resume: str = "trainer.fit(..., ckpt_path='{}')"
    mend: str = (
        "add a defence, or a stronger one, with "
        "Trainer(strategy=DefendedStrategy('auto', defenses=[...]))"
    )
    released: bool = False
    read: float = math.nan
    gate: str = ""
    client: str | int | None = None

    def __str__(self) -> str:
        """Return the message that users see."""
        place = f"at step {self.step}" if self.client is None else f"in round {self.step}"
        lines = [
            place,
            f"  measured: {self._measurement()}",
            f"  allowed:  at most {self.at_most:g}",
        ]
        if self.hardened:
            lines.append(f"  hardened: {'; '.join(self.hardened)}")
        elif self.exhausted:
            names = ", ".join(self.exhausted)
            lines.append(f"  defences: {names}, turned up as far as it goes")
        if self.checkpoint is not None:
            lines.append(f"  saved:    {self.checkpoint}")
        if not self.hardened and self.client is None:
            lines.append(f"  what now: {self._advice()}")
        return "\n".join(lines)

    def decision(self, did: str, hardened: Sequence[str] = ()) -> GateLine:
        """Return the line of the run's record for an action of the gate."""
        return GateLine(
            run="",
            gate=self.gate,
            did=did,
            step=self.step,
            client=self.client,
            metric=self.metric,
            source=self.source,
            measured=self.value,
            at_most=self.at_most,
            reason=self.why,
            hardened=tuple(hardened),
        )

    def _measurement(self) -> str:
        if math.isnan(self.value):
            why = self.why or "the attack gave no result; leakage.jsonl says why"
            return f"{self.metric} is unknown ({why}). A strict gate treats unknown as a breach"
        interval = "" if math.isnan(self.low) else f" (95% {self.low:.3f} to {self.high:.3f})"
        value = self.value if math.isnan(self.read) else self.read
        digits = 3
        if value != self.at_most:  # 0.3003 is not at most 0.3, and should not read like it
            digits = next((n for n in (3, 6, 9) if round(value, n) != self.at_most), 17)
        source = f", of {self.source}" if self.source not in ("", self.metric) else ""
        why = f"; {self.why}" if self.why else ""
        return f"{self.metric} = {value:.{digits}f}{interval}{source}{why}"

    def _advice(self) -> str:
        """Return the advice for a user after a gate has acted."""
        advice = "mend the reason, which leakage.jsonl holds"
        if not math.isnan(self.value):
            advice = "use larger batches"
            if self.released:
                advice = "train for fewer epochs, keep an earlier checkpoint (leakage/choose)"
            further = "let the defences start stronger or be turned up further (max_hardenings)"
            advice += f", {further if self.exhausted else self.mend}, or raise at_most."
        elif not (self.released or math.isnan(self.read)):
            advice = "use an attack that reads more here (attacks='auto' chooses)"
        if math.isnan(self.value):
            advice += ", or let unknown values pass with patience= or strict=False."
        if self.checkpoint is None:
            return advice
        resume = self.resume.format(self.checkpoint)
        return f"{advice} To go on from here: {resume}; the gate checks again there."
