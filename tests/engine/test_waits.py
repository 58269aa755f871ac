"""Attacks that can read nothing yet are tried again in the next steps, at little cost."""

from __future__ import annotations

import math
import time
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from torch import nn

from lightning_fedleak.attacks import GradientMembership, SubspaceMembership, SubspaceWords
from lightning_fedleak.attacks.base import Surfaces
from lightning_fedleak.attacks.membership import gradients
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.engine import scheduler
from lightning_fedleak.engine.fit import Fit
from lightning_fedleak.engine.run import Look
from lightning_fedleak.trainers import Threshold
from tests.attacks.row_space.models import VOCABULARY, llama
from tests.helpers.lightning_modules import random_token_loader
from tests.helpers.loops import assert_same_training, train
from tests.helpers.models import own_rng

F1 = "leakage/subspace_words/f1"
WORST = "leakage/worst/words"
LORA = partial(LoraConfig, r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])


def adapted(config: Any = None, second: bool = False) -> nn.Module:
    with own_rng(1):
        model: nn.Module = get_peft_model(llama(), LORA() if config is None else config)
        if second:
            model.add_adapter("other", LORA(r=4))  # type: ignore[operator]
        return model


class Counting(SubspaceWords):
    """Counts its runs."""

    needs_control = False

    def __init__(self) -> None:
        super().__init__(capacity_seconds=0)
        self.runs: list[int] = []
        self.refreshed: list[int] = []

    def refresh(self, anatomy: Any, step: int) -> None:
        self.refreshed.append(step)
        super().refresh(anatomy, step)

    def run(self, view: Any, query: Any = None) -> Any:
        self.runs.append(view.gradients[-1].step)
        return super().run(view, query)


def run(
    folder: Path | None,
    attacks: Any,
    model: nn.Module | None = None,
    *,
    zero_steps: int = 1,
    steps: int = 10,
    accumulate: int = 1,
    optimizer: str = "adamw",
    **settings: Any,
) -> Any:
    """Run a loop whose rate is 0 in its first steps, as warm-ups have it."""
    model = adapted() if model is None else model
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    stepper = kind([p for p in model.parameters() if p.requires_grad], lr=0.0)
    taken: list[int] = []

    def warm_up(model: Any) -> None:
        stepper.param_groups[0]["lr"] = 1e-2 * max(0, len(taken) - zero_steps + 1) / 4
        taken.append(1)

    rows = 2 * steps * accumulate
    data = random_token_loader(n=rows, batch_size=2, length=10, vocab=VOCABULARY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(
            folder,
            attacks,
            model,
            batches=data,
            optimizers=[stepper],
            before_step=warm_up,
            accumulate=accumulate,
            **({"every_n_steps": 50} | settings),
        )


SETUPS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "lora": (adapted, {}, 2),
    "rate 0 in five steps": (adapted, {"zero_steps": 5}, 6),
    "accumulation": (adapted, {"accumulate": 2}, 2),
    "rslora": (lambda: adapted(LORA(use_rslora=True)), {}, 2),
    "two adapters": (partial(adapted, second=True), {}, 2),
}


@pytest.mark.parametrize("setup", SETUPS)
def test_words_are_recovered_and_gated_as_soon_as_b_has_moved(setup: str, tmp_path: Path) -> None:
    make, settings, readable = SETUPS[setup]
    gate = Threshold(WORST, at_most=0.5)
    training = run(tmp_path, Counting(), make(), gates=[gate], **settings)
    assert gate.fired is not None
    assert (gate.fired.step, training.steps) == (readable, readable + 1)
    assert gate.fired.value > 0.8
    assert training.watch.failures == 0
    assert training.watch.looks == 2, "steps in which nothing can be read yet are no looks"


def test_adalora_is_tried_until_it_has_a_result(tmp_path: Path) -> None:
    """Its regulariser is not in this loss: A has a gradient once the singular values have moved."""
    config = AdaLoraConfig(
        init_r=8, target_r=4, total_step=40, tinit=30, tfinal=5, target_modules=["q_proj", "v_proj"]
    )
    watch = run(tmp_path, Counting(), adapted(config), steps=5).watch
    assert not math.isnan(watch.latest[F1])
    assert watch.engine.results.last_step <= 2


def test_trying_again_costs_little_and_does_not_disturb(tmp_path: Path) -> None:
    attack = Counting()
    training = run(tmp_path, attack, zero_steps=8, steps=14)
    assert attack.runs == [0, 9], "in steps 1 to 8 its gradients are zero, which is all it takes"
    assert attack.refreshed == [0, 9]
    assert (training.watch.looks, training.watch.engine.results.last_step) == (2, 9)
    assert training.watch.latest[F1] > 0.9
    assert_same_training(run(None, None, zero_steps=8, steps=14), training)


def test_membership_is_looked_at_while_words_wait(tmp_path: Path) -> None:
    """B has a gradient while it is zero: what reads it does not wait for A's."""
    text = PublicText(torch.randint(3, VOCABULARY, (40, 10)).unbind())
    attacks = [
        Counting(),
        GradientMembership(text, public_rows=8, controls=4),
        SubspaceMembership(text, public_rows=8),
    ]
    watch = run(tmp_path, attacks, zero_steps=3, steps=7).watch
    first: dict[str, int] = {}
    for line in watch.lines():
        first.setdefault(line["attack"], line["step"])
    assert first["gradient_membership"] == 1
    assert first["subspace_words"] == first["subspace_membership"] == 4
    assert watch.failures == 0


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("waits", [1000, 4])
def test_a_wait_that_ends_without_a_result_is_unknown(
    strict: bool, waits: int, tmp_path: Path
) -> None:
    """It ends with the run, or beyond the largest number of steps."""

    def shorten(watch: Any) -> None:
        watch.engine.results._max_steps_waited = waits

    gate = Threshold(WORST, at_most=0.5, strict=strict)
    settings = {"zero_steps": 99, "steps": 9, "gates": [gate], "configure": shorten}
    training = run(tmp_path, Counting(), **settings)
    assert math.isnan(training.watch.latest[F1])
    assert training.watch.failures == 1
    assert (gate.fired is not None) == strict
    assert training.steps == (6 if strict and waits == 4 else 9)


def test_a_run_that_resumes_goes_on_waiting(tmp_path: Path) -> None:
    model, gate = adapted(), Threshold(WORST, at_most=0.5)
    first = run(tmp_path / "a", Counting(), model, zero_steps=99, steps=3).watch
    state = first.state_dict()
    run(tmp_path / "b", Counting(), model, zero_steps=2, gates=[gate], state=state)
    assert gate.fired is not None
    assert (gate.fired.step, gate.fired.value) == (6, pytest.approx(1, abs=0.1))


# ---- calibrations -------------------------------------------------------------------------------


def test_auto_calibrates_for_b_and_again_for_a_and_leaves_training_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated: list[int | None] = []
    calibrate, try_few = GradientMembership._calibrate, gradients._all_reached

    def tried(anatomy: Any, maps: Any, batch: Any) -> bool:
        calibrated.append(len(batch.input_ids))
        return try_few(anatomy, maps, batch)

    def counted(self: GradientMembership, anatomy: Any) -> None:
        calibrated.append(None)
        calibrate(self, anatomy)

    monkeypatch.setattr(gradients, "_all_reached", tried)
    monkeypatch.setattr(GradientMembership, "_calibrate", counted)
    monkeypatch.setattr(scheduler, "MAX_CURVE_SHARE", 1e3)  # looks at steps 1, 2, 4, ...
    training = run(tmp_path, "auto", every_n_steps=None)
    assert_same_training(run(None, None), training)
    # A has no gradient at first, as a few texts show: all are run for B, and again once A has one.
    assert calibrated == [gradients.TIMED_TEXTS, None, None]
    assert not math.isnan(training.watch.latest["leakage/gradient_membership/auc"])


def test_what_would_take_too_long_is_not_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: GradientMembership, anatomy: Any) -> None:
        raise AssertionError("calibrated, to be dropped then")

    monkeypatch.setattr(GradientMembership, "prepare", refuse)
    monkeypatch.setattr(GradientMembership, "estimate", lambda *_: 31.0)
    watch = run(tmp_path, "auto", optimizer="sgd", every_n_steps=None, steps=4).watch
    assert not any("gradient_membership" in name for name in watch.latest)
    [line] = watch.lines("gradient_membership")
    assert line["unknown"] == "not played: a look takes about 31 s, and look_seconds=30"


def test_an_attack_whose_look_takes_too_long_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    real_run = SubspaceWords.run

    def run_slowly(self: SubspaceWords, view: Any, query: Any = None) -> Any:
        guess = real_run(self, view, query)
        runs.append(view.gradients[-1].step)
        time.sleep(0.5)
        return guess

    monkeypatch.setattr(SubspaceWords, "run", run_slowly)
    monkeypatch.setattr(SubspaceMembership, "needs", lambda *_: Surfaces())  # it runs the former
    watch = run(tmp_path, "auto", every_n_steps=1, steps=5, look_seconds=0.2).watch
    lines = {line["step"]: line["unknown"] for line in watch.lines("subspace_words")}
    assert set(runs) == {min(lines)}
    assert lines.pop(min(lines)) is None
    assert len(lines) >= 2
    for reason in lines.values():
        assert reason.startswith("not run any more: a run took")
        assert reason.endswith("s, and look_seconds=0.2")


@pytest.mark.parametrize("accounted", [False, True])
def test_no_attack_is_dropped_for_its_seconds_under_an_account(accounted: bool) -> None:
    """One example could make an attack slow, and a gate on it unknown, which is seen outside."""
    dropped: list[dict[str, float]] = []
    fit: Any = SimpleNamespace(
        accounting=[object()] if accounted else [],
        lineup=SimpleNamespace(leave_out_slow=dropped.append),
        run=SimpleNamespace(longest={"words": 99.0}),
        tap=SimpleNamespace(end=None),
        channels=(),
        each=lambda *functions: None,
    )
    Fit.end_look(fit, Look(0))
    assert dropped == ([] if accounted else [{"words": 99.0}])
