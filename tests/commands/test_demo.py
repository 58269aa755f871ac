from __future__ import annotations

import json
import signal
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.text import Text
from transformers import AutoTokenizer

from lightning_fedleak.attacks import AlignedFlatChat
from lightning_fedleak.cli.commands import demo as run_module
from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MESSAGES, SourceError
from lightning_fedleak.cli.finetuning.module import CausalLMFineTuning
from lightning_fedleak.cli.printing import INTERRUPTED
from tests.helpers.commands import run_command
from tests.helpers.folders import TEXTS


@pytest.fixture(autouse=True, scope="module")
def _calibrated_on_few_tokens() -> Iterator[None]:
    small = partial(AlignedFlatChat, calibration_tokens=400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "AlignedFlatChat", small)
        yield


def private(folder: Path) -> str:
    path = folder / "private.txt"
    path.write_text("\n".join(TEXTS * 2))
    return str(path)


def shown(*, terminal: bool = False, **settings: object) -> tuple[int, str]:
    small = {"batch_size": 4, "length": 16} | settings
    return run_command("demo", width=140, terminal=terminal, **small)


def test_watches_then_stops_then_sums_up_and_reveals_words_to_the_owner_alone(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = shown(
        model=model, text=private(tmp_path), steps=4, every_n_steps=2, at_most=0.0, reveal=True,
        out=tmp_path / "out",
    )  # fmt: skip
    assert code == 0
    [folder] = (tmp_path / "out").iterdir()
    lines = [
        json.loads(line) for line in (folder / "watched" / "leakage.jsonl").read_text().splitlines()
    ]
    assert {(line["step"], line["attack"]) for line in lines} == {
        (step, attack) for step in (0, 2) for attack in ("flatchat", "aligned_flatchat")
    }
    for line in lines:
        values = (f"{line['metrics'][m]['value']:.3f}" for m in ("recall", "precision", "f1"))
        assert all(value in printed for value in values)
    assert "RiskGate 'aligned_flatchat/f1' stopped training at step 2" in printed
    assert "RiskGate" not in capsys.readouterr().err  # what it says is printed once
    [saved] = (folder / "gated").rglob("*.ckpt")
    assert str(saved) in printed
    assert list((folder / "watched").glob("events.out.tfevents*"))
    assert f"tensorboard --logdir {folder}" in printed
    assert "One update lets the server" in printed
    assert "Words: " in printed
    [revealed] = folder.rglob("revealed*")
    assert stat.S_IMODE(revealed.stat().st_mode) == 0o600
    assert str(revealed) in printed
    words = revealed.read_text()
    assert "recovered" in words
    for line in words.splitlines():
        assert not line.startswith("recovered") or line not in printed


def test_an_invented_message_is_printed_beside_what_was_read_of_it(
    model: str, tmp_path: Path
) -> None:
    code, printed = shown(
        model=model, steps=1, at_most=1.0, length=32, out=tmp_path / "out", terminal=True
    )
    assert code == 0
    text = Text.from_ansi(printed)
    lines = text.plain.splitlines()
    message = lines[lines.index("An invented message of the newest batch that was looked at:") + 1]
    read = next(line for line in lines if line.startswith("The same, as far as the server read"))
    read = lines[lines.index(read) + 1]
    messages = [json.loads(line)["text"] for line in EMBEDDED_MESSAGES.read_text().splitlines()]
    assert any(message.strip() in one for one in messages), message
    [revealed] = tmp_path.rglob("revealed*")
    *_, last = (one for one in revealed.read_text().splitlines() if one.startswith("recovered"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    kept = tokenizer(message.strip())["input_ids"]
    pieces = [tokenizer.decode([token]) for token in kept]
    assert "".join(pieces) == message.strip()
    assert (
        read.strip()
        == "".join(piece if repr(piece) in last else "_" * len(piece) for piece in pieces).strip()
    )
    assert any(repr(piece) in last for piece in pieces)
    assert "LeakageCallback(trainer)" in text.plain
    assert str(revealed) not in text.plain.replace("\n", "")


def test_two_runs_with_one_seed_are_one_run_that_the_gate_lets_pass(
    model: str, tmp_path: Path
) -> None:
    rows = []
    for name in ("a", "b"):
        torch.rand(1)
        code, printed = shown(
            model=model, text=private(tmp_path), steps=2, at_most=1.0, out=tmp_path / name,
            terminal=True,
        )  # fmt: skip
        assert code == 0
        [path] = (tmp_path / name).rglob("watched/leakage.jsonl")
        rows.append([json.loads(line)["metrics"] for line in path.read_text().splitlines()])
    assert rows[0] == rows[1]
    printed = Text.from_ansi(printed).plain
    assert "Run 1: watched" in printed
    assert "aligned_flatchat" in printed
    assert "The gate let all 2 steps pass" in printed
    assert not list(tmp_path.rglob("revealed*"))


def test_an_output_folder_that_cannot_be_made_is_said_before_training(
    model: str, tmp_path: Path
) -> None:
    file = tmp_path / "taken"
    file.write_text("a file")
    with pytest.raises(SourceError, match=r"cannot be written to.*--out"):
        shown(model=model, text=private(tmp_path), out=file)


def test_ctrl_c_ends_with_what_was_measured(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(CausalLMFineTuning):
        def training_step(self, batch, batch_idx):
            if self.global_step == 2:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(run_module, "CausalLMFineTuning", Interrupted)
    handler = signal.getsignal(signal.SIGINT)
    code, printed = shown(
        model=model, text=private(tmp_path), steps=9, every_n_steps=1, out=tmp_path / "out"
    )
    assert code == INTERRUPTED
    assert "Interrupted. This is what was measured until then." in printed
    assert "of 2 looks" in printed
    assert "RiskGate" not in printed
    assert "Loss and leakage of the run on one page" in printed
    assert signal.getsignal(signal.SIGINT) is handler
