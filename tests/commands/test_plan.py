from __future__ import annotations

import pytest

from lightning_fedleak.attacks import row_space
from lightning_fedleak.cli import main
from lightning_fedleak.cli.commands import plan
from lightning_fedleak.cli.commands.plan import explain_trial
from lightning_fedleak.cli.studies.capacity import Trial
from tests.helpers.commands import run_command
from tests.helpers.folders import TEXTS, save_tiny_causal_lm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_causal_lm(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "client.txt"
    path.write_text("\n".join(TEXTS))
    return str(path)


def printed(**settings: object) -> str:
    status, output = run_command("plan", **settings)
    assert status == 0
    return output


def test_counts_rows_and_attacks_a_batch(model: str, text: str) -> None:
    output = printed(
        model=model, text=text, lora_r=2, targets="c_attn", batch=(2, 8), seconds=0.5
    )  # fmt: skip
    assert "An update shares 2 rows of 16 numbers" in output
    assert "by rule; planted at random" in output
    assert "A batch of 2 texts of 8 tokens (" in output
    assert "F1 of its words is " in output
    assert "no larger batch is shown to be safe" in " ".join(output.split())


def test_a_capacity_of_no_planted_set_is_unknown(
    model: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = row_space.Capacity(0, 4, 20.0)
    monkeypatch.setattr(row_space, "measure_capacity", lambda *_, **__: nothing)
    output = printed(model=model, text=text, lora_r=2, targets="c_attn", batch=(2, 8))
    assert "planted at random, how many is unknown, 4 were not." in " ".join(output.split())


def test_a_whole_model(model: str, text: str) -> None:
    assert "An update shares 48 rows of 16 numbers" in printed(
        model=model, text=text, lora_r=0, batch=(1, 6), seconds=0.5
    )


def test_without_a_trained_first_block_the_costs_of_attacks_are_still_shown(
    model: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[object] = []
    monkeypatch.setattr(plan, "show_attacks", measured.append)
    output = printed(model=model, text=text, targets="mlp.c_fc", batch=(1, 6))
    assert "What SubspaceWords can read is unknown: no trained map of this model" in output
    assert len(measured) == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--targets", "nothing"], "--targets nothing: Target modules"),
        (["--targets", "c_attn", "--lora-r", "0"], "give its rank too, --lora-r 8"),
        (["--batch", "1x4000"], "longer than the model's context"),
    ],
)
def test_errors_name_what_to_change(
    arguments: list[str], match: str, model: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", model, "--text", text, *arguments]) == 1
    assert match in capsys.readouterr().err


def test_an_attack_without_a_result_is_unknown_and_no_zero() -> None:
    text = explain_trial(Trial(1, 8, None, False, 0.1), 8)
    assert "A batch of 1 text of 8 tokens (8 distinct)" in text
    assert "is unknown." in text
    certified = explain_trial(Trial(2, 15, 1.0, True, 0.1), 8)
    assert "is 1.000, and the attack certifies that nothing is missing." in certified
