"""A RiskGate: which values it judges, what it does, and which rates can be known."""

import logging
import math
import sys
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fedleak import BagOfWords
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.callbacks import Games, LeakageLimitExceeded, LeakageMonitor, RiskGate
from lightning_fedleak.engine.channels.base import Channel
from tests.callbacks.runs import Probe, fit, logged_losses, monitor_with
from tests.engine.test_worst import look as decide
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.models import tiny_gpt2
from tests.helpers.notices import announced
from tests.helpers.processes import free_port

F1 = "leakage/probe/f1"


class Scripted(Probe):
    """Fails or succeeds as told: number of right types per look, None for a crash."""

    def __init__(self, script):
        super().__init__()
        self.script = list(script)

    def run(self, view, query=None):
        k = self.script.pop(0)
        if k is None:
            raise RuntimeError("no result")
        self.k = k
        return super().run(view, query)


def run(tmp_path, script=None, gate_first=True, every_n_steps=1, n=32, **gate):
    attack = Probe(k=20) if script is None else Scripted(script)
    monitor = LeakageMonitor(attack, every_n_steps=every_n_steps)
    gate = RiskGate(F1, **({"at_most": 0.0} | gate))
    callbacks = [gate, monitor] if gate_first else [monitor, gate]
    trainer = fit(callbacks, tmp_path, n=n)
    return trainer, gate, monitor


@pytest.mark.parametrize("gate_first", [True, False])
def test_stop_ends_at_the_step_that_breached_wherever_the_gate_stands(tmp_path, gate_first):
    """And says what was measured, where the checkpoint is, and what to do."""
    with announced("stopped training at step 0") as caught:
        trainer, gate, monitor = run(tmp_path, gate_first=gate_first, at_most=0.05)
    assert trainer.global_step == 1
    assert monitor.looks == 1
    assert gate.fired.step == 0
    assert gate.fired.value == monitor.latest[F1] > 0
    assert len(logged_losses(trainer)) == 1
    (text,) = [text for text in caught if "RiskGate" in text]
    assert f"{F1} = {gate.fired.value:.3f} (95%" in text
    assert "at most 0.05" in text
    assert "DefendedStrategy" in text
    assert f"ckpt_path='{gate.fired.checkpoint}'" in text


@pytest.mark.parametrize("handlers", [[], [logging.StreamHandler(sys.stderr)]])
def test_a_gate_speaks_once_on_stderr_whatever_filters_of_warnings_are_set(
    tmp_path, monkeypatch, capsys, handlers
):
    for handler in handlers:
        handler.setStream(sys.stderr)
    monkeypatch.setattr(logging.getLogger(), "handlers", handlers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(tmp_path, at_most=0.05)
    assert capsys.readouterr().err.count("RiskGate 'probe/f1' stopped training at step 0") == 1


def test_warn_warns_once_and_goes_on_without_saving(tmp_path):
    with announced("warns at step 0") as caught:
        trainer, gate, _ = run(tmp_path, action="warn")
    assert sum("RiskGate" in text for text in caught) == 1
    assert trainer.global_step == 8
    assert gate.fired.checkpoint is None
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize(("patience", "acts_at"), [(0, 0), (1, 4), (2, 5)])
def test_patience_counts_breaches_and_unknown_values_in_a_row(patience, acts_at):
    events, acted = [], []
    gate = RiskGate(F1, at_most=0.1, patience=patience, action=events.append)
    for value in (0.7, 0.1, 0.0, 0.7, math.nan, 0.7):
        decide(gate, {F1: value})
        acted.append(bool(events))
    assert acted.index(True) == acts_at


def test_unknown_is_a_breach_for_a_strict_gate(tmp_path):
    with announced("is unknown") as messages:
        trainer, gate, _ = run(tmp_path, script=[1, None, 1], at_most=0.5)
    assert trainer.global_step == 2
    assert math.isnan(gate.fired.value)
    assert not any("use larger batches" in text for text in messages)
    assert gate.fired.why.startswith("leakage/probe: RuntimeError at test_gate.py")


def test_a_stop_that_could_not_stop_is_refused(tmp_path):
    callbacks = [RiskGate(F1, at_most=0.3), LeakageMonitor(Probe())]
    with pytest.raises(ValueError, match="min_epochs"):
        fit(callbacks, tmp_path, min_epochs=1)


def test_the_decision_is_logged_and_breaches_survive_a_checkpoint(tmp_path):
    saver = ModelCheckpoint(tmp_path, save_last=True)
    monitor = LeakageMonitor(Scripted([1, 1, 1, 1, 1, 1, 1, 20]), every_n_steps=1)
    gate = RiskGate(F1, at_most=0.1, patience=1)
    trainer = fit([gate, monitor, saver], tmp_path, enable_checkpointing=True)
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]
    assert state["RiskGate[probe/f1]"] == {"breaches": 1}
    log = next(tmp_path.rglob("metrics.csv")).read_text()
    assert "gate/probe/f1" in log
    assert trainer.global_step == 8

    monitor = LeakageMonitor(Probe(k=20), every_n_steps=1)
    gate = RiskGate(F1, at_most=0.1, patience=1)
    with announced("stopped training at step 8"):
        fit([gate, monitor], tmp_path / "b", max_epochs=2, ckpt_path=tmp_path / "last.ckpt")


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ValueError, match="patience must be"):
        RiskGate(F1, at_most=0.3, patience=-1)
    RiskGate("monitor/seconds", at_most=60)  # no rate, which has no range


def test_a_callable_that_raises_ends_the_run_and_leaves_nothing(tmp_path):
    def refuse(event):
        raise KeyError(event.step)

    monitor = LeakageMonitor(Probe(k=20), every_n_steps=1)
    gate = RiskGate(F1, at_most=0.0, action=refuse)
    for _ in range(2):
        with pytest.raises(KeyError, match="0"):
            fit([gate, monitor], tmp_path)
    assert not monitor.engine.listeners


@pytest.mark.parametrize("action", ["stop", "raise"])
def test_a_trial_run_writes_no_checkpoint(tmp_path, action):
    monitor, gate = LeakageMonitor(Probe(k=20)), RiskGate(F1, at_most=0.0, action=action)
    raises = pytest.raises(LeakageLimitExceeded) if action == "raise" else nullcontext()
    with raises:
        fit([gate, monitor], tmp_path, fast_dev_run=2)
    assert gate.fired.checkpoint is None
    assert "saved:" not in str(gate.fired)
    assert not list(tmp_path.rglob("*.ckpt"))


LOW, HIGH = 1, 20  # right types named: F1 near .05 and .7


AUC = "leakage/fc_membership/auc"


def look(gate, now, **later):
    """Let a gate decide on the values of a look, which are pooled in the logs."""
    gate.action = (events := []).append
    decide(gate, now, **later)
    return events


def test_the_value_in_the_logs_counts_with_its_interval():
    now = {AUC: 0.4, f"{AUC}_low": 0.8}
    (event,) = look(RiskGate(AUC, at_most=0.6), now, latest=now | {AUC: 0.9})
    assert (event.value, event.low) == (0.9, 0.8)


def test_a_value_that_is_still_to_come_is_no_breach():
    gate = RiskGate(AUC, at_most=0.6)
    assert not look(gate, {})
    assert look(gate, {AUC: math.nan}), "unknown: a breach"


@pytest.mark.parametrize(
    ("fpr", "settings", "gate", "words"),
    [
        ("0.001", {}, {"strict": False}, "needs 10000 non-members.* a window of 100:"),
        ("0.01", {}, {}, "unknown before measurement .* or strict=False"),
        ("0.01", {}, {"strict": False}, None),
        ("0.01", {"targets": 1000}, {}, None),
    ],
)
def test_a_rate_that_is_never_known_is_refused(tmp_path, fpr, settings, gate, words):
    monitor = LeakageMonitor(FCMembership(layer=1), every_n_steps=100, games=Games(**settings))
    gate = RiskGate(f"leakage/fc_membership/tpr_at_fpr_{fpr}", at_most=0.3, **gate)
    trainer = SimpleNamespace(callbacks=[gate, monitor], world_size=1, min_epochs=0, min_steps=0)
    refused = nullcontext() if words is None else pytest.raises(ValueError, match=words)
    with refused:
        gate.setup(trainer, None, "fit")


def test_a_new_fit_counts_breaches_anew(tmp_path):
    gate = RiskGate(F1, at_most=0.3, patience=3, action="stop")
    for root in "ab":
        fit([gate, LeakageMonitor(Scripted([HIGH] * 2), every_n_steps=4)], tmp_path / root)
        assert gate.fired is None


def test_every_rate_that_is_logged_has_a_range() -> None:
    ours = [c for c in Channel.registry.values() if c.__module__.startswith("lightning_fedleak.")]
    names = {metric for channel in ours for metric in channel.metrics}
    assert {"f1", "auc", "rouge_2", "texts_found"} <= names
    known = {start for channel in Channel.registry.values() for start in channel.ranges}
    assert {n for n in names if not any(n.startswith(start) for start in known)} == set()


@pytest.mark.parametrize("metric", ["accuracy", "advantage", "f1", "auc"])
def test_a_gate_on_the_attacks_own_threshold_is_warned_of(metric):
    monitor = LeakageMonitor(FCMembership(layer=1), every_n_steps=100)
    gate = RiskGate(f"leakage/fc_membership/{metric}", at_most=0.9)
    trainer = SimpleNamespace(callbacks=[gate, monitor], world_size=1, min_epochs=0, min_steps=0)
    warned = pytest.warns(UserWarning, match="watch 'leakage/fc_membership/auc'")
    with warned if metric != "auc" else nullcontext():
        gate.setup(trainer, None, "fit")


@pytest.mark.slow
def test_the_main_process_knows_what_a_fit_in_other_processes_found(tmp_path, monkeypatch):
    if torch.cuda.is_initialized():
        pytest.skip("Lightning does not fork a process that has used a GPU")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monitor = monitor_with([BagOfWords()], every_n_steps=1)
    gate = RiskGate("leakage/bag_of_words/f1", at_most=0.5)
    module = CausalLMModule(tiny_gpt2(tied=False))
    trainer = fit([monitor, gate], tmp_path, module=module, strategy="ddp_fork", devices=2)
    assert gate.fired is not None
    assert gate.fired.value == monitor.latest[gate.metric] == 1.0
    assert gate.fired.checkpoint is not None
    assert gate.fired.checkpoint.exists()
    assert gate.fired.step == monitor.last_step == 0
    assert monitor.looks == 1
    logged = {n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith("leakage/")}
    assert logged == pytest.approx({n: monitor.latest[n] for n in logged})
    rows = monitor.to_dataframe()
    assert rows[rows.metric == "f1"].value.tolist() == [1.0]
