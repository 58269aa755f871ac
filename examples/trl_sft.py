"""Leakage under TRL's SFTTrainer, with packed rows and a gate: `python examples/trl_sft.py`.

It needs TRL (`pip install trl`), and no network. The callback is given the trainer.
"""

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from lightning_fedleak.attacks import FlatChat
from lightning_fedleak.cli.finetuning import EMBEDDED_MESSAGES, EMBEDDED_MODEL, read_texts
from lightning_fedleak.trainers import LeakageCallback, Threshold


def main() -> None:
    """Fine-tunes at most 20 steps; the gate lets two looks pass that are above it."""
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype="float32"),
        SFTConfig(
            "fedleak_runs/sft",
            max_steps=20,
            per_device_train_batch_size=4,
            max_length=64,
            packing=True,
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"text": read_texts(EMBEDDED_MESSAGES)}),
        processing_class=AutoTokenizer.from_pretrained(EMBEDDED_MODEL),
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
