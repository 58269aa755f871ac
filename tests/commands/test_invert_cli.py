"""``fedleak invert``: what it prints and writes, what it refuses, and what an interrupt leaves."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import BertConfig, BertForMaskedLM

from lightning_fedleak.attacks.texts.prefix.inversion import PrefixInversion
from lightning_fedleak.cli import main
from lightning_fedleak.cli.commands import invert as invert_cli
from lightning_fedleak.cli.commands.invert import InvertCommand, explain_activations
from lightning_fedleak.cli.finetuning.assets import SourceError
from lightning_fedleak.cli.studies.invert import ActivationCell, Utility
from lightning_fedleak.evaluation.metrics.rates import Rate
from tests.helpers.folders import TEXTS, save_tiny_causal_lm, tiny_tokenizer
from tests.helpers.models import own_rng


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_causal_lm(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    with own_rng(0):
        BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "client.txt"
    path.write_text("\n".join(TEXTS))
    return str(path)


def ran(command: InvertCommand, status: int = 0) -> str:
    console = Console(file=io.StringIO(), width=100)
    assert command.run(console) == status
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_causal_model_is_read_exactly(model: str, text: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    printed = ran(
        InvertCommand(
            model=model, text=text, noise=(0.0, 4.0), lengths=(8, 12), texts=3, out=out, layer=(1,)
        )
    )
    content = json.loads((out / "inversion.json").read_text())
    assert content["from"] == "activations"
    cells = [ActivationCell.from_dict(c) for c in content["cells"]]
    assert {(c.attack, c.layer) for c in cells} == {("prefix", 1)}
    assert [(c.length, c.sigma) for c in cells] == [(8, 0.0), (8, 4.0), (12, 0.0), (12, 4.0)]
    assert not [c for c in cells if c.problem]
    for cell in cells:
        assert (cell.rates["token_accuracy"].value == 1) == (cell.sigma == 0)
        value = f"{cell.rates['token_accuracy'].value:.3f}".removeprefix("0")
        shown = {"1.000": "1", ".000": "0"}.get(value, value)
        assert f" {shown} [" in printed
    assert "3/3" in printed
    assert "next-token accuracy of the whole model" in " ".join(printed.split())
    for name in ("noise.png", "length.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert name in printed.replace("\n", "")
    private = " ".join(TEXTS).split()
    assert not [w for w in private if len(w) > 6 and w in (out / "inversion.json").read_text()]


def test_an_encoder_is_read_by_sweeps(encoder: str, text: str, tmp_path: Path) -> None:
    printed = ran(
        InvertCommand(
            model=encoder, text=text, noise=(0.0,), lengths=(10,), texts=2, steps=100,
            out=tmp_path, layer=(1, 2),
        )
    )  # fmt: skip
    cells = [
        ActivationCell.from_dict(c)
        for c in json.loads((tmp_path / "inversion.json").read_text())["cells"]
    ]
    assert [(c.attack, c.layer) for c in cells] == [("sweeps", 1), ("sweeps", 2)]
    assert cells[0].rates["token_accuracy"].value > 0.9
    assert cells[0].utility is not None
    assert cells[0].utility.task == "masked-token accuracy"
    assert "masked-token accuracy" in printed
    assert not (tmp_path / "noise.png").exists()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layer": (3,)}, r"--layer 3: .*0 to 2"),
    ({"lengths": (65,)}, r"--lengths 65 .* context of 64"),
    ({"lengths": (1,)}, r"--lengths 1: give at least 2"),
    ({"lengths": (60,), "texts": 12}, r"--lengths 60: 12 texts make only"),
    ({"bos": 384}, r"--bos 384 is no token id"),
]


@pytest.mark.parametrize(("settings", "said"), REFUSED)
def test_what_cannot_be_done_is_refused_at_once(
    model: str, text: str, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(SourceError, match=said):
        ran(InvertCommand(model=model, text=text, out=tmp_path, **settings))
    assert not list(tmp_path.iterdir())


def test_prefix_on_an_encoder_no_text_and_no_folder(
    encoder: str, model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SourceError, match="give sweeps or descent"):
        ran(InvertCommand(model=encoder, text=text, attack=("prefix",), out=tmp_path / "o"))
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    arguments = ["invert", "--model", model, "--out", str(tmp_path / "o")]
    assert main([*arguments, "--text", str(empty)]) == 1
    assert "holds no text" in capsys.readouterr().err
    short = tmp_path / "short.txt"
    short.write_text("a\n")
    assert main([*arguments, "--text", text, "--public", str(short)]) == 1
    assert "--public" in capsys.readouterr().err
    assert main(["invert", "--model", model, "--text", text, "--out", str(empty)]) == 1
    assert "--out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*arguments, "--noise", "-1"])
    assert "'-1' is not a number of at least 0" in capsys.readouterr().err


def test_one_failed_cell_does_not_lose_the_rest(
    model: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = PrefixInversion.reconstruct
    calls: list[int] = []

    def fails_once(self: PrefixInversion, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no luck")
        return plain(self, *args)

    monkeypatch.setattr(PrefixInversion, "reconstruct", fails_once)
    command = InvertCommand(
        model=model, text=text, noise=(0.0, 0.01), lengths=(8,), texts=2, out=tmp_path, layer=(1,)
    )
    printed = ran(command)
    assert "Failed: prefix, split 1, 8 tokens, noise 0: RuntimeError: no luck" in printed
    first, second = json.loads((tmp_path / "inversion.json").read_text())["cells"]
    assert first["problem"] == "RuntimeError: no luck"
    assert second["problem"] is None
    monkeypatch.setattr(PrefixInversion, "reconstruct", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in ran(command, status=1)


def test_an_interrupt_writes_what_is_done(
    model: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = invert_cli.invert.run_cells

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        yield next(plain(*args, **kwargs))
        raise KeyboardInterrupt

    monkeypatch.setattr(invert_cli.invert, "run_cells", interrupted)
    printed = ran(
        InvertCommand(
            model=model, text=text, noise=(0.0, 1.0), lengths=(8,), texts=2, out=tmp_path,
            layer=(1,),
        ),
        status=130,
    )  # fmt: skip
    assert "Interrupted after 1 cells" in printed
    assert len(json.loads((tmp_path / "inversion.json").read_text())["cells"]) == 1


def test_the_budget_is_told_in_the_table_and_in_the_results(
    model: str, text: str, tmp_path: Path
) -> None:
    command = InvertCommand(
        model=model, text=text, noise=(0.0,), lengths=(8,), texts=2, out=tmp_path, layer=(1,)
    )
    assert "budget: 60 s" in ran(command)
    content = json.loads((tmp_path / "inversion.json").read_text())
    assert [c["budget_seconds"] for c in content["cells"]] == [60.0]
    line = ActivationCell.from_dict(content["cells"][0])
    assert "budget: 0.5 s for the texts of a line" in shown(replace(line, budget_seconds=0.5))
    unbounded = replace(command, budget_seconds=float("inf"))
    assert "budget: none" in ran(unbounded)
    content = json.loads((tmp_path / "inversion.json").read_text())
    assert [c["budget_seconds"] for c in content["cells"]] == [None]
    cut = explain_activations([replace(line, budget_seconds=0.5, finished=False)])
    assert "*: cut off by the budget of 0.5 s" in cut


def shown(*cells: ActivationCell) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(invert_cli.activation_table(cells))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_says_what_is_read_where_half_of_the_task_is_left() -> None:
    cells = [
        ActivationCell(
            "prefix", 2, 6, 32, sigma, True, 4, Utility("next-token accuracy", task),
            {name: Rate(read, 0.0, 1.0) for name in ("token_accuracy", "rouge_l")},
        )
        for sigma, task, read in ((0.0, 0.4, 1.0), (0.5, 0.2, 0.75), (1.0, 0.19, 0.25))
    ]  # fmt: skip
    said = explain_activations(cells)
    assert "at noise 0.5" in said
    assert "prefix .750." in said
    cells[1] = replace(cells[1], finished=False)
    assert "prefix* .750." in explain_activations(cells)
    assert "half" not in explain_activations([replace(c, sigma=c.sigma + 1) for c in cells])
