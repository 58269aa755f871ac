"""How much of a batch's vocabulary one shared gradient leaks, attack by attack.

    python -m benchmarks.attacks.word_recovery --model DIR --private imdb --public wikitext2 \
        --shapes 8x25,16x50,32x100 --batches 20

``--private`` and ``--public`` take a name (imdb, agnews, wikitext2, tinystories, yelp, multi30k;
from the folder that FEDLEAK_ASSETS names) or a file with one text per line (.txt, .jsonl with
"text", .gz of either). Every shape is sentences x tokens: texts of at least so many tokens, cut
there. Private sentences are run through the model once and batches are put together from them (the
exact gradient: sentences do not see each other).

``--surface tied`` attacks the matrix as shared, for a tied model the sum of head and embedding
parts; ``--surface lora`` the B of a LoRA of ``--rank`` on the head, at its start.

``blind-oracle`` is what no gradient is needed for: the types that are most frequent in the public
text, as many as there really were. An attack that does no better has read nothing.

Prints F1 with its 95% interval over batches (Student's t), precision, recall, MAER (mean absolute
error ratio of the number of types) and the seconds of one attack.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks import shared
from benchmarks.shared import mean_and_half, read_texts, tokens_of
from lightning_fedleak.attacks.base import Attack, UnusableObservation, WordGuess
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.attacks.words.aligned import LENGTHS, AlignedFlatChat
from lightning_fedleak.attacks.words.flatchat import fit_type_counts, flatchat, positive_weight
from lightning_fedleak.attacks.words.head_gradients import gradient_parts, head_parameters
from lightning_fedleak.model.anatomy import find_anatomy, head_surface
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage

SMOKE = (
    "--model {model} --private {text} --public {text} --shapes 2x8 --batches 1 --attacks "
    "flatchat-abs,aligned --calibration-tokens 500 --regression-batches 1 "
    "--regression-shapes 4 --regression-pool 1 --pool 8 --blind-tokens 500",
    "--model {model} --private {text} --public {text} --shapes 2x8 --batches 1 --attacks "
    "flatchat-abs-oracle,aligned --calibration-tokens 500 --pool 8 --surface lora",
)

FLATCHAT = ("flatchat-gmm-oracle", "flatchat-gmm", "flatchat-abs-oracle", "flatchat-abs")
ATTACKS = ("blind-oracle", *FLATCHAT, "aligned")
Reader = Callable[[Observation, int], WordGuess]
"""Names types, of what is observed and the true number of them."""
REGRESSION_SHAPES = tuple((b, n) for b in (1, 2, 4, 8, 16, 32) for n in (25, 50, 100))


def long_enough(text: PublicText, length: int, count: int) -> PublicText:
    """Texts of at least ``length`` tokens, or the longest there are."""
    ordered = sorted(text.sentences, key=len, reverse=True)
    full = [s for s in text.sentences if len(s) >= length]
    return PublicText((full if len(full) >= count else ordered)[:count])


def composed_batches(anatomy, text: PublicText, shape, count: int, seed: int, pool: int):
    """(gradient, types) of ``count`` batches from a pool of sentences, distinct within a batch."""
    size, length = shape
    generator = torch.Generator().manual_seed(seed)
    pooled = long_enough(text, length, max(pool, size))
    if len(pooled) < size:
        raise SystemExit(f"{shape}: only {len(pooled)} texts to make batches of {size} from")
    parts = gradient_parts(anatomy, pooled.rows(range(len(pooled)), length, generator))
    weight, bias = head_parameters(anatomy)
    for _ in range(count):
        chosen = parts.select(torch.randperm(parts.n_sentences, generator=generator)[:size])
        yield chosen.gradient(weight, bias), chosen.labels.unique()


def type_count_regressor(anatomy, text: PublicText, args: argparse.Namespace):
    """FLATCHAT's estimator, fitted on public batches of the paper's 18 shapes, or of the first."""
    weights, counts = [], []
    batches = args.regression_batches, args.seed, args.regression_pool
    for shape in REGRESSION_SHAPES[: args.regression_shapes]:
        for gradient, types in composed_batches(anatomy, text, shape, *batches):
            weights.append(positive_weight(gradient))
            counts.append(len(types))
    return fit_type_counts(weights, counts)


def by_flatchat(view: Observation, truth: int, scorer: str, regressor) -> WordGuess:
    """FLATCHAT, with a regressor of the number of types, or without one told it."""
    gradient = next(iter(view.gradients[-1].tensors.values()))
    return flatchat(gradient, truth if regressor is None else regressor, scorer)


def runners(names, anatomy, public: PublicText, args) -> tuple[dict[str, Reader], dict[str, float]]:
    """Return what reads by name, and calibration times."""
    readers: dict[str, Reader] = {}
    seconds: dict[str, float] = {}
    regressor = None
    if {"flatchat-gmm", "flatchat-abs"} & set(names):
        start = time.perf_counter()
        regressor = type_count_regressor(anatomy, public, args)
        seconds["flatchat"] = time.perf_counter() - start
    for name in names:
        if name == "blind-oracle":
            tokens = torch.cat(public.sentences)[: args.blind_tokens]
            counts = tokens.bincount(minlength=anatomy.vocab_size)
            ranked = counts.argsort(descending=True, stable=True)
            readers[name] = lambda view, truth, ranked=ranked: WordGuess(ranked[:truth], truth)
        elif name.startswith("flatchat"):
            fitted = None if name.endswith("oracle") else regressor
            readers[name] = partial(by_flatchat, scorer=name.split("-")[1], regressor=fitted)
        else:
            settings = {"calibration_tokens": args.calibration_tokens, "seed": args.seed}
            attack = AlignedFlatChat(public, lengths=args.lengths, **settings)
            attack.prepare(anatomy)
            seconds[name] = attack.calibration_seconds
            readers[name] = lambda view, truth, attack=attack: guessed(attack, view)
    return readers, seconds


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


def main() -> None:
    parser = shared.parser_of(
        __doc__, "model", private="imdb", public="wikitext2",
        shapes="8x25,16x50,32x100", batches=20, attacks=",".join(ATTACKS),
        surface=("tied", ("tied", "lora")), rank=(8, "of the LoRA of --surface lora"),
        calibration_tokens=12_000, lengths=([*LENGTHS], "of the calibrating texts"),
        regression_batches=(5, "for each shape"), regression_shapes=len(REGRESSION_SHAPES),
        regression_pool=(40, "public sentences of each of them, at least"),
        pool=(250, "private sentences for each shape"),
        blind_tokens=(200_000, "public tokens counted"), bos=(int, "id put before every text"),
        seed=0,
    )  # fmt: skip
    args = parser.parse_args()
    shared.print_place(f"torch {torch.__version__}")
    names = args.attacks.split(",")
    if unknown := set(names) - set(ATTACKS):
        parser.error(f"unknown attacks {sorted(unknown)}; choose from {ATTACKS}")

    tokenizer, model = shared.loaded(args.model)
    if args.surface == "lora":
        torch.manual_seed(args.seed)
        model = shared.with_lora(model, args.rank, ["lm_head"]).eval()
    anatomy = find_anatomy(model)
    role = head_surface(anatomy).role
    private = tokens_of(read_texts(args.private), tokenizer, args.bos, args.seed + 1, 2000)
    public = tokens_of(read_texts(args.public), tokenizer, args.bos, args.seed + 2, 1000)
    attacks, calibration = runners(names, anatomy, public, args)

    head = ("batch", "types", "attack", "F1", "precision", "recall", "MAER", "seconds")
    print(shared.table(head, []))
    shapes = [[int(n) for n in s.split("x")] for s in args.shapes.split(",")]
    for shape in shapes:
        batches = composed_batches(anatomy, private, shape, args.batches, args.seed, args.pool)
        scores = {name: [] for name in names}
        for gradient, truth in batches:
            observed = GradientSnapshot(0, Stage.SHARED, {role: gradient}, tied=anatomy.tied)
            for name, run in attacks.items():
                start = time.perf_counter()
                guess = run(Observation((observed,)), len(truth))
                elapsed = time.perf_counter() - start
                more = {"seconds": elapsed, "types": float(len(truth))}
                scores[name].append(score(guess, truth) | more)
        for name, entries in scores.items():
            columns = {k: mean_and_half([entry[k] for entry in entries]) for k in entries[0]}
            f1, half = columns["f1"]
            values = (f"{columns[k][0]:.4f}" for k in ("precision", "recall"))
            more = f"{columns['maer'][0]:.3f}", f"{columns['seconds'][0]:.2f}"
            front = "x".join(map(str, shape)), f"{columns['types'][0]:.0f}", name
            shared.print_row(*front, f"{f1:.4f} ± {half:.4f}", *values, *more)
    print(f"\ncalibration seconds: {calibration}")


if __name__ == "__main__":
    main()
