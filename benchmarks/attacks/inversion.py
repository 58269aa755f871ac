"""How much of the text the activations at a split give away: Figures 1 and 2 of Zheng's paper.

    python -m benchmarks.attacks.inversion cells --model DIR --text imdb --splits 2 4 --texts 3 \
        --lengths 64 --noise 0 0.1 0.3 1 3 --attacks prefix paper descent --json fig1.json
    python -m benchmarks.attacks.inversion cells --model DIR --text imdb --splits 2 4 --texts 3 \
        --lengths 16 64 256 --noise 0 --json fig2.json
    python -m benchmarks.attacks.inversion stale --model DIR --text imdb --other tinystories \
        --splits 2
    python -m benchmarks.attacks.inversion starts --model DIR --text tinystories --bos 1 --splits 4
    python -m benchmarks.attacks.inversion show fig1.json --against sigma --plot fig1.png

``cells`` is what ``fedleak invert`` does, with the processor's time and a table in Markdown; one
length and many noise levels are the paper's Fig. 1, one noise level and many lengths its Fig. 2.
``--text`` takes a name or a file, as ``word_recovery.py`` does. ``--absolute`` reads ``--noise`` as
the paper does; by default it counts in standard deviations of each dimension of the activations.
Utility is measured on ``--utility-texts`` texts: next-token accuracy and perplexity of the whole
model from the noised activations; of a plain encoder the cosine of its mean-pooled output.

``stale``: the client trains the model on other text (plain SGD, all weights) while the server keeps
the bottom that it had. Noise-free activations of the newer bottom are attacked with the older one.

``starts``: tokens right after some steps of EmbeddingDescent, by where it starts.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from benchmarks.attacks.word_recovery import read_texts
from lightning_fedleak.anatomy import Anatomy, find_anatomy
from lightning_fedleak.attacks.texts.embedding_descent import EmbeddingDescent
from lightning_fedleak.metrics.texts import reconstruction_rates, sentence_scores
from lightning_fedleak.model_runs import hidden_states
from lightning_fedleak.studies.invert import (
    ADVERSARIES,
    ActivationCell,
    Noise,
    make_adversary,
    rows_of_length,
    run_cells,
)
from lightning_fedleak.studies.invert.plots import plot_cells

SMOKE = (
    "cells --model {model} --text {text} --splits 1 --texts 1 --lengths 8 --noise 0 "
    "--attacks prefix --utility-texts 1",
    "stale --model {model} --text {text} --other {text} --splits 1 --texts 1 --length 8 "
    "--ages 0 1 --batch 2 --steps 2 --attacks prefix",
    "starts --model {model} --text {text} --splits 1 --texts 1 --length 8 --after 1 --steps 2",
)


def load(path: str):
    """Tokenizer and anatomy of a causal model or a plain encoder."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    encoder = not any("CausalLM" in a for a in AutoConfig.from_pretrained(path).architectures)
    kind = AutoModel if encoder else AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype=torch.float32).eval()
    return tokenizer, find_anatomy(model, kind="masked") if encoder else find_anatomy(model)


def makers(args, tokenizer) -> list:
    """Each attack's name, and how to make it for a split."""
    settings = {
        "steps": args.steps,
        "budget_seconds": args.budget_seconds,
        "hello": tokenizer("hello", add_special_tokens=False)["input_ids"][-1],
        "special_ids": tokenizer.all_special_ids,
    }
    return [(name, partial(make_adversary, name, **settings)) for name in args.attacks]


def thirds(anatomy: Anatomy) -> list[int]:
    """The splits at about a third and two thirds."""
    blocks = len(anatomy.blocks)
    return [round(blocks / 3), round(2 * blocks / 3)]


def about(args) -> dict[str, object]:
    """Where and how the figures came to be."""
    return {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {args.threads} threads, torch {torch.__version__}",
        "settings": {k: str(v) for k, v in vars(args).items()},
    }


def cells(args) -> None:
    tokenizer, anatomy = load(args.model)
    texts = read_texts(args.text)
    many = max(args.texts, args.utility_texts)
    rows = {
        n: rows_of_length(
            texts, tokenizer, n, many, least=many, seed=args.seed, start_token_id=args.bos
        )
        for n in args.lengths
    }
    done: list[ActivationCell] = []
    for cell in run_cells(
        anatomy,
        rows,
        makers(args, tokenizer),
        args.splits or thirds(anatomy),
        [Noise(sigma, not args.absolute, args.seed) for sigma in args.noise],
        texts=args.texts,
        tokenizer=tokenizer,
    ):
        print_row(cell, header=not done)
        done.append(cell)
        if args.json:
            content = about(args) | {"cells": [c.to_dict() for c in done]}
            args.json.write_text(json.dumps(content, indent=1))
    print(f"\n{about(args)['date']}, {about(args)['machine']}")


def print_row(cell: ActivationCell, *, header: bool) -> None:
    if header:
        print(
            "| split | tokens | noise | task | attack | token accuracy | exact texts | steps "
            "| candidates per token | CPU ms per token |\n|" + "---|" * 10
        )
    task = "unknown" if cell.utility is None else f"{cell.utility.accuracy:.2f}"
    if cell.utility is not None and cell.utility.perplexity is not None:
        task += f", ppl {cell.utility.perplexity:.3g}"
    noise = f"{cell.sigma:g}{'' if cell.relative else ' abs'}"
    start = f"| {cell.layer} of {cell.blocks} | {cell.length} | {noise} | {task} "
    if not cell.rates:
        print(start + f"| {cell.attack} | failed: {cell.problem} |", flush=True)
        return
    accuracy = cell.rates["token_accuracy"]
    exact = round(cell.rates["exact_sentences"].value * cell.texts)
    late = "" if cell.finished else " (out of time)"
    steps = "" if cell.steps is None else f"{cell.steps:.0f}"
    print(
        start + f"| {cell.attack}{late} | {accuracy.value:.3f} ({accuracy.low:.2f} to "
        f"{accuracy.high:.2f}) | {exact} of {cell.texts} | {steps} | {cell.candidates:.1f} "
        f"| {1e3 * cell.cpu_seconds / (cell.texts * cell.length):.1f} |",
        flush=True,
    )


def stale(args) -> None:
    tokenizer, anatomy = load(args.model)
    private, other = (
        rows_of_length(
            read_texts(source), tokenizer, n, many, least=many, seed=args.seed,
            start_token_id=args.bos,
        )
        for source, n, many in (
            (args.text, args.length, args.texts),
            (args.other, args.length, args.batch * max(args.ages)),
        )
    )  # fmt: skip
    splits = args.splits or thirds(anatomy)[:1]
    attacks = [(layer, make(layer)) for layer in splits for _, make in makers(args, tokenizer)]
    for _, attack in attacks:
        attack.prepare(anatomy)
    first = {layer: hidden_states(anatomy, layer, private) for layer in splits}
    optimizer = torch.optim.SGD(anatomy.model.parameters(), lr=args.lr)
    print("| split | age, steps | loss | states moved by | attack | token accuracy | exact texts |")
    print("|" + "---|" * 7)
    step, loss = 0, float("nan")
    for age in sorted(args.ages):
        while step < age:
            batch = other[step * args.batch : (step + 1) * args.batch]
            logits = anatomy.model(input_ids=batch).logits[:, :-1]
            value = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            step, loss = step + 1, float(value)
        for layer, attack in attacks:
            sent = hidden_states(anatomy, layer, private)
            moved = ((sent - first[layer]).norm(dim=-1) / first[layer].norm(dim=-1)).median()
            guess = attack.reconstruct(sent, None, None)
            rates = reconstruction_rates(sentence_scores(guess.tokens, private))
            accuracy = rates["token_accuracy"]
            exact = round(rates["exact_sentences"].value * args.texts)
            late = "" if guess.finished else " (out of time)"
            print(
                f"| {layer} | {age} | {loss:.2f} | {float(moved):.1%} | {attack.name}{late} "
                f"| {accuracy.value:.3f} ({accuracy.low:.2f} to {accuracy.high:.2f}) "
                f"| {exact} of {args.texts} |",
                flush=True,
            )


def starts(args) -> None:
    tokenizer, anatomy = load(args.model)
    rows = rows_of_length(
        read_texts(args.text), tokenizer, args.length, args.texts, least=args.texts, seed=args.seed,
        start_token_id=args.bos,
    )  # fmt: skip
    hello = tokenizer("hello", add_special_tokens=False)["input_ids"][-1]
    print(f"| split | start | {' | '.join(f'{n} steps' for n in args.after)} |")
    print("|" + "---|" * (2 + len(args.after)))
    for layer in args.splits or thirds(anatomy):
        sent = hidden_states(anatomy, layer, rows)
        for name, start in (
            ("'hello'", {"initial": hello}),
            ("mean", {"initial": "mean"}),
            ("readout", {"initial": "readout"}),
        ):
            right = []
            for steps in args.after:
                attack = EmbeddingDescent(layer, steps=steps, **start)
                attack.prepare(anatomy)
                guess = attack.reconstruct(sent, None, None)
                right.append(f"{float((guess.tokens == rows).float().mean()):.3f}")
            print(
                f"| {layer} of {len(anatomy.blocks)} | {name} | {' | '.join(right)} |", flush=True
            )


def show(args) -> None:
    done: list[ActivationCell] = []
    for path in args.read:
        done += [ActivationCell.from_dict(c) for c in json.loads(path.read_text())["cells"]]
    for i, cell in enumerate(done):
        print_row(cell, header=i == 0)
    if args.plot:
        plot_cells(done, args.against, args.plot, model=args.title)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", required=True, help="folder or hub id")
    common.add_argument("--text", default="imdb")
    common.add_argument("--splits", type=int, nargs="+", help="default a third and two thirds")
    common.add_argument("--texts", type=int, default=3)
    common.add_argument("--attacks", nargs="+", choices=ADVERSARIES, default=["prefix", "descent"])
    common.add_argument("--steps", type=int, default=1000)
    common.add_argument("--budget-seconds", type=float, help="for each attack on all texts")
    common.add_argument("--bos", type=int, help="id put before every text")
    common.add_argument("--threads", type=int, default=1)
    common.add_argument("--seed", type=int, default=0)
    one = commands.add_parser("cells", parents=[common])
    one.add_argument("--lengths", type=int, nargs="+", default=[64])
    one.add_argument("--noise", type=float, nargs="+", default=[0.0])
    one.add_argument("--absolute", action="store_true")
    one.add_argument("--utility-texts", type=int, default=16)
    one.add_argument("--json", type=Path)
    one.set_defaults(run=cells)
    two = commands.add_parser("stale", parents=[common])
    two.add_argument("--other", default="tinystories", help="what the client trains on")
    two.add_argument("--length", type=int, default=32)
    two.add_argument("--ages", type=int, nargs="+", default=[0, 1, 4, 16])
    two.add_argument("--batch", type=int, default=8)
    two.add_argument("--lr", type=float, default=1e-3)
    two.set_defaults(run=stale)
    start = commands.add_parser("starts", parents=[common])
    start.add_argument("--length", type=int, default=64)
    start.add_argument("--after", type=int, nargs="+", default=[1, 15, 60, 120])
    start.set_defaults(run=starts)
    three = commands.add_parser("show")
    three.add_argument("read", type=Path, nargs="+", help="results of one model")
    three.add_argument("--against", choices=("sigma", "length"), default="sigma")
    three.add_argument("--plot", type=Path, help="a picture (needs matplotlib)")
    three.add_argument("--title", default="")
    three.set_defaults(run=show)
    args = parser.parse_args(argv)
    torch.set_num_threads(getattr(args, "threads", 1))
    args.run(args)


if __name__ == "__main__":
    main()
