"""The user's own metrics in the report and in a comparison, and how much of a run was looked at."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightning_fedleak.cli import main
from lightning_fedleak.report import page
from lightning_fedleak.report.pages import model_card
from lightning_fedleak.report.records.lines import best_of, is_training, is_validation, title_of
from tests.report.lines import begin, dpsgd, end, entry, found_in, look, result, spent, written


def change(step: int, run: str = "a", **more: Any) -> dict[str, Any]:
    """Metrics that changed between looks, in ``run.jsonl``."""
    return entry("metrics", run, step=step, **more)


def record(run: str, train: float, *validations: float) -> list[dict[str, Any]]:
    """A run of 20 steps that was looked at once, with one validation loss for each epoch."""
    first = look(3, run, utility={"train_loss": train})
    epochs = [
        change(10 * number, run, utility={"val_loss": value})
        for number, value in enumerate(validations, 1)
    ]
    return [begin(run), first, *epochs, end(20, run)]


@pytest.mark.parametrize(
    ("name", "validation", "training", "title"),
    [
        ("val_loss", True, False, "val_loss"),
        ("eval_loss", True, False, "eval_loss"),
        ("valid/accuracy", True, False, "valid/accuracy"),
        ("train_loss", False, True, "train_loss (training loss of one batch)"),
        ("train_loss, client 3", False, True, "train_loss (training loss of one batch), client 3"),
        ("train_loss_epoch", False, True, "train_loss_epoch (mean training loss)"),
        ("loss", False, True, "loss (mean training loss)"),
        ("training_accuracy", False, True, "training_accuracy (training metric of one batch)"),
        ("values", False, False, "values"),
        ("trained", False, False, "trained"),
    ],
)
def test_a_name_says_what_a_metric_is_of(name, validation, training, title):
    assert (is_validation(name), is_training(name), title_of(name)) == (validation, training, title)


def test_the_best_of_a_loss_is_the_lowest():
    values = [0.5, 0.25, 0.75]
    for name, best in [("val_loss", 0.25), ("eval_perplexity", 0.25), ("val_accuracy", 0.75)]:
        assert best_of(name, values) == best


def test_validation_counts_where_there_is_one(tmp_path):
    found = found_in(tmp_path, [result(3, f1=0.9)], record("a", 7.5, 8.25, 8.125, 8.5))
    assert found.runs[0].utility["val_loss"] == [(10, 8.25), (20, 8.125), (30, 8.5)]
    html = page(found)
    assert "finished; measured 1 of 20 steps" in html
    assert "Looked at 1 of 20 steps." in model_card(found)


def test_without_validation_a_training_loss_is_called_that(tmp_path):
    found = found_in(tmp_path, [result(3, f1=0.9)], record("a", 7.5))
    [fact] = [one for one in found.overviews[0].facts if one.name == "Utility"]
    assert fact.detail.startswith("training loss of one batch; ")


def test_rounds_and_runs_without_an_end(tmp_path):
    killed = [begin(), look(0), look(50)]
    lines = [result(0, f1=0.1), result(50, f1=0.1), result(60, "x") | {"unknown": "not played: x"}]
    found = found_in(tmp_path, lines, killed)
    assert (found.runs[0].length, found.runs[0].looked_at) == (None, 2)
    assert "until step 50, running, cut off, or its end was not recorded" in page(found)
    for first, rounds in ((0, 5), (1, 4)):  # rounds are counted from 0 or from 1
        federation = [begin(training={"strategy": "federation"}), look(first, client=0), end(5)]
        found = found_in(tmp_path / str(first), [result(first, f1=0.1)], federation)
        assert f"finished; measured 1 of {rounds} rounds" in page(found)


def compared(folder, capsys, first, second) -> str:
    places = []
    for run, lines in (("a", first), ("b", second)):
        places.append(str(written(folder / run, [result(3, run=run, f1=0.5)], lines)))
    assert main(["compare", *places]) == 0
    return re.sub(r"\s+", " ", re.sub(r"[│┃]", " ", capsys.readouterr().out))


def test_a_comparison_is_of_validation_losses(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    first, second = record("a", 7.0, 8.2, 8.045), record("b", 7.923, 8.488)
    text = compared(tmp_path, capsys, first, second)
    assert "val_loss at 10 8.200 8.488" in text
    assert "train_loss" not in text
    assert "updates that left 20 20" in text
    text = compared(tmp_path / "c", capsys, record("a", 7.0), record("b", 7.923))
    assert "train_loss (training loss of one batch) at 3 7.000 7.923" in text
    assert "0.92" not in text


def test_an_account_goes_on_between_looks(tmp_path):
    lines = [
        begin(defenses=[dpsgd()]),
        look(0, privacy=[spent(5.07, 1)]),
        change(10, privacy=[spent(6.0, 10)]),
        end(20, privacy=[spent(8.0, 20)]),
    ]
    [account] = found_in(tmp_path, [result(0, f1=0.1)], lines).runs[0].privacy
    assert account.series == [(0, 5.07), (10, 6.0), (20, 8.0)]
    assert account.whole
