"""Canaries in tiers of repetition, scored on the trained weights in a Trainer."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fedleak import Games, LeakageMonitor, RiskGate, with_canaries
from lightning_fedleak.attacks.memorization import Canaries
from lightning_fedleak.callbacks import WatchSettings
from lightning_fedleak.engine import Memorization
from lightning_fedleak.evaluation.metrics.clustered import spent_at
from tests.engine.channels.test_memorization import fit, lines, rows

SUFFIX = 4


def planted(seed: int = 1, m: int = 90, times: tuple[int, ...] = (1, 8), **more: Any) -> Any:
    ids = torch.randint(3, 2000, (m, 14), generator=torch.Generator().manual_seed(9))
    canaries = [{"input_ids": row, "labels": row} for row in ids]
    return with_canaries(rows(300), canaries, seed, times=times, **more)


def watch(data: Any, folder: Path, *, budget: float = 1.0, **more: Any) -> LeakageMonitor:
    return LeakageMonitor(
        [Canaries(tokens=SUFFIX, **more)], games=Games(canaries=data.canaries), folder=folder,
        settings=WatchSettings(memorization=Memorization(max_overhead=budget)),
    )  # fmt: skip


def test_canaries_that_are_repeated_more_are_memorized_more(tmp_path: Path) -> None:
    data = planted()
    watching = watch(data, tmp_path)
    gate = RiskGate("audit/canary_x8/extracted", at_most=0.1, action="warn")
    fit([watching, gate], data=data, max_epochs=2, lr=1e-2)
    assert gate.fired is not None
    assert gate.fired.value > 0.1
    few, many = (lines(tmp_path, f"canary_x{times}") for times in (1, 8))
    assert [line["stage"] for line in many] == ["released"] * 4
    repeats = torch.tensor(data.canaries.record.repeats)
    included = data.canaries.included
    cap = math.log2(int((~included).sum()) + 1)
    for series, times in ((few, 1), (many, 8)):
        last = series[-1]["metrics"]
        assert last["members"]["value"] == int((included & (repeats == times)).sum())
        assert last["others"]["value"] == int((~included).sum())
        assert last["alpha"]["value"] == spent_at(4, 0.05 / 2)
        assert last["exposure_cap"]["value"] == pytest.approx(cap)
        assert series[-1]["config"]["tokens"] == SUFFIX
    first, last = few[-1]["metrics"], many[-1]["metrics"]
    assert last["exposure"]["value"] == pytest.approx(cap)  # above every other
    assert last["exposure"]["high"] is None  # so that no upper end is known
    assert last["exposure_capped"]["value"] > 0.9
    assert last["greedy"]["value"] > first["greedy"]["value"] + 0.5
    assert last["extracted"]["value"] > first["extracted"]["value"] + 0.5
    assert last["extracted_others"]["value"] == 0
    assert first["auc"]["value"] < last["auc"]["value"]
    assert first["shown"]["value"] is None  # with far fewer others than it needs
    assert math.isinf(watching.latest["audit/canary_x8/exposure_high"])
    assert not any(name.startswith("leakage/worst") for name in watching.latest)
    assert few[0]["unknown"]  # in mid-epoch few of them have come


def test_a_gate_on_a_rate_that_needs_more_canaries_says_to_plant_them(tmp_path: Path) -> None:
    data = planted()
    gate = RiskGate("audit/canary_x8/shown", at_most=0.1)
    n = int((~data.canaries.included).sum())
    with pytest.raises(ValueError, match=rf"non-members at look 4, and has {n}: plant more"):
        fit([watch(data, tmp_path), gate], data=data, max_epochs=2)


def test_a_tier_of_few_canaries_is_unknown_and_says_why(tmp_path: Path) -> None:
    data = planted(m=60, times=(1, 4, 16), probability=0.2)
    fit([watch(data, tmp_path)], data=data, max_epochs=1)
    [line] = lines(tmp_path, "canary_x16")[-1:]
    assert "canaries of tier x16" in line["unknown"]
    assert "53 were held out: 10 of each are needed" in line["unknown"]
    data = planted()  # of which no batch holds any
    fit([watch(data, tmp_path / "absent")], data=rows(300), max_epochs=1)
    for line in lines(tmp_path / "absent", "canary_x8"):
        assert line["unknown"].startswith("0 canaries of tier x8")


def test_what_does_not_fit_is_refused_at_setup(tmp_path: Path) -> None:
    data = planted()
    with pytest.raises(ValueError, match=r"Canaries\(tokens=14\) .* at most 13"):
        LeakageMonitor([Canaries(tokens=14)], games=Games(canaries=data.canaries))
    with pytest.raises(ValueError, match=r"games=Games\(canaries=train.canaries\)"):
        LeakageMonitor([Canaries()])
    argument = r"settings=WatchSettings\(memorization=Memorization\(max_overhead=0\.\d+\)\)"
    with pytest.raises(ValueError, match=f"of 90 texts: give {argument}"):
        fit([watch(data, tmp_path, budget=0.02)], data=data, max_epochs=1)


@pytest.mark.slow
def test_a_resumed_run_goes_on_and_its_checkpoint_shows_no_coin(tmp_path: Path) -> None:
    data = planted()
    keep = ModelCheckpoint(tmp_path / "ckpt", save_last=True)
    fit([watch(data, tmp_path), keep], data=data, max_epochs=1, enable_checkpointing=True)
    last = tmp_path / "ckpt" / "last.ckpt"
    saved = torch.load(last, weights_only=True)
    [state] = [s for name, s in saved["callbacks"].items() if name.startswith("LeakageMonitor")]
    assert not bool(state["canary"]["seen"].any())
    whole = tmp_path / "whole"
    fit([watch(data, whole)], data=data, max_epochs=2)
    fit([watch(data, tmp_path)], data=data, max_epochs=2, ckpt_path=str(last))
    resumed, single = (lines(f, "canary_x8")[-1]["metrics"] for f in (tmp_path, whole))
    assert resumed["members"] == single["members"]
    assert resumed["auc"]["value"] == pytest.approx(single["auc"]["value"], abs=0.05)
    other = planted(seed=2)
    with pytest.raises(ValueError, match="is of other canaries"):
        fit([watch(other, tmp_path)], data=other, max_epochs=2, ckpt_path=str(last))
