"""A one-run audit of texts that were in a run's data by coin flips."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fedleak.auditing.bound import EpsilonBound, Relation
from lightning_fedleak.auditing.one_run import audit_one_run

if TYPE_CHECKING:
    from lightning_fedleak.canaries import CanarySet, InclusionRecord

RELATION: dict[str, Relation] = {"add_remove": "add_remove", "replace": "replace_one"}
"""By the game of the record: a canary is there or not, or it or an item of the data is."""


def audit_canaries(
    canaries: CanarySet | InclusionRecord,
    scores: Tensor,
    *,
    delta: float = 0.0,
    confidence: float = 0.95,
    guesses: int | Sequence[tuple[int, int]] | None = None,
    accountant: Relation | None = None,
    seed: int = 0,
) -> EpsilonBound:
    """Lower bound on the epsilon of one training run, from its canaries' scores.

    ::

        train = with_canaries(train, texts, record="secret/inclusion.json")
        monitor = LeakageMonitor(attack, canaries=train.canaries, score_canaries="max")
        ...                                     # one run; an attack scores every canary
        print(audit_canaries(train.canaries, monitor.canary_scores(), delta=1e-5))

    arXiv 2305.08846 holds for scores that follow from what the run released, and from the coins
    through that alone. So every canary needs a score, those that were left out as well, all made in
    one way: at the same steps, reduced over steps by the same rule (``scores.amax(0)``, say).
    ``LeakageMonitor(canaries=..., score_canaries="max").canary_scores()`` gives such scores; it
    says under which defences they are evidence. Scores of the steps at which a canary was in the
    batch, against others' at other steps, show the coins by themselves; what the monitor logs as
    ``audit/`` are rates over such games, and not to be used here.

    Args:
        canaries: of :func:`~lightning_fedleak.canaries.with_canaries`, or their record.
        scores: (m,) for the m canaries in their order, higher is more likely included.
        delta: at which epsilon is asked for.
        confidence: of the bound.
        guesses: as in :func:`~lightning_fedleak.auditing.audit_one_run`.
        accountant: the relation of the epsilon, default that of the record's game.
        seed: of the order of equal scores.

    Raises:
        ValueError: not one score for each canary, a score that is NaN, coins that are not fair, or
            as :func:`~lightning_fedleak.auditing.audit_one_run`.
    """
    given: Any = canaries
    record: InclusionRecord = getattr(given, "record", given)
    m = len(record.included)
    if scores.shape != (m,):
        raise ValueError(
            f"scores must be ({m},), one for each canary, included or not; got "
            f"{tuple(scores.shape)}. Reduce steps first, by one rule for all."
        )
    if bool(scores.isnan().any()):
        raise ValueError(
            f"{int(scores.isnan().sum())} of {m} canaries have no score (NaN): which ones are "
            "scored must not hang on the coins, so score all of them"
        )
    if record.probability != 0.5:
        raise ValueError(
            f"the canaries were included with probability {record.probability:g}, and a one-run "
            "audit needs fair coins: with_canaries(..., probability=0.5)"
        )
    return audit_one_run(
        scores,
        torch.tensor(record.included),
        delta=delta,
        confidence=confidence,
        guesses=guesses,
        relation=RELATION[record.game],
        accountant=accountant,
        seed=seed,
    )
