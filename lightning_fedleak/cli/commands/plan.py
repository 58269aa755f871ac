"""``fedleak plan``: what an update of a set-up can reveal, and what the attacks on it cost."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from lightning_fedleak.cli.commands.options import PlanOptions
from lightning_fedleak.cli.commands.printing import print_table
from lightning_fedleak.cli.finetuning import (
    EMBEDDED_MESSAGES,
    SourceError,
    load_tokenizer,
    read_texts,
)
from lightning_fedleak.cli.studies.capacity import CapacityStudy, Trial
from lightning_fedleak.cli.studies.models import find_model, with_lora
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.trainers import Watch


@dataclass(frozen=True)
class PlanCommand(PlanOptions):
    """The command ``fedleak plan``; its settings are its options."""

    def run(self, console: Console | None = None) -> int:
        """Measure and print.

        Args:
            console: where to print; stdout by default.

        Returns:
            0.

        Raises:
            SourceError: model, text or settings cannot be used.
            AnatomyError: the model's parts could not be found.
        """
        console = console or Console(highlight=False)
        size, length = map(int, self.batch.split("x"))
        tokenizer = load_tokenizer(self.model)
        without_adapters = find_model(self.model, torch.float32)
        if without_adapters.kind == "classifier":
            raise SourceError(
                "--model is no language model with a head, so that its loss on a text is not known "
                "here; in a run of your own LeakageMonitor(SubspaceWords()) reports its capacity"
            )
        anatomy = with_lora(without_adapters, self.lora_r, self.targets, self.seed)
        mask = getattr(tokenizer, "mask_token_id", None)
        study = CapacityStudy(anatomy, length, mask, self.seed)
        texts = read_texts(self.text or EMBEDDED_MESSAGES, self.column, option="--column")
        console.print(
            f"An update shares {study.rows} rows of {study.known_input.width} numbers that reveal "
            "which tokens the first block reads, out of "
            f"{anatomy.vocab_size}: {', '.join(m.name for m in study.maps)}."
        )
        capacity = study.planted(self.seconds)
        shown = f"{capacity.types} were all found" if capacity.types else "how many is unknown"
        missed = "" if capacity.failed is None else f", {capacity.failed} were not"
        console.print(
            f"Distinct tokens that these rows reveal: about {capacity.predicted:.0f} by rule; "
            f"planted at random, {shown}{missed}.\n"
        )
        trials = study.trials(texts, tokenizer, size)
        print_table(console, trial_table(trials, length))
        console.print(f"{explain_trials(trials, length)}\n")
        show_attacks(anatomy)
        return 0


def show_attacks(anatomy: Anatomy) -> None:
    """Calibrate the attacks that a run on this model would choose, and log what each takes.

    A look is tried on a batch of 8 texts of 64 tokens.
    """
    trained = [p for p in anatomy.model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0)
    with (
        tempfile.TemporaryDirectory() as folder,
        Watch(
            anatomy.model, optimizer, folder=folder, tensorboard=False, report=False, cache=False
        ),
    ):
        pass  # the plan of a run is logged before its first step


def trial_table(trials: Sequence[Trial], length: int) -> Table:
    """Return a table with a row for each trial.

    Args:
        trials: by the size of their batches.
        length: tokens of a text.
    """
    rows = Table("texts x tokens", "distinct tokens", "read (F1)", "certified", "seconds")
    for trial in trials:
        rows.add_row(
            f"{trial.texts} x {length}",
            str(trial.types),
            "unknown" if trial.f1 is None else f"{trial.f1:.3f}",
            "yes" if trial.certified else "no",
            f"{trial.seconds:.1f}",
        )
    return rows


def explain_trials(trials: Sequence[Trial], length: int) -> str:
    """Return what the table means, in sentences; arguments as :func:`trial_table` takes them."""
    first_missed = next((trial for trial in trials if not trial.exact), None)
    if first_missed is None:
        result = (
            f"Every token of every batch was read exactly, up to {trials[-1].texts} texts of "
            f"{length} tokens; where that ends was not reached."
        )
    else:
        plural = "s" * (first_missed.texts > 1)
        result = (
            f"Exact recovery ends before {first_missed.texts} text{plural} of {length} tokens "
            f"({first_missed.types} distinct)."
        )
    return (
        f"{result}\nMeasured on these texts, with one attack on one step's gradient: no larger "
        "batch is shown to be safe by it. Beyond the end a part is still read (F1), and other "
        "attacks may read more."
    )
