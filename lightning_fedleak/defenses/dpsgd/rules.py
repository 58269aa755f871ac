"""Rules that compute the per-sample gradients of a layer from its input and output gradient.

A rule is a function of the layer, its input, the gradient of its output, and the number B of
samples. It returns the per-sample gradients of the layer's parameters by name, each as a *part*
(:mod:`~lightning_fedleak.defenses.dpsgd.per_sample`): the gradients of all samples, as factors, as
rows, or as one dense tensor.

Linear layers, embeddings, layer norms and transformers' experts have a closed form. Every other
layer is run again for each sample (:mod:`~lightning_fedleak.defenses.dpsgd.rerun`), or refused at
setup.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.defenses.dpsgd import experts
from lightning_fedleak.defenses.dpsgd.per_sample import Part, _Dense, _EmbeddingRows, _Outer, _wide
from lightning_fedleak.defenses.dpsgd.rerun import Rule, needs_more, plain_type, rerun

# What to use instead of layers without per-sample gradients; {0} is the name of the class.
_REPLACEMENTS = {
    nn.MultiheadAttention: "Build it of Linear layers around scaled_dot_product_attention.",
    nn.RNNBase: "Use opacus.layers.DP{0}, which takes its state_dict, or freeze it.",
    nn.EmbeddingBag: "Use nn.Embedding.",
    nn.modules.batchnorm._BatchNorm: "Use GroupNorm or LayerNorm, or freeze it in eval mode.",
}


def rule_of(name: str, module: nn.Module) -> Rule | None:
    """Return the rule that computes a layer's per-sample gradients.

    It is None if modules inside the layer hold all its trained parameters too, and have the rules:
    the masked language model heads of Hugging Face hold the bias of their decoder like this.

    Args:
        name: The name of the module in the root; "" for the root itself.
        module: A module that has trained parameters itself, not only in modules inside it.

    Raises:
        DefenseError: The parameters have no per-sample gradients. The message says why and what to
            use instead.
    """
    if experts.is_experts(module):
        return experts.by_row
    if experts.is_router(module):
        return ROUTER
    inner = {p for child in module.children() for p in child.parameters()}
    trained = {k: p for k, p in module._parameters.items() if p is not None and p.requires_grad}
    keys = [key for key, parameter in trained.items() if parameter not in inner]
    if not keys:
        return None
    if reason := _refusal(name, module, keys, has_inner=bool(inner)):
        raise DefenseError(f"DPSGD: {reason}")
    cls = plain_type(module)
    # GPT-2's linear layer in transformers, whose weight is transposed.
    if cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils":
        return _conv1d
    return _RULES.get(cls, rerun)


def _refusal(name: str, module: nn.Module, keys: Sequence[str], *, has_inner: bool) -> str:
    """Return why a module has no per-sample gradients, and what to do; "" if it has them.

    Args:
        name: The name of the module in the root.
        module: The module.
        keys: The names of its trained parameters that no module inside it holds too.
        has_inner: Whether modules inside it have parameters.
    """
    cls = type(module).__name__
    for base, advice in _REPLACEMENTS.items():
        if isinstance(module, base):
            return f"'{name}' is a {cls}. {advice.format(cls)}"
    if has_inner or not name or needs_more(module):
        return (
            f"'{name}' ({cls}) trains {keys} itself: put them into a module of their own, whose "
            "`forward` takes one tensor, or freeze them"
        )
    if type(module) in _RULES and not {"weight", "bias"}.issuperset(keys):
        return f"'{name}' ({cls}) has weight norm: torch.nn.utils.remove_weight_norm, or freeze it"
    # They write to weights in the forward pass, scale gradients by counts of the batch, or leave
    # out the rows of gradients that are zero.
    for setting in ("max_norm", "scale_grad_by_freq", "sparse"):
        if isinstance(module, nn.Embedding) and getattr(module, setting) not in (None, False):
            return f"build the embedding '{name}' without `{setting}`, or freeze it"
    return ""


def _linear(
    module: Any, inputs: Tensor, gradient: Tensor, samples: int, *, transposed: bool = False
) -> dict[str, Part]:
    """Return the factors of a linear layer's weight gradients, and its dense bias gradients.

    Args:
        module: The linear layer.
        inputs: (B, ..., in) or (B * positions, in), its input.
        gradient: The gradient of its output, with the same leading dimensions.
        samples: B, the number of samples.
        transposed: Whether the weight is (in, out), as in GPT-2's ``Conv1D``, not (out, in).
    """
    parts: dict[str, Part] = {}
    if inputs.dtype == torch.float64:  # some routers compute in float32 even then
        gradient = gradient.double()
    gradient = gradient.reshape(samples, -1, gradient.shape[-1])
    if module.weight.requires_grad:
        inputs = inputs.reshape(samples, -1, inputs.shape[-1])
        parts["weight"] = _Outer(inputs, gradient) if transposed else _Outer(gradient, inputs)
    bias = getattr(module, "bias", None)  # some routers have none
    if bias is not None and bias.requires_grad:
        parts["bias"] = _Dense(_wide(gradient).sum(1))
    return parts


_conv1d = functools.partial(_linear, transposed=True)
ROUTER: Rule = functools.partial(_linear)
"""The rule of a router's weight, from its input and logits (:func:`experts.of_logits`)."""


def _embedding(
    module: nn.Embedding, inputs: Tensor, gradient: Tensor, samples: int
) -> dict[str, Part]:
    """Return the rows of an embedding's gradients. As in autograd, padding has no gradient."""
    ids = inputs.reshape(samples, -1)
    values = gradient.reshape(samples, -1, gradient.shape[-1])
    if module.padding_idx is not None:
        values = values.masked_fill((ids == module.padding_idx)[..., None], 0.0)
    return {"weight": _EmbeddingRows(ids, values)}


def _layer_norm(
    module: nn.LayerNorm, inputs: Tensor, gradient: Tensor, samples: int
) -> dict[str, Part]:
    """Return dense gradients of a layer norm, whose input is normalized again for the weight's."""
    parts: dict[str, Part] = {}
    shape = module.normalized_shape
    gradient = _wide(gradient).reshape(samples, -1, *shape)
    if module.weight.requires_grad:
        normalized = nn.functional.layer_norm(_wide(inputs), shape, eps=module.eps)
        parts["weight"] = _Dense((normalized.reshape_as(gradient) * gradient).sum(1))
    if module.bias is not None and module.bias.requires_grad:
        parts["bias"] = _Dense(gradient.sum(1))
    return parts


_RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
}
# The rules of layers that use each of their parameters once in a call.
RULES_OF_ONE_USE: tuple[Rule, ...] = (_linear, _conv1d, ROUTER, _embedding, _layer_norm)
