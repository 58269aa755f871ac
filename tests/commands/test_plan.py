from __future__ import annotations

import pytest

from lightning_fedleak.attacks import row_space
from lightning_fedleak.cli import main
from lightning_fedleak.cli.commands import plan
from tests.helpers.commands import run_command
from tests.helpers.folders import save_tiny_causal_lm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_causal_lm(tmp_path_factory.mktemp("model")))


def printed(**settings: object) -> str:
    status, output = run_command("plan", **settings)
    assert status == 0
    return output


def test_counts_rows_and_planted_tokens(model: str) -> None:
    output = printed(model=model, lora_r=2, targets="c_attn", length=8, seconds=0.5)
    assert "An update shares 2 rows of 16 numbers" in output
    assert "by rule; planted at random" in output


def test_a_capacity_of_no_planted_set_is_unknown(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = row_space.Capacity(0, 4, 20.0)
    monkeypatch.setattr(row_space, "measure_capacity", lambda *_, **__: nothing)
    output = printed(model=model, lora_r=2, targets="c_attn", length=8)
    assert "planted at random, how many is unknown, 4 were not." in " ".join(output.split())


def test_a_whole_model(model: str) -> None:
    assert "An update shares 48 rows of 16 numbers" in printed(
        model=model, lora_r=0, length=6, seconds=0.5
    )


def test_without_a_trained_first_block_the_costs_of_attacks_are_still_shown(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[object] = []
    monkeypatch.setattr(plan, "show_attacks", measured.append)
    output = printed(model=model, targets="mlp.c_fc", length=6)
    assert "What SubspaceWords can read is unknown: no trained map of this model" in output
    assert len(measured) == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--targets", "nothing"], "--targets nothing: Target modules"),
        (["--targets", "c_attn", "--lora-r", "0"], "give its rank too, --lora-r 8"),
        (["--length", "4000"], "longer than the model's context"),
    ],
)
def test_errors_name_what_to_change(
    arguments: list[str], match: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", model, *arguments]) == 1
    assert match in capsys.readouterr().err
