"""What the activations at a split, or the gradients of a batch, leak of its texts."""

from lightning_fedleak.cli.studies.invert.cells import ActivationCell as ActivationCell
from lightning_fedleak.cli.studies.invert.cells import Noise as Noise
from lightning_fedleak.cli.studies.invert.cells import make_adversary as make_adversary
from lightning_fedleak.cli.studies.invert.cells import rows_of_length as rows_of_length
from lightning_fedleak.cli.studies.invert.cells import run_cells as run_cells
from lightning_fedleak.cli.studies.invert.gradients import GradientCell as GradientCell
from lightning_fedleak.cli.studies.invert.gradients import batches_of as batches_of
from lightning_fedleak.cli.studies.invert.gradients import make_reader as make_reader
from lightning_fedleak.cli.studies.invert.gradients import run_gradient_cells as run_gradient_cells
from lightning_fedleak.cli.studies.invert.gradients import step_of_adamw as step_of_adamw
