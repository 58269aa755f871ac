"""Clients of a tiny federation, trained in a plain loop."""

import copy
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.federation import RoundSettings, trained_state
from tests.helpers.models import VOCAB, tiny_gpt2

SGD = partial(torch.optim.SGD, lr=0.05)
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def model() -> nn.Module:
    return tiny_gpt2(tied=False, dropout=0.0).train()


def lora(r: int = 4) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return get_peft_model(
            tiny_gpt2(dropout=0.0, tied=False),
            LoraConfig(r=r, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True),
        ).train()


def batches(seed: int, n: int = 2, rows: int = 2, length: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(n):
        ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
        result.append({"input_ids": ids, "labels": ids.clone()})
    return result


def train(sent_model, data, optimizer=SGD, *, state=trained_state) -> dict[str, Tensor]:
    """What a client returns that was sent a model."""
    local = copy.deepcopy(sent_model)
    stepping = optimizer([p for p in local.parameters() if p.requires_grad])
    for batch in data:
        stepping.zero_grad()
        local(**batch).loss.backward()
        stepping.step()
    return {n: t.detach().clone() for n, t in state(local).items()}


def round_settings(arguments: dict[str, Any]) -> tuple[dict[str, Any], RoundSettings]:
    """Return the arguments of an observer that are no settings, and the settings."""
    names = {one.name for one in fields(RoundSettings)}
    rare = {name: value for name, value in arguments.items() if name in names}
    plain = {name: value for name, value in arguments.items() if name not in names}
    return plain, RoundSettings(**{"tensorboard": False} | rare)
