"""A user states what leaves the machine: only what reads it is set up, and records say who said."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fedleak import LeakageMonitor, RiskGate
from lightning_fedleak.attacks import BagOfWords, GradientMembership, SubspaceWords
from lightning_fedleak.attacks.memorization import Combined
from lightning_fedleak.engine import Memorization
from lightning_fedleak.engine.options import WatchSettings
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.evidence import verify_run
from lightning_fedleak.report import findings, read
from lightning_fedleak.report.pages import model_card
from lightning_fedleak.trainers import Threshold
from tests.helpers.loops import check_undisturbed, watched
from tests.helpers.models import tiny_gpt2

SAID = "what leaves the machine: model, stated by the user, not checked"
OF_WEIGHTS = Memorization(max_overhead=4.0)


def rows(n: int = 200) -> list[dict[str, Tensor]]:
    ids = torch.randint(3, 97, (n, 14), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def loader(data: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=10, shuffle=True)


def test_only_the_trained_model_is_attacked_where_only_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for attack in (SubspaceWords, BagOfWords, GradientMembership):
        for method in ("needs", "estimate", "prepare", "run"):
            monkeypatch.setattr(attack, method, lambda *_, **__: pytest.fail("it costs nothing"))
    train, _ = leave_out(rows(), 80, seed=1)
    given = {"shares": "model", "memorization": OF_WEIGHTS}
    gate = Threshold("leakage/worst/memorization", at_most=0.99, action="warn", strict=False)
    make = lambda: tiny_gpt2(tied=False)  # noqa: E731
    watch = check_undisturbed(tmp_path, "auto", make, loader=loader(train), gates=[gate], **given)
    families = {name.split("/")[2] for name in watch.latest if name.startswith("leakage/worst/")}
    assert families == {"memorization"}
    assert watch.latest["leakage/combined/auc"] > 0
    assert not watch.lines("gradient_membership")
    begin = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])
    assert begin["monitor"]["shares"] == SAID
    assert SAID in caplog.text
    assert "measured the trained weights in" in caplog.text
    assert not begin["unread"]
    found = findings(read([tmp_path]))
    assert " times;" in found.overviews[0].run_line
    answers = [reading.answer for reading in found.overviews[0].readings]
    assert answers[1:] == ["Stays here"] * 3
    assert "Not tested: Nothing that leaves" in " ".join(found.overviews[0].sentences)
    not_tested = found.runs[0].not_tested
    assert SAID in not_tested
    assert not [sentence for sentence in not_tested if "words" in sentence or "batch" in sentence]
    assert SAID in model_card(found)
    verdict = verify_run(tmp_path)
    assert verdict.status == 0
    assert SAID in verdict.not_checked


@pytest.mark.parametrize("given", ["rows", "no rows"])
def test_without_rows_that_are_left_out_the_fit_is_refused(given: str, tmp_path: Path) -> None:
    data = {"loader": loader(rows())} if given == "rows" else {}
    with pytest.raises(ValueError, match="leave_out"):
        watched(tmp_path, "auto", shares="model", memorization=OF_WEIGHTS, **data)


def test_a_gate_on_what_does_not_leave_is_refused(tmp_path: Path) -> None:
    gate = Threshold("leakage/worst/words", at_most=0.5)
    with pytest.raises(ValueError, match="leakage/worst/words"):
        watched(tmp_path, "auto", shares="model", gates=[gate])
    monitor = LeakageMonitor(settings=WatchSettings(shares="model"))
    assert not [name for name in monitor.metric_names() if name.startswith("leakage/worst/w")]
    assert RiskGate("leakage/worst/memorization", at_most=0.9).metric in monitor.metric_names()


def test_attacks_on_what_does_not_leave_are_refused() -> None:
    for shares, attack in (("model", BagOfWords()), ("states", BagOfWords())):
        with pytest.raises(ValueError, match=f"'bag_of_words' .*shares='{shares}'"):
            LeakageMonitor([attack], settings=WatchSettings(shares=shares))
    with pytest.raises(ValueError, match="reads nothing that leaves with shares='states'"):
        LeakageMonitor(settings=WatchSettings(shares="states"))
    stated = LeakageMonitor(settings=WatchSettings(shares="gradients"))
    assert [a.name for a in stated.attacks] == [a.name for a in LeakageMonitor().attacks]
    assert LeakageMonitor([Combined()], settings=WatchSettings(shares="states")).attacks
    with pytest.raises(ValueError, match="shares"):
        WatchSettings(shares="weights")  # type: ignore[arg-type]
