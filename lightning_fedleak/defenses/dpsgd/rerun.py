"""Per-sample gradients of layers without a closed form, by running them again.

A layer is run again for one sample at a time, vectorized over samples (``torch.func``), and its
output gradient is pulled back. So are PEFT's adapters that compute with parameters themselves
(DoRA, IA3, VeRA, LoHa, trainable tokens): such an adapted layer is run again as a whole. What is
drawn in it (dropout of its input, of ranks) is drawn again from the same random state.

At setup an adapted layer of each kind is run on a random input, and the sum of its per-sample
gradients compared with autograd's gradient. Samples that the layer mixes, and what it draws for
each sample in another way than by ``nn.Dropout``, make them differ.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.conv import _ConvNd

from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.defenses.dpsgd.per_sample import Part, _Dense

# A function that returns the per-sample gradients of a module's parameters, by their names. Its
# arguments are the module, its input (whose first dimension is samples, or samples times
# positions; of experts three tensors), the gradient of its output, and B.
Rule = Callable[[Any, Any, Tensor, int], Mapping[str, Part]]

# Numbers that the samples run again at once may have: each those of the layer's weights, which its
# gradient may take, and of its input and output. A sample is run alone at least. Not tuned
SIZE_AT_ONCE = 1 << 26
CHANGED = 0.1  # of the weights in the check at setup: zeros (B of a LoRA) would hide other weights
# Distance of the sum of per-sample gradients from autograd's, over its size, in the check at setup.
TOLERANCE = 1e-4  # with weights in float32 or float64, of which some adapters make float32
HALF_TOLERANCE = 0.05  # with weights in half precision
# Classes of adapted layers whose code `torch.func` cannot vectorize, or not in the memory there is.
_ONE_BY_ONE = WeakSet[type[nn.Module]]()
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class Moment:
    """The random state and autocast at which a layer is called.

    Args:
        device: whose random state is read, beside the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        self._states = torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)
        kind, dtype = device.type, torch.get_autocast_dtype(device.type)
        self._cast = torch.autocast(kind, dtype, torch.is_autocast_enabled(kind), False)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw and cast within this context as then, and go on afterwards as if it had not been."""
        with torch.random.fork_rng(self._devices), self._cast:
            torch.set_rng_state(self._states[0])
            for device, state in zip(self._devices, self._states[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield


def needs_more(module: nn.Module) -> bool:
    """Return whether a module's call, if it has one, takes more than one tensor."""
    if getattr(plain_type(module), "forward", None) is nn.Module.forward:
        return True  # lists and dicts of modules
    arguments = inspect.signature(module.forward).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(a.default is a.empty and a.kind not in variable for a in arguments) > 1


def adapted_layers(root: nn.Module) -> tuple[dict[nn.Module, str], set[nn.Module]]:
    """Return the layers that are run again as a whole, with their names, and the modules in them.

    They are layers around another (PEFT's ``base_layer``) that train parameters within modules
    whose own calls do not explain them: containers, and modules that take several tensors.
    """
    modules = dict(root.named_modules(remove_duplicate=False))
    adapted: dict[nn.Module, str] = {}
    for name, module in modules.items():
        if any(p.requires_grad for p in module._parameters.values() if p is not None):
            while name and needs_more(modules[name]):
                name = name.rpartition(".")[0]
            if wrapped_layer(modules[name]) is not modules[name]:
                adapted.setdefault(modules[name], name)
    inner = {m for layer in adapted for m in layer.modules() if m is not layer}
    return {layer: name for layer, name in adapted.items() if layer not in inner}, inner


def check_adapted(adapted: Mapping[nn.Module, str]) -> None:
    """Raise an error unless per-sample gradients of adapted layers are exact, one of each kind.

    Args:
        adapted: the layers, as in :func:`adapted_layers`.

    Raises:
        DefenseError: they are not, or a layer cannot be run again.
    """
    kinds: dict[object, tuple[str, nn.Module]] = {}
    for layer, name in adapted.items():
        trained = [k for k, p in layer.named_parameters() if p.requires_grad]
        kinds[plain_type(layer), plain_type(wrapped_layer(layer)), *trained] = name, layer
    for name, layer in kinds.values():
        _check(name, layer)


def _check(name: str, layer: nn.Module) -> None:
    """Raise an error unless an adapted layer's per-sample gradients add up to autograd's.

    The input is random. A layer without weights yet (meta), of shards, or around weights that are
    not floating-point numbers (four bits) is not run: its gradients are compared in the first step.
    """
    x = _random_input(wrapped_layer(layer))
    plain = all(not p.is_meta and not isinstance(p, DTensor) for p in layer.parameters())
    if x is None or not plain:
        return
    generator = torch.Generator(x.device).manual_seed(0)

    def changed(p: Tensor) -> Tensor:
        noise = torch.randn(p.shape, generator=generator, device=p.device, dtype=p.dtype)
        return (p.detach() + CHANGED * noise).requires_grad_()

    values = {k: changed(p) for k, p in layer.named_parameters() if p.requires_grad}
    moment = Moment(x.device)
    with torch.enable_grad(), without_hooks(layer), moment.again(), _explained(layer):
        output = functional_call(layer, values, (x,))
        upstream = changed(torch.zeros_like(output)).detach()
        expected = torch.autograd.grad(
            output, [*values.values()], upstream, allow_unused=True, materialize_grads=True
        )
    parts: Mapping[str, _Dense] = rerun(layer, x, upstream, len(x), moment=moment, values=values)
    precise = all(v.element_size() >= 4 for v in layer.parameters())
    largest = (TOLERANCE if precise else HALF_TOLERANCE) * max(float(g.norm()) for g in expected)
    for key, gradient in zip(values, expected, strict=True):
        if not float((parts[key].values.sum(0) - gradient).norm()) <= largest:
            raise DefenseError(
                f"DPSGD: '{name}' ({type(layer).__name__}): the gradients of '{key}' from one "
                "sample at a time do not add up to its gradient: the layer mixes samples, or draws "
                "at random otherwise than by nn.Dropout. Set its dropout to 0, or use LoraConfig."
            )


def rerun(
    module: nn.Module,
    source: Tensor,
    gradient: Tensor,
    samples: int,
    *,
    moment: Moment | None = None,
    values: Mapping[str, Tensor] | None = None,
) -> dict[str, _Dense]:
    """Return per-sample gradients of any layer by another forward and backward for each sample.

    The memory is that of :data:`SIZE_AT_ONCE` numbers, a few times over, or of one sample.

    Args:
        module: the layer, which takes one tensor and returns one.
        source: (B, ...) or (B rows, ...) its input.
        gradient: The gradient of its output, likewise.
        samples: B.
        moment: The moment of the call; None for a layer that may draw nothing at random.
        values: The values of the trained parameters by name; None for their own.

    Raises:
        DefenseError: it cannot be run again.
    """
    values = dict(module.named_parameters()) if values is None else values
    trained = {key: p.detach() for key, p in values.items() if p.requires_grad}
    if any(isinstance(p, DTensor) for p in trained.values()):
        raise DefenseError(
            f"DPSGD: a {plain_type(module).__name__} is sharded (FSDP2) when its gradient comes, "
            "and is needed whole. Shard the block around it instead, or leave `output_dtype` out "
            "of its MixedPrecisionPolicy."
        )
    rows = samples, len(source) // samples
    x, upstream = (tensor.reshape(*rows, *tensor.shape[1:]) for tensor in (source, gradient))
    one_by_one = _Samples(module, trained, x, upstream)
    draw = one_by_one.draw if moment else None
    with torch.enable_grad(), without_hooks(module, draw), _explained(module):
        if moment is None:
            return one_by_one.pull_at_once(slice(None), "error")
        return _pull_chunks(one_by_one, moment)


@contextmanager
def _explained(module: nn.Module) -> Iterator[None]:
    """Raise an error that says what to do with a layer that cannot be run within this context."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise DefenseError(
            f"DPSGD: a {plain_type(module).__name__} cannot be run again for one sample at a time "
            f"({error}). A trained layer must take one tensor of samples, return one, and draw "
            "nothing at random. Freeze it."
        ) from error


class _Samples:
    """A layer with what it took and the gradient of what it returned, sample by sample.

    Args:
        module: the layer.
        trained: its trained parameters, detached.
        x: (B, rows, ...) its input.
        upstream: (B, rows, ...) the gradient of its output.
    """

    def __init__(
        self, module: nn.Module, trained: dict[str, Tensor], x: Tensor, upstream: Tensor
    ) -> None:
        # Its state_dict() would make FSDP2 free the unsharded parameters.
        tensors = [*module.named_parameters(), *module.named_buffers()]
        self._state = {key: value.detach() for key, value in tensors}
        self.module, self._trained, self._x, self._upstream = module, trained, x, upstream
        self._order = torch.arange(len(x), device=x.device)

    def chunks(self) -> tuple[Tensor, ...]:
        """Return the numbers of the samples that are run again at once."""
        numbers = sum(t.numel() for t in [*self._state.values(), self._x[0], self._upstream[0]])
        return torch.split(self._order, max(1, SIZE_AT_ONCE // numbers))

    def draw(self, dropout: Any, value: Tensor) -> Tensor:
        """Return the values of one sample, dropped as they were among all samples."""
        ones = torch.ones(len(self._x), *value.shape, dtype=value.dtype, device=value.device)
        masks: Tensor = type(dropout).forward(dropout, ones.flatten(0, 1)).view_as(ones)
        return value * masks.index_select(0, self._index.view(1))[0]

    def pull_at_once(self, part: Tensor | slice, randomness: str) -> dict[str, _Dense]:
        """Return the gradients of some samples from one vectorized run."""

        def pull(index: Tensor, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
            self._index = index
            output, pull_back = vjp(functools.partial(self._run, x), self._trained)[:2]
            result: dict[str, Tensor] = pull_back(upstream.to(output.dtype))[0]
            return result

        rows = self._order[part], self._x[part], self._upstream[part]
        return {k: _Dense(v) for k, v in vmap(pull, randomness=randomness)(*rows).items()}

    def pull_alone(self, index: Tensor) -> dict[str, _Dense]:
        """Return the gradients of one sample."""
        self._index = index
        values = {key: p.detach().requires_grad_() for key, p in self._trained.items()}
        output = self._run(self._x[index], values)
        upstream = self._upstream[index].to(output.dtype)
        gradients = torch.autograd.grad(
            output, [*values.values()], upstream, allow_unused=True, materialize_grads=True
        )
        return {key: _Dense(g[None]) for key, g in zip(values, gradients, strict=True)}

    def _run(self, x: Tensor, trained: dict[str, Tensor]) -> Tensor:
        output: Tensor = functional_call(self.module, {**self._state, **trained}, (x,))
        return output


def _pull_chunks(samples: _Samples, moment: Moment) -> dict[str, _Dense]:
    """Return the gradients of an adapted layer, of one sample at a time if they must be.

    Every run draws what the layer's call at that moment drew.
    """
    kind, chunks = plain_type(samples.module), list[dict[str, _Dense]]()
    for part in samples.chunks():
        if kind not in _ONE_BY_ONE:
            try:
                with moment.again():
                    chunks.append(samples.pull_at_once(part, "same"))
                continue
            except Exception:  # what stops the layer itself stops it below too
                _ONE_BY_ONE.add(kind)
        for index in part:
            with moment.again():
                chunks.append(samples.pull_alone(index))
    return {key: _Dense(torch.cat([c[key].values for c in chunks])) for key in chunks[0]}


@contextmanager
def without_hooks(
    layer: nn.Module, draw: Callable[[Any, Tensor], Tensor] | None = None
) -> Iterator[None]:
    """Run a layer within this context without hooks on it and in it.

    Args:
        layer: the layer.
        draw: takes the place of the forward of every ``nn.Dropout`` in it, if given.
    """
    attributes_of = []
    try:
        for module in layer.modules():
            attributes_of.append((module, dict(vars(module))))
            module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
            if draw is not None and isinstance(module, _DROPOUTS):
                vars(module)["forward"] = functools.partial(draw, module)
        yield
    finally:
        for module, attributes in attributes_of:  # its own code may have kept something of a sample
            vars(module).clear()
            vars(module).update(attributes)


def plain_type(module: nn.Module) -> type[nn.Module]:
    """Return the class of a layer, or the one it had before FSDP2 replaced it by a subclass."""
    cls = type(module)
    if issubclass(cls, FSDPModule) and cls.__bases__[0] is FSDPModule:
        return cls.__bases__[1]
    return cls


def wrapped_layer(layer: Any) -> Any:
    """Return the layer within PEFT's layers around it, or the layer itself."""
    while isinstance(getattr(layer, "base_layer", None), nn.Module):
        layer = layer.base_layer
    return layer


def _random_input(base: Any) -> Tensor | None:
    """Return an input of three samples for a layer of a known kind."""
    weight = getattr(base, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return None
    draw: Any = {"generator": torch.Generator(weight.device), "device": weight.device}
    if isinstance(base, nn.Embedding):
        return torch.randint(len(weight), (3, 4), **draw)
    if isinstance(base, _ConvNd):
        sizes = [2 * d * (k - 1) + 1 for k, d in zip(base.kernel_size, base.dilation, strict=True)]
        return torch.randn(3, base.in_channels, *sizes, dtype=weight.dtype, **draw)
    width = getattr(base, "in_features", None) or getattr(base, "nx", None)
    return None if width is None else torch.randn(3, 4, width, dtype=weight.dtype, **draw)
