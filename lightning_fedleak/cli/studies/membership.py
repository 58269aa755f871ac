"""The adversaries of a membership game, made from the names that users give to ``--attack``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import torch

from lightning_fedleak import attacks
from lightning_fedleak.attacks.membership.fc import RANDOMISED_LADDER, FCMembership
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


def make_adversaries(
    names: Sequence[str],
    layers: Sequence[int],
    public: attacks.PublicText | None,
    *,
    tokens: int,
    batch: int,
    randomised: bool = False,
    seed: int = 0,
) -> list[Adversary]:
    """Return the attacks, the passive ones last. Each other one is called ``name@layer``.

    Args:
        names: out of ``GAME_ATTACKS``.
        layers: blocks whose output the active ones read.
        public: the server's public text, for attacks that calibrate; None where none does.
        tokens: largest number of tokens in a sentence.
        batch: number of sentences in the client's batch.
        randomised: whether the client's tokens are replaced before training. FCMembership then
            gets a longer ladder, ``RANDOMISED_LADDER``.
        seed: seed of the calibration.
    """
    ladder: dict[str, Any] = {"ladder": RANDOMISED_LADDER} if randomised else {}
    adversaries: list[Adversary] = []
    for layer, name in itertools.product(layers, [n for n in names if n not in PASSIVE]):
        full: Literal["full", "token"] = "full" if name.endswith("-full") else "token"
        common: dict[str, Any] = {"tokens": tokens, "name": f"{name}@{layer}"}
        if name.startswith("fc"):
            adversaries.append(FCMembership(layer, full, **common, **ladder))
            continue
        assert public is not None
        if name.startswith("trained"):
            adversaries.append(TrainedMembership(layer, public, full, seed=seed, **common))
        else:
            adversaries.append(
                attacks.AttentionMembership(layer, public, batch=batch, seed=seed, **common)
            )
    for name in (n for n in names if n in PASSIVE):
        assert public is not None
        adversaries.append(PASSIVE[name](public, tokens=tokens, seed=seed, name=name))
    return adversaries


def move_from_start(anatomy: Anatomy, seed: int) -> None:
    """Give a new LoRA's B small values, in place. While B is zero, A has no gradient."""
    parameters = dict(anatomy.model.named_parameters())
    values = attacks.nonzero_starts(anatomy, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)
