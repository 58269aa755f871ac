"""``fedleak records``: show or drop the training rows that a trained model leaks.

The list of rows was written by a monitor or by ``fedleak memorization --records``. It ranks row
numbers by how much the model leaks of the row, and holds no text.
"""

import sys
from argparse import Namespace
from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from lightning_fedleak.cli.finetuning import SourceError, read_rows, refuse_errors, text_of
from lightning_fedleak.evaluation.metrics.record_list import RecordList, used_up_mark
from lightning_fedleak.private_files import write_lines, write_secret


def run(options: Namespace, console: Console | None = None) -> int:
    """Print the riskiest rows on a terminal, or write all other rows to a file; return 0.

    Args:
        options: The options of the command.
        console: The console to print on; stdout by default.

    Raises:
        SourceError: The list or the rows cannot be used; rows should be shown and stdout is no
            terminal; or rows should be dropped and the run had differential privacy, or may have
            had it.
    """
    try:
        records = RecordList.load(options.file)
    except (OSError, ValueError) as error:
        raise SourceError(str(error)) from None
    rows, _ = read_rows(options.data)
    if (max_row := max((line.row for line in records.lines), default=-1)) >= len(rows):
        raise SourceError(
            f"the list has row {max_row} and '{options.data}' {len(rows)} rows: give the rows that "
            "were trained on"
        )
    is_terminal = sys.stdout.isatty() if console is None else console.is_terminal
    console = console or Console(highlight=False)
    if options.action == "drop":
        _drop(console, records, rows, options)
    elif is_terminal:
        _show(console, records, rows, options)
    else:
        raise SourceError("these are private texts, which are shown only on a terminal")
    return 0


def _show(
    console: Console, records: RecordList, rows: list[Mapping[str, object]], options: Namespace
) -> None:
    """Print the riskiest rows with their texts, after the list's notes on what it does not say."""
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
                console.print(Text("".join(characters)))  # without control codes of the terminal


def _drop(
    console: Console, records: RecordList, rows: list[Mapping[str, object]], options: Namespace
) -> None:
    """Write all rows but the riskiest ones to ``--out``, and mark the held-out rows as used up.

    Raises:
        SourceError: The list must not be used to drop rows, or the file cannot be written.
    """
    account = records.head.get("account")  # None: not recorded; False: none
    problem = ""
    if account:
        problem = (
            "the rows were trained on under differential privacy: dropping rows by their content "
            "is not covered by epsilon, and training again without them has no guarantee"
        )
    elif account is None and not options.no_account:
        problem = (
            "the list does not say whether the rows were trained on under differential privacy, "
            "in which case none may be dropped by their content: if they were not, give "
            "--no-account"
        )
    elif records.head["at_least"] is None:
        problem = (
            "too few texts were compared to show that any row leaks, so that no row is dropped by "
            "this list: hold out more rows, and make another list"
        )
    elif options.out is None or options.out.suffix != ".jsonl":
        problem = "drop writes the kept rows as JSON lines: give --out FILE.jsonl"
    if problem:
        raise SourceError(problem)
    dropped = {line.row for line in records.riskiest(options.top)}
    with refuse_errors(f"'{options.out}' cannot be written", OSError, TypeError):
        note = "rows were dropped by a list that depends on the held-out rows: draw them again"
        write_secret(used_up_mark(options.out), {"note": note}, replace=True)
        records.used_up().save(options.file)
        write_lines(options.out, (row for n, row in enumerate(rows) if n not in dropped))
    console.print(
        f"{len(dropped)} of {len(rows)} rows were dropped, {len(rows) - len(dropped)} are in "
        f"{options.out}. The held-out rows are used up: before you train again, hold out rows of a "
        "new draw (another seed). The remaining rows are not safer than before."
    )
