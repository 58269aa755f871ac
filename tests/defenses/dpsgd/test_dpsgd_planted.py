"""The guarantee, from outside: what a server that plants a neuron can tell from what is released.

The neuron fires for one target alone, its gradient has at least the clip norm, and no other sample
adds to it. Then its signed score is N(1, sigma^2) with the target and N(0, sigma^2) without, so its
membership AUC is Phi(1 / (sigma sqrt 2)).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedleak.defenses import DPSGD, CanaryGradient
from lightning_fedleak.defenses.accounting.account import Accountant
from tests.helpers.dpsgd_settings import grouped
from tests.helpers.inputs import context

CLIP, WIDTH, BATCH, N = 0.5, 4, 4, 16
TARGET = torch.tensor([3.0, 0.0, 0.0, 0.0])


class Planted(nn.Module):
    """A neuron that only the target passes; what is above it is frozen and steep."""

    def __init__(self) -> None:
        super().__init__()
        self.neuron, self.above = nn.Linear(WIDTH, 1), nn.Linear(1, 1)
        with torch.no_grad():
            self.neuron.weight.copy_(TARGET[None])
            self.neuron.bias.fill_(-8.5)
            self.above.weight.fill_(100.0)
        self.above.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.above(torch.relu(self.neuron(x)))


class Server:
    """Sees releases; ``score`` is the neuron's gradient along what the target would add."""

    def __init__(self, sigma: float, **settings: Any) -> None:
        self.defense, self.model = (
            DPSGD(CLIP, **grouped(noise_multiplier=sigma, **settings)),
            Planted(),
        )
        self.context = context(self.model, entropy=b"planted neuron of a test, 32 byte")
        self.parameters = list(self.model.neuron.parameters())
        self.rest = torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
        self.data = torch.cat([TARGET[None], self.rest[1:]])
        self.defense.before_setup(self.context)
        loader: DataLoader[Any] = DataLoader(TensorDataset(self.data), batch_size=BATCH)
        self.loader = self.defense.on_dataloader(loader, self.context)
        direction = torch.cat([TARGET, torch.ones(1)])
        self.direction = direction / direction.norm()

    def score(self, batch: Tensor) -> float:
        for parameter in self.parameters:
            parameter.grad = None
        loss = self.defense.on_logical_batch(self.step, [batch], self.context)
        loss.backward()
        with torch.no_grad():
            self.defense.on_gradients(self.parameters, self.context)
        update = torch.cat([p.grad.flatten() for p in self.parameters])
        return float(update @ self.direction) * BATCH / CLIP

    def step(self, batch: list[Tensor]) -> Tensor:
        return self.defense.on_training_step(
            lambda: self.model(batch[0]).mean(), batch, self.context
        )


@pytest.mark.parametrize(("sigma", "delta"), [(1.0, 1e-3), (2.0, 1e-3)])
def test_no_game_of_a_canary_shows_more_than_the_accounted_epsilon(
    sigma: float, delta: float
) -> None:
    """The 95% lower bound of an add/remove game, 200 times; it may exceed epsilon in 5% of them.

    Of a canary computed beside the step; for samples see ``tests/auditing``.
    """
    repetitions, plays = 200, 400
    server, account = Server(sigma), Accountant("prv")
    account.step(sigma, 1.0)
    epsilon = account.epsilon(delta)
    server.score(server.rest[:BATCH])
    games = repetitions * plays
    scores = []
    for present in (True, False):
        batch = server.rest[:1]
        loss = server.defense.on_training_step(
            lambda batch=batch: server.model(batch).mean(), [batch], server.context
        )
        loss.backward()
        canary = CanaryGradient(torch.full((1, games, 1), 100.0 if present else 0.0))
        released = server.defense.on_canary(canary, server.parameters, server.context).released
        scores.append((released[:, 0] * BATCH / CLIP).view(repetitions, plays).numpy())
        with torch.no_grad():
            server.defense.on_gradients(server.parameters, server.context)
    threshold = 0.5
    counts = [(side > threshold).sum(1) for side in scores]
    true_low = scipy.stats.beta.ppf(0.025, counts[0], plays - counts[0] + 1)
    false_high = scipy.stats.beta.ppf(0.975, counts[1] + 1, plays - counts[1])
    bound = np.log(np.maximum(true_low - delta, 1e-12) / false_high)
    excess = int((bound > epsilon).sum())
    assert scipy.stats.binomtest(excess, repetitions, 0.05, "greater").pvalue > 0.01
    assert bound.mean() > 0.1 * epsilon
