"""The channels: one class for each family of leak, such as words, membership and memorization."""

from lightning_fedleak.engine.channels.base import Channel as Channel
from lightning_fedleak.engine.channels.membership import MembershipChannel as MembershipChannel
from lightning_fedleak.engine.channels.released.canaries import CanaryChannel as CanaryChannel
from lightning_fedleak.engine.channels.released.canaries import EntityChannel as EntityChannel
from lightning_fedleak.engine.channels.released.memorization import (
    MemorizationChannel as MemorizationChannel,
)
from lightning_fedleak.engine.channels.released.prompts import PromptChannel as PromptChannel
from lightning_fedleak.engine.channels.steps import StepChannel as StepChannel
from lightning_fedleak.engine.channels.texts import TextsChannel as TextsChannel
from lightning_fedleak.engine.channels.words import WordsChannel as WordsChannel
