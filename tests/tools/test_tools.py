"""The tools' own logic; whole comparisons of two checkouts are too long for a test."""

import json
import re
from typing import Any

import pytest

from tests.helpers.processes import one_process
from tests.tools import compare_checkouts, lowest_versions, seeded_runs, trips

OLD = {"api": {"a: F": ["def F", "    -> int"], "b: G": ["def G"]}, "fits": {"x: model": ["1"]}}


def compared(new: dict[str, Any], *patterns: str) -> int:
    return compare_checkouts.report(OLD, new, list(patterns), 60)


def changed(**titles: list[str] | None) -> dict[str, Any]:
    api = OLD["api"] | {name.replace("_", ": "): lines for name, lines in titles.items()}
    return OLD | {"api": {name: lines for name, lines in api.items() if lines is not None}}


def test_equal_checkouts_are_equal(capsys):
    assert compared(OLD) == 0
    assert "====" not in capsys.readouterr().out


def test_a_line_that_differs_is_shown(capsys):
    assert compared(changed(a_F=["def F", "    -> str"])) == 1
    out = capsys.readouterr().out
    assert "==== api / a: F" in out
    assert "-    -> int\n+    -> str" in out


@pytest.mark.parametrize("new", [changed(b_G=None), changed(c_H=["def H"])])
def test_a_title_on_one_side_only_is_a_difference(new):
    assert compared(new) == 1


def test_a_difference_that_is_meant_is_none_and_others_stay():
    new = changed(a_F=["def F"], c_H=["def H"])
    assert compared(new, "api / a: F") == 1
    assert compared(new, "api / a: F", "api / c: *") == 0


def test_brackets_of_a_title_stand_for_themselves():
    assert compare_checkouts.fits("fits / RiskGate[low]", "fits / RiskGate[low]")


def test_a_meant_difference_must_say_why(tmp_path):
    file = tmp_path / "meant"
    file.write_text("# a remark\n\napi / a: F  # renamed\n")
    assert compare_checkouts.meant(file) == ["api / a: F"]
    file.write_text("api / a: F\n")
    with pytest.raises(SystemExit, match="does not say why"):
        compare_checkouts.meant(file)


def test_a_foreign_errors_place_does_not_count_and_all_else_in_a_line_does(tmp_path):
    log = tmp_path / "leakage.jsonl"
    reasons = ["KeyError at look.py:138", "KeyError at fit.py:12", "TypeError at fit.py:12"]
    shown = []
    for reason in reasons:
        log.write_text(
            json.dumps({"run": reason, "step": 1, "metrics": {"f1": 0.5}, "unknown": reason}) + "\n"
        )
        shown.append([seeded_runs.plain(line) for line in seeded_runs.written(log)])
    assert shown[0] == ["step : 1", "metrics f1: 0.5", 'unknown : "KeyError at <place>"']
    assert shown[0] == shown[1] != shown[2]


def test_settings_of_games_and_rare_ones_are_given_in_their_groups():
    monitor = seeded_runs.monitor(
        seeded_runs.flatchat(), targets=3, scale=2.0, texts=2, every_n_steps=1
    )
    options = monitor.engine.options
    assert (options.games.targets, options.games.scale, options.texts) == (3, 2.0, 2)


@pytest.mark.parametrize("name", trips.CEILINGS)
def test_trips_grow_no_longer(name, tmp_path):
    # In processes of their own: hooks on all optimizers that other tests left would count.
    output = one_process("tests.tools.trips", name, log=tmp_path / name)
    pattern = rf"{name}: (\d+) files, (\d+) functions, \d+ moves, depth (\d+)"
    [numbers] = re.findall(pattern, output)
    assert all(int(n) <= most for n, most in zip(numbers, trips.CEILINGS[name], strict=True)), (
        output
    )


def test_the_lowest_versions_are_the_bounds_of_the_extras_named():
    project = {
        "name": "me",
        "dependencies": ["torch>=2", "a>=1.5"],
        "optional-dependencies": {"x": ["b-c[d]>=0.6", "a>=1.5"], "y": ["me[x]"], "z": ["e==1.*"]},
    }
    pins = lowest_versions.lowest({"project": project}, ["y"], "a==9\ntorch==7\ntorchmetrics==3\n")
    assert pins == ["a==1.5", "b-c==0.6", "torch==7"]
    assert lowest_versions.names({"project": project}, ["y", "z"]) == ["a", "b-c[d]", "e", "torch"]


def test_every_bound_that_make_test_lowest_needs_can_be_told(capsys):
    makefile = (lowest_versions.ROOT / "Makefile").read_text()
    asked, by_name = re.findall(r"lowest_versions\.py (.*) >", makefile)
    assert by_name == f"--names {asked}"
    assert f'".[{asked.replace(" ", ",")}]"' in makefile
    lowest_versions.main(asked.split())
    pins = capsys.readouterr().out.splitlines()
    assert {"transformers==4.56", "pandas==2", "pytest==8"} <= set(pins)


@pytest.mark.parametrize("need", ["a", "a<2", "a>=1,<2", "a>=2"])
def test_a_bound_that_cannot_be_told_is_refused(need):
    project = {"name": "me", "dependencies": ["torch>=2", "a>=1"]}
    project["optional-dependencies"] = {"x": [need]}
    with pytest.raises(ValueError, match="'a"):
        lowest_versions.lowest({"project": project}, ["x"], "torch==7\n")
