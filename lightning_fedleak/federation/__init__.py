"""Federated rounds: attacks, gates and defences for the updates that clients share.

Updates are observed on the client's side, before they leave, or on the server's side. The
integrations with Flower and NVFlare are in :mod:`.flower` and :mod:`.nvflare`.
"""

from lightning_fedleak.federation.client_dp import ClientDP as ClientDP
from lightning_fedleak.federation.client_dp import ClientReleaseSettings as ClientReleaseSettings
from lightning_fedleak.federation.hand_over import HandOver as HandOver
from lightning_fedleak.federation.hand_over import TrainedOn as TrainedOn
from lightning_fedleak.federation.hand_over import recording as recording
from lightning_fedleak.federation.hand_over import report_batches as report_batches
from lightning_fedleak.federation.hand_over import trained_on as trained_on
from lightning_fedleak.federation.observer import SUM as SUM
from lightning_fedleak.federation.observer import RoundObserver as RoundObserver
from lightning_fedleak.federation.observer import RoundSettings as RoundSettings
from lightning_fedleak.federation.outgoing import Leaving as Leaving
from lightning_fedleak.federation.outgoing import OutgoingUpdates as OutgoingUpdates
from lightning_fedleak.federation.outgoing import RoundGate as RoundGate
from lightning_fedleak.federation.round_look import RoundLook as RoundLook
from lightning_fedleak.federation.updates import Release as Release
from lightning_fedleak.federation.updates import UpdateError as UpdateError
from lightning_fedleak.federation.updates import UpdateSum as UpdateSum
from lightning_fedleak.federation.updates import clipped as clipped
from lightning_fedleak.federation.updates import difference as difference
from lightning_fedleak.federation.updates import joint_norm as joint_norm
from lightning_fedleak.federation.updates import moved as moved
from lightning_fedleak.federation.updates import observe as observe
from lightning_fedleak.federation.updates import parameter_names as parameter_names
from lightning_fedleak.federation.updates import trained_state as trained_state
