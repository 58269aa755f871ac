"""Restoring all that a run of a model may change, in the model and in its process.

Buffers and small tensors are copied before the run. Parameters, their gradients and large tensors
are copied only if the run writes to them, right before it does.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from copy import deepcopy
from functools import lru_cache, partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")

LARGE = 1 << 22
"""Bytes of a tensor or array above which it is not copied before the run; not tuned."""
MAX_ENTRIES = 1 << 14
"""Entries of a container above which they are not visited; not tuned."""

_TRUSTED = ("torch", "transformers", "peft", "accelerate", "lightning_fedleak")
_WRITERS = ("ParamWrapper", "RwkvModel")
"""Classes of these packages whose forward writes: PEFT's parametrizes weights (target_parameters),
RWKV's rescales them in eval mode. A class that is missing here ends a run by WeightsWritten."""
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
_saved: ContextVar[dict[int, _State] | None] = ContextVar("fedleak_saved", default=None)
"""What was saved within :func:`saved_once`, by the module's id; None outside of it."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class WeightsWritten(RuntimeError):
    """A run of the model changed tensors that cannot be restored."""


@contextmanager
def preserve_process() -> Iterator[None]:
    """Restore after it how the process computes and draws random numbers.

    Restored are torch's generators (of the CPU and, if CUDA is in use, of every device), the global
    states of numpy and ``random``, the grad mode, autocast and the default dtype.
    """
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if cuda else ()
    numpy_state, python_state = np.random.get_state(), random.getstate()
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    casts = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)
            torch.set_grad_enabled(grad)
            torch.set_default_dtype(dtype)
            for kind, enabled, cast_dtype in casts:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, cast_dtype)


@contextmanager
def preserve_model(root: nn.Module, runs: nn.Module | None = None) -> Iterator[None]:
    """Restore after it every module of ``root``, also after an exception.

    Restored are the values and the identity of parameters, buffers, tensors, NumPy arrays and
    random generators that modules hold, their ``requires_grad`` and ``.grad``, the attributes of
    modules, and the entries of dicts, lists, sets, deques, tuples, dataclasses and namespaces at
    any depth. The entries of a container of more than :data:`MAX_ENTRIES`, and of other objects,
    are not restored. Version counters of tensors are, so that a graph that was built before the run
    still has its backward.

    A tensor above :data:`LARGE` bytes, a parameter or a gradient is copied when it is written to.
    Operators are watched for that (some microseconds each) if the model has modules or hooks that
    are not from torch, transformers, PEFT or accelerate, or are known to write. A parametrization
    that is registered and removed again sets a tensor to itself, which is no write.

    Args:
        root: the module whose state is restored, with all modules inside it.
        runs: the part of it that will run; all of it by default.

    Raises:
        WeightsWritten: at the end, if a tensor was written to that was neither copied nor watched.
    """
    saved = _saved.get()
    state = (saved or {}).get(id(root)) or _State(root, root if runs is None else runs)
    if saved is not None:
        saved[id(root)] = state
    watch = _Watch(state.watched) if state.has_user_code and state.watched else nullcontext()
    try:
        with watch:
            yield
    finally:
        state.restore()


@contextmanager
def saved_once(is_on: bool = True) -> Iterator[None]:
    """Let the first :func:`preserve_model` of a module save its state for all of them within.

    Each restores it. To save what a deep model holds takes longer than a short run of it. Nothing
    but runs may change the modules within: hooks that are to stay are registered outside.

    Args:
        is_on: False to let each save it.
    """
    token = _saved.set({} if is_on else None)
    try:
        yield
    finally:
        _saved.reset(token)


def copy_without_hooks(thing: T, root: nn.Module, package: str) -> T:
    """Return a deep copy of an object that holds a model, without the hooks of a package.

    A hook of another package that is bound to a module of the model is bound to its copy.

    Args:
        thing: the object.
        root: the model.
        package: the name of the package, whose hooks would act on the run of the original.
    """
    memo: dict[int, Any] = {}
    others = list[tuple[OrderedDict[int, Any], dict[int, Any]]]()
    for module in modules_of(root):
        for name in HOOKS:
            if hooks := module.__dict__.get(name):
                memo[id(hooks)] = store = OrderedDict[int, Any]()
                homes = {n: hook_home(hook).partition(".")[0] for n, hook in hooks.items()}
                others.append((store, {n: hooks[n] for n in hooks if homes[n] != package}))
    copied = deepcopy(thing, memo)
    for store, hooks in others:  # where all modules have their copies
        store.update(deepcopy(hooks, memo))
    return copied


class _Tensor:
    """The saved state of one tensor: its storage, its values if they were copied, its version."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        self.tensor, self.name = tensor, name
        self.requires_grad = tensor.requires_grad
        self.inference = tensor.is_inference()
        self.version = 0 if self.inference else tensor._version
        self._counter = None if self.inference else _unsafe_preserve_version_counter(tensor)
        self.alias = tensor.detach()  # of the same storage, also if tensor.data is replaced
        self.copy: Tensor | None = None
        self.was_set_to_itself = False  # which counts as a version, and is no write

    def copy_values(self) -> None:
        if self.copy is None:
            with torch.no_grad():
                self.copy = self.alias.clone()

    def restore(self) -> bool:
        """Restore the tensor, and return False if it was written to and there is no copy."""
        tensor, alias = self.tensor, self.alias
        if not _same_place(tensor, alias):
            tensor.data = alias
        if tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        written = not self.inference and tensor._version != self.version
        if self.copy is not None:
            with torch.inference_mode(self.inference), torch.no_grad():
                _without_repeats(alias, alias).copy_(_without_repeats(self.copy, alias))
        if self._counter is not None and tensor._version != self.version:
            self._counter.__exit__(None, None, None)
        return self.copy is not None or self.was_set_to_itself or not written


def _without_repeats(tensor: Tensor, like: Tensor) -> Tensor:
    """Return ``tensor`` without the repetitions that an expanded ``like`` has."""
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
    """The saved contents of the modules of ``root``."""

    def __init__(self, root: nn.Module, runs: nn.Module) -> None:
        self.root = root  # keeps the id that it is found by
        self.watched: list[_Tensor] = []
        self._copied: list[_Tensor] = []
        self._empty: list[Any] = []
        self._containers: list[tuple[Any, Any]] = []
        self._flags: list[tuple[Tensor, bool]] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._others: list[Callable[[], object]] = []
        self._visited: set[int] = set()
        modules = modules_of(root)
        running = modules if runs is root else modules_of(runs)
        hooks = [getattr(torch_module, f"_global{name}") for name in HOOKS]
        for module in running:
            hooks += [h for name in HOOKS if (h := module.__dict__.get(name))]
        self.has_user_code = any(
            not _is_trusted(type(m).__module__) or type(m).__name__ in _WRITERS for m in running
        ) or any(not _is_trusted(hook_home(hook)) for store in hooks for hook in store.values())
        for module in modules:
            attributes = module.__dict__
            self._containers.append((attributes, attributes.copy()))
            for name, value in attributes.items():
                kind = type(value)
                if kind in _ATOMS:
                    continue
                if kind in _CONTAINERS and not value:
                    self._empty.append(value)
                elif name != "_modules":
                    self._visit(value, f"{type(module).__name__}.{name}")
                else:
                    self._containers.append((value, value.copy()))

    def _visit(self, value: Any, name: str) -> None:
        kind = type(value)
        if kind in _ATOMS or isinstance(value, nn.Module) or id(value) in self._visited:
            return
        if isinstance(value, dict | list | set | deque | tuple):
            self._visit_entries(value, name)
            return
        self._visited.add(id(value))
        if isinstance(value, Tensor):
            self._visit_tensor(value, name)
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
        elif (
            kind is SimpleNamespace
            or hasattr(kind, "__dataclass_fields__")
            or kind.__module__.startswith("bitsandbytes.")  # how a weight is quantized
        ):
            self._visit_entries(getattr(value, "__dict__", {}), name)

    def _visit_entries(self, container: Any, name: str) -> None:
        """Save the entries of a dict, list, set, deque or tuple."""
        if len(container) > MAX_ENTRIES:
            return
        self._visited.add(id(container))
        old = dict(container) if isinstance(container, dict) else list(container)
        self._containers.append((container, old))
        for key, value in old.items() if isinstance(old, dict) else enumerate(old):
            if type(value) not in _ATOMS:
                self._visit(value, f"{name}.{key}")

    def _visit_tensor(self, tensor: Tensor, name: str) -> None:
        if tensor.is_leaf:
            self._gradients.append((tensor, tensor.grad))
            if tensor.grad is not None:
                self._visit(tensor.grad, f"{name}.grad")
        if type(tensor) not in _PLAIN:
            self._visit_entries(tensor.__dict__, name)
            if not type(tensor).__module__.startswith("bitsandbytes."):
                self._flags.append((tensor, tensor.requires_grad))
                return
        for store in ("._parameters.", "._buffers."):
            name = name.replace(store, ".")
        saved = _Tensor(tensor, name)
        if isinstance(tensor, nn.Parameter) or tensor.nbytes > LARGE or name.endswith(".grad"):
            self.watched.append(saved)
        else:
            saved.copy_values()
            self._copied.append(saved)

    def restore(self) -> None:
        for container in self._empty:
            if container:
                container.clear()
        for container, old in self._containers:
            _refill(container, old)
        written = [t.name for t in (*self.watched, *self._copied) if not t.restore()]
        for tensor, flag in self._flags:
            if tensor.requires_grad != flag:
                tensor.requires_grad_(flag)
        for tensor, gradient in self._gradients:
            if tensor.grad is not gradient:
                tensor.grad = gradient
        for restore in self._others:
            restore()
        if written:
            raise WeightsWritten(
                f"running the model wrote to {', '.join(written)}, which cannot be undone: change "
                "its forward so that it does not write to its parameters in eval mode"
            )


def _refill(container: Any, old: Any) -> None:
    """Restore the old entries of a container in place, if it has others."""
    if isinstance(container, tuple):
        return
    if isinstance(container, dict):
        if (
            len(container) == len(old)
            and all(map(is_, container, old))
            and all(map(is_, container.values(), old.values()))
        ):
            return
        base: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        base.clear(container)
        for key, value in old.items():
            base.__setitem__(container, key, value)
    elif len(container) != len(old) or not all(map(is_, container, old)):
        if isinstance(container, list):
            container[:] = old
        else:
            container.clear()
            container.update(old) if isinstance(container, set) else container.extend(old)


def modules_of(root: nn.Module) -> list[nn.Module]:
    """Return every module of ``root``, itself first; faster than ``root.modules()``, unordered."""
    visited: set[int] = set()
    modules: list[nn.Module] = []
    stack: list[nn.Module | None] = [root]
    while stack:
        module = stack.pop()
        if module is not None and id(module) not in visited:
            visited.add(id(module))
            modules.append(module)
            stack += module._modules.values()
    return modules


def hook_home(hook: Any) -> str:
    """Return the Python module that a hook's function comes from."""
    while hasattr(hook, "func"):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


@lru_cache(maxsize=4096)
def _is_trusted(home: str) -> bool:
    return home.split(".", 1)[0] in _TRUSTED


@lru_cache(maxsize=4096)
def _output_arguments(operator: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of the arguments that an operator writes to."""
    return tuple(
        (i, a.name)
        for i, a in enumerate(operator._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that copies a tensor's values before the first operator that writes to it."""

    def __init__(self, watched: Iterable[_Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._by_storage: dict[int, list[_Tensor]] = {}
        for saved in watched:
            key = _storage(saved.alias)
            if key is not None:
                self._by_storage.setdefault(key, []).append(saved)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for position, name in _output_arguments(func):
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if not isinstance(tensor, Tensor):
                    continue
                if func is torch.ops.aten.set_.source_Tensor and _same_place(tensor, args[1]):
                    for saved in self._by_storage.get(_storage(tensor) or 0, ()):
                        saved.was_set_to_itself = True
                    continue
                for saved in self._by_storage.pop(_storage(tensor) or 0, ()):
                    saved.copy_values()
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # no storage: sparse, or a wrapper of others
        return None
