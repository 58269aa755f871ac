"""What attacks take: extrapolation, and the tensors that are counted."""

from __future__ import annotations

import io
from dataclasses import astuple

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks import Attack
from lightning_fedleak.cli import main
from lightning_fedleak.commands.capacity import CostCommand
from lightning_fedleak.studies import cost
from tests.helpers.folders import save_tiny_causal_lm


def config(vocabulary: int = 128_256, blocks: int = 16) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=blocks,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
        bos_token_id=128_000, pad_token_id=128_004, dtype=torch.bfloat16,
    )  # fmt: skip


def test_time_is_extrapolated_and_large_tensors_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(attack: Attack, anatomy: Anatomy, tokens: int) -> cost.Cost:
        rows, blocks = anatomy.vocab_size, len(anatomy.blocks)
        return cost.Cost(2 + rows / 1000 + 5 * blocks, 1e6, 0.5 * blocks, rows / 2000, 2e6)

    monkeypatch.setattr(cost, "measure_cost", measured)
    costs = cost.predict_costs(config(), 4, "q_proj,v_proj", 64)
    assert set(costs) == set(cost.ATTACKS)
    for found in costs.values():
        expected = (2 + 128.256 + 80, 8.0, 64.128)
        assert (found.calibration, found.refresh, found.look) == pytest.approx(expected)
    more = 128_256 - cost.VOCABULARY
    words = costs["subspace_words"]
    assert words.calibration_bytes == 1e6 + more * 16 * 2  # in bfloat16
    assert words.look_bytes == 2e6 + more * 8 * 8  # 4 rows of a LoRA on queries, 4 on values
    states = 4 * 16 * (16 + 24 * 64)  # of float32, in 11 more blocks
    assert costs["subspace_membership"].calibration_bytes == 1e6 + more * 32 + 11 * states
    whitened = 12 * 15 * 2 * (4 * 16 + 4**2 + 16**2) * 2  # both sides of A and B, and their weights
    logits = 5 * 4 * (128_256 * 64 - (1 << 21))
    assert costs["gradient_membership"].calibration_bytes == 1e6 + whitened + logits


def test_a_small_model_is_measured_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def measured(attack: Attack, anatomy: Anatomy, tokens: int) -> cost.Cost:
        sizes.append((anatomy.vocab_size, len(anatomy.blocks)))
        return cost.Cost(1.0, 2.0, 3.0, 4.0, 5.0)

    monkeypatch.setattr(cost, "measure_cost", measured)
    costs = cost.predict_costs(config(512, 1), 4, None, 64)
    assert set(sizes) == {(512, 1)}
    assert all(astuple(found) == (1.0, 2.0, 3.0, 4.0, 5.0) for found in costs.values())


def test_the_command_tries_the_attacks(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = str(save_tiny_causal_lm(tmp_path_factory.mktemp("model")))
    console = Console(file=io.StringIO(), width=160)
    settings = {"model": model, "batch": "2x8", "lora_r": 2, "targets": "c_attn"}
    assert CostCommand(**settings).run(console) == 0  # type: ignore[arg-type]
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(f"{name} " in output for name in cost.ATTACKS)
    assert "above training's own" in output
    assert main(["cost", "--model", model, "--targets", "nothing"]) == 1
