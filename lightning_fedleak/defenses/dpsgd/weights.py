"""The weights and buffers of a model that only the optimizer may change while DP-SGD trains it.

Noise covers the optimizer's updates and nothing else. What is written to a model in another way
leaves with it uncovered, so each class here compares contents and refuses such a write.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_fedleak.defenses.base import DefenseError, parameter_name
from lightning_fedleak.defenses.processes import local_part

SMALL = 1 << 20  # numbers in a buffer; larger ones are compared now and then. Not tuned

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Buffers:
    """The buffers and parameters of a model, to see whether a training step writes to one.

    Averages of activations, codebooks, or embedding rows that ``max_norm`` shortens are computed
    from training data without noise. Only the write is seen, not its content, so a step counter is
    refused too. A tensor's version counts every write but one by ``.data``, so contents are
    compared as well: those of small buffers in every step, of large ones and of parameters where
    ``contents`` is set, of sparse ones never. FSDP2 writes to parameters itself, and there they
    are not compared.

    Args:
        root: the module that is trained.
        contents: whether to compare the contents of large buffers and of parameters too.
    """

    def __init__(self, root: nn.Module, *, contents: bool) -> None:
        self._root = root
        self._contents = contents
        self._read()

    def _read(self) -> None:
        self._buffers: dict[str, tuple[Tensor, int, Tensor | None]] = {}
        parameters: dict[nn.Parameter, str] = {}
        sharded = False
        for name, module in self._root.named_modules():  # one pass: a large model has many
            prefix = f"{name}." if name else ""
            sharded = sharded or isinstance(module, FSDPModule)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    dense = buffer.layout == torch.strided and not buffer.is_meta
                    compared = dense and (self._contents or buffer.numel() <= SMALL)
                    copy = buffer.detach().clone() if compared else None
                    self._buffers[prefix + key] = buffer, _version(buffer), copy
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    parameters.setdefault(parameter, prefix + key)
        self._parameters = [
            (name, p, _version(p), fingerprint(p) if self._contents else None)
            for p, name in ({} if sharded else parameters).items()
        ]

    @contextmanager
    def read_at_root_call(self) -> Iterator[None]:
        """Read everything again when the root is called within this context.

        DistributedDataParallel runs ``training_step`` as the root's call, and before it the
        processes of the client send each other buffers.
        """

        def read_once(*_: Any) -> None:
            self._read()
            handle.remove()

        handle = self._root.register_forward_pre_hook(read_once)
        try:
            yield
        finally:
            handle.remove()

    def check_unchanged(self) -> None:
        """Raise an error where a buffer or parameter was written to, replaced or added.

        Raises:
            DefenseError: names it.
        """
        for name, buffer in self._root.named_buffers():
            original, version, copy = self._buffers.get(name, (None, 0, None))
            same = buffer is original and _version(buffer) == version
            if not same or (copy is not None and not _same_content(buffer, copy)):
                raise DefenseError(
                    f"DPSGD: training_step changed the buffer '{name}', which leaves with the "
                    "model and which no noise covers. Put its layer into eval mode, or keep what "
                    "training data do not decide in a plain attribute or outside of training_step."
                )
        for name, parameter, version, content in self._parameters:
            changed = content is not None and not torch.equal(fingerprint(parameter), content)
            if changed or _version(parameter) != version:
                raise DefenseError(
                    f"DPSGD: training_step wrote to the parameter '{name}' itself, while noise "
                    "covers the optimizer's updates alone. Let a gradient train it, or move what "
                    "follows from the weights alone to on_train_batch_end."
                )


class Weights:
    """The trained weights as the optimizer's last step left them, to see another write to them.

    An average that is swapped in for validation, and out again before the next batch, is no such
    write. All numbers are compared in every step.
    """

    def __init__(self) -> None:
        self._states: dict[nn.Parameter, Tensor] = {}
        self._trained: list[nn.Parameter] | None = None
        self._released = False
        self._not_finite: list[nn.Parameter] = []
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Remove the hook on optimizers."""
        self._handle.remove()

    def restart(self) -> None:
        """Read the weights again at the next batch: training starts, perhaps from a checkpoint."""
        self._states, self._trained, self._not_finite = {}, None, []

    def begin(self, root: nn.Module) -> None:
        """Begin a batch.

        Raises:
            DefenseError: the optimizer's last step made weights that are not finite. This follows
                from releases alone, so it may end the run.
        """
        self._released = False
        if self._trained is None:
            self._trained = [p for p in root.parameters() if p.requires_grad]
            self._read(self._trained)
        if self._not_finite:
            raise DefenseError(
                "DPSGD: weights are not finite after the last release "
                f"({_listed(self._not_finite, root)}): lower the learning rate, which "
                "is too high for the noise or for the weights' precision."
            )

    def check(self, parameters: Sequence[nn.Parameter], root: nn.Module) -> None:
        """Raise an error unless the weights are as the optimizer's last step left them.

        Raises:
            DefenseError: names those that are not.
        """
        parameters = [p for p in parameters if p in self._states]
        if not parameters:
            return
        contents = _stacked([fingerprint(p) for p in parameters])
        expected = torch.stack([self._states[p] for p in parameters])
        changed = (contents != expected).nonzero().flatten().tolist()
        if changed:
            raise DefenseError(
                "DPSGD: weights were written to since the optimizer's last step "
                f"({_listed([parameters[i] for i in changed], root)}), and no noise covers that. "
                "Nothing was released. Write to a copy of the weights."
            )

    def released(self) -> None:
        """Prepare for the optimizer step that follows a release."""
        self._states, self._released = {}, True

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._released and self._trained is not None:
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._read([p for p in self._trained if id(p) in stepped])

    @torch.no_grad()
    def _read(self, parameters: Sequence[nn.Parameter]) -> None:
        if not parameters:
            return
        contents = _stacked([fingerprint(p) for p in parameters])
        self._states.update(zip(parameters, contents, strict=True))
        floating = [p for p in parameters if p.is_floating_point() and p.element_size() > 1]
        sums = [local_part(p.detach()).sum(dtype=torch.float32) for p in floating]
        self._not_finite = []
        if sums and not bool(_stacked(sums).isfinite().all()):
            self._not_finite = [p for p in floating if not bool(local_part(p).isfinite().all())]


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, 64 at a time: an integer that differs with the content.

    It is the same wherever the content lies, and 0 for a tensor without bits to read. A quantized
    weight of torchao counts by the tensors that it consists of.

    Args:
        tensor: of any type; of a DTensor this process's part.
    """
    part = tensor.detach()
    if isinstance(part, DTensor):
        part = part.to_local()
    flatten = getattr(part, "__tensor_flatten__", None)
    if flatten is not None:
        inner = (getattr(part, name) for name in flatten()[0])
        return torch.stack([fingerprint(one) for one in inner]).sum()
    if part.is_meta or part.layout != torch.strided:
        return torch.zeros((), dtype=torch.int64)
    if part.is_complex():
        part = torch.view_as_real(part)
    bits = part.view(_INTEGERS[part.element_size()]).flatten()
    per_word = 8 // bits.element_size()
    end = len(bits) // per_word * per_word
    aligned = bits if bits.storage_offset() % per_word == 0 else bits.clone()
    return aligned[:end].view(torch.int64).sum() + bits[end:].sum()


def _stacked(scalars: Sequence[Tensor]) -> Tensor:
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars])


def _listed(parameters: Sequence[nn.Parameter], root: nn.Module) -> str:
    texts = [f"'{parameter_name(p, root)}'" for p in parameters[:5]]
    return ", ".join(texts) + (" and others" if len(parameters) > 5 else "")


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _same_content(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal number for number, with NaN equal to NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if torch.equal(first, second):
        return True
    floats = first.is_floating_point() or first.is_complex()
    return floats and torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
