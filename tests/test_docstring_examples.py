"""The examples in docstrings run as they stand: of the root's names, and of some behind it."""

from __future__ import annotations

import doctest
import importlib
from functools import partial

import lightning
import pytest
import transformers

import lightning_fedleak as fedleak

CONSTANTS = {"DISHONEST_SERVER", "EMBEDDED_MESSAGES", "EMBEDDED_MODEL", "HEAD_WEIGHT"}
NAMES = sorted(set(fedleak.__all__) - {"__version__"} - CONSTANTS)
MODULES = [
    "attacks.texts.embedding_descent",
    "evaluation.auditing.private_training",
    "cli.finetuning.module",
]


def find_examples(name: str) -> list[doctest.DocTest]:
    """Return the examples of a name's own docstring, not those of its methods."""
    finder = doctest.DocTestFinder(recurse=False)
    return [test for test in finder.find(getattr(fedleak, name), name) if test.examples]


@pytest.mark.parametrize("name", NAMES)
def test_the_example_runs(name, tmp_path, monkeypatch):
    tests = find_examples(name)
    assert tests, "give it an example in its docstring"
    monkeypatch.chdir(tmp_path)
    # What Lightning prints beside: examples show results alone.
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    monkeypatch.setattr(lightning, "Trainer", partial(lightning.Trainer, **quiet))
    for callback in (transformers.PrinterCallback, transformers.trainer_callback.ProgressCallback):
        monkeypatch.setattr(callback, "on_log", lambda *_, **__: None)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for test in tests:
        test.globs = {}  # each imports what it needs, as a reader would
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)


@pytest.mark.parametrize("name", MODULES)
def test_examples_behind_the_root_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"lightning_fedleak.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
