import dataclasses
import json
import math
import re
import stat
import warnings

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader, Dataset

from lightning_fedleak.attacks import BagOfWords, BiasSign, EmbeddingDescent, FlatChat
from lightning_fedleak.attacks.base import Surfaces, UnusableObservation, WordGuess
from lightning_fedleak.callbacks import LeakageMonitor, MonitorSettings, RiskGate
from lightning_fedleak.defenses import GradientNoise
from lightning_fedleak.engine.choice import listed
from lightning_fedleak.engine.scheduler import EveryNSteps, MaxOverhead
from lightning_fedleak.model.anatomy import HEAD_BIAS, HEAD_WEIGHT
from lightning_fedleak.model.batches import BatchError, TokenBatch
from lightning_fedleak.strategies import DefendedStrategy
from lightning_fedleak.threats import ThreatModelError
from tests.callbacks.runs import Probe, fit, monitor_with
from tests.helpers.lightning_modules import (
    CausalLMModule,
    FusedLossModule,
    random_token_loader,
)
from tests.helpers.models import tiny_bert_mlm, tiny_gpt2, tiny_roberta_classifier


class Crashing(Probe):
    default_name = "crashing"

    def run(self, view, query=None):
        raise RuntimeError("boom")


class Rejecting(Probe):
    default_name = "rejecting"

    def run(self, view, query=None):
        if not view.gradient(self.role).isfinite().all():
            raise UnusableObservation("non-finite gradient")
        return super().run(view, query)


def lines(monitor):
    return [json.loads(line) for line in monitor.engine.jsonl.path.read_text().splitlines()]


# ---- what is seen where -------------------------------------------------------------------------


def test_without_defences_every_stage_is_what_the_optimizer_gets(tmp_path):
    probe = Probe()
    monitor = LeakageMonitor(probe, every_n_steps=1, stages=("local", "shared", "aggregate"))
    given = []

    class Recording(torch.optim.SGD):
        def step(self, closure=None):
            out = closure()
            given.append(self.param_groups[0]["params"][0].grad.clone())
            super().step()
            return out

    class Module(CausalLMModule):
        def configure_optimizers(self):
            head = self.model.lm_head.weight
            others = [p for p in self.parameters() if p is not head]
            return Recording([head, *others], lr=0.01)

    clip = 1e-3
    fit([monitor], tmp_path, module=Module(tiny_gpt2().train()), gradient_clip_val=clip)
    assert len(given) == 8
    for (_, _, seen), real in zip(probe.seen, given, strict=True):
        assert torch.equal(seen, real)
        assert seen.norm() <= clip * 1.0001
    values = {monitor.latest[f"leakage{s}/probe/f1"] for s in ("", "_local", "_aggregate")}
    assert len(values) == 1


def test_under_a_defence_local_is_before_and_shared_is_after_it(tmp_path):
    probe = Probe()
    monitor = LeakageMonitor(probe, every_n_steps=1, stages=("local", "shared", "aggregate"))
    defence = GradientNoise(clip=1e-6, sigma=1e3, seed=1)
    strategy = DefendedStrategy("single_device", defenses=[defence])
    fit([monitor], tmp_path, strategy=strategy)
    local, shared, aggregate = (probe.at(s) for s in ("local", "shared", "aggregate"))
    for before, after, applied in zip(local, shared, aggregate, strict=True):
        assert torch.equal(after, applied)
        assert after.std().item() == pytest.approx(1e-3, rel=0.1)
        assert abs(torch.corrcoef(torch.stack([before.flatten(), after.flatten()]))[0, 1]) < 0.1


def test_under_accumulation_a_look_is_the_whole_step(tmp_path):
    probe = Probe()
    monitor = LeakageMonitor(probe, every_n_steps=3)
    model = tiny_gpt2(dropout=0.0).train()
    module = CausalLMModule(model, lr=0.0)
    fit([monitor], tmp_path, module=module, accumulate_grad_batches=2)
    assert [step for step, *_ in probe.seen] == [0, 3]
    batches = list(random_token_loader(32))
    expected = torch.zeros_like(model.lm_head.weight)
    for batch in batches[6:8]:
        loss = model(**batch).loss / 2
        expected += torch.autograd.grad(loss, model.lm_head.weight)[0]
    torch.testing.assert_close(probe.at("shared")[1], expected, rtol=1e-4, atol=1e-7)
    targets = torch.cat([b["labels"][:, 1:] for b in batches[6:8]])
    assert lines(monitor)[-1]["n"] == targets.unique().numel()


def test_metrics_are_those_of_the_guess_against_the_labels(tmp_path):
    probe = Probe(k=7)
    monitor = LeakageMonitor(probe, every_n_steps=1)
    fit([monitor], tmp_path, n=4)
    labels = set(next(iter(random_token_loader(4)))["labels"][:, 1:].flatten().tolist())
    guessed = set(probe.at("shared")[0].norm(dim=1).topk(7).indices.tolist())
    hits = len(labels & guessed)
    assert monitor.latest["leakage/probe/precision"] == pytest.approx(hits / 7)
    assert monitor.latest["leakage/probe/recall"] == pytest.approx(hits / len(labels))
    f1 = 2 * hits / (7 + len(labels))
    assert monitor.latest["leakage/probe/f1"] == pytest.approx(f1)
    low, high = monitor.latest["leakage/probe/f1_low"], monitor.latest["leakage/probe/f1_high"]
    assert 0 <= low < f1 < high <= 1


def test_local_steps_show_the_weight_change_in_units_of_a_gradient(tmp_path):
    probe, single = Probe(), Probe()
    module = CausalLMModule(tiny_gpt2().train(), lr=0.01)
    fit([LeakageMonitor(probe, every_n_steps=4, local_steps=4)], tmp_path / "a", module=module)
    module = CausalLMModule(tiny_gpt2().train(), lr=0.01)
    fit([LeakageMonitor(single, every_n_steps=1)], tmp_path / "b", module=module)
    sums = [sum(single.at("shared")[i : i + 4]) for i in (0, 4)]
    for got, expected in zip(probe.at("shared"), sums, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)


# ---- failures -----------------------------------------------------------------------------------


def test_a_crashing_attack_reads_unknown_is_counted_and_does_not_stop_anything(tmp_path):
    monitor = LeakageMonitor([Crashing(), Probe()], every_n_steps=1)
    with pytest.warns(UserWarning, match=r"crashing.*RuntimeError at test_monitor.py.*unknown"):
        trainer = fit([monitor], tmp_path)
    assert trainer.global_step == 8
    assert math.isnan(monitor.latest["leakage/crashing/f1"])
    assert math.isnan(float(trainer.callback_metrics["leakage/crashing/f1"]))
    assert monitor.latest["leakage/probe/f1"] > 0
    assert monitor.failures == monitor.latest["monitor/failures"] == 8
    crashed = [x for x in lines(monitor) if x["attack"] == "crashing"]
    assert all(
        "RuntimeError at" in x["unknown"] and x["metrics"]["f1"]["value"] is None for x in crashed
    )


def test_non_finite_gradients_are_unknown(tmp_path):
    class Broken(CausalLMModule):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if batch_idx == 1 else loss

    monitor = LeakageMonitor([Rejecting(), FlatChat(oracle_n_types=20)], every_n_steps=1)
    with pytest.warns(UserWarning, match="non-finite"):
        fit([monitor], tmp_path, module=Broken(tiny_gpt2().train()), max_steps=2)
    assert math.isnan(monitor.latest["leakage/rejecting/f1"])
    assert math.isnan(monitor.latest["leakage/flatchat/f1"])
    assert monitor.failures == 2


def test_a_step_that_amp_skipped_shares_nothing_and_the_look_moves_on(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    probe = Probe()
    monitor = LeakageMonitor(probe, every_n_steps=100)
    fit([monitor], tmp_path, n=96, plugins=[precision])
    assert monitor.failures == 0
    assert monitor.looks == 1
    assert monitor.last_step > 0
    assert probe.seen[0][2].isfinite().all()


def test_batches_without_targets_are_passed_over_then_unknown(tmp_path):
    class Ignoring(CausalLMModule):
        def training_step(self, batch, batch_idx):
            loss = self.model.transformer(batch["input_ids"]).last_hidden_state.square().mean()
            self.log("train_loss", loss)
            return loss

    rows = [{"input_ids": torch.arange(3, 9), "labels": torch.full((6,), -100)}] * 120
    module = Ignoring(tiny_gpt2().train())
    monitor = LeakageMonitor(Probe(), every_n_steps=1)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[monitor], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="nothing was shared in 21 steps"):
        trainer.fit(module, DataLoader(rows, batch_size=4))
    assert (monitor.looks, monitor.failures) == (1, 1)
    assert math.isnan(monitor.latest["leakage/probe/f1"])


def test_a_later_batch_that_cannot_be_read_is_a_failure_not_an_end(tmp_path):
    def adapter(batch):
        if int(batch["input_ids"][0, 0]) % 2 == 0:
            raise BatchError("odd")
        return TokenBatch(batch["input_ids"], batch["labels"], None, "causal")

    even = [int(b["input_ids"][0, 0]) % 2 == 0 for b in random_token_loader(32)]
    assert not even[0]
    assert any(even)
    monitor = LeakageMonitor(
        Probe(), every_n_steps=1, settings=MonitorSettings(batch_adapter=adapter)
    )
    with pytest.warns(UserWarning, match="could not be read: BatchError: odd"):
        trainer = fit([monitor], tmp_path, module=FusedLossModule(tiny_gpt2().train()))
    assert trainer.global_step == 8
    assert monitor.failures == sum(even)


def test_a_batch_of_unknown_form_is_read_off_the_graph(tmp_path):
    class Odd(CausalLMModule):
        def training_step(self, batch, batch_idx):
            return super().training_step({"input_ids": batch[0], "labels": batch[0]}, batch_idx)

    class Rows(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.arange(3, 9) + index, "a text"

    monitor = LeakageMonitor(BagOfWords(), every_n_steps=1)
    module = Odd(tiny_gpt2(tied=False, dropout=0.0).train())
    fit([monitor], tmp_path, module=module, loader=DataLoader(Rows(), batch_size=4))
    assert monitor.latest["leakage/bag_of_words/f1"] == 1
    assert (monitor.looks, monitor.failures) == (2, 0)


def test_words_of_others_errors_are_not_repeated_anywhere(tmp_path, caplog):
    def adapter(batch):
        if seen:
            raise ValueError(f"odd text: {SECRET}")
        seen.append(1)
        return TokenBatch(batch["input_ids"], batch["labels"], None, "causal")

    class Quoting(Probe):
        def run(self, view, query=None):
            raise IndexError(SECRET)

    class Outside(Probe):
        def run(self, view, query=None):
            return WordGuess(torch.tensor([777_777]))

    SECRET, seen = "Mrs Fernsby's loan", []
    with warnings.catch_warnings(record=True) as caught, caplog.at_level("DEBUG"):
        warnings.simplefilter("always")
        attacks = [Quoting(), Outside(name="outside")]
        fit([LeakageMonitor(attacks, every_n_steps=1)], tmp_path)
        fit(
            [
                LeakageMonitor(
                    Probe(), every_n_steps=1, settings=MonitorSettings(batch_adapter=adapter)
                )
            ],
            tmp_path,
            module=FusedLossModule(tiny_gpt2().train()),
        )
    files = [p.read_text() for p in tmp_path.rglob("*") if p.is_file()]
    said = [str(w.message) for w in caught] + [caplog.text] + files
    assert any("ValueError at test_monitor.py" in text for text in said)
    assert any("ValueError at rates.py" in text for text in said)
    assert not [text for text in said if SECRET in text or "777777" in text]


# ---- what is refused, and when ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"attacks": []}, "at least one"),
        ({"attacks": [Probe(), Probe()]}, "several attacks are named probe"),
        ({"attacks": Probe(name="a/b")}, "cannot be part of a log name"),
        ({"attacks": Probe(), "every_n_steps": 5, "max_overhead": 0.1}, "not both"),
        (
            {"attacks": Probe(), "every_n_steps": 0},
            "every_n_steps must be an integer of at least 1",
        ),
        (
            {"attacks": Probe(), "max_overhead": 0.0},
            "max_overhead must be a number above 0 and of at most 1",
        ),
        ({"attacks": Probe(), "stages": ("shred",)}, "stages must be some of"),
        ({"attacks": Probe(), "client": "node"}, "client must be"),
        ({"attacks": Probe(), "local_steps": 2, "stages": ("local",)}, "local_steps"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        monitor_with(**arguments)


def test_a_class_in_place_of_an_attack_is_refused():
    with pytest.raises(TypeError, match="instances of Attack"):
        LeakageMonitor([FlatChat])
    with pytest.raises(TypeError, match="instances of Attack"):
        LeakageMonitor(FlatChat)


def test_an_unknown_batch_that_no_graph_shows_stops_the_first_step(tmp_path):
    class Odd(FusedLossModule):
        def training_step(self, batch, batch_idx):
            ids = batch["tokens"].long()
            return super().training_step({"input_ids": ids, "labels": ids}, batch_idx)

    loader = DataLoader([{"tokens": torch.arange(8.0)}] * 4, batch_size=1)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, callbacks=[LeakageMonitor(Probe())],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(BatchError, match=r"(?s)LeakageMonitor\(..., batch_adapter=batch_adapter\)"):
        trainer.fit(Odd(tiny_gpt2().train()), loader)
    assert trainer.global_step == 1


@dataclasses.dataclass
class Texts:
    tokens: torch.Tensor
    targets: torch.Tensor


class Typed(CausalLMModule):
    def training_step(self, batch: Texts, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch.tokens, labels=batch.targets).loss


def loader_of_texts() -> DataLoader:
    ids = torch.randint(5, 90, (4, 9), generator=torch.Generator().manual_seed(0))
    return DataLoader([Texts(ids, ids)], batch_size=None)


def test_a_batch_of_one_s_own_type_needs_no_adapter(tmp_path):
    monitor = LeakageMonitor(Probe())
    fit([monitor], tmp_path, module=Typed(tiny_gpt2().train()), loader=loader_of_texts())
    assert (monitor.looks, monitor.failures) == (1, 0)
    assert monitor.latest["leakage/probe/recall"] > 0


def test_an_adversary_that_sees_no_bias_is_refused_by_name(tmp_path):
    with pytest.raises(ThreatModelError, match=r"bias_sign.*output head's bias"):
        fit([LeakageMonitor(BiasSign())], tmp_path)


def test_an_attack_that_reads_no_gradient_is_refused_not_called_safe(tmp_path):
    class Activations(Probe):
        def needs(self, anatomy):
            return Surfaces(layers=("model.transformer.h.0",))

    with pytest.raises(ValueError, match=r"probe.*gradients"):
        fit([LeakageMonitor(Activations())], tmp_path)


def test_word_attacks_on_a_classifier_are_refused(tmp_path):
    module = CausalLMModule(tiny_roberta_classifier().train())
    with pytest.raises(ThreatModelError, match="probe"):
        fit([LeakageMonitor(Probe())], tmp_path, module=module)


def test_bag_of_words_on_a_tied_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="tied"):
        fit([LeakageMonitor(BagOfWords())], tmp_path)


def test_attacks_on_parameters_of_two_optimizers_are_refused(tmp_path):
    class Both(Probe):
        def needs(self, anatomy):
            needs = super().needs(anatomy)
            return type(needs)(gradients=(HEAD_WEIGHT, HEAD_BIAS))

    class Two(CausalLMModule):
        automatic_optimization = False

        def configure_optimizers(self):
            bias = self.model.cls.predictions.bias
            others = [p for p in self.parameters() if p is not bias]
            return [torch.optim.SGD([bias], lr=0.1), torch.optim.SGD(others, lr=0.1)]

    with pytest.raises(ValueError, match="different optimizers"):
        fit([LeakageMonitor(Both())], tmp_path, module=Two(tiny_bert_mlm().train()))


def test_two_monitors_that_would_log_under_one_name_are_refused(tmp_path):
    two = [LeakageMonitor([Probe(), Probe(name="b")]), LeakageMonitor([Probe(name="b")])]
    with pytest.raises(ValueError, match=r"another LeakageMonitor.*leakage/b"):
        fit(two, tmp_path)
    fit([two[0], LeakageMonitor([Probe(name="c")])], tmp_path)


def test_one_attack_at_two_stages_by_two_monitors(tmp_path):
    two = [LeakageMonitor(Probe(), stages=[stage]) for stage in ("local", "shared")]
    fit(two, tmp_path)
    assert [m.looks for m in two] == [1, 1]


def test_a_file_that_cannot_be_written_is_said_and_does_not_stop_training(tmp_path):
    (tmp_path / "file").write_text("")
    monitor = LeakageMonitor(Probe(), every_n_steps=1, log_dir=tmp_path / "file" / "in")
    with pytest.warns(UserWarning, match=r"leakage\.jsonl cannot be written"):
        trainer = fit([monitor], tmp_path)
    assert trainer.global_step == monitor.looks == 8


# ---- surfaces that are not shared ---------------------------------------------------------------


def test_a_frozen_head_is_logged_as_not_exposed_and_said_once(tmp_path):
    model = tiny_gpt2(tied=False).train()
    model.lm_head.weight.requires_grad_(False)
    probe = Probe()
    monitor = LeakageMonitor(probe, every_n_steps=1)
    with pytest.warns(UserWarning, match="not 'safe'.*other parameters") as caught:
        fit([monitor], tmp_path, module=CausalLMModule(model))
    (said,) = [str(w.message) for w in caught if "not 'safe'" in str(w.message)]
    parts = {n.split(".")[-2] for n, p in model.named_parameters() if p.requires_grad}
    assert all(f".{part}." in said for part in parts)
    assert "model.transformer.h.{0..1}.attn.c_attn.weight" in said
    assert monitor.latest["leakage/probe/exposed"] == 0
    assert monitor.latest["leakage/probe/f1"] == 0
    assert (probe.seen, probe.prepared, monitor.failures) == ([], 0, 0)
    assert lines(monitor)[0]["exposed"] is False


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        (["wte"], r"every gradient that does leave is read by 'bag_of_words'\."),
        (
            ["wte", "ln_f.bias"],
            r"gradient of one other parameter \(model.\S+.ln_f.bias\) do",
        ),
        (["wte", "ln_f"], r"gradients of 2 other parameters \(model.transformer.ln_f.*\) do leave"),
    ],
)
def test_what_leaves_beside_a_frozen_head(tmp_path, trained, expected):
    model = tiny_gpt2(tied=False).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    monitor = LeakageMonitor([Probe(), BagOfWords()], every_n_steps=1)
    with pytest.warns(UserWarning, match="not 'safe'") as caught:
        fit([monitor], tmp_path, module=CausalLMModule(model))
    [message] = [str(w.message) for w in caught if "not 'safe'" in str(w.message)]
    assert re.search(expected, message)
    assert " 0 other" not in message


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a.weight"], "a.weight"),
        (["h.3.w"], "h.3.w"),
        (["h.0.w", "h.0.b", "h.1.w", "h.2.w", "h.5.w"], "h.{0..2, 5}.w, h.0.b"),
        (["e.1.x.2.w", "e.0.x.2.w", "e.0.x.3.w"], "e.{0..1}.x.2.w, e.0.x.3.w"),
        ([], ""),
    ],
)
def test_every_name_is_listed_blocks_together(names, said):
    assert listed(names) == said


# ---- what is written ----------------------------------------------------------------------------


def test_values_reach_every_logger_at_the_steps_looked_at(tmp_path):
    board, table = TensorBoardLogger(tmp_path / "tb"), CSVLogger(tmp_path / "csv")
    monitor = LeakageMonitor(Probe(), every_n_steps=3)
    fit([monitor], tmp_path, logger=[board, table], log_every_n_steps=50)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(board.log_dir, size_guidance={"tensors": 0, "histograms": 0})
    events.Reload()
    tags = events.Tags()
    assert [e.step for e in events.Scalars("leakage/probe/f1")] == [0, 3, 6]
    assert {"utility/train_loss", "monitor/seconds", "monitor/failures"} <= set(tags["scalars"])
    assert "leakage/probe/score_of_used_types" in tags["histograms"]
    assert any("custom_scalars" in t for t in tags["tensors"])
    assert "leakage/probe/f1" in next((tmp_path / "csv").rglob("metrics.csv")).read_text()


def charts_and_tags(board):
    """Return the charts of a run's page, the scalars that it has logged, and its events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    events = EventAccumulator(board.log_dir)
    events.Reload()
    (event,) = events.Tensors(metadata.CONFIG_SUMMARY_TAG)
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    charts = [chart for category in layout.category for chart in category.chart]
    return charts, set(events.Tags()["scalars"]), events


def test_layout_names_only_tags_that_are_logged(tmp_path):
    board = TensorBoardLogger(tmp_path)
    monitor = LeakageMonitor(Probe(), every_n_steps=1, stages=("local", "shared"))
    gate = RiskGate("leakage/probe/f1", at_most=1.0, action="harden")
    strategy = DefendedStrategy("auto", [GradientNoise(clip=None, sigma=1e-9)])
    fit([monitor, gate], tmp_path, logger=board, strategy=strategy)

    charts, logged, events = charts_and_tags(board)
    lines = [tag for chart in charts for tag in chart.multiline.tag]
    matches = {tag: [name for name in logged if re.search(tag, name)] for tag in lines}
    assert [tag for tag, found in matches.items() if len(found) != 1] == ["^utility/val_loss$"]
    assert not any("gate/" in tag or "worst/" in tag for tag in lines), "these are smoothed"
    margins = {
        name
        for chart in charts
        for series in chart.margin.series
        for name in (series.value, series.lower, series.upper)
    }
    assert margins <= logged
    assert {"leakage/probe/f1", "leakage_local/probe/f1_low"} <= margins
    assert {"gate/probe/f1", "gate/probe/f1_notches"} <= margins
    frame = {"axis/0", "axis/1"}
    titles = [chart.title for chart in charts]
    assert len(set(titles)) == len(titles)
    for chart in charts:  # one line each, which the title names; rates between 0 and 1
        shown = [*chart.multiline.tag, *(s.value for s in chart.margin.series)]
        shown = [tag for tag in shown if tag not in frame]
        assert len(shown) == 1
        assert chart.title.startswith(shown[0].strip("^$").replace("\\", "").rpartition("/")[0])
        if chart.margin.series:
            assert {s.value for s in chart.margin.series} == {*shown, *frame}
    assert [e.value for e in events.Scalars("axis/1")] == [1.0] * monitor.looks


class WithSettings(CausalLMModule):
    def __init__(self, rate: float, **more) -> None:
        super().__init__(tiny_gpt2().train())
        self.save_hyperparameters()


def test_the_table_of_runs_has_leakage_beside_the_settings(tmp_path):
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    board = TensorBoardLogger(tmp_path)
    module = WithSettings(0.5, nested={"depth": 2}, names=["a"], nothing=None)
    trainer = fit([LeakageMonitor(Probe())], tmp_path, logger=board, module=module)
    events = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    [run] = events.Runs()

    def first(tag: str) -> HParamsPluginData:
        content = events.SummaryMetadata(run, f"_hparams_/{tag}").plugin_data.content
        return HParamsPluginData.FromString(content)

    experiment = first("experiment").experiment
    metrics = [info.name.tag for info in experiment.metric_infos]
    assert {"leakage/probe/f1", "leakage/worst/words", "utility/train_loss"} <= set(metrics)
    assert set(metrics) - {"utility/val_loss"} <= set(events.Runs()[run]["scalars"])
    found = first("session_start_info").session_start_info.hparams
    assert {info.name for info in experiment.hparam_infos} == set(found)
    assert found["rate"].number_value == 0.5
    assert found["nested/depth"].number_value == 2
    assert found["names"].string_value == "['a']"
    assert found["fedleak/defenses"].string_value == "none"
    assert found["fedleak/strategy"].string_value == type(trainer.strategy).__name__


def test_every_look_appends_a_line_for_each_attack_and_stage(tmp_path):
    monitor = LeakageMonitor(
        [Probe(), Probe(name="b")], every_n_steps=4, stages=("local", "shared")
    )
    fit([monitor], tmp_path)
    got = lines(monitor)
    assert [(x["step"], x["stage"], x["attack"]) for x in got] == [
        (step, stage, attack)
        for step in (0, 4)
        for stage in ("local", "shared")
        for attack in ("probe", "b")
    ]
    assert got[0]["schema"] == 3
    assert got[0]["config"] == {"k": 10}
    f1 = got[0]["metrics"]["f1"]
    assert f1["low"] < f1["value"] < f1["high"]
    assert got[0]["unknown"] is None


def test_recovered_words_appear_only_in_a_private_file(tmp_path):
    class Words:
        def decode(self, ids):
            return f"secret{ids[0]}"

    board = TensorBoardLogger(tmp_path)
    monitor = LeakageMonitor(Probe(), every_n_steps=2, reveal=True, tokenizer=Words())
    fit([monitor], tmp_path, logger=board)
    holding = [p for p in tmp_path.rglob("*") if p.is_file() and b"secret" in p.read_bytes()]
    (path,) = holding
    assert path.name == "revealed_words.rank0.txt"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().count("== step") == 4


def test_without_reveal_there_is_no_such_file(tmp_path):
    fit([LeakageMonitor(Probe())], tmp_path)
    assert not list(tmp_path.rglob("revealed*"))


def test_without_any_logger_the_values_are_still_there(tmp_path):
    monitor = LeakageMonitor(Probe(), every_n_steps=4)
    trainer = fit([monitor], tmp_path, logger=False)
    assert float(trainer.callback_metrics["leakage/probe/f1"]) == pytest.approx(
        monitor.latest["leakage/probe/f1"]
    )
    assert (tmp_path / "leakage.jsonl").exists()


def test_lightnings_own_callbacks_can_watch_what_is_logged(tmp_path):
    monitor = LeakageMonitor(Probe(k=40), every_n_steps=1)
    saver = ModelCheckpoint(tmp_path, monitor="leakage/probe/f1", mode="min", every_n_train_steps=1)
    stopper = EarlyStopping("leakage/probe/f1", mode="min", stopping_threshold=0.99)
    root = tmp_path / "run"
    trainer = fit([monitor, stopper, saver], root, max_epochs=3, enable_checkpointing=True)
    each = {line["step"]: line["metrics"]["f1"]["value"] for line in lines(monitor)}
    least = min(each, key=each.get)
    assert len(set(each.values())) > 1
    assert float(saver.best_model_score) == pytest.approx(each[least])
    assert f"step={least + 1}.ckpt" in saver.best_model_path
    assert trainer.current_epoch == 1


def test_names_in_advance_are_the_names_logged(tmp_path):
    monitor = LeakageMonitor(Probe(), every_n_steps=4, stages=("local", "shared"))
    names = set(monitor.metric_names())
    fit([monitor], tmp_path)
    logged = {n for n in monitor.latest if not n.startswith("utility/")}
    assert logged <= names
    absent = ("worst_client", "control", "control_of_a_part")  # of one client, without a control
    assert {n for n in names if not n.endswith(absent)} == logged


# ---- more than one fit, and how often -----------------------------------------------------------


def test_a_second_fit_of_the_same_callback_works_and_leaves_no_hooks(tmp_path):
    monitor = LeakageMonitor(Probe(), every_n_steps=1)
    module = CausalLMModule(tiny_gpt2().train())
    trainer = fit([monitor], tmp_path / "a", module=module)
    assert "step" not in vars(trainer.optimizers[0])
    trainer = fit([monitor], tmp_path / "b", module=module)
    assert monitor.looks >= 8
    assert not module.model.lm_head.weight._post_accumulate_grad_hooks


def test_every_n_steps():
    cadence = EveryNSteps(50)
    looked = []
    for step in range(120):
        if cadence.due(step):
            looked.append(step)
            cadence.next_step = cadence.after_look(step, 1.0, 1.0)
    assert looked == [0, 50, 100]


@pytest.mark.parametrize("share", [0.01, 0.1, 1.0])
def test_max_overhead_keeps_looks_within_their_share_of_the_time(share):
    cadence = MaxOverhead(share)
    spent = passed = 0.0
    generator = torch.Generator().manual_seed(0)
    for step in range(20_000):
        passed += 0.5
        if cadence.due(step):
            cost = 0.05 + 0.1 * torch.rand((), generator=generator).item()
            spent += cost
            cadence.next_step = cadence.after_look(step, cost, 0.5)
    assert 0 < spent <= share * passed * 1.02 + 0.15
    assert cadence.next_step > 1


def test_no_warning_of_ours_in_an_ordinary_run(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit([LeakageMonitor(Probe(), every_n_steps=1)], tmp_path)
    assert not [w for w in caught if "Leakage" in str(w.message)]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_what_reads_gradients_is_unknown_on_updates_of_an_adaptive_optimizer(tmp_path, optimizer):
    class Plain(Probe):
        reads_adaptive_updates = False

    monitor = LeakageMonitor(Plain(), local_steps=2, every_n_steps=2)
    module = CausalLMModule(tiny_gpt2().train(), optimizer=optimizer)
    fit([monitor], tmp_path, module=module)
    assert monitor.looks == 4
    assert monitor.failures == (4 if optimizer == "adamw" else 0)
    if optimizer == "adamw":
        why = lines(monitor)[0]["unknown"]
        assert why.startswith("the update of AdamW is no sum of gradients")


def _contradictory(what):
    def adapter(batch):
        ids, labels, mask = batch["input_ids"], batch["labels"], batch["attention_mask"]
        batches = {
            "a mask where 1 is padding": (ids, labels, 1 - mask),
            "a mask where 1 is padding, without labels": (ids, None, 1 - mask),
            "a mask of zeros": (ids, labels, torch.zeros_like(mask)),
            "a mask of zeros, without labels": (ids, None, torch.zeros_like(mask)),
            "ids outside the vocabulary": (ids + 4321, None, mask),
            "labels outside the vocabulary": (ids, labels.masked_fill(labels >= 0, 4321), mask),
        }
        return TokenBatch(*batches[what], "causal")

    return adapter


@pytest.mark.parametrize(
    "what",
    [
        "a mask where 1 is padding",
        "a mask where 1 is padding, without labels",
        "a mask of zeros",
        "a mask of zeros, without labels",
        "ids outside the vocabulary",
        "labels outside the vocabulary",
    ],
)
def test_a_batch_that_contradicts_itself_reads_unknown(tmp_path, what):
    monitor = LeakageMonitor(
        Probe(), every_n_steps=1, settings=MonitorSettings(batch_adapter=_contradictory(what))
    )
    loader = random_token_loader(8, padded=True)
    module = FusedLossModule(tiny_gpt2().train())
    with pytest.warns(UserWarning, match=r"the batch could not be read: BatchError: .*adapter"):
        trainer = fit([monitor], tmp_path, loader=loader, module=module)
    assert trainer.global_step == 2
    assert (monitor.looks, monitor.failures) == (2, 2)
    assert math.isnan(monitor.latest["leakage/probe/f1"])
    assert all("4321" not in line for line in monitor.engine.jsonl.path.read_text().splitlines())


def test_a_contradictory_batch_that_is_not_trained_on_harms_nothing(tmp_path):
    class Skipping(CausalLMModule):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) if batch_idx else None

    def adapter(batch):
        first = torch.equal(batch["input_ids"], next(iter(random_token_loader(8)))["input_ids"])
        mask = torch.zeros_like(batch["input_ids"]) if first else None
        return TokenBatch(batch["input_ids"], batch["labels"], mask, "causal")

    monitor = LeakageMonitor(
        Probe(), every_n_steps=1, settings=MonitorSettings(batch_adapter=adapter)
    )
    fit([monitor], tmp_path, module=Skipping(tiny_gpt2().train()), n=8)
    assert (monitor.looks, monitor.failures) == (1, 0)


def test_a_run_without_any_optimizer_is_refused(tmp_path):
    class Without(CausalLMModule):
        def configure_optimizers(self):
            return None

    with pytest.raises(ValueError, match=r"configure_optimizers returned None.*SGD"):
        fit([LeakageMonitor(Probe(), every_n_steps=1)], tmp_path, module=Without(tiny_gpt2()))


def test_hidden_states_cross_the_split_without_any_optimizer(tmp_path):
    class Without(CausalLMModule):
        def configure_optimizers(self):
            return None

    monitor = LeakageMonitor(EmbeddingDescent(layer=1, steps=2), every_n_steps=1)
    fit([monitor], tmp_path, module=Without(tiny_gpt2()), n=4)
    assert (monitor.looks, monitor.failures) == (1, 0)


def test_the_processor_time_of_looks_is_told(tmp_path, monkeypatch):
    clock, told = [0.0], []

    class Working(Probe):
        def run(self, view, query=None):
            clock[0] += 100.0
            return super().run(view, query)

    class Training(CausalLMModule):
        def training_step(self, batch, batch_idx):
            clock[0] += 7.0
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr("lightning_fedleak.engine.run.time.process_time", lambda: clock[0])
    monitor = LeakageMonitor(Working(), every_n_steps=2)
    monitor.subscribe(lambda _: told.append(monitor.processor_seconds))
    assert monitor.processor_seconds == 0
    fit([monitor], tmp_path, module=Training(tiny_gpt2().train()))
    assert len(told) > 1
    assert told == [100.0 * (look + 1) for look in range(len(told))]


def test_an_unknown_argument_is_refused_by_its_name():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'xyz'$"):
        LeakageMonitor(Probe(), xyz=5)


class Listing(Probe):
    """Returns ids alone, as somebody may who writes a first attack."""

    def run(self, view, query=None):
        return super().run(view, query).types.tolist()


def test_an_attack_of_ones_own_that_returns_no_guess_is_told_what_to_return(tmp_path):
    monitor = LeakageMonitor(Listing(), every_n_steps=8)
    said = (
        r"'probe' returned a list, and must return a WordGuess \(lightning_fedleak\.attacks\.base"
    )
    with pytest.warns(UserWarning, match=said):
        fit([monitor], tmp_path)
    assert math.isnan(monitor.latest["leakage/probe/f1"])
