"""Experts of transformers and their routers: per-sample gradients by row, and what is refused.

Since transformers 5 one module holds a block's experts, as matrices that are stacked to (E, ..., ...)
(``use_experts_implementation``). It takes N rows, the numbers of the k experts of each, and k weights
that the router gives them, and returns the weighted sum of what these experts make of the row::

    up = x W1[e] + b1[e];    active = gate(up);    y = sum over e of score_e (active W2[e] + b2[e])

A row's gradient of the matrices of its expert e is therefore a product of two vectors: of x and the
gradient of ``up``, and of ``active`` and ``score_e`` times the gradient of y. ``up`` and ``active``
are computed again in backward. As in the model itself, how long that takes follows the routing.

A router's logits are linear in what it takes, and what else it returns is computed from them, so
its weight's gradient follows from the whole gradient of the logits. Both are compared with autograd
at setup, for one module of each class, on a random input.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.defenses.dpsgd import rerun
from lightning_fedleak.defenses.dpsgd.per_sample import (
    Part,
    _EmbeddingRows,
    _ExpertRows,
    weighted_sum,
)

MEND = "Freeze it, or train a LoRA of the attention (target_modules)."
_COEFFICIENTS = ("router_aux_loss_coef", "router_z_loss_coef")  # of a router's loss, in configs
_ROWS, _SAMPLES, _CHOICES = 12, 3, 2  # of the random input at setup: rows, samples, experts of a row


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds a block's experts in the form of transformers 5."""
    return hasattr(module, "has_post_expert_norm")


def is_router(module: nn.Module) -> bool:
    """Return whether a module is a router of transformers, or of a model's own code for it."""
    cls, weight = rerun.plain_type(module), module._parameters.get("weight")
    known = cls.__module__.startswith("transformers") and "Router" in cls.__name__
    inside = any(p.requires_grad for child in module.children() for p in child.parameters())
    return known and weight is not None and weight.dim() == 2 and not inside


def refusals(module: nn.Module) -> dict[str, object]:
    """Return what of a module's experts couples examples or is not supported, and whether it is so."""
    config, name = getattr(module, "config", None), rerun.plain_type(module).__name__
    added = getattr(config, "output_router_logits", False)
    holds, own = is_experts(module), [p for p in module._parameters.values() if p is not None]
    many = isinstance(module, nn.ModuleList | nn.ModuleDict) or any(p.dim() == 3 for p in own)
    return {
        "adds its router's auxiliary loss, which is of a whole batch, so that it couples examples. "
        "Set `config.output_router_logits = False` on the model.": (
            added and any(getattr(config, key, 0) for key in _COEFFICIENTS)
        ),
        "leaves out tokens of one example where others fill an expert. Use another model.": (
            getattr(config, "model_type", "") == "nllb-moe"
        ),
        f"normalises what each expert returns, or splits experts over processes. {MEND}": (
            holds and (module.has_post_expert_norm or module._is_expert_parallel)
        ),
        "holds experts in another form than transformers' `use_experts_implementation`, and the "
        f"rows that they get are not known to be of which example. {MEND}": (
            "Experts" in name and many and not holds
            and any(p.requires_grad for p in module.parameters())
        ),
    }


def of_logits(inputs: Any, output: Any) -> tuple[Any, Any]:
    """Return a router's input (N, in) and its logits (N, E), which it returns first."""
    if isinstance(output, tuple):
        output = output[0]
    return (inputs.flatten(0, -2) if isinstance(inputs, Tensor) else inputs), output


def by_row(
    module: Any, source: Tensor, gradient: Tensor, samples: int, *, index: Tensor, scores: Tensor
) -> dict[str, Part]:
    """Return the rows' factors of the experts' matrices, and the rows of their biases' gradients.

    Args:
        module: the experts.
        source: (N, H), its input; N is samples times positions.
        gradient: (N, H), of its output.
        samples: B.
        index: (N, k) the experts of each row.
        scores: (N, k) their weights.

    Raises:
        DefenseError: the matrices are shards.
    """
    raising = "gate_up_proj" if module.has_gate else "up_proj"
    matrices = getattr(module, raising).detach(), module.down_proj.detach()
    if any(isinstance(matrix, DTensor) for matrix in matrices):
        raise DefenseError(
            "DPSGD: experts are sharded (FSDP2) when their gradient comes, and are needed whole. "
            "Shard the block around them instead."
        )
    up, down = (m if module.is_transposed else m.mT for m in matrices)  # (E, in, out)
    ids, choices = index.flatten(), index.shape[-1]
    x, upstream = (t.to(up.dtype).repeat_interleave(choices, 0) for t in (source, gradient))
    upstream = upstream * scores.to(up.dtype).reshape(-1, 1)
    rows = [*ids.argsort().split(ids.bincount(minlength=len(up)).tolist())]
    raised = _products(x, up, rows)
    if module.has_bias:
        raised += getattr(module, f"{raising}_bias").detach()[ids]
    with torch.enable_grad():
        active = (module._apply_gate if module.has_gate else module.act_fn)(raised.requires_grad_())
        pulled = _products(upstream, down.mT, rows).to(active.dtype)
        (slope,) = torch.autograd.grad(active, raised, pulled)

    def by_sample(values: Tensor) -> Tensor:
        return values.detach().reshape(samples, -1, *values.shape[1:])

    parts: dict[str, Part] = {}
    for key, taken, made in ((raising, x, slope), ("down_proj", active, upstream)):
        sides = (taken, made) if module.is_transposed else (made, taken)
        if getattr(module, key).requires_grad:
            parts[key] = _ExpertRows(by_sample(ids), *map(by_sample, sides))
        if module.has_bias and getattr(module, f"{key}_bias").requires_grad:
            parts[f"{key}_bias"] = _EmbeddingRows(by_sample(ids), by_sample(made))
    return parts


def _products(values: Tensor, matrices: Tensor, rows: list[Tensor]) -> Tensor:
    """Return the product of each row with its expert's matrix.

    Args:
        values: (S, m) rows.
        matrices: (E, m, n).
        rows: which rows are each expert's.
    """
    result = values.new_empty(len(values), matrices.shape[2])
    for matrix, own in zip(matrices, rows, strict=True):
        result[own] = values[own] @ matrix
    return result


def check_routed(root: nn.Module, rule_of: Any) -> None:
    """Raise an error for experts or a router that compute otherwise, one module of each class.

    Modules without weights yet (meta), of shards, or whose gradients are not finite are left to the
    comparison in the first step.

    Args:
        root: the module that is trained.
        rule_of: returns the rule of a layer from its name and module.

    Raises:
        DefenseError: names the module.
    """
    kinds: dict[object, tuple[str, nn.Module]] = {}
    for name, module in root.named_modules():
        trained = [p for p in module._parameters.values() if p is not None and p.requires_grad]
        whole = not any(p.is_meta or isinstance(p, DTensor) for p in trained)
        if trained and whole and (is_experts(module) or is_router(module)):
            kinds[rerun.plain_type(module), len(trained)] = name, module
    for name, module in kinds.values():
        for key, distance, size in _distances(name, module, rule_of(name, module)):
            precise = module._parameters[key].element_size() >= 4
            if distance > (rerun.TOLERANCE if precise else rerun.HALF_TOLERANCE) * size:
                raise DefenseError(
                    f"DPSGD: '{name}' ({type(module).__name__}) computes otherwise than experts and "
                    f"routers of transformers do: the per-sample gradients of '{key}' do not add "
                    f"up to its gradient. {MEND}"
                )


def _distances(
    name: str, module: Any, rule: Any
) -> Iterator[tuple[str, float, float]]:
    """Yield for each trained parameter how far its parts' sum is from its gradient, and its size."""
    trained = {key: p for key, p in module._parameters.items() if p is not None and p.requires_grad}
    some = next(iter(trained.values()))
    draw: Any = {"generator": torch.Generator(some.device).manual_seed(0), "device": some.device}
    more: list[Tensor] = []
    if is_experts(module):
        stacked = module.gate_up_proj if module.has_gate else module.up_proj
        width = stacked.shape[1 if module.is_transposed else 2]
        index = torch.randint(len(stacked), (_ROWS, _CHOICES), **draw)
        more = [index, torch.rand(_ROWS, _CHOICES, dtype=some.dtype, **draw)]
        rule = functools.partial(rule, index=index, scores=more[1])
    else:
        width = module.weight.shape[1]
        _, *arguments = inspect.signature(module.forward).parameters.values()
        more = [some.new_zeros(len(some)) for a in arguments if a.default is a.empty or "bias" in a.name]
    x = torch.randn(_ROWS, width, dtype=some.dtype, **draw)
    with torch.enable_grad(), rerun.without_hooks(module), rerun.Moment(some.device).again():
        try:
            output = module(x, *more)
        except Exception as error:
            raise DefenseError(
                f"DPSGD: '{name}' ({type(module).__name__}) cannot be run on a random input "
                f'({error}). Call model.set_experts_implementation("eager") if that is why '
                f"(grouped_mm has no float64). {MEND}"
            ) from error
        outputs = [o for o in (output if isinstance(output, tuple) else [output]) if o.requires_grad]
        upstream = [torch.randn(o.shape, dtype=o.dtype, **draw) for o in outputs]
        gradients = torch.autograd.grad(
            outputs, [outputs[0], *trained.values()], upstream, materialize_grads=True
        )
    parts = rule(module, x, gradients[0], _SAMPLES)
    size = max(float(g.norm()) for g in gradients[1:])
    for (key, parameter), expected in zip(trained.items(), gradients[1:], strict=True):
        total = weighted_sum([parts[key]], torch.ones(_SAMPLES), parameter.shape)
        yield key, float((total - expected).norm()), size
