"""Scores the guesses of a look, and pools the results over processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Protocol

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.base import Guess
from lightning_fedleak.callbacks.kinds import Inverted, Kind, Played, Texts
from lightning_fedleak.callbacks.ledger import Series, series_name
from lightning_fedleak.callbacks.look import Look, Plan, reason
from lightning_fedleak.callbacks.outcome import (
    Outcome,
    Result,
    Waiting,
    not_shared,
    pending,
    unknown,
)
from lightning_fedleak.callbacks.scoring import WordTruth, tally


class Witness(Protocol):
    """Is shown each guess beside the truth, on the process that has both."""

    def show_words(self, look: Look, series: Series, guess: Guess, types: Tensor) -> None:
        """Guessed words, and the true types of their surface."""

    def show_texts(self, look: Look, series: Series, found: Inverted) -> None:
        """Reconstructed texts, and what was sent."""


FOUND, FAILED, NOTHING, WAITING = 0.0, 1.0, 2.0, 3.0


class Pool:
    """The processes of one fit, which exchange counts after each look.

    Every process takes part in the same exchanges, whatever failed on it.

    Args:
        trainer: of this fit.
        anatomy: the model's parts.
        client: ``"rank"`` or ``"world"``.
        kinds: what the results of each series are.
        witness: shown each guess beside the truth.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        anatomy: Anatomy,
        client: str,
        kinds: Mapping[Series, Kind],
        witness: Witness,
    ) -> None:
        self._strategy = trainer.strategy
        self._many = trainer.world_size > 1
        self._one_client = client == "world"
        self._vocab_size = anatomy.vocab_size
        self._kinds = kinds
        self._witness = witness
        self._device = trainer.strategy.root_device

    def score(self, look: Look, keys: Sequence[tuple[str, Plan]]) -> list[Result]:
        """This process's result of every (stage, attack)."""
        words = any(plan.on_gradients for _, plan in keys)
        truth = self._truth(look) if words else None
        return [
            self._score(look, stage, plan, truth)
            if plan.on_gradients
            else self._computed(look, stage, plan)
            for stage, plan in keys
        ]

    def _computed(self, look: Look, stage: str, plan: Plan) -> Result:
        """The games of one canary, or the texts of one inversion attack."""
        if look.truth_error is not None:
            return _unread(look)
        if not look.stepped or not any(batch.input_ids.numel() for batch in look.batches):
            return None
        series = series_name(stage, plan.attack.name)
        said = look.guesses.get((stage, plan.attack.name), "the attack was not run")
        if isinstance(said, Played) and plan.canary is not None:
            return said.pack(self._kinds[series].width)
        if isinstance(said, Inverted) and plan.inversion is not None:
            try:
                kind = self._kinds[series]
                assert isinstance(kind, Texts)
                packed = said.pack(kind.texts)
                self._witness.show_texts(look, series, said)
            except Exception as error:
                return reason(error)
            return packed
        return said if isinstance(said, str | Waiting) else "the attack guessed something else"

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
            return _unread(look)
        if truth is None or truth.n_targets == 0 or not look.stepped or not plan.exposed:
            return None
        guess = look.guesses.get((stage, plan.attack.name), "the attack was not run")
        if isinstance(guess, str | Waiting):
            return guess
        if isinstance(guess, Played | Inverted):
            return "the attack guessed no words"
        try:
            result = tally(guess, truth, self._vocab_size)
            types = truth.types(getattr(guess, "surface", "output"))
            self._witness.show_words(look, series_name(stage, plan.attack.name), guess, types)
        except Exception as error:
            return reason(error)
        return result.pack()

    def outcomes(
        self, keys: Sequence[tuple[str, Plan]], results: Sequence[Result], next_step: int
    ) -> tuple[dict[Series, Outcome] | None, int]:
        """The results of all processes together.

        Returns:
            The outcomes, None where nothing was shared; and the next step to look at as rank 0
            proposes it.
        """
        series = [series_name(stage, plan.attack.name) for stage, plan in keys]
        widths = [1 + self._kinds[name].width for name in series]
        rows = (_row(r, width) for r, width in zip(results, widths, strict=True))
        gathered = torch.tensor([*chain.from_iterable(rows), next_step], dtype=torch.float64)[None]
        if self._many:
            gathered = self._strategy.all_gather(gathered[0].to(self._device)).cpu()
        agreed = int(gathered[0, -1])
        ends = list(accumulate(widths))
        tables = [gathered[:, end - width : end] for end, width in zip(ends, widths, strict=True)]
        exposed = [plan.exposed for _, plan in keys]
        if any(
            e and bool((t[:, 0] == NOTHING).all()) for e, t in zip(exposed, tables, strict=True)
        ):
            return None, agreed
        outcomes: dict[Series, Outcome] = {}
        for name, shared, table, mine in zip(series, exposed, tables, results, strict=True):
            kind = self._kinds[name]
            if self._one_client and not kind.parted and not bool((table[:, 0] == FAILED).any()):
                table = table[:1]
            outcomes[name] = not_shared(kind.metrics)
            if shared:
                outcomes[name] = _combined(kind, table, mine)
            if self._one_client:
                outcomes[name] = replace(outcomes[name], worst={})
        return outcomes, agreed


def _unread(look: Look) -> str:
    return f"the batch could not be read: {look.truth_error}"


def _row(result: Result, width: int) -> list[float]:
    """A client's result as so many numbers, for the exchange between processes."""
    if result is None:
        known = [NOTHING]
    elif isinstance(result, str):
        known = [FAILED]
    elif isinstance(result, Waiting):
        known = [WAITING]
    else:
        known = [FOUND, *result]
    return known + [0.0] * (width - len(known))


def _combined(kind: Kind, rows: Tensor, mine: Result) -> Outcome:
    """Pools the clients' rows (clients, width), not all of which are NOTHING.

    Unknown where any client's attack failed: what leaks there is not known to be less. Pending
    where every client waits that has anything at all.
    """
    found = {i: r[1:] for i, r in enumerate(rows.tolist()) if r[0] == FOUND}
    failed = [i for i, r in enumerate(rows.tolist()) if r[0] == FAILED]
    if failed:
        why = mine if isinstance(mine, str) else f"the attack failed on client {failed[0]}"
        return unknown(kind.metrics, why)
    if not found:
        return pending(mine.why if isinstance(mine, Waiting) else "another client waits")
    try:
        return kind.outcome(found)
    except Exception as error:
        return unknown(kind.metrics, reason(error))
