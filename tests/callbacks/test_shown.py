"""How monitors and gates present themselves, and the table of what was measured."""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_fedleak.callbacks import LeakageMonitor, RiskGate
from lightning_fedleak.engine.log import COLUMNS
from lightning_fedleak.report.records import ResultLine
from tests.callbacks.runs import Probe, fit
from tests.helpers.notices import announced


class Crashing(Probe):
    default_name = "crashing"

    def run(self, view: Any, query: Any = None) -> Any:
        raise RuntimeError("boom")


class Pandas:
    """Stands in for the package: keeps what a frame is made of."""

    @staticmethod
    def DataFrame(rows: list[dict[str, Any]], columns: list[str]) -> SimpleNamespace:
        assert all(set(row) == set(columns) for row in rows)
        return SimpleNamespace(rows=rows, columns=columns)


def test_a_monitor_says_its_attacks_and_when_it_looks(tmp_path):
    monitor = LeakageMonitor([Probe(), Probe(name="b")], every_n_steps=4)
    assert repr(monitor) == "LeakageMonitor([probe, b], every_n_steps=4)"
    fit([monitor], tmp_path)
    assert repr(monitor) == "LeakageMonitor([probe, b], every_n_steps=4, looks=2)"
    both = LeakageMonitor(Probe(), max_overhead=0.01, stages=("local", "shared"))
    assert repr(both) == "LeakageMonitor([probe], max_overhead=0.01, stages=['local', 'shared'])"
    assert repr(LeakageMonitor()) == "LeakageMonitor('auto', max_overhead=0.005)"


def test_a_gate_says_what_it_watches_and_whether_it_fired(tmp_path):
    gate = RiskGate("leakage/probe/f1", at_most=0.0, action="warn")
    assert repr(gate) == "RiskGate('leakage/probe/f1', at_most=0, warn)"
    with announced("RiskGate"):
        fit([LeakageMonitor(Probe(), every_n_steps=4), gate], tmp_path)
    assert repr(gate) == "RiskGate('leakage/probe/f1', at_most=0, warn, fired at step 0)"
    bounded = RiskGate("leakage/a/auc", at_most=0.6, action=print, bound="lower")
    assert repr(bounded) == "RiskGate('leakage/a/auc', at_most=0.6, print, bound='lower')"


def test_the_table_has_what_the_file_has(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", Pandas)
    monitor = LeakageMonitor(
        [Probe(), Crashing()], every_n_steps=4, stages=("local", "shared"), log_dir=tmp_path
    )
    fit([monitor], tmp_path)
    table = monitor.to_dataframe()
    assert table.columns == list(COLUMNS)
    written = [json.loads(line) for line in (tmp_path / "leakage.jsonl").open()]
    assert len(table.rows) == sum(len(line["metrics"]) for line in written) > 8
    shown = {(r["step"], r["stage"], r["attack"], r["metric"]): r for r in table.rows}
    for line in written:
        for metric, found in line["metrics"].items():
            row = shown.pop((line["step"], line["stage"], line["attack"], metric))
            assert (row["n"], row["unknown"]) == (line["n"], line["unknown"])
            for end in ("value", "low", "high"):
                if found.get(end) is None:
                    assert math.isnan(row[end])
                else:
                    assert row[end] == found[end]
            if line["attack"] == "crashing":
                assert math.isnan(row["value"])
                assert "RuntimeError" in row["unknown"]
    assert not shown


def test_the_table_is_of_the_newest_fit_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", Pandas)
    monitor = LeakageMonitor(Probe(), every_n_steps=4, log_dir=tmp_path)
    with pytest.raises(RuntimeError, match=r"call trainer\.fit"):
        monitor.to_dataframe()
    fit([monitor], tmp_path)
    first = monitor.to_dataframe().rows
    fit([monitor], tmp_path)
    assert len(monitor.to_dataframe().rows) == len(first)
    lines = [json.loads(line) for line in (tmp_path / "leakage.jsonl").open()]
    assert [len({line["run"] for line in lines}), len(lines)] == [2, 4]
    (tmp_path / "leakage.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"leakage\.jsonl"):
        monitor.to_dataframe()


def test_an_attack_that_is_not_played_is_one_row(tmp_path):
    from lightning_fedleak.engine.log import JsonLines

    log = JsonLines(tmp_path / "leakage.jsonl")
    unknown = "not played: it is not shared"
    log.append(ResultLine(step=0, stage="shared", attack="a", metrics={}, unknown=unknown))
    [row] = log.rows()
    assert row["metric"] is None
    assert row["unknown"] == "not played: it is not shared"
    assert math.isnan(row["value"])


def test_half_of_a_killed_fits_line_takes_no_line_of_the_next(tmp_path):
    for name in ("leakage.jsonl", "run.jsonl"):
        (tmp_path / name).write_text('{"run": "killed", "step')
    monitor = LeakageMonitor(Probe(), every_n_steps=4, log_dir=tmp_path)
    fit([monitor], tmp_path)
    for name, first in (("leakage.jsonl", "attack"), ("run.jsonl", "kind")):
        half, *lines = (tmp_path / name).read_text().splitlines()
        assert half.endswith('"step')
        assert all(first in json.loads(line) for line in lines)
        assert len(lines) >= 2
    assert monitor.engine.jsonl.rows()


def test_without_pandas_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"needs pandas: pip install .*\[datasets\]"):
        LeakageMonitor(Probe()).to_dataframe()


def test_pandas_takes_the_rows(tmp_path):
    pandas = pytest.importorskip("pandas")
    monitor = LeakageMonitor(Probe(), every_n_steps=4, log_dir=tmp_path)
    fit([monitor], tmp_path)
    table = monitor.to_dataframe()
    assert isinstance(table, pandas.DataFrame)
    f1 = table[table.metric == "f1"].pivot(index="step", columns="attack", values="value")
    assert f1.loc[4, "probe"] == monitor.latest["leakage/probe/f1"]
