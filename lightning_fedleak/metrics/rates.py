"""Precision, recall and F1 of guessed word types, with intervals: the pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from scipy.special import betaincinv
from torch import Tensor

from lightning_fedleak.attacks import WordGuess
from lightning_fedleak.validate import check_number


@dataclass(frozen=True)
class Counts:
    """Word types by outcome; counts of several batches are pooled by ``+``.

    Attributes:
        tp: guessed and used.
        fp: guessed and not used.
        fn: used and not guessed.
    """

    tp: int = 0
    fp: int = 0
    fn: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.tp + other.tp, self.fp + other.fp, self.fn + other.fn)


@dataclass(frozen=True)
class Rate:
    """A proportion and its confidence interval, all NaN where it is unknown (nothing to count)."""

    value: float
    low: float
    high: float


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
    """Return the counts of guessed types against those that were in the batch.

    Args:
        guess: its ``types`` count once each, in any order.
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
    return Counts(tp=hits, fp=n_guessed - hits, fn=n_true - hits)


def precision_recall_f1(counts: Counts, confidence: float = 0.95) -> dict[str, Rate]:
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
        confidence: of the intervals, between 0 and 1.

    Returns:
        Rates by name. A rate whose denominator is zero (nothing guessed, nothing used) is NaN:
        unknown, neither 0 nor 1.
    """
    jaccard = proportion(counts.tp, counts.tp + counts.fp + counts.fn, confidence)
    return {
        "precision": proportion(counts.tp, counts.tp + counts.fp, confidence),
        "recall": proportion(counts.tp, counts.tp + counts.fn, confidence),
        "f1": Rate(*(2 * j / (1 + j) for j in (jaccard.value, jaccard.low, jaccard.high))),
    }


def proportion(successes: int, trials: int, confidence: float = 0.95) -> Rate:
    """Return ``successes / trials`` with its two-sided Clopper-Pearson interval; NaN for no trials.

    Raises:
        ValueError: negative counts, more successes than trials, or a confidence outside (0, 1).
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"need 0 <= successes <= trials, got {successes} of {trials}")
    check_number("confidence", confidence, above=0, below=1)
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
