"""How fast PrefixInversion reads a text off the hidden states at a split, and how exactly.

    OMP_NUM_THREADS=1 python benchmarks/inversion_speed.py --model DIR --splits 1 3 5 6
    OMP_NUM_THREADS=1 python benchmarks/inversion_speed.py --model DIR --splits 10 --lengths 1000

Public text is WikiText-2, private text IMDB reviews, joined where one is too short; both from
``$FEDLEAK_ASSETS/data``. For each split and length: token accuracy, milliseconds a token (wall time
of ``run``, of all threads that the process may use), tokens that went through the bottom model and
forwards of it, each per token of text, the least confidence, and once per split the seconds of
``prepare``. Noise is Gaussian, in standard deviations of all hidden values of the text.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from lightning_fedleak.anatomy import Anatomy, find_anatomy
from lightning_fedleak.attacks import PublicText
from lightning_fedleak.attacks.hidden import hidden_states
from lightning_fedleak.attacks.prefix_inversion import PrefixInversion
from lightning_fedleak.snapshots import ActivationSnapshot, Observation, Stage

DATA = Path(os.environ.get("FEDLEAK_ASSETS", "../shared/assets")) / "data"


@dataclass(frozen=True)
class Line:
    """One split and length; means over the texts."""

    split: int
    length: int
    noise: float
    texts: int
    accuracy: float
    exact: float
    ms_per_token: float
    slowest_ms_per_token: float
    candidates_per_token: float
    least_confidence: float
    prepare_seconds: float


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


def measure(
    anatomy: Anatomy, attack: PrefixInversion, texts: Tensor, noise: float, prepared: float
) -> Line:
    accuracies, seconds, candidates, sure = [], [], [], []
    generator = torch.Generator().manual_seed(1)
    for text in texts:
        hidden = hidden_states(anatomy, attack.layer, text[None])
        if noise:
            draw = torch.randn(hidden.shape, generator=generator).to(hidden)
            hidden = hidden + noise * hidden.float().std().to(hidden.dtype) * draw
        view = Observation(activations=(ActivationSnapshot(0, Stage.SHARED, {"split": hidden}),))
        start = time.perf_counter()
        guess = attack.run(view)
        seconds.append(time.perf_counter() - start)
        accuracies.append(float((guess.tokens[0].cpu() == text).float().mean()))
        candidates.append(guess.candidates)
        assert guess.confidence is not None
        sure.append(float(guess.confidence.min()))
    length = texts.shape[1]
    return Line(
        split=attack.layer,
        length=length,
        noise=noise,
        texts=len(texts),
        accuracy=statistics.fmean(accuracies),
        exact=statistics.fmean(float(a == 1.0) for a in accuracies),
        ms_per_token=1e3 * statistics.fmean(seconds) / length,
        slowest_ms_per_token=1e3 * max(seconds) / length,
        candidates_per_token=statistics.fmean(candidates) / length,
        least_confidence=min(sure),
        prepare_seconds=prepared,
    )


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
    print("split length noise  accuracy exact  ms/token (slowest)  candidates/token  confidence")
    lines = []
    for split in args.splits:
        attack = PrefixInversion(
            split,
            text,
            args.budget_seconds,
            types=args.types or None,
            language_model=not args.no_language_model,
        )
        start = time.perf_counter()
        attack.prepare(anatomy)
        prepared = time.perf_counter() - start
        print(f"{split:5d} prepared in {prepared:.1f} s", flush=True)
        for length in args.lengths:
            texts = private(tokenizer, args.texts, length)
            for noise in args.noise:
                line = measure(anatomy, attack, texts, noise, prepared)
                lines.append(line)
                print(
                    f"{split:5d} {length:6d} {noise:5g}  {line.accuracy:8.4f} {line.exact:5.2f}  "
                    f"{line.ms_per_token:8.1f} ({line.slowest_ms_per_token:.1f})  "
                    f"{line.candidates_per_token:16.2f}  {line.least_confidence:.3f}",
                    flush=True,
                )
    if args.json:
        rows = [asdict(line) for line in lines]
        args.json.write_text(json.dumps({"model": args.model, "lines": rows}, indent=1))


if __name__ == "__main__":
    main()
