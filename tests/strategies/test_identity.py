"""Without gradient defences a defended run is the plain run, bit for bit (one device)."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_fedleak.defenses import Freeze
from lightning_fedleak.strategies import DefendedStrategy
from lightning_fedleak.strategies.seams import CHECKPOINT_KEY
from tests.strategies.toy import (
    Bursting,
    ManualLM,
    ToyLM,
    fit,
    loader,
    same,
    scaled,
    state_of,
    trainer,
)

CASES = {
    "fp32": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping": {"gradient_clip_val": 0.05},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


@pytest.mark.parametrize("name", CASES)
def test_no_defenses_is_the_plain_strategy(name: str) -> None:
    plain = state_of(*fit("auto", **CASES[name]))
    taps: list[object] = []
    for strategy in ("auto", "single_device", SingleDeviceStrategy("cpu")):
        defended = DefendedStrategy(strategy)
        defended.add_tap(lambda stage, _: taps.append(stage))
        assert same(plain, state_of(*fit(defended, **CASES[name])))
    assert taps
    assert len(plain["losses"]) == 6


def test_manual_optimization_is_the_plain_one() -> None:
    plain = state_of(*fit("auto", ManualLM))
    assert same(plain, state_of(*fit(DefendedStrategy(), ManualLM)))


def test_a_skipping_grad_scaler_is_the_plain_one() -> None:
    stages: list[object] = []
    plain = state_of(*fit("auto", Bursting, plugins=scaled()))
    strategy = DefendedStrategy()
    strategy.add_tap(lambda stage, _: stages.append(stage))
    assert same(plain, state_of(*fit(strategy, Bursting, plugins=scaled())))
    assert len(stages) == 5 * 3


def test_validation_without_a_fit_is_the_plain_one() -> None:
    found = []
    for strategy in ("auto", DefendedStrategy(), DefendedStrategy(defenses=[Freeze("head")])):
        torch.manual_seed(0)
        model = ToyLM()
        [result] = trainer(strategy).validate(model, loader(8), verbose=False)
        trained = all(p.requires_grad for p in model.parameters())
        found.append((result, trained, torch.get_rng_state()))
    assert same(found[0], found[1])
    assert same(found[0], found[2])


class Reseeding(ToyLM):
    """Dropout draws from the global RNG, whose state a checkpoint does not hold."""

    def on_train_batch_start(self, batch, batch_idx) -> None:
        torch.manual_seed(self.trainer.global_step)


def test_resume_is_the_uninterrupted_run(tmp_path) -> None:
    whole = state_of(*fit("auto", Reseeding, shuffle=False, max_epochs=2))
    keep = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    fit(DefendedStrategy(), Reseeding, shuffle=False, callbacks=[keep], enable_checkpointing=True)
    last = str(tmp_path / "last.ckpt")
    assert CHECKPOINT_KEY not in torch.load(last, weights_only=True)
    again = fit(DefendedStrategy(), Reseeding, shuffle=False, max_epochs=2, ckpt_path=last)
    resumed = state_of(*again)
    assert same(whole["weights"], resumed["weights"])
    assert same(whole["optimizers"], resumed["optimizers"])
    assert whole["losses"][6:] == resumed["losses"]
