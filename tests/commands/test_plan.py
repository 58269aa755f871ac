from __future__ import annotations

import io

import pytest
from rich.console import Console

from lightning_fedleak.attacks import row_space
from lightning_fedleak.cli import main
from lightning_fedleak.cli.commands.plan import PlanCommand, explain_trials
from lightning_fedleak.cli.studies.capacity import Trial
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
    console = Console(file=io.StringIO(), width=160)
    assert PlanCommand(**settings).run(console) == 0  # type: ignore[arg-type]
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_finds_where_exact_recovery_ends(model: str, text: str) -> None:
    output = printed(
        model=model, text=text, lora_r=2, targets="c_attn", batch="2x8", seconds=0.5
    )  # fmt: skip
    assert "An update shares 2 rows of 16 numbers" in output
    assert "by rule; planted at random" in output
    assert "Exact recovery ends before" in output
    assert "no larger batch is shown to be safe" in output


def test_a_capacity_of_no_planted_set_is_said_to_be_unknown(
    model: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = row_space.Capacity(0, 4, 20.0)
    monkeypatch.setattr(row_space, "measure_capacity", lambda *_, **__: nothing)
    output = printed(model=model, text=text, lora_r=2, targets="c_attn", batch="2x8")
    assert "planted at random, how many is unknown, 4 were not." in " ".join(output.split())


def test_a_whole_model_and_one_without_a_trained_first_block(model: str, text: str) -> None:
    assert "An update shares 48 rows of 16 numbers" in printed(
        model=model, text=text, lora_r=0, batch="1x6", seconds=0.5
    )
    assert main(["plan", "--model", model, "--text", text, "--targets", "mlp.c_fc"]) == 1


def test_errors_say_what_to_change(
    model: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, match in (
        (["--targets", "mlp.c_fc"], "no trained map of this model reads an input"),
        (["--targets", "nothing"], "--targets nothing: Target modules"),
        (["--targets", "c_attn", "--lora-r", "0"], "give its rank too, --lora-r 8"),
        (["--batch", "1x4000"], "exceed the context"),
        (["--model", "./nowhere"], "nowhere"),
        (["--text", "./nowhere.txt"], "there is no file"),
    ):
        assert main(["plan", "--model", model, "--text", text, *arguments]) == 1
        assert match in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "--batch", "8 by 64"])
    assert "such as 8x64" in capsys.readouterr().err


def test_an_end_that_was_not_reached_is_said() -> None:
    trials = [Trial(1, 8, 1.0, True, 0.1), Trial(2, 15, 1.0, True, 0.1)]
    assert "up to 2 texts of 8 tokens; where that ends was not reached" in explain_trials(trials, 8)
    assert "Exact recovery ends before 1 text of 8 tokens (8 distinct)" in explain_trials(
        [Trial(1, 8, None, False, 0.1)], 8
    )
