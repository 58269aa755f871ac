"""Which batches and which optimizer step a look covers, however the user steps."""

import json
import math
import time

import pytest
import torch

from lightning_fedleak.callbacks import LeakageMonitor, RiskGate
from lightning_fedleak.model.anatomy import HEAD_WEIGHT
from lightning_fedleak.model.batches import BatchError
from tests.callbacks.runs import Probe, fit
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.models import tiny_gpt2

F1 = "leakage/probe/f1"


def batches(n=32):
    return list(random_token_loader(n))


def n_types(*chosen):
    return torch.cat([b["labels"][:, 1:].flatten() for b in chosen]).unique().numel()


def sizes(monitor):
    lines = [json.loads(x) for x in monitor.engine.jsonl.path.read_text().splitlines()]
    return [(x["step"], x["n"]) for x in lines]


class Manual(CausalLMModule):
    automatic_optimization = False

    def optimizer(self):
        return self.optimizers()

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizer()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.steps(optimizer, batch, batch_idx)

    def steps(self, optimizer, batch, batch_idx):
        optimizer.step()
        optimizer.zero_grad()


def model():
    return tiny_gpt2(dropout=0.0).train()


def test_manual_accumulation_is_one_window(tmp_path):
    class Accumulating(Manual):
        def steps(self, optimizer, batch, batch_idx):
            if batch_idx % 3 == 2:
                super().steps(optimizer, batch, batch_idx)

    probe = Probe()
    monitor = LeakageMonitor(probe, every_n_steps=1)
    module = Accumulating(model())
    fit([monitor], tmp_path, module=module)
    b = batches()
    assert sizes(monitor) == [(0, n_types(*b[0:3])), (1, n_types(*b[3:6]))]


def test_of_several_steps_on_one_batch_the_first_is_looked_at(tmp_path):
    class Often(Manual):
        def steps(self, optimizer, batch, batch_idx):
            for _ in range(3):
                optimizer.step()
            optimizer.zero_grad()

    probe = Probe()
    monitor = LeakageMonitor(probe, every_n_steps=1)
    fit([monitor], tmp_path, module=Often(model()))
    assert [step for step, *_ in probe.seen] == [0, 3, 6, 9, 12, 15, 18, 21]
    assert monitor.failures == 0


class Two(Manual):
    """The embedding steps at every batch, the head with its bias-free weight at every fourth."""

    every = 4

    def configure_optimizers(self):
        head = self.model.lm_head.weight
        others = [p for p in self.parameters() if p is not head]
        return [torch.optim.SGD(others, lr=0.01), torch.optim.SGD([head], lr=0.01)]

    def optimizer(self):
        return self.optimizers()

    def steps(self, optimizer, batch, batch_idx):
        first, second = optimizer
        first.step()
        first.zero_grad()
        if batch_idx % self.every == self.every - 1:
            second.step()
            second.zero_grad()


def two(every):
    module = Two(tiny_gpt2(tied=False, dropout=0.0).train())
    module.every = every
    return module


def test_an_optimizer_that_steps_seldom_is_looked_at_over_its_own_window(tmp_path):
    probe = Probe()
    monitor = LeakageMonitor(probe, every_n_steps=1)
    fit([monitor], tmp_path, module=two(4))
    b = batches()
    assert [n for _, n in sizes(monitor)] == [n_types(*b[0:4]), n_types(*b[4:8])]
    assert monitor.failures == 0


def test_attacks_on_two_optimizers_that_step_together_both_run(tmp_path):
    head, embedding = Probe(), Probe(name="embedding", role="embedding.weight")
    monitor = LeakageMonitor([head, embedding], every_n_steps=1)
    fit([monitor], tmp_path, module=two(1))
    assert monitor.failures == 0
    assert len(head.seen) == len(embedding.seen) == monitor.looks == 8


def test_a_torch_optimizer_that_lightning_does_not_count_is_refused(tmp_path):
    class Raw(Manual):
        def optimizer(self):
            return self.optimizers(use_pl_optimizer=False)

    with pytest.raises(RuntimeError, match="use_pl_optimizer"):
        fit([LeakageMonitor(Probe(), every_n_steps=2)], tmp_path, module=Raw(model()))


def test_batches_that_trained_nothing_are_no_part_of_the_truth(tmp_path):
    class Picky(CausalLMModule):
        def training_step(self, batch, batch_idx):
            if batch_idx in (0, 3):
                return None
            return super().training_step(batch, batch_idx)

    monitor = LeakageMonitor(Probe(), every_n_steps=1)
    fit([monitor], tmp_path / "a", module=Picky(model()))
    assert [step for step, _ in sizes(monitor)] == [1, 2, 4, 5, 6, 7]
    assert monitor.failures == 0

    monitor = LeakageMonitor(Probe(), every_n_steps=1)
    fit([monitor], tmp_path / "b", module=Picky(model()), accumulate_grad_batches=2)
    b = batches()
    expected = [n_types(b[1]), n_types(b[2]), n_types(*b[4:6]), n_types(*b[6:8])]
    assert [n for _, n in sizes(monitor)] == expected


def test_a_batch_that_a_hook_skipped_is_no_part_of_the_truth(tmp_path):
    class Skipping(CausalLMModule):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if self.current_epoch == 0 and batch_idx == 1 else None

    monitor = LeakageMonitor(Probe(), every_n_steps=1)
    fit([monitor], tmp_path, module=Skipping(model()), max_epochs=2)
    b = batches()
    assert [n for _, n in sizes(monitor)][:3] == [n_types(b[0]), n_types(b[0]), n_types(b[1])]


def test_the_last_incomplete_window_of_an_epoch_is_looked_at(tmp_path):
    monitor = LeakageMonitor(Probe(), every_n_steps=1)
    fit([monitor], tmp_path, module=CausalLMModule(model()), accumulate_grad_batches=3)
    b = batches()
    expected = [n_types(*b[0:3]), n_types(*b[3:6]), n_types(*b[6:8])]
    assert [n for _, n in sizes(monitor)] == expected


def test_validation_inside_a_window_changes_nothing(tmp_path):
    class Validating(CausalLMModule):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.model(**batch).loss)

        def val_dataloader(self):
            return random_token_loader(8)

    monitor = LeakageMonitor(Probe(), every_n_steps=1)
    fit(
        [monitor], tmp_path, module=Validating(model()), accumulate_grad_batches=2,
        val_check_interval=1,
    )  # fmt: skip
    b = batches()
    assert [n for _, n in sizes(monitor)] == [n_types(*b[i : i + 2]) for i in (0, 2, 4, 6)]
    assert monitor.failures == 0


def test_a_step_that_takes_an_iterator_is_refused_with_the_mend(tmp_path):
    class Iterating(CausalLMModule):
        def training_step(self, dataloader_iter):
            batch, batch_idx, _ = next(dataloader_iter)
            return super().training_step(batch, batch_idx)

    with pytest.raises(BatchError, match="dataloader_iter"):
        fit([LeakageMonitor(Probe())], tmp_path, module=Iterating(model()))


@pytest.mark.parametrize("settings", [{"fast_dev_run": 2}, {"overfit_batches": 2}])
def test_short_runs_are_looked_at(tmp_path, settings):
    monitor = LeakageMonitor(Probe(), every_n_steps=1)
    fit([monitor], tmp_path, module=CausalLMModule(model()), **settings)
    assert monitor.looks == 2


# ---- a look that never ends is unknown ----------------------------------------------------------


def test_a_fit_in_which_no_look_could_end_is_a_breach_for_a_strict_gate(tmp_path):
    class Silent(CausalLMModule):
        def training_step(self, batch, batch_idx):
            return None

    monitor = LeakageMonitor(Probe(), every_n_steps=1)
    gate = RiskGate(F1, at_most=0.5, action="raise")
    with pytest.raises(RuntimeError, match="unknown"):
        fit([gate, monitor], tmp_path, module=Silent(model()))
    assert math.isnan(gate.fired.value)
    assert monitor.failures == 1


def test_a_round_longer_than_the_run_is_unknown(tmp_path):
    monitor = LeakageMonitor(Probe(), local_steps=100)
    with pytest.warns(UserWarning, match="training ended before"):
        fit([monitor], tmp_path)
    assert math.isnan(monitor.latest[F1])


def test_a_fit_without_steps_is_not(tmp_path):
    monitor = LeakageMonitor(Probe())
    fit([monitor], tmp_path, module=CausalLMModule(model()), limit_train_batches=0)
    assert (monitor.looks, monitor.failures) == (0, 0)


# ---- local steps --------------------------------------------------------------------------------


def grouped(lr_body, lr_head):
    class Grouped(CausalLMModule):
        def configure_optimizers(self):
            head = self.model.lm_head.weight
            others = [p for p in self.parameters() if p is not head]
            return torch.optim.SGD(
                [{"params": others, "lr": lr_body}, {"params": [head], "lr": lr_head}]
            )

    return Grouped(tiny_gpt2(tied=False, dropout=0.0).train())


def test_an_update_is_divided_by_the_learning_rate_of_its_own_group(tmp_path):
    update, gradient = Probe(), Probe()
    fit([LeakageMonitor(update, local_steps=1)], tmp_path / "a", module=grouped(0.1, 0.001))
    fit([LeakageMonitor(gradient)], tmp_path / "b", module=grouped(0.1, 0.001))
    torch.testing.assert_close(update.seen[0][2], gradient.seen[0][2], rtol=1e-3, atol=1e-5)


def test_an_update_with_several_learning_rates_is_unknown(tmp_path):
    class Both(Probe):
        def needs(self, anatomy):
            return type(super().needs(anatomy))(gradients=(HEAD_WEIGHT, "embedding.weight"))

    monitor = LeakageMonitor(Both(), local_steps=2)
    with pytest.warns(UserWarning, match="different learning rates"):
        fit([monitor], tmp_path, module=grouped(0.1, 0.001))
    assert monitor.failures > 0


@pytest.mark.parametrize("settings", [{}, {"local_steps": 2}])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_max_overhead_counts_whole_optimizer_steps(tmp_path, settings, accumulate, monkeypatch):
    given = []
    monitor = LeakageMonitor(Probe(), max_overhead=0.5, **settings)
    after_look = monitor.engine.options.cadence.after_look

    def recording(step, look_seconds, step_seconds):
        given.append(step_seconds)
        return after_look(step, 1e-9, step_seconds)

    monkeypatch.setattr(monitor.engine.options.cadence, "after_look", recording)
    clock = [time.perf_counter()]

    class Ticking(CausalLMModule):
        def training_step(self, batch, batch_idx):
            clock[0] += 1000.0
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr("lightning_fedleak.engine.run.time.perf_counter", lambda: clock[0])
    fit([monitor], tmp_path, module=Ticking(model()), accumulate_grad_batches=accumulate)
    assert given
    assert all(seconds == pytest.approx(1000 * accumulate, rel=0.01) for seconds in given)


def test_seconds_do_not_follow_the_wall_clock(tmp_path, monkeypatch):
    hours = iter(range(10**6, 0, -1))
    monkeypatch.setattr(time, "time", lambda: 3600.0 * next(hours))
    monitor = LeakageMonitor(Probe(), every_n_steps=1)
    fit([monitor], tmp_path, n=8)
    assert monitor.looks == 2
    assert 0 < monitor.latest["monitor/seconds"] < 600
