"""Lists of rows from the command, shown and dropped."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedleak.cli.commands.memorization import BREACH
from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MODEL
from lightning_fedleak.cli.studies.memorization import used_up_mark
from lightning_fedleak.evaluation.metrics.record_list import PoolRows, RecordList
from tests.commands.test_memorization_cli import (  # noqa: F401  (fixtures)
    TEXTS,
    _models_are_asked_once,
    folder,
    run,
)
from tests.helpers.commands import run_command


def test_the_command_writes_the_list_and_gates_on_it(
    folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    path, output = tmp_path / "records.jsonl", tmp_path / "out.json"
    settings = {"drawn": True, "records": path, "out": output, "metric": "at_least"}
    status, text = run(folder, at_most=2.0, **settings)
    assert status == BREACH
    records = RecordList.load(path)
    counts = json.loads(output.read_text())["records"]
    assert counts["at_least"] == records.head["at_least"] > 2
    assert records.head["account"] is None
    assert f"at least {records.head['at_least']} are given away" in text
    assert {line.row for line in records.lines} == set(range(TEXTS))
    words = (folder / "members.jsonl").read_text().splitlines()
    assert json.loads(words[0])["text"] not in path.read_text()
    assert run(folder, str(EMBEDDED_MODEL), at_most=5.0, **settings)[0] == 0
    assert json.loads(output.read_text())["records"]["at_least"] == 0
    status, text = run(folder, at_most=29.0, **settings)
    assert status == BREACH
    assert "is unknown: so few others" in text


def test_without_a_draw_no_list_is_written(
    folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    path = tmp_path / "records.jsonl"
    assert run(folder, records=path)[0] == BREACH
    assert not path.exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"metric": "at_least", "at_most": 3.0}, "--records FILE"),
        ({"at_most": 3.0}, "is above 1"),
    ],
)
def test_options_that_contradict_each_other(
    folder: Path,  # noqa: F811
    settings: dict[str, Any],
    words: str,
) -> None:
    with pytest.raises(SourceError, match=words):
        run(folder, drawn=True, **settings)


def write(tmp_path: Path, *, account: bool | None = False, others: int = 40) -> tuple[Path, Path]:
    """Return a list of twenty rows, of which 4 and 9 are copies, and the rows."""
    n = 19 + others
    data = tmp_path / "train.jsonl"
    rows = [{"text": f"text number {n}\x1b[31m", "id": n} for n in range(20)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = torch.cat([torch.arange(19.0).flip(0) + 100, torch.zeros(others)])
    times, copies = torch.ones(n, dtype=torch.long), [[row] for row in range(n)]
    for text in range(9, 19):
        copies[text] = [text + 1]
    times[4], copies[4] = 2, [4, 9]
    rows_of = PoolRows(copies, times)
    labels = torch.full((n,), 12)
    members = torch.arange(n) < 19
    path = tmp_path / "records.jsonl"
    RecordList.of(scores, members, labels, rows_of, account=account).save(path)
    return path, data


def test_rows_are_shown_on_a_terminal_alone(tmp_path: Path) -> None:
    path, data = write(tmp_path)
    settings = {"action": "show", "file": path, "data": str(data), "top": 0.2}
    status, text = run_command("records", terminal=True, **settings)
    assert status == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "\x1b" not in text
    shown = [n for n in range(20) if f"text number {n}" in text.replace("\n", " ")]
    places = [text.index(f"row {n},") for n in (4, 9, 0, 1)]
    assert places == sorted(places)
    assert {4, 9, 0} <= {*shown}
    assert "p is over the draw of rows" in text
    with pytest.raises(SourceError, match="on a terminal alone") as refusal:
        run_command("records", **settings)
    assert "text number" not in str(refusal.value)


@pytest.mark.parametrize("account", [None, False])
def test_kept_rows_are_written_and_the_draw_is_used_up(
    tmp_path: Path,
    folder: Path,  # noqa: F811
    account: bool | None,
) -> None:
    path, data = write(tmp_path, account=account)
    kept = tmp_path / "kept.jsonl"
    settings = {"action": "drop", "file": path, "data": str(data)}
    settings["no_account"] = account is None
    status, text = run_command("records", top=0.15, out=kept, **settings)
    assert status == 0
    assert "fresh draw" in text
    rows = [json.loads(line)["id"] for line in kept.read_text().splitlines()]
    assert rows == [n for n in range(20) if n not in (4, 9, 0)]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert RecordList.load(path).head["used_up"] is True
    members = (folder / "members.jsonl").read_text()
    kept.write_text(members)
    (tmp_path / "members.jsonl").symlink_to(kept)
    used_up_mark(kept).rename(used_up_mark(tmp_path / "members.jsonl"))
    (tmp_path / "others.jsonl").write_text((folder / "others.jsonl").read_text())
    (tmp_path / "model").symlink_to(folder / "model")
    status, text = run(tmp_path, drawn=True, at_most=1.0)
    assert status == BREACH
    assert "used up" in text


@pytest.mark.parametrize(
    ("head", "out", "words"),
    [
        ({"account": True}, "kept.jsonl", "under differential privacy: which"),
        ({"account": None}, "kept.jsonl", "--no-account"),
        ({"others": 1}, "kept.jsonl", "too few texts"),
        ({}, None, "--out FILE.jsonl"),
        ({}, "kept.csv", "--out FILE.jsonl"),
    ],
)
def test_what_must_not_be_dropped(
    tmp_path: Path, head: dict[str, Any], out: str | None, words: str
) -> None:
    path, data = write(tmp_path, **head)
    settings: dict[str, Any] = {} if out is None else {"out": tmp_path / out}
    settings["no_account"] = head.get("account") is True  # no word overrules an account
    with pytest.raises(SourceError, match=words):
        run_command("records", action="drop", file=path, data=str(data), **settings)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["records.jsonl", "train.jsonl"]


def test_rows_of_other_data_are_refused(tmp_path: Path) -> None:
    path, data = write(tmp_path)
    data.write_text('{"text": "one"}\n')
    with pytest.raises(SourceError, match="row 19"):
        run_command("records", action="drop", file=path, data=str(data), out=tmp_path / "k.jsonl")
