"""Split learning over a real boundary: a client with a model's bottom, a server with its top."""

from lightning_fedleak.split.channel import Channel, PeerError, connect
from lightning_fedleak.split.client import SplitClient
from lightning_fedleak.split.cut import SplitModel, split_model
from lightning_fedleak.split.halves import ModelPart, SplitError
from lightning_fedleak.split.server import SplitServer

__all__ = [
    "Channel",
    "ModelPart",
    "PeerError",
    "SplitClient",
    "SplitError",
    "SplitModel",
    "SplitServer",
    "connect",
    "split_model",
]
