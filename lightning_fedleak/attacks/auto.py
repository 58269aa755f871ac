"""The attacks that ``LeakageMonitor()`` chooses from: one for each surface that can be read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lightning_fedleak.attacks.base import Attack
from lightning_fedleak.attacks.membership.attention import AttentionMembership
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.membership.gradients import GradientMembership
from lightning_fedleak.attacks.membership.subspace import SubspaceMembership
from lightning_fedleak.attacks.public_text import Given, PublicText
from lightning_fedleak.attacks.texts.subspace import SubspaceTexts
from lightning_fedleak.attacks.words.aligned import AlignedFlatChat
from lightning_fedleak.attacks.words.direct import BagOfWords, BiasSign
from lightning_fedleak.attacks.words.subspace import SubspaceWords
from lightning_fedleak.threats import DISHONEST_SERVER, HONEST_BUT_CURIOUS, Capability

ASSUMED = HONEST_BUT_CURIOUS | {Capability.KNOWS_TARGET_TEXT}
"""What their adversary has by default, besides what it sees."""


def candidates(
    assumed: Collection[Capability],
    public_text: Given | None,
    tokenizer: Any,
    *,
    rounds: bool,
) -> list[Attack]:
    """Every attack that may apply, of which a fit plays those that do.

    Args:
        assumed: what the adversary has besides what it sees.
        public_text: for all that calibrate; None: text that the model writes itself.
        tokenizer: for strings.
        rounds: weight changes are shared, which some attacks do not read.

    Raises:
        ValueError: a text that is none.
    """
    given = PublicText.parse(public_text, tokenizer)
    text: Given = "sampled" if given is None else given
    attacks: list[Attack] = [
        AlignedFlatChat(text, tokenizer=tokenizer),
        SubspaceWords(given),
        BiasSign(),
        BagOfWords(),
    ]
    if Capability.KNOWS_TARGET_TEXT in assumed:
        attacks.append(GradientMembership(text))
    if rounds:
        return attacks
    if Capability.KNOWS_TARGET_TEXT in assumed:
        attacks.append(SubspaceMembership(text))
    if frozenset(assumed) >= DISHONEST_SERVER:
        attacks += [FCMembership(layer=1), AttentionMembership(1, text)]
    return attacks


def every_attack(*, rounds: bool) -> list[Attack]:
    """One attack for each way to read a run that is known here: to be named, not to be played.

    Args:
        rounds: weight changes are shared.
    """
    anybody = DISHONEST_SERVER | ASSUMED
    return [*candidates(anybody, "sampled", None, rounds=rounds), SubspaceTexts()]
