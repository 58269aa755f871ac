""""""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.tools import code_metrics, lowest_versions
from tools import control_picture


@pytest.fixture(scope="module")
def measures():
    return code_metrics.CodeMetrics().measure()


@pytest.mark.parametrize("row", code_metrics.ROWS, ids=lambda row: row.name)
def test_no_count_rises(measures, row):
    value, places = measures[row.name]
    root = code_metrics.ROOT
    shown = "\n".join(f"{p.path.relative_to(root)}:{p.line}: {p.text}" for p in places[:20])
    assert value <= row.at_most, f"all: make metrics ARGS='--list {row.name}'\n{shown}"


def small(tmp_path: Path, **files: str) -> dict[str, code_metrics.Measure]:
    root = tmp_path / code_metrics.PACKAGE
    for name, text in {"__init__": "", **files}.items():
        path = root / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return code_metrics.CodeMetrics(tmp_path).measure()


def lines(measure: code_metrics.Measure) -> list[int]:
    return [place.line for place in measure.places]


def test_docstrings_comments_and_blank_lines_are_no_code(tmp_path):
    text = '"""One\n\ntwo."""\n\n# three\nx = """a\n\nb"""  # four\n'
    assert small(tmp_path, a=text)["code"].value == 3


def test_names_are_counted_where_they_are_bound(tmp_path):
    text = (
        "def _said(of, *, name, b=1):\n"
        "    for told, x in ():\n        x.held = told\n    __in__ = x\n"
    )
    measures = small(tmp_path, a=text)
    assert lines(measures["names"]) == [1, 1, 2, 3]
    assert measures["names"].value == 4 / (1 + 3 + 2 + 1 + 1)


def test_imports_for_types_close_a_circle_and_count(tmp_path):
    measures = small(
        tmp_path,
        a="if TYPE_CHECKING:\n    from lightning_fedleak import b\n",
        b="from .c import x\n",
        c="from lightning_fedleak.a import y\n",
        d="def f():\n    from lightning_fedleak import a, b, c\n",
    )
    assert (
        measures["circles"].places[0].text
        == "lightning_fedleak.a, lightning_fedleak.b, lightning_fedleak.c"
    )
    assert measures["circles"].value == 1
    assert measures["most_imports"].value == 3


# The picture of a control is drawn by the rule of gates, and loads nothing.


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


# The tools' own logic.


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
