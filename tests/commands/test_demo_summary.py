from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_fedleak.cli.commands.demo import Reading, explain_readings, read_readings


def reading(attack: str, step: int, recall: float | None, **other) -> Reading:
    values = {"n": 100, "precision": recall, "exposed": True} | other
    return Reading(attack=attack, step=step, recall=recall, **values)


def test_headline_is_the_mean_of_the_best_attack() -> None:
    text = explain_readings(
        [
            reading("weak", 0, 0.1),
            reading("greedy", 0, 1.0, precision=0.01),
            reading("strong", 0, 0.8, precision=0.9, n=90),
            reading("weak", 5, 0.3),
            reading("strong", 5, 0.6, precision=0.7, n=110),
        ],
        batch_size=8,
    )
    assert "read 70% of the private words (strong)" in text
    assert "2 updates, each of 8 texts that held 100 different words" in text
    assert "  weak: recall 20% (10% to 30%), precision 20% (10% to 30%)" in text
    assert "  strong: recall 70% (60% to 80%), precision 80% (70% to 90%)" in text


def test_unknown_is_neither_zero_nor_safe() -> None:
    text = explain_readings([reading("a", 0, 0.5), reading("a", 5, None), reading("b", 0, None)], 8)
    assert "  a: recall 50% (50% to 50%), precision 50% (50% to 50%); no result at 1 looks" in text
    assert "  b: unknown" in text
    nothing = explain_readings([reading("a", 0, None)], 8)
    assert "'unknown', not 'safe'" in nothing
    assert "%" not in nothing
    assert "%" not in explain_readings([], 8)


def test_a_surface_that_is_not_shared_is_said() -> None:
    hidden = reading("a", 0, 0.0, exposed=False)
    assert "does not share it" in explain_readings([hidden], 8)
    assert "a: nothing, because it reads a gradient" in explain_readings(
        [hidden, reading("b", 0, 0.5)], 8
    )


def test_reads_back_the_shared_stage_only(tmp_path: Path) -> None:
    path = tmp_path / "leakage.jsonl"
    assert read_readings(path) == []
    line = {
        "attack": "a",
        "step": 5,
        "n": 7,
        "exposed": True,
        "metrics": {"recall": {"value": 0.25}, "precision": {"value": None}},
    }
    rows = [line | {"stage": "local"}, line | {"stage": "shared"}, line | {"stage": "aggregate"}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    expected = Reading(attack="a", step=5, n=7, recall=0.25, precision=None, exposed=True)
    assert read_readings(path) == [expected]


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        *((1.0, "100%"), (0.996, "99.6%"), (0.9996, "99.96%"), (0.99999, "nearly all")),
        *((0.0, "0%"), (0.004, "0.4%"), (0.00001, "nearly none"), (0.7, "70%")),
    ],
)
def test_what_is_not_all_is_not_said_to_be_all(share: float, shown: str) -> None:
    text = explain_readings([Reading("a", 0, 10, share, 0.5, True)], 8)
    assert f"could have read {shown} of the private words" in text
    assert f"recall {shown} ({shown} to {shown})" in text
