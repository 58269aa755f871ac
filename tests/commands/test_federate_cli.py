from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from lightning_fedleak.cli import main
from lightning_fedleak.cli.commands import options
from lightning_fedleak.cli.commands.federate import FederateCommand, RoundsTable, explain_rounds
from lightning_fedleak.cli.commands.options import FederateOptions
from lightning_fedleak.cli.finetuning.assets import SourceError
from lightning_fedleak.cli.studies.federation import FamilyLeakage, Round, Server
from lightning_fedleak.engine.channels.played import LEAST_MEMBERS
from lightning_fedleak.report.records import MEMBERSHIP, WORDS, Family
from tests.helpers.folders import TEXTS, save_tiny_causal_lm


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """A tiny model, and texts of five speakers."""
    folder = tmp_path_factory.mktemp("given")
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


def federate(folder: Path, given: dict[str, object], **more: object) -> tuple[str, Path]:
    console = Console(file=io.StringIO(), width=160)
    assert FederateCommand(**given | {"out": folder} | more).run(console) == 0  # type: ignore[arg-type]
    [made] = folder.iterdir()
    return console.file.getvalue(), made  # type: ignore[attr-defined]


def lines(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_each_round_is_shown_and_watching_changes_no_bit(
    tmp_path: Path, given: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    said, watched = federate(tmp_path / "watched", given, partition_by="who")
    assert "RoundObserver" not in capsys.readouterr().err
    first = said[said.index("\n round ") :].splitlines()[2].split()
    assert first == ["0", first[1], "-", "-", "-"]  # the loss before anything was trained
    assert float(first[1]) > 0
    shown = [line.split() for line in said.splitlines() if "words, F1" in line][:2]
    assert [row[0] for row in shown] == ["1", "2"]
    assert all(float(value) > 0.3 for row in shown for value in row[4:])
    found = {(x["round"], x["client"]) for x in lines(watched, "leakage.jsonl") if x["n"]}
    assert found >= {(r, c) for r in (1, 2) for c in (0, 1, "sum")}
    assert lines(watched, "run.jsonl")[-1]["how"] == "finished"
    assert (watched / "report.html").exists()
    said, plain = federate(tmp_path / "plain", given, partition_by="who", attack="none")
    assert "Nothing was measured" in said
    one, other = (load_file(f / "model.safetensors") for f in (watched, plain))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[n], other[n]) for n in one)


def test_each_client_asks_the_models_that_it_is_sent(tmp_path: Path, given: dict) -> None:
    """With rows left out: a line of its own for each client, once it has trained on some."""
    texts = tmp_path / "text.txt"
    words = [f"w{number}" for number in range(2000)]
    texts.write_text("\n".join(" ".join(words[n : n + 16]) for n in range(0, 1600, 16)))
    settings = {"text": str(texts), "column": None, "length": 24, "local_steps": 12}
    _, made = federate(tmp_path / "out", given | settings, leave_out=12)
    found = [line for line in lines(made, "leakage.jsonl") if line["stage"] == "released"]
    known = [line for line in found if line["attack"] == "combined" and not line["unknown"]]
    assert {str(line["client"]) for line in known} == {"0", "1"}
    for line in known:
        assert line["metrics"]["others"]["value"] == 12
        assert 0 <= line["metrics"]["auc"]["value"] <= 1
    with pytest.raises(SourceError, match="--leave-out 4000 is more than half"):
        federate(tmp_path / "many", given | settings, leave_out=4000)


def test_a_gate_holds_updates_back(tmp_path: Path, given: dict, capsys) -> None:
    words = "leakage/worst/words"
    said, folder = federate(tmp_path, given, gate=0.05, watch=words, rounds=1)
    assert "2 of 2 updates did not leave" in said
    assert "withheld" not in capsys.readouterr().err  # the table has it
    assert "(" in next(line for line in said.splitlines() if "words, F1" in line)
    gates = [x for x in lines(folder, "run.jsonl") if x["kind"] == "gate"]
    assert [x["did"] for x in gates] == ["withheld"] * 2
    untouched = FederateCommand(**given).federation().make_model().state_dict()
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(tensor, untouched[name])


def test_the_default_gate_watches_what_the_table_shows(tmp_path: Path, given: dict) -> None:
    """Of AdamW's steps behind a LoRA that is membership alone, and why is said."""
    own = {"text": None, "column": None, "length": 16, "members": 16, "rounds": 1}
    own |= {"optimizer": "adamw", "peft": "lora", "local_steps": 4, "batch_size": 4, "gate": 0.75}
    said, folder = federate(tmp_path, given, **own)
    assert (
        "It does not watch words, which are never known here: a round of 4 steps of AdamW" in said
    )
    [start, *_] = lines(folder, "run.jsonl")
    assert [gate["metric"] for gate in start["gates"]] == ["leakage/worst/membership"]
    [row] = [line for line in said.splitlines() if "membership, AUC  " in line]
    shown = row.split("AUC")[1].split()[:2]
    assert [cell.startswith("(") for cell in shown] == [
        float(cell.strip("()")) > 0.75 for cell in shown
    ]
    assert "1 of 2 updates did not leave" in said


@pytest.mark.slow
def test_what_is_read_without_an_error_does_not_leave(tmp_path: Path) -> None:
    """On board: the model and the messages, and the gate that is given no name."""
    said, _ = federate(
        tmp_path, {}, clients=2, rounds=1, peft="lora", optimizer="sgd", local_steps=4, gate=0.9
    )
    [row] = [line for line in said.splitlines() if "membership, AUC  " in line]
    assert row.split("AUC")[1].split()[:2] == ["(1.000)"] * 2
    assert "2 of 2 updates did not leave" in said


@pytest.mark.parametrize("trust", ["central", "local", "secure_aggregation"])
def test_epsilon_is_shown_and_kept(tmp_path: Path, given: dict, trust: str) -> None:
    private = {"noise_multiplier": 2.0, "trust": trust, "attack": "none"}
    said, folder = federate(tmp_path, given, **private)
    start, *shown = said[said.index("\n round ") :].splitlines()[2:5]
    assert start.split() == ["0", start.split()[1], *"-----"]  # before any noise
    assert all(x.split()[-2].endswith("x") for x in shown)
    assert "Noise drowned the updates: its norm is" in said
    spent = [float(x.split()[-1]) for x in shown]
    assert [x.split()[0] for x in shown] == ["1", "2"]
    assert 0 < spent[0] < spent[1]
    ledgers = {p.name for p in folder.glob("*.ledger")}
    assert (
        ledgers == {"client_0.ledger", "client_1.ledger"}
        if trust != "central"
        else {"server.ledger"}
    )
    federation = FederateCommand(**given, **private).federation()  # type: ignore[arg-type]
    same = federation.account(folder / sorted(ledgers)[0])
    assert same.privacy.releases == 2
    assert same.privacy.epsilon == pytest.approx(spent[1], abs=0.01)


def test_a_private_server_may_follow_a_quantile_and_move_by_adam(
    tmp_path: Path, given: dict
) -> None:
    private = {"noise_multiplier": 0.01, "attack": "none", "clip_quantile": 0.5}
    _, plain = federate(tmp_path / "plain", given, **private)
    shown, adam = federate(tmp_path / "adam", given, **private, server_optimizer="adam")
    drowned = "Noise will drown the updates: its norm is"
    assert drowned not in shown[: shown.index("\n round ")]
    states = [load_file(folder / "model.safetensors") for folder in (plain, adam)]
    assert any(not torch.equal(states[0][name], states[1][name]) for name in states[0])
    shown, _ = federate(tmp_path / "loud", given, noise_multiplier=2.0, attack="none", rounds=1)
    assert drowned in shown[: shown.index("\n round ")]
    assert "clients a round would bring it to 1" in shown
    correlated = {"sampling": "poisson", "per_round": 1, "rounds": 2, "noise_bands": 2}
    shown, _ = federate(tmp_path / "bands", given, **private | correlated | {"clip_quantile": None})
    assert "at most one of 2 rounds in a row" in shown.replace("\n", " ")


def test_what_a_table_says_of_many_clients_and_of_what_is_unknown() -> None:
    nan = float("nan")
    console = Console(file=io.StringIO(), width=160)
    with RoundsTable(console, 20, private=True) as table:
        values: dict[str | int, float] = {c: c / 20 for c in range(20)}
        read = [FamilyLeakage(WORDS, values | {"sum": nan})]
        table.add(Round(1, 2.5, read, frozenset({3}), epsilon=1.5, noise=52.73))
    header, row = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert header.split() == [
        "round",
        "loss",
        "leaks",
        "lowest",
        "median",
        "highest",
        "sum",
        "noise",
        "epsilon",
    ]
    assert row.split() == [
        "1",
        "2.500",
        "words,",
        "F1",
        "0.000",
        "0.475",
        "0.950",
        "unknown",
        "52.7x",
        "1.50",
    ]
    console = Console(file=io.StringIO(), width=160)
    with RoundsTable(console, 2, private=False) as table:
        table.add(Round(1, 2.5, [FamilyLeakage(WORDS, {0: nan, 1: nan})], frozenset({0})))
    row = console.file.getvalue().splitlines()[1]  # type: ignore[attr-defined]
    assert row.split()[-3:] == ["(unknown)", "unknown", "-"]
    member = FamilyLeakage(MEMBERSHIP, {0: nan, 1: 0.7, "sum": nan})
    told = explain_rounds([Round(1, 2.0, [member], absent={0: "gone"})], 2)
    assert (
        "from an update 0.70 in the median, 0.70 at most (unknown in 1 of 2); unknown from the sum"
        in told
    )
    assert "Client 0 counted for nothing in round 1: gone." in told
    assert "Guessing gives an AUC of .5; 1 is certainty." in told
    echoes = Family(name="echoes", headline="echo_rate")  # of somebody else's channel
    told = explain_rounds([Round(1, 2.0, [FamilyLeakage(echoes, {0: 0.25})])], 1)
    assert "echoes, ECHO RATE: from an update 0.25 in the median" in told


def test_errors_say_what_to_change(given: dict, tmp_path: Path, capsys) -> None:
    texts = ["--model", given["model"], "--text", given["text"], "--out", str(tmp_path)]
    for arguments, match in (
        (["--column", "text", "--partition-by", "whom"], "no column 'whom' (--partition-by)"),
        (
            ["--column", "text", "--partition-by", "who", "--clients", "9"],
            "more than the 5 speakers",
        ),
        (["--column", "text", "--partition", "speaker"], "name the column"),
        (["--column", "text", "--partition-by", "who", "--partition", "iid"], "--partition iid"),
        (["--column", "text", "--clients", "500"], "too few for --clients 500"),
        (["--gate", "0.5", "--attack", "none"], "--gate needs attacks"),
        (["--watch", "leakage/worst/words"], "give --gate too"),
        (["--gate", "0.3"], "--watch leakage/worst/words watches words alone"),
        (
            ["--column", "text", "--gate", "0.9", "--members", "4"],
            "fewer than 16",
        ),
        (
            ["--column", "text", "--gate", "0.9", "--local-steps", "1"],
            "a round has 4 texts of a client",
        ),
        (
            [
                "--column",
                "text",
                "--gate",
                ".9",
                "--watch",
                "leakage/gradient_membership/advantage",
            ],
            "attack's own threshold",
        ),
        (["--gate", "0.5", "--watch", "words"], "--watch words: a gate watches a name"),
        (["--column", "text", "--gate", "0.5", "--watch", "leakage/words"], "words: RoundGate"),
        (["--gate", "0.5", "--action", "harden"], "--trust local too"),
        (["--trust", "local"], "give --epsilon or --noise-multiplier too"),
        (["--epsilon", "8", "--sampling", "poisson"], "draw --per-round clients: give both"),
        (["--epsilon", "8", "--delta", "0.9"], "must be below 1 / 4"),
        (["--clip-quantile", ".5"], "give --epsilon or --noise-multiplier too"),
        (
            ["--clip-quantile", ".5", "--noise-multiplier", "1"],
            "(QuantileClip, --clip-quantile), and its count of 4 with noise 0.2",
        ),
        (["--noise-bands", "2"], "give --epsilon or --noise-multiplier too"),
        (
            ["--noise-bands", "2", "--epsilon", "8"],
            "(--noise-bands) correlates the noise",
        ),
        (["--server-lr", "1"], "give --server-optimizer too"),
        (["--lora-r", "4", "--column", "text"], "give --peft lora too"),
        (["--column", "text", "--peft", "lora", "--targets", "none_such"], "--targets none_such"),
        (["--column", "text", "--length", "4000"], "more than the"),
    ):
        assert main(["federate", *texts, *arguments]) == 1, arguments
        assert match in capsys.readouterr().err.replace("\n", " ")
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        main(["federate", "--optimizer", "adam"])
    assert "did you mean adamw" in capsys.readouterr().err
    for end in ("0", "1"):
        with pytest.raises(SystemExit):
            main(["federate", "--clip-quantile", end])
        assert "a number between 0 and 1" in capsys.readouterr().err


def test_an_interrupt_says_where_the_rounds_so_far_are(
    tmp_path: Path, given: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "close", interrupted)
    console = Console(file=io.StringIO(), width=160)
    command = FederateCommand(**given | {"out": tmp_path, "attack": "none"})
    with pytest.raises(KeyboardInterrupt):
        command.run(console)
    [made] = tmp_path.iterdir()
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"Interrupted after 0 of 2 rounds, whose logs are in {os.path.relpath(made)}" in said


def test_too_few_texts_for_a_gate_are_refused_before_libraries_load() -> None:
    assert options.LEAST_TEXTS == LEAST_MEMBERS
    settings = {"gate": 0.9, "local_steps": 3, "batch_size": 5}
    with pytest.raises(SourceError, match="by default, and a round has 15 texts of a client"):
        FederateOptions(**settings).check()
    FederateOptions(**settings | {"local_steps": 4}).check()
    FederateOptions(**settings, watch="leakage/worst/words").check()


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"trust": "local", "clip_quantile": 0.5}, "leave it or --trust local out"),
        ({"trust": "secure_aggregation", "clip_quantile": 0.5}, "a trusted server alone"),
        ({"per_round": 2.0}, "draw --per-round clients: give both, or neither"),
    ],
)
def test_privacy_that_cannot_hold_is_refused_before_libraries_load(wrong: dict, match: str) -> None:
    with pytest.raises(SourceError, match=match):
        FederateOptions(epsilon=8.0, **wrong).check()


@pytest.mark.parametrize(
    "right",
    [{"clip_quantile": 0.5}, {"trust": "local"}, {"sampling": "fixed", "per_round": 4.0}],
)
def test_privacy_that_can_hold_is_not_refused(right: dict) -> None:
    FederateOptions(epsilon=8.0, **right).check()
