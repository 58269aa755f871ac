"""``fedleak records``: show or drop the training rows that a trained model gives away."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from lightning_fedleak.cli.finetuning import SourceError, read_rows, refuse_errors, text_of
from lightning_fedleak.cli.studies.memorization import used_up_mark
from lightning_fedleak.evaluation.metrics.record_list import RecordList
from lightning_fedleak.private_files import write_lines, write_secret


def run(options: Namespace, console: Console | None = None) -> int:
    """Print the riskiest rows on a terminal, or write the others to a file; return 0.

    Args:
        options: The options of the command.
        console: where to print; stdout by default.

    Raises:
        SourceError: the list or the rows cannot be used, stdout is no terminal, or rows were or
            may have been trained on under differential privacy.
    """
    try:
        records = RecordList.load(options.file)
    except (OSError, ValueError) as error:
        raise SourceError(str(error)) from None
    rows, _ = read_rows(options.data)
    if (largest := max((line.row for line in records.lines), default=-1)) >= len(rows):
        raise SourceError(
            f"the list has row {largest} and '{options.data}' {len(rows)} rows: give the rows that "
            "were trained on"
        )
    is_terminal = sys.stdout.isatty() if console is None else console.is_terminal
    console = console or Console(highlight=False)
    if options.action == "drop":
        _drop(console, records, rows, options)
    elif is_terminal:
        _show(console, records, rows, options)
    else:
        raise SourceError("these are private texts, which are shown on a terminal alone")
    return 0


def _show(
    console: Console, records: RecordList, rows: list[Mapping[str, object]], options: Namespace
) -> None:
    for sentence in records.head["not_said"]:
        console.print(sentence, style="dim")
    for line in records.riskiest(options.top):
        facts = f"row {line.row}, {line.status}, score {line.score}, "
        facts += f"{line.repeats} copies" if line.p is None else f"p {line.p:g}"
        console.print(facts + ", listed" * bool(line.listed), style="bold")
        for name, value in rows[line.row].items():
            text = text_of(value)
            if text is not None and options.column in (None, name):
                characters = (c if c.isprintable() or c == "\n" else " " for c in f"{name}: {text}")
                console.print(Text("".join(characters)))  # without what would steer the terminal


def _drop(
    console: Console, records: RecordList, rows: list[Mapping[str, object]], options: Namespace
) -> None:
    account = records.head.get("account")
    problem = ""
    if account:
        problem = (
            "the rows were trained on under differential privacy: which rows are dropped by their "
            "content is outside of epsilon, and training again without them has no guarantee"
        )
    elif account is None and not options.no_account:
        problem = (
            "the list does not say whether the rows were trained on under differential privacy, "
            "where none may be dropped by their content: say by --no-account that they were not"
        )
    elif records.head["at_least"] is None:
        problem = (
            "too few texts were compared to say of any row that it is given away, so that no row "
            "is dropped by this list: leave more rows out, and make another list"
        )
    elif options.out is None or options.out.suffix != ".jsonl":
        problem = "drop writes the kept rows as JSON lines: give --out FILE.jsonl"
    if problem:
        raise SourceError(problem)
    dropped = {line.row for line in records.riskiest(options.top)}
    with refuse_errors(f"'{options.out}' cannot be written", OSError, TypeError):
        note = "rows were dropped by a list that left-out rows made: draw left-out rows again"
        write_secret(used_up_mark(options.out), {"note": note}, replace=True)
        records.used_up().save(options.file)
        write_lines(options.out, (row for n, row in enumerate(rows) if n not in dropped))
    console.print(
        f"{len(dropped)} of {len(rows)} rows were dropped, {len(rows) - len(dropped)} are in "
        f"{options.out}. The rows that were left out are used up: before you train again, leave "
        "out others by a fresh draw (another seed). No row that was kept is safer than before."
    )
