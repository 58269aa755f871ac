from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import BertForMaskedLM, BertModel

from lightning_fedleak.cli import main
from lightning_fedleak.cli.finetuning.assets import SourceError
from lightning_fedleak.cli.studies.models import find_model
from tests.helpers.commands import printed_by
from tests.helpers.folders import TEXTS, save_tiny_bert


def many(n: int) -> list[str]:
    """Return different texts, whose first eight tokens already differ."""
    return [f"{i} {TEXTS[i % len(TEXTS)]}" for i in range(n)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "client.txt"
    path.write_text("\n".join(many(60)))
    return str(path)


printed = partial(printed_by, "game")


def rates_of(output: str, attack: str) -> dict[str, str]:
    """Return the columns of an attack's row, each a value and its interval."""
    heads = next(line for line in output.splitlines() if line.startswith("┃"))
    row = next(line for line in output.splitlines() if line.startswith(f"│ {attack} "))
    columns = (cell.strip() for cell in heads.strip("┃").split("┃"))
    return dict(zip(columns, (cell.strip() for cell in row.strip("│").split("│")), strict=True))


def auc_of(output: str, attack: str) -> float:
    return float(rates_of(output, attack)["AUC"].partition(" ")[0])


def test_results_are_printed_without_text(model: str, text: str) -> None:
    output = printed(
        model=model, text=text, attack=["fc", "fc-full"], layer=[0, 2], batch=8, tokens=16, games=30
    )
    assert "out of 60 different sentences" in output
    for name in ("fc@0", "fc-full@0", "fc@2", "fc-full@2"):
        assert rates_of(output, name)["games"] == "30"
    assert rates_of(output, "fc-full@2")["accuracy"].startswith("1 [")
    collisions = re.search(r"Layer 0: in (\d+) of 30 games", output)
    assert collisions is not None
    assert rates_of(output, "  no collision")["games"] == str(30 - int(collisions[1]))
    assert re.fullmatch(
        r"0\.\d{3} \[0\.\d{3}, (0\.\d{3}|1)\]", rates_of(output, "fc@0")["accuracy"]
    )
    assert "dishonest" in output
    for line in Path(text).read_text().splitlines():
        assert line not in output


def test_every_adversary_plays_at_the_middle_layer(model: str, text: str) -> None:
    attacks = ["fc", "attention"]
    output = printed(model=model, text=text, attack=attacks, batch=6, tokens=12, games=4)
    assert all(f"{name}@1" in output for name in attacks)
    # A quarter of the text is the server's.
    assert "out of 45 different sentences" in output


def test_a_server_without_layers_reads_a_lora(model: str, text: str) -> None:
    settings = {"model": model, "text": text, "batch": 4, "tokens": 12, "games": 8}
    output = printed(attack=["gradient", "subspace"], lora_r=4, **settings)
    assert "A client trains a LoRA of rank 4 on" in output
    assert "An honest but curious server" in output
    assert "dishonest" not in output
    row = next(line for line in output.splitlines() if line.startswith("│ gradient"))
    assert " 1 [" in row, "B is moved: A has a gradient"


@pytest.mark.parametrize("head", [True, False])
def test_encoders_with_and_without_a_head(head: bool, text: str, tmp_path: Path, capsys) -> None:
    folder = save_tiny_bert(tmp_path, BertForMaskedLM if head else BertModel)
    assert find_model(folder).kind == ("masked" if head else "classifier")
    output = printed(model=folder, text=text, attack=["fc"], batch=5, tokens=12, games=2)
    assert "fc@1" in output
    words = ["game", "--model", folder, "--text", text, "--batch", "5", "--tokens", "12"]
    if head:
        assert main([*words, "--games", "2", "--attack", "gradient"]) == 1
        assert "play FCMembership (fedleak game --attack fc)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attack", "fc", "--text", "few", "--batch", "10"], "sentences"),
        (["--attack", "fc", "--layer", "3"], "layer must be an integer from 0 to 2, got 3"),
        (["--attack", "fc", "--tokens", "65"], "longer than the model's context of 64"),
        (["--attack", "attention", "--text", "some"], "public texts to calibrate on"),
        (["--targets", "c_attn"], "also give its rank, such as --lora-r 8"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    message: str,
    model: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("few").write_text("\n".join(many(10)))
    Path("some").write_text("\n".join(many(20)))
    words = ["game", "--model", model, "--text", text, "--batch", "6", "--games", "2"]
    assert main([*words, "--tokens", "12", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("fedleak: ")
    assert message in error


def defended(model: str, text: str, defense: str, **more: Any) -> str:
    settings = {"attack": ["fc-full"], "layer": [1], "batch": 8, "tokens": 16, "games": 40}
    settings |= {"model": model, "text": text, "defense": defense}
    output = printed(**settings | more)
    assert f"its text is randomised ({defense}). Guarantee: " in output
    return output


def test_ldp_is_played_and_epsilon_decides(model: str, text: str) -> None:
    noise = "grr:epsilon=0.001,per=token"
    clear = defended(model, text, "grr:epsilon=400,per=token", games=10)
    hidden = defended(model, text, noise)
    assert auc_of(clear, "fc-full@1") == 1
    assert 0.2 < auc_of(hidden, "fc-full@1") < 0.8
    assert "400-local differential privacy for each token" in clear
    assert "a threshold on the scores that was fitted on other games" in clear
    few = [defended(model, text, noise, games=10) for _ in range(2)]
    assert few[0] == few[1]
    memoized = defended(model, text, f"{noise},memoize=true", games=10)
    assert "keeps its replacement" in memoized
    assert rates_of(memoized, "fc-full@1") != rates_of(few[0], "fc-full@1")


@pytest.mark.parametrize(
    ("defense", "message"),
    [
        ("gradient_noise:clip=1,sigma=1", "'grr', 'rappor', 'the' or 'dbitflip', such as"),
        ("grr:epsilon=1/2", "one defence of the client's tokens"),
        ("grr:epsilon=-1", "epsilon must be a number above 0, got -1"),
    ],
)
def test_a_defence_that_no_game_can_play_is_refused(
    model: str, text: str, defense: str, message: str
) -> None:
    with pytest.raises(SourceError, match=re.escape(message)):
        printed(model=model, text=text, defense=defense, batch=5, games=2)
