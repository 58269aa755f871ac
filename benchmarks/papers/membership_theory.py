"""Lemma 2's bound against the attack it is about: Fig. 5 of Vu et al. 2024, and real embeddings.

    OMP_NUM_THREADS=1 python -m benchmarks.papers.membership_theory --plot
    docs/membership_theory.png OMP_NUM_THREADS=1 python -m benchmarks.papers.membership_theory
    --model <folder> --text <file.jsonl.gz>

The first prints Fig. 5 (d from 1,000 to 141,000 as in the authors' script, one sentence of l_X in
{5, 10, 15} tokens, 200 data sets a point). Then it plays the game at some d, from 30 on: Algorithm
1 in its projector form with gamma = 2 Delta-bar on drawn tokens, target in or out by turns. Beside
it stands the authors' own estimate of the bound on the same tokens, whose P_proj is counted over
the pairs of one sentence and whose value is cut at 0. ``--plot`` needs matplotlib (extra
``plots``).

The second measures the lemma's terms on a model's hidden states, and on one-hot tokens of the same
text.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.papers import (
    DataBound,
    Law,
    SimulatedBound,
    advantage_bound,
    advantage_bound_of,
    projection_radius,
    retrieval_error,
    simulate_bound,
)
from lightning_fedleak.metrics.rates import proportion

SMOKE = (
    "--runs 4 --games 2",
    "--model {model} --text {records} --sentences 8 --tokens 8 --batch 4",
)

LAWS: tuple[Law, ...] = ("one_hot", "spherical", "gaussian")
LENGTHS = (5, 10, 15)
DIMS = tuple(range(1_000, 150_000, 10_000))
PLAYED = (30, 100, 300, 1_000, 11_000, 41_000, 141_000)


def beta_of(law: Law, d: int) -> float:
    """Table 6."""
    return 10 / d if law == "gaussian" else 10.0


def draw(law: Law, n: int, d: int, rng: np.random.Generator) -> np.ndarray:
    if law == "one_hot":
        x = np.zeros((n, d), dtype=np.float32)
        x[np.arange(n), rng.choice(d, n, replace=False)] = 1
        return x
    x = rng.standard_normal((n, d), dtype=np.float32)
    return x if law == "gaussian" else x / np.linalg.norm(x, axis=1, keepdims=True)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(0))
    return e / e.sum(0)


def play(law: Law, tokens: int, d: int, games: int, seed: int) -> tuple[int, int, float]:
    """Hits among members, false alarms among the others, and the authors' estimate of the bound."""
    rng = np.random.default_rng(seed)
    beta = beta_of(law, d)
    hits, alarms, estimates = 0, 0, []
    for game in range(games):
        member = game % 2 == 0
        everything = draw(law, tokens + 1, d, rng)  # one-hot: no two alike
        x, v = everything[:tokens], everything[0 if member else tokens]
        u = rng.standard_normal(d, dtype=np.float32)
        products = (x @ x.T).astype(np.float64)
        own = products.diagonal()
        off = products - np.diag(np.full(tokens, np.inf))
        delta, norm = float((own - off.max(1)).min()), math.sqrt(own.max())
        error = float(retrieval_error(beta, tokens, delta, norm))
        heads = []
        for a in (v, u):
            along = (x @ a).astype(np.float64)
            heads.append(softmax(beta * (products - np.outer(along, along) / float(a @ a))))
        gap = float(np.abs((heads[0] - heads[1]).T @ x).max())
        if gap > 2 * error:
            hits, alarms = hits + member, alarms + (not member)
        component = np.abs(off[~np.eye(tokens, dtype=bool)].reshape(tokens, -1))
        component /= np.sqrt(own)[:, None]  # symmetric: over ordered pairs either norm will do
        p_proj = float((component <= projection_radius(beta, tokens, norm)).mean())
        p_box = float((x.max(1) < 3 * error).mean())
        estimates.append(max(float(advantage_bound(p_proj, p_box, tokens)), 0.0))
    return hits, alarms, float(np.mean(estimates))


def fig_5(runs: int, seed: int) -> list[SimulatedBound]:
    points = []
    print(
        f"Fig. 5: one sentence, {runs} data sets a point. bound: (5), with its 95% interval; "
        "second head: (5) with u uniform on the sphere; ratio: Delta over the right side of (4)\n"
        "law        l_X        d     beta    P_proj  P_box   bound (95%)                 "
        "second head   ratio (95%)              (4) holds"
    )
    for law in LAWS:
        for tokens in LENGTHS:
            for d in DIMS:
                p = simulate_bound(law, d, tokens, beta_of(law, d), runs=runs, seed=seed)
                points.append(p)
                print(
                    f"{law:<10} {tokens:>3} {d:>8,} {p.beta:>8.2g}   {p.p_proj.value:.5f}  "
                    f"{p.p_box.value:.3f}  {p.bound.value:+.4f} ({p.bound.low:+.4f} to "
                    f"{p.bound.high:+.4f})   {p.random_direction.value:+.4f}      "
                    f"{p.condition_ratio.value:.3f} ({p.condition_ratio.low:.3f} to "
                    f"{p.condition_ratio.high:.3f})   {p.condition_holds.value:.3f}"
                )
    return points


def games(number: int, runs: int, seed: int) -> None:
    print(
        f"\nAlgorithm 1 with gamma = 2 Delta-bar, {number} games a row, half with the target in "
        "the sentence\n"
        "law        l_X        d   (4) holds   bound     authors' estimate   "
        "advantage (95%)              hits    false alarms"
    )
    for law in LAWS:
        for tokens, d in itertools.product(LENGTHS, PLAYED):
            p = simulate_bound(law, d, tokens, beta_of(law, d), runs=runs, seed=seed)
            hits, alarms, estimate = play(law, tokens, d, number, seed)
            members = (number + 1) // 2
            others = number - members
            won = proportion(hits + others - alarms, number)
            value, low, high = (2 * x - 1 for x in (won.value, won.low, won.high))
            print(
                f"{law:<10} {tokens:>3} {d:>8,}   {p.condition_holds.value:.3f}       "
                f"{p.bound.value:+.4f}   {estimate:.4f}              {value:+.3f} ({low:+.3f} to "
                f"{high:+.3f})   {hits / members:.3f}   {alarms / others:.3f}"
            )


def plot(points: Sequence[SimulatedBound], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"one_hot": "tab:green", "spherical": "tab:blue", "gaussian": "tab:orange"}
    names = {"one_hot": "one-hot", "spherical": "spherical", "gaussian": "Gaussian"}
    marks = {5: ("o", "-"), 10: ("s", "--"), 15: ("^", ":")}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    for law in LAWS:
        for tokens in LENGTHS:
            line = [p for p in points if p.law == law and p.tokens == tokens]
            d = [p.dim / 1000 for p in line]
            mark, dash = marks[tokens]
            style = {"color": colours[law], "marker": mark, "linestyle": dash, "markersize": 4}
            for axes, which in ((left, "bound"), (right, "condition_ratio")):
                values = [getattr(p, which) for p in line]
                axes.plot(
                    d,
                    [v.value for v in values],
                    label=f"{names[law]}, $l_X$ = {tokens}",
                    **style,
                )
                axes.fill_between(
                    d,
                    [v.low for v in values],
                    [v.high for v in values],
                    color=colours[law],
                    alpha=0.2,
                    linewidth=0,
                )
            if law == "one_hot":
                left.plot(
                    d,
                    [p.random_direction.value for p in line],
                    color="0.45",
                    linestyle=dash,
                    linewidth=1,
                    label=f"one-hot, $l_X$ = {tokens}, u random",
                )
    left.axhline(0, color="black", linewidth=0.8)
    left.set_ylabel("lower bound on the advantage, Eq. 5")
    left.text(118, -0.07, "vacuous below", fontsize=8)
    right.axhline(1, color="black", linewidth=0.8)
    right.set_ylabel(r"$\Delta$ / right side of (4)")
    right.text(100, 1.005, "(4) holds above", fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("token dimension $d_X$ (thousands)")
        axes.grid(alpha=0.3)
    lines, labels = left.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: (labels[i].endswith("u random"), i))
    figure.legend(
        [lines[i] for i in order],
        [labels[i] for i in order],
        loc="outside lower center",
        ncols=4,
        fontsize=8,
    )
    figure.savefig(file, dpi=130)
    print(f"\nplot: {file}")


def hidden_states(
    folder: Path, text: Path, sentences: int, tokens: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    ids: list[list[int]] = []
    with gzip.open(text, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = tokenizer(json.loads(line)["text"], truncation=True, max_length=tokens)
            if len(row["input_ids"]) == tokens:
                ids.append(row["input_ids"])
            if len(ids) == sentences:
                break
    if len(ids) < 2:
        raise SystemExit(f"{text} holds fewer than 2 texts of {tokens} tokens")
    batch = torch.tensor(ids)
    with torch.no_grad():
        out = model(input_ids=batch, output_hidden_states=True)
    return batch, out.hidden_states


def data_row(name: str, b: DataBound) -> None:
    print(
        f"{name:<22} {b.beta:>9.3g} {b.separation:>9.3g}  {b.separated.value:>6.2f}  "
        f"{b.max_norm:>7.3g} {b.condition:>9.3g} {b.smallest_beta:>9.3g}   {b.p_proj.value:.3f} "
        f"({b.p_proj.low:.3f} to {b.p_proj.high:.3f})  {b.p_box.value:.3f}  {b.bound.value:+.3f}  "
        f"{'vacuous' if b.vacuous else 'proven'}"
    )


def embeddings(folder: Path, text: Path, sentences: int, tokens: int, n_batch: int) -> None:
    ids, states = hidden_states(folder, text, sentences, tokens)
    d = states[0].shape[-1]
    print(
        f"\n{folder.name}, {text.parent.name}: {len(ids)} sentences of {tokens} tokens, d {d}, "
        f"client's batch {n_batch}\n"
        "layer                       beta     Delta   Delta>0        M  (4) asks  (4) from   "
        "P_proj                  P_box   bound"
    )
    for layer, hidden in enumerate(states):
        authors = 2 / math.sqrt(d - 1)
        bound = advantage_bound_of(hidden, authors, n_batch)
        data_row(f"{layer}, paper's beta", bound)
        if math.isfinite(bound.smallest_beta):
            data_row(
                f"{layer}, least beta",
                advantage_bound_of(hidden, bound.smallest_beta * (1 + 1e-9), n_batch),
            )
        if layer in (0, len(states) - 1):
            print(f"    {bound}")
    types, places = ids.unique(return_inverse=True)
    one_hot = torch.nn.functional.one_hot(places, len(types)).float()
    bound = advantage_bound_of(one_hot, 10.0, n_batch)
    data_row("one-hot", bound)
    print(f"    {bound}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="data sets a point")
    parser.add_argument("--games", type=int, default=200, help="0 plays none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="PNG to write")
    parser.add_argument("--model", type=Path, help="folder: its hidden states instead of Fig. 5")
    parser.add_argument("--text", type=Path, help="jsonl.gz with a field 'text'")
    parser.add_argument("--sentences", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=40)
    args = parser.parse_args()
    if (args.model is None) != (args.text is None):
        parser.error("--model and --text go together")
    started = time.perf_counter()
    if args.model is not None:
        embeddings(args.model, args.text, args.sentences, args.tokens, args.batch)
    else:
        points = fig_5(args.runs, args.seed)
        if args.plot is not None:
            plot(points, args.plot)
        if args.games:
            games(args.games, args.runs, args.seed)
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
