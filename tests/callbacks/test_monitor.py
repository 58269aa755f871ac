"""LeakageMonitor in Lightning's Trainer: what only the callback can show."""

import copy
import dataclasses
import json
import math
import re
import stat
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fedleak.attacks import BagOfWords, EmbeddingDescent, FCMembership
from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.callbacks import LeakageMonitor, RiskGate
from lightning_fedleak.defenses import (
    DPSGD,
    CanaryGradient,
    DefenseError,
    GradientNoise,
    Privacy,
    TokenLDP,
)
from lightning_fedleak.engine import WatchSettings
from lightning_fedleak.engine.log import COLUMNS
from lightning_fedleak.engine.loggers import Cards
from lightning_fedleak.engine.outcomes import not_shared
from lightning_fedleak.engine.run import reason
from lightning_fedleak.model.batches import BatchError
from lightning_fedleak.report import findings, read, watched
from lightning_fedleak.report import pages as files
from lightning_fedleak.report.records import MetricsLine, read_lines
from lightning_fedleak.strategies import DefendedStrategy
from tests.callbacks.runs import Probe, fit
from tests.engine.test_looks import n_types
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.loops import lines_of
from tests.helpers.models import tiny_gpt2
from tests.helpers.notices import announced
from tests.strategies.dpsgd_runs import CausalLM

F1 = "leakage/probe/f1"


def module(kind: type[CausalLMModule] = CausalLMModule, **settings: Any) -> CausalLMModule:
    return kind(tiny_gpt2(**settings).train())


def steps_of(probe: Probe) -> list[int]:
    return [step for step, *_ in probe.seen]


# ---- stages and precision -----------------------------------------------------------------------


def test_one_attack_may_be_at_two_stages_by_two_monitors_but_not_under_one_name(
    tmp_path: Path,
) -> None:
    monitors = [
        LeakageMonitor(Probe(), settings=WatchSettings(stages=[stage]))
        for stage in ("local", "shared")
    ]
    fit([*monitors], tmp_path, n=4)
    assert [monitor.looks for monitor in monitors] == [1, 1]
    monitors = [LeakageMonitor([Probe(), Probe(name="b")]), LeakageMonitor([Probe(name="b")])]
    with pytest.raises(ValueError, match=r"another LeakageMonitor.*leakage/b"):
        fit([*monitors], tmp_path)


def test_a_step_that_amp_skipped_shares_nothing_and_the_look_moves_on(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
    probe = Probe()
    monitor = LeakageMonitor(probe, every_n_steps=100)
    fit([monitor], tmp_path, n=96, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)])
    assert (monitor.failures, monitor.looks) == (0, 1)
    assert monitor.last_step > 0
    assert probe.seen[0][2].isfinite().all()


# ---- batches ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Texts:
    tokens: torch.Tensor
    targets: torch.Tensor


class Typed(CausalLMModule):
    def training_step(self, batch: Texts, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch.tokens, labels=batch.targets).loss


def test_a_batch_of_a_users_own_type_is_read_off_the_graph_or_refused(tmp_path: Path) -> None:
    """Refused at the first batch, where a compiled model shows no graph."""
    ids = torch.randint(5, 90, (4, 9), generator=torch.Generator().manual_seed(0))
    loader = DataLoader([Texts(ids, ids)], batch_size=None)
    monitor = LeakageMonitor(Probe())
    fit([monitor], tmp_path, module=module(Typed), loader=loader)
    assert (monitor.looks, monitor.failures) == (1, 0)
    assert monitor.latest["leakage/probe/recall"] > 0
    compiled = module(Typed)
    compiled.model.compile(backend="eager")
    with pytest.raises(
        BatchError, match=r"got Texts(?s:.*)def batch_adapter(?s:.*)LeakageMonitor\("
    ):
        fit([LeakageMonitor(Probe())], tmp_path, module=compiled, loader=loader)


class Iterating(CausalLMModule):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class Without(CausalLMModule):
    def configure_optimizers(self) -> None:
        return None


class Manual(CausalLMModule):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 3 == 2:
            optimizer = self.optimizers(use_pl_optimizer=self.counted)
            optimizer.step()
            optimizer.zero_grad()

    counted = True


class Raw(Manual):
    counted = False


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (Iterating, BatchError, "dataloader_iter"),
        (Without, ValueError, r"configure_optimizers returned None.*SGD"),
        (Raw, RuntimeError, "use_pl_optimizer"),  # whose optimizer Lightning does not count
    ],
)
def test_modules_that_cannot_be_read_are_refused(
    tmp_path: Path, kind: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        fit([LeakageMonitor(Probe(), every_n_steps=2)], tmp_path, module=module(kind))


def test_hidden_states_cross_the_split_without_any_optimizer(tmp_path: Path) -> None:
    monitor = LeakageMonitor(EmbeddingDescent(layer=1, steps=2), every_n_steps=1)
    fit([monitor], tmp_path, module=module(Without), n=4)
    assert (monitor.looks, monitor.failures) == (1, 0)


def test_an_unknown_argument_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match=r"settings=WatchSettings\(report=\.\.\.\)"):
        LeakageMonitor(report="live")  # type: ignore[call-arg]


# ---- which batches a look covers, however the Trainer steps --------------------------------------


class Skipping(CausalLMModule):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 1 else None


class Validating(CausalLMModule):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def val_dataloader(self) -> Any:
        return random_token_loader(8)


@pytest.mark.parametrize(
    ("kind", "settings", "windows"),
    [
        (Manual, {}, [(0, 3), (3, 6)]),
        (Skipping, {"max_epochs": 2}, [(0, 1), *((n, n + 1) for n in range(8))]),
        (CausalLMModule, {"accumulate_grad_batches": 3}, [(0, 3), (3, 6), (6, 8)]),
        (
            Validating,
            {"accumulate_grad_batches": 2, "val_check_interval": 1},
            [(n, n + 2) for n in (0, 2, 4, 6)],
        ),
        (CausalLMModule, {"fast_dev_run": 2, "logger": False}, [(0, 1), (1, 2)]),
        (CausalLMModule, {"limit_train_batches": 0}, []),
    ],
    ids=["manual", "a hook skips the rest", "last window is short", "validation", "dev", "empty"],
)
def test_a_look_covers_the_batches_of_its_step(
    tmp_path: Path, kind: Any, settings: dict[str, Any], windows: list[tuple[int, int]]
) -> None:
    monitor = LeakageMonitor(Probe(), every_n_steps=1, folder=tmp_path)
    fit([monitor], tmp_path, module=module(kind, dropout=0.0), **settings)
    batches = list(random_token_loader(32))
    expected = [n_types(*batches[start:end]) for start, end in windows]
    assert [line["n"] for line in (lines_of(tmp_path) if windows else [])] == expected
    assert (monitor.looks, monitor.failures) == (len(windows), 0)


# ---- what is logged -----------------------------------------------------------------------------


def test_values_reach_every_logger_and_the_trainers_metrics(tmp_path: Path) -> None:

    board, table = TensorBoardLogger(tmp_path / "tb"), CSVLogger(tmp_path / "csv")
    monitor = LeakageMonitor(Probe(), every_n_steps=3)
    trainer = fit([monitor], tmp_path, logger=[board, table], log_every_n_steps=50)
    assert float(trainer.callback_metrics[F1]) == pytest.approx(monitor.latest[F1])
    events = EventAccumulator(board.log_dir, size_guidance={"tensors": 0})
    tags = events.Reload().Tags()
    assert [event.step for event in events.Scalars(F1)] == [0, 3, 6]
    assert {"utility/train_loss", "monitor/seconds", "monitor/failures"} <= set(tags["scalars"])
    assert F1 in next((tmp_path / "csv").rglob("metrics.csv")).read_text()


def charts_and_tags(board: TensorBoardLogger) -> tuple[list[Any], set[str], Any]:
    """Return the charts of a run's page, the scalars that it has logged, and its events."""
    events = EventAccumulator(board.log_dir).Reload()
    (event,) = events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    charts = [chart for category in layout.category for chart in category.chart]
    return charts, set(events.Tags()["scalars"]), events


def test_the_layout_names_only_tags_that_are_logged(tmp_path: Path) -> None:
    board = TensorBoardLogger(tmp_path)
    monitor = LeakageMonitor(
        Probe(), every_n_steps=1, settings=WatchSettings(stages=("local", "shared"))
    )
    gate = RiskGate(F1, at_most=1.0, action="harden")
    strategy = DefendedStrategy("auto", [GradientNoise(clip=None, sigma=1e-9)])
    fit([monitor, gate], tmp_path, logger=board, strategy=strategy)
    charts, logged, _ = charts_and_tags(board)
    matches = {
        chart.title: [
            [name for name in logged if re.search(tag, name)] for tag in chart.multiline.tag
        ]
        for chart in charts
    }
    assert not any(chart.margin.series for chart in charts)  # it complains of runs without a tag
    unmatched = [title for title, names in matches.items() if not all(names)]
    assert unmatched == []
    assert {len(names) for names in matches[f"{F1} and its 95% interval"]} == {1}
    assert "leakage_local/probe/f1 and its 95% interval" in matches
    assert set(matches["gates: 1 where one acted"][0]) == {"gate/probe/f1", "gate/probe/f1_notches"}


def test_the_first_cards_are_leakage_and_the_limit_of_a_gate(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    board = TensorBoardLogger(tmp_path)
    monitor = LeakageMonitor(Probe(), every_n_steps=3)
    fit([monitor, RiskGate(F1, at_most=0.5, action="warn")], tmp_path, logger=board)
    events = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    [run, limit] = sorted(events.Runs())
    assert limit == f"{run}/limit"
    tags = sorted(events.Runs()[run]["scalars"])
    cards = [tag for tag in tags if tag.startswith("1_leakage/")]
    assert tags[: len(cards)] == cards == ["1_leakage/train_loss", "1_leakage/words_f1"]
    values = [(event.step, event.value) for event in events.Scalars(run, "1_leakage/words_f1")]
    assert values == [(e.step, e.value) for e in events.Scalars(run, "leakage/worst/words")]
    limits = [(e.step, e.value) for e in events.Scalars(limit, "1_leakage/words_f1")]
    assert limits == [(step, 0.5) for step, _ in values]


def test_a_surface_that_is_not_shared_is_no_number_in_the_text() -> None:
    series, texts = LeakageMonitor(Probe()).engine.series, []
    board = SimpleNamespace(add_text=lambda _, text, __: texts.append(text))
    Cards(series, (), (), (), {}).add_summary([board], dict.fromkeys(series, not_shared(["f1"])), 0)
    assert "| leakage/probe | f1 | not shared | | 0 |" in texts[0]
    assert "nobody tested: words, membership, texts, memorization." in texts[0]


class Crashing(Probe):
    default_name = "crashing"

    def run(self, view: Any, query: Any = None) -> Any:
        raise RuntimeError("boom")


class Pandas:
    """Replaces the package: keeps what a frame is made of."""

    @staticmethod
    def DataFrame(rows: list[dict[str, Any]], columns: list[str]) -> SimpleNamespace:
        assert all(set(row) == set(columns) for row in rows)
        return SimpleNamespace(rows=rows, columns=columns)


def test_the_table_has_what_the_file_has_of_the_newest_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = WatchSettings(stages=("local", "shared"))
    attacks = [Probe(), Crashing()]
    monitor = LeakageMonitor(attacks, every_n_steps=4, settings=settings, folder=tmp_path)
    monkeypatch.setitem(sys.modules, "pandas", Pandas)
    with pytest.raises(RuntimeError, match=r"call trainer\.fit"):
        monitor.to_dataframe()
    fit([monitor], tmp_path)
    with (tmp_path / "leakage.jsonl").open("a") as file:
        file.write('{"run": "killed", "step')  # half of a line
    fit([monitor], tmp_path)
    table = monitor.to_dataframe()
    assert table.columns == list(COLUMNS)
    text = (tmp_path / "leakage.jsonl").read_text().splitlines()
    half = text.pop(len(text) // 2)
    assert half.endswith('"step')
    lines = [json.loads(line) for line in text]
    assert len({line["run"] for line in lines}) == 2
    cells = {(r["step"], r["stage"], r["attack"], r["metric"]): r for r in table.rows}
    for line in lines[len(lines) // 2 :]:
        for metric, logged in line["metrics"].items():
            row = cells.pop((line["step"], line["stage"], line["attack"], metric))
            assert (row["n"], row["unknown"]) == (line["n"], line["unknown"])
            expected = [logged.get(end) for end in ("value", "low", "high")]
            expected = [math.nan if value is None else value for value in expected]
            values = [row[end] for end in ("value", "low", "high")]
            assert values == pytest.approx(expected, nan_ok=True)
            assert math.isnan(row["value"]) or line["attack"] == "probe"
    assert not cells


def test_a_monitor_and_a_gate_show_their_settings(tmp_path: Path) -> None:
    monitor = LeakageMonitor([Probe(), Probe(name="b")], every_n_steps=4)
    gate = RiskGate(F1, at_most=0.0, action="warn")
    assert repr(monitor) == "LeakageMonitor([probe, b], every_n_steps=4)"
    assert repr(gate) == "RiskGate('leakage/probe/f1', at_most=0, warn)"
    with announced("warns at step 0"):
        fit([monitor, gate], tmp_path)
    assert repr(monitor) == "LeakageMonitor([probe, b], every_n_steps=4, looks=2)"
    assert repr(gate) == "RiskGate('leakage/probe/f1', at_most=0, warn, fired at step 0)"
    assert repr(LeakageMonitor()) == "LeakageMonitor('auto', 10 looks)"


def test_only_words_of_the_packages_own_errors_are_logged() -> None:
    """Others may quote the batch."""
    noised = CanaryGradient(torch.zeros(1, 1, 1)).noised(torch.zeros(1, 1), 1.0)
    defense = DPSGD(max_grad_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(DefenseError) as package_error:
        defense.on_canary(noised, [], None)
    assert "nothing was released" in reason(package_error.value)
    package_error.value.__cause__ = ValueError("the batch says: secret")
    assert "at dpsgd.py:" in reason(package_error.value)
    for error in (DefenseError("secret"), ValueError("secret")):
        with pytest.raises(type(error)) as user_error:
            raise error
        assert reason(user_error.value).startswith(
            f"{type(error).__name__} at {Path(__file__).name}:"
        )
    assert reason(UnusableObservation("ours")) == "ours"


def test_an_error_of_torch_is_told_by_its_words_and_the_module_and_no_line_of_torch() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 2).half())
    with pytest.raises(RuntimeError) as raised:
        model(torch.tensor([[1]]))
    why = reason(raised.value)
    assert why.startswith("torch failed (")
    assert "dtype" in why
    assert why.endswith(", in the model's '1'")
    with pytest.raises(IndexError) as raised_index:
        model(torch.tensor([[4321]]))
    assert reason(raised_index.value).endswith(", in the model's '0'")
    assert "4321" not in reason(raised_index.value)
    assert "functional.py" not in reason(raised_index.value)
    with pytest.raises(RuntimeError) as raised_id:
        torch.nn.functional.layer_norm(torch.ones(2, 3), (4321,))  # a number that may be an id
    assert "normalized_shape=[#]" in reason(raised_id.value)
    assert "4321" not in reason(raised_id.value)
    for value in (-0.4321, -4.3e-21, -43.0):
        with pytest.raises(RuntimeError, match=r"found std -(4|0.4)") as raised_number:
            torch.nn.init.normal_(torch.ones(2), std=value)
        assert "found std #" in reason(raised_number.value)
        assert re.findall(r"\d", reason(raised_number.value)) == []


# ---- more than one fit --------------------------------------------------------------------------


class Breaks(CausalLMModule):
    at = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.at:
            raise KeyError("the user's own")
        return super().training_step(batch, batch_idx)


def test_each_fit_is_watched_from_its_first_step_also_after_an_exception(tmp_path: Path) -> None:
    probe, events = Probe(k=20), []
    monitor = LeakageMonitor(probe, every_n_steps=1)
    gate = RiskGate(F1, at_most=0.0, action=events.append)
    broken = module(Breaks)
    with pytest.raises(KeyError):
        fit([gate, monitor], tmp_path / "broken", module=broken)
    assert "forward" not in vars(broken.model.lm_head)
    assert "step" not in vars(broken.trainer.optimizers[0])
    broken.at = -1
    trainer = fit([gate, monitor], tmp_path / "again", module=broken)
    assert not broken.model.lm_head.weight._post_accumulate_grad_hooks
    assert [event.step for event in events] == [0, 1, *range(8)]
    assert monitor.looks == 10
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, trainer.train_dataloader)  # goes on
    assert events[10].step == 8
    trainer.validate(Validating(broken.model), trainer.train_dataloader, verbose=False)
    assert monitor.looks == 18
    assert len(copy.deepcopy(monitor).attacks[0].seen) == len(probe.seen)


@pytest.mark.parametrize(
    ("before", "after", "expected"), [(1000, 3, [8, 9, 12, 15]), (5, 5, [8, 10, 15])]
)
def test_a_resumed_run_looks_at_its_first_step_and_by_its_own_cadence(
    tmp_path: Path, before: int, after: int, expected: list[int]
) -> None:
    saver = ModelCheckpoint(tmp_path, save_last=True)
    first = LeakageMonitor(Probe(k=20), every_n_steps=before)
    fit([first, saver], tmp_path, enable_checkpointing=True)
    probe = Probe(k=20)
    gate = RiskGate(F1, at_most=0.1, action="warn")
    callbacks = [gate, LeakageMonitor(probe, every_n_steps=after)]
    with announced("warns at step 8"):
        fit(callbacks, tmp_path / "b", max_epochs=2, ckpt_path=tmp_path / "last.ckpt")
    assert steps_of(probe) == expected


def waiting(root: Path, n: int = 4, strict: bool = True, **settings: Any) -> tuple[Any, ...]:
    """Run a fit that ends before there was any text outside the batch to query."""
    monitor = LeakageMonitor([Probe(), FCMembership(layer=1)], every_n_steps=50)
    gate = RiskGate("leakage/fc_membership/auc", at_most=0.9, action="warn", strict=strict)
    return fit([gate, monitor], root, n=n, **settings), gate, monitor


def test_a_strict_gate_that_never_had_a_result_ends_unknown(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="is unknown"):
        _, gate, monitor = waiting(tmp_path)
    assert math.isnan(gate.fired.value)
    assert math.isnan(monitor.latest["leakage/fc_membership/auc"])
    trainer, *_ = waiting(tmp_path / "over", n=16, strict=False)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    _, gate, _ = waiting(tmp_path / "over", n=16, ckpt_path=tmp_path / "end.ckpt")
    assert gate.fired is None, "that fit was over before it began"


# What people see of a run while it goes on, and what loggers get beside numbers.


LIVE = WatchSettings(report="live")


class Pages(Callback):
    """Keeps the page as it is after each step."""

    def __init__(self, folder: Path) -> None:
        self.page, self.texts = folder / "report.html", list[str]()

    def on_train_batch_end(self, *_: Any) -> None:
        self.texts.append(self.page.read_text())


def monitor(folder: Path, settings: WatchSettings = LIVE) -> LeakageMonitor:
    return LeakageMonitor(Probe(), every_n_steps=1, folder=folder, settings=settings)


@pytest.mark.parametrize(("seconds", "is_cheap"), [(1e9, True), (1e-9, False)])
def test_the_page_is_written_after_each_look_that_it_costs_little_of_and_loads_itself(
    tmp_path, monkeypatch, seconds, is_cheap
):
    monkeypatch.setattr(watched, "SECONDS", seconds)
    pages = Pages(tmp_path)
    fit([monitor(tmp_path), pages], tmp_path)
    assert len(set(pages.texts)) == (len(pages.texts) if is_cheap else 1)
    assert len(pages.texts) > 2
    assert all("data-live" in text for text in pages.texts)
    assert "data-live=" not in pages.page.read_text()
    assert stat.S_IMODE(pages.page.stat().st_mode) == 0o600


def test_a_live_page_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(files, "write_whole", refuse)
    with pytest.warns(UserWarning, match="no live report: no room"):
        trainer = fit([one := monitor(tmp_path)], tmp_path)
    assert one.looks == trainer.global_step


def test_a_notebook_shows_the_page(tmp_path, monkeypatch):
    display = pytest.importorskip("IPython.display")

    one = monitor(tmp_path)
    with pytest.raises(RuntimeError, match="train first"):
        one.show()
    fit([one], tmp_path)
    shown = []
    monkeypatch.setattr(display, "display", shown.append)
    one.show(height=500)
    assert "height:500px" in shown[0].data
    assert 'srcdoc="&lt;!doctype html&gt;' in shown[0].data


# ---- loggers ------------------------------------------------------------------------------------


class Experiment:
    """Stands for a run of W&B, or the client of MLflow."""

    def __init__(self) -> None:
        self.defined: dict[str, dict[str, Any]] = {}
        self.artifacts: list[tuple[str, str]] = []

    def define_metric(self, name: str, **settings: Any) -> None:
        self.defined[name] = settings

    def log_artifact(self, run_id: str, path: str) -> None:
        self.artifacts.append((run_id, path))


class WandbLogger(Logger):
    """Has what is used of Lightning's logger of this name."""

    name, version, save_dir = "project", "run1", None

    def __init__(self) -> None:
        self.experiment = Experiment()
        self.settings: dict[str, Any] = {}
        self.values: dict[str, float] = {}

    def log_hyperparams(self, params: Any, *_: Any) -> None:
        self.settings |= dict(params)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.values |= metrics


class MLFlowLogger(WandbLogger):
    run_id = "run1"


def test_loggers_have_the_settings_and_the_highest_leakage(tmp_path):
    wandb, csv = WandbLogger(), CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    gate = RiskGate(F1, at_most=0.9, action="warn")
    fit([monitor(tmp_path, WatchSettings()), gate], tmp_path, logger=[wandb, csv])
    settings = wandb.settings["fedleak"]
    assert settings["attacks"] == ["probe"]
    assert settings["gates"] == [f"{F1} at most 0.9: warn"]
    assert settings["defenses"] == []
    worst = {"step_metric": "trainer/global_step", "summary": "max,last"}
    assert wandb.experiment.defined == {"leakage/worst/words": worst}
    saved = yaml.safe_load(next(tmp_path.rglob("hparams.yaml")).read_text())
    assert saved["fedleak"]["attacks"] == ["probe"]


def test_a_report_is_uploaded_where_that_is_asked_for(tmp_path):
    for asked in (False, True):
        mlflow = MLFlowLogger()
        settings = WatchSettings(report=True, upload_report=asked)
        folder = tmp_path / str(asked)
        fit([monitor(folder, settings)], folder, logger=mlflow)
        page = str(folder / "report.html")
        assert mlflow.experiment.artifacts == ([("run1", page)] if asked else [])
    with pytest.raises(ValueError, match="pass report=True too"):
        WatchSettings(upload_report=True)


def test_a_logger_that_takes_no_settings_ends_no_run(tmp_path):
    class Refuses(WandbLogger):
        def log_hyperparams(self, params: Any, *_: Any) -> None:
            if "fedleak" in params:
                raise OSError("offline")

    with pytest.warns(UserWarning, match="not every logger has the settings"):
        fit([monitor(tmp_path, WatchSettings())], tmp_path, logger=(logger := Refuses()))
    assert F1 in logger.values


def test_two_runs_of_a_project_have_folders_of_their_own(tmp_path):
    """W&B and MLflow have one folder for all of them."""
    for run in ("run1", "run2"):
        logger = WandbLogger()
        logger.version = run
        one = LeakageMonitor(Probe(), every_n_steps=1)
        fit([one], tmp_path, logger=logger)
        assert (tmp_path / "project" / run / "leakage.jsonl").exists()


def test_tensorboard_has_the_settings_without_a_value_before_a_look(tmp_path):
    from tensorboard.plugins.hparams import plugin_data_pb2

    board = TensorBoardLogger(tmp_path)
    fit([monitor(tmp_path, WatchSettings())], tmp_path, logger=board, max_steps=1)
    events = EventAccumulator(board.log_dir).Reload()
    tables = events.PluginTagToContent("hparams")
    data = plugin_data_pb2.HParamsPluginData.FromString(tables["_hparams_/session_start_info"])
    assert "fedleak/attacks" in data.session_start_info.hparams
    data = plugin_data_pb2.HParamsPluginData.FromString(tables["_hparams_/experiment"])
    assert [one.name.tag for one in data.experiment.metric_infos] == ["leakage/worst/words"]
    assert [one.step for one in events.Scalars("leakage/worst/words")] == [0]


# The user's losses are logged where they were measured, beside leakage and epsilon.


class Named(CausalLMModule):
    """Logs its losses under two names; two validations in a row have the same loss."""

    def __init__(self, validation: str, training: str) -> None:
        super().__init__(tiny_gpt2(tied=False).train())
        self.names = validation, training
        self.losses = iter((4.0, 3.0, 3.0, 3.5))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log(self.names[1], loss)
        return loss

    def val_dataloader(self) -> Any:
        return random_token_loader(4)

    def on_validation_start(self) -> None:
        self.loss = next(self.losses)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log(self.names[0], self.loss)
        self.log("val_acc", 0.25)


@pytest.mark.parametrize(
    ("validation", "training"), [("val/loss", "train/loss"), ("Validation.NLL", "my_loss")]
)
def test_losses_of_any_name_have_cards_a_chart_and_the_steps_of_their_validations(
    tmp_path: Path, validation: str, training: str
) -> None:
    board = TensorBoardLogger(tmp_path)
    monitor = LeakageMonitor(BagOfWords(), every_n_steps=3)
    trainer = fit(
        [monitor], tmp_path, module=Named(validation, training), logger=board, max_epochs=4,
        loader=random_token_loader(16), num_sanity_val_steps=0,
    )  # fmt: skip
    per_epoch = trainer.global_step // 4
    steps = [per_epoch * epoch for epoch in (1, 2, 3, 4)]
    charts, tags, events = charts_and_tags(board)

    def curve(tag: str) -> list[tuple[int, float]]:
        return [(one.step, one.value) for one in events.Scalars(tag)]

    measured = [*zip(steps, (4.0, 3.0, 3.0, 3.5), strict=True)]
    assert curve(f"utility/{validation}") == curve(f"1_leakage/{validation}") == measured
    assert [step + 1 for step, _ in curve(validation)] == steps, "as Lightning counts, from 0"
    assert curve("utility/val_acc") == [(step, 0.25) for step in steps]
    assert curve(f"utility/{validation}_best") == [(steps[1], 3.0)]
    first = {tag for tag in tags if tag.startswith("1_leakage/")}
    assert first == {f"1_leakage/{name}" for name in ("words_f1", validation, training)}
    [utility] = [chart for chart in charts if chart.title.startswith("utility")]
    [pattern] = utility.multiline.tag
    matching = {tag for tag in tags if re.match(pattern, tag)}
    assert matching == {f"1_leakage/{name}" for name in (validation, training)}

    found = findings(read([Path(board.log_dir)]))
    assert found.runs[0].utility[validation] == measured
    [fact] = [fact for fact in found.overviews[0].facts if fact.name == "Utility"]
    assert (fact.value, fact.detail) == (f"{validation} 3.500", f"from 4.000, step {steps[-1]}")


class Accounted(GradientNoise):
    """Says what it costs."""

    def __init__(self, name: str, epsilon: float) -> None:
        super().__init__(clip=1.0, sigma=1.0)
        self.name, self._epsilon = name, epsilon

    @property
    def privacy(self) -> Privacy:
        return Privacy(self._epsilon, 1e-5, 1.0, 1.0, self.releases)


def run(tmp_path: Path, *defenses: Any) -> tuple[LeakageMonitor, L.Trainer]:
    monitor = LeakageMonitor(FCMembership(1), every_n_steps=2)
    # A Poisson batch of 50 of 200 is never empty, which would put a look off, and never holds all
    # texts of the one before, which are the games' non-members.
    settings: dict[str, Any] = {"loader": random_token_loader(200, batch_size=50), "max_steps": 4}
    settings |= {"strategy": DefendedStrategy("auto", list(defenses))}
    board = TensorBoardLogger(tmp_path)
    return monitor, fit([monitor], tmp_path, module=CausalLM(), logger=board, **settings)


class Validated(CausalLM):
    """Reports one validation loss after the other, the best of which is not the last."""

    losses = (4.0, 3.0, 3.5)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.log("val_loss", self.losses[self.current_epoch])


class Quits(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 7:
            raise RuntimeError("a cable")


@pytest.mark.parametrize("broken", [False, True])
def test_dashboards_end_at_what_was_spent_and_follow_the_validation(
    tmp_path: Path, broken: bool
) -> None:
    """Looks are at steps 0 and 1: the rest is written as epochs and the fit end."""
    L.seed_everything(0, verbose=False)
    defense = DPSGD(1.0, noise_multiplier=1.0, target_delta=1e-3, accountant="rdp")
    monitor = LeakageMonitor(FCMembership(1), every_n_steps=1000)
    trainer = L.Trainer(
        accelerator="cpu", strategy=DefendedStrategy("auto", [defense]), max_epochs=3,
        callbacks=[monitor, *([Quits()] if broken else [])], logger=TensorBoardLogger(tmp_path),
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        log_every_n_steps=1000,
    )  # fmt: skip
    data = random_token_loader(200, batch_size=50)
    with pytest.raises(RuntimeError, match="a cable") if broken else nullcontext():
        trainer.fit(Validated(), data, data)
    assert monitor.last_step == 1
    epochs, best = (1, 4.0) if broken else (3, 3.0)
    steps = [4 * epoch for epoch in range(1, epochs + 1)]
    events = EventAccumulator(str(trainer.log_dir))
    events.Reload()
    epsilons = {one.step: one.value for one in events.Scalars("privacy/epsilon")}
    assert [*epsilons] == [0, 1, *steps, *([7] if broken else [])]
    for step, epsilon in epsilons.items():
        twin = DPSGD(1.0, noise_multiplier=1.0, target_delta=1e-3, accountant="rdp").accountant
        twin.step(1.0, defense.privacy.sample_rate, step + (step < 2))  # looks come after
        assert epsilon == pytest.approx(twin.epsilon(1e-3))
    assert trainer.callback_metrics["privacy/epsilon"] == pytest.approx(defense.privacy.epsilon)
    validations = {one.step: one.value for one in events.Scalars("utility/val_loss")}
    expected = dict(zip(steps, Validated.losses, strict=False))
    assert validations == expected
    [lowest] = events.Scalars("utility/val_loss_best")
    assert (lowest.step, lowest.value) == (next(s for s in steps if expected[s] == best), best)
    assert events.Scalars("utility/train_loss")[-1].step == trainer.global_step
    assert monitor.latest["utility/val_loss"] == Validated.losses[epochs - 1]
    record = read_lines(Path(trainer.log_dir) / "run.jsonl").lines
    written = [line for line in record if isinstance(line, MetricsLine)]
    assert [line.step for line in written if "val_loss" in (line.utility or {})][:epochs] == steps
    assert written[-1].privacy[0].releases == trainer.global_step


@pytest.mark.filterwarnings("ignore:TokenLDP")
def test_several_are_distinguished_and_an_infinite_one_is_not_plotted(tmp_path: Path) -> None:
    """Epsilon of replaced words is that of a row of 12."""
    words = TokenLDP("grr", epsilon=3.0, per="token", special_ids=[])
    monitor, trainer = run(tmp_path, words, Accounted("b", float("inf")))
    assert monitor.latest[f"privacy/{words.name}/epsilon"] == pytest.approx(3.0 * 12)
    assert monitor.latest[f"privacy/{words.name}/delta"] == 0.0
    assert f"privacy/{words.name}/noise_multiplier" not in monitor.latest
    assert monitor.latest["privacy/b/epsilon"] == float("inf")
    tags = EventAccumulator(str(trainer.log_dir)).Reload().Tags()["scalars"]
    assert f"privacy/{words.name}/epsilon" in tags
    assert "privacy/b/epsilon" not in tags


def test_nothing_is_logged_where_nothing_is_accounted(tmp_path: Path) -> None:
    monitor, _ = run(tmp_path, GradientNoise(clip=1.0, sigma=1.0))
    assert not [name for name in monitor.latest if name.startswith("privacy/")]
