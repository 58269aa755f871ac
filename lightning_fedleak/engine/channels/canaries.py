"""Canaries: what the trained weights say of planted texts, by how often they were repeated."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fedleak.attacks import Attack
from lightning_fedleak.attacks.memorization import Canaries
from lightning_fedleak.engine.channels.account import too_few_non_members
from lightning_fedleak.engine.channels.memorization import MemorizationChannel
from lightning_fedleak.engine.channels.pool import CanaryPool, Pool
from lightning_fedleak.engine.outcomes import AUDIT, Series
from lightning_fedleak.engine.run import reason
from lightning_fedleak.evaluation.metrics.released import canary_tiers
from lightning_fedleak.model.snapshots import Observation, ReleasedModel, Stage, TokenSnapshot
from lightning_fedleak.report.records import CANARIES, PoolLine

_MEND = "Plant more; and a batch must hold a canary's tokens as they were given"


class CanaryChannel(MemorizationChannel):
    """Ask the trained weights about the user's own canaries, in the data or held out at random.

    Each number of repetitions has a series of its own, ``audit/<attack>_x<times>``. Those that were
    trained on so far are compared with all that were held out.

    Raises:
        ValueError: no canaries, or tokens that one of them does not have.
    """

    reads = Canaries
    leak = CANARIES
    plays_games = True
    metrics = ("auc", "shown", "exposure", "extracted", "greedy")
    ranges: ClassVar[Any] = {"exposure": (0.0, math.inf, 0.0)}
    extras = (
        *("p_value", "shown_p_value", "auc_provable", "extracted_provable", "greedy_provable"),
        *("exposure_cap", "exposure_capped", "extracted_others", "extracted_base"),
        *("members", "others", "alpha"),
    )
    width = 3 * len(metrics) + len(extras)
    file = "canaries_base.safetensors"
    absent = "no texts are planted: with_canaries(...) and games=Games(canaries=train.canaries)"

    def _check_settings(self) -> None:
        """Take the canaries; refuse attacks without any, or on tokens that one of them lacks.

        Raises:
            ValueError: says what to give.
        """
        super()._check_settings()
        canaries = self.settings.games.canaries
        if canaries is None:
            raise ValueError(
                f"'{self.attacks[0].name}' scores the texts of with_canaries, and none are "
                "given: games=Games(canaries=train.canaries)"
            )
        self._canaries = canaries
        shortest = min(map(len, canaries.token_ids))
        for attack in self.attacks:
            if shortest <= (attack.suffix or 1):
                raise ValueError(
                    f"Canaries(tokens={attack.suffix}) reads the last tokens of each canary but "
                    f"not its first, and one has {shortest} tokens: ask for at most {shortest - 1}"
                )

    def series(self, attack: Attack, stages: Collection[Stage]) -> list[Series]:
        """Return the series of each number of repetitions."""
        return [
            Series(AUDIT, _tier_name(attack, times), attack.name, Stage.RELEASED)
            for times in self._canaries.record.times
            if Stage.RELEASED in stages
        ]

    def _never_known(self, metric: str) -> str | None:
        """Return why a rate cannot become known: few canaries were held out."""
        if self._pool is None:  # before the run begins
            return None
        alpha = self.settings.memorization.alpha / len(self._canaries.record.times)
        non_members = int((~self._canaries.included).sum())
        counts = [non_members] * self._planned_looks
        return too_few_non_members(counts, alpha) if metric == "shown" else None

    def _drawn(self) -> Pool:
        """Return all canaries; they are queried, or the attack does not run.

        Raises:
            NoNonMembers: the budget does not pay for them.
        """
        return CanaryPool.of_canaries(
            self._canaries, self.run.training_loader, self.settings.memorization
        )

    def describe(self) -> str:
        """Return in words what is compared, for the line-up."""
        if self._pool is None:
            return ""
        n, n_non_members = int(self._pool.trains.sum()), int((~self._pool.trains).sum())
        return f"{n} canaries in the data and {n_non_members} that were held out"

    def pool_line(self) -> PoolLine | None:
        """Return nothing: each line of results has the numbers of canaries."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return also the commitment to the canaries."""
        canaries = self.settings.games.canaries
        commitment = {} if canaries is None else {"canary_set": canaries.state_dict()}
        return {**super().state_dict(), **commitment}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the canaries are the same, and remember where the base's answers are.

        Raises:
            InclusionMismatch: other canaries.
        """
        super().load_state_dict(state)
        canaries, committed = self.settings.games.canaries, state.get("canary_set")
        if canaries is not None and committed is not None:
            canaries.load_state_dict(committed)

    def _read_texts(
        self,
        pool: Pool,
        answers: TokenSnapshot,
        rows: Tensor,
        members: Tensor,
        attacks: Sequence[Any],
    ) -> dict[str, dict[str, float] | str]:
        """Return the values of each attack and tier by the name of its series."""
        assert self._base is not None
        released = ReleasedModel(answers, self._base, torch.ones(len(pool.texts)))
        values: dict[str, dict[str, float] | str] = {"pool": pool.digest(rows, members)}
        for attack in attacks:
            try:
                guess = attack.run(Observation(released=released))
                tiers = canary_tiers(
                    guess,
                    attack,
                    self._canaries.record.times,
                    torch.tensor(self._canaries.record.repeats),
                    members,
                    ~self._canaries.included,
                    look=self._looks,
                    alpha=self.settings.memorization.alpha,
                )
            except Exception as error:
                tiers = dict.fromkeys(self._canaries.record.times, reason(error))
            values |= {
                _tier_name(attack, times): f"{one}. {_MEND}" if isinstance(one, str) else one
                for times, one in tiers.items()
            }
        return values


def _tier_name(attack: Attack, times: int) -> str:
    return f"{attack.name}_x{times}"
