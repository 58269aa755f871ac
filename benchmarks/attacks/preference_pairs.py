"""Which pairs of preferences the weights were trained on: DPO, looked at after each epoch.

    python -m benchmarks.attacks.preference_pairs --model DIR --text FILE --seeds 0,1
    python -m benchmarks.attacks.preference_pairs --model DIR --text FILE --lora 16 --lr 1e-3
    python -m benchmarks.attacks.preference_pairs --model DIR --text FILE --loss orpo

A pair is the begin of a text with its own continuation, which is chosen, and that of another text,
which stands in no other pair. ``leave_out`` holds half of the pairs out. Prints AUC (its interval)
of :class:`~lightning_fedleak.attacks.memorization.PreferenceMargin`, and of other formulas on the
same answers of the model: ``margin_a_token`` divides each answer's gain by its length; ``ratios``
is the difference of the answers' likelihood ratios, a token; ``chosen`` and ``rejected`` read one
answer alone; ``no_reference`` leaves the base out. With ``--null`` the model is trained on further
pairs, none of which is asked about.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.shared import print_place, read_lines, table, trained, with_lora
from lightning_fedleak.attacks.memorization import MemorizationAttack, PreferenceMargin
from lightning_fedleak.cli.finetuning.texts import read_texts
from lightning_fedleak.engine import Memorization
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.model.snapshots import ReleasedModel
from lightning_fedleak.trainers import Watch, WatchSettings

SMOKE = (
    "--model {model} --text {text} --pairs 40 --prompt 4 --length 14 --epochs 1",
    "--model {model} --text {text} --pairs 40 --prompt 4 --length 14 --epochs 1 --lora 4 --null",
)

Row = dict[str, list[int]]


class Formula(MemorizationAttack):
    """Score pairs by a function of what each answer gained and how many tokens it has.

    Args:
        name: of the formula.
        formula: gets the log-likelihoods of both answers, (2, N), chosen first, those of the base,
            and the numbers of tokens; returns (N,) scores.
    """

    default_name = "formula"
    part = "pairs"

    def __init__(self, name: str, formula: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__(name)
        self.formula = formula

    def score(self, released: ReleasedModel) -> Tensor:
        """Return what the formula says."""
        assert released.rejected is not None
        labels = released.now.labels
        halves = torch.stack([labels & ~released.rejected, labels & released.rejected])
        now, base = (
            (answers.log_probs.double() * halves).sum(2)
            for answers in (released.now, released.base)
        )
        return self.formula(now, base, halves.sum(2).double())


FORMULAS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "margin_a_token": lambda now, base, n: _less((now - base) / n),
    "ratios": lambda now, base, n: _less(((now - base) / n).exp()),
    "chosen": lambda now, base, n: (now - base)[0],
    "rejected": lambda now, base, n: -(now - base)[1],
    "no_reference": lambda now, base, n: _less(now),
}


def _less(values: Tensor) -> Tensor:
    return values[0] - values[1]


def pairs_of(options: argparse.Namespace) -> list[Row]:
    """Return twice as many pairs as are asked about; the second half is for ``--null``."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    words = list(dict.fromkeys(t.replace("<br />", " ") for t in read_texts(options.text)))
    order = np.random.default_rng(0).permutation(len(words))
    chosen = [words[i] for i in order[: 8 * options.pairs]]
    encoded = tokenizer(chosen, truncation=True, max_length=options.length, verbose=False)
    rows = [ids for ids in encoded["input_ids"] if len(ids) > options.prompt + 2]
    return [
        {
            "prompt_ids": first[: options.prompt],
            "chosen_ids": first[options.prompt :],
            "rejected_ids": second[options.prompt :],
        }
        for first, second in zip(rows[::2], rows[1::2], strict=False)
    ][: 2 * options.pairs]


def collate(rows: list[Row]) -> dict[str, Tensor]:
    """Return a batch in the form of TRL's DPO."""
    sides = [(r["prompt_ids"], r[f"{s}_ids"]) for s in ("chosen", "rejected") for r in rows]
    ids = [torch.tensor(prompt + answer) for prompt, answer in sides]
    marks = [torch.tensor([0] * len(prompt) + [1] * len(answer)) for prompt, answer in sides]
    pad = partial(pad_sequence, batch_first=True)
    masks = [torch.ones_like(row) for row in ids]
    return {
        "input_ids": pad(ids),
        "attention_mask": pad(masks),
        "completion_mask": pad(marks),
    }


def token_log_likelihoods(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return (2 B,) the summed log-likelihoods of the answers, and their numbers of tokens."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    marks = batch["completion_mask"][:, 1:] != 0
    losses = functional.cross_entropy(
        logits[:, :-1][marks], batch["input_ids"][:, 1:][marks], reduction="none"
    )
    rows = marks.nonzero()[:, 0]
    return losses.new_zeros(len(marks)).index_add(0, rows, -losses), marks.sum(1)


def loss_of(options: argparse.Namespace, model: Any, base: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of DPO (arXiv 2305.18290) or ORPO (arXiv 2403.07691)."""
    now, n = token_log_likelihoods(model, batch)
    if options.loss == "dpo":
        with torch.no_grad():
            before, _ = token_log_likelihoods(base, batch)
        return -functional.logsigmoid(options.beta * _less((now - before).view(2, -1))).mean()
    mean = (now / n).view(2, -1)
    odds = mean - torch.log1p(-mean.exp())
    return -mean[0].mean() - options.beta * functional.logsigmoid(_less(odds)).mean()


def train(options: argparse.Namespace, rows: list[Row], seed: int, folder: Path) -> None:
    """Train once with a look after each epoch, and print a table."""
    torch.manual_seed(seed)
    data, _ = leave_out(rows[: options.pairs], options.pairs // 2, seed=seed)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    if options.lora:
        model = with_lora(model, options.lora, lora_dropout=0.05)
    optimizer = torch.optim.AdamW(trained(model), options.lr)
    loader = DataLoader(data, options.batch, shuffle=True, collate_fn=collate)
    attacks = [PreferenceMargin(), *(Formula(name, f) for name, f in FORMULAS.items())]
    memorization = Memorization(max_overhead=10, looks=())
    watch = Watch(
        model, optimizer, attacks, loader=loader, folder=folder,
        settings=WatchSettings(memorization=memorization),
    )  # fmt: skip
    start, sides = time.process_time(), ""
    model.train()
    with watch:
        for _ in range(options.epochs):
            further = iter(range(options.pairs, 2 * options.pairs))
            for batch in loader:
                optimizer.zero_grad()
                with watch.step(batch):
                    fed = batch
                    if options.null:
                        fed = collate(
                            [rows[next(further)] for _ in range(len(batch["input_ids"]) // 2)]
                        )
                    loss_of(options, model, base, fed).backward()
                    optimizer.step()
    seconds = time.process_time() - start
    cells: dict[str, list[str]] = {}
    for line in read_lines(folder / "leakage.jsonl"):
        rate = line["metrics"]["auc"]
        sides = f"{line['metrics']['members']['value']:.0f} members, "
        sides += f"{line['metrics']['others']['value']:.0f} others"
        text = f"{rate['value']:.3f} ({rate['low']:.2f}-{rate['high']:.2f})"
        cells.setdefault(line["attack"], []).append(text)
    kind = f"LoRA r {options.lora}" if options.lora else "whole"
    print(
        f"\n### {Path(options.model).name}, {kind}, {options.loss}, beta {options.beta:g}, lr "
        f"{options.lr:g}, seed {seed}{', null' * options.null}: {sides}; {seconds:.0f} s CPU"
    )
    head = ["AUC (interval) after epoch", *(str(n + 1) for n in range(options.epochs))]
    print(table(head, ([name, *values] for name, values in cells.items())), flush=True)


def main() -> None:
    """Read the options, train once for each seed, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--pairs", type=int, default=400, help="that are asked about")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--length", type=int, default=64, help="tokens of prompt and answer")
    parser.add_argument("--loss", choices=("dpo", "orpo"), default="dpo")
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--lora", type=int, default=0, help="rank, on all linear maps; 0: whole")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--batch", type=int, default=8, help="pairs")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--null", action="store_true", help="train on other pairs")
    parser.add_argument("--seeds", default="0")
    options = parser.parse_args()
    print_place()
    rows = pairs_of(options)
    for seed in map(int, options.seeds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            train(options, rows, seed, Path(folder))


if __name__ == "__main__":
    main()
