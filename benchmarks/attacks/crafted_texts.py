"""Whole texts off a round of Adam, for a server that has chosen the values of bottleneck adapters.

    python -m benchmarks.attacks.crafted_texts --model DIR --steps 1 --out FILE
    python -m benchmarks.attacks.crafted_texts --model DIR --steps 10 --texts 1 --out FILE
    python -m benchmarks.attacks.crafted_texts --table FILE

A bottleneck stands behind the embedding and behind every block, or at some ``--places``. *Exact* is
the share of a round's texts that are read without an error, *false* the share of texts read that
were not there. ROUGE-L is that of the most similar text read, and *alone* that of as many texts
which the model writes itself. ``--inspect`` prints which rules of ``fedleak inspect`` find the
values in a first round, in a later one, and in one whose round before is known.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.attacks.crafted_adapter import (
    AdaptedEmbedding,
    Bottleneck,
    mean_and_half,
    rows_of,
)
from benchmarks.federation.inspection import Adapted
from lightning_fedleak.anatomy import find_anatomy
from lightning_fedleak.attacks import PublicText, RunFacts
from lightning_fedleak.attacks.words.public_gradients import train_copies
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.federation import StartCheck
from lightning_fedleak.federation.round_start import RoundStart
from lightning_fedleak.games import TextSearch, crafted_texts, play_crafted_texts
from lightning_fedleak.metrics.texts import sentence_scores

SMOKE = (
    "--model {model} --text {text} --rank 8 --length 8 --texts 2 --steps 2 --rounds 1 --beam 4 "
    "--public 150 --out {out}/texts.jsonl",
    "--model {model} --text {text} --rank 8 --length 8 --texts 2 --steps 2 --rounds 1 --public 150 "
    "--inspect --out {out}/texts.jsonl",
)
COLUMNS = ("exact", "found", "false", "rouge_l", "alone")


def adapted(options: argparse.Namespace) -> tuple[Any, list[str]]:
    """Return the model, and the paths of its bottlenecks by depth."""
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    model.requires_grad_(False)
    decoder, width = model.get_decoder(), model.config.hidden_size
    adapters: list[nn.Module] = []
    for place in options.places or range(len(decoder.layers) + 1):
        if place == 0:
            decoder.embed_tokens = AdaptedEmbedding(decoder.embed_tokens, options.rank)
            adapters.append(decoder.embed_tokens.adapter)
        else:
            adapters.append(Bottleneck(width, options.rank))
            decoder.layers[place - 1] = Adapted(decoder.layers[place - 1], adapters[-1])
        adapters[-1].requires_grad_(True)
    names = {id(module): name for name, module in model.named_modules()}
    return model, [names[id(adapter)] for adapter in adapters]


def rouge_l(texts: Tensor, guesses: Tensor) -> float:
    """Return the mean over texts (n, L) of ROUGE-L with the most similar of guesses (m, L)."""
    if not len(guesses):
        return 0.0
    pairs = guesses.repeat(len(texts), 1), texts.repeat_interleave(len(guesses), 0)
    return float(sentence_scores(*pairs).rouge_l.view(len(texts), -1).amax(1).mean())


def inspected(server: Any, public: Tensor) -> list[str]:
    """Return the rules that find crafted values: in a first round, a later one, and after one."""
    anatomy, found = server.anatomy, []
    parameters = {n: p for n, p in anatomy.root.named_parameters() if p.requires_grad}
    honest = {n: p.detach().clone() for n, p in parameters.items()}
    starts = [RoundStart(StartCheck(), anatomy, PublicText(public)) for _ in range(3)]
    starts[2].inspect(1, honest)
    ids = public[: server.texts * server.steps.steps].split(server.texts)
    batches = [TokenBatch(part, part, None, "causal") for part in ids]
    starts[2].note(0, train_copies(anatomy, batches, server.steps))
    server.craft(public)
    for start, round_ in zip(starts, (1, 2, 2), strict=True):
        answers = start.inspect(round_, {n: p.detach() for n, p in parameters.items()}).found
        found.append(" ".join(f"{a.rule}:{a.count}" for a in answers) or "nothing")
    return found


def table(path: Path) -> str:
    """Return the cells of a file as a table in Markdown; rounds of one cell are joined."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text("utf-8").splitlines():
        cell = json.loads(line)
        cells.setdefault(cell["cell"], []).append(cell)
    lines = [f"| cell | rounds | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, rounds in cells.items():
        rates = (mean_and_half([one[column] for one in rounds]) for column in COLUMNS)
        shown = (f"{mean:.3f}" + f" ± {half:.3f}" * (half > 0) for mean, half in rates)
        lines.append(f"| {name} | {len(rounds)} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", help="folder of a causal model")
    add("--text", default="tinystories", help="file, or the name of a set in FEDLEAK_ASSETS")
    add("--places", type=int, nargs="*", help="0: behind the embedding, 1: the first block, ...")
    add("--rank", type=int, default=144, help="rows of an adapter")
    add("--texts", type=int, default=4, help="in a step")
    add("--length", type=int, default=32, help="tokens of a text")
    add("--steps", type=int, default=1, help="of the optimizer in a round")
    add("--optimizer", default="AdamW")
    add("--rate", type=float, default=3e-4, help="learning rate")
    add("--kappa", type=float, default=1.0, help="tokens of a round that a row fires for")
    add("--row-norm", type=float, help="of crafted rows; default: the adapter's own")
    add("--beam", type=int, default=64, help="beginnings that are kept, of four times as many")
    add("--rounds", type=int, default=3, help="each of a model and texts of its own")
    add("--public", type=int, default=750, help="public texts")
    add("--inspect", action="store_true", help="print what finds such values, and read nothing")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="JSON lines that each round is added to")
    add("--table", type=Path, help="print the cells of such a file, and measure nothing")
    options = parser.parse_args()
    if options.table:
        print(table(options.table))
        return
    if options.model is None or options.out is None:
        parser.error("--model and --out are needed, or --table")
    torch.set_num_threads(1)
    rows, in_round = rows_of(options), options.steps * options.texts
    facts = RunFacts(
        optimizer=options.optimizer,
        optimizer_settings={"lr": options.rate},
        local_steps=options.steps,
    )
    places = "all" if options.places is None else " ".join(map(str, options.places))
    name = (
        f"{Path(options.model).name}, places {places}, r {options.rank}, {options.optimizer} "
        f"{options.steps} x {options.texts} x {options.length} at {options.rate:g}, "
        f"kappa {options.kappa:g}, norm {options.row_norm or 'own'}, beam {options.beam}"
    )
    for number in range(options.seed, options.seed + options.rounds):
        began = time.monotonic()
        torch.manual_seed(number)
        order = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(number))]
        batches = [
            TokenBatch(ids, ids, None, "causal") for ids in order[:in_round].split(options.texts)
        ]
        public = PublicText(order[in_round:][: options.public + in_round])
        model, adapters = adapted(options)
        anatomy = find_anatomy(model, blocks="model.layers")
        search = TextSearch(
            options.kappa, options.row_norm, options.beam, 4 * options.beam, seed=number
        )
        if options.inspect:
            server = crafted_texts._Server(anatomy, adapters, facts, options.texts, search)
            print("inspector:", *inspected(server, torch.stack(public.sentences)), sep="\n")
            continue
        (played,) = play_crafted_texts(anatomy, adapters, [batches], facts, public, search)
        same = (played.guesses[:, None] == played.texts).all(-1).any(1)
        cell = {
            "cell": name,
            "exact": played.exact,
            "found": len(played.guesses) / in_round,
            "false": float((~same).float().mean()) if len(same) else math.nan,
            "rouge_l": rouge_l(played.texts, played.guesses),
            "alone": rouge_l(played.texts, played.alone),
            "settings": dataclasses.asdict(search) | {"split": number, "public": options.public},
            "seconds": time.monotonic() - began,
            "date": date.today().isoformat(),
            "machine": platform.machine(),
        }
        print({n: v for n, v in cell.items() if n not in ("cell", "settings")}, flush=True)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(cell) + "\n")
    if not options.inspect:
        print(table(options.out).splitlines()[-1])


if __name__ == "__main__":
    main()
