"""What the engine writes of a plain loop is what it writes of the same steps in a Trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lightning_fedleak import BagOfWords, FCMembership, FlatChat, LeakageMonitor
from lightning_fedleak.looks import Games
from lightning_fedleak.looks.engine import Engine
from lightning_fedleak.looks.options import Options, selected
from lightning_fedleak.looks.run import EveryNSteps
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.models import tiny_gpt2
from tests.looks.loop import train

ROOT = Path(__file__).parents[2]


def batches(count: int = 8) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, 60, (count, 4, 9), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": x, "labels": x, "attention_mask": torch.ones_like(x)} for x in ids]


def attacks() -> list[Any]:
    return [FlatChat(scorer="abs", oracle_n_types=12), BagOfWords(), FCMembership(1)]


def lines(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.rglob("leakage.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "run"} for line in found]


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_plain_loop_logs_what_a_trainer_logs(tmp_path: Path, accumulated: int) -> None:
    games = Games(targets=4)
    watched = CausalLMModule(tiny_gpt2(tied=False, dropout=0.0))
    trainer = L.Trainer(
        max_epochs=1,
        accumulate_grad_batches=accumulated,
        default_root_dir=tmp_path / "trainer",
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LeakageMonitor(attacks(), every_n_steps=2, games=games)],
    )
    loader: Any = torch.utils.data.DataLoader(batches(), batch_size=None)
    trainer.fit(watched, loader)
    model = CausalLMModule(tiny_gpt2(tied=False, dropout=0.0))
    [optimizer] = [model.configure_optimizers()]
    engine = Engine(selected(attacks()), Options(EveryNSteps(2), games=games))
    train(model.model.train(), optimizer, batches(), engine, tmp_path / "loop", accumulated)  # type: ignore[arg-type]
    for trained, looped in zip(watched.parameters(), model.parameters(), strict=True):
        assert torch.equal(trained, looped)
    assert lines(tmp_path / "loop") == lines(tmp_path / "trainer")
    assert {line["attack"] for line in lines(tmp_path / "loop")} == {
        "flatchat", "bag_of_words", "fc_membership",
    }  # fmt: skip
    assert all(line["unknown"] is None for line in lines(tmp_path / "loop")[3:])


def test_a_plain_loop_needs_no_lightning(tmp_path: Path) -> None:
    program = f"""
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric", "flwr"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuses())
import pathlib
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from lightning_fedleak.attacks import BagOfWords
from lightning_fedleak.looks.run import EveryNSteps
from lightning_fedleak.looks.engine import Engine
from lightning_fedleak.looks.options import Options, selected
from tests.looks.loop import train

torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2,
    tie_word_embeddings=False)
model = GPT2LMHeadModel(config)
ids = torch.arange(3, 35).view(4, 8)
engine = Engine(selected([BagOfWords()]), Options(EveryNSteps(1)))
rows = [{{"input_ids": ids, "labels": ids}}] * 3
optimizer = torch.optim.SGD(model.parameters(), 0.1)
train(model, optimizer, rows, engine, pathlib.Path({str(tmp_path)!r}))
print(engine.results.latest["leakage/bag_of_words/recall"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 1.0
    assert len(lines(tmp_path)) == 3
