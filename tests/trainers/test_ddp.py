"""Two gloo processes: a loop of one's own, and transformers' Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.processes import two_processes
from tests.trainers.test_watch import lines

pytestmark = [pytest.mark.ddp, pytest.mark.slow]


def test_two_processes(tmp_path: Path) -> None:
    """What each process shares is its own gradient; training is bit-identical; gates agree."""
    ranks = two_processes("tests.trainers.ddp_worker", tmp_path)
    expected = {"loop": 1.0, "same": True, "steps": 2, "saved": True}
    assert ranks == [expected, expected]
    first = lines(tmp_path / "gate")[0]
    assert (first["client"], first["metrics"]["f1"]["value"]) == ("pooled", 1.0)
