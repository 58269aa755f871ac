"""The interface through which defences access the trainer or training loop: its *host*.

A *release* is the update of one optimizer step that leaves the client. ``training_step`` is
Lightning's name of the function that returns the loss of a batch; in other hosts it is the code
that computes the loss.
"""

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
        A function that restores the previous attribute, unless other code has set it since.
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

    A logical batch is the batch of one optimizer step. It is run in pieces if it does not fit into
    memory at once.

    Attributes:
        batch: The rows, in the same form as the logical batch.
        rows: The number of rows that count: all, or 0 if the only row is a placeholder, because the
            batch is empty or other processes have more pieces.
        users: The number of rows of each user; None if the unit of privacy is an example.
    """

    batch: Any
    rows: int
    users: Sequence[int] | None = None


class Host:
    """The trainer or training loop of a run; the defaults are for an unknown loop.

    Each supported trainer has a subclass in the module that connects defences to the trainer.

    Attributes:
        name: The name of the trainer, for messages.
        mend: What the user should do if an optimizer is unknown to the defences, for messages.
        steps_by: The arguments that determine the number of steps, for messages.
        optimizers: The optimizers, in the trainer's order; empty before they are known.
        loader: The loader of the training data, or nested containers of several loaders.
        batch_number: The index of the current training batch; None if the loop does not count.
        step: The index of the next optimizer step, from 0.
        model: The model as it is called in training: the DistributedDataParallel module around it,
            if that reduces the gradients.
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
        """Return the DistributedDataParallel module that reduces gradients; None without one."""
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
        """Return a batch as ``training_step`` gets it: on its device and in its precision."""
        return batch

    def backward(self, loss: Tensor) -> None:
        """Run backward like the trainer, but without its hooks."""
        loss.backward()  # type: ignore[no-untyped-call]

    def without_logs(self) -> AbstractContextManager[None]:
        """Return a context that discards, at its end, what training steps log inside it."""
        return nullcontext()

    def merged_logs(
        self, pieces: Sequence[Piece]
    ) -> AbstractContextManager[Callable[[Piece], AbstractContextManager[None]]]:
        """Return a context that combines the values that the pieces of a batch log.

        The context yields a function. Call it with a piece, and run the piece within the context
        that it returns.
        """
        return nullcontext(lambda _: nullcontext())
