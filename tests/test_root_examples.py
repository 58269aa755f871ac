"""The examples in the docstrings of the package's root run as they stand."""

from __future__ import annotations

import doctest
from functools import partial

import lightning
import pytest

import lightning_fedleak as fedleak

NAMES = sorted(set(fedleak.__all__) - {"__version__"})


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
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for test in tests:
        test.globs = {}  # each imports what it needs, as a reader would
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)
