"""Attacks: each takes what an adversary observes of a step and returns a guess.

The names below are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fedleak.extras import lazy

if TYPE_CHECKING:
    from lightning_fedleak.attacks.base import DISHONEST_SERVER as DISHONEST_SERVER
    from lightning_fedleak.attacks.base import HONEST_BUT_CURIOUS as HONEST_BUT_CURIOUS
    from lightning_fedleak.attacks.base import Attack as Attack
    from lightning_fedleak.attacks.base import Capability as Capability
    from lightning_fedleak.attacks.base import Guess as Guess
    from lightning_fedleak.attacks.base import Query as Query
    from lightning_fedleak.attacks.base import RunFacts as RunFacts
    from lightning_fedleak.attacks.base import Surfaces as Surfaces
    from lightning_fedleak.attacks.base import ThreatModel as ThreatModel
    from lightning_fedleak.attacks.base import UnusableObservation as UnusableObservation
    from lightning_fedleak.attacks.base import WordGuess as WordGuess
    from lightning_fedleak.attacks.base import require as require
    from lightning_fedleak.attacks.membership.attention import (
        AttentionMembership as AttentionMembership,
    )
    from lightning_fedleak.attacks.membership.attention_layers import (
        AttentionSettings as AttentionSettings,
    )
    from lightning_fedleak.attacks.membership.base import CRAFTED as CRAFTED
    from lightning_fedleak.attacks.membership.base import MembershipAttack as MembershipAttack
    from lightning_fedleak.attacks.membership.base import MembershipGuess as MembershipGuess
    from lightning_fedleak.attacks.membership.base import PassiveMembership as PassiveMembership
    from lightning_fedleak.attacks.membership.base import direction_of as direction_of
    from lightning_fedleak.attacks.membership.base import upstream_of as upstream_of
    from lightning_fedleak.attacks.membership.fc import FCMembership as FCMembership
    from lightning_fedleak.attacks.membership.fc import WordMembership as WordMembership
    from lightning_fedleak.attacks.membership.gradients import (
        GradientMembership as GradientMembership,
    )
    from lightning_fedleak.attacks.membership.subspace import (
        SubspaceMembership as SubspaceMembership,
    )
    from lightning_fedleak.attacks.memorization import Combined as Combined
    from lightning_fedleak.attacks.memorization import Extraction as Extraction
    from lightning_fedleak.attacks.public_text import MissingText as MissingText
    from lightning_fedleak.attacks.public_text import PublicText as PublicText
    from lightning_fedleak.attacks.public_text import TextSource as TextSource
    from lightning_fedleak.attacks.public_text import gradient_of as gradient_of
    from lightning_fedleak.attacks.texts.base import InversionAttack as InversionAttack
    from lightning_fedleak.attacks.texts.base import TextAttack as TextAttack
    from lightning_fedleak.attacks.texts.base import TextGuess as TextGuess
    from lightning_fedleak.attacks.texts.embedding_descent import DescentSettings as DescentSettings
    from lightning_fedleak.attacks.texts.embedding_descent import (
        EmbeddingDescent as EmbeddingDescent,
    )
    from lightning_fedleak.attacks.texts.prefix.inversion import PrefixInversion as PrefixInversion
    from lightning_fedleak.attacks.texts.subspace import SubspaceTexts as SubspaceTexts
    from lightning_fedleak.attacks.words.aligned import AlignedFlatChat as AlignedFlatChat
    from lightning_fedleak.attacks.words.direct import BagOfWords as BagOfWords
    from lightning_fedleak.attacks.words.direct import BiasSign as BiasSign
    from lightning_fedleak.attacks.words.flatchat import FlatChat as FlatChat
    from lightning_fedleak.attacks.words.subspace import SubspaceWords as SubspaceWords

__getattr__ = lazy(__name__)
