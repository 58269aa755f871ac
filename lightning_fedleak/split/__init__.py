"""Split learning over a real boundary: a client with a model's bottom, a server with its top."""

from lightning_fedleak.split.client import SplitClient as SplitClient
from lightning_fedleak.split.connection import Connection as Connection
from lightning_fedleak.split.connection import PeerError as PeerError
from lightning_fedleak.split.connection import connect as connect
from lightning_fedleak.split.cut import SplitModel as SplitModel
from lightning_fedleak.split.cut import split_model as split_model
from lightning_fedleak.split.halves import ModelPart as ModelPart
from lightning_fedleak.split.halves import SplitError as SplitError
from lightning_fedleak.split.server import SplitServer as SplitServer
