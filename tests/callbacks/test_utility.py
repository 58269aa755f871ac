"""The user's losses, under any name, are logged where they were measured, beside leakage."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from torch import Tensor

from lightning_fedleak.attacks import BagOfWords
from lightning_fedleak.callbacks import LeakageMonitor
from lightning_fedleak.report import findings, read
from tests.callbacks.runs import fit
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.models import tiny_gpt2


class Named(CausalLMModule):
    """Logs its losses under two names; two validations in a row have the same loss."""

    def __init__(self, validation: str, training: str) -> None:
        super().__init__(tiny_gpt2(tied=False).train())
        self.names = validation, training
        self.losses = iter((4.0, 3.0, 3.0, 3.5))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log(self.names[1], loss)
        return loss

    def val_dataloader(self) -> Any:
        return random_token_loader(4)

    def on_validation_start(self) -> None:
        self.loss = next(self.losses)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log(self.names[0], self.loss)
        self.log("val_acc", 0.25)


@pytest.mark.parametrize(
    ("validation", "training"),
    [
        ("val/loss", "train/loss"),
        ("eval_loss", "loss"),
        ("valid_loss", "train_loss"),
        ("Validation.NLL", "my_loss"),
    ],
)
def test_losses_of_any_name_have_cards_a_chart_and_the_steps_of_their_validations(
    tmp_path: Path, validation: str, training: str
) -> None:
    board = TensorBoardLogger(tmp_path)
    monitor = LeakageMonitor(BagOfWords(), every_n_steps=3)
    trainer = fit(
        [monitor], tmp_path, module=Named(validation, training), logger=board, max_epochs=4,
        loader=random_token_loader(16), num_sanity_val_steps=0,
    )  # fmt: skip
    per_epoch = trainer.global_step // 4
    steps = [per_epoch * epoch for epoch in (1, 2, 3, 4)]
    events = EventAccumulator(board.log_dir).Reload()

    def curve(tag: str) -> list[tuple[int, float]]:
        return [(one.step, one.value) for one in events.Scalars(tag)]

    measured = [*zip(steps, (4.0, 3.0, 3.0, 3.5), strict=True)]
    assert curve(f"utility/{validation}") == curve(f"1_leakage/{validation}") == measured
    assert [step + 1 for step, _ in curve(validation)] == steps, "as Lightning counts, from 0"
    assert curve("utility/val_acc") == [(step, 0.25) for step in steps]
    assert curve(f"utility/{validation}_best") == [(steps[1], 3.0)]
    first = {tag for tag in events.Tags()["scalars"] if tag.startswith("1_leakage/")}
    assert first == {f"1_leakage/{name}" for name in ("words_f1", validation, training)}
    layout = Layout()
    [content] = [one.tensor_proto for one in events.Tensors("custom_scalars__config__")]
    layout.ParseFromString(content.string_val[0])
    charts = [chart for page in layout.category for chart in page.chart]
    [utility] = [chart for chart in charts if chart.title.startswith("utility")]
    [pattern] = utility.multiline.tag
    matching = {tag for tag in events.Tags()["scalars"] if re.match(pattern, tag)}
    assert matching == {f"1_leakage/{name}" for name in (validation, training)}

    found = findings(read([Path(board.log_dir)]))
    assert found.runs[0].utility[validation] == measured
    [fact] = [fact for fact in found.overviews[0].facts if fact.name == "Utility"]
    assert (fact.value, fact.detail) == (f"{validation} 3.500", f"from 4.000, step {steps[-1]}")
