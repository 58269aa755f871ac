"""Labels of a step, read from its last hidden states and their gradient.

A fused or chunked loss never calls the output head, so no gradient of logits can be observed. The
hidden states h that such a loss reads, and g = dL/dh, exist in every step. A cross-entropy,
whatever its weights, masks, signs and smoothing, has ``dL/dlogits = a p - b e_y - c 1`` in a row.
So ``g = a u - b W_y - c m`` with ``u = W^T p`` and ``m = W^T 1``. The head's matrix W and h are
known, and so is the softmax p. Projecting u and m out of g and W leaves the label's row of W.
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

ENTRIES_AT_ONCE = 1 << 24
"""Logits that are computed at once: 64 MiB in float32, in memory three times."""
MAX_RESIDUAL = 0.05
"""Largest share of g that a label leaves unexplained: float32 leaves 1e-5, bfloat16 1e-2.

A temperature that is wrong by half leaves .1, targets that are no labels .3 and more.
"""
MIN_COSINE = 0.9
"""Minimum cosine of a label's row with g without u and m; another row has about d^-.5.

Lower: rows of other tokens pass where d is small; higher: rounding to bfloat16 hides labels.
"""
TWINS = 1e-3
"""Cosine by which another row may fit better than a given label: rounding, or an equal row."""
CERTAIN_P = 0.99
"""Probability of a given label above which its gradient may be rounding, and does not refute it.

Where another token is the label, the gradient is a hundred times as large and has its row in it.
"""
MAX_SOFT = 0.2
"""Share of rows without a label above which another temperature is tried."""
FITTED_ROWS, TEMPERATURES, GRID, ACCURACY = 8, (0.1, 10.0), 24, 1e-3
"""Rows by which a temperature is fitted, its range, the size of the first grid, and the error.

The grid is log-spaced in steps of 22%; a temperature 20% off leaves .05 of g, one by .1% .0003.
"""


@dataclass(frozen=True)
class _HeadMap:
    """The map from last hidden states to logits: ``cap tanh((W h + bias) / cap) / temperature``.

    Attributes:
        weight: (V, d), with a LoRA on the head in it.
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
    """A block of rows and what is computed from it once for all candidate labels.

    ``residual`` is ``gradient`` (g) with u and m projected out, ``basis`` an orthonormal basis of u
    and m, ``columns`` u and m themselves, ``slopes`` the derivative of the cap, and ``p`` the
    softmax. ``row_norms`` are the squared norms of the rows of W.
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
    """Project u and m out of g, in float32."""
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
    """Return (n,) the absolute cosine of each label's row of W with the residual."""
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
    """Fit a, -c and -b to g for given labels, (n, 3); also return the unexplained share, (n,)."""
    entries = weight[labels]
    if rows.slopes is not None:
        entries = entries * rows.slopes.gather(1, labels[:, None])
    columns = torch.cat([rows.columns, entries[..., None]], 2)
    sizes = torch.linalg.vector_norm(columns, dim=1).clamp_min(1e-30)
    columns = columns / sizes[:, None]
    right = columns.mT @ rows.gradient[..., None]
    # On the CPU, since some devices have no float64; three columns a row.
    products = (columns.mT @ columns).double().cpu()
    inverse = torch.linalg.pinv(products, hermitian=True, rtol=1e-7)
    factors = (inverse @ right.double().cpu())[..., 0].float().to(columns.device)
    residual = rows.gradient - (columns @ factors[..., None])[..., 0]
    norm = torch.linalg.vector_norm(rows.gradient, dim=1).clamp_min(1e-30)
    return factors / sizes, torch.linalg.vector_norm(residual, dim=1) / norm


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
    live = (gradient != 0).any(1) | ~gradient.isfinite().all(1)
    numbers = torch.zeros(3, n, device=device)
    labels = torch.full((n,), IGNORE_INDEX, device=device)
    pushed = torch.zeros_like(live)
    indices, step = live.nonzero()[:, 0], max(1, ENTRIES_AT_ONCE // len(weight))
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
            row = (~is_label).nonzero()[:, 0]
            claimed = claim[block[row]].to(device)
            holds, sizes = _check_hidden(rows.select(row), weight, claimed)
            row, claimed, sizes = row[holds], claimed[holds], sizes[holds]
            best[row], b[row], is_label[row] = claimed, sizes, True
            shape[:, row] = torch.stack([sizes, sizes, torch.zeros_like(sizes)])
        labels[block] = torch.where(is_label, best, IGNORE_INDEX)
        numbers[:, block] = torch.where(is_label, shape, 0.0)
        pushed[block] = is_label & (b < 0)
    soft, never = live & (labels == IGNORE_INDEX), torch.zeros_like(live)
    no_ids, values = torch.zeros_like(labels), numbers.new_zeros(n, 2)
    fields = labels, numbers[0], numbers[1], numbers[2], pushed, live, soft
    return RowLabels(*fields, never, no_ids, no_ids, never, values)


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

    Either the model is certain of them, or their row of W is 0, such as that of a padding token in
    a tied head. The size is s in ``g = s (W^T q - W_y)``, where q is the softmax over the other
    tokens.
    """
    labels = claims.clamp(0, len(weight) - 1)[:, None]
    q = rows.p.scatter(1, labels, 0.0)
    direction = (q / q.sum(1, keepdim=True).clamp_min(1e-30)).scatter(1, labels, -1.0)
    direction = (direction if rows.slopes is None else direction * rows.slopes) @ weight
    sizes = (rows.gradient * direction).sum(1) / direction.square().sum(1).clamp_min(1e-30)
    residual = torch.linalg.vector_norm(rows.gradient - sizes[:, None] * direction, dim=1)
    explains = residual <= MAX_RESIDUAL * torch.linalg.vector_norm(rows.gradient, dim=1)
    is_silent = explains & (rows.row_norms[labels[:, 0]] == 0)
    is_certain = (rows.p.gather(1, labels)[:, 0] > CERTAIN_P) & ~is_silent
    holds = (is_certain | is_silent) & (claims == labels[:, 0]) & sizes.isfinite()
    # A negative size of a certain label is rounding, not a rejected text.
    return holds, torch.where(is_certain, sizes.clamp_min(0.0), sizes)


def fit_temperature(states: Tensor, gradient: Tensor, head: _HeadMap) -> _HeadMap:
    """Return the head with the temperature that explains most of g.

    One temperature holds for all rows of a step. No candidate labels are used.

    Args:
        states: (n, d) the last hidden states.
        gradient: (n, d) dL/dh.
        head: The head with the expected temperature, which is returned if no other is clearly
            better.
    """
    live = (gradient != 0).any(1).nonzero()[:, 0]
    block, weight = live[:: max(1, len(live) // FITTED_ROWS)], head.weight.float()
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
        near = (middle - width, middle, middle + width)
        middle = min(near, key=lambda log_t: residual_at(math.exp(log_t), labels)[0])
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
    if float(row_labels.soft.sum()) > MAX_SOFT * float(row_labels.live.sum()):
        fitted = fit_temperature(rows, gradients, head)
        if fitted is not head:
            return read_states(rows, gradients, fitted, claims), fitted
    return row_labels, head
