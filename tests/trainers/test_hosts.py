"""What the account and the sensitivity are does not depend on the host of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, default_data_collator

from lightning_fedleak.defenses import DPSGD
from lightning_fedleak.trainers import defended
from tests.helpers.models import tiny_t5
from tests.trainers import hosts
from tests.trainers.hosts import BATCH, CLIP, HOSTS, MODELS, N, rows


@pytest.mark.parametrize("host", HOSTS)
def test_one_row_moves_a_sum_by_at_most_twice_the_clip(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is replaced by another one; steps that do not draw it release the same bits."""

    def train(dataset: Any) -> hosts.Trace:
        monkeypatch.setattr(hosts, "rows", lambda: dataset)
        defense = DPSGD(CLIP, noise_multiplier=0.0, seed=2)
        return HOSTS[host](tmp_path, MODELS["llama"](), [defense], 0.0)

    data = rows()
    first = train(data)
    row = max(drawn[0] for drawn in first.drawn if drawn)
    other = [dict(data[place]) for place in range(N)]
    other[row] = {name: value.flip(0) for name, value in data[row - 1].items()}
    second = train(other)
    assert first.drawn == second.drawn
    moved = []
    for drawn, one, two in zip(first.drawn, first.shared, second.shared, strict=True):
        assert torch.equal(one, two) is (row not in drawn)
        moved.append(float((one - two).double().norm()) * BATCH)
    assert 0.1 * CLIP < max(moved) <= 2 * CLIP * (1 + 1e-6)


def test_a_seq2seq_lora_shares_the_clipped_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = get_peft_model(
        tiny_t5(dropout=0.0), LoraConfig(r=2, target_modules=["q", "v"], init_lora_weights=False)
    )
    defense = DPSGD(CLIP, noise_multiplier=0.0, seed=1)
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path), per_device_train_batch_size=BATCH, num_train_epochs=1, learning_rate=0.0,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    pairs = [dict(row) for row in rows()]
    trainer = defended(Seq2SeqTrainer)(
        model, arguments, default_data_collator, train_dataset=pairs, defenses=[defense]
    )
    trace = hosts.traced(trainer)
    assert trace.steps == N // BATCH
    monkeypatch.setattr(hosts, "rows", lambda: pairs)
    for shared, drawn in zip(trace.shared, trace.drawn, strict=True):
        if drawn:
            expected = hosts.clipped_sum(trace.model, drawn, CLIP)
            # Processors differ in what they round off: up to 1.6e-6 was seen.
            assert float((shared * BATCH - expected).norm() / expected.norm()) < 3e-6
