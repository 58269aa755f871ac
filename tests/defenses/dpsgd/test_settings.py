"""Settings of DP-SGD in groups."""

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


def spelled(defense: DPSGD) -> dict[str, Any]:
    known = {"_budget", "_team"}
    return {name: value for name, value in vars(defense).items() if name not in known}


@pytest.mark.parametrize(
    ("settings", "new"),
    [
        ({"unit": {"group_by": "customer"}}, {"unit": Users("customer")}),
        ({"clip": {"form": "ghost"}}, {"clip": ClipSettings("ghost")}),
        ({"release": {"on_budget": "raise"}}, {"release": ReleaseSettings(on_budget="raise")}),
    ],
)
def test_a_config_has_the_settings_in_groups(settings: Any, new: Any) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--defense", type=Defense)
    arguments = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    path = "lightning_fedleak.defenses.DPSGD"
    config = {"defense": {"class_path": path, "init_args": arguments | settings}}
    defense = parser.instantiate_classes(parser.parse_object(config)).defense
    expected = DPSGD(1.0, noise_multiplier=1.0, **new)
    assert spelled(defense) == spelled(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unit": "household"}, "unit must be 'example', got 'household'"),
        ({"max_physical_batch_size": 0}, "max_physical_batch_size must be .* at least 1"),
        (
            {"max_physical_batch_size": 4, "unit": Users(KEYS)},
            r"max_physical_batch_size=4 pass Users\(..., rows_per_user=4\)",
        ),
        ({"max_physical_batch_size": 4, "unit": Users(KEYS, 5)}, "rows_per_user=4.* or fewer"),
    ],
)
def test_what_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(DefenseError, match=message):
        DPSGD(1.0, noise_multiplier=1.0, **settings)
