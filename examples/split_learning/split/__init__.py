"""Split learning over a real boundary: a client with a model's bottom, a server with its top."""

from .client import SplitClient as SplitClient
from .connection import Connection as Connection
from .connection import PeerError as PeerError
from .connection import connect as connect
from .cut import SplitModel as SplitModel
from .cut import split_model as split_model
from .halves import ModelPart as ModelPart
from .halves import SplitError as SplitError
from .server import SplitServer as SplitServer
