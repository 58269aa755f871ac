"""Buffers of a model, which leave with it and which no noise of DP-SGD covers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_fedleak.defenses.base import DefenseContext, DefenseError
from lightning_fedleak.defenses.dpsgd_checks import trainer_of


class Buffers:
    """The buffers of a model as they are now, to see whether a training step writes to one.

    A buffer that training data change (an average of activations, a codebook, a sum of inputs)
    leaves with the model, and no noise covers it. Only that one was written to is seen, not with
    what, so that a step counter is refused too.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._read()

    def _read(self) -> None:
        self._before = {name: (b, _version(b)) for name, b in self._root.named_buffers()}

    @contextmanager
    def sent_first(self) -> Iterator[None]:
        """Inside, the client's own processes send each other buffers before the root is called.

        DistributedDataParallel does, and runs ``training_step`` as the root's call.
        """

        def once(*_: Any) -> None:
            self._read()
            handle.remove()

        handle = self._root.register_forward_pre_hook(once)
        try:
            yield
        finally:
            handle.remove()

    def check_unchanged(self) -> None:
        """Refuses where one was written to, replaced or added since.

        Raises:
            DefenseError: says which.
        """
        for name, buffer in self._root.named_buffers():
            old, version = self._before.get(name, (None, 0))
            if buffer is not old or _version(buffer) != version:
                raise DefenseError(
                    f"DPSGD: training_step changed the buffer '{name}', which leaves with the "
                    "model and which no noise covers. Put the layer that keeps it into eval mode, "
                    "or keep what training data do not decide (a step counter) in a plain "
                    "attribute or outside of training_step."
                )


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version


def is_ddp(context: DefenseContext) -> bool:
    """Whether DistributedDataParallel runs ``training_step``."""
    strategy = getattr(trainer_of(context), "strategy", None)
    return isinstance(getattr(strategy, "model", None), DistributedDataParallel)


__all__ = ["Buffers", "is_ddp"]
