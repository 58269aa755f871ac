"""The families of leak that the monitor knows: words, membership, texts."""

from lightning_fedleak.callbacks.channels.base import Channel
from lightning_fedleak.callbacks.channels.membership import (
    MembershipChannel,
    PassiveMembershipChannel,
)
from lightning_fedleak.callbacks.channels.targets import Games
from lightning_fedleak.callbacks.channels.texts import TextsChannel
from lightning_fedleak.callbacks.channels.words import WordsChannel

__all__ = [
    "Channel",
    "Games",
    "MembershipChannel",
    "PassiveMembershipChannel",
    "TextsChannel",
    "WordsChannel",
]
