"""``fedleak replay``: repeat a kept step in the user's own training."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_fedleak.cli.commands.verify import show
from lightning_fedleak.engine.evidence import Evidence, StepRepeated
from lightning_fedleak.evidence.replay import check_file, check_replay, find_kept
from lightning_fedleak.evidence.verification import verify_run
from lightning_fedleak.report import ReportError, read
from lightning_fedleak.report.records import RECORD


def run(options: Namespace) -> int:
    """Repeat a step, print what was compared, and return 0, 2 where it is open, or 3.

    Raises:
        ReportError: a file cannot be read, or there is no such function.
    """
    train, check = _function(options.train), verify_run(options.run)
    fit, line, path = find_kept(read([options.run / RECORD]).fits, options.step, options.evidence)
    check_file(path, line, check.verdict)
    if not check.verdict.contradictions:
        with TemporaryDirectory() as place:
            with suppress(StepRepeated):
                train(folder=Path(place), evidence=Evidence(options.evidence, repeats=path))
            text = check_replay(fit, line, Path(place), check.verdict)
        check = replace(check, checked=[*check.checked, *filter(None, [text])])
    return show(options.run, check)


def _function(name: str) -> Callable[..., object]:
    """Return a function that is named as FILE.py:FUNCTION or MODULE:FUNCTION."""
    place, _, function = name.rpartition(":")
    path = Path(place)
    sys.path.insert(0, str(path.parent if path.suffix == ".py" else Path.cwd()))
    try:
        module = importlib.import_module(path.stem if path.suffix == ".py" else place)
        train: Callable[..., object] = getattr(module, function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ReportError(
            f"--train takes FILE.py:FUNCTION or MODULE:FUNCTION, and '{name}' is none ({error})"
        ) from None
    return train
