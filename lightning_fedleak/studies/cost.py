"""What attacks take in time and memory, from small random models of the same width.

An attack's time grows in a straight line with the vocabulary and with the blocks that it reads:
each of its parts runs over one of them. So three models show the slopes, one with a larger
vocabulary and one with two blocks. A pursuit's time grows with the types of a batch, so that a
small one is tried. Memory is that of the smallest model, and the tensors that are larger.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_fedleak.anatomy import EMBEDDING_WEIGHT, Anatomy, find_anatomy
from lightning_fedleak.attacks import (
    Attack,
    GradientMembership,
    PublicText,
    Query,
    SubspaceMembership,
    SubspaceWords,
    frequent_tokens,
    gradient_of,
    row_space,
)
from lightning_fedleak.attacks.membership import token_parts
from lightning_fedleak.attacks.membership.gradients import MOST_NUMBERS
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.snapshots import GradientSnapshot, Observation, Stage
from lightning_fedleak.studies.models import with_lora

VOCABULARY = 8192  # of the smallest model; not tuned; larger: slower and more exact
LENGTH = 64  # tokens that membership attacks read of a text, by default
PUBLIC = 24  # public texts of a membership attack, by default
BLOCKS = 12  # that SubspaceMembership reads, by default
LOGITS_COPIES = 5  # logits, those counted, their logarithms and two gradients
PROBED = 64  # tokens of a probe; 3.5 times the types took 4.0 times as long (stories15M, r 8)
QUERIES = 8  # texts that a membership attack is asked about at a look; not tuned

ATTACKS: Mapping[str, Callable[[PublicText], Attack]] = {
    "subspace_words": lambda text: SubspaceWords(text, capacity_seconds=0),
    "subspace_membership": SubspaceMembership,
    "gradient_membership": GradientMembership,
}
"""The attacks that are tried, all of a causal model's projections or adapters on them."""


@dataclass(frozen=True)
class Cost:
    """What an attack takes.

    Attributes:
        calibration: processor seconds before training.
        calibration_bytes: memory above training's, at most; NaN where it cannot be measured.
        refresh: processor seconds in which it follows the model at a look.
        look: processor seconds of reading a gradient.
        look_bytes: memory of a look, above what the calibration stores.
    """

    calibration: float
    calibration_bytes: float
    refresh: float
    look: float
    look_bytes: float


def random_anatomy(
    config: Any, vocabulary: int, blocks: int, rank: int, targets: str | None = None
) -> Anatomy:
    """Return a random model of a configuration, its adapters trained a little.

    Args:
        config: of the model.
        vocabulary: its tokens.
        blocks: its blocks.
        rank: of the LoRA; 0 for the whole model.
        targets: modules with a LoRA; None for PEFT's choice.
    """
    config = deepcopy(config)
    config.vocab_size, config.num_hidden_layers = vocabulary, blocks
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:blocks]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        build: Any = AutoModelForCausalLM.from_config
        model = build(config, dtype=config.dtype or torch.float32)
        anatomy = with_lora(find_anatomy(model.eval()), rank, targets, 0)
        move(anatomy)
    return anatomy


@torch.no_grad()
def move(anatomy: Anatomy) -> None:
    """Change the trained parameters, as a step of training does."""
    for name in anatomy.trainable_names():
        parameter = anatomy.parameter(name)
        if parameter is not None:
            parameter.add_(0.01 * torch.randn_like(parameter))


def measure_cost(
    attack: Attack, anatomy: Anatomy, tokens: int, batch: TokenBatch | None = None
) -> Cost:
    """Return what an attack takes on a model, at two steps of training.

    Args:
        attack: asked about texts of 64 tokens, if it asks about texts.
        anatomy: of a causal model.
        tokens: of the client's batch.
        batch: whose gradient is read; None makes one up.
    """
    generator = torch.Generator().manual_seed(1)
    calibration, stored = clock(lambda: attack.prepare(anatomy))
    attack.refresh(anatomy, 0)
    with torch.random.fork_rng(devices=()):
        move(anatomy)
    refresh, _ = clock(lambda: attack.refresh(anatomy, 1))
    if batch is None:
        gradients = planted_gradients(attack, anatomy, tokens, generator)
    else:
        gradients = gradient_of(anatomy, batch, attack.needs(anatomy).gradients)
    view = Observation((GradientSnapshot(1, Stage.SHARED, gradients),))
    query = Query(frequent_tokens(anatomy, QUERIES, LENGTH, generator))
    look, more = clock(lambda: attack.run(view, query))
    return Cost(calibration, stored, refresh, look, more)


def planted_gradients(
    attack: Attack, anatomy: Anatomy, tokens: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return gradients whose first projections combine the inputs of a batch's types."""
    gradients = {}
    for name in attack.needs(anatomy).gradients:
        parameter = anatomy.parameter(name)
        assert parameter is not None
        noise = torch.randn(parameter.shape, generator=generator)
        gradients[name] = noise.to(parameter.device, parameter.dtype)
    types = torch.unique(frequent_tokens(anatomy, 1, tokens, generator))
    for known_input in row_space.find_known_inputs(anatomy, row_space.find_linear_maps(anatomy)):
        rows = row_space.input_rows(anatomy, known_input, types[:, None])[:, 0]
        for linear in known_input.maps:
            if linear.name in gradients:
                weights = torch.randn(linear.rows, len(types), generator=generator).to(rows)
                planted = weights @ rows
                old = gradients[linear.name]
                gradients[linear.name] = (planted if linear.axis == 1 else planted.T).to(old)
    return gradients


def predict_costs(config: Any, rank: int, targets: str | None, tokens: int) -> dict[str, Cost]:
    """Return what each attack would take on a model, by its name.

    Args:
        config: of the model.
        rank: of the LoRA; 0 for the whole model.
        targets: modules with a LoRA; None for PEFT's choice.
        tokens: of a client's batch.
    """
    vocabulary, blocks = config.vocab_size, config.num_hidden_layers
    # A pursuit chooses types one by one only where they are more than the rows.
    few = min(tokens, max(PROBED, 8 * rank)) if rank else tokens
    least, deep = min(vocabulary, VOCABULARY), min(blocks, 2)
    wide = min(vocabulary, 4 * least)
    measured: dict[tuple[int, int], dict[str, Cost]] = {}
    for size in dict.fromkeys([(least, 1), (wide, 1), (least, deep)]):
        anatomy = random_anatomy(config, *size, rank, targets)
        texts = PublicText(list(frequent_tokens(anatomy, 40, LENGTH, torch.Generator())))
        measured[size] = {
            name: measure_cost(attack(texts), anatomy, few) for name, attack in ATTACKS.items()
        }
    depths = {"subspace_words": 1, "subspace_membership": min(blocks, BLOCKS)}
    more_types = expected_types(vocabulary, tokens) / expected_types(vocabulary, few) - 1
    costs: dict[str, Cost] = {}
    for name, cost in measured[least, 1].items():
        rows = (vocabulary - least) / max(1, wide - least)
        deeper = depths.get(name, blocks) - 1
        seconds = {
            part: getattr(cost, part)
            + rows * max(0.0, getattr(measured[wide, 1][name], part) - getattr(cost, part))
            + deeper * max(0.0, getattr(measured[least, deep][name], part) - getattr(cost, part))
            for part in ("calibration", "refresh", "look")
        }
        words = costs["subspace_words"].look if costs else seconds["look"] * (1 + more_types)
        if name in depths:  # subspace_membership reads words too
            seconds["look"] += words * more_types / (1 + more_types)
        more = [
            large - small
            for large, small in zip(
                large_tensors(name, anatomy, vocabulary, blocks),
                large_tensors(name, anatomy, least, 1),
                strict=True,
            )
        ]
        costs[name] = Cost(
            **seconds,
            calibration_bytes=cost.calibration_bytes + more[0],
            look_bytes=cost.look_bytes + more[1],
        )
    return costs


def expected_types(vocabulary: int, tokens: int) -> float:
    """Return how many types so many tokens are expected to hold, as ``frequent_tokens`` draws."""
    odds = 1 / (10.0 + torch.arange(vocabulary))
    return float(-torch.expm1(tokens * torch.log1p(-odds / odds.sum())).sum())


def large_tensors(name: str, anatomy: Anatomy, vocabulary: int, blocks: int) -> tuple[float, float]:
    """Return bytes of the tensors that grow with the model, in calibration and in a look.

    They are the input of every token, the states and their covariances by block, the logits of a
    text with what their gradient needs, and both sides' covariances of each map.

    Args:
        name: of the attack.
        anatomy: of a model of the same width.
        vocabulary: tokens of the model.
        blocks: of the model.
    """
    maps = [m for m in row_space.find_linear_maps(anatomy) if anatomy.trainable(m.name)]
    tried = len({row_space.block_name(m.name) for m in maps})
    if name == "gradient_membership":
        logits = LOGITS_COPIES * 4 * max(vocabulary * LENGTH, token_parts.LOGITS_AT_ONCE)
        numbers = sum(token_parts.count_numbers(m, anatomy) for m in maps)
        return logits + 12 * min(blocks * numbers / tried, MOST_NUMBERS), logits
    width = anatomy.hidden_size
    weight = anatomy.parameter(EMBEDDING_WEIGHT)
    assert weight is not None
    inputs = vocabulary * width * weight.element_size()
    rows = sum(m.rows for m in maps if m.factor != "B") / tried
    states = 4 * width * (width + PUBLIC * LENGTH) if name == "subspace_membership" else 0
    return inputs + min(blocks, BLOCKS) * states, 8 * vocabulary * min(rows, width)


def clock(function: Callable[[], object]) -> tuple[float, float]:
    """Return the processor seconds of a call, and the bytes by which it grows the process."""
    start = time.process_time()
    size = grown(function)
    return time.process_time() - start, size


def grown(function: Callable[[], object]) -> float:
    """Return the bytes by which resident memory grows at most within a call; NaN but on Linux."""
    if sys.platform != "linux":
        function()
        return math.nan
    ctypes.CDLL(None).malloc_trim(0)  # what was freed would be used again, and not be counted
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest so far

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10

    before = status("VmRSS")
    function()
    return status("VmHWM") - before
