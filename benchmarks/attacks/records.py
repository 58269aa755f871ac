"""What trained weights give away of single rows: planted and found values, and references.

    python -m benchmarks.attacks.records --model DIR --text FILE --seeds 0,1

Texts of one length, the first half of each a prompt without loss. Names, numbers and codes are
planted in prompts and in labels; each is ranked among other values of its set after each epoch. In
the same texts with a number in each label, the numbers are compared as found ones, by their gain
beyond values like them. Last, the command lists whole texts, with and without references.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.shared import float_model, parser_of, print_place, read_texts, table
from lightning_fedleak.attacks.memorization import Entities, EntityGuess
from lightning_fedleak.cli.command_line import main as fedleak
from lightning_fedleak.evaluation.canaries import with_entities
from lightning_fedleak.evaluation.canaries.entities import EntitySet
from lightning_fedleak.evaluation.entities import EntityFinder, FoundEntities
from lightning_fedleak.evaluation.metrics.rates import proportion
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.model_runs import undisturbed
from lightning_fedleak.model.snapshots import CandidateSnapshot, Observation
from lightning_fedleak.model.taps import Text, token_log_probs
from lightning_fedleak.model.taps.tokens import candidate_log_probs

SMOKE = (
    "--model {model} --text {records} --texts 8 --count 2 --found 60 --epochs 1 --candidates 20 "
    "--length 40",
)

FIRST = (
    "Aaron Amir Bella Boris Dmitri Elena Farid Greta Hamid Ingrid Jonas Katya Lars Mona Nadia Rosa"
)
LAST = (
    "Abbott Brandt Dvorak Eriksen Gibbs Huber Ivanov Jarvis Keller Maddox Novak Petrov Rossi Weaver"
)
NUMBER = ("Please call me at {}.", "###-####")
KINDS = {
    "name": ("My name is {}", [f"{a} {b}." for a in FIRST.split() for b in LAST.split()]),
    "number": NUMBER,
    "code": ("My account code is {}.", "??####"),
}


def rows_of(options: argparse.Namespace, tokenizer: Any, n: int, seed: int) -> list[dict[str, Any]]:
    """Return n texts of one length, the first half of which is a prompt."""
    words, ids = read_texts(options.text), list[torch.Tensor]()
    for place in np.random.default_rng(seed).permutation(len(words)).tolist():
        tokens = tokenizer(words[place])["input_ids"][: options.length]
        ids += [torch.tensor(tokens)] if len(tokens) == options.length else []
        if len(ids) == n:
            half = torch.arange(options.length) < options.length // 2
            return [{"input_ids": row, "labels": row.masked_fill(half, -100)} for row in ids]
    raise SystemExit(f"{options.text} has {len(ids)} texts of {options.length} tokens, not {n}")


def epochs(options: argparse.Namespace, data: Any, seed: int) -> Iterator[tuple[int, Anatomy]]:
    """Yield a model before training (0) and after each epoch."""
    torch.manual_seed(seed)
    model = float_model(options.model)
    optimizer = torch.optim.AdamW(model.parameters(), options.lr)
    yield 0, find_anatomy(model)
    for epoch in range(options.epochs):
        model.train()
        for part in torch.randperm(len(data)).split(8):
            rows = [data[row] for row in part.tolist()]
            batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
            with torch.autocast("cpu", torch.bfloat16):
                model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        yield epoch + 1, find_anatomy(model)


def ranks(anatomy: Anatomy, values: EntitySet, candidates: int) -> EntityGuess:
    """Return the rank of each planted value."""
    answers = torch.zeros(len(values), candidates + 1)
    sizes, greedy = torch.zeros(len(values)).long(), torch.zeros(len(values)).bool()
    start = time.process_time()
    with undisturbed(anatomy), torch.autocast("cpu", torch.bfloat16):
        for row, entity in enumerate(values.entities):
            others = values.candidates(row, candidates)
            context, sizes[row] = values.token_ids[row][: entity.start], len(others) - 1
            said, greedy[row] = candidate_log_probs(anatomy, context, others)
            answers[row, : len(others)] = said
    seconds = (time.process_time() - start) / len(values)
    print(f"{seconds:.2f} s of processor a value of {candidates} candidates")
    guess: Any = Entities(candidates).run(
        Observation(candidates=CandidateSnapshot(answers, sizes, greedy))
    )
    return guess


def planted(options: argparse.Namespace, tokenizer: Any) -> list[list[str]]:
    """Return of each epoch, place and number of repetitions what ranks values have."""
    ranked: dict[tuple[int, str, int], list[tuple[int, bool]]] = {}
    for seed in options.seeds:
        rows = rows_of(options, tokenizer, options.texts + 6 * options.count, seed)
        more: Any = {"tokenizer": tokenizer, "count": options.count, "seed": seed}
        data = with_entities(rows, KINDS, **more)
        repeats = torch.tensor(data.entities.record.repeats) * data.entities.included
        for epoch, anatomy in epochs(options, data, seed):
            if epoch:
                guess = ranks(anatomy, data.entities, options.candidates)
                groups = zip(data.entities.entities, repeats.tolist(), strict=True)
                places = [(epoch, entity.place, times) for entity, times in groups]
                results = zip(guess.ranks.tolist(), guess.greedy.tolist(), strict=True)
                for place, result in zip(places, results, strict=True):
                    ranked.setdefault(place, []).append(result)
    lines = []
    for (epoch, place, times), values in sorted(ranked.items()):
        n, first = len(values), sum(rank == 1 for rank, _ in values)
        ends, written = proportion(first, n), sum(one for _, one in values)
        median = float(np.median([rank for rank, _ in values]))
        cells = [f"{first} / {n} ({ends.low:.2f} to {ends.high:.2f})", f"{median:g}"]
        lines.append([f"{epoch}", f"{place} x{times}", *cells, f"{written} / {n}"])
    return lines


def found(options: argparse.Namespace, tokenizer: Any) -> list[list[str]]:
    """Return of each epoch the AUC of numbers that stand in labels, beside those left out."""
    lines = []
    for seed in options.seeds:
        rows = rows_of(options, tokenizer, options.found, seed)
        more: Any = {"tokenizer": tokenizer, "count": options.found, "seed": seed}
        data = with_entities(rows, {"phone": NUMBER}, ["label"], (1,), **more)
        half = torch.arange(options.length) < options.length // 2
        texts = [Text(ids, ids.masked_fill(half, -100)) for ids in data.entities.token_ids]
        members, pool = data.entities.included, FoundEntities(EntityFinder(["phone"], [tokenizer]))
        pool.locate([text for text, _ in pool.counting(zip(texts, members.tolist(), strict=True))])
        everyone, answers = torch.arange(len(texts)), list[Any]()
        for epoch, anatomy in epochs(options, data, seed):
            answers.append(token_log_probs(anatomy, [text.whole for text in texts]))
            if epoch:
                told = pool.compare(answers[-1], answers[0], everyone, members)
                values: Any = told["entity/phone/label"]
                ends = "{auc:.3f} ({auc_low:.2f} to {auc_high:.2f})".format(**values)
                lines.append([f"{seed}", f"{epoch}", f"{values['members']:.0f}", ends])
    return lines


def references(options: argparse.Namespace, tokenizer: Any, folder: Path) -> None:
    """Let the command list texts of which half were trained on, all tokens of which are labels."""
    rows = [row["input_ids"] for row in rows_of(options, tokenizer, options.found, 0)]
    half = options.found // 2
    for name, part in (("members", rows[:half]), ("others", rows[half:])):
        lines = (json.dumps(dict.fromkeys(("input_ids", "labels"), row.tolist())) for row in part)
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    data = [{"input_ids": row, "labels": row} for row in rows[:half]]
    *_, (_, anatomy) = epochs(argparse.Namespace(**vars(options) | {"epochs": 1}), data, 0)
    anatomy.model.save_pretrained(folder / "model")
    sides = [f"--{name}={folder / name}.jsonl" for name in ("members", "others", "records")]
    recipe = ["--references=2", "--epochs=1", "--batch-size=8", f"--lr={options.lr}"]
    places = [f"--model={folder / 'model'}", f"--base={options.model}"]
    fedleak(["memorization", "--drawn", "--no-account", *places, *sides, *recipe])


def main() -> None:
    """Read the options, and print three results."""
    options = parser_of(
        __doc__, "model", "text", texts=(90, "without a planted value"), seeds="0",
        count=(12, "values of each kind and place"), found=(240, "texts with a found value"),
        length=(64, "tokens of a text"), candidates=(100, "of each planted value"),
        epochs=(3, "of a training"), lr=(2e-4, "of AdamW"),
    ).parse_args()  # fmt: skip
    options.seeds = [*map(int, options.seeds.split(","))]
    print_place()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    head = ("epoch", "place, times", "first (95%)", "median rank", "greedy")
    print(table(head, planted(options, tokenizer)), flush=True)
    head = ("seed", "epoch", "values trained on", "AUC (97.5%)")
    print(table(head, found(options, tokenizer)), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        references(options, tokenizer, Path(folder))


if __name__ == "__main__":
    main()
