"""What DP-SGD leaves of what training gains: a LoRA, or a head alone, on the sentiment of texts.

    # once; FEDLEAK_ASSETS
    python -m benchmarks.defenses.dp_utility features --model DIR --features FILE
    python -m benchmarks.defenses.dp_utility run --model DIR --features FILE --out RUNS
    python -m benchmarks.defenses.dp_utility table --out RUNS

``features`` computes the states of a text's frozen blocks once. ``run`` trains a LoRA in the last
block of a Llama on them, without a defence and under ``DPSGD`` at each epsilon (``inf``: clipped,
without noise), with every seed; it appends a line for each run to RUNS and leaves out what is
there. ``--sets`` are changes of the recipe, a run each: ``alpha=0`` trains the head alone. The head
reads the state of a text's last token, the only one that is computed in the last block, and the
mean of the frozen states; both standardised by public sentences (IMDB), and of norm ``scale``. A
gain is over naming the most frequent class. Learning rates were tried out on the test set with
seed 0, which in a run of one's own costs privacy unless the data are public.
"""

import argparse
import json
import math
import random
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
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
from torch.utils.data import DataLoader

from benchmarks import shared
from lightning_fedleak.defenses import DPSGD, DPAdamBC
from lightning_fedleak.strategies import DefendedStrategy

SMOKE = (
    "features run table --model {model} --text {text} --features {out}/a "
    "--epsilons 8 --seeds 1 --sets epochs=1,batch=16 --out {out}/runs",
)

DELTA = 1e-5


def falling(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Return an optimizer whose rate falls to 0, as Lightning takes it."""
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def spread(values: Sequence[float], form: str) -> str:
    """Mean, and half of what lies between the least and the most."""
    middle = format(statistics.mean(values), form)
    if len(values) < 2:
        return middle
    half = (max(values) - min(values)) / 2
    return f"{middle} ± {100 * half:.1f}" if form.endswith("%") else f"{middle} ± {half:{form}}"


EPSILONS = (2.0, 4.0, 8.0, math.inf)
TOKENS, PUBLIC, CHUNK = 32, 1000, 4096
"""Most tokens of a text; public texts for the mean; texts whose states are computed at
once."""
PROJECTIONS = ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Recipe:
    """How a LoRA is trained; ``alpha`` scales B, ``scale`` the parts that a head reads."""

    batch: int = 6000
    epochs: int = 6
    rate: float = 0.001
    head_rate: float = 0.025
    clip: float = 1.0
    rank: int = 8
    alpha: float = 16.0
    scale: float = 4.0
    piece: int = 1024


PLAIN = Recipe(batch=64, epochs=3, rate=3e-3, head_rate=0.01)
"""Without a defence."""


def shuffled(rows: Sequence[Any]) -> list[Any]:
    results = [*rows]
    random.Random(0).shuffle(results)
    return results


def movie_sentences() -> list[str]:
    """Sentences of IMDB's reviews."""
    files = sorted((shared.data_folder() / "imdb").glob("*.gz"))
    lines = (t for path in files for t in shared.content_of(path).splitlines())
    reviews = [json.loads(t)["text"].lower().replace("<br />", " ") for t in lines]
    sentences = [t.strip() for review in reviews for t in re.split("[.!?]", review)]
    return shuffled([t for t in sentences if 6 <= len(t.split()) <= 16])


def review_sentences() -> list[tuple[str, str]]:
    """Sentences of Yelp's reviews and their sentiment, as many of both, none twice."""
    files = [
        sorted((shared.data_folder() / "yelp_sentences").glob(f"*.{label}.gz")) for label in "01"
    ]
    texts = [
        shuffled(sorted({t for p in paths for t in shared.content_of(p).splitlines()}))
        for paths in files
    ]
    return shuffled([row for a, b in zip(*texts, strict=False) for row in ((a, "0"), (b, "1"))])


def encode(tokenizer: Any, text: str) -> list[int]:
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return begin + list(tokenizer(text, add_special_tokens=False).input_ids)


@torch.no_grad()
def states_of(model: Any, ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """(n, longest, d) states before the last block, zeros behind; (n,) lengths."""
    states = torch.zeros(len(ids), max(map(len, ids)), model.config.hidden_size)
    by_length = defaultdict(list)
    for index, tokens in enumerate(ids):
        by_length[len(tokens)].append(index)
    for length, indices in by_length.items():
        for start in range(0, len(indices), 64):
            chunk = indices[start : start + 64]
            input_ids = torch.tensor([list(ids[index]) for index in chunk])
            positions = model.model.rotary_emb(states, torch.arange(length)[None])
            hidden = model.model.embed_tokens(input_ids)
            for block in model.model.layers[:-1]:
                hidden = block(hidden, position_embeddings=positions)
            states[chunk, :length] = hidden
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
    for chunk, chunk_lengths in zip(states.split(256), lengths.split(256), strict=True):
        normed = block.input_layernorm(chunk)
        parts = (block.self_attn.k_proj(normed), block.self_attn.v_proj(normed))
        key, value = (p.unflatten(2, (-1, block.self_attn.head_dim)).transpose(1, 2) for p in parts)
        keys.append(turned(key, *(part[:, None] for part in positions)).half())
        values.append(value.half())
        sums.append((normed * (places > 0) * (places < chunk_lengths[:, None, None])).sum(1))
    last = states[torch.arange(len(states)), lengths - 1]
    pooled = torch.cat(sums) / (lengths - 1).clamp_min(1)[:, None]
    cached = {"keys": torch.cat(keys), "values": torch.cat(values), "pooled": pooled}
    return cached | {"last": last, "lengths": lengths}


def compute(options: argparse.Namespace) -> None:
    """Writes states and what is to be predicted from them."""
    tokenizer, model = shared.loaded(options.model)
    data: dict[str, Tensor] = {}
    if options.text:
        rows = [(t, "01"[len(t) % 2]) for t in shared.content_of(Path(options.text)).splitlines()]
        train, test, public = rows, rows[:20], rows
    else:
        rows = review_sentences()
        train, test = rows[4000:], rows[:4000]
        public = [(text, "0") for text in movie_sentences()[:PUBLIC]]
    for name, rows in {"": train, "test_": test, "public_": public}.items():
        ids = [encode(tokenizer, text)[:TOKENS] for text, _ in rows[: options.texts]]
        for start in range(0, len(ids), CHUNK):
            states = states_of(model, ids[start : start + CHUNK])
            for key, value in last_token(model, **states).items():
                size = [len(ids), *value.shape[1:]]
                if value.ndim == 4:
                    size[2] = max(map(len, ids))
                whole = data.setdefault(name + key, torch.zeros(size, dtype=value.dtype))
                place = whole[start : start + len(value)]
                (place[:, :, : value.shape[2]] if value.ndim == 4 else place).copy_(value)
        data[name + "classes"] = torch.tensor([int(label) for _, label in rows[: options.texts]])
    save_file(data, options.features)
    print(f"{options.features}: {len(data['lengths'])} texts, {data['lengths'].sum()} tokens")


class Tuned(L.LightningModule):
    """A LoRA in the last block of a Llama, and a head for classes, over cached states."""

    def __init__(self, model: Any, data: dict[str, Tensor], recipe: Recipe, private: bool) -> None:
        super().__init__()
        self.data, self.recipe, self.private = data, recipe, private
        last = [model.config.num_hidden_layers - 1]
        places = {"target_modules": PROJECTIONS, "layers_to_transform": last}
        config = LoraConfig(r=recipe.rank, lora_alpha=recipe.alpha, **places)
        self.model = get_peft_model(model, config)
        self.block = model.model.layers[-1]
        self.norm, self.rotary = model.model.norm, model.model.rotary_emb
        self.head = nn.Linear(2 * model.config.hidden_size, int(data["classes"].max()) + 1, False)
        nn.init.zeros_(self.head.weight)
        with torch.no_grad():
            features = self.in_pieces("public_", self.features)
        self.mean, self.deviation = features.mean(0), features.std(0)
        self.weights = shared.trained(self)

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
        is_token = (torch.arange(longest) < lengths[:, None])[:, None, None]
        hidden = F.scaled_dot_product_attention(query, keys, values, is_token, enable_gqa=True)
        hidden = last + attention.o_proj(hidden.transpose(1, 2).flatten(2))
        hidden = self.norm(hidden + block.mlp(block.post_attention_layernorm(hidden)))
        return torch.cat([hidden, self.data[name + "pooled"][rows][:, None]], 1)

    def classified(self, name: str, rows: Tensor) -> Tensor:
        features = (self.features(name, rows) - self.mean) / self.deviation
        return self.head(self.recipe.scale * F.normalize(features, dim=2).flatten(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.classified("", batch), self.data["classes"][batch])

    def configure_optimizers(self) -> Any:
        recipe, steps = self.recipe, int(self.trainer.estimated_stepping_batches)
        groups = [
            {"params": [weight for weight in self.weights if weight is not self.head.weight]},
            {"params": [self.head.weight], "lr": recipe.head_rate},
        ]
        if self.private:
            return falling(DPAdamBC(groups, recipe.rate, floor=0.5), steps)
        return falling(torch.optim.AdamW(groups, recipe.rate, weight_decay=0.0), steps)


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


def recipe_of(private: bool, changes: str) -> Recipe:
    recipe = Recipe() if private else PLAIN
    pairs = [pair.split("=", 1) for pair in changes.split(",") if pair]
    kinds = {name: type(value) for name, value in asdict(recipe).items()}
    return replace(recipe, **{name: kinds[name](value) for name, value in pairs})


def one_lora(
    data: dict[str, Tensor], epsilon: float | None, seed: int, changes: str,
    options: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """Trains a LoRA, and returns what it is worth. Epsilon None: no defence."""
    private = epsilon is not None
    recipe = recipe_of(private, changes)
    L.seed_everything(seed, verbose=False)
    module = Tuned(shared.loaded(options.model)[1], data, recipe, private)
    classes, count = data["test_classes"], len(data["lengths"])
    before = int(classes.bincount().max()) / len(classes)
    batch = min(recipe.batch, count // 4)
    strategy: Any = "auto"
    if private:
        noise = {"noise_multiplier": 0.0} if epsilon == math.inf else {"target_epsilon": epsilon}
        settings = {"target_delta": DELTA, "max_physical_batch_size": recipe.piece}
        defense = DPSGD(recipe.clip, **settings, **noise)
        strategy = DefendedStrategy("auto", [defense])

    def collated(rows: list[int]) -> Tensor:
        """The shortest first, so that pieces are no longer than they must be."""
        return torch.tensor(rows)[data["lengths"][rows].argsort()]

    module.train()
    start = time.process_time()
    places: Any = [*range(count)]  # of texts, whose features a step looks up
    loader = DataLoader(places, batch, shuffle=True, collate_fn=collated)
    shared.fit(module, loader, strategy=strategy, max_epochs=recipe.epochs)
    seconds = time.process_time() - start
    if private:
        spent = defense.accountant.epsilon(DELTA)
        assert spent <= epsilon, (spent, epsilon)
    told = {"epsilon": epsilon if private and epsilon < math.inf else None, "private": private}
    run = {"seed": seed, "changes": changes, "recipe": asdict(recipe)}
    sigma = defense.noise_multiplier if private else 0.0
    run |= {"sigma": sigma, "before": before, "score": score(module)}
    return {"model": Path(options.model).name, **told, **run, "texts": count, "seconds": seconds}


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    epsilon = (row["epsilon"] or math.inf) if row["private"] else None
    return row["model"], epsilon, row["seed"], row["changes"]


def train(options: argparse.Namespace) -> None:
    data, path = load_file(options.features), Path(options.out)
    finished = {key_of(row) for row in shared.read_lines(path)}
    epsilons = [None, *options.epsilons]
    for seed, changes, epsilon in product(range(options.seeds), options.sets, epsilons):
        if (Path(options.model).name, epsilon, seed, changes) in finished:
            continue
        row = one_lora(data, epsilon, seed, changes, options)
        shared.add_line(path, row)
        summary = " ".join(f"{n} {row[n]:.4g}" for n in ("before", "score", "sigma", "seconds"))
        print(f"epsilon {epsilon} seed {seed} {changes}: {summary}", flush=True)


def print_table(options: argparse.Namespace) -> None:
    """A model's runs by epsilon: means over seeds, and half of what lies between least and most."""
    runs: dict[tuple[str, str], dict[float | None, list[dict[str, Any]]]] = {}
    for row in shared.read_lines(Path(options.out)):
        model, epsilon, _, changes = key_of(row)
        by_epsilon = runs.setdefault((model, changes.replace("alpha=0", "head alone")), {})
        by_epsilon.setdefault(epsilon, []).append(row)
    lines = []
    for (model, changes), by_epsilon in runs.items():
        plain = runs.get((model, ""), by_epsilon).get(None) or by_epsilon.get(None, [])
        best = statistics.mean(row["score"] for row in plain) if plain else math.nan
        for epsilon, rows in by_epsilon.items():
            kept = [(row["score"] - row["before"]) / (best - row["before"]) for row in rows]
            scores, name = [row["score"] for row in rows], f"{model} {changes}".strip()
            shown = "no defence" if epsilon is None else f"{epsilon:g}"
            cells = [spread(kept, ".1%"), spread(scores, ".3f"), f"{rows[0]['sigma']:.2f}"]
            lines.append([name, shown, *cells, str(len(rows))])
    head = ["trained", "epsilon", "gain that is kept", "accuracy", "noise", "seeds"]
    print(shared.table(head, lines))


def main() -> None:
    parser = shared.parser_of(
        __doc__, model=(str, "folder of a Llama"), features=(str, "safetensors file"),
        text=(str, "a text a line, in place of the data (to try the script)"),
        out=(str, "file of runs, a line each"), epsilons=[*EPSILONS], seeds=3,
        sets=([""], "changes of the recipe, a run each"), texts=(10**6, "to train on, at most"),
    )  # fmt: skip
    parser.add_argument("what", nargs="+", choices=("features", "run", "table"))
    options = parser.parse_args()
    shared.quieten()
    shared.print_place()
    steps = {"features": compute, "run": train, "table": print_table}
    for quantity in options.what:
        steps[quantity](options)


if __name__ == "__main__":
    main()
