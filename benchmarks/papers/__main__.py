"""Tables and figures of the three papers, published numbers next to measured ones.

    python -m benchmarks.papers --list
    python -m benchmarks.papers membership table2 --model DIR DIR
    python -m benchmarks.papers flatchat table3 --model DIR
    python -m benchmarks.papers inversion fig1 --model DIR
    python -m benchmarks.papers flatchat --model DIR --jobs 2      # all of one paper
    python -m benchmarks.papers --docs benchmarks/papers/README.md   # writes the page, runs nothing
    make papers ENCODER=DIR STORIES=DIR                            # all papers, and the page

A table is made of cells, and each measured cell is a line of ``--log``: stop at any time, and the
same command continues. If a cell fails, the others still run; it is listed at the end and retried
next time, and the exit status is 1. ``--size`` and ``--set NAME=VALUE,VALUE`` say how much is run:
``--size paper`` is nearer to the papers, and takes days. ``--list`` prints the settings and the CPU
seconds of each table, measured if the log has them.

``measured.jsonl`` beside this file is the log of README.md. ``make papers`` goes on with it,
and measures all anew with ``PAPERS_LOG=FILE``.

Models are folders. ``FEDLEAK_ASSETS`` names the folder of the data sets. ``--docs`` without a table
writes what the log holds, which may be of several runs. ``--json FILE`` writes the rows of the
tables that are shown.
"""

import ast
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.papers import flatchat, inversion, membership, tables
from benchmarks.papers.cells import Cell, Log, run
from benchmarks.papers.tables import Paper, Results, Table, published
from benchmarks.shared import parser_of

SMOKE = (
    "membership --size smoke --model {model} --log {out}/log.jsonl --jobs 0 --docs {out}/page.md",
    "flatchat --size smoke --model {model} --log {out}/log.jsonl --jobs 0",
    "inversion --size smoke --model {model} --log {out}/log.jsonl --jobs 0 --json {out}/rows.json",
)

PAPERS: tuple[Paper, ...] = (membership.PAPER, flatchat.PAPER, inversion.PAPER)
LOG = Path("fedleak_runs/papers.jsonl")


def sized(paper: Paper, name: str, changes: Sequence[str]) -> Any:
    """A size of the paper with ``NAME=VALUE`` in it.

    Raises:
        ValueError: no such setting in any paper, or a value of another type.
    """
    size = paper.sizes[name]
    fields = {f.name: getattr(size, f.name) for f in dataclasses.fields(size)}
    for change in changes:
        key, equals, text = change.partition("=")
        everywhere = {f.name for p in PAPERS for f in dataclasses.fields(p.sizes[name])}
        if not equals or key not in everywhere:
            known = ", ".join(fields)
            raise ValueError(f"--set {change}: no such setting. {paper.name} has: {known}")
        if key not in fields:
            continue
        old = fields[key]
        values = [_value(part) for part in text.split(",")]
        like = old[0] if isinstance(old, tuple) and old else old
        if isinstance(like, float):
            values = [float(v) if isinstance(v, int) else v for v in values]
        one_of_many = len(values) > 1 and not isinstance(old, tuple)
        if one_of_many or any(type(v) is not type(like) for v in values):
            raise ValueError(f"--set {change}: {key} is like {key}={_written(old)}")
        fields[key] = tuple(values) if isinstance(old, tuple) else values[0]
    return type(size)(**fields)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _written(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def expected(cells: Sequence[Cell], log: Log) -> float:
    """Return CPU seconds, measured if the log has them."""
    return sum(s if (s := log.seconds(c)) is not None else c.seconds for c in cells)


def unique(cells: Sequence[Cell]) -> list[Cell]:
    """Each cell once."""
    return list({cell.key: cell for cell in cells}.values())


def listing(
    chosen: Sequence[tuple[Paper, Table]], sizes: dict[str, Any], log: Log, models: Sequence[str]
) -> None:
    """Every table, its cells, and its time; of these models, by default of those of the log."""
    print("| paper | table | shows | cells | done | processor seconds |\n|" + "---|" * 6)
    every: list[Cell] = []
    for paper, table in chosen:
        names = list(models) or log.models(paper.measures) or ["MODEL"]
        cells = unique(table.cells(sizes[paper.name], names))
        every += cells
        finished = sum(log.rows(c) is not None for c in cells)
        counts = f"{len(cells)} | {finished} | {expected(cells, log):.0f}"
        print(f"| {paper.name} | {table.name} | {table.title} | {counts} |")
    every = unique(every)
    measured = sum(s for c in every if (s := log.seconds(c)) is not None)
    print(
        f"\nIn all {expected(every, log):.0f} s of one processor, {measured:.0f} of them measured; "
        "cells that several tables show count once."
    )
    for name, size in sizes.items():
        print(f"\n{name}: " + " ".join(f"{k}={_written(v)}" for k, v in vars(size).items()))


def text_of(paper: Paper, table: Table, size: Any, names: Sequence[str], log: Log) -> str:
    """Return one table in Markdown: finding, grids, date, and missing cells."""
    cells = unique(table.cells(size, names))
    results = Results(row for cell in cells for row in log.rows(cell) or ())
    shown = table.show(results, size)
    printed = published()[paper.name][table.name]
    parts = [f"### {paper.name} {table.name}: {table.title}", shown.finding]
    if "says" in printed:
        parts.append(f"The paper ({printed['source']}) says: {printed['says']}.")
    if results:
        parts += map(str, shown.grids)
    parts.append(status(cells, log))
    return "\n\n".join(filter(None, parts))


def status(cells: Sequence[Cell], log: Log) -> str:
    """Return the date, and missing and failed cells."""
    dates = sorted({log.lines[c.key]["date"] for c in cells if log.rows(c) is not None})
    failed = [c for c in cells if log.failure(c) is not None]
    remaining = sum(c.key not in log.lines for c in cells)
    messages = [" to ".join(dict.fromkeys([dates[0], dates[-1]])) + "."] if dates else []
    if remaining:
        messages.append(f"{remaining} of {len(cells)} cells not run.")
    for why in dict.fromkeys(log.failure(cell) for cell in failed):
        alike = [cell for cell in failed if log.failure(cell) == why]
        messages.append(f"{len(alike)} of {len(cells)} cells failed, {alike[0]} first ({why}).")
    return " ".join(messages)


def models_of(paper: Paper, table: Table, size: Any, log: Log) -> list[str]:
    """Return the models that a table of the page shows: those of which all cells were measured.

    If there is none, all that the paper was measured on, so that a partial table is shown too.
    """
    names = log.models(paper.measures) or ["MODEL"]
    complete = [m for m in names if all(log.rows(c) is not None for c in table.cells(size, [m]))]
    return complete or names


def page(sizes: dict[str, Any], log: Log) -> str:
    """benchmarks/papers/README.md."""
    every_table = [(paper, table) for paper in PAPERS for table in paper.tables]
    names = {(p.name, t.name): models_of(p, t, sizes[p.name], log) for p, t in every_table}
    cells = (t.cells(sizes[p.name], names[p.name, t.name]) for p, t in every_table)
    every = [*itertools.chain.from_iterable(cells)]
    parts = [*tables.read_toml("page")["introduction"], cost(unique(every), log)]
    for paper in PAPERS:
        size = sizes[paper.name]
        parts.append(f"## {paper.title}")
        notes = tables.read_toml("page")[paper.name]["notes"]
        parts.append("\n".join(f"- {note}" for note in notes).format(size=paper.sizes["default"]))
        parts += [text_of(paper, t, size, names[paper.name, t.name], log) for t in paper.tables]
    return "\n\n".join(parts) + "\n"


def cost(cells: Sequence[Cell], log: Log) -> str:
    """What a page's cells take, in a sentence or two."""
    measured = [seconds for cell in cells if (seconds := log.seconds(cell)) is not None]
    text = f"The cells of this page take about {expected(cells, log):,.0f} s of one processor."
    lines = [log.lines[c.key] for c in cells if log.rows(c) is not None]
    if lines:
        text += f" Machine: {'; '.join(sorted({line['machine'] for line in lines}))}."
    if len(measured) < len(cells):
        text += f" Of {len(cells)} cells {len(measured)} were measured, in {sum(measured):,.0f} s;"
        text += " the rest is estimated, and says `not run` below."
    return text


def pairs(folders: Sequence[str]) -> dict[str, str]:
    """Folders of models by their names."""
    named = {Path(folder).name: folder for folder in folders}
    if len(named) < len(folders):
        raise ValueError("--model: two folders have one name, by which the log knows a model")
    for folder in folders:
        if not (Path(folder) / "config.json").is_file():
            raise ValueError(f"--model {folder}: no folder of a model (it has no config.json)")
    return named


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(
        __doc__, list=(False, "every table with its time; runs none"),
        model=([str], "folders of models"), jobs=(0, "processes; 0: in this one"),
        size=("default", ["default", "paper", "smoke"]),
        log=(LOG, "measured cells; new ones are appended"),
        docs=(Path, "page to write from the log"), json=(Path, "rows of the tables that are shown"),
    )  # fmt: skip
    parser.prog = "python -m benchmarks.papers"
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE,VALUE")
    parser.add_argument("paper", nargs="?", choices=[paper.name for paper in PAPERS])
    parser.add_argument("table", nargs="*", help="table2, fig1, ...; default all of the paper")
    args = parser.parse_args(argv)
    try:
        # Papers have settings of one name and another type: only the chosen one's are changed.
        changes = {p.name: args.set if args.paper in (None, p.name) else () for p in PAPERS}
        sizes = {p.name: sized(p, args.size, changes[p.name]) for p in PAPERS}
        models = pairs(args.model)
    except ValueError as error:
        parser.error(str(error))
    chosen = [
        (paper, table) for paper in PAPERS for table in paper.tables
        if args.paper in (None, paper.name) and (not args.table or table.name in args.table)
    ]  # fmt: skip
    unknown = set(args.table) - {table.name for _, table in chosen}
    if unknown:
        names = ", ".join(t.name for p in PAPERS if p.name == args.paper for t in p.tables)
        parser.error(f"{args.paper} has no {', '.join(sorted(unknown))}; it has {names}")
    if args.jobs < 0:
        parser.error("--jobs must be 0 or more")
    log = Log.read(args.log)
    if log.unreadable:
        print(f"{args.log}: {log.unreadable} lines cannot be read and are ignored")
    if args.list:
        listing(chosen, sizes, log, list(models))
        return 0
    failures = []
    if args.paper is not None:
        for paper, table in chosen:
            names = list(models)
            settings = [c.settings for c in table.cells(sizes[paper.name], ["?"])]
            if not names and any("model" in setting for setting in settings):
                parser.error(f"{paper.name} {table.name} needs --model, the folder of a model")
        paper = chosen[0][0]
        cells = [c for _, table in chosen for c in table.cells(sizes[paper.name], list(models))]
        failures = run(
            cells, paper.measures, models, log, jobs=args.jobs,
            told=lambda line: print(line, file=sys.stderr, flush=True),
        )  # fmt: skip
        for _, table in chosen:
            print(text_of(paper, table, sizes[paper.name], list(models), log) + "\n")
        if args.json:
            rows = {t.name: [r for c in unique(t.cells(sizes[paper.name], list(models)))
                             for r in log.rows(c) or ()] for _, t in chosen}  # fmt: skip
            args.json.write_text(json.dumps({paper.name: rows}, indent=1) + "\n", "utf-8")
    elif not args.docs:
        parser.error("name a paper, --list or --docs")
    if args.docs:
        args.docs.write_text(page(sizes, log), "utf-8")
        print(f"written: {args.docs}")
    for cell, why in failures:
        print(f"FAILED {cell}: {why}")
    return 1 if failures else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
