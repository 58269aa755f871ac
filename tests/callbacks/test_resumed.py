"""A run goes on from a checkpoint that was written after six of twelve steps."""

import json

import pytest
import torch

from lightning_fedleak.attacks import AlignedFlatChat, AttentionMembership, FlatChat
from tests.tools.seeded_runs import CHECKPOINTED, RESUMED_UNTIL, SAVED_AT, fit, make_checkpoint

GAMES = "LeakageMonitor[shared: fc_membership,attention_membership]"
WORDS = "LeakageMonitor[local,shared: flatchat,aligned_flatchat]"
CALIBRATED = (AlignedFlatChat, AttentionMembership, FlatChat)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    make_checkpoint(CHECKPOINTED, folder / "saved.ckpt", folder)
    return folder / "saved.ckpt"


@pytest.fixture(scope="module")
def saved(checkpoint):
    return torch.load(checkpoint, weights_only=True)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, checkpoint):
    """State by key and lines of leakage.jsonl of the run that goes on; who calibrated anew."""
    folder = tmp_path_factory.mktemp("resumed")
    calibrated = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in CALIBRATED:

            def prepare(self, anatomy, real=kind.prepare):
                calibrated.append(self.name)
                real(self, anatomy)

            patch.setattr(kind, "prepare", prepare)
        callbacks = CHECKPOINTED.callbacks()
        trainer = fit(
            CHECKPOINTED, folder, callbacks=callbacks, ckpt_path=checkpoint, max_steps=RESUMED_UNTIL
        )
    trainer.save_checkpoint(folder / "end.ckpt")
    (log,) = folder.rglob("leakage.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return torch.load(folder / "end.ckpt", weights_only=True), lines, calibrated


def test_calibrations_are_used_and_none_is_made_anew(saved, resumed):
    end, _, calibrated = resumed
    assert calibrated == []
    for key, names in (
        (WORDS, ("flatchat", "aligned_flatchat")),
        (GAMES, ("attention_membership",)),
    ):
        for name in names:
            was = saved["callbacks"][key]["attacks"][name]
            now = end["callbacks"][key]["attacks"][name]
            assert was["tensors"]
            assert was["config"] == now["config"]
            assert was["tensors"].keys() == now["tensors"].keys()
            assert all(torch.equal(t, now["tensors"][n]) for n, t in was["tensors"].items())


def test_every_monitor_looks_on_where_it_was(saved, resumed):
    end, lines, _ = resumed
    looked = {(x["attack"], x["step"]) for x in lines if x["stage"] == "shared"}
    assert {step for name, step in looked if name == "flatchat"} == {6, 8, 10}
    assert {step for name, step in looked if name == "fc_membership"} == {*range(6, 12)}
    assert {step for name, step in looked if name == "prefix_inversion"} == {6, 9}
    unknown = {line["attack"] for line in lines if line["unknown"] is not None}
    assert unknown <= {"aligned_flatchat"}, "it names no type here, which was a known 0"
    looks = [(state["looks"], end["callbacks"][key]["looks"])
             for key, state in saved["callbacks"].items() if "looks" in state]  # fmt: skip
    assert looks == [(3, 6), (6, 12), (2, 4)]


def test_games_of_earlier_looks_are_in_the_window(saved, resumed):
    _, lines, _ = resumed
    games = saved["callbacks"][GAMES]["games of leakage/fc_membership"]["games"]
    *_, last_but_one, last = games[:, 0].unique().tolist()
    kept = int((games[:, 0] >= last_but_one).sum())
    first = next(line for line in lines if line["attack"] == "fc_membership")
    assert (last_but_one, last) == (SAVED_AT - 2, SAVED_AT - 1)
    assert kept < first["n"] <= kept + 8


def test_what_was_counted_goes_on(saved, resumed):
    was, now = saved["callbacks"], resumed[0]["callbacks"]
    assert [state["RiskGate[flatchat/f1]"]["breaches"] for state in (was, now)] == [3, 6]


def test_releases_are_counted_on(saved, resumed):
    defences = [state["lightning_fedleak_defenses"]["dpsgd"] for state in (saved, resumed[0])]
    assert [state["releases"] for state in defences] == [SAVED_AT, RESUMED_UNTIL]
    assert [float(s["accountant/releases"][:, 2].sum()) for s in defences] == [6.0, 12.0]
