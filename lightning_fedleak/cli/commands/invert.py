"""``fedleak invert``: reads texts from noised hidden states or gradients, and measures how well."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_fedleak.attacks import PublicText
from lightning_fedleak.cli.commands import printing
from lightning_fedleak.cli.commands.options import InvertOptions
from lightning_fedleak.cli.finetuning import (
    EMBEDDED_MESSAGES,
    SourceError,
    load_tokenizer,
    read_texts,
)
from lightning_fedleak.cli.studies import invert
from lightning_fedleak.cli.studies.invert import ActivationCell, GradientCell
from lightning_fedleak.cli.studies.models import PRECISIONS, check_context, find_model, with_lora
from lightning_fedleak.model.anatomy import Anatomy, place_of

PLOTS: dict[invert.Axis, str] = {"sigma": "noise.png", "length": "length.png"}

UTILITY_TEXTS = 16  # texts that measure the task, at least; not tuned
PUBLIC_TEXTS, PUBLIC_TOKENS = 64, 64  # of --public that 'prefix' reads, at most; not tuned

NOISE = {"activations": (0.0, 0.3, 1.0, 3.0), "gradients": (0.0,)}
ATTACKS = {"activations": invert.ADVERSARIES, "gradients": tuple(invert.READERS)}
USED_BY = {
    "activations": ("public", "layer", "steps"),
    "gradients": ("lora_r", "targets", "batch_sizes"),
}
"""Options that only one source uses."""

C = TypeVar("C", bound=ActivationCell | GradientCell)


@dataclass(frozen=True)
class _Study(Generic[C]):
    """What is measured, of activations or of gradients.

    Attributes:
        introduction: who sends what to whom.
        cells: yields them, and calls its argument with the name of what comes next.
        total: of the cells.
        settings: of the study, for JSON.
        table: of cells.
        explanation: of that table.
    """

    introduction: str
    cells: Callable[[Callable[[str], None]], Iterator[C]]
    total: int
    settings: Mapping[str, Any]
    table: Callable[[Sequence[C]], Table]
    explanation: Callable[[Sequence[C]], str]


@dataclass(frozen=True)
class InvertCommand(InvertOptions):
    """The command ``fedleak invert``; its settings are its options."""

    def run(self, console: Console | None = None) -> int:
        """Attack, print and write.

        Args:
            console: where to print; stdout by default.

        Returns:
            0; 1 if no cell has a result; 130 after an interrupt, what was done by then written.

        Raises:
            SourceError: model, text and settings do not go together.
            AnatomyError: the model's parts could not be found.
        """
        console = console or Console(highlight=False)
        self._check_options()
        printing.make_folder(self.out, self.out)
        tokenizer = load_tokenizer(self.model)
        anatomy = find_model(self.model, PRECISIONS[self.precision])
        if self.from_ == "gradients":
            return self._carried_out(console, self._of_gradients(anatomy, tokenizer))
        return self._carried_out(console, self._of_activations(anatomy, tokenizer))

    def _carried_out(self, console: Console, study: _Study[C]) -> int:
        console.print(study.introduction)
        cells, interrupted = self._measure(console, study)
        if cells:
            printing.print_table(console, study.table(cells), keys=4)
            console.print(study.explanation(cells))
            self._plot(console, [c for c in cells if isinstance(c, ActivationCell)])
            console.print(f"Results: {self._file}", soft_wrap=True)
        if interrupted:
            console.print(f"Interrupted after {len(cells)} cells.")
            return printing.INTERRUPTED
        return 0 if any(c.rates for c in cells) else 1

    # ---- what is measured -----------------------------------------------------------------

    def _of_activations(
        self, anatomy: Anatomy, tokenizer: PreTrainedTokenizerBase
    ) -> _Study[ActivationCell]:
        layers = self._layers(anatomy)
        attacks = self._attacks(anatomy)
        rows = self._rows(anatomy, tokenizer, self.texts, max(self.texts, UTILITY_TEXTS))
        makers = self._makers(attacks, tokenizer)
        unit = " standard deviations of each dimension" if self.relative else ""
        return _Study(
            f"A client holds {printing.model_name(self.model)} ({self.precision}) up to block "
            f"{' or '.join(map(str, layers))} of {len(anatomy.blocks)}, and sends the hidden "
            f"states of {self.texts} texts of {printing.text_name(self.text)}, each of "
            f"{_listed(rows)} tokens, with Gaussian noise of {_listed(self._sigmas)}{unit}. The "
            "server has the same weights, and reads the texts.",
            lambda announce: invert.run_cells(
                anatomy,
                rows,
                makers,
                layers,
                self._noises,
                texts=self.texts,
                tokenizer=tokenizer,
                announce=announce,
            ),
            len(layers) * len(makers) * len(rows) * len(self._sigmas),
            {"steps": self.steps},
            activation_table,
            explain_activations,
        )

    def _of_gradients(
        self, anatomy: Anatomy, tokenizer: PreTrainedTokenizerBase
    ) -> _Study[GradientCell]:
        if anatomy.kind != "causal" or anatomy.head is None:
            raise SourceError(
                "--from gradients shares the gradient of next-token prediction, which this model "
                "does not do: give a causal language model"
            )
        attacks = list(dict.fromkeys(self.attack or ATTACKS["gradients"][:1]))
        anatomy = with_lora(anatomy, self.lora_r, self.targets, self.seed)
        sizes = sorted(set(self.batch_sizes))
        attacked = max(size * invert.batches_of(self.texts, size) for size in sizes)
        extra = max(sizes) if self.lora_r else 0
        rows = self._rows(anatomy, tokenizer, attacked + min(extra, 1), attacked + extra)
        if self.lora_r:
            # Of the longest, which begin after all that is attacked at any length.
            invert.step_of_adamw(anatomy, rows[max(rows)][attacked:])
        model = f"{printing.model_name(self.model)} ({self.precision})"
        adapted = (
            f"A client trains a LoRA of rank {self.lora_r} on {model}, one step of AdamW behind "
            "its start"
            if self.lora_r
            else f"A client trains {model}"
        )
        unit = " times the root mean square of all gradients" if self.relative else ""
        noise = ""
        if any(self._sigmas):
            noise = f", with Gaussian noise of {_listed(self._sigmas)}{unit}"
        return _Study(
            f"{adapted}, and shares the gradient of one batch (texts in it: {_listed(sizes)}) of "
            f"{printing.text_name(self.text)}, each text of {_listed(rows)} tokens{noise}. The "
            "server has the same weights, and reads the texts.",
            lambda announce: invert.run_gradient_cells(
                anatomy,
                {length: ids[:attacked] for length, ids in rows.items()},
                [(a, partial(invert.make_reader, a, budget_seconds=self._budget)) for a in attacks],
                sizes,
                self._noises,
                texts=self.texts,
                announce=announce,
            ),
            len(attacks) * len(rows) * len(sizes) * len(self._sigmas),
            {"lora_r": self.lora_r, "targets": self.targets},
            gradient_table,
            explain_gradients,
        )

    @property
    def _sigmas(self) -> list[float]:
        return sorted(set(NOISE[self.from_] if self.noise is None else self.noise))

    @property
    def _noises(self) -> list[invert.Noise]:
        return [invert.Noise(sigma, self.relative, self.seed) for sigma in self._sigmas]

    @property
    def _budget(self) -> float | None:
        return None if math.isinf(self.budget_seconds) else self.budget_seconds

    # ---- checked before anything is computed ----------------------------------------------

    def _check_options(self) -> None:
        """Raise an error for options that the source of the texts does not use."""
        unused = "activations" if self.from_ == "gradients" else "gradients"
        defaults = {f.name: f.default for f in fields(InvertOptions)}
        for name in USED_BY[unused]:
            value = getattr(self, name)
            if (tuple(value) if isinstance(value, list) else value) != defaults[name]:
                raise SourceError(
                    f"--{name.replace('_', '-')} is for --from {unused}, and this is --from "
                    f"{self.from_}: leave one of them out"
                )
        for attack in self.attack or ():
            if attack not in ATTACKS[self.from_]:
                raise SourceError(
                    f"--attack {attack} reads {unused}, and this is --from {self.from_}: give "
                    f"{' or '.join(ATTACKS[self.from_])}, or --from {unused}"
                )

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

    def _rows(
        self, anatomy: Anatomy, tokenizer: PreTrainedTokenizerBase, least_rows: int, most_rows: int
    ) -> dict[int, Tensor]:
        least_tokens = 2 if anatomy.kind == "causal" else 1
        texts = read_texts(self.text or EMBEDDED_MESSAGES, self.column, option="--column")
        if self.bos is not None and self.bos >= anatomy.vocab_size:
            raise SourceError(
                f"--bos {self.bos} is no token id of a vocabulary of {anatomy.vocab_size}"
            )
        rows: dict[int, Tensor] = {}
        for length in sorted(set(self.lengths)):
            check_context(anatomy, length, "--lengths")
            if length < least_tokens:
                raise SourceError(f"--lengths {length}: give at least {least_tokens} tokens")
            try:
                rows[length] = invert.rows_of_length(
                    texts,
                    tokenizer,
                    length,
                    most_rows,
                    least=least_rows,
                    seed=self.seed,
                    start_token_id=self.bos,
                )
            except invert.TooLittleText as error:
                raise SourceError(f"--lengths {length}: {error}") from error
        return rows

    def _makers(
        self, attacks: Sequence[str], tokenizer: PreTrainedTokenizerBase
    ) -> list[tuple[str, Any]]:
        hello = tokenizer("hello", add_special_tokens=False)["input_ids"]
        settings: dict[str, Any] = {
            "steps": self.steps,
            "budget_seconds": self._budget,
            "hello": hello[-1] if hello else None,
            "special_ids": tokenizer.all_special_ids,
        }
        if self.public is not None:
            owned = read_texts(self.public, self.public_column, option="--public-column")
            ids = tokenizer(owned[:PUBLIC_TEXTS], truncation=True, max_length=PUBLIC_TOKENS)[
                "input_ids"
            ]
            try:
                settings["public_text"] = PublicText(ids)
            except ValueError as error:
                raise SourceError(f"--public '{self.public}': {error}") from error
        return [(name, partial(invert.make_adversary, name, **settings)) for name in attacks]

    # ---- the run --------------------------------------------------------------------------

    def _measure(self, console: Console, study: _Study[C]) -> tuple[list[C], bool]:
        """Return the cells that were done, and whether an interrupt cut them short."""
        cells: list[C] = []
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("starting", total=study.total)
            try:
                for cell in study.cells(lambda name: progress.update(task, description=name)):
                    cells.append(cell)
                    progress.advance(task)
                    self._write(study, cells)
            except KeyboardInterrupt:
                return cells, True
        return cells, False

    @property
    def _file(self) -> Path:
        return self.out / "inversion.json"

    def _write(self, study: _Study[C], cells: Sequence[C]) -> None:
        content = {
            "schema": 1,
            "from": self.from_,
            "model": self.model or "embedded",
            "text": self.text or "embedded",
            "column": self.column,
            "precision": self.precision,
            **study.settings,
            "budget_seconds": self._budget,
            "seed": self.seed,
            "cells": [c.to_dict() for c in cells],
        }
        part = self._file.with_suffix(".part")
        try:
            part.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
            part.replace(self._file)
        except OSError as error:
            raise printing.unwritable(self._file, error, "folder with --out") from error

    def _plot(self, console: Console, cells: Sequence[ActivationCell]) -> None:
        for name in PLOTS.values():  # of an earlier run, with other numbers
            (self.out / name).unlink(missing_ok=True)
        if not cells:
            return
        if missing := printing.without_matplotlib():
            console.print(f"No plots: they need matplotlib ({missing}).")
            return
        model = "embedded model" if self.model is None else Path(self.model).name
        for axis, name in PLOTS.items():
            if invert.worth_drawing(cells, axis):
                invert.plot_cells(cells, axis, self.out / name, model=model)
                console.print(f"Plot: {self.out / name}", soft_wrap=True)


def _listed(values: Any) -> str:
    return ", ".join(f"{v:g}" for v in sorted(set(values)))


def activation_table(cells: Sequence[ActivationCell]) -> Table:
    """Return a row for each cell; the token accuracy with its 95% interval."""
    title = (
        f"what the hidden states at the split give away\n{_budget(cells, 'the texts of a line')}"
    )
    names = (
        "attack",
        "split",
        "len",
        "noise",
        "token accuracy",
        "exact",
        "ROUGE",
        "task",
        "ppl",
        "ms",
    )
    rows = _table_of(title, names)
    for cell in cells:
        useful = cell.utility
        perplexity = None if useful is None else useful.perplexity
        rows.add_row(
            *_keys(cell, cell.layer),
            *_rates(cell, "failed"),
            "unknown" if useful is None else _short(useful.accuracy),
            "" if perplexity is None else f"{perplexity:.3g}",
            f"{1e3 * cell.seconds_per_token:.3g}" if cell.rates else "",
        )
    return rows


def gradient_table(cells: Sequence[GradientCell]) -> Table:
    """Return a row for each cell; the share in place with its 95% interval."""
    title = f"what the gradient of a batch gives away\n{_budget(cells, 'a batch')}"
    names = ("attack", "batch", "len", "noise", "in place", "exact", "certified", "s")
    rows = _table_of(title, names)
    for cell in cells:
        batches = cell.batches - cell.unknown
        rows.add_row(
            *_keys(cell, cell.batch),
            *_rates(cell, "unknown")[:2],
            "" if cell.certified is None else f"{cell.certified}/{batches}",
            f"{cell.seconds:.3g}" if cell.rates else "",
        )
    return rows


def _table_of(title: str, names: Sequence[str]) -> Table:
    """Return a table without rows: four columns name a cell, and the fifth holds an interval."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number in (0, 4) else "right", no_wrap=True)
    return table


def _keys(cell: ActivationCell | GradientCell, place: int) -> tuple[str, str, str, str]:
    """Return what names a cell: attack (with a star where it was cut off), place, length, noise."""
    star = "" if cell.finished or not cell.rates else "*"
    return cell.attack + star, str(place), str(cell.length), f"{cell.sigma:g}"


def explain_gradients(cells: Sequence[GradientCell]) -> str:
    """Return what the table means, in sentences."""
    unit = " in root mean squares of all gradients" if cells[0].relative else ""
    lines = [
        "",
        "in place: the share of a text's tokens that are right at their place, mean over texts; in "
        "brackets its 95% interval over texts. The last token of a text is in these gradients as a "
        "label alone: it does not count where an attack leaves it open. exact: texts without an "
        "error. certified: batches of which the server itself can check that these are the "
        "texts, and all of them. s: wall time for a batch. batch: texts. len: tokens. noise: "
        f"standard deviations{unit}.",
    ]
    lines += [
        f"Unknown: {c.attack}, batches of {c.batch} x {c.length}, noise {c.sigma:g}: {c.unknown} "
        f"of {c.batches} batches, which count in no number of their line: {c.problem}"
        for c in cells
        if c.unknown
    ]
    return "\n".join([*lines, *_ends(cells)])


def _budget(cells: Sequence[ActivationCell] | Sequence[GradientCell], scope: str) -> str:
    """Return the time that attacks had."""
    budgets = dict.fromkeys(_seconds(c) for c in cells if c.rates)
    return f"budget: {', '.join(budgets) or 'none'} for {scope}"


def _ends(cells: Sequence[ActivationCell] | Sequence[GradientCell]) -> list[str]:
    """Return the last sentences of both explanations."""
    cut = dict.fromkeys(_seconds(c) for c in cells if not c.finished and c.rates)
    lines = []
    if cut:
        lines.append(
            f"*: cut off by the budget of {', '.join(cut)}, the best that was found by then; "
            "--budget-seconds gives more, inf for no bound."
        )
    lines.append(
        "A low number says that these attacks fail here, not that none succeeds: a server may know "
        "more, or search longer."
    )
    return lines


def _seconds(cell: ActivationCell | GradientCell) -> str:
    return "none" if cell.budget_seconds is None else f"{cell.budget_seconds:g} s"


def _rates(cell: ActivationCell | GradientCell, fallback: str) -> tuple[str, str, str]:
    """Return token accuracy, exact texts and ROUGE-L; a word where there are none."""
    if not cell.rates:
        return fallback, "", ""
    accuracy, rouge = cell.rates["token_accuracy"], cell.rates["rouge_l"]
    low, high = (_short(v, 2) for v in (accuracy.low, accuracy.high))
    exact = round(cell.rates["exact_sentences"].value * cell.texts)
    return (
        f"{_short(accuracy.value)} [{low}, {high}]",
        f"{exact}/{cell.texts}",
        "" if math.isnan(rouge.value) else _short(rouge.value),
    )


def _short(value: float, digits: int = 3) -> str:
    """Return a share without the leading zero; an exact 0 or 1 as such, unlike .0004 or .9996."""
    return f"{value:.0f}" if value in (0, 1) else f"{value:.{digits}f}".replace("0.", ".", 1)


def explain_activations(cells: Sequence[ActivationCell]) -> str:
    """Return what the table means, in sentences."""
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
    return "\n".join([*lines, *_ends(cells)])


def _task(cells: Sequence[ActivationCell]) -> str:
    tasks = dict.fromkeys(c.utility.task for c in cells if c.utility is not None)
    if not tasks:
        return "task: unknown."
    return f"task: {', '.join(tasks)} of the whole model from the noised states; ppl: perplexity."


def _half(cells: Sequence[ActivationCell], layer: int, length: int) -> list[str]:
    """Return what is still read where noise has cost half of the task."""
    clean = next((c.utility for c in cells if c.sigma == 0 and c.utility is not None), None)
    if clean is None or clean.accuracy <= 0:
        return []
    useful = [
        c for c in cells if c.utility and c.rates and c.utility.accuracy >= clean.accuracy / 2
    ]
    noise = max((c.sigma for c in useful), default=0.0)
    if noise == 0:
        return []
    results = ", ".join(
        f"{c.attack}{'' if c.finished else '*'} {_short(c.rates['token_accuracy'].value)}"
        for c in useful
        if c.sigma == noise
    )
    return [
        f"Split {layer}, {length} tokens: at noise {noise:g}, the most tried that leaves the model "
        f"half of its {clean.task}, the share of tokens read is: {results}."
    ]
