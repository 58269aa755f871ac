from __future__ import annotations

import pytest

from lightning_fedleak.cli.commands.demo import explain_readings
from lightning_fedleak.report.records import MetricValue, ResultLine


def reading(
    attack: str,
    step: int,
    recall: float | None,
    precision: float | None = None,
    *,
    n: int = 100,
    exposed: bool = True,
) -> ResultLine:
    precision = recall if precision is None else precision
    f1 = 2 * recall * precision / ((recall + precision) or 1) if recall is not None else None
    metrics = {"recall": recall, "precision": precision, "f1": f1}
    values = {name: MetricValue(value) for name, value in metrics.items()}
    return ResultLine(
        step=step, stage="shared", attack=attack, n=n, exposed=exposed, metrics=values
    )


def test_headline_is_the_mean_of_the_best_attack() -> None:
    text = explain_readings(
        [
            reading("weak", 0, 0.1),
            reading("greedy", 0, 1.0, 0.01),
            reading("strong", 0, 0.8, 0.9, n=90),
            reading("weak", 5, 0.3),
            reading("strong", 5, 0.6, 0.7, n=110),
        ],
        batch_size=8,
    )
    assert "read 70% of the private words (strong)" in text
    assert "2 updates, each of 8 texts that held 100 different words" in text
    assert "  weak: recall 20% (10% to 30%), precision 20% (10% to 30%)" in text
    assert "  strong: recall 70% (60% to 80%), precision 80% (70% to 90%)" in text


def test_unknown_is_neither_zero_nor_safe() -> None:
    text = explain_readings([reading("a", 0, 0.5), reading("a", 5, None), reading("b", 0, None)], 8)
    assert "  a: recall 50% (50% to 50%), precision 50% (50% to 50%); no result at 1 looks" in text
    assert "  b: unknown" in text
    nothing = explain_readings([reading("a", 0, None)], 8)
    assert "'unknown', not 'safe'" in nothing
    assert "%" not in nothing + explain_readings([], 8)
    hidden = reading("a", 0, 0.0, exposed=False)
    assert "does not share it" in explain_readings([hidden], 8)
    shown = explain_readings([hidden, reading("b", 0, 0.5)], 8)
    assert "a: nothing, because it reads a gradient" in shown


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        *((1.0, "100%"), (0.996, "99.6%"), (0.9996, "99.96%"), (0.99999, "nearly all")),
        *((0.0, "0%"), (0.004, "0.4%"), (0.00001, "nearly none"), (0.7, "70%")),
    ],
)
def test_only_0_and_1_are_written_as_0_and_100_percent(share: float, shown: str) -> None:
    text = explain_readings([reading("a", 0, share, 0.5)], 8)
    assert f"could have read {shown} of the private words" in text
    assert f"recall {shown} ({shown} to {shown})" in text
