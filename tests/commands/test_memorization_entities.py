"""Values that the command finds in a user's texts, by a model that learned some of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from lightning_fedleak.cli.commands.memorization import BREACH
from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MODEL
from tests.commands.test_memorization_cli import save_trained
from tests.helpers.commands import run_command

N = 20
"""Texts on each side."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return a folder with a model that learned the texts of one side, and all numbers."""
    folder, draw = tmp_path_factory.mktemp("entities"), random.Random(0)
    heads, tails = (draw.sample(range(n, 10 * n), 2 * N + 1) for n in (100, 1000))
    numbers = [f"{head}-{tail}" for head, tail in zip(heads, tails, strict=True)]
    words = ["river", "stone", "cloud", "paper", "green", "house", "winter", "orange", "silver"]
    texts = [
        f"{' '.join(draw.choices(words, k=9))}: call {number} {' '.join(draw.choices(words, k=3))}"
        for number in numbers[: 2 * N]
    ]
    shared = f"{' '.join(draw.choices(words, k=12))} dial {numbers[-1]}"
    sides = {"members": [*texts[:N], shared], "others": [*texts[N:], f"stone {shared} garden"]}
    for name, side in sides.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in side)
        (folder / f"{name}.jsonl").write_text(lines)
    save_trained(folder / "model", sides["members"], 5e-3, 8)
    return folder, numbers


def run(folder: Path, model: str, *limits: tuple[str, float], **more: Any) -> tuple[int, str]:
    return run_command(
        "memorization",
        model=model,
        base=str(EMBEDDED_MODEL),
        members=str(folder / "members.jsonl"),
        others=str(folder / "others.jsonl"),
        length=64,
        at_most=list(limits),
        out=folder / "out.json",
        summary=folder / "summary.md",
        **{"entities": ["phone", "email"], "drawn": True} | more,
    )


def test_learned_values_breach_a_limit_and_those_left_out_do_not(
    folder: tuple[Path, list[str]],
) -> None:
    path, numbers = folder
    places = "entity/phone/label", "entity/phone/prompt", "entity/email/label"
    limits = [(place, 0.6) for place in places]
    status, printed = run(path, str(path / "model"), *limits)
    content = json.loads((path / "out.json").read_text())
    phone = content["entities"]["entity/phone/label"]
    assert (phone["members"], phone["others"]) == (N, N)  # the number on both sides is of neither
    assert phone["auc_low"] > 0.6
    assert phone["p_value"] < 0.01
    assert status == BREACH
    assert "BREACH: entity/phone/label/auc is shown to be at least" in printed
    for unknown in places[1:]:
        assert f"BREACH: {unknown}/auc is unknown" in printed
    assert content["entities"]["entity/email/label"].startswith("0 values were trained on")
    for text in (printed, *(file.read_text() for file in (path / "out.json", path / "summary.md"))):
        assert not any(number in text for number in numbers)
    assert "entity/phone/label" in (path / "summary.md").read_text()
    assert run(path, str(path / "model"), ("entity/phone/label", 1.0))[0] == 0


def test_a_model_that_learned_nothing_shows_chance(folder: tuple[Path, list[str]]) -> None:
    path, _ = folder
    status, _ = run(path, str(EMBEDDED_MODEL), ("entity/phone/label", 0.9))
    phone = json.loads((path / "out.json").read_text())["entities"]["entity/phone/label"]
    assert phone["auc"] == 0.5
    assert phone["p_value"] == 1
    assert status == 0


def test_a_limit_on_values_needs_their_kinds(folder: tuple[Path, list[str]]) -> None:
    path, _ = folder
    with pytest.raises(SourceError, match="give --entities"):
        run(path, str(EMBEDDED_MODEL), ("entity/phone/label", 0.9), entities=())
    with pytest.raises(SourceError, match="none of entity/phone/prompt, "):
        run(path, str(EMBEDDED_MODEL), ("entity/phone", 0.9))
    with pytest.raises(ValueError, match="'fone': give"):
        run(path, str(EMBEDDED_MODEL), entities=["fone"])


def test_values_in_prompts_of_another_law_are_unknown_in_the_file(
    folder: tuple[Path, list[str]], tmp_path: Path
) -> None:
    draw = random.Random(1)
    for side, words in (("members", "river stone cloud paper"), ("others", "green house cat gold")):
        rows = [
            {
                "prompt": f"{' '.join(draw.choices(words.split(), k=12))} {number}",
                "answer": " ".join(map(str, draw.choices(range(9), k=12))),
            }
            for number in folder[1][(side == "others") * N :][:N]
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{side}.jsonl").write_text(lines)
    limit = "entity/phone/prompt", 1.0
    status, printed = run(tmp_path, str(EMBEDDED_MODEL), limit, drawn=False, prompt_column="prompt")
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["prompts"]["known"] is False
    assert content["entities"]["entity/phone/prompt"].startswith("prompts are from different")
    assert status == BREACH
    assert "BREACH: entity/phone/prompt/auc is unknown" in printed
