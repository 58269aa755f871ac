"""A whole federation on one machine: clients, server, attacks, gates and the account."""

from lightning_fedleak.studies.federation.federation import Federation
from lightning_fedleak.studies.federation.rounds import (
    Closed,
    FamilyLeakage,
    Round,
    Server,
    read_round,
    train_in_process,
)

__all__ = [
    "Closed",
    "FamilyLeakage",
    "Federation",
    "Round",
    "Server",
    "read_round",
    "train_in_process",
]
