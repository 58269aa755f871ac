"""``fedleak verify``, ``sign`` and ``replay``: what somebody else can check of a run."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.markup import escape

from lightning_fedleak.engine import Evidence, StepRepeated
from lightning_fedleak.evidence import (
    CONTRADICTED,
    HOLDS,
    Verification,
    check_replay,
    find_kept,
    sign_run,
    verify_run,
)
from lightning_fedleak.evidence.chain import runs_below
from lightning_fedleak.report import ReportError, read
from lightning_fedleak.report.records import RECORD
from lightning_fedleak.validate import explain_errors

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


def run_replay(options: Namespace) -> int:
    """Repeat a step, print what was compared, and return 0, 2 where it is open, or 3.

    Raises:
        ReportError: a file cannot be read, or there is no such function.
    """
    train, check = _function(options.train), verify_run(options.run)
    fits = read([options.run / RECORD]).fits
    fit, line, path = find_kept(fits, options.step, options.evidence, check.verdict)
    if not check.verdict.contradictions:
        with TemporaryDirectory() as place:
            with suppress(StepRepeated):
                train(folder=Path(place), evidence=Evidence(options.evidence, repeats=path))
            text = check_replay(fit, line, Path(place), check.verdict)
        check = replace(check, checked=[*check.checked, *filter(None, [text])])
    return _show(options.run, check)


def _function(name: str) -> Callable[..., object]:
    """Return a function that is named as FILE.py:FUNCTION or MODULE:FUNCTION."""
    place, _, function = name.rpartition(":")
    path = Path(place)
    sys.path.insert(0, str(path.parent if path.suffix == ".py" else Path.cwd()))
    wrong = f"--train takes FILE.py:FUNCTION or MODULE:FUNCTION, and '{name}' is none"
    with explain_errors(wrong, ImportError, AttributeError, ValueError, error=ReportError):
        module = importlib.import_module(path.stem if path.suffix == ".py" else place)
        train: Callable[..., object] = getattr(module, function)
    return train
