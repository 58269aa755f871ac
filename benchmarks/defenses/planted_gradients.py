"""Several hundred exact games in one run of DP-SGD, on a loss whose gradients are the examples.

Where :mod:`~benchmarks.defenses.planted` inserts a neuron into a language model, this plants
the gradients themselves (the worst case of Nasr et al. 2023, arXiv 2302.07956). An example's loss
is its inner product with the weights, so that its gradient is the example, whatever the weights
are. Every example is a target on an axis of its own, at least one and a half clip norms long. So
each step of the run is, along each axis, a sampled Gaussian mechanism, and what is released along
one axis is independent of the coins of all others: games of one run are as good as games of as many
runs.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.defenses.dp_sgd_games import Games, log_likelihood_ratios
from lightning_fedleak.defenses import DPSGD, DefenseContext
from lightning_fedleak.defenses.accounting.accounting import History
from lightning_fedleak.defenses.dpsgd.poisson import PoissonBatchSampler, UserBatchSampler
from lightning_fedleak.defenses.host import Host

RATE = 0.1


class Steps(Host):
    """A run of a known number of steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def count_steps(self, per_epoch: int) -> int:
        return self._steps


class PlantedGradients:
    """Add/remove games against DPSGD, by the hooks that a strategy calls, in its order.

    Every run is new: a defence, its secret entropy, weights at zero, a fair inclusion bit for
    each target, and real steps of SGD between releases. The entropy follows from ``seed`` and the
    number of the run and comes through the :class:`~lightning_fedleak.defenses.DefenseContext`, as
    that of a fit does: so a run can be repeated, while the defence does what it does in earnest and
    its epsilon is finite (with ``DPSGD(seed=...)`` it is infinite).

    Without a target its place in the data is empty, and drawn all the same: the sample rate, and
    with it the number of examples, is public in both worlds, as the accountant assumes.

    Args:
        defense: makes a new DPSGD, with noise.
        targets: how many; also the number of examples, 2 at least.
        batch_size: of the loader. Under Poisson sampling ``batch_size / targets`` is the rate. None
            for as many as targets: inclusion is given.
        steps: releases of a run.
        seed: of the runs' entropy and coins.
        rows: of each target, where a target is a user (``DPSGD(unit="user")``). Their mean is the
            target; one by one they are between half and one and a half times as long. ``owners``
            says whose each row is.

    Attributes:
        history: what the defence has accounted for a run, alike in all; empty before the first.
    """

    def __init__(
        self, defense: Callable[[], DPSGD], *, targets: int = 400, batch_size: int | None = None,
        steps: int = 1, seed: int = 0, rows: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self._batch_size = targets if batch_size is None else batch_size
        self.steps = steps
        self.seed = seed
        self.history: History = ()
        self._defense = defense
        arguments = defense()
        self._clip = 1.0 if arguments.max_grad_norm == "auto" else arguments.max_grad_norm
        self._data = torch.diag(self._clip * torch.linspace(1.5, 10.0, targets))
        if rows is not None:
            shares = [torch.linspace(0.5, 1.5, n) if n > 1 else torch.ones(1) for n in rows]
            self._data = self._data[owners(rows)] * torch.cat(shares)[:, None]
        layer = nn.Linear(targets, 1, bias=False, device="meta")
        self._model = nn.Sequential(layer.to_empty(device="cpu"))
        self._weights = list(self._model.parameters())
        self._loader = DataLoader(TensorDataset(self._data), batch_size=self._batch_size)

    def run(self, members: Tensor, number: int) -> Tensor:
        """Releases along the targets' axes, over the clip norm of each step.

        Args:
            members: (targets,) bool, which of them are there.
            number: of the run; the same gives the same noise and samples.

        Returns:
            (steps, targets) float64.

        Raises:
            RuntimeError: the defence has accounted this run otherwise than those before.
        """
        device, secret = torch.device("cpu"), self._secret("run", number)
        about = {"entropy": secret, "host": Steps(self.steps)}
        context = DefenseContext(self._model, 0, 1, device, "32-true", 0, **about)
        with torch.no_grad():
            self._weights[0].zero_()
        defense = self._defense()
        defense.before_setup(context)
        try:
            sampler = defense.on_dataloader(self._loader, context).batch_sampler
            defense.on_train_start(context)
            optimizer = torch.optim.SGD(self._weights, lr=RATE)
            releases = []
            for batch in itertools.islice(self._batches(sampler, members), self.steps):
                optimizer.zero_grad()
                self._backward(defense, context, batch)
                clip = defense._fit_step.clip.norm
                defense.before_release()
                with torch.no_grad():
                    defense.on_gradients(self._weights, context)
                optimizer.step()
                gradient = self._weights[0].grad
                assert gradient is not None
                releases.append(gradient[0].double() / clip)
        finally:
            defense.teardown()
        accounted = defense.accountant.history
        if self.history and accounted != self.history:
            raise RuntimeError(f"run {number} is accounted as {accounted}, others {self.history}")
        self.history = accounted
        return torch.stack(releases) * self._batch_size

    def coins(self, number: int) -> Tensor:
        """(targets,) bool, fair; the same for the same number of a run."""
        secret = np.frombuffer(self._secret("coins", number), dtype="<u4")
        targets = self._data.shape[1]
        return torch.from_numpy(np.random.default_rng(secret).random(targets) < 0.5)

    def games(self, number: int, sigma: float, sample_rate: float) -> Games:
        """The games of one run, a fair bit for each target, by the optimal score.

        Args:
            number: of the run; the same gives the same games.
            sigma: the noise multiplier that the score reckons with.
            sample_rate: likewise.
        """
        members = self.coins(number)
        releases = self.run(members, number)
        return Games(log_likelihood_ratios(releases, sigma, sample_rate).sum(0), members)

    def _backward(self, defense: DPSGD, context: DefenseContext, batch: Tensor) -> None:
        def step(rows: list[Tensor]) -> Tensor:
            return defense.on_training_step(lambda: self._model(rows[0]).mean(), rows, context)

        defense.on_logical_batch(step, [batch], context).backward()

    def _batches(self, sampler: Any, members: Tensor) -> Iterator[Tensor]:
        """Without end. Poisson draws are not noted by their sampler.

        It would tell the defence how many there were, and who is not there is drawn all the same.
        """
        if isinstance(sampler, UserBatchSampler):
            for step in itertools.count(sampler.step):
                present = [user for user in sampler.draw(step) if members[user]]
                rows = sorted((sampler.user_rows(u, step) for u in present), key=len, reverse=True)
                sampler._counts.append([len(indices) for indices in rows])
                yield self._data[[*itertools.chain.from_iterable(rows)]]
        draws = itertools.chain.from_iterable(itertools.repeat(sampler))
        if isinstance(sampler, PoissonBatchSampler):
            draws = map(sampler.draw, itertools.count(sampler.step))
        for sample in draws:
            yield self._data[[target for target in sample if members[target]]]

    def _secret(self, purpose: str, number: int) -> bytes:
        return hashlib.sha256(f"planted gradients {purpose} {self.seed} {number}".encode()).digest()


def owners(rows: Sequence[int]) -> list[int]:
    """Whose each row is, of users with so many rows."""
    return [user for user, count in enumerate(rows) for _ in range(count)]
