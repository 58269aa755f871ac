"""What a dishonest server reads off a round behind an adapter whose values it has chosen.

    python -m benchmarks.attacks.crafted_adapter --model DIR --out FILE
    python -m benchmarks.attacks.crafted_adapter --model DIR --place block --rank 144 --out FILE
    python -m benchmarks.attacks.crafted_adapter --model DIR --crafted-rows .5 --out FILE
    python -m benchmarks.attacks.crafted_adapter --table FILE

A split draws which texts are public, private and held out anew; the server crafts and calibrates
on the public ones, and ``--rounds`` rounds are played on the private ones, on copies. ``embedding``
is a bottleneck behind the embedding, ``block`` one behind the first block. The client trains with
AdamW from a fresh state.

Rates are means over rounds with 95% intervals (Student's t). *Usual* is a guess of the types that
more than half of all rounds hold, *blind* of the most frequent types, given their number. *Rare*
are the types that are not usual. Losses are in nats on held-out text. With ``--crafted-rows`` a
share of the rows is crafted, and the others stay as they are.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import platform
import time
from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.federation.inspection import Adapted, some_rows
from benchmarks.shared import add_line, mean_and_half, read_lines, read_texts, table
from lightning_fedleak import PublicText
from lightning_fedleak.attacks import RunFacts
from lightning_fedleak.evaluation.metrics import Counts, precision_recall_f1
from lightning_fedleak.labs import crafted_rows
from lightning_fedleak.labs.crafted_rows import CraftedValues, RowSettings, craft
from lightning_fedleak.labs.crafted_words import (
    CraftedAdapterWords,
    CraftedRound,
    RoundShape,
    play_crafted_rounds,
)
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.batches import TokenBatch

SMOKE = (
    "--model {model} --text {text} --rank 8 --length 8 --texts 2 --steps 2 --splits 2 --rounds 1 "
    "--public-rounds 1 --held 2 --out {out}/cells.jsonl",
    "--model {model} --text {text} --rank 8 --length 8 --texts 2 --steps 2 --splits 1 --rounds 1 "
    "--public-rounds 1 --held 0 --crafted-rows .5 --out {out}/cells.jsonl",
)
STD = 0.01  # of both maps of a new bottleneck, as in Houlsby et al. 2019


class Bottleneck(nn.Module):
    """Houlsby's adapter: ``h + up(relu(down(h)))``."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, rank), nn.Linear(rank, width)
        for linear in (self.down, self.up):
            nn.init.normal_(linear.weight, std=STD)
            nn.init.zeros_(linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        """The states, adapted."""
        return states + self.up(self.down(states).relu())


class AdaptedEmbedding(nn.Embedding):
    """An embedding with an adapter behind it."""

    def __init__(self, embedding: nn.Embedding, rank: int) -> None:
        super().__init__(*embedding.weight.shape)
        self.weight = embedding.weight
        self.adapter = Bottleneck(self.embedding_dim, rank)

    def forward(self, ids: Tensor) -> Tensor:
        """The embeddings, adapted."""
        return self.adapter(super().forward(ids))


def adapted(options: argparse.Namespace) -> tuple[nn.Module, str]:
    """The model with an adapter, and its path."""
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    decoder, width = model.get_decoder(), model.config.hidden_size
    model.requires_grad_(False)
    if options.place == "embedding":
        decoder.embed_tokens = AdaptedEmbedding(decoder.embed_tokens, options.rank)
        crafted = decoder.embed_tokens.adapter
    else:
        decoder.layers[0] = Adapted(decoder.layers[0], Bottleneck(width, options.rank))
        crafted = decoder.layers[0].adapter
    crafted.requires_grad_(True)
    return model, next(name for name, m in model.named_modules() if m is crafted)


def craft_share(share: float, anatomy: Anatomy, *arguments: Any, **settings: Any) -> CraftedValues:
    """Values of which a share of the rows is crafted."""
    values = craft(anatomy, *arguments, **settings)
    honest = {n: anatomy.root.get_parameter(n).detach() for n in values.tensors}
    rows = values.rows
    count = max(1, round(share * len(rows.directions)))
    rows = dataclasses.replace(
        rows, directions=rows.directions[:count], thresholds=rows.thresholds[:count]
    )
    tensors = some_rows(honest, values.tensors, share)
    return dataclasses.replace(values, tensors=tensors, rows=rows)


def rows_of(options: argparse.Namespace) -> Tensor:
    """Ids (n, length) of the beginnings of all texts that are long enough."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    front = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    texts = [
        front + tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in read_texts(options.text)
    ]
    return torch.tensor([ids[: options.length] for ids in texts if len(ids) >= options.length])


def split(rows: Tensor, number: int, options: argparse.Namespace) -> list[CraftedRound]:
    """The rounds of one split of the texts."""
    generator = torch.Generator().manual_seed(number)
    order = rows[torch.randperm(len(rows), generator=generator)]
    in_round = options.clients * options.steps * options.texts
    private, rest = order[: options.rounds * in_round], order[options.rounds * in_round :]
    held_out, public = rest[: options.held], rest[options.held :][: options.public]
    if len(private) < options.rounds * in_round or len(public) < 2:
        raise SystemExit(f"{len(rows)} texts are too few: take fewer --rounds or --texts")
    torch.manual_seed(number)
    model, adapter = adapted(options)
    rounds = [
        [
            [TokenBatch(ids, ids, None, "causal") for ids in client.split(options.texts)]
            for client in clients.split(options.steps * options.texts)
        ]
        for clients in private.split(in_round)
    ]
    attack = CraftedAdapterWords(
        adapter,
        PublicText(public),
        shape=RoundShape(options.texts, options.length, options.clients),
        rounds=options.public_rounds,
        rows=RowSettings(kappa=options.kappa, row_norm=options.row_norm, seed=number),
        seed=number,
    )
    settings = {"lr": options.rate, "weight_decay": 0.01}
    facts = RunFacts(optimizer="AdamW", optimizer_settings=settings, local_steps=options.steps)
    reserved = TokenBatch(held_out, held_out, None, "causal") if options.held else None
    some = partial(craft_share, options.crafted_rows) if options.crafted_rows < 1 else craft
    with patch.object(crafted_rows, "craft", some):
        played = play_crafted_rounds(find_anatomy(model), attack, rounds, facts, held_out=reserved)
    print(f"split {number}: cut {attack.cut:.3f}", flush=True)
    return played


def measured(rounds: Sequence[CraftedRound]) -> dict[str, tuple[float, float]]:
    """Mean and interval of everything that is measured, by name."""

    def rates(counts: Sequence[Counts], name: str) -> tuple[float, float]:
        return mean_and_half([precision_recall_f1(one)[name].value for one in counts])

    values = {
        f"{n} F1": rates([getattr(r, n) for r in rounds], "f1") for n in ("words", "usual", "blind")
    }
    gains = [
        precision_recall_f1(r.words)["f1"].value - precision_recall_f1(r.blind)["f1"].value
        for r in rounds
    ]
    values["above blind"] = mean_and_half(gains)
    values |= {f"rare {n}": rates([r.rare for r in rounds], n) for n in ("precision", "recall")}
    for name in ("before", "crafted", "honest", "trapped"):
        values[f"loss {name}"] = mean_and_half([r.losses[name] for r in rounds])
    costs = [r.losses["trapped"] - r.losses["honest"] for r in rounds]
    values["loss by crafting"] = mean_and_half(costs)
    return values


COLUMNS = (
    "words F1",
    "blind F1",
    "usual F1",
    "above blind",
    "rare precision",
    "rare recall",
    "loss before",
    "loss honest",
    "loss trapped",
)


def cell_table(path: Path) -> str:
    """The cells of a file as a table in Markdown; splits of one cell are joined."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for cell in read_lines(path):
        cells.setdefault(cell["cell"], []).append(cell)
    rows = []
    for name, splits in cells.items():
        rounds = [read_round(one) for split in splits for one in split["each"]]
        values = measured(rounds)
        rows.append(
            [
                *(name, str(len(rounds))),
                *(
                    "not measured"
                    if math.isnan(mean)
                    else f"{mean:.3g}" + f" ± {half:.2g}" * (half > 0)
                    for mean, half in (values[column] for column in COLUMNS)
                ),
            ]
        )
    return table(["cell", "rounds", *COLUMNS], rows)


def read_round(saved: dict[str, Any]) -> CraftedRound:
    """A round that was saved."""
    counts = ("words", "rare", "usual", "blind")
    return CraftedRound(**{n: Counts(**v) if n in counts else v for n, v in saved.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", help="folder of a causal model")
    add("--text", default="tinystories", help="file, or the name of a set in FEDLEAK_ASSETS")
    add("--place", default="embedding", choices=("embedding", "block"))
    add("--rank", type=int, default=144, help="rows of the adapter")
    add("--texts", type=int, default=4, help="in a step")
    add("--length", type=int, default=32, help="tokens of a text")
    add("--steps", type=int, default=10, help="of AdamW in a round")
    add("--clients", type=int, default=1, help="whose mean the server sees")
    add("--rate", type=float, default=3e-4, help="learning rate")
    add("--kappa", type=float, default=3.0, help="types of a round that a row fires for")
    add("--row-norm", type=float, help="of crafted rows; default: the adapter's own")
    add("--crafted-rows", type=float, default=1.0, help="share of rows that are crafted")
    add("--splits", type=int, default=10, help="draws of public and private texts")
    add("--rounds", type=int, default=1, help="of each split")
    add("--public-rounds", type=int, default=3, help="on which the cut is chosen")
    add("--public", type=int, default=1800, help="public texts at most")
    add(
        "--held",
        type=int,
        default=64,
        help="held-out texts; 0 measures no losses, in half the time",
    )
    add("--seed", type=int, default=0, help="number of the first split")
    add("--out", type=Path, help="JSON lines that each split is added to")
    add("--table", type=Path, help="print the cells of such a file, and measure nothing")
    options = parser.parse_args()
    if options.table:
        print(cell_table(options.table))
        return
    if options.model is None or options.out is None:
        parser.error("--model and --out are needed, or --table")
    if options.crafted_rows < 1 and options.place != "embedding":
        parser.error("--crafted-rows is for bottlenecks behind the embedding: --place embedding")
    torch.set_num_threads(1)
    rows = rows_of(options)
    settings = {n: v for n, v in vars(options).items() if n not in ("out", "table", "model")}
    name = f"{Path(options.model).name}, {options.place}, r {options.rank}"
    if options.crafted_rows < 1:
        name += f", {options.crafted_rows:.0%} of rows"
    if options.clients > 1:
        name += f", mean of {options.clients} clients"
    for number in range(options.splits):
        start = time.monotonic()
        rounds = split(rows, options.seed + number, options)
        cell = {
            "cell": f"{name}, {options.steps} x {options.texts} x {options.length} "
            f"at {options.rate:g}",
            "each": [dataclasses.asdict(one) for one in rounds],
            "settings": settings | {"split": options.seed + number},
            "seconds": time.monotonic() - start,
            "date": date.today().isoformat(),
            "machine": platform.machine(),
        }
        add_line(options.out, cell)
    print(cell_table(options.out).splitlines()[-1])


if __name__ == "__main__":
    main()
