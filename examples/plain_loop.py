"""Leakage in a training loop of one's own, up to a threshold: `python examples/plain_loop.py`.

``watch.step(batch)`` holds what the loop does with a batch. Nothing else of the loop changes.
"""

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

from lightning_fedleak.attacks import FlatChat
from lightning_fedleak.cli.finetuning import EMBEDDED_MESSAGES, EMBEDDED_MODEL, read_texts
from lightning_fedleak.trainers import Threshold, Watch


def main() -> None:
    """Fine-tunes at most 20 steps; the gate lets two looks pass that are above it."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    rows = [tokenizer(t, truncation=True, max_length=64) for t in read_texts(EMBEDDED_MESSAGES)]
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    loader = DataLoader(rows[:80], batch_size=4, shuffle=True, collate_fn=collate)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype="float32").train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    gate = Threshold("leakage/worst/words", at_most=0.5, patience=2)
    attack = FlatChat(n_types=100)

    with Watch(model, optimizer, [attack], gates=[gate], every_n_steps=2) as watch:
        for step, batch in enumerate(loader):
            with watch.step(batch):
                model(**batch).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            print(f"step {step}: leakage/worst/words = {watch.latest['leakage/worst/words']:.3f}")
            if watch.should_stop:
                break


if __name__ == "__main__":
    main()
