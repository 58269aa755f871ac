"""Which values a RiskGate judges, and which rates can be known."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.callbacks import Games, LeakageMonitor, RiskGate
from lightning_fedleak.engine.channels.base import Channel
from tests.callbacks.runs import fit
from tests.callbacks.test_gate import F1, Scripted
from tests.engine.test_worst import look as decide

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
        ("0.01", {}, {}, "unknown before look .* or strict=False"),
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
