"""Configs of LightningCLI with arguments as 0.1.0 spelled them."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from lightning_fedleak.attacks.base import Attack
from lightning_fedleak.defenses import Defense, GradientNoise

jsonargparse = pytest.importorskip("jsonargparse")

PUBLIC = [[5, 6, 7, 8], [9, 8, 7, 6]]
# Class, its required arguments, and an old argument with its place now.
OLD = [
    ("AttentionMembership", {"layer": 1, "public_text": PUBLIC}, "attention", {"variant": "paper"}),
    ("TrainedMembership", {"layer": 1, "public_text": PUBLIC}, "training", {"steps": 3}),
    ("EmbeddingDescent", {"layer": 1}, "descent", {"stop": "cosine"}),
    ("TokenRelaxation", {"layer": 1}, "descent", {"stop": "cosine"}),
    ("PrefixInversion", {"layer": 1}, "settings", {"refresh_every": 7}),
    ("GradientMatching", {"texts": 2, "length": 8}, "matching", {"swaps": 3}),
]


def built(base: type, name: str, arguments: dict[str, Any]) -> tuple[Any, list[str]]:
    """The object that a config makes, and what it warns of."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--one", type=base)
    config = {"class_path": name, "init_args": arguments}
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        parsed = parser.parse_args(["--one", json.dumps(config)])
        one = parser.instantiate_classes(parsed).one
    return one, [str(r.message) for r in records if r.category is FutureWarning]


@pytest.mark.parametrize(("name", "required", "group", "old"), OLD, ids=lambda x: str(x)[:20])
def test_old_names_in_a_config_work_and_warn(
    name: str, required: dict[str, Any], group: str, old: dict[str, Any]
) -> None:
    path = f"lightning_fedleak.attacks.{name}"
    one, told = built(Attack, path, required | old)
    [argument] = old
    assert any(f"{name}({argument}=) is spelled {name}({group}=" in text for text in told)
    other, told = built(Attack, path, required | {group: old})
    assert told == []
    assert one.config() == other.config()
    assert built(Attack, path, required)[1] == []


def test_init_token_in_a_config() -> None:
    one, told = built(
        Attack, "lightning_fedleak.attacks.EmbeddingDescent", {"layer": 1, "init_token": 3}
    )
    assert one.initial == 3
    assert any("EmbeddingDescent(initial=)" in text for text in told)


def test_gradient_noise_names_the_nearest_argument() -> None:
    with pytest.raises(TypeError, match=r"'most_notch'. Did you mean most_notches=\?"):
        GradientNoise(1.0, 1.0, most_notch=1)  # type: ignore[call-arg]
    one, told = built(
        Defense,
        "lightning_fedleak.defenses.GradientNoise",
        {"clip": 1.0, "sigma": 1.0, "most_notches": 2},
    )
    assert one.max_hardenings == 2
    assert any("GradientNoise(max_hardenings=)" in text for text in told)
