"""Flower: a mod that looks at a client's update before it leaves, and strategies for the server.

The only folder that knows Flower. It needs ``pip install lightning-fedleak[flower]``.
"""

from lightning_fedleak.federation.flower.messages import ROUND as ROUND
from lightning_fedleak.federation.flower.messages import WEIGHT as WEIGHT
from lightning_fedleak.federation.flower.mod import FedLeakMod as FedLeakMod
from lightning_fedleak.federation.flower.strategies import Observed as Observed
from lightning_fedleak.federation.flower.strategies import PrivateMean as PrivateMean
