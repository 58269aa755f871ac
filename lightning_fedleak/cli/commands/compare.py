"""``fedleak compare``: what changed between runs."""

from __future__ import annotations

from argparse import Namespace

from rich.console import Console

from lightning_fedleak.cli.printing import print_comparison
from lightning_fedleak.report import ReportError, findings, read


def run(options: Namespace) -> int:
    """Print the runs in some log folders side by side, and return 0.

    Raises:
        ReportError: one of them cannot be read, or there are not two runs to compare.
    """
    content = findings(read(options.runs))
    if content.comparison is None:
        raise ReportError(f"one run to compare in {options.runs[0]}: name the folder of another")
    print_comparison(Console(highlight=False), content)
    return 0
