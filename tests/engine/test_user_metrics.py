"""Which of a user's metrics are reported beside leakage."""

from __future__ import annotations

from lightning_fedleak.engine import chosen_metrics

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
