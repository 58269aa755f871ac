"""The highest headline of a family, and gates on it."""

import math
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from lightning_fedleak import RiskGate
from lightning_fedleak.engine import GateActions
from lightning_fedleak.engine.outcomes import Outcome, Series, not_shared, pending, unknown
from lightning_fedleak.engine.results import Results
from lightning_fedleak.engine.run import Look
from lightning_fedleak.evaluation.metrics import Rate
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.report.records import Judgement
from lightning_fedleak.trainers import Threshold

WORDS = "leakage/worst/words"
METRICS = ("precision", "recall", "f1")
HEADLINES = ("leakage/a/f1", "leakage/b/f1")
A, B = (Series.at(Stage.SHARED, name) for name in "ab")
LOCAL = Series.at(Stage.LOCAL, "a")
FAILED, NOT_MADE_FOR_IT = unknown(METRICS, "why"), unknown(METRICS, "why", applies=False)
UNTESTED = {"words": "'c' is not run: pass public_text="}


def read(f1: float, **extra: float) -> Outcome:
    return replace(Outcome(dict.fromkeys(METRICS, Rate(f1, f1, f1)), 3), extra=extra)


def channel_of(family: str) -> Any:
    """Return what results need of a channel."""
    return SimpleNamespace(
        family=family, headline="f1", metrics=METRICS, controlled=False, tests_looks=False,
        attacks=[], metrics_of=lambda series: METRICS,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("outcomes", "shared", "untested", "expected"),
    [
        ({A: read(0.3), B: read(0.8), LOCAL: read(0.9)}, True, {}, (0.8, None)),
        ({A: read(0.3), B: not_shared(METRICS)}, True, {}, (0.3, None)),
        ({A: read(0.3), B: NOT_MADE_FOR_IT}, True, {}, (0.3, None)),
        ({A: read(0.3), B: FAILED}, True, {}, (math.nan, 0.3)),
        ({A: FAILED, B: NOT_MADE_FOR_IT}, True, {}, (math.nan, None)),
        ({A: read(0.3), B: pending("not yet")}, True, {}, (None, 0.3)),
        ({A: not_shared(METRICS), B: not_shared(METRICS)}, True, {}, (math.nan, None)),
        ({A: not_shared(METRICS)}, False, {}, (0.0, None)),
        ({LOCAL: read(0.3)}, True, {}, (None, None)),
        ({}, True, {}, (None, None)),
        # Unless another one recovers all, or is certain that nothing is missing.
        ({A: read(1.0), B: FAILED}, True, {}, (1.0, None)),
        ({A: read(0.9, certified=1.0), B: FAILED}, True, {}, (0.9, None)),
        # One that applies is not run for want of text: unknown, unless another is certain.
        ({A: read(0.3), B: read(0.7)}, True, UNTESTED, (math.nan, 0.7)),
        ({A: read(0.3), B: read(0.9, certified=1.0)}, True, UNTESTED, (0.9, None)),
        ({A: read(0.3), B: read(0.9, certified=0.5)}, True, UNTESTED, (math.nan, 0.9)),
        ({A: read(0.3)}, True, {"texts": "why"}, (0.3, None)),
    ],
)
def test_the_worst_is_the_highest_headline_or_unknown(outcomes, shared, untested, expected) -> None:
    channel = channel_of("words")
    results = Results({A: channel, B: channel, LOCAL: channel})
    results.untested = untested
    results.add(Look(0), outcomes, {}, shared=shared)
    names = (WORDS, f"{WORDS}_at_least")
    expected = {n: v for n, v in zip(names, expected, strict=True) if v is not None}
    for values in (results.latest, results.look_values):
        logged = {n: v for n, v in values.items() if n.startswith(WORDS)}
        assert logged == pytest.approx(expected, nan_ok=True)
    why = results.why_unknown(WORDS)
    failed = any(outcome.unknown for outcome in outcomes.values())
    assert bool(why) == (failed or "words" in untested)
    assert why == UNTESTED["words"] or "why" in why or not why


def test_it_stays_where_only_another_family_has_news() -> None:
    results = Results({A: channel_of("words"), B: channel_of("membership")})
    results.add(Look(0), {A: read(0.4), B: pending("not yet")}, {})
    results.add(Look(3), {B: FAILED}, {})
    assert results.latest[WORDS] == 0.4
    assert math.isnan(results.latest["leakage/worst/membership"])


# ---- gates --------------------------------------------------------------------------------------


def values(a: float, b: float, worst: float | None = None, **more: float) -> dict[str, float]:
    logged = {HEADLINES[0]: a, HEADLINES[1]: b, WORDS: max(a, b) if worst is None else worst}
    return logged | {f"{WORDS}_{name}": value for name, value in more.items()}


def look(gate, logged, why="", latest=None, channel=None, counts=MappingProxyType({})) -> None:
    """Let a gate decide on the values of a look, of which some count differently."""
    engine: Any = SimpleNamespace(
        results=SimpleNamespace(
            latest=logged if latest is None else latest,
            look_values=logged,
            last_step=0,
            why_unknown=lambda name: why,
            channel_of=lambda name: channel,
            judge=lambda name, value, at_most: Judgement(counts.get(name, value)),
            headlines_of=lambda name: HEADLINES if name == WORDS else (),
        ),
        current=SimpleNamespace(lineup=SimpleNamespace(plans=[])),
        series={},
        record_decision=lambda facts: None,
        run=SimpleNamespace(rank=0, broadcast=lambda value: value),
    )
    gate._engine = engine
    gate._host = GateActions(lambda values, step: None, lambda name: None, lambda: None)
    gate._decide()


def gate_on(*looks: dict[str, float], **settings: Any) -> tuple[RiskGate, list[Any]]:
    events: list[Any] = []
    gate = RiskGate(WORDS, at_most=0.5, action=events.append, **settings)
    for logged in looks:
        look(gate, logged)
    return gate, events


def test_a_gate_names_the_argument_that_is_missing() -> None:
    gate, events = gate_on()
    for _ in range(3):
        look(gate, values(0.1, 0.2, math.nan, at_least=0.2), UNTESTED["words"])
    assert events
    assert all(math.isnan(event.value) for event in events)
    assert "pass public_text=" in str(events[0])


def test_a_gate_says_once_which_limit_can_decide() -> None:
    channel = SimpleNamespace(headline="f1", uninformed=0.9764)
    low, high = (RiskGate(WORDS, m, strict=False, action="warn") for m in (0.5, 0.98))

    def looks() -> None:
        for gate in (low, high, low, high):
            look(gate, values(0.3, 0.4), channel=channel)

    with pytest.warns(UserWarning, match="cannot decide") as caught:
        looks()
    (text,) = [str(warning.message) for warning in caught]
    assert "naming everything, whatever the gradient, has 0.98" in text
    assert "at_most=0.5" in text
    assert text.endswith("The lowest limit that can: 0.98")


@pytest.mark.parametrize("strict", [True, False])
def test_what_is_recovered_at_least_is_a_breach_whatever_else_is_unknown(strict: bool) -> None:
    _, (event,) = gate_on(values(0.8, math.nan, math.nan, at_least=0.8), strict=strict)
    assert (event.metric, event.value) == (f"{WORDS}_at_least", 0.8)
    _, events = gate_on(values(0.2, math.nan, math.nan, at_least=0.2), strict=strict)
    assert len(events) == strict
    assert all(math.isnan(event.value) for event in events)


def test_a_breach_by_its_control_counts_though_another_attack_is_unknown() -> None:
    gate, events = gate_on(strict=False)
    logged = values(0.4, math.nan, math.nan, at_least=0.4)
    look(gate, logged)
    assert not events
    look(gate, logged, counts={HEADLINES[0]: 0.7})
    (event,) = events
    assert (event.metric, event.value, event.read) == (f"{WORDS}_at_least", 0.7, 0.4)
    assert event.source == HEADLINES[0]


def test_what_does_not_apply_is_no_breach_and_what_failed_is_one() -> None:
    looks = [values(0.2, 0.3), values(0.2, math.nan, 0.2), values(0.2, math.nan, math.nan)]
    gate, events = gate_on(*looks, patience=1)
    assert not events
    look(gate, looks[-1])
    assert math.isnan(events[0].value)


@pytest.mark.parametrize(
    ("metric", "at_most", "words"),
    [
        ("leakage/worst/membership", 0.4, r"0\.5 by chance"),
        ("leakage/fc_membership/auc", 0.3, r"0\.5 by chance and at most 1: at_most=0\.3"),
        ("leakage/subspace_texts/certified", 1.5, "at most 1: at_most=1.5"),
        ("leakage/fc_membership/auc_low", 0.3, None),
        ("leakage/fc_membership/auc", -1, None),  # acts at every look: a drill
        ("leakage/subspace_texts/certified", 0, None),
    ],
)
def test_a_threshold_that_always_or_never_acts_is_refused(metric, at_most, words) -> None:
    if words is None:
        RiskGate(metric, at_most=at_most)
    else:
        with pytest.raises(ValueError, match=words):
            RiskGate(metric, at_most=at_most)


def test_a_gate_judges_what_is_pooled_while_another_attack_waits() -> None:
    channel = channel_of("membership")
    results = Results({A: channel, B: channel})
    pooled = Outcome({name: Rate(0.7, 0.6, 0.8) for name in METRICS}, 8)
    pooled = replace(pooled, now=dict.fromkeys(METRICS, 0.4))
    results.add(Look(0), {A: pooled, B: pending("zero gradient")}, {})
    gate = Threshold("leakage/worst/membership", 0.6, strict=False)
    lineup = SimpleNamespace(plans=[])
    gate._engine = SimpleNamespace(  # type: ignore[assignment]
        results=results, series=results._channels, current=SimpleNamespace(lineup=lineup)
    )
    event = gate._read_look()
    assert event is not None
    assert event.value == 0.7
