"""Whether a reader of its own refutes a low number that a gate lets pass, in random trainings.

    python -m benchmarks.attacks.drawn_trainings                    # a hundred, about 8 minutes
    python -m benchmarks.attacks.drawn_trainings --only 17 --runs 1  # the draw of a refutation
    python -m benchmarks.attacks.drawn_trainings --kind large       # how often a gate decides
    python -m benchmarks.attacks.drawn_trainings --kind untouched   # what is unknown without cause
    python -m benchmarks.attacks.drawn_trainings --kind declared    # changed before a defence acts
    python -m benchmarks.attacks.drawn_trainings --kind identity    # watched and unwatched weights

A training draws its loss (also of a fused head, of preferences, with a term of the weights alone),
what it trains, dropout, noise on embeddings, precision, batch, the step that is looked at, and what
its own code does to gradients before the optimizer steps, or to the batch before the model reads
it. Some are compiled, have a dropout whose randomness is their own, an L2 penalty of 1e-10 to 1,
or a declared GradientNoise of 1e-10 to 10. The true words are those that the model was called on.
Where a gate at .5 on ``leakage/worst/words`` lets a look pass, readers that are no attacks of the
package read what the optimizer gets: rows of the head's gradient, rows of the embedding's, and the
spans of a LoRA's A and B. One that reads more than .15 above the logged number refutes it, unless
types drawn at random would be as many true ones with a probability above .001. What
counts as known *by aggregation* is a number apart: the batch holds more than the attack can
distinguish there.

Of the kind ``large`` batches have 192 to 512 tokens, as many as attacks can distinguish or more,
and nothing hides them: no dropout, no noise, no rounding. There a gate should decide. The kind
``untouched`` has gradients that nothing but a declared defence changes, of a size over six decades.
Of the kind ``declared`` each training has such a defence, and most multiply all or some of their
gradients by 1e-4 to 1e4 before it acts, or touch them otherwise. Half have
noise of 1 to 1,000 times that factor. Where a bound on all readers is below the gate's limit, the
number should be known. Of the kind ``identity`` each training is run watched and unwatched, and
within its steps the model is copied, averaged and saved: the weights must be equal to the bit.
"""

import copy
import io
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from scipy.stats import chi2, hypergeom
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from benchmarks.shared import llama, parser_of, quieten
from lightning_fedleak.attacks import HONEST_BUT_CURIOUS
from lightning_fedleak.defenses import (
    DPSGD,
    ActivationCompression,
    ActivationNoise,
    Defense,
    DefenseError,
    GradientCompression,
    GradientNoise,
    TokenLDP,
)
from lightning_fedleak.trainers import DefendedLoop, Threshold, Watch, WatchSettings

SMOKE = (
    "--runs 1",
    "--kind large --runs 1",
    "--kind untouched --runs 1",
    "--kind declared --runs 1",
    "--kind identity --runs 1",
)

REFUTES = 0.15
CHANCE = 1e-3
VOCABULARY, WIDTH, BLOCKS, TOKENS = 256, 48, 3, 32
TRAINED_TOKENS = [3, 4, 5, 6]
"""Ids that ``trainable_token_indices`` trains, the most frequent ones."""
FREQUENT = 32
"""Ids below it have a tenth of the weight in a loss that is weighted by class."""

Q_AND_V: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
PARTS: dict[str, Mapping[str, Any] | None] = {
    "whole": None,
    "LoRA q/v": Q_AND_V,
    "LoRA all linear": {"target_modules": "all-linear"},
    "LoRA o+down": {"target_modules": ["o_proj", "down_proj"]},
    "layers_to_transform": Q_AND_V | {"layers_to_transform": [1, 2]},
    "trainable_token_indices": Q_AND_V | {"trainable_token_indices": TRAINED_TOKENS},
}


@dataclass(frozen=True)
class Training:
    """What a draw fixes."""

    seed: int
    loss: str
    part: str
    rank: int
    tied: bool
    dropout: float
    noise: float
    precision: str
    step: int
    rows: int
    length: int
    rate: float
    touch: str = "nothing"
    by_hook: bool = False
    batch: str = "the same"
    compiled: bool = False
    own_dropout: float = 0.0
    penalty: float = 0.0
    sigma: float = 0.0
    defence: str = "GradientNoise"
    half_base: bool = False
    factor: float = 1.0
    scaled: str = "all"

    @classmethod
    def drawn(cls, seed: int) -> "Training":
        training, draw = cls.plain(seed), random.Random(-seed)
        if draw.random() < 0.5:
            return training
        kind = draw.choice(["compiled", "own dropout", "penalty", "declared noise", "LoRA dropout"])
        penalty = 10 ** draw.uniform(-10, 0) if kind in ("penalty", "own dropout") else 0.0
        part = "LoRA q/v" if kind == "LoRA dropout" else training.part
        return replace(
            training,
            part=part,
            dropout=draw.choice([0.1, 0.2]) if kind == "LoRA dropout" else training.dropout,
            compiled=kind == "compiled",
            own_dropout=draw.choice([0.0, 0.1, 0.5]) if kind == "own dropout" else 0.0,
            penalty=penalty,
            sigma=10 ** draw.uniform(-10, 1) if kind == "declared noise" else 0.0,
            touch="nothing" if kind == "declared noise" else training.touch,
            batch="the same",
        )

    @classmethod
    def plain(cls, seed: int) -> "Training":
        draw = random.Random(seed)
        rows, length = draw.choice([(1, 6), (1, 12), (2, 8), (4, 8), (4, 16), (8, 24)])
        return cls(
            seed, draw.choice(list(LOSSES)), draw.choice(list(PARTS)), draw.choice([2, 4, 8, 16]),
            draw.random() < 0.3, draw.choice([0.0, 0.0, 0.1]), draw.choice([0.0, 0.0, 5.0]),
            draw.choice(["32-true", "32-true", "bf16-mixed", "bf16-true"]),
            draw.choice([0, 1, 2, 5, 10, 30]), rows, length, draw.choice([1e-4, 1e-3, 5e-3]),
            draw.choice(["nothing"] * len(TOUCHES) + [*TOUCHES]), draw.random() < 0.3,
            draw.choice(["the same", "the same", "the same", "cropped", "another"]),
        )  # fmt: skip

    @classmethod
    def large(cls, seed: int) -> "Training":
        """Return a training of large batches whose gradients nothing hides."""
        shape = random.Random(seed).choice([(8, 24), (8, 32), (16, 32)])
        plain = {"dropout": 0.0, "noise": 0.0, "precision": "32-true", "batch": "the same"}
        open_ = replace(cls.plain(seed), touch="nothing", **plain)
        part = "LoRA q/v" if open_.part == "LoRA o+down" else open_.part
        return replace(open_, part=part, rows=shape[0], length=shape[1])

    @classmethod
    def untouched(cls, seed: int) -> "Training":
        """Return a training whose gradients nothing but a declared defence changes."""
        draw = random.Random(-seed)
        plain = replace(cls.plain(seed), touch="nothing", batch="the same", noise=0.0)
        if draw.random() < 0.5:  # without a defence
            if plain.part != "whole" and draw.random() < 0.3:  # as TRL trains over a float16 file
                return replace(plain, precision="bf16-mixed", half_base=True)
            return replace(plain, compiled=draw.random() < 0.3)
        sigma, defence = 10 ** draw.uniform(-6, 0), draw.choice([*DEFENCES][:5])
        return replace(plain, sigma=sigma, defence=defence)

    @classmethod
    def declared(cls, seed: int) -> "Training":
        """Return a training with a declared defence, before which its own code may act."""
        draw = random.Random(-seed)
        plain = replace(cls.plain(seed), batch="the same", defence=draw.choice(list(DEFENCES)))
        if plain.defence == "DPSGD":
            rows, length = draw.choice([(4, 8), (8, 8), (8, 16)])
            sizes = {"rows": rows, "length": length, "noise": 0.0}
            plain = replace(plain, loss=draw.choice(["plain", "answers only"]), **sizes)
        touch = draw.choice([plain.touch, "factor", "factor", "factor", "nothing"])
        touch = "nothing" if plain.defence == "DPSGD" else touch  # which refuses changed gradients
        factor = 10 ** draw.uniform(-4, 4) if touch == "factor" else 1.0
        scaled = draw.choice(list(SCALED)) if touch == "factor" else "all"
        sigma, defence = 10 ** draw.uniform(-5, 1), plain.defence
        if draw.random() < 0.5:  # noise that hides the words from any reader, or nearly
            defence = defence if defence == "DPSGD" else draw.choice([*DEFENCES][:2])
            sigma = max(1.0, factor) * 10 ** draw.uniform(0, 3)
        settings = {"touch": touch, "factor": factor, "scaled": scaled}
        return replace(plain, sigma=sigma, defence=defence, **settings)

    def defences(self) -> list[Defense]:
        """Return the declared defences."""
        return [DEFENCES[self.defence](self.sigma)] if self.sigma else []

    def noise_std(self) -> float:
        """Return the standard deviation of the declared noise on each gradient."""
        is_noise = self.defence in ("GradientNoise", "GradientNoise, clipped", "DPSGD")
        return self.sigma * is_noise / (self.rows if self.defence == "DPSGD" else 1)

    def setting(self) -> str:
        """Return what a table of looks is sorted by."""
        if self.sigma:
            return self.defence
        precision = "float16 base, bf16-mixed" if self.half_base else self.precision
        return f"{precision}{', compiled' * self.compiled}{', dropout' * bool(self.dropout)}"

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        sizes = {"max_position_embeddings": TOKENS, "tie_word_embeddings": self.tied}
        dropout = {"attention_dropout": self.dropout, "pad_token_id": 0}
        model = llama(VOCABULARY, WIDTH, BLOCKS, **sizes, **dropout)
        if self.half_base:
            model = model.half()
        if (options := PARTS[self.part]) is not None:
            dropout = {"lora_dropout": self.dropout, "task_type": "CAUSAL_LM"}
            model = get_peft_model(model, LoraConfig(r=self.rank, **dropout, **options))
        if self.noise:
            size = self.noise / (self.length * WIDTH) ** 0.5

            def noisy(module: nn.Module, _: Any, output: Tensor) -> Tensor:
                return output + torch.empty_like(output).uniform_(-size, size) * module.training

            model.get_input_embeddings().register_forward_hook(noisy)
        if self.own_dropout:
            calls = itertools.count()

            def drop(module: nn.Module, _: Any, output: Tensor) -> Tensor:
                """Dropout by a counter of its own, as kernels with a Philox offset have it."""
                generator = torch.Generator().manual_seed(next(calls))
                kept = torch.rand(output.shape, generator=generator) > self.own_dropout
                return output * kept / (1 - self.own_dropout)

            norms = [
                m for n, m in model.named_modules() if n.endswith("1.post_attention_layernorm")
            ]
            norms[0].register_forward_hook(drop)
        dtype = torch.bfloat16 if self.precision == "bf16-true" else torch.float32
        return model.to(dtype).train()

    def ids(self, step: int) -> Tensor:
        """Return tokens of a step, with frequencies as in a language."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        weights = 1 / torch.arange(1, VOCABULARY - 2)
        drawn = torch.multinomial(weights, self.rows * self.length, True, generator=generator)
        return 3 + drawn.view(self.rows, self.length)


DEFENCES: dict[str, Callable[[float], Defense]] = {
    "GradientNoise": lambda sigma: GradientNoise(None, sigma, seed=0),
    "GradientNoise, clipped": lambda sigma: GradientNoise(1.0, sigma, seed=0),
    "ActivationNoise": lambda sigma: ActivationNoise(1, sigma),
    "TokenLDP": lambda sigma: TokenLDP("grr", 1 / sigma, special_ids=[]),
    "GradientCompression": lambda _: GradientCompression("int8"),
    "top k": lambda size: GradientCompression("topk", share=min(1.0, 0.01 + size / 10)),
    "ActivationCompression": lambda size: ActivationCompression(1, 1 + int(4.7 * size)),
    "DPSGD": lambda sigma: DPSGD(1.0, sigma, target_delta=1e-3),
}

SCALED: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "embedding or A": lambda name: "embed_tokens" in name or "lora_A" in name,
    "head or B": lambda name: "lm_head" in name or "lora_B" in name,
    "first block": lambda name: "layers.0." in name,
    "all but the first block": lambda name: "layers.0." not in name,
}
"""Of which parameters, by name, a training multiplies the gradients."""


# ---- losses: of a model, ids, and (B, L) what counts -------------------------------------------


def each(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1].float()
    return losses_of(logits, ids)


def losses_of(logits: Tensor, ids: Tensor) -> Tensor:
    losses = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids), -1)


def by_class(model: nn.Module, ids: Tensor, *, counted: Tensor, **settings: Any) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1].float()
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), **settings)


def given_labels(model: nn.Module, ids: Tensor, *, counted: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids.masked_fill(counted == 0, -100)).loss
    return loss


def focal(model: nn.Module, ids: Tensor, *, counted: Tensor) -> Tensor:
    losses = each(model, ids)
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def masked(model: nn.Module, ids: Tensor, *, counted: Tensor) -> Tensor:
    return (each(model, ids) * counted[:, 1:]).sum() / counted[:, 1:].sum()


def weighted_tokens(model: nn.Module, ids: Tensor, *, counted: Tensor) -> Tensor:
    weights = torch.where(torch.arange(1, ids.shape[1]) % 3 == 0, 1.0, 0.1)
    return (each(model, ids) * weights).mean()


CLASS_WEIGHTS = torch.where(torch.arange(VOCABULARY) < FREQUENT, 0.1, 1.0)


def fused(model: nn.Module, ids: Tensor, *, counted: Tensor, sign: bool = False) -> Tensor:
    """Return a loss that multiplies by the head's matrix, as fused ones do; of pairs, if signed."""
    core: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    states = core.model(input_ids=ids).last_hidden_state[:, :-1]
    logits = functional.linear(states, core.lm_head.weight).float()
    losses = losses_of(logits, ids)
    if not sign:
        return losses.mean()
    texts, half = losses.sum(1), (len(ids) + 1) // 2
    return -functional.logsigmoid(0.1 * (texts[half:].sum() - texts[:half].sum()))


def decayed(model: nn.Module, ids: Tensor, *, counted: Tensor, form: str) -> Tensor:
    """Return a loss with an L2 term of the weights, in a form that its graph may hide."""
    loss = given_labels(model, ids, counted=counted)
    term = 5e-3 * sum(p.square().sum() for p in model.parameters() if p.requires_grad)
    if form == "stacked":
        return torch.stack([loss, term]) @ torch.ones(2)
    return loss * (1 + term / loss.detach())


LOSSES: dict[str, Callable[..., Tensor]] = {
    "plain": given_labels,
    "answers only": given_labels,
    "class weights": partial(by_class, weight=CLASS_WEIGHTS),
    "token weights": weighted_tokens,
    "label smoothing": partial(by_class, label_smoothing=0.1),
    "focal": focal,
    "loss mask": masked,
    "fused": fused,
    "preferences": partial(fused, sign=True),
    "stacked decay": partial(decayed, form="stacked"),
    "scaled decay": partial(decayed, form="scaled"),
}


def in_int8(g: Tensor) -> Tensor:
    scale = (g.abs().max() / 127).clamp_min(1e-30)
    return (g / scale).round() * scale


TOUCHES: dict[str, Callable[[nn.Parameter, Tensor], Tensor]] = {
    "L2": lambda p, g: g + 1e-2 * p.detach(),
    "noise": lambda p, g: g + 1e-3 * g.std() * torch.randn_like(g),
    "bfloat16": lambda p, g: g.bfloat16().to(g),
    "int8": lambda p, g: in_int8(g),
    "centralised": lambda p, g: g - g.mean(-1, keepdim=True),
    "top 30%": lambda p, g: g * (g.abs() >= g.abs().flatten().float().quantile(0.7)),
}
"""What a user's own code does to a gradient between backward and the optimizer's step."""


# ---- a training --------------------------------------------------------------------------------


@dataclass
class Seen:
    """What the script kept of a step: its truth, what its optimizer got, and its weights."""

    words: dict[str, set[int]]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass
class Verdict:
    """What came of one training."""

    looks: Counter[str] = field(default_factory=Counter)
    bounded: Counter[str] = field(default_factory=Counter)
    copies: list[Mapping[str, Tensor]] = field(default_factory=list)
    refuted: list[str] = field(default_factory=list)
    aggregated: list[str] = field(default_factory=list)


def true_words(ids: Tensor, counted: Tensor) -> dict[str, set[int]]:
    """Return labels that count, and ids that a counted label depends on, of causal texts."""
    labels = counted[:, 1:] > 0
    later = labels.flip(1).cumsum(1).flip(1) > 0
    return {"output": {*ids[:, 1:][labels].tolist()}, "input": {*ids[:, :-1][later].tolist()}}


def rows_of_embedding(model: Any, gradients: Mapping[str, Tensor], sigma: float) -> set[int]:
    """Return the types whose row of an embedding of its own exceeds noise by chance in half a V."""
    name = next((n for n in gradients if n.endswith("embed_tokens.weight")), "")
    if not name or model.get_input_embeddings().weight is model.get_output_embeddings().weight:
        return set()
    quantile = float(chi2.ppf(1 - 0.5 / VOCABULARY, WIDTH))
    is_named = gradients[name].double().square().sum(1) > sigma**2 * quantile
    return {*is_named.nonzero()[:, 0].tolist()}


def rows_of_head(gradients: Mapping[str, Tensor]) -> set[int]:
    """Return the types whose row of the head's gradient is none of the many that are alike.

    Types that are no labels have multiples of one row, the sum of hidden states by probability.
    """
    name = next((n for n in gradients if n.endswith("lm_head.weight")), "")
    if not name:
        return set()
    rows = gradients[name].double()
    common = functional.normalize(rows.median(0).values, dim=0)
    rest = (rows - (rows @ common)[:, None] * common).norm(dim=1).clamp_min(1e-300).log()
    return {*(deviations(rest) > 5).nonzero()[:, 0].tolist()}


def deviations(values: Tensor) -> Tensor:
    """Return how far values are from their median, in robust standard deviations."""
    distances = values - values.median()
    return distances / (1.4826 * distances.abs().median())


def span_of_lora(model: Any, gradients: Mapping[str, Tensor]) -> set[int]:
    """Return the types whose input of the first block lies in the span of its A's gradients."""
    parts = [g.double() for n, g in gradients.items() if "layers.0." in n and "lora_A" in n]
    parts = [g / g.norm() for g in parts if bool(g.any()) and g.shape[1] == WIDTH]
    if not parts:
        return set()
    core = model.get_base_model().model
    inputs = core.layers[0].input_layernorm(core.embed_tokens.weight.detach()).detach().double()
    return in_span(inputs, torch.cat(parts))


def in_span(inputs: Tensor, rows: Tensor) -> set[int]:
    """Return the types whose input lies in the span of rows, up to their largest gap."""
    _, sizes, directions = torch.linalg.svd(rows, full_matrices=False)
    gaps = (sizes[:-1] / sizes[1:].clamp_min(1e-12)).log()
    basis = directions[: int(gaps[:-1].argmax()) + 1 if len(gaps) > 1 else 1]
    rest = (inputs - inputs @ basis.T @ basis).norm(dim=1) / inputs.norm(dim=1)
    rest = rest.nan_to_num(1.0).clamp_min(1e-12).log()
    return {*(deviations(rest) < -4).nonzero()[:, 0].tolist()}


def span_of_b(model: Any, gradients: Mapping[str, Tensor]) -> set[int]:
    """Return the types whose input of the first block, through A, lies in the span of B's rows."""
    named: set[int] = set()
    weights = dict(model.named_parameters())
    for name, gradient in gradients.items():
        if "layers.0." in name and "lora_B" in name and bool(gradient.any()):
            a = weights[name.replace("lora_B", "lora_A")].detach().double()
            core = model.get_base_model().model
            inputs = core.layers[0].input_layernorm(core.embed_tokens.weight).detach()
            if a.shape[1] == WIDTH:
                named |= in_span(inputs.double() @ a.T, gradient.double())
    return named


def read_alone(training: Training, seen: Seen) -> dict[str, float]:
    """Return the F1 of each reader that names more than chance of what the optimizer got."""
    with torch.random.fork_rng():
        model: Any = training.model()
    model.load_state_dict(seen.weights)
    named = {
        "rows of the head": ("output", rows_of_head(seen.gradients)),
        "rows of the embedding": (
            "input",
            rows_of_embedding(model, seen.gradients, training.noise_std()),
        ),
        "span of LoRA's B": ("input", span_of_b(model, seen.gradients)),
        "span of the LoRA": ("input", span_of_lora(model, seen.gradients)),
    }
    return {
        name: 2 * len(true & types) / max(1, len(true) + len(types))
        for name, (surface, types) in named.items()
        for true in [seen.words[surface]]
        if hypergeom.sf(len(true & types) - 1, VOCABULARY, len(true), len(types)) < CHANCE
    }


def shown_of(latest: Mapping[str, float]) -> dict[str, float]:
    """Return the rates of the attacks at a look, and their controls."""
    ends = ("/f1", "/control", "_part")
    return {n.removeprefix("leakage/"): round(v, 3) for n, v in latest.items() if n.endswith(ends)}


def judge(
    training: Training, watch: Watch, seen: Seen, gate: Threshold, fired: list[Any],
    verdict: Verdict,
) -> None:  # fmt: skip
    """Add a look to the verdict."""
    need = max(gate.at_most, 0.5)
    step, latest = watch.engine.results.last_step, watch.latest
    number = latest.get("leakage/worst/words")
    if number is None or "leakage/worst/words" not in watch.engine.results.look_values:
        verdict.looks["no result yet"] += 1
        return
    bounds = [v for n, v in latest.items() if n.endswith("/bound") and not math.isnan(v)]
    is_bounded = bool(bounds) and max(bounds) <= gate.at_most
    if fired:
        unknown = fired[-1].value != fired[-1].value
        verdict.looks["unknown" if unknown else "fired"] += 1
        verdict.bounded[str(fired[-1].why) if unknown else "fired"] += is_bounded
        return
    controls = {n: v for n, v in latest.items() if n.endswith("/control_of_a_part")}
    parted = any(
        part > need and not latest.get(n.removesuffix("_of_a_part"), math.nan) > gate.at_most
        for n, part in controls.items()
    )
    verdict.looks["by aggregation" if parted else "low"] += 1
    verdict.bounded["low"] += is_bounded
    rates = shown_of(latest)
    for name, f1 in read_alone(training, seen).items():
        if f1 > number + REFUTES:
            line = f"step {step}: {name} read {f1:.3f}, the log has {number:.3f}; {rates}"
            (verdict.aggregated if parted else verdict.refuted).append(f"{training}\n    {line}")


def check_truth(
    training: Training, folder: Path, truths: Mapping[int, Seen], verdict: Verdict
) -> None:
    """Compare the number of true words of each result in the log with the script's own."""
    for line in map(json.loads, (folder / "leakage.jsonl").read_text().splitlines()):
        surface = "input" if line["attack"] in ("subspace_words", "bag_of_words") else "output"
        n_words = len(truths[line["step"]].words[surface]) if line["step"] in truths else line["n"]
        if line["unknown"] is None and line["n"] and line["n"] != n_words:
            why = f"step {line['step']}: {line['attack']} has {line['n']} true words, not {n_words}"
            verdict.refuted.append(f"{training}\n    {why}")


def run(
    training: Training, folder: Path, at_most: float, *, watched: bool = True, copying: bool = False
) -> Verdict:
    """Train, look, and ask readers of its own where the gate lets a look pass."""
    verdict, model = Verdict(), training.model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], training.rate)
    own = TOUCHES.get(training.touch, lambda _, g: g)
    scaled = {id(p) for n, p in model.named_parameters() if SCALED[training.scaled](n)}

    def touch(p: nn.Parameter, g: Tensor) -> Tensor:
        g = g * training.factor if id(p) in scaled else g
        return own(p, g) + training.penalty * p.detach() if training.penalty else own(p, g)

    called: Any = torch.compile(model, backend="aot_eager") if training.compiled else model
    if training.by_hook:
        for p in optimizer.param_groups[0]["params"]:
            p.register_hook(lambda g, p=p: touch(p, g))
    fired: list[Any] = []
    gate = Threshold("leakage/worst/words", at_most=at_most, action=fired.append)
    settings = WatchSettings(
        precision=training.precision, tensorboard=False, assume=HONEST_BUT_CURIOUS
    )
    truths: dict[int, Seen] = {}
    steps = range(max(training.step, 2) + 1)
    rows = [{"input_ids": training.ids(step)} for step in steps]
    loader: Any = DataLoader(rows, batch_size=None)  # type: ignore[arg-type]
    if training.defence == "DPSGD":  # which draws its own batches
        texts = [{"input_ids": text} for batch in rows for text in batch["input_ids"]]
        loader = DataLoader(texts, batch_size=training.rows, shuffle=True)  # type: ignore[arg-type]
    defended: Any = nullcontext()
    if defences := training.defences():
        precision = "bf16-mixed" if training.precision == "bf16-mixed" else None
        defended = DefendedLoop(called, optimizer, loader, defences, epochs=1, precision=precision)
    watching: Any = nullcontext()
    if watched:
        looks = {"folder": folder, "every_n_steps": max(1, training.step)}
        watching = Watch(called, optimizer, "auto", [gate], settings=settings, **looks)
    with defended as loop, watching as watch:
        for step, given in enumerate(loader if loop is None else loop):
            ids = given["input_ids"]
            looks = watch.engine.results.looks if watched else 0
            counted = torch.ones_like(ids)
            if training.loss in ("answers only", "loss mask"):
                counted[:, : training.length // 2] = 0
            batch = {"input_ids": ids}
            if training.loss == "loss mask":
                batch["loss_mask"] = counted
            else:
                batch["labels"] = ids.masked_fill(counted == 0, -100)
            fired.clear()
            with watch.step(batch) if watched else nullcontext():
                if training.batch == "cropped":
                    ids, counted = ids[:, : max(4, training.length // 2)], torch.ones_like(ids)
                elif training.batch == "another":
                    ids = training.ids(step + 500)
                counted = counted[:, : ids.shape[1]]
                with torch.autocast("cpu", torch.bfloat16, training.precision == "bf16-mixed"):
                    compute = partial(LOSSES[training.loss], called, counted=counted)
                    loss = compute(ids) if loop is None else loop.loss(compute, ids)
                loss.backward()
                for p in optimizer.param_groups[0]["params"] if not training.by_hook else ():
                    if p.grad is not None:
                        p.grad.copy_(touch(p, p.grad))
                weights = {n: t.clone() for n, t in model.state_dict().items()}
                if copying:
                    verdict.copies.append(copied(training, model, folder))
                optimizer.step()  # which a declared defence acts in
                gradients = {
                    n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
                }
                written = training.ids(step) if training.defence == "TokenLDP" else ids
                truths[step] = Seen(true_words(written, counted), gradients, weights)
                optimizer.zero_grad()
            if watched and watch.engine.results.looks > looks:
                seen = truths[watch.engine.results.last_step]
                judge(training, watch, seen, gate, fired, verdict)
    verdict.copies.append(model.state_dict())
    # Of a compiled model words are read from the batch, which has no mask of the loss.
    if watched and not training.compiled and training.defence != "TokenLDP":
        check_truth(training, folder, truths, verdict)
    return verdict


def copied(training: Training, model: nn.Module, folder: Path) -> Mapping[str, Tensor]:
    """Return the weights of copies of a model: averaged, and saved, if its hooks can be saved."""
    averaged = AveragedModel(copy.deepcopy(model))
    averaged.update_parameters(model)
    saved: nn.Module = averaged
    if not (training.noise or training.own_dropout):
        torch.save(model, folder / "copy.pt")
        saved = torch.load(folder / "copy.pt", weights_only=False)
    return {**averaged.module.state_dict(), **dict(saved.named_parameters("saved"))}


def compare(training: Training, folder: Path, at_most: float) -> Verdict:
    """Return the looks of a training, refuted if its weights depend on whether it is watched."""
    both = []
    for watched in (True, False):
        torch.compiler.reset()
        both.append(run(training, folder, at_most, watched=watched, copying=True))
    with_looks, without = both
    pairs = zip(with_looks.copies, without.copies, strict=True)
    equal = all(set(x) == set(y) and all(torch.equal(x[n], y[n]) for n in x) for x, y in pairs)
    refuted = [] if equal else [f"{training}\n    watched weights differ"]
    return replace(with_looks, refuted=refuted)


KINDS: dict[str, Callable[[int], Training]] = {
    "drawn": Training.drawn,
    "large": Training.large,
    "untouched": Training.untouched,
    "declared": Training.declared,
    # A counter in a closure is state that no module holds, which a repeated step moves on.
    "identity": lambda seed: replace(Training.drawn(seed), own_dropout=0.0),
}


def main() -> int:
    kinds = ("drawn", ", ".join(KINDS))
    parser = parser_of(
        __doc__, runs=100, only=(0, "the first draw"), kind=kinds, at_most=(0.5, "of the gate")
    )
    options = parser.parse_args()
    quieten()
    total, start = Verdict(), time.monotonic()
    by_setting: dict[str, Counter[str]] = {}
    judge_run = compare if options.kind == "identity" else run
    for seed in range(options.only, options.only + options.runs):
        training = KINDS[options.kind](seed)
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
            try:
                verdict = judge_run(training, Path(folder), options.at_most)
            except ValueError as refusal:  # a gate on what nothing reads is refused
                if "not 'safe'" not in str(refusal) and not isinstance(refusal, DefenseError):
                    raise
                verdict = Verdict(Counter({"refused": 1}))
        total.looks += verdict.looks
        total.bounded += verdict.bounded
        total.refuted += verdict.refuted
        total.aggregated += verdict.aggregated
        by_setting.setdefault(training.setting(), Counter()).update(verdict.looks)
        for line in verdict.refuted:
            print("REFUTED", line, flush=True)
    print(f"{options.runs} trainings, {time.monotonic() - start:.0f} s, looks: {dict(total.looks)}")
    print(f"looks with a bound on all readers of at most the limit: {dict(total.bounded)}")
    if options.kind in ("untouched", "declared"):
        for setting, looks in sorted(by_setting.items()):
            print(f"  {setting}: {dict(looks)}")
    print(f"known and refuted: {len(total.refuted)}; by aggregation, and another reads more:")
    print("\n".join(total.aggregated) or "none")
    return 1 if total.refuted else 0


if __name__ == "__main__":
    sys.exit(main())
