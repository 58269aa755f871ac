"""Defences that are given in other ways than in a list, or used by several Trainers."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_fedleak.defenses import DPSGD, Defense, DefenseError, Freeze, GradientNoise
from lightning_fedleak.strategies import DefendedStrategy
from tests.helpers.processes import free_port, spawn_imported
from tests.strategies.toy import ToyLM, fit, loader, trainer


def noise() -> GradientNoise:
    return GradientNoise(1.0, 1.0)


class Forgetful(Defense):
    name, guarantee = "forgetful", "none: a test"

    def __init__(self, hook: str, value: Any) -> None:
        self.value = value
        self.answer = {hook}

    def on_gradients(self, parameters: Any, context: Any) -> Any:
        return self.value if "on_gradients" in self.answer else None

    def on_batch(self, batch: Any, context: Any) -> Any:
        return self.value if "on_batch" in self.answer else batch

    def on_dataloader(self, dataloader: Any, context: Any) -> Any:
        return self.value if "on_dataloader" in self.answer else dataloader


@pytest.mark.parametrize(
    ("hook", "value", "message"),
    [
        ("on_gradients", [1.0], "on_gradients must rewrite"),
        ("on_batch", None, "on_batch must return"),
        ("on_dataloader", None, "on_dataloader must return"),
    ],
)
def test_a_defence_that_returns_the_wrong_thing_is_told(hook, value, message: str) -> None:
    with pytest.raises(DefenseError, match=message):
        fit(DefendedStrategy("auto", [Forgetful(hook, value)]))


@pytest.mark.parametrize("change", ["twice", "cut", "as it was"])
def test_dpsgd_gets_the_rows_that_were_drawn(change: str) -> None:
    class Augmented(ToyLM):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            if change == "twice" and len(batch[0]):
                return [batch[0].repeat(2, 1)]
            return [batch[0][:1]] if change == "cut" else [batch[0].flip(1)]

    defense = DPSGD(1.0, noise_multiplier=1.0, accountant="rdp")
    run = trainer(DefendedStrategy("auto", [defense]), max_epochs=4)
    if change == "as it was":
        run.fit(Augmented(), loader())
        assert defense.releases == 24
    else:
        with pytest.raises(
            DefenseError, match=r"let no hook or callback add|other rows of a batch"
        ):
            run.fit(Augmented(), loader())


def test_gradients_after_the_release_are_not_those_that_were_released() -> None:
    class Twice(ToyLM):
        """Steps an optimizer of its own with what came after the defended step."""

        def __init__(self) -> None:
            super().__init__("sgd")
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            known, own = self.optimizers(), torch.optim.SGD(self.parameters(), lr=0.1)
            self.manual_backward(self.loss(batch))
            known.step()
            known.zero_grad()
            self.manual_backward(self.loss(batch))
            own.step()

    with pytest.raises(DefenseError, match="gradients that were not defended"):
        fit(DefendedStrategy("auto", [noise()]), Twice)


@pytest.mark.parametrize("automatic", [True, False])
def test_updates_that_no_optimizer_makes_are_refused(automatic: bool) -> None:
    class ByHand(ToyLM):
        def __init__(self) -> None:
            super().__init__("sgd")
            self.automatic_optimization = automatic

        def update(self) -> None:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter -= 0.1 * parameter.grad
            self.zero_grad()

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            closure()
            self.update()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if automatic:
                return super().training_step(batch, batch_idx)
            self.manual_backward(self.loss(batch))
            self.update()
            return None

        def configure_optimizers(self) -> Any:
            return super().configure_optimizers() if automatic else None

    with pytest.raises(DefenseError, match="weights changed without an optimizer"):
        fit(DefendedStrategy("auto", [noise()]), ByHand)
    fit(DefendedStrategy(), ByHand)


def test_updates_by_hand_beside_an_optimizer_of_something_else_are_refused() -> None:
    class Beside(ToyLM):
        def __init__(self) -> None:
            super().__init__("sgd")
            self.automatic_optimization = False
            self.unused = torch.nn.Linear(2, 2)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            weight = self.head.weight
            (gradient,) = torch.autograd.grad(self.loss(batch), [weight])
            with torch.no_grad():
                weight -= 0.1 * gradient

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.unused.parameters(), lr=0.1)

    with pytest.raises(DefenseError, match="weights changed without an optimizer"):
        fit(DefendedStrategy("auto", [noise()]), Beside)


@pytest.mark.slow
def test_what_was_released_in_processes_that_ended_is_remembered(monkeypatch) -> None:
    spawn_imported(monkeypatch)
    defense = DPSGD(1.0, noise_multiplier=1.0, accountant="rdp")
    for releases in (2, 4):
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        fit(DefendedStrategy("ddp_spawn", [defense]), devices=2, max_steps=2)
        assert defense.releases == defense.privacy.releases == releases
    assert 0 < defense.privacy.epsilon < 100
    assert defense.privacy.delta == pytest.approx(0.1 / 24)
    again = trainer(DefendedStrategy("auto", [defense]), max_steps=1)
    with pytest.raises(DefenseError, match="not those of the 4 releases before"):
        again.fit(ToyLM(), loader())


def test_noise_is_not_found_for_the_steps_of_a_learning_rate_finder(tmp_path) -> None:
    steps: list[int] = []

    class Tuned(ToyLM):
        lr = 0.1

        def on_train_batch_start(self, *_: Any) -> None:  # of empty lots too: they are released
            steps.append(self.trainer.global_step)

    def find(defense: DPSGD, *, outside_epsilon: bool = True) -> None:
        search = LearningRateFinder(
            num_training_steps=4, early_stop_threshold=None, update_attr=False
        )
        strategy = DefendedStrategy("auto", [defense], outside_epsilon=outside_epsilon)
        run = trainer(strategy, callbacks=[search], default_root_dir=tmp_path)
        run.fit(Tuned(), loader())

    with pytest.raises(DefenseError, match="learning rate finder decides by a metric"):
        find(DPSGD(1.0, noise_multiplier=1.0), outside_epsilon=False)
    with pytest.raises(DefenseError, match="rate finder needs noise_multiplier"):
        find(DPSGD(1.0, target_epsilon=3.0, target_delta=1e-3))
    accounted = DPSGD(1.0, noise_multiplier=1.0, accountant="rdp")
    find(accounted)
    assert steps[:5] == [0, 1, 2, 3, 0]
    assert accounted.releases == accounted.privacy.releases == len(steps)


class WholeOnly(Defense):
    """A defence that knows nothing of shards."""

    name, guarantee = "whole_only", "a test's"

    def on_gradients(self, parameters, context) -> None:
        pass


def test_sharded_strategies_are_refused_what_they_cannot_do() -> None:
    with pytest.raises(DefenseError, match=r"reduced inside backward.*client='world'"):
        DefendedStrategy(ModelParallelStrategy(), [GradientNoise(1.0, 1.0)])
    with pytest.raises(DefenseError, match=r"whole_only.*takes_shards = True"):
        DefendedStrategy(ModelParallelStrategy(), [WholeOnly()], client="world")
    strategy = DefendedStrategy(ModelParallelStrategy(), [Freeze("head")], client="world")
    assert isinstance(strategy, ModelParallelStrategy)
    assert strategy.separates_stages
