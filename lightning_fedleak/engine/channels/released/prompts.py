"""The channel of prompts: which of them reinforcement learning trained on.

Before the first step, the base writes completions of each prompt. A look queries the model's
likelihoods of them by one forward each. For rewards the model writes completions itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_fedleak.attacks import Attack, UnusableObservation
from lightning_fedleak.attacks.memorization import PromptAttack, RewardGain
from lightning_fedleak.engine.channels.released.memorization import MemorizationChannel
from lightning_fedleak.engine.channels.released.pool import FORWARD_SHARE, Pool
from lightning_fedleak.engine.channels.released.training_rows import UnplayableGame
from lightning_fedleak.engine.run import reason
from lightning_fedleak.model.taps import Text

_ADVICE = "leave RewardGain out of attacks=; PolicyDrift() needs no rewards"


class PromptChannel(MemorizationChannel):
    """Query the trained weights on prompts that TRL's GRPO or RLOO may have trained on.

    Runs of several processes are refused, because their completions would have to agree. Resumed
    runs are refused too, because no file has the completions of the base.
    """

    reads = PromptAttack
    kinds = ("causal",)
    finds_entities = False
    cost = 1 / FORWARD_SHARE  # as much as training on a prompt, which has as many completions

    def _series_names(self, attack: Attack) -> list[str]:
        return [attack.name]

    def _draw_pool(self) -> Pool:
        rollouts = self.run.rollouts
        if rollouts is None:
            raise UnplayableGame("there are no prompts of TRL's GRPOTrainer or RLOOTrainer")
        if (
            why := "several processes train" * (self.run.processes > 1)
            or rollouts.why_not_sampled()
        ):
            raise UnplayableGame(f"prompts are queried only if one process writes by itself: {why}")
        pool = super()._draw_pool()
        rollouts.keep(pool.texts)
        return replace(pool, length=pool.length * rollouts.repeats)

    def _read(self, batch: Any) -> Any:
        """Return the prompts of a batch of rollouts, as tokens."""
        return self.run.rollouts.read(batch)

    def describe(self) -> str:
        """Return what is compared, in words, for the attack plan."""
        rollouts = self.run.rollouts
        words = f"{super().describe()}. Each with {rollouts.count} completions of the base"
        if self._rewards is not None:
            return f"{words}, and with as many of its own at each look"
        why = rollouts.why_no_rewards() or "RewardGain() does that"
        return f"{words}. Their rewards are not compared: {why}"

    def query_base(self) -> None:
        """Let the base complete all prompts, before the first step.

        Raises:
            UnusableObservation: The base cannot be queried, or rewards cannot be recomputed.
        """
        rollouts, self._saved_state = self.run.rollouts, {}  # a saved state has no completions
        if self.run.step == 0:
            self._completions = completions = self._complete()
            if any(isinstance(attack, RewardGain) for attack in self.attacks):
                if not (why := rollouts.why_no_rewards()):
                    rewards = [rollouts.reward(self.pool.texts, completions) for _ in range(2)]
                    if not torch.equal(*rewards):
                        why = "the same completions have others the second time, or no numbers"
                if why:
                    raise UnusableObservation(f"no rewards to compare: {why}: {_ADVICE}")
                self._rewards = torch.stack(rewards)
        super().query_base()

    def _complete(self) -> Sequence[Text]:
        """Return the model's present completions, drawn with the same random numbers at each look.

        Raises:
            UnusableObservation: The model cannot write.
        """
        run, seed = self.run, self.settings.memorization.seed
        try:
            with run.forward_context():
                return [*run.rollouts.write(run.anatomy, self.pool.texts, seed)]
        except Exception as error:
            raise UnusableObservation(f"the model cannot write: {reason(error)}") from error

    def query_weights(self, epoch: int, *, lists: bool) -> Mapping[Any, Any]:
        """Return every attack's guess from the present likelihoods and completions."""
        if self._rewards is not None:
            try:
                self._rewards[1] = self.run.rollouts.reward(self.pool.texts, self._complete())
            except UnusableObservation:
                self._rewards[1] = torch.nan  # RewardGain alone is unknown
        return super().query_weights(epoch, lists=lists)
