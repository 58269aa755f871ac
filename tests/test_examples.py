"""Each example, run as a user would."""

import re
import runpy
import subprocess
import sys
from functools import partialmethod
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_fedleak.attacks import AlignedFlatChat
from lightning_fedleak.attacks.words import aligned_readout
from lightning_fedleak.cli import finetuning
from lightning_fedleak.cli.finetuning import TextDataModule, read_texts, texts
from tests.helpers.processes import SECONDS, environment_of_own

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[1] / "examples"


def set_calibration(attack: AlignedFlatChat, init: Any, *settings: Any, **named: Any) -> None:
    """A readout that is calibrated on a twelfth of the usual text, or half of an example's."""
    init(attack, *settings, **named | {"calibration_tokens": 1_000})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs an example in an empty folder, on fewer and shorter texts; gives what it printed.

    Each of its runs takes so many steps, where they are given. Arguments are those of its ``main``.
    """
    monkeypatch.chdir(tmp_path)
    shorter = partialmethod(TextDataModule.__init__, length=32)
    monkeypatch.setattr(TextDataModule, "__init__", shorter)
    calibrated = partialmethod(set_calibration, AlignedFlatChat.__init__)
    monkeypatch.setattr(AlignedFlatChat, "__init__", calibrated)
    monkeypatch.setattr(aligned_readout, "_REPEATS", 2)
    init = L.Trainer.__init__

    def run(
        name: str, words: int = 16, count: int | None = None, steps: int | None = None, **main: Any
    ) -> str:
        def read_some(path: str | Path) -> list[str]:
            return [" ".join(text.split()[:words]) for text in read_texts(path)[:count]]

        for module in (texts, finetuning):
            monkeypatch.setattr(module, "read_texts", read_some)
        if steps is not None:

            def stopped(trainer: L.Trainer, **settings: Any) -> None:
                assert settings["max_steps"] > steps
                init(trainer, **settings | {"max_steps": steps})

            monkeypatch.setattr(L.Trainer, "__init__", stopped)
        if main:
            runpy.run_path(str(EXAMPLES / name))["main"](**main)
        else:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def value(printed: str, before: str) -> float:
    [line] = [line for line in printed.splitlines() if line.startswith(before)]
    return float(line.removeprefix(before).split()[0].rstrip(","))


def test_quickstart(run) -> None:
    assert 0.5 < value(run("quickstart.py", steps=11), "leakage/aligned_flatchat/f1 =") <= 1


def test_custom_attack(run) -> None:
    printed = run("custom_attack.py", steps=6)
    assert 0 < value(printed, "largest_rows: F1") <= 1
    assert 0.5 < value(printed, "aligned_flatchat: F1") <= 1


def test_lora_closes_one_surface_and_leaves_another_open(run) -> None:
    whole, dropped, lora = run("lora.py", steps=6).split("dropout")[1:]
    assert value(whole, "  aligned_flatchat: f1") > 0.5
    for printed in (dropped, lora):
        assert "aligned_flatchat: f1 0.000, exposed 0" in printed
    assert 0.1 < value(dropped, "  subspace_words: f1") < 0.9
    assert value(lora, "  subspace_words: f1") > 0.99
    for printed in (whole, dropped, lora):
        assert value(printed, "  gradient_membership: auc") > 0.9


def test_members_are_told_unless_tokens_are_replaced(run) -> None:
    _, honest, crafted, weak, strong = re.split(r"(?m)^\S.*:$", run("membership.py"))
    assert value(honest, "  gradient_membership: AUC") > 0.9
    assert value(honest, "  subspace_membership: AUC") > 0.7
    assert value(crafted, "  fc_membership: AUC") == 1
    assert value(crafted, "  attention_membership: AUC") > 0.9
    assert value(weak, "  word_membership: AUC") > value(strong, "  word_membership: AUC")


def test_noise_of_dp_sgd_hides_words_and_no_hidden_states(run) -> None:
    lines = run("sweep.py", max_steps=6, names=["none", "DPSGD 0.5"]).splitlines()
    rows = {line[:20].strip(): line[20:].split() for line in lines}
    words, membership, split = map(float, rows["none"][2:])
    assert words > 0.5
    assert membership == 1
    assert split > 0.8
    epsilon, words, _, split = map(float, rows["DPSGD 0.5"][1:])
    assert 1 < epsilon < 10
    assert words < 0.1
    assert split > 0.8
    assert rows["none"][1] == "unknown"


def test_a_federation_is_gated_or_noised(run) -> None:
    gated, noised = run("federate.py", count=300, rounds=1, local_steps=4).split("noise:")
    members = [float(x) for x in re.findall(r"(\d\.\d\d)(?: withheld)?, ", gated)]
    assert len(members) == 4
    assert max(members) > 0.9
    assert "withheld" in gated
    assert "withheld" not in noised
    assert value(noised[noised.index("  the noise is") :], "  the noise is") > 10


def test_inversion_reads_texts_at_every_split(run) -> None:
    printed = run("inversion.py", steps=5)
    looks = re.findall(r"step \d+: .*", printed)  # perhaps behind a progress bar
    assert [look.split(":")[0] for look in looks] == ["step 0", "step 4"]
    for look in looks:
        for split in (1, 3, 5):
            assert value(look[look.index(f"split {split}:") :], f"split {split}:") > 0.9


def test_own_defense_hides_few_words_and_leaves_membership_unknown(run) -> None:
    printed = run("own_defense.py", steps=4)
    local = value(printed, "leakage_local/aligned_flatchat/f1 =")
    shared = value(printed, "leakage/aligned_flatchat/f1 =")
    assert local - 0.2 < shared < local + 0.02  # noise may also add a word by chance
    assert value(printed, "leakage_local/fc_membership/auc =") == 1
    assert "leakage/fc_membership/auc = unknown" in printed


@pytest.mark.ddp
def test_defended_ddp(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / "defended_ddp.py")],
        cwd=tmp_path,
        env=environment_of_own(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert finished.returncode == 0, finished.stderr
    local = value(finished.stdout, "leakage_local/aligned_flatchat/f1 =")
    shared = value(finished.stdout, "leakage/aligned_flatchat/f1 =")
    assert shared < local


def test_the_trained_weights_give_their_texts_away(run) -> None:
    printed = run("memorization.py", words=12)
    last = [line for line in printed.splitlines() if line.startswith("combined")][-1]
    assert float(last.split("AUC ")[1].split()[0]) > 0.95


def test_chats_are_listed_and_their_values_ranked_and_found(run) -> None:
    printed = run("records.py", words=24, count=240)
    assert int(printed.split("at least ")[1].split()[0]) > 50
    assert value(printed, "entity/phone/label: auc") > 0.7
    assert value(printed, "entity/code/label: first") > 0.5
    assert value(printed, "entity/code/prompt: first") < 0.3


@pytest.mark.parametrize("name", ["transformers_trainer.py", "plain_loop.py"])
def test_other_loops_are_stopped_at_the_third_look_above_the_threshold(run, name: str) -> None:
    looks = [float(value) for value in re.findall(r"words = ([\d.]+)", run(name))]
    assert all(value > 0.5 for value in looks)
    assert len(looks) == (3 if name.startswith("transformers") else 5)


def test_a_loop_of_accelerate(run) -> None:
    looks = [float(value) for value in re.findall(r"words = ([\d.]+)", run("accelerate_loop.py"))]
    assert len(looks) == 5
    assert all(value > 0.3 for value in looks)
