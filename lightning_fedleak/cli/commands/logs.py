"""The subcommands that read the logs of runs: ``report``, ``compare`` and ``verify``."""

from argparse import Namespace

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_fedleak.cli.printing import print_table
from lightning_fedleak.evidence import CONTRADICTED, HOLDS, verify_run
from lightning_fedleak.report import ReportError, findings, print_card, read, write
from lightning_fedleak.report.comparing import names_of
from lightning_fedleak.report.overview import plain
from lightning_fedleak.report.records.lines import title_of

_LABEL_WIDTH = 22  # characters of the first column of a comparison, with its borders
_STATUS_WORDS = {HOLDS: "holds", CONTRADICTED: "does not hold"}


def run_report(options: Namespace) -> int:
    """Write the report of runs, or print a model card, and return 0.

    Raises:
        ReportError: The runs cannot be read.
    """
    if options.model_card:
        print_card(options.runs, options.out)
        return 0
    for path in write(options.runs, options.out, options.reveal):
        print(path)
    return 0


def run_compare(options: Namespace) -> int:
    """Print the runs in some log folders side by side, and return 0.

    Raises:
        ReportError: A folder cannot be read, or there are not two runs to compare.
    """
    content = findings(read(options.runs))
    comparison = content.comparison
    if comparison is None:
        raise ReportError(
            f"{options.runs[0]} holds one run, and two are needed: name the folder of another"
        )
    console = Console(highlight=False)
    for name, overview in zip(names_of(content.runs), content.overviews, strict=True):
        for warning in overview.warnings:
            console.print(f"{name}: {warning}", markup=False, soft_wrap=True)
    claims = ["\n".join(account.claim for account in fit.privacy) for fit in content.runs]
    titles = [x.replace(comparison.metric, title_of(comparison.metric)) for x in comparison.columns]
    table = Table(show_lines=True)
    # Each run has an equal part of the console's width, less 3 characters of borders and padding.
    width = max(20, (console.width - _LABEL_WIDTH) // len(content.runs) - 3)
    table.add_column("run")
    for name, *_ in comparison.rows:
        table.add_column(escape(name), overflow="fold", max_width=width)
    for title, *values in [*zip(titles, *comparison.rows, strict=True)][1:]:
        table.add_row(escape(title), *map(escape, values))
    table.add_row("epsilon", *(claim or "none accounted" for claim in claims))
    print_table(console, table)
    console.print(
        f"{plain(comparison.sentence)}\nEach value is of the attack that recovered most, with its "
        "95% interval. Where intervals overlap, the difference may be chance.",
        markup=False,
        soft_wrap=True,
    )
    lengths = {fit.steps for fit in content.runs}
    if len(lengths) > 1:
        console.print("The runs differ in length: a change may come from that.")
    return 0


def run_verify(options: Namespace) -> int:
    """Print the checks of a run, and return the exit status of the verdict.

    It is 0 if all checks hold, 2 if the verdict is undecided, and 3 if a check contradicts the
    logs.

    Raises:
        ReportError: A file cannot be read.
    """
    verdict = verify_run(options.run, options.weights, options.head, options.repetition)
    console = Console(highlight=False, soft_wrap=True)
    for title, texts in (
        ("contradiction", verdict.contradictions),
        ("open", verdict.open),
        ("note", verdict.notes),
        ("checked", verdict.checked),
        ("not checked", verdict.not_checked),
    ):
        for text in texts:
            console.print(f"{title}: {escape(text)}")
    for name, head in verdict.heads.items():
        console.print(f"{name}: {verdict.lines[name]} lines, the last with hash {head}")
    console.print(f"{options.run}: {_STATUS_WORDS.get(verdict.status, 'undecided')}")
    return verdict.status
