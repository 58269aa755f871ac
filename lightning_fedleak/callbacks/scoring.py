"""From a guess and the truth to numbers: tallies that can be pooled over clients, and rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedleak.attacks.base import Guess, WordGuess
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.metrics import Counts, Rate, precision_recall_f1, word_counts

WORD_METRICS = ("precision", "recall", "f1")


@dataclass(frozen=True)
class WordTruth:
    """The word types that a step's batches really held. Only the client has this.

    Attributes:
        output_types: sorted distinct ids that the loss was computed on.
        input_types: sorted distinct ids that were read.
        n_targets: tokens the loss was computed on.
    """

    output_types: Tensor
    input_types: Tensor
    n_targets: int

    @classmethod
    def of(cls, batches: Sequence[TokenBatch]) -> WordTruth:
        """Joins the micro-batches of one step. Synchronises with the device."""
        targets = [b.target_ids() for b in batches]
        reads = [b.read_ids() for b in batches]
        return cls(
            torch.unique(torch.cat(targets)) if targets else torch.empty(0, dtype=torch.long),
            torch.unique(torch.cat(reads)) if reads else torch.empty(0, dtype=torch.long),
            sum(int(t.numel()) for t in targets),
        )

    def types(self, surface: str) -> Tensor:
        """The types of one surface, ``"output"`` or ``"input"``."""
        return self.output_types if surface == "output" else self.input_types

    def mask(self, vocab_size: int) -> Tensor:
        """(2, V) bool: output and input types, for a union over processes."""
        mask = torch.zeros(2, vocab_size, dtype=torch.bool, device=self.output_types.device)
        mask[0, self.output_types] = True
        mask[1, self.input_types.to(mask.device)] = True
        return mask

    @classmethod
    def of_mask(cls, mask: Tensor, n_targets: int) -> WordTruth:
        """The inverse of :meth:`mask`."""
        return cls(mask[0].nonzero().flatten(), mask[1].nonzero().flatten(), n_targets)


@dataclass(frozen=True)
class Tally:
    """Counts of one attack on one client, or pooled over clients by adding.

    Attributes:
        tp, fp, fn: word types found, falsely named, missed.
        type_error: sum over clients of |estimated - true| / true number of types; NaN without an
            estimate.
        clients: clients that were added.
    """

    tp: float
    fp: float
    fn: float
    type_error: float
    clients: float = 1.0

    def pack(self) -> list[float]:
        """Numbers in a fixed order."""
        return [self.tp, self.fp, self.fn, self.type_error, self.clients]

    WIDTH = 5

    @classmethod
    def pooled(cls, rows: Sequence[Sequence[float]]) -> Tally:
        """Adds packed tallies."""
        return cls(*(math.fsum(column) for column in zip(*rows, strict=True)))

    def rates(self) -> dict[str, Rate]:
        """Precision, recall, F1 with 95% intervals from these counts."""
        return precision_recall_f1(Counts(int(self.tp), int(self.fp), int(self.fn)))

    @property
    def type_count_error(self) -> float:
        """Mean absolute error ratio of the estimated number of types (MAER)."""
        return self.type_error / self.clients


def tally(guess: Guess, truth: WordTruth, vocab_size: int) -> Tally:
    """Counts a guess against the truth.

    Raises:
        TypeError: there is no score for this kind of guess.
    """
    if not isinstance(guess, WordGuess):
        raise TypeError(f"no score is known for a {type(guess).__name__}")
    true_types = truth.types(guess.surface).to(guess.types.device)
    counts = word_counts(guess, true_types, vocab_size)
    n_true = int(true_types.numel())
    error = math.nan
    if guess.n_types is not None and n_true:
        error = abs(guess.n_types - n_true) / n_true
    return Tally(float(counts.tp), float(counts.fp), float(counts.fn), error)
