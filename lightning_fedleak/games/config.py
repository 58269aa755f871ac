"""How a game is played."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_fedleak.attacks.membership.insertion import Placement
from lightning_fedleak.games.pool import GameError

Protocol = Literal["game", "authors"]
Relation = Literal["replace_one", "add_remove"]
Gradients = Literal["autograd", "closed_form"]
Upstream = Literal["generic", "loss"]
Forwards = Literal["fresh", "pooled"]
Recompute = Literal["alone", "padded"]

_CHOICES = {
    "protocol": get_args(Protocol),
    "relation": get_args(Relation),
    "gradients": get_args(Gradients),
    "upstream": get_args(Upstream),
    "forwards": get_args(Forwards),
    "recompute": get_args(Recompute),
    "placement": get_args(Placement),
}


@dataclass(frozen=True)
class GameConfig:
    """How the game is played.

    Attributes:
        games: how many.
        batch: n, distinct sentences in the client's data D.
        protocol: ``"game"`` for Fig. 2 (fair bit, random target in or outside D); ``"authors"``
            for the protocol of the authors' code: one planted sentence, always sentence 0, in one
            of two worlds; no attention mask, so that padding is read; the token at index 10; and
            guesses by a threshold that is the mean of all scores of both worlds, which no
            adversary in the game of Fig. 2 has.
        relation: what is in the target's place where it is not in D: ``"replace_one"``, another
            sentence (Fig. 2: D always has ``batch`` sentences), or ``"add_remove"``, nothing: D is
            ``batch - 1`` sentences and the target, or these alone, as accountants of DP-SGD compare
            (:func:`lightning_fedleak.auditing.audit_games`).
        gradients: ``"autograd"`` by backward through crafted layers that are really inserted into
            the model (``upstream`` and ``forwards``, of the closed form, are then left as they
            are); ``"closed_form"`` by the attack's own formula.
        position: which token of the target is asked for where an attack asks for tokens:
            ``"random"``, ``"last"`` or an index counted from 0. The first two ask for no special
            token, of which early layers make much the same state in every sentence. Of a causal
            model the last token of a sentence is not asked for either: its hidden states enter no
            next-token loss, so that its gradient is zero; ``"last"`` is the one before.
        upstream: of the closed form: ``"generic"`` for random numbers (the guess must not depend
            on them), ``"loss"`` for the gradient of the user's own loss at the crafted output.
        forwards: of the client, in closed form: ``"fresh"`` for one forward of the whole batch D in
            every game; ``"pooled"`` to compute each sentence once, in a batch of ``batch``
            sentences with its padding, and put every D together from these: the same but for
            rounding, since sentences of a batch do not see each other, and cheap enough for
            thousands of games.
        targets_per_batch: games that share one D; each has a bit and target of its own. Above 1
            the games are no longer independent, and intervals are taken over batches.
        recompute: how the server embeds its target: ``"alone"`` in a batch of one without padding,
            or ``"padded"`` together with the other targets of the batch and further sentences,
            padded to another length than the client's.
        dropout: whether the client's forward drops units. A dishonest server sets dropout to 0
            (False); True shows what it costs the attack not to.
        placement: where crafted layers go (Fig. 3), see
            :func:`lightning_fedleak.attacks.membership.insertion.insert`.
        seed: of own generators; nothing global is drawn from.

    Raises:
        GameError: a value out of range, or two that exclude each other.
    """

    games: int = 240
    batch: int = 40
    protocol: Protocol = "game"
    relation: Relation = "replace_one"
    gradients: Gradients = "closed_form"
    position: Literal["random", "last"] | int = "random"
    upstream: Upstream = "generic"
    forwards: Forwards = "fresh"
    targets_per_batch: int = 1
    recompute: Recompute = "alone"
    dropout: bool = False
    placement: Placement = "sequential"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("games", "batch", "targets_per_batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise GameError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise GameError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        position = self.position
        index = isinstance(position, int) and not isinstance(position, bool) and position >= 0
        if not index and position not in ("random", "last"):
            raise GameError(f"position must be 'random', 'last' or an index, got {position!r}")
        if self.protocol == "authors" and (position == "last" or self.targets_per_batch > 1):
            raise GameError("the authors' protocol has one target at one index in each batch")
        if self.relation == "add_remove":
            if self.protocol == "authors":
                raise GameError(
                    "the authors' protocol puts one sentence in the place of another: leave "
                    "relation='add_remove' out, or take protocol='game'"
                )
            if self.targets_per_batch > 1 or self.batch < 2:
                raise GameError(
                    "relation='add_remove' takes the target out of its batch: give batch of at "
                    "least 2 and targets_per_batch=1, got "
                    f"{self.batch} and {self.targets_per_batch}"
                )
        if self.gradients == "autograd" and (self.forwards, self.upstream) != ("fresh", "generic"):
            raise GameError(
                "gradients='autograd' runs the client's own forward and loss in every game, so "
                f"that forwards={self.forwards!r} and upstream={self.upstream!r} would do nothing: "
                "leave both out, or take gradients='closed_form'"
            )
        if self.dropout and (self.gradients == "autograd" or self.forwards == "pooled"):
            raise GameError("dropout=True needs gradients='closed_form' and forwards='fresh'")


__all__ = ["GameConfig", "Gradients", "Protocol", "Relation"]
