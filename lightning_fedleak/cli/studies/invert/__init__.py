"""What the activations at a split leak of the texts."""

from lightning_fedleak.cli.studies.invert.cells import Cell as Cell
from lightning_fedleak.cli.studies.invert.cells import Noise as Noise
from lightning_fedleak.cli.studies.invert.cells import make_adversary as make_adversary
from lightning_fedleak.cli.studies.invert.cells import rows_of_length as rows_of_length
from lightning_fedleak.cli.studies.invert.cells import run_cells as run_cells
