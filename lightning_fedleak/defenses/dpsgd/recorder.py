"""Hooks that record per-sample gradients from the layers' inputs and output gradients.

DP-SGD clips the gradient of each of the B samples of a batch, but autograd returns only their sum.
In the forward pass a :class:`Recorder` keeps the input of each layer with trained parameters. When
the gradient of the layer's output arrives in backward, a rule for the layer's class
(:mod:`~lightning_fedleak.defenses.dpsgd.rules`) computes the per-sample gradients from the two.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_fedleak.defenses.base import DefenseError, parameter_name
from lightning_fedleak.defenses.dpsgd import experts, rerun
from lightning_fedleak.defenses.dpsgd.per_sample import Part
from lightning_fedleak.defenses.dpsgd.rules import ROUTER, RULES_OF_ONE_USE, rule_of
from lightning_fedleak.model.taps.hooks import Hook, taps_paused

# Added to an error of training_step: {0} are the layers' names, {1} is the number of samples.
_EXPANDED = "DPSGD: if the cause is that {0} got one row for all {1} samples, pass one for each."


def _first_prompts(
    get_prompt: Callable[..., Any], samples: int, batch_size: int, *args: Any, **kwargs: Any
) -> Any:
    """Return PEFT's virtual tokens with one row for each sample.

    PEFT looks them up once and repeats them for every row of the batch, so that autograd would
    return only the sum of the samples' gradients. The recorder expands the look-up to one row for
    each sample. PEFT repeats these rows too, to ``samples ** 2``, and the first ``samples`` remain.

    Args:
        get_prompt: PEFT's method, which this function replaces during a step.
        samples: The number of samples in the step.
        batch_size: The first argument of ``get_prompt``.
        args: Its other positional arguments.
        kwargs: Its keyword arguments.
    """
    prompts = get_prompt(batch_size, *args, **kwargs)
    if batch_size == samples and isinstance(prompts, Tensor) and len(prompts) == samples**2:
        return prompts[:samples]
    return prompts


@dataclass(frozen=True)
class Call:
    """One call of a layer in a training step.

    Attributes:
        name: The layer's name in the root module.
        edge: The edge of its output in the autograd graph.
        sample_rows: The number of adjacent rows that each sample has in its input; -1 if it was
            called with one row for all samples, which was expanded to one row for each.
        trained: Whether it trains parameters. A frozen layer that gradients pass through is listed
            too, because the checks of the loss follow the graph from the loss down to the outputs
            of layers. No gradients are recorded for it.
        uses_once: Whether the call is known to use each parameter of the layer once.
    """

    name: str
    edge: GradientEdge
    sample_rows: int
    trained: bool
    uses_once: bool = False


class Recorder:
    """Hooks on every layer that owns parameters, which record per-sample gradients.

    Calls of layers within :meth:`step` are recorded if autograd is enabled. The gradients of a call
    are recorded when the gradient of the layer's output arrives. A checkpointed block repeats its
    calls in backward; these add nothing, because no gradient arrives at their outputs.

    Some embeddings are called with one row for all samples (positions, ids of shape (1, T) or
    (T,)), and autograd would return only the sum of the samples' gradients. A hook expands the
    input to one row for each sample.

    Under FSDP2 a layer has other parameter tensors during a forward pass than between steps.
    Records are kept by the tensors between steps, which the optimizer holds too. Hooks do not raise
    errors; :meth:`check` does. If a hook raised one in one process, the other processes would wait
    for it in their next collective.

    Args:
        root: The module whose parameters are trained. Later changes of ``requires_grad`` are
            respected; layers added later are not recorded.

    Attributes:
        root: The module whose parameters are trained.
        parts: The per-sample gradients of the loss, by parameter: one part for each use of the
            parameter, with the gradients of all samples.
        calls: The calls of layers in the last step.
        samples: The number of samples in the last step.
        counts: Whether these samples count: their gradients are recorded and released. False if the
            batch is the placeholder of an empty one.
        half: Whether the gradient of an output came in half precision.
        lacks_sums: Whether backward skips ``p.grad`` of parameters whose gradients are recorded
            (:meth:`without_sums`).
        terms: The number of terms of which the loss is the mean, if backward began with a gradient
            of one for each term, so that ``parts`` are gradients of the terms' sum; None if
            ``parts`` are gradients of the mean.
    """

    def __init__(self, root: nn.Module) -> None:
        self.parts: dict[Tensor, list[Part]] = {}
        self.calls: list[Call] = []
        self.samples = 0
        self.half = self.lacks_sums = False
        self.terms: Tensor | None = None
        self._recording = self._paused = False
        self.counts = True
        self._expanded_layers: set[nn.Module] = set()  # whose one row became a row per sample
        self._handles: list[Any] = []
        self.root = root
        self._failure: Exception | None = None  # raised by `check`
        self._adapted, inner = rerun.adapted_layers(root)
        # The rules of layers, decided once for each choice of the parameters that are trained.
        self._rules: dict[tuple[nn.Module, tuple[bool, ...]], rerun.Rule | None] = {}
        self._states: dict[nn.Module, rerun.CallState] = {}  # of calls of adapted layers
        self.read_parameters()
        for name, module in root.named_modules():
            if module in inner or not self._parameters[module]:
                continue
            if module in self._adapted:
                self._handles.append(module.register_forward_pre_hook(Hook(self._save_state)))
            if isinstance(rerun.wrapped_layer(module), nn.Embedding):
                self._handles.append(
                    module.register_forward_pre_hook(Hook(self._expand_ids), with_kwargs=True)
                )
            record = Hook(functools.partial(self._save_call, name))
            self._handles.append(module.register_forward_hook(record, with_kwargs=True))

    def read_parameters(self) -> None:
        """Read which parameters belong to which layer, and which modules have virtual tokens.

        Call this between steps only: during a forward pass FSDP2 has replaced the parameters.
        """
        self._parameters = {
            module: dict(module.named_parameters(recurse=module in self._adapted))
            for module in self.root.modules()
        }
        self._prompted: list[Any] = [
            module
            for module in self.root.modules()
            if hasattr(type(module), "get_prompt") and "prompt_encoder" in module._modules
        ]

    def check(self) -> None:
        """Raise the error of a layer that could not be recorded since the step began.

        Raises:
            DefenseError: The message names the layer and says what to do with it.
        """
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def step(self, samples: int, *, counts: bool = True) -> Iterator[None]:
        """Discard earlier records, and record the calls within this context.

        Args:
            samples: The number of samples in the batch.
            counts: False if the batch is the placeholder of an empty one. Its gradients are not
                recorded. Gradients of trained layers' outputs are replaced by zeros, which also
                removes NaN.

        Raises:
            DefenseError: Code within the context raised an error, and a layer could not be
                recorded: the latter is the likely cause.
        """
        self.clear()
        self.samples, self._recording, self.counts = samples, True, counts
        expanded_before = set(self._expanded_layers)
        try:
            for module in self._prompted:
                get_prompt = functools.partial(_first_prompts, module.get_prompt, samples)
                module.__dict__["get_prompt"] = get_prompt
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
            self._recording = False
            for module in self._prompted:
                module.__dict__.pop("get_prompt", None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record no gradients within this context, in which a check runs backward passes.

        The taps through which attacks observe gradients are paused too.
        """
        self._paused = True
        try:
            with taps_paused():
                yield
        finally:
            self._paused = False

    def check_uses(self, loss: Tensor) -> tuple[list[GradientEdge], list[Tensor]]:
        """Raise an error if a parameter is also used outside of the recorded calls of its layer.

        Each call has one edge of the loss's graph into each parameter, or into a copy in another
        precision, which calls share under autocast. Other uses have further edges. Layers that are
        run again for their gradients may use a parameter repeatedly, and are not counted, nor are
        the parameters that FSDP2 has put into the graph.

        Returns:
            The outputs of recorded layers, and the leaves that need a ``p.grad``: those without
            records, and those with a hook.

        Raises:
            DefenseError: The message names the parameter.
        """
        edges = _edges_into_nodes(loss)
        uses = {node.variable: n for node, n in edges.items() if hasattr(node, "variable")}
        reached = [call for call in self.calls if call.trained and call.edge.node in edges]
        recorded = {p: 0.0 for layer in self._parameters.values() for p in layer.values()}
        for call in reached:
            for p in self._parameters[self.root.get_submodule(call.name)].values():
                recorded[p] += 1 if call.uses_once else math.inf
        for p in (p for p, count in uses.items() if count > recorded.get(p, math.inf)):
            reason = "the sum of its recorded per-sample gradients: use it only in its module's"
            name = parameter_name(p, self.root)
            raise DefenseError(f"DPSGD: the gradient of '{name}' is not {reason} forward")
        hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
        leaves = [p for p in uses if p not in recorded or any(getattr(p, h) for h in hooks)]
        return [call.edge for call in reached], leaves

    def without_sums(
        self, loss: Tensor, edges: Sequence[GradientEdge], leaves: Sequence[Tensor]
    ) -> Tensor:
        """Return a loss whose backward skips the gradients ``p.grad`` that records replace.

        ``p.grad`` of a recorded layer's parameter is a sum over the batch, which the release
        replaces. So backward runs down to the layers' outputs and to the other leaves alone.

        Args:
            loss: The loss, a scalar with its graph.
            edges: The outputs of recorded layers (:meth:`check_uses`).
            leaves: The leaves that get a ``p.grad``.
        """
        self.lacks_sums = True
        targets: list[Any] = [*edges, *leaves]
        proxy: Tensor = OwnBackward.apply(  # type: ignore[no-untyped-call]
            loss.detach().requires_grad_(),
            lambda gradient: torch.autograd.backward(loss, gradient, inputs=targets),
        )
        return proxy

    def clear(self) -> None:
        """Discard all records, and with them the autograd graph."""
        self.parts, self.calls, self.samples = {}, [], 0
        self.half, self.lacks_sums, self.terms, self._failure = False, False, None, None
        self._states = {}

    def remove(self) -> None:
        """Remove the hooks."""
        self.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _expand_ids(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return an embedding's arguments with one row of ids for each sample, before its call.

        Ids (T,) or (1, T) that all samples share become (B, T). None: the arguments stay.
        """
        if not (self._recording and torch.is_grad_enabled() and self.samples > 1):
            return None
        ids = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(ids, Tensor) or ids.dim() == 0:
            return None
        if not trains(module, inside=module in self._adapted):
            return None
        if ids.dim() == 1 and (module in self._expanded_layers or self._are_positions(ids)):
            ids = ids[None]
        elif ids.dim() == 1 or len(ids) != 1:
            return None
        self._expanded_layers.add(module)
        return (ids.expand(self.samples, *ids.shape[1:]).contiguous(),), {}

    def _are_positions(self, ids: Tensor) -> bool:
        """Return whether ids (n,) are positions that all samples share.

        Otherwise they are the ids of all B samples, one sample after the other. They are taken for
        positions if n is no multiple of B, or if they are 0, 1, ..., n - 1 with n > B.
        """
        n = len(ids)
        if n % self.samples:
            return True
        return n > self.samples and torch.equal(ids, torch.arange(n, device=ids.device))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _save_call(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record a layer's call, and hook its output: its gradient yields the per-sample gradients.

        Args:
            name: The layer's name in the root module.
            module: The layer.
            args: The positional arguments of the call.
            kwargs: The keyword arguments of the call.
            output: The output of the call.
        """
        if not (self._recording and torch.is_grad_enabled()):
            return
        inputs: Any = args[0] if args else next(iter(kwargs.values()), None)
        choice = tuple(p.requires_grad for p in self._parameters[module].values())
        if not any(choice):
            self._record_frozen(name, output)
            return
        try:
            if (module, choice) not in self._rules:
                is_adapted = module in self._adapted
                rule = rerun.rerun if is_adapted else rule_of(name, module)
                self._rules[module, choice] = rule
            rule = self._rules[module, choice]
            if rule is None:
                return
            if rule is ROUTER:
                inputs, output = experts.of_logits(inputs, output)
            if isinstance(output, Tensor) and not output.requires_grad:
                return
            if module in self._adapted:
                rule = functools.partial(rerun.rerun, state=self._states.pop(module))
                # It is run again with one tensor; for None, `_sample_rows` raises an error.
                inputs = inputs if len(args) + len(kwargs) == 1 else None
            sample_rows = self._sample_rows(name, module, inputs, output)
        except DefenseError as error:
            self._failure = self._failure or error
            return
        uses_once = rule in RULES_OF_ONE_USE
        self.calls.append(Call(name, get_gradient_edge(output), sample_rows, True, uses_once))
        hook: Callable[[Tensor], Tensor | None] = self._zero_gradient
        if self.counts:
            rule_input = inputs.detach()
            if rule is experts.by_row:  # rows, the numbers of their experts, and the weights
                rule_input = [tensor.detach() for tensor in (*args, *kwargs.values())[:3]]
            arguments = module, rule, rule_input, self.parts
            hook = functools.partial(self._record_gradient, *arguments)
        output.register_hook(hook)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _save_state(self, layer: nn.Module, args: Any) -> None:
        """Save the random state and autocast of an adapted layer's call, to run it again."""
        if self._recording and torch.is_grad_enabled():
            self._states[layer] = rerun.CallState(next(layer.parameters()).device)

    def _record_frozen(self, name: str, output: Any) -> None:
        """Record a frozen layer's call if gradients pass through it.

        Calls in which samples cannot have the same number of rows are left out.
        """
        if not isinstance(output, Tensor) or not output.requires_grad or output.dim() == 0:
            return
        rows = len(output)
        if rows and rows % self.samples == 0:
            self.calls.append(Call(name, get_gradient_edge(output), rows // self.samples, False))

    def _sample_rows(self, name: str, module: nn.Module, inputs: Any, output: Tensor) -> int:
        """Return the number of rows that each sample has in a call's input; -1 if expanded.

        Raises:
            DefenseError: Input and output are not one tensor each, or their first dimensions differ
                or are no multiple of the number of samples.
        """
        if any(not isinstance(value, Tensor) or value.dim() == 0 for value in (inputs, output)):
            raise DefenseError(f"DPSGD: '{name}' does not take and return one tensor: freeze it")
        if module in self._expanded_layers:
            return -1
        rows = len(inputs)
        if len(output) != rows or rows % self.samples:
            raise DefenseError(
                f"DPSGD: in a batch of {self.samples} samples '{name}' ({type(module).__name__}) "
                f"has {rows} rows of input and {len(output)} of output: let the first dimension "
                "count samples, or freeze the layer"
            )
        return rows // self.samples

    def _zero_gradient(self, gradient: Tensor) -> Tensor | None:
        """Return zeros for the gradient of an output, of a batch that does not count."""
        return None if self._paused else torch.zeros_like(gradient)

    def _record_gradient(
        self,
        module: nn.Module,
        rule: rerun.Rule,
        rule_input: Any,
        parts: dict[Tensor, list[Part]],
        gradient: Tensor,
    ) -> None:
        """Record the per-sample gradients of a call when the gradient of its output arrives.

        Args:
            module: The layer.
            rule: The rule that computes the per-sample gradients.
            rule_input: The detached input of the call; for experts a list of three tensors.
            parts: The records of the step in which the layer was called.
            gradient: The gradient of the output.
        """
        # A hook in the graph of an earlier step holds that step's parts; they are not wanted now.
        if parts is not self.parts or self._paused:
            return
        self.half = self.half or gradient.element_size() < 4
        try:
            for key, part in rule(module, rule_input, gradient.detach(), self.samples).items():
                parts.setdefault(self._parameters[module][key], []).append(part)
        except Exception as error:
            self._failure = self._failure or error


class OwnBackward(torch.autograd.Function):
    """A copy of a loss whose backward calls a function with the loss's gradient.

    Torch runs it only if the value that is passed requires a gradient.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, run: Callable[[Tensor], None]) -> Any:
        """Return the value of the loss."""
        ctx.run = run
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Call the function; the two inputs have no gradients."""
        ctx.run(gradient)
        return None, None


def _edges_into_nodes(loss: Tensor) -> dict[Any, int]:
    """Return the number of edges of a loss's graph into each node, a leaf's with its copies'."""
    edges, stack, copies = dict[Any, int]({loss.grad_fn: 0}), [loss.grad_fn], list[Any]()
    while stack:
        node: Any = stack.pop()
        for child in (c for c, _ in getattr(node, "next_functions", ()) if c is not None):
            if child not in edges:
                stack.append(child)
            edges[child] = edges.get(child, 0) + 1
            if hasattr(child, "variable") and node.name() == "ToCopyBackward0":
                copies.append((child, node))
    for leaf, copy in copies:
        edges[leaf] += edges[copy] - 1
    return edges


def trains(module: nn.Module, *, inside: bool = False) -> bool:
    """Return whether the module has trained parameters itself.

    Args:
        module: The module.
        inside: Whether parameters of modules inside it count too.
    """
    parameters = module.parameters() if inside else module._parameters.values()
    return any(p is not None and p.requires_grad for p in parameters)


def count_samples(batch: Any) -> int:
    """Return B, the first dimension of all tensors of a batch.

    Raises:
        DefenseError: First dimensions differ, or there is no tensor with dimensions.
    """
    sizes = {tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()}
    if len(sizes) != 1:
        raise DefenseError(
            "DPSGD: the tensors of a batch need one first dimension, that of the samples, and not "
            f"{sorted(sizes)}"
        )
    return int(sizes.pop())


def tensors_of(batch: Any) -> list[Tensor]:
    """Return all tensors of a batch, also those in nested mappings, lists and tuples."""
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


def values_in(value: Any) -> Iterator[str]:
    """Yield the content of an example, or of a value in it, as texts."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key)
            yield from values_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from values_in(item)
    elif hasattr(value, "tolist"):
        yield repr(value.tolist())
    elif hasattr(value, "tobytes"):  # an image
        yield repr(value.tobytes())
    elif isinstance(value, str | bytes | int | float):
        yield repr(value)
