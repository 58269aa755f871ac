"""``fedleak report``: what runs showed, on one page."""

from __future__ import annotations

from argparse import Namespace

from lightning_fedleak.report import print_card, write


def run(options: Namespace) -> int:
    """Write the report of runs, or print a model card, and return 0.

    Raises:
        ReportError: the runs cannot be read.
    """
    if options.model_card:
        print_card(options.runs, options.out)
        return 0
    for path in write(options.runs, options.out, options.reveal):
        print(path)
    return 0
