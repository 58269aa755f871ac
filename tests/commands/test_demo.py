import json
import os
import random
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.text import Text
from transformers import AutoTokenizer

from lightning_fedleak.attacks import AlignedFlatChat
from lightning_fedleak.cli import finetuning
from lightning_fedleak.cli.commands import demo as run_module
from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MESSAGES, SourceError
from lightning_fedleak.cli.finetuning.module import CausalLMFineTuning
from lightning_fedleak.cli.printing import INTERRUPTED
from lightning_fedleak.cli.studies import demo_settings
from lightning_fedleak.report.wording import brief
from tests.helpers.commands import run_command
from tests.helpers.folders import TEXTS

FEW = {"CALIBRATION_TOKENS": 400, "GAMES": 2, "TEXTS": 1}
HEADLINES = {
    "flatchat": "f1",
    "aligned_flatchat": "f1",
    "gradient_membership": "auc",
    "fc_membership": "auc",
    "attention_membership": "auc",
    "prefix_inversion": "token_accuracy",
}


@pytest.fixture(autouse=True)
def _few_texts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "slow" not in request.keywords:
        for name, value in FEW.items():
            monkeypatch.setattr(demo_settings, name, value)


def private(folder: Path) -> str:
    path = folder / "private.txt"
    path.write_text("\n".join(TEXTS * 2))
    return str(path)


def shown(*, terminal: bool = False, **settings: object) -> tuple[int, str]:
    small = {"batch_size": 4, "length": 16} | settings
    return run_command("demo", width=140, terminal=terminal, **small)


def results(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "leakage.jsonl").read_text().splitlines()]


def test_watches_defends_and_stops_then_sums_up_and_reveals_words_to_the_owner_alone(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated = []
    prepare = AlignedFlatChat.prepare
    monkeypatch.setattr(
        AlignedFlatChat, "prepare", lambda *args: [calibrated.append(args), prepare(*args)]
    )
    words = sorted({word for text in TEXTS for word in text.split()})
    drawn = random.Random(0)
    text = tmp_path / "many.txt"
    text.write_text("\n".join(" ".join(drawn.choices(words, k=8)) for _ in range(300)))
    code, printed = shown(
        model=model, text=str(text), steps=4, every_n_steps=2, at_most=0.0, reveal=True, length=32,
        out=tmp_path / "out",
    )  # fmt: skip
    assert code == 0
    assert len(calibrated) == 1  # for all three runs
    [folder] = (tmp_path / "out").iterdir()
    lines = [line for line in results(folder / "watched") if line["attack"] in HEADLINES]
    assert {(line["step"], line["attack"]) for line in lines} == {
        (step, attack) for step in (0, 2) for attack in HEADLINES
    }
    for line in lines:
        assert f"{line['metrics'][HEADLINES[line['attack']]]['value']:.3f}" in printed
    stages = {line["stage"] for line in results(folder / "defended")}
    assert stages == {"local", "shared", "released"}
    assert "RiskGate 'aligned_flatchat/f1' stopped training at step 0" in printed
    assert "RiskGate" not in capsys.readouterr().err  # what it says is printed once
    [saved] = (folder / "gated").rglob("*.ckpt")
    assert str(saved) in printed
    assert list((folder / "watched").glob("events.out.tfevents*"))
    assert f"tensorboard --logdir {folder}" in printed
    [revealed] = folder.rglob("revealed_words*")
    assert stat.S_IMODE(revealed.stat().st_mode) == 0o600
    assert str(revealed) in printed
    words = revealed.read_text()
    assert "recovered" in words
    for line in words.splitlines():
        assert not line.startswith("recovered") or line not in printed
    assert_table_is_the_report(printed, folder)
    comparison = json.loads((folder / "report.json").read_text())["comparison"]
    assert comparison["sentence"].endswith("The gate stopped gated after 1 of 4 updates.")
    leaks, _, _ = comparison["sentence"].partition("The gate")
    cells = [dict(zip(comparison["columns"], row, strict=True)) for row in comparison["rows"]]
    for leak in ("words", "membership", "whole texts"):
        has_value = [
            "(" in row[leak] for row in cells if row["run"] != "gated"
        ]  # else it is unknown
        assert (f"{leak.capitalize()}: " in leaks) == all(has_value)
    assert "Words: F1" in leaks
    assert {*re.findall(r"in (\w+)[,.;]", leaks)} - {"both"} == {"watched", "defended"}


def assert_table_is_the_report(printed: str, folder: Path) -> None:
    """Compare what the terminal says of each attack and of the loss with ``report.json``."""
    table = printed.partition("what leaked")[2].splitlines()
    runs = {run["name"]: run for run in json.loads((folder / "report.json").read_text())["runs"]}
    doubtful = 0
    for attack, leak, title, command in run_module._ATTACKS:
        place = next(i for i, line in enumerate(table) if line.startswith(f"{leak}: {title}"))
        cells = []
        for run, is_local in (("watched", False), ("defended", True), ("defended", False)):
            of_run = [a for a in runs[run]["attacks"] if a["name"] == attack]
            of_stage = [a for a in of_run if (a["stage"] == "local") == is_local]
            cells += [a["quoted"]["rate"]["value"] for a in of_stage if a["quoted"]]
            if run == "watched":
                rate, chance = of_stage[0]["quoted"]["rate"], of_stage[0]["chance"]
        assert [*map(brief, cells)] == re.findall(r"(\S+) \(\S+–\S+\)", table[place])
        is_doubtful = f"This shows it: fedleak {command}" in table[place + 1]
        assert is_doubtful or rate["low"] > chance
        doubtful += is_doubtful
    assert doubtful  # of two games nothing follows
    [line] = [line for line in table if line.startswith("cost: val_loss")]
    losses = [dict(runs[run]["utility"]["val_loss"])[4] for run in ("watched", "defended")]
    assert line.split()[-2:] == [f"{loss:.3f}" for loss in losses]


def test_a_defence_that_refuses_is_said_and_the_gate_still_runs(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_settings, "MAX_GRAD_NORM", -1.0)
    code, printed = shown(
        model=model, text=private(tmp_path), steps=1, at_most=0.0, out=tmp_path / "out"
    )
    assert code == 0
    assert "DP-SGD refuses this run: " in printed
    assert "max_grad_norm" in printed
    assert "stopped training at step 0" in printed
    assert {path.name for path in tmp_path.glob("out/*/*") if path.is_dir()} == {"watched", "gated"}


@pytest.mark.slow
def test_it_shows_every_leak_in_forty_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_fedleak", "demo", "--out", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    finished = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert len(finished.stdout.splitlines()) <= 40
    assert "Not conclusive" not in finished.stdout


def test_an_invented_message_is_printed_beside_what_was_read_of_it(
    model: str, tmp_path: Path
) -> None:
    code, printed = shown(
        model=model, steps=1, at_most=1.0, length=32, out=tmp_path / "out", terminal=True
    )
    assert code == 0
    text = Text.from_ansi(printed)
    lines = text.plain.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("An invented message"))
    message, read = lines[start + 1 : start + 3]
    messages = [json.loads(line)["text"] for line in EMBEDDED_MESSAGES.read_text().splitlines()]
    assert any(message.strip() in one for one in messages), message
    [revealed] = tmp_path.rglob("revealed_words*")
    *_, last = (one for one in revealed.read_text().splitlines() if one.startswith("recovered"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    written = set()
    for start in ("", " "):  # of the message: a row may go on where the row before it ended
        pieces = [
            tokenizer.decode([token]) for token in tokenizer(start + message.strip())["input_ids"]
        ]
        assert "".join(pieces).strip() == message.strip()
        assert any(repr(piece) in last for piece in pieces)
        shown_pieces = (piece if repr(piece) in last else "_" * len(piece) for piece in pieces)
        written.add("".join(shown_pieces).strip())
    assert read.strip() in written
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
    assert "Run 1: no defence" in printed
    assert "AlignedFlatChat" in printed
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

    monkeypatch.setattr(finetuning, "CausalLMFineTuning", Interrupted)
    handler = signal.getsignal(signal.SIGINT)
    code, printed = shown(
        model=model, text=private(tmp_path), steps=9, every_n_steps=1, out=tmp_path / "out"
    )
    assert code == INTERRUPTED
    assert "Interrupted. This is what was measured until then." in printed
    [folder] = (tmp_path / "out").iterdir()
    assert {line["step"] for line in results(folder / "watched")} == {0, 1}
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["watched"]
    assert "Not tested: it needs 210 texts of 9 tokens." in printed
    assert "words: AlignedFlatChat" in printed
    assert "RiskGate" not in printed
    assert signal.getsignal(signal.SIGINT) is handler
