"""What holds for every test: no network, one thread."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("fedleak", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("fedleak")


@pytest.fixture(scope="session")
def assets() -> Path:
    """Folder of the real models and texts; skips where it is not there."""
    default = Path(__file__).parents[2] / "shared" / "assets"
    folder = Path(os.environ.get("FEDLEAK_ASSETS", default))
    if not folder.is_dir():
        pytest.skip("no real models and texts: set FEDLEAK_ASSETS to their folder")
    return folder
