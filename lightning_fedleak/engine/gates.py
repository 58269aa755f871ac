"""A limit on a logged value: which limits make sense, evidence that it is exceeded, messages."""

from __future__ import annotations

import difflib
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fedleak.defenses import DPSGD, Defense
from lightning_fedleak.engine.channels.base import Channel
from lightning_fedleak.engine.engine import Engine
from lightning_fedleak.engine.results import WORST
from lightning_fedleak.engine.run import Trials, Unknown
from lightning_fedleak.evaluation.metrics import MeanTest
from lightning_fedleak.evaluation.metrics.rates import jaccard_of
from lightning_fedleak.messages import is_first_process

log = logging.getLogger(__name__)


def announce(text: str) -> None:
    """Says what a gate did, by logging and once on stderr, whatever filters of warnings are set.

    It is not on stderr where the level of this module's own logger is above ``WARNING``.
    """
    if not is_first_process():
        return
    log.warning(text)
    if log.level <= logging.WARNING and not _log_is_on_stderr():
        print(text, file=sys.stderr, flush=True)


def _log_is_on_stderr() -> bool:
    """Whether a warning in the log is on stderr, by a handler of the user's or by Python's own."""
    if not log.isEnabledFor(logging.WARNING):
        return False
    handlers: list[logging.Handler | None] = []
    logger: logging.Logger | None = log
    while logger is not None:
        handlers += logger.handlers
        logger = logger.parent if logger.propagate else None
    return any(
        isinstance(handler, logging.StreamHandler)
        and handler.stream is sys.stderr
        and handler.level <= logging.WARNING
        for handler in handlers or [logging.lastResort]
    )


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
        ...     print("The update gives away too much:", str(error).splitlines()[0])
        The update gives away too much: RiskGate 'bag_of_words/f1' raised at step 0
    """


def check_threshold(gate: str, metric: str, at_most: float, *, reachable: bool = True) -> None:
    """Refuses a threshold that cannot be meant.

    Args:
        gate: who asks.
        metric: a name in the logs.
        at_most: the threshold.
        reachable: values above it must be possible.

    Raises:
        ValueError: no number, below chance, or beyond the metric's range.
    """
    if isinstance(at_most, bool | str) or not math.isfinite(at_most):
        raise ValueError(f"at_most must be a finite number, got {at_most!r}")
    rate = rate_of(metric)
    span = range_of(rate.removesuffix("_low").removesuffix("_high"))
    plain = range_of(rate)
    if plain is not None and plain[0] <= at_most < plain[2]:
        watched = f", the highest {rate} of several attacks" if is_worst(metric) else ""
        raise ValueError(
            f"{gate} watches '{metric}'{watched}. {plain[2]:g} is chance, so that "
            f"at_most={at_most:g} would be exceeded by an attack that knows nothing: "
            f"give {plain[2]:g} or more"
        )
    if reachable and span is not None and at_most > span[1]:
        raise ValueError(
            f"{gate} watches '{metric}', which lies between {span[0]:g} and {span[1]:g}, so "
            f"that at_most={at_most:g} could never be exceeded: rates are shares, not percent"
        )


def names_there_are(metric: str, names: Sequence[str]) -> str:
    """Return the names that exist, and the one that may be meant."""
    close = difflib.get_close_matches(metric, names, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return f"{hint} These exist:\n{_by_attack(names)}"


_ENDS = ("_low", "_high", "_worst_client")


def _by_attack(names: Sequence[str]) -> str:
    """Return a line of metrics for each attack; variants of a rate are listed once."""
    metrics_by_root: dict[str, list[str]] = {}
    for root, _, metric in (name.rpartition("/") for name in names):
        if not metric.endswith(_ENDS):
            metrics_by_root.setdefault(root, []).append(metric)
    lines = [f"  {root}/: {', '.join(metrics)}" for root, metrics in metrics_by_root.items()]
    varied = [name for name in names if name.endswith(_ENDS)]
    more = f"  (of rates also {', '.join(_ENDS[:-1])} and {_ENDS[-1]}, as in {varied[0]})"
    return "\n".join([*lines, more] if varied else lines)


def is_worst(metric: str) -> bool:
    """Return whether a logged name is the highest headline of a family."""
    return metric.startswith(f"{WORST}/")


def rate_of(metric: str) -> str:
    """Return the rate of a logged name; for the worst of a family its headline."""
    last = metric.rpartition("/")[-1]
    if not is_worst(metric):
        return last
    return next((c.headline for c in Channel.registry.values() if c.family == last), last)


def why_never_judged(engine: Engine, name: str, *, fresh: bool) -> str | None:
    """Return why no update can ever be judged by a value; None where one can.

    It depends on the optimizer, the steps of a round, what is trained, and the games.

    Args:
        engine: logs the value.
        name: in the logs.
        fresh: clients begin each round with a fresh optimizer.
    """
    root, _, rate = name.rpartition("/")
    names = engine.headlines_of(name) if root == WORST else (name,)
    verdicts = [
        (
            channel.never_judged(one.rpartition("/")[-1]),
            channel.never_read(series.attack, fresh=fresh),
        )
        for one in names
        for series, channel in engine.series.items()
        if one.rpartition("/")[0] == series.log_name and rate != "exposed"
    ]
    is_judged = any(why is None and answer is None for why, answer in verdicts)
    unread = [answer for _, answer in verdicts if isinstance(answer, Unknown)]
    # As in Results: an attack that is made for these updates, and fails, leaves the worst open.
    if not verdicts or (is_judged and not any(answer.applies for answer in unread)):
        return None
    reasons = [why for why, _ in verdicts if why] or [answer.why for answer in unread]
    return "; ".join(dict.fromkeys(reasons or ["what it reads is not trained, so not shared"]))


# ---- evidence from many looks, which holds whenever one stops to read it -----------------


@dataclass(frozen=True)
class Verdict:
    """What the looks so far show.

    Attributes:
        fires: whether the gate acts: the mean, or one look, is shown to be above the threshold.
        evidence: value of the e-process that decided.
        needed: what it needs, 1 / alpha.
        alpha: probability of a wrong decision, over all looks together.
        mean: of the looks.
        looks: how many were counted.
    """

    fires: bool
    evidence: float
    needed: float
    alpha: float
    mean: float
    looks: int

    def explain(self, at_most: float) -> str:
        """Return the evidence in the words that users see."""
        return (
            f"{self.evidence:.3g} for a mean above {at_most:g}, of {self.needed:.3g} needed "
            f"(bound='lower', alpha={self.alpha:g}); mean {self.mean:.3f} over {self.looks} looks. "
            f"Leakage of at most {at_most:g} at every look brings so much evidence with "
            f"probability at most {self.alpha:g}, however long the run"
        )


class Evidence:
    """Decides from the values of single looks, with one probability of error for all of them.

    It acts once one look, or the looks together, show more than ``at_most``. A run in which no look
    leaks more is ever acted on with probability at most ``alpha``. What one look shows is tested by
    its games (or its types) where their number is known; else only the mean over looks is, of which
    each is expected to be at most ``at_most`` (given all before). A rise that comes late is found
    too.

    Args:
        at_most: the threshold, strictly between the smallest and the largest possible value.
        alpha: probability of error.
        metric: last part of a log name, ``"f1"`` say; gives the range.

    Raises:
        ValueError: the metric's range is not known, or the threshold is not inside it.
    """

    def __init__(self, at_most: float, alpha: float, metric: str) -> None:
        span = range_of(metric)
        if span is None:
            names = ", ".join(name.rstrip("_") for name in known_ranges())
            raise ValueError(
                "bound='lower' needs values of single looks in a known range; "
                f"'{metric}' has none. Those that have: {names}, each also with "
                "_worst_client. Use one of them, or bound='value'."
            )
        self.at_most = at_most
        self.alpha = alpha
        self.metric = metric
        self._above = MeanTest(at_most, restarts=True, span=span[:2])

    def update(self, value: float, trials: Trials | None = None) -> None:
        """Take the value of one look; an unknown one is no evidence.

        Args:
            value: of the look.
            trials: what the value is the mean of; None where that is not known.
        """
        if not math.isnan(value):
            self._above.update(value, None if trials is None else self._on_scale(trials))

    def _on_scale(self, trials: Trials) -> tuple[float, float, int]:
        """Return the mean of trials, their threshold and number; F1 is no mean of types, J is."""
        if self.metric.removesuffix("_worst_client") == "f1":
            return jaccard_of(trials.mean), jaccard_of(self.at_most), trials.number
        return trials.mean, self.at_most, trials.number

    @property
    def progress(self) -> float:
        """Log of the evidence, as a share of what is needed."""
        return self._above.highest / -math.log(self.alpha)

    def verdict(self) -> Verdict:
        """Return what the looks so far show."""
        return Verdict(
            fires=self._above.highest >= -math.log(self.alpha),
            evidence=math.exp(min(self._above.highest, 700.0)),
            needed=1 / self.alpha,
            alpha=self.alpha,
            mean=self._above.mean,
            looks=self._above.looks,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, with the question they answer."""
        return {"question": self._question(), "above": self._above.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore what :meth:`state_dict` returned, if it answers the same question.

        Returns:
            False, and the evidence starts again, where metric or threshold are others.
        """
        if state["question"] != self._question():
            return False
        self._above.load_state_dict(state["above"])
        return True

    def _question(self) -> dict[str, Any]:
        return {"at_most": self.at_most, "metric": self.metric}


def known_ranges() -> dict[str, tuple[float, float, float]]:
    """Return smallest and largest value by metric of every family, and that of no knowledge."""
    ranges: dict[str, tuple[float, float, float]] = {}
    for channel in reversed(Channel.registry.values()):
        ranges |= channel.ranges
    return ranges


def range_of(metric: str) -> tuple[float, float, float] | None:
    """Return the range of a metric, as in :func:`known_ranges`.

    Args:
        metric: last part of a log name, ``"f1"`` or ``"auc_worst_client"`` say.

    Returns:
        None where the range is not known, or the name is that of the end of an interval.
    """
    name, ranges = metric.removesuffix("_worst_client"), known_ranges()
    start = next((key for key in ranges if key.endswith("_") and name.startswith(key)), name)
    return ranges.get(start)


_DPSGD_MEND = (
    " DPSGD can be only with accountant='filter' (with target_epsilon and target_delta, and "
    "max_hardenings above 0): other accountants do not cover noise that is chosen in the run."
)


def defenses_to_harden(defenses: Sequence[Defense]) -> tuple[Defense, ...]:
    """Return those defences of a run that can be made stronger while it goes on.

    Raises:
        ValueError: the run has none.
    """
    adjustable = tuple(defense for defense in defenses if defense.can_harden)
    if not adjustable:
        names = ", ".join(d.name for d in defenses) or "no defence"
        raise ValueError(
            f"RiskGate(action='harden') has nothing to turn up: this run has {names}. Give the "
            "Trainer strategy=DefendedStrategy('auto', defenses=[...]) with one that can be made "
            "stronger: GradientNoise or ActivationNoise with sigma above 0, or "
            "Freeze(..., when='hardened')."
            + _DPSGD_MEND
            * any(isinstance(d, DPSGD) for d in defenses)
        )
    return adjustable


def harden(defenses: tuple[Defense, ...]) -> list[str]:
    """Turn every defence up by one notch.

    Returns:
        The changes; empty where all defences are at their strongest.
    """
    changes = (defense.harden() for defense in defenses)
    return [change for change in changes if change is not None]


# ---- what a gate of a Trainer says --------------------------------------------------------


@dataclass(frozen=True)
class GateEvent:
    """Hold what a gate measured when it fired.

    Attributes:
        metric: the watched name.
        step: optimizer step that was looked at.
        value: what counted: what was read, as far as its control is high
            (:func:`~lightning_fedleak.report.records.judged`); NaN where it is unknown.
        low, high: 95% interval of the value where there is one, else NaN; with ``bound="value"``.
        at_most: the threshold.
        checkpoint: where the run was saved; None where it was not.
        verdict: what all looks together show; None with ``bound="value"``.
        hardened: changes to the defences that were made instead of stopping.
        exhausted: the defences that are at their strongest, so that the gate stopped instead;
            else empty.
        source: whose value it is, where the worst of a family is watched; else empty.
        why: why the value is unknown, or is not what was read, where the gate itself can say.
        resume: how a saved run goes on, with the place for its path.
        mend: what makes a run leak less.
        released: the trained weights were measured, and not what a step shares.
        read: what the attack read, whatever its control; NaN where it gave no result.
    """

    metric: str
    step: int
    value: float
    low: float
    high: float
    at_most: float
    checkpoint: Path | None
    verdict: Verdict | None = None
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

    def __str__(self) -> str:
        """Return the message that users see."""
        if math.isnan(self.value):
            why = self.why or "the attack gave no result; leakage.jsonl says why"
            measurement = (
                f"{self.metric} is unknown ({why}). A strict gate treats unknown as a breach"
            )
        else:
            interval = "" if math.isnan(self.low) else f" (95% {self.low:.3f} to {self.high:.3f})"
            # 0.3003 is not at most 0.3, and should not read like it.
            value = self.value if math.isnan(self.read) else self.read
            digits = 3
            if value != self.at_most:
                digits = next((n for n in (3, 6, 9) if round(value, n) != self.at_most), 17)
            measurement = f"{self.metric} = {value:.{digits}f}{interval}"
            if self.source not in ("", self.metric):
                measurement += f", of {self.source}"
            measurement += f"; {self.why}" if self.why else ""
        if self.verdict is not None:
            measurement += " at this look"
        saved, resume_hint, evidence = "", "", ""
        if self.verdict is not None and self.verdict.fires:
            evidence = f"\n  evidence: {self.verdict.explain(self.at_most)}"
        if self.checkpoint is not None:
            saved = f"\n  saved:    {self.checkpoint}"
            resume_hint = (
                f" To go on from here: {self.resume.format(self.checkpoint)}. This gate checks "
                "again at the first measurement after you resume."
            )
        start = (
            f"at step {self.step}\n  measured: {measurement}\n  allowed:  at most "
            f"{self.at_most:g}{evidence}"
        )
        if self.hardened:
            return f"{start}\n  hardened: {'; '.join(self.hardened)}"
        mend = self.mend
        if self.exhausted:
            start = f"{start}\n  defences: {', '.join(self.exhausted)}, turned up as far as it goes"
            mend = "let the defences start stronger or be turned up further (max_hardenings)"
        is_unknown = math.isnan(self.value) and (self.verdict is None or not self.verdict.fires)
        if is_unknown and not math.isnan(self.read):
            what_now = (
                "this attack reads little here even of what is known, so that its low number says "
                "nothing. Use an attack that reads more here (attacks='auto' chooses), or let "
                "unknown looks pass with patience= or strict=False"
            )
        elif is_unknown:
            subject = "the trained model" if self.released else "what was shared"
            what_now = (
                f"{subject} was not measured, so its leakage is unknown. leakage.jsonl holds the "
                "reason. Fix that, or let unknown looks pass with patience= or strict=False"
            )
        else:
            less = "Train for fewer epochs, keep an earlier checkpoint (leakage/choose)"
            less = less if self.released else "Use larger batches"
            what_now = f"{self._finding()}. {less}, {mend}, or raise at_most"
        return f"{start}{saved}\n  what now: {what_now}.{resume_hint}"

    def _finding(self) -> str:
        if self.released:
            gives = "may give" if self.low <= self.at_most else "gives"
            return f"the trained model {gives} away more than you allow"
        if self.verdict is None or not self.verdict.fires:
            of_it = "of what can be read here, " if self.why else ""
            return f"{of_it}the update of this step gives away more than you allow"
        return "the updates of this run give away more than you allow"
