"""``action.yml``: its form, and its scripts as GitHub's runner would call them.

The action itself was not run on GitHub.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.blocks import blocks_of
from tests.helpers.folders import noisy_release

ROOT = Path(__file__).parents[1]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}


def test_the_action_has_the_form_of_a_composite_action() -> None:
    """What the pages of GitHub on the metadata of actions say of composite ones."""
    parts = "name", "description", "author", "branding", "inputs", "outputs", "runs"
    assert tuple(ACTION) == parts
    assert 0 < len(ACTION["description"]) <= 125  # of the marketplace
    assert ACTION["branding"].keys() == {"icon", "color"}
    assert ACTION["runs"].keys() == {"using", "steps"}
    assert ACTION["runs"]["using"] == "composite"
    known = {"inputs": {"description", "required", "default"}, "outputs": {"description", "value"}}
    for kind, keys in known.items():
        for name, entry in ACTION[kind].items():
            assert re.fullmatch("[A-Za-z_][A-Za-z0-9_-]*", name)
            assert entry["description"]
            assert entry.keys() <= keys
            assert isinstance(entry.get("required", False), bool)
            assert isinstance(entry.get("default", ""), str)
    assert all(entry["value"] for entry in ACTION["outputs"].values())
    for step in ACTION["runs"]["steps"]:
        [own] = [keys for keys in ({"run", "shell"}, {"uses", "with"}) if step.keys() & keys]
        assert step.keys() <= own | {"name", "id", "if", "env"}
        if "run" in own:
            assert step["run"]
            assert step["shell"] == "bash"
        else:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])
        variables = (step.get("env", {}) | step.get("with", {})).values()
        assert all(isinstance(value, str) for value in variables)


def test_what_expressions_name_is_there_and_none_is_in_a_script() -> None:
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == ACTION["inputs"].keys()
    scripts = {step["id"]: step["run"] for step in STEPS.values() if "id" in step}
    for step, name in re.findall(r"steps\.(\w+)\.outputs\.([\w-]+)", text):
        assert f"{name}=" in scripts[step]
    for step in ACTION["runs"]["steps"]:
        script = step.get("run", "")
        assert "${{" not in script, "an input could end the script and begin another"
        assert all(f"${name}" in script or f"${{{name}" in script for name in step.get("env", {}))


def environment(folder: Path, inputs: dict[str, str]) -> dict[str, str]:
    """Return what the step that measures has in its environment on a runner."""
    names = re.findall(r"(\w+): \$\{\{ inputs\.([\w-]+) \}\}", (ROOT / "action.yml").read_text())
    defaults = {name: one.get("default", "") for name, one in ACTION["inputs"].items()}
    values = {variable: (defaults | inputs)[name] for variable, name in names}
    for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT"):
        (folder / name).touch()
        values[name] = str(folder / name)
    return {
        "PATH": f"{folder / 'path'}:{os.environ['PATH']}",
        "RUNNER_TEMP": str(folder),
        "GITHUB_ACTION_PATH": str(ROOT),
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": str(ROOT),
        **values,
    }


def run_step(name, variables, folder) -> subprocess.CompletedProcess[str]:
    """Run a script as a runner does."""
    (folder / "script.sh").write_text(STEPS[name]["run"])
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(folder / "script.sh")]
    return subprocess.run(
        command, env=variables, cwd=folder, capture_output=True, text=True, check=False
    )


def program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)


RECORDER = f"""#!{sys.executable}
import json, os, pathlib, sys
pathlib.Path(os.environ["RUNNER_TEMP"], "words.json").write_text(json.dumps(sys.argv[1:]))
sys.exit(STATUS)
"""
GIVEN = {"model": "m", "base": "b", "members": "x.txt", "held-out": "y.txt"}


def measured(folder: Path, status: int = 0, **inputs: str) -> tuple[int, list[str]]:
    """Return the status of the step that measures, and the words that ``fedleak`` got."""
    program(folder / "fedleak/bin/fedleak", RECORDER.replace("STATUS", str(status)))
    given = GIVEN | {name.replace("_", "-"): value for name, value in inputs.items()}
    result = run_step("Measure", environment(folder, given), folder)
    words = folder / "words.json"
    return result.returncode, json.loads(words.read_text()) if words.exists() else []


def test_options_are_those_of_the_command(tmp_path: Path) -> None:
    from lightning_fedleak.cli.commands.options import parse

    given = {"thresholds": "auc=0.6\n  extracted=0.05\n", "drawn": "true", "prompt_column": "p"}
    status, words = measured(tmp_path, **given)
    options = parse(words)
    assert status == 0
    assert options.at_most == [("auc", 0.6), ("extracted", 0.05)]
    assert (options.drawn, options.prompt_column, options.others) == (True, "p", "y.txt")
    assert options.records is None
    given |= {"reference": "a b\nc", "reference_rows": "rows.jsonl\n5"}
    options = parse(measured(tmp_path, **given)[1])
    assert (options.reference, options.reference_rows) == (["a b", "c"], ["rows.jsonl", "5"])
    assert str(options.summary) == str(tmp_path / "GITHUB_STEP_SUMMARY")


@pytest.mark.parametrize(
    "text",
    ["$(touch hacked)", "`touch hacked`", '"; touch hacked; "', "'; touch hacked #", "--x=y"],
)
@pytest.mark.parametrize("name", ["model", "held_out", "column"])
def test_an_input_is_one_value_whatever_stands_in_it(tmp_path: Path, name: str, text: str) -> None:
    _, words = measured(tmp_path, **{name: text})
    option = {"held_out": "others"}.get(name, name)
    assert f"--{option}={text}" in words
    assert not list(tmp_path.rglob("hacked"))


@pytest.mark.parametrize("inputs", [{"thresholds": " \n"}, {"drawn": "yes; touch hacked"}], ids=str)
def test_wrong_inputs_are_errors(tmp_path: Path, inputs: dict[str, str]) -> None:
    assert measured(tmp_path, **inputs) == (1, [])
    assert not (tmp_path / "hacked").exists()


def test_thresholds_cannot_become_options_or_files(tmp_path: Path) -> None:
    _, words = measured(tmp_path, thresholds="* --records=z $(touch hacked)")
    limits = ("*", "--records=z", "$(touch", "hacked)")
    assert words[-4:] == [f"--at-most={limit}" for limit in limits]
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("status", [0, 2, 3])
def test_the_exit_status_stays(tmp_path: Path, status: int) -> None:
    assert measured(tmp_path, status)[0] == status
    assert (tmp_path / "GITHUB_OUTPUT").read_text() == f"exit-code={status}\n"
    summary = (tmp_path / "GITHUB_STEP_SUMMARY").read_text()
    assert ("not measured, error 2" in summary) == (status == 2)


def test_what_is_installed_is_one_requirement(tmp_path: Path) -> None:
    recorder = RECORDER.replace("STATUS", "0")
    for name in ("path/python3", "fedleak/bin/python"):
        program(tmp_path / name, recorder)
    for package, expected in (("", f"{ROOT}[peft]"), ("x; touch hacked", "x; touch hacked")):
        variables = environment(tmp_path, GIVEN | {"package": package})
        assert run_step("Install", variables, tmp_path).returncode == 0
        words = json.loads((tmp_path / "words.json").read_text())
        assert words == ["-m", "pip", "install", "--quiet", "--", expected]
    assert not (tmp_path / "hacked").exists()


def test_a_release_is_judged_and_summed_up(tmp_path: Path) -> None:
    """With the real command, on a model that was changed by noise alone."""
    script = f'#!/bin/sh\nexec {sys.executable} -m lightning_fedleak "$@"\n'
    program(tmp_path / "fedleak/bin/fedleak", script)
    paths = noisy_release(tmp_path)
    given = paths | {"drawn": "true", "length": "24", "thresholds": "auc=1 shown=0.1"}
    result = run_step("Measure", environment(tmp_path, given), tmp_path)
    assert result.returncode == 3, result.stderr
    summary = (tmp_path / "GITHUB_STEP_SUMMARY").read_text()
    assert summary.startswith("### What the trained weights give away: FAILED")
    assert "| combined |" in summary
    assert "- combined/shown is unknown" in summary
    assert "- auc at most 1\n- shown at most 0.1\n" in summary
    outputs = dict(line.split("=", 1) for line in (tmp_path / "GITHUB_OUTPUT").read_text().split())
    assert outputs["exit-code"] == "3"
    report = json.loads(Path(outputs["report"]).read_text())
    assert report["kind"] == "memorization"
    members = Path(paths["members"]).read_text().split()
    assert not [word for word in members if word in json.dumps(report) + summary + result.stdout]


def test_the_page_shows_a_workflow_that_fits() -> None:
    [block] = [one for one in blocks_of(ROOT / "docs" / "gate.md") if "jobs:" in one.text]
    [job] = yaml.safe_load(block.text)["jobs"].values()
    given = job["steps"][-1]["with"]
    needed = {name for name, one in ACTION["inputs"].items() if one.get("required")}
    assert needed <= given.keys() <= ACTION["inputs"].keys()
    text = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8")
    table = text.partition("### Inputs of the action")[2].partition("\nOutputs:")[0]
    assert ACTION["inputs"].keys() <= set(re.findall(r"`([\w-]+)`", table))
