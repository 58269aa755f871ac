"""``fedleak plan``: what an update can reveal, and what the attacks on it cost.

With weights, :func:`run` measures how many tokens an update reveals, estimates the costs, and
calibrates the attacks that a run would choose. If a folder holds only a configuration, it builds
small models with random weights, measures the attacks on them, and extrapolates to the whole model.

A *look* is one measurement of a training step by the attacks. Its *control* repeats the step and
one on known words, and checks that the attacks find those. ``SubspaceWords`` is the attack that
finds a batch's tokens from the rows of an update that depend on single tokens.
"""

import logging
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from lightning_utilities.core import rank_zero
from rich.console import Console
from rich.table import Table
from torch.optim import Optimizer

from lightning_fedleak.attacks import row_space
from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.cli.printing import print_table
from lightning_fedleak.cli.studies import models
from lightning_fedleak.engine import WatchSettings
from lightning_fedleak.engine.fit import Fit
from lightning_fedleak.model.anatomy import EMBEDDING_WEIGHT, Anatomy
from lightning_fedleak.model.model_runs import LOGITS_AT_ONCE
from lightning_fedleak.progress import measure_seconds
from lightning_fedleak.trainers import Watch

RANKS = 8
"""Number of processes of the sharded trainings in the table."""
SETS = 4
"""Random sets of tokens that are tested at most; not tuned, more take longer."""
MAX_MEASURED = 250_000_000
"""Parameters of the largest block that is run; not tuned. More: ``plan`` takes minutes."""
PROBE_TOKENS, PROBE_BLOCKS = 1 << 14, 3
"""Largest vocabulary and number of blocks that are run. More: slower, with better estimates."""


def run(options: Namespace, console: Console | None = None) -> int:
    """Measure and print the capacity of an update and the costs of attacks.

    Args:
        options: The options of the command.
        console: The console to print on; stdout by default.

    Returns:
        0.

    Raises:
        SourceError: The model or the settings cannot be used.
        AnatomyError: The model's parts could not be found.
    """
    console = console or Console(highlight=False)
    # The last argument of check_context names the option in its message.
    rank, option = options.lora_r, f"--batch {options.batch[0]} x"
    if options.model is not None and models.has_config_without_weights(options.model):
        build = partial(models.build_model, options.model, rank, options.targets)
        with torch.device("meta"):
            shapes = build()
        models.check_context(shapes, options.batch[1], option)
        # A model of the smallest sizes shows which linear maps read known inputs.
        print_memory(console, shapes, build(blocks=1, tokens=64, mlp=64), options.batch)
        print_prices(console, shapes, build, options.batch)
        return 0
    bare = models.find_model(options.model)
    if bare.kind == "classifier":
        raise SourceError(
            "--model is no language model with a head, so that its loss on a text is unknown "
            "here; in your own training LeakageMonitor(SubspaceWords()) reports its capacity"
        )
    anatomy = models.with_lora(bare, rank, options.targets, options.seed)
    models.check_context(anatomy, options.batch[1], option)
    console.print(f"{explain_capacity(anatomy, options.batch[1], options.seed)}\n")
    print_memory(console, anatomy, anatomy, options.batch)
    show_attacks(anatomy)
    return 0


def print_memory(console: Console, anatomy: Anatomy, runs: Anatomy, batch: tuple[int, int]) -> None:
    """Print estimates of the memory of ``SubspaceWords`` and its control.

    Args:
        console: The console to print on.
        anatomy: The anatomy of the model, which may be on the meta device.
        runs: The same model, or a small model of the same architecture that can be run.
        batch: The number of texts, and of tokens of each.
    """
    weights = sum(p.nbytes for p in anatomy.model.parameters())
    trained = sum(p.nbytes for p in anatomy.model.parameters() if p.requires_grad)
    embeddings = anatomy.parameter(EMBEDDING_WEIGHT)
    known_inputs = row_space.find_known_inputs(runs, row_space.find_linear_maps(runs))
    trained_maps = (m for known_input in known_inputs for m in known_input.trainable_maps(runs))
    readers = [m for m in trained_maps if m.factor != "B"]
    if embeddings is None or not readers:
        console.print("No trained linear map reads single tokens: the memory is unknown.\n")
        return
    width, tokens = known_inputs[0].width, embeddings.shape[0]
    words, n_tokens = tokens * width * embeddings.itemsize, batch[0] * batch[1]
    rows = min(width, sum(anatomy.root.get_parameter(m.name).shape[1 - m.axis] for m in readers))
    # Bytes of the dictionary with the whitening matrix in float64 and float32, of four more
    # matrices while the whitening matrix is computed, and of the products with the update's rows.
    basis, making, products = words + 12 * width**2, 20 * width**2, 8 * tokens * rows
    # Bytes of three matrices of logits in float32.
    control = 12 * min(n_tokens * anatomy.vocab_size, LOGITS_AT_ONCE)
    printed = Table("per process", "memory")
    training = weights + 3 * trained  # a gradient and two moments of AdamW for each trained weight
    for name, size in (
        ("weights, gradients, AdamW", training),
        (f"the same, FSDP2 or ZeRO-3 over {RANKS}", training / RANKS),
        ("calibration adds", basis + making),
        ("a look adds", basis + products),
        ("its control adds at least", basis + max(control, products)),
    ):
        printed.add_row(name, f"{size / 1e9:.3g} GB")
    print_table(console, printed)
    console.print(
        f"Estimated, for SubspaceWords on {batch[0]} x {batch[1]} tokens, without activations. "
        "Attacks that run the model gather all of it; SubspaceWords does not run it.\n",
        soft_wrap=True,
    )


def explain_capacity(anatomy: Anatomy, length: int, seed: int) -> str:
    """Return how many distinct tokens the rows of an update reveal, in sentences.

    Args:
        anatomy: The anatomy of the model, with its adapters.
        length: The number of tokens of a text.
        seed: The seed of the planted sets of tokens.
    """
    known_inputs = row_space.find_known_inputs(anatomy, row_space.find_linear_maps(anatomy))
    for known_input in known_inputs:
        trained = known_input.trainable_maps(anatomy)
        if maps := [m for m in trained if m.factor != "B"]:  # rows that are sums of tokens' inputs
            break
    else:
        return (
            "What SubspaceWords can recover is unknown: no trained linear map of this model has an "
            "input that depends on single tokens, because the first block's projections are not "
            "trained. That is 'unknown', not 'safe'."
        )
    rows = sum(m.rows for m in maps)
    text = (
        f"An update shares {rows} rows of {known_input.width} numbers that reveal which tokens the "
        f"first block reads, out of {anatomy.vocab_size}: {', '.join(m.name for m in maps)}.\n"
    )
    try:
        dictionary = row_space.build_dictionary(anatomy, known_input)
    except row_space.NotAdditive as reason:
        return f"{text}What SubspaceWords can recover is unknown: {reason}"
    factors = row_space.factor_rows(anatomy, trained)
    atoms = row_space.Atoms(*dictionary.atoms(length, tuple(factors.values())))
    types, failed, predicted = row_space.measure_capacity(atoms, rows, sets=SETS, seed=seed)
    outcome = f"{types} were all found" if types else "how many is unknown"
    missed = "" if failed is None else f", {failed} were not"
    return (
        f"{text}Distinct tokens that these rows reveal: about {predicted:.0f} by rule; "
        f"planted at random, {outcome}{missed}."
    )


def measure_prices(probe: Anatomy, batch: tuple[int, int]) -> dict[tuple[str, str], float]:
    """Measure the costs of the attacks that ``auto`` chooses for a model, by running them.

    Args:
        probe: The model, whose trained weights change.
        batch: The number of texts, and of tokens of each, which are drawn at random.

    Returns:
        The seconds of ``"set-up"`` and ``"look"`` by the name of the attack. Under the name ``""``
        the seconds of the gradients of a ``"control"``.
    """
    device = probe.device
    generator = torch.Generator(device).manual_seed(0)
    optimizer = torch.optim.AdamW([p for p in probe.model.parameters() if p.requires_grad], lr=1e-3)
    prices: dict[tuple[str, str], float] = {}
    with _attack_plan(probe, optimizer, lambda _: False) as (watch, fit):
        for _ in range(3):  # LoRA's A has a gradient after a step, and is calibrated then
            ids = torch.randint(probe.vocab_size, batch, generator=generator, device=device)
            with watch.step({"input_ids": ids, "labels": ids}):
                # A control computes two gradients: of the step again, and of known words. A forward
                # pass is counted as a backward pass, which takes up to twice as long.
                loss = probe.model(input_ids=ids, labels=ids).loss
                prices["", "control"] = 4 * measure_seconds(loss.backward, device)
                optimizer.step()
                optimizer.zero_grad()
            for name, seconds in fit.run.longest.items():
                calibration = max(0.0, prices.get((name, "look"), 0.0) - seconds)
                prices[name, "set-up"] = fit.lineup.set_up_seconds.get(name, 0.0) + calibration
                prices[name, "look"] = seconds
    return prices


def print_prices(
    console: Console, shapes: Anatomy, build: Callable[..., Anatomy], batch: tuple[int, int]
) -> None:
    """Print the costs of every attack that ``auto`` runs, extrapolated from small models.

    Args:
        console: The console to print on.
        shapes: The model on the meta device.
        build: A function that returns a model with the given numbers of blocks and tokens.
        batch: The number of texts, and of tokens of each.
    """
    blocks, tokens = len(shapes.blocks), shapes.vocab_size
    block = sum(p.numel() for p in shapes.blocks[0].parameters())
    if block > MAX_MEASURED:
        console.print(f"Attacks are priced up to {MAX_MEASURED:,} parameters a block.\n")
        return
    n_tokens, n_blocks = min(tokens, PROBE_TOKENS), min(blocks, PROBE_BLOCKS)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def measure(blocks: int, tokens: int) -> dict[tuple[str, str], float]:
        with device:  # for weights only: attacks draw random numbers on the CPU
            probe = build(blocks=blocks, tokens=tokens)
        return measure_prices(probe, batch)

    measured = measure(n_blocks, n_tokens)
    prices = dict(measured)
    # Every cost is taken to be linear in the numbers of blocks and of tokens.
    for times, sizes in (
        ((blocks - n_blocks) / max(1, n_blocks - 1), (1, n_tokens)),
        ((tokens - n_tokens) / (n_tokens - n_tokens // 4), (n_blocks, n_tokens // 4)),
    ):
        if times > 0:
            smaller = measure(*sizes)
            for key, price in measured.items():
                prices[key] += times * max(0.0, price - smaller.get(key, price))
    control = prices.pop(("", "control"))
    table = Table("seconds of computation", "set-up", "a look", "its control, at most")
    for name in dict.fromkeys(name for name, _ in prices):
        table.add_row(name, *(f"{prices[name, part]:.2g}" for part in ("set-up", "look")))
    table.add_row("two gradients", "", "", f"{control:.2g}")
    both = ("set-up", "look")
    set_up, look = (sum(prices[key] for key in prices if key[1] == part) for part in both)
    table.add_row("all", f"{set_up:.2g}", f"{look:.2g}", f"{control + look:.2g}")
    print_table(console, table)
    console.print(
        f"The attacks of attacks='auto', measured on this machine's {device.type} at {batch[0]} x "
        f"{batch[1]} tokens of a process on models of up to {n_blocks} blocks and {n_tokens:,} "
        "tokens with random weights, and extended to "
        f"{blocks} blocks and {tokens:,} tokens. An attack whose look takes longer than "
        f"look_seconds={WatchSettings().look_seconds:g} is left out. A control makes the step "
        "again, and one on known words, which each attack must find.\n",
        soft_wrap=True,
    )


def show_attacks(anatomy: Anatomy) -> None:
    """Calibrate the attacks that a run on this model would choose, and log their costs."""
    optimizer = torch.optim.SGD([p for p in anatomy.model.parameters() if p.requires_grad], lr=0.0)
    # A run logs its plan before its first step; no other line is shown.
    with _attack_plan(anatomy, optimizer, lambda record: "these attacks" in record.getMessage()):
        pass


@contextmanager
def _attack_plan(
    anatomy: Anatomy, optimizer: Optimizer, logged: Callable[[logging.LogRecord], bool]
) -> Iterator[tuple[Watch, Fit]]:
    """Yield a watch that has calibrated the attacks that a run on this model would choose.

    Args:
        anatomy: The anatomy of the model.
        optimizer: The optimizer of the trained weights.
        logged: A filter of log records, which is in force until the end.
    """
    settings = WatchSettings(tensorboard=False, report=False)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        watch = Watch(anatomy.model, optimizer, folder=folder, every_n_steps=1, settings=settings)
        rank_zero.log.addFilter(logged)
        stack.callback(rank_zero.log.removeFilter, logged)
        stack.enter_context(watch)
        yield watch, watch.engine.current
