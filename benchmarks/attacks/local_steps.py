"""What federated averaging leaves to word recovery: several local steps in place of one gradient.

    python -m benchmarks.attacks.local_steps
    python -m benchmarks.attacks.local_steps --model DIR --text FILE --public FILE --rounds 20

For each optimizer (SGD, SGD with momentum 0.9, Adam) and number of local steps, a client starts
from the same weights, trains on private text, and shares its weight change in units of a gradient,
``(before - after) / learning rate``. Mean F1 over rounds with a 95% interval (normal), against the
words of *all* the round's steps.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import platform
import statistics
import warnings

import lightning.pytorch as L
import torch

from benchmarks.attacks.word_recovery import guessed
from lightning_fedleak import AlignedFlatChat, FlatChat, PublicText
from lightning_fedleak.anatomy import EMBEDDING_WEIGHT, HEAD_WEIGHT, find_anatomy
from lightning_fedleak.batches import read_batch
from lightning_fedleak.finetuning.lightning import CausalLMFineTuning, TextDataModule
from lightning_fedleak.metrics import precision_recall_f1, word_counts
from lightning_fedleak.snapshots import Observation, Stage
from lightning_fedleak.taps.gradients import UpdateTap

SMOKE = ("--rounds 2 --steps 1 2 --batch-size 2 --length 8",)

OPTIMIZERS = {
    "SGD": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "SGD, momentum 0.9": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "Adam": lambda p, lr: torch.optim.Adam(p, lr=lr / 5),
}


def one_round(module, batches, make, lr):
    """Trains a copy on ``batches``; returns its update and the true types."""
    client = copy.deepcopy(module)
    anatomy = find_anatomy(client)
    roles = {r: anatomy.parameter(r) for r in (HEAD_WEIGHT, EMBEDDING_WEIGHT)}
    tap = UpdateTap(roles, tied=anatomy.tied)
    optimizer = make([p for p in client.parameters() if p.requires_grad], lr)
    tap.begin()
    for batch in batches:
        optimizer.zero_grad()
        client.model(**batch).loss.backward()
        optimizer.step()
    rate = optimizer.param_groups[0]["lr"]
    update = tap.end(0, Stage.SHARED, learning_rate=rate, local_steps=len(batches))
    truth = torch.cat([read_batch(b, anatomy.kind).target_ids() for b in batches]).unique()
    return update, truth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id; default the embedded model")
    parser.add_argument("--text", help="private text; default the embedded messages")
    parser.add_argument("--public", help="public text; default sampled from the model")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-4, help="of SGD; Adam gets a fifth")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    L.seed_everything(0, verbose=False)

    module = CausalLMFineTuning(arguments.model)
    data = TextDataModule(
        arguments.model, arguments.text, batch_size=arguments.batch_size, length=arguments.length
    )
    data.setup("fit")
    anatomy = find_anatomy(module)
    public: PublicText
    if arguments.public:
        texts = TextDataModule(arguments.model, arguments.public, length=arguments.length)
        texts.setup("fit")
        public = PublicText([b["input_ids"][0].tolist() for b in texts.train_dataloader()])
    else:
        public = PublicText.sampled_from(anatomy, 256, arguments.length, seed=0)
    attacks = [
        FlatChat(public),
        AlignedFlatChat(public, readout="sign", name="aligned, sign"),
        AlignedFlatChat(public, name="aligned, learned"),
    ]
    for attack in attacks:
        attack.prepare(anatomy)

    print(f"{platform.platform()}, torch {torch.__version__}, {datetime.date.today()}, ", end="")
    print(f"{arguments.batch_size} x {arguments.length} a step, SGD lr {arguments.lr}\n")
    print("| optimizer | steps | types | " + " | ".join(a.name for a in attacks) + " |")
    print("|---|---|---|" + "---|" * len(attacks))
    for name, make in OPTIMIZERS.items():
        for steps in arguments.steps:
            scores: dict[str, list[float]] = {a.name: [] for a in attacks}
            types = []
            stream = _forever(data)
            for _ in range(arguments.rounds):
                batches = [next(stream) for _ in range(steps)]
                update, truth = one_round(module, batches, make, arguments.lr)
                types.append(len(truth))
                for attack in attacks:
                    guess = guessed(attack, Observation((update,)))
                    counts = word_counts(guess, truth, anatomy.vocab_size)
                    scores[attack.name].append(precision_recall_f1(counts)["f1"].value)
            cells = [_cell(scores[a.name]) for a in attacks]
            print(f"| {name} | {steps} | {statistics.mean(types):.0f} | {' | '.join(cells)} |")


def _forever(data):
    while True:
        yield from data.train_dataloader()


def _cell(values: list[float]) -> str:
    half = 1.96 * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {half:.3f}"


if __name__ == "__main__":
    main()
