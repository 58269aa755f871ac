"""How long the attacks on the head's gradient take, in units of reading it once.

The unit is ``grad.sum(1)``. FlatChat, the sign readout and the learned readout take turns with it
in one process; medians of the processor time of this thread, over vocabularies and widths:

    OMP_NUM_THREADS=1 python -m benchmarks.cost.read_speed
    OMP_NUM_THREADS=1 python -m benchmarks.cost.read_speed --model DIR --text FILE  # real gradients

Without ``--model`` the gradient is that of a head whose hidden states lie on one side, as those of
trained models do, and whose predictions follow Zipf's law, on 512 tokens drawn from these
predictions. Every attack is run through its public ``run``. F1 is printed to show that what is
timed does its work.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.anatomy import HEAD_WEIGHT
from lightning_fedleak.attacks import AlignedFlatChat, FlatChat, PublicText, gradient_of
from lightning_fedleak.attacks.words.aligned_readout import rehearse
from lightning_fedleak.attacks.words.aligned_rows import separating_direction
from lightning_fedleak.attacks.words.public_gradients import (
    GradientParts,
    head_gradient,
    log_partitions,
)
from lightning_fedleak.metrics import precision_recall_f1, word_counts
from lightning_fedleak.snapshots import GradientSnapshot, Observation, Stage

SMOKE = ("--repeats 1 --vocabularies 512 --widths 16",)

VOCABULARIES = (16_384, 32_768, 65_536, 131_072, 262_144)
WIDTHS = (256, 512, 1024)
AT_MOST = {"flatchat": 6, "sign": 6, "learned": 40}
NONE = PublicText([[0, 1]])


@dataclass(frozen=True)
class Case:
    """A gradient, the types behind it, and the attacks, ready to run."""

    gradient: Tensor
    types: Tensor
    attacks: dict[str, FlatChat | AlignedFlatChat]


@dataclass(frozen=True)
class Head:
    """A head with Zipf's law in its predictions, and states that share a direction."""

    weight: Tensor
    mean: Tensor

    @classmethod
    def of(cls, vocab: int, width: int, generator: torch.Generator) -> Head:
        mean = F.normalize(torch.randn(width, generator=generator), dim=0)
        rank = torch.randperm(vocab, generator=generator) + 2.7
        weight = torch.randn(vocab, width, generator=generator).mul_(2 * width**-0.5)
        weight.addr_(-rank.log() - weight @ mean, mean)
        return cls(weight, mean)

    def states(self, n: int, generator: torch.Generator) -> Tensor:
        """(n, d), in 48 clusters."""
        width = len(self.mean)
        topics = F.normalize(torch.randn(48, width, generator=generator), dim=1)
        own = F.normalize(torch.randn(n, width, generator=generator), dim=1)
        chosen = topics[torch.randint(48, (n,), generator=generator)]
        away = chosen + own
        away -= (away @ self.mean)[:, None] * self.mean
        return self.mean + 0.8 * away

    def parts(self, n: int, length: int, generator: torch.Generator) -> GradientParts:
        """Sentences of ``length`` tokens drawn from the head's own predictions."""
        hidden = self.states(n, generator)
        labels = torch.cat(
            [
                F.linear(h, self.weight).softmax(1).multinomial(1, generator=generator)[:, 0]
                for h in hidden.split(32)
            ]
        )
        none = labels[:0]
        return GradientParts(
            hidden,
            labels,
            torch.arange(n) // length,
            log_partitions(hidden, self.weight),
            none,
            hidden[:0],
            none,
            none.bool(),
        )


def synthetic(vocab: int, width: int) -> Case:
    """Attacks calibrated on 1,024 public tokens, and a gradient of 512 others."""
    generator = torch.Generator().manual_seed(0)
    head = Head.of(vocab, width, generator)
    public = head.parts(1024, 32, generator)
    private = head.parts(512, 64, generator)
    types = private.labels.unique()
    sign, learned = (AlignedFlatChat(NONE, readout=r) for r in ("sign", "learned"))
    u = separating_direction(public.hidden)
    state = {"aligned_at": torch.tensor(0), "u": u, "rounding": torch.tensor(0.0)}
    sign.load_state_dict(state)
    rehearsed = rehearse(public, head.weight, None, generator, n_directions=learned.n_directions)
    learned.load_state_dict({"aligned_at": torch.tensor(0)} | rehearsed.tensors())
    gradient = head_gradient(
        private.hidden, private.labels, head.weight, log_partition=private.log_partition
    )
    gradient /= len(private.labels)
    flat = FlatChat(n_types=float(len(types)))
    return Case(gradient, types, {"flatchat": flat, "sign": sign, "learned": learned})


def real(folder: str, text: str) -> Iterator[tuple[str, Case]]:
    """Batches of a text under a real model; the first 400 lines are the adversary's."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lightning_fedleak.anatomy import find_anatomy

    anatomy = find_anatomy(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with Path(text).open(encoding="utf-8") as file:
        lines = [line for line in itertools.islice(file, 1000) if len(line) > 200]
    public = PublicText(lines[:400], tokenizer)
    attacks: dict[str, FlatChat | AlignedFlatChat] = {
        "flatchat": FlatChat(public, shapes=((4, 25), (16, 50))),
        "sign": AlignedFlatChat(public, readout="sign"),
        "learned": AlignedFlatChat(public, calibration_tokens=4000),
    }
    for attack in attacks.values():
        attack.prepare(anatomy)
    for size, length in ((8, 25), (8, 64), (32, 100)):
        private = PublicText(lines[400:], tokenizer)
        batch = private.batch(size, length, torch.Generator().manual_seed(0))
        gradient = gradient_of(anatomy, batch, [HEAD_WEIGHT])[HEAD_WEIGHT]
        yield f"{size} x {length}", Case(gradient, batch.target_ids().unique(), attacks)


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


def measure(case: Case, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of ``read`` and of each attack; and each attack's F1."""
    vocab = len(case.gradient)
    view = Observation(
        (GradientSnapshot(tensors={HEAD_WEIGHT: case.gradient}, step=0, stage=Stage.SHARED),)
    )
    runs: dict[str, Callable[[], object]] = {"read": lambda: case.gradient.sum(1)}
    f1 = {}
    for name, attack in case.attacks.items():
        runs[name] = lambda a=attack: a.run(view)
        counts = word_counts(attack.run(view), case.types, vocab)
        f1[name] = precision_recall_f1(counts)["f1"].value
    with torch.no_grad():
        return medians(runs, repeats), f1


def line(name: str, case: Case, repeats: int) -> dict[str, float]:
    """Prints a row of the table; returns the seconds."""
    seconds, f1 = measure(case, repeats)
    vocab, width = case.gradient.shape
    cells = [name] * bool(name) + [f"{vocab:,}", f"{width:,}", f"{seconds['read'] * 1e3:.2f} ms"]
    for attack in case.attacks:
        ratio = seconds[attack] / seconds["read"]
        over = " (over)" if ratio > AT_MOST[attack] else ""
        cells.append(f"{seconds[attack] * 1e3:.1f} ms, **{ratio:.1f}**{over}")
    cells.append(", ".join(f"{x:.2f}" for x in f1.values()))
    print("| " + " | ".join(cells) + " |", flush=True)
    return seconds


def growth(found: dict[tuple[int, int], dict[str, float]]) -> None:
    """Prints how much longer the largest vocabulary takes than the smallest; likewise widths."""
    for axis, label in ((0, "V"), (1, "d")):
        sizes = sorted({key[axis] for key in found})
        low, high = sizes[0], sizes[-1]
        if low == high:
            continue
        print(f"\n{label} x {high / low:g} takes")
        for other in sorted({key[1 - axis] for key in found}):
            keys = [(size, other) if axis == 0 else (other, size) for size in (low, high)]
            less, more = (found[key] for key in keys)
            times = ", ".join(f"{name} x {more[name] / less[name]:.1f}" for name in less)
            print(f"  {'dV'[axis]} = {other:,}: {times}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--model", help="folder of a causal LM")
    parser.add_argument("--text", help="a file of long lines")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.platform()}, 1 thread, torch {torch.__version__}, {datetime.date.today()}\n")
    first = "| batch " if arguments.model else ""
    print(first + "| V | d | `grad.sum(1)` | FlatChat | sign | learned | F1 of each |")
    print("|---" * bool(first) + "|---|---|---|---|---|---|---|")
    if arguments.model:
        for name, case in real(arguments.model, arguments.text):
            line(name, case, arguments.repeats)
        return
    found = {}
    for vocab, width in itertools.product(arguments.vocabularies, arguments.widths):
        found[vocab, width] = line("", synthetic(vocab, width), arguments.repeats)
    growth(found)


if __name__ == "__main__":
    main()
