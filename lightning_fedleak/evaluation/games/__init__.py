"""The security game Exp^AMI: how well an adversary decides whether a text is in the batch."""

from lightning_fedleak.evaluation.games.config import GameConfig as GameConfig
from lightning_fedleak.evaluation.games.config import GameError as GameError
from lightning_fedleak.evaluation.games.config import GameResult as GameResult
from lightning_fedleak.evaluation.games.crafted_rounds import CraftedRound as CraftedRound
from lightning_fedleak.evaluation.games.crafted_rounds import (
    play_crafted_rounds as play_crafted_rounds,
)
from lightning_fedleak.evaluation.games.crafted_texts import CraftedTexts as CraftedTexts
from lightning_fedleak.evaluation.games.crafted_texts import TextSearch as TextSearch
from lightning_fedleak.evaluation.games.crafted_texts import (
    play_crafted_texts as play_crafted_texts,
)
from lightning_fedleak.evaluation.games.play import play as play
from lightning_fedleak.evaluation.games.pool import SentencePool as SentencePool
