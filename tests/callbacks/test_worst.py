"""The highest headline of a family, and gates on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from lightning_fedleak import FCMembership, LeakageMonitor, RiskGate, SubspaceWords
from lightning_fedleak.engine import GateActions
from lightning_fedleak.engine.results import Results
from lightning_fedleak.engine.run import Look, Outcome, Series, not_shared, pending, unknown
from lightning_fedleak.evaluation.metrics import Rate
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.report.records import Judgement
from tests.callbacks.runs import Probe

WORDS = "leakage/worst/words"
METRICS = ("precision", "recall", "f1")
A, B = (Series.at(Stage.SHARED, name) for name in "ab")
LOCAL = Series.at(Stage.LOCAL, "a")


def read(f1: float) -> Outcome:
    rate = Rate(f1, f1, f1)
    return Outcome(dict.fromkeys(METRICS, rate), 3)


def channel_of(family: str) -> Any:
    """Return what results ask of a channel."""
    return SimpleNamespace(
        family=family,
        headline="f1",
        metrics=METRICS,
        gives_control=lambda attack: False,
        tests_looks=False,
    )


def worst(
    outcomes: dict[Series, Outcome],
    shared: bool = True,
    untested: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, float]:
    channel = channel_of("words")
    results = Results({A: channel, B: channel, LOCAL: channel})
    results.untested = untested
    results.add(Look(0), outcomes, {}, shared=shared)
    found = {n: v for n, v in results.latest.items() if n.startswith(WORDS)}
    now = {n: v for n, v in results.look_values.items() if n.startswith(WORDS)}
    assert found.keys() == now.keys()
    return found


FAILED, NOT_MADE_FOR_IT = unknown(METRICS, "why"), unknown(METRICS, "why", applies=False)


@pytest.mark.parametrize(
    ("outcomes", "shared", "expected"),
    [
        ({A: read(0.3), B: read(0.8), LOCAL: read(0.9)}, True, {WORDS: 0.8}),
        ({A: read(0.3), B: not_shared(METRICS)}, True, {WORDS: 0.3}),
        ({A: read(0.3), B: NOT_MADE_FOR_IT}, True, {WORDS: 0.3}),
        ({A: read(0.3), B: FAILED}, True, {WORDS: math.nan, f"{WORDS}_at_least": 0.3}),
        ({A: FAILED, B: NOT_MADE_FOR_IT}, True, {WORDS: math.nan}),
        ({A: NOT_MADE_FOR_IT, B: NOT_MADE_FOR_IT}, True, {WORDS: math.nan}),
        ({A: read(0.3), B: pending("not yet")}, True, {f"{WORDS}_at_least": 0.3}),
        ({A: not_shared(METRICS), B: not_shared(METRICS)}, True, {WORDS: math.nan}),
        ({A: not_shared(METRICS)}, False, {WORDS: 0.0}),
        ({LOCAL: read(0.3)}, True, {}),
        ({}, True, {}),
    ],
)
def test_the_worst(
    outcomes: dict[Series, Outcome], shared: bool, expected: dict[str, float]
) -> None:
    assert worst(outcomes, shared) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ({A: read(0.3), B: read(0.7)}, {WORDS: math.nan, f"{WORDS}_at_least": 0.7}),
        ({A: read(0.3), B: read(1.0)}, {WORDS: 1.0}),
        ({A: read(0.3), B: replace(read(0.9), extra={"certified": 1.0})}, {WORDS: 0.9}),
        (
            {A: read(0.3), B: replace(read(0.9), extra={"certified": 0.5})},
            {WORDS: math.nan, f"{WORDS}_at_least": 0.9},
        ),
        ({A: FAILED}, {WORDS: math.nan}),
        ({}, {}),
    ],
)
def test_it_is_unknown_where_what_applies_is_not_played_for_want_of_text(
    outcomes: dict[Series, Outcome], expected: dict[str, float]
) -> None:
    untested = {"words": "'c' is not played: pass public_text="}
    assert worst(outcomes, untested=untested) == pytest.approx(expected, nan_ok=True)
    assert WORDS in worst(outcomes, untested={"texts": "why"}) or not outcomes


@pytest.mark.parametrize("bound", ["value", "lower"])
def test_a_gate_names_the_argument_that_is_missing(bound: str) -> None:
    why = "'c' is not played: pass public_text="
    low = {**values(0.1, 0.2, at_least=0.2), WORDS: math.nan}
    gate = RiskGate(WORDS, at_most=0.5, action=(events := []).append, bound=bound)  # type: ignore[arg-type]
    for _ in range(200):
        look(gate, low, why)
    assert events
    assert all(math.isnan(event.value) for event in events)
    assert "pass public_text=" in str(events[0])
    look(gate, {**values(0.1, 0.9, at_least=0.9), WORDS: math.nan}, why)
    assert len(events) == 201
    assert bound != "value" or events[-1].value == 0.9


def test_it_stays_where_only_another_family_has_news() -> None:
    words = SimpleNamespace(
        family="words",
        headline="f1",
        metrics=METRICS,
        gives_control=lambda name: False,
        tests_looks=False,
    )
    other = SimpleNamespace(
        family="membership",
        headline="f1",
        metrics=METRICS,
        gives_control=lambda name: False,
        tests_looks=False,
    )
    results = Results({A: words, B: other})
    results.add(Look(0), {A: read(0.4), B: pending("not yet")}, {})
    results.add(Look(3), {B: FAILED}, {})
    assert results.latest[WORDS] == 0.4
    assert math.isnan(results.latest["leakage/worst/membership"])


def engine_of(
    values: dict[str, float], names: tuple[str, ...] = ("a", "b"), why: str = ""
) -> SimpleNamespace:
    return SimpleNamespace(
        results=SimpleNamespace(latest=values, look_values=values, last_step=0, trials={}),
        unread=lambda name: None,
        untested=lambda name: why,
        judge_worst=lambda known, at_most: {n: Judgement(value) for n, value in known.items()},
        record_decision=lambda facts: None,
        run=SimpleNamespace(rank=0, broadcast=lambda value: value),
        headlines=tuple(f"leakage/{name}/f1" for name in names),
    )


def gate_on(values: dict[str, float], **settings: Any) -> tuple[RiskGate, list[Any]]:
    events: list[Any] = []
    gate = RiskGate(WORDS, at_most=0.5, action=events.append, **settings)
    look(gate, values)
    return gate, events


def look(gate: RiskGate, values: dict[str, float], why: str = "") -> None:
    engine: Any = engine_of(values, why=why)
    gate._watched = engine.headlines
    if gate._evidence is None:
        gate._evidence = gate._new_evidence()
    controls = GateActions(lambda values, step: None, lambda name: None, lambda: None)
    gate._decide(engine, controls)


def values(a: float, b: float, **more: float) -> dict[str, float]:
    known = {"leakage/a/f1": a, "leakage/b/f1": b, WORDS: max(a, b)}
    return known | {f"{WORDS}_{name}": value for name, value in more.items()}


def test_a_gate_says_whose_value_it_is() -> None:
    _, (event,) = gate_on(values(0.2, 0.8))
    assert (event.value, event.source) == (0.8, "leakage/b/f1")
    assert not gate_on(values(0.2, 0.4))[1]


@pytest.mark.parametrize("strict", [True, False])
def test_what_is_read_at_least_is_a_breach_whatever_else_is_unknown(strict: bool) -> None:
    unknown_but_high = {**values(0.8, math.nan, at_least=0.8), WORDS: math.nan}
    _, (event,) = gate_on(unknown_but_high, strict=strict)
    assert event.metric == f"{WORDS}_at_least"
    assert event.value == 0.8
    low = {**values(0.2, math.nan, at_least=0.2), WORDS: math.nan}
    _, events = gate_on(low, strict=strict)
    assert len(events) == strict
    assert all(math.isnan(event.value) for event in events)


def test_lower_splits_its_error_and_stops_on_one_attack() -> None:
    gate, _ = gate_on(values(0.2, 0.3), bound="lower")
    assert gate._evidence is not None
    assert {n: e.alpha for n, e in gate._evidence.items()} == {
        "leakage/a/f1": 0.025,
        "leakage/b/f1": 0.025,
    }
    gate, events = gate_on(values(0.0, 0.95), bound="lower")
    for _ in range(60):
        look(gate, values(0.0, 0.95))
    assert events
    assert gate.verdict is not None
    assert gate.verdict.evidence > gate.verdict.needed


def test_what_does_not_apply_is_no_evidence_and_what_failed_is_a_breach() -> None:
    gate, events = gate_on(values(0.2, 0.3), bound="lower", patience=1)
    look(gate, {**values(0.2, math.nan), WORDS: 0.2})
    assert gate._evidence is not None
    assert [e.verdict().looks for e in gate._evidence.values()] == [2, 1]
    look(gate, {**values(0.2, math.nan), WORDS: math.nan})
    assert [e.verdict().looks for e in gate._evidence.values()] == [3, 1]
    assert not events
    look(gate, {**values(0.2, math.nan), WORDS: math.nan})
    assert math.isnan(events[0].value)


def test_a_share_below_chance_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the highest auc of several attacks\. 0\.5 is chance"):
        RiskGate("leakage/worst/membership", at_most=0.4)
    with pytest.raises(ValueError, match=r"0\.5 is chance, so that at_most=0\.3 would be exceeded"):
        RiskGate("leakage/fc_membership/auc", at_most=0.3)
    RiskGate("leakage/fc_membership/auc_low", at_most=0.3)
    RiskGate("leakage/fc_membership/auc", at_most=-1)  # acts at every look: a drill
    RiskGate("leakage/subspace_texts/certified", at_most=0)
    with pytest.raises(ValueError, match="could never be exceeded"):
        RiskGate("leakage/subspace_texts/certified", at_most=1.5)
    with pytest.raises(ValueError, match="rates are shares"):
        RiskGate(WORDS, at_most=30)
    RiskGate("leakage/worst/membership", at_most=0.6, bound="lower")


def test_names_are_known_before_the_run() -> None:
    monitor = LeakageMonitor([Probe(), SubspaceWords(), FCMembership(layer=1)])
    assert {WORDS, "leakage/worst/membership"} <= set(monitor.metric_names())
    assert monitor.engine.headlines_of(WORDS) == ("leakage/probe/f1", "leakage/subspace_words/f1")
    assert monitor.engine.headlines_of("leakage/probe/f1") == ()
    assert monitor.engine.headlines_of("leakage/worst/texts") == ()


def test_evidence_of_the_worst_survives_a_checkpoint() -> None:
    gate, _ = gate_on(values(0.2, 0.3), bound="lower")
    state = gate.state_dict()
    again = RiskGate(WORDS, at_most=0.5, bound="lower")
    again._watched = gate._watched
    again._evidence = again._new_evidence()
    again.load_state_dict(state)
    assert again._evidence is not None
    assert [e.verdict().looks for e in again._evidence.values()] == [1, 1]
