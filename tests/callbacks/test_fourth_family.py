"""A user-defined family of leak: `text_counts.py` has its attack and channel in one file."""

from pathlib import Path

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_fedleak.attacks import FCMembership
from lightning_fedleak.callbacks import LeakageMonitor, WatchSettings
from lightning_fedleak.report import findings, page, read
from tests.callbacks.runs import Probe, fit
from tests.callbacks.text_counts import CountsChannel, TextCount
from tests.helpers.loops import lines_of

RIGHT = "leakage/text_count/right"


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[LeakageMonitor, Path]:
    """Return the monitor and the folder of a fit with this attack and two of the package."""
    folder = tmp_path_factory.mktemp("counts")
    settings = WatchSettings(stages=("local", "shared"), reveal=True)
    attacks = [Probe(), TextCount(1e9), FCMembership(1)]
    monitor = LeakageMonitor(attacks, every_n_steps=2, settings=settings)
    fit([monitor], folder, logger=TensorBoardLogger(folder), n=32)
    return monitor, folder


def revealed_by(monitor: LeakageMonitor) -> list[tuple[int, str]]:
    [channel] = {c for c in monitor.engine.series.values() if isinstance(c, CountsChannel)}
    return channel.revealed


def test_custom_family_is_logged_with_its_metrics(watched: tuple[LeakageMonitor, Path]) -> None:
    monitor, folder = watched
    assert monitor.failures == 0
    assert monitor.latest[RIGHT] == 0
    assert monitor.latest["leakage_local/text_count/off"] == 4
    assert f"{RIGHT}_low" in monitor.metric_names()
    lines = lines_of(folder, "text_count")
    assert [(line["step"], line["stage"]) for line in lines][:2] == [(0, "local"), (0, "shared")]
    assert lines[-1]["metrics"]["right"]["value"] == 0
    [board] = folder.rglob("events.out*")
    events = EventAccumulator(str(board)).Reload()
    n_shared = sum(line["stage"] == "shared" for line in lines)
    assert [e.value for e in events.Scalars(RIGHT)] == [0.0] * n_shared


def test_custom_family_reveals_guesses_at_each_look(watched: tuple[LeakageMonitor, Path]) -> None:
    titles = [(step, f"== step {step}, leakage/text_count") for step in (0, 2, 4, 6)]
    revealed = revealed_by(watched[0])
    assert [(step, title) for step, title in revealed if "_local" not in title] == titles


def test_report_describes_custom_family_in_its_own_terms(
    watched: tuple[LeakageMonitor, Path],
) -> None:
    report = findings(read([watched[1]]))
    attacks = report.runs[0].attacks
    [attack] = [a for a in attacks if (a.name, a.stage) == ("text_count", "shared")]
    assert (attack.family.name, attack.headline, attack.mean) == ("counts", "right", 0.0)
    assert report.verdict.worst["counts"] == 0.0
    [reading] = [r for r in report.overviews[0].readings if r.family == "counts"]
    assert reading.title == "Counts of texts"
    assert reading.question == "How many texts are in a batch?"
    assert (reading.answer, reading.measure, reading.verdict) == ("0.00", "right", "little")
    assert "The share of looks at which the count was right." in page(report)
