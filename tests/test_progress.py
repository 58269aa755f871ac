"""Progress in a notebook; on a terminal and in a pipe it is tested where it is shown."""

from __future__ import annotations

import importlib.util
import time
from functools import partial

import pytest
import torch
from rich.console import Console

from lightning_fedleak import progress


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a kernel of Jupyter that has no ipywidgets."""
    find = importlib.util.find_spec
    monkeypatch.setattr(progress, "Console", partial(Console, force_jupyter=True))
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ipywidgets" else find(name)
    )


@pytest.mark.usefixtures("notebook")
@pytest.mark.filterwarnings("error")
def test_a_notebook_without_widgets_gets_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.bars(True):
        assert list(progress.track([1, 2], "reading")) == [1, 2]
        assert list(progress.track([3], "writing")) == [3]
        assert list(progress.track([6, 7], "calibrates", "no. {}".format)) == [6, 7]
    with progress.bars(False):
        assert list(progress.track([4], "nothing")) == [4]
    assert list(progress.track([5], "nothing")) == [5]
    shown = capsys.readouterr()
    expected = "reading ...\nwriting ...\ncalibrates no. 6 ...\ncalibrates no. 7 ...\n"
    assert shown.err == expected
    assert shown.out == ""


def test_seconds_are_those_of_the_work_and_not_of_other_programs() -> None:
    device = torch.device("cpu")
    assert progress.measure_seconds(lambda: time.sleep(0.2), device) < 0.2
    assert progress.measure_seconds(lambda: sum(range(200_000)), device) > 0


def test_seconds_of_the_processor_are_shared_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 18.0])
    monkeypatch.setattr(progress.time, "process_time", lambda: next(clock))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert progress.measure_seconds(lambda: None, torch.device("cpu")) == 2.0
