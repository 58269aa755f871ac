"""Rounds of a federation of causal models: batches, models, optimizers and their rates.

A rank is that of a LoRA on all linear layers; a rank of 0 is the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.shared import trained, with_lora
from lightning_fedleak.cli.finetuning.assets import model_source

SGD, MOMENTUM = torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9)
OPTIMIZERS = {"sgd": SGD, "momentum": MOMENTUM, "adamw": torch.optim.AdamW}
LORA_RATES = {"sgd": 0.03, "momentum": 0.003, "adamw": 3e-4}
WHOLE_RATES = {"sgd": 1e-3, "momentum": 1e-4, "adamw": 3e-5}


def batches(
    rows: list[list[int]], size: int, length: int, pad: int, generator: torch.Generator
) -> Iterator[dict[str, Tensor]]:
    """Batches of texts in a random order, again and again."""
    while True:
        order = torch.randperm(len(rows), generator=generator).tolist()
        for start in range(0, len(order) - size + 1, size):
            chosen = [rows[i][:length] for i in order[start : start + size]]
            wide = max(map(len, chosen))
            ids = torch.tensor([r + [pad] * (wide - len(r)) for r in chosen])
            mask = torch.tensor([[1] * len(r) + [0] * (wide - len(r)) for r in chosen])
            labels = ids.masked_fill(mask == 0, -100)
            yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


def model_of(name: str | None, rank: int) -> nn.Module:
    """A causal model with a LoRA of that rank on all linear layers; of rank 0 the whole one."""
    from transformers import AutoModelForCausalLM

    source, options = model_source(name)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(source, **options).float()
    if rank:
        torch.manual_seed(0)
        model = with_lora(model, rank)
    return model.train()


def rate_of(optimizer: str, rank: int) -> float:
    """The learning rate, at which stories15M does not diverge."""
    rate = (LORA_RATES if rank else WHOLE_RATES)[optimizer]
    return rate / 3 if optimizer == "sgd" and rank > 8 else rate


def optimizer_of(name: str, rank: int) -> Any:
    """The optimizer of a LoRA of that rank; of rank 0 of the whole model."""
    return partial(OPTIMIZERS[name], lr=rate_of(name, rank))


def train(model: nn.Module, data: list[dict[str, Tensor]], optimizer: Any) -> float:
    """A round, by an optimizer that begins afresh; the loss of its last step."""
    stepping = optimizer(trained(model))
    loss = torch.tensor(math.nan)
    for batch in data:
        stepping.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        stepping.step()
    return float(loss.detach())
