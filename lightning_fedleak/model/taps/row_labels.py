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
"""The same on other devices: 64 MiB in float32, one block above training; each call is a wait."""
MAX_RESIDUAL_ENTRIES = 1 << 22
"""Entries of a call's rows that are kept as they were: 48 MiB, a thousandth of a large call's.

Rounding to bfloat16 changes a thousandth. Larger: losses of any shape are made again in larger
batches, for more memory; smaller: rounding passes for a change of the gradient.
"""
MAX_OTHERS = 0.2
"""Largest sum of the other entries with a label's sign, in units of the label's own entry.

The label of a row above it is found by fitting the row's shape (:func:`_fit_beside`). Larger: soft
targets of a confident teacher pass for labels; smaller: more rows of smoothed labels need a fit.
"""
MAX_DEVIATION = 0.01
"""Largest squared deviation of the entries beside a label from a softmax with a shift.

It is relative to these entries; rounding to bfloat16 gives 1e-5, the row of another label above
0.1. Larger: soft targets pass for labels; smaller: rows with a cap behind the head are unknown.
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
"""Sum of a row's entries over the sum of their shifts, below which it may be bfloat16's rounding.

Larger: certain texts that are pushed away have no sign; smaller: the sign of smoothed rows is lost.
"""
CERTAIN = 99.0
"""Odds of a given label above which its size may be rounding, and does not refute it.

The label's gradient is then below a hundredth of another one's. Larger: certain labels of smoothed
rows are unknown in bfloat16; smaller: more false labels are believed where their row fits.
"""
MIN_SPREAD = 1e-4
"""Least variance of a row's softmax, over that of a uniform one, that shows a shift beside it.

Below it both are one direction, and any division between them makes the row again.
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
        unsure: Whether two labels could have produced this row.
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
    unsure: Tensor
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
    learned = (n_below == 1) & (n_above > 1) | (mixed & is_low & ~is_high)
    labels = lowest.masked_fill(~learned, IGNORE_INDEX)
    shape, _, _ = _fit_beside(gradient, logits, lowest)
    pushed, unsure, soft = torch.zeros(3, len(low), device=low.device).bool()
    rows = (live & finite & ~learned).nonzero()[:, 0]
    if len(rows):
        part, ends = (gradient[rows], logits[rows]), torch.stack([lowest, highest])[:, rows]
        labels[rows], shape[:, rows], pushed[rows], fits = _labels_by_shape(
            *part, claims[rows], *ends
        )
        # With a cap behind the head nothing fits; but for smoothing the sign tells such a row.
        p = part[1].float().softmax(1).gather(1, ends.T).sum(1)
        is_capped = (n_above[rows] == 1) & (n_below[rows] > 1) & ~fits & (p < 1 - MAX_OTHERS)
        labels[rows] = torch.where(is_capped, ends[1], labels[rows])
        pushed[rows] |= is_capped
        is_open = labels[rows] == IGNORE_INDEX
        soft[rows] = is_open & mixed[rows] & ~is_low[rows] & ~fits
        unsure[rows] = is_open & ~soft[rows]
    unsure |= ~finite
    has_label = labels != IGNORE_INDEX
    sizes = -gradient.gather(1, labels.clamp_min(0)[:, None])[:, 0].masked_fill(~has_label, 0.0)
    entries = lowest, highest, one_each, torch.stack([low, high], 1)
    fields = labels, sizes, shape[0], shape[1], pushed, live, soft, unsure
    return RowLabels(*fields, *entries)


def _labels_by_shape(
    gradient: Tensor, logits: Tensor, claims: Tensor, lowest: Tensor, highest: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the only labels that explain the other entries of their rows.

    Returns:
        The labels (n,), -100 if two labels or none fit; the sum and the shift of the other entries
        (2, n), which are those beside the highest entry for -100; whether the loss makes the label
        less likely, (n,); and whether any label fits, (n,).
    """
    of_claim = _fit_beside(gradient, logits, claims.clamp(0, gradient.shape[1] - 1), is_claim=True)
    of_low, of_high = (_fit_beside(gradient, logits, entry) for entry in (lowest, highest))
    is_claim = of_claim[2] & (claims >= 0)
    is_low, is_high = of_low[2] & ~of_high[2] & ~is_claim, of_high[2] & ~of_low[2] & ~is_claim
    labels, shape, size = torch.full_like(lowest, IGNORE_INDEX), of_high[0], of_high[1]
    candidates = (is_claim, claims, of_claim), (is_low, lowest, of_low), (is_high, highest, of_high)
    for is_label, entry, (of_entry, its_size, _) in candidates:
        labels = torch.where(is_label, entry, labels)
        shape, size = torch.where(is_label, of_entry, shape), torch.where(is_label, its_size, size)
    has_label = labels != IGNORE_INDEX
    return labels, shape, has_label & (size < 0), has_label | of_low[2] | of_high[2]


def _fit_beside(
    gradient: Tensor, logits: Tensor, labels: Tensor, *, is_claim: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit the entries beside a label of each row by least squares.

    The size of a label that the model is certain of is lost in rounding, so a mismatch there does
    not refute a claim.

    Returns:
        The sum and the shift of these entries, (2, n); the size b of the label, with its sign,
        (n,); and whether the label explains the row, (n,).
    """
    logits, column = logits.float(), labels[:, None]
    q = logits.scatter(1, column, -torch.inf)
    odds = (logits.gather(1, column)[:, 0] - q.logsumexp(1)).clamp_max(80.0).exp()  # p / (1 - p)
    q = q.softmax(1)
    rest, n = gradient.scatter(1, column, 0.0), gradient.shape[1] - 1
    sums, at_q, q_norms = rest.sum(1), torch.linalg.vecdot(rest, q), q.square().sum(1)
    spread = n * q_norms - 1
    shifts = torch.where(spread > MIN_SPREAD, (at_q - sums * q_norms) / spread, 0.0)
    others, norms = sums + n * shifts, rest.square().sum(1)
    residual = rest - (q * others[:, None] - shifts[:, None]).scatter_(1, column, 0.0)
    sizes = others * odds - shifts - gradient.gather(1, column)[:, 0]
    is_shift = others.abs() < MIN_SUM * n * shifts.abs()  # smoothing alone leaves such a row
    sizes = torch.where(is_shift, sizes.abs(), sizes)
    fits = n * shifts.abs() <= MAX_SHIFT * sizes.abs()
    fits &= sizes.abs() >= MIN_SIZE * gradient.abs().amax(1)
    fits |= (odds > CERTAIN) & is_claim
    fits &= residual.square().sum(1) <= MAX_DEVIATION * norms
    return torch.stack([others, shifts]), sizes, fits


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
        logits: The logits, whose rows are the N rows.
        targets: (N,) labels.
        shapes: (3, N), see ``RowLabels.shapes``.
        temperature: The number by which the loss divides the logits. None: the rows are those of a
            plain cross-entropy, weighted by the first of the shapes.
    """
    values = logits.detach().flatten(0, -2)
    rows, step = torch.empty_like(values), _rows_at_once(values)
    for start in range(0, len(rows), step):  # float32 copies of one part at a time
        part = slice(start, start + step)
        labels = targets[part, None].clamp(max=values.shape[1] - 1)  # one output: no other class
        scores = values[part].float() / (temperature or 1.0)
        sizes, others, shifts = shapes[:, part, None].float()
        if temperature is None:
            at_labels = scores.softmax(1).gather(1, labels)
            sizes, others = sizes * (1 - at_labels), others * (1 - at_labels)
        part_rows = scores.scatter_(1, labels, -torch.inf).softmax(1).mul_(others).sub_(shifts)
        rows[part] = part_rows.scatter_(1, labels, -sizes)
    return rows.view(logits.shape)


class _RowRest(NamedTuple):
    """The entries of dL/dlogits that labels and shapes of its rows do not reproduce.

    Attributes:
        share: The norm of the residual over the norm of the gradient; NaN if the gradient is zero.
        places: (k,) indices of these entries in the flattened gradient; None if there are more than
            :data:`MAX_RESIDUAL_ENTRIES`, or if the gradient has no rows.
        values: (k,) the gradient's entries at ``places``.
    """

    share: float
    places: Tensor | None = None
    values: Tensor | None = None


@torch.no_grad()
def find_rest(gradient: Tensor, logits: Tensor, rows: RowLabels) -> _RowRest:
    """Return the entries of a gradient (n, V) that the shapes of its rows do not reproduce."""
    step, width = _rows_at_once(gradient), gradient.shape[1]
    tolerance = 2e-7 if gradient.dtype.itemsize > 2 else 0.0  # float32 leaves 1e-7
    places, values = [], []
    n_entries, rest, whole = 0, *gradient.new_zeros(2, dtype=torch.float32)
    for start in range(0, len(gradient), step):
        part = slice(start, start + step)
        block = RowLabels(*(column[part] for column in rows))
        true = gradient[part]
        residual = true.float() - rows_of_step(block, logits[part]).float()
        rest += residual.square().sum()
        whole += true.float().square().sum()
        limits = tolerance * true.abs().amax(1, keepdim=True)
        places_of_block = (residual.abs() > limits).flatten().nonzero()[:, 0]
        n_entries += len(places_of_block)
        if n_entries <= MAX_RESIDUAL_ENTRIES:
            places.append(places_of_block + start * width)
            values.append(true.flatten()[places_of_block])
    share = float((rest / whole).sqrt())
    if n_entries > MAX_RESIDUAL_ENTRIES or not places:
        return _RowRest(share)
    return _RowRest(share, torch.cat(places), torch.cat(values))


def rows_of_step(rows: RowLabels, logits: Tensor, rest: _RowRest | None = None) -> Tensor:
    """Return the gradient (..., V) of a step from the labels and shapes of its rows."""
    has_label = rows.labels != IGNORE_INDEX
    targets = torch.where(has_label, rows.labels, rows.highest)  # beside which its shape was read
    sizes = torch.where(has_label, rows.sizes, -rows.values[:, 1])
    shapes = torch.stack([sizes, rows.others, rows.shifts])
    gradient = make_rows(logits, targets, shapes, 1.0)
    if rest is not None and rest.places is not None and rest.values is not None:
        gradient.view(-1).index_copy_(0, rest.places, rest.values)
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
        rest: The entries of the gradient that these shapes do not reproduce.
        gradient: The gradient itself, for a classifier: its loss may be any function of its few
            logits.
    """

    shape: torch.Size
    n_entries: int
    source: Source = "head"
    temperature: float = 1.0
    rows: RowLabels | None = None
    rest: _RowRest | None = None
    gradient: Tensor | None = None

    def gradient_of(self, logits: Tensor) -> Tensor:
        """Return the gradient that these logits had in the step."""
        assert self.rows is not None
        if self.gradient is not None:
            return self.gradient
        scores = logits.detach() if self.source != "states" else logits.detach() / self.temperature
        return rows_of_step(self.rows, scores, self.rest)
