"""Prompts, which the loss is not computed on, as a series of their own."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import roc_auc_score

from lightning_fedleak import LeakageMonitor, RiskGate
from lightning_fedleak.attacks.memorization import Combined, PromptRatio
from lightning_fedleak.engine import Memorization
from lightning_fedleak.evaluation.canaries import leave_out
from tests.engine.channels.test_memorization import fit, lines, monitor, tiny


def rows(n: int = 420, prompt: int = 14, answer: int = 12) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 2000, (n, prompt + answer), generator=generator)
    labels = ids.clone()
    labels[:, :prompt] = -100
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


def watch(folder: Path, *attacks: Any, others: Any = None) -> LeakageMonitor:
    return monitor(folder, list(attacks), Memorization(max_overhead=4 / 3, others=others))


def test_prompts_have_a_series_and_answers_keep_their_numbers(tmp_path: Path) -> None:
    data, others = leave_out(rows(), 150, seed=1)
    base = tiny().eval()
    both = watch(tmp_path / "both", Combined(), PromptRatio())
    gate = RiskGate("leakage/prompt_ratio/auc", at_most=0.9, action="warn")
    _, module = fit([both, gate], data=data, max_epochs=1)
    fit([watch(tmp_path / "alone", Combined())], data=data, max_epochs=1)
    first, second = (lines(tmp_path / name, "combined") for name in ("both", "alone"))
    for one, two in zip(first, second, strict=True):
        assert one["pool"] == two["pool"]
        for name in ("auc", "shown", "p_value"):
            values = (line["metrics"] and line["metrics"][name]["value"] for line in (one, two))
            assert len({*values}) == 1
    line = lines(tmp_path / "both", "prompt_ratio")[-1]
    assert line["metrics"]["members"]["value"] > 100
    scores, sides = [], []
    texts = [(data[n], True) for n in range(len(data))] + [(row, False) for row in others]
    model = module.model.eval()
    for row, side in texts:
        ids = row["input_ids"]
        with torch.no_grad():
            now, before = (
                m(ids[None]).logits[0, :13].log_softmax(1).gather(1, ids[1:14, None])
                for m in (model, base)
            )
        scores.append(float((now - before).double().clamp_max(3.0).mean()))
        sides.append(side)
    count = (line["metrics"]["members"]["value"], line["metrics"]["others"]["value"])
    if count == (sum(sides), len(sides) - sum(sides)):  # all were asked
        assert line["metrics"]["auc"]["value"] == pytest.approx(roc_auc_score(sides, scores))
    else:
        assert line["metrics"]["auc"]["value"] == pytest.approx(
            roc_auc_score(sides, scores), abs=0.06
        )
    assert gate._has_result


def test_prompts_that_others_repeat_are_not_compared(tmp_path: Path) -> None:
    data = rows()
    for row in data[:330]:  # of most rows the prompt is one system prompt
        row["input_ids"][:14] = data[0]["input_ids"][:14]
    train, _ = leave_out(data, 150, seed=1)
    fit([watch(tmp_path, Combined(), PromptRatio())], data=train, max_epochs=1)
    [line] = lines(tmp_path, "prompt_ratio")[-1:]
    assert line["metrics"]["members"]["value"] + line["metrics"]["others"]["value"] <= 90


@pytest.mark.parametrize(
    ("data", "others", "message"),
    [
        (rows(prompt=1), None, "no row has a prompt of 8 tokens"),
        (rows(), rows(200), "prompts of others= may be from another distribution"),
    ],
)
def test_without_prompts_the_attack_is_refused(data, others, message, tmp_path) -> None:
    train = leave_out(data, 150, seed=1)[0] if others is None else data
    with pytest.raises(ValueError, match=message):
        fit([watch(tmp_path, PromptRatio(), others=others)], data=train, max_epochs=1)


def test_the_lineup_says_by_what_prompts_are_asked_about(tmp_path, caplog) -> None:
    data, _ = leave_out(rows(), 150, seed=1)
    for attacks, words in (
        ([Combined()], "no attack: PromptRatio() does"),
        ([Combined(), PromptRatio()], "prompt_ratio"),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            fit([watch(tmp_path, *attacks)], data=data, max_steps=1, max_epochs=1)
        assert re.search(
            rf"The prompts of \d+, .* are asked about by {re.escape(words)}", caplog.text
        )


def test_auto_asks_about_prompts_and_not_about_short_rows_where_there_are_none(tmp_path) -> None:
    data, _ = leave_out(rows(), 150, seed=1)
    auto = monitor(tmp_path, "auto", look_seconds=1e-9)
    fit([auto], data=data, max_steps=1)
    assert "leakage/prompt_ratio/auc" in auto.latest
    log = (tmp_path / "leakage.jsonl").read_text()
    assert "prompt_ratio" in log
    assert "loss_ratio_short" not in log
