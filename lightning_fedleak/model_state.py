"""What a run of a model may change, in the model and in its process, kept and put back.

Copied beforehand are buffers and small tensors; of parameters, their gradients and large tensors
only what a run really writes to, at the moment before it does.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode

LARGE = 1 << 22
"""Bytes of a tensor or array above which it is not copied before the run."""
MOST = 1 << 14
"""Entries of a container above which it is not looked into."""

_TRUSTED = ("torch", "transformers", "peft", "accelerate", "lightning_fedleak")
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_ATOMS = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        type,
        torch.dtype,
        torch.device,
        torch.Size,
        FunctionType,
        MethodType,
        BuiltinFunctionType,
        partial,
    }
)
_CONTAINERS = frozenset({dict, OrderedDict, list, set, deque})
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ModelWritten(RuntimeError):
    """A run wrote to a tensor in a way that nothing can undo."""


@contextmanager
def preserve_process() -> Iterator[None]:
    """After it the process computes and draws random numbers as before.

    Put back are torch's generators (CPU and, where CUDA is in use, every device), numpy's and
    ``random``'s global states, the grad mode, autocast and the default dtype.
    """
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if in_use else ()
    drawn, chance = np.random.get_state(), random.getstate()
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    casts = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            np.random.set_state(drawn)
            random.setstate(chance)
            torch.set_grad_enabled(grad)
            torch.set_default_dtype(dtype)
            for kind, enabled, to in casts:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, to)


@contextmanager
def preserve_model(root: nn.Module, runs: nn.Module | None = None) -> Iterator[None]:
    """After it every module of ``root`` is as it was, also after an exception.

    Put back are the values and the identity of parameters, buffers and tensors, NumPy arrays and
    random generators that modules hold, which of them require a gradient, ``.grad``, and the
    attributes of modules: whatever was bound, in place of whatever is, and the entries of dicts,
    lists, sets, deques, tuples, dataclasses and namespaces, however deep. A container of more than
    :data:`MOST` entries is kept as a whole, not its entries; other objects are kept as such and not
    looked into. Version counters of tensors are put back too, so that a graph built before the run
    still has its backward.

    A tensor above :data:`LARGE` bytes, a parameter or a gradient is copied when it is written to.
    That is watched (some microseconds for every operator) where the model holds code that is not of
    torch, transformers, PEFT or accelerate: a module or a hook.

    Args:
        root: the module whose state is kept, with all modules inside it.
        runs: the part of it that will be run; all of it by default.

    Raises:
        ModelWritten: at the end, where a tensor was written to that was neither copied nor watched.
    """
    state = _State(root, root if runs is None else runs)
    watch = _Watch(state.watched) if state.own_code and state.watched else nullcontext()
    try:
        with watch:
            yield
    finally:
        state.put_back()


class _Tensor:
    """One tensor as it was: its storage, its values where they were copied, its version."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        self.tensor, self.name = tensor, name
        self.requires_grad = tensor.requires_grad
        self.inference = tensor.is_inference()
        self.version = 0 if self.inference else tensor._version
        self._counter = None if self.inference else _unsafe_preserve_version_counter(tensor)
        self.alias = tensor.detach()  # of the same storage, whatever becomes of tensor.data
        self.copy: Tensor | None = None

    def keep(self) -> None:
        if self.copy is None:
            with torch.no_grad():
                self.copy = self.alias.clone()

    def put_back(self) -> bool:
        """False where the tensor was written to and there is no copy."""
        tensor, alias = self.tensor, self.alias
        if not _same_place(tensor, alias):
            tensor.data = alias
        if tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        written = not self.inference and tensor._version != self.version
        if self.copy is not None:
            with torch.inference_mode(self.inference), torch.no_grad():
                _narrowed(alias, alias).copy_(_narrowed(self.copy, alias))
        if self._counter is not None and tensor._version != self.version:
            self._counter.__exit__(None, None, None)
        return self.copy is not None or not written


def _narrowed(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` less the repetitions that an expanded ``like`` has."""
    if like.layout is not torch.strided:
        return tensor
    for dim, stride in enumerate(like.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _same_place(tensor: Tensor, alias: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return True
    return (
        tensor.data_ptr() == alias.data_ptr()
        and tensor.shape == alias.shape
        and tensor.stride() == alias.stride()
        and tensor.dtype == alias.dtype
    )


class _State:
    """Everything that the modules of ``root`` hold, as it was when this was made."""

    def __init__(self, root: nn.Module, runs: nn.Module) -> None:
        self.watched: list[_Tensor] = []
        self._copied: list[_Tensor] = []
        self._empty: list[Any] = []
        self._holders: list[tuple[Any, Any]] = []
        self._flags: list[tuple[Tensor, bool]] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._others: list[Callable[[], object]] = []
        self._seen: set[int] = set()
        modules = modules_of(root)
        inside = modules if runs is root else modules_of(runs)
        hooks = [getattr(torch_module, f"_global{name}") for name in HOOKS]
        for module in inside:
            hooks += [h for name in HOOKS if (h := module.__dict__.get(name))]
        self.own_code = any(not _trusted(type(m).__module__) for m in inside) or any(
            not _trusted(hook_home(hook)) for store in hooks for hook in store.values()
        )
        # FSDP1 and FSDP2 put parameters in and out by themselves, and keep account of it.
        if any("_fsdp_wrapped_module" in m._modules for m in modules):
            for module in modules:
                self._others.append(partial(setattr, module, "training", module.training))
                self._look(module._buffers, type(module).__name__)
            return
        for module in modules:
            held = module.__dict__
            self._holders.append((held, held.copy()))
            for name, value in held.items():
                kind = type(value)
                if kind in _ATOMS:
                    continue
                if kind in _CONTAINERS and not value:
                    self._empty.append(value)
                elif name != "_modules":
                    self._look(value, f"{type(module).__name__}.{name}")
                else:
                    self._holders.append((value, value.copy()))

    def _look(self, value: Any, name: str) -> None:
        kind = type(value)
        if kind in _ATOMS or isinstance(value, nn.Module) or id(value) in self._seen:
            return
        if isinstance(value, dict | list | set | deque | tuple):
            self._look_inside(value, name)
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self._look_at_tensor(value, name)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= LARGE and value.dtype != object and value.flags.writeable:
                self._others.append(partial(np.copyto, value, value.copy()))
        elif isinstance(value, torch.Generator):
            self._others.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._others.append(partial(setattr, bits, "state", bits.state))
        elif isinstance(value, np.random.RandomState):
            self._others.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._others.append(partial(value.setstate, value.getstate()))
        elif kind is SimpleNamespace or hasattr(kind, "__dataclass_fields__"):
            self._look_inside(getattr(value, "__dict__", {}), name)

    def _look_inside(self, held: Any, name: str) -> None:
        """Entries of a dict, list, set, deque or tuple."""
        if len(held) > MOST:
            return
        self._seen.add(id(held))
        old = dict(held) if isinstance(held, dict) else list(held)
        self._holders.append((held, old))
        for key, value in old.items() if isinstance(old, dict) else enumerate(old):
            if type(value) not in _ATOMS:
                self._look(value, f"{name}.{key}")

    def _look_at_tensor(self, tensor: Tensor, name: str) -> None:
        if tensor.is_leaf:
            self._gradients.append((tensor, tensor.grad))
            if tensor.grad is not None:
                self._look(tensor.grad, f"{name}.grad")
        if type(tensor) not in _PLAIN:
            self._flags.append((tensor, tensor.requires_grad))
            return
        for store in ("._parameters.", "._buffers."):
            name = name.replace(store, ".")
        kept = _Tensor(tensor, name)
        if isinstance(tensor, nn.Parameter) or tensor.nbytes > LARGE or name.endswith(".grad"):
            self.watched.append(kept)
        else:
            kept.keep()
            self._copied.append(kept)

    def put_back(self) -> None:
        for held in self._empty:
            if held:
                held.clear()
        for held, old in self._holders:
            _refill(held, old)
        lost = [t.name for t in (*self.watched, *self._copied) if not t.put_back()]
        for tensor, flag in self._flags:
            if tensor.requires_grad != flag:
                tensor.requires_grad_(flag)
        for tensor, gradient in self._gradients:
            if tensor.grad is not gradient:
                tensor.grad = gradient
        for put_back in self._others:
            put_back()
        if lost:
            raise ModelWritten(
                f"running the model wrote to {', '.join(lost)}, which only its own training may "
                "change, and that cannot be undone: have its forward leave its parameters alone in "
                "eval mode"
            )


def _refill(held: Any, old: Any) -> None:
    """Gives a container its old entries back, in place, where it has others."""
    if isinstance(held, tuple):
        return
    if isinstance(held, dict):
        if (
            len(held) == len(old)
            and all(map(is_, held, old))
            and all(map(is_, held.values(), old.values()))
        ):
            return
        base: Any = OrderedDict if isinstance(held, OrderedDict) else dict
        base.clear(held)
        for key, value in old.items():
            base.__setitem__(held, key, value)
    elif len(held) != len(old) or not all(map(is_, held, old)):
        if isinstance(held, list):
            held[:] = old
        else:
            held.clear()
            held.update(old) if isinstance(held, set) else held.extend(old)


def modules_of(root: nn.Module) -> list[nn.Module]:
    """Every module of ``root``, itself first; quicker than ``root.modules()``, in another order."""
    seen: set[int] = set()
    found: list[nn.Module] = []
    waiting: list[nn.Module | None] = [root]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            found.append(module)
            waiting += module._modules.values()
    return found


def hook_home(hook: Any) -> str:
    """The module of Python that a hook's function comes from."""
    while hasattr(hook, "func"):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


@lru_cache(maxsize=4096)
def _trusted(home: str) -> bool:
    return home.split(".", 1)[0] in _TRUSTED


@lru_cache(maxsize=4096)
def _written(operator: Any) -> tuple[tuple[int, str], ...]:
    """(place, name) of the arguments that an operator writes to."""
    return tuple(
        (i, a.name)
        for i, a in enumerate(operator._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies a tensor's values before the first operator that writes to its storage."""

    def __init__(self, watched: Iterable[_Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._at: dict[int, list[_Tensor]] = {}
        for kept in watched:
            key = _storage(kept.alias)
            if key is not None:
                self._at.setdefault(key, []).append(kept)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for place, name in _written(func):
            value = args[place] if place < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor):
                    for kept in self._at.pop(_storage(tensor) or 0, ()):
                        kept.keep()
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # no storage: sparse, or a wrapper of others
        return None
