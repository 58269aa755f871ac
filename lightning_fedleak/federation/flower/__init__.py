"""The integration with Flower: a mod for clients, and strategies for the server.

:class:`FedLeakMod` attacks, gates and defends the update of a client before it leaves.
:class:`Observed` attacks updates on the server, and :class:`PrivateMean` adds the noise of
client-level differential privacy there. No other module imports Flower. It needs
``pip install lightning-fedleak[flower]``.
"""

from lightning_fedleak.federation.flower.mod import ROUND as ROUND
from lightning_fedleak.federation.flower.mod import WEIGHT as WEIGHT
from lightning_fedleak.federation.flower.mod import FedLeakMod as FedLeakMod
from lightning_fedleak.federation.flower.strategies import Observed as Observed
from lightning_fedleak.federation.flower.strategies import PrivateMean as PrivateMean
