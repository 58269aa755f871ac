"""How much of the text the activations at a split give away: Figures 1 and 2 of Zheng's paper.

    python benchmarks/inversion.py --model DIR --text imdb --splits 2,4 --texts 3 \
        --length 64 --sigma 0 0.1 0.3 1 3 --attacks paper,descent --json fig1.json
    python benchmarks/inversion.py --model DIR --text imdb --splits 2,4 --texts 3 \
        --length 16 64 256 --attacks paper,descent --json fig2.json
    python benchmarks/inversion.py --read fig1.json fig2.json --plot inversion.png

Every length goes with every noise level; one noise level and many lengths are the paper's Fig. 2,
one length and many noise levels its Fig. 1. ``--text`` takes a name or a file, as
``word_recovery.py`` does.

``--sigma`` is in multiples of the standard deviation that each dimension of the activations has
over the texts at hand, ``--absolute`` the same for all dimensions, as in the paper.

Attacks: ``paper`` (Eq. 3 and 4 from 'hello'; add ``--paper-stop`` for its .98 rule), ``descent``
(EmbeddingDescent as it comes), ``sweeps`` (the same with verified changes), ``relaxation``
(TokenRelaxation), ``prefix`` (PrefixInversion, causal models).

Utility is the top model's, from the noised activations: next-token accuracy and perplexity over
``--utility-texts`` texts; of an encoder without a head the cosine of its mean-pooled output with
that of clean activations.

Prints token accuracy (Eq. 5) with its 95% interval over texts, exact texts, gradient steps,
candidates verified per token, and processor seconds per token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import time
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from word_recovery import read_texts

from lightning_fedleak.anatomy import find_anatomy
from lightning_fedleak.anatomy.text_layers import (
    place_of,
    states_in,
    states_out,
    with_states_in,
    with_states_out,
)
from lightning_fedleak.attacks.embedding_descent import EmbeddingDescent
from lightning_fedleak.attacks.hidden import hidden_states
from lightning_fedleak.attacks.token_relaxation import TokenRelaxation
from lightning_fedleak.metrics.text_reconstruction import reconstruction_rates, sentence_scores

ATTACKS = ("paper", "descent", "sweeps", "relaxation", "prefix")
COLORS = {
    "paper": "tab:red",
    "descent": "tab:blue",
    "sweeps": "tab:cyan",
    "relaxation": "tab:orange",
    "prefix": "tab:green",
}


def load(path: str):
    """Tokenizer, model and anatomy; whether it predicts next tokens."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    encoder = not any("CausalLM" in a for a in AutoConfig.from_pretrained(path).architectures)
    kind = AutoModel if encoder else AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype=torch.float32).eval()
    anatomy = find_anatomy(model, kind="masked") if encoder else find_anatomy(model)
    return tokenizer, model, anatomy, not encoder


def sentences(texts, tokenizer, length: int, count: int, seed: int, args, causal: bool):
    """(count, length) token ids of texts that are long enough."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    front = [] if args.bos is None else [args.bos]
    rows = []
    for i in order:
        ids = front + tokenizer(texts[i], add_special_tokens=not causal)["input_ids"]
        if len(ids) >= length:
            end = ids[-1:] if not causal else ids[length - 1 : length]
            rows.append(ids[: length - 1] + end)
        if len(rows) == count:
            return torch.tensor(rows)
    # WikiText's lines are short: join neighbours.
    joined = [" ".join(texts[i : i + 8]) for i in range(0, len(texts) - 8, 8)]
    if len(joined) < count:
        raise SystemExit(f"only {len(rows)} texts of {length} tokens")
    return sentences(joined, tokenizer, length, count, seed, args, causal)


def noise_for(hidden: torch.Tensor, kind: str, sigma: float, seed: int) -> torch.Tensor:
    """Gaussian noise of the shape of ``hidden`` (B, L, d)."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(hidden.shape, generator=generator)
    return sigma * noise * (hidden.flatten(0, 1).std(0) if kind == "relative" else 1.0)


@contextmanager
def noised(anatomy, layer: int, noise: torch.Tensor):
    """The model with ``noise`` added to its hidden states at the split."""
    place = place_of(anatomy, layer)

    def before(_, args, kwargs):
        return with_states_in(args, kwargs, states_in(args, kwargs) + noise)

    def behind(_, args, output):
        return with_states_out(output, states_out(output) + noise)

    handle = (
        place.module.register_forward_pre_hook(before, with_kwargs=True)
        if place.side == "input"
        else place.module.register_forward_hook(behind)
    )
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def utility(model, anatomy, layer: int, ids: torch.Tensor, noise: torch.Tensor, causal: bool):
    """What the top model still does with the noised activations."""
    with noised(anatomy, layer, noise):
        out = model(input_ids=ids)
    if not causal:
        clean = model(input_ids=ids).last_hidden_state.mean(1)
        return {"pooled_cosine": float(F.cosine_similarity(out[0].mean(1), clean).mean())}
    logits, truth = out.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
    return {
        "next_token_accuracy": float((logits.argmax(1) == truth).float().mean()),
        "perplexity": math.exp(min(700.0, float(F.cross_entropy(logits, truth)))),
    }


def made(name: str, layer: int, args, tokenizer):
    """The attack of that name."""
    common = {"budget_seconds": args.budget_seconds}
    descent = common | {"steps": args.steps}
    if name == "paper":
        hello = tokenizer("hello", add_special_tokens=False)["input_ids"][-1]
        stop = "cosine" if args.paper_stop else "settled"
        paper = {"weighting": "paper", "likeness": "cosine", "init_token": hello, "stop": stop}
        return EmbeddingDescent(layer, lr=args.paper_lr, **paper, **descent)
    if name == "descent":
        return EmbeddingDescent(layer, **descent)
    if name == "sweeps":
        special = tuple(tokenizer.all_special_ids)
        return EmbeddingDescent(
            layer, sweeps=max(1, args.steps // 50), always_try=special, **descent
        )
    if name == "relaxation":
        return TokenRelaxation(layer, lr=args.relaxation_lr, **descent)
    from lightning_fedleak.attacks.prefix_inversion import PrefixInversion

    return PrefixInversion(layer, **common)


def measured(name: str, layer: int, args, tokenizer, anatomy, sent, ids) -> dict:
    """One attack on all texts."""
    attack = made(name, layer, args, tokenizer)
    began = time.process_time()
    attack.prepare(anatomy)
    prepared = time.process_time() - began
    began, wall = time.process_time(), time.perf_counter()
    guess = attack.reconstruct(sent, None, None)
    took, wall = time.process_time() - began, time.perf_counter() - wall
    rates = reconstruction_rates(sentence_scores(guess.tokens, ids, rouge=args.rouge))
    entry = {"attack": name, "finished": guess.finished, "prepare_seconds": prepared}
    entry |= {"seconds_per_token": took / ids.numel(), "wall_seconds": wall}
    entry["candidates_per_token"] = guess.candidates / ids.numel()
    steps = getattr(guess, "steps", None)
    entry["steps"] = float("nan") if steps is None else float(steps.double().mean())
    for rate, value in rates.items():
        entry |= {rate: value.value, f"{rate}_low": value.low, f"{rate}_high": value.high}
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id")
    parser.add_argument("--text", default="imdb")
    parser.add_argument("--splits", default="", help="blocks; default a third and two thirds")
    parser.add_argument("--length", type=int, nargs="+", default=[64])
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--sigma", type=float, nargs="*", default=[], help="see above")
    parser.add_argument("--absolute", type=float, nargs="*", default=[], help="see above")
    parser.add_argument("--attacks", default="paper,descent")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--paper-lr", type=float, default=0.3)
    parser.add_argument("--paper-stop", action="store_true")
    parser.add_argument("--relaxation-lr", type=float, default=0.3)
    parser.add_argument("--budget-seconds", type=float, help="for each attack on all texts")
    parser.add_argument("--utility-texts", type=int, default=16)
    parser.add_argument("--rouge", action="store_true")
    parser.add_argument("--bos", type=int, help="id put before every text")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, nargs="+", help="earlier results, in place of a run")
    parser.add_argument("--plot", type=Path, help="a picture of both figures (needs matplotlib)")
    args = parser.parse_args()
    if args.read:
        results = [r for path in args.read for r in json.loads(path.read_text())["results"]]
    elif args.model:
        results = run(args, parser)
    else:
        parser.error("give --model, or earlier results by --read")
    if args.plot:
        draw(results, args.plot)


def run(args, parser) -> list[dict]:
    """All cells; prints them and writes them to ``--json`` as they come."""
    torch.set_num_threads(args.threads)
    names = args.attacks.split(",")
    if unknown := set(names) - set(ATTACKS):
        parser.error(f"unknown attacks {sorted(unknown)}; choose from {', '.join(ATTACKS)}")
    tokenizer, model, anatomy, causal = load(args.model)
    blocks = len(anatomy.blocks)
    splits = [int(s) for s in args.splits.split(",") if s]
    splits = splits or [round(blocks / 3), round(2 * blocks / 3)]
    texts = read_texts(args.text)
    levels = [("relative", s) for s in args.sigma] + [("absolute", s) for s in args.absolute]
    levels = levels or [("relative", 0.0)]
    about = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {args.threads} threads, torch {torch.__version__}",
        "settings": {k: str(v) for k, v in vars(args).items()},
    }
    results: list[dict] = []
    for length, split in itertools.product(args.length, splits):
        many = max(args.texts, args.utility_texts)
        pool = sentences(texts, tokenizer, length, many, args.seed, args, causal)
        hidden = hidden_states(anatomy, split, pool)
        for kind, sigma in levels:
            noise = noise_for(hidden, kind, sigma, args.seed)
            cell = {"model": Path(args.model).name, "text": args.text, "split": split}
            cell |= {"blocks": blocks, "length": length, "kind": kind, "sigma": sigma}
            cell |= {"texts": args.texts}
            n = args.utility_texts
            cell |= utility(model, anatomy, split, pool[:n], noise[:n], causal) if n else {}
            for name in names:
                sent, ids = (hidden + noise)[: args.texts], pool[: args.texts]
                results.append(cell | measured(name, split, args, tokenizer, anatomy, sent, ids))
                print_row(results[-1], header=len(results) == 1)
                if args.json:
                    args.json.write_text(json.dumps(about | {"results": results}, indent=1))
    print(f"\n{about['date']}, {about['machine']}")
    return results


def print_row(entry: dict, header: bool) -> None:
    causal = "perplexity" in entry
    if header:
        print(
            "| split | length | sigma | utility | attack | token accuracy | exact texts | steps "
            "| candidates per token | CPU s per token |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
    useful = ""
    if causal:
        useful = f"{entry['next_token_accuracy']:.2f}, ppl {entry['perplexity']:.3g}"
    elif "pooled_cosine" in entry:
        useful = f"cosine {entry['pooled_cosine']:.2f}"
    accuracy = [f"{entry[f'token_accuracy{end}']:.3f}" for end in ("", "_low", "_high")]
    mark = "" if entry["finished"] else " (out of time)"
    print(
        f"| {entry['split']} of {entry['blocks']} | {entry['length']} "
        f"| {entry['sigma']:g}{' abs' if entry['kind'] == 'absolute' else ''} | {useful} "
        f"| {entry['attack']}{mark} | {accuracy[0]} ({accuracy[1]} to {accuracy[2]}) "
        f"| {entry['exact_sentences'] * entry['texts']:.0f} of {entry['texts']} "
        f"| {entry['steps']:.0f} | {entry['candidates_per_token']:.1f} "
        f"| {entry['seconds_per_token']:.3f} |",
        flush=True,
    )


def draw(results: list[dict], path: Path) -> None:
    """A column for each model and split: Fig. 1 above, Fig. 2 below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cells = sorted({(r["model"], r["split"], r["blocks"]) for r in results})
    figure, axes = plt.subplots(
        2, len(cells), figsize=(4.2 * len(cells), 7), squeeze=False, sharey="row"
    )
    for column, (model, split, blocks) in enumerate(cells):
        rows = [r for r in results if (r["model"], r["split"]) == (model, split)]
        above, below = axes[:, column]
        above.set_title(f"{model}, split {split} of {blocks}")
        by_noise = [r for r in rows if r["kind"] == "relative"]
        by_length = [r for r in rows if r["sigma"] == 0]
        for name in ATTACKS:
            _line(above, [r for r in by_noise if r["attack"] == name], "sigma", name)
            _line(below, [r for r in by_length if r["attack"] == name], "length", name)
        for key, label in (
            ("next_token_accuracy", "utility: next-token accuracy"),
            ("pooled_cosine", "utility: cosine of the pooled output"),
        ):
            held = sorted({(r["sigma"], r[key]) for r in by_noise if key in r})
            if len({s for s, _ in held}) > 1:
                above.plot(*zip(*held, strict=True), "k--", label=label)
        above.set_xlabel("noise, in standard deviations per dimension")
        above.set_xscale("symlog", linthresh=0.1)
        below.set_xlabel("tokens")
        below.set_xscale("log", base=2)
        for axis in (above, below):
            axis.set_ylim(-0.02, 1.02)
            axis.grid(alpha=0.3)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=7)
    axes[0, 0].set_ylabel("share of tokens found")
    axes[1, 0].set_ylabel("share of tokens found")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _line(axis, rows: list[dict], key: str, name: str) -> None:
    """Mean and interval; of several cells at one point the one with the most texts."""
    best: dict[float, dict] = {}
    for row in rows:
        if row[key] not in best or row["texts"] > best[row[key]]["texts"]:
            best[row[key]] = row
    if len(best) < 2:
        return
    points = [best[x] for x in sorted(best)]
    values = [[p[f"token_accuracy{end}"] for p in points] for end in ("", "_low", "_high")]
    axis.plot(sorted(best), values[0], "o-", color=COLORS[name], label=name, markersize=4)
    axis.fill_between(sorted(best), values[1], values[2], color=COLORS[name], alpha=0.12)


if __name__ == "__main__":
    main()
