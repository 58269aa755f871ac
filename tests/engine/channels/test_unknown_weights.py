"""What could not be read of the trained weights is unknown, to looks and to gates."""

import math
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_fedleak import LeakageMonitor, RiskGate
from lightning_fedleak.attacks.memorization import Combined, Loss
from lightning_fedleak.model.batches import BatchError, TokenBatch, read_batch
from lightning_fedleak.model.snapshots import ReleasedModel
from tests.engine.channels.test_memorization import Validated, fit, lines, monitor, rows, tiny
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.notices import announced


class Failing(Loss):
    """Fails from the second look on."""

    def __init__(self) -> None:
        super().__init__("failing")
        self.runs = 0

    def score(self, released: ReleasedModel) -> Tensor:
        self.runs += 1
        if self.runs > 1:
            raise RuntimeError("no answer")
        return super().score(released)


def watch(folder: Path, *attacks: Any, **more: Any) -> LeakageMonitor:
    return monitor(folder, list(attacks) or [Combined()], **more)


def test_one_unknown_attack_makes_the_worst_unknown_to_a_strict_gate(tmp_path: Path) -> None:
    gate = RiskGate("leakage/worst/memorization", at_most=0.999, patience=1)
    with announced("leakage/worst/memorization is unknown"):
        trainer, _ = fit([watch(tmp_path, Combined(), Failing()), gate])
    assert gate.fired is not None
    assert math.isnan(gate.fired.value)
    assert trainer.global_step == 33  # the third look, the second that is unknown


def test_one_unknown_attack_allows_no_checkpoint(tmp_path: Path) -> None:
    gate = RiskGate("leakage/worst/memorization", at_most=1.0, strict=False)
    keep = ModelCheckpoint(tmp_path, monitor="leakage/choose", mode="min")
    trainer, _ = fit(
        [watch(tmp_path, Combined(), Failing()), gate, keep], Validated(tiny(), 1e-2, "adamw"),
        max_epochs=1, enable_checkpointing=True, validate=True,
    )  # fmt: skip
    assert [math.isnan(end) for end, _ in gate._choices] == [True]
    assert "was infinite at all 1 validations" in gate._none_chosen()
    assert "The interval was never known there" in gate._none_chosen()
    assert float(trainer.callback_metrics["leakage/choose"]) == math.inf


def test_the_end_of_an_interval_is_compared_as_it_is(tmp_path: Path) -> None:
    gate = RiskGate("leakage/combined/auc_high", at_most=0.6)
    with announced("stopped training"):
        trainer, _ = fit([watch(tmp_path), gate])
    assert gate.bound == "value"
    assert trainer.global_step == 17


def test_a_batch_that_cannot_be_read_leaves_no_others(tmp_path: Path) -> None:
    """Its rows may have been trained on, though nobody has recognised them."""
    broken = rows()[0]["input_ids"]

    def adapter(batch: Any) -> TokenBatch:
        if len(batch["input_ids"]) > 1 and bool((batch["input_ids"] == broken).all(1).any()):
            raise BatchError("unreadable")
        return read_batch(batch, "causal")

    fit([watch(tmp_path, batch_adapter=adapter)], data=rows(), max_epochs=1)
    first, later, last = (line["unknown"] for line in lines(tmp_path))
    assert first is None
    assert all("1 batches could not be read" in why for why in (later, last))


class Moody(CausalLMModule):
    """Its model cannot be asked after step 20."""

    def __init__(self) -> None:
        super().__init__(tiny(), 1e-2, "adamw")
        self.model.register_forward_pre_hook(self.refuse)

    def refuse(self, model: Any, _: Any) -> None:
        if self.trainer.global_step > 20 and not model.training:
            raise RuntimeError("not now")


def test_a_model_that_cannot_be_asked_is_unknown_and_training_goes_on(tmp_path: Path) -> None:
    trainer, _ = fit([watch(tmp_path)], Moody(), max_epochs=1)
    assert trainer.global_step == 33
    first, *later = lines(tmp_path)
    assert first["unknown"] is None
    assert all("the model cannot be asked: RuntimeError" in line["unknown"] for line in later)
