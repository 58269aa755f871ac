from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from lightning_fedleak.cli import main
from lightning_fedleak.commands.completion import script
from lightning_fedleak.studies.names import GAME_ATTACKS

ASK = """
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_fedleak
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(*words: str) -> set[str]:
    """What bash proposes for the last word."""
    given = " ".join(shlex.quote(word) for word in ("fedleak", *words))
    done = subprocess.run(
        ["bash", "--norc", "-u", "-c", script("bash") + ASK.format(words=given)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_proposes_what_exists() -> None:
    assert completed("") >= {"demo", "game", "recipes", "fit"}
    assert completed("ga") == {"game"}
    assert completed("game", "--te") == {"--text"}
    assert completed("game", "--attack", "") == set(GAME_ATTACKS)
    assert completed("game", "--attack", "fc", "att") == {"attention"}
    assert completed("game", "--attack", "fc", "--col") == {"--column"}
    assert completed("sweep", "--peft", "l") == {"lora"}
    assert completed("recipes", "gate_l") == {"gate_leakage"}
    assert completed("completion", "z") == {"zsh"}
    assert "--config" in completed("fit", "--co")
    assert completed("game", "--text", "") == set()  # the shell's own: files


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("autoload -U +X compinit")
    assert said.endswith(script("bash"))
