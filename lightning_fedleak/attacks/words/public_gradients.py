"""The gradients that public text would give.

The adversary knows the model and has text of its own. It can compute the update that a client
*would* share for a batch whose words are known, and fit its attack on that. Nothing here changes
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

_SMALL = 0.01  # standard deviation of the values in place of zeros; not tuned


def gradient_of(
    anatomy: Anatomy,
    batch: TokenBatch,
    roles: Sequence[str],
    *,
    instead: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Return the gradient of the mean token cross-entropy, which a client would share.

    It is computed in eval mode on detached views of the parameters, a few rows of the batch at a
    time. A tied matrix gives the sum of its head and embedding parts under either role, as in an
    update.

    Args:
        anatomy: the model.
        batch: token ids, labels (-100 ignored) and mask; moved to the model's device.
        roles: ``"head.weight"``, ``"embedding.weight"``, ... or names of parameters.
        instead: values that replace the model's, by their names in ``anatomy.model``.

    Returns:
        role -> gradient, detached, in the parameter's shape.

    Raises:
        ValueError: the model has no parameter of that role, or the batch has no label to predict.
    """
    views, leaf_of = _leaves(anatomy, roles, instead)
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
        raise ValueError("no label in this batch is left to predict (all are -100)")
    mean = {key: (total[key] / n_tokens).to(leaf.dtype) for key, leaf in distinct.items()}
    return {role: mean[id(leaf)] for role, leaf in leaf_of.items()}


def each_gradient(anatomy: Anatomy, batches: Sequence[TokenBatch], role: str) -> Iterator[Tensor]:
    """Yield the gradient in one role of each batch of public text, with a progress bar."""
    with whole_model(anatomy.root):
        for batch in track(batches, "gradients of public text"):
            yield gradient_of(anatomy, batch, [role])[role]


def _leaves(
    anatomy: Anatomy, roles: Sequence[str], instead: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return views of the model's parameters by name, and those of roles, which take a gradient."""
    targets = {}
    for role in roles:
        parameter = anatomy.parameter(role)
        if parameter is None:
            raise ValueError(f"this model has no parameter of role '{role}' to take a gradient of")
        targets[role] = parameter
    named = dict(anatomy.model.named_parameters())
    target_ids = {id(p) for p in targets.values()}
    views = {
        name: instead.get(name, p).detach().requires_grad_(id(p) in target_ids)
        for name, p in named.items()
    }
    leaves = {id(named[name]): views[name] for name in named}
    return views, {role: leaves[id(p)] for role, p in targets.items()}


def nonzero_starts(anatomy: Anatomy, generator: torch.Generator) -> dict[str, Tensor]:
    """Return small values for trained matrices that are all zero, such as a new LoRA's B.

    Args:
        anatomy: the model.
        generator: CPU generator.

    Returns:
        name in ``anatomy.model`` -> values, for ``instead`` of :func:`gradient_of`.
    """
    return {
        name: torch.randn(p.shape, generator=generator).to(p) * _SMALL
        for name, p in anatomy.model.named_parameters()
        if p.requires_grad and p.dim() == 2 and not bool(p.detach().any())
    }
