"""``fedleak sign``: a signed statement about the files of a run."""

from __future__ import annotations

from argparse import Namespace

from lightning_fedleak.evidence import sign_run
from lightning_fedleak.evidence.chain import runs_below


def run(options: Namespace) -> int:
    """Sign a run's files, print where the statement is, and return 0.

    Raises:
        ReportError: a file cannot be read.
    """
    print(sign_run(options.run, options.key))
    if others := runs_below(options.run):
        print(f"{others}: they are not signed; sign each")
    return 0
