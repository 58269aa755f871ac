"""What attacks take in time and memory, from small random models of the same width.

An attack's time grows in a straight line with the vocabulary and with the blocks that it reads:
each of its parts runs over one of them. So three models show the slopes, one with a larger
vocabulary and one with two blocks. A pursuit's time grows with the types of a batch, and that of
:class:`GradientMembership` with its texts, so that few are tried. Memory is that of the smallest
model, and the tensors that are larger.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
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
from lightning_fedleak.model_runs import undisturbed
from lightning_fedleak.progress import resident_bytes
from lightning_fedleak.snapshots import GradientSnapshot, Observation, Stage
from lightning_fedleak.studies.models import with_lora

VOCABULARY = 4096  # of the smallest model, as many as a pursuit screens; larger: slower
WIDER = 3  # times the vocabulary of the model that shows its slope; larger: slower, more exact
LENGTH = 64  # tokens that membership attacks read of a text, by default
PUBLIC = 24  # public texts of a membership attack, by default
BLOCKS = 12  # that SubspaceMembership reads, by default
LOGITS_COPIES = 2  # logits and those counted, then these and what they send back
PROBED = 64  # tokens of a probe; 3.5 times the types took 4.0 times as long (stories15M, r 8)
QUERIES = 8  # texts that a membership attack is asked about at a look; not tuned
STEP = 1e-5  # deviation of a small step's changes: tokens never trained stay nearly equal
FEW = 4  # texts of GradientMembership's calibration, and of its look, that are tried

WORDS, STATES, GRADIENTS = "subspace_words", "subspace_membership", "gradient_membership"
ATTACKS: Mapping[str, Callable[[PublicText], Attack]] = {
    WORDS: lambda text: SubspaceWords(text, capacity_seconds=0),
    STATES: SubspaceMembership,
    GRADIENTS: GradientMembership,
}
"""The attacks whose cost is predicted, all of a causal model's projections or adapters on them."""


@dataclass(frozen=True)
class Cost:
    """What an attack takes.

    Attributes:
        calibration: processor seconds before training.
        calibration_bytes: memory above training's, at most; NaN where it cannot be measured.
        refresh: processor seconds in which it follows the model at a look.
        look: processor seconds of reading a gradient.
        look_bytes: memory above training's at a look, with what the calibration stores.
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
        move(anatomy, 0.01)
    return anatomy


@torch.no_grad()
def move(anatomy: Anatomy, size: float) -> None:
    """Change the trained parameters, as training does."""
    for name in anatomy.trainable_names():
        parameter = anatomy.parameter(name)
        if parameter is not None:
            parameter.add_(size * torch.randn_like(parameter))


def measure_cost(
    attack: Attack,
    anatomy: Anatomy,
    tokens: int,
    batch: TokenBatch | None = None,
    queries: int = QUERIES,
) -> Cost:
    """Return what an attack takes on a model, at two steps of training.

    Args:
        attack: asked about texts of 64 tokens, if it asks about texts.
        anatomy: of a causal model.
        tokens: of the client's batch.
        batch: whose gradient is read; None makes one up.
        queries: texts that it is asked about.
    """
    generator = torch.Generator().manual_seed(1)
    trim()
    before = resident_bytes()
    calibration, most = clock(lambda: attack.prepare(anatomy))
    attack.refresh(anatomy, 0)
    with torch.random.fork_rng(devices=()):
        move(anatomy, STEP)
    refresh, _ = clock(lambda: attack.refresh(anatomy, 1))
    trim()
    before_gradients = resident_bytes()
    if batch is None:
        gradients = planted_gradients(attack, anatomy, tokens, generator)
    else:
        gradients = gradient_of(anatomy, batch, attack.needs(anatomy).gradients)
    trim()
    trained = resident_bytes() - before_gradients  # which is training's own
    view = Observation((GradientSnapshot(1, Stage.SHARED, gradients),))
    query = Query(frequent_tokens(anatomy, queries, LENGTH, generator))
    look, more = clock(lambda: attack.run(view, query))
    return Cost(calibration, most - before, refresh, look, more - before - trained)


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
    wide = min(vocabulary, WIDER * least)
    tried: dict[tuple[int, int], Collection[str]] = {(least, deep): (STATES, GRADIENTS)}
    tried[wide, 1] = (WORDS, GRADIENTS)
    tried[least, 1] = ATTACKS
    measured: dict[tuple[int, int], dict[str, Cost]] = {}
    saved, searched = dict[int, float](), dict[int, float]()
    for size in sorted(tried):
        anatomy = random_anatomy(config, *size, rank, targets)
        texts = PublicText(list(frequent_tokens(anatomy, 40, LENGTH, torch.Generator())))
        measured[size] = {name: try_attack(name, texts, anatomy, few) for name in tried[size]}
        saved[size[1]], searched[size[1]] = saved_bytes(anatomy), search_seconds(anatomy)
    types, few_types = (expected_types(vocabulary, n) for n in (tokens, few))
    rows = (vocabulary - least) / max(1, wide - least)
    read = {WORDS: 1, STATES: min(blocks, BLOCKS)}
    costs: dict[str, Cost] = {}
    for name in ATTACKS:
        cost, wider = measured[least, 1][name], name if name != STATES else WORDS
        seconds = {
            part: getattr(cost, part)
            + rows * rise(part, measured[least, 1][wider], measured[wide, 1][wider])
            + (read.get(name, blocks) - 1) * rise(part, cost, measured[least, deep].get(name, cost))
            for part in ("calibration", "refresh", "look")
        }
        unread = blocks - read.get(name, blocks)  # that a calibration runs all the same
        seconds["calibration"] += unread * max(0.0, searched[deep] - searched[1])
        words = costs[WORDS].look if costs else seconds["look"] * types / few_types
        if name in read:  # subspace_membership reads words too
            seconds["look"] += words * (1 - few_types / types)
        block = max(0.0, saved[deep] - saved[1])
        large = large_tensors(name, anatomy, vocabulary, blocks, block, PUBLIC, types)
        small = large_tensors(name, anatomy, least, 1, block, FEW, few_types)
        more = [whole - part for whole, part in zip(large, small, strict=True)]
        costs[name] = Cost(
            **seconds,
            calibration_bytes=cost.calibration_bytes + more[0],
            look_bytes=cost.look_bytes + more[1],
        )
    return costs


def try_attack(name: str, texts: PublicText, anatomy: Anatomy, tokens: int) -> Cost:
    """Return what an attack takes on a small model; of texts' gradients few are computed."""
    if name != GRADIENTS:
        return measure_cost(ATTACKS[name](texts), anatomy, tokens)
    attack = GradientMembership(texts, public_rows=FEW, controls=FEW // 2)
    cost = measure_cost(attack, anatomy, tokens, queries=FEW - FEW // 2)
    return replace(
        cost,
        calibration=cost.calibration + cost.look * (PUBLIC - FEW) / FEW,
        look=cost.look * (QUERIES + GradientMembership(texts).controls) / FEW,
    )


def rise(part: str, small: Cost, large: Cost) -> float:
    """Return by how much a part is larger; a clock's chance may show less."""
    more: float = getattr(large, part) - getattr(small, part)
    return max(0.0, more)


def search_seconds(anatomy: Anatomy) -> float:
    """Return the seconds in which a calibration finds what the blocks read."""
    maps = row_space.find_linear_maps(anatomy)
    return clock(lambda: row_space.find_known_inputs(anatomy, maps))[0]


def saved_bytes(anatomy: Anatomy) -> float:
    """Return the bytes that a text's forward keeps for its backward, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in anatomy.model.parameters()}
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros(1, LENGTH, dtype=torch.long, device=anatomy.device)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with undisturbed(anatomy) as model, torch.enable_grad(), hooks:
        model(input_ids=ids)
    return float(sum(size for place, size in sizes.items() if place not in parameters))


def expected_types(vocabulary: int, tokens: int) -> float:
    """Return how many types so many tokens are expected to hold, as ``frequent_tokens`` draws."""
    odds = 1 / (10.0 + torch.arange(vocabulary))
    return float(-torch.expm1(tokens * torch.log1p(-odds / odds.sum())).sum())


def large_tensors(
    name: str, anatomy: Anatomy, tokens: int, blocks: int, saved: float, texts: int, types: float
) -> tuple[float, float]:
    """Return bytes of the tensors that grow with the model, in calibration and in a look.

    They are the input of every token, the states and their covariances by block, the logits of a
    text and the states with what their gradient needs, and both sides' covariances of each map
    beside its whitened gradient.

    Args:
        name: of the attack.
        anatomy: of a model of the same width.
        tokens: of the model.
        blocks: of the model.
        saved: bytes that a block keeps of a text for its backward.
        texts: public texts that are run at once, at most.
        types: of a client's batch; their directions are compared with all tokens.
    """
    maps = [m for m in row_space.find_linear_maps(anatomy) if anatomy.trainable(m.name)]
    tried = len({row_space.block_name(m.name) for m in maps})
    if name == GRADIENTS:
        once = max(1, token_parts.LOGITS_AT_ONCE // (tokens * LENGTH))
        text = LOGITS_COPIES * 4 * tokens * LENGTH + blocks * saved
        numbers = sum(token_parts.count_numbers(m, anatomy) for m in maps)
        entries = sum(getattr(anatomy.parameter(m.name), "numel", int)() for m in maps)
        read = min(blocks / tried, MOST_NUMBERS / numbers)  # times the blocks that were tried
        calibration = 8 * read * (numbers - entries) + min(once, texts) * text
        return calibration, 4 * read * (numbers + entries) + min(once, texts, QUERIES) * text
    width = anatomy.hidden_size
    weight = anatomy.parameter(EMBEDDING_WEIGHT)
    assert weight is not None
    inputs = tokens * (width * weight.element_size() + 4)
    rows = sum(m.rows for m in maps if m.factor != "B") / tried
    products = 4 * tokens * min(2 * rows, width, types)
    if name == WORDS:
        return inputs, inputs + products
    states = 4 * width * min(blocks, BLOCKS)
    public = inputs + states * (width + PUBLIC * LENGTH)
    return public, public + states * QUERIES * LENGTH + products


def clock(function: Callable[[], object]) -> tuple[float, float]:
    """Return the processor seconds of a call, and the process's highest resident bytes in it."""
    trim()
    start = time.process_time()
    function()
    return time.process_time() - start, resident_bytes("VmHWM")


def trim() -> None:
    """Give back freed memory, which would be used again and not be counted; forget the peak."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
