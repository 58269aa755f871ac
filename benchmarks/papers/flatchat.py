"""FLAT-CHAT: Tables 2, 3 and 5, Figs. 3 and 4.

The language model is whatever ``--model`` names; batches are put together from sentences that were
run once (word_recovery.py). The translators are small encoder-decoders (BART's layout, hidden size
512 as in the paper, byte-level BPE of 8,192, head not tied): *Scratch* is trained on IWSLT 2017,
*FineTune* on Multi30k, in place of the paper's News Commentary. Both are
attacked with batches of held-out IWSLT; the attacker's own text is Multi30k.
"""

import copy
import functools
import gzip
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Any

import torch
from scipy import stats
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from torch import Tensor
from transformers import BartConfig
from transformers import BartForConditionalGeneration as Bart

from benchmarks.attacks.word_recovery import REGRESSION_SHAPES, composed_batches, long_enough, score
from benchmarks.papers import reference, tables
from benchmarks.papers.baselines import RevealLabels
from benchmarks.papers.cells import Cell, Row, chosen
from benchmarks.papers.tables import Grid, Results, Shown, Table, finding, number, pm
from benchmarks.shared import data_folder, loaded, read_texts, tokens_of
from lightning_fedleak.attacks import AlignedFlatChat, FlatChat, PublicText
from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.attacks.public_text import each_gradient, gradient_of
from lightning_fedleak.attacks.words.flatchat import fit_type_counts, flatchat, positive_weight
from lightning_fedleak.model.anatomy import HEAD_WEIGHT, Anatomy, find_anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage

PAD, EOS, LENGTH = 0, 1, 100
CUT = 32
"""Tokens at which sentences are cut that a translator is trained on."""
SETTINGS = ("Scratch", "FineTune")
MT_SHAPES = ((2, 40), (8, 40), (24, 40), (64, 40))
READINGS = ("sum/B", "mean", "update")
"""Readings of Table 5, since the paper does not specify what is clipped and what is averaged."""
WARM_UP = 4000
"""Steps in which fairseq's recipe for IWSLT raises the learning rate."""
IN_PAIRS = "The paper's number, then ours."
SCORERS = (("Abs", "oracle"), ("GMM", "oracle"), ("Abs", "predict"), ("GMM", "predict"))


@dataclass(frozen=True)
class Size:
    """How much is run.

    Attributes:
        texts, public: names or files, as in word_recovery.py.
        shapes: sentences x tokens of Table 3.
        batches: attacked in each cell.
        pool: private sentences that batches are drawn from, at least; of large batches twice as
            many as one has.
        regression_batches, regression_pool: for each of the paper's 18 shapes.
        noise_shape, noise_batches, sigmas: of Table 5, language models.
        hidden, scratch_steps, finetune_steps, warm_up_steps: of the translators.
        tokens, mt_attacks: target tokens of a batch and attacks, Table 2.
        rlg_batches, rlg_seconds: RLG's, and its time for one batch.
        mt_sigmas, mt_batch, mt_batches: of Table 5, translators.
        defences, curve_batch, curve_steps, curve_every, curve_seeds,
            validation_pairs: of Fig. 4.
    """

    texts: tuple[str, ...] = ("imdb", "agnews")
    public: str = "wikitext2"
    shapes: tuple[str, ...] = ("8x25", "16x50", "32x100", "64x50", "128x100")
    batches: int = 5
    pool: int = 64
    regression_batches: int = 3
    regression_pool: int = 32
    noise_shape: str = "32x100"
    noise_batches: int = 2
    sigmas: tuple[float, ...] = (0.0, 1e-4, 1e-3, 1e-2)
    hidden: int = 512
    scratch_steps: int = 60
    finetune_steps: int = 120
    warm_up_steps: tuple[int, ...] = (15,)
    tokens: tuple[int, ...] = (100, 500, 1000, 1500, 2000)
    mt_attacks: tuple[str, ...] = ("FlatChat", "Aligned", "RLG")
    mt_table_batches: int = 10
    rlg_batches: int = 2
    rlg_seconds: float = 20.0
    mt_sigmas: tuple[float, ...] = (0.0, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
    mt_batch: int = 32
    mt_batches: int = 5
    defences: tuple[str, ...] = (
        "none", "Last", "Emb", "Last+Emb", "DP 1e-4", "DP 1e-3", "DP 1e-2",
    )  # fmt: skip
    curve_batch: int = 16
    curve_steps: int = 20
    curve_every: int = 10
    curve_seeds: tuple[int, ...] = (0, 1, 2)
    validation_pairs: int = 64
    seed: int = 0


SIZES = tables.sizes_of(Size, "flatchat")


def sides(shape: str) -> tuple[int, int]:
    size, _, length = shape.partition("x")
    return int(size), int(length)


# Language models.


@dataclass(frozen=True)
class Language:
    """A causal model, and the attacker's own text."""

    anatomy: Anatomy
    tokenizer: Any
    public: PublicText


@functools.lru_cache(maxsize=1)
def language(folder: str, public: str, seed: int) -> Language:
    tokenizer, model = loaded(folder)
    text = tokens_of(read_texts(public), tokenizer, None, seed + 2, 1000)
    return Language(find_anatomy(model), tokenizer, text)


@functools.cache
def points(
    folder: str, public: str, shape: tuple[int, int], batches: int, pool: int, seed: int
) -> list[tuple[float, float, int]]:
    """Weight of the positive cluster, ours and scikit-learn's, and types, of public batches."""
    lm = language(folder, public, seed)
    drawn = composed_batches(lm.anatomy, lm.public, shape, batches, seed, pool)
    return [(*positive_weights(g), len(types)) for g, types in drawn]


def positive_weights(gradient: Tensor) -> tuple[float, float]:
    return positive_weight(gradient), reference.Flattened.fit(gradient).weight


def wide(pool: int, shape: str) -> int:
    """Sentences that batches are drawn from: twice a batch at least, or all would be one batch."""
    return max(pool, 2 * sides(shape)[0])


def regression_shapes(shapes: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return the paper's 18 shapes; if all batches of a size are smaller, their shapes."""
    sizes = [sides(s) for s in shapes]
    small = max(length for _, length in sizes) < min(length for _, length in REGRESSION_SHAPES)
    return tuple(dict.fromkeys([*sizes, (1, 6)])) if small else REGRESSION_SHAPES


def measure_weights(
    *, model: str, public: str, shape: str, batches: int, pool: int, seed: int,
    models: Mapping[str, str],
) -> list[Row]:  # fmt: skip
    """Fig. 3: one shape's points."""
    results = points(models[model], public, sides(shape), batches, pool, seed)
    weights, _, counts = zip(*results, strict=True)
    return [{"weights": weights, "counts": counts}]


def measure_words(
    *, model: str, text: str, public: str, shape: str, batches: int, pool: int,
    regression_batches: int, regression_pool: int, fitted_on: Sequence[str], seed: int,
    models: Mapping[str, str],
) -> list[Row]:  # fmt: skip
    """FlatChat's four variants on one shape: what each batch gave."""
    lm = language(models[model], public, seed)
    pools = {s: wide(regression_pool, s) for s in fitted_on}
    of_shapes = (points(models[model], public, sides(s), regression_batches, pool, seed)
                 for s, pool in pools.items())  # fmt: skip
    fitted = [*itertools.chain.from_iterable(of_shapes)]
    weights, other_weights, counts = zip(*fitted, strict=True)
    regressor = fit_type_counts(weights, counts)
    regression = reference.fit_count(other_weights, counts)
    private = tokens_of(read_texts(text), lm.tokenizer, None, seed + 1, 2000)
    rows: dict[tuple[str, str], list[dict[str, float]]] = {variant: [] for variant in SCORERS}
    for gradient, truth in composed_batches(lm.anatomy, private, sides(shape), batches, seed, pool):
        flattened = reference.Flattened.fit(gradient)
        for scorer, count in SCORERS:
            oracle, word = count == "oracle", "abs" if scorer == "Abs" else "gmm"
            guess = flatchat(gradient, len(truth) if oracle else regressor, word)
            other = score(flattened.guess(len(truth) if oracle else regression, word), truth)
            rows[scorer, count].append(
                score(guess, truth) | {"types": float(len(truth)), "reference": other["f1"]}
            )
    return [
        {"attack": f"{scorer} {count}", **{k: [f[k] for f in results] for k in results[0]}}
        for (scorer, count), results in rows.items()
    ]


@dataclass(frozen=True)
class ClippedBatch:
    """One batch's gradient of the head, clipped in both ways.

    Attributes:
        samples: (V, d) sum over sentences, each clipped to the norm C in the whole model.
        update: (V, d) of the mean gradient, clipped to C in the whole model.
        size: sentences.
    """

    samples: Tensor
    update: Tensor
    size: int

    def released(self, reading: str, noise: Tensor) -> Tensor:
        """What leaves the client under one reading of the paper, (V, d)."""
        if reading == "sum/B":
            return (self.samples + noise) / self.size
        return (self.samples / self.size if reading == "mean" else self.update) + noise


def clipped_batch(
    anatomy: Anatomy, samples: Sequence[Mapping[str, Tensor]], clip: float
) -> ClippedBatch:
    """One backward pass for each sample, given as the model's keyword arguments."""
    parameters = [p for p in anatomy.model.parameters() if p.requires_grad]
    head = next(i for i, p in enumerate(parameters) if p is anatomy.parameter(HEAD_WEIGHT))
    total, plain = sums_of_gradients(anatomy.model, parameters, samples, clip)
    update = plain[head] * min(1.0, clip * len(samples) / _norm(plain)) / len(samples)
    return ClippedBatch(total[head], update, len(samples))


def sums_of_gradients(
    model: torch.nn.Module, parameters: Sequence[Tensor], samples: Sequence[Mapping[str, Tensor]],
    clip: float,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Sums over samples of gradients, each clipped to a norm, and as they are."""
    clipped, plain = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    for sample in samples:
        gradients = torch.autograd.grad(model(**sample).loss, parameters, materialize_grads=True)
        share = min(1.0, clip / _norm(gradients))
        for whole, sum_, gradient in zip(clipped, plain, gradients, strict=True):
            whole.add_(gradient, alpha=share)
            sum_.add_(gradient)
    return clipped, plain


def _norm(gradients: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(g.norm()) ** 2 for g in gradients))


def measure_noise(
    *, model: str, text: str, shape: str, sigmas: Sequence[float], batches: int, seed: int,
    models: Mapping[str, str],
) -> list[Row]:  # fmt: skip
    """Table 5 of a language model: FlatChat with the true number of types, four readings."""
    lm = language(models[model], "wikitext2", seed)
    size, length = sides(shape)
    private = tokens_of(read_texts(text), lm.tokenizer, None, seed + 1, 2000)
    full = long_enough(private, length, size * batches)
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for order in torch.randperm(len(full), generator=generator).split(size)[:batches]:
        rows = [full.sentences[i][None, :length] for i in order.tolist()]
        drawn.append(
            ([{"input_ids": row, "labels": row} for row in rows], torch.cat(
                [row[0, 1:] for row in rows]).unique())
        )  # fmt: skip
    return noise_rows(lm.anatomy, drawn, sigmas, generator)


def noise_rows(
    anatomy: Anatomy, drawn: Sequence[tuple[list[dict[str, Any]], torch.Tensor]],
    sigmas: Sequence[float], generator: torch.Generator,
) -> list[Row]:  # fmt: skip
    results: dict[tuple[str, float], dict[str, list[float]]] = {}
    for samples, types in drawn:
        batch = clipped_batch(anatomy, samples, 1.0)
        z = torch.randn(batch.samples.shape, generator=generator)
        for sigma, reading in product(sigmas, READINGS):
            released, n = batch.released(reading, sigma * z), len(types)
            f1 = {"f1": score(flatchat(released, n), types)["f1"]}
            if reading == READINGS[0]:
                guess = reference.Flattened.fit(released).guess(n, "gmm")
                f1["reference"] = score(guess, types)["f1"]
            for name, value in f1.items():
                results.setdefault((reading, sigma), {}).setdefault(name, []).append(value)
    return [{"reading": r, "sigma": s, **values} for (r, s), values in results.items()]


# Translators.


@dataclass(frozen=True)
class Corpora:
    """Pairs as ids: the attacker's, the translator's training pairs, and held-out ones."""

    public: PublicText
    training: PublicText
    private: PublicText
    vocabulary: int


@functools.lru_cache(maxsize=1)
def corpora() -> Corpora:
    def lines(name: str) -> list[str]:
        with gzip.open(data_folder() / "multi30k" / name, "rt", encoding="utf-8") as file:
            return [line.strip() for line in file if line.strip()]

    texts = {f"public.{side}": lines(f"train.{side}.gz") for side in ("de", "en")}
    read: list[list[dict[str, str]]] = []
    for name in ("test.json.gz", "validation.json.gz"):
        with gzip.open(data_folder() / "iwslt17_de_en" / name, "rt", encoding="utf-8") as file:
            read.append([entry["translation"] for entry in json.load(file)])
    training, private = sorted(read, key=len, reverse=True)
    for side in ("de", "en"):
        texts[f"training.{side}"] = [pair[side] for pair in training]
        texts[f"private.{side}"] = [pair[side] for pair in private]
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192, special_tokens=["<pad>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(
        [t for name in ("public", "training") for s in ("de", "en") for t in texts[f"{name}.{s}"]],
        trainer,
    )

    def pairs(name: str) -> PublicText:
        ids = [
            [[*e.ids[: LENGTH - 1], EOS] for e in tokenizer.encode_batch(texts[f"{name}.{side}"])]
            for side in ("de", "en")
        ]
        return PublicText(ids[0], targets=ids[1])

    return Corpora(pairs("public"), pairs("training"), pairs("private"), tokenizer.get_vocab_size())


def trained(model: Bart, pairs: PublicText, steps: int, warm_up: int) -> Bart:
    """So many steps of AdamW on batches of 16 sentences.

    Args:
        warm_up: steps in which the learning rate rises to 5e-4.
    """
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=5e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, (n + 1) / warm_up))
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, pairs.batch(16, CUT, generator, kind="seq2seq")).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def loss_of(model: Bart, batch: TokenBatch) -> torch.Tensor:
    output = model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels
    )
    loss: torch.Tensor = output.loss
    return loss


@functools.lru_cache(maxsize=2)
def translator(setting: str, hidden: int, steps: int) -> Bart:
    torch.manual_seed(0)
    heads = hidden // 64
    config = BartConfig(
        vocab_size=corpora().vocabulary, d_model=hidden, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=heads, decoder_attention_heads=heads,
        encoder_ffn_dim=2 * hidden, decoder_ffn_dim=2 * hidden, max_position_embeddings=128,
        tie_word_embeddings=False, pad_token_id=PAD, bos_token_id=EOS, eos_token_id=EOS,
        decoder_start_token_id=EOS, forced_eos_token_id=EOS,
    )  # fmt: skip
    pairs = corpora().public if setting == "FineTune" else corpora().training
    return trained(Bart(config), pairs, steps, 1 if setting in SETTINGS else WARM_UP)


def of_tokens(text: PublicText, tokens: int, generator: torch.Generator) -> TokenBatch:
    """Sentence pairs until their targets hold ``tokens`` tokens."""
    assert text.targets is not None
    picked: list[int] = []
    total = 0
    for i in torch.randperm(len(text), generator=generator).tolist():
        picked.append(i)
        total += len(text.targets[i])
        if total >= tokens:
            break
    return text.rows(picked, LENGTH, generator, kind="seq2seq")


@functools.lru_cache(maxsize=4)
def reader(name: str, setting: str, hidden: int, steps: int, seconds: float) -> Any:
    """An attack that has been prepared for a translator."""
    attack: Any
    if name == "FlatChat":
        attack = FlatChat(corpora().public, shapes=MT_SHAPES)
    elif name == "RLG":
        attack = RevealLabels(seconds)
    else:
        attack = AlignedFlatChat(corpora().public)
    attack.prepare(find_anatomy(translator(setting, hidden, steps)))
    return attack


@functools.lru_cache(maxsize=1)
def translator_regression(setting: str, hidden: int, steps: int) -> Any:
    """The reference's number of types, fitted on the public batches of our attack."""
    anatomy = find_anatomy(translator(setting, hidden, steps))
    generator = torch.Generator().manual_seed(0)
    batches = [corpora().public.batch(*shape, generator, kind=anatomy.kind) for shape in MT_SHAPES]
    weights = [
        reference.Flattened.fit(g).weight for g in each_gradient(anatomy, batches, HEAD_WEIGHT)
    ]
    return reference.fit_count(weights, [len(b.target_ids().unique()) for b in batches])


def measure_translation(
    *, setting: str, attack: str, tokens: int, batches: int, hidden: int, steps: int,
    seconds: float, models: Mapping[str, str],
) -> list[Row]:  # fmt: skip
    """Table 2: one attack on batches of so many target tokens."""
    anatomy = find_anatomy(translator(setting, hidden, steps))
    prepared = reader(attack, setting, hidden, steps, seconds)
    results: list[dict[str, float]] = []
    failed = 0
    for k in range(batches):
        batch = of_tokens(
            corpora().private, tokens, torch.Generator().manual_seed(100 * tokens + k)
        )
        gradient = gradient_of(anatomy, batch, [HEAD_WEIGHT])
        truth = batch.target_ids().unique()
        start = time.process_time()
        try:
            guess = prepared.run(Observation((GradientSnapshot(0, Stage.SHARED, gradient),)))
        except UnusableObservation:
            failed += 1
            continue
        elapsed = time.process_time() - start
        row = score(guess, truth) | {"types": float(len(truth)), "took": elapsed}
        if attack == "FlatChat":
            row["oracle"] = score(flatchat(gradient[HEAD_WEIGHT], len(truth)), truth)["f1"]
            guess = reference.Flattened.fit(gradient[HEAD_WEIGHT]).guess(
                translator_regression(setting, hidden, steps), "gmm"
            )
            row["reference"] = score(guess, truth)["f1"]
        results.append(row)
    columns = {k: [row[k] for row in results] for k in results[0]} if results else {}
    return [{"failed": failed, **columns}]


def measure_translator_noise(
    *, setting: str, sigmas: Sequence[float], batch: int, batches: int, hidden: int, steps: int,
    seed: int, models: Mapping[str, str],
) -> list[Row]:  # fmt: skip
    """Table 5 of a translator."""
    anatomy = find_anatomy(translator(setting, hidden, steps))
    generator = torch.Generator().manual_seed(seed)
    text = corpora().private
    drawn = []
    for order in torch.randperm(len(text), generator=generator).split(batch)[:batches]:
        samples = [samples_of(text, i, generator) for i in order.tolist()]
        types = torch.cat([s["labels"][s["labels"] >= 0] for s in samples]).unique()
        drawn.append((samples, types))
    return noise_rows(anatomy, drawn, sigmas, generator)


def samples_of(
    text: PublicText, i: int, generator: torch.Generator, length: int = LENGTH
) -> dict[str, Any]:
    """One pair, as the model takes it."""
    batch = text.rows([i], length, generator, kind="seq2seq")
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask,
            "labels": batch.labels}  # fmt: skip


def measure_curve(
    *, defence: str, steps: int, every: int, batch: int, validation_pairs: int, hidden: int,
    pretrained: int, seed: int, models: Mapping[str, str],
) -> list[Row]:  # fmt: skip
    """Fig. 4: FineTune goes on training on IWSLT by Adam under one defence.

    ``DP sigma`` clips the whole gradient of each sentence to 1 and adds noise of sigma to their
    sum, which is divided by their number.
    """
    model = copy.deepcopy(translator("FineTune", hidden, pretrained)).train()
    head = model.get_output_embeddings().weight
    embeddings = [model.get_input_embeddings().weight, model.model.encoder.embed_tokens.weight,
                  model.model.decoder.embed_tokens.weight]  # fmt: skip
    for parameter in ([head] if "Last" in defence else []) + (
        embeddings if "Emb" in defence else []
    ):
        parameter.requires_grad_(False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=5e-4)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    sigma = float(defence.split()[1]) if defence.startswith("DP") else None
    losses, private = [validation_loss(model, validation_pairs)], corpora().training
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        if sigma is None:
            loss_of(model, private.batch(batch, CUT, generator, kind="seq2seq")).backward()
        else:
            chosen = torch.randperm(len(private), generator=generator)[:batch].tolist()
            samples = [samples_of(private, i, generator, CUT) for i in chosen]
            for parameter, sum_ in zip(
                parameters, sums_of_gradients(model, parameters, samples, 1.0)[0], strict=True
            ):
                noise = torch.randn(sum_.shape, generator=generator)
                parameter.grad = (sum_ + sigma * noise) / batch
        optimizer.step()
        if step % every == 0:
            losses.append(validation_loss(model, validation_pairs))
    return [{"steps": list(range(0, steps + 1, every)), "losses": losses}]


@torch.no_grad()
def validation_loss(model: Bart, pairs: int) -> float:
    """Mean over tokens of the first held-out pairs, without dropout."""
    text = corpora().private
    batch = text.rows(range(min(pairs, len(text))), LENGTH, torch.Generator(), kind="seq2seq")
    was = model.training
    loss = float(loss_of(model.eval(), batch))
    model.train(was)
    return loss


# What is shown.


def words_cells(size: Size, models: Sequence[str]) -> list[Cell]:
    shared = chosen(
        size, "public", "batches", "regression_batches", "regression_pool", "seed",
        fitted_on=[f"{b}x{n}" for b, n in regression_shapes(size.shapes)],
    )  # fmt: skip
    cells = []
    for model, shape, text in product(models, size.shapes, size.texts):
        (b, n), pool = sides(shape), wide(size.pool, shape)
        settings = {"model": model, "text": text, "shape": shape, "pool": pool, **shared}
        seconds = 10 + (pool + size.batches * b / 5) * n / 100
        cells.append(Cell("words", settings, seconds, f"{model}, words"))
    return cells


def fig3_cells(size: Size, models: Sequence[str]) -> list[Cell]:
    cells = []
    for model, (b, n) in product(models, regression_shapes(size.shapes)):
        pool = wide(size.regression_pool, f"{b}x{n}")
        settings = chosen(size, "public", "seed", model=model, shape=f"{b}x{n}",
                          batches=size.regression_batches, pool=pool)  # fmt: skip
        cells.append(Cell("weights", settings, 5 + pool * n / 100, f"{model}, words"))
    return cells


def noised(size: Size) -> dict[str, int]:
    """Translators of Table 5, of which Table 2 has the first two, with their steps."""
    warmed = {f"Scratch, {n} steps of warm-up": n for n in size.warm_up_steps}
    return {"Scratch": size.scratch_steps, "FineTune": size.finetune_steps, **warmed}


def table2_cells(size: Size, models: Sequence[str]) -> list[Cell]:
    results = []
    for setting, attack, tokens in product(SETTINGS, size.mt_attacks, size.tokens):
        slow = attack == "RLG"
        batches = size.rlg_batches if slow else size.mt_table_batches
        settings = chosen(size, "hidden", setting=setting, attack=attack, tokens=tokens,
                          batches=batches, steps=noised(size)[setting],
                          seconds=size.rlg_seconds)  # fmt: skip
        seconds = 8 + batches * (size.rlg_seconds if slow else 0.0018 * tokens)
        results.append(Cell("translation", settings, seconds, f"translator, {setting}"))
    return results


def table5_cells(size: Size, models: Sequence[str]) -> list[Cell]:
    b, n = sides(size.noise_shape)
    language_settings = chosen(size, "sigmas", "seed", shape=size.noise_shape,
                               batches=size.noise_batches)  # fmt: skip
    settings = chosen(size, "hidden", "seed", sigmas=size.mt_sigmas, batch=size.mt_batch,
                      batches=size.mt_batches)  # fmt: skip
    return [
        *(Cell("noise", {"model": model, "text": text, **language_settings},
               10 + size.noise_batches * (b * n * 0.035 + 10), f"{model}, noise, {text}")
          for model, text in product(models, size.texts)),
        *(Cell("translator_noise", {"setting": setting, "steps": steps, **settings},
               80 + 6 * size.mt_batches, f"translator, {setting}")
          for setting, steps in noised(size).items()),
    ]  # fmt: skip


def fig4_cells(size: Size, models: Sequence[str]) -> list[Cell]:
    shared = chosen(size, "validation_pairs", "hidden", steps=size.curve_steps,
                    every=size.curve_every, batch=size.curve_batch,
                    pretrained=size.finetune_steps)  # fmt: skip
    return [
        Cell("curve", {"defence": defence, "seed": seed, **shared},
             size.curve_steps * (5.0 if defence.startswith("DP") else 1.5), "translator, FineTune")
        for defence, seed in product(size.defences, size.curve_seeds)
    ]  # fmt: skip


def reference_gap(rows: Iterable[Row]) -> list[str]:
    """A sentence on how far the reference implementation's mean F1 is from ours, at most."""
    gaps = [abs(statistics.fmean(r["reference"]) - statistics.fmean(r["f1"]))
            for r in rows if r.get("reference")]  # fmt: skip
    text = "the reference implementation's mean F1 differs by at most"
    return [f"{text} {max(gaps):.2g}"] if gaps else []


def theirs(table: str, row: str) -> list[float] | None:
    values = tables.published()["flatchat"][table]["rows"].get(row)
    return None if values is None else list(values)


def mean(values: Sequence[float]) -> str:
    return number(statistics.fmean(values))


def both(printed: Sequence[str], cells: Sequence[str]) -> list[str]:
    """Put the paper's cells and ours, of which one may be missing, into one."""
    pairs = zip_longest(printed, cells, fillvalue="")
    return ["; ".join(filter(None, pair)) for pair in pairs]


def show_table2(results: Results, size: Size) -> Shown:
    """Where the paper or ours has no result, a cell has one number."""
    lines, notes = [], []
    for setting, tokens, attack in product(SETTINGS, size.tokens, size.mt_attacks):
        printed = theirs("table2", f"{setting} {tokens} {attack}")
        front = [setting, str(tokens), attack]
        paper: list[str] = []
        if printed is not None:
            rates = [number(v, 4) for v in printed[1:5]]
            paper = [f"{printed[0]:g}", *rates, f"{printed[5]:,g}"]
        cells: list[str] = []
        for row in results.where(setting=setting, tokens=tokens, attack=attack):
            if "f1" not in row:
                continue
            cells = [f"{statistics.fmean(row['types']):.0f}", pm(row.get("oracle", []), none=""),
                     mean(row["precision"]), mean(row["recall"]), pm(row["f1"]),
                     f"{statistics.fmean(row['took']):.2g}"]  # fmt: skip
            ends = min(size.tokens), max(size.tokens)
            if (setting, attack) == (SETTINGS[0], "FlatChat") and tokens in ends:
                known = "" if printed is None else f" (paper {number(printed[4])})"
                notes.append(
                    f"FlatChat on {setting} at {tokens} tokens has F1 {mean(row['f1'])}{known}"
                )
        if paper or cells:
            lines.append([*front, *both(paper, cells)])
    head = ["setting", "tokens", "attack", "types", "F1, true number of types given",
            "precision", "recall", "F1", "seconds"]  # fmt: skip
    caption = "Cells: paper; ours. A single number is the paper's, or ours in the rows of Aligned."
    return Shown([Grid(head, lines, caption)], finding(notes + reference_gap(results.rows)))


def show_table3(results: Results, size: Size) -> Shown:
    lines = []
    for text, shape in product(size.texts, size.shapes):
        printed = theirs("table3", f"{text} {shape}")
        paper = printed and [f"{printed[0]:g}", *(number(v, 4) for v in printed[1:])]
        for model in results.values("model"):
            by_attack = {r["attack"]: r for r in results.where(model=model, text=text, shape=shape)}
            if not by_attack:
                continue
            row, oracle = by_attack["GMM predict"], by_attack["GMM oracle"]
            cells = [f"{statistics.fmean(row['types']):.0f}",
                     *(mean(row[k]) for k in ("maer", "precision", "recall")),
                     pm(row["f1"]), pm(oracle["f1"])]  # fmt: skip
            lines.append([model, text, shape, *both(paper or [], cells)])
    head = ["model", "text", "batch", "types", "MAER", "precision", "recall", "F1",
            "F1, true number of types given"]  # fmt: skip
    notes = ["F1 is of the predicted number of types"] if results else []
    shown = tables.of_one_model(Grid(head, lines, IN_PAIRS))
    return Shown([shown], finding(notes + reference_gap(results.rows)))


def halving_sigma(rows: Sequence[Row]) -> float | None:
    """Return the smallest sigma of `sum/B` at which F1 is below half of that without noise."""
    means = {r["sigma"]: statistics.fmean(r["f1"]) for r in rows if r["reading"] == READINGS[0]}
    below = [sigma for sigma, f1 in means.items() if f1 < 0.5 * means.get(0.0, math.inf)]
    return min(below, default=None)


def show_table5(results: Results, size: Size) -> Shown:
    """Rows of the paper's sigmas, and of the one that halves F1 first."""
    lines, notes = [], []
    for name, sigmas in (
        *((t, size.sigmas) for t in size.texts), *((s, size.mt_sigmas) for s in noised(size))
    ):  # fmt: skip
        measured = [r for r in results.rows if name in (r.get("text"), r.get("setting"))]
        halving = halving_sigma(measured)
        for sigma in sigmas:
            level = f"{sigma:.0e}" if sigma else "0"
            printed = theirs("table5", f"{name.partition(',')[0]} {level}")
            rows = {r["reading"]: r for r in measured if r["sigma"] == sigma}
            if printed is None and not (rows and sigma == halving):
                continue
            cells = [pm(rows[r]["f1"] if r in rows else []) for r in READINGS]
            paper = number(printed[0], 4) if printed else ""
            lines.append([name, f"{sigma:g}", paper, *cells])
        if measured:
            notes.append(f"{'none' if halving is None else f'{halving:g}'} on {name}")
    head = ["text or translator", "sigma", "paper", f"sum and {READINGS[0]}", *READINGS[1:]]
    halved = [f"F1 ({READINGS[0]}) falls below half at sigma {'; '.join(notes)}"] if notes else []
    return Shown([Grid(head, lines)], finding(halved + reference_gap(results.rows)))


def show_fig3(results: Results, size: Size) -> Shown:
    notes = []
    for model in results.values("model"):
        rows = results.where(model=model)
        x, y = ([v for r in rows for v in r[name]] for name in ("weights", "counts"))
        if len(set(x)) > 2:
            fit = stats.pearsonr(x, y)
            low, high = fit.confidence_interval()
            notes.append(
                f"over {len(x)} batches on {model} the weight of the positive cluster and the "
                f"number of types have a correlation of {number(fit.statistic)} ({number(low)} to "
                f"{number(high)})"
            )
    return Shown([], finding(notes))


def show_fig4(results: Results, size: Size) -> Shown:
    lines = []
    steps = list(range(0, size.curve_steps + 1, size.curve_every))
    undefended = {r["seed"]: r["losses"][-1] for r in results.where(defence="none")}
    for defence in size.defences:
        rows = results.where(defence=defence)
        cells = [pm([r["losses"][i] for r in rows]) for i in range(len(steps))]
        more = [r["losses"][-1] - undefended[r["seed"]] for r in rows if r["seed"] in undefended]
        lines.append([defence, *cells, pm(more) if defence != "none" else ""])
    head = ["defence", *(f"step {s}" for s in steps), "increase"]
    note = "Last column: increase in loss over no defence."
    return Shown([Grid(head, lines)], note if results else "Not run.")


PAPER = tables.Paper(
    "flatchat",
    "FLAT-CHAT: A Word Recovery Attack on Federated Language Model Training",
    (
        Table("table2", "FlatChat and RLG on translators", table2_cells, show_table2),
        Table("table3", "FlatChat by batch shape", words_cells, show_table3),
        Table("table5", "FlatChat against DP-SGD, true number of types given", table5_cells,
              show_table5),
        Table("fig3", "weight of the positive cluster and number of types", fig3_cells, show_fig3),
        Table("fig4", "validation loss of a translator under defences", fig4_cells, show_fig4),
    ),
    SIZES,
    {"words": measure_words, "weights": measure_weights, "noise": measure_noise,
     "translation": measure_translation, "translator_noise": measure_translator_noise,
     "curve": measure_curve},
)  # fmt: skip
