"""The channel of prompts: which of them a reinforcement learning trained on.

The base writes completions of each prompt before the first step. A look asks the model about them
by one forward each; for rewards it lets the model write, too.
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

_MEND = "leave RewardGain out of attacks=; PolicyDrift() asks without rewards"


class PromptChannel(MemorizationChannel):
    """Ask the trained weights about prompts that TRL's GRPO or RLOO may have trained on.

    Only a process that trains alone is asked: completions of several would have to agree. What the
    base wrote is in no file, so that a resumed run is not asked either.
    """

    reads = PromptAttack
    kinds = ("causal",)
    finds_entities = False
    cost = 1 / FORWARD_SHARE  # as much as training on a prompt: its completions are as many

    def _series_names(self, attack: Attack) -> list[str]:
        return [attack.name]

    def _draw_pool(self) -> Pool:
        rollouts = self.run.rollouts
        if rollouts is None:
            raise UnplayableGame("there are no prompts of TRL's GRPOTrainer or RLOOTrainer")
        if why := "several processes train" * (self.run.processes > 1) or rollouts.why_unasked():
            raise UnplayableGame(f"prompts are asked about where one process writes itself: {why}")
        pool = super()._draw_pool()
        rollouts.keep(pool.texts)
        return replace(pool, length=pool.length * rollouts.repeats)

    def _read(self, batch: Any) -> Any:
        return self.run.rollouts.read(batch)

    def describe(self) -> str:
        """Return in words what is compared, for the line-up."""
        rollouts = self.run.rollouts
        words = f"{super().describe()}. Each with {rollouts.count} completions of the base"
        if self._rewards is not None:
            return f"{words}, and with as many of its own at each look"
        why = rollouts.why_no_rewards() or "RewardGain() does that"
        return f"{words}. Their rewards are not compared: {why}"

    def ask_base(self) -> None:
        """Let the base complete all prompts, before the first step.

        Raises:
            UnusableObservation: it cannot be asked, or there are no rewards to ask for again.
        """
        rollouts, self._saved = self.run.rollouts, {}  # of a run whose completions nobody has
        if self.run.step == 0:
            self._written = self._write()
            if any(isinstance(attack, RewardGain) for attack in self.attacks):
                why = rollouts.why_no_rewards()
                rewards = [rollouts.reward(self.pool.texts, self._written) for _ in "12" if not why]
                if why or not torch.equal(*rewards):
                    why = why or "the same completions have others the second time, or no numbers"
                    raise UnusableObservation(f"no rewards to compare: {why}: {_MEND}")
                self._rewards = torch.stack(rewards)
        super().ask_base()

    def _write(self) -> Sequence[Text]:
        """Return the model's completions now, drawn by the same random numbers at each look.

        Raises:
            UnusableObservation: it cannot write.
        """
        run, seed = self.run, self.settings.memorization.seed
        try:
            with run.forward_context():
                return [*run.rollouts.write(run.anatomy, self.pool.texts, seed)]
        except Exception as error:
            raise UnusableObservation(f"the model cannot write: {reason(error)}") from error

    def ask_weights(self, epoch: int, *, lists: bool) -> Mapping[Any, Any]:
        """Return what every attack guesses from the model's answers and completions now."""
        if self._rewards is not None:
            try:
                self._rewards[1] = self.run.rollouts.reward(self.pool.texts, self._write())
            except UnusableObservation:
                self._rewards[1] = torch.nan  # RewardGain alone is unknown
        return super().ask_weights(epoch, lists=lists)
