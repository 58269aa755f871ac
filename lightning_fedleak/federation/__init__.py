"""Federated rounds: what an update gives away, seen by the client or by the server."""

from lightning_fedleak.federation.client_dp import ClientDP, Release, clipped
from lightning_fedleak.federation.client_settings import (
    ClientReleaseSettings,
    ClientSampling,
    Trusted,
)
from lightning_fedleak.federation.gate import Leaving, OutgoingUpdates, RoundEvent, RoundGate
from lightning_fedleak.federation.observer import SUM, RoundObserver
from lightning_fedleak.federation.round_look import RoundLook
from lightning_fedleak.federation.round_run import RoundSettings
from lightning_fedleak.federation.updates import (
    TrainedOn,
    UpdateError,
    difference,
    joint_norm,
    moved,
    observe,
    parameter_names,
    recording,
    trained_on,
    trained_state,
)

__all__ = [
    "SUM",
    "ClientDP",
    "ClientReleaseSettings",
    "ClientSampling",
    "Leaving",
    "OutgoingUpdates",
    "Release",
    "RoundEvent",
    "RoundGate",
    "RoundLook",
    "RoundObserver",
    "RoundSettings",
    "TrainedOn",
    "Trusted",
    "UpdateError",
    "clipped",
    "difference",
    "joint_norm",
    "moved",
    "observe",
    "parameter_names",
    "recording",
    "trained_on",
    "trained_state",
]
