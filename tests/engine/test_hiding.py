"""A number that noise, dropout, clipping or a loss makes low for an attack alone is unknown."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional

from lightning_fedleak import PublicText
from lightning_fedleak.attacks import (
    FlatChat,
    GradientMembership,
    SubspaceWords,
)
from lightning_fedleak.engine import Games
from lightning_fedleak.trainers import Threshold
from tests.helpers.loops import watched
from tests.helpers.models import tiny_llama

STEPS = 3


def texts(n: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (n, 12), generator=generator).tolist()


def settings(**more: Any) -> dict[str, Any]:
    """Return what each loop here has: three batches, and texts held out."""
    batches = [{"input_ids": x, "labels": x} for x in torch.tensor(texts(4 * STEPS, 4)).split(4)]
    games = Games(held_out=PublicText(texts(40, 3)), targets=8)
    return {"batches": batches, "optimizer": "adamw", "lr": 1e-3, "games": games, **more}


def last(watch: Any) -> dict[str, Any]:
    """Return the lines of the last step by attack."""
    return {line["attack"]: line for line in watch.lines() if line["step"] == STEPS - 1}


def test_what_dropout_hides_it_hides_from_the_control_too(tmp_path: Path) -> None:
    gate = Threshold("leakage/subspace_words/f1", at_most=0.5, action="warn")
    model = tiny_llama(d=64)
    config = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.6)
    torch.manual_seed(1)
    model = get_peft_model(model, config)
    watched(tmp_path, SubspaceWords(capacity_seconds=0), model, **settings(gates=[gate]))
    assert gate.fired is not None
    assert math.isnan(gate.fired.value)
    assert "this attack cannot show more than" in gate.fired.why


def preferring(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """Return a loss that prefers the first half of the texts to the second, as DPO does."""
    targets = labels[:, 1:]
    losses = functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets, reduction="none")
    chosen, rejected = (-losses.sum(1)).chunk(2)
    return -functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def test_of_a_loss_that_prefers_texts_the_control_says_who_reads_it(tmp_path: Path) -> None:
    """Labels are read by the sizes of rows; a gradient of the likelihood shows no members."""
    public = PublicText(texts(60, 1))
    gate = Threshold("leakage/gradient_membership/auc", at_most=0.7, action="warn")
    model = tiny_llama()
    model.loss_function = preferring
    listed = [FlatChat(public), GradientMembership(public)]
    lines = last(watched(tmp_path, listed, model, **settings(gates=[gate])))
    assert lines["flatchat"]["metrics"]["f1"]["value"] > 0.9
    assert lines["gradient_membership"]["metrics"]["auc"]["value"] < 0.7
    assert gate.fired is not None
    assert math.isnan(gate.fired.value)
