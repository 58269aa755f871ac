"""The plugin of pytest, in sessions of its own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.folders import save_tiny_causal_lm

pytest_plugins = ["pytester"]

STEP = """
import torch
from lightning_fedleak import BagOfWords
from tests.helpers.models import tiny_gpt2

def test_words(fedleak_step):
    torch.manual_seed(0)
    ids = torch.randint(3, 60, (2, 6))
    model = tiny_gpt2(tied=False)
    before = [p.clone() for p in model.parameters()]
    check = fedleak_step(model, {{"input_ids": ids, "labels": ids}}, [BagOfWords()])
    check.assert_at_most({at_most}, "leakage/bag_of_words/f1")
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())
"""
RELEASE = """
def test_release(fedleak_release):
    check = fedleak_release({model!r}, {base!r}, {members!r}, {others!r}, length=24, drawn=True)
    check.assert_at_most({at_most}, {metric!r})
"""


def run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, source: str
) -> pytest.RunResult:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(source)
    plugin = ("-p", "lightning_fedleak.cli.pytest_plugin", "-p", "no:cacheprovider")
    return pytester.runpytest_inprocess(*plugin)


@pytest.mark.parametrize(("at_most", "outcome"), [(1.0, "passed"), (0.5, "failed")])
def test_a_step_is_judged(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, at_most: float, outcome: str
) -> None:
    result = run(pytester, monkeypatch, STEP.format(at_most=at_most))
    result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines(
        [
            f"leakage/bag_of_words/f1 1.000, limit {at_most:g}: {outcome}*"
            if outcome == "passed"
            else "*f1 1.000, limit 0.5: FAILED"
        ]
    )


def texts(path: Path, seed: int) -> str:
    """Write 30 texts of drawn letters, which repeat nothing of each other."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghiklmnoprstu", k=5)) for _ in range(300)]
    path.write_text("\n".join(" ".join(words[n : n + 10]) for n in range(0, 300, 10)) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("at_most", "metric", "outcome"),
    [(1.0, "auc", "passed"), (0.51, "auc", "failed"), (0.1, "shown", "failed")],
)
def test_a_release_is_judged_also_where_it_is_unknown(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    at_most: float,
    metric: str,
    outcome: str,
) -> None:
    """Noise alone gives nothing away; so few texts do not decide a limit near guessing."""
    base = str(save_tiny_causal_lm(tmp_path / "base"))
    network = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    network.save_pretrained(tmp_path / "model")
    source = RELEASE.format(
        model=str(tmp_path / "model"), base=base, at_most=at_most, metric=metric,
        members=texts(tmp_path / "members.txt", 0),
        others=texts(tmp_path / "others.txt", 1),
    )  # fmt: skip
    result = run(pytester, monkeypatch, source)
    result.assert_outcomes(**{outcome: 1})
    line = f"*combined/{metric} * limit {at_most:g}: *{outcome}*"
    result.stdout.fnmatch_lines([line if outcome == "passed" else line.replace(outcome, "FAILED")])
    if outcome == "failed":
        result.stdout.fnmatch_lines(["*is unknown*"])
