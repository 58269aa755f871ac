"""What a defence is: hooks that act where data leaves the client.

A defence of one's own needs a name, a plain sentence about what it guarantees, and one hook::

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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

State = Mapping[str, Tensor | int | float | str]


@dataclass(frozen=True)
class Privacy:
    """What the releases so far have cost one example of one client.

    What an example is, and against whom it is hidden, says the defence's ``guarantee``.

    Attributes:
        epsilon: an upper bound at ``delta``; infinite where there is nothing to speak of.
        delta: of the guarantee; 0 where it is pure.
        noise_multiplier: accounted: standard deviation of the noise that the server cannot tell
            apart from the sum, over the clip norm; None of a mechanism without one.
        sample_rate: chance of an example to be in a batch; 1 without Poisson sampling.
        releases: that are counted so far: optimizer steps, or of the example released most often.
    """

    epsilon: float
    delta: float
    noise_multiplier: float | None
    sample_rate: float
    releases: int


@dataclass(frozen=True)
class CanaryGradient:
    """Gradient of crafted layers that are not really there, as far as it has come.

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
        """(G, K), the sum over samples with its noise."""
        total = self.samples.sum(0)
        return total if self.noise is None else total + self.noise

    def scaled(self, factors: Tensor) -> CanaryGradient:
        """Each game's gradient times its factor, (G,)."""
        columns = factors.to(self.samples.dtype)[:, None]
        return CanaryGradient(
            self.samples * columns,
            None if self.noise is None else self.noise * columns,
            self.noise_std * math.sqrt(float(factors.square().mean())),
        )

    def noised(self, noise: Tensor, std: float) -> CanaryGradient:
        """With independent ``noise`` (G, K) of standard deviation ``std`` added."""
        total = noise if self.noise is None else self.noise + noise
        return CanaryGradient(self.samples, total, math.hypot(self.noise_std, std))


class DefenseError(ValueError):
    """A defence cannot hold its guarantee in this setting; says what to change.

    Examples:
        >>> from lightning_fedleak import DefenseError, Freeze
        >>> try:
        ...     Freeze()
        ... except DefenseError as error:
        ...     print(error)
        Freeze: nothing is named; give a part, such as Freeze('head'), or patterns ...
    """


@dataclass(frozen=True)
class DefenseContext:
    """Where a defence acts.

    Attributes:
        root: the module being trained (the LightningModule), never wrapped.
        client: index of this client, from 0. With ``client="rank"`` the rank of the process; with
            ``client="world"`` 0 on every rank, because all ranks together are one client.
        clients: number of clients in this run.
        device: where this process trains.
        precision: Lightning's name of it (``"32-true"``, ``"bf16-mixed"``, ...).
        step: optimizer step that is about to be taken, from 0; 0 in ``before_setup``.
        entropy: 32 secret random bytes of the operating system, drawn anew for every fit, alike on
            the processes of one client, independent between clients, never saved. Noise derived
            from it is not replayed after a resume.
        process: which share of the client's data this process holds, from 0; always 0 where each
            process is a client. Noise on data, not on gradients, must differ by it.
        processes: how many processes together are this client; 1 where each is one.
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


class Defense(ABC):
    """A defence. Every hook is optional; a subclass sets ``name`` and ``guarantee``.

    Examples:
        >>> from lightning_fedleak import DefendedStrategy, Defense
        >>> class Sign(Defense):
        ...     name = "sign"
        ...     guarantee = "none"
        ...
        ...     def on_gradients(self, named_parameters, context):
        ...         for _, parameter in named_parameters:
        ...             parameter.grad.sign_()
        >>> strategy = DefendedStrategy("auto", defenses=[Sign()])
        >>> strategy.defenses[0].acts_on_gradients
        True

    Attributes:
        name: key of its state in checkpoints; two defences of one run must differ in it.
        guarantee: what it guarantees, against whom, in plain words; ``"none"`` said plainly.
        activation_layers: layers whose hidden states it rewrites on their way to the server, by
            forward hooks that it registers in ``before_setup``; 0 for the input of the first block,
            k for the output of block k.
        acts_in_inference: whether it also acts where the Trainer validates, tests or predicts
            without a fit: then ``before_setup`` and ``teardown`` are called there too, with fresh
            entropy.
        takes_shards: whether ``on_gradients`` is right where ``p.grad`` is a DTensor that holds
            this process's shard (FSDP2). A defence that does not say so is refused there.
        per_sample: whether it computes the update from the samples and does not read ``p.grad``:
            what a defence before it did to gradients would be lost in silence, and its guarantee
            needs samples that do not influence each other.
    """

    name: str
    guarantee: str
    activation_layers: tuple[int, ...] = ()
    acts_in_inference: bool = False
    takes_shards: bool = False
    per_sample: bool = False

    @property
    def acts_on_batches(self) -> bool:
        """Whether the class replaces batches, that is, overrides ``on_batch``."""
        return type(self).on_batch is not Defense.on_batch

    @property
    def acts_on_gradients(self) -> bool:
        """Whether the class rewrites gradients, that is, overrides ``on_gradients``."""
        return type(self).on_gradients is not Defense.on_gradients

    @property
    def acts_on_canaries(self) -> bool:
        """Whether ``on_canary`` says what this defence does to a canary.

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
        """Whether ``harden`` may change something."""
        return type(self).harden is not Defense.harden

    def settings(self) -> dict[str, bool | int | float | str]:
        """What it was built with, for the record of a run: its public plain attributes."""
        known = (bool, int, float, str)
        told = ("name", "guarantee", "seed")  # besides; who knows a seed can take the noise off
        public = {n: v for n, v in vars(self).items() if n not in told and not n.startswith("_")}
        found = {n: v for n, v in public.items() if isinstance(v, known) and v == v}
        seeded = {"seeded": self.seed is not None} if hasattr(self, "seed") else {}
        return found | seeded

    def check_order(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        """Refuses an order of defences in which one of them would not do what it says.

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
                f"{type(self).__name__} computes the update anew from the samples, so what "
                f"{', '.join(rewriting)} did to the gradients before it would be lost. Put "
                f"'{self.name}' first among the defenses that act on gradients."
            )

    def before_setup(self, context: DefenseContext) -> None:  # noqa: B027
        """Prepares the model: where the user built it, not wrapped, no optimizer exists.

        Raises:
            DefenseError: the guarantee cannot hold for this model or setting.
        """

    def on_train_start(self, context: DefenseContext) -> None:  # noqa: B027
        """Training is about to begin: optimizers exist, and their state is restored.

        Raises:
            DefenseError: the guarantee cannot hold.
        """

    def on_dataloader(self, dataloader: Any, context: DefenseContext) -> Any:
        """The loader to train with instead of ``dataloader``; called whenever one is made.

        Args:
            dataloader: as Lightning has prepared it (a DistributedSampler put in, say), or as the
                defence before left it.
            context: where and when.

        Raises:
            DefenseError: the guarantee cannot hold with this loader.
        """
        return dataloader

    def on_batch(self, batch: Any, context: DefenseContext) -> Any:
        """What ``training_step`` gets instead of ``batch``, on the device, for every micro-batch.

        ``batch`` itself must stay what it is: callbacks read the truth from it.

        Raises:
            DefenseError: no batch can be given that holds the guarantee. Training stops.
        """
        return batch

    def on_logical_batch(
        self, step: Callable[[Any], Any], batch: Any, context: DefenseContext
    ) -> Any:
        """Stands around a whole batch, and may run it in pieces.

        Args:
            step: gives a batch of the same form to the module's ``training_step``, with every
                defence's ``on_training_step`` around it; returns its output.
            batch: after every ``on_batch``.
            context: where and when.

        Returns:
            What Lightning gets as the output of ``training_step``. Who runs pieces also runs their
            backward, and gives a loss whose ``backward`` leaves in ``p.grad`` what they add up to.

        Raises:
            DefenseError: the guarantee cannot hold for this batch. Training stops.
        """
        return step(batch)

    def on_training_step(
        self, training_step: Callable[[], Any], batch: Any, context: DefenseContext
    ) -> Any:
        """Stands around the forward pass of every micro-batch, or piece of a logical batch.

        What it returns is what Lightning gets as the output.

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
        """Checks that the guarantee still holds, in every optimizer step before anything leaves.

        Must not wait for the device.

        Raises:
            DefenseError: it does not. Training stops.
        """

    def on_gradients(  # noqa: B027
        self, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> None:
        """Rewrites ``p.grad`` in place; together the gradients are the client's whole update.

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
        self,
        canary: CanaryGradient,
        parameters: Sequence[nn.Parameter],
        context: DefenseContext,
    ) -> CanaryGradient:
        """What would leave the client of layers that a dishonest server had added to the model.

        The layers do not exist. In the run that is imagined their gradient is a part of the update
        like every other: it counts in a norm that is clipped, each game by itself, and gets noise
        of the same law. Called right before ``on_gradients``, only where a monitor looks, and must
        leave ``p.grad`` and the noise of ``on_gradients`` exactly as they would have been.

        The default hands a canary on unchanged, which is right for a defence that does not act on
        gradients. One that does and does not override this makes every canary *unknown*.

        Args:
            canary: as the defence before left it.
            parameters: as in ``on_gradients``; ``p.grad`` is what this defence is about to get.
            context: where and when.

        Raises:
            DefenseError: what would leave cannot be told.
        """
        return canary

    def noise_std(self, context: DefenseContext) -> float:
        """Standard deviation of what ``on_gradients`` adds to each number of this client's update.

        Those who attack a defended run are told it, as a server that prescribes the defence knows
        it. 0, the default, says that no noise is added.
        """
        return 0.0

    @property
    def privacy(self) -> Privacy | None:
        """What the releases so far have cost; None where nothing is accounted."""
        return None

    def harden(self) -> str | None:
        """Makes the defence stronger by one notch, for every step that follows.

        A gate calls it in the middle of a run, between two optimizer steps, on every rank alike.
        The decision is made in sight of private data: no accounted epsilon covers it.

        Returns:
            What changed, in words for a log; None where the defence is as strong as it gets, as one
            that does not override this always is.
        """
        return None

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Plain numbers and tensors for the checkpoint, alike on every rank; never a secret."""
        return {}

    def load_state_dict(self, state: State) -> None:  # noqa: B027
        """Takes back what ``state_dict`` gave, before ``before_setup`` (under FSDP2 after it).

        ``state`` is empty where the run resumes from a checkpoint that holds none for this
        defence.
        """

    @property
    def secret_name(self) -> str:
        """What the file of :meth:`save_secrets` is named by; empty where there is none to keep.

        Alike on all processes of the client, and in the run that resumes once it has called
        :meth:`load_state_dict`. Checkpoints in one folder that have it alike share the file.
        """
        return ""

    def save_secrets(self, path: Path) -> None:  # noqa: B027
        """Writes what a run that resumes needs and a checkpoint must not hold, on every process.

        Called after each checkpoint, where all processes are one client and :attr:`secret_name` is
        not empty.

        Args:
            path: of a file of this process's own, in the checkpoint's folder. It is to be of mode
                0600.
        """

    def load_secrets(self, path: Path, device: str) -> bool:
        """Takes it back, after ``load_state_dict``.

        Args:
            path: of the file, which may not be there.
            device: kind of the device that this process trains on.

        Returns:
            Whether it was there. Where another process of the client says no,
            :meth:`forget_secrets` is called on all.
        """
        return True

    def forget_secrets(self) -> None:  # noqa: B027
        """Begins without what :meth:`load_secrets` took back."""

    def teardown(self) -> None:  # noqa: B027
        """Takes back every change to the model. May be called twice, or without a setup."""


__all__ = ["CanaryGradient", "Defense", "DefenseContext", "DefenseError", "Privacy", "State"]
