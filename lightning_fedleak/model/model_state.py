"""Restore all that a run of a model may change, in the model and in its process.

Attacks and measurements run the user's model between two training steps, and must leave no trace
in it. :func:`preserve_model` saves the state of all modules and restores it after the run;
:func:`preserve_process` does the same for random generators and torch's global modes. Buffers and
small tensors are copied before the run. Parameters, their gradients and large tensors are copied
only if an operator of the run is about to write to them.

Code compiled by torch.compile ignores hooks that are added later (:func:`is_compiled`).

:func:`describe` says what an unforeseen error of a run is, and where, without what it may quote.
"""

from __future__ import annotations

import random
import re
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache, partial
from operator import is_
from pathlib import Path
from traceback import FrameSummary
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode

# Largest number of bytes of a tensor or array that is copied before the run; not tuned.
#
# A larger tensor is copied when it is written to; a larger array is not restored.
LARGE = 1 << 22
# Largest number of entries of a container that is saved; limits its time, not tuned.
MAX_ENTRIES = 1 << 14

# Packages whose modules write to no parameters in eval mode, except for the classes below.
_TRUSTED = ("torch", "transformers", "peft", "accelerate", "lightning_fedleak")
# Classes of these packages whose forward writes to parameters.
#
# PEFT's (for ``target_parameters``) parametrizes weights, RWKV's rescales them in eval mode. If a
# class is missing here, a run of it raises :class:`WeightsWritten`.
_WRITERS = ("ParamWrapper", "RwkvModel")
# Classes of tensors without further state; a subclass (a quantized weight, say) may have some.
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
# Types of values that contain nothing to restore.
_LEAVES = frozenset[type](
    (
        *(type(None), bool, int, float, complex, str, bytes, type),
        *(torch.dtype, torch.device, torch.Size),
        *(FunctionType, MethodType, BuiltinFunctionType, partial),
    )
)
_CONTAINERS = frozenset({dict, OrderedDict, list, set, deque})
# The saved states within :func:`saved_once` by their module's ``id``; None outside of it.
_saved: ContextVar[dict[int, _State] | None] = ContextVar("fedleak_saved", default=None)
# Attributes of a module that hold its hooks; torch has global ones with the prefix ``_global``.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class WeightsWritten(RuntimeError):
    """A run of the model changed tensors that cannot be restored."""


@contextmanager
def preserve_process() -> Iterator[None]:
    """Restore the process's random generators and torch's global modes after the block.

    These are torch's generators (of the CPU and, if CUDA is in use, of every device), the global
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
    """Restore every module of ``root`` after the block, also after an exception.

    Restored are the values and the identity of parameters, buffers, tensors, NumPy arrays and
    random generators that modules hold, their ``requires_grad`` and ``.grad``, the attributes of
    modules, and the entries of dicts, lists, sets, deques, tuples, dataclasses and namespaces at
    any depth. Not restored are the entries of containers with more than :data:`MAX_ENTRIES`
    entries, and of other objects. The version counters of tensors are restored too, so that a
    graph that was built before the run still has its backward.

    A tensor above :data:`LARGE` bytes, a parameter or a gradient is copied when it is written to.
    For that, every operator is observed, which takes some microseconds each. Operators are observed
    only if the model has modules or hooks from packages other than torch, transformers, PEFT,
    accelerate and this one, or classes that are known to write. A parametrization that is
    registered and removed again sets a tensor to itself, which is no write.

    Args:
        root: the module whose state is restored, with all modules inside it.
        runs: the module inside ``root`` that will run; ``root`` by default.

    Raises:
        WeightsWritten: at the end, if a tensor was written to of which there is no copy.
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
    """Let all :func:`preserve_model` blocks of a module inside this one share one saved state.

    The first block saves the state and each one restores it, because saving the state of a deep
    model takes longer than a short run of it. Inside, modules may change only in these blocks: for
    example, register hooks that must stay before entering.

    Args:
        is_on: whether to share the state; False if each block must save it.
    """
    token = _saved.set({} if is_on else None)
    try:
        yield
    finally:
        _saved.reset(token)


class _Tensor:
    """The saved state of one tensor: its storage, its version, and a copy of its values if any."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        self.tensor, self.name = tensor, name
        self.requires_grad = tensor.requires_grad
        self.inference = tensor.is_inference()
        self.version = 0 if self.inference else tensor._version
        # Its ``__exit__`` sets the version back to the current one; tensors of inference have none.
        self._counter = None if self.inference else _unsafe_preserve_version_counter(tensor)
        self.alias = tensor.detach()  # keeps the storage if tensor.data is replaced
        self.copy: Tensor | None = None
        self.was_set_to_itself = False  # no write, but it increments the version

    def copy_values(self) -> None:
        """Copy the tensor's values, unless there is a copy."""
        if self.copy is None:
            with torch.no_grad():
                self.copy = self.alias.clone()

    def restore(self) -> bool:
        """Restore the tensor, and return False if it was written to and there is no copy."""
        tensor, alias = self.tensor, self.alias
        if not _has_same_storage(tensor, alias):
            tensor.data = alias
        if tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        was_written = not self.inference and tensor._version != self.version
        if self.copy is not None:
            with torch.inference_mode(self.inference), torch.no_grad():
                _without_repetitions(alias, alias).copy_(_without_repetitions(self.copy, alias))
        if self._counter is not None and tensor._version != self.version:
            self._counter.__exit__(None, None, None)
        return self.copy is not None or self.was_set_to_itself or not was_written


def _without_repetitions(tensor: Tensor, like: Tensor) -> Tensor:
    """Return ``tensor`` without the repeated entries that an expanded ``like`` has."""
    if like.layout is not torch.strided:
        return tensor
    for dim, stride in enumerate(like.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _has_same_storage(tensor: Tensor, alias: Tensor) -> bool:
    """Return whether two tensors are views of the same memory; True if that cannot be known."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return True
    return (
        tensor.data_ptr() == alias.data_ptr()
        and tensor.shape == alias.shape
        and tensor.stride() == alias.stride()
        and tensor.dtype == alias.dtype
    )


class _State:
    """The saved state of all modules of ``root``.

    Attributes:
        root: The module whose state is saved.
        watched: The tensors that are copied only when an operator is about to write to them.
        has_user_code: Whether a module or a hook that runs may write to parameters.
    """

    def __init__(self, root: nn.Module, runs: nn.Module) -> None:
        self.root = root  # keeps it alive, and so its id unique
        self.watched: list[_Tensor] = []
        self._copied: list[_Tensor] = []  # tensors that are copied now
        self._empty: list[Any] = []  # containers without entries, which need no copy
        self._containers: list[tuple[Any, Any]] = []  # each with a copy of its entries
        self._flags: list[tuple[Tensor, bool]] = []  # requires_grad of tensors of subclasses
        self._gradients: list[tuple[Tensor, Tensor | None]] = []  # the ``.grad`` of each tensor
        self._restorers: list[Callable[[], object]] = []  # of arrays and random generators
        self._visited: set[int] = set()  # ids of values that are saved already
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
                cls = type(value)
                if cls in _LEAVES:
                    continue
                if cls in _CONTAINERS and not value:
                    self._empty.append(value)
                elif name != "_modules":
                    self._visit(value, f"{type(module).__name__}.{name}")
                else:
                    self._containers.append((value, value.copy()))

    def _visit(self, value: Any, name: str) -> None:
        """Save a value that a module holds; ``name`` is its path, for an error."""
        cls = type(value)
        if cls in _LEAVES or isinstance(value, nn.Module) or id(value) in self._visited:
            return
        if isinstance(value, dict | list | set | deque | tuple):
            self._visit_entries(value, name)
            return
        self._visited.add(id(value))
        if isinstance(value, Tensor):
            self._visit_tensor(value, name)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= LARGE and value.dtype != object and value.flags.writeable:
                self._restorers.append(partial(np.copyto, value, value.copy()))
        elif isinstance(value, torch.Generator):
            self._restorers.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator):
            bit_generator = value.bit_generator
            self._restorers.append(partial(setattr, bit_generator, "state", bit_generator.state))
        elif isinstance(value, np.random.RandomState):
            self._restorers.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._restorers.append(partial(value.setstate, value.getstate()))
        elif (
            cls is SimpleNamespace
            or hasattr(cls, "__dataclass_fields__")
            or cls.__module__.startswith("bitsandbytes.")  # the state of a quantized weight
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
            if type(value) not in _LEAVES:
                self._visit(value, f"{name}.{key}")

    def _visit_tensor(self, tensor: Tensor, name: str) -> None:
        """Save a tensor, its gradient and the attributes of a subclass."""
        if tensor.is_leaf:
            self._gradients.append((tensor, tensor.grad))
            if tensor.grad is not None:
                self._visit(tensor.grad, f"{name}.grad")
        if type(tensor) not in _TENSORS:
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
        """Restore the saved state; raise ``WeightsWritten`` if a written tensor has no copy."""
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
        for restore in self._restorers:
            restore()
        if written:
            raise WeightsWritten(
                f"running the model wrote to {', '.join(written)}: change its forward so that it "
                "does not write to its parameters in eval mode"
            )


def _refill(container: Any, old: Any) -> None:
    """Restore the old entries of a container in place, if they have changed."""
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
    """Return every module of ``root``, itself first, faster than ``root.modules()``."""
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


class Hook(partial[Any]):
    """A hook of this package on a user's module, which does nothing in a copy of the module.

    A user may copy or pickle the model within a step (averaged weights, a checkpoint). The copy
    must neither hold what the hook has recorded, such as token ids, nor record its own forwards.
    In the module itself it calls the function that it is created with.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a call that gives a function that ignores its arguments and returns None.

        It is one of the standard library, so that a pickle is loaded without this package.
        """
        return getattr, (nullcontext(), "__exit__")


def hook_home(hook: Any) -> str:
    """Return the name of the Python module that defines a hook's function."""
    while hasattr(hook, "func"):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


@lru_cache(maxsize=4096)
def _is_trusted(module_name: str) -> bool:
    """Return whether the package of a Python module is one of the trusted ones."""
    return module_name.split(".", 1)[0] in _TRUSTED


@lru_cache(maxsize=4096)
def _output_arguments(operator: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and the names of the arguments that an operator writes to."""
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
                if func is torch.ops.aten.set_.source_Tensor and _has_same_storage(tensor, args[1]):
                    for saved in self._by_storage.get(_storage(tensor) or 0, ()):
                        saved.was_set_to_itself = True
                    continue
                for saved in self._by_storage.pop(_storage(tensor) or 0, ()):
                    saved.copy_values()
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> int | None:
    """Return the address of a tensor's storage; None without one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or a wrapper of other tensors
        return None


def is_compiled(root: nn.Module) -> bool:
    """Return whether torch.compile runs a module, a part of it, or its ``training_step``."""
    return _is_compiled_function(getattr(root, "training_step", None)) or any(
        "_orig_mod" in module._modules
        or module._compiled_call_impl is not None
        or _is_compiled_function(module.forward)
        for module in modules_of(root)
    )


def _is_compiled_function(function: object) -> bool:
    """Return whether torch.compile runs a function, and has not been disabled for it."""
    return hasattr(function, "_torchdynamo_orig_callable") and not hasattr(
        function, "_torchdynamo_disable"
    )


def reset_compiled(root: nn.Module) -> None:
    """Discard compiled code, which would ignore hooks that were added or removed since."""
    if is_compiled(root):
        torch.compiler.reset()


LONGEST_MESSAGE = 200
"""Characters of an unforeseen error's message that are repeated: shapes, dtypes, devices fit."""


def calls_of(error: BaseException) -> list[FrameSummary]:
    """Return the calls that an error passed, without checks: their caller's line says more."""
    frames = traceback.extract_tb(error.__traceback__)
    callers = [frame for frame in frames if Path(frame.filename).name != "validate.py"]
    return [frame for frame in callers if frame.name != "check_finite"]


def is_within(frame: FrameSummary, folder: Path) -> bool:
    """Return whether the code of a call is in a folder."""
    return Path(frame.filename).is_relative_to(folder)


def describe(error: BaseException, *, quotes: bool = False) -> str:
    """Return what an unforeseen error is, and where: a line of the user, a module of the model.

    Its message is repeated if it ``quotes`` nothing private, because nothing has been read.
    """
    frames, of_torch = calls_of(error), Path(torch.__file__).parent
    frame = ([frame for frame in frames if not is_within(frame, of_torch)] or frames)[-1]
    what = f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"
    message = next(iter(str(error).splitlines()), "")
    # What torch's own code says of tensors: 4x64, dtypes and devices. Numbers may be private.
    if type(error) is RuntimeError and is_within(frames[-1], of_torch):
        message = re.sub(r"(?<![\w.])-?\.?\d[\d.]*(?:e[+-]?\d+)?j?(?!\w)", "#", message)
        what = f"torch failed ({message[:LONGEST_MESSAGE]})"
    elif quotes and message:
        what += f": {message[:LONGEST_MESSAGE]}"
    return what + _place_of(error)


def _place_of(error: BaseException) -> str:
    """Return where in the user's model an error was raised; empty if it was not in a module."""
    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    names = [name for name, m in modules[0].named_modules() if m is modules[-1]] if modules else []
    return f", in the model's '{names[0]}'" if names and names[0] else ""
