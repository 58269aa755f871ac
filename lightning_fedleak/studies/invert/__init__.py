"""What the activations at a split, or the gradients of a batch, give away of its texts."""

from lightning_fedleak.studies.invert.adversaries import (
    ADVERSARIES,
    READERS,
    make_adversary,
    make_reader,
)
from lightning_fedleak.studies.invert.cells import (
    ActivationCell,
    Noise,
    TooLittleText,
    Utility,
    gaussian_noise,
    noised,
    rows_of_length,
    run_cells,
    utility,
)
from lightning_fedleak.studies.invert.gradients import (
    GradientCell,
    batches_of,
    run_gradient_cells,
    step_of_adamw,
)

__all__ = [
    "ADVERSARIES",
    "READERS",
    "ActivationCell",
    "GradientCell",
    "Noise",
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
