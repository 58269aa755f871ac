"""The example, run as a user would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import SECONDS, environment_of_own

EXAMPLE = Path(__file__).parents[2] / "examples" / "split_learning.py"


@pytest.mark.ddp
def test_the_server_reads_the_message(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        env=environment_of_own(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    message, reply = done.stdout.splitlines()
    assert message.startswith("message: 29 tokens")
    assert float(message.split()[-1]) > 0.8
    assert float(reply.split()[-1]) > 0.5
    assert "chainsaw" not in done.stdout, "the text is shown with --reveal only"
