"""Labels of a step, read from the gradient of its logits.

A cross-entropy has the gradient ``w (softmax - one_hot)`` in a row of logits, whatever computes the
weight w: the label is the only negative entry of its row. A text that a loss pushes away (the
rejected one of DPO) has the only positive one. Label smoothing, focal losses, class and token
weights, a z-loss and masks of any name leave that pattern as it is, so that no field of the user's
batch has to be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lightning_fedleak.model.batches import IGNORE_INDEX

ENTRIES_AT_ONCE = 1 << 18
"""Entries of dL/dlogits that a CPU reads at once: 1 MiB in float32, which stays in its cache.

Larger: several passes over memory; smaller: more calls of torch for a row of few entries.
"""
DEVICE_ENTRIES_AT_ONCE = 1 << 24
"""The same on other devices: 64 MiB in float32 beyond training's memory; each block waits once."""
MAX_RESIDUAL_ENTRIES = 1 << 22
"""Entries of one call that are stored because the shapes of its rows do not reproduce them: 48 MiB.

In bfloat16 that is about one entry in a thousand. Larger: losses of other shapes are reproduced in
larger batches, for more memory; smaller: rounding counts as a change of the gradient.
"""
MAX_OTHERS = 0.2
"""Largest sum of the other entries with a label's sign, in units of the label's own entry.

Above it the label is found by fitting the row's shape (:func:`_fit_others`). Larger: soft
targets of a confident teacher pass for labels; smaller: more rows of smoothed labels need a fit.
"""
MAX_DEVIATION = 0.01
"""Largest squared norm of a fit's residual, over that of the entries beside the label.

Rounding to bfloat16 leaves 1e-5, a wrong label more than 0.1. Larger: soft targets pass for labels;
smaller: rows of logits that are capped after the head are unknown.
"""
MAX_SHIFT = 0.5
"""Largest sum of a row's shifts over the size b of a label that is found by a fit.

Label smoothing by a share s leaves s / (1 - s). Larger: rows whose label has no gradient, since it
is as likely as its target, have another label; smaller: smoothed rows are unknown.
"""
MIN_SIZE = 0.5
"""Least size b of a label that is found by a fit, over the row's largest entry.

A cross-entropy leaves 1, and with a third of label smoothing .67. Larger: smoothed rows are
unknown; smaller: rows of a z-loss alone have a label.
"""
MIN_SUM = 2.0**-6
"""Least sum of a row's other entries over that of their shifts at which the sign of b is known.

A smaller one may be bfloat16's rounding of a row that has only smoothing. Larger: rejected texts of
which the model is certain pass for trained ones; smaller: smoothed rows pass for rejected ones.
"""
CERTAIN_ODDS = 99.0
"""Odds of a candidate label above which its size may be rounding, and does not refute it.

The label's gradient is then below a hundredth of another one's. Larger: certain labels of smoothed
rows are unknown in bfloat16; smaller: more false candidates pass for labels.
"""
MIN_SPREAD = 1e-4
"""Least ``n |q|^2 - 1`` of the softmax q over a row's n other entries; a uniform one has 0.

Below it q and a shift are the same direction, and the shift counts as 0.
"""

Source = Literal["head", "model", "states"]


class RowLabels(NamedTuple):
    """The labels and the shapes of n rows of dL/dlogits, each field (n,) on the logits' device.

    A row is ``-sizes`` at its label and ``others q - shifts`` elsewhere, where q is the softmax
    over the other entries. Every gradient ``a p - b e_y - c 1`` of a cross-entropy with any weight,
    sign, smoothing or z-loss has this form.

    Attributes:
        labels: The label of each row; -100 if it has none, or if it is unknown.
        sizes: Minus the entry at the label; 0 without a label.
        others: The sum of the other entries, with the shifts added back.
        shifts: The number that is subtracted from each of the other entries.
        pushed: Whether the loss makes the label less likely (a rejected text).
        live: Whether the row has an entry other than 0.
        soft: Whether the target is not a single label, as in distillation.
        ambiguous: Whether two labels could have produced this row.
        lowest: The index of the row's lowest entry.
        highest: The index of the row's highest entry.
        one_each: Whether the row has exactly one negative and one positive entry.
        values: (n, 2) the entries at ``lowest`` and at ``highest``.
    """

    labels: Tensor
    sizes: Tensor
    others: Tensor
    shifts: Tensor
    pushed: Tensor
    live: Tensor
    soft: Tensor
    ambiguous: Tensor
    lowest: Tensor
    highest: Tensor
    one_each: Tensor
    values: Tensor

    @property
    def shapes(self) -> Tensor:
        """Return (3, n) sizes, others and shifts, from which :func:`make_rows` computes rows."""
        return torch.stack([self.sizes, self.others, self.shifts])


def _rows_at_once(matrix: Tensor) -> int:
    entries = ENTRIES_AT_ONCE if matrix.device.type == "cpu" else DEVICE_ENTRIES_AT_ONCE
    return max(1, entries // max(1, matrix.shape[1]))


@torch.no_grad()
def read_rows(gradient: Tensor, logits: Tensor, claims: Tensor | None = None) -> RowLabels:
    """Return the label and the shape of each row of dL/dlogits, computed in blocks of rows.

    Args:
        gradient: (n, V) dL/dlogits.
        logits: (n, V) the logits.
        claims: (n,) candidate labels, -100 for none, for rows whose own entries do not determine
            the label.
    """
    step = _rows_at_once(gradient)
    if claims is None:
        claims = torch.full((len(gradient),), IGNORE_INDEX, device=gradient.device)
    blocks = [
        _read_block(gradient[i : i + step].float(), logits[i : i + step], claims[i : i + step])
        for i in range(0, max(1, len(gradient)), step)
    ]
    return RowLabels(*map(torch.cat, zip(*blocks, strict=True)))


def _read_block(gradient: Tensor, logits: Tensor, claims: Tensor) -> RowLabels:
    """Return the labels and shapes of a block of rows.

    The label is the lowest entry if no other one is negative, or if it outweighs the other negative
    entries while the highest does not outweigh the other positive ones. In any other row, the label
    is the one whose shape fits the rest of the row.
    """
    low, lowest = gradient.min(1)
    high, highest = gradient.max(1)
    n_below, n_above = (gradient < 0).count_nonzero(1), (gradient > 0).count_nonzero(1)
    # Sums of the other entries that have the sign of the lowest, or of the highest one.
    others_below = gradient.clamp_max(0).sum(1) - low.clamp_max(0)
    others_above = gradient.clamp_min(0).sum(1) - high.clamp_min(0)
    is_low = others_below.abs() <= MAX_OTHERS * low.abs()
    is_high = others_above.abs() <= MAX_OTHERS * high.abs()
    finite = low.isfinite() & high.isfinite()  # NaN is the lowest and the highest of its row
    live = (n_below > 0) | (n_above > 0) | ~finite
    mixed, one_each = (n_below > 1) & (n_above > 1), (n_below == 1) & (n_above == 1)
    is_lowest = (n_below == 1) & (n_above > 1) | (mixed & is_low & ~is_high)
    labels = lowest.masked_fill(~is_lowest, IGNORE_INDEX)
    shape = _fit_shape(gradient, logits, lowest)[0]
    pushed, ambiguous, soft = torch.zeros(3, len(low), device=low.device).bool()
    rows = (live & finite & ~is_lowest).nonzero()[:, 0]
    if len(rows):
        scores, ends = logits[rows], torch.stack([lowest[rows], highest[rows]])
        labels[rows], shape[:, rows], pushed[rows], fits = _labels_by_shape(
            gradient[rows], scores, claims[rows], *ends
        )
        # Logits that are capped after the head fit no shape. Without smoothing, the label that such
        # a row is pushed from is still its only positive entry.
        p = scores.float().softmax(1).gather(1, ends.T).sum(1)
        is_capped = (n_above[rows] == 1) & (n_below[rows] > 1) & ~fits & (p < 1 - MAX_OTHERS)
        labels[rows] = torch.where(is_capped, highest[rows], labels[rows])
        pushed[rows] |= is_capped
        is_open = labels[rows] == IGNORE_INDEX
        soft[rows] = is_open & mixed[rows] & ~is_low[rows] & ~fits
        ambiguous[rows] = is_open & ~soft[rows]
    ambiguous |= ~finite
    has_label = labels != IGNORE_INDEX
    sizes = -gradient.gather(1, labels.clamp_min(0)[:, None])[:, 0].masked_fill(~has_label, 0.0)
    entries = lowest, highest, one_each, torch.stack([low, high], 1)
    fields = labels, sizes, shape[0], shape[1], pushed, live, soft, ambiguous
    return RowLabels(*fields, *entries)


class _RowFit(NamedTuple):
    """How well a label explains the other entries of each of n rows.

    Attributes:
        shape: (2, n) the sum and the shift of the other entries.
        sizes: (n,) the size b of the label, with its sign.
        explains: (n,) whether the label explains the row.
    """

    shape: Tensor
    sizes: Tensor
    explains: Tensor


def _labels_by_shape(
    gradient: Tensor, logits: Tensor, claims: Tensor, lowest: Tensor, highest: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the only labels that explain the other entries of their rows.

    Returns:
        The labels (n,), -100 if two labels or none fit; the shape (2, n) of the other entries,
        relative to the highest entry for -100; whether the loss makes the label less likely, (n,);
        and whether any label fits, (n,).
    """
    claim = _fit_others(gradient, logits, claims.clamp(0, gradient.shape[1] - 1), is_claim=True)
    low, high = (_fit_others(gradient, logits, entry) for entry in (lowest, highest))
    is_claim = claim.explains & (claims >= 0)
    is_low, is_high = low.explains & ~high.explains, high.explains & ~low.explains
    labels, shape, sizes = torch.full_like(lowest, IGNORE_INDEX), high.shape, high.sizes
    candidates = (is_low, lowest, low), (is_high, highest, high), (is_claim, claims, claim)
    for is_label, entry, fit in candidates:  # a claim that fits is preferred
        labels = torch.where(is_label, entry, labels)
        shape = torch.where(is_label, fit.shape, shape)
        sizes = torch.where(is_label, fit.sizes, sizes)
    has_label = labels != IGNORE_INDEX
    return labels, shape, has_label & (sizes < 0), has_label | low.explains | high.explains


def _fit_shape(gradient: Tensor, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fit the sum and the shift of each row's entries beside its label, by least squares.

    Returns:
        Both as (2, n); the softmax over these entries (n, V), and the entries (n, V). The last two
        are 0 at the label.
    """
    column, n = labels[:, None], gradient.shape[1] - 1
    q = logits.float().scatter(1, column, -torch.inf).softmax(1)
    entries = gradient.scatter(1, column, 0.0)
    sums, products, q_norms = entries.sum(1), torch.linalg.vecdot(entries, q), q.square().sum(1)
    spread = n * q_norms - 1
    shifts = torch.where(spread > MIN_SPREAD, (products - sums * q_norms) / spread, 0.0)
    return torch.stack([sums + n * shifts, shifts]), q, entries


def _fit_others(
    gradient: Tensor, logits: Tensor, labels: Tensor, *, is_claim: bool = False
) -> _RowFit:
    """Return how well a label explains the other entries of each row.

    Rounding hides the size of a label of which the model is certain, so that the fit of a claim
    does not depend on it.
    """
    logits, column, n = logits.float(), labels[:, None], gradient.shape[1] - 1
    shape, q, entries = _fit_shape(gradient, logits, labels)
    others, shifts = shape
    log_sum = logits.scatter(1, column, -torch.inf).logsumexp(1)
    odds = (logits.gather(1, column)[:, 0] - log_sum).clamp_max(80.0).exp()  # p / (1 - p)
    residual = entries - (q * others[:, None] - shifts[:, None]).scatter_(1, column, 0.0)
    # What is missing at the label of the shape that the other entries have.
    sizes = others * odds - shifts - gradient.gather(1, column)[:, 0]
    has_no_sign = others.abs() < MIN_SUM * n * shifts.abs()
    sizes = torch.where(has_no_sign, sizes.abs(), sizes)
    fits = n * shifts.abs() <= MAX_SHIFT * sizes.abs()
    fits &= sizes.abs() >= MIN_SIZE * gradient.abs().amax(1)
    fits |= (odds > CERTAIN_ODDS) & is_claim
    fits &= residual.square().sum(1) <= MAX_DEVIATION * entries.square().sum(1)
    return _RowFit(shape, sizes, fits)


def claims_of(labels: Tensor, width: int, shift: int) -> Tensor:
    """Return (B * width,) the candidate label of each row, -100 for none.

    Args:
        labels: (B, L) labels at the positions of their tokens; virtual tokens, which come first,
            have none.
        width: The number of rows of a text.
        shift: The number of columns between a row and its label.
    """
    length = labels.shape[1]
    labels = functional.pad(labels.long(), (max(0, width - length), shift), value=IGNORE_INDEX)
    return labels[:, shift : shift + width].flatten()


# ---- rows from labels and shapes ---------------------------------------------------------------


def make_rows(logits: Tensor, targets: Tensor, shapes: Tensor, temperature: float | None) -> Tensor:
    """Return the gradient of logits (..., V) whose rows have these labels and shapes.

    Args:
        logits: The logits, with N rows.
        targets: (N,) labels.
        shapes: (3, N), see ``RowLabels.shapes``.
        temperature: The number by which the loss divides the logits. None: the rows are those of a
            plain cross-entropy, weighted by the first of the shapes.
    """
    values = logits.detach().flatten(0, -2)
    rows, step = torch.empty_like(values), _rows_at_once(values)
    for start in range(0, len(rows), step):  # float32 copies of one block at a time
        block = slice(start, start + step)
        labels = targets[block, None].clamp(max=values.shape[1] - 1)  # a single output has class 0
        scores = values[block].float() / (temperature or 1.0)
        sizes, others, shifts = shapes[:, block, None].float()
        if temperature is None:
            at_labels = scores.softmax(1).gather(1, labels)
            sizes, others = sizes * (1 - at_labels), others * (1 - at_labels)
        entries = scores.scatter_(1, labels, -torch.inf).softmax(1).mul_(others).sub_(shifts)
        rows[block] = entries.scatter_(1, labels, -sizes)
    return rows.view(logits.shape)


class _Residual(NamedTuple):
    """The entries of dL/dlogits that labels and shapes of its rows do not reproduce.

    Attributes:
        share: The norm of the residual over the norm of the gradient; NaN if the gradient is zero.
        indices: (k,) these entries' indices in the flattened gradient; None if there are more than
            :data:`MAX_RESIDUAL_ENTRIES`, or if the gradient has no rows.
        values: (k,) the gradient's entries at ``indices``.
    """

    share: float
    indices: Tensor | None = None
    values: Tensor | None = None


@torch.no_grad()
def find_residual(gradient: Tensor, logits: Tensor, rows: RowLabels) -> _Residual:
    """Return the entries of a gradient (n, V) that the shapes of its rows do not reproduce."""
    step, width = _rows_at_once(gradient), gradient.shape[1]
    tolerance = 2e-7 if gradient.dtype.itemsize > 2 else 0.0  # float32 leaves 1e-7
    indices, values = [], []
    n_entries, residual_norm, norm = 0, *gradient.new_zeros(2, dtype=torch.float32)  # squared
    for start in range(0, len(gradient), step):
        block = slice(start, start + step)
        true = gradient[block]
        labels = RowLabels(*(column[block] for column in rows))
        residual = true.float() - rows_of_step(labels, logits[block]).float()
        residual_norm += residual.square().sum()
        norm += true.float().square().sum()
        limits = tolerance * true.abs().amax(1, keepdim=True)
        is_off = (residual.abs() > limits).flatten().nonzero()[:, 0]
        n_entries += len(is_off)
        if n_entries <= MAX_RESIDUAL_ENTRIES:
            indices.append(is_off + start * width)
            values.append(true.flatten()[is_off])
    share = float((residual_norm / norm).sqrt())
    if n_entries > MAX_RESIDUAL_ENTRIES or not indices:
        return _Residual(share)
    return _Residual(share, torch.cat(indices), torch.cat(values))


def rows_of_step(rows: RowLabels, logits: Tensor, residual: _Residual | None = None) -> Tensor:
    """Return the gradient (..., V) of a step from the labels and shapes of its rows."""
    has_label = rows.labels != IGNORE_INDEX
    # The shape of a row without a label is relative to its highest entry.
    targets = torch.where(has_label, rows.labels, rows.highest)
    sizes = torch.where(has_label, rows.sizes, -rows.values[:, 1])
    shapes = torch.stack([sizes, rows.others, rows.shifts])
    gradient = make_rows(logits, targets, shapes, 1.0)
    if residual is not None and residual.indices is not None and residual.values is not None:
        gradient.view(-1).index_copy_(0, residual.indices, residual.values)
    return gradient


@dataclass(eq=False)
class HeadCall:
    """One call of the head, and the labels that the gradient of its logits shows.

    Attributes:
        shape: The shape of the logits without the last dimension.
        n_entries: The last dimension of the logits.
        source: Where the rows were read: at the head's output (``"head"``), at logits that the
            model scaled or capped after it (``"model"``), or at the last hidden states
            (``"states"``).
        temperature: The number by which the loss divides the logits; it is fitted only for
            ``"states"``, and 1 otherwise.
        rows: The labels and shapes of the rows; None until the backward.
        residual: The entries of the gradient that these shapes do not reproduce.
        gradient: The gradient itself, for a classifier: its loss may be any function of its few
            logits.
    """

    shape: torch.Size
    n_entries: int
    source: Source = "head"
    temperature: float = 1.0
    rows: RowLabels | None = None
    residual: _Residual | None = None
    gradient: Tensor | None = None

    def gradient_of(self, logits: Tensor) -> Tensor:
        """Return the gradient that these logits had in the step."""
        assert self.rows is not None
        if self.gradient is not None:
            return self.gradient
        scores = logits.detach() if self.source != "states" else logits.detach() / self.temperature
        return rows_of_step(self.rows, scores, self.residual)
