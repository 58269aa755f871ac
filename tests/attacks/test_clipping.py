"""Clipping by value: no attack reads little, known, off entries that were cut to one size.

The step made again is not cut, which shows how much of the gradient the clipping has changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fedleak import LeakageMonitor, attacks
from lightning_fedleak.callbacks import Games
from lightning_fedleak.engine.channels.control import MAX_UNEXPLAINED
from lightning_fedleak.engine.results import UNEXPLAINED
from tests.attacks.row_space.models import VOCABULARY, bert, gpt2, llama, with_lora
from tests.callbacks.runs import fit
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader

TEXT = torch.randint(3, VOCABULARY, (60, 12), generator=torch.Generator().manual_seed(5))
HELD = torch.randint(3, VOCABULARY, (24, 10), generator=torch.Generator().manual_seed(9))


def aligned(**more: Any) -> attacks.AlignedFlatChat:
    text = attacks.PublicText(TEXT)
    return attacks.AlignedFlatChat(text, calibration_tokens=600, lengths=(8, 12), **more)


def lora() -> nn.Module:
    return with_lora(llama(), 8, ["q_proj", "v_proj"])


WORDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], attacks.Attack]]] = {
    "head": (llama, aligned),
    "flattened": (
        llama,
        lambda: attacks.FlatChat(attacks.PublicText(TEXT), shapes=((1, 10), (2, 10), (4, 10))),
    ),
    "bias": (bert, attacks.BiasSign),
    "rows": (lambda: gpt2(tie_word_embeddings=False), attacks.BagOfWords),
    "whole": (gpt2, lambda: attacks.SubspaceWords(capacity_seconds=0)),
    "lora": (lora, lambda: attacks.SubspaceWords(capacity_seconds=0)),
    "texts": (lora, lambda: attacks.SubspaceTexts(budget_seconds=3)),
    "own gradient": (lora, lambda: attacks.GradientMembership(attacks.PublicText(TEXT))),
    "row spaces": (lora, lambda: attacks.SubspaceMembership(attacks.PublicText(TEXT))),
}
READS = {"bias", "rows", "own gradient"}
"""Those that read what was cut at .01."""


def looked(root: Path, case: str, **trainer: Any) -> dict[str, float]:
    family, make = WORDS[case]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = CausalLMModule(family().train(), optimizer="sgd")  # type: ignore[arg-type]
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
    monitor = LeakageMonitor(
        make(), every_n_steps=1, games=Games(held_out=attacks.PublicText(HELD))
    )
    loader = random_token_loader(n=2, batch_size=2, length=10, vocab=VOCABULARY)
    fit([monitor], root, module=module, loader=loader, **trainer)
    name = monitor.attacks[0].name
    values = {m: monitor.latest.get(f"leakage/{name}/{m}") for m in ("f1", "auc", "token_accuracy")}
    values["unexplained"] = monitor.latest.get(UNEXPLAINED)
    return {metric: value for metric, value in values.items() if value is not None}


def headline(values: dict[str, float]) -> float:
    return values.get("auc", values.get("token_accuracy", values.get("f1", math.nan)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "size"),
    [
        *((case, 0.01) for case in WORDS),
        *((case, 1e-4) for case in ("head", "lora", *sorted(READS))),
    ],
)
def test_what_is_cut_is_read_or_unknown(tmp_path: Path, case: str, size: float) -> None:
    clipped = {"gradient_clip_val": size, "gradient_clip_algorithm": "value"}
    values = looked(tmp_path, case, **clipped)
    value = headline(values)
    assert math.isnan(value) or value > 0.85 or values["unexplained"] > MAX_UNEXPLAINED
    if case in READS:
        assert value > 0.85


@pytest.mark.filterwarnings("ignore")
def test_clipping_by_norm_changes_nothing(tmp_path: Path) -> None:
    norm = {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "norm"}
    assert headline(looked(tmp_path, "lora", **norm)) > 0.95
