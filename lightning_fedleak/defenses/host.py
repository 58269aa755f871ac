"""The interface through which defences access the trainer or training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def override(owner: object, name: str, replacement: object) -> Callable[[], None]:
    """Set an attribute of one object, such as a method.

    Returns:
        A function that puts back the previous attribute, unless something else has replaced it.
    """
    previous = vars(owner).get(name)
    setattr(owner, name, replacement)

    def restore() -> None:
        if vars(owner).get(name) is replacement:
            delattr(owner, name)
            if previous is not None:
                setattr(owner, name, previous)

    return restore


@dataclass(frozen=True)
class Piece:
    """A part of a logical batch that is run in one forward and backward pass.

    Attributes:
        batch: The rows, in the same form as the logical batch.
        rows: The number of rows that count: all, or 0 if one row is the placeholder for an empty
            batch.
        users: The number of rows of each user; None if the unit is not a user.
    """

    batch: Any
    rows: int
    users: Sequence[int] | None = None


class Host:
    """The trainer or loop of a run; the defaults are for a loop of which the defences know nothing.

    Each trainer has a subclass beside the code that lets defences act in it.

    Attributes:
        name: The name of the trainer, for messages.
        mend: What the user should do about an unknown optimizer, for messages.
        steps_by: The arguments that determine the number of steps, for messages.
        optimizers: The optimizers, in the trainer's order; empty before they are known.
        loader: The loader of the training data, or a tree of several.
        batch_number: The index of the current training batch; None if the loop does not count.
        step: The index of the next optimizer step, from 0.
        model: The model as it is called in training, in DistributedDataParallel if that reduces the
            gradients.
        reads_gradients: Whether anything may read ``p.grad`` between backward and the release.
        finds_learning_rate: Whether a learning rate finder trains the model before the run.
    """

    name: ClassVar[str] = "the loop"
    mend: ClassVar[str] = "Step an optimizer that the defences know."
    steps_by: ClassVar[str] = "the number of steps"
    optimizers: Sequence[Optimizer] = ()
    loader: object = None
    batch_number: int | None = None
    step: int = 0
    model: object = None
    finds_learning_rate: bool = False
    reads_gradients: bool = True

    @property
    def reducer(self) -> DistributedDataParallel | None:
        """Return the DistributedDataParallel that reduces gradients in backward; None without."""
        return self.model if isinstance(self.model, DistributedDataParallel) else None

    @property
    def rank_and_world_size(self) -> tuple[int, int]:
        """Return the rank of this process and the number of processes of the run."""
        return rank_and_world_size()

    def refusals(self) -> Mapping[str, object]:
        """Return the settings that break the guarantee of a defence on samples.

        Returns:
            The messages, each with a value that is true if it applies. A message continues a
            sentence that begins with the defence's name.
        """
        return {}

    def count_steps(self, per_epoch: int) -> int | None:
        """Return the planned number of optimizer steps of the run; None without a fixed end.

        Args:
            per_epoch: The number of batches in the loader.
        """
        return None

    def stop(self) -> None:
        """End the run after this step."""

    def to_device(self, batch: Any) -> Any:
        """Return a batch as ``training_step`` gets it: on the device and in its precision."""
        return batch

    def backward(self, loss: Tensor) -> None:
        """Run backward as the trainer does, without calling its hooks."""
        loss.backward()  # type: ignore[no-untyped-call]

    def without_logs(self) -> AbstractContextManager[None]:
        """Return a context that discards, at its end, what training steps log inside it."""
        return nullcontext()

    def merged_logs(
        self, pieces: Sequence[Piece]
    ) -> AbstractContextManager[Callable[[Piece], AbstractContextManager[None]]]:
        """Return a context that merges the values logged by the pieces of a batch into one.

        It yields a function: call it with a piece, and run the piece in the context it returns.
        """
        return nullcontext(lambda _: nullcontext())
