"""The base class of defences: hooks that are called before data leaves the client.

A *release* is the update of one optimizer step that leaves the client. A defence may change the
loader, the batch, the forward pass, or the gradients before the release, in this order. A *monitor*
is the part of this package that attacks the released updates, to measure what they leak.

To write a defence, give it a name, a plain sentence about what it guarantees, and one hook::

    class TopK(Defense):
        name = "top_k"
        guarantee = "none: the largest entries still leave the client"

        def __init__(self, share: float) -> None:
            self.share = share

        def on_gradients(self, parameters, context):
            for p in parameters:
                if p.grad is not None:
                    n_kept = max(1, int(self.share * p.grad.numel()))
                    threshold = p.grad.abs().flatten().topk(n_kept).values[-1]
                    p.grad.masked_fill_(p.grad.abs() < threshold, 0.0)
"""

from __future__ import annotations

import copy
import math
import random
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from lightning_fedleak import validate
from lightning_fedleak.defenses.host import Host
from lightning_fedleak.model.snapshots import Compression

State = Mapping[str, Tensor | int | float | str]
Curve = Sequence[tuple[float, float]]
"""Pairs (epsilon, delta), each of which holds for one mechanism; empty without a guarantee."""


@dataclass(frozen=True)
class Privacy:
    """The privacy cost of the releases so far, for one example of one client.

    The defence's ``guarantee`` says what counts as an example, and against whom it is protected.

    Attributes:
        epsilon: An upper bound at ``delta``; infinite if nothing is guaranteed.
        delta: The delta of the guarantee; 0 for pure differential privacy.
        noise_multiplier: The standard deviation of the noise that the server cannot separate from
            the sum, divided by the clip norm, as the accountant uses it; None for a mechanism
            without one.
        sample_rate: The probability that an example is in a batch; 1 without Poisson sampling.
        releases: The number of counted releases: optimizer steps, or the releases of the example
            that was released most often.
    """

    epsilon: float
    delta: float
    noise_multiplier: float | None
    sample_rate: float
    releases: int


@dataclass(frozen=True)
class CanaryGradient:
    """The gradient of layers that a dishonest server could add to the model (a "canary").

    The layers are only simulated: a monitor passes this gradient through the defences to measure
    how much of it they would release. G games, which are simulated membership tests, run at once.
    Each game has K trainable parameters in its added layers, and the layers of the other games do
    not exist in it.

    Attributes:
        samples: (B, G, K), the contribution of each of the client's B samples to the gradient of
            the K added parameters of each game, after the defences that have acted so far. The sum
            over samples leaves the client.
        noise: (G, K), the noise that defences have added to that sum; None if there is none.
        noise_std: The standard deviation of each element of ``noise``; if it differs between games,
            the square root of their mean variance.
    """

    samples: Tensor
    noise: Tensor | None = None
    noise_std: float = 0.0

    @property
    def released(self) -> Tensor:
        """Return (G, K), the sum over samples with its noise."""
        total = self.samples.sum(0)
        return total if self.noise is None else total + self.noise

    def scaled(self, factors: Tensor) -> CanaryGradient:
        """Return each game's gradient times its factor (G,); 0 times anything is 0."""
        columns = factors.to(self.samples.dtype)[:, None]
        return CanaryGradient(
            (self.samples * columns).masked_fill(columns == 0, 0.0),
            None if self.noise is None else self.noise * columns,
            self.noise_std * math.sqrt(float(factors.square().mean())),
        )

    def noised(self, noise: Tensor, std: float) -> CanaryGradient:
        """Return the gradient plus independent ``noise`` (G, K) of standard deviation ``std``."""
        total = noise if self.noise is None else self.noise + noise
        return CanaryGradient(self.samples, total, math.hypot(self.noise_std, std))


def copied(defense: Defense) -> Defense:
    """Return a copy of a defence, whose hooks leave the state of the original as it is."""
    twin = copy.copy(defense)
    generators = torch.Generator, np.random.Generator, random.Random
    kinds = (Tensor, dict, list, set, *generators)
    vars(twin).update(
        {n: copy.deepcopy(v) for n, v in vars(defense).items() if isinstance(v, kinds)}
    )
    return twin


class DefenseError(ValueError):
    """A defence cannot give its guarantee in this setting. The message says what to change.

    Examples:
        >>> from lightning_fedleak import DefenseError, Freeze
        >>> try:
        ...     Freeze("heads")
        ... except DefenseError as error:
        ...     print(error)
        Freeze: part must be 'head' or 'embeddings' or 'head+embeddings', got 'heads'
    """


def refuse(owner: str, refusals: Mapping[str, object]) -> None:
    """Raise an error with the first message whose condition holds.

    Args:
        owner: The text before the message: the name of the object that has the settings.
        refusals: A mapping from message to condition.

    Raises:
        DefenseError: One of the conditions holds.
    """
    for message, condition in refusals.items():
        if condition:
            raise DefenseError(f"{owner}{message}")


def parameter_name(parameter: nn.Parameter, root: nn.Module) -> str:
    """Return a parameter's name in the root, or a text with its shape if the root has none such."""
    for name, candidate in root.named_parameters():
        if candidate is parameter:
            return name
    return f"a parameter of shape {tuple(parameter.shape)}"


@dataclass(frozen=True)
class DefenseContext:
    """The run in which a defence acts.

    Attributes:
        root: The module being trained (the LightningModule), never wrapped.
        client: The index of this client, from 0. With ``client="rank"`` the rank of the process;
            with ``client="world"`` 0 on every rank, because all ranks together are one client.
        clients: The number of clients in this run.
        device: The device on which this process trains.
        precision: Lightning's name of the precision (``"32-true"``, ``"bf16-mixed"``, ...).
        step: The index of the next optimizer step, from 0; 0 in ``before_setup``.
        entropy: 32 secret random bytes of the operating system, drawn again for every fit, equal
            on the processes of one client, independent between clients, never saved. So noise that
            is derived from it differs after a resume.
        process: The index of the share of the client's data that this process holds, from 0;
            always 0 if each process is a client. Noise on data must depend on it; noise on
            gradients must not.
        processes: The number of processes that together are this client; 1 if each process is a
            client.
        host: The trainer or training loop.
    """

    root: nn.Module
    client: int
    clients: int
    device: torch.device
    precision: str
    step: int
    entropy: bytes = field(repr=False)
    process: int = 0
    processes: int = 1
    host: Host = field(default_factory=Host, repr=False)


class Defense(ABC):
    """A defence. Every hook is optional; a subclass sets ``name`` and ``guarantee``.

    Examples:
        >>> from lightning_fedleak import DefendedStrategy, Defense
        >>> class Sign(Defense):
        ...     name = "sign"
        ...     guarantee = "none"
        ...
        ...     def on_gradients(self, parameters, context):
        ...         for parameter in parameters:
        ...             if parameter.grad is not None:
        ...                 parameter.grad.sign_()
        >>> strategy = DefendedStrategy("auto", defenses=[Sign()])
        >>> strategy.defenses[0].acts_on_gradients
        True

    Attributes:
        name: The key of its state in checkpoints, unique among the defences of a run.
        guarantee: What it guarantees and against whom, in plain words; it begins with ``"none"`` if
            it guarantees nothing.
        activation_layers: The layers whose hidden states it rewrites on their way to the server, by
            forward hooks that it registers in ``before_setup``; 0 for the input of the first block,
            k for the output of block k.
        acts_in_inference: Whether it also acts if the Trainer validates, tests or predicts without
            fitting. If so, ``before_setup`` and ``teardown`` are called there too, with fresh
            entropy.
        takes_shards: Whether ``on_gradients`` supports a ``p.grad`` that is a DTensor and holds
            this process's shard (FSDP2). If not, using the defence under FSDP2 is an error.
        per_sample: Whether it recomputes the update from the samples without reading ``p.grad``.
            Changes that an earlier defence made to gradients would then be lost, and its guarantee
            needs samples that do not influence each other.
    """

    name: str
    guarantee: str
    activation_layers: tuple[int, ...] = ()
    acts_in_inference: bool = False
    takes_shards: bool = False
    per_sample: bool = False
    _changing: tuple[str, ...] = ()  # public attributes that change in a run, unlike settings

    @property
    def state_key(self) -> NoReturn:
        """Raise an error, because Lightning's Trainer reads it from its callbacks only."""
        name = type(self).__name__
        raise TypeError(
            f"{name} is a defence, not a callback: pass "
            f"Trainer(strategy=DefendedStrategy('auto', defenses=[{name}(...)]))"
        )

    @property
    def compression(self) -> Compression | None:
        """Return the compression of each tensor, which attacks may use; None without one."""
        return None

    @property
    def defers(self) -> bool:
        """Return whether the defence withholds parts of an update and releases them later.

        If so, a monitor attacks the input of this defence instead of its output.
        """
        return False

    @property
    def acts_on_batches(self) -> bool:
        """Return whether the class replaces batches, that is, overrides ``on_batch``."""
        return type(self).on_batch is not Defense.on_batch

    @property
    def acts_on_gradients(self) -> bool:
        """Return whether the class rewrites gradients, that is, overrides ``on_gradients``."""
        return type(self).on_gradients is not Defense.on_gradients

    @property
    def acts_on_canaries(self) -> bool:
        """Return whether ``on_canary`` simulates this class's ``on_gradients`` on a canary.

        It is False if the class rewrites gradients but does not override ``on_canary``, or inherits
        it from a class with another ``on_gradients``. The result of a canary is then unknown.
        """
        for cls in type(self).__mro__:
            if "on_canary" in vars(cls):
                return cls is not Defense or not self.acts_on_gradients
            if "on_gradients" in vars(cls):
                return False
        return False

    @property
    def can_harden(self) -> bool:
        """Return whether ``harden`` may change something, that is, is overridden."""
        return type(self).harden is not Defense.harden

    def settings(self) -> dict[str, bool | int | float | str]:
        """Return the public attributes that are plain values, for the record of a run.

        In a subclass, begin the names of attributes that change during a run with an underscore.
        """
        # The record must not hold a seed: whoever knows it can subtract the noise.
        excluded = ("name", "guarantee", "seed", *self._changing)
        settings = {
            name: value
            for name, value in vars(self).items()
            if name not in excluded
            and not name.startswith("_")
            and isinstance(value, bool | int | float | str)
            and value == value  # no NaN
        }
        seeded = {"seeded": self.seed is not None} if hasattr(self, "seed") else {}
        return settings | seeded

    def check_order(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        """Raise an error if this order of defences would break the guarantee of one of them.

        Called when a DefendedStrategy is built. A subclass that overrides it calls this one too.

        Args:
            before: The defences that act before this one.
            after: The defences that act after it.

        Raises:
            DefenseError: The order breaks a guarantee. The message says which to move where.
        """
        rewriting = [d.name for d in before if type(d).on_gradients is not Defense.on_gradients]
        if self.per_sample and rewriting:
            raise DefenseError(
                f"{type(self).__name__} computes the update again from the samples: put "
                f"'{self.name}' before {', '.join(rewriting)}"
            )

    def before_setup(self, context: DefenseContext) -> None:  # noqa: B027
        """Prepare the model as the user built it: before it is wrapped and optimizers exist.

        Raises:
            DefenseError: The guarantee cannot hold for this model or setting.
        """

    def on_train_start(self, context: DefenseContext) -> None:  # noqa: B027
        """Act right before training: optimizers exist, and their state is restored.

        Raises:
            DefenseError: The guarantee cannot hold.
        """

    def on_train_end(self, context: DefenseContext) -> None:  # noqa: B027
        """Act right after the last step of a training that no error has ended.

        Raises:
            DefenseError: The guarantee does not hold for the trained weights.
        """

    def on_dataloader(self, dataloader: Any, context: DefenseContext) -> Any:
        """Return the loader to train with in place of ``dataloader``; called whenever one is made.

        Args:
            dataloader: The loader as Lightning has prepared it, for example with a
                DistributedSampler, or as the previous defence returned it.
            context: The run and the current step.

        Raises:
            DefenseError: The guarantee cannot hold with this loader.
        """
        return dataloader

    def on_batch(self, batch: Any, context: DefenseContext) -> Any:
        """Return the batch that ``training_step`` gets instead, for every micro-batch.

        Do not change ``batch`` in place: callbacks read the true text from it.

        Raises:
            DefenseError: No batch can satisfy the guarantee. Training stops.
        """
        return batch

    def on_logical_batch(
        self, step: Callable[[Any], Any], batch: Any, context: DefenseContext
    ) -> Any:
        """Run ``step`` on a whole batch, or on pieces of it.

        Args:
            step: A function that runs the module's ``training_step`` on a batch of the same form,
                wrapped in every defence's ``on_training_step``, and returns its output.
            batch: The batch, after every ``on_batch``.
            context: The run and the current step.

        Returns:
            The output of ``training_step`` for Lightning. A defence that runs pieces also
            runs their backward, and returns a loss whose ``backward`` leaves their sum in
            ``p.grad``.

        Raises:
            DefenseError: The guarantee cannot hold for this batch. Training stops.
        """
        return step(batch)

    def on_training_step(
        self, training_step: Callable[[], Any], batch: Any, context: DefenseContext
    ) -> Any:
        """Run the forward pass of a micro-batch, or piece of a logical batch; return its output.

        Args:
            training_step: A function that runs the module's ``training_step`` (wrapped by the
                defences after this one).
            batch: The module's batch, after every ``on_batch``.
            context: The run and the current step.

        Raises:
            DefenseError: The guarantee cannot hold for this output. Training stops.
        """
        return training_step()

    def before_release(self) -> None:  # noqa: B027
        """Check in every optimizer step, before anything leaves, that the guarantee still holds.

        Must not wait for the device.

        Raises:
            DefenseError: The guarantee no longer holds. Training stops.
        """

    def on_gradients(  # noqa: B027
        self, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> None:
        """Rewrite ``p.grad`` in place; together the gradients are the client's whole update.

        Called once in every optimizer step, without autograd, after backward, accumulation and
        Lightning's own gradient clipping. ``p.grad`` is None if the batch did not reach ``p``, and
        for all of them if ``training_step`` returned None: an empty update is still an update.

        Args:
            parameters: All trainable parameters of the stepping optimizer, in the optimizer's
                order, which is the same on every rank.
            context: The run and the current step.

        Raises:
            DefenseError: The update cannot be released. Training stops, nothing leaves the client
                (the other ranks wait for it until their launcher ends them).
        """

    def on_canary(
        self, canary: CanaryGradient, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> CanaryGradient:
        """Return the gradient that would leave for layers that a dishonest server had added.

        The layers do not exist. In the simulated run their gradient is part of the update: it
        contributes to the clipped norm (each game separately), and gets noise from the same
        distribution. Called right before ``on_gradients``, only when a monitor measures, and must
        leave ``p.grad`` and the noise of ``on_gradients`` exactly as they would have been.

        The default returns the canary unchanged, which is right for a defence that does not act on
        gradients. If a defence acts on gradients and does not override this method, the result of
        every canary is *unknown*.

        Args:
            canary: The canary as the previous defence returned it.
            parameters: As in ``on_gradients``; ``p.grad`` is what this defence is about to get.
            context: The run and the current step.

        Raises:
            DefenseError: The gradient that would leave is unknown.
        """
        return canary

    def noise_std(self, context: DefenseContext) -> float:
        """Return the standard deviation of the noise on each number of this client's update.

        Attacks on a defended run get this number, because a server that prescribes the defence
        knows it. 0, the default, means that ``on_gradients`` adds no noise.
        """
        return 0.0

    def example_norm(self, context: DefenseContext) -> float:
        """Return the largest norm of what one example adds to this client's update, before noise.

        It is infinite, the default, if examples are not clipped.
        """
        return math.inf

    @property
    def privacy(self) -> Privacy | None:
        """Return the privacy cost of the releases so far; None if it is not accounted."""
        return None

    def curve(self) -> Curve:
        """Return pairs (epsilon, delta) of the releases so far, for adding or removing one example.

        Raises:
            DefenseError: The accounting is for another unit of privacy or another neighbouring
                relation, or there is none.
        """
        raise DefenseError(f"'{self.name}' accounts no cost for adding or removing one example")

    def harden(self) -> str | None:
        """Make the defence stronger by one level, for every step that follows.

        A gate, a rule that acts when a run leaks too much, calls it between two optimizer steps, on
        every rank. Its decision depends on private data, so no accounted epsilon covers it.

        Returns:
            A description of the change for a log; None if the defence cannot get stronger.
        """
        return None

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Return numbers and tensors for the checkpoint: no secrets, the same on every rank."""
        return {}

    def load_state_dict(self, state: State) -> None:  # noqa: B027
        """Restore what ``state_dict`` returned, before ``before_setup`` (under FSDP2 after it).

        ``state`` is empty if the run resumes from a checkpoint that has no state of this defence.
        """

    def teardown(self) -> None:  # noqa: B027
        """Undo every change to the model. May be called twice, or without a setup."""


check_choice = partial(validate.check_choice, error=DefenseError)
check_integer = partial(validate.check_integer, error=DefenseError)
check_number = partial(validate.check_number, error=DefenseError)
