"""The package: what is installed, imported and shown, on either package of Lightning."""

import csv
import doctest
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
import transformers
import yaml

import lightning_fedleak
import lightning_fedleak as fedleak
import lightning_fedleak.cli
import lightning_fedleak.evaluation
import lightning_fedleak.model
from lightning_fedleak import (
    DefendedStrategy,
    DefenseError,
    GradientNoise,
    LeakageMonitor,
    RiskGate,
    extras,
)
from lightning_fedleak.cli.finetuning import TextDataModule
from lightning_fedleak.cli.finetuning.module import load_model
from lightning_fedleak.engine import WatchSettings
from lightning_fedleak.lightning_packages import PACKAGES, both, package_of, twin
from tests.callbacks.runs import Probe
from tests.helpers.folders import TEXTS, save_tiny_causal_lm
from tests.helpers.settings import QUIET

pytest.importorskip("setuptools", minversion="77")


# What a wheel and an sdist hold, built as pip builds them; and the extras that are named.


ROOT = Path(__file__).parents[1]
PACKAGE, RECIPES = ROOT / "lightning_fedleak", ROOT / "callbacks"
COPIED = ("lightning_fedleak", "callbacks", "tools", "tests", "benchmarks", "examples", "docs")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*", "build", "dist")


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist, and the wheel that is built from that sdist."""
    folder = tmp_path_factory.mktemp("built")
    source, out = folder / "source", folder / "out"
    out.mkdir()
    source.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
        elif path.name in COPIED:
            shutil.copytree(path, source / path.name, ignore=LEFT_OUT)
    _build("sdist", source, out)
    [archive] = out.glob("*.tar.gz")
    with tarfile.open(archive) as held:
        held.extractall(folder, filter="data")
    _build("wheel", folder / archive.name.removesuffix(".tar.gz"), out)
    [wheel] = out.glob("*.whl")
    return archive, wheel


@pytest.fixture(scope="module")
def built(distributions: tuple[Path, Path]) -> tuple[set[str], set[str]]:
    """Names in both."""
    archive, wheel = distributions
    with tarfile.open(archive) as sdist, zipfile.ZipFile(wheel) as wheel_file:
        names = {name.partition("/")[2] for name in sdist.getnames()}
        return names, set(wheel_file.namelist())


def _build(kind: str, folder: Path, out: Path) -> None:
    code = f"from setuptools import build_meta as b; b.build_{kind}({str(out)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr


def _under(folder: Path) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_the_package_whole_and_nothing_else(built) -> None:
    _, wheel = built
    own = {name for name in wheel if not name.partition("/")[0].endswith(".dist-info")}
    recipes = {name.replace("callbacks", "lightning_fedleak/recipes") for name in _under(RECIPES)}
    assert own == _under(PACKAGE) | recipes
    assert "lightning_fedleak/recipes/leakage.yaml" in own
    assert "lightning_fedleak/cli/finetuning/model/model.safetensors" in own


def test_the_sdist_holds_what_its_tests_need(built: tuple[set[str], set[str]]) -> None:
    sdist, _ = built
    for name in COPIED:
        assert _under(ROOT / name) <= sdist
    for name in ("README.md", "CHANGELOG.md", "Makefile", "constraints.txt", "pyproject.toml"):
        assert name in sdist


def test_links_of_the_readme() -> None:
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (
        "![a picture](docs/a.png)\n\nSee ([measured](docs/b.md#c)), [b](docs/b.md), "
        "[docs/b.md](docs/b.md), [below](#c), [out](https://host/x).\n"
        "![out](https://host/x.png)\n```\n[0](1)\n```\n"
    )
    plain = module.for_the_index(text, {})
    assert plain == (
        "See (measured: `docs/b.md`), b (`docs/b.md`), docs/b.md, below, [out](https://host/x).\n"
        "![out](https://host/x.png)\n```\n[0](1)\n```\n"
    )
    whole = module.for_the_index(text, {"Repository": "https://host/r/"})
    assert "![a picture](https://host/r/raw/HEAD/docs/a.png)\n\nSee" in whole
    assert "([measured](https://host/r/blob/HEAD/docs/b.md#c))" in whole
    assert "[below](https://host/r#c)" in whole


def test_what_stands_beside_the_code_agrees_with_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
    assert lightning_fedleak.__version__ == project["version"]
    assert cited["authors"] == project["authors"] == [{"name": "the lightning-fedleak authors"}]
    if not (ROOT / ".github").exists():
        pytest.skip("an sdist has none")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    commands = [s["run"] for job in workflow["jobs"].values() for s in job["steps"] if "run" in s]
    assert commands[0] == ".ci/run"
    makefile = (ROOT / "Makefile").read_text()
    for command in commands[1:]:
        assert re.search(rf"^{command.removeprefix('make ')}: ", makefile, re.MULTILINE), command
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in hooks] == ["local"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    for template in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"):
        _, head, _ = template.read_text().split("---\n", 2)
        assert yaml.safe_load(head).keys() == {"name", "about", "labels"}


@pytest.mark.parametrize("kind", ["wheel", "editable", "none"])
def test_recipes_are_read_wherever_the_package_is(kind, distributions, tmp_path) -> None:
    _, wheel = distributions
    folder = source = wheel.parents[1] / "source"
    if kind == "editable":
        _build("editable", source, tmp_path)
        [wheel] = tmp_path.glob("*.whl")
    if kind != "none":
        folder = tmp_path / "site"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    code = (
        f"import site, sys; sys.path.insert(0, {str(folder)!r}); site.addsitedir({str(folder)!r})\n"
        "from lightning_fedleak.cli.command_line import recipe_files\n"
        "print(recipe_files()['leakage'], len(recipe_files()))"
    )
    # Without what is installed beside, which may hold this package too.
    python = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(python, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    place = {"wheel": folder / "lightning_fedleak" / "recipes"}.get(kind, source / "callbacks")
    assert done.stdout.split() == [str(place / "leakage.yaml"), "4"]


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        (None, "pip install 'lightning-fedleak[cli]'"),
        ({"url": "file:///a%20b/c", "dir_info": {}}, "pip install '/a b/c[cli]'"),
        ({"url": "file:///c", "dir_info": {"editable": True}}, "pip install -e '/c[cli]'"),
        (
            {"url": "file:///c.whl", "archive_info": {}},
            "pip install 'lightning-fedleak[cli] @ file:///c.whl'",
        ),
        (
            {"url": "https://host/r.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            "pip install 'lightning-fedleak[cli] @ git+https://host/r.git@ab12'",
        ),
    ],
)
def test_an_extra_comes_from_where_the_package_came(noted, command, monkeypatch) -> None:
    text = None if noted is None else json.dumps(noted)
    monkeypatch.setattr(
        extras, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text)
    )
    assert extras.install("cli") == command


def test_a_package_that_is_not_installed_comes_from_its_folder(monkeypatch) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", absent)
    assert extras.install("dp").startswith("pip install '.[dp]' in the folder")


def test_every_extra_that_a_message_names_exists() -> None:
    named = {
        extra
        for path in (ROOT / "lightning_fedleak").rglob("*.py")
        for extra in re.findall(r"\b(?:install|require_package)\(['\"](\w+)['\"]", path.read_text())
    }
    assert {"cli", "demo", "datasets", "dp", "peft"} <= named
    assert named <= EXTRAS.keys()
    spelled = [
        path
        for path in (ROOT / "lightning_fedleak").rglob("*.py")
        if "pip install 'lightning-fedleak" in path.read_text()
    ]
    assert spelled == []


def test_the_docs_name_every_extra_that_a_message_may_name() -> None:
    assert "[extras](docs/install.md)" in (ROOT / "README.md").read_text()
    page = (ROOT / "docs" / "install.md").read_text()
    shown = page[page.index("## Extras") :]
    for extra in EXTRAS.keys() - {"test", "dev", "docs"}:
        assert f"| `{extra}` |" in shown, extra


# Importing the package changes no state of the process, measured in fresh processes.


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


# A run by the Trainer of ``lightning`` and of ``pytorch_lightning``: alike, or one sentence.


OTHER = dict(zip(PACKAGES, reversed(PACKAGES), strict=True))


def either_lightning(package: str) -> ModuleType:
    return importlib.import_module(package)


def fine_tuning(package: str) -> type:
    """The module of ``cli.finetuning``, as one of a package."""

    class FineTuning(either_lightning(package).LightningModule):
        def __init__(self, model: str) -> None:
            super().__init__()
            self.model = load_model(model).train()

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return FineTuning


@dataclass
class Files:
    model: str
    text: str


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("files")
    (folder / "private.txt").write_text("\n".join(TEXTS))
    return Files(str(save_tiny_causal_lm(folder / "model")), str(folder / "private.txt"))


class Run:
    """A fit by one package's Trainer, and what it left."""

    def __init__(
        self,
        package: str,
        files: Files,
        folder: Path,
        *,
        at_most: float = 1.0,
        ckpt_path: Any = None,
        **settings: Any,
    ) -> None:
        L = either_lightning(package)
        L.seed_everything(3, verbose=False)
        self.module = fine_tuning(package)(files.model)
        data = TextDataModule(files.text, files.model, batch_size=2, length=16)
        data.setup()
        self.monitor = LeakageMonitor(
            Probe(), every_n_steps=1, settings=WatchSettings(stages=("local", "shared"))
        )
        self.gate = RiskGate("leakage/probe/recall", at_most=at_most)
        given = {"logger": L.loggers.CSVLogger(folder, flush_logs_every_n_steps=1)} | settings
        self.trainer = L.Trainer(
            devices=1,
            max_steps=3,
            log_every_n_steps=1,
            callbacks=[self.monitor, self.gate],
            default_root_dir=folder,
            **QUIET | given,
        )
        self.trainer.fit(self.module, data.train_dataloader(), ckpt_path=ckpt_path)

    def rows(self) -> list[dict[str, str]]:
        """What the CSV logger wrote, but for what the clock gave."""
        with (Path(self.trainer.log_dir) / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        return [{n: v for n, v in row.items() if n != "monitor/seconds"} for row in rows]

    def lines(self) -> list[dict[str, Any]]:
        """``leakage.jsonl``, but for the name of the run and hashes."""
        text = (Path(self.trainer.log_dir) / "leakage.jsonl").read_text()
        of_this_run = {"run": "", "before": "", "hash": ""}
        return [json.loads(line) | of_this_run for line in text.splitlines()]

    def weights(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.module.parameters()]


def assert_alike(first: Run, second: Run) -> None:
    assert package_of(first.trainer) != package_of(second.trainer)
    assert first.trainer.global_step == second.trainer.global_step
    assert first.rows() == second.rows()
    assert first.lines() == second.lines()
    assert all(map(torch.equal, first.weights(), second.weights()))


def test_a_gate_stops_and_both_go_on_from_its_checkpoint(files: Files, tmp_path: Path) -> None:
    stopped = [Run(p, files, tmp_path / p, at_most=0.0) for p in PACKAGES]
    assert stopped[0].trainer.global_step == 1
    assert stopped[0].monitor.latest["leakage/probe/recall"] > 0
    assert_alike(*stopped)
    saved = [run.gate.fired.checkpoint for run in stopped]
    found = [torch.load(path, weights_only=True) for path in saved]
    assert found[0]["callbacks"].keys() == found[1]["callbacks"].keys()
    assert {run.monitor.state_key for run in stopped} <= found[0]["callbacks"].keys()

    # Each goes on from what the Trainer of the other has saved.
    resumed = [
        Run(p, files, tmp_path / f"{p} on", ckpt_path=path)
        for p, path in zip(PACKAGES, reversed(saved), strict=True)
    ]
    assert [run.trainer.global_step for run in resumed] == [3, 3]
    assert [run.monitor.looks for run in resumed] == [3, 3]
    assert_alike(*resumed)


@pytest.mark.parametrize("strategy", ["auto", "instance"])
def test_a_defended_strategy_is_of_the_trainers_package(strategy, files, tmp_path) -> None:
    runs = []
    for package in PACKAGES:
        single = either_lightning(package).strategies.SingleDeviceStrategy
        given = strategy if strategy == "auto" else single(device="cpu")
        defended = DefendedStrategy(given, [GradientNoise(clip=1.0, sigma=0.1, seed=0)])
        run = Run(package, files, tmp_path / package, strategy=defended)
        assert isinstance(run.trainer.strategy, single)
        assert not isinstance(run.trainer.strategy, twin_of_other(single))
        assert run.trainer.strategy.defenses[0].releases == 3
        runs.append(run)
    assert_alike(*runs)
    values = runs[0].monitor.latest
    assert values["leakage/probe/recall"] != values["leakage_local/probe/recall"]


def twin_of_other(kind: type) -> type:
    [other] = (k for k in both(f"strategies.{kind.__name__}") if k is not kind)
    return other


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", ["ddp", "ddp_spawn"])
def test_a_name_is_resolved_by_the_trainer(package: str, name: str) -> None:
    strategies = either_lightning(package).strategies
    defended = DefendedStrategy(name, [GradientNoise(clip=1.0, sigma=0.1)])
    assert not isinstance(defended, both("strategies.DDPStrategy"))
    trainer = either_lightning(package).Trainer(
        strategy=defended, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False
    )
    assert isinstance(trainer.strategy, strategies.DDPStrategy)
    assert not isinstance(trainer.strategy, twin_of_other(strategies.DDPStrategy))
    assert package_of(trainer.strategy.launcher) == package
    order = [kind.__module__ for kind in type(trainer.strategy).__mro__]
    own, foreign = (f"{p}.strategies.strategy" for p in (package, OTHER[package]))
    assert order.index(own) < order.index(foreign)  # no method of the other's comes first


# ---- two packages in one run ----------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES)
def test_a_strategy_of_the_other_package_is_refused_in_one_sentence(package: str) -> None:
    strategies = either_lightning(OTHER[package]).strategies
    for inner in (strategies.SingleDeviceStrategy(device="cpu"), strategies.DDPStrategy()):
        defended = DefendedStrategy(inner)
        with pytest.raises(DefenseError) as refusal:
            either_lightning(package).Trainer(strategy=defended, accelerator="cpu", logger=False)
        assert str(refusal.value) == (
            f"DefendedStrategy({type(inner).__name__}) is of `{OTHER[package]}` and this Trainer "
            f"of `{package}`: import both from the same package."
        )


@pytest.mark.parametrize("package", PACKAGES)
def test_a_name_that_the_other_package_alone_knows_is_refused(package: str) -> None:
    registry = either_lightning(OTHER[package]).strategies.StrategyRegistry
    kind = either_lightning(OTHER[package]).strategies.DDPStrategy
    registry.register("only_there", kind, override=True)
    try:
        with pytest.raises(DefenseError, match="'only_there' is not supported"):
            either_lightning(package).Trainer(
                strategy=DefendedStrategy("only_there"), accelerator="cpu"
            )
    finally:
        registry.remove("only_there")


# ---- which package something is of -----------------------------------------------------------


def test_what_comes_from_neither_package_is_said() -> None:
    class Own(either_lightning("pytorch_lightning").Trainer):
        pass

    assert package_of(Own) == "pytorch_lightning"
    assert twin("trainer.Trainer", Own) is either_lightning("pytorch_lightning").Trainer
    with pytest.raises(TypeError, match=r"neither lightning\.pytorch nor pytorch_lightning"):
        package_of(object())


@pytest.mark.parametrize(
    "made", [LeakageMonitor, lambda: RiskGate("leakage/worst/words", at_most=0.5)]
)
def test_other_trainers_are_refused_in_one_sentence(made: Any, tmp_path: Path) -> None:
    from lightning.fabric import Fabric

    callback = made()
    said = f"{type(callback).__name__} is a callback of Lightning's Trainer: use LeakageCallback"
    arguments = transformers.TrainingArguments(
        str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True
    )
    with pytest.raises(TypeError, match=said):
        transformers.Trainer(torch.nn.Linear(2, 2), arguments, callbacks=[callback])
    with pytest.raises(TypeError, match=said):
        Fabric(accelerator="cpu", devices=1, callbacks=[callback]).setup(torch.nn.Linear(2, 2))


# The examples in docstrings run as they stand: of the root's names, and of some behind it.


CONSTANTS = {"DISHONEST_SERVER", "EMBEDDED_MESSAGES", "EMBEDDED_MODEL", "HEAD_WEIGHT"}
DOCUMENTED_NAMES = sorted(set(fedleak.__all__) - {"__version__"} - CONSTANTS)
MODULES = [
    "attacks.texts.embedding_descent",
    "evaluation.auditing.private_training",
    "cli.finetuning.module",
]


def find_examples(name: str) -> list[doctest.DocTest]:
    """Return the examples of a name's own docstring, not those of its methods."""
    finder = doctest.DocTestFinder(recurse=False)
    return [test for test in finder.find(getattr(fedleak, name), name) if test.examples]


@pytest.mark.parametrize("name", DOCUMENTED_NAMES)
def test_the_example_runs(name, tmp_path, monkeypatch):
    tests = find_examples(name)
    assert tests, "give it an example in its docstring"
    monkeypatch.chdir(tmp_path)
    # What Lightning prints beside: examples show results alone.
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    monkeypatch.setattr(lightning, "Trainer", partial(lightning.Trainer, **quiet))
    for callback in (transformers.PrinterCallback, transformers.trainer_callback.ProgressCallback):
        monkeypatch.setattr(callback, "on_log", lambda *_, **__: None)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for test in tests:
        test.globs = {}  # each imports what it needs, as a reader would
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)


@pytest.mark.parametrize("name", MODULES)
def test_examples_behind_the_root_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"lightning_fedleak.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
