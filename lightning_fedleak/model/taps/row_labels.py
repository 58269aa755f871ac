"""Labels of a step, read from the gradient of its logits.

A row of logits holds the V scores for one predicted token. The gradient of a cross-entropy in this
row is ``w (softmax - one_hot)``, whatever computes the weight w, so the label is the only negative
entry of the row. If a loss makes a text less likely (the rejected text of DPO), w is negative, and
the label is the only positive entry. Focal losses, class weights, token weights and masks only
change w. So the labels of a step are known without reading any field of the user's batch.

Label smoothing and a z-loss add further terms, so that other entries can have the label's sign.
:func:`read_rows` then fits the shape of the row to find its label. :func:`make_rows` computes a row
of the same shape for another label, as a control with shuffled tokens needs it.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lightning_fedleak.model.batches import IGNORE_INDEX

# Entries of dL/dlogits that are processed at once on a CPU: 1 MiB in float32, for its cache.
#
# If larger, each operation passes over memory again; if smaller, short rows take more calls of
# torch.
ENTRIES_AT_ONCE = 1 << 18
# The same on other devices: 64 MiB in float32, more than training alone needs.
#
# Each block makes the host wait for the device once, so blocks are larger than on a CPU.
DEVICE_ENTRIES_AT_ONCE = 1 << 24
# Largest number of entries of dL/dlogits that are stored per call of the head, in 48 MiB.
#
# Stored are the entries that the shapes of the rows do not reproduce; in bfloat16 about one in a
# thousand. If larger, losses of other shapes are reproduced for larger batches, with more memory.
# If smaller, the rounding of bfloat16 is not stored for large batches, and counts as a change of
# the gradient.
MAX_RESIDUAL_ENTRIES = 1 << 22
# Number of entries of dL/dlogits in float32, of one call, up to which each is stored as it was.
#
# It takes 32 MiB for 4 texts of 256 tokens and 32,000 types. If larger, larger steps are repeated
# bit by bit, with more memory, above all where gradients are accumulated. If smaller, rounding is
# added to the controls of more steps, and each pays for one more gradient and attack.
MAX_EXACT_ENTRIES = 1 << 25
# Largest sum of the other entries with a label's sign, in units of the label's own entry.
#
# Above it the label is found by fitting the row's shape (:func:`_fit_others`). If larger, soft
# targets of a confident teacher pass for labels; if smaller, more rows of smoothed labels need a
# fit.
MAX_OTHERS = 0.2
# Largest squared norm of a fit's residual, over that of all entries except the label's.
#
# Rounding to bfloat16 leaves 1e-5, a wrong label more than 0.1. If larger, soft targets pass for
# labels; if smaller, no label is found in rows of logits that are capped after the head.
MAX_DEVIATION = 0.01
# Largest sum of a row's shifts over the size b of its label, if a fit found the label.
#
# The shift is the number that smoothing subtracts from each entry (:class:`RowLabels`). Smoothing
# by a share s has the ratio s / (1 - s). If larger, a label that is exactly as likely as its
# smoothed target, and so has no gradient, is mistaken for another token; if smaller, smoothed rows
# have no label.
MAX_SHIFT = 0.5
# Smallest size b of a label, over the row's largest entry, if a fit found the label.
#
# A cross-entropy has 1, and with label smoothing of 1/3 it has .67. If larger, smoothed rows have
# no label; if smaller, rows that only a z-loss reaches have one.
MIN_SIZE = 0.5
# Smallest sum of a row's other entries, over the sum of their shifts, that shows the sign of b.
#
# A smaller sum may be the rounding of bfloat16 in a row whose gradient is only that of smoothing.
# If larger, rejected texts of which the model is certain pass for preferred texts; if smaller,
# smoothed rows pass for rejected ones.
MIN_SUM = 2.0**-6
# Odds p / (1 - p) of a candidate label above which a small size b does not exclude it.
#
# Its gradient is then below a hundredth of that of an unlikely label, and may be rounding. If
# larger, certain labels of smoothed rows are not found in bfloat16; if smaller, more false
# candidates pass.
CERTAIN_ODDS = 99.0
# Smallest ``n |q|^2 - 1`` at which a shift is fitted; q is the softmax over n other entries.
#
# A uniform q has 0. It has the same direction as a shift of all entries, so the shift is set to 0.
MIN_SPREAD = 1e-4
# Smallest sum of a row's shifts, over the sum of its other entries, that is not taken for rounding.
#
# Rounding of float32 leaves up to 1.1e-4 on rows of 32,000 entries of a trained model. If larger,
# label smoothing of a smaller share is not reproduced by a row's shape; if smaller, fewer of the
# shapes reproduce a plain cross-entropy to its last bits.
MIN_SHIFT = 5e-4

# The place where the rows of a step were read, see ``HeadCall.source``.
Source = Literal["head", "model", "states"]


class RowLabels(NamedTuple):
    """The labels and the shapes of n rows of dL/dlogits, each field (n,) on the logits' device.

    A row is ``-sizes`` at its label and ``other_sums q - shifts`` elsewhere, where q is the softmax
    over the other entries. With any weight, sign, smoothing or z-loss, the gradient of a
    cross-entropy is ``a p - b e_y - c 1``, with the softmax p, the one-hot vector e_y of the label
    y, and numbers a, b, c. Every such row has this shape: three numbers per row, ``sizes``,
    ``other_sums`` and ``shifts`` (which is c).

    Attributes:
        labels: The label of each row; -100 if it has none, or if it is unknown.
        sizes: Minus the entry at the label; 0 without a label.
        other_sums: The sum of the other entries, with the shifts added back.
        shifts: The number that is subtracted from each of the other entries.
        is_rejected: Whether the loss makes the label less likely, as in DPO's rejected texts.
        has_gradient: Whether any entry of the row is not 0.
        is_soft: Whether the target is not a single label, as in distillation.
        is_ambiguous: Whether two labels could have produced this row.
        lowest: The index of the row's lowest entry.
        highest: The index of the row's highest entry.
        has_two_entries: Whether the row has exactly one negative and one positive entry, so that
            either can be the label.
        values: (n, 2) the entries at ``lowest`` and at ``highest``.
    """

    labels: Tensor
    sizes: Tensor
    other_sums: Tensor
    shifts: Tensor
    is_rejected: Tensor
    has_gradient: Tensor
    is_soft: Tensor
    is_ambiguous: Tensor
    lowest: Tensor
    highest: Tensor
    has_two_entries: Tensor
    values: Tensor

    @property
    def shapes(self) -> Tensor:
        """Return (3, n) ``sizes``, ``other_sums`` and ``shifts``, for :func:`make_rows`."""
        return torch.stack([self.sizes, self.other_sums, self.shifts])


def _rows_at_once(matrix: Tensor) -> int:
    """Return the number of rows of a matrix (n, V) that are processed at once."""
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

    The label is the lowest entry if it is the only negative one and several are positive, or if it
    outweighs the other negative entries while the highest entry does not outweigh the other
    positive ones. In any other row, the label is the entry (or the candidate) whose shape fits the
    other entries of the row.
    """
    low, lowest = gradient.min(1)
    high, highest = gradient.max(1)
    n_below, n_above = (gradient < 0).count_nonzero(1), (gradient > 0).count_nonzero(1)
    # Sums of the other entries that have the sign of the lowest, or of the highest one.
    others_below = gradient.clamp_max(0).sum(1) - low.clamp_max(0)
    others_above = gradient.clamp_min(0).sum(1) - high.clamp_min(0)
    is_low = others_below.abs() <= MAX_OTHERS * low.abs()
    is_high = others_above.abs() <= MAX_OTHERS * high.abs()
    is_finite = low.isfinite() & high.isfinite()  # a NaN is min and max of its row
    has_gradient = (n_below > 0) | (n_above > 0) | ~is_finite
    is_mixed, has_two_entries = (n_below > 1) & (n_above > 1), (n_below == 1) & (n_above == 1)
    is_lowest = (n_below == 1) & (n_above > 1) | (is_mixed & is_low & ~is_high)
    labels = lowest.masked_fill(~is_lowest, IGNORE_INDEX)
    shape = _fit_shape(gradient, logits, lowest)[0]
    is_rejected, is_ambiguous, is_soft = torch.zeros(3, len(low), device=low.device).bool()
    rows = (has_gradient & is_finite & ~is_lowest).nonzero()[:, 0]
    if len(rows):
        scores, ends = logits[rows], torch.stack([lowest[rows], highest[rows]])
        labels[rows], shape[:, rows], is_rejected[rows], fits = _labels_by_shape(
            gradient[rows], scores, claims[rows], *ends
        )
        # Logits that are capped after the head fit no shape. Without smoothing, the label of a
        # rejected text is still the only positive entry of its row.
        two_probs = scores.float().softmax(1).gather(1, ends.T).sum(1)
        is_capped = (
            (n_above[rows] == 1) & (n_below[rows] > 1) & ~fits & (two_probs < 1 - MAX_OTHERS)
        )
        labels[rows] = torch.where(is_capped, highest[rows], labels[rows])
        is_rejected[rows] |= is_capped
        is_open = labels[rows] == IGNORE_INDEX
        is_soft[rows] = is_open & is_mixed[rows] & ~is_low[rows] & ~fits
        is_ambiguous[rows] = is_open & ~is_soft[rows]
    is_ambiguous |= ~is_finite
    has_label = labels != IGNORE_INDEX
    sizes = -gradient.gather(1, labels.clamp_min(0)[:, None])[:, 0].masked_fill(~has_label, 0.0)
    entries = lowest, highest, has_two_entries, torch.stack([low, high], 1)
    fields = labels, sizes, shape[0], shape[1], is_rejected, has_gradient, is_soft, is_ambiguous
    return RowLabels(*fields, *entries)


class _RowFit(NamedTuple):
    """How well a label explains the other entries of each of n rows.

    Attributes:
        shape: (2, n) the sum of the other entries with the shifts added back, and the shift.
        sizes: (n,) the size b of the label, negative for a label that the loss makes less likely.
        explains: (n,) whether the label explains the row.
    """

    shape: Tensor
    sizes: Tensor
    explains: Tensor


def _labels_by_shape(
    gradient: Tensor, logits: Tensor, claims: Tensor, lowest: Tensor, highest: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the label of each row that explains the row's other entries.

    Tried are the lowest entry, the highest entry, and the candidate (``claims``).

    Returns:
        The labels (n,), -100 if no label fits, or if both the lowest and the highest entry do and
        the candidate does not; the shape (2, n) of the other entries, for -100 that without the
        highest entry; whether the loss makes the label less likely, (n,); and whether the lowest
        entry, the highest entry or the candidate fits, (n,).
    """
    claim = _fit_others(gradient, logits, claims.clamp(0, gradient.shape[1] - 1), is_claim=True)
    low, high = (_fit_others(gradient, logits, entry) for entry in (lowest, highest))
    is_claim = claim.explains & (claims >= 0)
    is_low, is_high = low.explains & ~high.explains, high.explains & ~low.explains
    labels, shape, sizes = torch.full_like(lowest, IGNORE_INDEX), high.shape, high.sizes
    candidates = (is_low, lowest, low), (is_high, highest, high), (is_claim, claims, claim)
    for is_label, entry, fit in candidates:  # a fitting candidate overrides both
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
    # The normal equations of ``entries = s q - c`` for the sum s and the shift c.
    spread = n * q_norms - 1
    shifts = (products - sums * q_norms) / spread
    has_shift = (spread > MIN_SPREAD) & (n * shifts.abs() > MIN_SHIFT * sums.abs())
    shifts = torch.where(has_shift, shifts, 0.0)
    without = torch.where(q_norms > 0, products / q_norms, sums)
    return torch.stack([torch.where(has_shift, sums + n * shifts, without), shifts]), q, entries


def _fit_others(
    gradient: Tensor, logits: Tensor, labels: Tensor, *, is_claim: bool = False
) -> _RowFit:
    """Return how well a label explains the other entries of each row.

    A label explains its row if the residual of the fitted shape is small and the label's size is
    large enough. If the model is certain of a label, rounding hides its size; then the residual
    alone decides for a candidate (``is_claim``).
    """
    logits, column, n = logits.float(), labels[:, None], gradient.shape[1] - 1
    shape, q, entries = _fit_shape(gradient, logits, labels)
    other_sums, shifts = shape
    log_sum = logits.scatter(1, column, -torch.inf).logsumexp(1)
    odds = (logits.gather(1, column)[:, 0] - log_sum).clamp_max(80.0).exp()  # p / (1 - p)
    residual = entries - (q * other_sums[:, None] - shifts[:, None]).scatter_(1, column, 0.0)
    # The size b is what the shape of the other entries predicts at the label, minus the gradient
    # there.
    sizes = other_sums * odds - shifts - gradient.gather(1, column)[:, 0]
    has_no_sign = other_sums.abs() < MIN_SUM * n * shifts.abs()
    sizes = torch.where(has_no_sign, sizes.abs(), sizes)
    fits = n * shifts.abs() <= MAX_SHIFT * sizes.abs()
    fits &= sizes.abs() >= MIN_SIZE * gradient.abs().amax(1)
    fits |= (odds > CERTAIN_ODDS) & is_claim
    fits &= residual.square().sum(1) <= MAX_DEVIATION * entries.square().sum(1)
    return _RowFit(shape, sizes, fits)


def claims_of(labels: Tensor, width: int, shift: int) -> Tensor:
    """Return (B * width,) the candidate label of each row of logits, -100 for none.

    Args:
        labels: (B, L) labels at the positions of their tokens; virtual tokens, which come first,
            have none.
        width: The number of rows of a text, with those of virtual tokens (prompt tuning).
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
        sizes, other_sums, shifts = shapes[:, block, None].float()
        if temperature is None:
            at_labels = scores.softmax(1).gather(1, labels)
            sizes, other_sums = sizes * (1 - at_labels), other_sums * (1 - at_labels)
        entries = scores.scatter_(1, labels, -torch.inf).softmax(1).mul_(other_sums).sub_(shifts)
        rows[block] = entries.scatter_(1, labels, -sizes)
    return rows.view(logits.shape)


class _Residual(NamedTuple):
    """The entries of dL/dlogits that the labels and shapes of its rows do not reproduce.

    Attributes:
        share: The norm of the residual over the norm of the gradient; NaN if the gradient is zero.
        indices: (k,) these entries' indices in the flattened gradient; None if there are more than
            :data:`MAX_RESIDUAL_ENTRIES`, or if the gradient has no rows.
        values: (k,) the gradient's entries at ``indices``.
        ulps: (n, V) int8, by how many representable numbers each other entry of a float32 gradient
            differs, so that a repeated step has the same bits; None in other types, and of more
            than :data:`MAX_EXACT_ENTRIES`.
    """

    share: float
    indices: Tensor | None = None
    values: Tensor | None = None
    ulps: Tensor | None = None


@torch.no_grad()
def find_residual(gradient: Tensor, logits: Tensor, rows: RowLabels) -> _Residual:
    """Return the entries of a gradient (n, V) that the shapes of its rows do not reproduce."""
    at_once, width = _rows_at_once(gradient), gradient.shape[1]
    is_exact = gradient.dtype is torch.float32 and gradient.numel() <= MAX_EXACT_ENTRIES
    ulps = torch.empty_like(gradient, dtype=torch.int8) if is_exact else None
    # Where not all entries may be stored, those within the rounding of float32 are not.
    is_large = gradient.dtype.itemsize > 2 and gradient.numel() > MAX_RESIDUAL_ENTRIES
    tolerance = 2e-7 if is_large else 0.0
    indices, values, n_entries = [], [], 0
    residual_norm, gradient_norm = gradient.new_zeros(2, dtype=torch.float32)  # squared
    for start in range(0, len(gradient), at_once):
        block = slice(start, start + at_once)
        true_rows = gradient[block]
        row_labels = RowLabels(*(column[block] for column in rows))
        made_rows = rows_of_step(row_labels, logits[block])
        residual = true_rows.float() - made_rows.float()
        residual_norm += residual.square().sum()
        gradient_norm += true_rows.float().square().sum()
        is_off = residual.abs() >= tolerance * true_rows.abs().amax(1, keepdim=True)
        is_off &= true_rows != made_rows
        if ulps is not None:
            difference = true_rows.view(torch.int32) - made_rows.view(torch.int32)
            is_far = (difference < -127) | (difference > 127)
            ulps[block] = difference.masked_fill_(is_far, 0)
            is_off &= is_far
        off = is_off.flatten().nonzero()[:, 0]
        n_entries += len(off)
        if n_entries <= MAX_RESIDUAL_ENTRIES:
            indices.append(off + start * width)
            values.append(true_rows.flatten()[off])
    share = float((residual_norm / gradient_norm).sqrt())
    if n_entries > MAX_RESIDUAL_ENTRIES or not indices:
        return _Residual(share)
    return _Residual(share, torch.cat(indices), torch.cat(values), ulps)


def rows_of_step(rows: RowLabels, logits: Tensor, residual: _Residual | None = None) -> Tensor:
    """Return the gradient (..., V) of a step from the labels and shapes of its rows."""
    has_label = rows.labels != IGNORE_INDEX
    # The shape of a row without a label is relative to its highest entry.
    targets = torch.where(has_label, rows.labels, rows.highest)
    sizes = torch.where(has_label, rows.sizes, -rows.values[:, 1])
    shapes = torch.stack([sizes, rows.other_sums, rows.shifts])
    gradient = make_rows(logits, targets, shapes, 1.0)
    if residual is not None and residual.ulps is not None:
        gradient.view(torch.int32).add_(residual.ulps.view(gradient.shape))
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
        backward: The id of the backward pass that gave the rows.
    """

    shape: torch.Size
    n_entries: int
    source: Source = "head"
    temperature: float = 1.0
    rows: RowLabels | None = None
    residual: _Residual | None = None
    gradient: Tensor | None = None
    backward: int = -1

    def gradient_of(self, logits: Tensor) -> Tensor:
        """Return the gradient that these logits had in the step."""
        assert self.rows is not None
        if self.gradient is not None:
            return self.gradient
        scores = logits.detach() if self.source != "states" else logits.detach() / self.temperature
        return rows_of_step(self.rows, scores, self.residual)
