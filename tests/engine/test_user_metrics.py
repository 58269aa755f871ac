"""Which of a user's metrics are reported beside leakage."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_fedleak.engine import chosen_metrics
from lightning_fedleak.engine.log import UserMetrics

LOGGED = {
    "train_loss": 3.0,
    "train_loss_step": 3.0,
    "train_loss_epoch": 2.5,
    "val/acc": 0.5,
    "eval_loss": 2.0,
    "rouge_epoch": 0.1,
    "lr-AdamW": 1e-3,
    "learning_rate": 1e-3,
    "eval_runtime": 1.0,
    "train_samples_per_second": 9.0,
    "epoch": 1.0,
    "step": 4.0,
    "leakage/worst/words": 0.9,
    "leakage_local/probe/f1": 0.9,
    "utility/val/acc": 0.5,
    "privacy/epsilon": 3.0,
    "gate/probe": 0.0,
}


def test_all_that_a_run_logs_is_its_utility_but_times_rates_and_what_we_log() -> None:
    assert chosen_metrics(LOGGED, None) == {
        "train_loss": 3.0,
        "val/acc": 0.5,
        "eval_loss": 2.0,
        "rouge_epoch": 0.1,
    }
    assert chosen_metrics(LOGGED, ["val/acc", "absent"]) == {"val/acc": 0.5}


@given(st.lists(st.floats(-10, 10), min_size=1))
def test_at_the_end_the_last_and_the_best_are_there(values: list[float]) -> None:
    metrics = UserMetrics()
    for step, value in enumerate(values):
        metrics.add({"val_acc": value, "val_loss": value}, step)
    assert metrics.at_end() == {
        "val_acc": values[-1],
        "val_loss": values[-1],
        "val_acc_best": max(values),
        "val_loss_best": min(values),
    }
