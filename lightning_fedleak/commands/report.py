"""``fedleak report``: what runs showed, for people, or for a model card."""

from __future__ import annotations

import argparse

from lightning_fedleak.finetuning import SourceError
from lightning_fedleak.report import ReportError, print_card, write


def run(options: argparse.Namespace) -> int:
    """Write the report of runs, or print a model card, and return 0.

    Raises:
        SourceError: the runs cannot be read.
    """
    try:
        if options.model_card:
            print_card(options.runs, options.about)
            return 0
        for path in write(options.runs, options.out, options.about, options.reveal):
            print(path)
    except ReportError as error:
        raise SourceError(str(error)) from error
    return 0
