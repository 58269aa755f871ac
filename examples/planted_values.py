"""Which personal data does the model give away? `python examples/planted_values.py`.

Telephone numbers and codes are planted in invented chats: in the user's message, which has no loss,
or in the answer; some of them four times, and half of them not at all. After each epoch each number
is ranked among others that might have been planted in its place.
"""

import random

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_fedleak import Games
from lightning_fedleak.attacks.memorization import Entities
from lightning_fedleak.callbacks import LeakageMonitor
from lightning_fedleak.cli.finetuning import CausalLMFineTuning
from lightning_fedleak.cli.finetuning.data import load_tokenizer
from lightning_fedleak.evaluation.canaries import with_entities

PEOPLE = "a nurse", "a teacher", "a baker", "my neighbour", "the plumber", "our lawyer", "a friend"
THINGS = "the blue boat", "an old piano", "two bicycles", "a red sofa", "the garden shed"
PLACES = "near the river", "in the old town", "behind the station", "at the lake", "by the mill"


def chats(n: int, length: int) -> list[dict[str, torch.Tensor]]:
    """Return invented questions and answers as token ids; the loss is on the answers alone."""
    tokenizer, generator, rows = load_tokenizer(None), random.Random(0), []
    while len(rows) < n:
        parts = [
            " ".join(
                f"{generator.choice(PEOPLE)} sold {generator.choice(THINGS)} "
                f"{generator.choice(PLACES)} for {generator.randrange(100, 999)},"
                for _ in range(8)
            )
            for _ in range(2)
        ]
        prompt, answer = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts)
        ids = torch.tensor(prompt[: length // 2] + answer[: length // 2])
        if len(ids) == length:
            labels = ids.where(torch.arange(length) >= length // 2, -100)
            rows.append({"input_ids": ids, "labels": labels})
    return rows


def main() -> None:
    """Fine-tunes three epochs and prints what the weights give away, by kind and place."""
    kinds = {
        "phone": ("Please call me at {}.", "###-####"),
        "code": ("My account code is {}.", "??####"),
    }
    train = with_entities(
        chats(320, 80), kinds, tokenizer=load_tokenizer(None), times=(4,), count=30, seed=1
    )
    monitor = LeakageMonitor([Entities(candidates=50)], games=Games(entities=train.entities))
    trainer = L.Trainer(
        max_epochs=3,
        callbacks=[monitor],
        default_root_dir="fedleak_runs",
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(CausalLMFineTuning(lr=1e-3), DataLoader(train, batch_size=8, shuffle=True))
    for row in monitor.to_dataframe().query("metric == 'first'").itertuples():
        print(
            f"{row.attack} after {row.step} steps: {row.value:+.2f} more rank first than of those "
            f"left out (95%, all looks together: {row.low:.2f} to {row.high:.2f})"
        )


if __name__ == "__main__":
    main()
