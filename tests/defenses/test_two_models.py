"""A module that holds two language models: the defences ask which one, in words that they take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_fedleak.defenses import ActivationNoise, DefenseContext, DefenseError, Freeze
from tests.helpers.models import tiny_llama


def pair() -> DefenseContext:
    root = nn.Module()
    root.model, root.teacher = tiny_llama(), tiny_llama(seed=1)
    return DefenseContext(root, 0, 1, torch.device("cpu"), "32-true", 0, b"e" * 32)


def test_freeze_asks_for_names_and_takes_them() -> None:
    context = pair()
    with pytest.raises(DefenseError, match=r"2 language models.*Freeze\(parameters="):
        Freeze("head").before_setup(context)
    defense = Freeze(parameters=["model.lm_head.*"])
    defense.before_setup(context)
    assert not context.root.model.lm_head.weight.requires_grad
    assert context.root.teacher.lm_head.weight.requires_grad


def test_activation_noise_asks_for_anatomy_and_takes_it() -> None:
    context = pair()
    with pytest.raises(DefenseError, match=r"2 language models.*anatomy=\{'model': 'model'\}"):
        ActivationNoise(1, 1.0).before_setup(context)
    defense = ActivationNoise(1, 1.0, anatomy={"model": "teacher"})
    defense.before_setup(context)
    hooked = [name for name, module in context.root.named_modules() if module._forward_hooks]
    assert hooked == ["teacher.model.layers.0"]
    defense.teardown()
