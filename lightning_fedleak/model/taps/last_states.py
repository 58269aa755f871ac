"""Labels of a step, read from its last hidden states and their gradient.

A fused or chunked loss never calls the output head, so no gradient of logits can be observed. The
hidden states h that such a loss reads, and g = dL/dh, exist in every step. A cross-entropy,
whatever its weights, masks, signs and smoothing, has ``dL/dlogits = a p - b e_y - c 1`` in a row.
So ``g = a u - b W_y - c m`` with ``u = W^T p`` and ``m = W^T 1``. The head's matrix W and h are
known, and so is the softmax p: the row of W that explains what u and m leave of g is the label.
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
MAX_REST = 0.05
"""Largest share of g that a label leaves unexplained: float32 leaves 1e-5, bfloat16 1e-2.

A temperature that is wrong by half leaves .1, targets that are no labels .3 and more.
"""
MIN_COSINE = 0.9
"""Least cosine of a label's row with what u and m leave of g; another row has about d^-.5.

Lower: rows of other tokens pass where d is small; higher: rounding to bfloat16 hides labels.
"""
TWINS = 1e-3
"""Cosine by which another row may explain g better than a given label: rounding, or a twin's."""
CERTAIN = 0.99
"""Probability of a given label above which its gradient may be rounding, and does not refute it.

Where another token is the label, the gradient is a hundred times as large and has its row in it.
"""
MAX_SOFT = 0.2
"""Share of rows without a label above which another temperature is tried."""
FITTED_ROWS, TEMPERATURES, GRID, ACCURACY = 8, (0.1, 10.0), 24, 1e-3
"""Rows by which a temperature is fitted, its range, how many are tried first, and its error.

The grid is log-spaced in steps of 22%; a temperature 20% off leaves .05 of g, one by .1% .0003.
"""


@dataclass(frozen=True)
class _HeadMap:
    """The map from last hidden states to logits: ``cap tanh((W h + bias) / cap) / temperature``.

    Attributes:
        weight: (V, d), with a LoRA on the head in it.
        bias: (V,), or None.
        cap: of the logits (Gemma 2); None without one.
        temperature: that the loss divides logits by, over the model's own scale of them.
    """

    weight: Tensor
    bias: Tensor | None = None
    cap: float | None = None
    temperature: float = 1.0


def logit_cap(anatomy: Anatomy) -> float | None:
    """Return what a model caps its logits to (Gemma 2); None without a cap."""
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
    """Return logits with a cap, ``cap tanh(logits / cap)``; as they are without one."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


class _Rows(NamedTuple):
    """A block of rows: ``rest`` is g with u and m projected out; other fields fit labels."""

    states: Tensor
    gradient: Tensor
    rest: Tensor
    basis: Tensor
    columns: Tensor
    slopes: Tensor | None
    p: Tensor
    row_norms: Tensor

    def part(self, index: Tensor) -> _Rows:
        """Return some of the rows."""
        of_rows = {name: one for name, one in self._asdict().items() if one is not None}
        del of_rows["row_norms"]
        return self._replace(**{name: one[index] for name, one in of_rows.items()})


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
    # Where u and m are one direction, as in an untrained model, the second column is rounding.
    sizes = torch.linalg.vector_norm(columns, dim=1, keepdim=True).clamp_min(1e-30)
    inside = torch.linalg.vector_norm(basis.mT @ (columns / sizes), dim=2)
    basis = basis * (inside > 1e-4)[:, None]
    rest = gradient - (basis @ (basis.mT @ gradient[..., None]))[..., 0]
    return _Rows(states, gradient, rest, basis, columns, slopes, p, weight.square().sum(1))


def _cosines(rows: _Rows, weight: Tensor, labels: Tensor) -> Tensor:
    """Return (n,) the absolute cosine of each label's row of W with ``rest``."""
    entries = weight[labels]
    if rows.slopes is not None:
        entries = entries * rows.slopes.gather(1, labels[:, None])
    entries = entries - (rows.basis @ (rows.basis.mT @ entries[..., None]))[..., 0]
    return functional.cosine_similarity(entries, rows.rest, dim=1).abs()


def _search(rows: _Rows, weight: Tensor) -> Tensor:
    """Return (n,) the label whose row of W explains most of ``rest``."""
    dots = (rows.rest @ weight.T).square_()
    norms = rows.row_norms - (rows.basis[..., 0] @ weight.T).square_()
    norms -= (rows.basis[..., 1] @ weight.T).square_()
    # A row that lies in u and m but for rounding explains nothing.
    return (dots / norms.clamp_min_(1e-6 * float(rows.row_norms.mean()))).argmax(1)


def _fit_labels(rows: _Rows, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return a, -c and -b of g for given labels, (n, 3), and the unexplained share of g, (n,)."""
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
    rest = rows.gradient - (columns @ factors[..., None])[..., 0]
    norm = torch.linalg.vector_norm(rows.gradient, dim=1).clamp_min(1e-30)
    return factors / sizes, torch.linalg.vector_norm(rest, dim=1) / norm


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
    places, step = live.nonzero()[:, 0], max(1, ENTRIES_AT_ONCE // len(weight))
    for start in range(0, len(places), step):
        block = places[start : start + step]
        rows = _prepare(states[block], gradient[block], head, weight)
        of_rows, is_label = _labels(rows, weight, [one[block].to(device) for one in claims])
        factors, rest = _fit_labels(rows, weight, of_rows)
        is_label &= rest <= MAX_REST
        p_y = rows.p.gather(1, of_rows[:, None])[:, 0]
        # Not 1 - p_y, which is only rounding if the label is certain.
        p_others = rows.p.scatter(1, of_rows[:, None], 0.0).sum(1)
        above, shift, below = factors[:, 0], -factors[:, 1], -factors[:, 2]
        shape = torch.stack([below + shift - above * p_y, above * p_others, shift])
        for claim in claims if bool((~is_label).any()) else ():
            row = (~is_label).nonzero()[:, 0]
            of_row = claim[block[row]].to(device)
            holds, sizes = _check_unseen(rows.part(row), weight, of_row)
            row, of_row, sizes = row[holds], of_row[holds], sizes[holds]
            of_rows[row], below[row], is_label[row] = of_row, sizes, True
            shape[:, row] = torch.stack([sizes, sizes, torch.zeros_like(sizes)])
        labels[block] = torch.where(is_label, of_rows, IGNORE_INDEX)
        numbers[:, block] = torch.where(is_label, shape, 0.0)
        pushed[block] = is_label & (below < 0)
    soft, never = live & (labels == IGNORE_INDEX), torch.zeros_like(live)
    none, values = torch.zeros_like(labels), numbers.new_zeros(n, 2)
    fields = labels, numbers[0], numbers[1], numbers[2], pushed, live, soft
    return RowLabels(*fields, never, none, none, never, values)


def _labels(rows: _Rows, weight: Tensor, claims: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the label that explains each row best, (n,), and whether its cosine suffices."""
    labels = torch.zeros(len(rows.rest), dtype=torch.long, device=weight.device)
    cosines = torch.zeros(len(rows.rest), device=weight.device)
    for claim in claims:
        valid = (claim >= 0) & (claim < len(weight))
        ids = claim.clamp(0, len(weight) - 1)
        of_claim = _cosines(rows, weight, ids).masked_fill(~valid, 0.0)
        labels = torch.where(of_claim > cosines, ids, labels)
        cosines = torch.maximum(cosines, of_claim)
    unverified = (cosines < 1 - TWINS).nonzero()[:, 0]
    if len(unverified):
        part = rows.part(unverified)
        best = _search(part, weight)
        of_best = _cosines(part, weight, best)
        better = of_best > cosines[unverified] + TWINS
        labels[unverified] = torch.where(better, best, labels[unverified])
        cosines[unverified] = torch.maximum(cosines[unverified], of_best)
    return labels, cosines >= MIN_COSINE


def _check_unseen(rows: _Rows, weight: Tensor, claims: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether candidate labels hold that g cannot show, (n,), and their gradients' sizes.

    Either the model is certain of them, or their row of W is 0, such as that of a padding token in
    a tied head. The size is s in ``g = s (W^T q - W_y)``, where q is the softmax over the other
    tokens.
    """
    labels = claims.clamp(0, len(weight) - 1)[:, None]
    q = rows.p.scatter(1, labels, 0.0)
    direction = (q / q.sum(1, keepdim=True).clamp_min(1e-30)).scatter(1, labels, -1.0)
    direction = (direction if rows.slopes is None else direction * rows.slopes) @ weight
    sizes = (rows.gradient * direction).sum(1) / direction.square().sum(1).clamp_min(1e-30)
    rest = torch.linalg.vector_norm(rows.gradient - sizes[:, None] * direction, dim=1)
    explains = rest <= MAX_REST * torch.linalg.vector_norm(rows.gradient, dim=1)
    is_silent = explains & (rows.row_norms[labels[:, 0]] == 0)
    is_certain = (rows.p.gather(1, labels)[:, 0] > CERTAIN) & ~is_silent
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
    part = states[block], gradient[block]

    def rest_of(temperature: float, labels: Tensor | None = None) -> tuple[float, Tensor]:
        rows = _prepare(*part, replace(head, temperature=temperature), weight)
        labels = _search(rows, weight) if labels is None else labels
        return float(_fit_labels(rows, weight, labels)[1].median()), labels

    low, high = map(math.log, TEMPERATURES)
    width = (high - low) / (GRID - 1)
    tried = {low + i * width: rest_of(math.exp(low + i * width)) for i in range(GRID)}
    middle = min(tried, key=lambda one: tried[one][0])
    labels = tried[middle][1]
    while width > ACCURACY:
        width /= 2
        near = (middle - width, middle, middle + width)
        middle = min(near, key=lambda one: rest_of(math.exp(one), labels)[0])
    best = math.exp(middle)
    is_better = rest_of(best)[0] < min(MAX_REST, rest_of(head.temperature)[0] / 2)
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
    read = read_states(rows, gradients, head, claims)
    if float(read.soft.sum()) > MAX_SOFT * float(read.live.sum()):
        fitted = fit_temperature(rows, gradients, head)
        if fitted is not head:
            return read_states(rows, gradients, fitted, claims), fitted
    return read, head
