"""Rows of which some entries are known well and others badly: the latter follow from the former.

So it is with a gradient that is computed back from a step of Adam
(:meth:`~lightning_fedleak.attacks.local_steps.LocalSteps.inverted`): its small entries come out
exactly, its largest hardly. Rows are combinations of few atoms. So the atoms that explain the rows
as they are known give the bad entries better than they were known, and the rows so filled in give
better atoms, until these stay the same (expectation and maximisation in turns).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_fedleak.attacks.row_space.pursuit import PursuitResult

_ROUNDS = 10
_MOST_ROWS = 256
_RIDGE = 1e-9
_WELL_KNOWN = 0.9
_SPARE = 1.5  # known entries of a row over atoms, from which a fit of it says that they are right

Find = Callable[[Sequence[Tensor], Sequence[float]], tuple[PursuitResult, Tensor]]
"""Explains rows with a noise of so much each; what was found, and its atoms (k, d) float64."""


def explain_uneven(rows: Sequence[Tensor], errors: Sequence[Tensor], find: Find) -> PursuitResult:
    """Finds the atoms of rows with entries of uneven accuracy.

    Args:
        rows: each (n_i, d).
        errors: standard deviations of their entries; infinite where an entry is known to be of its
            sign and of at least its size alone.
        find: finds the atoms of rows that are evenly accurate.
    """
    kept = [_best(y.double(), e.double()) for y, e in zip(rows, errors, strict=True)]
    now = [y * (y.square() / (y.square() + e.square())).where(e.isfinite(), 0.5) for y, e in kept]
    left = [torch.minimum(e, y.abs()) for y, e in zip(now, (e for _, e in kept), strict=True)]
    before: list[set[int]] = []
    found: PursuitResult | None = None
    for _ in range(_ROUNDS):
        latest, atoms = find(now, [float(x.square().mean().sqrt()) for x in left])
        types = set(latest.types.tolist())
        found = latest if types or found is None else found
        if not types or types in before or len(atoms) >= atoms.shape[1]:
            break
        before.append(types)
        filled = [_filled(y, e, atoms) for y, e in kept]
        now, left = [y for y, _ in filled], [e for _, e in filled]
    assert found is not None
    return found


def _best(rows: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that are known best, and their errors, none below what half of them have."""
    if len(rows) > _MOST_ROWS:
        worth = (errors / rows.abs().clamp_min(1e-300)).clamp(max=1.0).mean(1)
        best = worth.argsort()[:_MOST_ROWS]
        rows, errors = rows[best], errors[best]
    known = errors[errors.isfinite()]
    return rows, errors.clamp_min(float(known.median()) if len(known) else 0.0)


def _filled(rows: Tensor, errors: Tensor, atoms: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as measured and fitted, by how sure each is; and how far they may be off."""
    weights = errors.square().reciprocal()
    k = len(atoms)
    out, off = torch.empty_like(rows), torch.empty_like(rows)
    for i, (row, error, weight) in enumerate(zip(rows, errors, weights, strict=True)):
        if int((weight > 0).sum()) <= k:  # less is known of the row than atoms could fit
            out[i], off[i] = row, row.abs()
            continue
        weighed = atoms * weight
        gram = weighed @ atoms.T
        gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
        fit = torch.linalg.solve(gram, weighed @ row) @ atoms
        finite = error.isfinite()
        known = error <= error[finite].quantile(_WELL_KNOWN)
        # What the atoms found so far leave open, as seen where the row is well known.
        spare = max(0.1, 1 - k / int(finite.sum()))
        variance = (row - fit)[known].square().mean() / spare
        trust = variance / (variance + error.square())
        out[i] = torch.where(finite, trust * row + (1 - trust) * fit, fit)
        off[i] = torch.where(finite, trust.sqrt() * error, variance.sqrt())
    return out, off


def unexplained_share(rows: Sequence[Tensor], errors: Sequence[Tensor], atoms: Tensor) -> float:
    """Share of the norm of known entries that atoms do not explain; 1 where too few are known.

    Args:
        rows: each (n_i, d).
        errors: of their entries; infinite where one is not known.
        atoms: (k, d) float64.
    """
    left, whole = 0.0, 0.0
    for y, e in (_best(y.double(), e.double()) for y, e in zip(rows, errors, strict=True)):
        for row, known in zip(y, e.isfinite(), strict=True):
            if int(known.sum()) > _SPARE * len(atoms):  # else atoms fit whatever it is
                part = atoms[:, known].T
                fit = part @ torch.linalg.lstsq(part, row[known][:, None]).solution
                left += float((row[known] - fit[:, 0]).square().sum())
                whole += float(row[known].square().sum())
    return (left / whole) ** 0.5 if whole else 1.0
