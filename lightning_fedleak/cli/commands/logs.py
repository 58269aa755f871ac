"""The subcommands that read the logs of runs: ``report``, ``compare`` and ``verify``."""

from __future__ import annotations

from argparse import Namespace

from rich.console import Console
from rich.markup import escape

from lightning_fedleak.cli.printing import print_comparison
from lightning_fedleak.evidence import CONTRADICTED, HOLDS, verify_run
from lightning_fedleak.report import ReportError, findings, print_card, read, write

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
    if content.comparison is None:
        raise ReportError(
            f"{options.runs[0]} holds one run, and two are needed: name the folder of another"
        )
    print_comparison(Console(highlight=False), content)
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
