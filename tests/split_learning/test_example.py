"""The example, run as a user would."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.helpers.processes import spawn_imported

EXAMPLE = Path(__file__).parents[2] / "examples" / "split_learning" / "run.py"


@pytest.mark.ddp
def test_the_server_reads_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spawn_imported(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(EXAMPLE)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    message, reply = printed.splitlines()
    assert message.startswith("message: 29 tokens")
    assert float(message.split()[-1]) > 0.8
    assert float(reply.split()[-1]) > 0.5
    assert "chainsaw" not in printed, "the text is shown with --reveal only"
