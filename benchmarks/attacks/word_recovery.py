"""How much of a batch's vocabulary one shared gradient gives away, attack by attack.

    python -m benchmarks.attacks.word_recovery --model DIR --private imdb --public wikitext2 \
        --shapes 8x25,16x50,32x100 --batches 20 --json word_recovery.json

``--private`` and ``--public`` take a name (imdb, agnews, wikitext2, tinystories, yelp, multi30k;
from the folder that FEDLEAK_ASSETS names) or a file with one text per line (.txt, .jsonl with
"text", .gz of either). Every shape is sentences x tokens: texts of at least so many tokens, cut
there; ``--whole`` takes texts as they come, short ones too. Private sentences are run through the
model once and batches are put together from them (the exact gradient: sentences do not see each
other); ``--local-steps K`` trains K steps of plain SGD on K batches instead, and attacks the weight
change.

``--surface tied`` attacks the matrix as shared, for a tied model the sum of head and embedding
parts; ``--surface head`` the head's own part, which no server sees of a tied model; ``--surface
lora`` the B of a LoRA of ``--rank`` on the head, at its start.

``--noise`` adds Gaussian noise to every coordinate, its standard deviation in units of what one
token puts into a row (the mean norm of the hidden states over the number of tokens).
``--clip-value`` cuts every entry to that size, as a Trainer with gradient_clip_algorithm="value"
does, and says so to the attacks.

``blind-oracle`` is what no gradient is needed for: the types that are most frequent in the public
text, as many as there really were. An attack that does no better has read nothing.

Prints F1 with its 95% interval over batches (Student's t), precision, recall, MAER (mean absolute
error ratio of the number of types) and the seconds of one attack.
"""

from __future__ import annotations

import argparse
import copy
import csv
import gzip
import io
import itertools
import json
import os
import platform
import re
import time
from datetime import date
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from scipy import stats
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_fedleak.anatomy import HEAD_WEIGHT, find_anatomy
from lightning_fedleak.attacks.base import Attack, RunFacts, UnusableObservation, WordGuess
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.attacks.words.aligned import LENGTHS, AlignedFlatChat
from lightning_fedleak.attacks.words.flatchat import TypeCountRegressor, flatchat
from lightning_fedleak.attacks.words.public_gradients import (
    gradient_parts,
    head_parameters,
    head_surface,
)
from lightning_fedleak.model_runs import micro_batches, token_logits, undisturbed
from lightning_fedleak.snapshots import GradientSnapshot, Observation, Stage, UpdateSnapshot

SMOKE = (
    "--model {model} --private {text} --public {text} --shapes 2x8 --batches 1 --attacks "
    "flatchat-abs,aligned-sign --calibration-tokens 500 --regression-batches 1 "
    "--regression-pool 1 --pool 8 --blind-tokens 500",
    "--model {model} --private {text} --public {text} --shapes 2x8 --batches 1 --attacks "
    "flatchat-abs-oracle,aligned-sign --calibration-tokens 500 --pool 8 --surface lora",
)

ATTACKS = (
    "blind-oracle",
    "flatchat-gmm-oracle",
    "flatchat-gmm",
    "flatchat-abs-oracle",
    "flatchat-abs",
    "aligned-sign",
    "aligned-learned",
)
NAMED = {
    "imdb": "imdb/test.jsonl.gz",
    "agnews": "ag_news/test.csv.gz",
    "wikitext2": "wikitext2/train.raw.txt.gz",
    "tinystories": "tinystories/train_2MiB.txt.gz",
    "yelp": "yelp_sentences/sentiment.test.1.gz",
    "multi30k": "multi30k/test_2016_flickr.en.gz",
}
REGRESSION_SHAPES = tuple((b, n) for b in (1, 2, 4, 8, 16, 32) for n in (25, 50, 100))


def read_texts(name: str) -> list[str]:
    """Texts of a named set or a file."""
    path = Path(name)
    if name in NAMED:
        folder = os.environ.get("FEDLEAK_ASSETS", "../shared/assets")
        path = Path(folder) / "data" / NAMED[name]
    if not path.exists():
        known = ", ".join(NAMED)
        raise SystemExit(f"no text at {path}: name a file, or one of {known} (FEDLEAK_ASSETS)")
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    content = raw.decode("utf-8")
    if ".jsonl" in path.name:
        texts = [json.loads(line)["text"] for line in content.splitlines() if line.strip()]
    elif ".csv" in path.name:
        texts = [" ".join(row[1:]) for row in csv.reader(io.StringIO(content))]
    elif name == "tinystories":
        texts = content.split("<|endoftext|>")
    else:
        texts = [line for line in content.splitlines() if not line.lstrip().startswith("=")]
    if name == "wikitext2":
        texts = [without_token_spaces(t) for t in texts]
    texts = [t.replace("<br />", " ").strip() for t in texts]
    return [t for t in texts if t]


def without_token_spaces(text: str) -> str:
    """WikiText's spaced-out punctuation as it is written."""
    text = re.sub(r" @([-.,])@ ", r"\1", text)
    text = re.sub(r" ([.,;:!?)\]%])", r"\1", text)
    text = re.sub(r"([(\[]) ", r"\1", text)
    text = re.sub(r'" ([^"]*) "', r'"\1"', text)
    return text.replace(" 's", "'s").replace(" n't", "n't")


def tokens_of(texts: list[str], tokenizer, bos: int | None, seed: int, limit: int) -> PublicText:
    """``limit`` texts in random order, as ids."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    front = [] if bos is None else [bos]
    chosen = [texts[i] for i in order[:limit]]
    ids = [front + tokenizer(t, add_special_tokens=False)["input_ids"] for t in chosen]
    return PublicText([i for i in ids if len(i) >= 2])


def long_enough(text: PublicText, length: int, count: int) -> PublicText:
    """Texts of at least ``length`` tokens, or the longest there are."""
    ordered = sorted(text.sentences, key=len, reverse=True)
    full = [s for s in text.sentences if len(s) >= length]
    return PublicText((full if len(full) >= count else ordered)[:count])


def smoothed_gradient(anatomy, batch, smoothing: float) -> torch.Tensor:
    """The head's gradient under label smoothing, by autograd."""
    named = {n: p.detach() for n, p in anatomy.model.named_parameters()}
    weight = anatomy.parameter(HEAD_WEIGHT)
    names = [n for n, p in anatomy.model.named_parameters() if p is weight]
    leaf = weight.detach().requires_grad_()
    named |= dict.fromkeys(names, leaf)
    total, n = torch.zeros_like(weight), 0
    with undisturbed(anatomy) as model, torch.enable_grad():
        for part in micro_batches(anatomy, batch):
            logits, labels = token_logits(model, part, named)
            loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
            total += torch.autograd.grad(loss, leaf)[0]
            n += len(labels)
    return (total / n).detach()


def composed_batches(
    anatomy,
    text: PublicText,
    shape,
    count: int,
    seed: int,
    pool: int,
    noise: float = 0.0,
    whole: bool = False,
    clip_value: float | None = None,
):
    """(gradient, types) of ``count`` batches from a pool of sentences, distinct within a batch."""
    size, length = shape
    generator = torch.Generator().manual_seed(seed)
    most = max(pool, size)
    pooled = PublicText(text.sentences[:most]) if whole else long_enough(text, length, most)
    if len(pooled) < size:
        raise SystemExit(f"{shape}: only {len(pooled)} texts to make batches of {size} from")
    parts = gradient_parts(anatomy, pooled.rows(range(len(pooled)), length, generator))
    weight, bias = head_parameters(anatomy)
    for _ in range(count):
        chosen = parts.select(torch.randperm(parts.n_sentences, generator=generator)[:size])
        gradient = chosen.clipped_gradient(weight, bias, None, clip_value)
        if noise:
            one_token = chosen.states.norm(dim=1).mean() / len(chosen.labels)
            gradient += noise * one_token * torch.randn(gradient.shape, generator=generator)
        yield gradient, chosen.labels.unique(), {}


def trained_batches(anatomy, text: PublicText, shape, count: int, seed: int, args):
    """(weight change over learning rate, types) of ``--local-steps`` steps of SGD."""
    size, length = shape
    generator = torch.Generator().manual_seed(seed)
    full = long_enough(text, length, len(text))
    for _ in range(count):
        local = copy.deepcopy(anatomy.model).eval()
        optimizer = torch.optim.SGD(local.parameters(), lr=args.lr, momentum=args.momentum)
        seen = []
        for _ in range(args.local_steps):
            batch = full.batch(size, length, generator)
            optimizer.zero_grad()
            total = batch.n_targets
            for part in batch.input_ids.split(max(1, 1600 // length)):
                labels = part[:, 1:].reshape(-1)
                logits = local(input_ids=part).logits[:, :-1].flatten(0, 1)
                (F.cross_entropy(logits, labels, reduction="sum") / total).backward()
            optimizer.step()
            seen.append(batch.target_ids())
        before = anatomy.parameter(HEAD_WEIGHT).detach()
        after = local.get_output_embeddings().weight.detach()
        options = {"local_steps": args.local_steps, "learning_rate": args.lr}
        yield (before - after) / args.lr, torch.cat(seen).unique(), options


def type_count_regressor(anatomy, text: PublicText, per_shape: int, pool: int, seed: int):
    """FLATCHAT's estimator, fitted on public batches of the paper's 18 shapes."""
    weights, counts = [], []
    for shape in REGRESSION_SHAPES:
        for gradient, types, _ in composed_batches(anatomy, text, shape, per_shape, seed, pool):
            weights.append(float(flatchat(gradient, 1).mixture.weights[1]))
            counts.append(len(types))
    return TypeCountRegressor.fit(weights, counts)


def runners(names, anatomy, public: PublicText, args):
    """name -> function of (observation, true number of types) to a guess; and calibration times."""
    made, seconds = {}, {}
    regressor = None
    if {"flatchat-gmm", "flatchat-abs"} & set(names):
        began = time.perf_counter()
        regressor = type_count_regressor(
            anatomy, public, args.regression_batches, args.regression_pool, args.seed
        )
        seconds["flatchat"] = time.perf_counter() - began
    for name in names:
        if name == "blind-oracle":
            tokens = torch.cat(public.sentences)
            ranked = tokens[: args.blind_tokens].bincount(minlength=anatomy.vocab_size)
            ranked = ranked.argsort(descending=True, stable=True)

            def blind(view, truth, ranked=ranked):
                return WordGuess(ranked[:truth], n_types=float(truth))

            made[name] = blind
            continue
        if name.startswith("flatchat"):
            scorer, oracle = name.split("-")[1], name.endswith("oracle")

            def run(view, truth, scorer=scorer, oracle=oracle):
                gradient = next(iter(view.gradients[-1].tensors.values()))
                return flatchat(gradient, truth if oracle else regressor, scorer)

            made[name] = run
            continue
        attack = AlignedFlatChat(
            public,
            readout=name.split("-")[1],
            calibration_tokens=args.calibration_tokens,
            lengths=args.lengths,
            seed=args.seed,
        )
        attack.meet(RunFacts(clip_value=args.clip_value))
        attack.prepare(anatomy)
        seconds[name] = attack.calibration_seconds
        made[name] = lambda view, truth, attack=attack: guessed(attack, view)
    return made, seconds


def score(guess, truth) -> dict[str, float]:
    """Precision, recall, F1 and the relative error of the number of types."""
    right = int(torch.isin(guess.types, truth).sum())
    return {
        "precision": right / max(1, len(guess.types)),
        "recall": right / len(truth),
        "f1": 2 * right / (len(guess.types) + len(truth)),
        "maer": abs(guess.n_types - len(truth)) / len(truth),
    }


def guessed(attack: Attack, view: Observation) -> WordGuess:
    """What an attack names; no type where it refuses, which a table of F1 counts as 0."""
    try:
        guess = attack.run(view)
    except UnusableObservation:
        return WordGuess(torch.empty(0, dtype=torch.int64), n_types=0)
    assert isinstance(guess, WordGuess)
    return guess


def summary(values: list[float]) -> tuple[float, float]:
    """Mean and half width of its 95% interval."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, float("nan")
    deviation = (sum((v - mean) ** 2 for v in values) / (n - 1)) ** 0.5
    return mean, float(stats.t.ppf(0.975, n - 1) * deviation / n**0.5)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or hub id of a causal model")
    parser.add_argument("--private", default="imdb")
    parser.add_argument("--public", default="wikitext2", help="a set, or 'sampled'")
    parser.add_argument("--shapes", default="8x25,16x50,32x100")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--surface", choices=("tied", "head", "lora"), default="tied")
    parser.add_argument("--rank", type=int, default=8, help="of the LoRA of --surface lora")
    parser.add_argument("--calibration-tokens", type=int, default=12_000)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS, help="of the calibrating texts"
    )
    parser.add_argument("--whole", action="store_true", help="texts as they come, see above")
    parser.add_argument("--regression-batches", type=int, default=5, help="for each of 18 shapes")
    parser.add_argument(
        "--regression-pool", type=int, default=40, help="public sentences of each of them, at least"
    )
    parser.add_argument("--pool", type=int, default=250, help="private sentences for each shape")
    parser.add_argument("--blind-tokens", type=int, default=200_000, help="public tokens counted")
    parser.add_argument("--bos", type=int, help="id put before every text")
    parser.add_argument("--local-steps", type=int, default=0)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0], help="see above")
    parser.add_argument("--clip-value", type=float, help="see above")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.surface == "lora" and (args.local_steps or args.label_smoothing):
        parser.error("--surface lora goes with neither --local-steps nor --label-smoothing")
    if any(args.noise) and (args.local_steps or args.label_smoothing):
        parser.error("--noise goes with neither --local-steps nor --label-smoothing")
    if args.clip_value is not None and (args.local_steps or args.label_smoothing):
        parser.error("--clip-value goes with neither --local-steps nor --label-smoothing")
    names = args.attacks.split(",")
    if args.whole and (args.local_steps or args.label_smoothing):
        parser.error("--whole goes with neither --local-steps nor --label-smoothing")
    if unknown := set(names) - set(ATTACKS):
        parser.error(f"unknown attacks {sorted(unknown)}; choose from {ATTACKS}")

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if args.surface == "head":
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    if args.surface == "lora":
        torch.manual_seed(args.seed)
        config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=["lm_head"])
        model = get_peft_model(model, config).eval()
    anatomy = find_anatomy(model)
    role = head_surface(anatomy).role
    private = tokens_of(read_texts(args.private), tokenizer, args.bos, args.seed + 1, 2000)
    if args.public == "sampled":
        public = PublicText.sampled_from(anatomy, 256, 64, args.seed, start_token_id=args.bos)
    else:
        public = tokens_of(read_texts(args.public), tokenizer, args.bos, args.seed + 2, 1000)
    attacks, calibration = runners(names, anatomy, public, args)

    results = []
    shapes = [[int(n) for n in s.split("x")] for s in args.shapes.split(",")]
    for shape, noise in itertools.product(shapes, args.noise):
        if args.local_steps:
            batches = trained_batches(anatomy, private, shape, args.batches, args.seed, args)
        elif args.label_smoothing:
            g = torch.Generator().manual_seed(args.seed)
            drawn = [private.batch(*shape, g) for _ in range(args.batches)]
            batches = (
                (smoothed_gradient(anatomy, b, args.label_smoothing), b.target_ids().unique(), {})
                for b in drawn
            )
        else:
            batches = composed_batches(
                anatomy,
                private,
                shape,
                args.batches,
                args.seed,
                args.pool,
                noise,
                args.whole,
                args.clip_value,
            )
        scores = {name: [] for name in names}
        for gradient, truth, options in batches:
            kind = UpdateSnapshot if options else GradientSnapshot
            seen = kind(0, Stage.SHARED, {role: gradient}, tied=anatomy.tied, **options)
            for name, run in attacks.items():
                began = time.perf_counter()
                guess = run(Observation((seen,)), len(truth))
                took = time.perf_counter() - began
                scores[name].append(
                    score(guess, truth) | {"seconds": took, "types": float(len(truth))}
                )
        for name, rows in scores.items():
            columns = {k: [r[k] for r in rows] for k in rows[0]}
            entry = {"shape": "x".join(map(str, shape)), "noise": noise, "attack": name}
            entry["batches"] = len(rows)
            for key, values in columns.items():
                entry[key], entry[f"{key}_half_width"] = summary(values)
            results.append(entry)
            print_row(entry, header=len(results) == 1)
    about = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {args.threads} threads, torch {torch.__version__}",
        "settings": {k: str(v) for k, v in vars(args).items()},
        "calibration_seconds": calibration,
    }
    print(f"\n{about['date']}, {about['machine']}; calibration seconds: {calibration}")
    if args.json:
        args.json.write_text(json.dumps(about | {"results": results}, indent=1))


def print_row(entry: dict, header: bool) -> None:
    if header:
        print("| batch | noise | types | attack | F1 | precision | recall | MAER | seconds |")
        print("|---|---|---|---|---|---|---|---|---|")
    print(
        f"| {entry['shape']} | {entry['noise']:g} | {entry['types']:.0f} | {entry['attack']} "
        f"| {entry['f1']:.4f} ± {entry['f1_half_width']:.4f} | {entry['precision']:.4f} "
        f"| {entry['recall']:.4f} | {entry['maer']:.3f} | {entry['seconds']:.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
