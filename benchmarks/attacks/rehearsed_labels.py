"""Labels that ``RehearsedLabels`` reads, beside what it names without the batch's own gradient.

    python -m benchmarks.attacks.rehearsed_labels --model DIR --bos 1
    python -m benchmarks.attacks.rehearsed_labels --model DIR --setups "lora 8 o,down" --shape 8x64

A set-up of ``benchmarks.attacks.setups`` takes ``--warm`` steps of AdamW on public text. The attack
then rehearses on public text, and reads the gradients of ``--batches`` private batches. The last
three columns are told the number of types: with the batch's own gradient, with that of another
batch, and the most frequent types of the public text, which need no gradient. What the attack shows
of a batch is the difference between the first of them and the others.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from contextlib import suppress
from datetime import date

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.attacks.setups import SETUPS, mean_and_half, tokens, warm
from lightning_fedleak.anatomy import find_anatomy
from lightning_fedleak.attacks import PublicText, RehearsedLabels
from lightning_fedleak.snapshots import GradientSnapshot, Observation, Stage, UnusableObservation

SMOKE = (
    "--model {model} --private {text} --public {text} --shape 2x8 --batches 2 --warm 1 "
    "--rehearsals 12 --setups adapters",
)


def f1(named: torch.Tensor, truth: set[int]) -> float:
    found = set(named.tolist())
    return 2 * len(found & truth) / (len(found) + len(truth))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--private", default="imdb")
    parser.add_argument("--public", default="wikitext2")
    parser.add_argument("--shape", default="4x32")
    parser.add_argument("--rehearsed-shapes", nargs="*", default=None, metavar="TEXTSxTOKENS")
    parser.add_argument("--setups", nargs="+", default=["adapters"], choices=SETUPS)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--rehearsals", type=int, default=48)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--bos", type=int)
    parser.add_argument("--dtype", default="float32", help="of model and gradients")
    parser.add_argument("--pool", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.device, options.head = "cpu", "next"
    torch.set_num_threads(1)
    print(f"# {platform.machine()}, one thread, {date.today()}")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts, length = map(int, options.shape.split("x"))
    private = [ids for ids in tokens(options.private, tokenizer, options) if len(ids) >= length]
    public = tokens(options.public, tokenizer, options)
    shapes = options.rehearsed_shapes or [options.shape]
    for setup in options.setups:
        torch.manual_seed(options.seed)
        plain = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        model = SETUPS[setup](plain).to(getattr(torch, options.dtype))
        warm(model, public, texts, length, options)
        anatomy = find_anatomy(model)
        attack = RehearsedLabels(
            PublicText(public),
            shapes=[tuple(map(int, s.split("x"))) for s in shapes],
            rehearsals=options.rehearsals,
            seed=options.seed,
        )
        began = time.process_time()
        attack.prepare(anatomy)
        calibration, began = time.process_time() - began, time.process_time()
        guesses, scores, truths = {}, [], []
        for i in range(options.batches):
            ids = torch.tensor([row[:length] for row in private[i * texts : (i + 1) * texts]])
            model.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            gradients = {n: anatomy.parameter(n).grad for n in attack.needs(anatomy).gradients}
            snapshot = GradientSnapshot(
                0, Stage.SHARED, {n: g.clone() for n, g in gradients.items()}
            )
            scores.append(attack._readout.probabilities(snapshot.tensors))  # also where unknown
            with suppress(UnusableObservation):
                guesses[i] = attack.run(Observation((snapshot,)))
            truths.append(set(ids[:, 1:].flatten().tolist()))
        frequent = torch.bincount(torch.cat([torch.tensor(ids) for ids in public]))
        others = scores[1:] + scores[:1]
        columns = {
            "attack": [f1(g.types, truths[i]) for i, g in guesses.items()],
            "types told": [
                f1(p.topk(len(t)).indices, t) for p, t in zip(scores, truths, strict=True)
            ],
            "another gradient": [
                f1(p.topk(len(t)).indices, t) for p, t in zip(others, truths, strict=True)
            ],
            "frequency": [f1(frequent.topk(len(t)).indices, t) for t in truths],
        }
        seconds = (time.process_time() - began) / len(truths)
        print(f"# {setup}: calibration {calibration:.0f} s of a core, a look {seconds:.1f} s")
        named = sum(len(g.types) for g in guesses.values()) / max(1, len(guesses))
        types = sum(map(len, truths)) / len(truths)
        for name, values in columns.items():
            mean, half = mean_and_half(values) if values else (math.nan, math.nan)
            sizes = f"{types:.0f} types" + f", {named:.0f} named" * (name == "attack")
            rounds = f"{len(truths) - len(values)} of {len(truths)} unknown"
            print(f"{setup} {options.shape} {name}: F1 {mean:.3f} +- {half:.3f} | {sizes} {rounds}")


if __name__ == "__main__":
    main()
