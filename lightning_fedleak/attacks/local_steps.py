"""Gradients from the updates of rounds of local steps, as far as the optimizer allows it.

In a round a client takes several optimizer steps and shares the change of its weights.
:class:`LocalSteps` describes a round: a server that prescribes the training knows the optimizer's
class, its settings and the number of steps.

An update of plain SGD is a sum of gradients. With momentum it is a weighted sum. Weight decay adds
a multiple of the initial weights, which :meth:`LocalSteps.without_decay` removes: a simulation of
the optimizer without gradients shows the multiple.

Adam and similar optimizers divide each entry by its size.
:meth:`LocalSteps.invert` inverts a single first step of Adam: because of eps, an entry's step is
shorter than the learning rate, by an amount that depends on the gradient. Several steps cannot be
inverted, but an attack can be fitted on public updates that the same optimizer class makes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedleak.attacks.base import RunFacts, UnusableObservation
from lightning_fedleak.model import snapshots
from lightning_fedleak.model.anatomy import Anatomy

_UNSUPPORTED = ("Optimizer", "LBFGS", "SparseAdam", "Adafactor", "Muon")  # not entry by entry
_ROUNDINGS = 3.0  # float32 roundings in one step of Adam; fewer make errors too small, not tuned
_SHORT = 3.0  # a step shows a size if it is this many errors shorter than the rate; not tuned
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable", "maximize")
"""Optimizer settings that do not change an update (``maximize=True`` is refused before)."""


def decays_apart(facts: RunFacts) -> bool:
    """Return whether a round has weight decay that is independent of the gradients.

    Such decay shrinks all weights by the same share. The result is False if single gradients are
    shared, or if the optimizer is not known.
    """
    try:
        steps = LocalSteps.from_facts(facts)
    except UnusableObservation:
        return False
    return steps is not None and steps.decays_apart and bool(steps.settings.get("weight_decay"))


def explain_stale_optimizer(name: str) -> str:
    """Return the message for a round whose optimizer kept its state from earlier rounds."""
    return (
        "call optimizer.state.clear() where a round begins, as a federated client does: "
        f"{name} goes on with its state of earlier rounds"
    )


def check_fresh(facts: RunFacts, snapshot: snapshots.GradientSnapshot) -> None:
    """Raise an error for a round whose optimizer kept its state from earlier rounds.

    Raises:
        UnusableObservation: the optimizer kept its state, or is not known.
    """
    if isinstance(snapshot, snapshots.UpdateSnapshot) and not snapshot.fresh:
        steps = LocalSteps.from_facts(facts)
        if steps is not None:
            steps.check_fresh(False)


def check_compressed(facts: RunFacts, compressed: bool = False) -> None:
    """Raise an error for compressed rounds of any optimizer but plain SGD.

    Args:
        facts: The facts of the run, with its compression.
        compressed: whether the update at hand is compressed, which the facts may not know.

    Raises:
        Inapplicable: the optimizer's effect cannot be undone on the entries that were sent.
    """
    steps = LocalSteps.from_facts(facts) if compressed or facts.compression else None
    if steps is not None and not steps.plain:
        raise snapshots.Inapplicable(
            "the effect of its optimizer or weight decay on a compressed update is not undone: set "
            "error_feedback=True, or use SGD without momentum and weight decay"
        )


def copy_weights(anatomy: Anatomy, names: Iterable[str]) -> dict[str, Tensor]:
    """Return copies of whole parameters by name, to store the weights that a round begins with."""
    parameters = ((name, anatomy.parameter(name)) for name in names)
    return {n: snapshots.whole_tensor(p).clone() for n, p in parameters if p is not None}


def rounding_error(weight: Tensor) -> float:
    """Return the standard deviation of the rounding error of storing ``weight`` (V, d).

    The error of an entry is uniform over one unit in the last place. The result is the 90% quantile
    over the rows, of each row's root mean square.
    """
    exponent = torch.frexp(weight.float()).exponent - 1
    unit = torch.finfo(weight.dtype).eps * torch.exp2(exponent.float())
    rows = (unit.square().mean(1) / 12).sqrt()
    return float(rows.kthvalue(1 + (len(rows) - 1) * 9 // 10).values)


@dataclass(frozen=True)
class LocalSteps:
    """A round of local steps, as the server prescribes it.

    Attributes:
        optimizer: optimizer class of torch.optim.
        settings: arguments of the class.
        steps: number of optimizer steps in a round.
    """

    optimizer: type[Optimizer]
    settings: Mapping[str, Any]
    steps: int

    @classmethod
    def from_facts(cls, facts: RunFacts) -> LocalSteps | None:
        """Return the round of a run; None if single gradients are shared, or no optimizer is known.

        Raises:
            UnusableObservation: the optimizer is not in torch.optim, or ascends.
        """
        if facts.local_steps is None or facts.optimizer is None:
            return None
        kind = getattr(torch.optim, facts.optimizer, None)
        if kind is None or not issubclass(kind, Optimizer) or facts.optimizer in _UNSUPPORTED:
            raise UnusableObservation(
                f"what {facts.optimizer} makes of gradients is not known: omit local_steps"
            )
        group = dict(facts.optimizer_settings)
        if group.get("maximize"):
            raise UnusableObservation("an optimizer that ascends (maximize=True) is not read")
        arguments = inspect.signature(kind.__init__).parameters
        settings = {n: v for n, v in group.items() if n in arguments and n not in _IMPLEMENTATION}
        if not settings.get("lr", 1.0):  # a warm-up that starts at 0: use the rate at its end
            settings["lr"] = group.get("initial_lr", 0.0)
        if settings.get("lr") == 0.0:
            del settings["lr"]
        return cls(kind, settings, facts.local_steps)

    @property
    def linear(self) -> bool:
        """Return whether updates are sums of gradients after :meth:`without_decay`: those of SGD.

        With momentum the sums are weighted, and include gradients of earlier rounds unless the
        optimizer is fresh.
        """
        return self.optimizer is torch.optim.SGD

    @property
    def plain(self) -> bool:
        """Return whether updates are sums of gradients: those of SGD without momentum and decay."""
        return self.linear and not self.carries and not self.settings.get("weight_decay")

    @property
    def carries(self) -> bool:
        """Return whether a step depends on optimizer state of earlier steps, such as momentum."""
        return not self.linear or bool(self.settings.get("momentum"))

    def sums(self, *, fresh: bool) -> bool:
        """Return whether updates are linear combinations of the round's gradients alone.

        With momentum they are if a round begins with a fresh optimizer.
        """
        return self.linear and (fresh or not self.carries) and not self.settings.get("weight_decay")

    def make_optimizer(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        """Return a fresh optimizer of these parameters."""
        return self.optimizer(parameters, **self.settings)

    @property
    def rate(self) -> float:
        """Return the learning rate."""
        return float(self.make_optimizer([nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"])

    def _simulate(self, weight: float, gradient: float, **settings: float) -> float:
        """Return one weight after a round in which every gradient is the same."""
        parameter = nn.Parameter(torch.tensor([weight], dtype=torch.float64))
        steps = replace(self, settings={**self.settings, **settings})
        optimizer = steps.make_optimizer([parameter])
        for _ in range(self.steps):
            parameter.grad = torch.full_like(parameter, gradient)
            optimizer.step()
        return float(parameter.detach())

    def without_decay(self, update: Tensor, before: Tensor, rate: float) -> Tensor:
        """Return an update without the change that the round makes if there is no gradient.

        SGD's and decoupled decay change the weights in proportion to themselves, also with
        momentum. Without that change SGD's update is a combination of gradients. The decay of plain
        Adam is part of the gradient that Adam divides, and stays.

        Args:
            update: ``(before - after) / rate``.
            before: the weights before the round.
            rate: learning rate that the update is divided by.
        """
        if not self.settings.get("weight_decay") or not self.decays_apart:
            return update
        remaining = self._simulate(1.0, 0.0, lr=rate)
        return update - before.to(update) * ((1.0 - remaining) / rate)

    def check_fresh(self, fresh: bool) -> None:
        """Raise an error if the round depends on the optimizer's state of earlier rounds.

        Raises:
            UnusableObservation: the optimizer has such state and is not fresh.
        """
        if self.carries and not fresh:
            raise UnusableObservation(explain_stale_optimizer(self.optimizer.__name__))

    @property
    def decays_apart(self) -> bool:
        """Return whether weight decay is independent of gradients, as in SGD and AdamW."""
        argument = self.settings.get("decoupled_weight_decay")
        return self.linear or self.optimizer is torch.optim.AdamW or bool(argument)

    @property
    def largest(self) -> float:
        """Return the largest change of a weight per step, in units of the learning rate.

        It is that of a weight whose gradient is the same in every step.
        """
        no_decay = {"weight_decay": 0.0} if "weight_decay" in self.settings else {}
        return -self._simulate(0.0, 1.0, **no_decay) / self.rate / self.steps

    @property
    def invertible(self) -> bool:
        """Return whether :meth:`invert` applies: to one step of Adam or AdamW."""
        return self.steps == 1 and self.optimizer in (torch.optim.Adam, torch.optim.AdamW)

    def invert(
        self, update: Tensor, before: Tensor, rate: float, noise: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of a first step of Adam, and its error.

        The step is ``rate g / (|g| + eps)`` in each entry. In units of the rate it is shorter than
        1 by ``eps / (|g| + eps)``. From this g follows, up to the rounding of the stored weights.

        Args:
            update: ``(before - after) / rate`` of a round that is :attr:`invertible`.
            before: the weights before the round, in the dtype they are stored in.
            rate: learning rate that the update is divided by.
            noise: standard deviation of a defence's noise on each number of the update.

        Returns:
            The gradient in float64, and the standard deviation of each entry's error: infinite
            where only an entry's sign and a lower bound of its size are known.
        """
        eps = float(self.make_optimizer([nn.Parameter(torch.zeros(1))]).param_groups[0]["eps"])
        weight = before.double()
        change = self.without_decay(update.double(), weight, rate)
        after = weight - rate * update.double()
        largest = torch.maximum(weight.abs(), after.abs())
        unit = torch.finfo(before.dtype).eps * torch.exp2(torch.frexp(largest).exponent - 1.0)
        storage = unit / (6**0.5 * rate)  # rounded twice: by the decay, and by the step
        arithmetic = _ROUNDINGS * torch.finfo(torch.float32).eps
        change_error = (storage.square() + (arithmetic * change).square() + noise**2).sqrt()
        # |change| is |g| / (|g| + eps), so that g is eps * change / (1 - |change|).
        shortfall = torch.maximum(1 - change.abs(), change_error)
        gradient = eps * change / shortfall
        error = (gradient.abs() + eps).square() / eps * change_error  # by the derivative
        decay = float(self.settings.get("weight_decay") or 0.0)
        if decay and not self.decays_apart:
            gradient = gradient - decay * weight
            error = torch.hypot(error, torch.finfo(torch.float32).eps * decay * weight.abs())
        error[1 - change.abs() < _SHORT * change_error] = torch.inf
        return gradient, error

    def describe(self) -> dict[str, object]:
        """Return the optimizer, its settings and the number of steps as plain values."""
        return {
            "optimizer": self.optimizer.__name__,
            "steps": self.steps,
            **{f"optimizer_{name}": value for name, value in self.settings.items()},
        }
