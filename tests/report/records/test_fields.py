"""A field is declared once: reading, checking and writing follow from its type."""

import json
import math

import pytest

from lightning_fedleak.report.records import (
    STANDARD_FAMILIES,
    BeginLine,
    DefenseFacts,
    DefenseLine,
    EndLine,
    Family,
    GateLine,
    LookLine,
    MetricValue,
    Releases,
    ResultLine,
    Spending,
    as_json,
    read_lines,
)
from tests.report.lines import about, begin, decision, dpsgd, end, look, result, spent

SPENDING = Spending(
    defense="dpsgd", epsilon=math.inf, delta=1e-5, releases=3, history=(Releases(1.0, 0.01, 3),)
)
FAMILY = Family(name="counts", headline="right", chance=0.25, terms={"Right": "The count is."})
LINES = [
    ResultLine(step=1, stage="shared", attack="a", metrics={"f1": MetricValue(0.5, 0.4, 0.6)}),
    ResultLine(step=1, stage="shared", attack="a", metrics={}, unknown="it broke", client="sum"),
    BeginLine(run="a", families=(FAMILY,), defenses=(DefenseFacts(name="x"),)),
    DefenseLine(run="a", name="dpsgd", class_name="DPSGD", settings={"clip": 1.0, "x": [1]}),
    LookLine(run="a", step=1, utility={"loss": math.inf}, privacy=(SPENDING,)),
    GateLine(run="a", gate="g", did="warn", step=1, source="f1", reason="", at_most=0.5),
    EndLine(run="a", step=9, outcome="finished"),
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: type(line).__name__)
def test_what_is_written_is_read_again(line):
    text = json.dumps(as_json(line), allow_nan=False)
    assert type(line).from_json(json.loads(text)) == line


def test_keys_of_json_are_those_of_the_files():
    gate = as_json(LINES[5])
    assert (gate["kind"], gate["of"], gate["why"]) == ("gate", "f1", "")
    assert as_json(LINES[3])["class"] == "DPSGD"
    assert as_json(LINES[4])["utility"] == {"loss": "infinite"}
    assert as_json(LINES[4])["privacy"][0]["history"] == [[1.0, 0.01, 3]]


@pytest.mark.parametrize(
    ("kind", "line", "path"),
    [
        (LookLine, look(True), "step"),
        (LookLine, look(0, utility=[1]), "utility"),
        (LookLine, look(0, utility={"loss": "low"}), "utility/loss"),
        (LookLine, look(0, privacy=[spent(-1.0, 1)]), "privacy/epsilon"),
        (LookLine, look(0, privacy=[spent(1.0, 1) | {"history": [[1, 2, 1]]}]), "privacy/history"),
        (BeginLine, begin(attacks=[about("a", "words") | {"needs": "x"}]), "attacks/needs"),
        (BeginLine, begin(defenses=[dpsgd(clients=1.5)]), "defenses/settings/clients"),
        (BeginLine, begin(monitor={"clients": 10**30}), "monitor/clients"),
        (BeginLine, begin(families=[{"name": "x", "chance": 1.5}]), "families/chance"),
        (EndLine, {"run": "a", "kind": "end", "step": 1}, "how is missing"),
        (ResultLine, result(0) | {"metrics": {"f1": {"value": "x"}}}, "metrics/f1/value"),
        (ResultLine, result(0, f1=1e308), "metrics/f1/value"),
        (ResultLine, result(0, f1=(0.5, -1e308, 0.6)), "metrics/f1/low"),
    ],
)
def test_what_a_field_cannot_hold_is_named_by_its_path(kind, line, path):
    with pytest.raises(ValueError, match=f"^{path}$"):
        kind.from_json(line)


def test_the_loss_of_a_run_that_diverged_is_read():
    line = LookLine.from_json(look(0, utility={"loss": 1e30}))
    assert line.utility == {"loss": 1e30}


def test_settings_that_no_field_names_are_kept():
    monitor = {"clients": 2, "every_n_steps": 4, "side": "server"}
    line = BeginLine.from_json(begin(monitor=monitor))
    assert line.monitor.more == {"every_n_steps": 4, "side": "server"}
    assert as_json(line)["monitor"]["side"] == "server"


def test_lines_become_records_of_their_kinds(tmp_path):
    path = tmp_path / "run.jsonl"
    lines = [
        begin(),
        look(0),
        decision("warn", 0, 1),
        end(3),
        {"schema": 4, "run": "a", "kind": "later"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    kinds = [type(line).__name__ for line in read_lines(path).lines]
    assert kinds == ["BeginLine", "LookLine", "GateLine", "EndLine", "RunLine"]
    family = read_lines(path).lines[0].family_of("flatchat")
    assert family in STANDARD_FAMILIES
    assert BeginLine.from_json(begin(families=[as_json(FAMILY)])).families == (FAMILY,)
