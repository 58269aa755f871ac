"""``fedleak invert``: recovers texts from hidden states with noise, and measures how well.

A client runs the first blocks of a model (up to the split) and sends their output with noise; the
server attacks it. A cell is the measurement of one attack at one split, for texts of one length and
one strength of the noise.
"""

from __future__ import annotations

import itertools
import json
import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_fedleak.cli import finetuning, printing
from lightning_fedleak.cli.printing import format_share
from lightning_fedleak.cli.studies import invert
from lightning_fedleak.cli.studies.invert import Cell
from lightning_fedleak.cli.studies.models import check_context, find_model
from lightning_fedleak.model.anatomy import Anatomy, place_of
from lightning_fedleak.progress import bars, track
from lightning_fedleak.report.records import as_json

UTILITY_TEXTS = 16  # smallest number of texts that measure the task; not tuned, more take longer


def run(options: Namespace, console: Console | None = None) -> int:
    """Measure all cells, print a table, and write JSON.

    Args:
        options: The options of the command.
        console: The console to print on; stdout by default.

    Returns:
        0; 1 if no cell has a result; 130 after an interrupt, with the finished cells written.

    Raises:
        SourceError: Model, text and settings do not go together.
        AnatomyError: The model's parts could not be found.
    """
    console = console or Console(highlight=False)
    printing.make_folder(options.out, options.out)
    tokenizer = finetuning.load_tokenizer(options.model)
    anatomy = find_model(options.model)
    introduction, names, measured = _plan(options, anatomy, tokenizer)
    console.print(introduction)
    file = options.out / "inversion.json"
    cells: list[Cell] = []
    interrupted = False
    with bars(console.is_terminal):
        try:
            for _, cell in zip(track(names, "cells:", str), measured, strict=True):
                cells.append(cell)
                _write(file, options, cells)
        except KeyboardInterrupt:
            interrupted = True
    if cells:
        printing.print_table(console, cells_table(cells))
        console.print(explain_cells(cells))
        console.print(f"Results: {file}", soft_wrap=True)
    if interrupted:
        console.print(f"Interrupted after {len(cells)} cells.")
        return printing.INTERRUPTED
    return 0 if any(c.rates for c in cells) else 1


# ---- the plan of the measurements ---------------------------------------------------------------


def _plan(
    options: Namespace, anatomy: Anatomy, tokenizer: Any
) -> tuple[str, list[str], Iterator[Cell]]:
    """Return the introduction, the names of the cells, and the cells, which are yet to measure."""
    layers = _layers(options, anatomy)
    causal = anatomy.kind == "causal"
    attacks = list(dict.fromkeys(options.attack or ("prefix" if causal else "sweeps",)))
    if not causal and "prefix" in attacks:
        raise finetuning.SourceError(
            "--attack prefix goes from left to right, and in an encoder each hidden state also "
            "depends on the tokens after it: give sweeps or descent"
        )
    rows = _rows(options, anatomy, tokenizer, options.texts, max(options.texts, UTILITY_TEXTS))
    hello = tokenizer("hello", add_special_tokens=False)["input_ids"]
    settings: dict[str, Any] = {
        "steps": options.steps,
        "budget_seconds": _budget(options),
        "hello": hello[-1] if hello else None,
        "special_ids": tokenizer.all_special_ids,
    }
    makers = [(name, partial(invert.make_adversary, name, **settings)) for name in attacks]
    noises = [invert.Noise(s, options.relative, options.seed) for s in sorted(set(options.noise))]
    unit = " standard deviations of each dimension" if options.relative else ""
    introduction = (
        f"A client holds {printing.model_name(options.model)} (fp32) up to block "
        f"{' or '.join(map(str, layers))} of {len(anatomy.blocks)}, and sends the hidden "
        f"states of {options.texts} texts of {printing.text_name(options.text)}, each of "
        f"{_join_numbers(rows)} tokens, with Gaussian noise of "
        f"{_join_numbers(noise.sigma for noise in noises)}{unit}. The server has the same "
        "weights, and recovers the texts."
    )
    names = [
        f"{name}, split {layer}, {length} tokens, noise {noise.sigma:g}"
        for layer, name, length, noise in itertools.product(layers, attacks, rows, noises)
    ]
    measured = invert.run_cells(anatomy, rows, makers, layers, noises, texts=options.texts)
    return introduction, names, measured


def _budget(options: Namespace) -> float | None:
    """Return the seconds of ``--budget-seconds``; None for ``inf``."""
    return None if math.isinf(options.budget_seconds) else options.budget_seconds


def _layers(options: Namespace, anatomy: Anatomy) -> list[int]:
    """Return the splits, by default at a third and two thirds of the blocks.

    Raises:
        SourceError: The model has no such block.
    """
    blocks = len(anatomy.blocks)
    layers = list(dict.fromkeys(options.layer or (round(blocks / 3), round(2 * blocks / 3))))
    for layer in layers:
        with finetuning.refuse_errors(f"--layer {layer}", ValueError):
            place_of(anatomy, layer)
    return layers


def _rows(
    options: Namespace, anatomy: Anatomy, tokenizer: Any, min_rows: int, max_rows: int
) -> dict[int, Tensor]:
    """Return token ids (n, L) by their length L, n from ``min_rows`` to ``max_rows``."""
    texts = finetuning.read_texts(options.text or finetuning.EMBEDDED_MESSAGES, options.column)
    rows: dict[int, Tensor] = {}
    for length in sorted(set(options.lengths)):
        check_context(anatomy, length, "--lengths")
        min_tokens = 2 if anatomy.kind == "causal" else 1
        finetuning.check_option("--lengths", length, at_least=min_tokens, hint="tokens")
        rows[length] = invert.rows_of_length(
            texts,
            tokenizer,
            length,
            max_rows,
            min_rows=min_rows,
            seed=options.seed,
            start_token_id=options.bos,
        )
    return rows


def _write(file: Path, options: Namespace, cells: Sequence[Cell]) -> None:
    """Write the settings and the cells that are done as JSON."""
    content = {
        "schema": 1,
        "model": options.model or "embedded",
        "text": options.text or "embedded",
        "column": options.column,
        "precision": "fp32",
        "steps": options.steps,
        "seed": options.seed,
        "budget_seconds": _budget(options),
        "cells": cells,
    }
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(as_json(content), indent=1, allow_nan=False) + "\n")
    unfinished.replace(file)  # an interrupt leaves the last complete file


def _join_numbers(values: Any) -> str:
    return ", ".join(f"{value:g}" for value in sorted(set(values)))


# ---- the table ----------------------------------------------------------------------------------


def cells_table(cells: Sequence[Cell]) -> Table:
    """Return a row for each cell: the share of tokens at the correct position with its interval."""
    budget = next((f"{c.budget_seconds:g} s" for c in cells if c.budget_seconds), "none")
    names = ["attack", "split", "len", "noise", "token accuracy", "exact", "ROUGE"]
    names += ["task", "ppl", "ms"]
    table = Table(
        title="what the hidden states at the split reveal\n"
        f"budget: {budget} for the texts of a line",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i in (0, 4) else "right")
    for cell in cells:
        star = "" if cell.finished or not cell.rates else "*"  # explained below the table
        keys = (cell.attack + star, str(cell.layer), str(cell.length), f"{cell.sigma:g}")
        table.add_row(*keys, *_numbers(cell))
    return table


def _numbers(cell: Cell) -> list[str]:
    """Return the results of a cell, from token accuracy to milliseconds per token."""
    utility, rouge = cell.utility, cell.rates.get("rouge_l")
    accuracy, exact, per_token = "failed", "", ""
    if cell.rates:
        rate = cell.rates["token_accuracy"]
        low, high = format_share(rate.low, 2), format_share(rate.high, 2)
        accuracy = f"{format_share(rate.value)} [{low}, {high}]"
        exact = f"{round(cell.rates['exact_sentences'].value * cell.texts)}/{cell.texts}"
        per_token = f"{1e3 * cell.seconds / (cell.texts * cell.length):.3g}"
    return [
        accuracy,
        exact,
        "" if rouge is None or math.isnan(rouge.value) else format_share(rouge.value),
        "unknown" if utility is None else format_share(utility.accuracy),
        "" if utility is None else f"{utility.perplexity:.3g}",
        per_token,
    ]


def explain_cells(cells: Sequence[Cell]) -> str:
    """Return sentences that explain the table, and name the errors of failed attacks."""
    unit = " in those of each dimension of the hidden states" if cells[0].relative else ""
    lines = [
        "Token accuracy (Zheng 2023, Eq. 5): the share of a text's tokens that are at the correct "
        "position, mean over texts; in brackets its 95% interval. exact: texts without an error. "
        f"ROUGE: ROUGE-L. ms: wall time per token. split: block, of {cells[0].blocks}. len: "
        f"tokens. noise: standard deviations{unit}. task: next-token accuracy of the whole model "
        "from the states with noise, unknown for encoders; ppl: perplexity."
    ]
    problems = dict.fromkeys(
        f"{c.attack}, split {c.layer}, {c.length} tokens, noise {c.sigma:g}: {c.problem}"
        for c in cells
        if c.problem
    )
    if not all(c.finished for c in cells if c.rates):
        lines.append(
            f"*: stopped by the budget of {cells[0].budget_seconds:g} s; the best result until "
            "then. --budget-seconds gives more time, inf sets no bound."
        )
    lines.append(
        "A low number says that these attacks fail here, not that none succeeds: a server may know "
        "more, or search longer."
    )
    return "\n".join(["", *lines, *(f"Failed: {problem}" for problem in problems)])
