from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import BertConfig, BertForMaskedLM, BertModel, PreTrainedTokenizerFast

from lightning_fedleak.cli import main
from lightning_fedleak.cli.commands.game import GameCommand
from lightning_fedleak.cli.finetuning.assets import SourceError
from lightning_fedleak.cli.studies.models import find_model
from lightning_fedleak.evaluation.games import GameError
from tests.helpers.folders import TEXTS, save_tiny_causal_lm, tiny_tokenizer
from tests.helpers.models import own_rng


def many(n: int) -> list[str]:
    """Different texts that need no more tokens than the first eight of theirs to tell apart."""
    return [f"{i} {TEXTS[i % len(TEXTS)]}" for i in range(n)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_causal_lm(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "client.txt"
    path.write_text("\n".join(many(60)))
    return str(path)


def save_bert(folder: Path, *, head: bool) -> str:
    tokenizer = tiny_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    with own_rng(0):
        (BertForMaskedLM if head else BertModel)(config).save_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.save_pretrained(folder)
    return str(folder)


def played(command: GameCommand, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    assert command.run(console) == 0
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_plays_and_says_what_it_means(model: str, text: str, tmp_path: Path) -> None:
    out = tmp_path / "game.json"
    command = GameCommand(
        model=model, text=text, attack=("fc", "fc-full"), layer=(0, 2), batch=8, tokens=16,
        games=30, json=out,
    )  # fmt: skip
    printed = played(command)
    content = json.loads(out.read_text())
    assert content["pool"]["sentences"] == 60
    by_name = {r["attack"]: r for r in content["results"]}
    assert list(by_name) == ["fc@0", "fc-full@0", "fc@2", "fc-full@2"]
    for name, result in by_name.items():
        assert name in printed
        assert result["games"] == len(result["bits"]) == len(result["scores"]) == 30
        assert result["protocol"] == "game"
        right = sum(b == g for b, g in zip(result["bits"], result["guesses"], strict=True))
        assert result["right"] == right
    assert by_name["fc-full@2"]["rates"]["accuracy"]["value"] == 1
    assert by_name["fc@2"]["rates_without_collisions"]["auc"]["value"] == 1
    collisions = by_name["fc@0"]["collisions"]
    assert collisions > 0
    assert f"Layer 0: in {collisions} of 30 games" in printed
    accuracy = by_name["fc@0"]["rates"]["accuracy"]
    shown = (f"{accuracy[end]:.3f}".removeprefix("0") for end in ("value", "low", "high"))
    assert "{} [{}, {}]".format(*shown) in printed
    assert "fair bit, random target" in printed
    assert "dishonest" in printed
    for line in Path(text).read_text().splitlines():
        assert line not in printed
        assert line not in out.read_text()


def test_every_adversary_plays(model: str, text: str) -> None:
    command = GameCommand(
        model=model, text=text, attack=("fc", "attention", "trained"), layer=(1,), batch=6,
        tokens=12, games=4,
    )  # fmt: skip
    printed = played(command)
    assert all(f"{name}@1" in printed for name in command.attack)
    # A quarter of the text is the server's.
    assert "out of 45 different sentences" in printed
    fewer = replace(command, attack=("fc",), pool=20)
    assert "out of 20 different sentences" in played(fewer)


def test_a_server_without_layers_of_its_own_reads_a_lora(model: str, text: str) -> None:
    settings = {"model": model, "text": text, "batch": 4, "tokens": 12, "games": 8}
    printed = played(GameCommand(attack=("gradient", "subspace"), lora_r=4, **settings))
    assert "A client trains a LoRA of rank 4 on" in printed
    assert "An honest but curious server" in printed
    assert "dishonest" not in printed
    assert "closed form" not in printed
    row = next(line for line in printed.splitlines() if line.startswith("│ gradient"))
    assert " 1 [" in row, "B is moved: A has a gradient"
    both = played(GameCommand(attack=("gradient", "fc"), **settings))
    assert "dishonest" in both
    assert "fc@1" in both


def test_public_text_is_a_file_or_sampled(model: str, text: str, tmp_path: Path) -> None:
    owned = tmp_path / "owned.txt"
    owned.write_text("\n".join(many(80)[60:]))
    settings = {
        "model": model, "text": text, "attack": ("attention",), "layer": (1,), "batch": 6,
        "tokens": 12, "games": 4,
    }  # fmt: skip
    for public in (str(owned), "sampled"):
        assert "out of 60 different sentences" in played(GameCommand(public=public, **settings))
    # What the server owns is no target.
    owned.write_text("\n".join(many(80)[50:]))
    assert "out of 50 different" in played(GameCommand(public=str(owned), **settings))


def test_the_middle_layer_by_default_and_other_protocols(model: str, text: str) -> None:
    settings = {"model": model, "text": text, "attack": ("fc",), "batch": 6, "tokens": 16}
    assert "fc@1" in played(GameCommand(games=2, gradients="autograd", **settings))
    printed = played(GameCommand(games=4, protocol="authors", **settings))
    assert "the authors' code" in printed
    assert printed.count(" 1 [") == 3
    printed = played(GameCommand(games=4, relation="add_remove", **settings))
    assert "the game that adds or removes" in printed
    printed = played(GameCommand(games=4, position=3, precision="bf16", bos=0, **settings))
    assert "(bf16)" in printed


@pytest.mark.parametrize("head", [True, False])
def test_encoders_are_played_with_and_without_a_head(head: bool, text: str, tmp_path: Path) -> None:
    folder = save_bert(tmp_path, head=head)
    assert find_model(folder, __import__("torch").float32).kind == (
        "masked" if head else "classifier"
    )
    command = GameCommand(model=folder, text=text, attack=("fc",), batch=5, tokens=12, games=2)
    assert "fc@1" in played(command)


def test_an_encoder_is_not_asked_for_its_gradient(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["game", "--model", save_bert(tmp_path, head=True), "--text", text, "--batch", "5"]
    assert main([*given, "--tokens", "12", "--games", "2", "--attack", "gradient"]) == 1
    assert "play FCMembership (fedleak game --attack fc)" in capsys.readouterr().err


def test_tables_are_read_by_the_columns_that_are_named(model: str, tmp_path: Path) -> None:
    owned, private, found = (tmp_path / name for name in ("owned.tsv", "private.csv", "found.json"))
    texts = many(60)
    private.write_text("id,review\n" + "".join(f'{i},"{t}"\n' for i, t in enumerate(texts[:40])))
    owned.write_text("id\tbody\n" + "".join(f"{i}\t{t}\n" for i, t in enumerate(texts[40:])))
    given = ["game", "--model", model, "--batch", "4", "--games", "2", "--tokens", "12"]
    given += ["--attack", "trained", "--text", str(private), "--column", "review"]
    given += ["--public", str(owned), "--public-column", "body", "--json", str(found)]
    assert main(given) == 0
    content = json.loads(found.read_text())
    assert content["column"] == "review"
    assert content["pool"]["sentences"] + content["pool"]["duplicates"] <= 40


def test_errors_are_one_line(
    model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    few = tmp_path / "few.txt"
    few.write_text("\n".join(many(10)))
    some = tmp_path / "some.txt"
    some.write_text("\n".join(many(20)))
    short = tmp_path / "short.txt"
    short.write_text("Thanks.")
    given = ["game", "--model", model, "--batch", "6", "--games", "2", "--tokens", "12"]
    fc = [*given, "--attack", "fc"]
    for arguments, message in (
        ([*fc, "--text", str(empty)], "holds no text"),
        ([*fc, "--text", str(tmp_path / "none.txt")], "there is no file"),
        ([*fc, "--text", str(few), "--batch", "10"], "more than 10 distinct sentences"),
        ([*fc, "--text", text, "--layer", "3"], "layer=3 is out of range"),
        ([*fc, "--text", text, "--tokens", "65"], "longer than the model's context of 64"),
        ([*fc, "--text", text, "--position", "30"], "--position 30"),
        ([*fc, "--text", text, "--model", str(tmp_path)], "holds no model"),
        ([*fc, "--text", text, "--protocol", "authors", "--tokens", "8"], "at least 11"),
        ([*fc, "--text", text, "--json", str(tmp_path)], "no file in an existing folder"),
        ([*given, "--attack", "attention", "--text", str(some)], "public texts are too few"),
        ([*given, "--attack", "attention", "--text", str(short)], "too few to give"),
        (
            [*given, "--attack", "attention", "--text", text, "--public", str(short)],
            "cannot whiten",
        ),
        ([*given, "--text", text, "--targets", "c_attn"], "give its rank too, --lora-r 8"),
    ):
        assert main(arguments) == 1, arguments
        error = capsys.readouterr().err
        assert message in error, (arguments, error)
        assert error.startswith("fedleak: ")
        assert "Traceback" not in error


def test_refuses_arguments_that_mean_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--position", "first"], "'first' is not 'random', 'last' or a whole number"),
        (["--layer", "-1"], "'-1' is not a whole number of at least 0"),
        (["--attack", "magic"], "invalid choice: 'magic'"),
        (["--games", "0"], "'0' is not a whole number of at least 1"),
    ):
        with pytest.raises(SystemExit) as left:
            main(["game", *arguments])
        assert left.value.code == 2
        assert message in capsys.readouterr().err


def defended(model: str, text: str, out: Path, defense: str, **more: Any) -> dict[str, Any]:
    settings = {"attack": ("fc-full",), "layer": (1,), "batch": 8, "tokens": 16, "games": 40}
    command = GameCommand(model=model, text=text, json=out, defense=defense, **settings | more)
    printed = played(command)
    content: dict[str, Any] = json.loads(out.read_text())
    assert content["defense"] == defense
    assert f"its text is randomised ({defense}). Guarantee: {content['guarantee']}." in printed
    return content | {"printed": printed}


def test_ldp_is_played_and_epsilon_decides(model: str, text: str, tmp_path: Path) -> None:
    out = tmp_path / "game.json"
    weak = defended(model, text, out, "grr:epsilon=400,per=token")
    strong = defended(model, text, out, "grr:epsilon=0.001,per=token")
    (kept,), (lost,) = weak["results"], strong["results"]
    assert kept["bits"] == lost["bits"]
    assert kept["rates"]["auc"]["value"] == 1
    assert 0.2 < lost["rates"]["auc"]["value"] < 0.8
    assert "400-local differential privacy for each token" in weak["guarantee"]
    assert "a threshold on the scores that was fitted on other games" in weak["printed"]
    again = defended(model, text, out, "grr:epsilon=0.001,per=token")
    assert again["results"][0]["scores"] == lost["scores"]
    other = defended(model, text, out, "grr:epsilon=0.001,per=token", seed=1)
    assert other["results"][0]["scores"] != lost["scores"]


@pytest.mark.parametrize("mechanism", ["grr", "rappor", "the", "dbitflip"])
def test_every_mechanism_plays_both_protocols(
    model: str, text: str, tmp_path: Path, mechanism: str
) -> None:
    defense = f"{mechanism}:epsilon=60,per=token,keep_special=false"
    for protocol in ("game", "authors"):
        found = defended(
            model, text, tmp_path / "game.json", defense, protocol=protocol, games=6
        )  # fmt: skip
        (result,) = found["results"]
        assert result["protocol"] == protocol
        assert result["rates"]["auc"]["value"] > 0.7


def test_each_game_draws_new_noise_unless_it_is_memoised(
    model: str, text: str, tmp_path: Path
) -> None:
    given = {"targets_per_batch": 1, "games": 30}
    fresh, kept = (
        defended(model, text, tmp_path / "g.json", f"grr:epsilon=8,per=token{more}", **given)
        for more in ("", ",memoize=true")
    )
    assert "again in every epoch" in fresh["guarantee"]
    assert "keeps its replacement" in kept["guarantee"]
    assert fresh["results"][0]["scores"] != kept["results"][0]["scores"]


@pytest.mark.parametrize(
    ("defense", "message"),
    [
        ("gradient_noise:clip=1,sigma=1", "one of grr, rappor, the and dbitflip, as grr:epsilon=5"),
        ("grr:epsilon=1/2", "one defence of the client's tokens"),
        ("none", "one defence of the client's tokens"),
        ("gr:epsilon=1", "no defence 'gr' (did you mean 'grr'?)"),
        ("grr", "needs epsilon: write token_ldp:mechanism=grr,epsilon=VALUE"),
        ("grr:epsilon=-1", "epsilon must be a number above 0, got -1"),
        ("grr:epsilon=1,special_ids=3", "the game itself sets 'special_ids' and 'kind'"),
    ],
)
def test_a_defence_that_no_game_can_play_is_refused(
    model: str, text: str, defense: str, message: str
) -> None:
    with pytest.raises(SourceError, match=re.escape(message)):
        played(GameCommand(model=model, text=text, defense=defense, batch=5, games=2))


def test_pooled_forwards_and_a_defence_exclude_each_other(model: str, text: str) -> None:
    with pytest.raises(GameError, match="needs forwards='fresh'"):
        played(
            GameCommand(
                model=model, text=text, attack=("fc",), defense="grr:epsilon=5", forwards="pooled",
                batch=5, games=2, layer=(1,),
            )
        )  # fmt: skip


def test_a_model_without_blocks_is_said(
    monkeypatch: pytest.MonkeyPatch, text: str, model: str
) -> None:
    from lightning_fedleak.cli.commands import game as game_cli

    def bare(name, dtype):
        return replace(find_model(name, dtype), blocks=(), block_names=())

    monkeypatch.setattr(game_cli, "find_model", bare)
    with pytest.raises(GameError, match="no transformer blocks"):
        GameCommand(model=model, text=text, attack=("fc",), batch=5, games=2, layer=(1,)).run(
            Console(file=io.StringIO())
        )


def test_defaults_run_on_what_is_on_board() -> None:
    printed = played(GameCommand(games=6, batch=10, tokens=16))
    assert "the embedded model" in printed
    assert all(f"{name}@2" in printed for name in ("fc", "fc-full", "attention"))
