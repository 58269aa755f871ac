"""A copy of the model that is made within a step holds nothing of the step, and records nothing."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from lightning_fedleak import DPSGD, ActivationNoise, BagOfWords, DefendedStrategy
from lightning_fedleak.model.model_state import HOOKS, Hook
from lightning_fedleak.trainers import Watch
from tests.callbacks.runs import Probe, fit, monitor_with
from tests.helpers.models import tiny_gpt2


def loaded(model: nn.Module) -> Any:
    """Return the model that a file of it gives."""
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def averaged(model: nn.Module) -> Any:
    return torch.optim.swa_utils.AveragedModel(model).module


COPIES: list[Callable[[nn.Module], Any]] = [copy.deepcopy, loaded, averaged]


def hooks_of(model: nn.Module) -> list[Any]:
    return [h for m in model.modules() for name in HOOKS for h in getattr(m, name).values()]


def train_copy(model, copied, ids, other_ids) -> None:
    """Train a copy of the model in the middle of a step on other texts."""
    assert any(isinstance(hook, Hook) for hook in hooks_of(model))
    stored = pickle.dumps(model)
    assert ids[0].numpy().tobytes() not in stored
    assert b"lightning_fedleak" not in stored
    other = copied(model)
    assert not any(isinstance(hook, Hook) for hook in hooks_of(other))
    other(input_ids=other_ids, labels=other_ids).loss.backward()


def measured(folder: Path, copied: Callable[[nn.Module], Any] | None) -> dict[str, float]:
    """Return what two looks measure, with copies that train in the middle of their steps."""
    torch.manual_seed(7)
    model = tiny_gpt2(tied=False, dropout=0.0).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(2)
    with Watch(model, optimizer, BagOfWords(), folder=folder, every_n_steps=1) as watch:
        for _ in range(2):
            ids, other_ids = torch.randint(3, 60, (2, 4, 9), generator=generator)
            with watch.step({"input_ids": ids, "labels": ids}):
                loss = model(input_ids=ids, labels=ids).loss
                if copied is not None:
                    train_copy(model, copied, ids, other_ids)
                loss.backward()
                if copied is not None:
                    train_copy(model, copied, ids, other_ids)
                optimizer.step()
                optimizer.zero_grad()
    return {n: v for n, v in watch.latest.items() if "seconds" not in n}


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_within_a_step_holds_no_ids_and_records_nothing(tmp_path, copied) -> None:
    assert measured(tmp_path / "a", copied) == measured(tmp_path / "b", None)


def test_a_copy_of_a_defended_model_holds_no_defence(tmp_path: Path) -> None:
    found = []

    class Copies(L.Callback):
        def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            model = pl_module.model
            found.append((len(hooks_of(model)), pickle.dumps(model), copy.deepcopy(model)))

    defenses = [DPSGD(1.0, noise_multiplier=1.0, target_delta=1e-3), ActivationNoise(1, sigma=1.0)]
    strategy = DefendedStrategy("auto", defenses=defenses)
    fit([monitor_with([Probe()]), Copies()], tmp_path, strategy=strategy, max_steps=1)
    assert len(found) == 1
    n_hooks, stored, model = found[0]
    assert n_hooks > 10
    assert b"lightning_fedleak" not in stored
    assert not any(isinstance(hook, Hook) for hook in hooks_of(model))
