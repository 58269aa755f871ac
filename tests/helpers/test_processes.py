"""Two processes of a test: what is done where native code ends one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.processes import two_processes

MODULE = "tests.helpers.crashing_worker"


def test_processes_that_abort_are_run_once_more_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="crashing_worker crashed, and is run once more"):
        results = two_processes(MODULE, tmp_path)
    assert results == [{"rank": 0}, {"rank": 1}]


def test_a_second_crash_fails(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception):
        two_processes(MODULE, tmp_path, again=False)
