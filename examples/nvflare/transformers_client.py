"""A site's training script: transformers' Trainer with ``flare.patch``, in a process of its own."""

import tempfile

import nvflare.client.hf as flare
from transformers import Trainer, TrainingArguments
from watch import RATE, ROWS, STEPS, Module, rows_of

from lightning_fedleak.cli.finetuning.module import PadRight
from lightning_fedleak.federation import report_batches


def main() -> None:
    """Train as often as the server asks."""
    flare.init()
    collate = PadRight(0)
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        optim="sgd",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        per_device_train_batch_size=ROWS,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(
        Module().model,
        arguments,
        data_collator=lambda rows: collate([row["input_ids"] for row in rows]),
        train_dataset=[{"input_ids": row} for row in rows_of(flare.get_site_name())],
    )
    report_batches(trainer)  # the filter asks what was trained on
    flare.patch(trainer, local_steps=STEPS, server_key_prefix="model.")
    while flare.is_running():
        trainer.train()


main()
