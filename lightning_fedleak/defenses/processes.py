"""The processes that together are one client: sums, agreement, and shards of gradients (FSDP2).

If one process raises an error, all must raise one, because the other processes would wait for it in
their next collective. So code that may raise in a single process runs within :attr:`Team.together`.
Code that computes with sums over processes has the same result in all of them, and raises in all.

A DTensor is a tensor that is distributed over a mesh of processes. Along each dimension of the mesh
it is sharded (each process has a part), replicated (each has the same), or partial (the tensor is
the sum of what the processes have).
"""

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
"""Noise has a 64-bit index, of a parameter and its shard: ``index + (shard << SHARD_BITS)``."""


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a DTensor, which shares its memory; other tensors as they are.

    Args:
        tensor: The tensor.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_number(tensor: Tensor) -> int:
    """Return the number of this process's shard of a tensor, from 0; replicas have the same."""
    if not isinstance(tensor, DTensor):
        return 0
    mesh, number = tensor.device_mesh, 0
    for dim, (size, placement) in enumerate(zip(mesh.shape, tensor.placements, strict=True)):
        number = number * size + (0 if placement.is_replicate() else mesh.get_local_rank(dim))
    return number


def reduce_partial(parameter: nn.Parameter) -> None:
    """Sum the gradient of a parameter over processes if it is partial (tensor parallelism).

    It is then a collective call.
    """
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
        assert isinstance(parameter, DTensor)
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def global_norm(gradients: Sequence[Tensor]) -> float:
    """Return the 2-norm of all gradients together, in which replicas count once.

    It waits for the device. If a gradient is a DTensor, it is a collective call of all processes,
    which must pass the same gradients. Tensors that are not DTensors are then taken for replicas,
    equal in all processes.

    Args:
        gradients: Dense gradients, of any dtypes and on any devices.

    Returns:
        The norm, the same in every process; NaN or infinite if a gradient is.
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


def own_part(whole: Tensor, like: Tensor, placement: Placement | None = None) -> Tensor:
    """Return this process's part of a tensor, sharded in the same way as another tensor.

    Args:
        whole: The tensor in its whole shape.
        like: The DTensor that has the same shape. If it is no DTensor, ``whole`` is returned.
        placement: How ``whole`` is distributed. None: all processes have the same, and nothing is
            sent. ``Partial()``: it is this process's addend, and the part is that of the sum over
            processes.
    """
    if not isinstance(like, DTensor):
        return whole
    mesh = like.device_mesh
    placements = [placement or Replicate()] * mesh.ndim
    distributed = DTensor.from_local(whole, mesh, placements, run_check=False)
    return distributed.redistribute(placements=like.placements).to_local()


def own_parts_of_sums(addends: Sequence[Tensor], likes: Sequence[Tensor]) -> list[Tensor]:
    """Return this process's parts of the sums of tensors over processes; a collective call.

    Args:
        addends: This process's addends, in the whole shapes. They may be overwritten.
        likes: For each addend a tensor of the same shape, which says how the sum is sharded: a
            DTensor over all processes, or another tensor, for which each process gets the whole
            sum.
    """
    first = addends[0]
    same_type = all((a.dtype, a.device) == (first.dtype, first.device) for a in addends)
    if len(addends) == 1 or not same_type:
        for addend, like in zip(addends, likes, strict=True):
            if not isinstance(like, DTensor):
                dist.all_reduce(addend)
        return [own_part(a, like, Partial()) for a, like in zip(addends, likes, strict=True)]
    flat = torch.cat([addend.flatten() for addend in addends])
    dist.all_reduce(flat)
    start = 0
    for addend in addends:
        addend.copy_(flat[start : start + addend.numel()].view_as(addend))
        start += addend.numel()
    return [own_part(total, like) for total, like in zip(addends, likes, strict=True)]


def reshard(root: nn.Module) -> None:
    """Free the whole parameters of every layer of FSDP2, so that only shards remain.

    This is their state between two steps.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_layers(root: nn.Module) -> list[FSDPModule]:
    """Return the modules of FSDP2 whose parameters are whole now, as after a forward pass."""
    return [m for m in root.modules() if isinstance(m, FSDPModule) and _is_whole(m)]


def unshard(layers: Sequence[FSDPModule]) -> None:
    """Gather the whole parameters of layers. It is a collective call if one holds only shards."""
    for layer in layers:
        layer.unshard()


def copies(tensor: Tensor) -> float:
    """Return the number of processes that hold the same part of a tensor."""
    world = dist.get_world_size()
    if not isinstance(tensor, DTensor):
        return float(world)
    axes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return world / math.prod(size for size, placement in axes if not placement.is_replicate())


def _is_whole(module: Any) -> bool:
    """Return whether a parameter that a module of FSDP2 manages is whole, so no DTensor.

    Parameters of inner modules that FSDP2 manages separately are not considered.
    """
    parameters = [*module.parameters(recurse=False)]
    inner = [child for child in module.children() if not isinstance(child, FSDPModule)]
    return any(not isinstance(p, DTensor) for p in parameters) or any(map(_is_whole, inner))


class Team:
    """The processes of one client. All methods are collective calls: all processes must call them.

    Args:
        context: The context of the run; None for a single process.

    Attributes:
        size: The number of processes. If it is 1, nothing is sent.
        process: The index of this process.
        largest: A function that returns the maximum over processes of each number in a list. A
            boolean counts as 0 or 1.
        together: A function that returns a context. If one process raises an error within it, all
            processes raise one at its end, with the index of that process and its message. No
            collective may be called within it: after an error, the other processes would wait.
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
        """Return the sum of a tensor over processes, written into the tensor."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def _largest(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over several processes."""
        numbers = torch.tensor([*map(float, values)], dtype=torch.float64, device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        maxima: list[float] = numbers.tolist()
        return maxima

    def broadcast(self, value: Any) -> Any:
        """Return the value of process 0; the values of other processes are ignored."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self._device)
        return values[0]

    def check_alike(self, **numbers: float) -> None:
        """Raise an error if numbers differ between processes.

        Args:
            numbers: The numbers by name.

        Raises:
            DefenseError: A number differs; the message names it. All processes raise the error.
        """
        if self.size == 1:
            return
        values = [*numbers.values()]
        maxima = self.largest([*values, *(-value for value in values)])
        for name, high, low in zip(numbers, maxima, maxima[len(values) :], strict=False):
            if high != -low:
                raise DefenseError(
                    f"DPSGD: {name} differs between the client's processes, from {-low} to {high}: "
                    "build the same defence, loader and Trainer in all of them"
                )

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Raise an error in all processes if one raises one within this context."""
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
