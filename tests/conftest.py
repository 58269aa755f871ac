"""What holds for every test: no network, one thread, random numbers that no other test drew."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import functools
import gc
import importlib.metadata
import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# Each fit asks for versions and plugins, and reads and parses the same files for them.
importlib.metadata.version = functools.cache(importlib.metadata.version)
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
gc.disable()  # until all is collected: little of what imports make is garbage
torch.set_num_threads(1)
settings.register_profile(
    "fedleak",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # a slow machine is no failure
    max_examples=20,
)
settings.load_profile("fedleak")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files that start processes first, so that no long file is left for the end."""
    first = {item.path for item in items if item.get_closest_marker("ddp")}
    items.sort(key=lambda item: item.path not in first)


def pytest_collection_finish() -> None:
    """Searches for garbage pass over what was imported and collected: some 700 000 objects.

    And they are seldom: there is little garbage, and they took a twelfth of the time.
    """
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


def _begin_anew() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():  # else torch.manual_seed notes a traceback for each device
        torch.cuda.manual_seed_all(0)
    os.environ.pop("PL_GLOBAL_SEED", None)  # of seed_everything; Lightning's samplers follow it
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)  # what a quiet fit left
    if "torch._dynamo" in sys.modules:  # models of one class share what is compiled of its code
        torch.compiler.reset()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef) -> None:
    """Seed also what a fixture of several tests draws: it does not depend on the test before it."""
    if fixturedef.scope != "function":
        _begin_anew()


@pytest.fixture(autouse=True, scope="session")
def _nothing_is_left_where_tests_run() -> Iterator[None]:
    """Where a Trainer is given no folder, a monitor's logs are written to the current one."""
    before = {path.name for path in Path.cwd().glob("*.jsonl")}
    yield
    assert {path.name for path in Path.cwd().glob("*.jsonl")} == before


@pytest.fixture(autouse=True)
def _own_random_numbers() -> None:
    """Seed each test, so that its results do not depend on the tests before it."""
    _begin_anew()


@pytest.fixture(scope="session")
def assets() -> Path:
    """Folder of the real models and texts; skips where it is not there."""
    default = Path(__file__).parents[2] / "shared" / "assets"
    folder = Path(os.environ.get("FEDLEAK_ASSETS", default))
    if not folder.is_dir():
        pytest.skip("no real models and texts: set FEDLEAK_ASSETS to their folder")
    return folder
