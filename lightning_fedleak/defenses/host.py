"""What a defence asks of the trainer or loop in which it acts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


@dataclass(frozen=True)
class Piece:
    """Rows that are run at once.

    Attributes:
        batch: of the form of the logical batch.
        rows: how many count: all, or none where one row stands in for no rows.
        users: how many rows each user has, where users are clipped.
    """

    batch: Any
    rows: int
    users: Sequence[int] | None = None


class Host:
    """The trainer or loop of a run; what is here is right for a loop about which nothing is known.

    Each trainer has a subclass beside the code that lets defences act in it.

    Attributes:
        name: of the trainer, for messages.
        mend: what to do about an optimizer that it does not know, for messages.
        steps_by: the arguments that set how many steps there are, for messages.
        optimizers: in their order; none where they are not known yet.
        loader: of the training data, or several in a tree.
        batch_number: number of the training batch at work; None where nobody counts.
        model: as processes run it, in DistributedDataParallel where that reduces gradients.
        finds_learning_rate: whether it trains first, to find a learning rate.
    """

    name: ClassVar[str] = "the loop"
    mend: ClassVar[str] = "Step an optimizer that the defences know."
    steps_by: ClassVar[str] = "the number of steps"
    optimizers: Sequence[Optimizer] = ()
    loader: object = None
    batch_number: int | None = None
    model: object = None
    finds_learning_rate: bool = False

    @property
    def reducer(self) -> DistributedDataParallel | None:
        """Return what reduces gradients inside backward; None where nothing does."""
        return self.model if isinstance(self.model, DistributedDataParallel) else None

    def refusals(self) -> Mapping[str, object]:
        """Return the settings that break the guarantee of a defence on samples.

        Returns:
            For each message, which goes on after the defence's name, whether it holds.
        """
        return {}

    def count_steps(self, per_epoch: int) -> int | None:
        """Return how many optimizer steps the run is to take; None where it has no end.

        Args:
            per_epoch: batches of the loader.
        """
        return None

    def stop(self) -> None:
        """End the run after this step."""

    def to_device(self, batch: Any) -> Any:
        """Return a batch as ``training_step`` gets it, on the device and in its precision."""
        return batch

    def backward(self, loss: Tensor) -> None:
        """Run backward as the trainer does, without its hooks."""
        loss.backward()  # type: ignore[no-untyped-call]

    def without_logs(self) -> AbstractContextManager[None]:
        """Return a context that restores, at its end, what training steps within it have logged."""
        return nullcontext()

    def merged_logs(
        self, pieces: Sequence[Piece]
    ) -> AbstractContextManager[Callable[[Piece], AbstractContextManager[None]]]:
        """Return a context that merges what the pieces of a batch log into the batch's values.

        It yields a function that returns a context to run a piece in.
        """
        return nullcontext(lambda _: nullcontext())
