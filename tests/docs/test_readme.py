"""A stranger's run through the README, in order: each block does and prints what the README shows.

Numbers may differ, and ``...`` stands for what the README leaves out.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

from lightning_fedleak import (
    EMBEDDED_MESSAGES,
    EMBEDDED_MODEL,
    CausalLMFineTuning,
    TextDataModule,
    read_texts,
)
from lightning_fedleak.cli import main
from tests.docs.blocks import ROOT, Block, blocks_of
from tests.docs.test_commands import lines_of
from tests.docs.test_python import reader as reader

README = ROOT / "README.md"
MAX_LINES = 110
STEPS = "100"  # as many as the printed run of the README has


def pattern_of(line: str) -> re.Pattern[str]:
    """Return what a printed line has to match: numbers and spaces aside, ``...`` is anything."""
    parts = []
    for part in re.split(r"(\.\.\.|\d+(?:\.\d+)?|\s+)", line.strip()):
        if part == "...":
            parts.append(r".*?")
        elif re.fullmatch(r"\d+(?:\.\d+)?", part):
            parts.append(r"\d+(?:\.\d+)?")
        else:
            parts.append(r"\s+" if part.isspace() else re.escape(part))
    return re.compile("".join(parts), re.DOTALL)


def assert_printed(expected: str, printed: str) -> None:
    """Fails unless the lines were printed, in this order."""
    position = 0
    for line in expected.strip().splitlines():
        match = pattern_of(line).search(printed, position)
        assert match, f"not printed, or not in this order: {line}\n{printed}"
        position = match.end()


@pytest.fixture
def printed(caplog, capsys) -> Iterator[Any]:
    """A function that returns what was printed or logged since it was called last."""
    with caplog.at_level(logging.INFO):

        def read() -> str:
            messages = [record.getMessage() for record in caplog.records]
            caplog.clear()
            out, err = capsys.readouterr()
            return "\n".join([*messages, out, err])

        yield read


def readers_names() -> dict[str, Any]:
    data = TextDataModule(EMBEDDED_MESSAGES, batch_size=8, length=32)
    return {"model": CausalLMFineTuning(), "datamodule": data}


def fit(**settings: Any) -> None:
    """Train as the comment after a line of the README says."""
    L.Trainer(**settings).fit(**readers_names())


@pytest.mark.slow
def test_each_block_does_what_the_readme_shows(reader, monkeypatch, printed) -> None:
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", STEPS)
    blocks = list(blocks_of(README))
    assert [block.language for block in blocks] == [
        "bash", "python", "python", "text", "python", "python", "bash"
    ]  # fmt: skip
    make, watch, transformers, watched, gate, defence, release = blocks
    _make(make)

    names: dict[str, Any] = {}  # pasted, the first snippets run as they are
    exec(compile(watch.text, watch.place, "exec"), names)
    assert_printed(watched.text, printed())

    monkeypatch.chdir(reader)
    short = transformers.text.replace(f"max_steps={STEPS}", "max_steps=4")
    exec(compile(short, transformers.place, "exec"), {})
    assert_printed("LeakageCallback: highest leakage ...: words 1.00 (step 3)", printed())

    exec(compile(gate.text, gate.place, "exec"), names)
    fit(callbacks=[names["LeakageMonitor"](), names["gate"]])
    assert names["gate"].fired

    exec(compile(defence.text, defence.place, "exec"), names)
    fit(strategy=names["strategy"], callbacks=[names["monitor"]], max_steps=10)
    latest = names["monitor"].latest
    assert latest["leakage/subspace_words/f1"] < 0.1
    assert latest["leakage_local/subspace_words/f1"] > 0.9

    assert _exit_status_of(release, reader) == 3


def _make(block: Block) -> None:
    """What `make` would run."""
    run = {"make demo": "fedleak demo", "make test": "-m pytest"}
    for line in lines_of(block.text):
        command = line.partition("#")[0].split()
        dry = subprocess.run(
            [*command, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert run[" ".join(command)] in dry.stdout, dry.stdout


def _exit_status_of(block: Block, folder: Path) -> int:
    """Return the status of the command on a model that took five steps on all of its 20 rows."""
    texts = read_texts(EMBEDDED_MESSAGES)[:40]
    for name, rows in (("train", texts[:20]), ("left_out", texts[20:])):
        lines = [json.dumps({"text": text}) for text in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    shutil.copytree(EMBEDDED_MODEL, folder / "out" / "base")
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    batch = collate([tokenizer(text, max_length=64, truncation=True) for text in texts[:20]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "out" / "model")
    tokenizer.save_pretrained(folder / "out" / "model")
    [line] = lines_of(block.text)
    return main(line.split()[1:])


def test_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_a_line_matches_with_other_numbers_and_what_was_left_out() -> None:
    shown = "  look  played, 0.6 s: reads layers.0 and 34 more\nread 2 of 100 (words 38%, ...); ..."
    real = "A: look played, 12 s: reads layers.1 and\n  7 more\nread 1 of 3 (words 4%, x); y"
    assert_printed(shown, real)
    for wrong in (
        "look played, s: reads layers.1 and 7 more",
        real.replace("words", "texts"),
    ):
        with pytest.raises(AssertionError, match="not printed"):
            assert_printed(shown, wrong)
