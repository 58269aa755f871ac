"""What DP-SGD leaves of what training gains: batches, clipping, optimizer, unit and noise.

    # once; FEDLEAK_ASSETS
    python -m benchmarks.defenses.dp_utility features --model DIR --features FILE
    python -m benchmarks.defenses.dp_utility run --features FILE --out RUNS
    python -m benchmarks.defenses.dp_utility table --out RUNS

A linear head of 77 intents (banking77) on frozen states of a BERT (all-MiniLM-L6-v2 in the docs),
their mean over a text's tokens. ``features`` computes these once. ``run`` trains the head under
``DPSGD`` in Lightning's Trainer: every method at every epsilon, with every seed, the same texts and
epochs; it appends a line for each run to RUNS and leaves out what is there. ``plain`` has no
defence. Validation is banking77's test set. Learning rates, clip norms and bands were tried out on
it with seed 0, which in a run of one's own costs privacy unless the data are public.

Canaries: ``CANARIES`` training texts get a wrong intent at random, and half of these are trained
on, by a coin each. A canary's score is minus its loss after training. ``AUC`` is that of its coin.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import gzip
import io
import json
import logging
import math
import os
import platform
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_fedleak.defenses import DPSGD, DPAdamBC, ReleaseSettings, Users, noise_multiplier_for
from lightning_fedleak.evaluation.auditing import audit_one_run
from lightning_fedleak.evaluation.metrics import membership_rates
from lightning_fedleak.labs.correlated_noise import CorrelatedNoise
from lightning_fedleak.strategies import DefendedStrategy

SMOKE = (
    "features run table --model {model} --text {text} --features {out}/features.safetensors "
    "--methods large user banded --epsilons 8 --seeds 1 --epochs 1 --canaries 40 --out {out}/runs",
)

DATA = Path(os.environ.get("FEDLEAK_ASSETS", "../shared/assets")) / "data" / "banking77"
EPSILONS = (1.0, 2.0, 4.0, 8.0, math.inf)
DELTA, EPOCHS, CANARIES = 1e-5, 30, 300
SCALE, LARGE, ROWS = 4.0, 1000, 5
"""Norm of a text's features; rows of a large batch; rows of a user."""
RATES = {1.0: 2.25, 2.0: 4.0, 4.0: 7.0, 8.0: 11.0, math.inf: 19.0}
"""Learning rate of SGD by epsilon, with batches of LARGE and gradients clipped to CLIP."""
CLIP = 2.0
FASTER = 1.4
"""Times the learning rate, which correlated noise allows; beside it independent noise with it."""
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"adam": 0.02},
    "small": {"batch": 64, "rate": 64 / LARGE},
    "large": {},
    "auto": {"clip": "auto", "rate": 2.0},
    "layers": {"clip": {"head.weight": 1.94, "head.bias": 0.49}},
    "adam": {"adam": {1.0: 0.02, 2.0: 0.02, 4.0: 0.025, 8.0: 0.025, math.inf: 0.025}},
    "user": {"batch": LARGE // ROWS, "user": True},
    "fast": {"rate": FASTER},
    "banded": {"rate": FASTER, "noise": {"mechanism": "banded", "bands": 4}},
    "banded_inverse": {"rate": FASTER, "noise": {"mechanism": "banded_inverse", "bands": 32}},
}
NAMES = {
    "plain": "AdamW, no defence",
    "small": "batches of 64",
    "large": f"batches of {LARGE:,}",
    "auto": 'the same, `"auto"`',
    "layers": "the same, each layer clipped",
    "adam": "the same, `DPAdamBC`",
    "user": f"the same, users of {ROWS} texts",
    "fast": f"the same, {FASTER} times the learning rate",
    "banded": f'{FASTER} times, `"banded"`, 4 bands',
    "banded_inverse": f'{FASTER} times, `"banded_inverse"`, 32 bands',
}


class Places(Dataset[int]):
    """Which text: its features are looked up in the training step."""

    def __init__(self, places: Sequence[int]) -> None:
        self.places = [*places]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> int:
        return self.places[index]


class Head(L.LightningModule):
    """A linear classifier of features that it does not train."""

    def __init__(self, data: dict[str, Tensor], labels: Tensor, adam: float, rate: float) -> None:
        super().__init__()
        self.data, self.labels, self.adam, self.rate = data, labels, adam, rate
        self.head = nn.Linear(data["train"].shape[1], int(data["labels"].max()) + 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.private = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.data["train"][batch]), self.labels[batch])

    def configure_optimizers(self) -> Any:
        steps = self.trainer.estimated_stepping_batches
        optimizer: torch.optim.Optimizer
        if self.adam:
            kind: Any = DPAdamBC if self.private else torch.optim.AdamW
            more = {"floor": 0.5} if self.private else {}
            optimizer = kind(self.parameters(), lr=self.adam, weight_decay=0.0, **more)
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.rate)
        falls = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, int(steps))
        return [optimizer], [{"scheduler": falls, "interval": "step"}]


def rows_of(path: Path) -> list[tuple[str, str]]:
    """Texts and intents of one of banking77's files."""
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    rows = csv.DictReader(io.StringIO(lines, newline=""))
    return [(row["text"], row["category"]) for row in rows]


@torch.no_grad()
def states(model: nn.Module, ids: Sequence[list[int]]) -> Tensor:
    """(n, d) mean over each text's last hidden states; texts of one length at once, unpadded."""
    results = torch.zeros(len(ids), model.config.hidden_size)  # type: ignore[union-attr, arg-type]
    by_length = defaultdict(list)
    for place, local in enumerate(ids):
        by_length[len(local)].append(place)
    for places in by_length.values():
        for start in range(0, len(places), 64):
            some = places[start : start + 64]
            settings = torch.tensor([ids[i] for i in some])
            results[some] = model(input_ids=settings).last_hidden_state.mean(1)
    return results


def compute(options: argparse.Namespace) -> None:
    """Writes features and labels of both sets."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModel.from_pretrained(options.model, dtype=torch.float32).eval()
    if options.text:
        lines = Path(options.text).read_text("utf-8").splitlines() * 2
        sets = {"train": [(line, str(len(line) % 5)) for line in lines]}
        sets["test"] = sets["train"][: len(lines) // 2]
    else:
        sets = {"train": rows_of(DATA / "train.csv.gz"), "test": rows_of(DATA / "test.csv")}
    classes = sorted({intent for _, intent in sets["train"]})
    results = {}
    for name, rows in sets.items():
        ids = [tokenizer(text, truncation=True, max_length=64).input_ids for text, _ in rows]
        results[name] = SCALE * F.normalize(states(model, ids))
        labels = torch.tensor([classes.index(intent) for _, intent in rows])
        results["labels" if name == "train" else "test_labels"] = labels
    save_file(results, options.features)
    print(f"{options.features}: {len(results['train'])} and {len(results['test'])} texts")


def planted(data: dict[str, Tensor], canaries: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Labels with the canaries' wrong ones, which texts are canaries, and which of them are in."""
    generator = torch.Generator().manual_seed(seed)
    labels, classes = data["labels"].clone(), int(data["labels"].max()) + 1
    chosen = torch.randperm(len(labels), generator=generator)[:canaries]
    shift = torch.randint(1, classes, (canaries,), generator=generator)
    labels[chosen] = (labels[chosen] + shift) % classes
    return labels, chosen, torch.rand(canaries, generator=generator) < 0.5


@functools.cache
def multiplier(epsilon: float, rate: float, steps: int, mechanism: str, bands: int = 1) -> float:
    """Noise at which ``steps`` cost epsilon, by what the mechanism is accounted as."""
    if mechanism == "banded_inverse":
        return noise_multiplier_for(epsilon, DELTA, 1.0, 1)
    return noise_multiplier_for(epsilon, DELTA, bands * rate, math.ceil(steps / bands))


def one_run(
    data: dict[str, Tensor], method: str, epsilon: float, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Trains a head; what it is worth, and what its canaries tell."""
    local, epochs = METHODS[method], options.epochs
    labels, chosen, inside = planted(data, options.canaries, seed)
    output = set(chosen[~inside].tolist())
    places = [i for i in range(len(labels)) if i not in output]
    users = local.get("user", False)
    units = math.ceil(len(places) / ROWS) if users else len(places)
    batch = min(local.get("batch", LARGE), units // 4)
    adam = local.get("adam", 0.0)
    adam = adam[epsilon] if isinstance(adam, dict) else adam
    # A user's mean is under the noise of five times as many rows: as a row at a smaller epsilon.
    like = {8.0: 2.0, 4.0: 1.0, 2.0: 1.0}.get(epsilon, epsilon) if users else epsilon
    module = Head(data, labels, adam, RATES[like] * local.get("rate", 1.0))
    loader = DataLoader(Places(places), batch, shuffle=True)
    strategy: Any = "auto"
    sigma = 0.0
    if method == "plain":
        module.private = False
        L.seed_everything(seed, verbose=False)
    else:
        noise = local.get("noise", {"mechanism": "independent"})
        if epsilon < math.inf:
            per_epoch = max(1, round(units / batch))
            sigma = multiplier(epsilon, batch / units, epochs * per_epoch, **noise)
        unit: Any = "example"
        if users:
            mixed = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
            unit = Users((mixed % units).tolist(), rows_per_user=ROWS)
        bands = noise.get("bands")
        mechanism = None if bands is None else CorrelatedNoise(noise["mechanism"], bands)
        defense = DPSGD(
            local.get("clip", CLIP),
            sigma,
            target_delta=DELTA,
            max_physical_batch_size=LARGE * 2,
            unit=unit,
            release=ReleaseSettings(mechanism=mechanism),
        )
        strategy = DefendedStrategy("auto", [defense])
    start = time.process_time()
    L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, loader)
    seconds = time.process_time() - start
    if method != "plain":
        display = defense.accountant.epsilon(DELTA)
        assert display <= epsilon, (display, epsilon)
    with torch.no_grad():
        logits = module.head(data["test"])
        truth = data["test_labels"]
        canaries = module.head(data["train"][chosen])
        queried = F.cross_entropy(canaries, labels[chosen], reduction="none")
        loss = float(F.cross_entropy(logits, truth))
    return {
        "method": method,
        "epsilon": None if math.isinf(epsilon) else epsilon,
        "seed": seed,
        "sigma": sigma,
        "loss": loss,
        "accuracy": float((logits.argmax(1) == truth).float().mean()),
        "start": math.log(module.head.out_features),
        "chance": 1 / module.head.out_features,
        "auc": membership_rates(-queried, inside)["auc"].value,
        "audit": audit_one_run(-queried, inside, delta=DELTA).epsilon,
        "seconds": seconds,
        "epochs": epochs,
    }


def wanted(options: argparse.Namespace) -> Iterator[tuple[str, float, int]]:
    for seed in range(options.seeds):
        for method in dict.fromkeys(["plain", *options.methods]):
            for epsilon in [math.inf] if method == "plain" else options.epsilons:
                if "noise" not in METHODS[method] or epsilon < math.inf:
                    yield method, epsilon, seed


def known(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train(options: argparse.Namespace) -> None:
    data, path = load_file(options.features), Path(options.out)
    finished = {(r["method"], r["epsilon"] or math.inf, r["seed"]) for r in known(path)}
    for method, epsilon, seed in wanted(options):
        if (method, epsilon, seed) in finished:
            continue
        row = one_run(data, method, epsilon, seed, options)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        results = " ".join(f"{key} {row[key]:.4f}" for key in ("loss", "accuracy", "auc"))
        print(f"{method} epsilon {epsilon:g} seed {seed}: {results}", flush=True)


def spread(values: Sequence[float], form: str) -> str:
    """Mean, and half of what lies between the least and the most."""
    middle = format(statistics.mean(values), form)
    if len(values) < 2:
        return middle
    half = (max(values) - min(values)) / 2
    return f"{middle} ± {100 * half:.1f}" if form.endswith("%") else f"{middle} ± {half:{form}}"


def print_tables(
    results: Mapping[tuple[str, float], list[dict[str, Any]]],
    columns: Mapping[str, Callable[[list[dict[str, Any]]], str]],
    names: Mapping[str, str],
) -> None:
    """A table for each of ``columns``: the methods of ``names`` by epsilon, but for ``plain``."""
    epsilons = sorted({epsilon for method, epsilon in results if method != "plain"})
    heads = ["none" if math.isinf(epsilon) else f"{epsilon:g}" for epsilon in epsilons]
    for title, display in columns.items():
        print(f"\n| {title} | " + " | ".join(heads) + " |\n" + "|---" * (len(heads) + 1) + "|")
        for method, name in names.items():
            local = [results.get((method, epsilon), []) for epsilon in epsilons]
            if method != "plain" and any(local):
                cells = [display(runs) if runs else "" for runs in local]
                print(f"| {name} | " + " | ".join(cells) + " |")


def table(options: argparse.Namespace) -> None:
    """Methods by epsilon: means over seeds, and half of what lies between the least and the most.

    A gain is what a run gains over chance, of what the plain one gains. The audit is the largest
    one-run bound over seeds, at 95% for each.
    """
    rows = known(Path(options.out))
    results: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        results[row["method"], row["epsilon"] or math.inf].append(row)
    plain = results["plain", math.inf]
    best = {key: statistics.mean(row[key] for row in plain) for key in ("loss", "accuracy")}

    def gain(row: dict[str, Any]) -> float:
        return float((row["start"] - row["loss"]) / (row["start"] - best["loss"]))

    def hits(row: dict[str, Any]) -> float:
        return float((row["accuracy"] - row["chance"]) / (best["accuracy"] - row["chance"]))

    columns: dict[str, Callable[[list[dict[str, Any]]], str]] = {
        "gain in validation loss": lambda local: spread([*map(gain, local)], ".1%"),
        "gain in accuracy": lambda local: spread([*map(hits, local)], ".1%"),
        "accuracy": lambda local: spread([row["accuracy"] for row in local], ".3f"),
        "canaries' AUC": lambda local: spread([row["auc"] for row in local], ".2f"),
        "audit": lambda local: f"{max(row['audit'] for row in local):.2f}",
        "noise": lambda local: f"{local[0]['sigma']:.2f}",
        "seconds": lambda local: f"{statistics.median(row['seconds'] for row in local):.0f}",
        "seeds": lambda local: f"{len(local)}",
    }
    print(f"{platform.machine()}, one thread, {datetime.date.today()}; {len(rows)} runs")
    print(
        "without a defence: " + ", ".join(f"{k} {display(plain)}" for k, display in columns.items())
    )
    print_tables(results, columns, NAMES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", nargs="+", choices=("features", "run", "table"))
    parser.add_argument("--model", help="folder of a BERT and its tokenizer")
    parser.add_argument("--text", help="a text a line, in place of banking77 (to try the script)")
    parser.add_argument("--features", help="safetensors file")
    parser.add_argument("--out", help="file of runs, a line each")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--epsilons", nargs="+", type=float, default=[*EPSILONS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--canaries", type=int, default=CANARIES)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    for quantity in options.what:
        {"features": compute, "run": train, "table": table}[quantity](options)


if __name__ == "__main__":
    main()
