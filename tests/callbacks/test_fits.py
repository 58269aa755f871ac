"""Several fits, exceptions in between, resumes: each fit is watched, and nothing is left."""

import copy
import json
import math

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint

from lightning_fedleak.attacks import AlignedFlatChat, PublicText
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.callbacks import (
    LeakageLimitExceeded,
    LeakageMonitor,
    RiskGate,
)
from tests.callbacks.runs import Probe, fit
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.models import tiny_gpt2
from tests.helpers.notices import announced

F1 = "leakage/probe/f1"
PUBLIC = [[(7 * i + 3 * j) % 94 + 3 for j in range(20)] for i in range(12)]


class Breaks(CausalLMModule):
    def __init__(self, *args, at=2, **kwargs):
        super().__init__(*args, **kwargs)
        self.at = at

    def training_step(self, batch, batch_idx):
        if batch_idx == self.at:
            raise KeyError("user's own")
        return super().training_step(batch, batch_idx)


def broken(callbacks, tmp_path, **settings):
    module = Breaks(tiny_gpt2().train())
    with pytest.raises(KeyError):
        fit(callbacks, tmp_path / "broken", module=module, **settings)
    return module


@pytest.mark.parametrize("n", [1, 100])
def test_a_second_fit_is_looked_at_from_its_first_step(tmp_path, n):
    probe = Probe()
    monitor = LeakageMonitor(probe, every_n_steps=n)
    fit([monitor], tmp_path / "a")
    fit([monitor], tmp_path / "b")
    steps = [step for step, *_ in probe.seen]
    assert steps == 2 * (list(range(8)) if n == 1 else [0])


def test_a_fit_that_goes_on_in_the_same_trainer_is_looked_at(tmp_path):
    probe = Probe()
    trainer = fit([LeakageMonitor(probe, every_n_steps=100)], tmp_path)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, trainer.train_dataloader)
    assert [step for step, *_ in probe.seen] == [0, 8]


def test_after_an_exception_of_the_user_nothing_is_left_behind(tmp_path):
    monitor = LeakageMonitor(Probe(), every_n_steps=1)
    module = broken([monitor], tmp_path)
    assert "step" not in vars(module.trainer.optimizers[0])
    assert monitor.looks == 2
    module.at = -1
    fit([monitor], tmp_path / "again", module=module)
    assert monitor.looks == 10


def test_a_gate_decides_once_a_look_in_the_fit_after_an_exception(tmp_path):
    events = []
    monitor = LeakageMonitor(Probe(k=20), every_n_steps=1)
    gate = RiskGate(F1, at_most=0.0, action=events.append)
    module = broken([gate, monitor], tmp_path)
    assert len(events) == 2
    module.at = -1
    fit([gate, monitor], tmp_path / "again", module=module)
    assert [e.step for e in events] == [0, 1, *range(8)]


def test_a_gate_that_raised_can_be_used_again(tmp_path):
    gate = RiskGate(F1, at_most=0.0, action="raise")
    monitor = LeakageMonitor(Probe(k=20), every_n_steps=1)
    for name in "ab":
        with pytest.raises(LeakageLimitExceeded, match="at step 0"):
            fit([gate, monitor], tmp_path / name)


def test_a_gate_warns_in_every_fit(tmp_path):
    gate = RiskGate(F1, at_most=0.0, action="warn")
    monitor = LeakageMonitor(Probe(k=20), every_n_steps=100)
    for name in "ab":
        with announced("warns at step 0"):
            fit([gate, monitor], tmp_path / name)


def test_a_callback_can_be_copied_after_a_fit(tmp_path):
    monitor = LeakageMonitor(Probe(), every_n_steps=1)
    gate = RiskGate(F1, at_most=1.0)
    fit([gate, monitor], tmp_path)
    probe = copy.deepcopy(monitor).attacks[0]
    assert len(probe.seen) == 8
    assert not any(isinstance(v, L.Trainer) for v in vars(monitor).values())


def test_validate_with_a_monitor_is_no_fit(tmp_path):
    class Validating(CausalLMModule):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.model(**batch).loss)

    monitor = LeakageMonitor(Probe(), every_n_steps=1)
    trainer = fit([monitor], tmp_path, module=Validating(tiny_gpt2().train()))
    trainer.validate(trainer.lightning_module, trainer.train_dataloader, verbose=False)
    assert monitor.looks == 8


# ---- resume -------------------------------------------------------------------------------------


def test_a_resumed_run_follows_its_new_cadence(tmp_path):
    saver = ModelCheckpoint(tmp_path, save_last=True)
    fit([LeakageMonitor(Probe(), every_n_steps=1000), saver], tmp_path, enable_checkpointing=True)
    probe = Probe()
    monitor = LeakageMonitor(probe, every_n_steps=3)
    fit([monitor], tmp_path / "b", max_epochs=2, ckpt_path=tmp_path / "last.ckpt")
    assert [step for step, *_ in probe.seen] == [8, 9, 12, 15]


def test_an_attack_that_is_refused_leaves_no_hook_on_the_optimizer(tmp_path):
    module = CausalLMModule(tiny_gpt2().train())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.configure_optimizers = lambda: optimizer
    with pytest.raises(ValueError, match="is neither a role"):
        fit([LeakageMonitor(Probe(role=""))], tmp_path, module=module)
    assert not hasattr(optimizer.step, "_fedleak_before_step")


def test_a_resumed_run_keeps_its_cadence(tmp_path):
    saver = ModelCheckpoint(tmp_path, save_last=True)
    fit([LeakageMonitor(Probe(), every_n_steps=5), saver], tmp_path, enable_checkpointing=True)
    probe = Probe()
    monitor = LeakageMonitor(probe, every_n_steps=5)
    fit([monitor], tmp_path / "b", max_epochs=2, ckpt_path=tmp_path / "last.ckpt")
    assert [step for step, *_ in probe.seen] == [8, 10, 15]


def test_a_resumed_fit_looks_at_its_first_step_and_a_gate_judges_it(tmp_path):
    first = fit([LeakageMonitor(Probe(k=20), every_n_steps=50)], tmp_path, n=40)
    first.save_checkpoint(tmp_path / "10.ckpt")
    assert first.global_step == 10
    probe = Probe(k=20)
    gate = RiskGate(F1, at_most=0.1, action="warn")
    monitor = LeakageMonitor(probe, every_n_steps=50)
    with announced("warns at step 10"):
        fit(
            [gate, monitor], tmp_path / "b", n=40, max_epochs=4, ckpt_path=tmp_path / "10.ckpt"
        )  # fmt: skip
    assert [step for step, *_ in probe.seen] == [10]
    assert monitor.last_step == 10


def waiting(settings, root, n=4, **gate):
    """A fit that ends before there was any text outside the batch to ask for."""
    monitor = LeakageMonitor([Probe(), FCMembership(layer=1)], every_n_steps=50)
    gate = RiskGate("leakage/fc_membership/auc", at_most=0.9, **gate)
    trainer = fit([gate, monitor], root, n=n, **settings)
    return trainer, gate, monitor


@pytest.mark.parametrize("gate", [{}, {"patience": 5}, {"bound": "lower", "patience": 2}])
def test_a_strict_gate_that_never_had_a_result_ends_unknown(tmp_path, gate):
    trainer, _, _ = waiting({}, tmp_path, action="warn", strict=True, **gate)
    trainer.save_checkpoint(tmp_path / "1.ckpt")
    for settings in ({}, {"ckpt_path": tmp_path / "1.ckpt", "max_epochs": 2}):
        with pytest.warns(UserWarning, match="is unknown"):
            _, judged, monitor = waiting(settings, tmp_path / "b", action="warn", **gate)
        assert math.isnan(judged.fired.value)
        assert math.isnan(monitor.latest["leakage/fc_membership/auc"])


def test_a_gate_that_is_not_strict_says_nothing_of_a_fit_without_a_result(tmp_path):
    _, gate, _ = waiting({}, tmp_path, strict=False)
    assert gate.fired is None


def test_a_gate_says_nothing_of_a_fit_that_was_over_before_it_began(tmp_path):
    trainer, *_ = waiting({}, tmp_path, n=16, strict=False)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    _, gate, _ = waiting({"ckpt_path": tmp_path / "end.ckpt"}, tmp_path, n=16, patience=3)
    assert gate.fired is None


def frozen_head():
    model = tiny_gpt2(tied=False).train()
    model.lm_head.weight.requires_grad_(False)
    return CausalLMModule(model)


@pytest.mark.parametrize("readout", ["sign", "learned"])
def test_a_run_whose_attack_read_nothing_can_be_resumed(tmp_path, readout):
    def callbacks():
        attack = AlignedFlatChat(PublicText(PUBLIC), readout=readout, name="a")
        return [LeakageMonitor(attack, every_n_steps=4)]

    saver = ModelCheckpoint(tmp_path, save_last=True)
    fit([*callbacks(), saver], tmp_path, module=frozen_head(), enable_checkpointing=True)
    again = callbacks()
    fit(again, tmp_path / "b", module=frozen_head(), max_epochs=2, ckpt_path=tmp_path / "last.ckpt")
    assert again[0].latest["leakage/a/exposed"] == 0


# ---- surfaces that change -----------------------------------------------------------------------


class Unfreezing(BaseFinetuning):
    """Trains the head from the second epoch on."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.model.lm_head)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.lm_head, optimizer)


@pytest.mark.parametrize("unfreezing_first", [True, False])
def test_a_head_that_is_unfrozen_later_is_attacked_from_then_on(tmp_path, unfreezing_first):
    probe = Probe()
    monitor = LeakageMonitor(probe, every_n_steps=4)
    callbacks = [Unfreezing(), monitor] if unfreezing_first else [monitor, Unfreezing()]
    module = CausalLMModule(tiny_gpt2(tied=False).train())
    with pytest.warns(UserWarning, match="not 'safe'"):
        fit(callbacks, tmp_path, module=module, max_epochs=2)
    assert [step for step, *_ in probe.seen] == [8, 12]
    assert probe.prepared == 1
    lines = [json.loads(x) for x in monitor.engine.jsonl.path.read_text().splitlines()]
    assert [x["exposed"] for x in lines] == [False, False, True, True]
    assert monitor.latest[F1] > 0


def test_an_attack_that_cannot_be_calibrated_later_is_unknown(tmp_path):
    class Unprepared(Probe):
        def prepare(self, anatomy):
            raise ValueError("no public text")

    monitor = LeakageMonitor(Unprepared(), every_n_steps=4)
    module = CausalLMModule(tiny_gpt2(tied=False).train())
    with pytest.warns(UserWarning, match="gave no result at step 8"):
        trainer = fit([Unfreezing(), monitor], tmp_path, module=module, max_epochs=2)
    assert trainer.global_step == 16
    assert monitor.failures == 2


def test_a_head_that_is_frozen_later_is_not_exposed_from_then_on(tmp_path):
    class Freezing(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                pl_module.model.lm_head.weight.requires_grad_(False)
                pl_module.model.lm_head.weight.grad = None

    monitor = LeakageMonitor(Probe(), every_n_steps=4)
    module = CausalLMModule(tiny_gpt2(tied=False).train())
    fit([monitor, Freezing()], tmp_path, module=module, max_epochs=2)
    assert monitor.latest["leakage/probe/exposed"] == 0
    assert monitor.failures == 0
    assert torch.isfinite(torch.tensor(monitor.latest[F1]))
