"""Optimizers of other libraries that clip each example's gradient and add noise in their step.

Opacus' ``PrivacyEngine.make_private`` returns such an optimizer, a ``DPOptimizer`` around the
optimizer of the user. Inside its step it computes the gradient that is released; before the step,
``p.grad`` is the raw gradient. If Opacus splits a batch into parts (a virtual batch), the steps
after all parts except the last are skipped and release nothing.

A monitor measures what released gradients leak. It reads the gradient at a *stage*: ``LOCAL`` is
before the defence, ``SHARED`` after it in this process, ``AGGREGATE`` the mean over processes.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_fedleak.defenses import Accountant, Defense, DefenseContext, DefenseError, Privacy
from lightning_fedleak.defenses.host import override
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.model.taps import before_real_step, real_optimizer

# Epsilon is computed for this share more steps than were taken, and reused until they are taken, so
# that not every measurement step recomputes it. The reported epsilon is about 1% too large.
SLACK = 0.02
MAX_DELTA = 1e-5
"""Largest delta of a reported epsilon; with N > 10,000 examples it is 0.1 / N."""


class OptimizerDP(Defense):
    """The settings of a DP optimizer of another library; it does not change gradients itself.

    Args:
        optimizer: The optimizer, with ``noise_multiplier`` and ``max_grad_norm``.
        under_ddp: Whether DistributedDataParallel reduces its gradients.

    Attributes:
        inner: The optimizer inside it that applies the private gradient.
        noise_multiplier: The optimizer's noise multiplier; NaN if unknown.
        max_grad_norm: The optimizer's clip norm; NaN if unknown.
        expected_batch_size: The expected batch size of one process; None if unknown.
    """

    guarantee = (
        "differential privacy of one example, by the steps that its own accountant has recorded, "
        "provided that batches are drawn by Poisson sampling; neither was checked here"
    )

    def __init__(self, optimizer: Optimizer, *, under_ddp: bool = False) -> None:
        self._optimizer: Any = optimizer
        self.inner = real_optimizer(optimizer)
        self.name = type(optimizer).__name__
        self.noise_multiplier = getattr(optimizer, "noise_multiplier", math.nan)
        self.max_grad_norm = getattr(optimizer, "max_grad_norm", math.nan)
        self.expected_batch_size = getattr(optimizer, "expected_batch_size", None)
        self._has_pre_step = self.inner is not optimizer and hasattr(optimizer, "pre_step")
        self._under_ddp = under_ddp
        self._reduced = False  # whether ``p.grad`` is the mean over processes already
        self._account = Accountant()

    def why_hidden(self, stage: Stage) -> str | None:
        """Return why the gradient at a stage cannot be read; None if it can.

        Opacus' optimizers have a ``pre_step``, after which ``p.grad`` is the private gradient; the
        summed raw gradient is then never in ``p.grad``. Without ``pre_step`` it is the other way.
        """
        if self._under_ddp:
            return (
                "DistributedDataParallel shares raw gradients inside backward, before "
                f"{self.name} adds noise: use Opacus' DifferentiallyPrivateDistributedDataParallel"
            )
        if self._has_pre_step and stage is Stage.LOCAL:
            return f"{self.name} has no gradient before its step, which sums per-example ones"
        if not self._has_pre_step and stage is not Stage.LOCAL:
            return (
                f"{self.name} adds noise inside its step, where the released gradient cannot be "
                "read; use Opacus' DPOptimizer, whose released gradient can be read"
            )
        return None

    @property
    def acts_on_gradients(self) -> bool:
        """Return True: the optimizer rewrites gradients. Canaries are not passed through it."""
        return True

    @property
    def accountant(self) -> Any:
        """Return the accountant that the optimizer's step calls; None if it is not found."""
        # Opacus keeps it in the closure of the function that its step calls.
        cells = getattr(getattr(self._optimizer, "step_hook", None), "__closure__", None) or ()
        contents = (cell.cell_contents for cell in cells)
        return next((content for content in contents if hasattr(content, "get_epsilon")), None)

    @property
    def privacy(self) -> Privacy:
        """Return the privacy cost of the steps that the optimizer's accountant has recorded.

        Epsilon is computed from the accountant's history by this package, because Opacus may take
        minutes if the noise is small.

        Raises:
            DefenseError: No accountant was found, or no step was taken: epsilon is unknown.
        """
        accountant = self.accountant
        if accountant is None or not accountant.history:
            raise DefenseError(f"{self.name}: no accountant with a history, so the cost is unknown")
        noise, rate, _ = accountant.history[-1]
        examples = (self.expected_batch_size or 0) * self._world_size() / rate
        delta = min(MAX_DELTA, 0.1 / max(1.0, examples))
        # The steps of the accountant's history that this package's account does not hold yet.
        new_steps: Counter[tuple[float, float]] = Counter()
        for sigma, sample_rate, count in accountant.history:
            new_steps[float(sigma), float(sample_rate)] += count
        counted = Counter({(sigma, q): count for sigma, q, count in self._account.history})
        for event, count in (new_steps - counted).items():
            self._account.step(*event, count, planned=True)
        epsilon = self._account.epsilon(delta, slack=SLACK)
        return Privacy(epsilon, delta, noise, rate, self._account.steps)

    def _world_size(self) -> int:
        """Return the number of processes that together sample the batch of a step."""
        return int(getattr(self._optimizer, "world_size", 1))

    @property
    def reduces(self) -> bool:
        """Return whether the optimizer sums over processes itself, after it has added noise."""
        return hasattr(self._optimizer, "reduce_gradients")

    def noise_std(self, context: DefenseContext) -> float:
        """Return the standard deviation of the noise on each number of ``p.grad``; NaN if unknown.

        Before gradients are reduced it is the noise on this process's gradient. Afterwards it is
        multiplied by the root of the number of clients: the noise of one client in their mean.
        """
        optimizer = self._optimizer
        if not self._has_pre_step:
            return math.nan
        if not self._reduced and getattr(optimizer, "rank", 0) != 0:
            return 0.0  # the first process adds the noise of all
        std = float(optimizer.noise_multiplier) * self.example_norm(context)
        # The caller divides the noise of a client by the root of the number of clients, to get the
        # noise of the clients' mean. A reduced gradient is that mean already.
        return std * math.sqrt(context.clients) if self._reduced else std

    def example_norm(self, context: DefenseContext) -> float:
        """Return the clip norm, over the divisor of the gradient's mean."""
        optimizer = self._optimizer
        if optimizer.loss_reduction != "mean":
            return float(optimizer.max_grad_norm)
        divisor = optimizer.expected_batch_size * optimizer.accumulated_iterations
        divisor *= self._world_size() if self._reduced else 1
        return float(optimizer.max_grad_norm / divisor)

    def watch(
        self, on_local_gradient: Callable[[], None], on_reduced: Callable[[], None]
    ) -> list[Callable[[], Any]]:
        """Call two functions in every step that is not skipped, when ``p.grad`` is private.

        Args:
            on_local_gradient: Is called when this process's gradient is clipped and has its noise.
            on_reduced: Is called after that, when the gradient is reduced over all processes.

        Returns:
            Functions that remove the hooks.
        """
        optimizer = self._optimizer
        if not self.reduces:
            callbacks = (on_local_gradient, on_reduced)
            return [before_real_step(self.inner, callback) for callback in callbacks]
        original = optimizer.reduce_gradients

        def reduce_gradients() -> None:
            self._reduced = False
            with torch.no_grad():
                on_local_gradient()
            original()
            self._reduced = True

        restore = override(optimizer, "reduce_gradients", reduce_gradients)
        return [restore, before_real_step(self.inner, on_reduced)]


def declared(optimizers: Sequence[Optimizer], *, under_ddp: bool) -> tuple[OptimizerDP, ...]:
    """Return a defence for each optimizer that adds noise itself.

    An optimizer counts if it has a ``noise_multiplier``, or a ``privacy_engine`` that has patched
    its ``step``.

    Args:
        optimizers: The optimizers as the run steps them.
        under_ddp: Whether DistributedDataParallel reduces their gradients.
    """
    attributes = ("noise_multiplier", "privacy_engine")
    dp_optimizers = [o for o in optimizers if any(hasattr(o, name) for name in attributes)]
    return tuple(OptimizerDP(optimizer, under_ddp=under_ddp) for optimizer in dp_optimizers)
