"""``make smoke`` runs every script of benchmarks/ and tells what failed; here the runner itself."""

from __future__ import annotations

import ast
import os
import sys
import time
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import smoke as runner
from benchmarks.attacks import setups

FOLDER = Path(runner.__file__).parent


@pytest.fixture
def smoke(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The runner, for the scripts in a test's own folder, which need no model."""
    monkeypatch.setattr(runner, "make_assets", lambda folder: {"model": "M"})
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")  # which the runner sets: put back after it
    return runner


def test_every_script_says_how_it_is_run_and_is_listed(smoke: ModuleType) -> None:
    listed = (FOLDER / "README.md").read_text()
    scripts = smoke.scripts([])
    assert len(scripts) >= 18
    for path in scripts:
        assert smoke.runs_of(path)
        if FOLDER in path.parents:
            assert f"| `{path.relative_to(FOLDER)}` |" in listed
    assert {*smoke.EXAMPLES} == {path.name for path in scripts if FOLDER not in path.parents}


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda p: p.stem)
def test_scripts_import_by_package_and_nothing_of_tests(path: Path) -> None:
    siblings = {other.stem for other in FOLDER.rglob("*.py")} - {"__init__", "__main__"}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert not {name.partition(".")[0] for name in names} & {"tests", *siblings}, names


def main(smoke: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    monkeypatch.setattr(smoke, "HERE", folder)
    monkeypatch.setattr(sys, "argv", ["smoke.py"])
    status: int = smoke.main()
    return status


def script(path: Path, smoke: str, body: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"import sys\n{smoke}\nif __name__ == '__main__':\n    {body}\n")


def test_what_fails_hangs_or_is_silent_is_told(smoke, tmp_path, monkeypatch, capsys) -> None:
    script(tmp_path / "good.py", 'SMOKE = ("--model {model}", "b")', "print(sys.argv[1:])")
    (tmp_path / "module.py").write_text("1 / 0\n")
    assert main(smoke, monkeypatch, tmp_path) == 0
    assert "2 runs, 0 failed" in capsys.readouterr().out
    script(tmp_path / "papers" / "bad.py", 'SMOKE = ("", "")', "print('so far'); 1 / 0")
    script(tmp_path / "silent.py", 'SMOKE = ("",)', "pass")
    assert main(smoke, monkeypatch, tmp_path) == 1
    message = capsys.readouterr().out
    assert "5 runs, 3 failed" in message
    assert "so far" in message
    assert "ZeroDivisionError" in message
    assert "printed nothing" in message


def test_a_run_that_does_not_end_is_killed_and_told(smoke, tmp_path, monkeypatch, capsys) -> None:
    present = tmp_path / "there"
    stays = f"print('begun', flush=True); open({str(present)!r}, 'x'); time.sleep(1000)"
    script(tmp_path / "slow.py", 'import time; SMOKE = ("",)', stays)
    pids = []

    def time_is_over(process: BaseProcess, seconds: float) -> bool:
        assert seconds == smoke.LIMIT_S
        while not present.exists():
            assert process.is_alive()
            time.sleep(0.05)
        pids.append(process.pid)
        return False

    monkeypatch.setattr(smoke, "ended", time_is_over)
    assert main(smoke, monkeypatch, tmp_path) == 1
    assert "begun\nnot done after 600 s" in capsys.readouterr().out
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_the_exit_status_of_a_run_is_read_by_one_thread(smoke, tmp_path, monkeypatch, capsys):
    """The start of a run reads the status of others too, which can be read once."""
    read, waiting = forkserver.read_signed, set[int]()

    def read_late(descriptor: int) -> int:
        if descriptor not in waiting:  # a second reader overtakes
            waiting.add(descriptor)
            time.sleep(0.3)
            waiting.discard(descriptor)
        return read(descriptor)

    monkeypatch.setattr(forkserver, "read_signed", read_late)
    script(tmp_path / "good.py", f"SMOKE = {('',) * 12}", "print('done')")
    assert main(smoke, monkeypatch, tmp_path) == 0, capsys.readouterr().out


def test_a_script_that_does_not_say_how_it_is_run_fails(smoke, tmp_path, monkeypatch) -> None:
    script(tmp_path / "papers" / "new.py", "", "print(1)")
    with pytest.raises(SystemExit, match=r"new\.py: give SMOKE"):
        main(smoke, monkeypatch, tmp_path)


def test_setups_refuses_a_round_under_a_defense(tmp_path, monkeypatch, capsys) -> None:
    options = "--model DIR --columns gradient SGD:2 --defenses noise:.01 --out"
    monkeypatch.setattr(sys, "argv", ["setups", *options.split(), str(tmp_path / "cells.jsonl")])
    with pytest.raises(SystemExit):
        setups.main()
    assert "--columns SGD:2: a round is measured without a defence" in capsys.readouterr().err
    assert not (tmp_path / "cells.jsonl").exists()
