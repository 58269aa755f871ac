"""What newcomers get wrong is refused before a step, in three lines at most, with what to write."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import lightning_fedleak
from lightning_fedleak import (
    DPSGD,
    DefendedStrategy,
    FCMembership,
    FlatChat,
    LeakageMonitor,
    PrefixInversion,
    RiskGate,
)
from lightning_fedleak.callbacks import WatchSettings
from tests.callbacks.runs import Probe, fit
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.models import tiny_gpt2

WORDS = "leakage/worst/words"
DP = DPSGD(max_grad_norm=1.0, noise_multiplier=1.0)
MOST_LINES = 3


class Counts(CausalLMModule):
    """Counts its training steps."""

    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)


def shuffled() -> DataLoader[Any]:
    return DataLoader(random_token_loader(32).dataset, batch_size=4, shuffle=True)


def gated(*arguments: Any, **more: Any) -> Callable[[], list[Any]]:
    return lambda: [LeakageMonitor(), RiskGate(*arguments, **more)]


CALLBACKS: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "a gate alone": (
        lambda: [RiskGate(WORDS, at_most=0.5)],
        "Trainer(callbacks=[LeakageMonitor(), gate])",
    ),
    "two monitors": (lambda: [LeakageMonitor(), LeakageMonitor()], "use one for all attacks"),
    "a gate on two monitors": (
        lambda: [RiskGate(WORDS, 0.3), LeakageMonitor(Probe()), LeakageMonitor(Probe(name="b"))],
        "which one LeakageMonitor with all attacks has to log: Trainer(",
    ),
    "a typo": (gated("leakage/worst/word", at_most=0.5), f"Did you mean '{WORDS}'?"),
    "no prefix": (gated("worst/words", at_most=0.5), f"Did you mean '{WORDS}'?"),
    "a metric of one's own": (gated("val_loss", at_most=0.5), f"the highest: {WORDS}"),
    "another attack": (gated("leakage/flatchat/f1", at_most=0.5), f"the highest: {WORDS}"),
    "percent": (gated(WORDS, at_most=50), "rates are shares, not percent"),
    "a string": (gated(WORDS, at_most="0.5"), "at_most must be a number"),
    "no limit": (gated(WORDS), f"For example: RiskGate('{WORDS}', at_most=0.5)"),
    "at_least": (gated(WORDS, at_least=0.5), "Did you mean at_most=?"),
    "an action": (gated(WORDS, at_most=0.5, action="halt"), "'stop' or 'harden'"),
    "below chance": (gated("leakage/worst/membership", at_most=0.4), "which is 0.5 by chance"),
    "texts": (gated("leakage/worst/texts", at_most=0.5), "LeakageMonitor(attacks=[SubspaceTexts"),
    "memorization": (
        gated("leakage/worst/memorization", at_most=0.6),
        "settings=WatchSettings(memorization=Memorization(max_overhead=",
    ),
    "an argument": (lambda: [LeakageMonitor(every_n_step=5)], "Did you mean every_n_steps=?"),
    "no steps": (lambda: [LeakageMonitor(every_n_steps=0)], "an integer of at least 1"),
    "part of a step": (lambda: [LeakageMonitor(every_n_steps=2.5)], "an integer of at least 1"),
    "too much": (lambda: [LeakageMonitor(max_overhead=5)], "it is a share"),
    "a name": (lambda: [LeakageMonitor("FlatChat")], "'auto' or instances of Attack"),
    "a class of attacks": (lambda: [LeakageMonitor([FlatChat])], "such as FlatChat()"),
    "a class": (lambda: [LeakageMonitor], "write callbacks=[LeakageMonitor()]"),
    "a dict": (
        lambda: [LeakageMonitor(settings={"stages": ("local",)})],
        "write settings=WatchSettings(...)",
    ),
    "a stage": (
        lambda: [LeakageMonitor(settings=WatchSettings(stages=("locl",)))],
        "stages must be some of",
    ),
    "a defence": (
        lambda: [LeakageMonitor(), DP],
        "Trainer(strategy=DefendedStrategy('auto', defenses=[DPSGD(...)]))",
    ),
}


@pytest.mark.parametrize("mistake", CALLBACKS)
def test_a_mistake_in_callbacks_is_refused_before_a_step(tmp_path: Path, mistake: str) -> None:
    callbacks, hint = CALLBACKS[mistake]
    module = Counts(tiny_gpt2())
    with pytest.raises((ValueError, TypeError)) as refusal:
        fit(callbacks(), tmp_path, module=module, loader=shuffled())
    message = str(refusal.value)
    assert hint in message
    assert len(message.splitlines()) <= MOST_LINES
    assert module.steps == 0


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: DPSGD(max_grad_norm=1.0, target_epsilon="8", target_delta=1e-5), "a number above"),
        (lambda: DPSGD(max_grad_norm=1.0, target_epsilon=8), "needs target_delta"),
        (lambda: DPSGD(max_grad_norm=1.0), "give one"),
        (lambda: DPSGD(1.0, epsilon=8), "Did you mean target_epsilon=?"),
        (lambda: DPSGD(1.0, 1.0, target_delta=1e-5, check=True), "PlantedGradients(every_n_steps="),
        (lambda: DPSGD(1.0, noise_multiplier=1.0, target_epsilon=8, target_delta=1e-5), "give one"),
        (lambda: DefendedStrategy([DP]), ": DefendedStrategy('auto', defenses=[...])."),
        (lambda: FCMembership(), "FCMembership(layer=1)"),
        (lambda: WatchSettings(stage=("local",)), "WatchSettings: got an unexpected"),
        (lambda: WatchSettings(stage=("local",)), "Did you mean stages=?"),
        (lambda: LeakageMonitor(every=2), "Did you mean every_n_steps=?"),
        (lambda: PrefixInversion(), "PrefixInversion(layer=2)"),
        (lambda: lightning_fedleak.LeakMonitor, "Did you mean LeakageMonitor?"),
        (lambda: LeakageMonitor().latest[WORDS], "no look has ended yet"),
        (lambda: RiskGate(LeakageMonitor(), 0.5), "name of a metric first, not a LeakageMonitor"),
    ],
)
def test_a_wrong_call_says_what_to_write(call: Callable[[], Any], hint: str) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError, KeyError)) as refusal:
        call()
    assert hint in str(refusal.value)
    assert len(str(refusal.value).splitlines()) <= MOST_LINES


def test_a_run_without_a_step_says_nothing_of_a_run_that_was_resumed(tmp_path, recwarn) -> None:
    trainer = fit([LeakageMonitor()], tmp_path, max_epochs=0)
    assert trainer.global_step == 0
    said = [str(warning.message) for warning in recwarn]
    assert not [text for text in said if "AssertionError" in text or "resumed" in text]


def test_weights_that_are_not_tested_are_one_short_line_at_the_start(tmp_path, caplog) -> None:
    with caplog.at_level("INFO"):
        fit([LeakageMonitor()], tmp_path, loader=shuffled())
    lines = [one.getMessage() for one in caplog.records if "trained weights" in one.getMessage()]
    [line] = lines
    assert "are not tested: 32 rows pay for 0 of 200 texts" in line
    assert "WatchSettings(memorization=Memorization(max_overhead=" in line
    assert len(line) < 200
