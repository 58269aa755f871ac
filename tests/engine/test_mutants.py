"""Attacks that are broken on purpose: every gate says unknown, where the whole attack is read."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fedleak.attacks import (
    AlignedFlatChat,
    Attack,
    FCMembership,
    GradientMembership,
    PrefixInversion,
    SubspaceMembership,
    SubspaceWords,
)
from lightning_fedleak.model.snapshots import Observation
from lightning_fedleak.trainers import Threshold
from tests.engine.test_control import lora, watched
from tests.helpers.models import tiny_llama

MEMBERSHIP = GradientMembership | SubspaceMembership | FCMembership
AT_MOST = {"f1": 0.6, "auc": 0.65, "token_accuracy": 0.6}
PUBLIC = [[(7 * i + 3 * j) % 94 + 3 for j in range(12)] for i in range(48)]


def whole() -> nn.Module:
    return tiny_llama()


def low_rank() -> nn.Module:
    return lora(4)


def after(kind: type[Attack], method: str, change: Callable[[Any], object]) -> type[Attack]:
    """Return a class of attacks that ``change`` breaks each time after a method was called."""

    def broken(self: Any, *arguments: Any, **settings: Any) -> None:
        getattr(kind, method)(self, *arguments, **settings)
        change(self)

    return type(f"Broken{kind.__name__}", (kind,), {method: broken})


def reading(kind: type[Attack], change: Callable[[Tensor], Tensor]) -> type[Attack]:
    """Return a class of attacks that read something else than what was shared."""

    def run(self: Any, view: Observation, query: Any = None) -> Any:
        snapshot = view.gradients[-1]
        tensors = {role: change(tensor) for role, tensor in snapshot.tensors.items()}
        return kind.run(self, Observation((replace(snapshot, tensors=tensors),)), query)

    return type(f"Misreading{kind.__name__}", (kind,), {"run": run})


def answering(kind: type[Attack], change: Callable[[Any], Any]) -> type[Attack]:
    """Return a class of attacks that answer something else than they found."""
    run = lambda self, view, query=None: change(kind.run(self, view, query))  # noqa: E731
    return type(f"Misnaming{kind.__name__}", (kind,), {"run": run})


def with_rows(change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    """Return what changes the rows of a dictionary of SubspaceWords."""

    def broken(attack: Any) -> None:
        for readable in attack._readable:
            rows = change(readable.dictionary.rows)
            readable.dictionary = replace(readable.dictionary, rows=rows)
            readable._atoms = readable._weighted = None

    return broken


def permuted(tensor: Tensor) -> Tensor:
    order = torch.randperm(len(tensor), generator=torch.Generator().manual_seed(0))
    return tensor[order]


def permuted_both_ways(gradient: Tensor) -> Tensor:
    return permuted(permuted(gradient).T).T


def stale(rows: Tensor) -> Tensor:
    """Return the inputs of each token as weights of another training would have them."""
    return torch.randn(rows.shape, generator=torch.Generator().manual_seed(1)).to(rows)


def noise_inside(gradient: Tensor) -> Tensor:
    noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(2))
    return gradient + noise.to(gradient)


def other_readout(attack: Any) -> None:
    """Give the weights of features to others, and count a sure type as unused."""
    readout = attack._calibration.readout
    readout = replace(readout, weight0=permuted(readout.weight0), weight2=-readout.weight2)
    attack._calibration = replace(attack._calibration, readout=readout)


def other_projection(gradient: Tensor) -> Tensor:
    """Turn the rows of maps that read hidden states."""
    generator = torch.Generator().manual_seed(3)
    turn = torch.linalg.qr(torch.randn(16, 16, generator=generator)).Q
    return gradient @ turn if gradient.shape[1] == 16 else gradient


def next_types(guess: Any) -> Any:
    return replace(guess, types=(guess.types + 1) % 97)


def next_tokens(guess: Any) -> Any:
    return replace(guess, tokens=(guess.tokens + 1) % 97)


def stale_copy(attack: Any) -> None:
    """Give the adversary's copy of the bottom model the weights of another training."""
    for _, _, weight in attack.bottom._weights:
        weight.copy_(stale(weight))


def by_place(guess: Any) -> Any:
    order = torch.randperm(len(guess.scores), generator=torch.Generator().manual_seed(5))
    return replace(guess, scores=order.double())


def zeroed_whitening(attack: Any) -> None:
    attack._whitenings = [torch.zeros_like(white) for white in attack._whitenings]


MUTANTS: dict[str, tuple[Callable[[], nn.Module], type[Attack], type[Attack]]] = {
    "zeroed dictionary": (
        low_rank, SubspaceWords, after(SubspaceWords, "refresh", with_rows(torch.zeros_like)),
    ),
    "stale dictionary": (
        whole, SubspaceWords, after(SubspaceWords, "refresh", with_rows(stale)),
    ),
    "noise added inside": (
        low_rank, SubspaceWords, reading(SubspaceWords, noise_inside),
    ),
    "permuted calibration": (
        whole, AlignedFlatChat, after(AlignedFlatChat, "prepare", other_readout),
    ),
    "swapped head rows": (
        whole, AlignedFlatChat, reading(AlignedFlatChat, permuted),
    ),
    "wrong projection": (low_rank, SubspaceWords, reading(SubspaceWords, other_projection)),
    "wrong labels": (whole, AlignedFlatChat, answering(AlignedFlatChat, next_types)),
    "scores by chance": (
        low_rank, GradientMembership, answering(GradientMembership, by_place),
    ),
    "permuted gradient": (
        low_rank, GradientMembership, reading(GradientMembership, permuted_both_ways),
    ),
    "the server's layers without a gradient": (
        whole, FCMembership, reading(FCMembership, torch.zeros_like),
    ),
    "wrong tokens": (whole, PrefixInversion, answering(PrefixInversion, next_tokens)),
    "stale bottom model": (
        whole, PrefixInversion, after(PrefixInversion, "refresh", stale_copy),
    ),
    "zeroed whitening": (
        low_rank, SubspaceMembership, after(SubspaceMembership, "refresh", zeroed_whitening),
    ),
}  # fmt: skip


def of(kind: type[Attack]) -> Attack:
    """Return an attack of a class with its smallest settings."""
    settings: dict[str, Any] = {"name": "attack"}
    if issubclass(kind, SubspaceWords):
        settings["capacity_seconds"] = 0
    if issubclass(kind, AlignedFlatChat):
        settings["public_text"] = PUBLIC
        settings["calibration_tokens"] = 600
    if issubclass(kind, FCMembership | PrefixInversion):
        settings["layer"] = 1
    if issubclass(kind, PrefixInversion):
        settings["language_model"] = False  # its texts are random tokens
    return kind(**settings)


def judged(folder: Path, model: nn.Module, attack: Attack) -> tuple[Threshold, dict[str, float]]:
    """Return a gate on an attack after two looks, and the log."""
    rate = "auc" if isinstance(attack, MEMBERSHIP) else "f1"
    rate = "token_accuracy" if isinstance(attack, PrefixInversion) else rate
    rows = 8 if rate == "auc" else 2
    gate = Threshold(f"leakage/attack/{rate}", at_most=AT_MOST[rate], action="warn")
    watch = watched(folder, attack, [gate], model=model, rows=rows, length=6, steps=2)
    return gate, watch.latest


@pytest.fixture(scope="module")
def wholes() -> dict[Any, tuple[Threshold, dict[str, float]]]:
    """Return what gates on whole attacks decided, by model and attack, as it is made."""
    return {}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_attack_is_unknown_and_the_whole_one_fires(name, tmp_path, wholes) -> None:
    model, kind, mutant = MUTANTS[name]
    if (model, kind) not in wholes:
        wholes[model, kind] = judged(tmp_path / "whole", model(), of(kind))
    gate, values = wholes[model, kind]
    assert gate.fired is not None, values
    assert gate.fired.value > gate.at_most
    gate, values = judged(tmp_path / "broken", model(), of(mutant))
    assert gate.fired is not None, values
    assert math.isnan(gate.fired.value), (gate.fired.value, values)
