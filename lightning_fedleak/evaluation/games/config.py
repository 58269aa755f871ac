"""Settings of a membership game, and its result: guesses and scores of one adversary, and rates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args, get_origin, get_type_hints

from torch import Tensor

from lightning_fedleak.evaluation.metrics import Rate, membership_rates
from lightning_fedleak.validate import check_choice, check_integer

Protocol = Literal["game", "authors"]
Relation = Literal["replace_one", "add_remove"]
Forwards = Literal["fresh", "pooled"]


@dataclass(frozen=True)
class GameConfig:
    """Settings of a membership game.

    Attributes:
        games: number of games.
        batch: n, distinct sentences in the client's data D.
        protocol: ``"game"`` for Fig. 2 (fair bit, random target in or outside D). ``"authors"``
            for the protocol of the authors' code: one planted sentence, always sentence 0, in one
            of two worlds; no attention mask, so the model reads the padding; the token at index 10;
            and a threshold that is the mean of all scores of both worlds, which no adversary in the
            game of Fig. 2 has.
        relation: what replaces the target where it is not in D. ``"replace_one"``: another sentence
            (Fig. 2: D always has ``batch`` sentences). ``"add_remove"``: nothing, so D is
            ``batch - 1`` sentences with or without the target, as accountants of DP-SGD compare
            (:func:`lightning_fedleak.evaluation.auditing.audit_games`).
        forwards: of the client. ``"fresh"``: one forward of the whole batch D in
            every game. ``"pooled"``: each sentence is computed once, in a batch of ``batch``
            sentences with its padding, and every D is assembled from these. Sentences of a batch do
            not attend to each other, so both agree up to rounding; ``"pooled"`` is cheap enough for
            thousands of games.
        targets_per_batch: games that share one D; each has its own bit and target. Above 1 the
            games are no longer independent, and intervals are over batches.
        seed: of the game's own generators; global random numbers are not used.

    Raises:
        ValueError: a value out of range, or two that exclude each other.

    Examples:
        >>> from lightning_fedleak.evaluation.games import GameConfig
        >>> config = GameConfig(games=100, batch=8, relation="add_remove")
        >>> config.protocol
        'game'
    """

    games: int = 240
    batch: int = 40
    protocol: Protocol = "game"
    relation: Relation = "replace_one"
    forwards: Forwards = "fresh"
    targets_per_batch: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("games", "batch", "targets_per_batch"):
            check_integer(name, getattr(self, name))
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal:
                check_choice(name, getattr(self, name), get_args(hint))
        if self.protocol == "authors":
            check_choice(
                "targets_per_batch", self.targets_per_batch, (1,), hint="with protocol='authors'"
            )
        if self.relation == "add_remove" and (
            self.protocol == "authors" or self.targets_per_batch > 1 or self.batch < 2
        ):
            raise ValueError(
                "relation='add_remove' removes the target from its batch: set protocol='game', "
                "batch to at least 2 and targets_per_batch to 1"
            )


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
        dtype: of the model.
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
    dtype: str
    seconds: float = 0.0
    relation: Relation = "replace_one"

    def __len__(self) -> int:
        return len(self.bits)

    def without_collisions(self) -> GameResult:
        """Return only the games in which the assumption of Lemma 1 holds."""
        return replace(self, **{name: getattr(self, name)[~self.collides] for name in _COLUMNS})

    def summary(self, confidence: float = 0.95, *, fitted: bool = False) -> dict[str, Rate]:
        """Return accuracy, F1, AUC, advantage and TPR at small FPRs, each with its interval.

        The intervals are over batches; see
        :func:`lightning_fedleak.evaluation.metrics.membership.membership_rates`.

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

    def __repr__(self) -> str:
        right = int((self.guesses == self.bits).sum())
        return (
            f"GameResult({self.attack!r}, layer={self.layer}, protocol={self.protocol!r}, "
            f"relation={self.relation!r}, {right} of {len(self)} right)"
        )
