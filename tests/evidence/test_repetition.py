"""A training that is repeated gives the same to the bit, or it is said which value differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedleak import BagOfWords
from lightning_fedleak.engine.record import ROW_KEY
from lightning_fedleak.evidence import CONTRADICTED, HOLDS, OPEN, verify_run
from lightning_fedleak.report.records import RECORD, RESULTS, hash_line
from lightning_fedleak.trainers import Watch
from tests.evidence.test_verification import chained_again, lines_of
from tests.helpers.models import tiny_gpt2

FILES = RESULTS, RECORD  # in this order: the last line of a record closes the results
IDS = torch.randint(3, 60, (12, 6), generator=torch.Generator().manual_seed(1))


def train(folder, key_of=None, *, start=0.0, order=0, rate=0.1, every_n_steps=2, extra=0.0) -> Path:
    """Train two epochs of three batches, watched; ``extra`` is added to the loss of one batch."""
    folder.mkdir()
    if key_of is not None:
        (folder / ROW_KEY).write_bytes((key_of / ROW_KEY).read_bytes())
        (folder / ROW_KEY).chmod(0o600)
    torch.manual_seed(0)
    model = tiny_gpt2(tied=False)
    model.lm_head.weight.data[0, 0] += start
    optimizer = torch.optim.SGD(model.parameters(), rate)
    rows = DataLoader(
        TensorDataset(IDS), 4, shuffle=True, generator=torch.Generator().manual_seed(order)
    )
    watch = Watch(
        model, optimizer, [BagOfWords()], loader=rows, folder=folder, every_n_steps=every_n_steps
    )
    with watch:
        for epoch in range(2):
            for number, [ids] in enumerate(rows):
                with watch.step({"input_ids": ids, "labels": ids}):
                    loss = model(input_ids=ids, labels=ids).loss
                    if number == 1 == epoch:
                        loss = loss * (1 + extra)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    watch.utility["train_loss"] = float(loss.detach())
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "first")


def change(folder: Path, name: str, number: int, edit: Any) -> None:
    """Edit one line of a log as who knows the chain does, and close the run again."""
    logs = {file: [json.loads(line) for line in lines_of(folder / file)] for file in FILES}
    edit(logs[name][number])
    for file in FILES:
        lines = chained_again([json.dumps(one).encode() for one in logs[file]])
        (folder / file).write_bytes(b"\n".join(lines) + b"\n")
        logs[RECORD][-1]["results_head"] = hash_line(lines[-1])


def read_lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines_of(folder / name)]


def compared(folder: Path, again: Path) -> str:
    """Return what a check compared, which must hold."""
    check = verify_run(folder, repetition=again)
    assert check.status == HOLDS, check
    return next(one for one in check.checked if one.startswith("repetition"))


def test_the_same_training_again_holds(run: Path, tmp_path: Path) -> None:
    results, record = read_lines(run, RESULTS), read_lines(run, RECORD)
    values = sum(len(line["metrics"]) for line in results)
    losses = sum(len(line.get("utility") or {}) for line in record)
    assert losses >= len(results) - 1 > 0
    tensors, total = len(record[-1]["weights"]), values + losses
    text = f"repetition: {tensors} hashes of weights, {total} values of losses and leakage"
    assert compared(run, train(tmp_path / "again", run)) == text


def test_looks_at_other_steps_leave_weights_and_losses(run: Path, tmp_path: Path) -> None:
    """Training is the same however often it is looked at; both look at the first step."""
    metrics = len(read_lines(run, RESULTS)[0]["metrics"])
    again = train(tmp_path / "again", run, every_n_steps=3)
    assert int(compared(run, again).split(", ")[1].split()[0]) >= metrics
    [note] = verify_run(run, repetition=again).notes
    assert note == "leakage from step 2 on is not compared: only one run looked there"


def test_another_training_is_a_contradiction(run: Path, tmp_path: Path) -> None:
    check = verify_run(run, repetition=train(tmp_path / "again", run, extra=1e-3))
    assert check.status == CONTRADICTED
    [text] = check.contradictions
    assert "look, train_loss is not what" in text
    differing = int(text.split("; ")[1].split()[0])
    assert differing > len(read_lines(run, RECORD)[-1]["weights"]) // 2


@pytest.mark.parametrize("name", ["metrics", "utility"])
def test_what_one_log_alone_has_is_open(tmp_path: Path, name: str) -> None:
    """An invented name does not end the comparison of the others."""
    first = train(tmp_path / "first")
    file = RESULTS if name == "metrics" else RECORD
    number = next(
        n for n, one in enumerate(read_lines(first, file)) if one.get(name) and "step" in one
    )
    value = {"value": 0.0, "low": None, "high": None} if name == "metrics" else 0.0
    change(first, file, number, lambda line: line[name].update(invented_loss=value))
    verdict = verify_run(first, repetition=train(tmp_path / "again", first))
    assert verdict.status == OPEN
    assert "only one run logged" in verdict.open[0]
    assert "invented_loss; " in verdict.open[0]


@pytest.mark.parametrize(("seconds", "is_timed"), [(None, False), (5.0, True)])
def test_results_are_not_compared_if_a_budget_of_seconds_is_set(run, tmp_path, seconds, is_timed):
    first, again = shutil.copytree(run, tmp_path / "first"), train(tmp_path / "again", run)
    for folder in (first, again):
        change(
            folder, RECORD, 0, lambda line: line["attacks"][0].update(config={"s_seconds": seconds})
        )
        for number in range(len(read_lines(folder, RESULTS))):
            change(folder, RESULTS, number, lambda line: line.update(config={"s_seconds": seconds}))
    notes = verify_run(first, repetition=again).notes
    assert any("because of a budget of seconds" in note for note in notes) == is_timed


def test_other_settings_of_attacks_leave_their_results(run: Path, tmp_path: Path) -> None:
    again = train(tmp_path / "again", run)
    change(again, RECORD, 0, lambda line: line["attacks"][0].update(config={"other": 1}))
    check = verify_run(run, repetition=again)
    assert check.status == HOLDS
    assert "leakage is not compared" in check.notes[0]


@pytest.mark.parametrize(
    ("file", "edit", "named"),
    [
        (
            RESULTS,
            lambda x: x["metrics"]["f1"].update(value=0.1),
            "bag_of_words, f1 is not what",
        ),
        (RECORD, lambda line: line["utility"].update(train_loss=0.1), "train_loss is not what"),
    ],
)
def test_an_invented_number_is_found_although_all_hashes_fit(tmp_path, file, edit, named) -> None:
    first, field = train(tmp_path / "first"), "metrics" if file == RESULTS else "utility"
    number = next(n for n, one in enumerate(read_lines(first, file)) if one.get(field))
    change(first, file, number, edit)
    assert verify_run(first).status == HOLDS
    check = verify_run(first, repetition=train(tmp_path / "again", first))
    assert check.status == CONTRADICTED
    [text] = check.contradictions
    assert named in text
    assert "1 of" in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rate": 0.2}, "different training"),
        ({"start": 1e-3}, "different weights before the first step"),
        ({"order": 1}, "the order of rows"),
    ],
    ids=str,
)
def test_what_is_no_repetition_is_open(run, tmp_path, changes, reason) -> None:
    verdict = verify_run(run, repetition=train(tmp_path / "again", run, **changes))
    assert verdict.status == OPEN
    assert reason in verdict.open[0]


@pytest.mark.parametrize(
    ("key", "edit", "reason"),
    [
        (False, lambda first: None, "copy row_order.key of the run"),
        (True, lambda first: first["versions"].update(torch="1.0"), "different versions"),
        (True, lambda first: first["machine"].update(instructions="AVX"), "different machine"),
        (True, lambda first: first.update(resumed={"run": "a"}), "from its first step"),
    ],
)
def test_other_orders_and_platforms_cannot_be_compared(run, tmp_path, key, edit, reason) -> None:
    again = train(tmp_path / "again", run if key else None)
    change(again, RECORD, 0, edit)
    verdict = verify_run(run, repetition=again)
    assert verdict.status == OPEN
    assert reason in verdict.open[0]


def test_a_repetition_that_was_edited_is_not_compared(run: Path, tmp_path: Path) -> None:
    again = train(tmp_path / "again", run)
    lines = lines_of(again / RESULTS)
    (again / RESULTS).write_bytes(b"\n".join(lines[:1] + lines[2:]) + b"\n")
    check = verify_run(run, repetition=again)
    assert check.status == OPEN
    assert "was not compared" in check.open[0]


def test_a_run_is_no_repetition_of_itself(run: Path) -> None:
    assert "the same run" in verify_run(run, repetition=run).open[0]
