"""A training that is repeated gives the same to the bit, or it is said which value differs."""

from __future__ import annotations

import json
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


def train(
    folder: Path,
    key_of: Path | None = None,
    *,
    start: float = 0.0,
    order: int = 0,
    rate: float = 0.1,
    every_n_steps: int = 2,
    extra: float = 0.0,
) -> Path:
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


def test_the_same_training_again_holds(run: Path, tmp_path: Path) -> None:
    check = verify_run(run, repetition=train(tmp_path / "again", run))
    assert check.verdict.status == HOLDS, check.verdict
    [text] = [one for one in check.checked if one.startswith("repetition")]
    metrics = sum(len(json.loads(line)["metrics"]) for line in lines_of(run / RESULTS))
    assert text == f"repetition: {metrics + 1} values of weights, losses and leakage"


def test_looks_at_other_steps_leave_the_weights(run: Path, tmp_path: Path) -> None:
    """Training is the same however often it is looked at."""
    check = verify_run(run, repetition=train(tmp_path / "again", run, every_n_steps=3))
    assert check.verdict.status == HOLDS, check.verdict
    metrics = len(json.loads(lines_of(run / RESULTS)[0])["metrics"])  # of the first look of both
    assert f"repetition: {metrics + 1} values of weights, losses and leakage" in check.checked


def test_another_training_is_a_contradiction(run: Path, tmp_path: Path) -> None:
    check = verify_run(run, repetition=train(tmp_path / "again", run, extra=1e-3))
    assert check.verdict.status == CONTRADICTED
    assert "weights" in check.verdict.contradictions[0]


def test_an_invented_leakage_is_found_although_all_hashes_fit(tmp_path: Path) -> None:
    first = train(tmp_path / "first")

    def lower(line: dict[str, Any]) -> None:
        line["metrics"]["f1"]["value"] /= 2

    change(first, RESULTS, 1, lower)
    assert verify_run(first).verdict.status == HOLDS
    check = verify_run(first, repetition=train(tmp_path / "again", first))
    assert check.verdict.status == CONTRADICTED
    [text] = check.verdict.contradictions
    step = json.loads(lines_of(first / RESULTS)[1])["step"]
    assert f"step {step}: shared bag_of_words f1 is not what" in text
    assert "1 of" in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rate": 0.2}, "another training"),
        ({"start": 1e-3}, "other weights before the first step"),
        ({"order": 1}, "another order of rows"),
    ],
    ids=str,
)
def test_what_is_no_repetition_is_open(
    run: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    verdict = verify_run(run, repetition=train(tmp_path / "again", run, **changes)).verdict
    assert verdict.status == OPEN
    assert reason in verdict.open[0]


def test_without_the_key_the_order_is_not_comparable(run: Path, tmp_path: Path) -> None:
    verdict = verify_run(run, repetition=train(tmp_path / "again")).verdict
    assert verdict.status == OPEN
    assert "copy that of the run" in verdict.open[0]


@pytest.mark.parametrize(("fact", "value"), [("versions", "1.0"), ("machine", "AVX")])
def test_another_platform_is_open(run: Path, tmp_path: Path, fact: str, value: str) -> None:
    again = train(tmp_path / "again", run)
    name = {"versions": "torch", "machine": "instructions"}[fact]
    change(again, RECORD, 0, lambda line: line[fact].update({name: value}))
    verdict = verify_run(run, repetition=again).verdict
    assert verdict.status == OPEN
    assert f"another {fact}" in verdict.open[0]


def test_a_run_is_no_repetition_of_itself(run: Path) -> None:
    assert "the same run" in verify_run(run, repetition=run).verdict.open[0]
