"""What an adversary can learn beforehand: public text, and the gradients it would give.

The adversary knows the model and has text of its own, so it can compute the update a client
*would* share for a batch whose words are known, and fit its attack on that. Everything here leaves
no trace on the model: parameters, ``.grad``, hooks on parameters, modes and the global random
numbers stay as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.logit_map import PLAIN, LogitMap
from lightning_fedleak.attacks.public_text import PublicText as PublicText
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.model_runs import (
    LOGITS_AT_ONCE,
    inputs_of,
    micro_batches,
    predicting,
    run_logits,
    token_logits,
    undisturbed,
)


def gradient_of(anatomy: Anatomy, batch: TokenBatch, roles: Sequence[str]) -> dict[str, Tensor]:
    """The gradient that a client would share for ``batch``: of the mean token cross-entropy.

    Computed in eval mode on detached views of the parameters, a few rows of the batch at a time,
    so that the live model is only read. A tied matrix gives the sum of its head and embedding
    parts under either role, as in an update.

    Args:
        anatomy: the model.
        batch: token ids, labels (-100 ignored) and mask; moved to the model's device.
        roles: ``"head.weight"``, ``"embedding.weight"``, ... or names of parameters.

    Returns:
        role -> gradient, detached, shaped as the parameter.

    Raises:
        ValueError: the model has no parameter of that role, or no label is left to predict.
    """
    targets = {}
    for role in roles:
        parameter = anatomy.parameter(role)
        if parameter is None:
            raise ValueError(f"this model has no parameter of role '{role}' to take a gradient of")
        targets[role] = parameter
    named = dict(anatomy.model.named_parameters())
    wanted = {id(p) for p in targets.values()}
    views = {name: p.detach().requires_grad_(id(p) in wanted) for name, p in named.items()}
    leaves = {id(named[name]): views[name] for name in named}
    absent = [role for role, p in targets.items() if id(p) not in leaves]
    if absent:
        raise ValueError(
            f"the parameters of {absent} are not inside the language model ({type(anatomy.model)})"
        )
    distinct = {id(p): leaves[id(p)] for p in targets.values()}
    total = {key: torch.zeros_like(leaf, dtype=torch.float32) for key, leaf in distinct.items()}
    n_tokens = 0
    with undisturbed(anatomy) as model, torch.enable_grad():
        for part in micro_batches(anatomy, batch):
            logits, labels = token_logits(model, part, views)
            loss = F.cross_entropy(logits.float(), labels, reduction="sum")
            grads = torch.autograd.grad(loss, list(distinct.values()), allow_unused=True)
            for key, grad in zip(distinct, grads, strict=True):
                if grad is not None:
                    total[key] += grad
            n_tokens += len(labels)
    if n_tokens == 0:
        raise ValueError("no label in this batch is left to predict (all are -100)")
    mean = {key: (total[key] / n_tokens).to(leaf.dtype) for key, leaf in distinct.items()}
    return {role: mean[id(p)] for role, p in targets.items()}


def hidden_states_of(anatomy: Anatomy, batch: TokenBatch) -> Tensor:
    """Inputs of the output head at the positions that predict a label, (N, d).

    In the order of the flattened labels. One eval-mode forward per few rows, no gradients.

    Raises:
        ValueError: the model has no head.
    """
    head = _head(anatomy)
    states: list[Tensor] = []
    with undisturbed(anatomy) as model, torch.no_grad():
        for part in micro_batches(anatomy, batch):
            with inputs_of(head) as seen:
                run_logits(model, part)
            hidden, _ = predicting(seen[-1], part)
            states.append(hidden)
    return torch.cat(states)


def head_gradient(
    hidden: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    log_partition: Tensor | None = None,
    logit_map: LogitMap = PLAIN,
) -> Tensor:
    """The head's own part of the gradient in closed form, summed over tokens.

    ``sum_i f'(z_i) (softmax(f(z_i)) - onehot(y_i)) h_i^T`` with ``z_i = W h_i + b``.

    Args:
        hidden: (N, d) inputs of the head.
        labels: (N,) the tokens predicted there.
        weight: (V, d).
        bias: (V,) or None.
        rows: (k,) only these types' rows; all by default.
        log_partition: (N,) log of the softmax's denominator, computed when missing.
        logit_map: f, what the model makes of the product; by default nothing.

    Returns:
        (V, d) or (k, d), in float32.
    """
    weight, hidden = weight.float(), hidden.float()
    bias = None if bias is None else bias.float()
    if log_partition is None:
        log_partition = log_partitions(hidden, weight, bias, logit_map)
    kept = weight if rows is None else weight[rows]
    kept_bias = bias if bias is None or rows is None else bias[rows]
    out = torch.zeros_like(kept)
    step = max(1, LOGITS_AT_ONCE // max(1, len(kept)))
    for a in range(0, len(hidden), step):
        h = hidden[a : a + step]
        logits = logit_map(F.linear(h, kept, kept_bias), rows)
        pull = (logits - log_partition[a : a + step, None]).exp_()
        if logit_map.softcap is not None:
            pull *= logit_map.steepness(logits)
        out.addmm_(pull.T, h, alpha=logit_map.scale)
    pushed = hidden
    if logit_map.softcap is not None:
        parts = torch.split(torch.arange(len(labels), device=labels.device), step)
        product = torch.cat([(hidden[i] * weight[labels[i]]).sum(1) for i in parts])
        product = product if bias is None else product + bias[labels]
        pushed = hidden * logit_map.steepness(logit_map(product, labels)[:, None])
    if rows is None:
        return out.index_add_(0, labels, pushed, alpha=-logit_map.scale)
    place = torch.full((len(weight),), -1, dtype=torch.int64, device=hidden.device)
    place[rows] = torch.arange(len(rows), device=hidden.device)
    at = place[labels]
    return out.index_add_(0, at[at >= 0], pushed[at >= 0], alpha=-logit_map.scale)


def log_partitions(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, logit_map: LogitMap = PLAIN
) -> Tensor:
    """Log of the softmax's denominator at each of (N, d) hidden states, (N,)."""
    step = max(1, LOGITS_AT_ONCE // max(1, len(weight)))
    parts = [logit_map(F.linear(h, weight, bias)).logsumexp(1) for h in torch.split(hidden, step)]
    return torch.cat(parts) if parts else hidden.new_zeros(0)


def _head(anatomy: Anatomy) -> nn.Module:
    if anatomy.head is None:
        raise ValueError("this model has no output head, so it has no states that feed one")
    return anatomy.head
