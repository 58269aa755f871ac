"""A record of every sample's part in a backward pass: layer inputs and output gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.defenses.dpsgd.per_sample import Part, count_positions, parts_of, refusal

Layout = tuple[str, int]
"""How a layer's first dimension counts samples: ("batch", 1), ("flat", positions of a sample), or
("expanded", 1) where it had one row for all samples and now has one for each."""

FIRST_COLUMNS = 4  # compared first; nearly all rows that differ do so there. Not tuned
DISTINCT = 5  # samples; of fewer, rows may agree by chance whatever one sample holds. Not tuned

_EXPANDED = (
    "DPSGD: {0} looked up one row for all samples, and DPSGD let it look up one for each of the "
    "{1} instead, so that each has a gradient of its own. If that is why it failed (the module "
    "repeats the row itself, or has several rows for a sample), let it look up one for each row "
    "of the batch, or freeze it."
)


@contextmanager
def prompts_of_samples(root: nn.Module, samples: int) -> Iterator[None]:
    """Let PEFT's virtual tokens have one row for each sample within this context.

    PEFT looks them up once and repeats them for every row of the batch, so that only the sum of the
    samples' gradients comes back. The recorder lets them be looked up for each sample. Of the
    ``samples ** 2`` rows that PEFT makes of these the first ``samples`` are right.

    Args:
        root: the module, with or without PEFT's models in it.
        samples: of the batch.
    """
    with ExitStack() as stack:
        for module in root.modules():
            if hasattr(type(module), "get_prompt") and "prompt_encoder" in module._modules:
                plain: Any = module.get_prompt
                module.__dict__["get_prompt"] = functools.partial(_first_prompts, plain, samples)
                stack.callback(module.__dict__.pop, "get_prompt")
        yield


def _first_prompts(
    plain: Callable[..., Any], samples: int, batch_size: int, *args: Any, **kwargs: Any
) -> Any:
    prompts = plain(batch_size, *args, **kwargs)
    if batch_size == samples and isinstance(prompts, Tensor) and len(prompts) == samples**2:
        return prompts[:samples]
    return prompts


@dataclass(frozen=True)
class Call:
    """One call of a layer in a training step.

    Attributes:
        name: the layer's, in the root module.
        edge: of its output in the autograd graph.
        layout: how its first dimension counts samples.
        trained: whether it trains parameters. A frozen layer that gradients pass is recorded for
            its place in the graph alone.
    """

    name: str
    edge: GradientEdge
    layout: Layout
    trained: bool


class Recorder:
    """Hooks on every layer that owns parameters, which record per-sample gradients.

    Calls within :meth:`step` with autograd on are recorded, when the gradient of the layer's output
    arrives. What a checkpointed block computes again in backward is not counted twice, because no
    gradient arrives there.

    An embedding that is called once for all samples (positions, ids of shape (1, T) or (T,)) is
    called with a row for each, because autograd's broadcast would return the sum of their gradients
    alone.

    Under FSDP2 a layer holds other tensors in a forward than between steps; records use those
    between steps, which are the optimizer's. An error is raised by :meth:`check`, not by a hook: if
    a hook raised it in one process, the others would wait.

    Args:
        root: the module whose parameters are trained. Later changes of ``requires_grad`` are
            respected; layers added later are not recorded.

    Attributes:
        root: the module.
        parts: per-sample gradients of the mean loss, by parameter.
        calls: of layers in the last step.
        samples: in the last step.
        real: how many of them count, the first ones.
        half: whether a gradient came in half precision.
        terms: of the loss, where gradients are those of their sum; None where of their mean.
    """

    def __init__(self, root: nn.Module) -> None:
        self.parts: dict[Tensor, list[Part]] = {}
        self.calls: list[Call] = []
        self.samples = self.real = 0
        self._filled = self.half = False
        self.terms: int | None = None
        self._open = self._looking = False
        self._counting = True
        self._positional: set[nn.Module] = set()
        self._batch_tensors: list[Tensor] = []
        self._single: set[int] = set()
        self._handles: list[Any] = []
        self.root = root
        self._failure: Exception | None = None
        self.adopt()
        for name, module in root.named_modules():
            if not owns_parameters(module):
                continue
            if isinstance(module, nn.Embedding):
                self._handles.append(
                    module.register_forward_pre_hook(self._expand, with_kwargs=True)
                )
            record: Callable[..., None] = functools.partial(self._on_call, name)
            self._handles.append(module.register_forward_hook(record, with_kwargs=True))

    def adopt(self) -> None:
        """Read which parameters belong to which layer; to be called between steps."""
        self._owned = {
            (module, key): parameter
            for module in self.root.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        }

    def check(self) -> None:
        """Raise the error of a layer that could not be recorded since the step began.

        Raises:
            DefenseError: names the layer, and says what to do with it.
        """
        if len(self._single) == self.samples > 1:
            self._failure = DefenseError(
                f"DPSGD: sample 0 of {self.samples} was run by itself in training_step, and so "
                "were the others, where a row for each sample is looked for. Run the whole batch "
                "at once."
            )
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def step(
        self,
        samples: int,
        *,
        counts: bool = True,
        real: int | None = None,
        tensors: Iterable[Tensor] = (),
    ) -> Iterator[None]:
        """Record the calls within this context, of a batch of ``samples``; discard earlier ones.

        Gradients of a batch that does not count are set to zero at every trained layer, NaN too,
        and are not recorded. So are those of all samples but the first ``real`` ones, which are
        recorded, so that a step takes as long however many these are. The tensors of the batch show
        where rows are joined so that they would be taken for those of other samples.
        """
        self.clear()
        self.samples, self._open, self._counting = samples, True, counts
        self.real, self._filled = samples if real is None else real, real is not None
        self._batch_tensors = [t for t in tensors if t.dim() == 2 and len(t) == samples]
        self._single = set()
        expanded = set(self._positional)
        try:
            with prompts_of_samples(self.root, samples):
                yield
        except Exception as error:
            try:
                self.check()
            except DefenseError as failure:
                raise failure from error
            if names := [n for n, m in self.root.named_modules() if m in self._positional]:
                error.add_note(_EXPANDED.format(", ".join(names), samples))
            self._positional = expanded
            raise
        finally:
            self._open, self._batch_tensors = False, []

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Record no gradients within this context, which are those of a check."""
        self._looking = True
        try:
            yield
        finally:
            self._looking = False

    @property
    def positions(self) -> int:
        """Return the positions of all samples of the last step, in the layer that has most."""
        return max((count_positions(p) for parts in self.parts.values() for p in parts), default=0)

    def clear(self) -> None:
        """Discard all records, and with them the graph."""
        self.parts, self.calls, self.samples, self.real = {}, [], 0, 0
        self.half, self.terms, self._failure = False, None, None

    def remove(self) -> None:
        """Remove the hooks."""
        self.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _expand(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not (self._open and torch.is_grad_enabled() and self.samples > 1):
            return None
        ids = first_input(args, kwargs)
        if not isinstance(ids, Tensor) or ids.dim() == 0:
            return None
        if ids.dim() == 1 or len(ids) == 1:
            self._note_single(ids.flatten())
        if not trains(module):
            return None
        if ids.dim() == 1 and (module in self._positional or self._are_positions(ids)):
            ids = ids[None]
        elif ids.dim() == 1 or len(ids) != 1:
            return None
        self._positional.add(module)
        return (ids.expand(self.samples, *ids.shape[1:]).contiguous(),), {}

    def _are_positions(self, ids: Tensor) -> bool:
        """Return whether (n,) ids are positions, not those of one sample after the other."""
        n = len(ids)
        if n % self.samples:
            return True
        return n > self.samples and torch.equal(ids, torch.arange(n, device=ids.device))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _on_call(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not (self._open and torch.is_grad_enabled()):
            return
        try:
            self._record(name, module, args, kwargs, output)
        except DefenseError as error:
            self._failure = self._failure or error

    def _record(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._check_rows(name, first_input(args, kwargs))
        if not trains(module):
            self._record_frozen(name, output)
            return
        if _ignored(module):
            return
        if not isinstance(output, Tensor):
            raise DefenseError(
                f"DPSGD: '{name}' ({type(module).__name__}) returns {type(output).__name__}, not "
                "one tensor, so its per-sample gradients cannot be read. Freeze it."
            )
        if not output.requires_grad:
            return
        reason = refusal(name, module)
        if reason:
            raise DefenseError(f"DPSGD: {reason}")
        source = first_input(args, kwargs)
        layout = self._layout(name, module, source, output)
        self.calls.append(Call(name, get_gradient_edge(output), layout, True))
        if not self._counting:
            output.register_hook(self._to_zero)  # type: ignore[no-untyped-call]
            return
        if self._filled:
            output.register_hook(functools.partial(self._to_real, self.samples, self.real))  # type: ignore[no-untyped-call]
        hook = functools.partial(self._record_gradient, module, source.detach(), self.parts)
        output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _record_frozen(self, name: str, output: Any) -> None:
        """Record a frozen layer if gradients pass it and its rows divide among the samples."""
        if not isinstance(output, Tensor) or not output.requires_grad or output.dim() == 0:
            return
        rows = len(output)
        if rows and rows % self.samples == 0:
            layout = ("batch", 1) if rows == self.samples else ("flat", rows // self.samples)
            self.calls.append(Call(name, get_gradient_edge(output), layout, False))

    def _layout(self, name: str, module: nn.Module, source: Any, output: Tensor) -> Layout:
        if not isinstance(source, Tensor) or source.dim() == 0 or output.dim() == 0:
            raise DefenseError(
                f"DPSGD: '{name}' ({type(module).__name__}) is not called with a tensor of a batch "
                "as its first argument, so its per-sample gradients cannot be read. Freeze it."
            )
        if module in self._positional:
            return ("expanded", 1)
        rows = len(source)
        if len(output) != rows or rows % self.samples:
            raise DefenseError(
                f"DPSGD: the first dimension of what goes through '{name}' "
                f"({type(module).__name__}) is {rows}, while the batch has {self.samples} samples: "
                "it is not known whose gradient a row belongs to. Let the first dimension be the "
                "samples in every trainable layer, or freeze this one."
            )
        return ("batch", 1) if rows == self.samples else ("flat", rows // self.samples)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_single(self, ids: Tensor) -> None:
        """Note a sample that is run alone, whose row would be taken for positions.

        Labels of the samples, (B,), come here too. Zeros and ones (a mask), and one number
        throughout, equal them by chance and are not a sample's ids. One example may equal
        positions, so :meth:`check` refuses only where all samples were run alone.
        """
        for tensor in self._batch_tensors:
            if not 2 <= len(ids) <= tensor.shape[1] or tensor.device != ids.device:
                continue
            equal = (tensor[:, : len(ids)] == ids).all(1)
            distinct = (tensor > 1).any() & (ids != ids[0]).any()
            if bool(equal.any() & ~equal.all() & distinct):
                self._single.update(equal.nonzero().flatten().tolist())

    def _check_rows(self, name: str, source: Any) -> None:
        """Raise an error where a sample has several rows and one is another sample's in the batch.

        A batch has no gradient until the first layer. Rows that were changed before they were
        joined are not recognised, nor are those of one number throughout (token types, where
        another sample's labels are all zero). From :data:`DISTINCT` samples on the rows of one
        sample do not suffice, because they may equal another example's by chance.
        """
        samples = self.samples
        if not isinstance(source, Tensor) or source.requires_grad or source.dim() != 2:
            return
        rows = len(source) // samples
        if len(source) % samples or rows < 2:
            return
        matches = torch.zeros(len(source), samples, dtype=torch.bool, device=source.device)
        owners = torch.arange(len(source), device=source.device) // rows
        matches_owner = torch.zeros_like(owners, dtype=torch.bool)
        for tensor in self._batch_tensors:
            width = min(source.shape[1], tensor.shape[1])
            if width < 2 or tensor.device != source.device:
                continue
            equal = _equal_rows(source[:, :width], tensor[:, :width])
            matches_owner |= equal.gather(1, owners[:, None])[:, 0]
            matches |= equal & (tensor[:, :width] != tensor[:, :1]).any(1)
        foreign = (matches.any(1) & ~matches_owner).nonzero().flatten().tolist()
        if foreign and (
            samples < DISTINCT or not _involve_one_sample(matches[foreign], owners[foreign])
        ):
            row, owner = foreign[0], int(matches[foreign[0]].int().argmax())
            raise DefenseError(
                f"DPSGD: '{name}' gets {len(source)} rows for {samples} samples, and row {row}, "
                f"which would be taken for one of sample {row // rows}'s, is sample {owner}'s in "
                "the batch. An example would "
                "be clipped in several places, and add more than max_grad_norm. Put the rows of a "
                "sample side by side: torch.stack([a, b], 1).flatten(0, 1), not torch.cat([a, b])."
            )

    def _to_zero(self, gradient: Tensor) -> Tensor | None:
        return None if self._looking else torch.zeros_like(gradient)

    def _to_real(self, samples: int, real: int, gradient: Tensor) -> Tensor | None:
        if self._looking:
            return None
        gradient = gradient.clone()
        gradient[len(gradient) // samples * real :] = 0
        return gradient

    def _record_gradient(
        self,
        module: nn.Module,
        source: Tensor,
        parts: dict[Tensor, list[Part]],
        gradient: Tensor,
    ) -> None:
        # Hooks of an earlier step's graph hold other parts.
        if parts is not self.parts or self._looking:
            return
        self.half = self.half or gradient.element_size() < 4
        try:
            for key, part in parts_of(module, source, gradient.detach(), self.samples):
                parts.setdefault(self._owned[module, key], []).append(part)
        except Exception as error:
            self._failure = self._failure or error


def _equal_rows(rows: Tensor, others: Tensor) -> Tensor:
    """Return (N, B) booleans: which of the (N, W) rows equal which of the (B, W) others."""
    equal = rows[:, :1] == others[:, 0]
    for column in range(1, min(FIRST_COLUMNS, rows.shape[1])):
        equal &= rows[:, column, None] == others[:, column]
    for sample in equal.any(0).nonzero().flatten().tolist():
        candidates = equal[:, sample].nonzero().flatten()
        equal[candidates, sample] = (rows[candidates] == others[sample]).all(1)
    return equal


def _involve_one_sample(matches: Tensor, owners: Tensor) -> bool:
    """Return whether one sample takes part in all matches: as the owner, or as the only match.

    Args:
        matches: (N, B) booleans.
        owners: (N,) of the rows.
    """
    single = matches & (matches.sum(1, keepdim=True) == 1)
    involved = single.scatter(1, owners[:, None], True)
    return bool(involved.all(0).any())


def owns_parameters(module: nn.Module) -> bool:
    """Return whether the module has parameters itself, not in a module inside."""
    return any(parameter is not None for parameter in module._parameters.values())


def trains(module: nn.Module) -> bool:
    """Return whether one of the module's parameters itself is trained."""
    return any(p is not None and p.requires_grad for p in module._parameters.values())


def first_input(args: Any, kwargs: Any) -> Any:
    """Return the first argument of a layer's call."""
    return args[0] if args else next(iter(kwargs.values()), None)


def _ignored(module: nn.Module) -> bool:
    """Return whether modules inside train all that it trains too (Hugging Face's MLM heads)."""
    inside = {p for child in module.children() for p in child.parameters()}
    trained = {p for p in module._parameters.values() if p is not None and p.requires_grad}
    return bool(inside) and trained <= inside
