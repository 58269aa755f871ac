"""24 ways to fine-tune a tiny model: what is logged is true against a truth computed anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.ways_to_fine_tune import CELLS, Texts, run
from tests.helpers.folders import save_tiny_llama

FAST = ("LoRA", "LoRA, left padding", "LoRA, padding-free with a cache", "LoRA, NEFTune 5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"), vocab_size=512)


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CELLS]
)
def test_what_is_logged_is_true(folder: Path, name: str) -> None:
    if CELLS[name].base != "plain":
        pytest.importorskip("bitsandbytes")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 500, (3, 40, 16), generator=generator).tolist()
    values = run(CELLS[name], str(folder), Texts(*ids), "2x12", steps=2, looks=3)
    if name == "adapters":
        assert values["f1"] == "none reads it"
    else:
        assert values["f1"] == pytest.approx(values["true_f1"])
        exact = "dropout" not in name and "bf16" not in name
        assert values["f1"] > (0.9 if exact else 0.2) or "NEFTune" in name
    if "cache" in name:
        assert "attend to the others" in values["auc"]
    else:
        assert values["true_auc"] > 0.9
