"""Labels of a step off the gradient of its logits.

A cross-entropy has the gradient ``w (softmax - one_hot)`` in a row of logits, whatever computes the
weight w: the label is the only negative entry of its row. A text that a loss pushes away (the
rejected one of DPO) has the only positive one. Label smoothing, focal losses, class and token
weights, a z-loss and masks of any name leave that pattern as it is, so that no field of the user's
batch has to be read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fedleak.model.batches import IGNORE_INDEX

ENTRIES_AT_ONCE = 1 << 24
"""Entries of dL/dlogits that are read at once: 64 MiB in float32, one block above training."""
MAX_OTHERS = 0.2
"""Largest sum of the other entries with a label's sign, in units of the label's own entry.

Label smoothing of .1 leaves at most .13 until a label's probability is .9. Larger: soft targets of
a confident teacher pass for labels; smaller: smoothed rows of a trained model are unknown.
"""
MAX_DEVIATION = 0.01
"""Largest squared deviation of a row from the multiple of its softmax that a pushed label leaves.

It is relative to the row; rounding to bfloat16 gives 1e-5, label smoothing past its target above
0.1. Larger: such rows pass for texts that are pushed away.
"""
MIN_SPREAD = 1e-4
"""Least variance of a row's softmax, over that of a uniform one, that shows a shift beside it.

Below it both are one direction, and any division between them makes the row again.
"""


class RowLabels(NamedTuple):
    """What rows of dL/dlogits show, each field (n,) on the logits' device.

    A row is ``-sizes`` at its label and ``others q - shifts`` elsewhere, with q the softmax over
    the other entries: so are ``a p - b e_y - c 1`` of a cross-entropy with any weight, sign,
    smoothing or z-loss.

    Attributes:
        labels: label of each row, -100 where it has none or it is not known.
        sizes: minus the entry at the label; 0 where there is no label.
        others: sum of the other entries without their shift.
        shifts: what is subtracted from each of the other entries.
        pushed: whether the text is pushed away.
        live: whether the row has a gradient at all.
        soft: whether the row has a target that is no label, as in distillation.
        unsure: whether two labels could have left this row.
        lowest: index of the row's lowest entry.
        highest: index of the row's highest entry.
        one_each: whether the row has one negative and one positive entry alone.
        values: the entry at ``lowest`` and at ``highest``, (n, 2).
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
        """Return (3, n) sizes, others and shifts, from which rows are made again."""
        return torch.stack([self.sizes, self.others, self.shifts])


@torch.no_grad()
def read_rows(gradient: Tensor, logits: Tensor) -> RowLabels:
    """Return which label each row of dL/dlogits (n, V) belongs to, in blocks of rows."""
    step = max(1, ENTRIES_AT_ONCE // max(1, gradient.shape[1]))
    blocks = [
        _read_block(gradient[i : i + step].float(), logits[i : i + step])
        for i in range(0, max(1, len(gradient)), step)
    ]
    return RowLabels(*map(torch.cat, zip(*blocks, strict=True)))


def _read_block(gradient: Tensor, logits: Tensor) -> RowLabels:
    low, lowest = gradient.min(1)
    high, highest = gradient.max(1)
    n_below, n_above = (gradient < 0).sum(1), (gradient > 0).sum(1)
    # Sums of the other entries that have the sign of the lowest, or of the highest one.
    others_below = gradient.clamp_max(0).sum(1) - low.clamp_max(0)
    others_above = gradient.clamp_min(0).sum(1) - high.clamp_min(0)
    is_low = others_below.abs() <= MAX_OTHERS * low.abs()
    is_high = others_above.abs() <= MAX_OTHERS * high.abs()
    finite = gradient.isfinite().all(1)
    live = (n_below > 0) | (n_above > 0) | ~finite
    learned = (n_below == 1) & (n_above > 1)
    one_high = (n_above == 1) & (n_below > 1)
    pushed = torch.zeros_like(live)
    if bool(one_high.any()):
        rows = one_high.nonzero()[:, 0]
        pushed[rows] = _is_pushed(
            gradient[rows], logits[rows].float().softmax(1), lowest[rows], highest[rows]
        )
    mixed = (n_below > 1) & (n_above > 1)
    learned |= mixed & is_low & ~is_high
    one_each = (n_below == 1) & (n_above == 1)
    unsure = one_each | (one_high & ~pushed) | (mixed & is_low & is_high)
    unsure |= ~finite
    ignored = torch.full_like(lowest, IGNORE_INDEX)
    labels = torch.where(learned, lowest, torch.where(pushed, highest, ignored))
    sizes = torch.where(learned, -low, torch.where(pushed, -high, torch.zeros_like(low)))
    soft = mixed & ~is_low
    shape = _shape(gradient, logits, torch.where(learned, lowest, highest))
    entries = lowest, highest, one_each, torch.stack([low, high], 1)
    fields = labels, sizes, shape[0], shape[1], pushed, live, soft, unsure
    return RowLabels(*fields, *entries)


def _shape(gradient: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Return sum and shift of each row's entries beside its label, by least squares, (2, n)."""
    q = logits.float().scatter(1, labels[:, None], -torch.inf).softmax(1)
    rest, n = gradient.scatter(1, labels[:, None], 0.0), gradient.shape[1] - 1
    sums, at_q, q_norms = rest.sum(1), torch.linalg.vecdot(rest, q), q.square().sum(1)
    spread = n * q_norms - 1
    shifts = torch.where(spread > MIN_SPREAD, (at_q - sums * q_norms) / spread, 0.0)
    return torch.stack([sums + n * shifts, shifts])


def _is_pushed(gradient: Tensor, p: Tensor, lowest: Tensor, highest: Tensor) -> Tensor:
    """Return whether rows with one positive entry are of a text that is pushed away, (n,) bool.

    The others are then a multiple of the softmax, unless logits are capped behind the head. Label
    smoothing leaves such a row too, where the label and one other token have all the probability.
    """
    both = p.gather(1, torch.stack([lowest, highest], 1)).sum(1)
    p = p.scatter(1, highest[:, None], 0.0)
    others = gradient.scatter(1, highest[:, None], 0.0)
    factor = (others * p).sum(1) / (p * p).sum(1)
    rest = (others - factor[:, None] * p).square().sum(1)
    return (rest <= MAX_DEVIATION * others.square().sum(1)) | (both < 1 - MAX_OTHERS)
