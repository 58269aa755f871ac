"""What the activations at a split, or the gradients of a batch, give away of its texts."""

from lightning_fedleak.commands.invert.adversaries import (
    ADVERSARIES,
    READERS,
    make_adversary,
    make_reader,
)
from lightning_fedleak.commands.invert.cells import Cell, run_cells
from lightning_fedleak.commands.invert.gradients import (
    GradientCell,
    batches_of,
    run_gradient_cells,
    step_of_adamw,
)
from lightning_fedleak.commands.invert.noise import gaussian_noise, noised
from lightning_fedleak.commands.invert.task import Utility, utility
from lightning_fedleak.commands.invert.texts import TooLittleText, rows_of_length

__all__ = [
    "ADVERSARIES",
    "READERS",
    "Cell",
    "GradientCell",
    "TooLittleText",
    "Utility",
    "batches_of",
    "gaussian_noise",
    "make_adversary",
    "make_reader",
    "noised",
    "rows_of_length",
    "run_cells",
    "run_gradient_cells",
    "step_of_adamw",
    "utility",
]
