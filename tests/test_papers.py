"""``python -m benchmarks.papers``: cells, their log, the layout, and the page that is written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.papers import __main__ as door
from benchmarks.papers import flatchat as papers_flatchat
from benchmarks.papers import reference
from benchmarks.papers.cells import Cell, Log, run
from benchmarks.papers.tables import Mean, Results, mean_of, number, published, student
from lightning_fedleak.attacks.words.flatchat import flatchat, positive_weight
from lightning_fedleak.defenses import BatchForm, DefenseContext, TokenLDP
from tests.helpers.measures import squared
from tests.helpers.models import tiny_gpt2

ROOT = Path(__file__).parents[1]


MEASURES = {"square": squared}


def cells(*values: int, together: str = "") -> list[Cell]:
    return [Cell("square", {"value": value}, float(value), together) for value in values]


@pytest.mark.parametrize("jobs", [0, 2])
def test_a_failed_cell_is_named_costs_no_other_and_is_tried_again(tmp_path, jobs) -> None:
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
    assert [number(v) for v in (0.5, 1.0, -0.25, 10.04)] == ["0.500", "1.000", "-0.250", "10.040"]
    assert student([1.0, 2.0, 3.0]).high == pytest.approx(2 + 4.302652729911275 / math.sqrt(3))


def test_published_numbers_are_complete() -> None:
    for paper in door.PAPERS:
        assert {t.name for t in paper.tables} <= set(published()[paper.name])
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


def test_every_table_can_be_shown_before_anything_was_measured() -> None:
    for paper in door.PAPERS:
        for name, size in paper.sizes.items():
            for table in paper.tables:
                created = table.cells(size, ["some-model"])
                assert created or name == "smoke"
                assert table.show(Results([]), size).finding == "Not run."
                assert all(cell.kind in paper.measures for cell in created)
                json.dumps([cell.settings for cell in created], allow_nan=False)


def test_one_table_runs_is_printed_and_goes_on(capsys, tmp_path) -> None:
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
    assert "12 of 12 cells not run" not in page.partition("### membership fig5")[2].split("### ")[0]
    assert door.main(words) == 0
    second = capsys.readouterr()
    assert second.err == ""
    assert second.out == first.out


def test_the_page_is_what_the_log_in_the_repository_gives(tmp_path: Path) -> None:
    log = ROOT / "benchmarks" / "papers" / "measured.jsonl"
    assert door.main(["--docs", str(tmp_path / "page.md"), "--log", str(log)]) == 0
    written = (tmp_path / "page.md").read_text("utf-8")
    assert written == (ROOT / "benchmarks" / "papers" / "README.md").read_text("utf-8"), (
        "write it anew: python -m benchmarks.papers --log benchmarks/papers/measured.jsonl "
        "--docs benchmarks/papers/README.md"
    )


def two_clusters() -> torch.Tensor:
    """A gradient whose first 40 of 900 rows are wide."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(900, 24, generator=generator) * 1e-5
    rows[:40] = torch.randn(40, 24, generator=generator) * 1e-2 - 2e-2
    return rows


@pytest.mark.parametrize("scorer", ["gmm", "abs"])
def test_the_reference_of_flatchat_names_the_types_of_ours(scorer: str) -> None:
    flattened = reference.Flattened.fit(two_clusters())
    ours = flatchat(two_clusters(), 40, scorer)
    named = flattened.guess(40, scorer)
    assert set(named.types.tolist()) == set(ours.types.tolist())
    assert flattened.weight == pytest.approx(positive_weight(two_clusters()), rel=0.05)
    x, y = [0.01, 0.02, 0.06, 0.1], [12.0, 30.0, 70.0, 99.0]
    slope, constant = np.polyfit(x, y, 1)
    guess = flattened.guess(reference.fit_count(x, y), scorer)
    assert guess.n_types == pytest.approx(constant + slope * flattened.weight)
    assert len(guess.types) == round(guess.n_types)


@pytest.mark.parametrize("mechanism", ["grr", "rappor", "the", "dbitflip"])
def test_the_clients_replace_the_words_of_a_batch_by_the_law_of_ours(mechanism: Any) -> None:
    """At epsilon 3 among 6 words: the share of kept words within five standard errors."""
    ids = torch.arange(6).repeat(8, 60)

    def replaced(defense: TokenLDP, entropy: bytes) -> torch.Tensor:
        context = DefenseContext(tiny_gpt2(), 0, 1, torch.device("cpu"), "32-true", 0, entropy)
        defense.before_setup(context)
        return defense.on_batch({"input_ids": ids}, context)["input_ids"]

    kept = []
    for kind in (TokenLDP, reference.ReferenceLDP):
        with pytest.warns(UserWarning, match="no guarantee"):
            defense = kind.as_published(mechanism, 3.0, form=BatchForm(kind="causal"))
        kept.append((replaced(defense, b"a" * 32) == ids).double().mean())
    ours, clients = kept
    assert 0.2 < float(ours) < 0.95
    assert float(clients) == pytest.approx(float(ours), abs=5 * (0.25 * 2 / ids.numel()) ** 0.5)
    state = np.random.get_state()[1]
    with pytest.warns(UserWarning, match="no guarantee"):
        once, again, other = (
            replaced(reference.ReferenceLDP.as_published(mechanism, 3.0), e * 32)
            for e in (b"a", b"a", b"b")
        )
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    assert np.array_equal(state, np.random.get_state()[1])


def test_clipped_sums_are_those_of_single_gradients() -> None:
    model = tiny_gpt2().eval()
    parameters = list(model.parameters())
    ids = [torch.tensor([[1, 5, 2, 7]]), torch.tensor([[3, 3, 4]])]
    samples = [{"input_ids": row, "labels": row} for row in ids]
    clipped, plain = papers_flatchat.sums_of_gradients(model, parameters, samples, 0.3)
    whole = [torch.zeros_like(p) for p in parameters]
    for sample in samples:
        model.zero_grad()
        model(**sample).loss.backward()
        norm = torch.cat([p.grad.flatten() for p in parameters]).norm()
        for total, p in zip(whole, parameters, strict=True):
            total += p.grad * min(1.0, 0.3 / float(norm))
    torch.testing.assert_close(clipped, whole, rtol=1e-4, atol=1e-7)
    model.zero_grad()
    sum(model(**sample).loss for sample in samples).backward()
    torch.testing.assert_close(plain, [p.grad for p in parameters], rtol=1e-4, atol=1e-7)
