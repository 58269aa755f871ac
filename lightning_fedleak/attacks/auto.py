"""The attacks that ``LeakageMonitor()`` chooses from: one for each surface that can be read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lightning_fedleak.attacks.base import Attack
from lightning_fedleak.attacks.membership.attention import AttentionMembership
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.membership.gradients import GradientMembership
from lightning_fedleak.attacks.membership.subspace import SubspaceMembership
from lightning_fedleak.attacks.memorization import Combined, Extraction
from lightning_fedleak.attacks.public_text import PublicText, TextSource
from lightning_fedleak.attacks.texts.subspace import SubspaceTexts
from lightning_fedleak.attacks.words.aligned import AlignedFlatChat
from lightning_fedleak.attacks.words.direct import BagOfWords, BiasSign
from lightning_fedleak.attacks.words.subspace import SubspaceWords
from lightning_fedleak.threats import DISHONEST_SERVER, HONEST_BUT_CURIOUS, Capability

ASSUMED = HONEST_BUT_CURIOUS | {Capability.KNOWS_TARGET_TEXT}
"""Capabilities that the adversary has by default, besides what it sees."""


def candidates(
    assumed: Collection[Capability],
    public_text: TextSource | None,
    tokenizer: Any,
    *,
    rounds: bool,
) -> list[Attack]:
    """Return every attack that may apply; a fit runs those that do.

    Args:
        assumed: capabilities of the adversary besides what it sees.
        public_text: for calibrations; None means text that the model writes itself.
        tokenizer: for strings.
        rounds: whether weight changes are shared, which some attacks do not read.

    Raises:
        ValueError: ``public_text`` is one string, or strings without a tokenizer.
    """
    parsed = PublicText.parse(public_text, tokenizer)
    text: TextSource = "sampled" if parsed is None else parsed
    attacks: list[Attack] = [
        AlignedFlatChat(text, tokenizer=tokenizer),
        SubspaceWords(parsed),
        BiasSign(),
        BagOfWords(),
    ]
    if Capability.KNOWS_TARGET_TEXT in assumed:
        attacks.append(GradientMembership(text))
    if rounds:
        return attacks
    if Capability.KNOWS_TARGET_TEXT in assumed:
        attacks += [SubspaceMembership(text), Combined(), Extraction()]
    if frozenset(assumed) >= DISHONEST_SERVER:
        attacks += [FCMembership(layer=1), AttentionMembership(1, text)]
    return attacks


def every_attack(*, rounds: bool) -> list[Attack]:
    """Return one attack for each known way to read a run, for messages that name them.

    Args:
        rounds: whether weight changes are shared.
    """
    capabilities = DISHONEST_SERVER | ASSUMED
    return [*candidates(capabilities, "sampled", None, rounds=rounds), SubspaceTexts()]
