"""The security game Exp^AMI: how well an adversary decides whether a text is in the batch."""

from lightning_fedleak.games.config import GameConfig, GameError, GameResult
from lightning_fedleak.games.play import play
from lightning_fedleak.games.pool import SentencePool

__all__ = ["GameConfig", "GameError", "GameResult", "SentencePool", "play"]
