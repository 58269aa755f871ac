"""A fake device: its tensors report it, and operations distinguish them from the host's.

    with FakeDevice() as device:
        moved = device.model(model)
        attack.run(observation_of(moved))
    device.synchronisations      # what made the host wait, by operation

Tensors of it are of the device ``meta``, which PyTorch has everywhere, and hold an ordinary tensor
that the numbers lie in; so results are those of the CPU, to the bit. As on a GPU:

- an operation that is given tensors of both sides fails, but for numbers without dimensions, and
  for indices from the host;
- a generator of the host draws nothing on the device, nor one of the device on the host;
- NumPy cannot read its tensors;
- what needs a value on the host (``item``, ``tolist``, ``nonzero``, masks as indices, copies
  either way) is counted: these are the ones that ``torch.cuda.set_sync_debug_mode`` reports.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

DEVICE = torch.device("meta")
_HOST = torch.device("cpu")
aten = torch.ops.aten

READS = {
    aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default,
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default,
    aten.unique_dim.default, aten.unique_consecutive.default, aten.repeat_interleave.Tensor,
    aten.bincount.default, aten.multinomial.default, aten.linalg_eigh.default,
    aten._linalg_eigh.default, aten._linalg_svd.default, aten.linalg_qr.default,
    aten.linalg_lstsq.default, aten._linalg_solve_ex.result,
}  # fmt: skip
"""What gives the host a value, or a size that hangs on values."""
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default,
           aten._index_put_impl_.default, aten._unsafe_index.Tensor}  # fmt: skip
COPIES = {aten.copy_.default, aten._to_copy.default, aten.copy.default}


class MixedDevices(RuntimeError):
    """An operation was given what lies on the host and what lies on the device."""


class There(Tensor):
    """A tensor of the fake device.

    Args:
        held: the ordinary tensor with its numbers.
    """

    held: Tensor
    is_meta = False  # it has numbers
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor, requires_grad: bool = False) -> "There":
        made: There = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, layout=held.layout, device=DEVICE, requires_grad=requires_grad,
        )  # fmt: skip
        made.held = held.detach()
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"There({self.held!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "There":
        if id(self) not in memo:
            copied = There(self.held.clone(), self.requires_grad)
            memo[id(self)] = nn.Parameter(copied) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_without_lists(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_without_lists(index), value)

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("NumPy reads no tensor of another device: use Tensor.cpu() first")

    __array__ = numpy

    @classmethod
    def __torch_dispatch__(
        cls, op: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return _computed(op, args, kwargs or {}, Counter())


def _without_lists(index: Any) -> Any:
    """Lists of places as tensors of the host, which PyTorch would make without their numbers."""
    if isinstance(index, tuple):
        return tuple(map(_without_lists, index))
    return (
        torch.tensor(index, dtype=None if index else torch.int64)
        if isinstance(index, list)
        else index
    )


_there: dict[int, torch.Generator] = {}
"""Generators of the device, by address: an operation is given the same under another object."""


class _Generator(torch.Generator):
    """One that says where it lies."""

    def __new__(cls, device: Any = None) -> "_Generator":
        made = super().__new__(cls)
        if device is not None and torch.device(device) == DEVICE:
            _there[made._cdata] = made
        return made

    @property
    def device(self) -> torch.device:
        return DEVICE if self._cdata in _there else torch.device("cpu")


class _Autocast(torch.autocast):
    """The device has none of its own: nothing on it is cast."""

    def __init__(self, device_type: str, *args: Any, **more: Any) -> None:
        super().__init__("cpu" if device_type == DEVICE.type else device_type, *args, **more)


def _of_autocast(asked: Callable[..., Any]) -> Callable[..., Any]:
    def of(device_type: str | None = None) -> Any:
        given = () if device_type is None else (device_type,)
        return asked(*("cpu" if name == DEVICE.type else name for name in given))

    return of


class FakeDevice(TorchDispatchMode):
    """While it is entered, operations are checked and counted.

    Args:
        without_float64: refuse it there, as MPS does.

    Attributes:
        synchronisations: times that the host waited, by operation.
    """

    device = DEVICE

    def __init__(self, *, without_float64: bool = False) -> None:
        super().__init__()
        self.synchronisations: Counter[str] = Counter()
        self.without_float64 = without_float64

    def __enter__(self) -> "FakeDevice":
        self._patches = ExitStack()
        for place, name, made in (
            (torch, "tensor", _from_data(torch.tensor)),
            (torch, "as_tensor", _from_data(torch.as_tensor)),
            (torch, "Generator", _Generator),
            (torch, "autocast", _Autocast),
            (torch, "is_autocast_enabled", _of_autocast(torch.is_autocast_enabled)),
            (torch, "get_autocast_dtype", _of_autocast(torch.get_autocast_dtype)),
        ):
            old = getattr(place, name)
            self._patches.callback(setattr, place, name, old)
            setattr(place, name, made)
        super().__enter__()
        return self

    def __exit__(self, *of: Any) -> None:
        super().__exit__(*of)
        self._patches.close()

    def __torch_dispatch__(
        self, op: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return _computed(op, args, kwargs or {}, self.synchronisations, self.without_float64)

    def put(self, value: Any) -> Any:
        """``value`` with its tensors there."""
        return tree_map_only(Tensor, lambda t: There(t.detach(), t.requires_grad), value)

    def model(self, model: nn.Module) -> nn.Module:
        """The same module, its parameters and buffers there; what is tied stays tied."""
        done: dict[int, Any] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not isinstance(parameter, There):
                    if id(parameter) not in done:
                        there = There(parameter.detach().clone())
                        done[id(parameter)] = nn.Parameter(there, parameter.requires_grad)
                    module._parameters[name] = done[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None and not isinstance(buffer, There):
                    module._buffers[name] = done.setdefault(id(buffer), There(buffer.clone()))
        return model


class _Accelerator(Accelerator):
    """The fake device, as a Trainer knows devices."""

    def setup_device(self, device: torch.device) -> None:
        assert device == DEVICE

    def teardown(self) -> None: ...

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [DEVICE] * int(devices)

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "fake"


def single_device() -> SingleDeviceStrategy:
    """For ``Trainer(strategy=...)``, wrapped or not; the model must lie there already."""
    return SingleDeviceStrategy(DEVICE, accelerator=_Accelerator())


def _from_data(made: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.tensor`` forgets the data where the device is ``meta``."""

    def from_data(data: Any, *args: Any, device: Any = None, **more: Any) -> Tensor:
        if device is None or torch.device(device) != DEVICE:
            return made(data, *args, **more)
        if isinstance(data, There):
            return data.to(more.get("dtype") or data.dtype)
        return made(data, *args, **more).to(DEVICE)

    return from_data


def _computed(
    op: Any, args: Any, kwargs: dict[str, Any], count: Counter[str], no_float64: bool = False
) -> Any:
    """The operation on what the tensors hold."""
    there: list[There] = []
    here: list[Tensor] = []
    generators: list[torch.Generator] = []
    for item in _leaves((*args, *kwargs.values())):
        if isinstance(item, There):
            there.append(item)
        elif isinstance(item, Tensor):
            if item.device == DEVICE:
                raise AssertionError(f"{op}: a tensor without numbers")
            here.append(item)
        elif isinstance(item, torch._C.Generator):
            generators.append(item)
    asked = kwargs.get("device")
    asked = None if asked is None else torch.device(asked)
    goes_there = asked == DEVICE if asked is not None else bool(there)
    if op in COPIES:
        source_there = isinstance(args[1] if op is not aten._to_copy.default else args[0], There)
        goes_there = goes_there if op is aten._to_copy.default else isinstance(args[0], There)
        if source_there != goes_there:
            count["copy to the device" if goes_there else "copy to the host"] += 1
    elif there:
        _check(op, args, here)
        if op in READS:
            count[op.overloadpacket.__name__] += 1
        if op in INDEXED and any(
            isinstance(i, There) and i.dtype in (torch.bool, torch.uint8)
            for i in args[1]
            if i is not None
        ):
            count["mask as an index"] += 1
        if op in INDEXED and any(
            isinstance(i, Tensor) and not isinstance(i, There) for i in args[1]
        ):
            count["copy to the device"] += 1
    for generator in generators:
        if (generator._cdata in _there) != goes_there:
            raise MixedDevices(f"{op}: a generator of the {'host' if goes_there else 'device'}")
    wanted = {id(t.held): t for t in there}
    inner_args = tuple(map(_on_the_host, args))
    inner_kwargs = {name: _on_the_host(value) for name, value in kwargs.items()}
    if op is aten._to_copy.default and source_there != goes_there:
        # Else of the same kind and place: PyTorch would hand on the tensor itself.
        inner_args = (inner_args[0].clone(), *inner_args[1:])
    made = op(*inner_args, **inner_kwargs)
    if torch.Tag.inplace_view in op.tags:
        with no_dispatch():  # sizes of the outer tensor; the inner one has them
            op(*args, **kwargs)
        return args[0]
    if not goes_there:
        return made

    def wrapped(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(wrapped, value))
        if not isinstance(value, Tensor):
            return value
        if id(value) in wanted:
            return wanted[id(value)]
        if no_float64 and value.dtype == torch.float64:
            raise TypeError(f"{op}: the device has no float64")
        return There(value)

    return wrapped(made)


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """What an operation is given: the entries of lists too, which hold no lists."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _on_the_host(value: Any) -> Any:
    """An argument with the tensors that hold the numbers."""
    if isinstance(value, There):
        return value.held
    if isinstance(value, list | tuple):
        return [_on_the_host(one) for one in value]
    return _HOST if isinstance(value, torch.device) and value == DEVICE else value


def _check(op: Any, args: Any, here: list[Tensor]) -> None:
    """Refuses tensors of the host beside those of the device, but for what PyTorch allows."""
    allowed: set[int] = set()
    if op in INDEXED and isinstance(args[0], There):
        allowed = {id(i) for i in args[1] if i is not None}
    for tensor in here:
        if tensor.dim() > 0 and id(tensor) not in allowed:
            raise MixedDevices(
                f"{op}: tensors of the host and of the device: {tuple(tensor.shape)}"
            )


__all__ = ["DEVICE", "FakeDevice", "MixedDevices", "There", "single_device"]
