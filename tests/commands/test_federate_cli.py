from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightning_fedleak.cli import main
from lightning_fedleak.cli.studies.federation import Federation
from tests.helpers.commands import run_command
from tests.helpers.folders import TEXTS, save_tiny_causal_lm


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """A tiny model, and texts of five speakers."""
    folder = tmp_path_factory.mktemp("small")
    rows = ["who;text", *(f'p{i % 5};"{t} {i}"' for i, t in enumerate(TEXTS * 4))]
    (folder / "text.csv").write_text("\n".join(rows))
    return {
        "model": str(save_tiny_causal_lm(folder / "model")),
        "text": str(folder / "text.csv"),
        "column": "text",
        "clients": 2,
        "rounds": 2,
        "local_steps": 1,
        "optimizer": "sgd",
        "batch_size": 2,
        "length": 8,
        "members": 2,
    }


def federate(folder: Path, small: dict[str, object], **more: object) -> tuple[str, Path]:
    status, printed = run_command("federate", **small | {"out": folder} | more)
    assert status == 0
    [results] = folder.iterdir()
    return printed, results


def federation_of(settings: dict[str, object]) -> Federation:
    return Federation(**settings)  # type: ignore[arg-type]


def lines(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_each_round_is_shown_and_watching_changes_no_bit(
    tmp_path: Path, small: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    printed, watched = federate(tmp_path / "watched", small)
    assert "RoundObserver" not in capsys.readouterr().err
    first = printed[printed.index("\n round ") :].splitlines()[2].split()
    assert first == ["0", first[1], "-", "-", "-"]  # the loss before anything was trained
    assert float(first[1]) > 0
    display = [line.split() for line in printed.splitlines() if "words, F1" in line][:2]
    assert [row[0] for row in display] == ["1", "2"]
    assert all(float(value) > 0.3 for row in display for value in row[4:])
    records = {(x["round"], x["client"]) for x in lines(watched, "leakage.jsonl") if x["n"]}
    assert records >= {(r, c) for r in (1, 2) for c in (0, 1, "sum")}
    assert lines(watched, "run.jsonl")[-1]["how"] == "finished"
    assert (watched / "report.html").exists()


def test_a_gate_holds_updates_back(tmp_path: Path, small: dict, capsys) -> None:
    words = "leakage/worst/words"
    printed, folder = federate(tmp_path, small, gate=0.05, watch=words, rounds=1)
    assert "2 of 2 updates were withheld" in printed
    assert "withheld" not in capsys.readouterr().err  # the table has it
    assert "(" in next(line for line in printed.splitlines() if "words, F1" in line)
    gates = [x for x in lines(folder, "run.jsonl") if x["kind"] == "gate"]
    assert [x["did"] for x in gates] == ["withheld"] * 2
    untouched = federation_of(small).make_model().state_dict()
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(tensor, untouched[name])


def test_the_default_gate_watches_what_the_table_shows(tmp_path: Path, small: dict) -> None:
    """Of AdamW's steps behind a LoRA that is membership alone, and why is said."""
    settings = {"text": None, "column": None, "length": 16, "members": 16, "rounds": 1}
    settings |= {
        "optimizer": "adamw",
        "lora_r": 8,
        "local_steps": 4,
        "batch_size": 4,
        "gate": 0.75,
    }
    printed, folder = federate(tmp_path, small, **settings)
    assert (
        "It does not watch words, whose leakage is always unknown here: a round of 4 steps of AdamW"
        in printed
    )
    [start, *_] = lines(folder, "run.jsonl")
    assert [gate["metric"] for gate in start["gates"]] == ["leakage/worst/membership"]
    [row] = [line for line in printed.splitlines() if "membership, AUC  " in line]
    assert row.split("AUC")[1].split()[:2] == ["(0.859)", "(0.633)"]
    first, second = (line for line in lines(folder, "run.jsonl") if line["kind"] == "gate")
    assert (first["measured"], first["why"]) == (0.859375, "")
    assert second["measured"] is None
    assert second["why"].startswith("it reads 0.63, and 0.72 of known texts")  # its control
    assert "2 of 2 updates were withheld" in printed


DROWNED = "Noise will drown the updates: its norm is"


@pytest.mark.parametrize("trust", ["central", "local"])
def test_epsilon_is_shown_and_kept(tmp_path: Path, small: dict, trust: str) -> None:
    private = {"epsilon": 8.0, "trust": trust}
    printed, folder = federate(tmp_path, small, **private)
    start, *rest = printed[printed.index("\n round ") :].splitlines()[2:]
    display = [line for line in rest if line[:6].strip() in ("1", "2")]
    assert start.split() == ["0", start.split()[1], *"-----"]  # before any noise
    assert all(x.split()[-2].endswith("x") for x in display)
    assert DROWNED in printed[: printed.index("\n round ")]
    assert "clients a round would bring it to 1" in printed
    spent = [float(x.split()[-1]) for x in display]
    assert [x.split()[0] for x in display] == ["1", "2"]
    assert 0 < spent[0] < spent[1]
    ledgers = {p.name for p in folder.glob("*.ledger")}
    assert (
        ledgers == {"client_0.ledger", "client_1.ledger"}
        if trust != "central"
        else {"server.ledger"}
    )
    federation = federation_of(small | private)
    same = federation.account(folder / sorted(ledgers)[0])
    assert same.privacy.releases == 2
    assert same.privacy.epsilon == pytest.approx(spent[1], abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("--clients 500", "of 500 clients have no text"),
        ("--watch leakage/worst/words", "give --gate, such as 0.5 too"),
        ("--gate 0.3", "--watch leakage/worst/words watches words alone"),
        ("--gate 0.9 --members 4", "fewer than 16"),
        ("--gate 0.9 --local-steps 1", "a client trains on 4 texts in a round"),
        ("--gate 0.5 --watch leakage/words", "words: RoundGate"),
        ("--trust local", "give --epsilon too"),
        ("--epsilon 8 --delta 0.9", "below 0.25"),
        ("--targets c_attn", "also give its rank, such as --lora-r 8"),
        ("--lora-r 8 --targets none_such", "--targets none_such"),
        ("--length 4000", "--length must be an integer from 1 to"),
    ],
)
def test_errors_name_what_to_change(
    arguments: str, match: str, small: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", small["model"], "--text", small["text"], "--column", "text"]
    assert main(["federate", *words, "--out", str(tmp_path), *arguments.split()]) == 1
    assert match in capsys.readouterr().err.replace("\n", " ")
    assert not list(tmp_path.iterdir())
