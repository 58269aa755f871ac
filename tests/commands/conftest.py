"""The model of the commands; calibrations repeat small batches seldom, which changes no output."""

from __future__ import annotations

import pytest

from lightning_fedleak.attacks.words import aligned_readout
from tests.helpers.folders import save_tiny_causal_lm


@pytest.fixture(autouse=True)
def _few_rehearsals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned_readout, "_REPEATS", 2)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_causal_lm(tmp_path_factory.mktemp("model")))
