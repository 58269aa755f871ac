"""``fedleak plan``: what an update of a set-up can reveal, and what the attacks on it cost."""

from __future__ import annotations

import tempfile
from argparse import Namespace

import torch
from rich.console import Console

from lightning_fedleak.attacks import row_space
from lightning_fedleak.cli.finetuning import SourceError
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
        SourceError: model or settings cannot be used.
        AnatomyError: the model's parts could not be found.
    """
    console = console or Console(highlight=False)
    bare = find_model(options.model)
    if bare.kind == "classifier":
        raise SourceError(
            "--model is no language model with a head, so that its loss on a text is not known "
            "here; in a run of your own LeakageMonitor(SubspaceWords()) reports its capacity"
        )
    anatomy = with_lora(bare, options.lora_r, options.targets, options.seed)
    check_context(anatomy, options.length, "--length")
    console.print(f"{explain_capacity(anatomy, options.length, options.seconds, options.seed)}\n")
    show_attacks(anatomy)
    return 0


def explain_capacity(anatomy: Anatomy, length: int, seconds: float, seed: int) -> str:
    """Return how many distinct tokens the rows of an update reveal, in sentences.

    Args:
        anatomy: of the model, with its adapters.
        length: tokens of a text.
        seconds: after which no other set of tokens is planted.
        seed: of the planted sets.
    """
    known_inputs = row_space.find_known_inputs(anatomy, row_space.find_linear_maps(anatomy))
    for known_input in known_inputs:
        trained = known_input.trainable_maps(anatomy)
        if maps := [m for m in trained if m.factor != "B"]:  # rows that are sums of tokens' inputs
            break
    else:
        return (
            "What SubspaceWords can read is unknown: no trained map of this model reads an input "
            "that a token determines, because the first block's projections are not trained. That "
            "is 'unknown', not 'safe'."
        )
    rows = sum(m.rows for m in maps)
    text = (
        f"An update shares {rows} rows of {known_input.width} numbers that reveal which tokens the "
        f"first block reads, out of {anatomy.vocab_size}: {', '.join(m.name for m in maps)}.\n"
    )
    try:
        dictionary = row_space.build_dictionary(anatomy, known_input)
    except row_space.NotAdditive as reason:
        return f"{text}What SubspaceWords can read is unknown: {reason}"
    factors = row_space.factor_rows(anatomy, [m for m in trained if m.regularised])
    atoms = row_space.Atoms(*dictionary.atoms(length, tuple(factors.values())))
    capacity = row_space.measure_capacity(atoms, rows, seconds=seconds, seed=seed)
    outcome = f"{capacity.types} were all found" if capacity.types else "how many is unknown"
    missed = "" if capacity.failed is None else f", {capacity.failed} were not"
    return (
        f"{text}Distinct tokens that these rows reveal: about {capacity.predicted:.0f} by rule; "
        f"planted at random, {outcome}{missed}."
    )


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
