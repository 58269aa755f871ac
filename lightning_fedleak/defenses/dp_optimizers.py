"""Optimizers of other libraries that clip and noise each example's gradient inside their step.

Opacus' ``PrivacyEngine.make_private`` returns such a ``DPOptimizer``. What leaves is made in its
step: before it, ``p.grad`` is the raw gradient, and in a step that it skips (a part of a virtual
batch) nothing leaves at all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_fedleak.defenses import Accountant, Defense, DefenseContext, DefenseError, Privacy
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.model.taps import before_real_step, real_optimizer

SLACK = 0.02  # of the steps that an epsilon is of, so that not each look composes: 1% too large
MOST_DELTA = 1e-5
"""Largest delta of a reported epsilon: a tenth of 1/N where the data has over 10,000 examples."""


class OptimizerDP(Defense):
    """What an optimizer of another library declares of itself; it acts by itself.

    Args:
        optimizer: has ``noise_multiplier`` and ``max_grad_norm``.
        under_ddp: DistributedDataParallel reduces its gradients.

    Attributes:
        inner: the optimizer that takes the step with what was made.
    """

    guarantee = (
        "differential privacy of one example, by the steps that its own accountant has recorded, "
        "where batches are drawn by Poisson sampling; neither was checked here"
    )

    def __init__(self, optimizer: Optimizer, *, under_ddp: bool = False) -> None:
        self._optimizer: Any = optimizer
        self.inner = real_optimizer(optimizer)
        self.name = type(optimizer).__name__
        self.noise_multiplier = getattr(optimizer, "noise_multiplier", math.nan)
        self.max_grad_norm = getattr(optimizer, "max_grad_norm", math.nan)
        self.expected_batch_size = getattr(optimizer, "expected_batch_size", None)
        self._prepares = self.inner is not optimizer and hasattr(optimizer, "pre_step")
        self._under_ddp = under_ddp
        self._reduced = False
        self._account = Accountant()

    def why_hidden(self, stage: Stage) -> str | None:
        """Return why the gradient at a stage cannot be read; None where it can."""
        if self._under_ddp:
            return (
                "DistributedDataParallel shares raw gradients inside backward, before "
                f"{self.name} adds noise: Opacus has DifferentiallyPrivateDistributedDataParallel"
            )
        if self._prepares and stage is Stage.LOCAL:
            return f"{self.name} makes its gradient of single examples', and none is there before"
        if not self._prepares and stage is not Stage.LOCAL:
            return (
                f"{self.name} adds noise inside of its step, where what leaves cannot be read; "
                "that of Opacus' DPOptimizer can be"
            )
        return None

    @property
    def acts_on_gradients(self) -> bool:
        """Return that it rewrites gradients: a canary beside them is not passed through it."""
        return True

    @property
    def accountant(self) -> Any:
        """Return the accountant that its step calls, with a ``history``; None: not reachable."""
        cells = getattr(getattr(self._optimizer, "step_hook", None), "__closure__", None) or ()
        contents = (cell.cell_contents for cell in cells)
        return next((one for one in contents if hasattr(one, "get_epsilon")), None)

    @property
    def privacy(self) -> Privacy:
        """Return what the steps so far have cost that its accountant has recorded.

        They are composed here, since Opacus may take minutes for that where noise is small.

        Raises:
            DefenseError: no accountant can be reached, or no step was taken: epsilon is unknown.
        """
        accountant = self.accountant
        if accountant is None or not accountant.history:
            raise DefenseError(f"{self.name}: no accountant says what its steps have cost")
        noise, rate, _ = accountant.history[-1]
        examples = (self.expected_batch_size or 0) * self._share() / rate
        delta = min(MOST_DELTA, 0.1 / max(1.0, examples))
        new: Counter[tuple[float, float]] = Counter()
        for sigma, share, count in accountant.history:
            new[float(sigma), float(share)] += count
        for sigma, share, count in self._account.history:
            new[sigma, share] -= count
        for (sigma, share), count in new.items():
            if count > 0:
                self._account.step(sigma, share, count, planned=True)
        epsilon = self._account.epsilon(delta, slack=SLACK)
        return Privacy(epsilon, delta, noise, rate, self._account.steps)

    def _share(self) -> int:
        """Return how many processes draw the batch of a step together."""
        return int(getattr(self._optimizer, "world_size", 1))

    @property
    def reduces(self) -> bool:
        """Return whether it also sums over processes, behind the noise."""
        return hasattr(self._optimizer, "reduce_gradients")

    def noise_std(self, context: DefenseContext) -> float:
        """Return the deviation of the noise on each number of ``p.grad`` as it is now."""
        optimizer = self._optimizer
        if not self._prepares:
            return math.nan
        if not self._reduced and getattr(optimizer, "rank", 0) != 0:
            return 0.0  # one process adds the noise of all
        std = float(optimizer.noise_multiplier * optimizer.max_grad_norm)
        if optimizer.loss_reduction == "mean":
            std /= optimizer.expected_batch_size * optimizer.accumulated_iterations
            std /= self._share() if self._reduced else 1
        # Where each process is a client, what all add is taken for the mean of independent noises.
        return std * math.sqrt(context.clients) if self._reduced else std

    def watch(
        self, prepared: Callable[[], None], reduced: Callable[[], None]
    ) -> list[Callable[[], Any]]:
        """Call functions in each step that is taken, while ``p.grad`` is what leaves.

        Args:
            prepared: is called once this process's gradient is clipped and noised.
            reduced: is called behind it, once it is that of all processes.

        Returns:
            Functions that end it.
        """
        optimizer = self._optimizer
        if not self.reduces:
            return [before_real_step(self.inner, one) for one in (prepared, reduced)]
        original, overridden = optimizer.reduce_gradients, "reduce_gradients" in vars(optimizer)

        def reduce_gradients() -> None:
            self._reduced = False
            with torch.no_grad():
                prepared()
            original()
            self._reduced = True

        optimizer.reduce_gradients = reduce_gradients
        restore: Callable[[], object] = partial(vars(optimizer).pop, "reduce_gradients", None)
        if overridden:
            restore = partial(setattr, optimizer, "reduce_gradients", original)
        return [restore, before_real_step(self.inner, reduced)]


def declared(optimizers: Sequence[Optimizer], *, under_ddp: bool) -> tuple[OptimizerDP, ...]:
    """Return what those optimizers declare that add noise by themselves.

    An engine that patches the optimizer's ``step`` (``optimizer.privacy_engine``) is one too.

    Args:
        optimizers: as the run steps them.
        under_ddp: DistributedDataParallel reduces their gradients.
    """
    marks = ("noise_multiplier", "privacy_engine")
    marked = [o for o in optimizers if any(hasattr(o, mark) for mark in marks)]
    return tuple(OptimizerDP(optimizer, under_ddp=under_ddp) for optimizer in marked)
