"""Orders of defences in which one of them would not do what it says."""

from __future__ import annotations

import pytest

from lightning_fedleak.defenses import DPSGD, ActivationNoise, DefenseError, Freeze, GradientNoise
from lightning_fedleak.strategies import DefendedStrategy


def noise() -> GradientNoise:
    return GradientNoise(1.0, 1.0)


def test_dpsgd_is_such_a_defence() -> None:
    private = DPSGD(max_grad_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(DefenseError, match="Put 'dpsgd' first among"):
        DefendedStrategy("auto", [noise(), private])
    with pytest.raises(DefenseError, match="Use relative=False"):
        DefendedStrategy("auto", [private, ActivationNoise(1, 1.0, relative=True)])
    DefendedStrategy("auto", [Freeze("head"), private, noise(), ActivationNoise(1, 1.0)])
