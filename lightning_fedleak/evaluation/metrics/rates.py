"""Precision, recall and F1 of guessed word types, with intervals.

A *type* is a token id of the vocabulary, counted once however often the batch holds it. An attack
guesses from a gradient which types were used. It may also estimate their number, *certify* that its
guess misses no type, and state its *capacity*: the number of types that it could distinguish.
:class:`Rate` and :class:`RateMetric` are shared with the other metrics.
"""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any, ClassVar

import torch
from scipy.special import betaincinv
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_fedleak.attacks import WordGuess


@dataclass(frozen=True)
class Counts:
    """Counts of word types by outcome, and of what attacks state on batches; ``+`` adds batches.

    Attributes:
        tp: The number of types that were guessed and used.
        fp: The number of types that were guessed and not used.
        fn: The number of types that were used and not guessed.
        n_estimates: The number of batches for which the attack estimates the number of types.
        error_sum: The sum of the :func:`type_count_error` of these estimates.
        n_certificates: The number of batches for which the attack states whether a type is missing.
        n_certified: The number of batches for which it states that none is missing.
        n_capacities: The number of batches for which the attack states how many types it could
            distinguish.
        capacity_sum: The sum of that number divided by the true number of types.
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
        """Return the means over the batches that have a value; NaN if no batch has one."""
        sums = {
            "type_count_error": (self.error_sum, self.n_estimates),
            "certified": (self.n_certified, self.n_certificates),
            "capacity": (self.capacity_sum, self.n_capacities),
        }
        return {name: total / n if n else math.nan for name, (total, n) in sums.items()}


@dataclass(frozen=True)
class Rate:
    """A proportion and its confidence interval, all NaN if there was nothing to count."""

    value: float
    low: float
    high: float


ALPHA = 0.05  # 1 - confidence of the intervals
UNKNOWN = Rate(math.nan, math.nan, math.nan)


def flat(rates: Mapping[str, Rate]) -> dict[str, float]:
    """Return each rate by its name, and its interval by ``<name>_low`` and ``<name>_high``."""
    values: dict[str, float] = {}
    for name, rate in rates.items():
        values[name] = rate.value
        values[f"{name}_low"] = rate.low
        values[f"{name}_high"] = rate.high
    return values


def values_of(rates: Mapping[str, Rate]) -> dict[str, float]:
    """Return each rate by its name, without its interval."""
    return {name: rate.value for name, rate in rates.items()}


def word_counts(guess: WordGuess, truth_types: Tensor, vocab_size: int) -> Counts:
    """Return the counts of one batch, comparing guessed types with the types in it.

    Args:
        guess: The attack's guess. Duplicates in ``types`` count once; the order does not matter.
        truth_types: The token ids used in the batch, (m,), repeats allowed.
        vocab_size: The size of the vocabulary; all ids must be less.

    Raises:
        ValueError: An id, guessed or true, lies outside the vocabulary.
    """
    guessed_types, true_types = (
        type_mask(ids, vocab_size, argument)
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

    The intervals are Clopper-Pearson's: exact if types are independent trials with a constant
    probability, of a guessed type to be correct (precision), of a used type to be guessed (recall).
    F1 is ``2 J / (1 + J)``, increasing in the Jaccard index ``J = tp / (tp + fp + fn)``; its
    interval is that of J, a proportion of the types that were guessed or used, transformed by the
    same function. The intervals describe the randomness of which types occur in these batches, not
    the spread between batches, models or texts. Types of one batch are not independent, so the true
    uncertainty may be larger.

    Args:
        counts: The counts, summed over batches *before* this call; intervals cannot be averaged.

    Returns:
        The rates by name. A rate is NaN, unknown, if its denominator is zero, that is, if nothing
        was guessed or nothing was used.
    """
    jaccard = proportion(counts.tp, counts.tp + counts.fp + counts.fn)
    return {
        "precision": proportion(counts.tp, counts.tp + counts.fp),
        "recall": proportion(counts.tp, counts.tp + counts.fn),
        "f1": Rate(*(2 * j / (1 + j) for j in (jaccard.value, jaccard.low, jaccard.high))),
    }


def proportion(successes: float, trials: float, confidence: float = 1 - ALPHA) -> Rate:
    """Return ``successes / trials`` and its Clopper-Pearson interval; NaN for no trials."""
    if trials == 0:
        return UNKNOWN
    low, high = clopper_pearson(successes, trials - successes, 1 - confidence)
    return Rate(successes / trials, low, high)


def clopper_pearson(successes: float, failures: float, alpha: float) -> tuple[float, float]:
    """Return the ends of the Clopper-Pearson interval; fractional counts are allowed."""
    low = float(betaincinv(successes, failures + 1, alpha / 2)) if successes else 0.0
    high = float(betaincinv(successes + 1, failures, 1 - alpha / 2)) if failures else 1.0
    return low, high


def type_count_error(estimate: float | None, n_types: int) -> float:
    """Return ``|estimate - n_types| / n_types``, whose mean over batches is the paper's MAER.

    NaN (unknown) if the attack makes no finite estimate, or no type was used.
    """
    if estimate is None or n_types == 0 or not math.isfinite(estimate):
        return math.nan
    return abs(estimate - n_types) / n_types


def type_mask(ids: Tensor, vocab_size: int, argument: str) -> Tensor:
    """Return (vocab_size,) bool, the types among ids; raise ``ValueError`` for other ids."""
    ids = ids.detach().reshape(-1)
    if ids.numel() and not bool(((ids >= 0) & (ids < vocab_size)).all()):
        raise ValueError(f"{argument} holds ids outside 0..{vocab_size - 1}, such as -100")
    return torch.zeros(vocab_size, dtype=torch.bool, device=ids.device).index_fill(
        0, ids.long(), True
    )


class RateMetric(Metric):
    """A base class for metrics of rates with intervals, of a table of trials; not differentiable.

    Args:
        kwargs: The arguments that are passed to :class:`torchmetrics.Metric`.

    Attributes:
        n_columns: The number of numbers of a trial.
        rows: The trials, in float64.
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False
    n_columns: ClassVar[int]
    rows: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # The dtype of the empty tensor that a process without trials gathers.
        self.set_dtype(torch.float64)
        self.add_state("rows", [], dist_reduce_fx="cat")

    def _add(self, trials: Tensor) -> None:
        """Add trials, (n, columns)."""
        # Flat, like the empty tensor that a process without trials gathers.
        self.rows.append(trials.detach().flatten().to(self.device, torch.float64))

    def _trials(self) -> Tensor:
        """Return all trials, (n, columns) float64 on the CPU."""
        rows = dim_zero_cat(self.rows) if len(self.rows) else torch.zeros(0)
        return rows.reshape(-1, self.n_columns).cpu().double()

    @abstractmethod
    def rates(self) -> dict[str, Rate]:
        """Return the rates by name, computed from the current state."""

    def values(self) -> dict[str, float]:
        """Return each rate, and the ends of its interval, from the current state."""
        return flat(self.rates())

    def compute(self) -> dict[str, Tensor]:
        """Return each rate, and the ends of its interval, over all updates and processes."""
        values = self.values().items()
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in values}


class WordRecovery(RateMetric):
    """Compute precision, recall and F1 of word types over all batches, with intervals.

    Counts are summed over updates and processes, and rates and intervals computed from the sums
    (pooled, see :func:`~lightning_fedleak.evaluation.metrics.rates.precision_recall_f1`).
    ``type_count_error`` is the mean over those batches for which the attack estimates the number
    of types, ``certified`` the share of batches for which the attack says that no type is missing,
    and ``capacity`` the mean ratio of the number of types it could distinguish to the true number.

    Args:
        vocab_size: The size of the vocabulary; all token ids must be less.
        kwargs: The arguments that are passed to :class:`torchmetrics.Metric`.

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

    n_columns = len(fields(Counts))

    def __init__(self, vocab_size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocab_size = vocab_size

    def update(self, guess: WordGuess, truth_types: Tensor) -> None:
        """Add one batch.

        Args:
            guess: The attack's guess.
            truth_types: The token ids that were used, (m,), repeats allowed, no ignored labels.
        """
        counts = astuple(word_counts(guess, truth_types, self.vocab_size))
        self._add(torch.tensor([counts], dtype=torch.float64))

    def _counts(self) -> Counts:
        return Counts(*self._trials().sum(0).tolist())

    def rates(self) -> dict[str, Rate]:
        """Return precision, recall and F1 of the current pooled counts."""
        return precision_recall_f1(self._counts())

    def values(self) -> dict[str, float]:
        """Return the rates with their ends, and the means over batches, from the current state."""
        return super().values() | self._counts().means()
