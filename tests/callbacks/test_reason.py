"""Which errors' words may be logged."""

from pathlib import Path

import pytest
import torch

from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.defenses import DPSGD, CanaryGradient, DefenseError
from lightning_fedleak.engine.run import reason


def caught(fail):
    with pytest.raises(Exception) as found:  # noqa: PT011
        fail()
    return found.value


def test_the_packages_own_defences_say_why_a_canary_is_refused():
    noised = CanaryGradient(torch.zeros(1, 1, 1)).noised(torch.zeros(1, 1), 1.0)
    defense = DPSGD(max_grad_norm=1.0, noise_multiplier=1.0)
    error = caught(lambda: defense.on_canary(noised, [], None))
    assert reason(error) == (
        "DefenseError: DPSGD: a step or a release outside of fit; nothing was released"
    )


def test_what_others_wrote_may_quote_the_batch_and_is_not_repeated():
    def a_defence_of_ones_own():
        raise DefenseError("the batch says: secret")

    def another():
        raise ValueError("the batch says: secret")

    for fail in (a_defence_of_ones_own, another):
        error = caught(fail)
        assert reason(error).startswith(f"{type(error).__name__} at {Path(__file__).name}:")
    assert reason(caught(lambda: (_ for _ in ()).throw(UnusableObservation("ours")))).endswith(
        "ours"
    )


def test_one_of_ours_that_repeats_another_error_is_not_repeated():
    cause = ValueError("the batch says: secret")
    noised = CanaryGradient(torch.zeros(1, 1, 1)).noised(torch.zeros(1, 1), 1.0)
    defense = DPSGD(max_grad_norm=1.0, noise_multiplier=1.0)
    error = caught(lambda: defense.on_canary(noised, [], None))
    error.__cause__ = cause
    assert "at dpsgd.py:" in reason(error)
