"""What the commands print does not depend on how often a calibration repeats small batches."""

from __future__ import annotations

import pytest

from lightning_fedleak.attacks.words import aligned_readout


@pytest.fixture(autouse=True)
def _few_rehearsals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned_readout, "_REPEATS", 2)
