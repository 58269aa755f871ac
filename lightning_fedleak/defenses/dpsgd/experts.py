"""Experts of transformers and their routers: per-sample gradients by row, and what is refused.

Since transformers 5 one module holds a block's E experts, as stacked matrices
(``use_experts_implementation``). It takes N rows, the numbers of the k experts of each, and k
weights that the router gives them, and returns the weighted sum of what these make of the row::

    up = x W1[e] + b1[e];    active = gate(up);    y = sum over e of score_e (active W2[e] + b2[e])

A row's gradient of the matrices of its expert e is therefore a product of two vectors: of x and the
gradient of ``up``, and of ``active`` and ``score_e`` times the gradient of y. ``up`` and ``active``
are computed again in backward. As in the model itself, how long that takes follows the routing.

A router's logits are linear in what it takes, and what else it returns is computed from them, so
its weight's gradient follows from the whole gradient of the logits. Both are compared with autograd
at setup, for one module of each class, on a random input.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fedleak.defenses.base import DefenseError, refuse
from lightning_fedleak.defenses.dpsgd import rerun
from lightning_fedleak.defenses.dpsgd.per_sample import (
    Part,
    _EmbeddingRows,
    _ExpertRows,
    weighted_sum,
    zeros_of,
)

_MEND = "Freeze it, or train a LoRA of the attention (target_modules)."
# Settings of configs that scale a router's loss.
_COEFFICIENTS = ("router_aux_loss_coef", "router_z_loss_coef", "aux_loss_coef")
_ROWS, _SAMPLES, _CHOICES = 12, 3, 2  # of the input at setup: rows, samples, experts of a row


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds a block's experts in the form of transformers 5."""
    return hasattr(module, "has_post_expert_norm")


def is_router(module: nn.Module) -> bool:
    """Return whether a module is a router of transformers, or of a model's own code for it."""
    cls, weight = rerun.plain_type(module), module._parameters.get("weight")
    if not cls.__module__.startswith("transformers") or "Router" not in cls.__name__:
        return False
    inside = any(p.requires_grad for child in module.children() for p in child.parameters())
    return weight is not None and weight.dim() == 2 and not inside


def _refusals(module: nn.Module) -> dict[str, object]:
    """Return what may couple examples or have no rule in a module, and whether it does."""
    config, cls = getattr(module, "config", None), rerun.plain_type(module)
    known, name = cls.__module__.startswith("transformers"), cls.__name__
    added = getattr(config, "output_router_logits", False)
    own = [p for p in module._parameters.values() if p is not None]
    many = isinstance(module, nn.ModuleList | nn.ModuleDict) or any(p.dim() == 3 for p in own)
    holds, trained = is_experts(module), any(p.requires_grad for p in module.parameters())
    return {
        "adds its router's auxiliary loss, which is of a whole batch, so that it couples examples. "
        "Set `model.config.output_router_logits = False`.": (
            added and any(getattr(config, key, 0) for key in _COEFFICIENTS)
        ),
        "leaves out tokens of one example where others fill an expert. Use another model.": (
            getattr(config, "model_type", "") == "nllb-moe"
        ),
        f"normalises what each expert returns, or splits experts over processes. {_MEND}": (
            holds and (module.has_post_expert_norm or module._is_expert_parallel)
        ),
        "holds experts in another form than transformers' `use_experts_implementation`, and the "
        f"rows that they get are not known to be of which example. {_MEND}": (
            trained and known and "Experts" in name and many and not holds
        ),
        "adapts a stacked parameter (PEFT's target_parameters), which has no per-sample gradients. "
        "Use target_modules, or modules_to_save=['experts'].": trained and name == "ParamWrapper",
    }


def of_logits(inputs: Any, output: Any) -> tuple[Any, Any]:
    """Return a router's input and its logits, which it returns first, with the same rows."""
    logits = output[0] if isinstance(output, tuple) else output
    tensors = isinstance(inputs, Tensor) and isinstance(logits, Tensor)
    if tensors and len(inputs) != len(logits):
        inputs = inputs.flatten(0, -2)
    return inputs, logits


@contextmanager
def routers_in_eager_mode(root: nn.Module) -> Iterator[None]:
    """Keep routers out of compiled code within this context.

    There, the gradient of the logits would lack what comes through the other outputs.
    """
    routers = [m for m in root.modules() if is_router(m) and "forward" not in vars(m)]
    for router in routers:
        forward: Any = torch.compiler.disable(type(router).forward)  # type: ignore[no-untyped-call]
        vars(router)["forward"] = MethodType(forward, router)  # a deep copy is bound to the copy
    try:
        yield
    finally:
        for router in routers:
            vars(router).pop("forward", None)


def by_row(
    module: Any, source: Sequence[Tensor], gradient: Tensor, samples: int
) -> dict[str, Part]:
    """Return the rows' factors of the experts' matrices, and the rows of their biases' gradients.

    Args:
        module: the experts.
        source: (N, H) rows, (N, k) numbers of the experts of each, and (N, k) weights of these. N
            is samples times positions.
        gradient: (N, H), of the output.
        samples: B.

    Raises:
        DefenseError: the matrices are shards.
    """
    x, index, scores = source
    raising = "gate_up_proj" if module.has_gate else "up_proj"
    matrices = getattr(module, raising).detach(), module.down_proj.detach()
    if any(isinstance(matrix, DTensor) for matrix in matrices):
        raise DefenseError(
            "DPSGD: experts are sharded (FSDP2) when their gradient comes, and are needed whole. "
            "Shard the block around them instead."
        )
    up, down = (m if module.is_transposed else m.mT for m in matrices)  # (E, in, out)
    ids, choices = index.flatten(), index.shape[-1]
    x, upstream = (t.to(up.dtype).repeat_interleave(choices, 0) for t in (x, gradient))
    upstream = upstream * scores.to(up.dtype).reshape(-1, 1)
    counts = ids.bincount(minlength=len(up)).tolist()
    rows = torch.split(ids.argsort(), counts)
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


def _products(values: Tensor, matrices: Tensor, rows: Sequence[Tensor]) -> Tensor:
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


def check(root: nn.Module, linear: rerun.Rule) -> None:
    """Raise an error for experts or a router without per-sample gradients, or that couple examples.

    One module of each class is run. Those without weights yet (meta) or of shards are left to the
    comparison in the first step.

    Args:
        root: the module that is trained.
        linear: the rule of a router's logits.

    Raises:
        DefenseError: names the module.
    """
    kinds: dict[object, tuple[str, nn.Module]] = {}
    for name, module in root.named_modules():
        cls = rerun.plain_type(module)
        refuse(f"DPSGD: '{name or cls.__name__}' ({cls.__name__}) ", _refusals(module))
        trained = _trained(module)
        whole = not any(p.is_meta or isinstance(p, DTensor) for p in trained.values())
        if trained and whole and (is_experts(module) or is_router(module)):
            kinds[(cls, *trained)] = name, module
    for name, module in kinds.values():
        _check_sums(name, module, by_row if is_experts(module) else linear)


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's own trained parameters by name."""
    own = module._parameters.items()
    return {key: p for key, p in own if p is not None and p.requires_grad}


def _check_sums(name: str, module: Any, rule: Any) -> None:
    """Raise an error unless the parts of a random input's rows add up to autograd's gradients."""
    trained = _trained(module)
    some = next(iter(trained.values()))
    draw: Any = {"generator": torch.Generator(some.device).manual_seed(0), "device": some.device}
    if is_experts(module):
        stacked = module.gate_up_proj if module.has_gate else module.up_proj
        width = stacked.shape[1 if module.is_transposed else 2]
        index = torch.randint(len(stacked), (_ROWS, _CHOICES), **draw)
        more = [index, torch.rand(_ROWS, _CHOICES, dtype=some.dtype, **draw)]
    else:
        width = module.weight.shape[1]
        _, *arguments = inspect.signature(module.forward).parameters.values()
        needed = [a for a in arguments if a.default is a.empty or "bias" in a.name]
        more = [some.new_zeros(len(module.weight)) for _ in needed]
    x = torch.randn(_ROWS, width, dtype=some.dtype, **draw)
    with torch.enable_grad(), rerun.without_hooks(module), rerun.Moment(some.device).again():
        try:
            output = module(x, *more)
            made = output if isinstance(output, tuple) else (output,)
            outputs = [tensor for tensor in made if tensor.requires_grad]
            first, *gradients = torch.autograd.grad(
                outputs,
                [made[0], *trained.values()],
                [torch.randn(o.shape, dtype=o.dtype, **draw) for o in outputs],
                materialize_grads=True,
            )
        except Exception as error:
            raise DefenseError(
                f"DPSGD: '{name}' ({type(module).__name__}) cannot be run on a random input "
                f'({error}). Call model.set_experts_implementation("eager") if that is why '
                f"(grouped_mm has no float64). {_MEND}"
            ) from error
    parts = rule(module, (x, *more) if is_experts(module) else x, first, _SAMPLES)
    precise = some.element_size() >= 4
    largest = (rerun.TOLERANCE if precise else rerun.HALF_TOLERANCE) * max(
        float(gradient.norm()) for gradient in gradients
    )
    for (key, parameter), expected in zip(trained.items(), gradients, strict=True):
        known = [parts[key]] if key in parts else []
        zeros = zeros_of(parameter)
        total = weighted_sum(known, torch.ones(_SAMPLES), parameter.shape, zeros)
        if not float((total - expected).norm()) <= largest:
            raise DefenseError(
                f"DPSGD: '{name}' ({type(module).__name__}) computes otherwise than experts and "
                f"routers of transformers do: the per-sample gradients of '{key}' do not add up to "
                f"its gradient. {_MEND}"
            )
