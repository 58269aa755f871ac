"""``make smoke`` runs every script of benchmarks/ and tells what failed; here the runner itself."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The runner, for the scripts in ``tmp_path``."""
    spec = importlib.util.spec_from_file_location("smoke", FOLDER / "smoke.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "smoke", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "make_assets", lambda folder: {"model": "M"})
    return module


def test_every_script_says_how_it_is_run_and_is_listed(smoke: ModuleType) -> None:
    listed = (FOLDER / "README.md").read_text()
    scripts = smoke.scripts([])
    assert len(scripts) >= 18
    for path in scripts:
        assert smoke.runs_of(path)
        assert f"| `{path.relative_to(FOLDER)}` |" in listed


def main(smoke: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    monkeypatch.setattr(smoke, "HERE", folder)
    monkeypatch.setattr(sys, "argv", ["smoke.py"])
    status: int = smoke.main()
    return status


def script(path: Path, smoke: str, body: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"import sys\n{smoke}\nif __name__ == '__main__':\n    {body}\n")


def test_what_fails_hangs_or_is_silent_is_told(
    smoke: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    script(tmp_path / "good.py", 'SMOKE = ("--model {model}", "b")', "print(sys.argv[1:])")
    (tmp_path / "module.py").write_text("1 / 0\n")
    assert main(smoke, monkeypatch, tmp_path) == 0
    assert "2 runs, 0 failed" in capsys.readouterr().out
    script(tmp_path / "papers" / "bad.py", 'SMOKE = ("", "")', "print('so far'); 1 / 0")
    script(tmp_path / "silent.py", 'SMOKE = ("",)', "pass")
    assert main(smoke, monkeypatch, tmp_path) == 1
    said = capsys.readouterr().out
    assert "5 runs, 3 failed" in said
    assert "so far" in said
    assert "ZeroDivisionError" in said
    assert "printed nothing" in said


def test_a_run_that_does_not_end_is_told(
    smoke: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    script(tmp_path / "slow.py", 'SMOKE = ("",)', "print('begun')")

    def never(*_: object, **settings: float) -> None:
        raise subprocess.TimeoutExpired("slow.py", settings["timeout"], output=b"begun")

    monkeypatch.setattr(subprocess, "run", never)
    assert main(smoke, monkeypatch, tmp_path) == 1
    said = capsys.readouterr().out
    assert "begun\nnot done after 240 s" in said


def test_a_script_that_does_not_say_how_it_is_run_fails(
    smoke: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "papers" / "new.py", "", "print(1)")
    with pytest.raises(SystemExit, match=r"new\.py: give SMOKE"):
        main(smoke, monkeypatch, tmp_path)
