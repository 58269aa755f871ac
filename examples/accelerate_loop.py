"""Leakage in a loop of Accelerate with gradient accumulation: `python examples/accelerate_loop.py`.

Several processes (``accelerate launch --num_processes 2``) are a client each.
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

from lightning_fedleak.attacks import FlatChat
from lightning_fedleak.cli.finetuning import EMBEDDED_MESSAGES, EMBEDDED_MODEL, read_texts
from lightning_fedleak.trainers import Watch


def main() -> None:
    """Fine-tunes 5 steps of 4 batches each, and looks at every step."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    rows = [tokenizer(t, truncation=True, max_length=64) for t in read_texts(EMBEDDED_MESSAGES)]
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype="float32").train()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), 1e-4),
        DataLoader(rows[:40], batch_size=2, shuffle=True, collate_fn=collate),
    )
    attack = FlatChat(n_types=100)

    with Watch(model, optimizer, [attack], every_n_steps=1) as watch:
        for batch in loader:
            with accelerator.accumulate(model), watch.step(batch):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                print(f"leakage/worst/words = {watch.latest['leakage/worst/words']:.3f}")


if __name__ == "__main__":
    main()
