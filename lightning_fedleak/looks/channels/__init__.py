"""The families of leak that the monitor knows: words, membership, texts."""

from lightning_fedleak.looks.channels.base import Channel
from lightning_fedleak.looks.channels.membership import (
    MembershipChannel,
    PassiveMembershipChannel,
)
from lightning_fedleak.looks.channels.targets import Games
from lightning_fedleak.looks.channels.texts import TextsChannel
from lightning_fedleak.looks.channels.words import WordsChannel

__all__ = [
    "Channel",
    "Games",
    "MembershipChannel",
    "PassiveMembershipChannel",
    "TextsChannel",
    "WordsChannel",
]
