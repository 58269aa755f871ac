"""Importing the package changes nothing that other code sees: fresh processes compare."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_fedleak.cli
import lightning_fedleak.evaluation
import lightning_fedleak.model

ROOT = Path(__file__).parents[1]
WITHOUT = (
    *("attacks", "evaluation.metrics", "evaluation.games", "defenses", "engine"),
    *("report.records", "report", "trainers"),
)
"""Parts that need no Lightning, in the order of what they import."""
FOLDERS = [lightning_fedleak, lightning_fedleak.cli, lightning_fedleak.evaluation]
PUBLIC = sorted(
    f"{folder.__name__}.{module.name}"
    for folder in [*FOLDERS, lightning_fedleak.model]
    for module in pkgutil.iter_modules(folder.__path__)
    if not module.name.startswith("_")
)
# Runs in a fresh process, which each case leaves by a fork of its own: none sees what another has
# imported, and what all import first is loaded once: torch, and transformers and PEFT, which set
# their own loggers. What a new module sets up for itself, such as a logger of its own name, is no
# change; what was there before is to be as it was.
COMPARE = """
import importlib, json, logging, os, pkgutil, sys, warnings
import peft, scipy.stats, torch, torchmetrics, transformers
from lightning_utilities.core import rank_zero

def logger_state(one):
    return [one.level, one.propagate, one.disabled, [repr(h) for h in one.handlers],
            [repr(f) for f in one.filters]]

def state():
    loggers = {n: l for n, l in logging.root.manager.loggerDict.items()
               if isinstance(l, logging.Logger)}
    hooks = torch.nn.modules.module
    optim = sys.modules['torch.optim.optimizer']
    return {
        "root logger": logger_state(logging.root),
        "logging.disable": logging.root.manager.disable,
        "logger class": logging.getLoggerClass().__name__,
        **{f"logger {n}": logger_state(l) for n, l in loggers.items()},
        "log of rank_zero": rank_zero.log.name,
        "rank": getattr(rank_zero.rank_zero_only, "rank", None),
        "deprecation": rank_zero.rank_zero_deprecation_category.__name__,
        "warning filters": [str(f) for f in warnings.filters],
        "showwarning": warnings.showwarning.__module__,
        "formatwarning": warnings.formatwarning.__module__,
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "random state": torch.get_rng_state().sum().item(),
        "environment": dict(os.environ),
        "hooks of modules": [len(getattr(hooks, n)) for n in vars(hooks)
                             if n.startswith("_global_") and hasattr(getattr(hooks, n), "__len__")],
        "hooks of optimizers": [len(optim._global_optimizer_pre_hooks),
                                len(optim._global_optimizer_post_hooks)],
        "saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        "patches": [f.__module__ for f in (torch.autograd.backward, torch.nn.Module.__call__,
                    torch.nn.Module.__init__, torch.optim.Optimizer.__init__, torch.load)],
        "excepthook": repr(sys.excepthook),
        "path": list(sys.path),
        "recursion": sys.getrecursionlimit(),
    }

def change(before, after):
    return {n: [before[n], after[n]] for n in before if before[n] != after[n]}

def count():
    return sum(name.startswith("lightning_fedleak") for name in sys.modules)

def engine(*without):
    assert not sys.modules.keys() & set(without)

    class Refuses:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in without:
                raise ModuleNotFoundError(name)

    sys.meta_path.insert(0, Refuses())
    parts = importlib.import_module("lightning_fedleak.engine")
    modules = [m.name for m in pkgutil.walk_packages(parts.__path__, parts.__name__ + ".")]
    for name in modules:
        importlib.import_module(name)
    return {"modules": modules, "all": list(sys.modules), **train()}

def train():
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    from lightning_fedleak.attacks import BagOfWords
    from lightning_fedleak.defenses import DPSGD
    from lightning_fedleak.trainers import LeakageCallback, Threshold, Watch, WatchSettings
    from lightning_fedleak.trainers import defended

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2,
        tie_word_embeddings=False)
    model = GPT2LMHeadModel(config)
    ids = torch.arange(3, 35).view(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = dict(every_n_steps=1, settings=WatchSettings(report=True))
    with Watch(model, optimizer, [BagOfWords()], folder="loop", **settings) as watch:
        for _ in range(3):
            with watch.step(dict(input_ids=ids, labels=ids)):
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    arguments = TrainingArguments("trainer", max_steps=3, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True)
    trainer = Trainer(model, arguments, train_dataset=[dict(input_ids=x, labels=x) for x in ids])
    gate = Threshold("leakage/worst/words", at_most=0.5, action="warn")
    callback = LeakageCallback(trainer, [BagOfWords()], [gate], **settings)
    trainer.add_callback(callback)
    trainer.train()
    latest = [watched.latest["leakage/bag_of_words/f1"] for watched in (watch, callback)]
    dp = DPSGD(1.0, target_epsilon=8, target_delta=1e-2)
    rows = [dict(input_ids=x, labels=x) for x in ids]
    defended(Trainer)(model, arguments, train_dataset=rows, defenses=[dp]).train()
    return {"latest": latest, "releases": dp.releases}

def logs():
    one = logging.getLogger("lightning.pytorch")
    return [rank_zero.log.name, rank_zero.rank_zero_only.rank, one.level, one.propagate]

def compare(first, names):
    for name in first:
        importlib.import_module(name)
    begun = logs() if first == ["lightning.pytorch"] else None
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("pytorch_lightning").setLevel(logging.CRITICAL)
    logging.getLogger("lightning_fabric").setLevel(logging.CRITICAL)
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    changes, before = {}, state()
    for name in names:
        importlib.import_module(name)
        after = state()
        if changed := change(before, after):
            changes[name] = changed
        before = after
    return {"changes": changes, "logs": begun}

def alone(*homes):
    counts = []
    for home, name in homes:
        getattr(importlib.import_module(home), name)
        counts.append(count())
    importlib.import_module("lightning_fedleak.callbacks")
    return {"counts": counts, "logs": logs()}

for case, (function, *arguments) in json.loads(sys.argv[1]).items():
    child = os.fork()
    if not child:
        print(json.dumps([case, globals()[function](*arguments)]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
NAMES = ["lightning_fedleak", *PUBLIC]
LIGHTNINGS = ("lightning.pytorch", "pytorch_lightning")
CASES = {
    **{first: ("compare", [first], NAMES) for first in LIGHTNINGS},
    "none": (
        "compare",
        [],
        ["lightning_fedleak", *(f"lightning_fedleak.{name}" for name in WITHOUT)],
    ),
    "engine": ("engine", "lightning", "pytorch_lightning", "lightning_fabric", "flwr"),
    "alone": (
        "alone",
        ("lightning_fedleak", "SubspaceWords"),
        ("lightning_fedleak.attacks", "SubspaceTexts"),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("import")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """Return what importing modules changes, by case, and what was written to stderr."""
    command = [sys.executable, "-c", COMPARE, json.dumps(CASES)]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=folder, env=os.environ | paths
    )
    found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
    assert found.keys() == CASES.keys(), done.stderr
    return {**found, "stderr": done.stderr}


@pytest.mark.parametrize("first", LIGHTNINGS)
def test_importing_changes_nothing_beside_lightning(results: dict[str, Any], first: str) -> None:
    assert results[first]["changes"] == {}


def test_what_needs_no_lightning_changes_nothing_at_all(results: dict[str, Any]) -> None:
    """Not even which process prints, which Lightning sets for all."""
    assert results["none"]["changes"] == {}


def test_alone_it_leaves_what_lightning_alone_leaves(results: dict[str, Any]) -> None:
    """The log that messages go to is that of the Lightning which is imported."""
    assert results["alone"]["logs"] == results["lightning.pytorch"]["logs"] is not None


def test_one_attack_loads_few_files(results: dict[str, Any]) -> None:
    """The second count is of the files of both attacks."""
    assert max(results["alone"]["counts"]) <= 60


def test_the_engine_runs_where_there_is_no_lightning(results: dict[str, Any]) -> None:
    imported = results["engine"]["modules"]
    assert "lightning_fedleak.engine.channels.pool" in imported
    pages = [n for n in results["engine"]["all"] if n.startswith("lightning_fedleak.report.")]
    assert all(name.startswith("lightning_fedleak.report.records") for name in pages), pages


def test_loops_and_trainers_of_transformers_need_no_lightning(
    results: dict[str, Any], folder: Path
) -> None:
    assert results["engine"]["latest"] == [1.0, 1.0]
    assert results["engine"]["releases"] == 3
    for face in ("Watch: ", "LeakageCallback: "):  # says where its report is, without any logging
        assert face in results["stderr"]
    assert (folder / "loop" / "report.html").exists()
    assert json.loads((folder / "trainer" / "report.json").read_text())
