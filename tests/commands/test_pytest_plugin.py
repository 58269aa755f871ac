"""The plugin of pytest, in sessions of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.folders import noisy_release

pytest_plugins = ["pytester"]

STEP = """
import torch
from lightning_fedleak import BagOfWords, SubspaceWords
from tests.helpers.models import tiny_gpt2

def test_words(fedleak_step):
    torch.manual_seed(0)
    ids = torch.randint(3, 60, (2, 6))
    model = tiny_gpt2(tied=False)
    before = [p.clone() for p in model.parameters()]
    attacks = [BagOfWords(), SubspaceWords()]
    check = fedleak_step(model, {{"input_ids": ids, "labels": ids}}, attacks)
    check.assert_at_most({at_most})
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())
"""
RELEASE = """
def test_release(fedleak_release):
    check = fedleak_release({model!r}, {base!r}, {members!r}, {others!r}, length=24, drawn=True)
    check.assert_at_most({at_most}, {metric!r})
"""


def run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, source: str, *options: str
) -> pytest.RunResult:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(source)
    plugin = ("-p", "lightning_fedleak.cli.pytest_plugin", "-p", "no:cacheprovider")
    return pytester.runpytest_inprocess(*plugin, *options)


@pytest.mark.parametrize(("selected", "count"), [("fedleak", 2), ("not fedleak", 1)])
def test_tests_that_measure_are_marked(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, selected: str, count: int
) -> None:
    tests = ("def test_a(fedleak_step): ...", "def test_b(fedleak_release): ...")
    source = "\n".join((*tests, "def test_c(): ..."))
    result = run(pytester, monkeypatch, source, "--strict-markers", "-m", selected)
    result.assert_outcomes(passed=count, deselected=3 - count)


@pytest.mark.parametrize(("at_most", "outcome"), [(1.0, "passed"), (0.5, "failed")])
def test_a_step_is_judged(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, at_most: float, outcome: str
) -> None:
    result = run(pytester, monkeypatch, STEP.format(at_most=at_most))
    result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines(
        [
            f"*leakage/worst/words 1.000, limit {at_most:g}; bag_of_words 1.000 (0.7* to 1.000), "
            "control 1.000; "
            f"subspace_words 0.* (0.* to 0.*), control 0.*: {outcome.replace('failed', 'FAILED')}*"
        ]
    )


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
    paths = noisy_release(tmp_path)
    paths["others"] = paths.pop("held-out")
    source = RELEASE.format(**paths, at_most=at_most, metric=metric)
    result = run(pytester, monkeypatch, source)
    result.assert_outcomes(**{outcome: 1})
    line = f"*combined/{metric} * limit {at_most:g}: *{outcome}*"
    result.stdout.fnmatch_lines([line if outcome == "passed" else line.replace(outcome, "FAILED")])
    if outcome == "failed":
        result.stdout.fnmatch_lines(["*is unknown*"])


def test_members_that_cannot_be_compared_fail_a_test(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two short members have no others to compare with, so that their leakage is unknown."""
    paths = noisy_release(tmp_path)
    paths["others"] = paths.pop("held-out")
    with Path(paths["members"]).open("a") as file:
        file.write("ab\nba\n")
    result = run(pytester, monkeypatch, RELEASE.format(**paths, at_most=1.0, metric="auc"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*loss_ratio_short/auc is unknown.*"])
    result.stdout.no_fnmatch_line("loss_ratio_short: *")
