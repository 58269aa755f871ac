"""``fedleak verify`` and ``sign``: what somebody else can check of a run."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from lightning_fedleak.evidence import CONTRADICTED, HOLDS, Verification, sign_run, verify_run
from lightning_fedleak.evidence.chain import runs_below

WORDS = {HOLDS: "holds", CONTRADICTED: "does not hold"}


def run_verify(options: Namespace) -> int:
    """Print what was checked, and return 0, 2 where it is undecided, or 3 where it does not hold.

    Raises:
        ReportError: a file cannot be read.
    """
    check = verify_run(
        options.run, options.weights, options.key, options.head, options.repetition, options.client
    )
    return _show(options.run, check)


def _show(place: Path, check: Verification) -> int:
    """Print what a check found, and return its exit code."""
    console, verdict = Console(highlight=False, soft_wrap=True), check.verdict
    for title, texts in (
        ("contradiction", verdict.contradictions),
        ("open", verdict.open),
        ("note", verdict.notes),
        ("checked", check.checked),
        ("not checked", check.not_checked),
    ):
        for text in texts:
            console.print(f"{title}: {escape(text)}")
    for name, head in check.heads.items():
        console.print(f"{name}: {check.lines[name]} lines, the last with hash {head}")
    console.print(f"{place}: {WORDS.get(verdict.status, 'undecided')}")
    return verdict.status


def run_sign(options: Namespace) -> int:
    """Sign a run's files, print where the statement is, and return 0.

    Raises:
        ReportError: a file cannot be read.
    """
    print(sign_run(options.run, options.key))
    if others := runs_below(options.run):
        print(f"{others}: they are not signed; sign each")
    return 0
