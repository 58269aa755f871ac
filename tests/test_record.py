"""``benchmarks/record.py``: commands of the docs beside what they printed, and tables of logs."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from tests.docs.blocks import blocks_of
from tests.docs.test_commands import check_line, lines_of
from tests.tools.sentences import ROOT

RECORDED = record.lines_of(record.LOG)
PRINTED = re.compile(
    r"F1 (?P<f1>\S+) \+- (?P<half>\S+) \|.* (?P<unknown>\d+) of (?P<rounds>\d+) unknown"
    r"|AUC (?P<auc>\S+) \((?P<low>\S+) to (?P<high>\S+)\)"
)


def short(text: str, digits: int = 3) -> str:
    """A number as tables of the docs have it."""
    return re.sub(r"^0\.", ".", f"{float(text):.{digits}f}")


def cell_of(line: str) -> str | None:
    """What a table says of a printed line; None where it says nothing."""
    if line.startswith("| ") and " Fig. 2 | " in line:  # a table of papers: its last column, AUC
        return line.strip("| ").rsplit(" | ", 1)[-1]
    found = PRINTED.search(line)
    if found is None:
        return None
    if found["auc"]:
        ends = f"{short(found['low'], 2)} to {short(found['high'], 2)}"
        return f"{short(found['auc'])} ({ends})"
    unknown = (
        f", {found['unknown']} of {found['rounds']} *unknown*" if int(found["unknown"]) else ""
    )
    return f"{short(found['f1'])} ± {short(found['half'])}{unknown}"


@pytest.mark.parametrize("line", RECORDED, ids=lambda line: line["command"].split(".py ")[-1][:60])
def test_a_recorded_command_stands_in_its_pages_and_its_results_in_their_tables(
    line: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    check_line(line["command"])
    cells = [cell for row in line["printed"] if (cell := cell_of(row))]
    assert cells
    for page in line["pages"]:
        commands = {
            " ".join(command.split())
            for block in blocks_of(ROOT / page)
            if block.language in ("commands", "bash")
            for command in lines_of(block.text)
        }
        assert line["command"] in commands
        text = (ROOT / page).read_text(encoding="utf-8")
        assert [cell for cell in cells if f"| {cell} |" not in text] == []


def test_cells_of_printed_lines() -> None:
    printed = "| F1 0.0441 +- 0.0113 | precision 0.967 | certified 0.00 | 0.3 s | 0 of 10 unknown"
    assert cell_of(printed) == ".044 ± .011"
    assert cell_of(printed.replace("0 of", "2 of")) == ".044 ± .011, 2 of 10 *unknown*"
    assert (
        cell_of("| other text | 20 members | AUC 1.000 (0.158 to 1.000)") == "1.000 (.16 to 1.00)"
    )
    assert cell_of("| 0.1 s | unknown | 10 of 10 unknown") is None


def main(monkeypatch: pytest.MonkeyPatch, log: Path, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["record.py", "--log", str(log), *words])
    return record.main()


def test_what_was_not_run_is_run_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    says = "python -c \"import sys; print('read', sys.argv[1][-5:])\" <small>"
    before = {"printed": ["kept"], "date": "2026-01-01", "machine": "m"}
    lines: list[dict[str, Any]] = [
        {"pages": ["docs/lora.md"], "command": says},
        {"pages": ["docs/lora.md"], "command": "python -c '1 / 0'", **before},
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SystemExit):
        main(monkeypatch, log)
    assert "give --model small=DIR" in capsys.readouterr().err
    folder = tmp_path / "model"
    assert main(monkeypatch, log, "--model", f"small={folder}") == 0
    first, second = record.lines_of(log)
    assert first["printed"] == ["read model"]
    assert second["printed"] == ["kept"]
    assert main(monkeypatch, log, "--model", f"small={folder}", "--again") == 1
    assert "FAILED python -c '1 / 0'" in capsys.readouterr().out
    assert record.lines_of(log)[1] == lines[1]
    assert main(monkeypatch, log, "--show") == 0


def test_the_tables_of_federations_are_what_their_log_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ROOT / "benchmarks" / "federation"
    for name in ("federation_table", "final_model"):
        log = str(folder / f"{name}.jsonl")
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--log", log, "--show"])
        runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
    shown = capsys.readouterr().out.splitlines()
    page = (ROOT / "docs" / "federation.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in page if re.match(r"\| (sgd|momentum|adamw), \d", line)]
    assert len(rows) >= 25
    assert [row for row in rows if row not in shown] == []
