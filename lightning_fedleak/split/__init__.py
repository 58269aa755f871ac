"""Split learning over a real boundary: a client with a model's bottom, a server with its top."""

from lightning_fedleak.split.client import SplitClient
from lightning_fedleak.split.connection import Connection, PeerError, connect
from lightning_fedleak.split.cut import SplitModel, split_model
from lightning_fedleak.split.halves import ModelPart, SplitError
from lightning_fedleak.split.server import SplitServer
from lightning_fedleak.validate import warn_of_old_spelling

__all__ = [
    "Connection",
    "ModelPart",
    "PeerError",
    "SplitClient",
    "SplitError",
    "SplitModel",
    "SplitServer",
    "connect",
    "split_model",
]


def __getattr__(name: str) -> object:
    if name == "Channel":
        warn_of_old_spelling(
            "lightning_fedleak.split.Channel", "lightning_fedleak.split.Connection"
        )
        return Connection
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
