"""Whether rows that the first epoch has not come to are fair controls: do they score as others do?

    python -m benchmarks.attacks.memorization_controls --runs 200

Each run leaves rows out by a draw, trains on the others for half an epoch in a shuffled order, and
compares rows to come with those left out. Neither was trained on, so that the true AUC is .5, and
its 95% interval holds .5 in 95% of the runs. The AUC of the rows that were trained on, against the
same rows left out, shows that there was something to see.
"""

from __future__ import annotations

import argparse
import platform
import time
from datetime import date
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_fedleak.anatomy import find_anatomy
from lightning_fedleak.attacks.memorization import Combined
from lightning_fedleak.batches import IGNORE_INDEX, read_batch
from lightning_fedleak.canaries import leave_out
from lightning_fedleak.finetuning import EMBEDDED_MESSAGES, EMBEDDED_MODEL
from lightning_fedleak.finetuning.texts import read_texts
from lightning_fedleak.looks import Memorization
from lightning_fedleak.looks.pool import collect
from lightning_fedleak.metrics.rates import Rate, proportion
from lightning_fedleak.metrics.released import blind_aucs
from lightning_fedleak.snapshots import ReleasedModel, TokenSnapshot
from lightning_fedleak.studies.memorization import tokenize
from lightning_fedleak.taps.tokens import ask_tokens, compressed_bytes

SMOKE = ("--runs 2 --length 10 --model {model} --text {text}",)


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """Return a batch of token ids, padded on the right."""
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return {
        "input_ids": pad(rows),
        "attention_mask": pad([torch.ones_like(ids) for ids in rows]),
        "labels": pad(rows, padding_value=IGNORE_INDEX),
    }


def compare(
    options: argparse.Namespace, rows: list[Tensor], answers: TokenSnapshot, seed: int
) -> tuple[Rate, Rate]:
    """Return the AUC of rows to come, and of rows that were trained on, against those left out.

    Args:
        options: of the command.
        rows: all rows, of which some are left out.
        answers: what the base says of them.
        seed: of the draw and of the order.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    anatomy = find_anatomy(model)
    data, _ = leave_out(rows, len(rows) // 3, seed=seed)
    loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=padded)
    read = partial(read_batch, kind="causal")
    pool = collect(loader, Memorization(max_overhead=4 / 3, seed=seed), read)
    places = {tuple(ids.tolist()): place for place, ids in enumerate(rows)}
    base = answers.rows(torch.tensor([places[tuple(t.ids.tolist())] for t in pool.texts]))
    optimizer = torch.optim.AdamW(model.parameters(), options.lr)
    model.train()
    for step, batch in enumerate(loader):
        if step == len(loader) // 2:
            break
        pool.remember(read(batch))
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    now = ask_tokens(anatomy, pool.texts)
    compressed, rates = compressed_bytes(pool.texts), []
    for group in (pool.trains & ~pool.seen, pool.seen):
        both = (group | ~pool.trains).nonzero()[:, 0]
        released = ReleasedModel(now.rows(both), base.rows(both), compressed[both])
        scores = {"combined": Combined().score(released)}
        rates.append(blind_aucs(scores, group[both])["combined"])
    return rates[0], rates[1]


def main() -> None:
    """Read the options, train once for each run, and print how often the interval holds .5."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(EMBEDDED_MODEL))
    parser.add_argument("--text", default=str(EMBEDDED_MESSAGES))
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--length", type=int, default=12, help="tokens of a text, at most")
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = tokenize(read_texts(options.text), tokenizer, options.length)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    answers, rows = ask_tokens(find_anatomy(model), texts), [text.ids for text in texts]
    start, pairs = time.process_time(), []
    for seed in range(options.runs):
        pairs.append(compare(options, rows, answers, seed))
    held = proportion(sum(come.low <= 0.5 <= come.high for come, _ in pairs), len(pairs))
    print(
        f"# {platform.machine()}, one thread, {date.today()}: {len(rows)} texts of at most "
        f"{options.length} tokens, {options.runs} runs, {time.process_time() - start:.0f} s CPU"
    )
    print("| compared with rows left out | AUC, mean (least to most) |\n|---|---|")
    for name, rates in zip(
        ("rows to come", "rows trained on"), zip(*pairs, strict=True), strict=True
    ):
        values = [rate.value for rate in rates]
        mean = sum(values) / len(values)
        print(f"| {name} | {mean:.3f} ({min(values):.3f} to {max(values):.3f}) |")
    print(
        f"\nThe interval of rows to come holds .5 in {held.value:.1%} of the runs "
        f"({held.low:.1%} to {held.high:.1%})"
    )


if __name__ == "__main__":
    main()
