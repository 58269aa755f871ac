"""The results of membership games: of one look, pooled over looks, and on controls.

In a *game* a secret bit decides whether a text is one of the batch (a member) or not. The attack
scores the text, and decides. A *look* is a measurement at one step, with one game for each drawn
text. :class:`GameResults` are the games of one client at one look, :class:`Window` pools them over
clients and the last looks. A *control* is the same step on known words: it shows whether the attack
works at all, so that a low rate means little leakage and not a failed attack.
"""

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
from lightning_fedleak.evaluation.metrics.clustered import lowest_p_value, rank_p_value
from lightning_fedleak.evaluation.metrics.membership import NEGATIVES_PER_FPR

MIN_MEMBERS = 16
"""The number of members, and of non-members, that one look needs to judge an update.

The standard error of an AUC is at most ``sqrt(.25 / members)`` for any distribution of the scores
(Van Dantzig 1951), here 1/8. With a smaller value a leaking update may pass by chance; with a
larger one, rounds of few texts can never be judged.
"""

MAX_CONTROL_P_VALUE = 0.05
"""The largest p-value of a control's games at which the attack counts as working.

With a larger value an attack that guesses passes as one that would have found a leak; with a
smaller one, batches of a few texts have no control.
"""


@dataclass(frozen=True)
class GameResults:
    """The results of the games of one client at one look.

    Attributes:
        scores: (n,) the adversary's scores.
        members: (n,) bool, the secret bits b.
        decisions: (n,) bool, the adversary's decisions b'.
    """

    scores: Tensor
    members: Tensor
    decisions: Tensor

    def pack(self, width: int) -> list[float]:
        """Return n, the scores, bits and decisions in this order, with zeros up to ``width``.

        Rows of one width can be gathered over processes; :meth:`Window.add` unpacks them.
        """
        numbers = [float(len(self.scores))]
        for column in (self.scores, self.members, self.decisions):
            numbers += column.double().tolist()
        return numbers + [0.0] * (width - len(numbers))


class Window:
    """The games of one series, pooled over clients and over the last looks.

    Accuracy, F1 and advantage use the adversary's own decisions, so that one look is enough for
    them. The threshold of a TPR is fitted on games other than the scored ones.

    Intervals describe only these looks: each game is a trial. An exact test within one look shows
    whether it leaked at all (:mod:`lightning_fedleak.evaluation.metrics.clustered`).

    Args:
        looks: The number of looks to pool.
    """

    def __init__(self, looks: int) -> None:
        self._looks: deque[Tensor] = deque(maxlen=looks)
        self._next = 0

    def add(self, rows: Mapping[int, Sequence[float]]) -> Outcome:
        """Add the packed games of a look, by client, and return the rates over the full window.

        The p-value is the lowest of the clients', corrected for their number.
        """
        games = []
        for client, numbers in rows.items():
            n = int(numbers[0])
            columns = [[float(self._next)] * n, [float(client)] * n]
            columns += [list(numbers[1 + i * n : 1 + (i + 1) * n]) for i in range(3)]
            games.append(torch.tensor(columns, dtype=torch.float64).T)
        self._next += 1
        self._looks.append(torch.cat(games))
        pooled = torch.cat(list(self._looks))
        # Columns 2 to 4 of games are the score, the bit and the decision.
        client_rates = [_rates(*g[:, 2:].T) for g in games]
        look_rates = client_rates[0] if len(games) == 1 else _rates(*self._looks[-1][:, 2:].T)
        members = int(self._looks[-1][:, 3].sum())
        return Outcome(
            _rates(*pooled[:, 2:].T),
            len(pooled),
            worst=worst_of([_values(rates) for rates in client_rates]),
            now=_values(look_rates),
            p_value=lowest_p_value([_p_value(g) for g in games]),
            too_few=too_few(members),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the games (n, 5) of the window: look, client, score, bit and decision."""
        return {"games": torch.cat(list(self._looks))} if self._looks else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the window from :meth:`state_dict`."""
        self._looks.clear()
        self._next = 0
        if "games" in state:
            games = state["games"].cpu().double()
            looks = sorted(set(games[:, 0].tolist()))
            self._looks.extend(games[games[:, 0] == look] for look in looks)
            self._next = int(games[-1, 0]) + 1


def too_few(members: int) -> str | None:
    """Return why one look has too few members to judge an update; None if it has enough."""
    if members >= MIN_MEMBERS:
        return None
    return (
        f"{members} texts of the update were queried, and as many non-members: with fewer than "
        f"{MIN_MEMBERS} a rate may be low by chance (raise games=Games(targets=...), and use more "
        "texts per round)"
    )


def requirement_of(
    metric: str, targets: int, clients: int, own_threshold: Collection[str]
) -> Requirement:
    """Return the looks that a TPR needs, and why a rate cannot judge one update alone.

    Args:
        metric: The name of the rate, or of an end of its interval.
        targets: The number of members in one client's look; non-members are as many.
        clients: The number of clients whose games are pooled.
        own_threshold: The names of the rates that use the attacks' own decisions.
    """
    rate = metric.removesuffix("_worst_client").removesuffix("_low").removesuffix("_high")
    looks, why = 1, ""  # only a TPR may need more than one look
    if rate.startswith("tpr_at_fpr_"):
        fpr, n = float(rate.removeprefix("tpr_at_fpr_")), targets * clients
        # The tolerance keeps rounding from adding a look, as in 10 / 0.01 / n.
        looks = math.ceil(NEGATIVES_PER_FPR / fpr / n - 1e-9)
        why = (
            f"a TPR at an FPR of {fpr:g} needs {NEGATIVES_PER_FPR / fpr:.0f} non-members, and a "
            f"look has {n}"
        )
    never_alone = why if looks > 1 else too_few(targets)
    if metric.endswith(("_low", "_high")):
        never_alone = "intervals use the games of all rounds, and a gate judges one round"
    elif metric in own_threshold:
        never_alone = (
            "it uses the attack's own threshold, so that it may be 0 even if the scores separate "
            "members from non-members without an error"
        )
    return Requirement(looks, why, never_alone=never_alone)


def _p_value(games: Tensor) -> float:
    """Return the exact p-value of "members rank no higher than non-members" in packed games."""
    return rank_p_value(games[:, 2].numpy(), games[:, 3].numpy() == 1)


def _values(rates: Mapping[str, Rate]) -> dict[str, float]:
    """Return the rates without their intervals."""
    return {name: rate.value for name, rate in rates.items()}


def _rates(scores: Tensor, members: Tensor, decisions: Tensor) -> dict[str, Rate]:
    """Return the rates of games, with intervals that take each game as a trial."""
    # None: each game is a cluster of its own. 100 resamples, because this runs at every look.
    return membership_rates(scores, members == 1, None, decisions == 1, resamples=100)


def rates_of(results: GameResults) -> dict[str, float]:
    """Return the rates of the games of one look."""
    return _values(_rates(results.scores, results.members, results.decisions))


def game_results(guess: Any, members: Tensor) -> GameResults | Unknown | Waiting:
    """Return a guess together with the truth ``members``, (n,) bool.

    If there is no guess, or not yet, that is returned. The result is also unknown if the guess has
    another shape than ``members``, or a score is NaN.
    """
    if isinstance(guess, Unknown | Waiting):
        return guess
    try:
        scores = guess.scores.detach().cpu().double()
        decisions = guess.members.detach().bool().cpu()
        if {scores.shape, decisions.shape} != {members.shape} or bool(scores.isnan().any()):
            raise UnusableObservation("the attack gave no score and decision for each target")
    except Exception as error:
        return Unknown(reason(error))
    return GameResults(scores, members, decisions)


def control_rates_of(results: GameResults) -> dict[str, float] | Unknown:
    """Return the rates of a control's games; unknown if random scores may do as well.

    If the texts are so few that not even perfect scores would be significant, it still has rates.

    Args:
        results: The games of texts that are known to be in the batch or not.
    """
    p_value, min_p_value = _control_p_values(results)
    if p_value > MAX_CONTROL_P_VALUE >= min_p_value:
        return Unknown(f"random scores do as well with a probability of {p_value:.2f}")
    return rates_of(results)


def _control_p_values(results: GameResults) -> tuple[float, float]:
    """Return the p-value of "members score no higher" (Mann-Whitney), and its smallest value."""
    members, non_members = results.scores[results.members], results.scores[~results.members]
    if not len(members) or not len(non_members):
        return 1.0, 1.0
    p_value = float(mannwhitneyu(members, non_members, alternative="greater").pvalue)
    return p_value, 1 / math.comb(len(results.scores), len(members))
