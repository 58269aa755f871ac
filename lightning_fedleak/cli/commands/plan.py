"""``fedleak plan``: what an update of a set-up can reveal, and what the attacks on it cost."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lightning_fedleak.attacks.row_space import NotAdditive
from lightning_fedleak.cli.commands.printing import print_table
from lightning_fedleak.cli.finetuning import (
    EMBEDDED_MESSAGES,
    SourceError,
    load_tokenizer,
    read_texts,
)
from lightning_fedleak.cli.studies.capacity import CapacityStudy, NothingRead, Trial
from lightning_fedleak.cli.studies.models import check_context, find_model, with_lora
from lightning_fedleak.engine import WatchSettings
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.trainers import Watch


def run(options: Namespace, console: Console | None = None) -> int:
    """Measure and print.

    Args:
        options: of the command.
        console: where to print; stdout by default.

    Returns:
        0.

    Raises:
        SourceError: model, text or settings cannot be used.
        AnatomyError: the model's parts could not be found.
    """
    console = console or Console(highlight=False)
    size, length = options.batch
    tokenizer = load_tokenizer(options.model)
    bare = find_model(options.model)
    if bare.kind == "classifier":
        raise SourceError(
            "--model is no language model with a head, so that its loss on a text is not known "
            "here; in a run of your own LeakageMonitor(SubspaceWords()) reports its capacity"
        )
    anatomy = with_lora(bare, options.lora_r, options.targets, options.seed)
    check_context(anatomy, length, "--batch")
    texts = read_texts(options.text or EMBEDDED_MESSAGES, options.column, option="--column")
    try:
        study = CapacityStudy.of(anatomy, length, options.seed)
        _show_capacity(console, study, texts, tokenizer, size, options.seconds)
    except (NothingRead, NotAdditive) as reason:
        console.print(f"What SubspaceWords can read is unknown: {reason}\n")
    show_attacks(anatomy)
    return 0


def _show_capacity(
    console: Console,
    study: CapacityStudy,
    texts: Sequence[str],
    tokenizer: Any,
    size: int,
    seconds: float,
) -> None:
    """Print how many tokens the rows of an update reveal, and where exact recovery ends."""
    console.print(
        f"An update shares {study.rows} rows of {study.known_input.width} numbers that reveal "
        "which tokens the first block reads, out of "
        f"{study.anatomy.vocab_size}: {', '.join(m.name for m in study.maps)}."
    )
    capacity = study.planted(seconds)
    shown = f"{capacity.types} were all found" if capacity.types else "how many is unknown"
    missed = "" if capacity.failed is None else f", {capacity.failed} were not"
    console.print(
        f"Distinct tokens that these rows reveal: about {capacity.predicted:.0f} by rule; "
        f"planted at random, {shown}{missed}.\n"
    )
    trials = study.trials(texts, tokenizer, size)
    print_table(console, trial_table(trials, study.length))
    console.print(f"{explain_trials(trials, study.length)}\n")


def show_attacks(anatomy: Anatomy) -> None:
    """Calibrate the attacks that a run on this model would choose, and log what each takes.

    A look is tried on a batch of 8 texts of 64 tokens.
    """
    trained = [p for p in anatomy.model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0)
    with (
        tempfile.TemporaryDirectory() as folder,
        Watch(
            anatomy.model,
            optimizer,
            folder=folder,
            settings=WatchSettings(tensorboard=False, report=False),
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
