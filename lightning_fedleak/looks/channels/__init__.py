"""The families of leak that the monitor knows: words, membership, texts, memorization, canaries."""

from lightning_fedleak.looks.channels.base import Channel
from lightning_fedleak.looks.channels.canaries import CanaryChannel
from lightning_fedleak.looks.channels.membership import MembershipChannel
from lightning_fedleak.looks.channels.memorization import MemorizationChannel
from lightning_fedleak.looks.channels.passive import PassiveMembershipChannel
from lightning_fedleak.looks.channels.texts import TextsChannel
from lightning_fedleak.looks.channels.words import WordsChannel
from lightning_fedleak.looks.options import Games

__all__ = [
    "CanaryChannel",
    "Channel",
    "Games",
    "MembershipChannel",
    "MemorizationChannel",
    "PassiveMembershipChannel",
    "TextsChannel",
    "WordsChannel",
]
