"""How much of the text the activations at a split give away: Figures 1 and 2 of Zheng's paper.

    python -m benchmarks.attacks.inversion --model DIR --text imdb --splits 2 4 --texts 3 \
        --lengths 64 --noise 0 0.1 0.3 1 3 --attacks prefix paper descent
    python -m benchmarks.attacks.inversion --model DIR --text imdb --splits 2 4 --texts 3 \
        --lengths 16 64 256 --noise 0

What ``fedleak invert`` does, with the processor's time and a table in Markdown; one length and many
noise levels are the paper's Fig. 1, one noise level and many lengths its Fig. 2. ``--text`` takes a
name or a file, as ``word_recovery.py`` does. Noise counts in standard deviations of each dimension
of the activations. Utility is measured on ``--utility-texts`` texts: next-token accuracy and
perplexity of the whole model from the noised activations; of a plain encoder the cosine of its
mean-pooled output. ``--plot`` draws what was found against noise, or against length.
"""

from __future__ import annotations

import argparse
import platform
from datetime import date
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from benchmarks.attacks.word_recovery import read_texts
from lightning_fedleak.cli.studies.invert import (
    ADVERSARIES,
    ActivationCell,
    Noise,
    make_adversary,
    rows_of_length,
    run_cells,
)
from lightning_fedleak.cli.studies.invert.plots import plot_cells
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy

SMOKE = (
    "--model {model} --text {text} --splits 1 --texts 1 --lengths 8 --noise 0 "
    "--attacks prefix --utility-texts 1",
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


def measure(args) -> None:
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
        [Noise(sigma, True, args.seed) for sigma in args.noise],
        texts=args.texts,
        tokenizer=tokenizer,
    ):
        print_row(cell, header=not done)
        done.append(cell)
    where = f"{platform.machine()}, {args.threads} threads, torch {torch.__version__}"
    print(f"\n{date.today().isoformat()}, {where}")
    if args.plot:
        against = "sigma" if len(args.noise) > 1 else "length"
        plot_cells(done, against, args.plot, model=Path(args.model).name)


def print_row(cell: ActivationCell, *, header: bool) -> None:
    if header:
        print(
            "| split | tokens | noise | task | attack | token accuracy | exact texts | steps "
            "| candidates per token | CPU ms per token |\n|" + "---|" * 10
        )
    task = "unknown" if cell.utility is None else f"{cell.utility.accuracy:.2f}"
    if cell.utility is not None and cell.utility.perplexity is not None:
        task += f", ppl {cell.utility.perplexity:.3g}"
    start = f"| {cell.layer} of {cell.blocks} | {cell.length} | {cell.sigma:g} | {task} "
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="folder or hub id")
    add("--text", default="imdb")
    add("--splits", type=int, nargs="+", help="default a third and two thirds")
    add("--texts", type=int, default=3)
    add("--attacks", nargs="+", choices=ADVERSARIES, default=["prefix", "descent"])
    add("--steps", type=int, default=1000)
    add("--budget-seconds", type=float, help="for each attack on all texts")
    add("--bos", type=int, help="id put before every text")
    add("--lengths", type=int, nargs="+", default=[64])
    add("--noise", type=float, nargs="+", default=[0.0])
    add("--utility-texts", type=int, default=16)
    add("--plot", type=Path, help="a picture (needs matplotlib)")
    add("--threads", type=int, default=1)
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    measure(args)


if __name__ == "__main__":
    main()
