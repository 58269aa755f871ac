"""The security game Exp^AMI: how well an adversary decides whether a text is in the batch."""

from lightning_fedleak.evaluation.games.play import play as play
from lightning_fedleak.evaluation.games.pool import GameConfig as GameConfig
from lightning_fedleak.evaluation.games.pool import GameResult as GameResult
from lightning_fedleak.evaluation.games.pool import SentencePool as SentencePool
