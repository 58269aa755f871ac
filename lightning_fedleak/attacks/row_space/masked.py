"""The atoms of rows of which only the largest entries were sent (top-k compression).

A row is a combination of few atoms, at its kept entries as elsewhere. So each row is explained on
its own kept entries, with coefficients of its own, and all rows share the atoms. Atoms are chosen
one by one, by how much less likely the rows' residuals are without them (order-recursive matching
pursuit). That takes more kept entries in a row than there are atoms.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_ROWS = 64  # those that keep most entries; more take more time, not tuned
_SPARE = 1.5  # kept entries for each atom, below which a row fits whatever the atoms are; not tuned
_EXPLAINED = 1e-3  # share of the rows' norm that may be left: rounding leaves less, a type more
_TOKENS_AT_ONCE = 8192  # whose atoms are in float32 at once, which bounds the memory
_DEPENDENT = 1e-4  # squared share of an atom outside of the others that counts as none; not tuned


def most_kept(rows: Tensor) -> Tensor:
    """Return (m, d) float64, those of (n, d) rows of which most entries are not zero."""
    kept = (rows != 0).sum(1)
    best = kept.argsort(descending=True, stable=True)[:_MOST_ROWS]
    return rows[best[kept[best] > 1]].double()


def explain_kept(rows: Tensor, atoms: Tensor, beside: Tensor, log_odds: Tensor) -> Tensor | None:
    """Return the (k,) atoms that explain all kept entries of rows; None if there are none.

    Args:
        rows: (m, d) float64, zero where an entry was not sent.
        atoms: (V, d) of all tokens.
        beside: (b, d) directions that are no word, which any row may hold.
        log_odds: (V,) prior of each token being in the batch.
    """
    kept = rows != 0
    counts = kept.sum(1)
    parts = torch.split(atoms, _TOKENS_AT_ONCE)
    sizes = torch.cat([kept.float() @ part.float().square().T for part in parts], 1)
    outside, residual = sizes.clone(), rows

    def multiply(vectors: Tensor) -> Tensor:
        return torch.cat([vectors.float() @ part.float().T for part in parts], 1)

    bases = rows.new_zeros(len(rows), 0, rows.shape[1])
    chosen: list[int] = []
    directions = list(beside.double())
    while True:
        for direction in directions:
            new = kept * direction
            for _ in range(2):
                new = new - torch.einsum("rd,rkd,rke->re", new, bases, bases)
            new = torch.nn.functional.normalize(new, dim=1, eps=1e-30)
            residual = residual - (residual * new).sum(1, keepdim=True) * new
            bases = torch.cat([bases, new[:, None]], 1)
            outside -= multiply(new).square()
        usable = counts > _SPARE * (bases.shape[1] + 1)
        if not bool(usable.any()):
            return None
        if float(residual[usable].norm()) <= _EXPLAINED * float(rows[usable].norm()):
            return _without_dispensable(rows[usable], atoms, beside, chosen)
        products = multiply(residual).square_()
        products /= outside.clamp_min(1e-30) * residual.square().sum(1, keepdim=True).float()
        products[outside < _DEPENDENT * sizes] = 0.0
        weights = ((counts - bases.shape[1]) * usable).float() / 2
        gain = log_odds - weights @ products.clamp_(0, 1 - 1e-6).neg_().log1p_()
        gain[chosen] = -torch.inf
        chosen.append(int(gain.argmax()))
        directions = [atoms[chosen[-1]].double()]


def _without_dispensable(rows: Tensor, atoms: Tensor, beside: Tensor, chosen: list[int]) -> Tensor:
    """Return the chosen atoms without those that the rows are explained without."""
    kept, needed = rows != 0, list(chosen)
    for token in chosen:
        others = [t for t in needed if t != token]
        columns = torch.cat([atoms[others].double(), beside.double()]) * kept[:, None]
        fit = torch.linalg.lstsq(columns.mT, rows[:, :, None]).solution
        left = rows - (columns.mT @ fit)[:, :, 0]
        if others and float(left.norm()) <= _EXPLAINED * float(rows.norm()):
            needed = others
    return torch.tensor(needed, device=rows.device)
