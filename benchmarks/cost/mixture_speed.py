"""Mixture fit against scikit-learn's, and FlatChat against one read of the gradient.

Every ratio is of medians of processor time, over runs that alternate in the same process on one
thread:

    OMP_NUM_THREADS=1 python -m benchmarks.cost.mixture_speed

Row sums: synthetic at V = 50,257, and those of IMDB batches on stories15M (FEDLEAK_ASSETS) and
SmolLM2-135M (FEDLEAK_SMOLLM2) where these folders are given. scikit-learn is run with the same
regularisation in three ways: as one would call it (its k-means start, tol=1e-3), from our start at
that tolerance, and from our start until its likelihood stands still (tol=1e-10).
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from sklearn.mixture import GaussianMixture
from torch import Tensor

from lightning_fedleak.attacks.words.flatchat import MixtureSettings, flatchat
from lightning_fedleak.attacks.words.mixture import Mixture, fit_two_gaussians, tail_start

SMOKE = ("--repeats 1 --vocabulary 2000 --shapes 2000x16",)
SHAPES = [f"{vocab}x768" for vocab in (16_384, 32_768, 50_257, 131_072, 262_144)]
SHAPES += [f"50257x{d}" for d in (256, 512, 1024, 2048)]


def medians(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Processor seconds of each, the runs taking turns; one warm-up."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            started = time.thread_time()
            run()
            if repeat:
                taken[name].append(time.thread_time() - started)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def synthetic_sums(vocab: int = 50_257, used: int = 1_200) -> Tensor:
    """Log-normal unused rows and wide used ones."""
    generator = torch.Generator().manual_seed(0)
    s = torch.randn(vocab, generator=generator, dtype=torch.float64).mul(2).exp() * 1e-6
    s[:used] = torch.randn(used, generator=generator, dtype=torch.float64) * 2e-3 - 3e-3
    return s / torch.linalg.vector_norm(s)


def real_sums(folder: Path, assets: Path) -> Iterator[tuple[str, Tensor]]:
    """Normalised row sums of the tied gradient on IMDB, two batch shapes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lightning_fedleak.anatomy import HEAD_WEIGHT, find_anatomy
    from lightning_fedleak.attacks import PublicText, gradient_of

    anatomy = find_anatomy(AutoModelForCausalLM.from_pretrained(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with gzip.open(assets / "data/imdb/test.jsonl.gz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(next(lines))["text"] for _ in range(60)]
    text = PublicText(texts, tokenizer)
    for size, length in ((8, 25), (16, 50)):
        batch = text.batch(size, length, torch.Generator().manual_seed(0))
        s = gradient_of(anatomy, batch, [HEAD_WEIGHT])[HEAD_WEIGHT].double().sum(dim=1)
        yield f"{folder.name} {size}x{length}", s / torch.linalg.vector_norm(s)


def sklearn_fit(x: Tensor, tol: float, regularization: float, start: Mixture | None) -> float:
    """Fits and returns the mean log-likelihood."""
    given = {}
    if start is not None:
        given = {
            "weights_init": start.weights.numpy(),
            "means_init": start.means.numpy()[:, None],
            "precisions_init": (1 / start.variances).numpy()[:, None, None],
        }
    data = x.numpy()[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = GaussianMixture(
            2, tol=tol, max_iter=20_000, reg_covar=regularization, random_state=0, **given
        ).fit(data)
    return float(model.score(data))


def log_likelihood(x: Tensor, mixture: Mixture) -> float:
    """Returns the mean log density of the values."""
    parts = torch.distributions.Normal(mixture.means, mixture.variances.sqrt())
    return float((mixture.weights.log() + parts.log_prob(x[:, None])).logsumexp(1).mean())


def compare_fits(name: str, s: Tensor, repeats: int) -> None:
    for regularization in (MixtureSettings().regularization, 0.0):
        start = tail_start(s.numpy(), 0.01)
        ours = fit_two_gaussians(s, regularization=regularization)
        ways: dict[str, tuple[float, Mixture | None]] = {
            "as called": (1e-3, None),
            "our start": (1e-3, start),
            "converged": (1e-10, start),
        }
        runs: dict[str, Callable[[], object]] = {
            "fit_two_gaussians": lambda r=regularization: fit_two_gaussians(s, regularization=r)
        }
        for way, (tol, begin) in ways.items():
            runs[way] = lambda t=tol, r=regularization, b=begin: sklearn_fit(s, t, r, b)
        seconds = medians(runs, repeats)
        own, own_likelihood = seconds["fit_two_gaussians"], log_likelihood(s, ours)
        print(f"\n{name}, V = {len(s):,}, regularization {regularization:g}")
        print(
            f"  fit_two_gaussians       {own * 1e3:8.2f} ms, log-likelihood "
            f"{own_likelihood:.9f}, converged {ours.converged}"
        )
        for way, (tol, begin) in ways.items():
            reached = sklearn_fit(s, tol, regularization, begin)
            difference = (own_likelihood - reached) / abs(reached)
            print(
                f"  scikit-learn, {way} {seconds[way] * 1e3:8.1f} ms, log-likelihood "
                f"{reached:.9f}: ratio {seconds[way] / own:6.1f}, relative difference "
                f"{difference:+.1e}"
            )


def compare_whole(vocab: int, d: int, repeats: int) -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(vocab, d, generator=generator)
    gradient *= synthetic_sums(vocab, min(1_200, vocab // 8))[:, None].abs().float()
    seconds = medians(
        {"read": lambda: gradient.sum(1), "flatchat": lambda: flatchat(gradient, 1000)}, repeats
    )
    read, whole = seconds["read"], seconds["flatchat"]
    print(
        f"  V {vocab:>7,}  d {d:>5,}  grad.sum(1) {read * 1e3:7.2f} ms  flatchat "
        f"{whole * 1e3:7.2f} ms  ratio {whole / read:5.2f}  {whole / vocab * 1e9:6.1f} ns a type"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--vocabulary", type=int, default=50_257, help="of the synthetic sums")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="gradients, rows x columns")
    arguments = parser.parse_args()
    repeats = arguments.repeats
    torch.set_num_threads(1)
    vocab = arguments.vocabulary
    compare_fits("synthetic", synthetic_sums(vocab, min(1_200, vocab // 8)), repeats)
    assets = Path(os.environ.get("FEDLEAK_ASSETS", "."))
    smollm2 = os.environ.get("FEDLEAK_SMOLLM2")
    for folder in (assets / "models/stories15M", Path(smollm2) if smollm2 else None):
        if folder is None or not folder.exists():
            print("\n(skipped a model: set FEDLEAK_ASSETS and FEDLEAK_SMOLLM2 to its folder)")
            continue
        for name, s in real_sums(folder, assets):
            compare_fits(name, s, repeats)
    print("\nFlatChat whole against one read of the gradient (float32)")
    for shape in arguments.shapes:
        vocab, d = (int(n) for n in shape.split("x"))
        compare_whole(vocab, d, repeats)


if __name__ == "__main__":
    main()
