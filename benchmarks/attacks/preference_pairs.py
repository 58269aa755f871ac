"""Which pairs of preferences the weights were trained on: DPO, looked at after each epoch.

    python -m benchmarks.attacks.preference_pairs --model DIR --text FILE --seeds 0,1
    python -m benchmarks.attacks.preference_pairs --model DIR --text FILE --lora 16 --lr 1e-3
    python -m benchmarks.attacks.preference_pairs --model DIR --text FILE --loss orpo

A pair is the begin of a text with its own continuation, which is chosen, and that of another text,
which stands in no other pair. ``leave_out`` holds half of the pairs out. Prints AUC (its interval)
of :class:`~lightning_fedleak.attacks.memorization.PreferenceMargin`. With ``--null`` the model is
trained on further pairs, none of which is asked about.
"""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from benchmarks import shared
from lightning_fedleak.attacks.memorization import PreferenceMargin
from lightning_fedleak.engine import Memorization
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.trainers import Watch, WatchSettings

SMOKE = (
    "--model {model} --text {text} --pairs 40 --prompt 4 --length 14 --epochs 1",
    "--model {model} --text {text} --pairs 40 --prompt 4 --length 14 --epochs 1 --lora 4 --null",
)

Row = dict[str, list[int]]


def _less(values: Tensor) -> Tensor:
    return values[0] - values[1]


def pairs_of(options: argparse.Namespace) -> list[Row]:
    """Return twice as many pairs as are asked about; the second half is for ``--null``."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    chosen = shared.shuffled_texts(options.text)[: 8 * options.pairs]
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
    return {"input_ids": pad(ids), "attention_mask": pad(masks), "completion_mask": pad(marks)}


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
    data, _ = leave_out(rows[: options.pairs], options.pairs // 2, seed=seed)
    base = shared.float_model(options.model).eval()
    model = shared.tuned_model(options, seed)
    optimizer = torch.optim.AdamW(shared.trained(model), options.lr)
    loader = DataLoader(data, options.batch, shuffle=True, collate_fn=collate)
    memorization = Memorization(max_overhead=10, looks=())
    watch = Watch(
        model, optimizer, [PreferenceMargin()], loader=loader, folder=folder,
        settings=WatchSettings(memorization=memorization),
    )  # fmt: skip
    start = time.process_time()
    model.train()
    with watch:
        for _ in range(options.epochs):
            further = iter(range(options.pairs, 2 * options.pairs))
            for batch in loader:
                optimizer.zero_grad()
                with watch.step(batch):
                    if options.null:
                        count = len(batch["input_ids"]) // 2
                        batch = collate([rows[next(further)] for _ in range(count)])
                    loss_of(options, model, base, batch).backward()
                    optimizer.step()
    seconds = time.process_time() - start
    cells, sides = shared.auc_cells(folder)
    facts = f"seed {seed}{', null' * options.null}: {sides}; {seconds:.0f} s CPU"
    what = options.loss, f"beta {options.beta:g}", f"lr {options.lr:g}"
    shared.print_epochs(options, cells, *what, facts)


def main() -> None:
    """Read the options, train once for each seed, and print."""
    parser = shared.parser_of(
        __doc__, "model", "text", pairs=(400, "that are asked about"),
        prompt=(16, "tokens of a prompt"), length=(64, "tokens of prompt and answer"),
        loss=("dpo", ("dpo", "orpo")), beta=0.1, lora=(0, "rank, on all linear maps; 0: whole"),
        lr=5e-5, batch=(8, "pairs"), epochs=3, null=(False, "train on other pairs"), seeds="0",
    )  # fmt: skip
    options = parser.parse_args()
    shared.print_place()
    rows = pairs_of(options)
    for seed in map(int, options.seeds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            train(options, rows, seed, Path(folder))


if __name__ == "__main__":
    main()
