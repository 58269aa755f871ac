"""Gather the parameters of a sharded model on every process, all at once or one by one.

FSDP2 and ZeRO-3 keep a part of each parameter, its shard, on each process. Attacks need whole
parameters, because they run the model at other times and on other batches than the training.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_fedleak.model.anatomy import mixed_precision
from lightning_fedleak.model.model_runs import WHOLE_MODEL_PACKAGES, only_needed_hooks
from lightning_fedleak.model.snapshots import is_shard, whole_rows, whole_tensor

Parameters = Mapping[str, nn.Parameter | None]

ParameterPlace = tuple[nn.Module, str, Tensor]
"""A module, the name of a parameter in it, and a tensor that replaces the parameter."""


def parameter_places(
    modules: Iterable[nn.Module], values: Mapping[int, Tensor]
) -> list[ParameterPlace]:
    """Return the places of parameters with their new values, given by the parameters' ``id``."""
    return [
        (module, name, values[id(parameter)])
        for module in modules
        for name, parameter in module._parameters.items()
        if id(parameter) in values
    ]


@contextmanager
def parameters_replaced(places: Sequence[ParameterPlace]) -> Iterator[None]:
    """Replace parameters by tensors inside the block, and restore them after it."""
    live = [module._parameters.get(name) for module, name, _ in places]
    try:
        for module, name, value in places:
            module._parameters[name] = value  # type: ignore[assignment]
        yield
    finally:
        for (module, name, _), parameter in zip(places, live, strict=True):
            module._parameters[name] = parameter


@contextmanager
def whole_model(root: nn.Module, *, as_read: bool = False) -> Iterator[None]:
    """Replace the parameters that FSDP2 or ZeRO-3 shards by whole ones, on every process.

    Attacks run the model as often as their data ask for, which differs between processes. A
    collective in such a run would block the other processes, so the parameters are gathered before.
    That takes the memory of all parameters on each process. The model's own tensors are restored
    after the block. Sharding hooks do not run within it, see
    :func:`~lightning_fedleak.model.model_runs.only_needed_hooks`. The computation is in the dtype
    that the model's policy casts parameters to.

    Every process must enter the block, outside of forward and backward, because it gathers.

    Args:
        root: the module whose parameters are replaced.
        as_read: whether to gather a parameter only when a module first reads it as its attribute.
            All processes must then read parameters in the same order. A call of an embedding
            gathers only the rows of its ids, which must be the same on every process.
            ``parameters()`` yields the shards. A nested block without ``as_read`` gathers the
            missing parameters, and frees them at its end.
    """
    modules = list(root.modules())
    owned = [p for m in modules for p in m._parameters.values()]
    sharded = {id(p): p for p in owned if p is not None and is_shard(p)}
    if not sharded:
        yield
        return
    dtypes = {key: policy.param_dtype for key, policy in mixed_precision(root).items()}

    def gather(parameter: nn.Parameter) -> nn.Parameter:
        whole = whole_tensor(parameter)
        dtype = dtypes.get(id(parameter)) or whole.dtype
        return nn.Parameter(whole.to(dtype), requires_grad=parameter.requires_grad)

    with only_needed_hooks(root, WHOLE_MODEL_PACKAGES):
        if not as_read:
            whole = {key: gather(p) for key, p in sharded.items()}
            with parameters_replaced(parameter_places(modules, whole)):
                yield
            return
        with _gathered_as_read(modules, gather, dtypes):
            yield


@contextmanager
def _gathered_as_read(
    modules: Sequence[nn.Module],
    gather: Callable[[nn.Parameter], nn.Parameter],
    dtypes: Mapping[int, torch.dtype | None],
) -> Iterator[None]:
    """Gather a parameter when it is first read; of an embedding, only the rows of its ids."""
    stores, whole = [m._parameters for m in modules], dict[int, nn.Parameter]()
    by_rows = [m for m in modules if _gives_rows(m)]
    try:
        for module in by_rows:
            module.forward = partial(_embed, module, dtypes.get(id(module.weight)))
        for module, store in zip(modules, stores, strict=True):
            module._parameters = _GatheredAsRead(store, whole, gather)
        yield
    finally:
        for module, store in zip(modules, stores, strict=True):
            module._parameters = store
        for module in by_rows:
            del module.forward


def _gives_rows(module: nn.Module) -> bool:
    """Return whether a module only looks up rows of a sharded weight.

    An embedding with ``max_norm``, its own forward or a patched one does more than that.
    """
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return False
    is_plain = type(module).forward is nn.Embedding.forward and "forward" not in vars(module)
    return is_plain and is_shard(module.weight)


def _embed(embedding: nn.Module, dtype: torch.dtype | None, input: Tensor) -> Tensor:
    """Return the rows of ids of an embedding, and gather only these rows."""
    shard = embedding._parameters.get("weight")
    if shard is None or not is_shard(shard):  # a nested block has gathered it
        return nn.Embedding.forward(embedding, input)  # type: ignore[arg-type]
    ids, inverse = torch.unique(input, return_inverse=True)
    rows = whole_rows(shard, ids)
    return rows.to(dtype or rows.dtype)[inverse]


class _GatheredAsRead(dict[str, nn.Parameter | None]):
    """The parameters of a module by name. Access by ``[name]`` gathers a parameter that is a shard.

    Iteration and ``get`` return the shards.
    """

    def __init__(
        self,
        shards: Parameters,
        gathered: dict[int, nn.Parameter],
        gather: Callable[[nn.Parameter], nn.Parameter],
    ) -> None:
        super().__init__(shards)
        self._gathered, self._gather = gathered, gather

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is None or not is_shard(parameter):
            return parameter
        if id(parameter) not in self._gathered:
            self._gathered[id(parameter)] = self._gather(parameter)
        return self._gathered[id(parameter)]


def explain_shards(model: nn.Module, processes: int) -> str:
    """Return why the gradients of a model under FSDP2 cannot be read; an empty string if they can.

    Args:
        model: the model. Layers that are whole after an evaluation are sharded again.
        processes: the number of processes that train the model.
    """
    layers = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for layer in layers:
        layer.reshard()
    if not layers and not any(hasattr(p, "full_tensor") for p in model.parameters()):
        return ""
    policies = mixed_precision(model)
    floating = [p for p in model.parameters() if p.is_floating_point()]
    shards: list[Any] = [p for p in floating if hasattr(p, "full_tensor")]
    meshes = {(p.device_mesh.ndim, p.device_mesh.size()) for p in shards}
    if meshes != {(1, processes)} or any(id(p) not in policies for p in shards):
        return (
            "Hybrid sharding (HSDP) and tensor parallelism are not tested: give fully_shard one "
            "mesh of one dimension, of all processes, or ModelParallelStrategy "
            "tensor_parallel_size=1 and the number of processes as data_parallel_size"
        )
    for name, p in model.named_parameters():
        if p.requires_grad and not hasattr(p, "full_tensor"):
            return (
                f"FSDP2 does not reduce the gradient of '{name}', which each process trains on its "
                "own: call fully_shard on the whole model, without ignored_params"
            )
    if any(torch.float16 in (p.param_dtype, p.reduce_dtype) for p in policies.values()):
        return "Under FSDP2 with float16 gradients are scaled, which is not tested: use bfloat16"
    return ""
