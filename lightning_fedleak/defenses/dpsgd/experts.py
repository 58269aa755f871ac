"""Mixture-of-experts layers of transformers: their per-sample gradients, and refused variants.

Since transformers 5 one module holds the E experts of a block as stacked matrices
(``use_experts_implementation``). Its input is N rows x (the tokens of all samples), and for each
row the numbers e of its k experts and their k weights ``score_e``, all from the router. The output
y is the weighted sum of the experts' outputs::

    up = x W1[e] + b1[e];    active = gate(up);    y = sum over e of score_e (active W2[e] + b2[e])

A row's gradient of ``W1[e]`` is therefore the outer product of x and the gradient of ``up``. Its
gradient of ``W2[e]`` is that of ``active`` and ``score_e`` times the gradient of y. Backward
computes ``up`` and ``active`` again. The time depends on the routing, as it does in the model.

A router's logits are a linear function of its input, and its other outputs are computed from the
logits. Its weight's gradient therefore follows from the input and the gradient of the logits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.defenses.dpsgd import rerun
from lightning_fedleak.defenses.dpsgd.per_sample import Part, _EmbeddingRows, _ExpertRows

# The advice at the end of error messages.
_MEND = "Freeze it, or train a LoRA of the attention (target_modules)."


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds a block's experts in the form of transformers 5."""
    return hasattr(module, "has_post_expert_norm")


def is_router(module: nn.Module) -> bool:
    """Return whether a module is a router of transformers that computes logits with its weight.

    A model's own code, which transformers imports as ``transformers_modules``, counts too.
    """
    cls, weight = rerun.plain_type(module), module._parameters.get("weight")
    if not cls.__module__.startswith("transformers") or "Router" not in cls.__name__:
        return False
    inside = any(p.requires_grad for child in module.children() for p in child.parameters())
    return weight is not None and weight.dim() == 2 and not inside


def refusals(module: nn.Module) -> dict[str, object]:
    """Return reasons to refuse a module, each with a value that is true if it applies.

    A reason is that the module couples examples, or that no rule computes its per-sample gradients.
    """
    config, cls = getattr(module, "config", None), rerun.plain_type(module)
    in_transformers, name = cls.__module__.startswith("transformers"), cls.__name__
    params = [p for p in module._parameters.values() if p is not None]
    is_many = isinstance(module, nn.ModuleList | nn.ModuleDict) or any(p.dim() == 3 for p in params)
    is_stacked, trained = is_experts(module), any(p.requires_grad for p in module.parameters())
    return {
        "drops tokens of one example if other examples fill an expert. Use another model.": (
            getattr(config, "model_type", "") == "nllb-moe"
        ),
        f"holds experts in a form without per-sample gradients. {_MEND}": (
            module.has_post_expert_norm or module._is_expert_parallel
            if is_stacked
            else trained and in_transformers and "Experts" in name and is_many
        ),
        "adapts a stacked parameter. Use target_modules, or modules_to_save=['experts'].": (
            trained and name == "ParamWrapper"
        ),
    }


def of_logits(inputs: Any, output: Any) -> tuple[Any, Any]:
    """Return a router's input and its logits, flattened to the same rows.

    A router returns its logits first, or returns only them.
    """
    logits = output[0] if isinstance(output, tuple) else output
    tensors = isinstance(inputs, Tensor) and isinstance(logits, Tensor)
    if tensors and len(inputs) != len(logits):
        inputs = inputs.flatten(0, -2)
    return inputs, logits


@contextmanager
def routers_in_eager_mode(root: nn.Module) -> Iterator[None]:
    """Keep routers out of compiled code within this context.

    In compiled code the gradient of the logits would lack the addend from a router's other outputs.
    """
    routers = [m for m in root.modules() if is_router(m) and "forward" not in vars(m)]
    for router in routers:
        forward: Any = torch.compiler.disable(type(router).forward)  # type: ignore[no-untyped-call]
        # A bound method, so that a deep copy of the router gets a method that is bound to the copy.
        vars(router)["forward"] = MethodType(forward, router)
    try:
        yield
    finally:
        for router in routers:
            vars(router).pop("forward", None)


def by_row(
    module: Any, inputs: Sequence[Tensor], gradient: Tensor, samples: int
) -> dict[str, Part]:
    """Return the per-sample gradients of experts, as factors of matrices and rows of biases.

    Args:
        module: The experts.
        inputs: (N, H) rows, (N, k) the numbers of each row's experts, and (N, k) the weights of
            these experts. N is samples times positions.
        gradient: (N, H) the gradient of the output.
        samples: The number B of samples.

    Returns:
        The gradients of the trained parameters, by name.

    Raises:
        DefenseError: The matrices are shards.
    """
    x, index, scores = inputs
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    matrices = getattr(module, up_name).detach(), module.down_proj.detach()
    if any(isinstance(matrix, DTensor) for matrix in matrices):
        raise DefenseError(
            "DPSGD: experts are sharded (FSDP2) in backward. Shard the block around them instead."
        )
    up, down = (m if module.is_transposed else m.mT for m in matrices)  # (E, in, out)
    ids, choices = index.flatten(), index.shape[-1]
    # From here on each pair of a row and one of its experts has a row, N k in all.
    x, upstream = (t.to(up.dtype).repeat_interleave(choices, 0) for t in (x, gradient))
    upstream = upstream * scores.to(up.dtype).reshape(-1, 1)
    counts = ids.bincount(minlength=len(up)).tolist()
    rows = torch.split(ids.argsort(), counts)
    hidden = _products(x, up, rows)
    if module.has_bias:
        hidden += getattr(module, f"{up_name}_bias").detach()[ids]
    with torch.enable_grad():
        active = (module._apply_gate if module.has_gate else module.act_fn)(hidden.requires_grad_())
        active_gradient = _products(upstream, down.mT, rows).to(active.dtype)
        (hidden_gradient,) = torch.autograd.grad(active, hidden, active_gradient)

    def by_sample(values: Tensor) -> Tensor:
        """Return values (N k, ...) as (B, N k / B, ...)."""
        return values.detach().reshape(samples, -1, *values.shape[1:])

    parts: dict[str, Part] = {}
    for key, factor, output_gradient in (
        (up_name, x, hidden_gradient),
        ("down_proj", active, upstream),
    ):
        sides = (factor, output_gradient) if module.is_transposed else (output_gradient, factor)
        if getattr(module, key).requires_grad:
            parts[key] = _ExpertRows(by_sample(ids), *map(by_sample, sides))
        if module.has_bias and getattr(module, f"{key}_bias").requires_grad:
            parts[f"{key}_bias"] = _EmbeddingRows(by_sample(ids), by_sample(output_gradient))
    return parts


def _products(values: Tensor, matrices: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """Return the product (S, n) of each row with its expert's matrix.

    Args:
        values: (S, m) rows.
        matrices: (E, m, n) the experts' matrices.
        rows: The indices of the rows of each expert.
    """
    result = values.new_empty(len(values), matrices.shape[2])
    for matrix, index in zip(matrices, rows, strict=True):
        result[index] = values[index] @ matrix
    return result
