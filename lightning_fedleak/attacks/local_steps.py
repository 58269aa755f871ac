"""What an optimizer makes of gradients in a round of local steps, as a server knows it.

A server that prescribes the training knows the optimizer's class and settings, and how many steps a
client takes. Plain SGD shares a sum of gradients. What momentum and decay add to that is linear:
it is undone here by what the same optimizer does to the same weights with no gradient at all. Adam
and its kin divide each entry by its own size. Of Adam's first step that is undone too: it adds eps
to that size, and an entry's step falls short of the learning rate by as much. Of several steps it
is not; but public updates can be made in the same way, by the same class, and an attack be fitted
on these.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedleak.attacks.base import RunFacts, UnusableObservation
from lightning_fedleak.snapshots import GradientSnapshot, UpdateSnapshot

_NOT_ALIKE = ("Optimizer", "LBFGS", "SparseAdam", "Adafactor", "Muon")
_COMPUTED = 3.0
_SHORT = 3.0
_NOT_THEIRS = ("foreach", "fused", "capturable", "differentiable", "maximize")


def decays_apart(facts: RunFacts) -> bool:
    """Whether a round shrinks weights by a share, beside what gradients do to them.

    False where single gradients are shared, or it is not known what the optimizer does.
    """
    try:
        steps = LocalSteps.from_facts(facts)
    except UnusableObservation:
        return False
    return steps is not None and steps.decays_apart and bool(steps.settings.get("weight_decay"))


def explain_stale_optimizer(name: str) -> str:
    """Return why a round is not read whose optimizer kept its state from the round before."""
    return (
        "call optimizer.state.clear() where a round begins, as a federated client does: "
        f"{name} goes on with what it gathered in earlier rounds"
    )


def check_fresh(facts: RunFacts, snapshot: GradientSnapshot) -> None:
    """Refuses a round that goes on with what earlier ones have left in the optimizer.

    Raises:
        UnusableObservation: says what a client does, or that the optimizer is not known.
    """
    if isinstance(snapshot, UpdateSnapshot) and not snapshot.fresh:
        steps = LocalSteps.from_facts(facts)
        if steps is not None:
            steps.check_fresh(False)


@dataclass(frozen=True)
class LocalSteps:
    """A round, as the server prescribed it.

    Attributes:
        optimizer: of torch.optim.
        settings: its arguments.
        steps: of a round.
        clip_value: size that entries of each step's gradient are cut to; None where none are.
    """

    optimizer: type[Optimizer]
    settings: Mapping[str, Any]
    steps: int
    clip_value: float | None = None

    @classmethod
    def from_facts(cls, facts: RunFacts) -> LocalSteps | None:
        """The round of a run; None where single gradients are shared, or nothing is known of it.

        Raises:
            UnusableObservation: the optimizer is none of torch.optim's, or ascends.
        """
        if facts.local_steps is None or facts.optimizer is None:
            return None
        kind = getattr(torch.optim, facts.optimizer, None)
        if kind is None or not issubclass(kind, Optimizer) or facts.optimizer in _NOT_ALIKE:
            raise UnusableObservation(
                f"what {facts.optimizer} makes of gradients is not known (it is none of "
                "torch.optim that steps entry by entry): measure the gradients of single steps "
                "(leave local_steps out)"
            )
        given = dict(facts.optimizer_settings)
        if given.get("maximize"):
            raise UnusableObservation("an optimizer that ascends (maximize=True) is not read")
        known = inspect.signature(kind.__init__).parameters
        settings = {n: v for n, v in given.items() if n in known and n not in _NOT_THEIRS}
        if not settings.get("lr", 1.0):  # a warm-up that begins at 0
            settings["lr"] = given.get("initial_lr", 0.0)
        if settings.get("lr") == 0.0:
            del settings["lr"]
        return cls(kind, settings, facts.local_steps, facts.clip_value)

    @property
    def linear(self) -> bool:
        """Whether updates are sums of gradients, but for what :meth:`without_decay` undoes."""
        return self.optimizer is torch.optim.SGD

    @property
    def plain(self) -> bool:
        """Whether updates are sums of gradients as they are."""
        return self.linear and not self.carries and not self.settings.get("weight_decay")

    @property
    def carries(self) -> bool:
        """Whether a step hangs on what earlier steps have left in the optimizer."""
        return not self.linear or bool(self.settings.get("momentum"))

    def sums(self, *, fresh: bool) -> bool:
        """Whether updates are combinations of gradients, as they are, and of nothing else.

        With momentum too, where a round begins with a fresh optimizer: a round of one step is that
        step's gradient then, one and more times it with Nesterov's.
        """
        return self.linear and (fresh or not self.carries) and not self.settings.get("weight_decay")

    def make_optimizer(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        """A fresh optimizer of these parameters."""
        return self.optimizer(parameters, **self.settings)

    @property
    def rate(self) -> float:
        """The learning rate."""
        return float(self.make_optimizer([nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"])

    def _moved(self, weight: float, gradient: float, **settings: float) -> float:
        """Where one weight is after a round in which every gradient was the same."""
        moved = nn.Parameter(torch.tensor([weight], dtype=torch.float64))
        optimizer = replace(self, settings={**self.settings, **settings}).make_optimizer([moved])
        for _ in range(self.steps):
            moved.grad = torch.full_like(moved, gradient)
            optimizer.step()
        return float(moved.detach())

    def without_decay(self, update: Tensor, before: Tensor, rate: float) -> Tensor:
        """An update less what the round does to the weights with no gradient.

        That is proportional to the weights where it is linear, for SGD with momentum too: the rest
        of its update is a combination of gradients. Adam's own decay, which it divides like a
        gradient, stays.

        Args:
            update: ``(before - after) / rate``.
            before: the weights before the round.
            rate: learning rate that the update is divided by.
        """
        if not self.settings.get("weight_decay") or not self.decays_apart:
            return update
        kept = self._moved(1.0, 0.0, lr=rate)
        return update - before.to(update) * ((1.0 - kept) / rate)

    def check_fresh(self, fresh: bool) -> None:
        """Refuses a round that goes on with what earlier ones have left in the optimizer.

        Raises:
            UnusableObservation: says what a client does.
        """
        if self.carries and not fresh:
            raise UnusableObservation(explain_stale_optimizer(self.optimizer.__name__))

    @property
    def decays_apart(self) -> bool:
        """Whether decay shrinks weights by a share, and is not divided as a gradient is."""
        return self.linear or self._decoupled

    @property
    def _decoupled(self) -> bool:
        plain = self.settings.get("decoupled_weight_decay")
        return self.optimizer is torch.optim.AdamW or bool(plain)

    @property
    def largest(self) -> float:
        """What a gradient that is always the same comes to, per step and in units of the rate."""
        without = {"weight_decay": 0.0} if "weight_decay" in self.settings else {}
        return -self._moved(0.0, 1.0, **without) / self.rate / self.steps

    @property
    def invertible(self) -> bool:
        """Whether the gradient can be computed back: of one step of Adam or AdamW."""
        return self.steps == 1 and self.optimizer in (torch.optim.Adam, torch.optim.AdamW)

    def invert(
        self, update: Tensor, before: Tensor, rate: float, noise: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """The gradient that a first step of Adam was made of, and its error.

        That step is ``rate g / (|g| + eps)``, for each entry by itself: short of 1 by
        ``eps / (|g| + eps)``, which the rounding of the stored weights leaves to be seen.

        Args:
            update: ``(before - after) / rate`` of a round that :attr:`invertible` holds of.
            before: the weights before the round, of the dtype they are stored in.
            rate: learning rate that the update is divided by.
            noise: standard deviation of what a defence has added to each number of the update.

        Returns:
            The gradient in float64, and the standard deviation of each entry's error: infinite
            where the entry is known to be of its sign and of at least its size alone.
        """
        eps = float(self.make_optimizer([nn.Parameter(torch.zeros(1))]).param_groups[0]["eps"])
        weight = before.double()
        moved = self.without_decay(update.double(), weight, rate)
        after = weight - rate * update.double()
        largest = torch.maximum(weight.abs(), after.abs())
        unit = torch.finfo(before.dtype).eps * torch.exp2(torch.frexp(largest).exponent - 1.0)
        stored = unit / (6**0.5 * rate)  # twice rounded: by the decay, by the step
        computed = _COMPUTED * torch.finfo(torch.float32).eps
        doubt = (stored.square() + (computed * moved).square() + noise**2).sqrt()
        short = torch.maximum(1 - moved.abs(), doubt)
        gradient = eps * moved / short
        error = (gradient.abs() + eps).square() / eps * doubt
        decay = float(self.settings.get("weight_decay") or 0.0)
        if decay and not self._decoupled:
            gradient = gradient - decay * weight
            error = torch.hypot(error, torch.finfo(torch.float32).eps * decay * weight.abs())
        error[1 - moved.abs() < _SHORT * doubt] = torch.inf
        return gradient, error

    def describe(self) -> dict[str, object]:
        """Plain values that tell one round from another."""
        return {
            "optimizer": self.optimizer.__name__,
            "steps": self.steps,
            "clip_value": self.clip_value,
            **{f"optimizer_{name}": value for name, value in self.settings.items()},
        }
