"""What leaves with a model although no optimizer moved it, and no noise of DP-SGD covers it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_fedleak.defenses.base import DefenseContext, DefenseError
from lightning_fedleak.defenses.dpsgd_checks import trainer_of
from lightning_fedleak.defenses.shards import local_part

SMALL = 1 << 20
"""Numbers in a buffer up to which it is compared in every step."""
LITTLE = 1 << 18
"""Trained weights up to which all are compared in every step."""
CHEAP = 4000
"""More than those, where a step multiplies so many times as many numbers as there are.

Comparing reads each trained weight three times, which takes .5% of a step at about 800 on a CPU.
"""
FEW = 256
"""Numbers of each weight that are compared in every step."""


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
            (name, p, _version(p), printed(p) if self._contents else None) for name, p in parameters
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
            changed = before is not None and not torch.equal(printed(parameter), before)
            if changed or _version(parameter) != version:
                raise DefenseError(
                    f"DPSGD: training_step wrote to the parameter '{name}' itself, which leaves "
                    "with the model, while noise covers the optimizer's updates alone. Let a "
                    "gradient train it, build an embedding without max_norm, or move what follows "
                    "from the weights alone (an average of them) to on_train_batch_end."
                )


class Weights:
    """The trained weights as the optimizer's last step left them.

    What else writes to them between two releases leaves with the next, and no noise covers it. An
    average that is swapped in for validation, and out again before the next batch, leaves what
    there was. All numbers are compared in every step where there are few, or few for the work that
    a step is (:data:`LITTLE`, :data:`CHEAP`); else from the first batch to the first release, and
    in one interval of ``every``. In the others :data:`FEW` numbers of each weight are; where a
    weight's version tells that more was written, and these are as they were, all are from then on.

    Args:
        every: releases.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._before: dict[nn.Parameter, tuple[int, Tensor]] = {}
        self._all = True
        self._written = False
        self._known: list[nn.Parameter] | None = None
        self._due = False
        self._endless: list[nn.Parameter] = []
        self._work = 0
        self._handle = register_optimizer_step_post_hook(self._stepped)

    def remove(self) -> None:
        """Takes the hook out."""
        self._handle.remove()

    def restart(self) -> None:
        """Training starts, perhaps from a checkpoint; weights are read at the first batch."""
        self._before, self._known, self._all, self._endless = {}, None, True, []

    def begin(self, root: nn.Module) -> None:
        """A batch comes.

        Raises:
            DefenseError: the optimizer's last step has left weights that are not finite. That
                follows from what was released alone.
        """
        self._due = False
        if self._known is None:
            self._known = [p for p in root.parameters() if p.requires_grad]
            self._read(self._known)
        if self._endless:
            raise DefenseError(
                "DPSGD: weights are not finite after the last release "
                f"({_names(self._endless, root)}). What was released is clipped and finite, so the "
                "learning rate is too high for the noise, or for the weights' precision. Lower it."
            )

    def check(self, parameters: Sequence[nn.Parameter], root: nn.Module) -> None:
        """Refuses weights that are not as the optimizer's last step left them.

        Raises:
            DefenseError: says which.
        """
        known = [p for p in parameters if p in self._before]
        if not known:
            return
        now = self._prints(known)
        before = torch.stack([self._before[p][1] for p in known])
        changed = (now != before).nonzero().flatten().tolist()
        if changed:
            raise DefenseError(
                "DPSGD: weights were written to since the optimizer's last step "
                f"({_names([known[i] for i in changed], root)}), by a callback or hook perhaps. "
                "Noise covers the optimizer's updates alone, and nothing was released. Write to a "
                "copy of the weights, and swap averages out before the next batch."
            )
        versions = (_version(p) != self._before[p][0] for p in known if not isinstance(p, DTensor))
        self._written = self._written or (not self._all and any(versions))

    def released(self, releases: int, positions: int, root: nn.Module) -> None:
        """The optimizer is about to step.

        Args:
            releases: how many were made, with this one.
            positions: of all samples together, in the layer that has most.
            root: the module that is trained.
        """
        trained = sum(local_part(p).numel() for p in self._known or ())
        self._work = max(self._work, positions * sum(p.numel() for p in root.parameters()))
        cheap = trained <= LITTLE or self._work >= CHEAP * trained
        self._all = cheap or self._written or releases % self._every == 0
        self._before, self._due = {}, True

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if self._due and self._known is not None:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._read([p for p in self._known if id(p) in own])

    @torch.no_grad()
    def _read(self, parameters: Sequence[nn.Parameter]) -> None:
        if not parameters:
            return
        for parameter, found in zip(parameters, self._prints(parameters), strict=True):
            self._before[parameter] = _version(parameter), found
        floating = [p for p in parameters if p.is_floating_point() and p.element_size() > 1]
        sums = [_numbers(p, whole=self._all).sum(dtype=torch.float32) for p in floating]
        self._endless = []
        if sums and not bool(_together(sums).isfinite().all()):
            self._endless = [p for p in floating if not bool(local_part(p).isfinite().all())]

    def _prints(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        return _together([printed(p, whole=self._all) for p in parameters])


def _together(scalars: Iterable[Tensor]) -> Tensor:
    scalars = list(scalars)
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars])


def _numbers(parameter: Tensor, *, whole: bool) -> Tensor:
    own = local_part(parameter.detach())
    return own if whole else own.flatten()[:: max(1, own.numel() // FEW)]


def _names(parameters: Sequence[nn.Parameter], root: nn.Module) -> str:
    known = {p: name for name, p in root.named_parameters(remove_duplicate=False)}
    names = [f"'{known.get(p, tuple(p.shape))}'" for p in parameters[:5]]
    return ", ".join(names) + (" and others" if len(parameters) > 5 else "")


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, NaN alike."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def printed(tensor: Tensor, *, whole: bool = True) -> Tensor:
    """A number that tells contents apart: the sum of the bits, 64 at a time, or of a few numbers'.

    An integer, so that it is the same wherever the contents lie; 0 for what has no bits to read.
    """
    own = local_part(tensor.detach())
    if own.is_meta or own.layout != torch.strided:
        return torch.zeros((), dtype=torch.int64)
    if own.is_complex():
        own = torch.view_as_real(own)
    bits = own.view(_BITS[own.element_size()]).flatten()
    if not whole:
        return bits[:: max(1, len(bits) // FEW)].sum()
    at_once = 8 // bits.element_size()
    end = len(bits) // at_once * at_once
    aligned = bits if bits.storage_offset() % at_once == 0 else bits.clone()
    return aligned[:end].view(torch.int64).sum() + bits[end:].sum()


def is_ddp(context: DefenseContext) -> bool:
    """Whether DistributedDataParallel runs ``training_step``."""
    strategy = getattr(trainer_of(context), "strategy", None)
    return isinstance(getattr(strategy, "model", None), DistributedDataParallel)


__all__ = ["Buffers", "Weights", "is_ddp", "printed"]
