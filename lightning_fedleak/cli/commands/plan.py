"""``fedleak plan``: what an update of a set-up can reveal, and what the attacks on it cost."""

from __future__ import annotations

import logging
import tempfile
from argparse import Namespace
from contextlib import ExitStack
from typing import ClassVar

import torch
from lightning_utilities.core import rank_zero
from rich.console import Console
from rich.table import Table

from lightning_fedleak.attacks import row_space
from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.cli.printing import print_table
from lightning_fedleak.cli.studies import models
from lightning_fedleak.engine import WatchSettings
from lightning_fedleak.model.anatomy import EMBEDDING_WEIGHT, Anatomy
from lightning_fedleak.model.model_runs import LOGITS_AT_ONCE
from lightning_fedleak.progress import operations_per_second
from lightning_fedleak.trainers import Watch
from lightning_fedleak.trainers.loop import LoopRun

RANKS = 8
"""Processes over which a sharded model is planned."""
DICTIONARY = 4
"""Products of the vocabulary with the width squared that a calibration takes.

Fitted to 32,000 tokens of width 1,024 and 2,048, and 128,000 of 512, on one core (November 2026).
"""
SECONDS = 30.0
"""After which no other set of tokens is planted; not tuned."""
LINK = 1e10
"""Bytes a second that a gathering brings to a process: an assumption, below PCIe 4's 2.5e10."""


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
    rank, option = options.lora_r, f"--batch {options.batch[0]} x"
    if options.model is not None and models.has_config_without_weights(options.model):
        shapes = models.build_meta_and_probe(options.model, rank, options.targets)
        models.check_context(shapes[0], options.batch[1], option)
        print_costs(console, *shapes, options.batch)
        return 0
    bare = models.find_model(options.model)
    if bare.kind == "classifier":
        raise SourceError(
            "--model is no language model with a head, so that its loss on a text is not known "
            "here; in a run of your own LeakageMonitor(SubspaceWords()) reports its capacity"
        )
    anatomy = models.with_lora(bare, rank, options.targets, options.seed)
    models.check_context(anatomy, options.batch[1], option)
    console.print(f"{explain_capacity(anatomy, options.batch[1], options.seed)}\n")
    print_costs(console, anatomy, anatomy, options.batch)
    show_attacks(anatomy)
    return 0


def print_costs(console: Console, anatomy: Anatomy, runs: Anatomy, batch: tuple[int, int]) -> None:
    """Print what ``SubspaceWords`` and its control take of time and memory, by arithmetic.

    Sharded processes are one client, whose gradient holds the tokens of all. All experts of a
    mixture are counted as run on each token.

    Args:
        console: where to print.
        anatomy: of the model, which may be without numbers.
        runs: the same, or a block of it that can be run.
        batch: texts, and tokens of each.
    """
    parameters = list(anatomy.model.parameters())
    weights = sum(p.nbytes for p in parameters)
    trained = sum(p.nbytes for p in parameters if p.requires_grad)
    table_of_words = anatomy.parameter(EMBEDDING_WEIGHT)
    known_inputs = row_space.find_known_inputs(runs, row_space.find_linear_maps(runs))
    readers = [m for each in known_inputs for m in each.trained_readers(runs)]
    if table_of_words is None or not readers:
        console.print("No trained map reads what a token determines: the costs are unknown.\n")
        return
    width, tokens = known_inputs[0].width, table_of_words.shape[0]
    words, n_tokens = tokens * width * table_of_words.itemsize, batch[0] * batch[1]
    rows = min(width, sum(anatomy.root.get_parameter(m.name).shape[1 - m.axis] for m in readers))
    capacity = row_space.predict_capacity(width, tokens, rows)
    # A dictionary; whitening in float64 and float32; and while it is made four matrices more.
    basis, making, products = words + 12 * width**2, 20 * width**2, 8 * tokens * rows
    # Three matrices of logits in float32.
    control = 12 * min(n_tokens * anatomy.vocab_size, LOGITS_AT_ONCE)
    numbers = sum(p.numel() for p in parameters)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rate = operations_per_second(device)
    processes = (1, RANKS, RANKS)
    passes = (4 + 2 * (trained == weights)) * numbers * n_tokens
    types = [min(n * n_tokens, capacity) for n in processes]
    looks = [row_space.pursuit_seconds(device, width, tokens, rows, n) for n in types]
    controls = [passes / rate + look for look in looks]
    printed = Table("per process", "one device", f"FSDP2 over {RANKS}", f"ZeRO-3 over {RANKS}")
    training = [(weights + 3 * trained) / n / 1e9 for n in processes]
    printed.add_row("weights, gradients, AdamW", *(f"{size:.3g} GB" for size in training))
    by_rows = 2 * words  # a ring brings each row of a sum twice
    by_layers = (2 + (trained == weights)) * weights  # as a training step does
    for name, memory, sent, seconds in (
        ("calibration adds", basis + making, by_rows, [DICTIONARY * tokens * width**2 / rate] * 3),
        ("a look adds", basis + products, by_rows, looks),
        ("its control adds at least", basis + max(control, products), by_layers, controls),
    ):
        cells = [
            f"{memory / 1e9:.3g} GB, {float(f'{here + sent_bytes / LINK:.2g}'):g} s"
            for here, sent_bytes in zip(seconds, (0, sent, sent), strict=True)
        ]
        printed.add_row(name, *cells)
    print_table(console, printed)
    console.print(
        f"Estimated, for SubspaceWords on {numbers / 1e9:.3g} billion parameters, {batch[0]} x "
        f"{batch[1]} tokens a process, without activations, at {rate / 1e9:.3g} GFLOP/s measured "
        f"on this machine's {device.type}, and {LINK / 1e9:.0f} GB/s of gathering. A control is "
        "counted as one backward pass and one attack; often it is two, and more on parts. Attacks "
        "that run the model, which this one does not, gather all of it.\n",
        soft_wrap=True,
    )


def explain_capacity(anatomy: Anatomy, length: int, seed: int) -> str:
    """Return how many distinct tokens the rows of an update reveal, in sentences.

    Args:
        anatomy: of the model, with its adapters.
        length: tokens of a text.
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
    factors = row_space.factor_rows(anatomy, trained)
    atoms = row_space.Atoms(*dictionary.atoms(length, tuple(factors.values())))
    types, failed, predicted = row_space.measure_capacity(atoms, rows, seconds=SECONDS, seed=seed)
    outcome = f"{types} were all found" if types else "how many is unknown"
    missed = "" if failed is None else f", {failed} were not"
    return (
        f"{text}Distinct tokens that these rows reveal: about {predicted:.0f} by rule; "
        f"planted at random, {outcome}{missed}."
    )


class _PlannedRun(LoopRun):
    watcher: ClassVar[str] = "LeakageMonitor"


def _is_line_up(record: logging.LogRecord) -> bool:
    return "plays these attacks" in record.getMessage()  # other lines are of steps and data


def show_attacks(anatomy: Anatomy) -> None:
    """Calibrate the attacks that a run on this model would choose, and log what each takes."""
    optimizer = torch.optim.SGD([p for p in anatomy.model.parameters() if p.requires_grad], lr=0.0)
    settings = WatchSettings(tensorboard=False, report=False)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        watch = Watch(anatomy.model, optimizer, folder=folder, settings=settings)
        watch.run = _PlannedRun  # type: ignore[misc]
        rank_zero.log.addFilter(_is_line_up)
        stack.callback(rank_zero.log.removeFilter, _is_line_up)
        stack.enter_context(watch)  # the plan of a run is logged before its first step
