"""The list of rows that a trained model gives away, written in a Trainer."""

import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_fedleak import DPSGD, DefendedStrategy, RiskGate
from lightning_fedleak.attacks import BagOfWords
from lightning_fedleak.attacks.memorization import Combined, Extraction
from lightning_fedleak.engine import Memorization
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.evaluation.metrics.record_list import RecordList
from lightning_fedleak.report import findings, page, read
from tests.engine.channels.test_memorization import fit, lines, monitor, rows, tiny

SETTINGS = Memorization(max_overhead=10, records=True)


def watching(folder: Path, settings: Memorization = SETTINGS, attacks: Any = None) -> Any:
    attacks = [Combined(), Extraction(tokens=4)] if attacks is None else attacks
    return monitor(folder, attacks, settings)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Return a fit of three epochs on data of which ten rows stand in it four times."""
    folder = tmp_path_factory.mktemp("records")
    data = rows()
    train, _ = leave_out(data, 140, seed=1)
    copied = [train.number_of(index) for index in range(10)]
    spots = [train.number_of(index) for index in range(20, 50)]
    for n, spot in enumerate(spots):  # the copies were rows that are trained on
        data[spot] = {name: value.clone() for name, value in data[copied[n % 10]].items()}
    train, _ = leave_out(data, 140, seed=1)
    watch = watching(folder)
    gate = RiskGate("leakage/records/at_least", at_most=5, action="warn")
    _, module = fit([watch, gate], data=train)
    return SimpleNamespace(
        folder=folder, train=train, module=module, latest=watch.latest, gate=gate,
        copies={*copied, *spots},
    )  # fmt: skip


def test_the_file_is_private_and_holds_numbers_of_rows_alone(run: SimpleNamespace) -> None:
    path = run.folder / "records.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    records = RecordList.load(path)
    numbers = [line.row for line in records.lines]
    trained = {run.train.number_of(index) for index in range(len(run.train))}
    assert {*numbers} == trained
    assert len(numbers) == len(trained)
    assert records.head["members"] == len(trained) - 40
    assert len(records.head["not_said"]) == 5
    assert (records.head["account"], records.head["pool"]) == (False, lines(run.folder)[-1]["pool"])
    first = run.train[0]["input_ids"].tolist()
    for file in run.folder.rglob("*"):
        text = file.read_text(errors="replace") if file.suffix in (".jsonl", ".csv") else ""
        assert ", ".join(map(str, first[:4])) not in text


def test_rows_that_were_trained_on_are_listed(run: SimpleNamespace) -> None:
    records = RecordList.load(run.folder / "records.jsonl")
    assert records.head["listed"] == sum(line.listed is True for line in records.lines)
    assert records.head["at_least"] > 100
    assert records.head["look"] == 3  # after each of three epochs
    assert records.head["rate"] == pytest.approx(0.05)
    assert records.head["alpha"] == pytest.approx(0.025)
    assert records.head["listed"] > 100
    scored = [line for line in records.lines if line.status == "scored"]
    assert [line.score for line in scored] == sorted((x.score for x in scored), reverse=True)
    assert run.latest["leakage/records/at_least"] == records.head["at_least"]
    assert run.latest["leakage/records/at_least_high"] == records.head["members"]
    assert run.latest["leakage/records/smallest_list"] == records.head["smallest_list"]
    logged = lines(run.folder, "records")
    assert [line["step"] for line in logged] == [33, 66, 99]
    assert logged[-1]["metrics"]["at_least"]["value"] == records.head["at_least"]
    assert "auc" not in logged[-1]["metrics"]
    assert run.gate.fired.value > 5
    assert not any("/records/" in name and "auc" in name for name in run.latest)


def test_copies_come_first_as_groups_without_a_p(run: SimpleNamespace) -> None:
    records = RecordList.load(run.folder / "records.jsonl")
    copies = records.lines[:40]
    assert {line.row for line in copies} == run.copies
    assert {line.status for line in copies} == {"repeated"}
    assert {line.repeats for line in copies} == {4}
    assert all(line.p is None and line.listed is None for line in copies)
    assert records.head["repeated"] == 40
    scores = {line.group or line.row + 1000: line.score for line in records.lines}  # once a text
    fifth = sorted(scores.values(), reverse=True)[len(scores) // 5]
    assert min(line.score for line in copies) > fifth  # by score alone all ten are in it


def test_the_report_says_the_counts(run: SimpleNamespace) -> None:
    text = page(findings(read([run.folder])))
    head = RecordList.load(run.folder / "records.jsonl").head
    assert f"at least {head['at_least']} of {head['members']} training rows" in text


def test_of_a_model_that_does_not_learn_nothing_is_listed_and_no_gate_acts(tmp_path: Path) -> None:
    gate = RiskGate("leakage/combined/auc", at_most=0.6)
    data = leave_out(rows(), 140, seed=1)[0]
    trainer, _ = fit([watching(tmp_path), gate], data=data, lr=0.0, max_epochs=1)
    assert (trainer.global_step, gate.fired) == (33, None)
    head = RecordList.load(tmp_path / "records.jsonl").head
    assert (head["listed"], head["at_least"]) == (0, 0)
    assert head["provable"] > 100


def test_a_run_that_ends_within_an_epoch_is_listed_at_its_end(tmp_path: Path) -> None:
    fit([watching(tmp_path)], data=leave_out(rows(), 140, seed=1)[0], max_steps=30)
    head = RecordList.load(tmp_path / "records.jsonl").head
    assert head["look"] == 1
    assert head["alpha"] == pytest.approx(0.05 / 4)


@pytest.mark.parametrize(
    ("attacks", "data", "words"),
    [([BagOfWords()], None, "add Combined"), (None, rows(), "add leave_out")],
)
def test_a_list_that_cannot_be_made_is_refused(tmp_path, attacks, data, words) -> None:
    with pytest.raises(ValueError, match=words):
        fit([watching(tmp_path, attacks=attacks)], data=data)


def test_beside_an_account_it_must_be_accepted(tmp_path: Path) -> None:
    strategy = DefendedStrategy("auto", [DPSGD(1.0, noise_multiplier=1.0, target_delta=1e-5)])
    with pytest.raises(ValueError, match="outside_epsilon=True"):
        fit([watching(tmp_path)], tiny(), strategy=strategy)
    assert not (tmp_path / "records.jsonl").exists()
