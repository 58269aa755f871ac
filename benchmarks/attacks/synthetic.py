"""What generated texts give away of the training rows, by epochs of the model that wrote them.

    python -m benchmarks.attacks.synthetic --model DIR --text wikitext2
    python -m benchmarks.attacks.synthetic --model DIR --text imdb --epochs 0,4 --generated 500

A random draw splits the texts into rows, which a copy of the model is trained on, and others. The
copy then writes texts at temperature 1, from the token that texts begin with. ``fedleak synthetic``
gets these alone: an auxiliary model is fitted on them with the defaults of the command, and runs of
tokens are looked for. Epochs 0 are the null: the model that wrote the texts was trained on no row.
Prints for each number of epochs and of texts the AUC of each score, with its interval, which hold
together with an error of .05; and how many rows and others have a run of 13 tokens in the texts.
``--text`` is a file or the name of a set in ``FEDLEAK_ASSETS``.

With ``--canaries`` so many texts of each of three kinds are planted beside the rows, or not, each
by a fair coin: written by the base behind beginnings of other texts (``sampled_canaries``), the
same with a third of their tokens at the end drawn from the whole vocabulary, and drawn so up to
their first token. All kinds are in one run. Prints how well the tuned weights themselves, and the
texts that they write, tell planted ones from those left out:

    python -m benchmarks.attacks.synthetic --model DIR --text wikitext2 --length 32 \\
        --canaries 100 --epochs 1,4 --generated 1000
"""

import argparse
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from benchmarks.shared import loaded, parser_of, print_place, read_texts, table, with_range
from lightning_fedleak.attacks.memorization import Combined
from lightning_fedleak.cli.commands.options import parse
from lightning_fedleak.cli.commands.synthetic import COPY_SCORES, ask_auxiliary, compare_generated
from lightning_fedleak.cli.studies.references import Recipe, fit_texts
from lightning_fedleak.engine.channels.released.audit import Audit
from lightning_fedleak.engine.channels.released.pool import Pool
from lightning_fedleak.evaluation.canaries import sampled_canaries
from lightning_fedleak.evaluation.metrics.released import membership_values
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.snapshots import ReleasedModel
from lightning_fedleak.model.taps import Text, token_log_probs

SMOKE = (
    "--model {model} --text {text} --rows 24 --length 24 --epochs 0,1 --generated 16 --auxiliary 1",
    "--model {model} --text {text} --rows 12 --length 16 --epochs 1 --generated 12 --auxiliary 1 "
    "--canaries 12 --times 1",
)
NAMES = "combined", *COPY_SCORES
BEGIN = 8  # tokens of another text that a canary begins with; its kind shows, its words vary
AT_ONCE = 100  # texts that are written together; more take memory and are no faster


def text_of(ids: Sequence[int]) -> Text:
    """Return a text whose first token, with which every text begins, has no label."""
    row = torch.tensor(ids)
    return Text(row, torch.cat([row.new_tensor([-100]), row[1:]]))


def drawn_rows(
    options: argparse.Namespace, tokenizer: Any, seed: int, part: slice, length: int
) -> list[list[int]]:
    """Return a part of the texts in the order of a seed as ids, cut to a length."""
    words = [words for words in dict.fromkeys(read_texts(options.text)) if len(words) > 40]
    order = np.random.default_rng([seed, 3]).permutation(len(words))[part]
    settings = {"truncation": True, "max_length": length - 1, "add_special_tokens": False}
    rows = tokenizer([words[i] for i in order], **settings)["input_ids"]
    return [[tokenizer.bos_token_id, *row] for row in rows]


def drawn_pool(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, seed: int) -> Pool:
    """Return as many rows as others, dealt by a coin."""
    rows = drawn_rows(options, tokenizer, seed, slice(2 * options.rows), options.length)
    texts = [text_of(row) for row in rows]
    half = len(texts) // 2
    return Pool.of_sides(texts[:half], texts[half:])


def written(
    model: torch.nn.Module, n: int, tokenizer: PreTrainedTokenizerBase, length: int
) -> list[Text]:
    """Return texts that the model writes, each up to its end-of-text token."""
    texts: list[Text] = []
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    while len(texts) < n:
        start = torch.full((min(AT_ONCE, n - len(texts)), 1), bos)
        settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_length": length}
        mask = torch.ones_like(start)
        rows = model.generate(start, attention_mask=mask, pad_token_id=eos, **settings).tolist()
        for row in rows:
            end = row.index(eos, 1) if eos in row[1:] else len(row)
            texts.append(text_of(row[: max(end, 2)]))
    return texts


def fitted(
    options: argparse.Namespace, base: Any, rows: list[Text], tokenizer: Any, seed: int
) -> Iterator[tuple[int, Anatomy]]:
    """Yield each number of epochs, and a copy of the base that was trained for so many."""
    for epochs in map(int, options.epochs.split(",")):
        torch.manual_seed(seed)
        model = copy.deepcopy(base)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        recipe = Recipe(epochs, 8, options.lr)
        yield epochs, fit_texts(model, rows, recipe, "causal", tokenizer)


def auc_cell(values: dict[str, float]) -> str:
    """Return the AUC and its interval as text."""
    return with_range(*(values[f"auc{end}"] for end in ("", "_low", "_high")))


def play(options: argparse.Namespace, seed: int) -> None:
    """Train, write and ask for each number of epochs, and print a table."""
    tokenizer, base = loaded(options.model)
    pool = drawn_pool(options, tokenizer, seed)
    rows = [text for text, inside in zip(pool.texts, pool.trains, strict=True) if inside]
    defaults, cells = defaults_of(options, seed), []
    sizes = sorted(map(int, options.generated.split(",")))
    for epochs, anatomy in fitted(options, base, rows, tokenizer, seed):
        texts = written(anatomy.model, sizes[-1], tokenizer, options.length)
        for size in sizes:
            before, after = ask_auxiliary(pool.texts, texts[:size], defaults)
            audit = Audit(pool, before, lambda ids: str(tokenizer.decode(ids)))
            result = audit.part("long", after, alpha=0.05 / len(NAMES))
            copied = compare_generated(result, texts[:size])
            scores = [auc_cell(result.values[name]) for name in NAMES]
            counts = f"{copied['members']:.0f} / {copied['others']:.0f}"
            cells.append([f"{epochs}", f"{size}", *scores, counts])
    lines = table(["epochs", "texts", *NAMES, "copied rows / others"], cells)
    n, n_others = int(result.sides.sum()), int((~result.sides).sum())
    print(f"\nSeed {seed}: {n} rows, {n_others} others\n\n{lines}")


def planted(
    options: argparse.Namespace, base: Any, tokenizer: PreTrainedTokenizerBase, seed: int
) -> dict[str, list[Text]]:
    """Return canaries of each kind."""
    further = slice(2 * options.rows, 2 * options.rows + options.canaries)
    starts = drawn_rows(options, tokenizer, seed, further, BEGIN)
    prompts = [torch.tensor(row) for row in starts if len(row) == BEGIN]
    ends = {"sampled": 0, "unlikely end": options.length // 3, "unlikely": options.length - 1}
    texts = {}
    for number, (kind, end) in enumerate(ends.items()):
        first = [torch.tensor([tokenizer.bos_token_id])] if kind == "unlikely" else prompts
        draw = {"prompts": first, "length": options.length, "unlikely_end": end}
        rows = sampled_canaries(base, options.canaries, seed=3 * seed + number, **draw)
        texts[kind] = [text_of(row.tolist()) for row in rows]
    return texts


def play_canaries(options: argparse.Namespace, seed: int) -> None:
    """Plant canaries, train, write and ask for each number of epochs, and print a table."""
    tokenizer, base = loaded(options.model)
    pool, canaries = drawn_pool(options, tokenizer, seed), planted(options, base, tokenizer, seed)
    rows = [text for text, inside in zip(pool.texts, pool.trains, strict=True) if inside]
    texts = [text for kind in canaries.values() for text in kind]
    coins = torch.from_numpy(np.random.default_rng([seed, 5]).random(len(texts)) < 0.5)
    train = rows + [text for text, coin in zip(texts, coins, strict=True) if coin] * options.times
    before = token_log_probs(find_anatomy(base), texts)
    cells = []
    for epochs, anatomy in fitted(options, base, train, tokenizer, seed):
        now = token_log_probs(anatomy, texts)
        generated = written(anatomy.model, int(options.generated), tokenizer, options.length)
        answers = before, ask_auxiliary(texts, generated, defaults_of(options, seed))[1]
        for number, kind in enumerate(canaries):
            side = torch.arange(len(texts)) // options.canaries == number
            row = [f"{epochs}", kind]
            for first, last in ((before, now), answers):
                released = ReleasedModel(last, first, torch.ones(len(texts))).rows(side)
                scores = Combined().score(released)
                row.append(auc_cell(membership_values(scores, coins[side], alpha=0.05 / 6)))
            cells.append([*row, f"{int(coins[side].sum())} / {int((~coins[side]).sum())}"])
    head = ["epochs", "canaries", "weights", "generated texts", "planted / left out"]
    print(f"\nSeed {seed}: {len(rows)} rows, {len(train)} with canaries\n\n{table(head, cells)}")


def defaults_of(options: argparse.Namespace, seed: int) -> argparse.Namespace:
    """Return what the command takes by default."""
    sources = [f"--{name}=x" for name in ("rows", "others", "generated")]
    defaults = parse(["synthetic", *sources, "--base", options.model, "--seed", str(seed)])
    defaults.epochs = options.auxiliary or defaults.epochs
    return defaults


def main() -> None:
    """Read the options, and play once for each seed."""
    parser = parser_of(
        __doc__, "model", "text", rows=(200, "on each side"),
        length=(48, "tokens of a text, at most"), lr=(5e-4, "of the model that writes"),
        epochs=("0,1,4,16", "of it, separated by commas"),
        generated=("500,2000", "texts, separated by commas"),
        auxiliary=(0, "its epochs; 0: the default"), canaries=(0, "of each kind; 0: none"),
        times=(4, "rows that hold a planted canary"), seeds="0",
    )  # fmt: skip
    options = parser.parse_args()
    print_place()
    for seed in map(int, options.seeds.split(",")):
        (play_canaries if options.canaries else play)(options, seed)


if __name__ == "__main__":
    main()
