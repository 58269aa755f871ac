"""How many distinct tokens an update's first block reveals, before any training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_fedleak import attacks
from lightning_fedleak.evaluation.metrics import WordRecovery
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.snapshots import (
    GradientSnapshot,
    Observation,
    Stage,
    UnusableObservation,
)


@dataclass(frozen=True)
class Trial:
    """One batch of real text whose update was attacked.

    Attributes:
        texts: in the batch.
        types: distinct tokens that an update of it can hold.
        f1: of the attack; None where it has no result.
        certified: whether the attack itself can check that nothing is missing.
        seconds: wall time of the attack.
    """

    texts: int
    types: int
    f1: float | None
    certified: bool
    seconds: float


class NothingRead(ValueError):
    """The attack reads nothing of what a model shares; the message says why."""


@dataclass(frozen=True)
class CapacityStudy:
    """The rows of one model's updates that depend on the tokens of a batch alone.

    Attributes:
        anatomy: of the model, with its adapters.
        length: tokens of a text.
        seed: of texts and planted sets.
        known_input: the input of the first block's trained maps, which tokens determine.
    """

    anatomy: Anatomy
    length: int
    seed: int
    known_input: attacks.row_space.KnownInput

    @classmethod
    def of(cls, anatomy: Anatomy, length: int, seed: int = 0) -> CapacityStudy:
        """Return the study of a model; arguments as the attributes.

        Raises:
            NothingRead: no trained map reads an input that tokens determine.
        """
        maps = attacks.row_space.find_linear_maps(anatomy)
        for candidate in attacks.row_space.find_known_inputs(anatomy, maps):
            if any(m.factor != "B" for m in candidate.trainable_maps(anatomy)):
                return cls(anatomy, length, seed, candidate)
        raise NothingRead(
            "no trained map of this model reads an input that a token determines, because the "
            "first block's projections are not trained. That is 'unknown', not 'safe'."
        )

    @property
    def maps(self) -> list[attacks.row_space.LinearMap]:
        """Return the trained maps whose gradients' rows are sums of the tokens' inputs."""
        return [m for m in self.known_input.trainable_maps(self.anatomy) if m.factor != "B"]

    @property
    def rows(self) -> int:
        """Return how many such rows an update shares."""
        return sum(m.rows for m in self.maps)

    def planted(self, seconds: float) -> attacks.row_space.Capacity:
        """Return how many types, planted at random, these rows reveal.

        Args:
            seconds: after which no other set is planted.

        Raises:
            NotAdditive: the first block's input is no sum over token and position.
        """
        dictionary = attacks.row_space.build_dictionary(self.anatomy, self.known_input)
        trained = self.known_input.trainable_maps(self.anatomy)
        factors = attacks.row_space.factor_rows(self.anatomy, [m for m in trained if m.regularised])
        atoms = attacks.row_space.Atoms(*dictionary.atoms(self.length, tuple(factors.values())))
        return attacks.row_space.measure_capacity(atoms, self.rows, seconds=seconds, seed=self.seed)

    def trial(self, texts: Sequence[str], tokenizer: Any, size: int) -> Trial:
        """Attack the update of one batch.

        Args:
            texts: that the batch is drawn from.
            tokenizer: of the model.
            size: texts of the batch; fewer where there are not so many.
        """
        text = attacks.PublicText(texts, tokenizer)
        size = min(size, len(text))
        attack = attacks.SubspaceWords(capacity_seconds=0)
        attack.prepare(self.anatomy)
        generator = torch.Generator().manual_seed(self.seed)
        rows = text.draw(size, generator).tolist()
        batch = text.rows(
            rows,
            self.length,
            generator,
            kind=self.anatomy.kind,
            mask_token_id=getattr(tokenizer, "mask_token_id", None),
        )
        roles = attack.needs(self.anatomy).gradients
        weights = attacks.nonzero_starts(self.anatomy, generator)
        gradient = attacks.gradient_of(self.anatomy, batch, roles, instead=weights)
        view = Observation((GradientSnapshot(0, Stage.SHARED, gradient),))
        truth = torch.unique(batch.context_ids())
        start = time.perf_counter()
        guess: attacks.WordGuess | None
        try:
            guess = attack.run(view)
        except UnusableObservation:
            guess = None
        seconds = time.perf_counter() - start
        if guess is None:
            return Trial(size, len(truth), None, False, seconds)
        metric = WordRecovery(self.anatomy.vocab_size, sync_on_compute=False)
        metric.update(guess, truth)
        return Trial(size, len(truth), metric.rates()["f1"].value, bool(guess.certified), seconds)
