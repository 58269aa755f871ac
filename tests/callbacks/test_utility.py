"""The user's losses are logged where they were measured, beside leakage and epsilon."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from torch import Tensor

from lightning_fedleak.attacks import BagOfWords, FCMembership
from lightning_fedleak.callbacks import LeakageMonitor
from lightning_fedleak.defenses import DPSGD, GradientNoise, Privacy, TokenLDP
from lightning_fedleak.report import findings, read
from lightning_fedleak.report.records import MetricsLine, read_lines
from lightning_fedleak.strategies import DefendedStrategy
from tests.callbacks.runs import fit
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.models import tiny_gpt2
from tests.strategies.dpsgd_runs import CausalLM


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


class Accounted(GradientNoise):
    """Says what it costs."""

    def __init__(self, name: str, epsilon: float) -> None:
        super().__init__(clip=1.0, sigma=1.0)
        self.name, self._epsilon = name, epsilon

    @property
    def privacy(self) -> Privacy:
        return Privacy(self._epsilon, 1e-5, 1.0, 1.0, self.releases)


def run(tmp_path: Path, *defenses: Any) -> tuple[LeakageMonitor, L.Trainer]:
    monitor = LeakageMonitor(FCMembership(1), every_n_steps=2)
    # A Poisson batch of 50 of 200 is never empty, which would put a look off, and never holds all
    # texts of the one before, which are the games' non-members.
    settings: dict[str, Any] = {"loader": random_token_loader(200, batch_size=50), "max_steps": 4}
    settings |= {"strategy": DefendedStrategy("auto", list(defenses))}
    board = TensorBoardLogger(tmp_path)
    return monitor, fit([monitor], tmp_path, module=CausalLM(), logger=board, **settings)


class Validated(CausalLM):
    """Reports one validation loss after the other, the best of which is not the last."""

    losses = (4.0, 3.0, 3.5)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.log("val_loss", self.losses[self.current_epoch])


class Breaks(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 7:
            raise RuntimeError("a cable")


@pytest.mark.parametrize("broken", [False, True])
def test_dashboards_end_at_what_was_spent_and_follow_the_validation(
    tmp_path: Path, broken: bool
) -> None:
    """Looks are at steps 0 and 1: the rest is written as epochs and the fit end."""
    L.seed_everything(0, verbose=False)
    defense = DPSGD(1.0, noise_multiplier=1.0, target_delta=1e-3, accountant="rdp")
    monitor = LeakageMonitor(FCMembership(1), every_n_steps=1000)
    trainer = L.Trainer(
        accelerator="cpu", strategy=DefendedStrategy("auto", [defense]), max_epochs=3,
        callbacks=[monitor, *([Breaks()] if broken else [])], logger=TensorBoardLogger(tmp_path),
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        log_every_n_steps=1000,
    )  # fmt: skip
    data = random_token_loader(200, batch_size=50)
    with pytest.raises(RuntimeError, match="a cable") if broken else nullcontext():
        trainer.fit(Validated(), data, data)
    assert monitor.last_step == 1
    epochs, best = (1, 4.0) if broken else (3, 3.0)
    steps = [4 * epoch for epoch in range(1, epochs + 1)]
    events = EventAccumulator(str(trainer.log_dir))
    events.Reload()
    epsilons = {one.step: one.value for one in events.Scalars("privacy/epsilon")}
    assert [*epsilons] == [0, 1, *steps, *([7] if broken else [])]
    for step, epsilon in epsilons.items():
        twin = DPSGD(1.0, noise_multiplier=1.0, target_delta=1e-3, accountant="rdp").accountant
        twin.step(1.0, defense.privacy.sample_rate, step + (step < 2))  # looks come after
        assert epsilon == pytest.approx(twin.epsilon(1e-3))
    assert trainer.callback_metrics["privacy/epsilon"] == pytest.approx(defense.privacy.epsilon)
    validations = {one.step: one.value for one in events.Scalars("utility/val_loss")}
    expected = dict(zip(steps, Validated.losses, strict=False))
    assert validations == expected
    [lowest] = events.Scalars("utility/val_loss_best")
    assert (lowest.step, lowest.value) == (next(s for s in steps if expected[s] == best), best)
    assert events.Scalars("utility/train_loss")[-1].step == trainer.global_step
    assert monitor.latest["utility/val_loss"] == Validated.losses[epochs - 1]
    record = read_lines(Path(trainer.log_dir) / "run.jsonl").lines
    written = [line for line in record if isinstance(line, MetricsLine)]
    assert [line.step for line in written if "val_loss" in (line.utility or {})][:epochs] == steps
    assert written[-1].privacy[0].releases == trainer.global_step


@pytest.mark.filterwarnings("ignore:TokenLDP")
def test_epsilon_of_replaced_words_is_that_of_a_row(tmp_path: Path) -> None:
    defense = TokenLDP("grr", epsilon=3.0, per="token", special_ids=[])
    monitor, _ = run(tmp_path, defense)
    assert monitor.latest["privacy/epsilon"] == pytest.approx(3.0 * 12)
    assert monitor.latest["privacy/delta"] == 0.0
    assert "privacy/noise_multiplier" not in monitor.latest


def test_several_are_distinguished_and_an_infinite_one_is_not_plotted(tmp_path: Path) -> None:
    monitor, trainer = run(tmp_path, Accounted("a", 2.0), Accounted("b", float("inf")))
    assert monitor.latest["privacy/a/epsilon"] == 2.0
    assert monitor.latest["privacy/b/epsilon"] == float("inf")
    tags = EventAccumulator(str(trainer.log_dir)).Reload().Tags()["scalars"]
    assert "privacy/a/epsilon" in tags
    assert "privacy/b/epsilon" not in tags


def test_nothing_is_logged_where_nothing_is_accounted(tmp_path: Path) -> None:
    monitor, _ = run(tmp_path, GradientNoise(clip=1.0, sigma=1.0))
    assert not [name for name in monitor.latest if name.startswith("privacy/")]
