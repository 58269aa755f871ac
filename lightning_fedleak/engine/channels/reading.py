"""What attacks on the trained weights read at one look, with the error that the look spends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lightning_fedleak.attacks import Attack
from lightning_fedleak.attacks.memorization import Extraction, ExtractionGuess, MemorizationGuess
from lightning_fedleak.engine.channels.account import BOUND, AccountGame
from lightning_fedleak.evaluation.metrics.released import (
    extraction_values,
    membership_values,
    others_needed,
    spent_at,
)
from lightning_fedleak.model.snapshots import Observation, ReleasedModel


@dataclass(frozen=True)
class PoolReading:
    """Texts that are asked about at a look.

    Attributes:
        released: what the model and its base say of N texts.
        members: (N,) bool, those that were trained on.
        times: (N,) int64, rows of the training data that each stands in. Texts that stand in one
            are told from others; all are asked whether they can be extracted.
        look: counted from 1.
        alpha: probability of error over all looks together.
    """

    released: ReleasedModel
    members: Tensor
    times: Tensor
    look: int
    alpha: float

    def membership(
        self, attack: Attack, ranked: int, shared: Mapping[str, float], account: AccountGame | None
    ) -> dict[str, float]:
        """Return the values of an attack on membership by name.

        Args:
            attack: the attack.
            ranked: how many attacks on membership share the error of a joint interval.
            shared: values that all these attacks share; with those of an account it is tested.
            account: the account.

        Raises:
            TypeError: the attack guesses something else.
        """
        once = self.times == 1
        guess = attack.run(Observation(released=self.released.rows(once)))
        if not isinstance(guess, MemorizationGuess):
            raise TypeError(f"no score is known for a {type(guess).__name__}")
        members = self.members[once]
        values, joint = (
            membership_values(guess.scores, members, look=self.look, alpha=alpha)
            for alpha in (self.alpha, self.alpha / ranked)
        )
        values |= {f"auc_joint_{end}": joint[f"auc_{end}"] for end in ("low", "high", "provable")}
        values |= shared
        if f"{BOUND}auc" in shared and account is not None:
            error = spent_at(self.look, self.alpha / ranked)
            values["refuted"] = account.refuted(
                attack.name, guess.scores, members, error, self.alpha
            )
        return values | self._sizes(members)

    def extraction(self, attack: Extraction) -> dict[str, float]:
        """Return the values of an attack that extracts texts, by name."""
        guess = attack.run(Observation(released=self.released))
        assert isinstance(guess, ExtractionGuess)
        values = extraction_values(
            guess, attack, self.members, self.times, look=self.look, alpha=self.alpha
        )
        return values | self._sizes(self.members)

    def _sizes(self, members: Tensor) -> dict[str, float]:
        """Return how many texts are compared, and the error that the look spends."""
        return {
            "members": float(members.sum()),
            "others": float((~members).sum()),
            "alpha": spent_at(self.look, self.alpha),
        }


def too_few_others(counts: list[int], alpha: float) -> str | None:
    """Return at which look ``shown`` has too few others, the farthest one; None: at none.

    Args:
        counts: of others, at look 1, 2, and so on.
        alpha: probability of error over all looks together.
    """
    lacks = [others_needed(look, alpha) - count for look, count in enumerate(counts, start=1)]
    if max(lacks, default=0) <= 0:
        return None
    look = 1 + lacks.index(max(lacks))
    needed, count = others_needed(look, alpha), counts[look - 1]
    return f"'shown' needs {needed} others at look {look}, and has {count}"
