"""Hooks that record per-sample gradients from the layers' inputs and output gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.defenses.dpsgd import experts, rerun
from lightning_fedleak.defenses.dpsgd.per_sample import Part
from lightning_fedleak.defenses.dpsgd.rules import rule_of
from lightning_fedleak.model.taps.hooks import taps_paused

Layout = tuple[str, int]
"""Which rows (first dimension) of a layer's input belong to a sample: ("batch", 1) where it has one
row, ("flat", n) where it has n rows, and ("expanded", 1) where one row for all samples was expanded
to one row for each."""

SMALL_BATCH = 5  # samples; in a smaller batch one sample may be part of every match. Not tuned

_EXPANDED = (
    "DPSGD: {0} looked up one row for all samples, and DPSGD let it look up one for each of the "
    "{1}. If the error comes from that, look up one row for each row of the batch, or freeze it."
)


def _first_prompts(
    plain: Callable[..., Any], samples: int, batch_size: int, *args: Any, **kwargs: Any
) -> Any:
    """Return PEFT's virtual tokens with one row for each sample.

    PEFT looks them up once and repeats them for every row of the batch, so that only the sum of the
    samples' gradients would be known. The recorder expands the look-up to one row for each sample.
    PEFT repeats these too, to ``samples ** 2`` rows, of which the first ``samples`` are kept.
    """
    prompts = plain(batch_size, *args, **kwargs)
    if batch_size == samples and isinstance(prompts, Tensor) and len(prompts) == samples**2:
        return prompts[:samples]
    return prompts


@dataclass(frozen=True)
class Call:
    """One call of a layer in a training step.

    Attributes:
        name: the layer's name in the root module.
        edge: the edge of its output in the autograd graph.
        layout: which rows of its input belong to a sample.
        trained: whether it trains parameters. A frozen layer that gradients pass through is
            recorded too, but only for its place in the graph.
    """

    name: str
    edge: GradientEdge
    layout: Layout
    trained: bool


class Recorder:
    """Hooks on every layer that owns parameters, which record per-sample gradients.

    A call within :meth:`step` with autograd on is recorded when the gradient of the layer's output
    arrives. The calls that a checkpointed block repeats in backward are not recorded again, because
    no gradient arrives there.

    Some embeddings are called with one row for all samples (positions, ids of shape (1, T) or
    (T,)), and autograd would return only the sum of the samples' gradients. A hook expands the
    input to one row for each sample.

    Under FSDP2 a layer's parameters are other tensors in a forward than between steps. Records use
    those between steps, which the optimizer has too. An error is raised by :meth:`check`, not by a
    hook: if a hook raised it in one process, the others would wait.

    Args:
        root: the module whose parameters are trained. Later changes of ``requires_grad`` are
            respected; layers added later are not recorded.

    Attributes:
        root: the module.
        parts: per-sample gradients of the mean loss, by parameter.
        calls: the calls of layers in the last step.
        samples: number of samples in the last step.
        counts: whether they count.
        half: whether a gradient came in half precision.
        lacks_sums: whether backward leaves out ``p.grad`` of parameters with records.
        terms: number of terms of the loss, if gradients are those of the terms' sum; None if they
            are those of the mean.
    """

    def __init__(self, root: nn.Module) -> None:
        self.parts: dict[Tensor, list[Part]] = {}
        self.calls: list[Call] = []
        self.samples = 0
        self.half = self.lacks_sums = False
        self.terms: int | None = None
        self._recording = self._paused = False
        self.counts = True
        self._expanded_layers: set[nn.Module] = set()
        self._batch_tensors: list[Tensor] = []
        self._lone_samples: set[int] = set()
        self._handles: list[Any] = []
        self.root = root
        self._failure: Exception | None = None
        self._adapted, inner = rerun.adapted_layers(root)
        self._moments: dict[nn.Module, rerun.Moment] = {}
        self.read_parameters()
        for name, module in root.named_modules():
            if module in inner or not (module in self._adapted or owns_parameters(module)):
                continue
            if module in self._adapted:
                self._handles.append(module.register_forward_pre_hook(self._note_moment))
            if isinstance(rerun.wrapped_layer(module), nn.Embedding):
                self._handles.append(
                    module.register_forward_pre_hook(self._expand_ids, with_kwargs=True)
                )
            record: Callable[..., None] = functools.partial(self._on_call, name)
            self._handles.append(module.register_forward_hook(record, with_kwargs=True))

    def read_parameters(self) -> None:
        """Read which parameters belong to which layer, and which modules have virtual tokens.

        Call this between steps only.
        """
        self._parameters = {
            (module, key): parameter
            for module in self.root.modules()
            for key, parameter in module.named_parameters(recurse=module in self._adapted)
        }
        self._prompted: list[Any] = [
            module
            for module in self.root.modules()
            if hasattr(type(module), "get_prompt") and "prompt_encoder" in module._modules
        ]

    def check(self) -> None:
        """Raise the error of a layer that could not be recorded since the step began.

        Raises:
            DefenseError: the message names the layer and says what to do with it.
        """
        if len(self._lone_samples) == self.samples > 1:
            self._failure = DefenseError(
                f"DPSGD: sample 0 of {self.samples} was run by itself in training_step, and so "
                "were the others: run the whole batch at once."
            )
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def step(
        self, samples: int, *, counts: bool = True, tensors: Iterable[Tensor] = ()
    ) -> Iterator[None]:
        """Discard earlier records, and record the calls within this context.

        Args:
            samples: number of samples in the batch.
            counts: False for a batch that does not count. Its gradients are set to zero at every
                trained layer, also where they are NaN, and are not recorded.
            tensors: the tensors of the batch. Rows of a layer are compared with theirs, to find
                rows that would be taken for those of another sample.
        """
        self.clear()
        self.samples, self._recording, self.counts = samples, True, counts
        self._batch_tensors = [t for t in tensors if t.dim() == 2 and len(t) == samples]
        self._lone_samples = set()
        expanded_before = set(self._expanded_layers)
        try:
            for module in self._prompted:
                get = functools.partial(_first_prompts, module.get_prompt, samples)
                module.__dict__["get_prompt"] = get
            yield
        except Exception as error:
            try:
                self.check()
            except DefenseError as failure:
                raise failure from error
            if names := [n for n, m in self.root.named_modules() if m in self._expanded_layers]:
                error.add_note(_EXPANDED.format(", ".join(names), samples))
            self._expanded_layers = expanded_before
            raise
        finally:
            self._recording, self._batch_tensors = False, []
            for module in self._prompted:
                module.__dict__.pop("get_prompt", None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record no gradients within this context, in which a check runs backward passes."""
        self._paused = True
        try:
            with taps_paused():
                yield
        finally:
            self._paused = False

    def without_sums(self, loss: Tensor, calls: Sequence[Call]) -> Tensor:
        """Return a loss whose backward leaves out sums over the batch that records replace.

        It runs down to the outputs of recorded layers, and to all leaves but the parameters of
        those layers. A parameter with a hook of its own is a leaf like the others, and so is one
        whose layers' outputs do not reach the loss: there is no record in place of its gradient.

        Args:
            loss: with its graph.
            calls: The calls of layers in this step.
        """
        stack, visited, leaves = [loss.grad_fn], set[Any](), list[Any]()
        while stack:
            node = stack.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            stack += [below for below, _ in node.next_functions]
            leaf: Any = getattr(node, "variable", None)
            if leaf is not None:
                leaves.append(leaf)
        trained = [call for call in calls if call.trained and call.edge.node in visited]
        modules = {self.root.get_submodule(call.name) for call in trained}
        replaced = {p for (module, _), p in self._parameters.items() if module in modules}
        ends: list[Any] = [call.edge for call in trained]
        ends += [
            leaf
            for leaf in leaves
            if leaf not in replaced or leaf._backward_hooks or leaf._post_accumulate_grad_hooks
        ]
        self.lacks_sums = True
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        partial: Tensor = _PartialBackward.apply(anchor, (loss, ends))  # type: ignore[no-untyped-call]
        return partial

    def clear(self) -> None:
        """Discard all records, and with them the autograd graph."""
        self.parts, self.calls, self.samples = {}, [], 0
        self.half, self.lacks_sums, self.terms, self._failure = False, False, None, None
        self._moments = {}

    def remove(self) -> None:
        """Remove the hooks."""
        self.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _expand_ids(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not (self._recording and torch.is_grad_enabled() and self.samples > 1):
            return None
        ids = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(ids, Tensor) or ids.dim() == 0:
            return None
        if ids.dim() == 1 or len(ids) == 1:
            self._note_lone_sample(ids.flatten())
        if not trains(module, inside=module in self._adapted):
            return None
        if ids.dim() == 1 and (module in self._expanded_layers or self._are_positions(ids)):
            ids = ids[None]
        elif ids.dim() == 1 or len(ids) != 1:
            return None
        self._expanded_layers.add(module)
        return (ids.expand(self.samples, *ids.shape[1:]).contiguous(),), {}

    def _are_positions(self, ids: Tensor) -> bool:
        """Return whether ids (n,) are positions, not all samples' ids one after the other."""
        n = len(ids)
        if n % self.samples:
            return True
        return n > self.samples and torch.equal(ids, torch.arange(n, device=ids.device))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _on_call(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not (self._recording and torch.is_grad_enabled()):
            return
        inputs: Any = args[0] if args else next(iter(kwargs.values()), None)
        try:
            self._check_rows(name, inputs)
            if not trains(module, inside=module in self._adapted):
                self._record_frozen(name, output)
                return
            adapted = module in self._adapted
            if module._modules and not adapted and _shares_all(module):
                return
            if experts.is_router(module):
                inputs, output = experts.of_logits(inputs, output)
            if isinstance(output, Tensor) and not output.requires_grad:
                return
            if adapted:
                rule: rerun.Rule = functools.partial(rerun.rerun, moment=self._moments.pop(module))
                inputs = inputs if len(args) + len(kwargs) == 1 else None
            else:
                rule = rule_of(name, module)
            layout = self._layout(name, module, inputs, output)
        except DefenseError as error:
            self._failure = self._failure or error
            return
        self.calls.append(Call(name, get_gradient_edge(output), layout, True))
        hook: Callable[[Tensor], Tensor | None] = self._zero_gradient
        if self.counts:
            source = inputs.detach()
            if experts.is_experts(module):
                source = [tensor.detach() for tensor in (*args, *kwargs.values())[:3]]
            call = module, rule, source, self.parts
            hook = functools.partial(self._record_gradient, *call)
        output.register_hook(hook)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_moment(self, layer: nn.Module, args: Any) -> None:
        if self._recording and torch.is_grad_enabled():
            self._moments[layer] = rerun.Moment(next(layer.parameters()).device)

    def _record_frozen(self, name: str, output: Any) -> None:
        """Record a frozen layer if gradients pass through it and all samples have as many rows."""
        if not isinstance(output, Tensor) or not output.requires_grad or output.dim() == 0:
            return
        rows = len(output)
        if rows and rows % self.samples == 0:
            layout = ("batch", 1) if rows == self.samples else ("flat", rows // self.samples)
            self.calls.append(Call(name, get_gradient_edge(output), layout, False))

    def _layout(self, name: str, module: nn.Module, inputs: Any, output: Tensor) -> Layout:
        if any(not isinstance(value, Tensor) or value.dim() == 0 for value in (inputs, output)):
            raise DefenseError(
                f"DPSGD: '{name}' ({type(module).__name__}) does not take and return one tensor of "
                "a batch, so its per-sample gradients cannot be read. Freeze it."
            )
        if module in self._expanded_layers:
            return ("expanded", 1)
        rows = len(inputs)
        if len(output) != rows or rows % self.samples:
            raise DefenseError(
                f"DPSGD: of a batch with {self.samples} samples the first dimensions of what "
                f"'{name}' ({type(module).__name__}) takes and returns are {rows} and "
                f"{len(output)}. Let them be the samples in every trainable layer, or freeze it."
            )
        return ("batch", 1) if rows == self.samples else ("flat", rows // self.samples)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_lone_sample(self, ids: Tensor) -> None:
        """Note which samples' ids these are, if a sample is run alone in a call.

        Its row would be taken for positions. Labels of the samples, (B,), come here too. A tensor
        of zeros and ones (a mask), or ids that are all one number, may be equal by chance and are
        left out. One example may equal positions, so :meth:`check` raises an error only if all
        samples were run alone.
        """
        for tensor in self._batch_tensors:
            if not 2 <= len(ids) <= tensor.shape[1] or tensor.device != ids.device:
                continue
            equal = (tensor[:, : len(ids)] == ids).all(1)
            distinct = (tensor > 1).any() & (ids != ids[0]).any()
            if bool(equal.any() & ~equal.all() & distinct):
                self._lone_samples.update(equal.nonzero().flatten().tolist())

    def _check_rows(self, name: str, inputs: Any) -> None:
        """Raise an error if a sample gets several rows and one of them is another sample's.

        Only inputs without gradient are compared: they come from the batch itself. Rows that were
        changed before they were joined are not recognised, nor are rows of one number throughout
        (token types, if another sample's labels are all zero). In a batch of :data:`SMALL_BATCH`
        samples or more there is no error if one sample is part of all matches: its rows may equal
        those of others by chance.
        """
        samples = self.samples
        if not isinstance(inputs, Tensor) or inputs.requires_grad or inputs.dim() != 2:
            return
        rows = len(inputs) // samples
        if len(inputs) % samples or rows < 2:
            return
        matches = torch.zeros(len(inputs), samples, dtype=torch.bool, device=inputs.device)
        owners = torch.arange(len(inputs), device=inputs.device) // rows
        matches_owner = torch.zeros_like(owners, dtype=torch.bool)
        for tensor in self._batch_tensors:
            width = min(inputs.shape[1], tensor.shape[1])
            if width < 2 or tensor.device != inputs.device:
                continue
            rows_of_batch, firsts = inputs[:, :width], tensor[:, :width]
            equal = torch.stack([(rows_of_batch == first).all(1) for first in firsts], 1)
            matches_owner |= equal.gather(1, owners[:, None])[:, 0]
            matches |= equal & (firsts != firsts[:, :1]).any(1)
        foreign = (matches.any(1) & ~matches_owner).nonzero().flatten().tolist()
        if foreign and (
            samples < SMALL_BATCH or not _involve_one_sample(matches[foreign], owners[foreign])
        ):
            row, owner = foreign[0], int(matches[foreign[0]].int().argmax())
            raise DefenseError(
                f"DPSGD: '{name}' gets {len(inputs)} rows for {samples} samples, of which row "
                f"{row}, taken for sample {row // rows}'s, is sample {owner}'s in the batch. Put "
                "the rows of a sample side by side: torch.stack([a, b], 1).flatten(0, 1), not "
                "torch.cat([a, b])."
            )

    def _zero_gradient(self, gradient: Tensor) -> Tensor | None:
        return None if self._paused else torch.zeros_like(gradient)

    def _record_gradient(
        self,
        module: nn.Module,
        rule: rerun.Rule,
        source: Any,
        parts: dict[Tensor, list[Part]],
        gradient: Tensor,
    ) -> None:
        # The hooks of an earlier step's graph have that step's parts.
        if parts is not self.parts or self._paused:
            return
        self.half = self.half or gradient.element_size() < 4
        try:
            for key, part in rule(module, source, gradient.detach(), self.samples).items():
                parts.setdefault(self._parameters[module, key], []).append(part)
        except Exception as error:
            self._failure = self._failure or error


class _PartialBackward(torch.autograd.Function):
    """A loss whose backward runs its graph only as far as some edges and leaves."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, graph: tuple[Tensor, list[Any]]) -> Any:
        ctx.graph = graph
        return graph[0].detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        loss, ends = ctx.graph
        torch.autograd.backward(loss, gradient, inputs=ends)
        return None, None


def _involve_one_sample(matches: Tensor, owners: Tensor) -> bool:
    """Return whether one sample is part of all matches: as the row's owner, or as the only match.

    Args:
        matches: (N, B) booleans, which samples each row equals.
        owners: (N,) the sample to which each row would be assigned.
    """
    single = matches & (matches.sum(1, keepdim=True) == 1)
    involved = single.scatter(1, owners[:, None], True)
    return bool(involved.all(0).any())


def owns_parameters(module: nn.Module) -> bool:
    """Return whether the module has parameters of its own, not only in modules inside it."""
    return any(parameter is not None for parameter in module._parameters.values())


def trains(module: nn.Module, *, inside: bool = False) -> bool:
    """Return whether the module trains parameters of its own, or also in modules inside it."""
    parameters = module.parameters() if inside else module._parameters.values()
    return any(p is not None and p.requires_grad for p in parameters)


def _shares_all(module: nn.Module) -> bool:
    """Return whether modules inside it have all its trained parameters too (HF's MLM heads)."""
    inside = {p for child in module.children() for p in child.parameters()}
    trained = {p for p in module._parameters.values() if p is not None and p.requires_grad}
    return bool(inside) and trained <= inside


def count_samples(batch: Any) -> int:
    """Return B, the first dimension of all tensors of a batch.

    Raises:
        DefenseError: they differ in it, or there are none.
    """
    sizes = {tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()}
    if len(sizes) != 1:
        content = "no tensors" if not sizes else f"tensors with first dimensions {sorted(sizes)}"
        raise DefenseError(
            f"DPSGD: the batch ({type(batch).__name__}) holds {content}, so its samples cannot be "
            "counted. Let it be a tensor, or a dict, list or tuple of tensors, with the samples "
            "first."
        )
    return int(sizes.pop())


def tensors_of(batch: Any) -> list[Tensor]:
    """Return all tensors of a batch, in mappings, lists and tuples."""
    tensors, stack = list[Tensor](), [batch]
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, Mapping):
            stack += [*value.values()][::-1]
        elif isinstance(value, list | tuple):
            stack += value[::-1]
    return tensors
