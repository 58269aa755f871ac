"""Audits of DPSGD by add/remove games: how often does a lower bound exceed the accounted epsilon?

    OMP_NUM_THREADS=1 python -m benchmarks.defenses.audit
    OMP_NUM_THREADS=1 python -m benchmarks.defenses.audit --broken --audits 100

Each audit is a seeded run of ``DPSGD`` with entropy of its own. Every example is a planted gradient
on an axis of its own, included with probability 1/2: as many games as examples (see
``planted_gradients.py``). The score is the best there is and the threshold is fixed beforehand; the
result is a 95% lower bound on epsilon.

- ``epsilon``: PRV's value of what the defence has accounted.
- ``median``: the median bound over epsilon; ``pooled``: that of all audits' games together.
- ``exceeded``: audits whose bound exceeds epsilon, at most 5% where the claim is right.
- ``p``: the binomial probability of so many or more.

Two claims are audited. ``dp`` is (epsilon, delta)-DP and nothing else, at a small delta and at one
at which a few hundred games show most. ``gaussian``, for rate 1, says that no test does better than
the one against a Gaussian mechanism, which is exact there.

``--broken`` breaks the defence, one way a row, and leaves the account as it is: the audit must see
it, at the delta of 0.1 or by the claim of a Gaussian mechanism, in far more than 5% of audits.
DPSGD's own measurement of its noise is switched off for that: it sees half the noise by itself.
"""

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.defenses.dp_sgd_games import Games, best_threshold, refutations
from benchmarks.defenses.planted_gradients import PlantedGradients
from benchmarks.shared import parser_of, quieten
from lightning_fedleak.defenses import DPSGD, noise
from lightning_fedleak.defenses.accounting.account import Accountant
from lightning_fedleak.defenses.accounting.accounting import epsilon_of
from lightning_fedleak.defenses.dpsgd.clipped_sum import ClippedSum
from lightning_fedleak.defenses.noise import NoiseGauge
from lightning_fedleak.evaluation.auditing import audit_scores
from lightning_fedleak.evaluation.auditing.lower_bounds import Claim

SMOKE = ("--audits 2 --games 40 --rows 0",)

SMALL_DELTA, LARGE_DELTA = 1e-3, 0.1
MAX_GAMES = 20_000
"""Games up to which the best threshold is computed; beyond, it hardly changes."""


@dataclass(frozen=True)
class Row:
    """A setting of DPSGD.

    Attributes:
        sigma: noise multiplier.
        rate: share of the examples in a batch, on average.
        steps: releases of a run.
    """

    sigma: float
    rate: float
    steps: int

    def __str__(self) -> str:
        return f"{self.sigma:5g} {self.rate:5g} {self.steps:5}"


ROWS = (
    *(Row(0.5, 1.0, 1), Row(1.0, 1.0, 1), Row(2.0, 1.0, 4), Row(0.5, 0.5, 1)),
    *(Row(0.7, 0.2, 4), Row(1.0, 0.5, 4), Row(2.0, 0.5, 10)),
)
ROWS_TO_BREAK = (ROWS[1], ROWS[5])


def audits(row: Row, count: int, games: int, seed: int) -> tuple[list[Games], PlantedGradients]:
    size = round(row.rate * games)
    defense = functools.partial(DPSGD, 0.7, noise_multiplier=row.sigma, target_delta=SMALL_DELTA)
    planted = PlantedGradients(defense, targets=games, batch_size=size, steps=row.steps, seed=seed)
    return [planted.games(number, row.sigma, row.rate) for number in range(count)], planted


def report(row: Row, label: str, count: int, games: int, seed: int) -> None:
    audits(row, 1, games, seed)  # a warm-up, which is not timed
    start = time.process_time()
    played, planted = audits(row, count, games, seed)
    ms_per_audit = 1e3 * (time.process_time() - start) / count
    scores = torch.cat([audit.scores for audit in played])
    members = torch.cat([audit.members for audit in played])
    claims: list[tuple[Claim, float]] = [("dp", SMALL_DELTA), ("dp", LARGE_DELTA)]
    claims += [("gaussian", SMALL_DELTA)] * (row.rate == 1)
    for claim, delta in claims:
        epsilon = epsilon_of(planted.history, delta, "prv")

        def bound(scores: Tensor, members: Tensor, claim: Claim = claim, d: float = delta) -> float:
            n = min(len(scores), MAX_GAMES)
            cut = 0.0 if claim == "gaussian" else threshold(row, n, d)
            return audit_scores(scores, members, delta=d, claim=claim, threshold=cut).epsilon

        bounds = [bound(audit.scores, audit.members) for audit in played]
        exceeded = refutations(bounds, epsilon)
        print(
            f"{row} {label:14} {claim:>8} {delta:6g} {epsilon:7.3f} "
            f"{statistics.median(bounds) / epsilon:7.2f} {exceeded.refuted:4}/{exceeded.audits:<4} "
            f"{exceeded.p_value:8.2g} {bound(scores, members) / epsilon:7.3f} {ms_per_audit:6.1f}",
            flush=True,
        )


@functools.cache
def threshold(row: Row, games: int, delta: float) -> float:
    return best_threshold(row.sigma, row.rate, row.steps, games=games, delta=delta)


# ---- broken on purpose ----------------------------------------------------------------------


def half_the_noise() -> Any:
    right = noise._add

    def half(key: bytes, target: Tensor, std: float) -> None:
        right(key, target, std / 2)

    broken = contextlib.ExitStack()
    broken.enter_context(mock.patch.object(NoiseGauge, "measured", return_value=None))
    broken.enter_context(mock.patch.object(noise, "_add", half))
    return broken


def twice_the_clip() -> Any:
    right = ClippedSum.__init__

    def loose(self: ClippedSum, *given: Any, **named: Any) -> None:
        right(self, *given, **named)
        self.factors *= 2

    return mock.patch.object(ClippedSum, "__init__", loose)


def drawn_twice_as_often() -> Any:
    right = DPSGD.on_dataloader

    def often(self: DPSGD, dataloader: Any, context: Any) -> Any:
        loader = right(self, dataloader, context)
        loader.batch_sampler.rate *= 2
        return loader

    return mock.patch.object(DPSGD, "on_dataloader", often)


def every_second_release_forgotten() -> Any:
    right, odd = Accountant.counter, itertools.cycle((True, False))

    def forgetful(self: Accountant, *arguments: Any) -> Callable[[], None]:
        count = right(self, *arguments)
        return lambda: count() if next(odd) else None

    return mock.patch.object(Accountant, "counter", forgetful)


BREAKS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("half the noise", half_the_noise),
    ("clip at 2 C", twice_the_clip),
    ("rate doubled", drawn_twice_as_often),
    ("half forgotten", every_second_release_forgotten),
)
"""What is broken, and what returns a context in which it is."""


def main() -> None:
    games, rows = (500, "of each audit"), ([int], "numbers of the rows, from 0; default all")
    parser = parser_of(__doc__, audits=1000, games=games, broken=False, rows=rows, seed=0)
    args = parser.parse_args()
    quieten()
    print(f"{args.audits} audits of {args.games} games a row")
    print(
        f"{'sigma':>5} {'q':>5} {'steps':>5} {'':14} {'claim':>8} {'delta':>6} {'epsilon':>7} "
        f"{'median':>7} {'exceeded':>9} {'p':>8} {'pooled':>7} {'ms':>6}"
    )
    chosen = ROWS_TO_BREAK if args.broken else ROWS
    for number in args.rows or range(len(chosen)):
        row = chosen[number]
        if not args.broken:
            report(row, "", args.audits, args.games, args.seed)
            continue
        for label, broken in BREAKS:
            if (broken is drawn_twice_as_often and row.rate == 1) or (
                broken is every_second_release_forgotten and row.steps % 2
            ):
                continue
            with broken():
                report(row, label, args.audits, args.games, args.seed)


if __name__ == "__main__":
    main()
