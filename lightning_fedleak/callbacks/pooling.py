"""Scores the guesses of a look, and pools the results over processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.base import Guess
from lightning_fedleak.callbacks.look import (
    HEAD_ONLY,
    PREFIX,
    Look,
    Outcome,
    Plan,
    any_failed,
    combine,
    not_shared,
    reason,
    row,
)
from lightning_fedleak.callbacks.scoring import Tally, WordTruth, tally

Series = tuple[str, str]
Witness = Callable[[Look, Series, Guess, Tensor], None]
Result = Tally | str | None
"""A tally, why there is none, or None where nothing was shared."""


def series_name(stage: str, attack: str) -> Series:
    """(prefix, attack) under which a result is logged."""
    if stage == HEAD_ONLY:
        return PREFIX["local"], f"{attack}_{HEAD_ONLY}"
    return PREFIX[stage], attack


class Pool:
    """The processes of one fit, which exchange counts after each look.

    Every process takes part in the same exchanges, whatever failed on it.

    Args:
        trainer: of this fit.
        anatomy: the model's parts.
        client: ``"rank"`` or ``"world"``.
        witness: shown each guess with the true types of its surface.
    """

    def __init__(self, trainer: L.Trainer, anatomy: Anatomy, client: str, witness: Witness) -> None:
        self._strategy = trainer.strategy
        self._many = trainer.world_size > 1
        self._one_client = client == "world"
        self._vocab_size = anatomy.vocab_size
        self._witness = witness
        self._device = trainer.strategy.root_device

    def score(self, look: Look, keys: Sequence[tuple[str, Plan]]) -> list[Result]:
        """This process's result of every (stage, attack)."""
        truth = self._truth(look)
        return [self._score(look, stage, plan, truth) for stage, plan in keys]

    def _truth(self, look: Look) -> WordTruth | None:
        """The true words, of all processes together where they are one client."""
        size = self._vocab_size
        together = self._one_client and self._many
        mask = torch.zeros(2, size if together else 0, dtype=torch.int32, device=self._device)
        tokens = torch.zeros((), dtype=torch.int64, device=self._device)
        truth = None
        try:
            if look.truth_error is None:
                truth = WordTruth.of(look.batches)
                if together:
                    mask += truth.mask(size).to(mask.device)
                    tokens += truth.n_targets
        except Exception as error:
            look.truth_error = reason(error)
        if not together:
            return truth
        mask = self._strategy.reduce(mask, reduce_op="sum")
        tokens = self._strategy.reduce(tokens, reduce_op="sum")
        return None if look.truth_error else WordTruth.of_mask(mask > 0, int(tokens))

    def _score(self, look: Look, stage: str, plan: Plan, truth: WordTruth | None) -> Result:
        if look.truth_error is not None:
            return f"the batch could not be read: {look.truth_error}"
        if truth is None or truth.n_targets == 0 or not look.stepped or not plan.exposed:
            return None
        guess = look.guesses.get((stage, plan.attack.name), "the attack was not run")
        if isinstance(guess, str):
            return guess
        try:
            result = tally(guess, truth, self._vocab_size)
            types = truth.types(getattr(guess, "surface", "output"))
            self._witness(look, series_name(stage, plan.attack.name), guess, types)
        except Exception as error:
            return reason(error)
        return result

    def outcomes(
        self, keys: Sequence[tuple[str, Plan]], results: Sequence[Result], next_step: int
    ) -> tuple[dict[Series, Outcome] | None, int]:
        """The results of all processes together.

        Returns:
            The outcomes, None where nothing was shared; and the next step to look at as rank 0
            proposes it.
        """
        values = [*chain.from_iterable(row(r) for r in results), next_step]
        gathered = torch.tensor(values, dtype=torch.float64).unsqueeze(0)
        if self._many:
            gathered = self._strategy.all_gather(gathered[0].to(self._device)).cpu()
        table = gathered[:, :-1].reshape(gathered.shape[0], len(keys), -1)
        agreed = int(gathered[0, -1])
        outcomes: dict[Series, Outcome] = {}
        for i, ((stage, plan), mine) in enumerate(zip(keys, results, strict=True)):
            rows = table[:, i]
            if self._one_client and not any_failed(rows):
                rows = rows[:1]
            outcome: Outcome | None = not_shared()
            if plan.exposed:
                outcome = combine(rows, mine if isinstance(mine, str) else None)
            if outcome is None:
                return None, agreed
            outcomes[series_name(stage, plan.attack.name)] = outcome
        return outcomes, agreed
