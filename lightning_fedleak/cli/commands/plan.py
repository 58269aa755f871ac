"""``fedleak plan``: what an update of a set-up can reveal, and what the attacks on it cost."""

from __future__ import annotations

import copy
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from lightning_fedleak.attacks import row_space
from lightning_fedleak.attacks.row_space import explanation
from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.cli.finetuning.assets import loading
from lightning_fedleak.cli.printing import print_table
from lightning_fedleak.cli.studies.models import check_context, find_model, with_lora
from lightning_fedleak.engine import WatchSettings
from lightning_fedleak.model.anatomy import EMBEDDING_WEIGHT, Anatomy, find_anatomy
from lightning_fedleak.trainers import Watch

RANKS = 8
"""Processes over which a sharded model is planned."""
PER_SQUARE, PER_WORD = 100, 24
"""Operations for each type found, by width squared and by numbers of the dictionary.

Fitted to looks of 126 types on one core of x86-64, at 49,152 x 576 and 16,384 x 4,096, rank 8.
"""
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
    if options.peft == "full":
        options.lora_r = 0
    if options.model is not None and _has_config_alone(Path(options.model).expanduser()):
        shape, small = _shapes(options)
        check_context(shape, options.batch[1], "--batch")
        print_costs(console, shape, small, options.batch)
        return 0
    bare = find_model(options.model)
    if bare.kind == "classifier":
        raise SourceError(
            "--model is no language model with a head, so that its loss on a text is not known "
            "here; in a run of your own LeakageMonitor(SubspaceWords()) reports its capacity"
        )
    anatomy = with_lora(bare, options.lora_r, options.targets, options.seed)
    check_context(anatomy, options.length, "--length")
    console.print(f"{explain_capacity(anatomy, options.length, options.seconds, options.seed)}\n")
    print_costs(console, anatomy, anatomy, options.batch)
    show_attacks(anatomy)
    return 0


def _has_config_alone(folder: Path) -> bool:
    weights = (path for end in ("safetensors", "bin") for path in folder.glob(f"*.{end}"))
    return (folder / "config.json").is_file() and not any(weights)


def _shapes(options: Namespace) -> tuple[Anatomy, Anatomy]:
    """Return a model without numbers, and one of its blocks with random ones, of few tokens.

    The block shows which maps read an input that a token determines. Its feed-forward is narrow.

    Raises:
        SourceError: the configuration is of no causal language model.
    """
    with loading(options.model, "causal language model's configuration"):
        config = transformers.AutoConfig.from_pretrained(options.model)
        block = copy.deepcopy(config)
        few = {"vocab_size": 64, "num_hidden_layers": 1, "intermediate_size": 64}
        for name in (name for name in few if hasattr(block, name)):
            setattr(block, name, few[name])
        block.pad_token_id = None
        if getattr(block, "layer_types", None):
            block.layer_types = block.layer_types[:1]
        anatomies = []
        for one, device in ((config, "meta"), (block, "cpu")):
            dtype = config.dtype if device == "meta" else None
            with torch.device(device):
                auto: Any = transformers.AutoModelForCausalLM
                bare = find_anatomy(auto.from_config(one, dtype=dtype).eval())
                anatomies.append(with_lora(bare, options.lora_r, options.targets, options.seed))
    return anatomies[0], anatomies[1]


def print_costs(console: Console, anatomy: Anatomy, runs: Anatomy, batch: tuple[int, int]) -> None:
    """Print what ``SubspaceWords`` and its control take of time and memory, by arithmetic.

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
    readers = [m for known in known_inputs for m in known.trained_readers(runs)]
    if table_of_words is None or not readers:
        console.print("No trained map reads what a token determines: the costs are unknown.\n")
        return
    width, tokens = known_inputs[0].width, table_of_words.shape[0]
    words, n_tokens = tokens * width * table_of_words.itemsize, batch[0] * batch[1]
    rows = min(width, sum(anatomy.root.get_parameter(m.name).shape[1 - m.axis] for m in readers))
    types = min(n_tokens, explanation.predict_capacity(width, tokens, rows))
    # A dictionary; whitening in float64 and float32; and while it is made four matrices more.
    held, making, products = words + 12 * width**2, 20 * width**2, 8 * tokens * rows
    control = 12 * n_tokens * anatomy.vocab_size  # three matrices of logits in float32
    numbers, rate = sum(p.numel() for p in parameters), _rate(anatomy)
    backward = 2 if trained == weights else 1
    seconds = {
        "calibration": 2.25 * tokens * width**2 / rate,
        "look": types * (PER_SQUARE * width**2 + PER_WORD * tokens * width) / rate,
        "control": (2 + 2 * backward) * numbers * n_tokens / rate,
    }
    printed = Table("per process", "one card", f"FSDP2 over {RANKS}", f"ZeRO-3 over {RANKS}")

    def add(name: str, memory: float, gathered: float = 0.0, key: str = "") -> None:
        """Add a row: bytes that a process holds, with those that it gathers if it has a shard."""
        cells = []
        for more in (0.0, gathered, gathered):
            takes = f", {seconds[key] + more / LINK:.2g} s" if key else ""
            cells.append(f"{(memory + more) / 1e9:.3g} GB{takes}")
        printed.add_row(name, *cells)

    whole, part = (weights + 3 * trained, (weights + 3 * trained) / RANKS)
    cells = [f"{size / 1e9:.3g} GB" for size in (whole, part, part)]
    printed.add_row("weights, gradients, AdamW", *cells)
    add("calibration adds", held + making, words, "calibration")
    add("a look adds", held + products, words, "look")
    add("its control adds", held + control, weights, "control")
    add("an attack that runs the whole model adds", 0.0, weights)
    print_table(console, printed)
    console.print(
        f"Estimated, for SubspaceWords on {numbers / 1e9:.3g} billion parameters "
        f"({trained / 1e9:.3g} GB trained), {batch[0]} x {batch[1]} tokens, without activations; "
        f"seconds at the {rate / 1e9:.3g} GFLOP/s that this machine reaches now and "
        f"{LINK / 1e9:.0f} GB/s of gathering. The control, and attacks that run the model on "
        "public text, gather all of a sharded model. ZeRO-3 is counted as FSDP2; DeepSpeed's "
        "engine is refused.\n",
        soft_wrap=True,
    )


def _rate(anatomy: Anatomy) -> float:
    """Return the operations a second of a product in float32, on the device or the CPU."""
    device = "cpu" if anatomy.device.type == "meta" else anatomy.device
    matrix = torch.ones(1024, 1024, device=device)
    started = time.perf_counter()
    for _ in range(4):
        float((matrix @ matrix)[0, 0])
    return 4 * 2 * 1024**3 / (time.perf_counter() - started)


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
