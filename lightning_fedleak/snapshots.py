"""Snapshots of what an adversary would see of a training step; ``taps`` takes them.

There are three stages: *local* (the gradient a client computed, before any defence), *shared* (what
leaves the client) and *aggregate* (what the server applies). A snapshot holds read-only views if
the memory is stable while the attacks run, and a preallocated buffer if not. Nothing is cloned, and
nothing is moved to the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor


class Stage(StrEnum):
    """A place on the way of a tensor from the client to the server."""

    LOCAL = "local"
    SHARED = "shared"
    AGGREGATE = "aggregate"


@dataclass(frozen=True)
class GradientSnapshot:
    """Gradients of one step at one stage.

    Attributes:
        step: optimizer step, counted from 0, that these gradients lead to.
        stage: where they were recorded.
        tensors: gradient by role (``"head.weight"`` (V, d), ``"head.bias"`` (V,),
            ``"embedding.weight"`` (V, d), or a parameter's name), detached. For a tied matrix both
            weight roles have the same tensor, the sum of its head and embedding parts. It is valid
            only until the step continues: an attack that stores one must copy it.
        tied: whether head and embedding are one matrix.
        client: rank of the client, 0 in a single process.
        noise_std: standard deviation of the noise that a defence declares on each number, or 0.
        loss_terms: roles of the parameters that have a term of their own in the loss (an L2 penalty
            in ``training_step``), whose gradient is included.
    """

    step: int
    stage: Stage
    tensors: Mapping[str, Tensor]
    tied: bool = False
    client: int = 0
    noise_std: float = 0.0
    loss_terms: frozenset[str] = frozenset()


@dataclass(frozen=True)
class UpdateSnapshot(GradientSnapshot):
    """The weight change of several local steps (FedAvg), in units of a gradient.

    ``tensors`` holds ``(before - after) / learning_rate``: after one plain SGD step this *is* the
    gradient, after k steps the sum of k gradients taken at moving weights.

    Attributes:
        local_steps: optimizer steps between before and after.
        learning_rate: the divisor.
        fresh: whether the optimizer began the round without state of earlier steps.
    """

    local_steps: int = 1
    learning_rate: float = 1.0
    fresh: bool = True


@dataclass(frozen=True)
class ActivationSnapshot:
    """Hidden states sent across a split.

    Attributes:
        step: optimizer step, counted from 0, in which they were sent.
        stage: where they were recorded.
        tensors: by layer name, each (B, L, d), detached.
        client: rank of the client.
        attention_mask: (B, L), 0 where padded, or None; sent too, because the top model needs it.
        position_ids: (B, L), or None for the model's default.
    """

    step: int
    stage: Stage
    tensors: Mapping[str, Tensor]
    client: int = 0
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None


@dataclass(frozen=True)
class Observation:
    """All that one run of an attack may read. It never holds the truth.

    Attributes:
        gradients: snapshots, oldest first; most attacks read the last only.
        activations: what crossed the split in the same step.
    """

    gradients: tuple[GradientSnapshot, ...] = ()
    activations: tuple[ActivationSnapshot, ...] = field(default=())

    def gradient(self, role: str) -> Tensor:
        """Return the newest gradient of ``role``.

        Raises:
            KeyError: no snapshot has that role; the message lists those there are.
        """
        for snapshot in reversed(self.gradients):
            if role in snapshot.tensors:
                return snapshot.tensors[role]
        roles = sorted({r for s in self.gradients for r in s.tensors})
        raise KeyError(f"no gradient of '{role}' in this observation; it holds {roles}")


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a detached tensor; a DTensor is gathered, by a collective that all processes enter."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.detach()


def explain_weight_term(role: str) -> str:
    """Return why a gradient that holds a loss term of the parameter alone cannot be read."""
    return (
        f"the loss has a term of '{role}' alone (an L2 penalty, say), whose weight the attack does "
        "not know, so that the gradient is not the batch's alone: use the optimizer's weight_decay "
        "in its place, or leave it out of the loss while you measure"
    )


class UnusableObservation(RuntimeError):
    """The snapshot cannot be read (non-finite, all zero): the result is unknown, not safe."""


class Inapplicable(UnusableObservation):
    """The method is not made for what was shared: the result is unknown, not safe.

    ``leakage/worst/<family>`` is then that of the other attacks, if there are any.
    """


class NotYet(UnusableObservation):
    """Nothing can be read yet, but later steps can: there is no result so far.

    The next step is read too; a fit that ends without a result is unknown, not safe.
    """
