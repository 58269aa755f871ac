"""The families of leak that the monitor knows: words, membership, texts, memorization, canaries."""

from lightning_fedleak.looks.channels.base import Channel as Channel
from lightning_fedleak.looks.channels.canaries import CanaryChannel as CanaryChannel
from lightning_fedleak.looks.channels.membership import MembershipChannel as MembershipChannel
from lightning_fedleak.looks.channels.memorization import MemorizationChannel as MemorizationChannel
from lightning_fedleak.looks.channels.passive import (
    PassiveMembershipChannel as PassiveMembershipChannel,
)
from lightning_fedleak.looks.channels.texts import TextsChannel as TextsChannel
from lightning_fedleak.looks.channels.words import WordsChannel as WordsChannel
from lightning_fedleak.looks.options import Games as Games
