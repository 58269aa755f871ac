"""What a gate may conclude from many looks: evidence that holds whenever one stops to read it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from lightning_fedleak.metrics.betting import MeanTest, looks_to_show

Bound = Literal["lower", "upper"]

RANGES: dict[str, tuple[float, float, float]] = {
    "precision": (0.0, 1.0, 0.0),
    "recall": (0.0, 1.0, 0.0),
    "f1": (0.0, 1.0, 0.0),
    "token_accuracy": (0.0, 1.0, 0.0),
    "exact_sentences": (0.0, 1.0, 0.0),
    "texts_found": (0.0, 1.0, 0.0),
    "rouge_1": (0.0, 1.0, 0.0),
    "rouge_2": (0.0, 1.0, 0.0),
    "rouge_l": (0.0, 1.0, 0.0),
    "accuracy": (0.0, 1.0, 0.5),
    "auc": (0.0, 1.0, 0.5),
    "advantage": (-1.0, 1.0, 0.0),
    "tpr_at_fpr": (0.0, 1.0, 0.0),
    "certified": (0.0, 1.0, 0.0),
}
"""Smallest and largest possible value by metric, and that of an attack that knows nothing."""


@dataclass(frozen=True)
class Verdict:
    """What the looks so far show.

    Attributes:
        bound: ``"lower"`` or ``"upper"``.
        fires: whether the gate acts.
        above: whether it acts because the mean is shown to be above the threshold.
        evidence: value of the e-process that decided.
        needed: what it needs, 1 / alpha.
        alpha: probability of a wrong decision, over all looks together.
        mean: of the looks; unknown ones count as the largest possible value if at all.
        looks: how many were counted.
        unknown: how many of them were unknown.
        warmup: looks that ``"upper"`` lets pass.
    """

    bound: Bound
    fires: bool
    above: bool
    evidence: float
    needed: float
    alpha: float
    mean: float
    looks: int
    unknown: int
    warmup: int

    def explain(self, at_most: float) -> str:
        """In the words that users see."""
        unknown = f", {self.unknown} of them unknown and counted as worst" if self.unknown else ""
        side = "above" if self.above else "below"
        found = (
            f"{self.evidence:.3g} for a mean {side} {at_most:g}, of {self.needed:.3g} needed "
            f"(bound='{self.bound}', alpha={self.alpha:g}); mean {self.mean:.3f} over "
            f"{self.looks} looks{unknown}. "
        )
        if self.above:
            return found + (
                f"Leakage that is expected to be at most {at_most:g} at every look brings so much "
                f"evidence with probability at most {self.alpha:g}, however long the run"
            )
        return found + (
            f"After {self.warmup} looks a run goes on only where its mean is shown to be below; "
            f"one really above gets so far with probability at most {self.alpha:g}. This does "
            "not say that this run is above: a larger warmup= gives it more looks to show it"
        )


class Evidence:
    """Decides from the values of single looks, with one probability of error for all of them.

    ``"lower"`` acts once a mean above ``at_most`` is shown: a run in which every look is expected
    to give at most ``at_most`` (given all before) is ever acted on with probability at most
    ``alpha``. A rise that comes late is found too.

    ``"upper"`` acts, from look ``warmup`` on, whenever a mean below ``at_most`` is not shown, and
    at any look as soon as one above is: a run in which every look is expected to give at least
    ``at_most`` goes on past the warm-up with probability at most ``alpha``.

    Args:
        bound: which.
        at_most: the threshold, strictly between the smallest and the largest possible value.
        alpha: probability of error.
        warmup: looks that ``"upper"`` lets pass; None is :func:`default_warmup`, or where looks
            scatter :func:`looks_per_variance` times the variance of the values seen.
        metric: last part of a log name, ``"f1"`` say; gives the range.

    Raises:
        ValueError: the metric's range is not known, or the threshold is not inside it.
    """

    def __init__(
        self, bound: Bound, at_most: float, alpha: float, warmup: int | None, metric: str
    ) -> None:
        span = range_of(metric)
        if span is None:
            raise ValueError(
                "bound='lower' and bound='upper' need values of single looks in a known range; "
                f"'{metric}' has none. Those that have: {', '.join(RANGES)}, each also with "
                "_worst_client. Use one of them, or bound='value'."
            )
        low, high, idle = span
        self.bound = bound
        self.at_most = at_most
        self.alpha = alpha
        self.metric = metric
        self.worst = high
        self._unknown = 0
        self._above = MeanTest(at_most, "above", restarts=True, span=(low, high))
        self._below = MeanTest(at_most, "below", span=(low, high))
        self._least, self._per_variance = warmup or 0, 0.0
        if bound == "upper" and warmup is None:
            least = idle if idle < at_most else low
            self._least = default_warmup(at_most, alpha, least, (low, high))
            self._per_variance = looks_per_variance((at_most - least) / 2, alpha)
        self.warmup = self._least
        self._late = False
        self._values, self._total, self._squares = 0, 0.0, 0.0

    def update(self, value: float) -> None:
        """Takes the value of one look; ``"upper"`` counts an unknown one as the worst there is."""
        if math.isnan(value):
            if self.bound == "lower":
                return
            self._unknown += 1
            value = self.worst
        else:
            self._values += 1
            self._total += value
            self._squares += value * value
        self._above.update(value)
        self._below.update(value)
        self._warm_up()

    def _warm_up(self) -> None:
        """Sets how long the warm-up is, by the scatter of the known values, until it is over."""
        if self._late:
            return
        if self._values > 1:
            mean = self._total / self._values
            variance = max(0.0, self._squares / self._values - mean * mean)
            self.warmup = max(self._least, math.ceil(self._per_variance * variance))
        self._late = self._below.looks >= self.warmup

    @property
    def progress(self) -> float:
        """Log of the evidence that the bound asks for, as a share of what is needed."""
        log = self._above.highest if self.bound == "lower" else self._below.log_evidence
        return log / -math.log(self.alpha)

    def verdict(self) -> Verdict:
        """What the looks so far show."""
        needed = -math.log(self.alpha)
        above = self._above.highest >= needed
        late = self.bound == "upper" and self._late
        fires = above or (late and self._below.log_evidence < needed)
        log = self._above.highest if above or self.bound == "lower" else self._below.log_evidence
        return Verdict(
            bound=self.bound,
            fires=fires,
            above=above or self.bound == "lower",
            evidence=math.exp(min(log, 700.0)),
            needed=1 / self.alpha,
            alpha=self.alpha,
            mean=self._above.mean,
            looks=self._above.looks,
            unknown=self._unknown,
            warmup=self.warmup,
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, with the question they answer."""
        return {
            "question": self._question(),
            "unknown": self._unknown,
            "scatter": [self._values, self._total, self._squares],
            "over": self.warmup if self._late else None,
            "above": self._above.state_dict(),
            "below": self._below.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Takes back what :meth:`state_dict` gave, if it answers the same question.

        Returns:
            False, and the evidence starts again, where metric or threshold are others.
        """
        if state["question"] != self._question():
            return False
        self._unknown = state["unknown"]
        self._above.load_state_dict(state["above"])
        self._below.load_state_dict(state["below"])
        # A checkpoint of 0.1.0 knows of no scatter: its warm-up grows with the looks since.
        self._values, self._total, self._squares = state.get("scatter", (0, 0.0, 0.0))
        if self._per_variance and state.get("over") is not None:
            self._late, self.warmup = True, state["over"]
        self._warm_up()
        return True

    def _question(self) -> dict[str, Any]:
        return {"bound": self.bound, "at_most": self.at_most, "metric": self.metric}


def range_of(metric: str) -> tuple[float, float, float] | None:
    """Smallest and largest possible value of a metric, and that of an attack that knows nothing.

    Args:
        metric: last part of a log name, ``"f1"`` or ``"auc_worst_client"`` say.

    Returns:
        None where the range is not known, or the name is that of the end of an interval.
    """
    name = metric.removesuffix("_worst_client")
    return RANGES.get("tpr_at_fpr" if name.startswith("tpr_at_fpr_") else name)


def default_warmup(at_most: float, alpha: float, least: float, span: tuple[float, float]) -> int:
    """Twice the looks in which a steady value half-way between ``least`` and ``at_most`` shows it.

    Args:
        at_most: the threshold.
        alpha: probability of error.
        least: value of an attack that knows nothing.
        span: smallest and largest possible value.
    """
    return 2 * looks_to_show((least + at_most) / 2, at_most, alpha, "below", span)


def looks_per_variance(gap: float, alpha: float) -> float:
    """Looks, per variance of a look's value, in which all but few runs show a mean below.

    A gambler who stakes what is best for a mean ``gap`` below the threshold and a variance ``v``
    wins ``gap^2 / 2 v`` a look in log capital, with standard deviation ``gap / sqrt(v)``. After so
    many looks capital that was the smallest share dealt, 1/14, has come to ``1 / alpha`` even two
    standard deviations below what is expected. Which look is the last of the warm-up may depend on
    what was seen: the evidence holds at any.

    Args:
        gap: by how much the mean lies below the threshold.
        alpha: probability of error.
    """
    needed = math.log(14 / alpha)
    return float((2 + math.sqrt(4 + 2 * needed)) ** 2 / gap**2)
