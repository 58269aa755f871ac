"""The example for TRL, run as a user would."""

import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("trl")


def test_the_gate_stops_it_at_the_third_look_above_the_threshold(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(Path(__file__).parents[2] / "examples/trl_sft.py"), run_name="__main__")
    looks = re.findall(r"step (\d+): leakage/worst/words = ([\d.]+)", capsys.readouterr().out)
    assert [int(step) for step, _ in looks] == [1, 3, 5]
    assert all(float(value) > 0.5 for _, value in looks)
