"""This machine's own GPU, with what tests ask of the fake device."""

import warnings
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils._pytree import tree_map_only

from tests.helpers.fake_device import FakeDevice, single_device

DEVICE = torch.device("cuda", 0)


class Gpu:
    """While it is entered, what makes the host wait is counted, as CUDA reports it."""

    def __init__(self, *, without_float64: bool = False) -> None:
        self._warnings: list[warnings.WarningMessage] = []

    @property
    def synchronisations(self) -> Counter[str]:
        waits = (str(warning.message) for warning in self._warnings)
        return Counter("waits" for wait in waits if "synchronizing CUDA operation" in wait)

    def __enter__(self) -> "Gpu":
        torch.zeros(1, device=DEVICE)
        self._stack = ExitStack()
        self._warnings = self._stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        self._stack.callback(torch.cuda.set_sync_debug_mode, 0)
        torch.cuda.set_sync_debug_mode(1)
        return self

    def __exit__(self, *of: Any) -> None:
        self._stack.close()

    def put(self, value: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(DEVICE), value)

    def model(self, model: nn.Module) -> nn.Module:
        return model.to(DEVICE)


def strategy_of(device: type) -> SingleDeviceStrategy:
    """For ``Trainer(strategy=...)``, wrapped or not."""
    if device is FakeDevice:
        return single_device()
    return SingleDeviceStrategy(DEVICE, accelerator=CUDAAccelerator())


DEVICES = [
    pytest.param(FakeDevice, id="fake"),
    pytest.param(
        Gpu,
        id="cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    ),
]
