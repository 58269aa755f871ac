"""The processes that together are one client: sums, agreement, and parts of gradients (FSDP2).

Where one of them raises an error, all must: the others would wait for it in their next collective.
So code that may raise in one of them runs in :attr:`Team.together`. Code that computes from sums
raises in all of them anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from lightning_fedleak.defenses.base import DefenseContext, DefenseError

SHARD_BITS = 32
"""A parameter's index and its shard's number share 64 bits: ``index + (shard << SHARD_BITS)``."""


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of ``tensor``, sharing its memory; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_number(tensor: Tensor) -> int:
    """Return the number of this process's part of ``tensor``, which replicas share."""
    if not isinstance(tensor, DTensor):
        return 0
    mesh, number = tensor.device_mesh, 0
    for dim, (size, placement) in enumerate(zip(mesh.shape, tensor.placements, strict=True)):
        number = number * size + (0 if placement.is_replicate() else mesh.get_local_rank(dim))
    return number


def reduce_partial(parameter: nn.Parameter) -> None:
    """Reduce a gradient that is still a sum to be made (tensor parallelism); a collective."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
        assert isinstance(parameter, DTensor)
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def global_norm(gradients: Sequence[Tensor]) -> float:
    """Return the 2-norm of all gradients together, each number counted once; waits for the device.

    With a DTensor among them it is a collective over all processes, which must agree on which
    gradients there are. A plain tensor then counts as a replica on every process.

    Args:
        gradients: dense, any dtypes and devices.

    Returns:
        The norm, the same on every process; NaN or infinite where a gradient is.
    """
    if not gradients:
        return 0.0
    norms = []
    for gradient in gradients:
        part = local_part(gradient)
        dtype = torch.float64 if part.dtype == torch.float64 else torch.float32
        norms.append(torch.linalg.vector_norm(part, dtype=dtype))
    device = norms[0].device
    stacked = torch.stack([norm.to(device) for norm in norms])
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return float(torch.linalg.vector_norm(stacked))
    shares = torch.tensor([copies(gradient) for gradient in gradients], device=device)
    square = (stacked.double().square() / shares).sum()
    dist.all_reduce(square)
    return math.sqrt(float(square))


def own_part(whole: Tensor, like: Tensor, now: Placement | None = None) -> Tensor:
    """Return this process's part of ``whole``, split as ``like`` is.

    Sends nothing where all processes have ``whole``; with ``now=Partial()`` it is an addend.
    """
    if not isinstance(like, DTensor):
        return whole
    mesh = like.device_mesh
    spread = DTensor.from_local(whole, mesh, [now or Replicate()] * mesh.ndim, run_check=False)
    return spread.redistribute(placements=like.placements).to_local()


def own_parts_of_sums(addends: Sequence[Tensor], likes: Sequence[Tensor]) -> list[Tensor]:
    """Return this process's parts of the sums of all processes' ``addends``; a collective.

    Args:
        addends: of the whole shapes on every process; may be overwritten.
        likes: for each a plain tensor, of which every process holds all, or a DTensor over all
            processes.
    """
    first = addends[0]
    one_kind = all((a.dtype, a.device) == (first.dtype, first.device) for a in addends)
    if len(addends) == 1 or not one_kind:
        for addend, like in zip(addends, likes, strict=True):
            if not isinstance(like, DTensor):
                dist.all_reduce(addend)
        return [own_part(a, like, Partial()) for a, like in zip(addends, likes, strict=True)]
    joint = torch.cat([addend.flatten() for addend in addends])
    dist.all_reduce(joint)
    start = 0
    for addend in addends:
        addend.copy_(joint[start : start + addend.numel()].view_as(addend))
        start += addend.numel()
    return [own_part(total, like) for total, like in zip(addends, likes, strict=True)]


def reshard(root: nn.Module) -> None:
    """Let every layer of FSDP2 keep its shards only, as between two steps."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_layers(root: nn.Module) -> list[FSDPModule]:
    """Return the modules that FSDP2 shards and that are whole now, as after a forward."""
    return [m for m in root.modules() if isinstance(m, FSDPModule) and _is_whole(m)]


def unshard(layers: Sequence[FSDPModule]) -> None:
    """Make layers whole where they are not; a collective then."""
    for layer in layers:
        layer.unshard()


def copies(tensor: Tensor) -> float:
    """Return how many processes hold the same part of ``tensor``."""
    world = dist.get_world_size()
    if not isinstance(tensor, DTensor):
        return float(world)
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return world / math.prod(size for size, place in sizes if not place.is_replicate())


def _is_whole(module: Any) -> bool:
    """Return whether a parameter that ``module`` itself manages is a plain tensor."""
    parameters = [*module.parameters(recurse=False)]
    inner = [child for child in module.children() if not isinstance(child, FSDPModule)]
    return any(not isinstance(p, DTensor) for p in parameters) or any(map(_is_whole, inner))


class Team:
    """The processes of one client; every method with a result is a collective of all of them.

    Attributes:
        size: number of processes. With one nothing is sent anywhere.
        process: number of this one.
        largest: returns the largest of each number over processes; a boolean counts as 0 or 1.
        together: returns a context in which all processes raise where one of them raises; a
            collective inside would wait. Its error in the others says which refused and why.
    """

    largest: Callable[[Sequence[float]], list[float]]
    together: Callable[[], AbstractContextManager[None]]

    def __init__(self, context: DefenseContext | None = None) -> None:
        self.size = 1 if context is None else context.processes
        self.process = 0 if context is None else context.process
        self._device = torch.device("cpu") if context is None else context.device
        self.largest, self.together = list, nullcontext
        if self.size > 1:
            self.largest, self.together = self._largest, self._together

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def _largest(self, values: Sequence[float]) -> list[float]:
        numbers = torch.tensor([*map(float, values)], dtype=torch.float64, device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        maxima: list[float] = numbers.tolist()
        return maxima

    def broadcast(self, value: Any) -> Any:
        """Return the value of process 0; those of the others are ignored."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self._device)
        return values[0]

    def check_alike(self, **numbers: float) -> None:
        """Raise an error where numbers differ between processes.

        Raises:
            DefenseError: says which, on all of them.
        """
        if self.size == 1:
            return
        values = [*numbers.values()]
        maxima = self.largest([*values, *(-value for value in values)])
        for name, high, low in zip(numbers, maxima, maxima[len(values) :], strict=False):
            if high != -low:
                raise DefenseError(
                    f"DPSGD: the processes of the client have different values of {name}, from "
                    f"{-low} to {high}. Build the same defence, loader and Trainer in all of them."
                )

    @contextmanager
    def _together(self) -> Iterator[None]:
        error: Exception | None = None
        try:
            yield
        except Exception as exception:
            error = exception
        if not self.largest([error is not None])[0]:
            return
        reasons: list[Any] = [None] * self.size
        dist.all_gather_object(reasons, None if error is None else f"{error}")
        if error is not None:
            raise error
        first = next(number for number, reason in enumerate(reasons) if reason is not None)
        raise DefenseError(f"process {first} of this client refused: {reasons[first]}")
