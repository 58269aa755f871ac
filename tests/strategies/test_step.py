"""`before_real_step` beside schedulers, and optimizers that it refuses."""

import warnings

import pytest
import torch
from torch import nn

from lightning_fedleak.model.taps.gradients import before_real_step, check_optimizer


def problem() -> tuple[nn.Linear, torch.Tensor]:
    return nn.Linear(4, 3), torch.randn(5, 4)


def closure_of(model: nn.Linear, optimizer: torch.optim.Optimizer, x: torch.Tensor):
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_learning_rate_schedulers_keep_their_own_patch(scheduler_first: bool) -> None:
    model, x = problem()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls: list[int] = []
    remove = None
    if not scheduler_first:
        remove = before_real_step(optimizer, lambda: calls.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    own = optimizer.step
    if remove is None:
        remove = before_real_step(optimizer, lambda: calls.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(closure_of(model, optimizer, x))
        scheduler.step()
    assert optimizer._opt_called
    assert calls == [1]
    remove()
    optimizer.step(closure_of(model, optimizer, x))
    assert calls == [1]
    assert (optimizer.step is own) or not scheduler_first
    assert optimizer.step._wrapped_by_lr_sched


def test_optimizers_without_one_moment_are_refused() -> None:
    model, x = problem()

    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            closure()
            return super().step(closure)

    class Never(torch.optim.SGD):
        def step(self, closure=None):
            return super().step()

    with pytest.raises(RuntimeError, match=r"LBFGS.*AdamW"):
        before_real_step(torch.optim.LBFGS(model.parameters()), lambda: None)
    for kind, message in ((Twice, "twice"), (Never, "did not run")):
        optimizer = kind(model.parameters(), 0.1)
        before_real_step(optimizer, lambda: None)
        with pytest.raises(RuntimeError, match=message):
            optimizer.step(closure_of(model, optimizer, x))
    fused = torch.optim.Adam(model.parameters(), fused=True)
    check_optimizer(fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with pytest.raises(RuntimeError, match="fused=False"):
        check_optimizer(fused, scaler)
    before_real_step(fused, lambda: None)
    scaler.scale(model(x).square().mean()).backward()
    with pytest.raises(RuntimeError, match="fused=False"):
        scaler.step(fused)
