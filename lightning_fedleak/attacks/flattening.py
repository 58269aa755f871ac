"""The steps of FLATCHAT that need no model: row sums, clusters, ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.attacks.mixture import Mixture, fit_two_gaussians
from lightning_fedleak.snapshots import whole_tensor

Scorer = Literal["gmm", "abs"]

TAILS = (0.01, 0.03, 0.1, 0.003, 0.25)
REGULARIZATION = 1e-6
_ROWS_AT_ONCE = 512
_ROWS_CHECKED = 33
_ROUNDING_UNITS = 16.0


def flatten(gradient: Tensor) -> Tensor:
    """Row sums ``dW 1`` (Eq. 5), accumulated in float32 or float64.

    Half precision is widened a few rows at a time. A DTensor is summed where it lies; only the
    (V,) sums are gathered, by a collective that every rank must enter.

    Args:
        gradient: (V, d) of a floating type.

    Returns:
        (V,) on the same device, float64 for float64, float32 otherwise.
    """
    if gradient.ndim != 2:
        raise ValueError(f"gradient must be (V, d), got shape {tuple(gradient.shape)}")
    gradient = gradient.detach()
    if hasattr(gradient, "full_tensor"):
        local = gradient if gradient.dtype.itemsize >= 4 else gradient.float()
        return whole_tensor(local.sum(dim=1))
    if gradient.dtype.itemsize >= 4:
        return gradient.sum(dim=1)
    room = gradient.new_empty(_ROWS_AT_ONCE, gradient.shape[1], dtype=torch.float32)
    parts = torch.split(gradient, _ROWS_AT_ONCE)
    return torch.cat([room[: len(part)].copy_(part).sum(dim=1) for part in parts])


def flattened(gradient: Tensor) -> Tensor:
    """Row sums of norm 1 (line 2 of Algorithm 1), checked.

    The ones direction reads nothing where all hidden states sum to zero, as they do behind a
    LayerNorm at its initial gain and bias (GPT-2 and BERT trained from scratch, first step): the
    row sums are rounding errors then, far below what d random signs would leave.

    Args:
        gradient: (V, d) of a floating type.

    Returns:
        (V,) float64 on the CPU.

    Raises:
        UnusableObservation: NaN or infinity in the sums, all zero, all alike, or rounding errors.
    """
    sums = flatten(gradient)
    s = sums.cpu().double()
    low, high = torch.aminmax(s)
    if not math.isfinite(low) or not math.isfinite(high):
        n_bad = int((~s.isfinite()).sum())
        raise UnusableObservation(
            f"the head's gradient has NaN or infinity in {n_bad} of {len(s)} rows: nothing can be "
            "read from it (an overflowed mixed-precision step, or a diverged model)"
        )
    norm: Tensor = torch.linalg.vector_norm(s)
    if not bool(norm > 0):
        raise UnusableObservation(
            "every row of the head's gradient sums to zero: no token was trained on in this step, "
            "or the head's gradient is not shared"
        )
    if _is_rounding(gradient.detach(), sums):
        raise UnusableObservation(
            "the row sums of the head's gradient are rounding errors: all hidden states sum to "
            "zero, as behind a LayerNorm that is not trained yet. FlatChat's ones direction reads "
            "nothing there; AlignedFlatChat chooses one that does"
        )
    if bool(low == high):
        raise UnusableObservation("all rows of the head's gradient have the same sum")
    return s.div_(norm)


def _is_rounding(gradient: Tensor, sums: Tensor) -> bool:
    """Whether even the largest sums are no larger than rounding in their rows explains.

    Rounding leaves some ``eps / sqrt(d)`` of a row's absolute sum (measured: up to 3 for the
    median row); a real row sum leaves hundreds in bfloat16 and millions in float32.
    """
    largest = sums.abs().topk(min(_ROWS_CHECKED, len(sums))).indices
    if hasattr(gradient, "full_tensor"):
        absolute = whole_tensor(gradient.float().abs().sum(dim=1))[largest]
    else:
        absolute = gradient[largest].abs().sum(dim=1, dtype=sums.dtype)
    unit = torch.finfo(gradient.dtype).eps / gradient.shape[1] ** 0.5
    shares = sums[largest].abs() / absolute
    return bool(shares.nanmedian() < _ROUNDING_UNITS * unit)


def separate_clusters(
    s: Tensor,
    *,
    regularization: float = REGULARIZATION,
    tails: Sequence[float] = TAILS,
    min_ratio: float = 4.0,
) -> tuple[Mixture, int, bool]:
    """Fits the mixture until the positive cluster stands out by its variance (Remark 1).

    Real row sums are peaked far beyond a Gaussian, and the mixture of greatest likelihood puts up
    to half of the vocabulary into the wide cluster. ``regularization`` bounds the narrow one from
    below; it is what makes the positive weight follow the number of types (Remark 2).

    Args:
        s: (V,) flattened gradient, of norm 1.
        regularization: added to both variances; 1e-6 is scikit-learn's ``reg_covar``.
        tails: shares of the values that start in the wide component, tried in this order until
            one succeeds (the paper re-runs with random starts).
        min_ratio: of the variances, wide over narrow, from which they count as separated.

    Returns:
        The mixture (of the largest ratio if none reached ``min_ratio``), the number of fits, and
        whether the clusters are separated.

    Raises:
        ValueError: ``s`` is non-finite or constant, or ``tails`` is empty.
    """
    best: Mixture | None = None
    for fits, tail in enumerate(tails, start=1):
        mixture = fit_two_gaussians(s, start=tail, regularization=regularization)
        if mixture.variance_ratio >= min_ratio:
            return mixture, fits, True
        if best is None or mixture.variance_ratio > best.variance_ratio:
            best = mixture
    if best is None:
        raise ValueError("tails is empty: give at least one share to start from")
    return best, len(tails), False


def rank_types(s: Tensor, mixture: Mixture, scorer: Scorer = "gmm") -> Tensor:
    """Scores by which types are ranked, higher is more likely used.

    Args:
        s: (V,) flattened gradient, in the unit that the mixture was fitted in.
        mixture: its wide component is the positive cluster.
        scorer: ``"gmm"``: Eq. 11, squared distance from the negative cluster less that from the
            positive one, each in its own standard deviation; ``"abs"``: ``|s|`` (Table 4).

    Returns:
        (V,) float64 on the CPU.
    """
    x = s.detach().cpu().double()
    if scorer == "abs":
        return x.abs()
    if scorer == "gmm":
        to_negative, to_positive = (
            (x - mean).square_().div_(variance)
            for mean, variance in zip(mixture.means, mixture.variances, strict=True)
        )
        difference: Tensor = to_negative - to_positive
        return difference
    raise ValueError(f"scorer must be 'gmm' or 'abs', got {scorer!r}")
