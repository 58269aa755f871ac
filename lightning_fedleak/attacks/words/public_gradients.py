"""Gradients of public text, computed as a client would compute them.

The adversary knows the model and has public text. It can compute the update that a client *would*
share for a known batch, and calibrate its attack on that update. Nothing here changes
the model: parameters, ``.grad``, hooks, modes and the global random numbers stay as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.model import model_runs
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.whole_models import whole_model
from lightning_fedleak.progress import track


def gradient_of(
    anatomy: Anatomy,
    batch: TokenBatch,
    roles: Sequence[str],
    *,
    instead: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Return the gradient of the mean token cross-entropy, which a client would share.

    It is computed in eval mode on detached views of the parameters, a few rows of the batch at a
    time. For a tied matrix both roles give the sum of its head and embedding parts, as in an
    update.

    Args:
        anatomy: The model.
        batch: The token ids, labels (-100 ignored) and mask; moved to the model's device.
        roles: The roles ``"head.weight"``, ``"embedding.weight"``, ... or names of parameters.
        instead: The values that replace those of parameters, by name in ``anatomy.model``.

    Returns:
        A mapping from role to the detached gradient, in the parameter's shape.

    Raises:
        ValueError: The model has no parameter for a role, or all labels of the batch are ignored.
    """
    views, leaf_of = leaves(anatomy, roles, instead)
    distinct = {id(leaf): leaf for leaf in leaf_of.values()}
    total = {key: torch.zeros_like(leaf, dtype=torch.float32) for key, leaf in distinct.items()}
    n_tokens = 0
    with model_runs.undisturbed(anatomy) as model, torch.enable_grad():
        for part in model_runs.micro_batches(anatomy, batch):
            logits, labels = model_runs.token_logits(model, part, views)
            loss = F.cross_entropy(logits.float(), labels, reduction="sum")
            grads = torch.autograd.grad(loss, list(distinct.values()), allow_unused=True)
            for key, grad in zip(distinct, grads, strict=True):
                if grad is not None:
                    total[key] += grad
            n_tokens += len(labels)
    if n_tokens == 0:
        raise ValueError("all labels of this batch are ignored (-100): there is nothing to predict")
    mean = {key: (total[key] / n_tokens).to(leaf.dtype) for key, leaf in distinct.items()}
    return {role: mean[id(leaf)] for role, leaf in leaf_of.items()}


def each_gradient(anatomy: Anatomy, batches: Sequence[TokenBatch], role: str) -> Iterator[Tensor]:
    """Yield the gradient of one role's parameter for each public batch, with a progress bar."""
    with whole_model(anatomy.root):
        for batch in track(batches, "gradients of public text"):
            yield gradient_of(anatomy, batch, [role])[role]


def leaves(
    anatomy: Anatomy, roles: Sequence[str], instead: Mapping[str, Tensor] = MappingProxyType({})
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return detached views of all parameters by name, and the views of roles, by role.

    The views of roles require a gradient. A backward pass writes no gradients into the model.
    """
    targets = {}
    for role in roles:
        parameter = anatomy.parameter(role)
        if parameter is None:
            raise ValueError(f"this model has no parameter for the role '{role}'")
        targets[role] = parameter
    named = dict(anatomy.model.named_parameters())
    target_ids = {id(p) for p in targets.values()}
    views = {
        name: instead.get(name, p).detach().requires_grad_(id(p) in target_ids)
        for name, p in named.items()
    }
    views_by_id = {id(p): views[name] for name, p in named.items()}
    return views, {role: views_by_id[id(p)] for role, p in targets.items()}
