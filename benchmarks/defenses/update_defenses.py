"""What noise on the update buys against word recovery.

    python -m benchmarks.defenses.update_defenses --model DIR --shape 8x25 --batches 10

FLATCHAT's Table 5: F1 of word recovery from one shared gradient of the output head against the
noise multiplier sigma at a clip norm C. The paper leaves open what is clipped and what the sum is
divided by, so that four readings are run, with the same noise z ~ N(0, 1) in each:

- ``sum``: sum_i min(1, C / |g_i|) g_i + sigma C z, DP-SGD before the division;
- ``sum/B``: the same over the batch size, which is what ``DPSGD`` releases;
- ``mean``: the clipped mean, then sigma C z, so B times as much noise for the same signal;
- ``update``: min(1, C / |g|) g + sigma C z with g the batch's mean gradient: ``GradientNoise``.

g_i is the whole model's gradient of one sentence's mean loss, by one backward pass a sentence. A
tied head is attacked as it is shared, as the sum of its parts. FlatChat is *given* the true
number of types. ``blind`` names as many types as there were, the most frequent in public text: no
gradient is needed for that.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.attacks.word_recovery import guessed, score
from benchmarks.shared import mean_and_half, print_place, read_texts, table, tokens_of
from lightning_fedleak.attacks import (
    AlignedFlatChat,
    PublicText,
)
from lightning_fedleak.attacks.base import WordGuess
from lightning_fedleak.attacks.words.flatchat import flatchat
from lightning_fedleak.model.anatomy import HEAD_WEIGHT, Anatomy, find_anatomy
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage

SMOKE = (
    "--model {model} --private {text} --public {text} --shape 2x8 --batches 2 "
    "--sigma 0 0.1 --calibration-tokens 500",
)

READINGS = ("sum", "sum/B", "mean", "update")
WORD_ATTACKS = ("flatchat", "sign", "learned")


@dataclass(frozen=True)
class ClippedBatch:
    """One batch's gradient of the head, clipped in both ways.

    Attributes:
        samples: (V, d) sum over sentences, each clipped to the norm C in the whole model.
        update: (V, d) of the mean gradient, clipped to C in the whole model.
        norms: (B,) of the sentences' gradients.
        update_norm: of the mean gradient.
        types: distinct tokens that were predicted.
    """

    samples: Tensor
    update: Tensor
    norms: list[float]
    update_norm: float
    types: Tensor

    def released(self, reading: str, noise: Tensor) -> Tensor:
        """What leaves the client under one reading of the paper, (V, d)."""
        size = len(self.norms)
        if reading == "sum":
            return self.samples + noise
        if reading == "sum/B":
            return (self.samples + noise) / size
        return (self.samples / size if reading == "mean" else self.update) + noise


def clipped_batch(
    anatomy: Anatomy, samples: Sequence[Mapping[str, Tensor]], types: Tensor, clip: float
) -> ClippedBatch:
    """One backward pass for each sample, given as the model's keyword arguments."""
    parameters = [p for p in anatomy.model.parameters() if p.requires_grad]
    head = next(i for i, p in enumerate(parameters) if p is anatomy.parameter(HEAD_WEIGHT))
    mean = [torch.zeros_like(p) for p in parameters]
    total, norms = torch.zeros_like(parameters[head]), []
    for sample in samples:
        loss = anatomy.model(**sample).loss
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        norms.append(_norm(gradients))
        total.add_(gradients[head], alpha=min(1.0, clip / norms[-1]))
        for sum_, gradient in zip(mean, gradients, strict=True):
            sum_.add_(gradient, alpha=1 / len(samples))
    whole = _norm(mean)
    update = mean[head] * min(1.0, clip / whole)
    return ClippedBatch(total, update, norms, whole, types)


def _norm(gradients) -> float:
    return math.sqrt(sum(float(g.norm()) ** 2 for g in gradients))


def batches(text: PublicText, size: int, length: int, seed: int) -> Iterator[Tensor]:
    """(size, length) ids of texts that are long enough, none of them twice."""
    full = [s[:length] for s in text.sentences if len(s) >= length]
    order = torch.randperm(len(full), generator=torch.Generator().manual_seed(seed)).tolist()
    for start in range(0, len(full) - size + 1, size):
        yield torch.stack([full[i] for i in order[start : start + size]])


def measure(args: argparse.Namespace) -> None:
    """Word recovery against the noise multiplier."""
    start_time = time.process_time()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    anatomy = find_anatomy(model)
    private = tokens_of(read_texts(args.private), tokenizer, args.bos, args.seed + 1, 2000)
    public = tokens_of(read_texts(args.public), tokenizer, args.bos, args.seed + 2, 1000)
    aligned = {
        readout: AlignedFlatChat(
            public, readout=readout, calibration_tokens=args.calibration_tokens, seed=args.seed
        )
        for readout in ("sign", "learned")
    }
    for attack in aligned.values():
        attack.prepare(anatomy)
    frequent = torch.cat(public.sentences).bincount(minlength=anatomy.vocab_size)
    frequent = frequent.argsort(descending=True, stable=True)
    print(
        f"calibrated after {time.process_time() - start_time:.0f} s of processor time", flush=True
    )

    size, length = (int(n) for n in args.shape.split("x"))
    generator = torch.Generator().manual_seed(args.seed)
    scores: dict[tuple[str, float, str], list[float]] = {}
    blind: list[float] = []
    norms: list[float] = []
    updates: list[float] = []
    types: list[int] = []
    for number, ids in enumerate(batches(private, size, length, args.seed)):
        if number == args.batches:
            break
        samples = [{"input_ids": row, "labels": row} for row in ids.split(1)]
        batch = clipped_batch(anatomy, samples, ids[:, 1:].unique(), args.clip)
        truth = batch.types
        norms += batch.norms
        updates.append(batch.update_norm)
        types.append(len(truth))
        blind.append(score(WordGuess(frequent[: len(truth)], n_types=len(truth)), truth)["f1"])
        z = torch.randn(batch.samples.shape, generator=generator)
        for sigma in args.sigma:
            for reading in READINGS:
                observed = batch.released(reading, sigma * args.clip * z)
                view = Observation(
                    (GradientSnapshot(0, Stage.SHARED, {HEAD_WEIGHT: observed}, tied=anatomy.tied),)
                )
                guesses = {"flatchat": flatchat(observed, len(truth))}
                guesses |= {name: guessed(attack, view) for name, attack in aligned.items()}
                for name, guess in guesses.items():
                    results = scores.setdefault((reading, sigma, name), [])
                    results.append(score(guess, truth)["f1"])
    if len(types) < 2:
        raise SystemExit("fewer than two batches: lower the shape, or raise --batches")
    report_noise(args, scores, blind, norms, updates, types, time.process_time() - start_time)


def report_noise(args, scores, blind, norms, updates, types, seconds) -> None:
    """Print the table."""
    print(
        f"{len(types)} batches of {args.shape}, {mean_and_half(map(float, types))[0]:.0f} types, "
        f"C = {args.clip:g}; norm of a sentence's gradient: median "
        f"{torch.tensor(norms).median():.3g}, smallest {min(norms):.3g}; of a batch's mean: median "
        f"{torch.tensor(updates).median():.3g}, smallest {min(updates):.3g}; blind F1 {_pm(blind)}"
    )
    rows = [
        [reading, name, *(_pm(scores[reading, sigma, name]) for sigma in args.sigma)]
        for reading in READINGS
        for name in WORD_ATTACKS
    ]
    print(table(["reading", "attack", *(f"sigma {s:g}" for s in args.sigma)], rows))
    print(f"{seconds:.0f} s of processor time")


def _pm(values: list[float]) -> str:
    mean, half = mean_and_half(values)
    return f"{mean:.3f}" + (f" ± {half:.3f}" if len(values) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="folder or hub id of a causal model")
    add("--private", default="imdb", help="as in word_recovery.py")
    add("--public", default="wikitext2")
    add("--seed", type=int, default=0, help="of the choice of texts")
    add("--threads", type=int, default=1)
    add("--shape", default="8x25", help="sentences x tokens")
    add("--batches", type=int, default=10)
    add("--clip", type=float, default=1.0)
    add("--sigma", type=float, nargs="+", default=[0, 1e-4, 1e-3, 1e-2, 0.1, 1])
    add("--bos", type=int, help="id put before every text")
    add("--calibration-tokens", type=int, default=12_000)
    args = parser.parse_args()
    print_place(args.threads, f"torch {torch.__version__}")
    measure(args)


if __name__ == "__main__":
    main()
