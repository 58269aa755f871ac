"""The example in the documentation of `Defense` is a whole defence."""

from __future__ import annotations

import textwrap

import torch

from lightning_fedleak.defenses import (
    DPSGD,
    ActivationNoise,
    Defense,
    Freeze,
    GradientNoise,
    base,
)
from lightning_fedleak.strategies import DefendedStrategy
from tests.strategies.toy import ToyLM, fit, grads


def test_the_documented_example_runs() -> None:
    code = textwrap.dedent(str(base.__doc__).split("::\n", 1)[1])
    names: dict[str, type[Defense]] = {"Defense": Defense}
    exec(code, names)
    top = names["TopK"](0.1)
    shares: list[float] = []
    strategy = DefendedStrategy("auto", [top])

    def tap(stage: str, optimizer: torch.optim.Optimizer) -> None:
        if stage == "shared":
            shares.append(float((grads(optimizer)[-2] != 0).double().mean()))

    strategy.add_tap(tap)
    fit(strategy, lambda: ToyLM("sgd"))
    assert len(shares) == 6
    assert all(abs(share - 0.1) < 0.02 for share in shares)


def test_what_acts_on_gradients_is_seen_from_the_class() -> None:
    assert GradientNoise(1.0, 1.0).acts_on_gradients
    assert not Freeze("head").acts_on_gradients


def test_settings_are_those_that_a_defence_was_built_with() -> None:
    dpsgd = DPSGD(1.0, 1.0)
    defenses = [dpsgd, Freeze("head", "hardened"), GradientNoise(1.0, 1.0), ActivationNoise(1, 1.0)]
    built = [defense.settings() for defense in defenses]
    dpsgd.releases, dpsgd.measured_noise_multiplier = 3, 0.97
    for defense in defenses[1:]:
        assert defense.harden() is not None
    assert [defense.settings() for defense in defenses] == built
    assert built[0]["max_grad_norm"] == built[0]["noise_multiplier"] == 1.0
    assert built[1]["when"] == "hardened"
    assert built[2]["sigma"] == built[3]["sigma"] == 1.0
    counts = {"releases", "measured_noise_multiplier", "active", "notches"}
    assert not any(counts & settings.keys() for settings in built)
