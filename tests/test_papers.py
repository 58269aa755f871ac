"""``python -m benchmarks.papers``: cells, their log, the layout, and the page that is written."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.papers import __main__ as door
from benchmarks.papers import flatchat, inversion, membership
from benchmarks.papers.cells import Cell, Log, Row, run
from benchmarks.papers.tables import Mean, Results, mean_of, number, published, student
from tests.helpers.measures import squared

ROOT = Path(__file__).parents[1]


MEASURES = {"square": squared}


def cells(*values: int, together: str = "") -> list[Cell]:
    return [Cell("square", {"value": value}, float(value), together) for value in values]


@pytest.mark.parametrize("jobs", [0, 2])
def test_a_failed_cell_is_named_costs_no_other_and_is_tried_again(
    tmp_path: Path, jobs: int
) -> None:
    path, said = tmp_path / "log.jsonl", []
    required = cells(1, 3, 2, 2, 5)
    failures = run(required, MEASURES, {}, Log.read(path), jobs=jobs, told=said.append)
    ((failed, why),) = failures
    assert failed.settings == {"value": 3}
    assert why.startswith("ArithmeticError at measures.py:")
    log = Log.read(path)
    assert [log.rows(c) for c in cells(1, 2, 5)] == [
        [{"value": v, "square": v * v, "none": None}] for v in (1, 2, 5)
    ]
    assert log.rows(required[1]) is None
    assert log.failure(required[1]) == why
    assert len(said) == 4
    again = []
    run(required, MEASURES, {}, Log.read(path), jobs=0, told=again.append)
    assert len(again) == 1
    assert "value 3" in again[0]


def test_a_process_that_dies_fails_the_cells_that_share_it(tmp_path: Path) -> None:
    log = Log.read(tmp_path / "log.jsonl")
    required = cells(1, 4, 6, together="one process")
    failures = run(required, MEASURES, {}, log, jobs=1, told=lambda line: None)
    assert failures == [(cell, "a process ended") for cell in required]
    assert [log.failure(cell) for cell in required] == ["a process ended"] * 3
    assert log.rows(required[0]) is None


def test_a_line_that_was_cut_off_is_left_out_and_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    run(cells(1, 2), MEASURES, {}, Log.read(path), jobs=0, told=lambda line: None)
    path.write_text(path.read_text()[:-20])
    log = Log.read(path)
    assert log.unreadable == 1
    assert log.rows(cells(1)[0])
    assert log.rows(cells(2)[0]) is None
    run(cells(1, 2), MEASURES, {}, log, jobs=0, told=lambda line: None)
    log = Log.read(path)
    assert log.unreadable == 1
    assert log.rows(cells(2)[0])


def test_no_cell_begins_when_the_minutes_are_over(tmp_path: Path) -> None:
    log = Log.read(tmp_path / "log.jsonl")
    for jobs in (0, 1):
        assert not run(cells(1), MEASURES, {}, log, jobs=jobs, minutes=0, told=print)
    assert not log.lines


def test_a_mean_joins_what_is_independent_and_averages_what_shares_its_games() -> None:
    a, b = Mean(0.5, 0.4, 0.7), Mean(0.7, 0.6, 0.9)
    both = mean_of([[a, b]])
    assert (both.value, both.low, both.high) == pytest.approx((0.6, 0.5, 0.8))
    apart = mean_of([[a], [b]])
    assert apart.low == pytest.approx(0.6 - math.hypot(0.05, 0.05))
    assert apart.high == pytest.approx(0.6 + math.hypot(0.1, 0.1))
    unknown = Mean(math.nan, math.nan, math.nan)
    assert mean_of([[a], [unknown]]) == mean_of([[a]]) == a
    assert str(mean_of([[unknown]])) == "not run"


def test_numbers_and_students_interval() -> None:
    assert [number(v) for v in (0.5, 1.0, -0.25, 10.04)] == [".500", "1.000", "-.250", "10.040"]
    assert student([1.0, 2.0, 3.0]).high == pytest.approx(2 + 4.302652729911275 / math.sqrt(3))


def test_published_numbers_are_complete() -> None:
    for paper in door.PAPERS:
        assert {t.name for t in paper.tables} == set(published()[paper.name]) - {"paper"}
        for table in published()[paper.name].values():
            if not isinstance(table, dict) or "rows" not in table:
                continue
            shapes = {np.shape(row) for row in table["rows"].values()}
            columns = table.get("columns")
            metrics = len(table["metrics"])
            assert shapes == {(len(columns), metrics) if columns else (metrics,)}
    table = published()["membership"]
    for eps in ("5", "7.5", "10"):  # Table 3 is the mean of Tables 7 to 10, but for its rounding
        for attack in ("FC-Full", "FC-Token", "Attn"):
            four = [np.array(table[f"table{n}"]["rows"][f"{eps} {attack}"]) for n in range(7, 11)]
            mean = np.array(table["table3"]["rows"][f"{eps} {attack}"])
            assert np.median(np.abs(np.mean(four, 0) - mean)) < 0.02


def fake_rows(cells: list[Cell]) -> list[Row]:
    """As measured, for the layout of LDP tables."""
    rates = {"value": 0.75, "low": 0.5, "high": 0.875}
    names = [*membership.METRICS, "fitted_accuracy", "fitted_f1"]
    return [
        {**c.settings, "attack": attack, "layer": layer, "games": 10, **dict.fromkeys(names, rates)}
        for c in cells
        for layer in c.settings["layers"]
        for attack in ("FC-Full", "FC-Token", "Attn")
    ]


def test_our_rows_stand_beside_the_papers_in_both_protocols() -> None:
    size = replace(membership.SIZES["default"], texts=("imdb", "yelp"))
    table = membership.PAPER.table("table7")
    created = table.cells(size, ["minilm"])
    assert len(created) == 2 * 3 * 2
    whole = table.show(Results(fake_rows(created)), size)
    rows = {tuple(row[:3]): row[3:] for row in whole.grids[0].rows}
    paper = rows["5", "Attn", "paper"]
    assert whole.grids[0].caption == ("The paper's models: BERT, RoBERTa, DistilBERT, GPT1, GPT2.")
    assert paper == ["", ".56, .67, .61, .64, .50", ".51, .62, .52, .60, .50",
                     ".60, .69, .64, .67, .50"]  # fmt: skip
    result = [row for row in whole.grids[0].rows if "minilm" in row[2]]
    assert len(result) == 3 * 3 * 2
    games, accuracy = result[0][3:5]
    assert games == "60"
    assert accuracy == ".750 (.57 to .84)"
    assert "FC-Full has AUC .750 at 10 (paper's mean 1.00)" in whole.finding
    part = table.show(Results(fake_rows(created[:-1])), size)
    assert [r[3] for r in part.grids[0].rows if "parts" in r[3]][:1] == ["30, 3 of 6 parts"]
    none = table.show(Results([]), size)
    assert none.finding == "Not run."


def test_a_row_that_the_paper_does_not_have_is_labelled() -> None:
    size = replace(membership.SIZES["default"], texts=("imdb",), layers=(1,))
    rates = {name: {"value": 0.75, "low": 0.5, "high": 0.875} for name in membership.METRICS}
    rows = [
        {"model": "m", "text": "imdb", "protocol": protocol, "attack": attack, "games": 4, **rates}
        for attack in ("Attn", "Attn, as published")
        for protocol in membership.PROTOCOLS
    ]
    (grid,) = membership.PAPER.table("table2").show(Results(rows), size).grids
    labels = [row[:2] for row in grid.rows if row[2]]
    position = labels.index(["Attn", "paper"])
    assert labels[position : position + 5] == [
        ["Attn", "paper"],
        [" ", "m, Fig. 2"],
        [" ", "m, authors' code"],
        ["Attn, as published", "m, Fig. 2"],
        [" ", "m, authors' code"],
    ]


def test_every_table_can_be_shown_before_anything_was_measured() -> None:
    for paper in door.PAPERS:
        for name, size in paper.sizes.items():
            for table in paper.tables:
                created = table.cells(size, ["some-model"])
                assert created or name == "smoke"
                assert table.show(Results([]), size).finding == "Not run."
                assert (table.page or table.show)(Results([]), size).finding == "Not run."
                assert all(cell.kind in paper.measures for cell in created)
                json.dumps([cell.settings for cell in created], allow_nan=False)


def test_the_page_has_one_row_for_a_label_with_the_interval_of_auc() -> None:
    size = replace(membership.SIZES["default"], texts=("imdb", "yelp"))
    table = membership.PAPER.table("table7")
    assert table.page is not None
    display = table.page(Results(fake_rows(table.cells(size, ["minilm"]))), size)
    (grid,) = display.grids
    assert len(grid.rows) == 3 * 3
    assert grid.rows[-2] == [
        "5", "Attn", ".56, .67, .61, .64, .50", ".750, .750", ".51, .62, .52, .60, .50",
        ".750, .750", ".60, .69, .64, .67, .50", ".750 (.57 to .84)", ".750 (.57 to .84)",
    ]  # fmt: skip
    assert grid.caption == "Games: minilm, Fig. 2: 60; minilm, authors' code: 60."
    assert display.finding.count("FC-Full has AUC") == 1


def test_one_hot_gaps_are_those_of_the_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    u = torch.randn(12, generator=generator, dtype=torch.float64)
    u /= u.norm()
    hidden = torch.nn.functional.one_hot(ids, 12).double()
    for word in (4, 1, 7):
        v = torch.nn.functional.one_hot(torch.tensor(word), 12).double()
        projectors = [torch.eye(12).double() - torch.outer(w, w) for w in (v, u)]
        first, second = (3.0 * hidden @ p @ hidden.T for p in projectors)
        expected = float(((first.softmax(-1) - second.softmax(-1)) @ hidden).abs().max())
        found = membership.gap(ids.numpy(), word, u.numpy(), 3.0)
        assert found == pytest.approx(expected, rel=1e-9)


def test_the_games_of_a_number_are_those_of_the_papers_table_1() -> None:
    games = {}
    for name, table in (("table2", membership.show_table2), ("table3", membership.show_table3)):
        display = table(Results([{"model": "m"}]), membership.SIZES["default"])
        games[name] = {row[-4] for row in display.grids[0].rows if "paper" in row}
    assert games == {"table2": {"480"}, "table3": {"480"}}


def test_condition_4_counts_each_data_set_once() -> None:
    """One-hot data stands in two lines of Fig. 5: by the bound, and by a random direction."""
    value = {"value": 0.0, "low": 0.0, "high": 0.0}
    rows = [
        {"law": law, "tokens": 5, "dim": 1_000, "condition_holds": value | {"value": rate},
         "bound": value, "random_direction": value}
        for law, rate in (("one_hot", 1.0), ("gaussian", 0.5))
    ]  # fmt: skip
    display = membership.show_fig5(
        Results(rows), replace(membership.SIZES["default"], dims=(1_000,))
    )
    assert "Condition (4) holds in .750 of all data sets." in display.finding


def test_regression_shapes_are_the_papers_for_sizes_like_the_papers() -> None:
    assert len(flatchat.regression_shapes(flatchat.SIZES["default"].shapes)) == 18
    assert (2, 8) in flatchat.regression_shapes(("2x8",))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["flatchat", "table9"], "flatchat has no table9"),
        (["flatchat", "table3"], "needs --model"),
        (["flatchat", "--model", "nowhere"], "no folder of a model"),
        (["--list", "--set", "gams=3"], "no such setting"),
        (["--list", "--set", "layers=a"], "layers is like layers=1,3,6"),
        (["--list", "--set", "games=3,4"], "games is like games=40"),
        ([], "name a paper"),
    ],
)
def test_bad_words_are_refused_at_once(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as caught:
        door.main([*words, "--log", str(tmp_path / "log.jsonl")])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_the_page_leaves_out_models_of_which_a_table_was_measured_in_part(tmp_path: Path) -> None:
    log = Log.read(tmp_path / "log.jsonl")
    paper, table = inversion.PAPER, inversion.PAPER.table("fig1")
    size = inversion.SIZES["smoke"]
    rows = [{"task": 0.5}]
    first, *rest = table.cells(size, ["begun"])
    log.add(first, rows=rows)
    assert door.models_of(paper, table, size, log) == ["begun"]
    for cell in table.cells(size, ["done"]):
        log.add(cell, rows=rows)
    assert door.models_of(paper, table, size, log) == ["done"]
    for cell in rest:
        log.add(cell, rows=rows)
    assert door.models_of(paper, table, size, log) == ["begun", "done"]


def test_one_table_runs_is_printed_and_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["membership", "fig5", "--log", str(tmp_path / "log.jsonl"), "--jobs", "0"]
    words += ["--set", "dims=1000,50000", "--set", "runs=5", "--json", str(tmp_path / "rows.json")]
    words += ["--docs", str(tmp_path / "page.md")]
    assert door.main(words) == 0
    first = capsys.readouterr()
    assert "| gaussian | 15 |" in first.out
    assert "[18/18]" in first.err
    rows: dict[str, Any] = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows["membership"]["fig5"]) == 18
    page = (tmp_path / "page.md").read_text()
    assert "| gaussian | 15 |" in page
    assert "12 of 12 cells not run" not in page.split("### membership fig6")[0].split("fig5")[1]
    assert door.main(words) == 0
    second = capsys.readouterr()
    assert second.err == ""
    assert second.out == first.out


def test_the_page_is_what_the_log_in_the_repository_gives(tmp_path: Path) -> None:
    log = ROOT / "benchmarks" / "papers" / "measured.jsonl"
    assert door.main(["--docs", str(tmp_path / "page.md"), "--log", str(log)]) == 0
    written = (tmp_path / "page.md").read_text("utf-8")
    assert written == (ROOT / "docs" / "papers.md").read_text("utf-8"), (
        "write it anew: python -m benchmarks.papers --log benchmarks/papers/measured.jsonl "
        "--docs docs/papers.md"
    )
