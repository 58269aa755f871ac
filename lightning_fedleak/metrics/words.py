"""Word recovery as a torchmetrics Metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_fedleak.attacks.base import WordGuess
from lightning_fedleak.metrics.rates import (
    Counts,
    Rate,
    flat,
    precision_recall_f1,
    type_count_error,
    word_counts,
)

_COUNTS = ("tp", "fp", "fn", "n_estimates")


class WordRecovery(Metric):
    """Precision, recall and F1 of word types over all batches seen, with intervals.

    Counts are summed over updates and processes, and rates and intervals computed from the sums
    (pooled, see :func:`~lightning_fedleak.metrics.rates.precision_recall_f1`).
    ``type_count_error`` is the mean over those batches for which the attack estimates the number
    of types.

    Args:
        vocab_size: token ids are below it.
        confidence: of the intervals.
        kwargs: passed to :class:`torchmetrics.Metric`.

    ``compute()`` gives ``precision``, ``recall``, ``f1``, each also with ``_low`` and ``_high``,
    and ``type_count_error``: scalars on the CPU, NaN where unknown.
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    WIDTH = 5
    """Numbers that :meth:`pack` gives."""

    tp: Tensor
    fp: Tensor
    fn: Tensor
    error_sum: Tensor
    n_estimates: Tensor

    def __init__(self, vocab_size: int, *, confidence: float = 0.95, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.confidence = confidence
        for count in _COUNTS:
            self.add_state(count, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("error_sum", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, guess: WordGuess, truth_types: Tensor) -> None:
        """Adds one batch.

        Args:
            guess: what the attack said.
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

    def pack(self) -> list[float]:
        """All that was added so far, as plain numbers: the counts, and the sum of errors."""
        return [*(float(getattr(self, count)) for count in _COUNTS), float(self.error_sum)]

    def add_packed(self, numbers: Sequence[float]) -> None:
        """Adds what another instance gave with :meth:`pack`."""
        for count, number in zip(_COUNTS, numbers, strict=False):
            setattr(self, count, getattr(self, count) + int(number))
        self.error_sum += numbers[-1]

    def rates(self) -> dict[str, Rate]:
        """Precision, recall and F1 of the pooled counts, on this process."""
        counts = Counts(int(self.tp), int(self.fp), int(self.fn))
        return precision_recall_f1(counts, self.confidence)

    def mean_type_count_error(self) -> float:
        """Of the batches with an estimate, on this process; NaN where there was none."""
        n = int(self.n_estimates)
        return float(self.error_sum) / n if n else math.nan

    def compute(self) -> dict[str, Tensor]:
        """The rates of the pooled counts."""
        values = flat(self.rates()) | {"type_count_error": self.mean_type_count_error()}
        return {name: torch.tensor(value) for name, value in values.items()}
