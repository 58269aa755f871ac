"""``make gpu``: sections that end badly are told and leave the others alone."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_fedleak.callbacks.monitor import LeakageMonitor

ROOT = Path(__file__).parents[1]


@pytest.fixture
def gpu() -> ModuleType:
    from benchmarks.cost import gpu

    return gpu


def call(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str
) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--out", str(folder), *more])
    monkeypatch.setattr(gpu, "tokens_of_messages", list)
    status = gpu.main()
    return status, json.loads((folder / "gpu.json").read_text())


def test_the_bounds_of_all_sections_are_nine_minutes_together(gpu: ModuleType) -> None:
    assert set(gpu.SECONDS) == set(gpu.SECTIONS)
    assert sum(gpu.SECONDS.values()) <= 540


def test_the_page_has_a_place_for_every_section_and_names_its_bound(gpu: ModuleType) -> None:
    page = (ROOT / "docs" / "gpu.md").read_text("utf-8")
    found = {
        name: {"problem": None, "tables": [{"note": "", "columns": [name], "rows": [[name]]}]}
        for name in gpu.SECTIONS
    }
    full = gpu.filled(page, found)
    for name, seconds in gpu.SECONDS.items():
        assert f"\n| {name} | {seconds} |" in page
        assert f"| {name} |\n| --- |\n| {name} |\n" in full
    assert gpu.filled(full, found) == full
    with pytest.raises(ValueError, match="no single place for 'versions'"):
        gpu.filled("nothing", found)


def test_what_fails_or_is_not_done_in_time_is_told_and_the_others_run(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def fails(section: Any) -> None:
        section.table("some numbers", "a", "b")
        section.row(1, 2)
        raise ZeroDivisionError("by 0")

    def hangs(section: Any) -> None:
        section.table("others", "c")
        section.row(3)
        time.sleep(600)

    def works(section: Any) -> None:
        section.table("the rest", "d")
        section.row(4)

    own = {"versions": works, "fails": fails, "hangs": hangs, "works": works}
    monkeypatch.setattr(gpu, "SECTIONS", own)
    monkeypatch.setattr(gpu, "SECONDS", dict.fromkeys(own, 2))
    status, found = call(gpu, monkeypatch, tmp_path)
    assert status == 1
    assert {name: section["problem"] for name, section in found.items()} == {
        "versions": None,
        "fails": "ZeroDivisionError: by 0",
        "hangs": "not done after 2 s",
        "works": None,
    }
    assert found["hangs"]["tables"][0]["rows"] == [[3]]
    text = (tmp_path / "gpu.md").read_text()
    assert (
        "Failed: ZeroDivisionError: by 0\n\nSome numbers:\n\n| a | b |\n| --- | --- |\n| 1 | 2 |"
        in text
    )
    said = capsys.readouterr().out
    assert "4 sections, 2 failed" in said
    assert call(gpu, monkeypatch, tmp_path, "--only", "works")[0] == 0


def test_without_a_card_it_ends_with_one_sentence(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    section = gpu.Section(
        gpu.argparse.Namespace(device="cuda", smallest=False, model=None), tmp_path / "x.json"
    )
    with pytest.raises(SystemExit, match=r"sees no CUDA device here. Install PyTorch for CUDA"):
        gpu.versions(section)


def test_numbers_of_a_cpu_are_kept_out_of_the_page(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(SystemExit):
        call(gpu, monkeypatch, tmp_path, "--docs", str(page))
    assert "--docs takes what was measured on a GPU" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--docs", str(page)])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "has no place for ['attacks', 'dpsgd'" in capsys.readouterr().err


def test_a_monitor_that_waits_in_steps_without_a_look_fails_the_section(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def section() -> Any:
        given = gpu.argparse.Namespace(device="cpu", smallest=True, model=None)
        return gpu.Section(given, tmp_path / "waiting.json")

    passed = section()
    gpu.waiting(passed)
    assert [row[1] for row in passed.tables[1].rows] == ["pass", "pass"]
    assert passed.tables[0].rows[0][1] == passed.tables[0].rows[0][2]
    ends = LeakageMonitor.on_train_batch_end

    def waits(self: LeakageMonitor, trainer: Any, module: Any, *args: Any) -> None:
        next(module.parameters()).sum().item()
        ends(self, trainer, module, *args)

    monkeypatch.setattr(LeakageMonitor, "on_train_batch_end", waits)
    with pytest.raises(AssertionError, match=r"wait more often with a monitor: .*'none', 'where"):
        gpu.waiting(failed := section())
    assert failed.tables[1].rows[1][1].startswith("waits at ")
