"""Labels of a step, read from its last hidden states and their gradient.

A fused or chunked loss multiplies by the head's matrix itself and never calls the head, so no hook
sees the gradient of logits. But the hidden states h that such a loss reads, and g = dL/dh, exist in
every step, one row (d,) for each predicted token.

A cross-entropy, whatever its weights, masks, signs and smoothing, has ``dL/dlogits = a p - b e_y -
c 1`` for a token, with the softmax p, the one-hot vector e_y of the label y, and numbers a, b, c.
So ``g = a u - b W_y - c m``, with the head's matrix W (V, d), ``u = W^T p`` and ``m = W^T 1``. W
and h are known, and p follows from them. If u and m are projected out of g, only the label's row
W_y is left, projected too: :func:`read_states` finds the row of W with the same direction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lightning_fedleak.model.anatomy import Anatomy, head_adapter, leaf
from lightning_fedleak.model.batches import IGNORE_INDEX
from lightning_fedleak.model.snapshots import is_shard
from lightning_fedleak.model.taps.row_labels import RowLabels, claims_of

# Logits that are computed at once: 64 MiB in float32. Up to seven such arrays are in memory.
ENTRIES_AT_ONCE = 1 << 24
# Largest share of g's norm that a label may leave unexplained.
#
# The true label leaves 1e-5 in float32 and 1e-2 in bfloat16. A temperature that is wrong by half
# leaves .1, soft targets (distillation) leave .3 and more.
MAX_RESIDUAL = 0.05
# Minimum cosine of a label's row of W and of g, both without u and m.
#
# Another token's row has a cosine of about d^-.5. If lower, rows of other tokens pass if d is
# small; if higher, rounding to bfloat16 hides labels.
MIN_COSINE = 0.9
# Difference of cosines up to which a candidate label is kept though another row of W fits better.
#
# Such a difference can be rounding, or the other row may be nearly equal.
TWINS = 1e-3
# Probability of a candidate label above which its gradient may be only rounding.
#
# It is then accepted without a fit of its row. If another token were the label, the gradient would
# be a hundred times as large and contain that token's row.
CERTAIN_P = 0.99
# Share of the rows with a gradient that may lack a label before a temperature is fitted.
MAX_SOFT = 0.2
# Rows that a temperature is fitted to, at least (at most 15); its range, its first grid's size, its
# relative error.
#
# The grid is log-spaced in steps of 22%. A temperature that is 20% off leaves .05 of g unexplained,
# one that is .1% off leaves .0003.
FITTED_ROWS, TEMPERATURES, GRID, ACCURACY = 8, (0.1, 10.0), 24, 1e-3


@dataclass(frozen=True)
class _HeadMap:
    """The map from last hidden states to logits: ``cap tanh((W h + bias) / cap) / temperature``.

    Attributes:
        weight: (V, d) W, with a LoRA on the head added to it.
        bias: (V,), or None.
        cap: The cap of the logits (Gemma 2); None without one.
        temperature: The number by which the loss divides the model's logits.
    """

    weight: Tensor
    bias: Tensor | None = None
    cap: float | None = None
    temperature: float = 1.0


def logit_cap(anatomy: Anatomy) -> float | None:
    """Return the cap of a model's logits (Gemma 2); None without one."""
    config = getattr(anatomy.model, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    cap: float | None = getattr(config, "final_logit_softcapping", None)
    return cap


def head_map(anatomy: Anatomy, temperature: float) -> _HeadMap | None:
    """Return the current head; None if it is not a plain matrix, or is sharded."""
    assert anatomy.head is not None
    layer = leaf(anatomy.head)
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    if weight is None or is_shard(weight) or not weight.is_floating_point():
        return None
    matrix = weight.detach()
    if (adapter := head_adapter(anatomy)) is not None:
        b, a = adapter
        matrix = matrix + (b.detach().float() @ a).to(matrix)
    biases = None if bias is None else bias.detach()
    return _HeadMap(matrix, biases, logit_cap(anatomy), temperature)


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return ``cap tanh(logits / cap)``; the logits themselves without a cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


class _Rows(NamedTuple):
    """A block of n rows, with values that are computed once for all candidate labels.

    Attributes:
        states: (n, d) the last hidden states h.
        gradient: (n, d) g = dL/dh.
        residual: (n, d) g with u and m projected out.
        basis: (n, d, 2) an orthonormal basis of u and m.
        columns: (n, d, 2) u and m.
        slopes: (n, V) the derivative of the logits' cap; None without a cap.
        p: (n, V) the softmax.
        row_norms: (V,) the squared norms of the rows of W.
    """

    states: Tensor
    gradient: Tensor
    residual: Tensor
    basis: Tensor
    columns: Tensor
    slopes: Tensor | None
    p: Tensor
    row_norms: Tensor

    def select(self, index: Tensor) -> _Rows:
        """Return some of the rows."""
        columns = {name: x for name, x in self._asdict().items() if x is not None}
        del columns["row_norms"]  # of W, not of these rows
        return self._replace(**{name: x[index] for name, x in columns.items()})


def _prepare(states: Tensor, gradient: Tensor, head: _HeadMap, weight: Tensor) -> _Rows:
    """Return the values of a block of rows in float32, with u and m projected out of g."""
    states, gradient = states.float(), gradient.float()
    logits = functional.linear(states, weight, None if head.bias is None else head.bias.float())
    slopes = None
    if head.cap is not None:
        logits = torch.tanh(logits / head.cap)
        slopes = 1 - logits.square()
        logits = logits * head.cap
    p = (logits / head.temperature).softmax(1)
    u = (p if slopes is None else p * slopes) @ weight
    m = weight.sum(0).expand_as(u) if slopes is None else slopes @ weight
    columns = torch.stack([u, m], 2)
    basis = torch.linalg.qr(columns.double())[0].float()
    # If u and m have the same direction, as in an untrained model, the second column is rounding.
    sizes = torch.linalg.vector_norm(columns, dim=1, keepdim=True).clamp_min(1e-30)
    inside = torch.linalg.vector_norm(basis.mT @ (columns / sizes), dim=2)
    basis = basis * (inside > 1e-4)[:, None]
    residual = gradient - (basis @ (basis.mT @ gradient[..., None]))[..., 0]
    return _Rows(states, gradient, residual, basis, columns, slopes, p, weight.square().sum(1))


def _cosines(rows: _Rows, weight: Tensor, labels: Tensor) -> Tensor:
    """Return (n,) the absolute cosine of the residual and the label's row of W without u and m."""
    entries = weight[labels]
    if rows.slopes is not None:
        entries = entries * rows.slopes.gather(1, labels[:, None])
    entries = entries - (rows.basis @ (rows.basis.mT @ entries[..., None]))[..., 0]
    return functional.cosine_similarity(entries, rows.residual, dim=1).abs()


def _search(rows: _Rows, weight: Tensor) -> Tensor:
    """Return (n,) the label whose row of W explains most of the residual."""
    dots = (rows.residual @ weight.T).square_()
    norms = rows.row_norms - (rows.basis[..., 0] @ weight.T).square_()
    norms -= (rows.basis[..., 1] @ weight.T).square_()
    # A row in the span of u and m explains nothing; its projected norm is rounding.
    return (dots / norms.clamp_min_(1e-6 * float(rows.row_norms.mean()))).argmax(1)


def _fit_labels(rows: _Rows, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Fit a, -c and -b to g for these labels, (n, 3); also return g's unexplained share, (n,)."""
    entries = weight[labels]
    if rows.slopes is not None:
        entries = entries * rows.slopes.gather(1, labels[:, None])
    columns = torch.cat([rows.columns, entries[..., None]], 2)
    sizes = torch.linalg.vector_norm(columns, dim=1).clamp_min(1e-30)
    columns = columns / sizes[:, None]
    targets = columns.mT @ rows.gradient[..., None]
    # On the CPU, because some devices have no float64: each row has only a 3 x 3 matrix.
    products = (columns.mT @ columns).double().cpu()
    inverse = torch.linalg.pinv(products, hermitian=True, rtol=1e-7)
    factors = (inverse @ targets.double().cpu())[..., 0].float().to(columns.device)
    residual = rows.gradient - (columns @ factors[..., None])[..., 0]
    gradient_norms = torch.linalg.vector_norm(rows.gradient, dim=1).clamp_min(1e-30)
    return factors / sizes, torch.linalg.vector_norm(residual, dim=1) / gradient_norms


def read_states(
    states: Tensor, gradient: Tensor, head: _HeadMap, claims: Sequence[Tensor] = ()
) -> RowLabels:
    """Return the label and the shape of each row of dL/dlogits from the rows of dL/dh.

    A candidate label is verified: it must explain g as well as the best row of W does. For rows
    without such a candidate all rows of W are searched, in blocks.

    Args:
        states: (n, d) the last hidden states, in the dtype of the step.
        gradient: (n, d) dL/dh.
        head: The map from hidden states to logits in this step.
        claims: Sets of candidate labels, each (n,), -100 for none.
    """
    n, weight, device = len(states), head.weight.float(), states.device
    has_gradient = (gradient != 0).any(1) | ~gradient.isfinite().all(1)
    shapes = torch.zeros(3, n, device=device)
    labels = torch.full((n,), IGNORE_INDEX, device=device)
    is_rejected = torch.zeros_like(has_gradient)
    indices, step = has_gradient.nonzero()[:, 0], max(1, ENTRIES_AT_ONCE // len(weight))
    for start in range(0, len(indices), step):
        block = indices[start : start + step]
        rows = _prepare(states[block], gradient[block], head, weight)
        best, is_label = _labels(rows, weight, [claim[block].to(device) for claim in claims])
        factors, residual = _fit_labels(rows, weight, best)
        is_label &= residual <= MAX_RESIDUAL
        p_y = rows.p.gather(1, best[:, None])[:, 0]
        # Not 1 - p_y, which is only rounding if the label is certain.
        p_others = rows.p.scatter(1, best[:, None], 0.0).sum(1)
        a, c, b = factors[:, 0], -factors[:, 1], -factors[:, 2]
        shape = torch.stack([b + c - a * p_y, a * p_others, c])
        for claim in claims if bool((~is_label).any()) else ():
            open_rows = (~is_label).nonzero()[:, 0]
            claimed = claim[block[open_rows]].to(device)
            is_accepted, sizes = _check_hidden(rows.select(open_rows), weight, claimed)
            open_rows, claimed, sizes = (x[is_accepted] for x in (open_rows, claimed, sizes))
            best[open_rows], b[open_rows], is_label[open_rows] = claimed, sizes, True
            shape[:, open_rows] = torch.stack([sizes, sizes, torch.zeros_like(sizes)])
        labels[block] = torch.where(is_label, best, IGNORE_INDEX)
        shapes[:, block] = torch.where(is_label, shape, 0.0)
        is_rejected[block] = is_label & (b < 0)
    is_soft, all_false = has_gradient & (labels == IGNORE_INDEX), torch.zeros_like(has_gradient)
    no_ids, values = torch.zeros_like(labels), shapes.new_zeros(n, 2)
    fields = labels, shapes[0], shapes[1], shapes[2], is_rejected, has_gradient, is_soft
    return RowLabels(*fields, all_false, no_ids, no_ids, all_false, values)


def _labels(rows: _Rows, weight: Tensor, claims: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the label that explains each row best, (n,), and whether its cosine suffices."""
    labels = torch.zeros(len(rows.p), dtype=torch.long, device=weight.device)
    cosines = torch.zeros(len(rows.p), device=weight.device)
    for claim in claims:
        valid = (claim >= 0) & (claim < len(weight))
        ids = claim.clamp(0, len(weight) - 1)
        claim_cosines = _cosines(rows, weight, ids).masked_fill(~valid, 0.0)
        labels = torch.where(claim_cosines > cosines, ids, labels)
        cosines = torch.maximum(cosines, claim_cosines)
    unverified = (cosines < 1 - TWINS).nonzero()[:, 0]
    if len(unverified):
        part = rows.select(unverified)
        best = _search(part, weight)
        best_cosines = _cosines(part, weight, best)
        better = best_cosines > cosines[unverified] + TWINS
        labels[unverified] = torch.where(better, best, labels[unverified])
        cosines[unverified] = torch.maximum(cosines[unverified], best_cosines)
    return labels, cosines >= MIN_COSINE


def _check_hidden(rows: _Rows, weight: Tensor, claims: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether to accept candidate labels that g cannot show, (n,), and their sizes.

    Either the model is certain of them, or their row of W is 0, such as the row of a padding token
    in a tied head. The size of a label is s in ``g = s (W^T q - W_y)``, where q is the softmax over
    the other tokens.
    """
    labels = claims.clamp(0, len(weight) - 1)[:, None]
    q = rows.p.scatter(1, labels, 0.0)
    direction = (q / q.sum(1, keepdim=True).clamp_min(1e-30)).scatter(1, labels, -1.0)
    direction = (direction if rows.slopes is None else direction * rows.slopes) @ weight
    sizes = (rows.gradient * direction).sum(1) / direction.square().sum(1).clamp_min(1e-30)
    residual = torch.linalg.vector_norm(rows.gradient - sizes[:, None] * direction, dim=1)
    explains = residual <= MAX_RESIDUAL * torch.linalg.vector_norm(rows.gradient, dim=1)
    has_zero_row = explains & (rows.row_norms[labels[:, 0]] == 0)
    is_certain = (rows.p.gather(1, labels)[:, 0] > CERTAIN_P) & ~has_zero_row
    is_accepted = (is_certain | has_zero_row) & (claims == labels[:, 0]) & sizes.isfinite()
    # A negative size of a certain label is rounding, not a rejected text.
    return is_accepted, torch.where(is_certain, sizes.clamp_min(0.0), sizes)


def fit_temperature(states: Tensor, gradient: Tensor, head: _HeadMap) -> _HeadMap:
    """Return the head with the temperature that explains most of g.

    One temperature holds for all rows of a step. No candidate labels are used.

    Args:
        states: (n, d) the last hidden states.
        gradient: (n, d) dL/dh.
        head: The head with the expected temperature, which is returned if no other is clearly
            better.
    """
    indices = (gradient != 0).any(1).nonzero()[:, 0]
    block, weight = indices[:: max(1, len(indices) // FITTED_ROWS)], head.weight.float()
    sample = states[block], gradient[block]

    def residual_at(temperature: float, labels: Tensor | None = None) -> tuple[float, Tensor]:
        rows = _prepare(*sample, replace(head, temperature=temperature), weight)
        labels = _search(rows, weight) if labels is None else labels
        return float(_fit_labels(rows, weight, labels)[1].median()), labels

    low, high = map(math.log, TEMPERATURES)
    width = (high - low) / (GRID - 1)
    grid = {low + i * width: residual_at(math.exp(low + i * width)) for i in range(GRID)}
    middle = min(grid, key=lambda log_t: grid[log_t][0])
    labels = grid[middle][1]
    while width > ACCURACY:
        width /= 2
        candidates = (middle - width, middle, middle + width)
        middle = min(candidates, key=lambda log_t: residual_at(math.exp(log_t), labels)[0])
    best = math.exp(middle)
    is_better = residual_at(best)[0] < min(MAX_RESIDUAL, residual_at(head.temperature)[0] / 2)
    return replace(head, temperature=best) if is_better else head


def read_last_states(
    states: Tensor, gradient: Tensor, head: _HeadMap, sources: Sequence[tuple[Tensor, int]]
) -> tuple[RowLabels, _HeadMap]:
    """Return the labels of the rows of texts, and the head with the temperature of their loss.

    Args:
        states: (B, L, d) the last hidden states.
        gradient: (B, L, d) dL/dh.
        head: The map to logits, with the expected temperature.
        sources: Sets of candidate labels (B, L) at the positions of their tokens, each with the
            number of columns between a row and its label.
    """
    rows, gradients = states.flatten(0, 1), gradient.flatten(0, 1)
    claims = [claims_of(labels, states.shape[1], shift) for labels, shift in sources]
    row_labels = read_states(rows, gradients, head, claims)
    if float(row_labels.is_soft.sum()) > MAX_SOFT * float(row_labels.has_gradient.sum()):
        fitted = fit_temperature(rows, gradients, head)
        if fitted is not head:
            return read_states(rows, gradients, fitted, claims), fitted
    return row_labels, head
