"""What DP-SGD leaves of what a LoRA of a causal language model gains, by batch and epsilon.

    # FEDLEAK_ASSETS, or --text FILE
    python -m benchmarks.defenses.dp_lora run --model DIR --out RUNS
    python -m benchmarks.defenses.dp_lora table --out RUNS

Yelp sentences of at most ``TOKENS`` tokens, ``TEXTS`` to train on and ``HELD`` to validate. Each
run trains a LoRA on the query and value projections for ``EPOCHS`` epochs in Lightning's Trainer,
with the learning rate falling to zero, and appends a line to RUNS; runs that are there are left
out. ``plain`` has no defence. Learning rates of ``plain`` and ``large`` were tried out on the
validation texts with seed 0, which in a run of one's own costs privacy unless the data are public.
Rows are sorted by length within a batch, and pieces cut to their longest: time then depends on the
texts.

Canaries: ``CANARIES`` further sentences have their words shuffled, and half of them are trained on,
by a coin each. A canary's score is how far its loss fell in training. ``AUC`` is that of its coin.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import math
import os
import platform
import random
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.attacks.word_recovery import read_texts
from benchmarks.defenses.dp_utility import known, print_tables, spread
from lightning_fedleak import mean_of_sample_means
from lightning_fedleak.auditing import audit_one_run
from lightning_fedleak.defenses import DPSGD, DPAdamBC
from lightning_fedleak.metrics import membership_rates
from lightning_fedleak.strategies import DefendedStrategy

SMOKE = (
    "run table --model {model} --text {text} --tokens 128 --texts 40 --held 8 --canaries 6 "
    "--epochs 1 --methods small medium --epsilons 8 --seeds 1 --out {out}/runs",
)

DATA = Path(os.environ.get("FEDLEAK_ASSETS", "../shared/assets")) / "data" / "yelp_sentences"
EPSILONS = (2.0, 8.0, math.inf)
DELTA, EPOCHS, TEXTS, HELD, CANARIES, TOKENS = 1e-5, 1, 20_000, 500, 300, 24
RANK, PIECE, CLIP = 8, 32, 1.0
IGNORED = -100
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"batch": 32, "rate": 3e-3},
    "small": {"batch": 8, "rate": 5e-4},
    "large": {"batch": 500, "rate": 3e-3},
    "medium": {"batch": 250, "rate": 3e-3},
}
NAMES = {
    "plain": "AdamW, no defence",
    "small": "batches of 8",
    "large": "batches of 500",
    "medium": "batches of 250",
}


class Finetuning(L.LightningModule):
    """LoRA on the query and value projections, trained on rows of token ids."""

    def __init__(self, model: str, rate: float, private: bool) -> None:
        super().__init__()
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        inside = {name.rpartition(".")[2] for name, _ in base.named_modules()}
        targets = ["q_proj", "v_proj"] if "q_proj" in inside else ["c_attn"]
        self.model = get_peft_model(
            base, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets)
        )
        self.rate, self.private = rate, private

    def logits(self, rows: dict[str, Tensor]) -> Tensor:
        return self.model(input_ids=rows["ids"], attention_mask=rows["mask"]).logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        batch = trimmed(batch)
        return mean_of_sample_means(self.logits(batch), batch["labels"], causal=True)

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.requires_grad]
        optimizer: torch.optim.Optimizer
        if self.private:
            optimizer = DPAdamBC(weights, lr=self.rate, weight_decay=0.0, floor=0.5)
        else:
            optimizer = torch.optim.AdamW(weights, lr=self.rate, weight_decay=0.0)
        steps = int(self.trainer.estimated_stepping_batches)
        falls = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        return [optimizer], [{"scheduler": falls, "interval": "step"}]


def collated(rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Rows of token ids, the shortest first, padded on the right."""
    rows = sorted(rows, key=len)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {
        "ids": pad_sequence(list(rows), batch_first=True),
        "mask": mask,
        "labels": pad_sequence(list(rows), batch_first=True, padding_value=IGNORED),
    }


def trimmed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    longest = max(2, int(batch["mask"].sum(1).max()))
    return {name: value[:, :longest] for name, value in batch.items()}


@torch.no_grad()
def losses(module: Finetuning, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row, (n): sum of its tokens' losses, right guesses, tokens that are guessed."""
    module.eval()
    found = torch.zeros(3, len(rows))
    by_length = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    for start in range(0, len(rows), 64):
        places = by_length[start : start + 64]
        batch = collated([rows[place] for place in places])
        logits, labels = module.logits(batch)[:, :-1], batch["labels"][:, 1:]
        lost = F.cross_entropy(
            logits.transpose(1, 2), labels, reduction="none", ignore_index=IGNORED
        )
        found[0, places] = lost.sum(1)
        found[1, places] = (logits.argmax(2) == labels).sum(1).float()
        found[2, places] = (labels != IGNORED).sum(1).float()
    return found[0], found[1], found[2]


def data_of(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Rows to train on, held out, and canaries with the coins of those that are trained on."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    files = [options.text] if options.text else sorted(map(str, DATA.glob("*dev*.gz")))
    texts = [text for name in files for text in read_texts(name)]
    random.Random(0).shuffle(texts)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]

    def row(text: str) -> list[int]:
        return begin + tokenizer(text, add_special_tokens=False).input_ids

    rows = [own for text in texts if 4 <= len(own := row(text)) <= options.tokens]
    sizes = [options.texts, options.held, options.canaries]
    if len(rows) < sum(sizes):
        raise SystemExit(f"{len(rows)} texts of 4 to {options.tokens} tokens, not {sum(sizes)}")
    cut = [torch.tensor(own) for own in rows[: sum(sizes)]]
    train, held, canaries = torch.utils.data.random_split(
        cut, sizes, torch.Generator().manual_seed(0)
    )
    generator = torch.Generator().manual_seed(seed)
    first = len(begin)
    mixed = []
    for own in canaries:
        order = torch.randperm(len(own) - first, generator=generator)
        mixed.append(torch.cat([own[:first], own[first:][order]]))
    inside = torch.rand(len(mixed), generator=generator) < 0.5
    rows_in = [own for own, one in zip(mixed, inside.tolist(), strict=True) if one]
    return {"train": [*train, *rows_in], "held": [*held], "canaries": mixed, "inside": inside}


def one_run(method: str, epsilon: float, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Trains a LoRA; what it is worth, and what its canaries tell."""
    own, data = METHODS[method], data_of(options, seed)
    private = method != "plain"
    L.seed_everything(seed, verbose=False)
    rate = own["rate"] * options.rate
    module = Finetuning(options.model, rate, private)
    batch = min(own["batch"], len(data["train"]) // 4)
    loader = DataLoader(data["train"], batch, shuffle=True, collate_fn=collated)
    strategy: Any = "auto"
    if private:
        noise = {"noise_multiplier": 0.0} if epsilon == math.inf else {"target_epsilon": epsilon}
        defense = DPSGD(CLIP, target_delta=DELTA, max_physical_batch_size=PIECE, **noise)
        strategy = DefendedStrategy("auto", [defense])
    before, hits, count = losses(module, data["held"])
    asked = losses(module, data["canaries"])[0]
    module.train()
    start = time.process_time()
    L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, loader)
    seconds = time.process_time() - start
    if private:
        shown = defense.accountant.epsilon(DELTA)
        assert shown <= epsilon, (shown, epsilon)
    after, right, _ = losses(module, data["held"])
    fell = asked - losses(module, data["canaries"])[0]
    return {
        "method": method,
        "epsilon": None if math.isinf(epsilon) else epsilon,
        "seed": seed,
        "sigma": defense.noise_multiplier if private else 0.0,
        "loss": float(after.sum() / count.sum()),
        "start": float(before.sum() / count.sum()),
        "accuracy": float(right.sum() / count.sum()),
        "start_accuracy": float(hits.sum() / count.sum()),
        "auc": membership_rates(fell, data["inside"])["auc"].value,
        "audit": audit_one_run(fell, data["inside"], delta=DELTA).epsilon,
        "seconds": seconds,
        "epochs": options.epochs,
        "rate": rate,
    }


def wanted(options: argparse.Namespace) -> Iterator[tuple[str, float, int]]:
    for seed in range(options.seeds):
        for method in dict.fromkeys(["plain", *options.methods]):
            for epsilon in [math.inf] if method == "plain" else options.epsilons:
                yield method, epsilon, seed


def train(options: argparse.Namespace) -> None:
    path = Path(options.out)
    done = {(r["method"], r["epsilon"] or math.inf, r["seed"]) for r in known(path)}
    for method, epsilon, seed in wanted(options):
        if (method, epsilon, seed) in done:
            continue
        row = one_run(method, epsilon, seed, options)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = " ".join(f"{key} {row[key]:.4g}" for key in ("loss", "accuracy", "auc", "seconds"))
        print(f"{method} epsilon {epsilon:g} seed {seed}: {shown}", flush=True)


def table(options: argparse.Namespace) -> None:
    """Methods by epsilon: means over seeds, and half of what lies between the least and the most.

    A gain is how far a run's validation loss falls, over how far the plain one's falls.
    """
    found: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    for row in known(Path(options.out)):
        found[row["method"], row["epsilon"] or math.inf].append(row)
    plain = found["plain", math.inf]
    best = statistics.mean(row["loss"] for row in plain)

    def gains(own: list[dict[str, Any]]) -> str:
        return spread([(row["start"] - row["loss"]) / (row["start"] - best) for row in own], ".1%")

    columns = {
        "gain in validation loss": gains,
        "validation loss": lambda own: spread([row["loss"] for row in own], ".3f"),
        "accuracy of the next token": lambda own: spread([row["accuracy"] for row in own], ".3f"),
        "canaries' AUC": lambda own: spread([row["auc"] for row in own], ".2f"),
        "audit": lambda own: f"{max(row['audit'] for row in own):.2f}",
        "noise": lambda own: f"{own[0]['sigma']:.2f}",
        "seconds": lambda own: f"{statistics.median(row['seconds'] for row in own):.0f}",
        "seeds": lambda own: f"{len(own)}",
    }
    print(f"{platform.machine()}, one thread, {datetime.date.today()}")
    print(f"before: loss {plain[0]['start']:.3f}, accuracy {plain[0]['start_accuracy']:.3f}")
    print("without a defence: " + ", ".join(f"{k} {shown(plain)}" for k, shown in columns.items()))
    print_tables(found, columns, NAMES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", nargs="+", choices=("run", "table"))
    parser.add_argument("--model", help="folder of a causal language model and its tokenizer")
    parser.add_argument("--text", help="a text a line, in place of Yelp's sentences")
    parser.add_argument("--out", help="file of runs, a line each")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--epsilons", nargs="+", type=float, default=[*EPSILONS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--texts", type=int, default=TEXTS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a text at most")
    parser.add_argument("--held", type=int, default=HELD)
    parser.add_argument("--canaries", type=int, default=CANARIES)
    parser.add_argument("--rate", type=float, default=1.0, help="times each learning rate")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    for what in options.what:
        {"run": train, "table": table}[what](options)


if __name__ == "__main__":
    main()
