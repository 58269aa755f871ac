"""Writes to weights and buffers, which no noise covers.

The noise of DP-SGD covers what the optimizer adds to the weights. Any other write may carry an
example into what is released: :class:`Buffers` finds those of a training step, :class:`Weights`
those between two steps.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_fedleak.defenses.base import DefenseError, parameter_name
from lightning_fedleak.defenses.processes import local_part
from lightning_fedleak.model.model_state import Hook

# The largest number of elements of a buffer whose content is compared after every step. Larger ones
# are compared every ``loss_graph.CHECK_EVERY`` releases, because it takes longer. Not tuned.
SMALL = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class Buffers:
    """The buffers and parameters of a model, to detect whether a training step writes to one.

    Averages of activations, codebooks, or embedding rows that ``max_norm`` shortens are computed
    from training data without noise. Any change is refused, also that of a step counter. Contents
    are compared: of small buffers in every step, of large buffers and of parameters if
    ``all_contents`` is set, of sparse buffers never. A buffer that is not compared, and any
    parameter, must also keep its version, which counts all writes except those through ``.data``.
    Parameters are not compared under FSDP2, which writes to them itself.

    Args:
        root: The module that is trained.

    Attributes:
        comparisons: Whether buffers have had equal contents before and after each run of this
            batch, () on the device, by name.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.comparisons: dict[str, Tensor] = {}

    def read(self, *, all_contents: bool) -> None:
        """Read the buffers and parameters before a training step, which must not change them.

        Args:
            all_contents: Whether to compare the contents of large buffers and of parameters too.
        """
        self._all_contents = all_contents
        self._buffers: dict[str, tuple[Tensor, int, Tensor | None]] = {}
        parameters: dict[nn.Parameter, str] = {}
        is_sharded = False
        # One pass for both, because a large model has many modules.
        for name, module in self._root.named_modules():
            prefix = f"{name}." if name else ""
            is_sharded = is_sharded or isinstance(module, FSDPModule)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    is_dense = buffer.layout == torch.strided and not buffer.is_meta
                    is_compared = is_dense and (all_contents or buffer.numel() <= SMALL)
                    copy = buffer.detach().clone() if is_compared else None
                    self._buffers[prefix + key] = buffer, _version(buffer), copy
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    parameters.setdefault(parameter, prefix + key)
        self._parameters = [
            (name, p, _version(p), fingerprint(p) if all_contents else None)
            for p, name in ({} if is_sharded else parameters).items()
        ]

    @contextmanager
    def read_at_root_call(self) -> Iterator[None]:
        """Read everything again when the root is called within this context.

        DistributedDataParallel runs ``training_step`` as the root's call. Before that it copies
        the buffers of one process to the other processes, which is no write of the step.
        """

        def read_once(*_: Any) -> None:
            self.read(all_contents=self._all_contents)
            handle.remove()

        handle = self._root.register_forward_pre_hook(Hook(read_once))
        try:
            yield
        finally:
            handle.remove()

    def check_unchanged(self) -> None:
        """Raise an error if a buffer or parameter was written to, or a buffer added.

        Contents of buffers, also of one that replaces another, are compared on the device, in
        :attr:`comparisons`.

        Raises:
            DefenseError: Names the buffer or parameter.
        """
        for name, buffer in self._root.named_buffers():
            original, version, copy = self._buffers.get(name, (None, 0, None))
            if original is None or (copy is None and _version(original) != version):
                raise _buffer_error(name)
            # Equal numbers may be written: Phi-3's rotary embeddings do it in each step.
            content = original if copy is None and buffer is not original else copy
            if content is not None:
                earlier = self.comparisons.get(name, True)
                self.comparisons[name] = _is_equal(buffer, content) & earlier
        for name, parameter, version, content in self._parameters:
            is_changed = content is not None and not torch.equal(fingerprint(parameter), content)
            if is_changed or _version(parameter) != version:
                raise DefenseError(
                    f"DPSGD: training_step must not write to '{name}' without noise: train it by a "
                    "gradient, or write in on_train_batch_end if only weights decide"
                )
        self._buffers, self._parameters = {}, []  # frees the memory of the copies

    def check(self, equal: Sequence[bool]) -> None:
        """Raise an error if a buffer had another content after a run.

        Args:
            equal: The numbers of :attr:`comparisons`.

        Raises:
            DefenseError: Names the buffer.
        """
        for name, is_equal in zip(self.comparisons, equal, strict=True):
            if not is_equal:
                raise _buffer_error(name)


def _buffer_error(name: str) -> DefenseError:
    """Return the error about a buffer that a training step changed."""
    return DefenseError(
        f"DPSGD: training_step changed the buffer '{name}' without noise. Put its layer into eval "
        "mode, or change it outside of training_step if it does not depend on training data."
    )


class Weights:
    """The trained weights after the optimizer's last step, to detect any other write to them.

    All numbers are compared in every step. Averaged weights may replace them during validation, if
    the trained weights are back before the next release.
    """

    def __init__(self) -> None:
        self._contents: dict[nn.Parameter, Tensor] = {}  # fingerprints
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._trained: list[nn.Parameter] | None = None
        self._released = False
        self._handle = register_optimizer_step_pre_hook(self._before_step)
        self._post_hooks = WeakKeyDictionary[Optimizer, RemovableHandle]()

    def restart(self) -> None:
        """Begin again with the present weights, which may be of a checkpoint."""
        self._contents, self._sums, self._trained = {}, {}, None

    def remove(self) -> None:
        """Remove the hooks on optimizers."""
        for handle in (self._handle, *self._post_hooks.values()):
            handle.remove()

    def begin(self, root: nn.Module) -> None:
        """Begin a batch, and read the weights before the first one.

        Raises:
            DefenseError: The optimizer's last step made weights that are not finite. That depends
                only on releases, so that the error leaks nothing else. The host waits here, since
                what a step with such weights raises may depend on its examples.
        """
        self._released = False
        if self._trained is None:
            self._trained = [p for p in root.parameters() if p.requires_grad]
            self._read(self._trained)
        if not self._sums or bool(_stack(list(self._sums.values())).isfinite().all()):
            return
        parts = {p: local_part(p) for p in self._sums}  # a sum of finite numbers may overflow
        not_finite = [p for p, part in parts.items() if not bool(part.isfinite().all())]
        if not_finite:
            raise DefenseError(
                f"DPSGD: after the last release '{parameter_name(not_finite[0], root)}' is not "
                "finite: lower the learning rate"
            )

    def compare(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return which known weights are as the optimizer left them: no or one vector."""
        parameters = [p for p in parameters if p in self._contents]
        if not parameters:
            return []
        contents = _stack([fingerprint(p) for p in parameters])
        return [contents == torch.stack([self._contents[p] for p in parameters])]

    def check(
        self, parameters: Sequence[nn.Parameter], equal: Sequence[bool], root: nn.Module
    ) -> None:
        """Raise an error if weights were written to since the optimizer's last step.

        Args:
            parameters: The weights.
            equal: The numbers of :meth:`compare`.
            root: The module that is trained.

        Raises:
            DefenseError: Names one of these weights.
        """
        known = (p for p in parameters if p in self._contents)
        changed = [p for p, is_equal in zip(known, equal, strict=True) if not is_equal]
        if changed:
            raise DefenseError(
                f"DPSGD: '{parameter_name(changed[0], root)}' was written to since the optimizer's "
                "last step, which no noise covers: do not share these weights. Write to a copy."
            )

    def check_all(self, root: nn.Module) -> None:
        """Raise an error, as :meth:`check` does, if any known weights were written to."""
        known = list(self._contents)
        self.check(known, [bool(e) for equal in self.compare(known) for e in equal], root)

    def released(self) -> None:
        """Prepare for the optimizer step that follows a release."""
        self._contents, self._sums, self._released = {}, {}, True

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Let :meth:`_after_step` run before all other hooks that follow the optimizer's step."""
        if optimizer not in self._post_hooks:
            self._post_hooks[optimizer] = optimizer.register_step_post_hook(self._after_step)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(self._post_hooks[optimizer].id, last=False)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Read an optimizer's weights after its step, if the step follows a release."""
        if self._released and self._trained is not None:
            ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._read([p for p in self._trained if id(p) in ids])

    @torch.no_grad()
    def _read(self, parameters: Sequence[nn.Parameter]) -> None:
        """Store the fingerprints and the sums of these weights; a sum shows what is not finite."""
        if not parameters:
            return
        contents = _stack([fingerprint(p) for p in parameters])
        self._contents.update(zip(parameters, contents, strict=True))
        floating = [p for p in parameters if p.is_floating_point() and p.element_size() > 1]
        sums = [local_part(p.detach()).sum(dtype=torch.float32) for p in floating]
        self._sums.update(zip(floating, sums, strict=True))


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """Return a checksum of a tensor's content: the sum of its bits as integers of 64 bits.

    Equal contents have equal checksums, regardless of the memory address. The checksum is 0 for a
    meta or sparse tensor. For a quantized weight of torchao it is the sum over its inner tensors.

    Args:
        tensor: A tensor of any type; of a DTensor, only this process's shard counts.
    """
    data = local_part(tensor.detach())
    flatten = getattr(data, "__tensor_flatten__", None)
    if flatten is not None:
        inner_tensors = (getattr(data, name) for name in flatten()[0])
        return torch.stack([fingerprint(inner) for inner in inner_tensors]).sum()
    if data.is_meta or data.layout != torch.strided:
        return torch.zeros((), dtype=torch.int64)
    numbers = _bits(data).flatten()
    per_word = 8 // numbers.element_size()
    end = len(numbers) // per_word * per_word
    aligned = numbers if numbers.storage_offset() % per_word == 0 else numbers.clone()
    total = aligned[:end].view(torch.int64).sum()
    return total + numbers[end:].sum() if end < len(numbers) else total


def _stack(scalars: Sequence[Tensor]) -> Tensor:
    """Return n scalars as a tensor (n,) on the device of the first."""
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars])


def _version(tensor: Tensor) -> int:
    """Return autograd's count of writes to a tensor; inference tensors have none."""
    return -1 if tensor.is_inference() else tensor._version


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers as integers of the same size, by which NaN equals itself."""
    numbers = tensor.resolve_conj().resolve_neg()
    numbers = torch.view_as_real(numbers) if numbers.is_complex() else numbers
    return numbers.view(_INTEGERS[numbers.element_size()])


@torch.no_grad()
def _is_equal(first: Tensor, second: Tensor) -> Tensor:
    """Return whether two tensors have the same type, shape and bits, () on the device."""
    first, second = map(local_part, (first, second))
    kinds = [(t.shape, t.dtype, t.device, t.layout) for t in (first, second)]
    if kinds[0] != kinds[1] or first.layout != torch.strided:  # of sparse ones unknown
        return torch.zeros((), dtype=torch.bool)
    if first.is_quantized:
        return torch.tensor(torch.equal(first, second))
    return (_bits(first) == _bits(second)).all()
