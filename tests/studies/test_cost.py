"""What attacks take: extrapolation, and the tensors that are counted."""

from __future__ import annotations

import io
from dataclasses import astuple

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks import Attack, Query, SubspaceWords, WordGuess, frequent_tokens
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.cli import main
from lightning_fedleak.commands.capacity import CostCommand
from lightning_fedleak.snapshots import Observation
from lightning_fedleak.studies import cost
from tests.helpers.folders import save_tiny_causal_lm


def config(vocabulary: int = 128_256, blocks: int = 16) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=blocks,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
        bos_token_id=128_000, pad_token_id=128_004, dtype=torch.bfloat16,
    )  # fmt: skip


def in_straight_lines(
    attack: Attack, anatomy: Anatomy, tokens: int, queries: int = cost.QUERIES
) -> cost.Cost:
    """A cost by the vocabulary and the blocks, of a batch of 64 tokens."""
    assert tokens == 64
    rows, blocks = anatomy.vocab_size, len(anatomy.blocks)
    return cost.Cost(2 + rows / 1000 + 5 * blocks, 1e6, 0.5 * blocks, rows / 2000, 2e6)


def test_time_is_extrapolated_and_large_tensors_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "measure_cost", in_straight_lines)
    monkeypatch.setattr(cost, "saved_bytes", lambda anatomy: 7.0 + 1000 * len(anatomy.blocks))
    monkeypatch.setattr(cost, "search_seconds", lambda anatomy: 0.25 * len(anatomy.blocks))
    costs = cost.predict_costs(config(), 4, "q_proj,v_proj", 64)
    assert set(costs) == set(cost.ATTACKS)
    read = {"subspace_words": 1, "subspace_membership": 12, "gradient_membership": 16}
    for name, blocks in read.items():
        found, expected = costs[name], [2 + 128.256 + 5 * blocks, 0.5 * blocks, 64.128]
        expected[0] += 0.25 * (16 - blocks)  # of blocks that are run and not read
        if name == "gradient_membership":  # 4 texts were tried, of 24 and of 8 with 8 controls
            expected[0] += 5 * 64.128
            expected[2] *= 4
        assert (found.calibration, found.refresh, found.look) == pytest.approx(expected)
    more = 128_256 - cost.VOCABULARY
    inputs = more * (16 * 2 + 4)  # in bfloat16, and a factor of each token
    words, membership, gradients = (costs[name] for name in read)
    assert words.calibration_bytes == 1e6 + inputs
    products = more * 8 * 8  # 4 rows of a LoRA on queries, 4 on values
    assert words.look_bytes == 2e6 + inputs + products
    states = 11 * 4 * 16 * (16 + 24 * 64)  # of float32, in 11 more blocks
    assert membership.calibration_bytes == 1e6 + inputs + states
    asked = 11 * 4 * 16 * 8 * 64
    assert membership.look_bytes == 2e6 + inputs + states + asked + products
    sides, entries = 2 * 2 * (4**2 + 16**2), 2 * 2 * 4 * 16  # of A and B, of both maps
    runs = 2 * 4 * 128_256 * 64 + 16 * 1000 - 4 * (2 * 4 * cost.VOCABULARY * 64 + 1000)
    assert gradients.calibration_bytes == 1e6 + runs + 8 * 15 * sides
    assert gradients.look_bytes == 2e6 + runs + 4 * 15 * (sides + 2 * entries)  # g, sizes


def test_blocks_after_the_first_keep_equal_bytes_for_a_backward() -> None:
    single = config(300)
    single.dtype = torch.float32
    saved = [
        cost.saved_bytes(cost.random_anatomy(single, 300, n, 4, "q_proj,v_proj")) for n in (1, 2, 3)
    ]
    block = saved[1] - saved[0]
    assert saved[2] - saved[1] == block
    # At least what enters both norms, the gate and its activation, and what the down map reads.
    assert 4 * 64 * (2 * 16 + 3 * 32) < block < 3 * 4 * 64 * (8 * 16 + 4 * 32)


def test_a_look_at_a_whole_model_compares_no_more_directions_than_types() -> None:
    single = config(300, 1)
    single.dtype = torch.float32
    anatomy = cost.random_anatomy(single, 300, 1, 0)
    kept, look = cost.large_tensors(cost.WORDS, anatomy, 300, 1, 0.0, 1, 7.0)
    assert (kept, look - kept) == (300 * (16 * 4 + 4), 4 * 300 * 7)
    kept, look = cost.large_tensors(cost.WORDS, anatomy, 300, 1, 0.0, 1, 99.0)
    assert look - kept == 4 * 300 * 16  # the width of the model


def test_types_of_a_batch_are_those_that_are_drawn() -> None:
    anatomy = cost.random_anatomy(config(300, 1), 300, 1, 0)
    for tokens in (16, 500):
        drawn = frequent_tokens(anatomy, 400, tokens, torch.Generator().manual_seed(0))
        mean = sum(len(set(row)) for row in drawn.tolist()) / 400
        assert cost.expected_types(300, tokens) == pytest.approx(mean, rel=0.01)


def test_a_pursuits_time_grows_with_the_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 64 tokens is tried, and words are read in a look at membership as well."""
    monkeypatch.setattr(cost, "measure_cost", in_straight_lines)
    costs = cost.predict_costs(config(), 4, "q_proj,v_proj", 4096)
    odds = 1 / np.arange(10.0, 10 + 128_256)
    few, types = ((1 - (1 - odds / odds.sum()) ** n).sum() for n in (64, 4096))
    look, words = 64.128, 64.128 * types / few
    assert costs["subspace_words"].look == pytest.approx(words, rel=1e-4)
    assert costs["subspace_membership"].look == pytest.approx(look + words - look, rel=1e-4)
    assert costs["gradient_membership"].look == pytest.approx(4 * look)


@pytest.mark.parametrize(
    ("rank", "tokens", "probed"), [(0, 4096, 4096), (16, 4096, 128), (4, 32, 32)]
)
def test_how_many_tokens_are_tried(
    monkeypatch: pytest.MonkeyPatch, rank: int, tokens: int, probed: int
) -> None:
    tried = set()

    def measured(
        attack: Attack, anatomy: Anatomy, tokens: int, queries: int = cost.QUERIES
    ) -> cost.Cost:
        tried.add(tokens)
        return cost.Cost(1.0, 1.0, 1.0, 1.0, 1.0)

    monkeypatch.setattr(cost, "measure_cost", measured)
    cost.predict_costs(config(512, 1), rank, "q_proj" if rank else None, tokens)
    assert tried == {probed}


def test_a_larger_model_is_never_said_to_take_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock's chance may show a slope below zero."""

    def measured(
        attack: Attack, anatomy: Anatomy, tokens: int, queries: int = cost.QUERIES
    ) -> cost.Cost:
        time = 9.0 - len(anatomy.blocks) - 1e-4 * anatomy.vocab_size
        return cost.Cost(time, 1.0, time, time, 1.0)

    monkeypatch.setattr(cost, "measure_cost", measured)
    monkeypatch.setattr(cost, "search_seconds", lambda anatomy: -float(len(anatomy.blocks)))
    for name, found in cost.predict_costs(config(), 4, "q_proj,v_proj", 64).items():
        smallest = 8.0 - 1e-4 * cost.VOCABULARY
        factors = (6, 1, 4) if name == "gradient_membership" else (1, 1, 1)
        expected = [smallest * factor for factor in factors]
        assert (found.calibration, found.refresh, found.look) == pytest.approx(expected)


def test_the_gradient_of_a_batch_is_read_once() -> None:
    looks = []

    class Looks(SubspaceWords):
        def run(self, view: Observation, query: Query | None = None) -> WordGuess:
            looks.append(view.gradients[-1].tensors)
            return super().run(view, query)

    single = config(300, 1)
    single.dtype = torch.float32
    anatomy = cost.random_anatomy(single, 300, 1, 4, "q_proj,v_proj")
    ids = torch.arange(5, 21).view(2, 8)
    batch = TokenBatch(ids, ids, None, "causal")
    found = cost.measure_cost(Looks(capacity_seconds=0), anatomy, 16, batch)
    [tensors] = looks
    anatomy.model.zero_grad()
    anatomy.model(input_ids=ids, labels=ids).loss.backward()  # as the attack has moved it
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, anatomy.parameter(name).grad)
    assert found.look > 0


def test_a_small_model_is_measured_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def measured(
        attack: Attack, anatomy: Anatomy, tokens: int, queries: int = cost.QUERIES
    ) -> cost.Cost:
        sizes.append((anatomy.vocab_size, len(anatomy.blocks)))
        return cost.Cost(1.0, 2.0, 3.0, 4.0, 5.0)

    monkeypatch.setattr(cost, "measure_cost", measured)
    costs = cost.predict_costs(config(512, 1), 4, None, 64)
    assert set(sizes) == {(512, 1)}
    for name in ("subspace_words", "subspace_membership"):
        assert astuple(costs[name]) == (1.0, 2.0, 3.0, 4.0, 5.0)


def test_the_command_tries_the_attacks(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = str(save_tiny_causal_lm(tmp_path_factory.mktemp("model")))
    console = Console(file=io.StringIO(), width=160)
    settings = {"model": model, "batch": "2x8", "lora_r": 2, "targets": "c_attn"}
    assert CostCommand(**settings).run(console) == 0  # type: ignore[arg-type]
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(f"{name} " in output for name in cost.ATTACKS)
    assert "above training's own" in output
    assert main(["cost", "--model", model, "--targets", "nothing"]) == 1
