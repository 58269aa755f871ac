"""A low number in a report counts only as far as the control of its look is high."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_fedleak.cli import main
from lightning_fedleak.report import findings, model_card, page, read
from lightning_fedleak.report.pages import Findings
from lightning_fedleak.report.records import as_json, judge_value
from tests.report.lines import about, begin, result, sentences_of, written


def words(step: int, f1: float, name: str = "flatchat", **controls: float | None) -> dict[str, Any]:
    """Return a line of an attack on words; a control by its end of the name."""
    ends = {f"f1_of_{end}": value for end, value in controls.items()}
    return result(step, name, f1=f1, recall=f1, precision=f1, **ends)


def found_in(folder: Path, *lines: dict[str, Any], **facts: Any) -> Findings:
    return findings(read([written(folder, lines, [begin(**facts)])]))


@pytest.mark.parametrize("f1", [0.0, 0.05, 0.22, 0.45])
def test_a_low_number_of_a_low_control_is_neither_low_nor_safe(tmp_path: Path, f1: float) -> None:
    found = found_in(tmp_path, words(0, f1, control=0.3))
    [attack] = found.runs[0].attacks
    assert (attack.control, attack.blind, attack.is_blind) == (0.3, 1, True)
    [reading] = [one for one in found.overviews[0].readings if one.family == "words"]
    assert (reading.verdict, reading.answer, reading.control) == ("unknown", "Unknown", 0.3)
    assert f"it reads {f1:.2f}, and 0.30 of known words in the same step" in reading.note
    assert "cannot show more than 0.30" in reading.note
    assert "nknown" in found.verdict.sentence
    assert found.verdict.level == "unknown"
    for text in (page(found), json.dumps(as_json(found)), model_card(found)):
        assert "0.30 of known words in the same step" in text


def test_an_attack_that_names_nearly_everything_is_not_said_to_read_next_to_none(tmp_path):
    line = words(0, 0.05, control=1.0)
    line["metrics"] |= {"recall": {"value": 0.91}, "precision": {"value": 0.03}}
    note = found_in(tmp_path, line).overviews[0].readings[0].note
    assert note.startswith("Hardly any name is right. 91% found, 3% of what was named was there.")


def test_a_low_number_of_a_high_control_reads_as_before_with_the_control_beside_it(tmp_path):
    found = found_in(tmp_path, words(0, 0.05, control=1.0))
    reading = found.overviews[0].readings[0]
    assert (reading.verdict, reading.control) == ("little", 1.0)
    assert "Next to none." in reading.note
    assert found.verdict.level == "some"
    html = page(found)
    assert "the same attack on known words: <b>1.00</b>" in html
    assert 'control 1.00"><i class="iv"' in html


@pytest.mark.parametrize(
    ("bound", "verdict"), [(0.3, "little"), (0.7, "unknown"), (1.0, "unknown")]
)
def test_behind_a_declared_defence_a_bound_on_every_reader_decides(tmp_path, bound, verdict):
    line = result(
        0, "flatchat", f1=0.05, recall=0.05, precision=0.05, f1_of_control=1.0, bound=bound
    )
    reading = found_in(tmp_path, line).overviews[0].readings[0]
    assert reading.verdict == verdict
    assert ("behind the declared defences" in reading.note) == (verdict == "unknown")


def test_what_could_be_read_here_scales_a_number(tmp_path: Path) -> None:
    """0.45 of 0.6 is 0.75, which is high; the gate at 0.5 counts the same."""
    found = found_in(tmp_path, words(0, 0.45, control=0.6))
    [attack] = found.runs[0].attacks
    counted = judge_value(0.45, 0.6, at_most=0.5, chance=0.0)
    assert attack.above_chance == pytest.approx(counted.value) == pytest.approx(0.75)
    assert found.verdict.level == "high"
    assert "0.60 of known words in the same step, so that it counts as 0.75" in sentences_of(found)


def test_a_low_number_of_a_batch_above_capacity_is_low_by_aggregation(tmp_path: Path) -> None:
    found = found_in(tmp_path, words(0, 0.05, control=0.3, a_part=0.9))
    [attack] = found.runs[0].attacks
    assert (attack.blind, attack.by_aggregation, attack.control_of_a_part) == (0, 1, 0.9)
    assert "Low by aggregation: it reads 0.05" in sentences_of(found)
    assert found.verdict.level == "some"
    assert "0.300, of a part 0.900" in page(found)


def test_a_control_that_could_not_be_read_makes_a_low_number_unknown(tmp_path: Path) -> None:
    found = found_in(tmp_path, words(0, 0.05, control=None))
    assert "could not be checked on known" in sentences_of(found)
    assert found.verdict.level == "unknown"


def test_an_area_counts_from_one_half_on(tmp_path: Path) -> None:
    line = result(0, "fc", auc=(0.55, 0.3, 0.8), auc_of_control=0.6)
    found = found_in(tmp_path, line, attacks=[about("fc", "membership")])
    assert "0.55, and 0.60 of known texts in the same step" in sentences_of(found)
    line = result(0, "fc", auc=(0.55, 0.3, 0.8), auc_of_control=0.9)
    found = found_in(tmp_path / "b", line, attacks=[about("fc", "membership")])
    assert found.runs[0].attacks[0].blind == 0


def test_another_attack_that_reads_the_same_counts_in_its_place(tmp_path: Path) -> None:
    pair = [about("flatchat", "words"), about("sees", "words")]
    lines = (words(0, 0.05, control=0.1), words(0, 0.04, "sees", control=1.0))
    found = found_in(tmp_path / "same", *lines, attacks=pair)
    assert found.verdict.level == "some"
    assert "Next to none" in sentences_of(found)
    other = [pair[0], pair[1] | {"reads": ["b.weight"]}]
    found = found_in(tmp_path / "other", *lines, attacks=other)
    assert found.verdict.level == "unknown"
    lines = (words(0, 0.02, control=0.1), words(0, 0.04, "sees", control=1.0))
    found = found_in(tmp_path / "less", *lines, attacks=other)
    assert "flatchat: it reads 0.02" in sentences_of(found)


@pytest.mark.parametrize("metric", ["leakage/worst/words", "leakage/flatchat/f1"])
def test_the_limit_is_that_of_the_gate(tmp_path: Path, metric: str) -> None:
    gate = {"name": "g", "metric": metric, "at_most": 0.2}
    found = found_in(tmp_path, words(0, 0.05, control=0.3), gates=[gate])
    [attack] = found.runs[0].attacks
    assert attack.blind == 0
    assert attack.above_chance == pytest.approx(0.05 / 0.3)


def test_compare_shows_no_blind_number(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    written(tmp_path / "a", [words(0, 0.9, control=1.0)], [begin()])
    low = [words(0, 0.1, control=0.3, a_part=0.4) | {"run": "b"}]
    written(tmp_path / "b", low, [begin("b")])
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│ words")]
    assert [cell.strip().split(" ")[0] for cell in row.strip("│").split("│")[1:]] == [
        "0.90",
        "unknown",
    ]
