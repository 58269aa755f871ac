"""Zheng: Input Reconstruction Attack against Vertical Federated LLMs: Figs. 1 and 2.

Noise is counted in standard deviations of each dimension of the hidden states, the paper's in
absolute numbers of its own model; the task is the next token instead of questions and answers.
``paper`` is the paper's descent, ``relaxation`` the baseline that it names (its ref. 18),
``descent`` and ``prefix`` are ours.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from word_recovery import read_texts

from benchmarks.papers.cells import Cell, Row
from benchmarks.papers.tables import Found, Grid, Paper, Shown, Table, finding, number, rate_of
from lightning_fedleak.anatomy import Anatomy, find_anatomy
from lightning_fedleak.commands.invert import make_adversary, rows_of_length, run_cells

LOST = 0.1
"""Share of its noise-free accuracy below which the task is called lost."""


@dataclass(frozen=True)
class Size:
    """How much is run.

    Attributes:
        text: a name or a file, as in word_recovery.py.
        splits: blocks below the split.
        texts: attacked in each cell.
        utility_texts: on which the task is measured.
        steps: most steps of a descent; the paper's 1,000.
        length, noises, attacks: of Fig. 1.
        lengths, length_attacks: of Fig. 2, without noise.
    """

    text: str = "imdb"
    splits: tuple[int, ...] = (10, 20)
    texts: int = 3
    utility_texts: int = 8
    steps: int = 100
    length: int = 16
    noises: tuple[float, ...] = (0.0, 0.3, 1.0, 3.0)
    attacks: tuple[str, ...] = ("paper", "relaxation", "descent", "prefix")
    lengths: tuple[int, ...] = (16, 64, 256)
    length_attacks: tuple[str, ...] = ("paper", "prefix")
    seed: int = 0


SIZES = {
    "default": Size(),
    "paper": Size(texts=20, utility_texts=20, steps=1000, length=220,
                  noises=(0.0, 0.1, 0.3, 1.0, 2.0, 3.0), lengths=(16, 64, 256, 1000)),
    "smoke": Size(splits=(1,), texts=1, utility_texts=1, steps=2, length=8, noises=(0.0,),
                  attacks=("paper",), lengths=(8,), length_attacks=("paper",)),
}  # fmt: skip


@functools.lru_cache(maxsize=1)
def loaded(folder: str) -> tuple[Any, Anatomy]:
    """Tokenizer and anatomy of a causal model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return AutoTokenizer.from_pretrained(folder), find_anatomy(model)


def measure(
    *, model: str, text: str, attack: str, split: int, length: int, noise: float, texts: int,
    utility_texts: int, steps: int, seed: int, models: Mapping[str, str],
) -> list[Row]:  # fmt: skip
    """One attack on the states behind one split."""
    tokenizer, anatomy = loaded(models[model])
    many = max(texts, utility_texts)
    rows = rows_of_length(read_texts(text), tokenizer, length, many, least=many, seed=seed)
    hello = tokenizer("hello", add_special_tokens=False)["input_ids"][-1]
    make = partial(
        make_adversary, attack, steps=steps, hello=hello, special_ids=tokenizer.all_special_ids
    )
    (cell,) = run_cells(
        anatomy, {length: rows}, [(attack, make)], [split], [noise], relative=True, texts=texts,
        seed=seed,
    )  # fmt: skip
    if not cell.rates:
        raise RuntimeError(cell.problem)
    row: Row = {"blocks": cell.blocks, "seconds": cell.cpu_seconds, "taken": cell.steps}
    row |= {name: vars(cell.rates[name]) for name in ("token_accuracy", "exact_sentences")}
    utility = cell.utility
    return [
        row | {"task": utility and utility.accuracy, "perplexity": utility and utility.perplexity}
    ]


def cells(
    size: Size, models: Sequence[str], attacks: Sequence[str], lengths: Sequence[int],
    noises: Sequence[float],
) -> list[Cell]:  # fmt: skip
    found = []
    for model, split, attack, length, noise in product(
        models, size.splits, attacks, lengths, noises
    ):
        settings = {"model": model, "text": size.text, "attack": attack, "split": split,
                    "length": length, "noise": noise, "texts": size.texts,
                    "utility_texts": size.utility_texts, "steps": size.steps,
                    "seed": size.seed}  # fmt: skip
        tokens = size.texts * length
        # Of a model with some hundred million weights.
        seconds = tokens * (0.05 + 1.5 * bool(noise)) if attack == "prefix" else (
            tokens * split * size.steps * 7e-4
        )  # fmt: skip
        found.append(Cell("inversion", settings, 15 + seconds, f"{model}, split {split}, {attack}"))
    return found


def fig1_cells(size: Size, models: Sequence[str]) -> list[Cell]:
    return cells(size, models, size.attacks, [size.length], size.noises)


def fig2_cells(size: Size, models: Sequence[str]) -> list[Cell]:
    return cells(size, models, size.length_attacks, size.lengths, [0.0])


def rate(rows: Sequence[Row]) -> str:
    return str(rate_of(rows[0], "token_accuracy")) if rows else "not run"


def show_fig1(found: Found, size: Size) -> Shown:
    lines, told = [], []
    for model, split in product(found.values("model") or ["ours"], size.splits):
        at = found.where(model=model, split=split, length=size.length)
        clean = next((r["task"] for r in at if r["noise"] == 0.0), None)
        for noise in size.noises:
            rows = [r for r in at if r["noise"] == noise]
            task = next((r["task"] for r in rows if r["task"] is not None), None)
            by = {a: [r for r in rows if r["attack"] == a] for a in size.attacks}
            blocks = rows[0]["blocks"] if rows else "?"
            lines.append(
                [model, f"{split} of {blocks}", f"{noise:g}",
                 "not run" if task is None else number(task, 2), *(rate(by[a]) for a in by)]
            )  # fmt: skip
            if clean and task is not None and task < LOST * clean:
                best = {a: rate_of(r[0], "token_accuracy").value for a, r in by.items() if r}
                told.append(
                    f"behind block {split} noise {noise:g} leaves {number(task, 2)} of the task's "
                    f"{number(clean, 2)}, and "
                    + ", ".join(f"`{a}` reads {number(v, 2)}" for a, v in best.items())
                )
    if found and not told:
        told.append("no noise level that was run takes the task below a tenth of what it was")
    head = ["model", "split", "noise", "next token", *size.attacks]
    return Shown([Grid(head, lines)], finding(told))


def show_fig2(found: Found, size: Size) -> Shown:
    lines, told = [], []
    for model, split in product(found.values("model") or ["ours"], size.splits):
        for length in size.lengths:
            at = found.where(model=model, split=split, length=length, noise=0.0)
            blocks = at[0]["blocks"] if at else "?"
            line = [model, f"{split} of {blocks}", str(length)]
            for attack in size.length_attacks:
                rows = [r for r in at if r["attack"] == attack]
                line += [rate(rows), str(_steps(rows)), _ms(rows)]
            lines.append(line)
        for attack in size.length_attacks:
            values = {r["length"]: rate_of(r, "token_accuracy").value
                      for r in found.where(model=model, split=split, attack=attack, noise=0.0)
                      if r["length"] in size.lengths}  # fmt: skip
            if values:
                ends = ", ".join(f"{number(v, 2)} at {n}" for n, v in sorted(values.items()))
                told.append(f"`{attack}` behind block {split} reads {ends} tokens")
    columns = [f for a in size.length_attacks for f in (a, "steps", "ms a token")]
    return Shown([Grid(["model", "split", "tokens", *columns], lines)], finding(told))


def _steps(rows: Sequence[Row]) -> str:
    return "" if not rows or rows[0]["taken"] is None else f"{rows[0]['taken']:.0f}"


def _ms(rows: Sequence[Row]) -> str:
    return (
        "" if not rows else f"{1e3 * rows[0]['seconds'] / rows[0]['texts'] / rows[0]['length']:.1f}"
    )


PAPER = Paper(
    "inversion",
    "Input Reconstruction Attack against Vertical Federated Large Language Models (Zheng)",
    (
        Table("fig1", "tokens read and task against noise", fig1_cells, show_fig1),
        Table("fig2", "tokens read against length", fig2_cells, show_fig2),
    ),
    SIZES,
    {"inversion": measure},
    (
        "Model and text: ours are named; the paper's are ChatGLM-6B on SQuAD and FindSum.",
        "Noise: in standard deviations of each dimension of the states; the paper's is absolute.",
        "`paper` is the paper's attack, `relaxation` its baseline, `descent` and `prefix` are "
        "ours. Descents take at most the steps that the size names; the paper's take 1,000.",
    ),
)  # fmt: skip
