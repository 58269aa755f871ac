"""Canaries that stand 1, 4 or 16 times in the data of a fine-tuning: what the weights say of them.

    python -m benchmarks.attacks.canaries --model DIR --text FILE --seeds 0,1
    python -m benchmarks.attacks.canaries --model DIR --text FILE --seeds 0,1 --lora 8 --lr 1e-3

The layout is that of memaudit's case study: a third of 300 canaries is planted, a tier is drawn for
each, and those that are left out are the controls. A canary is the first tokens of a text that is
trained on nowhere else and six random tokens, which alone are scored. Prints a table for each seed.
"""

from __future__ import annotations

import argparse
import platform
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_fedleak.anatomy import find_anatomy
from lightning_fedleak.attacks.memorization import Canaries, ExtractionGuess
from lightning_fedleak.canaries import CanaryDataset, with_canaries
from lightning_fedleak.finetuning.texts import read_texts
from lightning_fedleak.metrics.rates import proportion
from lightning_fedleak.metrics.released import FPR, canary_tiers
from lightning_fedleak.snapshots import Observation, ReleasedModel, TokenSnapshot
from lightning_fedleak.studies.memorization import tokenize
from lightning_fedleak.taps.tokens import Text, ask_tokens

SMOKE = (
    "--model {model} --text {text} --rows 60 --canaries 150 --length 20 --prefix 4",
    "--model {model} --text {text} --rows 60 --canaries 150 --length 20 --prefix 4 --lora 4",
)
SECRET = 6  # random tokens at the end of a canary; more: greedy decoding writes fewer of them


def planted(options: argparse.Namespace, seed: int) -> CanaryDataset:
    """Return texts with canaries among them."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    words = list(dict.fromkeys(t.replace("<br />", " ") for t in read_texts(options.text)))
    order = np.random.default_rng(0).permutation(len(words))
    most = 2 * (options.rows + options.canaries)
    rows = tokenize([words[i] for i in order[:most]], tokenizer, options.length)
    whole = [row.ids for row in rows if len(row.ids) >= options.prefix]
    hosts, heads = whole[: options.rows], whole[options.rows :]
    generator = torch.Generator().manual_seed(seed)
    special = set(tokenizer.all_special_ids)
    ordinary = torch.tensor([i for i in range(len(tokenizer)) if i not in special])
    drawn = torch.randint(len(ordinary), (options.canaries, SECRET), generator=generator)
    canaries = [
        torch.cat([heads[i % len(heads)][: options.prefix], ordinary[drawn[i]]])
        for i in range(options.canaries)
    ]
    return with_canaries(hosts, canaries, seed, probability=1 / 3, times=(1, 4, 16))


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return a batch's ids and mask."""
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True), pad([torch.ones_like(r) for r in rows], batch_first=True)


def train(options: argparse.Namespace, seed: int) -> None:
    """Fine-tune once, and print a table."""
    data = planted(options, seed)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    torch.manual_seed(seed)
    if options.lora:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=options.lora,
            lora_alpha=2 * options.lora,
            lora_dropout=0.05,
            target_modules="all-linear",
        )
        model = get_peft_model(model, config)
    anatomy = find_anatomy(model)
    texts = [Text(ids, ids) for ids in data.canaries.token_ids]

    def ask() -> TokenSnapshot:
        with torch.autocast("cpu", torch.bfloat16, enabled=options.autocast):
            return ask_tokens(anatomy, texts)

    begun, base = time.process_time(), ask()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], options.lr)
    loader = DataLoader(data, options.batch, shuffle=True, collate_fn=padded)
    model.train()
    for epoch in range(1, options.epochs + 1):
        for ids, mask in loader:
            labels = ids.masked_fill(mask == 0, -100)
            with torch.autocast("cpu", torch.bfloat16, enabled=options.autocast):
                model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        report(options, seed, epoch, data, ReleasedModel(ask(), base, torch.ones(len(texts))))
    print(f"\n{time.process_time() - begun:.0f} s of processor time", flush=True)


def report(
    options: argparse.Namespace,
    seed: int,
    epoch: int,
    data: CanaryDataset,
    released: ReleasedModel,
) -> None:
    """Print what each tier shows after an epoch."""
    attack = Canaries(tokens=SECRET)
    guess = attack.run(Observation(released=released))
    assert isinstance(guess, ExtractionGuess)
    record, members = data.canaries.record, data.canaries.included
    repeats = torch.tensor(record.repeats)
    tiers = canary_tiers(guess, attack, record.times, repeats, members, ~members)
    tokens = sum(len(row) for row in data)
    share = 1 - sum(len(row) for row in data.dataset) / tokens
    kind = f"LoRA r {options.lora}" if options.lora else "whole"
    print(
        f"\n### {Path(options.model).name}, {kind}, lr {options.lr:g}, seed {seed}, epoch {epoch}: "
        f"{len(data.dataset)} texts, {int(members.sum())} of {len(members)} canaries planted, "
        f"{share:.1%} of the tokens"
    )
    print(
        "| times | canaries, controls | AUC (95%, all tiers) | TPR at 1% FPR | exposure, median | "
        "above all controls | greedy | in 100 draws | in 10,000 | controls in 10,000 |"
    )
    print("|---" * 10 + "|")
    scores = guess.log_probs - guess.base_log_probs
    bar = scores[~members].sort(descending=True).values[int(FPR * int((~members).sum()))]
    for tier, values in tiers.items():
        if isinstance(values, str):
            print(f"| {tier} | unknown: {values} |")
            continue
        inside = members & (repeats == tier)
        n, hits = int(inside.sum()), int((scores[inside] > bar).sum())
        rate = proportion(hits, n)
        capped = values["exposure"] >= values["exposure_cap"]
        counts = [
            int(one[inside].sum())
            for one in (
                guess.greedy,
                *(attack.extracted(guess.log_probs, d) for d in (100, 10_000)),
            )
        ]
        others = int(attack.extracted(guess.log_probs[~members], 10_000).sum())
        print(
            f"| {tier} | {n}, {int(values['others'])} | {values['auc']:.3f} "
            f"({values['auc_low']:.2f} to {values['auc_high']:.2f}) | {rate.value:.2f} "
            f"({rate.low:.2f} to {rate.high:.2f}) | {'at least ' * capped}"
            f"{values['exposure']:.1f} | {values['exposure_capped']:.0%} | "
            f"{' | '.join(map(str, counts))} | {others} |"
        )


def main() -> None:
    """Read the options, train once for each seed, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--rows", type=int, default=3000, help="texts beside the canaries")
    parser.add_argument("--canaries", type=int, default=300, help="of which a third is planted")
    parser.add_argument("--length", type=int, default=48, help="tokens of a text")
    parser.add_argument("--prefix", type=int, default=12, help="tokens that lead to the secret")
    parser.add_argument("--lora", type=int, default=0, help="rank, on all linear maps; 0: whole")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--autocast", action="store_true", help="bf16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"# {platform.machine()}, one thread, {date.today()}")
    for seed in map(int, options.seeds.split(",")):
        train(options, seed)


if __name__ == "__main__":
    main()
