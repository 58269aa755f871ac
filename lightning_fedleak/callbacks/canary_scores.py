"""One score for each of the user's canaries over a whole run, for a one-run audit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Reduction = Literal["max", "mean"]


class CanaryScores:
    """The scores of all canaries, included or not, reduced over looks by one rule.

    A look counts for all canaries or for none, so that which are scored does not hang on the coins.

    Args:
        reduction: ``"max"`` or ``"mean"``; settled before the run.
        attacks: names of the attacks that score them.

    Raises:
        ValueError: an unknown reduction.
    """

    def __init__(self, reduction: Reduction, attacks: Sequence[str]) -> None:
        if reduction not in get_args(Reduction):
            raise ValueError(f"score_canaries must be 'max', 'mean' or None, got {reduction!r}")
        self.reduction = reduction
        self._attacks = tuple(attacks)
        self.clear()

    def clear(self) -> None:
        """A new fit: earlier looks were at another run."""
        self._looks = dict.fromkeys(self._attacks, 0)
        self._kept: dict[str, Tensor] = {}

    def add(self, scores: Mapping[str, Tensor]) -> None:
        """Takes what attacks said at one look, (m,) each."""
        for name, new in scores.items():
            kept = self._kept.get(name)
            joined = torch.maximum if self.reduction == "max" else torch.add
            self._kept[name] = new.double() if kept is None else joined(kept, new.double())
            self._looks[name] += 1

    def of(self, attack: str | None) -> Tensor:
        """(m,) scores of one attack; without a name of the only one.

        Raises:
            ValueError: no such attack, several and no name, or no look has scored the canaries.
        """
        name = self._attacks[0] if attack is None and len(self._attacks) == 1 else attack
        if name not in self._looks:
            raise ValueError(f"canary_scores(attack) must name one of {list(self._attacks)}")
        if not self._looks[name]:
            raise ValueError(f"'{name}' has scored the canaries at no look so far")
        kept = self._kept[name]
        return kept.clone() if self.reduction == "max" else kept / self._looks[name]

    def state_dict(self) -> dict[str, object]:
        """What a resumed run goes on with."""
        return {"reduction": self.reduction, "looks": dict(self._looks), "kept": dict(self._kept)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Takes back what :meth:`state_dict` gave.

        Raises:
            ValueError: it was reduced by another rule.
        """
        if state["reduction"] != self.reduction:
            raise ValueError(
                f"the checkpoint's canary scores were reduced by {state['reduction']!r}, and one "
                f"rule must hold for the whole run: resume with score_canaries="
                f"{state['reduction']!r}"
            )
        looks, kept = state["looks"], state["kept"]
        assert isinstance(looks, Mapping)
        assert isinstance(kept, Mapping)
        self._looks = {name: int(looks.get(name, 0)) for name in self._attacks}
        self._kept = {n: kept[n].double().cpu() for n in self._attacks if n in kept}


__all__ = ["CanaryScores", "Reduction"]
