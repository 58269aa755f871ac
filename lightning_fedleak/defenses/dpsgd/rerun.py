"""Per-sample gradients of layers without a closed form, by running the layers again.

When the gradient of a layer's output arrives in backward, the layer is run again for each sample
separately, and the backward of that run, from the sample's output gradient, yields the sample's
gradient. All samples are run in one vectorized call (``vmap`` of ``torch.func``) where possible.

PEFT's adapters that compute with parameters outside of a layer's call (DoRA, IA3, VeRA, LoHa,
trainable tokens) have no layer of their own to run. Here the *adapted layer*, which is the adapter
together with the layer around which it is built, is run again as a whole. Its random numbers
(dropout of its input or of ranks) are drawn again from the random state of the first call.

In the first step, and in some later ones, the sum of the per-sample gradients is compared with
autograd's gradient. They differ if the layer mixes samples, or if it draws random numbers for each
sample in another way than by ``nn.Dropout``.
"""

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

from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.defenses.dpsgd.per_sample import Part, _Dense
from lightning_fedleak.model.taps.hooks import random_states, set_random_states

# A function that returns the per-sample gradients of a module's parameters, by the parameters'
# names. Its arguments are the module, its input (whose first dimension is samples, or samples times
# positions; for experts three tensors), the gradient of its output, and the number B of samples.
Rule = Callable[[Any, Any, Tensor, int], Mapping[str, Part]]

# The maximum of numbers in memory for samples that are run again at once. A sample takes as many as
# the layer's weights have (its gradient is as large), plus those of its input and output. If one
# sample exceeds the maximum, samples are run singly. Not tuned; a larger value takes more memory.
SIZE_AT_ONCE = 1 << 26
# Classes of adapted layers that `torch.func` cannot vectorize, or only with too much memory.
_ONE_BY_ONE = WeakSet[type[nn.Module]]()
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class CallState:
    """The random state and the autocast setting when a layer is called.

    Args:
        device: The device of the layer, whose random state is saved in addition to the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._states = device, random_states(device)
        backend, dtype = device.type, torch.get_autocast_dtype(device.type)
        self._cast = torch.autocast(backend, dtype, torch.is_autocast_enabled(backend), False)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore this state within the context, and afterwards the state from before it."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices), self._cast:
            set_random_states(self._states, self._device)
            yield


def needs_more(module: nn.Module) -> bool:
    """Return whether a module's ``forward`` needs more than one argument, or does not exist."""
    if getattr(plain_type(module), "forward", None) is nn.Module.forward:
        return True  # lists and dicts of modules have no forward
    arguments = inspect.signature(module.forward).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(a.default is a.empty and a.kind not in variable for a in arguments) > 1


def adapted_layers(root: nn.Module) -> tuple[dict[nn.Module, str], set[nn.Module]]:
    """Return the adapted layers, which are run again as a whole, with their names.

    For each module that has trained parameters itself, the smallest module around it is considered
    (or the module itself) whose ``forward`` takes one tensor. It is an adapted layer if PEFT has
    built it around another layer (``base_layer``).

    Returns:
        The names of the adapted layers by layer, and the set of all modules inside them.
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


def rerun(
    module: nn.Module,
    inputs: Tensor,
    gradient: Tensor,
    samples: int,
    *,
    state: CallState | None = None,
) -> dict[str, _Dense]:
    """Return per-sample gradients of any layer by another forward and backward for each sample.

    An adapted layer is run for as many samples at once as :data:`SIZE_AT_ONCE` allows. Any other
    layer is run for all samples at once.

    Args:
        module: The layer, which takes one tensor and returns one.
        inputs: Its input, (B, ...) or (B n, ...) with n rows for each sample.
        gradient: The gradient of its output, with the same first dimension.
        samples: The number B of samples.
        state: The state of an adapted layer's call; None for any other layer, which must not draw
            random numbers.

    Returns:
        The per-sample gradients of the trained parameters, by name.

    Raises:
        DefenseError: The layer cannot be run again.
    """
    trained = {key: p.detach() for key, p in module.named_parameters() if p.requires_grad}
    if any(isinstance(p, DTensor) for p in trained.values()):
        raise DefenseError(
            f"DPSGD: a {plain_type(module).__name__} is sharded (FSDP2) in backward. Shard the "
            "block around it instead, or leave `output_dtype` out of its MixedPrecisionPolicy."
        )
    shape = samples, len(inputs) // samples
    x, upstream = (tensor.reshape(*shape, *tensor.shape[1:]) for tensor in (inputs, gradient))
    run = _SampleRuns(module, trained, x, upstream)
    dropout = run.drop if state else None
    try:
        with torch.enable_grad(), without_hooks(module, dropout):
            if state is None:
                return run.gradients_at_once(slice(None), "error")
            return _gradients_in_chunks(run, state)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise DefenseError(
            f"DPSGD: a {plain_type(module).__name__} cannot be run again for one sample at a time "
            f"({error}). A trained layer must take one tensor of samples, return one, and draw no "
            "random numbers. Freeze it."
        ) from error


class _SampleRuns:
    """The runs of a layer for one sample each, and the gradients from them.

    Args:
        module: The layer.
        trained: The layer's trained parameters, detached, by name.
        x: (B, n, ...) the layer's input, with n rows for each sample.
        upstream: (B, n, ...) the gradient of the layer's output.
    """

    def __init__(
        self, module: nn.Module, trained: dict[str, Tensor], x: Tensor, upstream: Tensor
    ) -> None:
        # Not state_dict(), which would make FSDP2 free the unsharded parameters.
        tensors = [*module.named_parameters(), *module.named_buffers()]
        self._state = {key: value.detach() for key, value in tensors}
        self.module, self._trained, self._x, self._upstream = module, trained, x, upstream
        self._order = torch.arange(len(x), device=x.device)

    def chunks(self) -> tuple[Tensor, ...]:
        """Return the indices of the samples, split into chunks that are run at once."""
        numbers = sum(t.numel() for t in [*self._state.values(), self._x[0], self._upstream[0]])
        return torch.split(self._order, max(1, SIZE_AT_ONCE // numbers))

    def drop(self, dropout: Any, value: Tensor) -> Tensor:
        """Return the values (n, ...) of the current sample after a dropout layer.

        The masks of all samples are drawn, as in the call with all samples, so that from the same
        random state the current sample gets the same mask as in that call.
        """
        ones = torch.ones(len(self._x), *value.shape, dtype=value.dtype, device=value.device)
        masks: Tensor = type(dropout).forward(dropout, ones.flatten(0, 1)).view_as(ones)
        return value * masks.index_select(0, self._index.view(1))[0]

    def gradients_at_once(self, chunk: Tensor | slice, randomness: str) -> dict[str, _Dense]:
        """Return the gradients of some samples from one vectorized run.

        Args:
            chunk: The indices of the samples.
            randomness: What ``vmap`` does when the layer draws random numbers.
        """

        def gradients_of(index: Tensor, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
            """Return the gradients of one sample; ``vmap`` runs this for all at once."""
            self._index = index
            output, pull_back = vjp(functools.partial(self._run, x), self._trained)[:2]
            gradients: dict[str, Tensor] = pull_back(upstream.to(output.dtype))[0]
            return gradients

        rows = self._order[chunk], self._x[chunk], self._upstream[chunk]
        return {k: _Dense(v) for k, v in vmap(gradients_of, randomness=randomness)(*rows).items()}

    def gradients_of_sample(self, index: Tensor) -> dict[str, _Dense]:
        """Return the gradients of one sample, from a run without ``vmap``."""
        self._index = index
        values = {key: p.detach().requires_grad_() for key, p in self._trained.items()}
        output = self._run(self._x[index], values)
        upstream = self._upstream[index].to(output.dtype)
        gradients = torch.autograd.grad(
            output, [*values.values()], upstream, allow_unused=True, materialize_grads=True
        )
        return {key: _Dense(g[None]) for key, g in zip(values, gradients, strict=True)}

    def _run(self, x: Tensor, trained: dict[str, Tensor]) -> Tensor:
        """Return the layer's output for one sample (n, ...), with these trained parameters."""
        output: Tensor = functional_call(self.module, {**self._state, **trained}, (x,))
        return output


def _gradients_in_chunks(run: _SampleRuns, state: CallState) -> dict[str, _Dense]:
    """Return the per-sample gradients of an adapted layer, from one run for each chunk of samples.

    If the vectorized run fails, this and all later layers of the class are run for one sample at a
    time. Every run starts from the state of the layer's call, so it draws the same random numbers.
    """
    cls, results = plain_type(run.module), list[dict[str, _Dense]]()
    for chunk in run.chunks():
        if cls not in _ONE_BY_ONE:
            try:
                with state.restored():
                    results.append(run.gradients_at_once(chunk, "same"))
                continue
            except Exception:  # an error of the layer itself is raised again by the runs below
                _ONE_BY_ONE.add(cls)
        for index in chunk:
            with state.restored():
                results.append(run.gradients_of_sample(index))
    return {key: _Dense(torch.cat([r[key].values for r in results])) for key in results[0]}


@contextmanager
def without_hooks(
    layer: nn.Module, drop: Callable[[Any, Tensor], Tensor] | None = None
) -> Iterator[None]:
    """Remove the hooks of a layer and of the modules in it within this context.

    Args:
        layer: The layer.
        drop: Replaces the ``forward`` of every dropout layer in it: takes the dropout layer and the
            values. None: dropout layers stay.
    """
    saved_attributes = []
    try:
        for module in layer.modules():
            saved_attributes.append((module, dict(vars(module))))
            module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
            if drop is not None and isinstance(module, _DROPOUTS):
                vars(module)["forward"] = functools.partial(drop, module)
        yield
    finally:
        # All attributes are restored, because the layer's code may have stored some in the run.
        for module, attributes in saved_attributes:
            vars(module).clear()
            vars(module).update(attributes)


def plain_type(module: nn.Module) -> type[nn.Module]:
    """Return the class of a layer; under FSDP2, the class that FSDP2 replaced by a subclass."""
    cls = type(module)
    if issubclass(cls, FSDPModule) and cls.__bases__[0] is FSDPModule:
        return cls.__bases__[1]
    return cls


def wrapped_layer(layer: Any) -> Any:
    """Return the innermost layer around which PEFT's layers are built, or the layer itself."""
    while isinstance(getattr(layer, "base_layer", None), nn.Module):
        layer = layer.base_layer
    return layer
