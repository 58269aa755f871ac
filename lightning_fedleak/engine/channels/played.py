"""Games that were played: of one look, pooled over looks, and how many of them a rate needs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import mannwhitneyu
from torch import Tensor

from lightning_fedleak.attacks import UnusableObservation
from lightning_fedleak.engine.channels.base import Requirement, worst_of
from lightning_fedleak.engine.outcomes import Outcome, Unknown, Waiting
from lightning_fedleak.engine.run import reason
from lightning_fedleak.evaluation.metrics import Rate, membership_rates
from lightning_fedleak.evaluation.metrics.membership import NEGATIVES_PER_FPR
from lightning_fedleak.evaluation.metrics.within import lowest_p_value, rank_p_value

LEAST_MEMBERS = 16
"""Texts of a batch, and as many non-members, that one look needs before it can judge an update.

The standard error of an AUC is at most ``sqrt(.25 / members)`` for any distribution of the scores
(Van Dantzig 1951), 1/8 here. Fewer: an update that is read well may pass by chance. More: rounds of
few texts can never be judged.
"""


BY_CHANCE = 0.05
PART_BY_CHANCE = 0.01
"""Chance of scores that know nothing above which a control, or one of a part, counts as not read.

Of a part it is smaller since some three are tried. Higher: an attack that knows nothing passes as
one that would have been seen; lower: batches of a few texts have no control. Of two texts no game
is certain: their control counts as it is.
"""


@dataclass(frozen=True)
class Played:
    """Hold the games of one client at one look.

    Attributes:
        scores: (n,) the adversary's scores.
        members: (n,) bool, the secret bits b.
        decisions: (n,) bool, the adversary's b'.
    """

    scores: Tensor
    members: Tensor
    decisions: Tensor

    def pack(self, width: int) -> list[float]:
        """Return n, scores, bits and decisions in this order, padded with zeros to ``width``."""
        numbers = [float(len(self.scores))]
        for column in (self.scores, self.members, self.decisions):
            numbers += column.double().tolist()
        return numbers + [0.0] * (width - len(numbers))


class Window:
    """Pool the games of one series over the last looks.

    Accuracy, F1 and advantage follow from the adversary's own decisions, so that one look is enough
    for them. The threshold of a TPR is fitted on other games than those scored.

    Intervals are of these looks as they were: each game is a trial. Whether one look leaked at all
    is an exact test within it (:mod:`lightning_fedleak.evaluation.metrics.within`).
    """

    def __init__(self, looks: int) -> None:
        self._looks: deque[Tensor] = deque(maxlen=looks)
        self._next = 0

    def add(self, rows: Mapping[int, Sequence[float]]) -> Outcome:
        """Add a look's packed games, by client, and return the rates over the whole window."""
        games = []
        for client, numbers in rows.items():
            n = int(numbers[0])
            columns = [[float(self._next)] * n, [float(client)] * n]
            columns += [list(numbers[1 + i * n : 1 + (i + 1) * n]) for i in range(3)]
            games.append(torch.tensor(columns, dtype=torch.float64).T)
        self._next += 1
        self._looks.append(torch.cat(games))
        pooled = torch.cat(list(self._looks))
        each = [_rates(g) for g in games]
        now = each[0] if len(games) == 1 else _rates(self._looks[-1])
        members = int(self._looks[-1][:, 3].sum())
        return Outcome(
            _rates(pooled),
            len(pooled),
            worst=worst_of([_values(rates) for rates in each]),
            now=_values(now),
            p_value=lowest_p_value([_p_value(g) for g in games]),
            too_few=too_few(members),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return (n, 5): look, client, score, bit and decision of every game in the window."""
        return {"games": torch.cat(list(self._looks))} if self._looks else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the window."""
        self._looks.clear()
        self._next = 0
        if "games" in state:
            games = state["games"].cpu().double()
            looks = sorted(set(games[:, 0].tolist()))
            self._looks.extend(games[games[:, 0] == look] for look in looks)
            self._next = int(games[-1, 0]) + 1


def too_few(members: int) -> str | None:
    """Return why a rate of so many members says too little; None where it does not."""
    if members >= LEAST_MEMBERS:
        return None
    return (
        f"{members} texts of the update were asked for, and as many non-members: fewer than "
        f"{LEAST_MEMBERS}, of which a rate may be low by chance (games=Games(targets=...), and "
        "more texts a round, give more)"
    )


def requirement_of(
    metric: str, targets: int, clients: int, own_threshold: Collection[str]
) -> Requirement:
    """Return the looks that a TPR needs, and why a rate cannot judge one update alone.

    Args:
        metric: its name, or that of an end of its interval.
        targets: texts of one client's look that are in the batch, and so many that are not.
        clients: whose games are pooled.
        own_threshold: rates of the attacks' own decisions.
    """
    rate = metric.removesuffix("_worst_client").removesuffix("_low").removesuffix("_high")
    looks, why = 1, ""
    if rate.startswith("tpr_at_fpr_"):  # a small rate of false positives takes many texts
        fpr, n = float(rate.removeprefix("tpr_at_fpr_")), targets * clients
        looks = math.ceil(NEGATIVES_PER_FPR / fpr / n - 1e-9)
        why = (
            f"a rate at {fpr:g} false positives is known only from {NEGATIVES_PER_FPR / fpr:.0f} "
            f"texts that are not in the batch, and a look has {n} of them"
        )
    alone = why if looks > 1 else too_few(targets)
    if metric.endswith(("_low", "_high")):
        alone = "intervals are of the games of all rounds, and a gate judges one round"
    elif metric in own_threshold:
        alone = (
            "it is of the attack's own threshold, so that it may be 0 of an update that is read "
            "without an error"
        )
    return Requirement(looks, why, never_alone=alone)


def _p_value(games: Tensor) -> float:
    """Return how probable guessing is to rank the members so high."""
    return rank_p_value(games[:, 2].numpy(), games[:, 3].numpy() == 1)


def _values(rates: Mapping[str, Rate]) -> dict[str, float]:
    return {name: rate.value for name, rate in rates.items()}


def _rates(games: Tensor) -> dict[str, Rate]:
    """Return the rates; each game is a trial."""
    decisions = games[:, 4] == 1
    return membership_rates(games[:, 2], games[:, 3] == 1, None, decisions, resamples=100)


def rates_of(played: Played) -> dict[str, float]:
    """Return the rates of the games of one look."""
    columns = (played.scores, played.members, played.decisions)
    games = torch.stack([column.double() for column in columns], 1)
    rates = _rates(torch.nn.functional.pad(games, (2, 0)))
    return _values(rates)


def played_games(guess: Any, members: Tensor) -> Played | Unknown | Waiting:
    """Return a guess beside the secret bits; unknown where there is none, or of other targets."""
    if isinstance(guess, Unknown | Waiting):
        return guess
    try:
        scores = guess.scores.detach().cpu().double()
        decisions = guess.members.detach().bool().cpu()
        if {scores.shape, decisions.shape} != {members.shape} or bool(scores.isnan().any()):
            raise UnusableObservation("the attack gave no score and decision for each target")
    except Exception as error:
        return Unknown(reason(error))
    return Played(scores, members, decisions)


def control_rates_of(games: Played, *, is_part: bool) -> dict[str, float] | Unknown:
    """Return the rates of a control's games; unknown where scores that know nothing do as well.

    Args:
        games: of known texts.
        is_part: they are of a part of the batch.
    """
    chance, least = _chances(games)
    most = PART_BY_CHANCE if is_part else BY_CHANCE
    if chance > most and (is_part or least <= most):
        return Unknown(f"scores that know nothing do as well with a chance of {chance:.2f}")
    return rates_of(games)


def _chances(games: Played) -> tuple[float, float]:
    """Return the chance that scores which know nothing do as well (exact), and its least value."""
    members, non_members = games.scores[games.members], games.scores[~games.members]
    if not len(members) or not len(non_members):
        return 1.0, 1.0
    chance = float(mannwhitneyu(members, non_members, alternative="greater").pvalue)
    return chance, 1 / math.comb(len(games.scores), len(members))
