"""``fedleak invert``: what it prints, writes and refuses."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import BertForMaskedLM

from lightning_fedleak.attacks.texts.prefix.inversion import PrefixInversion
from lightning_fedleak.cli import main
from lightning_fedleak.cli.finetuning.assets import SourceError
from lightning_fedleak.cli.printing import format_share
from tests.helpers.commands import printed_by
from tests.helpers.folders import TEXTS, save_tiny_bert


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_bert(tmp_path_factory.mktemp("encoder"), BertForMaskedLM, mask="<|mask|>")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "client.txt"
    path.write_text("\n".join(TEXTS))
    return str(path)


printed = partial(printed_by, "invert", width=100)


def cells_in(folder: Path) -> list[dict[str, Any]]:
    content = json.loads((folder / "inversion.json").read_text())
    return content["cells"]


def test_a_causal_model_is_read_exactly(model: str, text: str, tmp_path: Path) -> None:
    outputs = tmp_path / "new" / "folder"
    settings = {"noise": [0.0, 4.0], "lengths": [8, 12], "texts": 3, "layer": [1], "out": outputs}
    output = printed(model=model, text=text, **settings)
    cells = cells_in(outputs)
    assert {(c["attack"], c["layer"]) for c in cells} == {("prefix", 1)}
    assert [(c["length"], c["sigma"]) for c in cells] == [(8, 0), (8, 4), (12, 0), (12, 4)]
    assert not [c for c in cells if c["problem"]]
    for cell in cells:
        accuracy = cell["rates"]["token_accuracy"]["value"]
        assert (accuracy == 1) == (cell["sigma"] == 0)
        assert f" {format_share(accuracy)} [" in output
        assert cell["budget_seconds"] == 60.0
    assert "3/3" in output
    assert "budget: 60 s" in output
    assert "next-token accuracy of the whole model" in " ".join(output.split())
    private = " ".join(TEXTS).split()
    assert not [w for w in private if len(w) > 6 and w in (outputs / "inversion.json").read_text()]


def test_an_encoder_is_read_by_sweeps(encoder: str, text: str, tmp_path: Path) -> None:
    output = printed(
        model=encoder, text=text, noise=[0.0], lengths=[10], texts=2, steps=100, out=tmp_path,
        layer=[1, 2], budget_seconds=float("inf"),
    )  # fmt: skip
    first, second = cells_in(tmp_path)
    assert [(c["attack"], c["layer"]) for c in (first, second)] == [("sweeps", 1), ("sweeps", 2)]
    assert first["rates"]["token_accuracy"]["value"] > 0.9
    assert first["utility"] is first["problem"] is None
    assert first["budget_seconds"] is None
    assert "unknown for encoders" in " ".join(output.split())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layer": [3]}, r"--layer 3: .*0 to 2"),
    ({"lengths": [65]}, r"--lengths 65 .* context of 64"),
    ({"lengths": [1]}, r"--lengths must be .*at least 2, got 1"),
    ({"lengths": [60], "texts": 12}, r"--lengths 60: 12 texts make only"),
]


@pytest.mark.parametrize(("settings", "match"), REFUSED)
def test_what_cannot_be_done_is_refused_at_once(
    model: str, text: str, tmp_path: Path, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(SourceError, match=match):
        printed(model=model, text=text, out=tmp_path, **settings)
    assert not list(tmp_path.iterdir())


def test_errors_of_attacks_and_noise(
    encoder: str, model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SourceError, match="give sweeps or descent"):
        printed(model=encoder, text=text, attack=["prefix"], out=tmp_path / "o")
    words = ["invert", "--model", model, "--text", text, "--out", str(tmp_path / "o")]
    with pytest.raises(SystemExit):
        main([*words, "--noise", "-1"])
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
    settings = {"noise": [0.0, 0.01], "lengths": [8], "texts": 2, "layer": [1], "out": tmp_path}
    output = printed(model=model, text=text, **settings)
    assert "Failed: prefix, split 1, 8 tokens, noise 0: RuntimeError: no luck" in output
    first, second = cells_in(tmp_path)
    assert first["problem"] == "RuntimeError: no luck"
    assert second["problem"] is None
    monkeypatch.setattr(PrefixInversion, "reconstruct", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in printed(status=1, model=model, text=text, **settings)
