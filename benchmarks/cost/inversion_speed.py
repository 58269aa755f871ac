"""How fast PrefixInversion reads a text off the hidden states at a split, and how exactly.

    OMP_NUM_THREADS=1 python -m benchmarks.cost.inversion_speed --model DIR --splits 1 2 4 6 \\
        --descent-steps 1000
    OMP_NUM_THREADS=1 python -m benchmarks.cost.inversion_speed --model DIR --splits 10 \\
        --lengths 1000
    OMP_NUM_THREADS=1 python -m benchmarks.cost.inversion_speed --model DIR --splits 3 \\
        --lengths 64 --noise 0.1 0.3 1 2 --descent-steps 1000

Public text is WikiText-2, private text IMDB reviews, joined where one is too short; both from
``$FEDLEAK_ASSETS/data``. For each split and length: token accuracy with its standard error over
texts, processor and wall time of ``run`` for each token, tokens that went through the bottom model
for each token of text, the least confidence, and once per split the seconds of ``prepare``. With
``--descent-steps`` EmbeddingDescent is run on the same states, text by text after PrefixInversion,
for exactly so many steps and not one more: nothing is extrapolated. Noise is Gaussian, in standard
deviations of each dimension over the text's positions.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from lightning_fedleak.anatomy import Anatomy, find_anatomy
from lightning_fedleak.attacks import DescentSettings, PublicText
from lightning_fedleak.attacks.texts.embedding_descent import EmbeddingDescent
from lightning_fedleak.attacks.texts.prefix.inversion import PrefixInversion
from lightning_fedleak.model_runs import hidden_states
from lightning_fedleak.snapshots import ActivationSnapshot, Observation, Stage

SMOKE = ("--model {model} --splits 1 --lengths 8 --texts 1 --types 64 --descent-steps 2",)

DATA = Path(os.environ.get("FEDLEAK_ASSETS", "../shared/assets")) / "data"


@dataclass(frozen=True)
class Line:
    """One attack at one split, length and noise; a number for each text in the lists."""

    attack: str
    split: int
    length: int
    noise: float
    accuracy: list[float]
    cpu_ms_per_token: list[float]
    wall_ms_per_token: list[float]
    candidates_per_token: list[float]
    least_confidence: float
    steps: int | None
    prepare_seconds: float

    def __str__(self) -> str:
        mean = statistics.fmean
        n = len(self.accuracy)
        error = statistics.stdev(self.accuracy) / n**0.5 if n > 1 else float("nan")
        return (
            f"{self.split:5d} {self.length:6d} {self.noise:5g}  {self.attack:14s} "
            f"{mean(self.accuracy):8.4f} +- {error:.4f}  "
            f"{mean(self.cpu_ms_per_token):9.1f} ({max(self.cpu_ms_per_token):.1f})  "
            f"{mean(self.wall_ms_per_token):9.1f}  {mean(self.candidates_per_token):8.2f}  "
            f"{self.least_confidence:.3f}"
        )


def public(tokenizer: PreTrainedTokenizerBase, characters: int) -> PublicText:
    files = sorted((DATA / "wikitext2").glob("*train*"))
    if not files:
        raise SystemExit(f"no WikiText-2 in {DATA}; set FEDLEAK_ASSETS")
    read = gzip.open if files[0].suffix == ".gz" else open
    with read(files[0], "rt") as file:
        ids = tokenizer(file.read(characters), return_tensors="pt").input_ids[0]
    return PublicText(list(ids[: len(ids) // 64 * 64].view(-1, 64)))


def private(tokenizer: PreTrainedTokenizerBase, n: int, length: int) -> Tensor:
    """(n, length) token ids."""
    files = sorted((DATA / "imdb").glob("*test*"))
    rows: list[Tensor] = []
    open_row: list[int] = []
    with gzip.open(files[0], "rt") as file:
        for line in file:
            found = tokenizer(json.loads(line)["text"]).input_ids
            open_row = open_row + found if length > 256 else found
            if len(open_row) >= length:
                rows.append(torch.tensor(open_row[:length]))
                open_row = []
            if len(rows) == n:
                return torch.stack(rows)
    raise SystemExit(f"fewer than {n} texts of {length} tokens")


Attack = PrefixInversion | EmbeddingDescent


def measure(
    anatomy: Anatomy, attacks: dict[str, tuple[Attack, float]], texts: Tensor, noise: float
) -> list[Line]:
    """``attacks``: by name with the seconds that they took to prepare."""
    generator = torch.Generator().manual_seed(1)
    found: dict[str, list[tuple[float, float, float, float, float]]] = {n: [] for n in attacks}
    length = texts.shape[1]
    for text in texts:
        split = next(iter(attacks.values()))[0].layer
        hidden = hidden_states(anatomy, split, text[None])
        if noise:
            draw = torch.randn(hidden.shape, generator=generator).to(hidden)
            hidden = hidden + noise * hidden.float().std((0, 1)).to(hidden.dtype) * draw
        view = Observation(activations=(ActivationSnapshot(0, Stage.SHARED, {"split": hidden}),))
        for name, (attack, _) in attacks.items():
            wall, cpu = time.perf_counter(), time.process_time()
            guess = attack.run(view)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            right = float((guess.tokens[0].cpu() == text).float().mean())
            sure = float("nan") if guess.confidence is None else float(guess.confidence.min())
            per = 1e3 / length
            found[name].append((right, cpu * per, wall * per, guess.candidates / length, sure))
    lines = []
    for name, (attack, prepared) in attacks.items():
        right, cpus, walls, candidates, sures = (list(c) for c in zip(*found[name], strict=True))
        steps = attack.steps if isinstance(attack, EmbeddingDescent) else None
        lines.append(
            Line(
                name,
                attack.layer,
                length,
                noise,
                right,
                cpus,
                walls,
                candidates,
                min(sures),
                steps,
                prepared,
            )
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder or name of a causal model")
    parser.add_argument("--splits", type=int, nargs="+", required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--types", type=int, default=4096, help="0 for the whole vocabulary")
    parser.add_argument("--no-language-model", action="store_true")
    parser.add_argument("--descent-steps", type=int, default=0)
    parser.add_argument("--noised", action="store_true", help="the adversary knows of the noise")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--budget-seconds", type=float)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
    if torch.cuda.is_available():
        model = model.cuda()
    anatomy = find_anatomy(model)
    text = public(tokenizer, 400_000)
    print(f"{args.model}, {args.dtype}, {torch.get_num_threads()} threads, {anatomy.device}")
    print("split length noise  attack  accuracy +- error  CPU ms/token (slowest)  wall ms/token")
    print("    tokens run per token  least confidence")
    lines: list[Line] = []
    for split in args.splits:
        prefix = PrefixInversion(
            split,
            text,
            args.budget_seconds,
            types=args.types or None,
            language_model=not args.no_language_model,
            noised=True if args.noised else None,
            beam=args.beam,
        )
        attacks: dict[str, Attack] = {"prefix": prefix}
        if args.descent_steps:
            attacks[f"descent, {args.descent_steps} steps"] = EmbeddingDescent(
                split, args.descent_steps, descent=DescentSettings(stop="cosine", cosine=1.0)
            )
        ready: dict[str, tuple[Attack, float]] = {}
        for name, attack in attacks.items():
            start = time.process_time()
            attack.prepare(anatomy)
            ready[name] = attack, time.process_time() - start
        print(f"{split:5d} prepared in {ready['prefix'][1]:.1f} CPU s", flush=True)
        for length in args.lengths:
            texts = private(tokenizer, args.texts, length)
            for noise in args.noise:
                new = measure(anatomy, ready, texts, noise)
                lines += new
                print(*new, sep="\n", flush=True)
                if args.json:
                    machine = f"{platform.processor() or platform.machine()}, {anatomy.device}"
                    report = {
                        "model": Path(args.model).name,
                        "dtype": args.dtype,
                        "threads": torch.get_num_threads(),
                        "machine": machine,
                        "date": date.today().isoformat(),
                        "lines": [asdict(line) for line in lines],
                    }
                    args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
