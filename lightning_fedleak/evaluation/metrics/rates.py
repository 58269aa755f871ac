"""Precision, recall and F1 of guessed word types, with intervals."""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
from scipy.special import betaincinv
from torch import Tensor
from torchmetrics import Metric

from lightning_fedleak.attacks import WordGuess


@dataclass(frozen=True)
class Counts:
    """Word types by outcome, and what attacks said of batches; those of several add up by ``+``.

    Attributes:
        tp: guessed and used.
        fp: guessed and not used.
        fn: used and not guessed.
        n_estimates: batches with an estimate of the number of types.
        error_sum: sum of its :func:`type_count_error`.
        n_certificates: batches of which the attack says whether a type is missing.
        n_certified: those in which none is.
        n_capacities: batches of which the attack says how many types it could distinguish.
        capacity_sum: sum of that number over the number of types.
    """

    tp: float = 0
    fp: float = 0
    fn: float = 0
    n_estimates: float = 0
    error_sum: float = 0
    n_certificates: float = 0
    n_certified: float = 0
    n_capacities: float = 0
    capacity_sum: float = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(operator.add, astuple(self), astuple(other)))

    def means(self) -> dict[str, float]:
        """Return the means over the batches that have a value; else NaN."""
        each = {
            "type_count_error": (self.error_sum, self.n_estimates),
            "certified": (self.n_certified, self.n_certificates),
            "capacity": (self.capacity_sum, self.n_capacities),
        }
        return {name: total / n if n else math.nan for name, (total, n) in each.items()}


@dataclass(frozen=True)
class Rate:
    """A proportion and its confidence interval, all NaN where it is unknown (nothing to count)."""

    value: float
    low: float
    high: float


ALPHA = 0.05  # of the intervals, the usual one
UNKNOWN = Rate(math.nan, math.nan, math.nan)


def flat(rates: Mapping[str, Rate]) -> dict[str, float]:
    """Return each rate by its name, and its interval by ``<name>_low`` and ``<name>_high``."""
    values: dict[str, float] = {}
    for name, rate in rates.items():
        values[name] = rate.value
        values[f"{name}_low"] = rate.low
        values[f"{name}_high"] = rate.high
    return values


def word_counts(guess: WordGuess, truth_types: Tensor, vocab_size: int) -> Counts:
    """Return the counts of one batch: of guessed types against those that were in it.

    Args:
        guess: the attack's; its ``types`` count once each, in any order.
        truth_types: (m,) token ids used in the batch, repeats allowed.
        vocab_size: ids are below it.

    Raises:
        ValueError: an id, guessed or true, lies outside the vocabulary.
    """
    guessed_types, true_types = (
        _type_mask(ids, vocab_size, argument)
        for ids, argument in ((guess.types, "guess.types"), (truth_types, "truth_types"))
    )
    true_types = true_types.to(guessed_types.device)
    hits, n_guessed, n_true = torch.stack(
        [(guessed_types & true_types).sum(), guessed_types.sum(), true_types.sum()]
    ).tolist()
    error = type_count_error(guess.n_types, n_true)
    has_error, has_capacity = not math.isnan(error), guess.capacity is not None and n_true > 0
    return Counts(
        tp=hits,
        fp=n_guessed - hits,
        fn=n_true - hits,
        n_estimates=has_error,
        error_sum=error if has_error else 0,
        n_certificates=guess.certified is not None,
        n_certified=bool(guess.certified),
        n_capacities=has_capacity,
        capacity_sum=(guess.capacity or 0) / n_true if has_capacity else 0,
    )


def precision_recall_f1(counts: Counts) -> dict[str, Rate]:
    """Return ``precision``, ``recall`` and ``f1`` of pooled counts, each with its interval.

    The intervals are Clopper-Pearson's: exact where types are independent trials, and each guessed
    type is right (precision), and each used type is guessed (recall), with a fixed probability. F1
    is ``2 J / (1 + J)``, increasing in the Jaccard index ``J = tp / (tp + fp + fn)``; its interval
    is that of J, a proportion of the types that were guessed or used, under the same map. The
    intervals describe chance in *which* types occur in these batches, not the spread between
    batches, models or texts. Types of one batch are not quite independent, so the true uncertainty
    is at least this large.

    Args:
        counts: summed over batches *before* this call; intervals cannot be averaged.

    Returns:
        Rates by name. A rate whose denominator is zero (nothing guessed, nothing used) is NaN:
        unknown, neither 0 nor 1.
    """
    jaccard = proportion(counts.tp, counts.tp + counts.fp + counts.fn)
    return {
        "precision": proportion(counts.tp, counts.tp + counts.fp),
        "recall": proportion(counts.tp, counts.tp + counts.fn),
        "f1": Rate(*(2 * j / (1 + j) for j in (jaccard.value, jaccard.low, jaccard.high))),
    }


def proportion(successes: float, trials: float, confidence: float = 0.95) -> Rate:
    """Return ``successes / trials`` and its Clopper-Pearson interval; NaN for no trials."""
    if trials == 0:
        return UNKNOWN
    low, high = clopper_pearson(successes, trials - successes, 1 - confidence)
    return Rate(successes / trials, low, high)


def clopper_pearson(successes: float, failures: float, alpha: float) -> tuple[float, float]:
    """Return both ends of the interval of a proportion; the numbers need not be whole."""
    low = float(betaincinv(successes, failures + 1, alpha / 2)) if successes else 0.0
    high = float(betaincinv(successes + 1, failures, 1 - alpha / 2)) if failures else 1.0
    return low, high


def type_count_error(estimate: float | None, n_types: int) -> float:
    """Return ``|estimate - n_types| / n_types``, whose mean over batches is the paper's MAER.

    NaN (unknown) where the attack makes no estimate, a non-finite one, or no type was used.
    """
    if estimate is None or n_types == 0 or not math.isfinite(estimate):
        return math.nan
    return abs(estimate - n_types) / n_types


def _type_mask(ids: Tensor, vocab_size: int, argument: str) -> Tensor:
    ids = ids.detach().reshape(-1)
    if ids.numel() and not bool(((ids >= 0) & (ids < vocab_size)).all()):
        raise ValueError(
            f"{argument} holds ids outside 0..{vocab_size - 1} ({int(ids.min())} to "
            f"{int(ids.max())}): leave out ignored labels (-100), and check vocab_size"
        )
    return torch.zeros(vocab_size, dtype=torch.bool, device=ids.device).index_fill(
        0, ids.long(), True
    )


class RateMetric(Metric):
    """A metric of rates with intervals, which no gradient passes through."""

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    @abstractmethod
    def rates(self) -> dict[str, Rate]:
        """Return the rates by name, on this process."""

    def values(self) -> dict[str, float]:
        """Return each rate, and the ends of its interval, on this process."""
        return flat(self.rates())

    def compute(self) -> dict[str, Tensor]:
        """Return each rate, and the ends of its interval, over all that was added."""
        values = self.values().items()
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in values}


class WordRecovery(RateMetric):
    """Compute precision, recall and F1 of word types over all batches, with intervals.

    Counts are summed over updates and processes, and rates and intervals computed from the sums
    (pooled, see :func:`~lightning_fedleak.evaluation.metrics.rates.precision_recall_f1`).
    ``type_count_error`` is the mean over those batches for which the attack estimates the number
    of types, ``certified`` the share of batches for which the attack says that no type is missing,
    and ``capacity`` the mean of how many types it could distinguish over how many there were.

    Args:
        vocab_size: token ids are below it.
        kwargs: passed to :class:`torchmetrics.Metric`.

    ``compute()`` returns ``precision``, ``recall``, ``f1``, each also with ``_low`` and ``_high``,
    ``type_count_error``, ``certified`` and ``capacity``: scalars on the CPU, NaN where unknown.

    Examples:
        >>> import torch
        >>> from lightning_fedleak.attacks.base import WordGuess
        >>> from lightning_fedleak.evaluation.metrics import WordRecovery
        >>> metric = WordRecovery(vocab_size=100)
        >>> guess = WordGuess(types=torch.tensor([3, 5, 7]), n_types=4)
        >>> metric.update(guess, truth_types=torch.tensor([3, 5, 9, 11]))
        >>> metric.compute()["recall"].item()
        0.5
    """

    counts: Tensor

    def __init__(self, vocab_size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.add_state("counts", torch.tensor(astuple(Counts())).double(), dist_reduce_fx="sum")

    def update(self, guess: WordGuess, truth_types: Tensor) -> None:
        """Add one batch.

        Args:
            guess: the attack's guess.
            truth_types: (m,) token ids that were used, repeats allowed, no ignored labels.
        """
        counts = astuple(word_counts(guess, truth_types, self.vocab_size))
        self.counts += torch.tensor(counts, dtype=torch.float64, device=self.counts.device)

    def rates(self) -> dict[str, Rate]:
        """Return precision, recall and F1 of the pooled counts, on this process."""
        return precision_recall_f1(Counts(*self.counts.tolist()))

    def values(self) -> dict[str, float]:
        """Return the rates with their ends, and the means over batches, on this process."""
        return super().values() | Counts(*self.counts.tolist()).means()
