"""Per-sample gradients of one layer from its input and its output's gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call, vjp, vmap

from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.defenses.per_sample import Dense, Outer, Part, Rows
from lightning_fedleak.defenses.shards import plain_type

CONTAINERS = (nn.ParameterList, nn.ParameterDict)


def refusal(name: str, module: nn.Module) -> str:
    """Why the parameters that hang on ``module`` itself have no per-sample gradients; "" if none.

    Args:
        name: of the module in the root, "" for the root itself.
        module: owns trainable parameters.
    """
    kind = type(module).__name__
    inside = {p for child in module.children() for p in child.parameters()}
    own = [k for k, p in module._parameters.items() if p is not None and p.requires_grad]
    loose = [k for k in own if module._parameters[k] not in inside]
    if not loose:
        return ""
    names = ", ".join(f"'{name}.{key}'" if name else f"'{key}'" for key in loose)
    if not name:
        return (
            f"the parameters {names} hang directly on the LightningModule, where no layer's inputs "
            "and outputs tell their per-sample gradients. Put them into a module of their own "
            "that computes with them in its `forward`, or freeze them."
        )
    if isinstance(module, CONTAINERS):
        return (
            f"the parameters {names} are in a {kind}, which computes nothing: what uses them "
            "cannot be seen. Put them into a module that computes with them, or freeze them."
        )
    if isinstance(module, nn.MultiheadAttention):
        return (
            f"'{name}' is torch's MultiheadAttention, which has no per-sample gradients. Use "
            "opacus.layers.DPMultiheadAttention, or freeze it."
        )
    if inside:
        return (
            f"the parameters {names} hang on a {kind} that has layers inside. Put them into a "
            "module of their own, or freeze them."
        )
    if type(module) in _RULES and not {"weight", "bias"}.issuperset(loose):
        return (
            f"'{name}' ({kind}) trains {names}. Its weight is computed from other parameters, as "
            "weight_norm and spectral_norm do, so their per-sample gradients cannot be told. Take "
            "that off (torch.nn.utils.remove_weight_norm), or freeze it."
        )
    if isinstance(module, nn.RNNBase):
        return f"'{name}' is a {kind}; use opacus.layers.DP{kind}, or freeze it."
    if isinstance(module, nn.Embedding):
        settings = {
            "max_norm": module.max_norm is not None,
            "scale_grad_by_freq": module.scale_grad_by_freq,
            "sparse": module.sparse,
        }
        for setting, on in settings.items():
            if on:
                return (
                    f"the embedding '{name}' has `{setting}`, which mixes samples or hides rows. "
                    "Build it without."
                )
    if isinstance(module, nn.EmbeddingBag):
        return f"'{name}' is an EmbeddingBag, which is not supported. Use nn.Embedding."
    return ""


def parts_of(
    module: nn.Module, source: Tensor, gradient: Tensor, samples: int
) -> Iterator[tuple[str, Part]]:
    """Every trainable parameter of ``module`` itself, by name, with its per-sample gradients.

    Args:
        module: see :func:`refusal`.
        source: its input; the first dimension counts samples, or samples times positions.
        gradient: of its output.
        samples: B.
    """
    rule = _RULES.get(plain_type(module))
    if rule is None and _is_conv1d(module):
        rule = _conv1d
    if rule is not None:
        yield from rule(module, source, gradient, samples)
    else:
        yield from _any(module, source, gradient, samples)


def has_ghost_rule(module: nn.Module) -> bool:
    """Whether its matrices stay factors: Linear, Hugging Face's Conv1D, Embedding."""
    return plain_type(module) in (nn.Linear, nn.Embedding) or _is_conv1d(module)


Rule = Callable[[Any, Tensor, Tensor, int], Iterator[tuple[str, Part]]]


def _positions(values: Tensor, samples: int) -> Tensor:
    """(B, T, last dimension) of (B, ..., last) or (B T, ..., last)."""
    return values.reshape(samples, -1, values.shape[-1])


def _linear(
    module: nn.Linear, source: Tensor, gradient: Tensor, samples: int
) -> Iterator[tuple[str, Part]]:
    gradient = _positions(gradient, samples)
    if module.weight.requires_grad:
        yield "weight", Outer(gradient, _positions(source, samples))
    if module.bias is not None and module.bias.requires_grad:
        yield "bias", Dense(_total(gradient))


def _conv1d(
    module: Any, source: Tensor, gradient: Tensor, samples: int
) -> Iterator[tuple[str, Part]]:
    gradient = _positions(gradient, samples)
    if module.weight.requires_grad:
        yield "weight", Outer(_positions(source, samples), gradient)
    if module.bias.requires_grad:
        yield "bias", Dense(_total(gradient))


def _embedding(
    module: nn.Embedding, source: Tensor, gradient: Tensor, samples: int
) -> Iterator[tuple[str, Part]]:
    ids = source.reshape(samples, -1)
    values = _positions(gradient, samples)
    if module.padding_idx is not None:
        values = values.masked_fill((ids == module.padding_idx)[..., None], 0.0)
    yield "weight", Rows(ids, values)


def _layer_norm(
    module: nn.LayerNorm, source: Tensor, gradient: Tensor, samples: int
) -> Iterator[tuple[str, Part]]:
    shape = module.normalized_shape
    gradient = _wide(gradient).reshape(samples, -1, *shape)
    if module.weight.requires_grad:
        normal = nn.functional.layer_norm(_wide(source), shape, eps=module.eps)
        yield "weight", Dense((normal.reshape_as(gradient) * gradient).sum(1))
    if module.bias is not None and module.bias.requires_grad:
        yield "bias", Dense(gradient.sum(1))


def _any(
    module: nn.Module, source: Tensor, gradient: Tensor, samples: int
) -> Iterator[tuple[str, Part]]:
    """Runs the layer again, sample by sample, vectorised."""
    parameters = {k: p.detach() for k, p in module.named_parameters() if p.requires_grad}
    if any(isinstance(p, DTensor) for p in parameters.values()):
        raise DefenseError(
            f"DPSGD: a {plain_type(module).__name__} is sharded (FSDP2) when the gradient of its "
            "output arrives, and its per-sample gradients need it whole. Shard the block around it "
            "instead of the layer itself, or leave `output_dtype` out of its MixedPrecisionPolicy."
        )
    # Not its state_dict: FSDP2 would take that for a moment in which to free what is whole.
    everything = [*module.named_parameters(), *module.named_buffers()]
    rest = {key: value.detach() for key, value in everything}
    hooks, module._forward_hooks = module._forward_hooks, type(module._forward_hooks)()
    before, module._forward_pre_hooks = module._forward_pre_hooks, type(module._forward_pre_hooks)()

    def one(x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
        def run(trained: dict[str, Tensor]) -> Tensor:
            output: Tensor = functional_call(module, {**rest, **trained}, (x,))
            return output

        output, pull = vjp(run, parameters)[:2]
        result: dict[str, Tensor] = pull(upstream.to(output.dtype))[0]
        return result

    try:
        with torch.enable_grad():
            rows = len(source) // samples
            x = source.reshape(samples, rows, *source.shape[1:])
            upstream = gradient.reshape(samples, rows, *gradient.shape[1:])
            found = vmap(one, randomness="error")(x, upstream)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise DefenseError(
            f"DPSGD: a {plain_type(module).__name__} cannot be run again for one sample at a time "
            f"({error}). The forward of a trained layer must take one tensor of samples, return "
            "one, and draw nothing at random. Put what is trained into layers of that form, or "
            "freeze it."
        ) from error
    finally:
        module._forward_hooks, module._forward_pre_hooks = hooks, before
    for key, values in found.items():
        yield key, Dense(values)


def _total(gradient: Tensor) -> Tensor:
    return _wide(gradient).sum(1)


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _is_conv1d(module: nn.Module) -> bool:
    """Hugging Face's, without importing it: a Linear with its weight transposed."""
    kind = plain_type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


_RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
}

__all__ = ["has_ghost_rule", "parts_of", "refusal"]
