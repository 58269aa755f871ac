"""What leaves with a model although no optimizer moved it, and no noise of DP-SGD covers it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lightning_fedleak.defenses.base import DefenseContext, DefenseError
from lightning_fedleak.defenses.dpsgd_checks import trainer_of

SMALL = 1 << 20
"""Numbers in a buffer up to which it is compared in every step."""


class Buffers:
    """The buffers and parameters of a model as they are now, to see whether a step writes to one.

    What training data change other than through the optimizer (an average of activations, a
    codebook, a sum of inputs, rows of an embedding that ``max_norm`` shortens) leaves with the
    model, and no noise covers it. Only that one was written to is seen, not with what, so that a
    step counter is refused too.

    Every write counts up a tensor's version, except one by ``.data``. So contents are compared as
    well: of small buffers in every step, of the rest where ``contents`` says so, of sparse ones
    never. Parameters are not looked at under FSDP2, which writes to them itself.

    Args:
        root: the module that is trained.
        contents: compare those of large buffers and of parameters too.
    """

    def __init__(self, root: nn.Module, *, contents: bool) -> None:
        self._root = root
        self._contents = contents
        self._read()

    def _read(self) -> None:
        self._before = {
            name: (b, _version(b), b.detach().clone() if self._compares(b) else None)
            for name, b in self._root.named_buffers()
        }
        sharded = any(isinstance(module, FSDPModule) for module in self._root.modules())
        parameters = () if sharded else self._root.named_parameters()
        self._weights = [
            (name, p, _version(p), _print(p) if self._contents else "") for name, p in parameters
        ]

    def _compares(self, buffer: Tensor) -> bool:
        dense = buffer.layout == torch.strided and not buffer.is_meta
        return dense and (self._contents or buffer.numel() <= SMALL)

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
            old, version, copy = self._before.get(name, (None, 0, None))
            same = buffer is old and _version(buffer) == version
            if not same or (copy is not None and not _equal(buffer, copy)):
                raise DefenseError(
                    f"DPSGD: training_step changed the buffer '{name}', which leaves with the "
                    "model and which no noise covers. Put the layer that keeps it into eval mode, "
                    "or keep what training data do not decide (a step counter) in a plain "
                    "attribute or outside of training_step."
                )
        for name, parameter, version, before in self._weights:
            if _version(parameter) != version or (before and _print(parameter) != before):
                raise DefenseError(
                    f"DPSGD: training_step wrote to the parameter '{name}' itself, which leaves "
                    "with the model, while noise covers the optimizer's updates alone. Let a "
                    "gradient train it, build an embedding without max_norm, or move what follows "
                    "from the weights alone (an average of them) to on_train_batch_end."
                )


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, NaN alike."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


@torch.no_grad()
def _print(parameter: Tensor) -> str:
    """A few digits that tell contents apart."""
    if parameter.is_meta or parameter.layout != torch.strided:
        return ""
    if parameter.element_size() == 1:  # torch does not compute in float8
        return repr(parameter.view(torch.uint8).sum().item())
    if not parameter.is_floating_point():
        return repr(parameter.sum().item())
    norm = torch.linalg.vector_norm(parameter, dtype=torch.float64)
    return repr((parameter.sum(dtype=torch.float64).item(), norm.item()))


def is_ddp(context: DefenseContext) -> bool:
    """Whether DistributedDataParallel runs ``training_step``."""
    strategy = getattr(trainer_of(context), "strategy", None)
    return isinstance(getattr(strategy, "model", None), DistributedDataParallel)


__all__ = ["Buffers", "is_ddp"]
