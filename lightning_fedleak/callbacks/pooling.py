"""Scores the guesses of a look, and pools the results over processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Protocol

import lightning.pytorch as L
import torch
import torch.distributed as dist
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
from lightning_fedleak.metrics import Rate


class Witness(Protocol):
    """Is shown each guess beside the truth, on the process that has both."""

    def show_words(self, look: Look, series: Series, guess: Guess, types: Tensor) -> None:
        """Guessed words, and the true types of their surface."""

    def show_texts(self, look: Look, series: Series, found: Inverted) -> None:
        """Reconstructed texts, and what was sent."""


FOUND, FAILED, NOTHING, WAITING = 0.0, 1.0, 2.0, 3.0


class Pool:
    """The processes of one fit, which exchange counts after each look.

    Every process takes part in the same exchanges, whatever failed on it. A client's counts go to
    process 0 and no further.

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

        Process 0 gets the rows of all clients and pools them. The others get what came out, as
        numbers, without the values of single clients and without the reasons.

        Returns:
            The outcomes, None where nothing was shared; and the next step to look at as process 0
            proposes it.
        """
        series = [series_name(stage, plan.attack.name) for stage, plan in keys]
        kinds = [self._kinds[name] for name in series]
        widths = [1 + kind.width for kind in kinds]
        rows = [_row(r, width) for r, width in zip(results, widths, strict=True)]
        gathered = self._at_first(torch.tensor([*chain.from_iterable(rows)], dtype=torch.float64))
        found: list[Outcome] | None = None
        if gathered is not None:
            ends = list(accumulate(widths))
            tables = [gathered[:, e - w : e] for e, w in zip(ends, widths, strict=True)]
            exposed = [plan.exposed for _, plan in keys]
            if not any(
                e and bool((t[:, 0] == NOTHING).all()) for e, t in zip(exposed, tables, strict=True)
            ):
                found = [
                    self._outcome(kind, shared, table, mine)
                    for kind, shared, table, mine in zip(
                        kinds, exposed, tables, results, strict=True
                    )
                ]
        if self._many:
            told = _told(kinds, found, next_step).to(_exchange_device(self._device))
            dist.broadcast(told, src=0)
            if gathered is None:
                found, next_step = _heard(kinds, told.tolist(), results)
        return None if found is None else dict(zip(series, found, strict=True)), next_step

    def _at_first(self, mine: Tensor) -> Tensor | None:
        """(clients, numbers) of all processes on the first of them, None on the others."""
        if not self._many:
            return mine[None]
        mine = mine.to(_exchange_device(self._device))
        if dist.get_rank() != 0:
            dist.gather(mine, None, dst=0)
            return None
        all_rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.gather(mine, all_rows, dst=0)
        return torch.stack(all_rows).cpu()

    def _outcome(self, kind: Kind, shared: bool, table: Tensor, mine: Result) -> Outcome:
        if self._one_client and not kind.parted and not bool((table[:, 0] == FAILED).any()):
            table = table[:1]
        outcome = _combined(kind, table, mine) if shared else not_shared(kind.metrics)
        return replace(outcome, worst={}) if self._one_client else outcome


def _exchange_device(device: torch.device) -> torch.device:
    """Where the processes' backend gathers: gloo does on CPU alone."""
    return torch.device("cpu") if "gloo" in dist.get_backend() else device


def _told(kinds: Sequence[Kind], found: Sequence[Outcome] | None, next_step: int) -> Tensor:
    """What process 0 tells the others: pooled values, and no client's own."""
    numbers = [float(found is not None), float(next_step)]
    for i, kind in enumerate(kinds):
        outcome = not_shared(()) if found is None else found[i]
        state = FOUND if outcome.exposed else NOTHING
        state = FAILED if outcome.unknown is not None else state
        state = WAITING if outcome.pending is not None else state
        now = outcome.now or {}
        numbers += [state, float(outcome.n), float(outcome.now is not None)]
        for name in kind.metrics:
            rate = outcome.rates.get(name, Rate(math.nan, math.nan, math.nan))
            numbers += [rate.value, rate.low, rate.high, now.get(name, math.nan)]
        numbers += [outcome.extra.get(name, math.nan) for name in kind.extras]
    return torch.tensor(numbers, dtype=torch.float64)


def _heard(
    kinds: Sequence[Kind], told: Sequence[float], results: Sequence[Result]
) -> tuple[list[Outcome] | None, int]:
    """What :func:`_told` says, on another process; reasons are its own results'."""
    shared, next_step, *rest = told
    numbers = iter(rest)
    found = []
    for kind, mine in zip(kinds, results, strict=True):
        state, n, has_now = (next(numbers) for _ in range(3))
        each = {name: [next(numbers) for _ in range(4)] for name in kind.metrics}
        extra = {name: next(numbers) for name in kind.extras}
        if state == FOUND:
            rates = {name: Rate(*four[:3]) for name, four in each.items()}
            now = {name: four[3] for name, four in each.items()} if has_now else None
            found.append(Outcome(rates, int(n), extra=extra, now=now))
        elif state == FAILED:
            why = mine if isinstance(mine, str) else "the attack failed on another client"
            found.append(unknown(kind.metrics, why))
        elif state == WAITING:
            found.append(_waits(mine))
        else:
            found.append(not_shared(kind.metrics))
    return found if shared else None, int(next_step)


def _waits(mine: Result) -> Outcome:
    return pending(mine.why if isinstance(mine, Waiting) else "another client waits")


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
        return _waits(mine)
    try:
        return kind.outcome(found)
    except Exception as error:
        return unknown(kind.metrics, reason(error))
