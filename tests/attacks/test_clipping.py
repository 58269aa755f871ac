"""Clipping by value: no attack reads little, known, off entries that were cut to one size."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fedleak import LeakageMonitor
from lightning_fedleak.attacks import (
    AlignedFlatChat,
    Attack,
    BagOfWords,
    BiasSign,
    FlatChat,
    GradientMembership,
    PublicText,
    RevealLabels,
    SubspaceMembership,
    SubspaceTexts,
    SubspaceWords,
)
from lightning_fedleak.attacks.base import RunFacts
from lightning_fedleak.attacks.local_steps import cut_size, shared_cut
from lightning_fedleak.callbacks import Games
from lightning_fedleak.model.snapshots import GradientSnapshot, Stage, UpdateSnapshot
from tests.attacks.row_space.models import VOCABULARY, bert, gpt2, llama, with_lora
from tests.callbacks.runs import fit
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader

TEXT = torch.randint(3, VOCABULARY, (60, 12), generator=torch.Generator().manual_seed(5))
HELD = torch.randint(3, VOCABULARY, (24, 10), generator=torch.Generator().manual_seed(9))
GRADIENT = torch.randn(40, 30, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("gradient", "size"),
    [
        (GRADIENT, None),
        (GRADIENT.clamp(-1.5, 1.5), 1.5),
        (GRADIENT.clamp(-1.5, 1.5).bfloat16(), 1.5),
        (torch.cat([GRADIENT[:1], -GRADIENT[:1]]), None),  # a head of two classes
        (torch.zeros(4, 4), None),
        (GRADIENT.clamp(-1.5, 1.5).index_fill(0, torch.tensor([0]), math.nan), None),
        (torch.tensor([math.inf, -math.inf] * 4), None),
        (GRADIENT[:0], None),
    ],
)
def test_a_gradient_shows_to_what_its_entries_were_cut(
    gradient: Tensor, size: float | None
) -> None:
    assert cut_size(gradient) == size


def snapshot(gradient: Tensor, stage: Stage = Stage.SHARED, **more: Any) -> GradientSnapshot:
    kind = UpdateSnapshot if more else GradientSnapshot
    return kind(0, stage, {"w": gradient}, **more)


@pytest.mark.parametrize(
    ("shared", "facts", "size"),
    [
        (snapshot(GRADIENT.clamp(-1, 1)), RunFacts(clip_value=1.0), 1.0),
        (snapshot(GRADIENT.clamp(-1, 1)), RunFacts(), 1.0),
        (snapshot(GRADIENT), RunFacts(clip_value=9.0), None),
        (snapshot(GRADIENT), RunFacts(), None),
        # Noise on top hides which entries were cut, so that none counts as known.
        (snapshot(GRADIENT), RunFacts(clip_value=9.0, defended=frozenset({"gradients"})), math.nan),
        (
            snapshot(GRADIENT, Stage.LOCAL),
            RunFacts(clip_value=9.0, defended=frozenset({"gradients"})),
            None,
        ),
        # All entries of a first step of Adam are of one size, cut or not.
        (snapshot(GRADIENT.sign(), local_steps=1), RunFacts(optimizer="Adam"), None),
        (
            snapshot(GRADIENT.sign(), local_steps=1),
            RunFacts(optimizer="Adam", clip_value=1.0),
            math.nan,
        ),
        # What weights of finite precision have moved by is cut but for rounding.
        (
            snapshot(GRADIENT.clamp(-1, 1) * (1 + 1e-4 * GRADIENT), local_steps=1),
            RunFacts(optimizer="SGD"),
            pytest.approx(1.0, rel=1e-3),
        ),
    ],
)
def test_what_was_shared_is_known_to_be_cut(
    shared: GradientSnapshot, facts: RunFacts, size: float | None
) -> None:
    assert shared_cut(shared, ["w"], facts) == pytest.approx(size, nan_ok=True)


def aligned(**more: Any) -> AlignedFlatChat:
    text = PublicText(TEXT)
    return AlignedFlatChat(text, calibration_tokens=600, lengths=(8, 12), **more)


def lora() -> nn.Module:
    return with_lora(llama(), 8, ["q_proj", "v_proj"])


WORDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Attack]]] = {
    "head": (llama, aligned),
    "sign": (llama, lambda: aligned(readout="sign")),
    "flattened": (llama, lambda: FlatChat(PublicText(TEXT), shapes=((1, 10), (2, 10), (4, 10)))),
    "programs": (llama, RevealLabels),
    "bias": (bert, BiasSign),
    "rows": (lambda: gpt2(tie_word_embeddings=False), BagOfWords),
    "whole": (gpt2, lambda: SubspaceWords(capacity_seconds=0)),
    "lora": (lora, lambda: SubspaceWords(capacity_seconds=0)),
    "texts": (lora, lambda: SubspaceTexts(budget_seconds=20)),
    "own gradient": (lora, lambda: GradientMembership(PublicText(TEXT))),
    "row spaces": (lora, lambda: SubspaceMembership(PublicText(TEXT))),
}
READS = {"bias", "rows", "own gradient"}
"""Those that read what was cut at .01."""


class OwnClipping(CausalLMModule):
    """Clips by itself, of which a Trainer says nothing."""

    def configure_gradient_clipping(self, optimizer: Any, *given: Any, **more: Any) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)


def looked(
    root: Path, case: str, kind: type[CausalLMModule] = CausalLMModule, **trainer: Any
) -> dict[str, float]:
    family, make = WORDS[case]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = kind(family().train(), optimizer="sgd")  # type: ignore[arg-type]
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
    monitor = LeakageMonitor(make(), every_n_steps=1, games=Games(held_out=PublicText(HELD)))
    loader = random_token_loader(n=4, batch_size=2, length=10, vocab=VOCABULARY)
    fit([monitor], root, module=module, loader=loader, **trainer)
    name = monitor.attacks[0].name
    values = {m: monitor.latest.get(f"leakage/{name}/{m}") for m in ("f1", "auc", "token_accuracy")}
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
    value = headline(looked(tmp_path, case, **clipped))
    assert math.isnan(value) or value > 0.85
    if size == 0.01:
        assert math.isnan(value) == (case not in READS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["head", "whole"])
def test_clipping_that_the_trainer_says_nothing_of(tmp_path: Path, case: str) -> None:
    assert math.isnan(headline(looked(tmp_path, case, OwnClipping)))


@pytest.mark.filterwarnings("ignore")
def test_clipping_by_norm_changes_nothing(tmp_path: Path) -> None:
    norm = {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "norm"}
    assert headline(looked(tmp_path, "lora", **norm)) > 0.95
