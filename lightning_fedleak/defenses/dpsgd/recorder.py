"""Keeps what a backward pass tells of every sample: layer inputs and output gradients."""

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

_FEW = 4
"""Columns in which nearly all rows that differ do so."""

TELLING = 5
"""Samples from which on rows of a batch tell how they were joined, whatever one sample holds."""

_EXPANDED = (
    "DPSGD: {0} looked up one row for all samples, and DPSGD let it look up one for each of the "
    "{1} instead, so that each has a gradient of its own. If that is why it failed (the module "
    "repeats the row itself, or has several rows for a sample), let it look up one for each row "
    "of the batch, or freeze it."
)


@contextmanager
def prompts_of_samples(root: nn.Module, samples: int) -> Iterator[None]:
    """Within it a prompt that was looked up for each sample is not repeated for all once more.

    PEFT looks its virtual tokens up once and repeats what it gets for every row of the batch, where
    only the sum of the samples' gradients comes back. The recorder of DPSGD has them looked up for
    each sample; of the ``samples ** 2`` rows that PEFT makes of these the first ``samples`` are
    right.

    Args:
        root: with PEFT's models inside it, if there are any.
        samples: of the batch.
    """
    with ExitStack() as stack:
        for module in root.modules():
            if hasattr(type(module), "get_prompt") and "prompt_encoder" in module._modules:
                plain: Any = module.get_prompt
                module.__dict__["get_prompt"] = functools.partial(_once, plain, samples)
                stack.callback(module.__dict__.pop, "get_prompt")
        yield


def _once(plain: Callable[..., Any], samples: int, batch_size: int, *args: Any, **more: Any) -> Any:
    prompts = plain(batch_size, *args, **more)
    if batch_size == samples and isinstance(prompts, Tensor) and len(prompts) == samples**2:
        return prompts[:samples]
    return prompts


@dataclass(frozen=True)
class Call:
    """One call of a layer in a training step.

    Attributes:
        name: the layer's, in the root module.
        edge: where its output stands in the autograd graph.
        layout: how its first dimension counts samples.
        trained: whether parameters of its own are trained. A frozen layer that gradients pass is
            only kept for its place in the graph.
    """

    name: str
    edge: GradientEdge
    layout: Layout
    trained: bool


class Recorder:
    """Hooks on every layer that owns parameters; the model is otherwise left as it is.

    Only calls in between :meth:`step` with autograd on are recorded, and a record is made when the
    gradient of the layer's output arrives. So what a checkpointed block computes again in backward
    is not counted twice: no gradient ever arrives there.

    An embedding that is asked once for all samples (positions, ids of shape (1, T) or (T,)) is
    asked once for each: otherwise its per-sample gradients are lost in autograd's broadcast.

    Under FSDP2 a layer holds other tensors in a forward than in between steps; what is recorded
    goes by those in between, which are the optimizer's. What cannot be recorded is kept until
    :meth:`check` is asked: a hook that raises in one process would let the others wait.

    Args:
        root: the module whose parameters are trained. Later changes of ``requires_grad`` are
            respected; layers added later are not seen.

    Attributes:
        root: the module.
        parts: per-sample gradients of the mean loss, by parameter.
        calls: of layers in the last step.
        samples: in the last step.
        half: a gradient came in half precision.
    """

    def __init__(self, root: nn.Module) -> None:
        self.parts: dict[Tensor, list[Part]] = {}
        self.calls: list[Call] = []
        self.samples = 0
        self.half = False
        self._open = self._looking = False
        self._counting = True
        self._positional: set[nn.Module] = set()
        self._given: list[Tensor] = []
        self._alone: set[int] = set()
        self._handles: list[Any] = []
        self.root = root
        self._refused: Exception | None = None
        self.adopt()
        for name, module in root.named_modules():
            if not owns_parameters(module):
                continue
            if isinstance(module, nn.Embedding):
                hook = functools.partial(self._expand)
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            after: Callable[..., None] = functools.partial(self._after, name)
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def adopt(self) -> None:
        """Learns which parameters hang on which layer; to be called between steps."""
        self._owned = {
            (module, key): parameter
            for module in self.root.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        }

    def check(self) -> None:
        """Refuses what could not be recorded since the step began.

        Raises:
            DefenseError: says which layer, and what to do with it.
        """
        if len(self._alone) == self.samples > 1:
            self._refused = DefenseError(
                f"DPSGD: sample 0 of {self.samples} was run by itself in training_step, and so "
                "were the others, where a row for each sample is looked for. Run the whole batch "
                "at once."
            )
        if self._refused is not None:
            raise self._refused

    @contextmanager
    def step(
        self, samples: int, *, counts: bool = True, given: Iterable[Tensor] = ()
    ) -> Iterator[None]:
        """Records the calls inside, of a batch of ``samples``; forgets what came before.

        Gradients of a batch that does not count are made zero at every trained layer, also where
        they are NaN, and are not recorded. By the tensors ``given`` in the batch it is seen where
        rows are joined so that they would be taken for other samples'.
        """
        self.clear()
        self.samples, self._open, self._counting = samples, True, counts
        self._given = [t for t in given if t.dim() == 2 and len(t) == samples]
        self._alone = set()
        expanded = set(self._positional)
        try:
            with prompts_of_samples(self.root, samples):
                yield
        except Exception as error:
            try:
                self.check()
            except DefenseError as refused:
                raise refused from error
            if names := [n for n, m in self.root.named_modules() if m in self._positional]:
                error.add_note(_EXPANDED.format(", ".join(names), samples))
            self._positional = expanded
            raise
        finally:
            self._open, self._given = False, []

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Gradients that arrive inside are those of a check, and not recorded."""
        self._looking = True
        try:
            yield
        finally:
            self._looking = False

    @property
    def positions(self) -> int:
        """Of all samples of the last step together, in the layer that has most."""
        return max((count_positions(p) for parts in self.parts.values() for p in parts), default=0)

    def clear(self) -> None:
        """Forgets everything, and lets go of the graph."""
        self.parts, self.calls, self.samples = {}, [], 0
        self.half, self._refused = False, None

    def remove(self) -> None:
        """Takes the hooks out."""
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
            self._check_alone(ids.flatten())
        if not trains(module):
            return None
        if ids.dim() == 1 and (module in self._positional or self._counts(ids)):
            ids = ids[None]
        elif ids.dim() == 1 or len(ids) != 1:
            return None
        self._positional.add(module)
        return (ids.expand(self.samples, *ids.shape[1:]).contiguous(),), {}

    def _counts(self, ids: Tensor) -> bool:
        """Whether (n,) ids are positions, not those of the samples one after the other."""
        n = len(ids)
        if n % self.samples:
            return True
        return n > self.samples and torch.equal(ids, torch.arange(n, device=ids.device))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not (self._open and torch.is_grad_enabled()):
            return
        try:
            self._record(name, module, args, kwargs, output)
        except DefenseError as error:
            self._refused = self._refused or error

    def _record(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._check_rows(name, first_input(args, kwargs))
        if not trains(module):
            self._pass(name, output)
            return
        if not isinstance(output, Tensor):
            if _ignored(module):
                return
            raise DefenseError(
                f"DPSGD: '{name}' ({type(module).__name__}) returns {type(output).__name__}, not "
                "one tensor, so its per-sample gradients cannot be read. Freeze it."
            )
        if _ignored(module) or not output.requires_grad:
            return
        reason = refusal(name, module)
        if reason:
            raise DefenseError(f"DPSGD: {reason}")
        source = first_input(args, kwargs)
        layout = self._layout(name, module, source, output)
        self.calls.append(Call(name, get_gradient_edge(output), layout, True))
        if not self._counting:
            output.register_hook(self._silenced)  # type: ignore[no-untyped-call]
            return
        source = source.detach()
        arrived = functools.partial(self._arrived, module, source, self.parts)
        output.register_hook(arrived)  # type: ignore[no-untyped-call]

    def _pass(self, name: str, output: Any) -> None:
        """A frozen layer, where gradients pass it and its rows can be shared by the samples."""
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
                "whose gradient a row belongs to cannot be told. Let the first dimension be the "
                "samples in every trainable layer, or freeze this one."
            )
        return ("batch", 1) if rows == self.samples else ("flat", rows // self.samples)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _check_alone(self, ids: Tensor) -> None:
        """Notes a sample that is run by itself; its row would be taken for positions.

        Labels of the samples, (B,), come here too. Zeros and ones in a batch (a mask), or one
        number over and over, are like them by chance and are no sample's ids. Nor is one example
        that reads like positions: all samples must have been run so.
        """
        for given in self._given:
            if not 2 <= len(ids) <= given.shape[1] or given.device != ids.device:
                continue
            alike = (given[:, : len(ids)] == ids).all(1)
            tells = (given > 1).any() & (ids != ids[0]).any()
            if bool(alike.any() & ~alike.all() & tells):
                self._alone.update(alike.nonzero().flatten().tolist())

    def _check_rows(self, name: str, source: Any) -> None:
        """Refuses several rows a sample where one of them is another sample's row of the batch.

        What a training step makes of a batch has no gradient until the first layer. Rows that were
        changed before they were joined are not recognised, nor those of one number over and over,
        which tell no sample (token types, where another sample's labels are all zero).
        From five samples on it takes more than one sample's content: a row may read like another
        example's by chance.
        """
        samples = self.samples
        if not isinstance(source, Tensor) or source.requires_grad or source.dim() != 2:
            return
        rows = len(source) // samples
        if len(source) % samples or rows < 2:
            return
        alike = torch.zeros(len(source), samples, dtype=torch.bool, device=source.device)
        owners = torch.arange(len(source), device=source.device) // rows
        own = torch.zeros_like(owners, dtype=torch.bool)
        for given in self._given:
            width = min(source.shape[1], given.shape[1])
            if width < 2 or given.device != source.device:
                continue
            found = _equal_rows(source[:, :width], given[:, :width])
            own |= found.gather(1, owners[:, None])[:, 0]
            alike |= found & (given[:, :width] != given[:, :1]).any(1)
        foreign = (alike.any(1) & ~own).nonzero().flatten().tolist()
        if foreign and (samples < TELLING or not _by_one(alike[foreign], owners[foreign])):
            raise DefenseError(
                f"DPSGD: '{name}' gets {len(source)} rows for {samples} samples, and row "
                f"{foreign[0]}, which would be taken for one of sample {foreign[0] // rows}'s, is "
                f"sample {int(alike[foreign[0]].int().argmax())}'s in the batch. An example would "
                "be clipped in several places, and add more than max_grad_norm. Put the rows of a "
                "sample side by side: torch.stack([a, b], 1).flatten(0, 1), not torch.cat([a, b])."
            )

    def _silenced(self, gradient: Tensor) -> Tensor | None:
        return None if self._looking else torch.zeros_like(gradient)

    def _arrived(
        self,
        module: nn.Module,
        source: Tensor,
        parts: dict[Tensor, list[Part]],
        gradient: Tensor,
    ) -> None:
        # Nor does a hook of an earlier step's graph add to this step.
        if parts is not self.parts or self._looking:
            return
        self.half = self.half or gradient.element_size() < 4
        try:
            for key, part in parts_of(module, source, gradient.detach(), self.samples):
                parts.setdefault(self._owned[module, key], []).append(part)
        except Exception as error:
            self._refused = self._refused or error


def _equal_rows(rows: Tensor, others: Tensor) -> Tensor:
    """(N, B) booleans: which of (N, W) ``rows`` equal which of (B, W) ``others``."""
    equal = rows[:, :1] == others[:, 0]
    for column in range(1, min(_FEW, rows.shape[1])):
        equal &= rows[:, column, None] == others[:, column]
    for other in equal.any(0).nonzero().flatten().tolist():
        maybe = equal[:, other].nonzero().flatten()
        equal[maybe, other] = (rows[maybe] == others[other]).all(1)
    return equal


def _by_one(alike: Tensor, owners: Tensor) -> bool:
    """Whether one sample is in all matches of (N,) owners' rows with (N, B) samples' ``alike``."""
    lone = alike & (alike.sum(1, keepdim=True) == 1)
    involved = lone.scatter(1, owners[:, None], True)
    return bool(involved.all(0).any())


def owns_parameters(module: nn.Module) -> bool:
    """Whether parameters hang on ``module`` itself, not on a module inside."""
    return any(parameter is not None for parameter in module._parameters.values())


def trains(module: nn.Module) -> bool:
    """Whether one of the parameters that hang on ``module`` itself is trained."""
    return any(p is not None and p.requires_grad for p in module._parameters.values())


def first_input(args: Any, kwargs: Any) -> Any:
    """What a layer was called with."""
    return args[0] if args else next(iter(kwargs.values()), None)


def _ignored(module: nn.Module) -> bool:
    """Whether all it trains is trained by a module inside too (Hugging Face's MLM heads)."""
    inside = {p for child in module.children() for p in child.parameters()}
    own = {p for p in module._parameters.values() if p is not None and p.requires_grad}
    return bool(inside) and own <= inside


__all__ = [
    "TELLING",
    "Call",
    "Layout",
    "Recorder",
    "first_input",
    "owns_parameters",
    "prompts_of_samples",
    "trains",
]
