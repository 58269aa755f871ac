"""The channel of prompts: which of them reinforcement learning trained on.

A channel plays the attacks of one family in a run, and turns their answers into rates. This one
takes prompts that TRL's GRPO or RLOO trains on and prompts that it does not, the *pool*. Before the
first step, the *base* (the model as it is then) completes each prompt. At a *look*, a measurement
during training, the model is queried with these completions, by one forward for each. How far
their likelihood moved (``PolicyDrift``) scores the prompt: training moves it most on its own
prompts. ``RewardGain`` scores by rewards instead: for it the model completes each prompt again at
every look, and the user's reward functions rate the completions.
"""

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

# The end of messages about rewards that cannot be compared.
_ADVICE = "leave RewardGain out of attacks=; PolicyDrift() needs no rewards"


class PromptChannel(MemorizationChannel):
    """Query the trained weights on prompts that TRL's GRPO or RLOO may have trained on.

    Runs of several processes are refused, because their completions would have to agree. Resumed
    runs are refused too, because no file has the completions of the base.
    """

    # The constants are explained in Channel, WeightChannel and MemorizationChannel.
    reads = PromptAttack
    kinds = ("causal",)  # of models
    finds_entities = False  # no values in texts, such as phone numbers, are searched
    # In forward passes. A query costs as much as training on a prompt: both take all completions.
    cost = 1 / FORWARD_SHARE

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
        rollouts.keep(pool.texts)  # the examples of these prompts, which reward functions get
        # An epoch passes each prompt to this many steps, and each time the pool counts it.
        return replace(pool, length=pool.length * rollouts.repeats)

    def _read(self, batch: Any) -> Any:
        """Return the prompts of a batch of rollouts, as tokens."""
        return self.run.rollouts.read(batch)

    def describe(self) -> str:
        """Return what is compared, in words, for the attack plan."""
        rollouts = self.run.rollouts
        words = f"{super().describe()}. Each with {rollouts.count} completions of the base"
        if self._rewards is not None:
            return f"{words}, and with as many of the present model at each look"
        why = rollouts.why_no_rewards() or "RewardGain() does that"
        return f"{words}. Their rewards are not compared: {why}"

    def query_base(self) -> None:
        """Let the base complete all prompts, before the first step, and query it with them.

        If an attack needs rewards, they are computed twice, and must be equal.

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
                        why = "the same completions have others the second time, or NaN"
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
