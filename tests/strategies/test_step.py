"""`before_real_step`: once, after the closure, before the update, and nothing else changes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from lightning_fedleak.model.taps.gradients import before_real_step, check_optimizer

OPTIMIZERS = {
    "nesterov, foreach": lambda p: torch.optim.SGD(
        p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True
    ),
    "adam, fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
}


def problem(seed: int = 0) -> tuple[nn.Linear, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model, torch.randn(5, 4, generator=generator)


def closure_of(model: nn.Linear, optimizer: torch.optim.Optimizer, x: torch.Tensor):
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["closure", "keyword", "none"])
def test_sees_the_gradient_and_the_weights_before_the_update(name: str, way: str) -> None:
    model, x = problem()
    twin, _ = problem()
    optimizer = OPTIMIZERS[name](model.parameters())
    reference = OPTIMIZERS[name](twin.parameters())
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def look() -> None:
        assert not torch.is_grad_enabled()
        seen.append((model.weight.grad.clone(), model.weight.detach().clone()))

    remove = before_real_step(optimizer, look)
    for step in range(3):
        before = twin.weight.detach().clone()
        gradient = torch.autograd.grad(twin(x).square().mean(), twin.weight)[0]
        closures = [closure_of(m, o, x) for m, o in ((model, optimizer), (twin, reference))]
        if way == "none":
            for closure in closures:
                closure()
            results = [optimizer.step(), reference.step()]
        elif way == "closure":
            results = [optimizer.step(closures[0]), reference.step(closures[1])]
        else:
            results = [optimizer.step(closure=closures[0]), reference.step(closure=closures[1])]
        assert results[0] == results[1]
        assert len(seen) == step + 1
        assert torch.equal(seen[-1][0], gradient)
        assert torch.equal(seen[-1][1], before)
        assert torch.equal(model.weight, twin.weight)
    remove()
    remove()
    assert "step" not in vars(optimizer)
    optimizer.step(closure_of(model, optimizer, x))
    assert len(seen) == 3


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
