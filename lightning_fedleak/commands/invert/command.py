"""``fedleak invert``: reads texts off noised hidden states at a split, and says how well."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_fedleak.anatomy import Anatomy, AnatomyError
from lightning_fedleak.anatomy.text_layers import place_of
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.commands.game import PRECISIONS, find_model
from lightning_fedleak.commands.invert import (
    Cell,
    TooLittleText,
    make_adversary,
    rows_of_length,
    run_cells,
)
from lightning_fedleak.commands.invert.plots import Axis, draw, worth_drawing
from lightning_fedleak.commands.options import InvertOptions
from lightning_fedleak.finetuning.assets import EMBEDDED_MESSAGES, SourceError
from lightning_fedleak.finetuning.data import load_tokenizer
from lightning_fedleak.finetuning.texts import read_texts
from lightning_fedleak.model_runs import context_length

UserError = (SourceError, AnatomyError)
INTERRUPTED = 130
PLOTS: dict[Axis, str] = {"sigma": "noise.png", "length": "length.png"}

UTILITY_TEXTS = 16
PUBLIC_TEXTS, PUBLIC_TOKENS = 64, 64


@dataclass(frozen=True)
class InvertCommand(InvertOptions):
    """The command ``fedleak invert``; its settings are its options."""

    def run(self, console: Console | None = None) -> int:
        """Attacks, prints and writes.

        Args:
            console: where to print; stdout by default.

        Returns:
            0; 1 if no cell has a result; 130 after an interrupt, what was done by then written.

        Raises:
            SourceError: model, text and settings do not go together.
            AnatomyError: the model's parts could not be found.
        """
        console = console or Console()
        self._make_folder()
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        tokenizer = load_tokenizer(self.model)
        anatomy = find_model(self.model, PRECISIONS[self.precision])
        layers = self._layers(anatomy)
        attacks = self._attacks(anatomy)
        rows = self._rows(anatomy, tokenizer)
        makers = self._makers(attacks, tokenizer)
        self._introduce(console, anatomy, layers, rows)
        cells, interrupted = self._measure(console, anatomy, tokenizer, layers, rows, makers)
        if cells:
            console.print(table(cells))
            console.print(explanation(cells), highlight=False)
            self._plot(console, cells)
            console.print(f"Results: {self._file}", highlight=False, soft_wrap=True)
        if interrupted:
            console.print(f"Interrupted after {len(cells)} cells.", highlight=False)
            return INTERRUPTED
        return 0 if any(c.rates for c in cells) else 1

    # ---- checked before anything is computed ----------------------------------------------

    def _make_folder(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SourceError(
                f"--out {self.out} is no folder that can be made ({error.strerror}): name another"
            ) from error

    def _layers(self, anatomy: Anatomy) -> list[int]:
        blocks = len(anatomy.blocks)
        layers = list(dict.fromkeys(self.layer or (round(blocks / 3), round(2 * blocks / 3))))
        for layer in layers:
            try:
                place_of(anatomy, layer)
            except ValueError as error:
                raise SourceError(f"--layer {layer}: {error}") from error
        return layers

    def _attacks(self, anatomy: Anatomy) -> list[str]:
        causal = anatomy.kind == "causal"
        attacks = list(dict.fromkeys(self.attack or ("prefix" if causal else "sweeps",)))
        if not causal and "prefix" in attacks:
            raise SourceError(
                "--attack prefix goes from left to right, and in an encoder each hidden state "
                "depends on the tokens behind it too: give sweeps or descent"
            )
        return attacks

    def _rows(self, anatomy: Anatomy, tokenizer: PreTrainedTokenizerBase) -> dict[int, Tensor]:
        context = context_length(anatomy)
        least = 2 if anatomy.kind == "causal" else 1
        texts = read_texts(EMBEDDED_MESSAGES if self.text is None else self.text)
        if self.bos is not None and self.bos >= anatomy.vocab_size:
            raise SourceError(
                f"--bos {self.bos} is no token id of a vocabulary of {anatomy.vocab_size}"
            )
        rows: dict[int, Tensor] = {}
        for length in sorted(set(self.lengths)):
            if context is not None and length > context:
                raise SourceError(
                    f"--lengths {length} is longer than the model's context of {context}: give "
                    f"{context} or fewer"
                )
            if length < least:
                raise SourceError(f"--lengths {length}: give at least {least} tokens")
            try:
                rows[length] = rows_of_length(
                    texts,
                    tokenizer,
                    length,
                    max(self.texts, UTILITY_TEXTS),
                    least=self.texts,
                    seed=self.seed,
                    start_token_id=self.bos,
                )
            except TooLittleText as error:
                raise SourceError(f"--lengths {length}: {error}") from error
        return rows

    def _makers(
        self, attacks: Sequence[str], tokenizer: PreTrainedTokenizerBase
    ) -> list[tuple[str, Any]]:
        hello = tokenizer("hello", add_special_tokens=False)["input_ids"]
        settings: dict[str, Any] = {
            "steps": self.steps,
            "budget_seconds": None if math.isinf(self.budget_seconds) else self.budget_seconds,
            "hello": hello[-1] if hello else None,
            "special_ids": tokenizer.all_special_ids,
        }
        if self.public is not None:
            ids = tokenizer(
                read_texts(self.public)[:PUBLIC_TEXTS], truncation=True, max_length=PUBLIC_TOKENS
            )["input_ids"]
            try:
                settings["public_text"] = PublicText(ids)
            except ValueError as error:
                raise SourceError(f"--public '{self.public}': {error}") from error
        return [(name, partial(make_adversary, name, **settings)) for name in attacks]

    # ---- the run --------------------------------------------------------------------------

    def _introduce(
        self, console: Console, anatomy: Anatomy, layers: Sequence[int], rows: Mapping[int, Tensor]
    ) -> None:
        model = "the embedded model" if self.model is None else self.model
        text = "the embedded messages of a bank's customers" if self.text is None else self.text
        unit = " standard deviations of each dimension" if self.relative else ""
        console.print(
            f"A client holds {model} ({self.precision}) up to block "
            f"{' or '.join(map(str, layers))} of {len(anatomy.blocks)}, and sends the hidden "
            f"states of {self.texts} texts of {text}, each of {_listed(rows)} tokens, with "
            f"Gaussian noise of {_listed(self.noise)}{unit}. The server has the same weights, and "
            "reads the texts.",
            highlight=False,
        )

    def _measure(
        self,
        console: Console,
        anatomy: Anatomy,
        tokenizer: PreTrainedTokenizerBase,
        layers: Sequence[int],
        rows: Mapping[int, Tensor],
        makers: Sequence[tuple[str, Any]],
    ) -> tuple[list[Cell], bool]:
        """The cells that were done, and whether an interrupt cut them short."""
        sigmas = sorted(set(self.noise))
        cells: list[Cell] = []
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            total = len(layers) * len(makers) * len(rows) * len(sigmas)
            task = progress.add_task("starting", total=total)
            try:
                for cell in run_cells(
                    anatomy,
                    rows,
                    makers,
                    layers,
                    sigmas,
                    relative=self.relative,
                    texts=self.texts,
                    seed=self.seed,
                    mask_token_id=tokenizer.mask_token_id,
                    special_ids=tokenizer.all_special_ids,
                    began=lambda what: progress.update(task, description=what),
                ):
                    cells.append(cell)
                    progress.advance(task)
                    self._write(cells)
            except KeyboardInterrupt:
                return cells, True
        return cells, False

    @property
    def _file(self) -> Path:
        return self.out / "inversion.json"

    def _write(self, cells: Sequence[Cell]) -> None:
        content = {
            "schema": 1,
            "model": self.model or "embedded",
            "text": self.text or "embedded",
            "precision": self.precision,
            "steps": self.steps,
            "budget_seconds": None if math.isinf(self.budget_seconds) else self.budget_seconds,
            "seed": self.seed,
            "cells": [c.to_dict() for c in cells],
        }
        part = self._file.with_suffix(".part")
        try:
            part.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
            part.replace(self._file)
        except OSError as error:
            raise SourceError(
                f"'{self._file}' cannot be written ({error.strerror}): name another folder with "
                "--out."
            ) from error

    def _plot(self, console: Console, cells: Sequence[Cell]) -> None:
        for name in PLOTS.values():  # of an earlier run, with other numbers
            (self.out / name).unlink(missing_ok=True)
        if importlib.util.find_spec("matplotlib") is None:
            console.print(
                "No plots: they need matplotlib (pip install 'lightning-fedleak\\[plots]').",
                highlight=False,
            )
            return
        model = "embedded model" if self.model is None else Path(self.model).name
        for against, name in PLOTS.items():
            if worth_drawing(cells, against):
                draw(cells, against, self.out / name, model=model)
                console.print(f"Plot: {self.out / name}", highlight=False, soft_wrap=True)


def _listed(values: Any) -> str:
    return ", ".join(f"{v:g}" for v in sorted(set(values)))


def table(cells: Sequence[Cell]) -> Table:
    """A line for each cell, in 80 columns; the token accuracy with its 95% interval."""
    title = "what the hidden states at the split give away\n" + _budget(cells)
    shown = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    shown.add_column("attack", no_wrap=True)
    for column in ("split", "len", "noise"):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column("token accuracy", no_wrap=True)
    for column in ("exact", "ROUGE", "task", "ppl", "ms"):
        shown.add_column(column, justify="right", no_wrap=True)
    for cell in cells:
        useful = cell.utility
        perplexity = None if useful is None else useful.perplexity
        shown.add_row(
            cell.attack + ("" if cell.finished or cell.problem else "*"),
            str(cell.layer),
            str(cell.length),
            f"{cell.sigma:g}",
            *_rates(cell),
            "unknown" if useful is None else _short(useful.accuracy),
            "" if perplexity is None else f"{perplexity:.3g}",
            f"{1e3 * cell.seconds_per_token:.3g}" if cell.rates else "",
        )
    return shown


def _budget(cells: Sequence[Cell]) -> str:
    """The time that attacks were given."""
    budgets = dict.fromkeys(_seconds(c) for c in cells if c.rates)
    return f"budget: {', '.join(budgets) or 'none'} for the texts of a line"


def _seconds(cell: Cell) -> str:
    return "none" if cell.budget_seconds is None else f"{cell.budget_seconds:g} s"


def _rates(cell: Cell) -> tuple[str, str, str]:
    """Token accuracy, exact texts and ROUGE-L."""
    if not cell.rates:
        return "failed", "", ""
    accuracy, rouge = cell.rates["token_accuracy"], cell.rates["rouge_l"]
    low, high = (_short(v, 2) for v in (accuracy.low, accuracy.high))
    exact = round(cell.rates["exact_sentences"].value * cell.texts)
    return (
        f"{_short(accuracy.value)} [{low}, {high}]",
        f"{exact}/{cell.texts}",
        "" if math.isnan(rouge.value) else _short(rouge.value),
    )


def _short(value: float, digits: int = 3) -> str:
    """Without the leading zero; an exact 0 or 1 as such, so that it tells from .0004 or .9996."""
    return f"{value:.0f}" if value in (0, 1) else f"{value:.{digits}f}".replace("0.", ".", 1)


def explanation(cells: Sequence[Cell]) -> str:
    """What the table says, in sentences."""
    lines = [
        "",
        "Token accuracy (Eq. 5): the share of a text's tokens that are right at their place, mean "
        "over texts; in brackets its 95% interval over texts. exact: texts without an error. "
        "ROUGE: ROUGE-L. ms: wall time per token. "
        f"split: block, of {cells[0].blocks}. len: tokens. noise: standard deviations"
        + (" in those of each dimension of the hidden states. " if cells[0].relative else ". ")
        + _task(cells),
    ]
    for layer, length in dict.fromkeys((c.layer, c.length) for c in cells):
        lines += _half([c for c in cells if (c.layer, c.length) == (layer, length)], layer, length)
    problems = dict.fromkeys(
        f"{c.attack}, split {c.layer}, {c.length} tokens, noise {c.sigma:g}: {c.problem}"
        for c in cells
        if c.problem
    )
    lines += [f"Failed: {problem}" for problem in problems]
    cut = dict.fromkeys(_seconds(c) for c in cells if not c.finished and not c.problem)
    if cut:
        lines.append(
            f"*: cut off by the budget of {', '.join(cut)}, the best that was found by then; "
            "--budget-seconds gives more, inf for no bound."
        )
    lines.append(
        "A low number says that these attacks fail here, not that none succeeds: a server may know "
        "more, or search longer."
    )
    return "\n".join(lines)


def _task(cells: Sequence[Cell]) -> str:
    tasks = dict.fromkeys(c.utility.task for c in cells if c.utility is not None)
    if not tasks:
        return "task: unknown."
    return f"task: {', '.join(tasks)} of the whole model from the noised states; ppl: perplexity."


def _half(cells: Sequence[Cell], layer: int, length: int) -> list[str]:
    """What is still read where noise has cost half of the task."""
    clean = next((c.utility for c in cells if c.sigma == 0 and c.utility is not None), None)
    if clean is None or clean.accuracy <= 0:
        return []
    kept = [c for c in cells if c.utility and c.rates and c.utility.accuracy >= clean.accuracy / 2]
    most = max((c.sigma for c in kept), default=0.0)
    if most == 0:
        return []
    found = ", ".join(
        f"{c.attack}{'' if c.finished else '*'} {_short(c.rates['token_accuracy'].value)}"
        for c in kept
        if c.sigma == most
    )
    return [
        f"Split {layer}, {length} tokens: at noise {most:g}, the most tried that leaves the model "
        f"half of its {clean.task}, the share of tokens read is: {found}."
    ]


__all__ = ["InvertCommand", "UserError", "explanation", "table"]
