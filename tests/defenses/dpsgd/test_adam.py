"""DPAdamBC: against AdamW, its own recurrence in plain numbers, and what it refuses."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_fedleak.defenses import DPSGD, DefenseError, DPAdamBC, GradientNoise
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.strategies import DefendedStrategy
from tests.strategies.dpsgd_runs import BATCH, CLIP, CausalLM, fit, loader, trainer


class WithAdam(CausalLM):
    def __init__(self, kind: type = DPAdamBC, **settings: Any) -> None:
        super().__init__()
        self.kind, self.settings = kind, settings

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), **{"lr": 1e-3, **self.settings})


def test_without_noise_it_is_adamw() -> None:
    result = []
    for kind in (DPAdamBC, torch.optim.AdamW):
        settings = {"weight_decay": 0.1, "betas": (0.8, 0.95)}
        module, _ = fit(DPSGD(CLIP, noise_multiplier=0.0, seed=1), WithAdam(kind, **settings))
        result.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    torch.testing.assert_close(*result, rtol=1e-4, atol=1e-6)


def by_hand(
    gradients: list[np.ndarray[Any, Any]], variances: list[float], weights: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """The sums written out, every step's from the beginning."""
    lr, beta1, beta2, eps, floor = 0.01, 0.9, 0.99, 1e-8, 0.2
    for t in range(1, len(gradients) + 1):
        first = [(1 - beta1) * beta1 ** (t - 1 - i) for i in range(t)]
        second = [(1 - beta2) * beta2 ** (t - 1 - i) for i in range(t)]
        m = sum(w * g for w, g in zip(first, gradients, strict=False)) / sum(first)
        v = sum(w * g**2 for w, g in zip(second, gradients, strict=False)) / sum(second)
        phi = sum(w * x for w, x in zip(second, variances, strict=False)) / sum(second)
        weights = weights - lr * m / (np.sqrt(np.maximum(v - phi, floor * phi)) + eps)
    return weights


def test_each_step_takes_out_the_variances_so_far_also_where_they_change() -> None:
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(3, 4))
    parameter = nn.Parameter(torch.tensor(weights))
    optimizer = DPAdamBC([parameter], lr=0.01, betas=(0.9, 0.99), floor=0.2)
    variances = [0.5, 0.5, 2.0, 0.1, 0.0, 0.7]
    gradients = [rng.normal(size=(3, 4)) * 1.2 for _ in variances]
    for number, (gradient, variance) in enumerate(zip(gradients, variances, strict=True)):
        if number == 3:  # a checkpoint
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = DPAdamBC([parameter], lr=1.0)
            optimizer.load_state_dict(state)
        parameter.grad = torch.tensor(gradient)
        optimizer.set_noise({parameter: variance})
        optimizer.step()
    expected = by_hand(gradients, variances, weights)
    np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-5)


class Told(Callback):
    """Compares what the optimizer is told with the noise that is really there."""

    def __init__(self) -> None:
        self.told: list[float] = []
        self.really: list[float] = []

    def on_train_start(self, run: Any, module: Any) -> None:
        [optimizer] = run.optimizers
        right = optimizer.set_noise

        def told(variances: Any) -> None:
            self.told.append(next(iter(variances.values())))
            right(variances)

        optimizer.set_noise = told
        run.strategy.add_tap(self.tap)

    def tap(self, stage: Stage, optimizer: Any) -> None:
        if stage == Stage.AGGREGATE:
            grads = [p.grad.flatten() for p in optimizer.param_groups[0]["params"]]
            self.really.append(float(torch.cat(grads).var()))


def test_dpsgd_tells_it_the_noise_of_every_release_also_after_a_notch(tmp_path: Path) -> None:
    defense = DPSGD(
        CLIP, noise_multiplier=40.0, target_epsilon=3.0, target_delta=1e-3, accountant="filter"
    )

    class Harden(Callback):
        def on_train_batch_end(self, run: Any, *_: Any) -> None:
            if run.global_step == 2:
                defense.harden()

    look = Told()
    _, run = fit(defense, WithAdam(lr=1e-5), max_steps=4, callbacks=[look, Harden()])
    expected = [(s * CLIP / BATCH) ** 2 for s in (40, 40, 80, 80)]
    assert look.told == pytest.approx(expected, rel=1e-9)
    assert look.really == pytest.approx(expected, rel=0.05)
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = DPSGD(
        CLIP, noise_multiplier=40.0, target_epsilon=3.0, target_delta=1e-3, accountant="filter"
    )
    path = str(tmp_path / "a.ckpt")
    _, run = fit(again, WithAdam(lr=1e-5), max_steps=6, max_epochs=-1, ckpt_path=path)
    state = next(iter(run.optimizers[0].state.values()))
    assert float(state["step"]) == 6


def test_it_refuses_to_run_without_known_noise() -> None:
    module = WithAdam()
    before = [p.detach().clone() for p in module.parameters()]
    for strategy in ("auto", DefendedStrategy("auto", [GradientNoise(clip=1.0, sigma=1.0)])):
        with pytest.raises(DefenseError, match="no DPSGD has passed"):
            trainer(strategy, max_steps=1).fit(module, loader())
    with pytest.raises(DefenseError, match="gradient_noise changes the gradients after DPSGD"):
        fit([DPSGD(CLIP, noise_multiplier=1.0), GradientNoise(clip=1.0, sigma=1.0)], module)
    assert all(map(torch.equal, module.parameters(), before))
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = DPAdamBC([parameter])
    optimizer.set_noise({parameter: 1.0})
    optimizer.step()
    with pytest.raises(DefenseError, match="no DPSGD has passed"):
        optimizer.step()  # it was told of one release
    optimizer.set_noise({nn.Parameter(torch.ones(1)): 1.0})
    with pytest.raises(DefenseError, match="not released by DPSGD"):
        optimizer.step()
