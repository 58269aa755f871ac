from pathlib import Path

import pytest

from tests.tools import code_metrics


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
