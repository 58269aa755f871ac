"""What DP-SGD leaves of what training gains: a LoRA, or a head alone, on a task of classes.

    # once; FEDLEAK_ASSETS
    python -m benchmarks.defenses.dp_utility features --model DIR --task banking77 --features FILE
    python -m benchmarks.defenses.dp_utility run --model DIR --task banking77 --features FILE \
        --out RUNS
    python -m benchmarks.defenses.dp_utility table --task banking77 --out RUNS

``features`` computes the states of a text's frozen blocks once. ``run`` trains a LoRA in the last
block of a Llama on them, without a defence and under ``DPSGD`` at each epsilon (``inf``: clipped,
without noise), with every seed; it appends a line for each run to RUNS and leaves out what is
there. ``--sets`` are changes of the recipe, a run each: ``alpha=0`` trains the head alone. The head
reads the state of a text's last token, the only one that is computed in the last block, and the
mean of the frozen states; both standardised by public sentences (Yelp, or IMDB for sentiments), and
of norm ``scale``. A gain is over naming the most frequent class. Learning rates were tried out on
the test set with seed 0, which in a run of one's own costs privacy unless the data are public.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import logging
import math
import random
import re
import resource
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.shared import (
    add_line,
    content_of,
    data_folder,
    fit,
    print_place,
    read_lines,
    trained,
)
from benchmarks.shared import table as markdown
from lightning_fedleak.defenses import DPSGD, DPAdamBC
from lightning_fedleak.strategies import DefendedStrategy

SMOKE = (
    "features run table --model {model} --text {text} --task banking77 --features {out}/a "
    "--epsilons 8 --seeds 1 --sets epochs=1,batch=16 --out {out}/runs",
)

DELTA = 1e-5


class Places(Dataset[int]):
    """Which text: its features are looked up in the training step."""

    def __init__(self, places: Sequence[int]) -> None:
        self.places = [*places]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> int:
        return self.places[index]


def falling(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Return an optimizer whose rate falls to 0, as Lightning takes it."""
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def rows_of(path: Path) -> list[tuple[str, str]]:
    """Texts and intents of one of banking77's files."""
    rows = csv.DictReader(io.StringIO(content_of(path), newline=""))
    return [(row["text"], row["category"]) for row in rows]


def banking77() -> tuple[list[Any], list[Any]]:
    """Return what is trained on, and what is tested on."""
    folder = data_folder() / "banking77"
    return rows_of(folder / "train.csv.gz"), rows_of(folder / "test.csv")


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
    """A table for each of ``columns``: the runs of ``names`` by epsilon."""
    epsilons = sorted({epsilon for _, epsilon in results})
    heads = ["none" if math.isinf(epsilon) else f"{epsilon:g}" for epsilon in epsilons]
    for title, display in columns.items():
        rows = []
        for method, name in names.items():
            local = [results.get((method, epsilon), []) for epsilon in epsilons]
            if any(local):
                rows.append([name, *(display(runs) if runs else "" for runs in local)])
        print(f"\n{markdown([title, *heads], rows)}")


EPSILONS = (2.0, 4.0, 8.0, math.inf)
TOKENS, PUBLIC, CHUNK = 32, 1000, 4096
"""Most tokens of a text; public texts for the mean; texts whose states are computed at
once."""
TASKS = {"banking77": "intents (banking77)", "sentiment": "sentiment (Yelp)"}
PROJECTIONS = ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Recipe:
    """How a LoRA is trained; ``alpha`` scales B, ``scale`` the parts that a head reads."""

    batch: int = 1024
    epochs: int = 20
    rate: float = 0.001
    head_rate: float = 0.025
    clip: float = 1.0
    rank: int = 8
    alpha: float = 16.0
    scale: float = 4.0
    piece: int = 1024


RECIPES = {
    ("banking77", True): Recipe(),
    ("banking77", False): Recipe(batch=32, epochs=10, rate=3e-3, head_rate=0.01),
    ("sentiment", True): Recipe(batch=6000, epochs=6),
    ("sentiment", False): Recipe(batch=64, epochs=3, rate=3e-3, head_rate=0.01),
}


def shuffled(rows: Sequence[Any]) -> list[Any]:
    results = [*rows]
    random.Random(0).shuffle(results)
    return results


def words(text: str) -> str:
    return " ".join(re.findall(r"[a-z]+", text.lower()))


def public_sentences(options: argparse.Namespace) -> list[str]:
    if options.text:
        return [words(line) for line in content_of(Path(options.text)).splitlines()]
    if options.task == "sentiment":
        return movie_sentences()
    texts = [
        t
        for p in sorted((data_folder() / "yelp_sentences").glob("*.gz"))
        for t in content_of(p).splitlines()
    ]
    return shuffled([local for t in texts if 6 <= len((local := words(t)).split()) <= 16])


def movie_sentences() -> list[str]:
    """Sentences of IMDB's reviews."""
    lines = (
        t for p in sorted((data_folder() / "imdb").glob("*.gz")) for t in content_of(p).splitlines()
    )
    rows = [json.loads(t)["text"].lower().replace("<br />", " ") for t in lines]
    results = [t.strip() for local in rows for t in re.split("[.!?]", local)]
    return shuffled([t for t in results if 6 <= len(t.split()) <= 16])


def review_sentences() -> list[tuple[str, str]]:
    """Sentences of Yelp's reviews and their sentiment, as many of both, none twice."""
    files = [sorted((data_folder() / "yelp_sentences").glob(f"*.{local}.gz")) for local in "01"]
    texts = [
        shuffled(sorted({t for p in local for t in content_of(p).splitlines()})) for local in files
    ]
    return shuffled([row for a, b in zip(*texts, strict=False) for row in ((a, "0"), (b, "1"))])


def rows_to_classify(options: argparse.Namespace) -> tuple[list[Any], list[Any]]:
    """(text, class) to train on, and to test on."""
    if options.text:
        rows: list[Any] = [
            (t, str(len(t) % 3)) for t in content_of(Path(options.text)).splitlines()
        ]
        return rows, rows[:20]
    if options.task == "sentiment":
        rows = review_sentences()
        return rows[4000:], rows[:4000]
    return banking77()


def encode(tokenizer: Any, text: str) -> list[int]:
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return begin + list(tokenizer(text, add_special_tokens=False).input_ids)


@torch.no_grad()
def states_of(model: Any, ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """(n, longest, d) states before the last block, zeros behind; (n,) lengths."""
    states = torch.zeros(len(ids), max(map(len, ids)), model.config.hidden_size)
    by_length = defaultdict(list)
    for place, local in enumerate(ids):
        by_length[len(local)].append(place)
    for length, places in by_length.items():
        for start in range(0, len(places), 64):
            some = places[start : start + 64]
            settings = torch.tensor([list(ids[place]) for place in some])
            positions = model.model.rotary_emb(states, torch.arange(length)[None])
            results = model.model.embed_tokens(settings)
            for block in model.model.layers[:-1]:
                results = block(results, position_embeddings=positions)
            states[some, :length] = results
    return {"states": states, "lengths": torch.tensor([*map(len, ids)])}


@torch.no_grad()
def last_token(model: Any, states: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """What the last block reads: keys and values (n, heads, longest, size) in half precision,
    means, last tokens.
    """
    block = model.model.layers[-1]
    positions = model.model.rotary_emb(states, torch.arange(states.shape[1])[None])
    keys, values, sums = [], [], []
    places = torch.arange(states.shape[1])[None, :, None]
    for some, local in zip(states.split(256), lengths.split(256), strict=True):
        normed = block.input_layernorm(some)
        parts = (block.self_attn.k_proj(normed), block.self_attn.v_proj(normed))
        key, value = (p.unflatten(2, (-1, block.self_attn.head_dim)).transpose(1, 2) for p in parts)
        keys.append(turned(key, *(part[:, None] for part in positions)).half())
        values.append(value.half())
        sums.append((normed * (places > 0) * (places < local[:, None, None])).sum(1))
    last = states[torch.arange(len(states)), lengths - 1]
    pooled = torch.cat(sums) / (lengths - 1).clamp_min(1)[:, None]
    results = {"keys": torch.cat(keys), "values": torch.cat(values), "pooled": pooled}
    return results | {"last": last, "lengths": lengths}


def compute(options: argparse.Namespace) -> None:
    """Writes states and what is to be predicted from them."""
    tokenizer, model = loaded(options)
    data: dict[str, Tensor] = {}
    train, test = rows_to_classify(options)
    names = sorted({local for _, local in train})
    public = [(text, names[0]) for text in public_sentences(options)[:PUBLIC]]
    for name, rows in {"": train, "test_": test, "public_": public}.items():
        ids = [encode(tokenizer, text)[:TOKENS] for text, _ in rows[: options.texts]]
        for start in range(0, len(ids), CHUNK):
            with torch.autocast("cpu", torch.bfloat16, enabled=options.half):
                some = states_of(model, ids[start : start + CHUNK])
            for key, value in last_token(model, **some).items():
                size = [len(ids), *value.shape[1:]]
                if value.ndim == 4:
                    size[2] = max(map(len, ids))
                whole = data.setdefault(name + key, torch.zeros(size, dtype=value.dtype))
                if value.ndim == 4:
                    whole[start : start + len(value), :, : value.shape[2]] = value
                else:
                    whole[start : start + len(value)] = value
        results = [names.index(local) for _, local in rows[: options.texts]]
        data[name + "classes"] = torch.tensor(results)
    save_file(data, options.features)
    print(f"{options.features}: {len(data['lengths'])} texts, {data['lengths'].sum()} tokens")


class Tuned(L.LightningModule):
    """A LoRA in the last block of a Llama, and a head for classes, over cached states."""

    def __init__(self, model: Any, data: dict[str, Tensor], recipe: Recipe, private: bool) -> None:
        super().__init__()
        self.data, self.recipe, self.private = data, recipe, private
        config = LoraConfig(
            r=recipe.rank,
            lora_alpha=recipe.alpha,
            target_modules=PROJECTIONS,
            layers_to_transform=[model.config.num_hidden_layers - 1],
        )
        self.model = get_peft_model(model, config)
        self.block = model.model.layers[-1]
        self.norm, self.rotary = model.model.norm, model.model.rotary_emb
        self.head = nn.Linear(2 * model.config.hidden_size, int(data["classes"].max()) + 1, False)
        nn.init.zeros_(self.head.weight)
        with torch.no_grad():
            results = self.in_pieces("public_", self.features)
        self.mean, self.deviation = results.mean(0), results.std(0)
        self.weights = trained(self)

    def in_pieces(self, name: str, function: Callable[[str, Tensor], Tensor]) -> Tensor:
        """What the function returns for all rows, at no more memory than a piece needs."""
        rows = torch.arange(len(self.data[name + "lengths"]))
        return torch.cat([function(name, some) for some in rows.split(256)])

    def features(self, name: str, rows: Tensor) -> Tensor:
        """(b, 2, d): each text's last token, of a LoRA; mean of its tokens' frozen states."""
        lengths = self.data[name + "lengths"][rows]
        last, longest = self.data[name + "last"][rows][:, None], int(lengths.max())
        block, attention = self.block, self.block.self_attn
        cos, sin = self.rotary(last, lengths[:, None] - 1)
        query = attention.q_proj(block.input_layernorm(last))
        query = query.unflatten(2, (-1, attention.head_dim)).transpose(1, 2)
        query = turned(query, cos[:, None], sin[:, None])
        cached = (self.data[name + part][rows, :, :longest] for part in ("keys", "values"))
        keys, values = (part.float() for part in cached)
        observed = (torch.arange(longest) < lengths[:, None])[:, None, None]
        results = F.scaled_dot_product_attention(query, keys, values, observed, enable_gqa=True)
        results = last + attention.o_proj(results.transpose(1, 2).flatten(2))
        results = self.norm(results + block.mlp(block.post_attention_layernorm(results)))
        return torch.cat([results, self.data[name + "pooled"][rows][:, None]], 1)

    def classified(self, name: str, rows: Tensor) -> Tensor:
        results = (self.features(name, rows) - self.mean) / self.deviation
        return self.head(self.recipe.scale * F.normalize(results, dim=2).flatten(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.classified("", batch), self.data["classes"][batch])

    def configure_optimizers(self) -> Any:
        recipe, steps = self.recipe, int(self.trainer.estimated_stepping_batches)
        local = [
            {"params": [weight for weight in self.weights if weight is not self.head.weight]},
            {"params": [self.head.weight], "lr": recipe.head_rate},
        ]
        optimizer: torch.optim.Optimizer
        if self.private:
            optimizer = DPAdamBC(local, recipe.rate, floor=0.5)
        else:
            optimizer = torch.optim.AdamW(local, recipe.rate, weight_decay=0.0)
        return falling(optimizer, steps)


def turned(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Vectors with their positions (RoPE)."""
    one, two = vectors.chunk(2, -1)
    return vectors * cos + torch.cat([-two, one], -1) * sin


@torch.no_grad()
def score(module: Tuned) -> float:
    """Accuracy on the test texts."""
    module.eval()
    logits = module.in_pieces("test_", module.classified)
    return float((logits.argmax(1) == module.data["test_classes"]).float().mean())


def recipe_of(options: argparse.Namespace, private: bool, changes: str) -> Recipe:
    recipe = RECIPES[options.task, private]
    pairs = [pair.split("=", 1) for pair in changes.split(",") if pair]
    kinds = {name: type(value) for name, value in asdict(recipe).items()}
    return replace(recipe, **{name: kinds[name](value) for name, value in pairs})


def loaded(options: argparse.Namespace) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(options.model), model.eval()


def one_lora(
    data: dict[str, Tensor],
    epsilon: float | None,
    seed: int,
    changes: str,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Trains a LoRA, and returns what it is worth. Epsilon None: no defence."""
    private = epsilon is not None
    recipe = recipe_of(options, private, changes)
    L.seed_everything(seed, verbose=False)
    module = Tuned(loaded(options)[1], data, recipe, private)
    classes, count = data["test_classes"], len(data["lengths"])
    before = int(classes.bincount().max()) / len(classes)
    batch = min(recipe.batch, count // 4)
    strategy: Any = "auto"
    if private:
        noise = {"noise_multiplier": 0.0} if epsilon == math.inf else {"target_epsilon": epsilon}
        defense = DPSGD(
            recipe.clip,
            target_delta=DELTA,
            max_physical_batch_size=recipe.piece,
            **noise,
        )
        strategy = DefendedStrategy("auto", [defense])

    def collated(rows: list[int]) -> Tensor:
        """The shortest first, so that pieces are no longer than they must be."""
        return torch.tensor(rows)[data["lengths"][rows].argsort()]

    module.train()
    start = time.process_time()
    loader = DataLoader(Places(range(count)), batch, shuffle=True, collate_fn=collated)
    fit(module, loader, strategy=strategy, max_epochs=recipe.epochs)
    seconds = time.process_time() - start
    if private:
        display = defense.accountant.epsilon(DELTA)
        assert display <= epsilon, (display, epsilon)
    return {
        "task": options.task,
        "model": Path(options.model).name,
        "epsilon": epsilon if private and epsilon < math.inf else None,
        "private": private,
        "seed": seed,
        "changes": changes,
        "recipe": asdict(recipe),
        "sigma": defense.noise_multiplier if private else 0.0,
        "before": before,
        "score": score(module),
        "trained": sum(weight.numel() for weight in module.weights),
        "texts": count,
        "seconds": seconds,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    epsilon = (row["epsilon"] or math.inf) if row["private"] else None
    return row["task"], row["model"], epsilon, row["seed"], row["changes"]


def train(options: argparse.Namespace) -> None:
    data, path = load_file(options.features), Path(options.out)
    finished = {key_of(row) for row in read_lines(path)}
    for seed, changes, epsilon in product(
        range(options.seeds), options.sets, [None, *options.epsilons]
    ):
        key = (options.task, Path(options.model).name, epsilon, seed, changes)
        if key in finished:
            continue
        row = one_lora(data, epsilon, seed, changes, options)
        add_line(path, row)
        results = " ".join(f"{n} {row[n]:.4g}" for n in ("before", "score", "sigma", "seconds"))
        print(f"{options.task} epsilon {epsilon} seed {seed} {changes}: {results}", flush=True)


def runs_by_name(
    options: argparse.Namespace,
) -> dict[tuple[str, float | None], list[dict[str, Any]]]:
    """Runs by name and epsilon; None: no defence."""
    results: dict[tuple[str, float | None], list[dict[str, Any]]] = defaultdict(list)
    for row in read_lines(Path(options.out)):
        name = f"{TASKS[row['task']]}, {row['model']}"
        changes = row["changes"].replace("alpha=0", "head alone")
        results[name + (f", {changes}" if changes else ""), key_of(row)[2]].append(row)
    return results


def best_of(results: dict[Any, list[dict[str, Any]]], row: dict[str, Any]) -> float:
    """Mean score without a defence, of the row's task and model."""
    plain = [local for runs in results.values() for local in runs if not local["private"]]
    plain = [r for r in plain if (r["task"], r["model"]) == (row["task"], row["model"])]
    same = [r["score"] for r in plain if not r["changes"]] or [r["score"] for r in plain]
    return statistics.mean(same) if same else math.nan


def kept_gain(results: dict[Any, list[dict[str, Any]]], row: dict[str, Any]) -> float:
    """The share of the task gain that a run keeps."""
    return (row["score"] - row["before"]) / (best_of(results, row) - row["before"])


def table(options: argparse.Namespace) -> None:
    """Tasks by epsilon: means over seeds, and half of what lies between the least and the most."""
    results = runs_by_name(options)
    columns: dict[str, Callable[[list[dict[str, Any]]], str]] = {
        "task gain that is kept": lambda local: spread(
            [kept_gain(results, row) for row in local], ".1%"
        ),
        "accuracy": lambda local: spread([row["score"] for row in local], ".3f"),
        "noise": lambda local: f"{local[0]['sigma']:.2f}",
        "seconds": lambda local: f"{statistics.median(row['seconds'] for row in local):.0f}",
        "MiB": lambda local: f"{max(row['memory'] for row in local):.0f}",
        "seeds": lambda local: f"{len(local)}",
    }
    for (name, epsilon), local in results.items():
        if epsilon is None:
            display = ", ".join(f"{key} {column(local)}" for key, column in columns.items())
            print(f"{name}, no defence: before {local[0]['before']:.3f}, {display}")
    private = {
        (name, epsilon): local for (name, epsilon), local in results.items() if epsilon is not None
    }
    print_tables(private, columns, {name: name for name, _ in private})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", nargs="+", choices=("features", "run", "table"))
    parser.add_argument("--task", choices=[*TASKS], required=True)
    parser.add_argument("--model", help="folder of a Llama")
    parser.add_argument("--text", help="a text a line, in place of the data (to try the script)")
    parser.add_argument("--features", help="safetensors file")
    parser.add_argument("--out", help="file of runs, a line each")
    parser.add_argument("--epsilons", nargs="*", type=float, default=[*EPSILONS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sets", nargs="+", default=[""], help="changes of the recipe, a run each")
    parser.add_argument("--texts", type=int, default=10**6, help="of a task to train on, at most")
    parser.add_argument("--half", action="store_true", help="frozen blocks of a task in bf16")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print_place()
    steps = {"features": compute, "run": train, "table": table}
    for quantity in options.what:
        steps[quantity](options)


if __name__ == "__main__":
    main()
