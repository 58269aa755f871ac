"""The channel of prompts: which of them a reinforcement learning trained on.

The base writes completions of each prompt before the first step. A look asks the model about them
by one forward each; for rewards it lets the model write, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_fedleak.attacks import Attack, UnusableObservation
from lightning_fedleak.attacks.memorization import MemorizationAttack, PromptAttack, RewardGain
from lightning_fedleak.engine.channels.memorization import MemorizationChannel
from lightning_fedleak.engine.channels.pool import FORWARD_SHARE, Pool
from lightning_fedleak.engine.channels.training_rows import NoNonMembers
from lightning_fedleak.engine.run import Run, reason
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import ReleasedModel, TokenSnapshot
from lightning_fedleak.model.taps import Completions, Text
from lightning_fedleak.report.records import MEMORIZATION

_NO_REWARDS = "leave RewardGain out of attacks=; PolicyDrift() asks without rewards"


class PromptChannel(MemorizationChannel):
    """Ask the trained weights about prompts that TRL's GRPO or RLOO may have trained on.

    Only the process that trains alone is asked: completions of several would have to agree. A
    resumed run has no completions of the base, and is not asked either.
    """

    reads = PromptAttack
    leak = MEMORIZATION
    kinds = ("causal",)
    finds_entities = False

    def open(self, run: Run) -> None:
        """Forget the completions of an earlier fit."""
        super().open(run)
        self._written: list[Completions] = []
        self._rewards: Tensor | None = None  # (2, N), of the base and of the model now

    def _series_names(self, attack: Attack) -> list[str]:
        return [attack.name]

    @property
    def _forwards(self) -> float:
        """Return what asking about a prompt costs, in forwards: as much as training on it."""
        return 1 / FORWARD_SHARE

    @property
    def _asked(self) -> Sequence[Text]:
        return self._written

    @property
    def _gains(self) -> bool:
        return any(isinstance(attack, RewardGain) for attack in self.attacks)

    def meet_data(self, attack: MemorizationAttack) -> str:
        """Draw the prompts, and find out whether there are rewards for an attack on them.

        Raises:
            ValueError: there are no prompts, or no rewards that can be asked for again.
        """
        answer = super().meet_data(attack)
        if isinstance(attack, RewardGain) and (why := self.run.rollouts.why_no_rewards()):
            raise NoNonMembers(f"attack '{attack.name}' finds no rewards: {why}: {_NO_REWARDS}")
        return answer

    def _draw_pool(self) -> Pool:
        rollouts = self.run.rollouts
        if rollouts is None:
            raise NoNonMembers("there are no prompts of TRL's GRPOTrainer or RLOOTrainer")
        why = rollouts.why_unasked()
        if self.run.processes > 1:
            why = "several processes train, and their completions would have to be the same"
        if why:
            raise NoNonMembers(f"prompts are asked about where one process writes itself: {why}")
        pool = super()._draw_pool()
        rollouts.keep(pool.texts)
        return replace(pool, length=pool.length * rollouts.repeats)

    def _read(self, batch: Any) -> TokenBatch:
        return self.run.rollouts.read(batch)  # type: ignore[no-any-return]

    def describe(self) -> str:
        """Return in words what is compared, for the line-up."""
        k, gains = self.run.rollouts.count, ", and with as many of its own at each look"
        why = self.run.rollouts.why_no_rewards()
        silent = f". Rewards are not compared: {why}" * bool(why)
        words = super().describe()
        return f"{words}. Each with {k} completions of the base{gains * self._gains}{silent}"

    def ask_base(self) -> None:
        """Let the base complete all prompts, before the first step.

        Raises:
            UnusableObservation: it cannot be queried, or a reward is another one the second time.
        """
        if self.run.step == 0:
            self._written = self._write()
            if self._gains:
                first, second = (self._reward(self._written) for _ in range(2))
                if not torch.equal(first, second):
                    raise UnusableObservation(
                        f"rewards of the same completions differ or are no numbers: {_NO_REWARDS}"
                    )
                self._rewards = torch.stack([first, first])
        super().ask_base()

    def _write(self) -> list[Completions]:
        """Return the model's completions now, drawn by the same random numbers at each look.

        Raises:
            UnusableObservation: it cannot write.
        """
        run, seed = self.run, self.settings.memorization.seed
        try:
            with run.forward_context():
                return [*run.rollouts.write(run.anatomy, self.pool.texts, seed)]
        except Exception as error:
            why = f"the model cannot complete prompts: {reason(error)}"
            raise UnusableObservation(why) from error

    def _reward(self, written: Sequence[Completions]) -> Tensor:
        rewards: Tensor = self.run.rollouts.reward(self.pool.texts, written)
        return rewards

    def ask_weights(self, epoch: int, *, lists: bool) -> Mapping[Any, Any]:
        """Return what every attack guesses from the model's answers and completions now."""
        if self._rewards is not None:
            try:
                self._rewards[1] = self._reward(self._write())
            except UnusableObservation:
                self._rewards[1] = torch.nan  # RewardGain alone is unknown
        return super().ask_weights(epoch, lists=lists)

    def _released(
        self, now: TokenSnapshot, rows: Tensor, *, prompts: bool = False
    ) -> ReleasedModel:
        rewards = None if self._rewards is None else self._rewards[:, rows]
        return replace(super()._released(now, rows, prompts=prompts), rewards=rewards)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of looks: what the base wrote is in no file."""
        return {f"{self.family}/prompts": {"looks": self._looks}} if self.listed_attacks else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count the looks before a checkpoint."""
        self._looks = int(state.get(f"{self.family}/prompts", {}).get("looks", 0))
