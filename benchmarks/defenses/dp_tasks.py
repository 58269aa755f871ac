"""What DP-SGD leaves of what a LoRA gains on a task: accuracy of classes, ROUGE-L of sentences.

    # FEDLEAK_ASSETS, or --text FILE
    python -m benchmarks.defenses.dp_tasks states --model DIR --task banking77 --states FILE  # once
    python -m benchmarks.defenses.dp_tasks run --model DIR --task banking77 --states FILE --out RUNS
    python -m benchmarks.defenses.dp_tasks run --task emotion ... --sets "clip=0.1" "batch=512"
    python -m benchmarks.defenses.dp_tasks table --out RUNS
    python -m benchmarks.defenses.dp_tasks picture --out RUNS --plot FILE

A LoRA is trained in the last ``blocks`` of a Llama, on states of the frozen ones, which ``states``
writes once. ``run`` fits it in Lightning's Trainer, without a defence and under ``DPSGD`` at each
epsilon (``inf``: clipped, without noise), and appends a line for each run; what is there is left
out. ``--sets`` are changes of the recipe, a run each: settings are tried out on public tasks alone.

- Classes (``banking77``, ``ag_news``, ``sentiment``; public: ``emotion``, ``imdb``): a head is
  trained with the LoRA. It reads the state of a text's last token, the only one that is computed in
  the last block, and the mean of the frozen states; both standardised by public sentences (Yelp, or
  IMDB for sentiments), and of norm ``scale``. A gain is over naming the most frequent class.
- Sentences (``captions``; public: ``yelp``): a caption is written from its words that are not
  ``COMMON``, greedily, and scored by ROUGE-L. Logits are of tokens of public sentences alone (Yelp,
  multi30k's validation set). A sentence begins with the begin token, which counts as a wrong word.
  Leakage: ``CANARIES`` captions have their words shuffled, half of them are trained on, by a coin
  each, and an outsider who has model and base asks which (``LossRatio``).
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gzip
import json
import logging
import math
import os
import platform
import random
import re
import resource
import statistics
import time
import warnings
from collections import Counter, defaultdict
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
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.defenses.dp_utility import Places, known, print_tables, rows_of, spread
from lightning_fedleak import mean_of_sample_means
from lightning_fedleak.anatomy import find_anatomy
from lightning_fedleak.attacks.memorization import LossRatio
from lightning_fedleak.defenses import (
    DPSGD,
    ClipSettings,
    DPAdamBC,
    QuantileClip,
    ReleaseSettings,
    Schedule,
)
from lightning_fedleak.metrics import membership_rates
from lightning_fedleak.snapshots import Observation, ReleasedModel
from lightning_fedleak.strategies import DefendedStrategy
from lightning_fedleak.taps.tokens import Text, ask_tokens, compressed_bytes

SMOKE = (
    "states run table picture --model {model} --text {text} --task banking77 --states {out}/a "
    "--epsilons 8 --seeds 0 --sets epochs=1,batch=16 --out {out}/runs --plot {out}/a.png",
    "states run table --model {model} --text {text} --task captions --states {out}/b "
    "--epsilons 8 --seeds 0 --canaries 8 --sets epochs=1,batch=16 --out {out}/more",
)

DATA = Path(os.environ.get("FEDLEAK_ASSETS", "../shared/assets")) / "data"
EPSILONS = (2.0, 4.0, 8.0, math.inf)
DELTA, CANARIES, TOKENS, WRITTEN, PUBLIC, CHUNK = 1e-5, 300, 32, 24, 1000, 4096
"""Delta; canaries; most tokens of a text and of a written sentence; public texts for the mean;
texts whose states are computed at once."""
CLASSES = {
    "banking77": "intents (banking77)",
    "ag_news": "topics (AG News)",
    "sentiment": "sentiment (Yelp)",
    "emotion": "emotion",
    "imdb": "sentiment (IMDB)",
}
SENTENCES = {"captions": "captions from words (multi30k)", "yelp": "sentences from words (Yelp)"}
IGNORED = -100
FUNCTION_WORDS = """
a an the this that these those and or but so if of in on at by to from for with into onto over up
down out off near next as is are was were be been being am has have had do does did will would can
could it its he she they them his her their him we us our you your i my me there here who which what
while when where not no very just also than then too s t
"""
COMMON = frozenset(FUNCTION_WORDS.split())
"""Words that a caption is to be completed with."""
PROJECTIONS = ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Recipe:
    """How a LoRA is trained.

    ``alpha`` scales B, ``scale`` the parts that a head reads. ``noise_end`` and ``clip_end`` are
    the factors that end exponential schedules, ``quantile`` is one that the clip norm follows. The
    weights of the last ``average`` of the steps are averaged; ``targets`` are projections, with a
    plus between them.
    """

    batch: int = 1024
    epochs: int = 20
    rate: float = 0.001
    head_rate: float = 0.025
    clip: float = 1.0
    blocks: int = 1
    rank: int = 8
    alpha: float = 16.0
    frozen_a: bool = False
    targets: str = ""
    scale: float = 4.0
    noise_end: float = 1.0
    clip_end: float = 1.0
    quantile: float = 0.0
    average: float = 0.0
    piece: int = 1024


RECIPES = {
    ("classes", True): Recipe(),
    ("classes", False): Recipe(batch=32, epochs=10, rate=3e-3, head_rate=0.01),
    ("sentiment", True): Recipe(batch=6000, epochs=6),
    ("sentiment", False): Recipe(batch=64, epochs=3, rate=3e-3, head_rate=0.01),
    ("sentences", True): Recipe(
        batch=512, epochs=2, rate=0.01, clip=0.1, blocks=2, frozen_a=True, piece=64
    ),
    ("sentences", False): Recipe(batch=32, epochs=4, rate=3e-3, blocks=2),
}


def lines_of(path: Path) -> list[str]:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8").splitlines()


def shuffled(rows: Sequence[Any]) -> list[Any]:
    found = [*rows]
    random.Random(0).shuffle(found)
    return found


def words(text: str) -> str:
    return " ".join(re.findall(r"[a-z]+", text.lower()))


def public_sentences(options: argparse.Namespace) -> list[str]:
    if options.text:
        return [words(line) for line in lines_of(Path(options.text))]
    if options.task in ("sentiment", "imdb"):
        return [text for text, _ in movie_sentences()]
    texts = [t for p in sorted((DATA / "yelp_sentences").glob("*.gz")) for t in lines_of(p)]
    return shuffled([own for t in texts if 6 <= len((own := words(t)).split()) <= 16])


def movie_sentences() -> list[tuple[str, str]]:
    """Sentences of IMDB's reviews, each with the sentiment of its review."""
    lines = (t for p in sorted((DATA / "imdb").glob("*.gz")) for t in lines_of(p))
    rows = [(json.loads(t)["text"].lower().replace("<br />", " "), json.loads(t)) for t in lines]
    found = [(t.strip(), str(row["label"])) for own, row in rows for t in re.split("[.!?]", own)]
    return shuffled([(t, label) for t, label in found if 6 <= len(t.split()) <= 16])


def review_sentences() -> list[tuple[str, str]]:
    """Sentences of Yelp's reviews and their sentiment, as many of both, none twice."""
    files = [sorted((DATA / "yelp_sentences").glob(f"*.{own}.gz")) for own in "01"]
    texts = [shuffled(sorted({t for p in own for t in lines_of(p)})) for own in files]
    return shuffled([row for a, b in zip(*texts, strict=False) for row in ((a, "0"), (b, "1"))])


def rows_to_classify(options: argparse.Namespace) -> tuple[list[Any], list[Any]]:
    """(text, class) to train on, and to test on."""
    if options.text:
        rows: list[Any] = [(t, str(len(t) % 3)) for t in lines_of(Path(options.text))]
        return rows, rows[:20]
    folder = DATA / options.task
    if options.task in ("sentiment", "imdb"):
        rows = review_sentences() if options.task == "sentiment" else movie_sentences()
        return rows[4000:], rows[:4000]
    if options.task == "banking77":
        return rows_of(folder / "train.csv.gz"), rows_of(folder / "test.csv")
    if options.task == "ag_news":
        found = csv.reader(lines_of(folder / "test.csv.gz"))
        rows = shuffled([(f"{title}. {text}", own) for own, title, text in found])
        return rows[:6600], rows[6600:]
    rows = shuffled([tuple(t.rsplit(";", 1)) for t in lines_of(folder / "train.txt.gz")[1:]])
    return rows[:10000], rows[10000:12000]


def public_captions(options: argparse.Namespace) -> list[str]:
    if options.text:
        return public_sentences(options)
    return [words(text) for text in lines_of(DATA / "multi30k" / "val.en.gz")]


def rows_to_write(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Sentences to train on, and to test on."""
    if options.text:
        rows = public_sentences(options)
        return rows, rows[:20]
    if options.task == "yelp":
        rows = public_sentences(options)
        return rows[1000:], rows[:1000]
    files = ("train.en.gz", "test_2016_flickr.en.gz")
    train, test = ([words(t) for t in lines_of(DATA / "multi30k" / name)] for name in files)
    return train, test


def encode(tokenizer: Any, text: str) -> list[int]:
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return begin + list(tokenizer(text, add_special_tokens=False).input_ids)


def prompt_of(text: str) -> str:
    return " ".join(word for word in text.split() if word not in COMMON) + " ="


def rouge_l(guess: Sequence[str], truth: Sequence[str]) -> float:
    """F1 of the longest common subsequence of words."""
    lengths = [0] * (len(truth) + 1)
    for one in guess:
        diagonal = 0
        for place, other in enumerate(truth, 1):
            above = lengths[place]
            lengths[place] = diagonal + 1 if one == other else max(above, lengths[place - 1])
            diagonal = above
    return 2 * lengths[-1] / max(1, len(guess) + len(truth))


@torch.no_grad()
def states_of(model: Any, ids: Sequence[Sequence[int]], blocks: int) -> dict[str, Tensor]:
    """(n, longest, d) states before the last ``blocks`` blocks, zeros behind; (n,) lengths."""
    states = torch.zeros(len(ids), max(map(len, ids)), model.config.hidden_size)
    by_length = defaultdict(list)
    for place, own in enumerate(ids):
        by_length[len(own)].append(place)
    for length, places in by_length.items():
        for start in range(0, len(places), 64):
            some = places[start : start + 64]
            given = torch.tensor([list(ids[place]) for place in some])
            positions = model.model.rotary_emb(states, torch.arange(length)[None])
            found = model.model.embed_tokens(given)
            for block in model.model.layers[:-blocks]:
                found = block(found, position_embeddings=positions)
            states[some, :length] = found
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
    for some, own in zip(states.split(256), lengths.split(256), strict=True):
        normed = block.input_layernorm(some)
        parts = (block.self_attn.k_proj(normed), block.self_attn.v_proj(normed))
        key, value = (p.unflatten(2, (-1, block.self_attn.head_dim)).transpose(1, 2) for p in parts)
        keys.append(turned(key, *(part[:, None] for part in positions)).half())
        values.append(value.half())
        sums.append((normed * (places > 0) * (places < own[:, None, None])).sum(1))
    last = states[torch.arange(len(states)), lengths - 1]
    pooled = torch.cat(sums) / (lengths - 1).clamp_min(1)[:, None]
    found = {"keys": torch.cat(keys), "values": torch.cat(values), "pooled": pooled}
    return found | {"last": last, "lengths": lengths}


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor([*row]) for row in rows], batch_first=True)


def compute(options: argparse.Namespace) -> None:
    """Writes states and what is to be predicted from them."""
    tokenizer, model = loaded(options)
    blocks = recipe_of(options, True, options.sets[0]).blocks
    public = public_sentences(options)
    data: dict[str, Tensor] = {}
    if options.task in CLASSES:
        train, test = rows_to_classify(options)
        names = sorted({own for _, own in train})
        sets = {"": train, "test_": test, "public_": [(t, names[0]) for t in public[:PUBLIC]]}
        for name, rows in sets.items():
            ids = [encode(tokenizer, text)[:TOKENS] for text, _ in rows[: options.texts]]
            for start in range(0, len(ids), CHUNK):
                with torch.autocast("cpu", torch.bfloat16, enabled=options.half):
                    some = states_of(model, ids[start : start + CHUNK], blocks)
                found = last_token(model, **some)
                for key, value in found.items():
                    size = [len(ids), *value.shape[1:]]
                    if value.ndim == 4:
                        size[2] = max(map(len, ids))
                    whole = data.setdefault(name + key, torch.zeros(size, dtype=value.dtype))
                    if value.ndim == 4:
                        whole[start : start + len(value), :, : value.shape[2]] = value
                    else:
                        whole[start : start + len(value)] = value
            found = [names.index(own) for _, own in rows[: options.texts]]
            data[name + "classes"] = torch.tensor(found)
    else:
        train, mixer = rows_to_write(options)[0][: options.texts], random.Random(0)
        prompts = [encode(tokenizer, prompt_of(text)) for text in train]
        for place in range(len(train) - options.canaries, len(train)):
            own = train[place].split()
            train[place] = " ".join(mixer.sample(own, len(own)))
        end = encode(tokenizer, "a.")[-1:]
        ids = [
            prompt + encode(tokenizer, text)[-WRITTEN:] + end
            for prompt, text in zip(prompts, train, strict=True)
        ]
        data = states_of(model, [own[:-1] for own in ids], blocks)
        data |= {"ids": padded(ids), "prompts": torch.tensor([*map(len, prompts)])}
        some = Counter(t for text in public for t in encode(tokenizer, text))
        more = public_captions(options)
        seen = {token for token, n in some.items() if n > 3} | set(end)
        seen |= {token for text in more for token in encode(tokenizer, text)}
        data["vocabulary"] = torch.tensor(sorted(seen))
    save_file(data, options.states)
    print(f"{options.states}: {len(data['lengths'])} texts, {data['lengths'].sum()} tokens")


class Tuned(L.LightningModule):
    """A LoRA in the last blocks of a Llama, and a head for classes, over cached states."""

    def __init__(self, model: Any, data: dict[str, Tensor], recipe: Recipe, private: bool) -> None:
        super().__init__()
        self.data, self.recipe, self.private = data, recipe, private
        count = model.config.num_hidden_layers
        projections = [*PROJECTIONS, *([] if "classes" in data else ["v_proj"])]
        config = LoraConfig(
            r=recipe.rank,
            lora_alpha=recipe.alpha,
            target_modules=recipe.targets.split("+") if recipe.targets else projections,
            layers_to_transform=[*range(count - recipe.blocks, count)],
        )
        self.model = get_peft_model(model, config)
        self.blocks = model.model.layers[count - recipe.blocks :]
        self.norm, self.rotary = model.model.norm, model.model.rotary_emb
        for name, weight in self.model.named_parameters():
            if recipe.frozen_a and "lora_A" in name:
                weight.requires_grad = False
        self.mean, self.deviation = torch.zeros(()), torch.ones(())
        width = model.config.hidden_size
        if "classes" in data:
            self.head = nn.Linear(2 * width, int(data["classes"].max()) + 1, bias=False)
            nn.init.zeros_(self.head.weight)
            with torch.no_grad():
                found = self.in_pieces("public_", self.features)
            self.mean, self.deviation = found.mean(0), found.std(0)
        else:
            self.head = nn.Linear(width, len(data["vocabulary"]), bias=False)
            self.head.weight = nn.Parameter(
                model.lm_head.weight[data["vocabulary"]].detach(), False
            )
            self.place = torch.full((model.config.vocab_size,), IGNORED)
            self.place[data["vocabulary"]] = torch.arange(len(data["vocabulary"]))
        self.weights = [weight for weight in self.parameters() if weight.requires_grad]
        self.means, self.summed = [torch.zeros_like(weight) for weight in self.weights], 0

    def in_pieces(self, name: str, function: Callable[[str, Tensor], Tensor]) -> Tensor:
        """What the function returns for all rows, at no more memory than a piece needs."""
        rows = torch.arange(len(self.data[name + "lengths"]))
        return torch.cat([function(name, some) for some in rows.split(256)])

    def features(self, name: str, rows: Tensor) -> Tensor:
        """(b, 2, d): each text's last token, of a LoRA; mean of its tokens' frozen states."""
        lengths = self.data[name + "lengths"][rows]
        last, longest = self.data[name + "last"][rows][:, None], int(lengths.max())
        block, attention = self.blocks[0], self.blocks[0].self_attn
        cos, sin = self.rotary(last, lengths[:, None] - 1)
        query = attention.q_proj(block.input_layernorm(last))
        query = query.unflatten(2, (-1, attention.head_dim)).transpose(1, 2)
        query = turned(query, cos[:, None], sin[:, None])
        cached = (self.data[name + part][rows, :, :longest] for part in ("keys", "values"))
        keys, values = (part.float() for part in cached)
        seen = (torch.arange(longest) < lengths[:, None])[:, None, None]
        found = F.scaled_dot_product_attention(query, keys, values, seen, enable_gqa=True)
        found = last + attention.o_proj(found.transpose(1, 2).flatten(2))
        found = self.norm(found + block.mlp(block.post_attention_layernorm(found)))
        return torch.cat([found, self.data[name + "pooled"][rows][:, None]], 1)

    def classified(self, name: str, rows: Tensor) -> Tensor:
        found = (self.features(name, rows) - self.mean) / self.deviation
        return self.head(self.recipe.scale * F.normalize(found, dim=2).flatten(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        data, lengths = self.data, self.data["lengths"][batch]
        if "classes" in data:
            return F.cross_entropy(self.classified("", batch), data["classes"][batch])
        states = data["states"][batch, : int(lengths.max())]
        begins = data["prompts"][batch][:, None]
        places = begins - 1 + torch.arange(int((lengths[:, None] - begins).max()) + 1)
        behind = places >= lengths[:, None]
        places = places.clamp_max(states.shape[1] - 1)
        labels = self.place[data["ids"][batch][:, 1:].gather(1, places)].masked_fill(
            behind, IGNORED
        )
        positions = self.rotary(states, torch.arange(states.shape[1])[None])
        for block in self.blocks:
            states = block(states, position_embeddings=positions)
        places = places[..., None].expand(-1, -1, states.shape[2])
        logits = self.head(self.norm(states.gather(1, places)))
        return mean_of_sample_means(logits, labels, causal=False)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Adds up the weights of the last steps, and takes their mean after the last one."""
        steps, done = int(self.trainer.estimated_stepping_batches), self.trainer.global_step
        if done > (1 - self.recipe.average) * steps:
            self.summed += 1
            for mean, weight in zip(self.means, self.weights, strict=True):
                mean += (weight - mean) / self.summed
                if done == steps:
                    weight.copy_(mean)

    def configure_optimizers(self) -> Any:
        recipe, steps = self.recipe, int(self.trainer.estimated_stepping_batches)
        own = [{"params": [weight for weight in self.weights if weight is not self.head.weight]}]
        if self.head.weight.requires_grad:
            own += [{"params": [self.head.weight], "lr": recipe.head_rate}]
        optimizer: torch.optim.Optimizer
        if self.private:
            optimizer = DPAdamBC(own, recipe.rate, floor=0.5)
        else:
            optimizer = torch.optim.AdamW(own, recipe.rate, weight_decay=0.0)
        falls = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        return [optimizer], [{"scheduler": falls, "interval": "step"}]


def turned(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Vectors with their positions (RoPE)."""
    one, two = vectors.chunk(2, -1)
    return vectors * cos + torch.cat([-two, one], -1) * sin


@torch.no_grad()
def score(module: Tuned, tokenizer: Any, options: argparse.Namespace) -> float:
    """Accuracy on the test texts, or mean ROUGE-L of greedy sentences."""
    module.eval()
    if "classes" in module.data:
        logits = module.in_pieces("test_", module.classified)
        return float((logits.argmax(1) == module.data["test_classes"]).float().mean())
    texts, model = rows_to_write(options)[1][: options.held], module.model.base_model.model.model
    prompts, by_length = [encode(tokenizer, prompt_of(text)) for text in texts], defaultdict(list)
    for place, own in enumerate(prompts):
        by_length[len(own)].append(place)
    total, end = 0.0, encode(tokenizer, "a.")[-1]
    for places in by_length.values():
        given, past, steps = torch.tensor([prompts[place] for place in places]), None, []
        for _ in range(WRITTEN):
            found = model(input_ids=given, past_key_values=past, use_cache=True)
            best = module.head(found.last_hidden_state[:, -1:]).argmax(-1)
            given, past = module.data["vocabulary"][best], found.past_key_values
            steps.append(given)
        for place, own in zip(places, torch.cat(steps, 1).tolist(), strict=True):
            text = tokenizer.decode(own[: [*own, end].index(end)])
            total += rouge_l(text.split(), texts[place].split())
            if place < options.show:
                print(f"{prompt_of(texts[place])} {text} | {texts[place]}")
    return total / len(texts)


def asked(module: Tuned, options: argparse.Namespace) -> tuple[Any, Tensor] | None:
    """What the model says of its canaries, and the bytes that each is compressed to."""
    data = module.data
    if "classes" in data or not options.canaries:
        return None
    texts = []
    for place in range(len(data["lengths"]) - options.canaries, len(data["lengths"])):
        ids = data["ids"][place, : int(data["lengths"][place]) + 1]
        labels = ids.clone()
        labels[: int(data["prompts"][place])] = IGNORED
        texts.append(Text(ids, labels))
    module.eval()
    return ask_tokens(find_anatomy(module.model), texts), compressed_bytes(texts)


def recipe_of(options: argparse.Namespace, private: bool, changes: str) -> Recipe:
    kind = "classes" if options.task in CLASSES else "sentences"
    recipe = RECIPES.get((options.task, private), RECIPES[kind, private])
    pairs = [pair.split("=", 1) for pair in changes.split(",") if pair]
    kinds = {name: type(value) for name, value in asdict(recipe).items()}
    own = {name: kinds[name](int(value) if kinds[name] is bool else value) for name, value in pairs}
    return replace(recipe, **own)


def loaded(options: argparse.Namespace) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(options.model), model.eval()


def curve(end: float) -> Schedule | None:
    return None if end == 1 else Schedule("exponential", end)


def one_run(
    data: dict[str, Tensor],
    epsilon: float | None,
    seed: int,
    changes: str,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Trains a LoRA; what it is worth, and what its canaries tell. Epsilon None: no defence."""
    private = epsilon is not None
    recipe = recipe_of(options, private, changes)
    L.seed_everything(seed, verbose=False)
    tokenizer, model = loaded(options)
    module = Tuned(model, data, recipe, private)
    before, base = score(module, tokenizer, options), asked(module, options)
    if "classes" in data:
        classes = data["test_classes"]
        before = int(classes.bincount().max()) / len(classes)
    count, canaries = len(data["lengths"]), options.canaries if "classes" not in data else 0
    inside = torch.rand(canaries, generator=torch.Generator().manual_seed(seed)) < 0.5
    places = [*range(count - canaries)]
    places += [count - canaries + i for i, own in enumerate(inside.tolist()) if own]
    batch = min(recipe.batch, len(places) // 4)
    strategy: Any = "auto"
    if private:
        noise = {"noise_multiplier": 0.0} if epsilon == math.inf else {"target_epsilon": epsilon}
        defense = DPSGD(
            recipe.clip,
            target_delta=options.delta,
            max_physical_batch_size=recipe.piece,
            clip=ClipSettings(
                schedule=curve(recipe.clip_end),
                quantile=QuantileClip(recipe.quantile) if recipe.quantile else None,
            ),
            release=ReleaseSettings(noise_schedule=curve(recipe.noise_end)),
            **noise,
        )
        strategy = DefendedStrategy("auto", [defense])

    def collated(rows: list[int]) -> Tensor:
        """The shortest first, so that pieces are no longer than they must be."""
        return torch.tensor(rows)[data["lengths"][rows].argsort()]

    module.train()
    start = time.process_time()
    L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=recipe.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(Places(places), batch, shuffle=True, collate_fn=collated))
    seconds = time.process_time() - start
    if private:
        shown = defense.accountant.epsilon(options.delta)
        assert shown <= epsilon, (shown, epsilon)
    row = {
        "task": options.task,
        "model": Path(options.model).name,
        "epsilon": epsilon if private and epsilon < math.inf else None,
        "private": private,
        "seed": seed,
        "changes": changes,
        "recipe": asdict(recipe),
        "sigma": defense.noise_multiplier if private else 0.0,
        "before": before,
        "score": score(module, tokenizer, options),
        "trained": sum(weight.numel() for weight in module.weights),
        "texts": len(places),
        "seconds": seconds,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    now = asked(module, options)
    if base is not None and now is not None:
        view = Observation(released=ReleasedModel(now[0], base[0], base[1]))
        row["auc"] = membership_rates(LossRatio().run(view).scores, inside)["auc"].value
    return row


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    epsilon = (row["epsilon"] or math.inf) if row["private"] else None
    return row["task"], row["model"], epsilon, row["seed"], row["changes"]


def train(options: argparse.Namespace) -> None:
    data, path = load_file(options.states), Path(options.out)
    done = {key_of(row) for row in known(path)}
    arms = [*([] if options.no_plain else [None]), *options.epsilons]
    for seed, changes, epsilon in product(options.seeds, options.sets, arms):
        key = (options.task, Path(options.model).name, epsilon, seed, changes)
        if key in done:
            continue
        row = one_run(data, epsilon, seed, changes, options)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        names = [name for name in ("before", "score", "sigma", "seconds", "auc") if name in row]
        found = " ".join(f"{name} {row[name]:.4g}" for name in names)
        print(f"{options.task} epsilon {epsilon} seed {seed} {changes}: {found}", flush=True)


def found_in(options: argparse.Namespace) -> dict[tuple[str, float | None], list[dict[str, Any]]]:
    """Runs by name and epsilon; None: no defence."""
    found: dict[tuple[str, float | None], list[dict[str, Any]]] = defaultdict(list)
    for row in known(Path(options.out)):
        name = f"{ {**CLASSES, **SENTENCES}[row['task']] }, {row['model']}"
        changes = row["changes"].replace("alpha=0", "head alone")
        found[name + (f", {changes}" if changes else ""), key_of(row)[2]].append(row)
    return found


def best_of(found: dict[Any, list[dict[str, Any]]], row: dict[str, Any]) -> float:
    """Mean score without a defence, of the row's task and model."""
    plain = [own for runs in found.values() for own in runs if not own["private"]]
    plain = [r for r in plain if (r["task"], r["model"]) == (row["task"], row["model"])]
    same = [r["score"] for r in plain if not r["changes"]] or [r["score"] for r in plain]
    return statistics.mean(same) if same else math.nan


def kept(found: dict[Any, list[dict[str, Any]]], row: dict[str, Any]) -> float:
    """The share of the task gain that a run keeps."""
    return (row["score"] - row["before"]) / (best_of(found, row) - row["before"])


def table(options: argparse.Namespace) -> None:
    """Tasks by epsilon: means over seeds, and half of what lies between the least and the most."""
    found = found_in(options)
    columns: dict[str, Callable[[list[dict[str, Any]]], str]] = {
        "task gain that is kept": lambda own: spread([kept(found, row) for row in own], ".1%"),
        "accuracy or ROUGE-L": lambda own: spread([row["score"] for row in own], ".3f"),
        "canaries' AUC": lambda own: spread(
            [row["auc"] for row in own if "auc" in row] or [math.nan], ".2f"
        ),
        "noise": lambda own: f"{own[0]['sigma']:.2f}",
        "seconds": lambda own: f"{statistics.median(row['seconds'] for row in own):.0f}",
        "MiB": lambda own: f"{max(row['memory'] for row in own):.0f}",
        "seeds": lambda own: f"{len(own)}",
    }
    print(f"{platform.machine()}, one thread, {datetime.date.today()}")
    for (name, epsilon), own in found.items():
        if epsilon is None:
            shown = ", ".join(f"{key} {column(own)}" for key, column in columns.items())
            print(f"{name}, no defence: before {own[0]['before']:.3f}, {shown}")
    private = {
        (name, epsilon): own for (name, epsilon), own in found.items() if epsilon is not None
    }
    print_tables(private, columns, {name: name for name, _ in private})


def picture(options: argparse.Namespace) -> None:
    """The share of the task gain that is kept against epsilon; the canaries' AUC beside it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found, figure = found_in(options), Figure(figsize=(9, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    tasks, leaks = figure.subplots(1, 2, width_ratios=(3, 2))
    ends = sorted({epsilon for _, epsilon in found if epsilon is not None})
    for name in dict.fromkeys(name for name, epsilon in found if epsilon is not None):
        runs = [found.get((name, epsilon), []) for epsilon in ends]
        at = [place for place, own in enumerate(runs) if own]
        shares = [[100 * kept(found, row) for row in runs[place]] for place in at]
        means = [statistics.mean(own) for own in shares]
        bars = [[m - min(o) for m, o in zip(means, shares, strict=True)]]
        bars += [[max(o) - m for m, o in zip(means, shares, strict=True)]]
        tasks.errorbar(at, means, bars, marker="o", capsize=3, label=name)
        if all("auc" in row for place in at for row in runs[place]):
            aucs = [statistics.mean(row["auc"] for row in runs[place]) for place in at]
            leaks.plot(at, aucs, marker="o", label=name)
            plain = [row["auc"] for row in found.get((name, None), [])]
            if plain:
                leaks.axhline(statistics.mean(plain), ls="--", c="C3", label="no defence")
    tasks.axhline(85, ls=":", c="grey")
    tasks.set(ylabel="task gain that is kept (%)", title="What is left of the task", ylim=(0, 105))
    leaks.axhline(0.5, ls=":", c="grey", label="guessing")
    leaks.set(ylabel="AUC", title="What an outsider tells of canaries", ylim=(0.4, 1))
    for axes in (tasks, leaks):
        labels = ["clipped only" if math.isinf(epsilon) else f"{epsilon:g}" for epsilon in ends]
        axes.set_xticks(range(len(ends)), labels)
        axes.set_xlabel("epsilon")
        axes.legend(fontsize="x-small", loc="lower right" if axes is tasks else "upper right")
    figure.savefig(options.plot, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", nargs="+", choices=("states", "run", "table", "picture"))
    parser.add_argument("--model", help="folder of a Llama and its tokenizer")
    parser.add_argument("--text", help="a text a line, in place of the task's (to try the script)")
    parser.add_argument("--task", choices=[*CLASSES, *SENTENCES])
    parser.add_argument("--states", help="safetensors file")
    parser.add_argument("--out", help="file of runs, a line each")
    parser.add_argument("--plot", help="picture")
    parser.add_argument("--epsilons", nargs="*", type=float, default=[*EPSILONS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--sets", nargs="+", default=[""], help="changes of the recipe, a run each")
    parser.add_argument("--no-plain", action="store_true", help="no run without a defence")
    parser.add_argument("--texts", type=int, default=10**6, help="to train on, at most")
    parser.add_argument("--half", action="store_true", help="frozen blocks in bf16")
    parser.add_argument("--delta", type=float, default=DELTA, help="below one over the texts")
    parser.add_argument("--held", type=int, default=500, help="sentences that are scored")
    parser.add_argument("--canaries", type=int, default=CANARIES)
    parser.add_argument("--show", type=int, default=0, help="sentences that are printed")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    for what in options.what:
        {"states": compute, "run": train, "table": table, "picture": picture}[what](options)


if __name__ == "__main__":
    main()
