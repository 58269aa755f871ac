"""What the activations at a split give away, against noise and length, beside the task."""

from lightning_fedleak.commands.invert.adversaries import ADVERSARIES, make_adversary
from lightning_fedleak.commands.invert.cells import Cell, run_cells
from lightning_fedleak.commands.invert.noise import gaussian_noise, noised
from lightning_fedleak.commands.invert.task import Utility, utility
from lightning_fedleak.commands.invert.texts import TooLittleText, rows_of_length

__all__ = [
    "ADVERSARIES",
    "Cell",
    "TooLittleText",
    "Utility",
    "gaussian_noise",
    "make_adversary",
    "noised",
    "rows_of_length",
    "run_cells",
    "utility",
]
