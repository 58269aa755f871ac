import csv
import logging
import math
import sys
import warnings
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.callbacks import LeakageLimitExceeded, LeakageMonitor, RiskGate
from tests.callbacks.runs import Probe, fit, logged_losses
from tests.helpers.notices import announced

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
    with announced("stopped training at step 0"):
        trainer, gate, monitor = run(tmp_path, gate_first=gate_first)
    assert trainer.global_step == 1
    assert monitor.looks == 1
    assert gate.fired.step == 0
    assert gate.fired.value == monitor.latest[F1] > 0
    assert len(logged_losses(trainer)) == 1


def test_what_the_user_sees(tmp_path):
    with announced("stopped training") as caught:
        _, gate, _ = run(tmp_path, at_most=0.05)
    (text,) = [text for text in caught if "RiskGate" in text]
    assert f"{F1} = {gate.fired.value:.3f} (95%" in text
    assert "at most 0.05" in text
    assert str(gate.fired.checkpoint) in text
    assert "DefendedStrategy" in text
    assert f"ckpt_path='{gate.fired.checkpoint}'" in text


@pytest.mark.parametrize("shown", ["by Python", "by a handler", "nowhere", "disabled"])
def test_a_gate_speaks_once_on_stderr_whatever_filters_of_warnings_are_set(
    tmp_path, monkeypatch, capsys, shown
):
    """A handler of the user's own that writes elsewhere does not make the gate quiet."""
    log = tmp_path / "log.txt"
    handlers = {
        "by Python": [],
        "by a handler": [logging.StreamHandler(sys.stderr)],
        "nowhere": [logging.FileHandler(log)],
        "disabled": [logging.StreamHandler(sys.stderr)],
    }[shown]
    monkeypatch.setattr(logging.getLogger(), "handlers", handlers)
    logging.disable(logging.ERROR if shown == "disabled" else logging.NOTSET)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(tmp_path, at_most=0.05)
    finally:
        logging.disable(logging.NOTSET)
    assert capsys.readouterr().err.count("RiskGate 'probe/f1' stopped training at step 0") == 1
    if shown == "nowhere":
        assert "stopped training at step 0" in log.read_text()


def test_the_checkpoint_is_there_and_the_run_goes_on_from_it(tmp_path):
    with announced("stopped training"):
        _, gate, _ = run(tmp_path, every_n_steps=3)
    assert gate.fired.checkpoint.exists()
    monitor, gate2 = LeakageMonitor(Probe(k=20), every_n_steps=3), RiskGate(F1, at_most=1.0)
    trainer = fit([gate2, monitor], tmp_path, ckpt_path=gate.fired.checkpoint)
    assert trainer.global_step == 8
    assert monitor.looks == 4


def test_raise_saves_first_and_reaches_the_caller(tmp_path):
    with pytest.raises(LeakageLimitExceeded, match="at step 0"):
        run(tmp_path, action="raise")
    assert list(tmp_path.rglob("gate-probe-f1-step=0.ckpt"))


def test_warn_warns_once_and_goes_on_without_saving(tmp_path):
    with announced("warns at step 0") as caught:
        trainer, gate, _ = run(tmp_path, action="warn")
    assert sum("RiskGate" in text for text in caught) == 1
    assert trainer.global_step == 8
    assert gate.fired.checkpoint is None
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_callable_gets_every_event(tmp_path):
    events = []
    trainer, _, _ = run(tmp_path, action=events.append)
    assert [e.step for e in events] == list(range(8))
    assert trainer.global_step == 8


@pytest.mark.parametrize(("patience", "stops_after"), [(0, 1), (1, 5), (2, 6)])
def test_patience_counts_breaches_in_a_row(tmp_path, patience, stops_after):
    script = [20, 1, 1, 20, 20, 20, 20, 20]
    with announced("stopped training"):
        trainer, _, _ = run(tmp_path, script=script, at_most=0.1, patience=patience)
    assert trainer.global_step == stops_after


def test_unknown_is_a_breach_for_a_strict_gate(tmp_path):
    with announced("is unknown"):
        trainer, gate, _ = run(tmp_path, script=[1, None, 1], at_most=0.5)
    assert trainer.global_step == 2
    assert math.isnan(gate.fired.value)


def test_a_stop_at_an_unknown_value_does_not_say_that_too_much_leaked(tmp_path):
    with announced("stopped training") as caught:
        run(tmp_path, [None], at_most=0.05)
    (text,) = [text for text in caught if "RiskGate" in text]
    assert "is unknown" in text
    assert "leakage.jsonl holds the reason" in text
    assert "strict=False" in text
    assert "more than you allow" not in text


def test_unknown_uses_up_patience_together_with_breaches(tmp_path):
    with announced("stopped training at step 2"):
        trainer, *_ = run(tmp_path, script=[20, None, 20], at_most=0.1, patience=2)
    assert trainer.global_step == 3


def test_unknown_is_nothing_for_a_gate_that_is_not_strict(tmp_path):
    with pytest.warns(UserWarning, match="gave no result"):
        trainer, gate, _ = run(tmp_path, script=[1, *[None] * 7], at_most=0.5, strict=False)
    assert trainer.global_step == 8
    assert gate.fired is None


def test_a_value_at_the_threshold_is_allowed(tmp_path):
    _, gate, monitor = run(tmp_path, n=4, at_most=1.0)
    value = monitor.latest[F1]
    _, gate, _ = run(tmp_path, n=4, at_most=value)
    assert gate.fired is None


@pytest.mark.parametrize(
    "metric", ["leakage/probe/f2", "leakage/flatchat/f1", "train_loss", "leakage_local/probe/f1"]
)
def test_a_misspelt_metric_is_refused_before_the_first_step_with_the_names(tmp_path, metric):
    monitor = LeakageMonitor(Probe())
    with pytest.raises(ValueError, match=r"no LeakageMonitor(?s:.*)leakage/probe/") as caught:
        fit([RiskGate(metric, at_most=0.3), monitor], tmp_path)
    assert monitor.looks == 0
    if metric.startswith("leakage"):
        told = str(caught.value)
        assert "Did you mean 'leakage/probe/f1" in told
        assert "\n  leakage/probe/: exposed, " in told
        assert told.count("leakage/probe/") < 5  # variants of a rate are told once
        assert max(map(len, told.splitlines())) < 140


def test_a_gate_without_a_monitor_is_refused(tmp_path):
    with pytest.raises(ValueError, match="needs a LeakageMonitor"):
        fit([RiskGate(F1, at_most=0.3)], tmp_path)


def test_a_stop_that_could_not_stop_is_refused(tmp_path):
    callbacks = [RiskGate(F1, at_most=0.3), LeakageMonitor(Probe())]
    with pytest.raises(ValueError, match="min_epochs"):
        fit(callbacks, tmp_path, min_epochs=1)


def test_two_gates_on_one_metric_need_names(tmp_path):
    monitor = LeakageMonitor(Probe(), every_n_steps=1)
    gates = [RiskGate(F1, at_most=1.0), RiskGate(F1, at_most=0.99, name="hard")]
    fit([*gates, monitor], tmp_path)
    with pytest.raises((ValueError, RuntimeError), match=r"gates are named|state_key"):
        fit([RiskGate(F1, at_most=1.0), RiskGate(F1, at_most=0.99), monitor], tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"at_most": math.nan}, "at_most must be a finite"),
        ({"at_most": True}, "at_most must be a finite"),
        ({"at_most": "0.5"}, "at_most must be a finite number, got '0.5'"),
        ({"at_most": 0.3, "action": "halt"}, "action must be"),
        ({"at_most": 0.3, "patience": -1}, "patience must be"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        RiskGate(F1, **arguments)


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


def test_a_metric_that_two_monitors_log_is_refused(tmp_path):
    monitors = [LeakageMonitor(Probe()), LeakageMonitor(Probe(name="other"))]
    with pytest.raises(ValueError, match="2 LeakageMonitors"):
        fit([RiskGate("monitor/failures", at_most=0.0), *monitors], tmp_path)


def test_one_client_alone_is_its_own_worst(tmp_path):
    monitor = LeakageMonitor(Probe(k=20))
    gate = RiskGate(f"{F1}_worst_client", at_most=0.1)
    with announced("stopped training at step 0"):
        fit([gate, monitor], tmp_path)
    assert gate.fired.value == monitor.latest[F1]


def test_a_callable_that_raises_ends_the_run_and_leaves_nothing(tmp_path):
    def refuse(event):
        raise KeyError(event.step)

    monitor = LeakageMonitor(Probe(k=20), every_n_steps=1)
    gate = RiskGate(F1, at_most=0.0, action=refuse)
    for _ in range(2):
        with pytest.raises(KeyError, match="0"):
            fit([gate, monitor], tmp_path)
    assert not monitor.engine._after_look


# ---- its own metric only ------------------------------------------------------------------------


def beside_games(tmp_path, metric=F1, n=4, **gate):
    """A fit that ends before the games of another attack had a first result."""
    monitor = LeakageMonitor([Probe(k=20), FCMembership(layer=1)], every_n_steps=1)
    gate = RiskGate(metric, **gate)
    trainer = fit([gate, monitor], tmp_path, n=n)
    return trainer, gate, monitor


def test_another_attack_without_a_result_is_nothing_to_a_gate(tmp_path):
    _, gate, monitor = beside_games(tmp_path, at_most=1.0)
    assert math.isnan(monitor.latest["leakage/fc_membership/auc"])
    assert gate.fired is None
    assert 0 < monitor.latest[F1] <= 1
    rows = list(csv.DictReader(next(tmp_path.rglob("metrics.csv")).open()))
    assert sum(bool(row.get(F1)) for row in rows) == 1, "said once, not again at the end"
    _, gate, _ = beside_games(tmp_path / "b", at_most=0.99, bound="lower")
    assert (gate.fired, gate.verdict.looks) == (None, 1)


def test_a_gate_that_has_stopped_the_run_says_nothing_more(tmp_path):
    with announced("stopped training") as caught:
        _, gate, _ = beside_games(tmp_path, n=32, at_most=0.0)
    assert sum("RiskGate" in text for text in caught) == 1
    assert [p.name for p in tmp_path.rglob("*.ckpt")] == ["gate-probe-f1-step=0.ckpt"]
    assert gate.fired.step == 0


@pytest.mark.parametrize("action", ["stop", "raise"])
def test_a_trial_run_writes_no_checkpoint(tmp_path, action):
    monitor, gate = LeakageMonitor(Probe(k=20)), RiskGate(F1, at_most=0.0, action=action)
    raises = pytest.raises(LeakageLimitExceeded) if action == "raise" else nullcontext()
    with raises:
        fit([gate, monitor], tmp_path, fast_dev_run=2)
    assert gate.fired.checkpoint is None
    assert "saved:" not in str(gate.fired)
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize("metric", ["f1", "f1_worst_client", "f1_low", "tpr_at_fpr_0.01", "auc"])
def test_a_rate_in_percent_is_refused(metric):
    with pytest.raises(ValueError, match=r"between 0 and 1.*at_most=60.*not percent"):
        RiskGate(f"leakage/probe/{metric}", at_most=60)
    RiskGate(f"leakage/probe/{metric}", at_most=1.0)


def test_a_number_that_is_no_rate_has_no_range():
    RiskGate("monitor/seconds", at_most=60)
