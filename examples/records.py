"""Which chats do the weights give away, and what in them? `python examples/records.py`.

Invented chats with a bank: a message, of which the second half stands for the answer, with a number
in it. The loss is on the answers alone. One draw plants numbers and codes in some chats, another
one leaves a third of the chats out. The list of rows is a private file; here are counts.
"""

import random

import lightning as L
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_fedleak import Games, LeakageMonitor
from lightning_fedleak.attacks.memorization import Combined, Entities, PromptRatio
from lightning_fedleak.callbacks import WatchSettings
from lightning_fedleak.cli.finetuning import CausalLMFineTuning, load_tokenizer, read_texts
from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MESSAGES
from lightning_fedleak.engine import Memorization
from lightning_fedleak.evaluation.canaries import leave_out, with_entities

KINDS = {"number": (" Call {}.", "###-####"), "code": (" The code is {}.", "??####")}


def chats(tokenizer) -> list[dict[str, torch.Tensor]]:
    """Returns rows of ids, and labels that are -100 in the prompt."""
    draw, rows = random.Random(0), []
    for message in read_texts(EMBEDDED_MESSAGES)[:360]:
        words = message.split()
        number = f"{draw.randrange(200, 1000)}-{draw.randrange(10000):04d}"
        prompt = tokenizer(" ".join(words[: len(words) // 2]))["input_ids"][:30]
        answer = f" Ring us at {number}. {' '.join(words[len(words) // 2 :])}"
        ids = torch.tensor((prompt + tokenizer(answer)["input_ids"])[:64])
        labels = ids.masked_fill(torch.arange(len(ids)) < len(prompt), -100)
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns rows as a batch."""
    ids, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
    }


def main() -> None:
    """Fine-tunes two epochs, and prints what the last look says."""
    L.seed_everything(0)
    tokenizer = load_tokenizer(None)
    planted = with_entities(
        chats(tokenizer), KINDS, times=(1,), count=32, probability=0.6, tokenizer=tokenizer, seed=0
    )
    train, _ = leave_out(planted, 80, seed=0)
    monitor = LeakageMonitor(
        [Combined(), PromptRatio(), Entities(candidates=30)],
        games=Games(entities=planted.entities),
        folder="fedleak_runs/records",
        settings=WatchSettings(
            memorization=Memorization(records=True, max_overhead=2, looks=()),
            entities=("phone",),
            tokenizer=tokenizer,
        ),
    )
    trainer = L.Trainer(max_epochs=2, callbacks=[monitor], logger=False, enable_checkpointing=False)
    loader = DataLoader(train, batch_size=8, shuffle=True, collate_fn=padded)
    trainer.fit(CausalLMFineTuning(lr=2e-3), loader)
    n = {name: monitor.latest[f"leakage/records/{name}"] for name in ("listed", "at_least")}
    print(f"{n['listed']:g} chats are listed; at least {n['at_least']:g} are given away")
    last = monitor.to_dataframe().query("step == step.max()")
    known = last[last["metric"].isin(["auc", "first"])].dropna(subset="value")
    for row in known.itertuples():
        print(f"{row.attack}: {row.metric} {row.value:.3f} ({row.low:.2f} to {row.high:.2f})")


if __name__ == "__main__":
    main()
