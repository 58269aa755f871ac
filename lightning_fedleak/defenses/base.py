"""What a defence is: hooks that act where data leaves the client.

A defence that you write needs a name, a plain sentence about what it guarantees, and one hook::

    class TopK(Defense):
        name = "top_k"
        guarantee = "none: the largest entries still leave the client"

        def __init__(self, share: float) -> None:
            self.share = share

        def on_gradients(self, parameters, context):
            for p in parameters:
                if p.grad is not None:
                    keep = max(1, int(self.share * p.grad.numel()))
                    threshold = p.grad.abs().flatten().topk(keep).values[-1]
                    p.grad.masked_fill_(p.grad.abs() < threshold, 0.0)
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_fedleak.defenses.host import Host
from lightning_fedleak.model.compression import Compression

State = Mapping[str, Tensor | int | float | str]
Curve = Sequence[tuple[float, float]]
"""Pairs (epsilon, delta) that all hold for one mechanism; none where nothing is guaranteed."""


@dataclass(frozen=True)
class Privacy:
    """What the releases so far have cost one example of one client.

    The defence's ``guarantee`` says what an example is, and against whom it is hidden.

    Attributes:
        epsilon: an upper bound at ``delta``; infinite where nothing is guaranteed.
        delta: of the guarantee; 0 where it is pure.
        noise_multiplier: standard deviation of the noise that the server cannot separate from the
            sum, over the clip norm, as it is accounted; None for a mechanism without one.
        sample_rate: chance of an example to be in a batch; 1 without Poisson sampling.
        releases: that were counted: optimizer steps, or those of the example released most often.
    """

    epsilon: float
    delta: float
    noise_multiplier: float | None
    sample_rate: float
    releases: int


@dataclass(frozen=True)
class CanaryGradient:
    """Gradient of crafted layers that are not really there, after the defences so far.

    There are G games at once, each with crafted layers of its own (K trainable numbers) beside the
    client's model. In none of them do the other games' layers exist.

    Attributes:
        samples: (B, G, K) what each of the client's B samples adds to the gradient of the K
            numbers crafted in each of G games. Their sum leaves the client.
        noise: (G, K) what defences have added to that sum; None where nothing.
        noise_std: standard deviation of each number of ``noise``; where it differs between games
            the root of their mean variance.
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
        """Return each game's gradient times its factor, (G,); 0 makes zeros of infinity too."""
        columns = factors.to(self.samples.dtype)[:, None]
        return CanaryGradient(
            (self.samples * columns).masked_fill(columns == 0, 0.0),
            None if self.noise is None else self.noise * columns,
            self.noise_std * math.sqrt(float(factors.square().mean())),
        )

    def noised(self, noise: Tensor, std: float) -> CanaryGradient:
        """Return the gradient with independent ``noise`` (G, K) of deviation ``std`` added."""
        total = noise if self.noise is None else self.noise + noise
        return CanaryGradient(self.samples, total, math.hypot(self.noise_std, std))


class DefenseError(ValueError):
    """A defence cannot hold its guarantee in this setting; says what to change.

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
        owner: of the settings; stands before the message.
        refusals: the condition of each message.

    Raises:
        DefenseError: one of the conditions holds.
    """
    for message, condition in refusals.items():
        if condition:
            raise DefenseError(f"{owner}{message}")


def parameter_name(parameter: nn.Parameter, root: nn.Module) -> str:
    """Return a parameter's name in the root, or its shape where the root does not have it."""
    for name, candidate in root.named_parameters():
        if candidate is parameter:
            return name
    return f"a parameter of shape {tuple(parameter.shape)}"


@dataclass(frozen=True)
class DefenseContext:
    """The run in which a defence acts.

    Attributes:
        root: the module being trained (the LightningModule), never wrapped.
        client: index of this client, from 0. With ``client="rank"`` the rank of the process; with
            ``client="world"`` 0 on every rank, because all ranks together are one client.
        clients: number of clients in this run.
        device: where this process trains.
        precision: Lightning's name of it (``"32-true"``, ``"bf16-mixed"``, ...).
        step: optimizer step that is about to be taken, from 0; 0 in ``before_setup``.
        entropy: 32 secret random bytes of the operating system, drawn again for every fit, equal
            on the processes of one client, independent between clients, never saved. Noise derived
            from it is not replayed after a resume.
        process: which share of the client's data this process holds, from 0; always 0 where each
            process is a client. Noise on data, not on gradients, must differ by it.
        processes: how many processes together are this client; 1 where each is one.
        host: the trainer or loop.
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
        name: key of its state in checkpoints; two defences of one run must differ in it.
        guarantee: what it guarantees, against whom, in plain words; it begins with ``"none"`` where
            it guarantees nothing.
        activation_layers: layers whose hidden states it rewrites on their way to the server, by
            forward hooks that it registers in ``before_setup``; 0 for the input of the first block,
            k for the output of block k.
        acts_in_inference: whether it also acts where the Trainer validates, tests or predicts
            without a fit: then ``before_setup`` and ``teardown`` are called there too, with fresh
            entropy.
        takes_shards: whether ``on_gradients`` is right where ``p.grad`` is a DTensor that holds
            this process's shard (FSDP2). A defence without it is refused there.
        per_sample: whether it computes the update from the samples and does not read ``p.grad``:
            what a defence before it did to gradients would be lost, and its guarantee needs samples
            that do not influence each other.
    """

    name: str
    guarantee: str
    activation_layers: tuple[int, ...] = ()
    acts_in_inference: bool = False
    takes_shards: bool = False
    per_sample: bool = False

    @property
    def state_key(self) -> NoReturn:
        """Refuse to be a callback of Lightning's Trainer, which reads this first."""
        name = type(self).__name__
        raise TypeError(
            f"{name} is a defence and no callback: "
            f"Trainer(strategy=DefendedStrategy('auto', defenses=[{name}(...)]))"
        )

    @property
    def compression(self) -> Compression | None:
        """Return how each tensor is compressed, which attacks know; None where none is."""
        return None

    @property
    def defers(self) -> bool:
        """Return whether what it leaves out of an update leaves later.

        A monitor then reads what it gets, in place of what it makes of it.
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
        """Return whether ``on_canary`` says what this defence does to a canary.

        False where the class rewrites gradients and ``on_canary`` was written for another
        ``on_gradients``, or not at all: what a canary then shows is unknown.
        """
        for kind in type(self).__mro__:
            if "on_canary" in vars(kind):
                return kind is not Defense or not self.acts_on_gradients
            if "on_gradients" in vars(kind):
                return False
        return False

    @property
    def can_harden(self) -> bool:
        """Return whether ``harden`` may change something."""
        return type(self).harden is not Defense.harden

    def settings(self) -> dict[str, bool | int | float | str]:
        """Return the public plain attributes it was built with, for the record of a run."""
        excluded = ("name", "guarantee", "seed")  # whoever knows a seed can subtract the noise
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
        """Raise an error for an order of defences in which one of them would not do what it says.

        Called when a DefendedStrategy is built. A subclass that overrides it calls this one too.

        Args:
            before: the defences that act before this one.
            after: those that act after it.

        Raises:
            DefenseError: says which to move where.
        """
        rewriting = [d.name for d in before if type(d).on_gradients is not Defense.on_gradients]
        if self.per_sample and rewriting:
            raise DefenseError(
                f"{type(self).__name__} computes the update again from the samples, without what "
                f"{', '.join(rewriting)} did. Put '{self.name}' first among the defenses that act "
                "on gradients."
            )

    def before_setup(self, context: DefenseContext) -> None:  # noqa: B027
        """Prepare the model: where the user built it, not wrapped, before any optimizer exists.

        Raises:
            DefenseError: the guarantee cannot hold for this model or setting.
        """

    def on_train_start(self, context: DefenseContext) -> None:  # noqa: B027
        """Act right before training: optimizers exist, and their state is restored.

        Raises:
            DefenseError: the guarantee cannot hold.
        """

    def on_dataloader(self, dataloader: Any, context: DefenseContext) -> Any:
        """Return the loader to train with in place of ``dataloader``; called whenever one is made.

        Args:
            dataloader: as Lightning has prepared it (a DistributedSampler put in, say), or as the
                defence before left it.
            context: where and when.

        Raises:
            DefenseError: the guarantee cannot hold with this loader.
        """
        return dataloader

    def on_batch(self, batch: Any, context: DefenseContext) -> Any:
        """Return what ``training_step`` gets in place of ``batch``, for every micro-batch.

        ``batch`` itself must stay what it is: callbacks read the truth from it.

        Raises:
            DefenseError: no batch holds the guarantee. Training stops.
        """
        return batch

    def on_logical_batch(
        self, step: Callable[[Any], Any], batch: Any, context: DefenseContext
    ) -> Any:
        """Run ``step`` on a whole batch, or on pieces of it.

        Args:
            step: runs the module's ``training_step`` on a batch of the same form, with every
                defence's ``on_training_step`` around it; returns its output.
            batch: after every ``on_batch``.
            context: where and when.

        Returns:
            What Lightning gets as the output of ``training_step``. A defence that runs pieces also
            runs their backward, and returns a loss whose ``backward`` leaves their sum in
            ``p.grad``.

        Raises:
            DefenseError: the guarantee cannot hold for this batch. Training stops.
        """
        return step(batch)

    def on_training_step(
        self, training_step: Callable[[], Any], batch: Any, context: DefenseContext
    ) -> Any:
        """Run the forward pass of a micro-batch, or piece of a logical batch; return its output.

        Args:
            training_step: runs the module's ``training_step`` (and what the defences after this one
                put around it).
            batch: what the module gets, after every ``on_batch``.
            context: where and when.

        Raises:
            DefenseError: the guarantee cannot hold for this output. Training stops.
        """
        return training_step()

    def before_release(self) -> None:  # noqa: B027
        """Check in every optimizer step, before anything leaves, that the guarantee still holds.

        Must not wait for the device.

        Raises:
            DefenseError: it does not. Training stops.
        """

    def on_gradients(  # noqa: B027
        self, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> None:
        """Rewrite ``p.grad`` in place; together the gradients are the client's whole update.

        Called once in every optimizer step, without autograd, after backward, accumulation and
        Lightning's own gradient clipping. ``p.grad`` is None where the batch did not reach ``p``,
        and for all of them where ``training_step`` returned None: an empty update is one too.

        Args:
            parameters: all trainable parameters of the optimizer that steps, in its order, which
                is the same on every rank.
            context: where and when; ``context.step`` is current.

        Raises:
            DefenseError: the update cannot be released. Training stops, nothing leaves the client
                (the other ranks wait for it until their launcher ends them).
        """

    def on_canary(
        self, canary: CanaryGradient, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> CanaryGradient:
        """Return what would leave the client of layers that a dishonest server had added.

        The layers do not exist. In the run that is imagined their gradient is a part of the update
        like every other: it counts in a norm that is clipped, each game by itself, and gets noise
        from the same distribution. Called right before ``on_gradients``, only where a monitor
        looks, and must leave ``p.grad`` and the noise of ``on_gradients`` exactly as they would
        have been.

        The default hands a canary on unchanged, which is right for a defence that does not act on
        gradients. One that does and does not override this makes every canary *unknown*.

        Args:
            canary: as the defence before left it.
            parameters: as in ``on_gradients``; ``p.grad`` is what this defence is about to get.
            context: where and when.

        Raises:
            DefenseError: what would leave is unknown.
        """
        return canary

    def noise_std(self, context: DefenseContext) -> float:
        """Return the standard deviation of the noise on each number of this client's update.

        Attacks on a defended run get this number, because a server that prescribes the defence
        knows it. 0, the default, means that ``on_gradients`` adds no noise.
        """
        return 0.0

    @property
    def privacy(self) -> Privacy | None:
        """Return what the releases so far have cost; None where nothing is accounted."""
        return None

    def curve(self) -> Curve:
        """Return pairs (epsilon, delta) that hold for one example, added or removed, so far.

        Raises:
            DefenseError: the account is of another unit or of other neighbours; says which.
        """
        raise DefenseError(f"the account of '{self.name}' is not of one example added or removed")

    def harden(self) -> str | None:
        """Make the defence stronger by one notch, for every step that follows.

        A gate calls it in the middle of a run, between two optimizer steps, on every rank alike.
        The decision depends on private data, so that no accounted epsilon covers it.

        Returns:
            What changed, in words for a log; None where the defence cannot get stronger.
        """
        return None

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Return plain numbers and tensors for the checkpoint, equal on every rank; no secret."""
        return {}

    def load_state_dict(self, state: State) -> None:  # noqa: B027
        """Restore what ``state_dict`` returned, before ``before_setup`` (under FSDP2 after it).

        ``state`` is empty where the run resumes from a checkpoint that holds none for this
        defence.
        """

    def teardown(self) -> None:  # noqa: B027
        """Undo every change to the model. May be called twice, or without a setup."""
