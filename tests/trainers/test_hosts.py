"""What the account and the sensitivity are does not depend on the host of a training."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, default_data_collator

from lightning_fedleak.defenses import DPSGD
from lightning_fedleak.trainers import defended
from tests.helpers.models import tiny_t5
from tests.trainers import hosts
from tests.trainers.hosts import BATCH, CLIP, N, rows


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
