"""Orders of defences in which one of them would not do what it says."""

from __future__ import annotations

import pytest

from lightning_fedleak.defenses import (
    DPSGD,
    ActivationNoise,
    Defense,
    DefenseError,
    Freeze,
    GradientNoise,
)
from lightning_fedleak.strategies import DefendedStrategy


class PerSample(Defense):
    name, guarantee, per_sample = "per_sample", "a test's", True

    def on_gradients(self, parameters, context) -> None:
        pass


class Last(Defense):
    """A rule of a third party's own."""

    name, guarantee = "last", "a test's"

    def check_order(self, before, after) -> None:
        super().check_order(before, after)
        if after:
            raise DefenseError("Last: put it last")


def noise() -> GradientNoise:
    return GradientNoise(1.0, 1.0)


@pytest.mark.parametrize(
    ("defenses", "message"),
    [
        (
            [noise(), PerSample()],
            r"what gradient_noise did to the gradients before it would be lost. Put 'per_sample'",
        ),
        ([PerSample(), Freeze("head")], r"Freeze\('head'\): per_sample.*Put 'freeze' before"),
        ([Last(), noise()], "put it last"),
    ],
)
def test_a_wrong_order_is_refused_and_the_mend_works(defenses, message: str) -> None:
    with pytest.raises(DefenseError, match=message):
        DefendedStrategy("auto", defenses)
    DefendedStrategy("auto", defenses[::-1])


def test_dpsgd_is_such_a_defence() -> None:
    private = DPSGD(max_grad_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(DefenseError, match="Put 'dpsgd' first among"):
        DefendedStrategy("auto", [noise(), private])
    with pytest.raises(DefenseError, match="Use relative=False"):
        DefendedStrategy("auto", [private, ActivationNoise(1, 1.0, relative=True)])
    DefendedStrategy("auto", [Freeze("head"), private, noise(), ActivationNoise(1, 1.0)])


def test_freeze_before_all_and_noise_after_all() -> None:
    DefendedStrategy("auto", [Freeze("head"), PerSample(), noise(), Last()])
