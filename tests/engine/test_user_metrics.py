"""Which of a user's metrics are reported beside leakage."""

from types import SimpleNamespace

from lightning_fedleak.engine import chosen_metrics
from lightning_fedleak.engine.log import UserMetrics

LOGGED = {
    "train_loss": 3.0, "train_loss_step": 3.0, "train_loss_epoch": 2.5, "val/acc": 0.5,
    "eval_loss": 2.0, "rouge_epoch": 0.1, "lr-AdamW": 1e-3, "learning_rate": 1e-3,
    "eval_runtime": 1.0, "train_samples_per_second": 9.0, "epoch": 1.0, "step": 4.0,
    "leakage/worst/words": 0.9, "leakage_local/probe/f1": 0.9, "utility/val/acc": 0.5,
    "privacy/epsilon": 3.0, "gate/probe": 0.0,
}  # fmt: skip


def test_all_that_a_run_logs_is_its_utility_but_times_rates_and_what_we_log() -> None:
    assert chosen_metrics(LOGGED, None) == {
        "train_loss": 3.0, "val/acc": 0.5, "eval_loss": 2.0, "rouge_epoch": 0.1,
    }  # fmt: skip
    assert chosen_metrics(LOGGED, ["val/acc", "absent"]) == {"val/acc": 0.5}


def test_a_value_is_new_where_it_was_measured_and_not_where_it_is_read() -> None:
    metrics, measured = UserMetrics(None), {"val_loss": 3.0, "train_loss": 2.0}

    def changed(utility: dict[str, float], step: int, **options: bool) -> dict[str, float]:
        return metrics.changed(SimpleNamespace(utility=utility, step=step), **options)  # type: ignore[arg-type]

    assert changed(measured, 10, sparse=True) == measured
    assert changed(measured, 20) == {}
    earlier = measured | {"train_loss": 1.5}
    assert changed(earlier, 30, sparse=True) == {}, "a training metric waits"
    assert changed(earlier, 70, sparse=True) == {}, "it is not of step 70"
    assert changed(earlier, 71) == {}
    metrics.measured(["val_loss"])
    assert changed(earlier, 80, validation=False) == {}, "a validation's is not asked for"
    assert changed(earlier, 80) == {"val_loss": 3.0}, "measured again, the same number"
