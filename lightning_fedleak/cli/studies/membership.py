"""The adversaries of a membership game, made from the names that users give to ``--attack``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_fedleak import attacks
from lightning_fedleak.attacks.membership.fc import RANDOMISED_LADDER, FCMembership
from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.evaluation.games.play import Adversary
from lightning_fedleak.labs.trained_membership import TrainedMembership
from lightning_fedleak.model.anatomy import Anatomy

PLANTED = " ".join(["This is the sentence that is looked for."] * 11)
"""The text that the authors' protocol plants: one short sentence many times, as in their code."""

PASSIVE: dict[str, type[attacks.GradientMembership] | type[attacks.SubspaceMembership]] = {
    "gradient": attacks.GradientMembership,
    "subspace": attacks.SubspaceMembership,
}
"""The attacks that add no layers to the model, by name."""


@dataclass(frozen=True)
class MembershipAdversaries:
    """The settings that all adversaries of one game share.

    Attributes:
        tokens: largest number of tokens in a sentence.
        batch: number of sentences in the client's batch.
        public: the server's public text, for attacks that calibrate; None if it has none.
        randomised: whether the client's tokens are replaced before training. FCMembership then
            gets a longer ladder, ``RANDOMISED_LADDER``.
        seed: seed of the calibration.
    """

    tokens: int
    batch: int
    public: attacks.PublicText | None = None
    randomised: bool = False
    seed: int = 0

    def make(self, names: Sequence[str], layers: Sequence[int]) -> list[Adversary]:
        """Return the attacks, the passive ones last. Each other one is called ``name@layer``.

        Raises:
            SourceError: an attack needs public text, and there is none.
        """
        active = [self._active(name, n) for n in layers for name in names if name not in PASSIVE]
        return [*active, *(self._passive(name) for name in names if name in PASSIVE)]

    def _active(self, name: str, layer: int) -> Adversary:
        granularity: Literal["full", "token"] = "full" if name.endswith("-full") else "token"
        label = f"{name}@{layer}"
        tokens, seed = self.tokens, self.seed
        if name.startswith("fc"):
            ladder: dict[str, Any] = {"ladder": RANDOMISED_LADDER} if self.randomised else {}
            return FCMembership(layer, granularity, tokens=tokens, name=label, **ladder)
        public = self._public_text(name)
        if name.startswith("trained"):
            return TrainedMembership(
                layer, public, granularity, tokens=tokens, seed=seed, name=label
            )
        return attacks.AttentionMembership(
            layer, public, tokens=tokens, batch=self.batch, seed=seed, name=label
        )

    def _passive(self, name: str) -> Adversary:
        public = self._public_text(name)
        return PASSIVE[name](public, tokens=self.tokens, seed=self.seed, name=name)

    def _public_text(self, name: str) -> attacks.PublicText:
        if self.public is None:
            raise SourceError(
                f"--attack {name} calibrates on text that the server owns: give --public"
            )
        return self.public


def move_from_start(anatomy: Anatomy, seed: int) -> None:
    """Give a new LoRA's B small values, in place. While B is zero, A has no gradient."""
    parameters = dict(anatomy.model.named_parameters())
    values = attacks.nonzero_starts(anatomy, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)
