"""Importing the package changes no state of the process, measured in fresh processes."""

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
LIGHTNING_FREE = (
    *("attacks", "evaluation.metrics", "evaluation.games", "defenses", "engine"),
    *("report.records", "report", "trainers"),
)
"""Packages that need no Lightning, each after the packages that it imports."""
FOLDERS = [lightning_fedleak, lightning_fedleak.cli, lightning_fedleak.evaluation]
PUBLIC = sorted(
    f"{folder.__name__}.{module.name}"
    for folder in [*FOLDERS, lightning_fedleak.model]
    for module in pkgutil.iter_modules(folder.__path__)
    if not module.name.startswith("_")
)
# The script of a fresh process. It imports what all cases need once (torch; transformers and PEFT,
# which configure their own loggers) and then forks for each case, so that no case sees the imports
# of another. New entries, such as the logger of a new module, are no change: only entries that
# existed before the import are compared.
COMPARE = """
import importlib, json, logging, os, pkgutil, sys, warnings
import peft, scipy.stats, torch, torchmetrics, transformers
from lightning_utilities.core import rank_zero

def logger_state(logger):
    return [logger.level, logger.propagate, logger.disabled, [repr(h) for h in logger.handlers],
            [repr(f) for f in logger.filters]]

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

def engine(*blocked):
    assert not sys.modules.keys() & set(blocked)

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in blocked:
                raise ModuleNotFoundError(name)

    sys.meta_path.insert(0, Blocker())
    package = importlib.import_module("lightning_fedleak.engine")
    modules = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
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
    logger = logging.getLogger("lightning.pytorch")
    return [rank_zero.log.name, rank_zero.rank_zero_only.rank, logger.level, logger.propagate]

def compare(first, names):
    for name in first:
        importlib.import_module(name)
    initial_logs = logs() if first == ["lightning.pytorch"] else None
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("pytorch_lightning").setLevel(logging.CRITICAL)
    logging.getLogger("lightning_fabric").setLevel(logging.CRITICAL)
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    changes, before = {}, state()
    for name in names:
        importlib.import_module(name)
        after = state()
        if difference := change(before, after):
            changes[name] = difference
        before = after
    return {"changes": changes, "logs": initial_logs}

def attacks(*names):
    counts = []
    for module, name in names:
        getattr(importlib.import_module(module), name)
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
        ["lightning_fedleak", *(f"lightning_fedleak.{name}" for name in LIGHTNING_FREE)],
    ),
    "engine": ("engine", "lightning", "pytorch_lightning", "lightning_fabric", "flwr"),
    "attacks": (
        "attacks",
        ("lightning_fedleak", "SubspaceWords"),
        ("lightning_fedleak.attacks", "SubspaceTexts"),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("import")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """Return the output of each case by its name, and stderr."""
    command = [sys.executable, "-c", COMPARE, json.dumps(CASES)]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=folder, env=os.environ | paths
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith('["')]
    outputs = dict(map(json.loads, lines))
    assert outputs.keys() == CASES.keys(), process.stderr
    return {**outputs, "stderr": process.stderr}


@pytest.mark.parametrize("first", LIGHTNINGS)
def test_import_after_lightning_changes_no_state(results: dict[str, Any], first: str) -> None:
    assert results[first]["changes"] == {}


def test_import_without_lightning_changes_no_state(results: dict[str, Any]) -> None:
    """Lightning itself would set ``rank_zero_only.rank``, which decides which process prints."""
    assert results["none"]["changes"] == {}


def test_importing_callbacks_configures_logs_as_lightning_does(results: dict[str, Any]) -> None:
    """Messages go to the log of the Lightning package that is imported."""
    assert results["attacks"]["logs"] == results["lightning.pytorch"]["logs"] is not None


def test_importing_an_attack_loads_at_most_60_modules(results: dict[str, Any]) -> None:
    """The second count includes the modules of both attacks."""
    assert max(results["attacks"]["counts"]) <= 60


def test_engine_imports_without_lightning_and_report_pages(results: dict[str, Any]) -> None:
    assert "lightning_fedleak.engine.channels.released.pool" in results["engine"]["modules"]
    pages = [n for n in results["engine"]["all"] if n.startswith("lightning_fedleak.report.")]
    assert all(name.startswith("lightning_fedleak.report.records") for name in pages), pages


def test_watch_and_transformers_trainer_run_without_lightning(results, folder) -> None:
    assert results["engine"]["latest"] == [1.0, 1.0]
    assert results["engine"]["releases"] == 3
    for prefix in ("Watch: ", "LeakageCallback: "):  # of the path of the report, without a logger
        assert prefix in results["stderr"]
    assert (folder / "loop" / "report.html").exists()
    assert json.loads((folder / "trainer" / "report.json").read_text())
