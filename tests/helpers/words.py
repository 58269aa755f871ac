"""What an attack on words has named at each look, and how well it agrees with the truth."""

from lightning_fedleak.attacks import SubspaceWords
from lightning_fedleak.attacks.base import Query, WordGuess
from lightning_fedleak.model.snapshots import Observation, Stage


class Kept(SubspaceWords):
    """Keeps the words that it names, but those of controls."""

    def run(self, view: Observation, query: Query | None = None) -> WordGuess:
        guess = super().run(view, query)
        if view.gradients[-1].stage is not Stage.LOCAL:
            self.__dict__.setdefault("named", []).append(sorted(guess.types.tolist()))
        return guess


def agreement(named: list[int], true: list[int]) -> float:
    """Return F1."""
    return 2 * len({*named} & {*true}) / (len(named) + len(true))
