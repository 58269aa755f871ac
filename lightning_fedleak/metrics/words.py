"""Word recovery as a torchmetrics Metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_fedleak.attacks import WordGuess
from lightning_fedleak.metrics.rates import (
    Counts,
    Rate,
    flat,
    precision_recall_f1,
    type_count_error,
    word_counts,
)

_COUNTS = ("tp", "fp", "fn", "n_estimates", "n_certificates", "n_certified", "n_capacities")
_SUMS = ("error_sum", "capacity_sum")


class WordRecovery(Metric):
    """Compute precision, recall and F1 of word types over all batches, with intervals.

    Counts are summed over updates and processes, and rates and intervals computed from the sums
    (pooled, see :func:`~lightning_fedleak.metrics.rates.precision_recall_f1`).
    ``type_count_error`` is the mean over those batches for which the attack estimates the number
    of types, ``certified`` the share of batches for which the attack says that no type is missing,
    and ``capacity`` the mean of how many types it could distinguish over how many there were.

    Args:
        vocab_size: token ids are below it.
        confidence: of the intervals.
        kwargs: passed to :class:`torchmetrics.Metric`.

    ``compute()`` returns ``precision``, ``recall``, ``f1``, each also with ``_low`` and ``_high``,
    ``type_count_error``, ``certified`` and ``capacity``: scalars on the CPU, NaN where unknown.

    Examples:
        >>> import torch
        >>> from lightning_fedleak.attacks.base import WordGuess
        >>> from lightning_fedleak.metrics import WordRecovery
        >>> metric = WordRecovery(vocab_size=100)
        >>> guess = WordGuess(types=torch.tensor([3, 5, 7]), n_types=4)
        >>> metric.update(guess, truth_types=torch.tensor([3, 5, 9, 11]))
        >>> metric.compute()["recall"].item()
        0.5
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    WIDTH = len(_COUNTS) + len(_SUMS)
    """Numbers that :meth:`pack` returns."""

    tp: Tensor
    fp: Tensor
    fn: Tensor
    n_estimates: Tensor
    n_certificates: Tensor
    n_certified: Tensor
    n_capacities: Tensor
    error_sum: Tensor
    capacity_sum: Tensor

    def __init__(self, vocab_size: int, *, confidence: float = 0.95, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.confidence = confidence
        for count in _COUNTS:
            self.add_state(count, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        for name in _SUMS:
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, guess: WordGuess, truth_types: Tensor) -> None:
        """Add one batch.

        Args:
            guess: the attack's guess.
            truth_types: (m,) token ids that were used, repeats allowed, no ignored labels.
        """
        counts = word_counts(guess, truth_types, self.vocab_size)
        self.tp += counts.tp
        self.fp += counts.fp
        self.fn += counts.fn
        error = type_count_error(guess.n_types, counts.tp + counts.fn)
        if error == error:
            self.error_sum += error
            self.n_estimates += 1
        if guess.certified is not None:
            self.n_certificates += 1
            self.n_certified += int(guess.certified)
        types = int(counts.tp + counts.fn)
        if guess.capacity is not None and types:
            self.n_capacities += 1
            self.capacity_sum += guess.capacity / types

    def pack(self) -> list[float]:
        """Return all that was added so far, as plain numbers: the counts and the sums."""
        return [float(getattr(self, name)) for name in (*_COUNTS, *_SUMS)]

    def add_packed(self, numbers: Sequence[float]) -> None:
        """Add the numbers that another instance returned from :meth:`pack`."""
        for name, number in zip((*_COUNTS, *_SUMS), numbers, strict=True):
            addition = number if name in _SUMS else int(number)
            setattr(self, name, getattr(self, name) + addition)

    def rates(self) -> dict[str, Rate]:
        """Return precision, recall and F1 of the pooled counts, on this process."""
        counts = Counts(int(self.tp), int(self.fp), int(self.fn))
        return precision_recall_f1(counts, self.confidence)

    def means(self) -> dict[str, float]:
        """Return the means over the batches that have a value, on this process; else NaN."""
        each = {
            "type_count_error": (self.error_sum, self.n_estimates),
            "certified": (self.n_certified, self.n_certificates),
            "capacity": (self.capacity_sum, self.n_capacities),
        }
        return {name: float(total) / int(n) if n else math.nan for name, (total, n) in each.items()}

    def compute(self) -> dict[str, Tensor]:
        """Return the rates of the pooled counts."""
        values = flat(self.rates()) | self.means()
        return {name: torch.tensor(value) for name, value in values.items()}
