"""Settings of DP-SGD in groups, and arguments as 0.1.0 spelled them."""

from __future__ import annotations

from typing import Any

import pytest
from jsonargparse import ArgumentParser

from lightning_fedleak.defenses import (
    DPSGD,
    ClipSettings,
    Defense,
    DefenseError,
    ReleaseSettings,
    Users,
)

KEYS = [row // 2 for row in range(40)]
SPELLINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"poisson": False}, {"poisson_sampling": False}),
    ({"max_physical_batch": 8}, {"max_physical_batch_size": 8}),
    (
        {"clipping": "ghost", "gamma": 0.1, "loss": "trusted", "per_layer": True},
        {"clip": ClipSettings("ghost", gamma=0.1, loss="trusted", per_layer=True)},
    ),
    (
        {"per_layer": True, "layer_noise": "by_clip"},
        {"clip": ClipSettings(per_layer=True, layer_noise="by_clip")},
    ),
    (
        {"mechanism": "banded", "bands": 4, "trust": "central", "on_budget": "raise"},
        {"release": ReleaseSettings("central", "banded", 4, on_budget="raise")},
    ),
    (
        {"unit": "user", "group_by": "customer", "rows_per_user": 3},
        {"unit": Users("customer", rows_per_user=3)},
    ),
    ({"unit": "user", "group_by": KEYS}, {"unit": Users(KEYS)}),
]


def spelled(defense: DPSGD) -> dict[str, Any]:
    known = {"_noise", "_budget", "_team"}
    return {name: value for name, value in vars(defense).items() if name not in known}


@pytest.mark.parametrize(("old", "new"), SPELLINGS)
def test_arguments_of_0_1_0_warn_and_mean_what_they_did(old: Any, new: Any) -> None:
    with pytest.warns(FutureWarning, match="The old spelling works through 0.2") as warned:
        before = DPSGD(1.0, noise_multiplier=1.0, **old)
    after = DPSGD(1.0, noise_multiplier=1.0, **new)
    assert spelled(before) == spelled(after)
    assert before.settings() == after.settings()
    [message] = {str(warning.message) for warning in warned}
    assert all(f"{name}=" in message for name in new)
    assert warned[0].filename == __file__


def test_what_hardens_is_passed_on() -> None:
    budget: Any = {"target_epsilon": 50.0, "target_delta": 1e-3, "accountant": "filter"}
    release = ReleaseSettings(harden_factor=3.0, max_hardenings=1)
    new = DPSGD(1.0, noise_multiplier=6.0, release=release, **budget)
    with pytest.warns(FutureWarning, match=r"harden_factor=, max_hardenings=\)"):
        old = DPSGD(1.0, noise_multiplier=6.0, harden_factor=3.0, most_notches=1, **budget)
    for defense in (old, new):
        assert defense.harden() == "dpsgd: noise multiplier 6 -> 18"
        assert defense.harden() is None


@pytest.mark.parametrize(
    ("settings", "new"),
    [
        ({"poisson": False, "clipping": "ghost"}, {"clip": ClipSettings("ghost")}),
        ({"mechanism": "banded", "bands": 4}, {"release": ReleaseSettings("local", "banded", 4)}),
        ({"unit": "user", "group_by": "customer"}, {"unit": Users("customer")}),
        ({"unit": {"group_by": "customer"}}, {"unit": Users("customer")}),
        ({"clip": {"form": "ghost"}}, {"clip": ClipSettings("ghost")}),
        ({"release": {"on_budget": "raise"}}, {"release": ReleaseSettings(on_budget="raise")}),
    ],
)
def test_a_config_may_spell_both(settings: Any, new: Any) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--defense", type=Defense)
    arguments = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    path = "lightning_fedleak.defenses.DPSGD"
    config = {"defense": {"class_path": path, "init_args": arguments | settings}}
    defense = parser.instantiate_classes(parser.parse_object(config)).defense
    poisson = settings.get("poisson", True)
    expected = DPSGD(1.0, noise_multiplier=1.0, poisson_sampling=poisson, **new)
    assert spelled(defense) == spelled(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unit": "user"}, "needs group_by"),
        ({"unit": "user", "rows_per_user": 2}, "needs group_by"),
        ({"group_by": "customer"}, "the unit is an example"),
        ({"unit": Users("customer"), "group_by": "customer"}, "are for users"),
        ({"unit": "household"}, "unit must be 'example', got 'household'"),
        ({"max_physical_batch_size": 0}, "max_physical_batch_size must be .* at least 1"),
        ({"poisson": False, "unit": "user", "group_by": KEYS}, "users are drawn by chance"),
    ],
)
def test_what_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(DefenseError, match=message):
        DPSGD(1.0, noise_multiplier=1.0, **settings)


def test_an_argument_that_never_was_is_none() -> None:
    with pytest.raises(TypeError, match="batches"):
        DPSGD(1.0, noise_multiplier=1.0, batches=3)


def test_a_misspelt_argument_is_named_with_its_nearest() -> None:
    with pytest.raises(
        TypeError, match=r"^DPSGD\(\) got .* 'target_epslon'\. Did you mean target_epsilon=\?$"
    ):
        DPSGD(1.0, target_epslon=8)
