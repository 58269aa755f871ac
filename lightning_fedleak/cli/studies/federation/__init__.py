"""A whole federation on one machine: clients, server, attacks, gates and the account."""

from lightning_fedleak.cli.studies.federation.federation import Federation as Federation
from lightning_fedleak.cli.studies.federation.rounds import Round as Round
from lightning_fedleak.cli.studies.federation.rounds import Values as Values
from lightning_fedleak.cli.studies.federation.rounds import train_in_process as train_in_process
