"""Guesses and scores of one adversary in all games, and their rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from lightning_fedleak.games.config import Gradients, Protocol, Relation
from lightning_fedleak.metrics.membership import membership_rates
from lightning_fedleak.metrics.rates import Rate

_SETTINGS = ("attack", "layer", "granularity", "protocol", "relation", "gradients", "dtype")
_COLUMNS = ("bits", "guesses", "scores", "collides", "batches", "positions")


@dataclass(frozen=True, repr=False)
class GameResult:
    """Guesses and scores of one adversary in all games.

    Attributes:
        attack: its name.
        layer: at which it read; None for an attack that reads the model's own gradient.
        granularity: ``"token"`` or ``"full"``; ``"text"`` for such an attack.
        bits: (n,) bool, the secret b.
        guesses: (n,) bool, the adversary's b'.
        scores: (n,) float64, higher is more likely a member.
        collides: (n,) bool, whether the hidden states of the target that this attack reads (of one
            token, or of its sentence) occur in D outside the target: then the assumption of Lemma 1
            fails, and the attack cannot decide.
        batches: (n,) int, the number of the D that a game was played on.
        positions: (n,) int, the target token (not used by an attack on whole sentences).
        protocol: ``"game"`` or ``"authors"``, see :class:`GameConfig`.
        gradients: ``"autograd"`` or ``"closed_form"``.
        dtype: of the model.
        config: settings of game and attack, plain values.
        seconds: the adversary's own work in all games (A_attack, gradient, A_guess).
        relation: ``"replace_one"`` or ``"add_remove"``, see :class:`GameConfig`.
    """

    attack: str
    layer: int | None
    granularity: str
    bits: Tensor
    guesses: Tensor
    scores: Tensor
    collides: Tensor
    batches: Tensor
    positions: Tensor
    protocol: Protocol
    gradients: Gradients
    dtype: str
    config: Mapping[str, object] = field(default_factory=dict)
    seconds: float = 0.0
    relation: Relation = "replace_one"

    def __len__(self) -> int:
        return len(self.bits)

    def without_collisions(self) -> GameResult:
        """Return only the games in which the assumption of Lemma 1 holds."""
        return self.only(~self.collides)

    def only(self, selection: Tensor) -> GameResult:
        """Return the games that ``selection``, (n,) bool, holds; ``seconds`` stays that of all."""
        return replace(self, **{name: getattr(self, name)[selection] for name in _COLUMNS})

    def summary(self, confidence: float = 0.95, *, fitted: bool = False) -> dict[str, Rate]:
        """Return accuracy, F1, AUC, advantage and TPR at small FPRs, each with its interval.

        The intervals are over batches; see
        :func:`lightning_fedleak.metrics.membership.membership_rates`.

        Args:
            confidence: of the intervals.
            fitted: take accuracy, F1 and advantage not from the adversary's own guesses, but from
                a threshold on its scores that was fitted on other games: what the scores are worth
                to someone who knows the outcome of such games.
        """
        guesses = None if fitted else self.guesses
        return membership_rates(
            self.scores, self.bits, self.batches, guesses, confidence=confidence
        )

    def to_dict(self, games: bool = False) -> dict[str, object]:
        """Return plain values for JSON: settings, counts, rates with intervals; no text.

        Args:
            games: whether to add every game's bit, guess, score and flag.
        """
        whole, fitted = self.summary(), self.summary(fitted=True)
        clean = self.without_collisions().summary()
        plain: dict[str, object] = {
            **{name: getattr(self, name) for name in _SETTINGS},
            "games": len(self),
            "members": int(self.bits.sum()),
            "collisions": int(self.collides.sum()),
            "clusters": len(set(self.batches.tolist())),
            "right": int((self.guesses == self.bits).sum()),
            "seconds": self.seconds,
            "config": dict(self.config),
            "rates": {name: _plain(rate) for name, rate in whole.items()},
            "rates_fitted": {name: _plain(rate) for name, rate in fitted.items()},
            "rates_without_collisions": {name: _plain(rate) for name, rate in clean.items()},
        }
        if games:
            for name in _COLUMNS:
                values = getattr(self, name).tolist()
                plain[name] = [v if math.isfinite(v) else str(v) for v in values]
        return plain

    def __repr__(self) -> str:
        right = int((self.guesses == self.bits).sum())
        return (
            f"GameResult({self.attack!r}, layer={self.layer}, protocol={self.protocol!r}, "
            f"relation={self.relation!r}, gradients={self.gradients!r}, "
            f"{right} of {len(self)} right)"
        )


def _plain(rate: Rate) -> dict[str, float | None]:
    """Return a rate for JSON, which has no NaN: null where it is unknown."""
    ends = {"value": rate.value, "low": rate.low, "high": rate.high}
    return {name: end if math.isfinite(end) else None for name, end in ends.items()}
