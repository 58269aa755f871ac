"""``Memorization(reference="auto")`` under SFTTrainer: the reference has a LoRA as the run has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from peft import LoraConfig, PeftModel
from trl import SFTConfig, SFTTrainer

from lightning_fedleak.attacks.memorization import Combined, CombinedReference
from lightning_fedleak.engine import Memorization, reference
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.trainers import LeakageCallback, WatchSettings
from tests.engine.channels.test_memorization import lines, of_kind
from tests.trl.test_trainers import preferences
from tests.trl.test_trl import COMMON, model_of, tokenizer

N = 120
"""Rows that are trained on; as many are left out."""


def run(folder: Path, memorization: Memorization) -> SFTTrainer:
    settings = COMMON | {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 8}
    texts = [row["prompt"] + row["chosen"] for row in preferences(2 * N)]
    torch.manual_seed(3)
    trainer = SFTTrainer(
        model_of(),
        args=SFTConfig(str(folder), **settings | {"max_length": 64, "packing": False}),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train_dataset, _ = leave_out(trainer.train_dataset, N, seed=1)
    attacks = [Combined(), CombinedReference()]
    watching = WatchSettings(memorization=memorization)
    trainer.add_callback(LeakageCallback(trainer, attacks, settings=watching))
    trainer.train()
    return trainer


def test_a_lora_has_a_lora_for_its_reference(tmp_path, monkeypatch) -> None:
    references: list[tuple[list[str], int, dict[str, torch.Tensor]]] = []
    describe = reference.describe_reference

    def noted(model: Any, rows: int, anatomy: Any) -> Any:
        assert isinstance(model, PeftModel)
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        references.append(([*model.peft_config], rows, weights))
        return describe(model, rows, anatomy)

    monkeypatch.setattr(reference, "describe_reference", noted)
    watched = run(tmp_path / "watched", Memorization(max_overhead=10, reference="auto", looks=()))
    assert [*watched.model.peft_config] == watched.model.active_adapters == ["default"]
    weights = dict(watched.model.named_parameters())

    [pool] = of_kind(tmp_path / "watched", "pool")
    assert pool["reference"]["kind"] == "auto"
    assert pool["reference"]["models"] == len(references)
    for adapters, rows, of_reference in references:
        assert adapters == ["default"]
        assert rows == pool["reference"]["rows"] == N
        assert {*of_reference} == {*weights}
        for name, weight in of_reference.items():
            assert torch.equal(weight, weights[name]) is ("lora" not in name), name
        assert any(bool(w.any()) for name, w in of_reference.items() if "lora_B" in name)
    last = lines(tmp_path / "watched", "combined_reference")[-1]["metrics"]
    assert last["auc"]["value"] is not None
