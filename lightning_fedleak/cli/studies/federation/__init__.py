"""A whole federation on one machine: clients, server, attacks, gates and the account."""

from lightning_fedleak.cli.studies.federation.federation import Federation as Federation
from lightning_fedleak.cli.studies.federation.rounds import Closed as Closed
from lightning_fedleak.cli.studies.federation.rounds import FamilyLeakage as FamilyLeakage
from lightning_fedleak.cli.studies.federation.rounds import Round as Round
from lightning_fedleak.cli.studies.federation.rounds import Server as Server
from lightning_fedleak.cli.studies.federation.rounds import read_leakage as read_leakage
from lightning_fedleak.cli.studies.federation.rounds import read_withheld as read_withheld
from lightning_fedleak.cli.studies.federation.rounds import train_in_process as train_in_process
