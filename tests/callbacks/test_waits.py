"""Attacks that can read nothing yet: tried again in the next steps, by themselves and cheaply."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_fedleak.attacks import GradientMembership, SubspaceMembership, SubspaceWords
from lightning_fedleak.attacks.base import Query, WordGuess
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.callbacks import LeakageMonitor, MonitorSettings, RiskGate
from lightning_fedleak.engine.channels import WordsChannel
from lightning_fedleak.engine.options import Options
from lightning_fedleak.engine.outcomes import Outcome, Series, pending
from lightning_fedleak.engine.results import Results
from lightning_fedleak.engine.run import Look
from lightning_fedleak.engine.scheduler import MaxOverhead
from lightning_fedleak.evaluation.metrics import Rate
from lightning_fedleak.federation import RoundObserver, RoundSettings, trained_state
from lightning_fedleak.model.snapshots import Observation, Stage
from tests.attacks.row_space.models import VOCABULARY, llama
from tests.callbacks.runs import Probe, assert_same, fit
from tests.federation.rounds import SGD, batches, lora, train
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader

F1 = "leakage/subspace_words/f1"
WORST = "leakage/worst/words"
LORA = partial(LoraConfig, r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
ADALORA = partial(AdaLoraConfig, init_r=8, target_r=4, total_step=40, tinit=30, tfinal=5)


class WarmUp(CausalLMModule):
    """The rate of its first steps is 0, as every recipe has it in the first one at least."""

    zero_steps = 1

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = LambdaLR(optimizer, lambda step: max(0, step - self.zero_steps + 1) / 4)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def module(
    config: Any = None, zero_steps: int = 1, optimizer: str = "adamw", *, second: bool = False
) -> WarmUp:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model: nn.Module = get_peft_model(llama(), LORA() if config is None else config)
        if second:
            model.add_adapter("other", LORA(r=4))  # type: ignore[operator]
        made = WarmUp(model.train(), optimizer=optimizer)
        made.zero_steps = zero_steps
        return made


class Counting(SubspaceWords):
    """Counts what is asked of it."""

    needs_control = False

    def __init__(self) -> None:
        super().__init__(capacity_seconds=0)
        self.runs: list[int] = []
        self.refreshed: list[int] = []

    def refresh(self, anatomy, step):
        self.refreshed.append(step)
        super().refresh(anatomy, step)

    def run(self, view, query=None):
        self.runs.append(view.gradients[-1].step)
        return super().run(view, query)


def words(**settings: Any) -> LeakageMonitor:
    settings = {"every_n_steps": 50} | settings
    return LeakageMonitor([Counting()], **settings)


def run(root: Path, callbacks: list[L.Callback], made: L.LightningModule, **more: Any) -> L.Trainer:
    settings: dict[str, Any] = {"max_steps": 10}
    settings |= more
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = random_token_loader(n=48, batch_size=2, length=10, vocab=VOCABULARY)
        return fit(callbacks, root, module=made, loader=loader, **settings)


def lines(monitor: LeakageMonitor) -> list[dict[str, Any]]:
    assert monitor.engine.jsonl is not None
    return [json.loads(line) for line in monitor.engine.jsonl.path.read_text().splitlines()]


SETUPS: dict[str, tuple[Callable[[], WarmUp], dict[str, Any], dict[str, Any], int]] = {
    "lora": (module, {}, {}, 2),
    "a budget": (module, {"max_overhead": 0.005, "every_n_steps": None}, {}, 2),
    "rate 0 in five steps": (partial(module, zero_steps=5), {}, {}, 6),
    "accumulation": (module, {}, {"accumulate_grad_batches": 2}, 2),
    "rslora": (lambda: module(LORA(use_rslora=True)), {}, {}, 2),
    "two adapters": (partial(module, second=True), {}, {}, 2),
    "rounds": (
        partial(module, optimizer="sgd"),
        {"local_steps": 1, "every_n_steps": 50},
        {},
        2,
    ),
}


@pytest.mark.parametrize("setup", SETUPS)
def test_words_are_read_and_gated_as_soon_as_b_has_moved(setup: str, tmp_path: Path) -> None:
    made, settings, more, readable = SETUPS[setup]
    monitor, gate = words(**settings), RiskGate(WORST, at_most=0.5)
    trainer = run(tmp_path, [monitor, gate], made(), **more)
    assert gate.fired is not None
    assert (gate.fired.step, trainer.global_step) == (readable, readable + 1)
    assert gate.fired.value > 0.8
    assert monitor.failures == 0
    assert monitor.looks == 2, "steps in which nothing can be read yet are no looks"


def test_adalora_is_tried_until_it_has_a_result(tmp_path: Path) -> None:
    """Its regulariser is not in this loss: A has a gradient once the singular values have moved."""
    monitor = words()
    config = ADALORA(target_modules=["q_proj", "v_proj"])
    trainer = run(tmp_path, [monitor], module(config), max_steps=5)
    assert trainer.global_step == 5
    assert not math.isnan(monitor.latest[F1])
    assert monitor.last_step <= 2


def test_a_try_is_a_glance_until_something_can_be_read(tmp_path: Path) -> None:
    monitor = words()
    [attack] = monitor.attacks
    run(tmp_path, [monitor], module(zero_steps=8), max_steps=14)
    assert attack.runs == [0, 9], "in steps 1 to 8 its gradients are zero, which is all it takes"
    assert attack.refreshed == [0, 9]
    assert (monitor.looks, monitor.last_step) == (2, 9)
    assert monitor.latest[F1] > 0.9


def test_training_is_bit_identical_while_attacks_wait(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", [], module(zero_steps=3))
    watched = run(tmp_path / "watched", [words()], module(zero_steps=3))
    assert_same(plain, watched)


def test_tries_are_paid_for_by_later_looks() -> None:
    cadence = MaxOverhead(0.01)
    cadence.next_step = 40
    assert cadence.after_try(0.5, 1.0) == 90
    every = words().engine.options.cadence
    every.next_step = 50
    assert every.after_try(0.5, 1.0) == 50


def test_membership_is_looked_at_while_words_wait(tmp_path: Path) -> None:
    """B has a gradient while it is zero: what reads it does not wait for A's."""
    text = PublicText(torch.randint(3, VOCABULARY, (40, 10)).unbind())
    monitor = LeakageMonitor(
        [
            Counting(),
            GradientMembership(text, public_rows=8, controls=4),
            SubspaceMembership(text, public_rows=8),
        ],
        every_n_steps=50,
    )
    auc = "leakage/gradient_membership/auc"
    seen: list[tuple[int, set[str]]] = []
    publish = monitor.engine._publish

    def published(look: Look, outcomes: Any) -> None:
        publish(look, outcomes)
        known = (s for s, o in outcomes.items() if o.pending is None)
        seen.append((look.step, {series.attack for series in known}))

    monitor.engine._publish = published  # type: ignore[method-assign]
    gate = RiskGate(auc, at_most=0.9, action=lambda event: None)
    run(tmp_path, [monitor, gate], module(zero_steps=3), max_steps=7)
    assert seen == [
        (0, set()),
        (1, {"gradient_membership"}),
        (4, {"subspace_words", "subspace_membership"}),
    ]
    assert gate.fired is not None
    assert gate.fired.step == 1
    assert monitor.failures == 0


class Loud(Probe):
    """Names every word of the vocabulary, of what it reads in every step."""

    def run(self, view: Observation, query: Query | None = None) -> WordGuess:
        gradient = view.gradient(self.role)
        return WordGuess(torch.arange(VOCABULARY), gradient.new_ones(VOCABULARY))


def test_what_one_attack_reads_is_gated_while_another_waits(tmp_path: Path) -> None:
    made = module(zero_steps=4)
    role = next(n for n, _ in made.named_parameters() if "lora_B" in n)
    monitor = LeakageMonitor([Counting(), Loud(role=role)])
    gate = RiskGate(WORST, at_most=0.05)
    run(tmp_path, [monitor, gate], made)
    assert gate.fired is not None
    assert gate.fired.step == 0
    assert gate.fired.metric == f"{WORST}_at_least"


@pytest.mark.parametrize("strict", [True, False])
def test_a_run_that_ends_before_is_unknown(strict: bool, tmp_path: Path) -> None:
    monitor, gate = words(), RiskGate(WORST, at_most=0.5, strict=strict)
    run(tmp_path, [monitor, gate], module(zero_steps=99), max_steps=6)
    assert math.isnan(monitor.latest[F1])
    assert monitor.failures == 1
    assert (gate.fired is not None) == strict


@pytest.mark.parametrize("strict", [True, False])
def test_beyond_the_largest_wait_it_is_unknown(strict: bool, tmp_path: Path) -> None:
    monitor, gate = words(), RiskGate(WORST, at_most=0.5, strict=strict)
    monitor.engine.results._most_waited = 4
    trainer = run(tmp_path, [monitor, gate], module(zero_steps=99), max_steps=9)
    assert trainer.global_step == (6 if strict else 9)
    assert (gate.fired is not None) == strict
    if not strict:
        assert monitor.looks == 2, "it is not tried for ever"
    assert math.isnan(monitor.latest[F1])


def test_a_run_that_resumes_goes_on_waiting(tmp_path: Path) -> None:
    first = words()
    trainer = run(tmp_path / "a", [first], module(zero_steps=5), max_steps=3)
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    again, gate = words(), RiskGate(WORST, at_most=0.5)
    run(
        tmp_path / "b",
        [again, gate],
        module(zero_steps=5),
        max_steps=12,
        max_epochs=3,
        ckpt_path=str(tmp_path / "c.ckpt"),
    )
    assert gate.fired is not None
    assert (gate.fired.step, gate.fired.value) == (6, pytest.approx(1, abs=0.1))


# ---- calibrations that wait for their turn --------------------------------------------------


def test_a_slow_attack_is_calibrated_behind_the_first_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Words are read first; training does not notice when the rest is calibrated."""
    known: dict[str, int] = {}

    class First(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            for name in monitor.latest:
                known.setdefault(name, trainer.global_step - 1)

    prepared: list[bool] = []
    prepare = GradientMembership.prepare

    def counted(self: GradientMembership, anatomy: Any) -> None:
        prepared.append(any(n.endswith("/f1") for n in monitor.latest))
        prepare(self, anatomy)

    monkeypatch.setattr(GradientMembership, "prepare", counted)
    plain = run(tmp_path / "plain", [], module())
    monitor = LeakageMonitor(settings=MonitorSettings(cache=False))
    gate = RiskGate("leakage/gradient_membership/auc", at_most=0.9, action=lambda event: None)
    with caplog.at_level("INFO"):
        watched = run(tmp_path / "watched", [monitor, gate, First()], module())
    assert_same(plain, watched)
    assert prepared == [True]
    assert known[F1] == 2
    assert known["leakage/gradient_membership/auc"] == 3
    assert "'gradient_membership' is calibrated now" in caplog.text
    assert "gradient_membership  played, about" in caplog.text
    assert gate.fired is not None
    assert gate.fired.step == 3


def test_a_turn_does_not_wait_for_ever(tmp_path: Path) -> None:
    monitor = LeakageMonitor(settings=MonitorSettings(cache=False))
    run(tmp_path, [monitor], module(zero_steps=99), max_steps=5)
    assert not math.isnan(monitor.latest["leakage/gradient_membership/auc"])
    assert math.isnan(monitor.latest[F1])


@pytest.mark.parametrize("local_steps", [None, 1])
def test_what_would_take_too_long_is_not_calibrated(
    local_steps: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: GradientMembership, anatomy: Any) -> None:
        raise AssertionError("calibrated, to be dropped then")

    monkeypatch.setattr(GradientMembership, "prepare", refuse)
    monkeypatch.setattr(GradientMembership, "estimate", lambda *_: 31.0)
    monitor = LeakageMonitor(local_steps=local_steps, settings=MonitorSettings(cache=False))
    run(tmp_path, [monitor], module(optimizer="sgd"), max_steps=4)
    assert not any("gradient_membership" in name for name in monitor.latest)
    row = next(r for r in lines(monitor) if r["attack"] == "gradient_membership")
    assert row["unknown"] == "not played: a look takes about 31 s, and look_seconds=30"


# ---- what results say of it -----------------------------------------------------------------


def results() -> tuple[Results, Series, Series]:
    one, two = (SubspaceWords(name=name) for name in ("one", "two"))
    channel = WordsChannel([one, two], Options(texts=1))
    first, second = (Series.at(Stage.SHARED, name) for name in ("one", "two"))
    return Results({first: channel, second: channel}), first, second


def f1(value: float) -> Outcome:
    return Outcome({n: Rate(value, value, value) for n in ("precision", "recall", "f1")}, 9)


def test_the_worst_of_a_family_is_not_that_of_the_attack_that_waited() -> None:
    kept, first, second = results()
    kept.add(Look(0), {first: f1(0.9), second: pending("b", soon=True)}, {})
    assert WORST not in kept.look_values
    assert kept.look_values[f"{WORST}_at_least"] == 0.9
    assert kept.waiting == {second}
    kept.add(Look(1, scope=frozenset({second})), {second: f1(0.3)}, {})
    assert kept.look_values[WORST] == kept.latest[WORST] == 0.9
    assert kept.waiting == frozenset()


def test_a_wait_is_kept_in_checkpoints_and_ends() -> None:
    kept, first, second = results()
    waits = {first: f1(0.1), second: pending("b", soon=True)}
    kept.add(Look(3), waits, {})
    again, *_ = results()
    again.load_state_dict(kept.state_dict())
    tried = Look(1004, scope=frozenset({second}))
    alone = {second: pending("b", soon=True)}
    assert again.settled(replace(tried, step=1003), alone) is None
    assert again.settled(tried, None) is None, "nothing was shared in that step"
    settled = again.settled(tried, alone)
    assert settled == alone
    [outcome] = again.add(tried, settled, {}).values()
    assert outcome.unknown == "b, for more than 1000 steps (or rounds)"
    assert again.waiting == frozenset()


# ---- federations ----------------------------------------------------------------------------


def test_a_client_is_looked_at_again_in_the_next_round_whatever_it_cost(tmp_path: Path) -> None:
    net = lora(r=8)
    observer = RoundObserver(
        net,
        SGD,
        1,
        attacks=[SubspaceWords(capacity_seconds=0)],
        folder=tmp_path,
        max_overhead=0.001,
        settings=RoundSettings(cache=False, tensorboard=False),
    )
    state = trained_state(net)
    values = []
    for round_ in range(3):
        observer.begin(round_, state)
        data = batches(round_, 1, rows=1, length=6)
        state = train(net, data)
        if observer.due(0):
            values.append(observer.look(state, 0, batches=data).now.get(F1))
            observer.paid(0, 5.0, 1.0)
        net.load_state_dict(state, strict=False)
    assert values[0] is None, "B is zero in the first round"
    assert values[1] is not None
    assert len(values) == 2, "the budget counts from there on"
    observer.end()
