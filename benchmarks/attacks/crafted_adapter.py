"""What a dishonest server reads off a round behind an adapter whose values it has chosen.

    python -m benchmarks.attacks.crafted_adapter --model DIR --out FILE
    python -m benchmarks.attacks.crafted_adapter --model DIR --place block --rank 144 --out FILE
    python -m benchmarks.attacks.crafted_adapter --model DIR --place lora --rank 32 --blocks 3 \
        --rate 1e-4 --kappa 5 --out FILE
    python -m benchmarks.attacks.crafted_adapter --model DIR --ballast 3 --crafted-rows .25 \
        --out FILE
    python -m benchmarks.attacks.crafted_adapter --table FILE

A split draws which texts are public, private and held out anew; the server crafts and calibrates
on the public ones, and ``--rounds`` rounds are played on the private ones, on copies. ``embedding``
is a bottleneck behind the embedding, ``block`` one behind the first block, ``lora`` a LoRA on gate
and up projection of the first ``--blocks`` blocks. The client trains with AdamW from a fresh state.

Rates are means over rounds with 95% intervals (Student's t). *Usual* is a guess of the types that
more than half of all rounds hold, *blind* of the most frequent types, given their number. *Rare*
are the types that are not usual. Losses are in nats on held-out text. ``--ballast``,
``--crafted-rows``, ``--zero-bias``, ``--slow`` and ``--asleep`` are of a server that hides from
``fedleak inspect``; *seen* counts the inspected states that looked crafted or diverged.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
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
from peft import LoraConfig, get_peft_model
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.attacks.word_recovery import read_texts
from benchmarks.federation.inspection import Adapted, some_rows, with_ballast
from lightning_fedleak import CraftedAdapterWords, PublicText
from lightning_fedleak.anatomy import Anatomy, find_anatomy
from lightning_fedleak.attacks import RoundShape, RowSettings, RunFacts
from lightning_fedleak.attacks.local_steps import LocalSteps
from lightning_fedleak.attacks.words import crafted
from lightning_fedleak.attacks.words.crafted_rows import UNSEEN, CraftedValues, craft
from lightning_fedleak.attacks.words.public_gradients import train_copies
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.federation import StartCheck
from lightning_fedleak.federation.inspection import LIMITS
from lightning_fedleak.federation.round_start import RoundStart
from lightning_fedleak.games import CraftedRound, play_crafted_rounds
from lightning_fedleak.metrics import Counts, precision_recall_f1

SMOKE = (
    "--model {model} --text {text} --rank 8 --length 8 --texts 2 --steps 2 --splits 2 --rounds 1 "
    "--public-rounds 1 --held 2 --out {out}/cells.jsonl",
    "--model {model} --text {text} --place lora --rank 4 --blocks 1 --length 8 --texts 2 --steps 2 "
    "--splits 1 --rounds 1 --public-rounds 1 --held 2 --out {out}/lora.jsonl",
    "--model {model} --text {text} --rank 8 --length 8 --texts 2 --steps 2 --splits 1 --rounds 1 "
    "--public-rounds 1 --held 0 --ballast 3 --zero-bias --slow 2 --out {out}/cells.jsonl",
    "--model {model} --text {text} --rank 8 --length 8 --texts 2 --steps 2 --splits 1 --rounds 1 "
    "--public-rounds 1 --held 0 --ballast 3 --asleep --out {out}/cells.jsonl",
)
ASLEEP = -10.0  # bias with which no row of a bottleneck fires
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


def adapted(options: argparse.Namespace) -> tuple[nn.Module, list[str]]:
    """The model with adapters, and the paths of those that are crafted."""
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    decoder, width = model.get_decoder(), model.config.hidden_size
    if options.place == "lora":
        rank = options.rank
        lora = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, lora).eval()
        names = {id(m): name for name, m in model.named_modules()}
        return model, [names[id(block.mlp)] for block in decoder.layers[: options.blocks]]
    model.requires_grad_(False)
    if options.place == "embedding":
        decoder.embed_tokens = AdaptedEmbedding(decoder.embed_tokens, options.rank)
        crafted = decoder.embed_tokens.adapter
    else:
        decoder.layers[0] = Adapted(decoder.layers[0], Bottleneck(width, options.rank))
        crafted = decoder.layers[0].adapter
    crafted.requires_grad_(True)
    return model, [next(name for name, m in model.named_modules() if m is crafted)]


def craft_hidden(
    options: argparse.Namespace,
    steps: LocalSteps,
    anatomy: Anatomy,
    *arguments: Any,
    **settings: Any,
) -> CraftedValues:
    """Values of a server that hides from the inspector, whose verdicts are added to the options."""
    values = craft(anatomy, *arguments, **settings)
    tensors, public = dict(values.tensors), arguments[1]
    weight = values.rows.parameter
    bias = weight.removesuffix("weight") + "bias"
    if options.ballast:
        tensors = with_ballast(values, options.ballast)
    if options.zero_bias:
        tensors |= without_bias(values, tensors, weight, bias)
    honest = {n: anatomy.root.get_parameter(n).detach() for n in tensors}
    tensors = some_rows(honest, tensors, options.crafted_rows)
    start = RoundStart(StartCheck(), anatomy, public)
    if options.slow:
        tensors = move_slowly(options, steps, anatomy, start, public, honest, tensors)
    round_ = options.slow or (1 if options.zero_bias else 2)  # a bias that is not 0 comes later
    if options.asleep:
        asleep = honest | {bias: torch.full_like(honest[bias], ASLEEP)}
        for round_, state in ((1, honest), (2, asleep)):
            options.seen.append(start.inspect(round_, state).verdict != "nothing found")
            start.note(0, train_copies(anatomy, draw_batches(options, public), steps, state))
        round_ = 3
    verdict = start.inspect(round_, tensors).verdict
    options.seen.append(verdict != "nothing found")
    print("inspector:", verdict, flush=True)
    norm = tensors[weight].norm(dim=1)
    rows = dataclasses.replace(
        values.rows,
        directions=F.normalize(tensors[weight], dim=1),
        thresholds=-tensors[bias] / norm,
    )
    if not options.slow:
        count = max(1, round(options.crafted_rows * len(norm)))
        rows = dataclasses.replace(
            rows, directions=rows.directions[:count], thresholds=rows.thresholds[:count]
        )
    return dataclasses.replace(values, tensors=tensors, rows=rows)


def draw_batches(
    options: argparse.Namespace, public: PublicText, generator: torch.Generator | None = None
) -> list[TokenBatch]:
    """Return the batches of a client's round."""
    generator = generator or torch.Generator().manual_seed(options.seed)
    shape = options.texts, options.length
    return [public.batch(*shape, generator) for _ in range(options.steps)]


def without_bias(
    values: CraftedValues, tensors: dict[str, Tensor], weight: str, bias: str
) -> dict[str, Tensor]:
    """The same rows with the threshold in their direction, as all inputs have a part in common."""
    inputs, presence = values.rows.inputs, values.rows.presence
    shares = (presence + UNSEEN)[:, None] * inputs
    ridge = 1e-6 * torch.eye(inputs.shape[1])
    ones = torch.linalg.solve(shares.T @ inputs + ridge, shares.sum(0))
    norm = tensors[weight].norm(dim=1, keepdim=True)
    rows = F.normalize(tensors[weight] + tensors[bias][:, None] * ones, dim=1)
    return {weight: norm * rows, bias: torch.zeros_like(tensors[bias])}


def move_slowly(
    options: argparse.Namespace,
    steps: LocalSteps,
    anatomy: Anatomy,
    start: RoundStart,
    public: PublicText,
    honest: dict[str, Tensor],
    target: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Values that a server has moved to crafted ones in rounds of two clients.

    It moves the first map's rows as far in a round as the rule ``jump`` lets pass, and knows what
    the inspected client returns. All else is the clients' mean; with ``--left-out`` rows and biases
    are as the server wants them, and what the inspected client returns does not count.
    """
    generator = torch.Generator().manual_seed(options.seed)
    state = dict(honest)
    for round_ in range(1, options.slow):
        options.seen.append(start.inspect(round_, state).verdict != "nothing found")
        own, other = (
            train_copies(anatomy, draw_batches(options, public, generator), steps, state)
            for _ in range(2)
        )
        start.note(0, own)
        mean = {n: other[n] if options.left_out else (own[n] + other[n]) / 2 for n in state}
        for name in (n for n in state if ".down." in n):
            base = state[name] if options.left_out else mean[name]
            step = step_towards(target[name] - base, base - state[name], own[name] - state[name])
            mean[name] = base + step
        state = {n: t.detach().clone() for n, t in mean.items()}
    weight = next(n for n in state if n.endswith("down.weight"))
    near = torch.cosine_similarity(state[weight], target[weight], dim=1)
    print(f"cosine with the target {float(near.median()):.3f}", flush=True)
    return state


def step_towards(missing: Tensor, honest: Tensor, own: Tensor) -> Tensor:
    """A step towards what is missing that the rule ``jump`` lets pass.

    Args:
        missing: the target less what the clients' mean makes.
        honest: the change that the mean makes.
        own: the client's own change.
    """
    if missing.dim() == 1:
        return missing / 4
    usual = torch.maximum(1.5 * own.norm(dim=1).median(), own.norm(dim=1).max())
    room = 0.9 * LIMITS["jump"] * usual - honest.norm(dim=1)
    share = room.clamp(min=0) / missing.norm(dim=1).clamp(min=1e-12)
    return share.clamp(max=1)[:, None] * missing


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
    model, names = adapted(options)
    rounds = [
        [
            [TokenBatch(ids, ids, None, "causal") for ids in client.split(options.texts)]
            for client in clients.split(options.steps * options.texts)
        ]
        for clients in private.split(in_round)
    ]
    attack = CraftedAdapterWords(
        names,
        PublicText(public),
        shape=RoundShape(options.texts, options.length, options.clients),
        rounds=options.public_rounds,
        rows=RowSettings(kappa=options.kappa, row_norm=options.row_norm, seed=number),
        seed=number,
    )
    settings = {"lr": options.rate, "weight_decay": 0.01}
    facts = RunFacts(optimizer="AdamW", optimizer_settings=settings, local_steps=options.steps)
    held = TokenBatch(held_out, held_out, None, "causal") if options.held else None
    steps = LocalSteps.from_facts(facts)
    hidden = partial(craft_hidden, options, steps) if options.evades else craft
    with patch.object(crafted, "craft", hidden):
        played = play_crafted_rounds(find_anatomy(model), attack, rounds, facts, held_out=held)
    print(f"split {number}: cut {attack.cut:.3f}", flush=True)
    return played


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """Mean of the known values, and half of its 95% interval."""
    x = [value for value in values if not math.isnan(value)]
    if len(x) < 2:
        return (x[0] if x else math.nan), math.nan
    half = float(stats.t.ppf(0.975, len(x) - 1)) * float(stats.sem(x))
    return sum(x) / len(x), half


def measured(rounds: Sequence[CraftedRound]) -> dict[str, tuple[float, float]]:
    """Mean and interval of everything that is measured, by name."""

    def rates(counts: Sequence[Counts], name: str) -> tuple[float, float]:
        return mean_and_half([precision_recall_f1(one)[name].value for one in counts])

    table = {
        f"{n} F1": rates([getattr(r, n) for r in rounds], "f1") for n in ("words", "usual", "blind")
    }
    gains = [
        precision_recall_f1(r.words)["f1"].value - precision_recall_f1(r.blind)["f1"].value
        for r in rounds
    ]
    table["above blind"] = mean_and_half(gains)
    table |= {f"rare {n}": rates([r.rare for r in rounds], n) for n in ("precision", "recall")}
    steps = [r.right_steps / r.n_steps for r in rounds if r.n_steps]
    table["steps right"] = mean_and_half(steps)
    table["steps named"] = mean_and_half([float(r.n_steps) for r in rounds])
    for name in ("before", "crafted", "honest", "trapped"):
        table[f"loss {name}"] = mean_and_half([r.losses[name] for r in rounds])
    costs = [r.losses["trapped"] - r.losses["honest"] for r in rounds]
    table["loss by crafting"] = mean_and_half(costs)
    return table


COLUMNS = (
    "words F1",
    "blind F1",
    "usual F1",
    "above blind",
    "rare precision",
    "rare recall",
    "steps named",
    "steps right",
    "loss before",
    "loss honest",
    "loss trapped",
)


def table(path: Path) -> str:
    """The cells of a file as a table in Markdown; splits of one cell are joined."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text("utf-8").splitlines():
        cell = json.loads(line)
        cells.setdefault(cell["cell"], []).append(cell)
    columns = " | ".join(COLUMNS)
    lines = [f"| cell | rounds | seen | {columns} |", "|---" * (len(COLUMNS) + 3) + "|"]
    for name, splits in cells.items():
        rounds = [read_round(one) for split in splits for one in split["each"]]
        seen = [one for split in splits for one in split["seen"]]
        shown = [
            "not measured" if math.isnan(mean) else f"{mean:.3g}" + f" ± {half:.2g}" * (half > 0)
            for mean, half in (measured(rounds)[column] for column in COLUMNS)
        ]
        first = f"| {name} | {len(rounds)} | {sum(seen)} of {len(seen)} | "
        lines.append(first + " | ".join(shown) + " |")
    return "\n".join(lines)


def read_round(saved: dict[str, Any]) -> CraftedRound:
    """A round that was saved."""
    counts = ("words", "rare", "usual", "blind")
    return CraftedRound(**{n: Counts(**v) if n in counts else v for n, v in saved.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", help="folder of a causal model")
    add("--text", default="tinystories", help="file, or the name of a set in FEDLEAK_ASSETS")
    add("--place", default="embedding", choices=("embedding", "block", "lora"))
    add("--rank", type=int, default=144, help="rows of the adapter")
    add("--blocks", type=int, default=3, help="of which LoRAs are crafted")
    add("--texts", type=int, default=4, help="in a step")
    add("--length", type=int, default=32, help="tokens of a text")
    add("--steps", type=int, default=10, help="of AdamW in a round")
    add("--clients", type=int, default=1, help="whose mean the server sees")
    add("--rate", type=float, default=3e-4, help="learning rate")
    add("--kappa", type=float, default=3.0, help="types of a round that a row fires for")
    add("--row-norm", type=float, help="of crafted rows; default: the adapter's own")
    add("--ballast", type=float, default=0.0, help="how far usual words are pushed below; 0: not")
    add("--crafted-rows", type=float, default=1.0, help="share of rows that are crafted")
    add("--zero-bias", action="store_true", help="thresholds in the rows, as in a first round")
    add("--slow", type=int, default=0, help="rounds in which rows are moved; 0: sent at once")
    add("--left-out", action="store_true", help="with --slow: the mean leaves the client out")
    add("--asleep", action="store_true", help="the round before, no row fires")
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
        print(table(options.table))
        return
    if options.model is None or options.out is None:
        parser.error("--model and --out are needed, or --table")
    hidden = options.ballast > 0 or options.crafted_rows < 1
    options.evades = hidden or options.zero_bias or options.slow or options.asleep
    if options.evades and options.place != "embedding":
        parser.error("a server hides bottlenecks behind the embedding: --place embedding")
    torch.set_num_threads(1)
    rows = rows_of(options)
    settings = {n: v for n, v in vars(options).items() if n not in ("out", "table", "model")}
    name = f"{Path(options.model).name}, {options.place}, r {options.rank}"
    if options.place == "lora":
        name += f", {options.blocks} blocks"
    if options.evades:
        name += f", ballast {options.ballast:g} in {options.crafted_rows:.0%} of rows"
        name += ", no bias" * options.zero_bias
        name += f", moved in {options.slow} rounds" * bool(options.slow)
        name += ", left out" * options.left_out
        name += ", asleep before" * options.asleep
    if options.clients > 1:
        name += f", mean of {options.clients} clients"
    for number in range(options.splits):
        start, options.seen = time.monotonic(), []
        rounds = split(rows, options.seed + number, options)
        cell = {
            "cell": f"{name}, {options.steps} x {options.texts} x {options.length} "
            f"at {options.rate:g}",
            "each": [dataclasses.asdict(one) for one in rounds],
            "seen": options.seen,
            "settings": settings | {"split": options.seed + number},
            "seconds": time.monotonic() - start,
            "date": date.today().isoformat(),
            "machine": platform.machine(),
        }
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(cell) + "\n")
    print(table(options.out).splitlines()[-1])


if __name__ == "__main__":
    main()
