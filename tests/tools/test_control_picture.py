"""The picture of a control is drawn by the rule of gates, and loads nothing."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools import control_picture

PICTURE = Path(__file__).parents[2] / "docs" / "control.svg"


def test_the_picture_in_the_docs_is_the_one_that_is_drawn() -> None:
    assert PICTURE.read_text(encoding="utf-8") == control_picture.picture()


def test_it_is_readable_in_light_and_dark_and_asks_no_host() -> None:
    text = control_picture.picture()
    root = ElementTree.fromstring(text)
    assert root.get("aria-label")
    assert "prefers-color-scheme: dark" in text
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
    numbers = [float(one.text or "") for one in root.iter() if re.match(r"0|1\.", one.text or "")]
    assert numbers == [n for row in control_picture.ROWS for n in row if n == n]
    places = [float(one.get("x", 0)) for one in root.iter() if one.tag.endswith("text")]
    assert max(places) < control_picture.WIDTH - 30


@pytest.mark.parametrize(
    ("row", "words"),
    [((0.05, 1.0), "rings: little"), ((0.22, 0.3), "unknown"), ((0.22, 0.3, 0.95), "for a part")],
)
def test_a_row_says_what_the_rule_says(row: tuple[float, ...], words: str) -> None:
    value, control, *parts = row
    counted = control_picture.judge_value(
        value, control, part=parts[0] if parts else float("nan"), at_most=0.5, chance=0.0
    )
    assert words in control_picture.conclusion(counted)
