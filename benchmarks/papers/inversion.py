"""Zheng: Input Reconstruction Attack against Vertical Federated LLMs: Figs. 1 and 2.

Noise is in standard deviations of each dimension of the hidden states, the paper's in absolute
numbers of its model; the task is the next token instead of questions and answers.
``paper`` is the paper's descent, ``relaxation`` the baseline that it names (its ref. 18),
``descent`` and ``prefix`` are ours.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks import shared
from benchmarks.papers import tables
from benchmarks.papers.baselines import TokenRelaxation
from benchmarks.papers.cells import Cell, Row, chosen
from benchmarks.papers.membership import start_of
from benchmarks.papers.tables import Grid, Results, Shown, Table, finding, number, rate_of
from lightning_fedleak.attacks.texts.base import InversionAttack
from lightning_fedleak.cli.commands.invert import Noise, make_adversary, rows_of_length, run_cells
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy

RELAXATION_LR = 0.3  # learning rate of the relaxation; not tuned
LOST = 0.1
"""Share of its noise-free accuracy below which the task counts as lost."""


@dataclass(frozen=True)
class Size:
    """How much is run.

    Attributes:
        sources: names or files, as in word_recovery.py; Fig. 2 is of the first.
        thirds: of the model's blocks that are below the split; the paper's 10 and 20 of 28.
        texts: number attacked in each cell.
        utility_texts: on which the task is measured.
        steps: maximum steps of a descent.
        published_steps: the paper's, taken by its attack in the first split without noise.
        length, noises, attacks: of Fig. 1.
        lengths, length_attacks: of Fig. 2, without noise.
    """

    sources: tuple[str, ...] = ("imdb", "tinystories")
    thirds: tuple[int, ...] = (1, 2)
    texts: int = 3
    utility_texts: int = 8
    steps: int = 80
    published_steps: int = 1000
    length: int = 16
    noises: tuple[float, ...] = (0.0, 0.3, 1.0, 3.0)
    attacks: tuple[str, ...] = ("paper", "relaxation", "descent", "prefix")
    lengths: tuple[int, ...] = (16, 64, 128)
    length_attacks: tuple[str, ...] = ("paper", "prefix")
    seed: int = 0


SIZES = tables.sizes_of(Size, "inversion")


@functools.lru_cache(maxsize=1)
def loaded(folder: str) -> tuple[Any, Anatomy]:
    """Tokenizer and anatomy of a causal model."""
    tokenizer, model = shared.loaded(folder)
    return tokenizer, find_anatomy(model)


@functools.lru_cache(maxsize=1)
def prepared(folder: str, name: str, split: int, steps: int) -> InversionAttack:
    """The model does not change, so an attack is prepared once for a split."""
    tokenizer, anatomy = loaded(folder)
    hello = tokenizer("hello", add_special_tokens=False)["input_ids"][-1]
    settings = {"steps": steps, "hello": hello, "special_ids": tokenizer.all_special_ids}
    attack = (
        TokenRelaxation(split, steps, RELAXATION_LR, initial="mean") if name == "relaxation"
        else make_adversary(name, split, **settings)
    )  # fmt: skip
    attack.prepare(anatomy)
    attack.prepare = lambda anatomy: None
    return attack


def measure(
    *, model: str, text: str, attack: str, third: int, length: int, noise: float, texts: int,
    utility_texts: int, steps: int, seed: int, models: Mapping[str, str],
) -> list[Row]:  # fmt: skip
    """One attack on the states behind one split."""
    tokenizer, anatomy = loaded(models[model])
    many = max(texts, utility_texts)
    rows = rows_of_length(
        shared.read_texts(text), tokenizer, length, many, min_rows=many, seed=seed,
        start_token_id=start_of(tokenizer, anatomy),
    )  # fmt: skip
    split = max(1, round(third * len(anatomy.blocks) / 3))
    prepared_attack = prepared(models[model], attack, split, steps)
    (cell,) = run_cells(
        anatomy, {length: rows}, [(attack, lambda _: prepared_attack)], [split],
        [Noise(noise, True, seed)], texts=texts,
    )  # fmt: skip
    if not cell.rates:
        raise RuntimeError(cell.problem)
    row: Row = {"split": split, "blocks": cell.blocks}
    row |= {"seconds": cell.cpu_seconds, "taken": cell.steps}
    row |= {name: vars(cell.rates[name]) for name in ("token_accuracy", "exact_sentences")}
    names = {"task": "accuracy", "perplexity": "perplexity"}
    return [row | {k: cell.utility and getattr(cell.utility, name) for k, name in names.items()}]


def cell(
    size: Size, model: str, text: str, third: int, attack: str, length: int, noise: float,
    steps: int,
) -> Cell:  # fmt: skip
    settings = chosen(size, "texts", "utility_texts", "seed", model=model, text=text,
                      attack=attack, third=third, length=length, noise=noise,
                      steps=steps)  # fmt: skip
    tokens = size.texts * length
    # Of a model with some hundred million weights.
    seconds = tokens * (0.05 + 1.5 * bool(noise)) if attack == "prefix" else (
        tokens * 10 * third * steps * 7e-4
    )  # fmt: skip
    return Cell("inversion", settings, 20 + seconds, f"{model}, split {third}/3, {attack}")


def fig1_cells(size: Size, models: Sequence[str]) -> list[Cell]:
    every = product(models, size.sources, size.thirds, size.attacks, size.noises)
    return [
        *(cell(size, m, text, third, attack, size.length, noise, size.steps)
          for m, text, third, attack, noise in every),
        *(cell(size, m, text, size.thirds[0], "paper", size.length, 0.0, size.published_steps)
          for m, text in product(models, size.sources)),
    ]  # fmt: skip


def fig2_cells(size: Size, models: Sequence[str]) -> list[Cell]:
    every = product(models, size.thirds, size.length_attacks, size.lengths)
    return [
        cell(size, model, size.sources[0], third, attack, length, 0.0, size.steps)
        for model, third, attack, length in every
    ]


def place(rows: Sequence[Row], third: int) -> str:
    """The split, in blocks where a cell was measured."""
    return f"{rows[0]['split']} of {rows[0]['blocks']}" if rows else f"{third}/3"


def rate(rows: Sequence[Row]) -> str:
    return str(rate_of(rows[0], "token_accuracy")) if rows else "not run"


def show_fig1(results: Results, size: Size) -> Shown:
    """The weakest of many noises is left out."""
    lines, notes = [], []
    models = results.values("model") or ["ours"]
    weakest = size.noises[1] if len(size.noises) > 3 else None
    for model, text, third in product(models, size.sources, size.thirds):
        cell = {"model": model, "text": text, "third": third, "length": size.length}
        selected = results.where(**cell, steps=size.steps)
        clean = next((r["task"] for r in selected if r["noise"] == 0.0), None)
        for noise in size.noises:
            if noise == weakest:
                continue
            rows = [r for r in selected if r["noise"] == noise]
            task = next((r for r in rows if r["task"] is not None), None)
            by_attack = {a: [r for r in rows if r["attack"] == a] for a in size.attacks}
            lines.append(
                [model, text, place(rows, third), f"{noise:g}",
                 *_utility(task), *(rate(by_attack[a]) for a in by_attack)]
            )  # fmt: skip
            if not notes and clean and task is not None and task["task"] < LOST * clean:
                best = {a: rate_of(r[0], "token_accuracy").value for a, r in by_attack.items() if r}
                read = ", ".join(f"`{a}` recovers {number(v, 2)}" for a, v in best.items())
                notes.append(
                    f"on {model} and {text}, behind block {place(rows, third)}, noise {noise:g} "
                    f"lowers next-token accuracy from {number(clean, 2)} to "
                    f"{number(task['task'], 2)}, and {read}"
                )
    if any(row["noise"] for row in results.rows) and not notes:
        notes.append("no noise level that was run lowers the task's accuracy to a tenth")
    head = ["model", "text", "split", "noise", "next token", "perplexity", *size.attacks]
    grids = [Grid(head, lines), published_grid(results, size)]
    return Shown([*map(tables.of_one_model, grids)], finding(notes))


def published_grid(results: Results, size: Size) -> Grid:
    """The paper's attack with its number of steps, next to ours."""
    third, lines = size.thirds[0], []
    for model, text in product(results.values("model") or ["ours"], size.sources):
        cell = {"model": model, "text": text, "third": third, "length": size.length}
        selected = results.where(**cell, noise=0.0, attack="paper")
        counts = (size.steps, size.published_steps)
        by_steps = {n: [r for r in selected if r["steps"] == n] for n in counts}
        cells = [text for rows in by_steps.values() for text in (rate(rows), str(_steps(rows)))]
        lines.append([model, text, place(selected, third), *cells])
    head = [f"{n:,} steps" for n in (size.steps, size.published_steps)]
    columns = [column for name in head for column in (f"at most {name}", "steps taken")]
    caption = "The paper's attack, from 'hello' at every position, without noise."
    return Grid(["model", "text", "split", *columns], lines, caption)


def _utility(row: Row | None) -> tuple[str, str]:
    """Accuracy and perplexity of the task."""
    if row is None:
        return "not run", "not run"
    perplexity = row["perplexity"]
    if perplexity is None:
        return number(row["task"], 2), ""
    return number(row["task"], 2), f"{perplexity:,.0f}" if perplexity >= 10 else f"{perplexity:.1f}"


def show_fig2(results: Results, size: Size) -> Shown:
    lines, notes = [], []
    for model, third in product(results.values("model") or ["ours"], size.thirds):
        values: dict[str, list[str]] = {attack: [] for attack in size.length_attacks}
        for length in size.lengths:
            selected = results.where(
                model=model, third=third, length=length, noise=0.0, steps=size.steps,
                text=size.sources[0],
            )  # fmt: skip
            line = [model, place(selected, third), str(length)]
            for attack, ends in values.items():
                rows = [r for r in selected if r["attack"] == attack]
                line.append(rate(rows))
                if rows:
                    accuracy = rate_of(rows[0], "token_accuracy").value
                    ends.append(f"{number(accuracy, 2)} at {length}")
            lines.append(line)
        if third == size.thirds[0]:
            notes += [
                f"on {model}, split at {third}/3, `{attack}` recovers {', '.join(ends)} tokens"
                for attack, ends in values.items() if ends
            ]  # fmt: skip
    head = ["model", "split", "tokens", *size.length_attacks]
    return Shown([tables.of_one_model(Grid(head, lines))], finding(notes))


def _steps(rows: Sequence[Row]) -> str:
    return "" if not rows or rows[0]["taken"] is None else f"{rows[0]['taken']:.0f}"


PAPER = tables.Paper(
    "inversion",
    "Input Reconstruction Attack against Vertical Federated Large Language Models (Zheng)",
    (
        Table("fig1", "tokens recovered and task accuracy by noise", fig1_cells, show_fig1),
        Table("fig2", "tokens recovered by length", fig2_cells, show_fig2),
    ),
    SIZES,
    {"inversion": measure},
)  # fmt: skip
