"""RLG ("revealing labels from gradients"): word types from the head's gradient.

If a batch has few tokens, a type (a distinct token of the vocabulary) was used as a label if some
vector has a negative product with its row of the gradient and with no other row. Whether there is
such a vector is a linear program.

:func:`reveal_labels` reduces the gradient to coordinates of its row space, excludes types by a
basis of large volume, and solves one linear program for each remaining candidate type.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import qr
from scipy.optimize import linprog
from torch import Tensor

from lightning_fedleak.attacks import base
from lightning_fedleak.model.anatomy import HEAD_WEIGHT, Anatomy
from lightning_fedleak.model.snapshots import Inapplicable, Observation, whole_tensor
from lightning_fedleak.threats import Capability, ThreatModel
from lightning_fedleak.validate import check_number

Array = NDArray[np.floating[Any]]

_SLACK = 1e-7  # constraint violation that counts as rounding: HiGHS's own feasibility tolerance
_VOLUME_GROWTH = 1.01  # largest coefficient in the basis; nearer to 1 takes more swaps, not tuned
_ROWS_PER_ROUND = 60  # violated constraints added before a program is solved again; not tuned


def reveal_labels(
    gradient: Tensor, *, max_seconds: float = 60.0, allow_full_rank: bool = False
) -> base.WordGuess:
    """Return the types that are linearly separable: some vector makes their row alone negative.

    The gradient of softmax with cross-entropy is ``dW = G H^T`` with a column ``p_i - onehot(y_i)``
    of G for each token i, which is negative in the row of its label only. If the hidden states are
    linearly independent (at most d tokens), a vector r exists for each used type t with
    ``dW_t r < 0`` and ``dW_j r >= 0`` for all other j (Dang et al. 2021, Sect. 3). An unused row
    may meet the condition too, which is rare while V is much larger than the rank. With more than d
    tokens the rank is full, and used types may be missed. A rank of d - 1 counts as full, because
    it is the largest after a LayerNorm without bias, whose outputs over its gain sum to zero.

    One program is solved for each candidate, as in the paper, but there are few candidates. Take S
    rows of dW that span the others with coefficients of magnitude at most 1 (a maximum-volume
    basis). Because the rows sum to zero, an unused row whose coefficients all exceed -1 is a
    non-negative combination of other rows, which no r can separate (Farkas). About S candidates
    remain.

    The loss must be cross-entropy without label smoothing, the gradient without noise, and the
    head's own: the rows of a tied matrix do not sum to zero.

    Args:
        gradient: (V, d), the head's own part.
        max_seconds: time limit for all linear programs together.
        allow_full_rank: whether to attack if the rank is full.

    Returns:
        The separable types in ascending order; ``scores`` is None.

    Raises:
        UnusableObservation: the gradient is non-finite or all zero, has full rank, or its rows do
            not sum to zero; or the time ran out, or the solver cannot decide a program.
    """
    deadline = time.monotonic() + max_seconds
    if torch.finfo(gradient.dtype).bits < 32:
        raise Inapplicable(
            f"the head's gradient is rounded to {gradient.dtype}, in which its rank is not known: "
            "this method needs a head in float32"
        )
    rows = _row_space(gradient)
    n_types, rank = rows.shape
    if rank >= min(gradient.shape) - 1 and not allow_full_rank:
        raise Inapplicable(
            f"the gradient has full rank {rank}: with {rank} tokens or more in the batch (after "
            "noise or rounding, with any number) the labels need not be separable. Use a smaller "
            "batch, FlatChat, or allow_full_rank=True to see which are."
        )
    basis, coefficients = _large_volume_basis(rows)
    excluded = coefficients.min(axis=1) > -1 + _SLACK
    excluded[basis] = False
    candidates = np.flatnonzero(~excluded).tolist()
    scale = np.abs(coefficients).max(axis=1)
    constraints = coefficients / np.where(scale > 0, scale, 1)[:, None]
    types: list[int] = []
    for i, t in enumerate(candidates):
        separable = _is_separable(constraints, basis, t, deadline)
        if separable is None:
            raise Inapplicable(
                f"{max_seconds:g} s were not enough: {i} of {len(candidates)} candidate types are "
                f"decided (V = {n_types}, rank {rank}). Raise max_seconds, or use a smaller batch."
            )
        if separable:
            types.append(t)
    separable_types = torch.tensor(types, dtype=torch.int64, device=gradient.device)
    return base.WordGuess(separable_types, n_types=float(len(types)))


class RevealLabels(base.Attack):
    """RLG (Dang et al. 2021): one linear program for each candidate type.

    It finds every label of a batch with fewer tokens than the hidden size less 1, see
    :func:`reveal_labels`. It is slow: up to a minute at rank 200 and hours at rank 500.

    Args:
        max_seconds: time for the linear programs of one run; the result is unknown if it runs out.
        allow_full_rank: whether to attack if the rank is as large as hidden states allow: their
            width, less 1.
        name: The name in the logs.

    Raises:
        ValueError: ``max_seconds`` is not positive.

    Examples:
        >>> import torch
        >>> from lightning_fedleak.attacks.words.reveal_labels import reveal_labels
        >>> generator = torch.Generator().manual_seed(0)
        >>> hidden = torch.randn(2, 8, generator=generator)  # two tokens of 8 dimensions
        >>> probabilities = torch.randn(2, 50, generator=generator).softmax(1)
        >>> probabilities[[0, 1], [4, 9]] -= 1.0  # their labels
        >>> reveal_labels(probabilities.T @ hidden).types.tolist()
        [4, 9]
    """

    threat_model = ThreatModel.create(
        "an honest but curious server that reads one update of the output head",
        Capability.SEES_HEAD_GRADIENT,
    )
    default_name = "reveal_labels"
    for_uneven_losses = True  # it uses only the signs of products, which such weights do not change
    config_names = ("max_seconds", "allow_full_rank")

    def __init__(
        self, *, max_seconds: float = 60.0, allow_full_rank: bool = False, name: str | None = None
    ) -> None:
        super().__init__(name)
        self.max_seconds = check_number("max_seconds", max_seconds, above=0)
        self.allow_full_rank = allow_full_rank

    def needs(self, anatomy: Anatomy) -> base.Surfaces:
        """Return the head's weight.

        Raises:
            ValueError: head and embedding are one matrix.
        """
        base.refuse_tied(anatomy.tied, self.name, "head")
        return base.Surfaces(gradients=(HEAD_WEIGHT,))

    def run(self, view: Observation, query: base.Query | None = None) -> base.WordGuess:
        """Return the separable types of the newest head gradient.

        Raises:
            UnusableObservation: see :func:`reveal_labels`.
        """
        return reveal_labels(
            view.gradient(HEAD_WEIGHT),
            max_seconds=self.max_seconds,
            allow_full_rank=self.allow_full_rank,
        )


def _row_space(gradient: Tensor) -> Array:
    """Return rows in coordinates of the row space, (V, S) with orthonormal columns, S the rank.

    Singular values below eight roundings of the gradient's dtype count as zero.
    """
    gradient = whole_tensor(gradient)
    precision = torch.finfo(gradient.dtype).eps
    matrix = gradient.cpu().double()
    base.check_readable(matrix.abs().max(), "the head's gradient")
    imbalance = float(matrix.sum(dim=0).norm() / matrix.abs().sum(dim=0).norm())
    if imbalance > min(64 * precision, 0.05):  # more than rounding explains
        raise base.UnusableObservation(
            f"the rows of the head's gradient do not sum to zero (off by {imbalance:.1e} of their "
            "magnitude), so it is not that of a softmax with cross-entropy alone, which this "
            "method needs: a tied matrix's sum, noise, weight decay in an update, or compression."
        )
    triangle = torch.linalg.qr(matrix, mode="r").R
    _, singular, right = torch.linalg.svd(triangle)
    threshold = 8 * precision * float(singular[0])
    rank = int((singular > threshold).sum())
    rows: np.ndarray[Any, Any] = ((matrix @ right[:rank].T) / singular[:rank]).numpy()
    return rows


def _large_volume_basis(rows: Array) -> tuple[NDArray[np.int64], Array]:
    """Return S rows that span the others with coefficients of magnitude at most about 1.

    The search starts from pivoted QR and swaps in the row of the largest coefficient until none
    exceeds the growth factor (Goreinov et al. 2010, maxvol).

    Returns:
        Indices (S,) of the basis, and coefficients (V, S) of every row in it.
    """
    pivots: NDArray[np.int64]
    _, pivots = qr(rows.T, mode="r", pivoting=True)
    basis = pivots[: rows.shape[1]].copy()
    coefficients: Array = np.linalg.solve(rows[basis].T, rows.T).T
    for _ in range(10 * rows.shape[1]):
        j, k = np.unravel_index(np.abs(coefficients).argmax(), coefficients.shape)
        pivot = coefficients[j, k]
        if abs(pivot) <= _VOLUME_GROWTH:
            break
        change = coefficients[j].copy()
        change[k] -= 1
        coefficients -= np.outer(coefficients[:, k] / pivot, change)
        basis[k] = j
    accurate: Array = np.linalg.solve(rows[basis].T, rows.T).T  # without the swaps' rounding
    return basis, accurate


def _is_separable(
    constraints: Array, basis: NDArray[np.int64], t: int, deadline: float
) -> bool | None:
    """Return whether an r has ``c_t r = -1`` and ``c_j r >= 0`` for all other rows j.

    The result is None if time ran out.

    Rows of the basis are unit vectors, so that their constraints are bounds. The other constraints
    are added when they are violated: a program that is infeasible with some is so with all.
    """
    rank = constraints.shape[1]
    lower = np.where(basis == t, -1.0, 0.0)
    upper = np.where(basis == t, -1.0, np.inf)
    in_basis = bool((basis == t).any())
    constrained = np.ones(len(constraints), dtype=bool)
    constrained[basis] = False
    constrained[t] = False
    working = np.zeros(len(constraints), dtype=bool)
    r, meets_bounds = lower, in_basis
    while True:
        if meets_bounds:
            values = constraints @ r
            violated = np.flatnonzero(
                constrained & ~working & (values < -_SLACK * (1 + np.abs(r).max()))
            )
            if len(violated) == 0:
                return True
            worst = violated[np.argsort(values[violated])[:_ROWS_PER_ROUND]]
            working[worst] = True
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            return None
        solution = linprog(
            np.ones(rank),
            A_ub=-constraints[working] if working.any() else None,
            b_ub=np.zeros(int(working.sum())) if working.any() else None,
            A_eq=None if in_basis else constraints[t : t + 1],
            b_eq=None if in_basis else np.array([-1.0]),
            bounds=np.column_stack([lower, upper]),
            method="highs",
            options={"time_limit": seconds},
        )
        if solution.status == 2:  # infeasible
            return False
        if solution.status == 1:  # the time limit was reached
            return None
        if solution.status != 0:
            raise base.UnusableObservation(
                "the linear program of a type was neither solved nor shown infeasible "
                f"({solution.message}); the gradient may be too noisy for this method"
            )
        r, meets_bounds = solution.x, True
