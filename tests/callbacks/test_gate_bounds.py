"""RiskGate's bounds in real fits; what they promise is in tests/metrics/test_sequential.py."""

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.callbacks import Games, LeakageMonitor, RiskGate
from lightning_fedleak.engine import GateActions
from lightning_fedleak.engine.channels.base import Channel
from lightning_fedleak.engine.gates import known_ranges
from lightning_fedleak.report.records import Judgement
from tests.callbacks.runs import Probe, fit
from tests.callbacks.test_gate import F1, Scripted
from tests.helpers.notices import announced

LOW, HIGH = 1, 20  # right types named: F1 near .05 and .7


def run(tmp_path, script, n=None, ckpt_path=None, **gate):
    monitor = LeakageMonitor(Scripted(script), every_n_steps=1)
    gate = RiskGate(F1, **gate)
    trainer = fit([gate, monitor], tmp_path, n=4 * len(script), ckpt_path=ckpt_path)
    return trainer, gate, monitor


def test_lower_waits_for_evidence_where_value_stops_at_once(tmp_path):
    script = [LOW, HIGH, LOW, LOW, HIGH, LOW, LOW, LOW]
    with announced("stopped training at step 1"):
        run(tmp_path, script, at_most=0.5)
    trainer, gate, _ = run(tmp_path, script, at_most=0.5, bound="lower")
    assert trainer.global_step == 8
    assert gate.fired is None
    assert 0 < gate.verdict.evidence < gate.verdict.needed == 20
    assert gate.verdict.looks == 8


def test_lower_stops_at_one_look_whose_types_show_it(tmp_path):
    with announced("stopped training at step 0"):
        _, gate, _ = run(tmp_path, [HIGH] * 3, at_most=0.3, bound="lower")
    assert gate.fired.verdict.looks == 1


def test_lower_stops_on_evidence_and_says_what_it_means(tmp_path):
    with announced("stopped training") as caught:
        trainer, gate, _ = run(tmp_path, [HIGH] * 24, at_most=0.6, bound="lower")
    assert 2 < trainer.global_step < 24
    assert gate.fired.verdict.evidence >= 20
    assert gate.fired.verdict.looks == trainer.global_step
    assert math.isnan(gate.fired.low)
    (text,) = [text for text in caught if "RiskGate" in text]
    for words in ("at this look", "of 20 needed", "bound='lower'", "alpha=0.05", "mean 0.7"):
        assert words in text
    assert "with probability at most 0.05, however long the run" in text
    assert gate.fired.checkpoint.exists()


def test_unknown_uses_up_the_patience_of_lower_and_is_no_evidence(tmp_path):
    script = [LOW, None, LOW, None, None, LOW, LOW, LOW]
    with announced("stopped training at step 4") as caught:
        trainer, gate, _ = run(tmp_path, script, at_most=0.3, bound="lower", patience=1)
    assert trainer.global_step == 5
    assert gate.verdict.looks == 2
    text = next(text for text in caught if "RiskGate" in text)
    assert "is unknown" in text
    assert "evidence" not in text
    trainer, gate, _ = run(tmp_path / "b", script, at_most=0.3, bound="lower", strict=False)
    assert trainer.global_step == 8
    assert gate.fired is None


def test_evidence_survives_a_checkpoint_and_starts_anew_for_another_threshold(tmp_path):
    script = [HIGH] * 3
    trainer, gate, _ = run(tmp_path, script, at_most=0.65, bound="lower")
    assert gate.fired is None
    path = tmp_path / "middle.ckpt"
    trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=True)["callbacks"]["RiskGate[probe/f1]"]
    json.dumps(state)
    before = gate.verdict.evidence

    def resume(folder, **changed):
        monitor = LeakageMonitor(Scripted([HIGH] * 24), every_n_steps=1)
        gate = RiskGate(F1, **({"at_most": 0.65, "bound": "lower"} | changed))
        trainer = fit([gate, monitor], tmp_path / folder, n=12, max_epochs=8, ckpt_path=path)
        return trainer, gate

    with announced("stopped training"):
        resumed, gate = resume("b")
    assert gate.fired.verdict.looks == resumed.global_step < 24
    assert before < 20
    with (
        announced("begins again without evidence"),
        announced("stopped training"),
    ):
        resumed, gate = resume("c", at_most=0.6)
    assert gate.fired.verdict.looks == resumed.global_step - 3


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("leakage/probe/f1_low", "known range"),
        ("monitor/seconds", "known range"),
        ("leakage/probe/exposed", "known range"),
    ],
)
def test_a_metric_without_a_range_is_refused_before_the_first_step(tmp_path, metric, words):
    monitor = LeakageMonitor(Probe())
    with pytest.raises(ValueError, match=words):
        fit([RiskGate(metric, at_most=0.3, bound="lower"), monitor], tmp_path)
    assert monitor.looks == 0


@pytest.mark.parametrize("at_most", [0.0, 1.0, 60])
def test_a_threshold_that_nothing_can_be_shown_about_is_refused(tmp_path, at_most):
    with pytest.raises(ValueError, match=r"watches 'leakage/probe/f1'.*strictly between 0 and 1"):
        fit([RiskGate(F1, at_most=at_most, bound="lower"), LeakageMonitor(Probe())], tmp_path)


def test_lower_refuses_the_worst_of_several_clients():
    gate = RiskGate(f"{F1}_worst_client", at_most=0.3, bound="lower")
    monitor = LeakageMonitor(Probe())
    trainer = SimpleNamespace(
        callbacks=[monitor, gate], world_size=2, min_epochs=None, min_steps=None
    )
    with pytest.raises(ValueError, match="Watch the pooled value"):
        gate.setup(trainer, None, "fit")


AUC = "leakage/fc_membership/auc"


def judge(name, value, at_most):
    return Judgement(value)


def look(gate, **monitor):
    """One look of a monitor that pools over looks, as the gate sees it."""
    results = {"latest": {}, "look_values": {}, "last_step": 0} | monitor
    engine = SimpleNamespace(
        results=SimpleNamespace(**({"trials": {}, "untested": {}} | results), judge=judge),
        unread=lambda name: None,
        record_decision=lambda facts: None,
        run=SimpleNamespace(rank=0, broadcast=lambda value: value),
    )
    controls = GateActions(lambda values, step: None, lambda name: None, lambda: None)
    gate._engine, gate._evidence = engine, gate._evidence or gate._new_evidence()
    events = []
    gate.action = events.append
    gate._decide(engine, controls)
    return events


def test_a_bound_reads_single_looks_where_the_logs_pool_them():
    values = {"latest": {AUC: 0.9, f"{AUC}_low": 0.8}, "look_values": {AUC: 0.4, f"{AUC}_low": 0.8}}
    gate = RiskGate(AUC, at_most=0.6, bound="lower")
    assert not look(gate, **values)
    assert gate.verdict.mean == 0.4
    (event,) = look(RiskGate(AUC, at_most=0.6), **values)
    assert (event.value, event.low) == (0.9, 0.8)


@pytest.mark.parametrize("bound", ["value", "lower"])
def test_a_value_that_is_still_to_come_is_neither_breach_nor_evidence(bound):
    gate = RiskGate(AUC, at_most=0.6, bound=bound)
    assert not look(gate, pending=frozenset([AUC]))
    assert gate.verdict is None
    unknown = {"latest": {AUC: math.nan}, "look_values": {AUC: math.nan}}
    assert look(gate, **unknown), "unknown: a breach"


@pytest.mark.parametrize(
    ("fpr", "settings", "gate", "words"),
    [
        ("0.01", {}, {"bound": "lower"}, "known only from 1000 .* of 1 look, and never known"),
        ("0.001", {}, {"strict": False}, "known only from 10000 .* of 100 looks, and never known"),
        ("0.01", {}, {}, "unknown at the first .* looks, which a strict gate treats as breaches"),
        ("0.01", {}, {"strict": False}, None),
        ("0.01", {"targets": 1000}, {"bound": "lower"}, None),
    ],
)
def test_a_rate_that_is_never_known_is_refused(tmp_path, fpr, settings, gate, words):
    monitor = LeakageMonitor(FCMembership(layer=1), every_n_steps=100, games=Games(**settings))
    gate = RiskGate(f"leakage/fc_membership/tpr_at_fpr_{fpr}", at_most=0.3, **gate)
    trainer = SimpleNamespace(callbacks=[gate, monitor], world_size=1, min_epochs=0, min_steps=0)
    refused = nullcontext() if words is None else pytest.raises(ValueError, match=words)
    with refused:
        gate.setup(trainer, None, "fit")


@pytest.mark.parametrize("metric", ["advantage", "auc"])
@pytest.mark.parametrize("bound", ["value", "lower"])
def test_rates_of_games_are_known_from_the_first_look_on(tmp_path, metric, bound):
    monitor = LeakageMonitor(FCMembership(layer=1), every_n_steps=3)
    name = f"leakage/fc_membership/{metric}"
    gate = RiskGate(name, at_most=0.9, bound=bound, action=lambda event: None)
    fit([gate, monitor], tmp_path)
    assert monitor.failures == 0
    assert monitor.engine.results.look_values[gate.metric] == 1
    if bound == "value":
        assert (gate.fired.step, gate.fired.value) == (1, 1)
    else:
        assert (gate.fired, gate.verdict.looks) == (None, 3)


def test_a_new_fit_counts_breaches_anew(tmp_path):
    gate = RiskGate(F1, at_most=0.3, patience=3, action="stop")
    for root in "ab":
        fit([gate, LeakageMonitor(Scripted([HIGH] * 2), every_n_steps=4)], tmp_path / root)
        assert gate.fired is None


def test_every_rate_that_is_logged_has_a_range() -> None:
    ours = [c for c in Channel.registry.values() if c.__module__.startswith("lightning_fedleak.")]
    names = {metric for channel in ours for metric in channel.metrics}
    assert {"f1", "auc", "rouge_2", "texts_found"} <= names
    assert {n for n in names if not any(n.startswith(known) for known in known_ranges())} == set()


@pytest.mark.parametrize("metric", ["accuracy", "advantage", "f1", "auc"])
def test_a_gate_on_the_attacks_own_threshold_is_warned_of(metric):
    monitor = LeakageMonitor(FCMembership(layer=1), every_n_steps=100)
    gate = RiskGate(f"leakage/fc_membership/{metric}", at_most=0.9)
    trainer = SimpleNamespace(callbacks=[gate, monitor], world_size=1, min_epochs=0, min_steps=0)
    warned = pytest.warns(UserWarning, match="watch 'leakage/fc_membership/auc'")
    with warned if metric != "auc" else nullcontext():
        gate.setup(trainer, None, "fit")
