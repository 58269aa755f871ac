"""How often a certificate of SubspaceWords is given, and how often it is wrong.

    python -m benchmarks.attacks.subspace_certificates --runs 1000

Every run is a small model of random weights (Llama, GPT-2, BERT; V 300, d 64), whole or with a
LoRA of random rank, and a batch of 1 to 8 texts of random length. Of Llama and BERT the LoRA is on
queries and values, or on some others of queries, keys and values. In three of ten runs two types of
the batch differ by 1e-6 to 1e-4 of their embedding's norm. A certificate is *false* if a type is
named that was not there, or one is missing whose part of the rows of the whole projections, be they
shared or not (what the other true types do not explain of it) lies above rounding, 4 units in the
last place of single precision. Where such a type nearly equals one that is named, positions and
other types may explain its part: these are *alike*, and counted apart. *Complete* are runs in which
every type was named and none besides.
"""

from __future__ import annotations

import argparse
import platform
import random
from collections.abc import Sequence
from datetime import date

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from benchmarks.attacks.text_certificates import make_alike
from lightning_fedleak.anatomy import Anatomy, find_anatomy
from lightning_fedleak.attacks import SubspaceWords, UnusableObservation
from lightning_fedleak.attacks.row_space.linear_maps import LinearMap, input_rows
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.snapshots import GradientSnapshot, Observation, Stage

SMOKE = ("--runs 6",)
FLOOR = 4 * torch.finfo(torch.float32).eps


TARGETS = {
    "llama": ("q_proj", "k_proj", "v_proj"),
    "bert": ("query", "key", "value"),
    "gpt2": ("c_attn", "c_attn", "c_attn"),
}
ADAPTED = ((0, 2), (0, 2), (0,), (1,), (0, 1), (2,))


def model_of(family: str, rank: int, adapted: tuple[int, ...]) -> nn.Module:
    """A small model with norms of its own, its adapters away from B = 0."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    if family == "llama":
        model: nn.Module = LlamaForCausalLM(
            LlamaConfig(vocab_size=300, intermediate_size=96, **sizes)
        )
    elif family == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=32)
        )
    else:
        model = BertForMaskedLM(
            BertConfig(vocab_size=300, intermediate_size=96, max_position_embeddings=32, **sizes)
        )
    with torch.no_grad():
        for module in model.modules():
            if "norm" in type(module).__name__.lower():
                for parameter in module.parameters(recurse=False):
                    parameter += 0.2 * torch.randn_like(parameter)
    if rank:
        targets = [TARGETS[family][i] for i in adapted]
        model = get_peft_model(model, LoraConfig(r=rank, target_modules=targets))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter += 0.05 * torch.randn_like(parameter)
    return model.eval()


def missing_part(gradients: list[torch.Tensor], inputs: torch.Tensor, kept: torch.Tensor) -> float:
    """The largest part of rows that a row of ``inputs`` alone explains.

    Args:
        gradients: of maps that read these inputs.
        inputs: (n, d) distinct inputs that really were there.
        kept: (n,) which of them are named.
    """
    rows = torch.cat([g.double() / g.double().norm() for g in gradients if g.any()])
    x = inputs.double() / inputs.double().norm(dim=1, keepdim=True)
    largest = 0.0
    for j in (~kept).nonzero()[:, 0].tolist():
        others = torch.cat([x[:j], x[j + 1 :]])
        basis = torch.linalg.qr(others.T).Q
        own = x[j] - basis @ (basis.T @ x[j])
        if float(own.norm()) > 1e-9:
            part = (rows - (rows @ basis) @ basis.T) @ (own / own.norm())
            largest = max(largest, float(part.norm()) / float(rows.norm()))
    return largest


def whole_gradients(
    model: nn.Module, anatomy: Anatomy, maps: Sequence[LinearMap], ids: torch.Tensor
) -> list[torch.Tensor]:
    """What whole projections would share, each (n, d)."""
    whole = [(m, anatomy.parameter(m.name)) for m in maps if m.factor == "whole"]
    for _, parameter in whole:
        parameter.requires_grad_(True)
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return [p.grad if m.axis == 1 else p.grad.T for m, p in whole]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    count = dict.fromkeys(("certified", "complete", "both", "unknown", "false", "alike"), 0)
    for _ in range(options.runs):
        family = rng.choice(("llama", "gpt2", "bert"))
        rank = rng.choice((0, 2, 4, 8, 16))
        model = model_of(family, rank, rng.choice(ADAPTED)).to(options.device)
        ids = torch.randint(5, 300, (rng.choice((1, 2, 4, 8)), rng.randint(2, 24)))
        types = ids.unique().tolist()
        alike: set[int] = set()
        if rng.random() < 0.3 and len(types) > 1:
            one, other = rng.sample(types, 2)
            make_alike(model, one, other, 10 ** rng.uniform(-6, -4))
            alike = {one, other}
        anatomy = find_anatomy(model)
        attack = SubspaceWords(capacity_seconds=0)
        attack.prepare(anatomy)
        batch = TokenBatch(ids, ids, None, "masked" if family == "bert" else "causal")
        ids = ids.to(options.device)
        model(input_ids=ids, labels=ids).loss.backward()
        grads = {r: anatomy.parameter(r).grad for r in attack.needs(anatomy).gradients}
        view = Observation((GradientSnapshot(0, Stage.SHARED, grads),))
        truth = set(batch.context_ids().tolist())
        try:
            guess = attack.run(view)
        except UnusableObservation:
            count["unknown"] += 1
            continue
        named = set(guess.types.tolist())
        count["complete"] += named == truth
        count["certified"] += bool(guess.certified)
        count["both"] += bool(guess.certified) and named == truth
        if guess.certified and named - truth:
            count["false"] += 1
        elif guess.certified and truth - named:
            known = next(r.known for r in attack._readable if not r.is_factor_b)
            seen = ids if family == "bert" else ids[:, :-1]
            inputs = input_rows(anatomy, known, ids)[:, : seen.shape[1]].flatten(0, 1)
            distinct = torch.unique(torch.cat([seen.flatten()[:, None], inputs], 1), dim=0)
            kept = torch.tensor([int(t) in named for t in distinct[:, 0].tolist()])
            of_whole = whole_gradients(model, anatomy, known.maps, ids)
            above = missing_part(of_whole, distinct[:, 1:], kept) > FLOOR
            count["alike" if truth - named < alike else "false"] += above
    print(f"# {platform.machine()}, one thread, {options.device}, {date.today()}")
    print(
        f"{options.runs} runs: {count['unknown']} unknown, {count['complete']} complete, "
        f"{count['certified']} certified; of the complete {count['both']} certified; "
        f"{count['false']} certificates false, {count['alike']} alike"
    )


if __name__ == "__main__":
    main()
