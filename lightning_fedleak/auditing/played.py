"""What offline games show about the epsilon of what the client did to its data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from lightning_fedleak.auditing.bound import EpsilonBound, Relation
from lightning_fedleak.auditing.many_runs import audit_scores

if TYPE_CHECKING:
    from lightning_fedleak.games import GameResult


def audit_games(
    result: GameResult,
    *,
    delta: float = 0.0,
    confidence: float = 0.95,
    threshold: Literal["union", "split"] | float = "union",
    accountant: Relation | None = None,
    seed: int = 0,
) -> EpsilonBound:
    """Lower bound on epsilon from the games of one adversary, in the relation that was played.

    For an accountant of DP-SGD's usual kind play ``GameConfig(relation="add_remove")``. Games of
    ``"replace_one"`` bound its epsilon at half the strength, and say the whole of a replace-one
    epsilon (a client that randomises its tokens, ``play(..., defend=...)``).

    Args:
        result: of :func:`~lightning_fedleak.games.play`, every batch with one target.
        delta: at which epsilon is asked for.
        confidence: of the bound.
        threshold: as in :func:`~lightning_fedleak.auditing.audit_scores`.
        accountant: the relation of the epsilon; default that of the games.
        seed: of the split.

    Raises:
        ValueError: games that share batches or follow the authors' protocol, or as
            :func:`~lightning_fedleak.auditing.audit_scores`.
    """
    if result.protocol != "game":
        raise ValueError(
            "the authors' protocol flips no coin, so that its worlds bound no epsilon: play "
            "GameConfig(protocol='game')"
        )
    if len(set(result.batches.tolist())) != len(result):
        raise ValueError(
            "games that share a batch are not independent: play GameConfig(targets_per_batch=1)"
        )
    return audit_scores(
        result.scores,
        result.bits,
        delta=delta,
        confidence=confidence,
        threshold=threshold,
        relation=result.relation,
        accountant=accountant,
        seed=seed,
    )
