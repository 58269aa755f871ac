"""Leakage under transformers' Trainer, with a gate: `python examples/transformers_trainer.py`.

The callback is given the Trainer. What it finds stands among the Trainer's own logs, and in
``leakage.jsonl`` in the output folder. The gate stops the run after a checkpoint.
"""

import transformers

from lightning_fedleak.attacks import FlatChat
from lightning_fedleak.cli.finetuning import EMBEDDED_MESSAGES, EMBEDDED_MODEL, read_texts
from lightning_fedleak.trainers import LeakageCallback, Threshold


def main() -> None:
    """Fine-tunes at most 20 steps; the gate lets two looks pass that are above it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    texts = read_texts(EMBEDDED_MESSAGES)
    trainer = transformers.Trainer(
        transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype="float32"),
        transformers.TrainingArguments(
            "fedleak_runs/trainer",
            max_steps=20,
            per_device_train_batch_size=4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        train_dataset=[tokenizer(text, truncation=True, max_length=64) for text in texts],
    )
    gate = Threshold("leakage/worst/words", at_most=0.5, patience=2)
    attack = FlatChat(n_types=100)
    trainer.add_callback(LeakageCallback(trainer, [attack], gates=[gate], every_n_steps=2))
    trainer.train()
    for logs in trainer.state.log_history:
        if "leakage/worst/words" in logs:
            print(f"step {logs['step']}: leakage/worst/words = {logs['leakage/worst/words']:.3f}")
    print(f"stopped after step {trainer.state.global_step}")


if __name__ == "__main__":
    main()
