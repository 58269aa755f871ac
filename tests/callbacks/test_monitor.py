"""LeakageMonitor in Lightning's Trainer: what only the callback can show."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader

from lightning_fedleak.attacks import EmbeddingDescent
from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.callbacks import LeakageMonitor, RiskGate
from lightning_fedleak.defenses import DPSGD, CanaryGradient, DefenseError, GradientNoise
from lightning_fedleak.engine import WatchSettings
from lightning_fedleak.engine.log import COLUMNS
from lightning_fedleak.engine.loggers import Cards
from lightning_fedleak.engine.outcomes import not_shared
from lightning_fedleak.engine.run import reason
from lightning_fedleak.model.batches import BatchError
from lightning_fedleak.strategies import DefendedStrategy
from tests.callbacks.runs import Probe, fit
from tests.engine.test_looks import n_types
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.loops import lines_of
from tests.helpers.models import tiny_gpt2
from tests.helpers.notices import announced

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
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'xyz'$"):
        LeakageMonitor(Probe(), xyz=5)  # type: ignore[call-arg]
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
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

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
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    events = EventAccumulator(board.log_dir).Reload()
    (event,) = events.Tensors(metadata.CONFIG_SUMMARY_TAG)
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
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
    assert limit == f"{run}/gate"
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


# ---- surfaces that change -----------------------------------------------------------------------
