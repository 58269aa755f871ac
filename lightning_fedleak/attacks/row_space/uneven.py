"""Atoms of rows whose entries are not equally accurate: the accurate ones correct the others.

A gradient that is computed back from a step of Adam
(:meth:`~lightning_fedleak.attacks.local_steps.LocalSteps.invert`) is such a case: its small entries
are exact, its largest are uncertain. Rows are combinations of few atoms. The atoms that explain the
accurate entries predict the uncertain ones, and the completed rows give better atoms. Both steps
alternate until the atoms stay the same (expectation and maximisation).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_fedleak.attacks.row_space.pursuit import PursuitResult

_ROUNDS = 10  # alternations at most: a limit of time, not tuned
_MOST_ROWS = 256  # rows per map, the most accurate ones: a limit of time, not tuned
_RIDGE = 1e-9  # share of a Gram matrix's mean diagonal that makes it invertible; not tuned
_ACCURATE = 0.9  # quantile of errors up to which entries measure the misfit; not tuned
_SPARE = 1.5  # known entries per atom from which a fit of a row can fail; not tuned

Find = Callable[[Sequence[Tensor], Sequence[float]], tuple[PursuitResult, Tensor]]
"""Explains rows whose noise has these standard deviations: the result, its atoms (k, d) float64."""


def explain_uneven(rows: Sequence[Tensor], errors: Sequence[Tensor], find: Find) -> PursuitResult:
    """Return the atoms of rows with entries of uneven accuracy.

    Args:
        rows: each (n_i, d).
        errors: standard deviations of their entries; infinite where only an entry's sign and a
            lower bound of its size are known.
        find: finds the atoms of rows that are evenly accurate.
    """
    measured = [_most_accurate(y.double(), e.double()) for y, e in zip(rows, errors, strict=True)]
    current = [
        y * (y.square() / (y.square() + e.square())).where(e.isfinite(), 0.5) for y, e in measured
    ]
    doubts = [torch.minimum(e, y.abs()) for y, (_, e) in zip(current, measured, strict=True)]
    history: list[set[int]] = []
    result: PursuitResult | None = None
    for _ in range(_ROUNDS):
        latest, atoms = find(current, [float(x.square().mean().sqrt()) for x in doubts])
        types = set(latest.types.tolist())
        result = latest if types or result is None else result
        if not types or types in history or len(atoms) >= atoms.shape[1]:
            break
        history.append(types)
        completed = [_complete(y, e, atoms) for y, e in measured]
        current, doubts = [y for y, _ in completed], [e for _, e in completed]
    assert result is not None
    return result


def _most_accurate(rows: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows with the smallest relative errors, and errors of at least their median."""
    if len(rows) > _MOST_ROWS:
        relative = (errors / rows.abs().clamp_min(1e-300)).clamp(max=1.0).mean(1)
        best = relative.argsort()[:_MOST_ROWS]
        rows, errors = rows[best], errors[best]
    finite = errors[errors.isfinite()]
    return rows, errors.clamp_min(float(finite.median()) if len(finite) else 0.0)


def _complete(rows: Tensor, errors: Tensor, atoms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of measured and fitted rows, weighted by accuracy, and its errors."""
    weights = errors.square().reciprocal()
    k = len(atoms)
    means, doubts = torch.empty_like(rows), torch.empty_like(rows)
    for i, (row, error, weight) in enumerate(zip(rows, errors, weights, strict=True)):
        if int((weight > 0).sum()) <= k:  # atoms could fit whatever the known entries are
            means[i], doubts[i] = row, row.abs()
            continue
        weighed = atoms * weight
        gram = weighed @ atoms.T
        gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
        fit = torch.linalg.solve(gram, weighed @ row) @ atoms
        finite = error.isfinite()
        accurate = error <= error[finite].quantile(_ACCURATE)
        spare = max(0.1, 1 - k / int(finite.sum()))
        variance = (row - fit)[accurate].square().mean() / spare
        trust = variance / (variance + error.square())
        means[i] = torch.where(finite, trust * row + (1 - trust) * fit, fit)
        doubts[i] = torch.where(finite, trust.sqrt() * error, variance.sqrt())
    return means, doubts


def unexplained_share(rows: Sequence[Tensor], errors: Sequence[Tensor], atoms: Tensor) -> float:
    """Return the share of known entries' norm that atoms do not explain; 1 if too few are known.

    Args:
        rows: each (n_i, d).
        errors: of their entries; infinite for an unknown entry.
        atoms: (k, d) float64.
    """
    residual, whole = 0.0, 0.0
    for y, e in (_most_accurate(y.double(), e.double()) for y, e in zip(rows, errors, strict=True)):
        for row, finite in zip(y, e.isfinite(), strict=True):
            if int(finite.sum()) > _SPARE * len(atoms):  # else atoms fit whatever it is
                part = atoms[:, finite].T
                fit = part @ torch.linalg.lstsq(part, row[finite][:, None]).solution
                residual += float((row[finite] - fit[:, 0]).square().sum())
                whole += float(row[finite].square().sum())
    return (residual / whole) ** 0.5 if whole else 1.0
