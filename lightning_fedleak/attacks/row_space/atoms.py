"""What every token looks like at an input, ready to be compared with the rows of a gradient.

Of rows of which only the largest entries were sent (top-k compression) each is explained on its own
kept entries, with coefficients of its own, and all rows share the atoms. Atoms are chosen one by
one, by how much less likely the rows' residuals are without them. That takes more kept entries in a
row than there are atoms.

Whitening, fitted on public text: of hidden states, and of the two sides of a gradient.

Hidden states of a language model fill a narrow cone, with a few directions of large variance. Each
has large products with all others, so an attention of products retrieves none. In coordinates of
unit covariance most products are small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 0.1
"""Share of the median (or mean) eigenvalue that is added to every eigenvalue.

Not tuned. Smaller: directions that public text hardly has count for more.
"""


@dataclass(frozen=True, repr=False)
class Whitening:
    """The map ``x -> matrix (x - mean)``.

    Attributes:
        mean: (d,) float32.
        matrix: (d, d) float32, symmetric.
    """

    mean: Tensor
    matrix: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return (..., d) for (..., d), in the dtype and on the device of ``hidden``."""
        return (hidden - self.mean.to(hidden)) @ self.matrix.to(hidden)

    def tensors(self) -> dict[str, Tensor]:
        """Return the numbers for a checkpoint."""
        return {"whitening.mean": self.mean, "whitening.matrix": self.matrix}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Whitening:
        """Restore what :meth:`tensors` returned."""
        return cls(tensors["whitening.mean"], tensors["whitening.matrix"])


def fit_whitening(hidden: Tensor, ridge: float = RIDGE) -> Whitening:
    """Return ``(C + ridge * median eigenvalue * I)^(-1/2)`` of hidden states' covariance C.

    The ridge is in units of the median eigenvalue: a model with massive activations has one
    eigenvalue a million times above the others, and a share of the mean would hide those.

    Args:
        hidden: (n, d).
        ridge: 0 for none.

    Returns:
        The whitening, on the device of ``hidden``.

    Raises:
        ValueError: fewer than d + 1 states, or states that do not vary in half of their directions.
    """
    n, d = hidden.shape
    states = hidden.double()
    mean = states.mean(0)
    centred = states - mean
    spectrum = torch.linalg.eigh(centred.T @ centred / (n - 1)) if n > d else None
    if spectrum is None or not spectrum[0].median() > 1e-12 * spectrum[0][-1]:
        raise ValueError(
            f"{n} tokens of public text, or too alike ones, cannot whiten {d} dimensions: give "
            f"more text (at least {2 * d} tokens are advised), or set whiten=False"
        )
    values, vectors = spectrum
    scale = values.median()
    values = (values.clamp(min=0.0) + ridge * scale).clamp(min=1e-9 * float(scale))
    matrix = (vectors * values.rsqrt()) @ vectors.T
    return Whitening(mean.float(), matrix.float())


def whitening_matrix(moment: Tensor) -> Tensor:
    """Return W such that ``x W`` has the same second moment in all directions, but for a ridge.

    Args:
        moment: second moments (d, d), or their diagonal (d,).

    Returns:
        (d, d), or its diagonal.
    """
    if moment.dim() == 1:
        return (moment + RIDGE * moment.mean()).rsqrt().float()
    return inverse_factor(moment).float()


def inverse_factor(moment: Tensor) -> Tensor:
    """Return the upper triangular (d, d) matrix that whitens rows of this moment, ridged."""
    eye = torch.eye(len(moment)).to(moment)
    lower = torch.linalg.cholesky(moment + RIDGE * moment.diagonal().mean() * eye)
    factor: Tensor = torch.linalg.solve_triangular(lower, eye, upper=False).T
    return factor


_NUMBERS_AT_ONCE = 1 << 20  # of inputs in float32, 4 MB; more: more memory, no faster
_STRIPES = 8  # of a triangular matrix, whose zeros are skipped; not tuned
_MOST_ROWS = 64  # those that keep most entries; more take more time, not tuned
_SPARE = 1.5  # kept entries for each atom below which a row fits whatever atoms are; not tuned
_EXPLAINED = 1e-3  # share of the rows' norm that may be left: rounding leaves less, a type more
_TOKENS_AT_ONCE = 8192  # whose atoms are in float32 at once, which bounds the memory
_FEW = 8  # tokens over changed ones up to which the whitening of earlier atoms serves; not tuned
_DEPENDENT = 1e-4  # squared share of an atom outside of the others that counts as none; not tuned

Subset = tuple[Tensor, Tensor]
"""Some inputs (n, d) in float32, and the factors (n,) that make unit atoms of them."""


class Atoms:
    """The words' directions, ready to be compared with rows.

    The inputs are used as they are, block by block: of a large vocabulary whitened ones would take
    twice or three times their memory. A product with a whitened atom is one of the input with a
    whitened direction, over the atom's norm.

    Args:
        rows: (V, d) the input of each token.
        beside: (b, d) float64 orthonormal, the directions that are no word.
        further: (q, d) atoms that are no token, whose places follow.

    Attributes:
        tokens: V, the number of atoms that are tokens.
        sizes: (V + q,) float32, norms of the inputs outside of ``beside``; 0 where that is nothing.
        usable: (V + q,) bool, where it is something.
    """

    def __init__(self, rows: Tensor, beside: Tensor, further: Tensor | None = None) -> None:
        self._parts = [rows] if further is None or not len(further) else [rows, further]
        self.beside = beside
        self.tokens = len(rows)
        self.width = d = rows.shape[1]
        self.device = rows.device
        step = max(64, d // _STRIPES)
        stripes = [slice(start, start + step) for start in range(0, d, step)]
        covariance = torch.zeros(d, d, dtype=torch.float64, device=rows.device)
        # One tensor for all rows: small ones between large blocks would hold these in memory.
        self._scales = torch.empty(sum(map(len, self._parts)), device=rows.device)
        self.sizes = torch.empty_like(self._scales)
        for unit in self._unit_blocks():
            for stripe in stripes:
                covariance[: stripe.stop, stripe] += unit[:, : stripe.stop].T @ unit[:, stripe]
        self._changed = torch.zeros_like(self._scales, dtype=torch.bool)
        self.usable = self._scales > 0
        covariance = covariance.triu() + covariance.triu(1).T
        covariance /= max(1, int(self.usable.sum()))
        if not bool(self.usable.any()):  # what is no word fills all directions
            covariance.diagonal().fill_(1.0)
        self.whitening = inverse_factor(covariance).contiguous()
        self._factor = self.whitening.float()
        start = 0
        for unit in self._unit_blocks():
            parts = ((unit[:, : s.stop] @ self._factor[: s.stop, s]).square() for s in stripes)
            norms = torch.stack([part.sum(1) for part in parts]).sum(0).sqrt()
            self._scales[start : start + len(unit)] /= norms.clamp_min(1e-30)
            start += len(unit)

    def follow(self, changed: Tensor) -> bool:
        """Take over the inputs of some tokens, which were changed in place.

        The whitening stays: it is a means of the comparison, which any full matrix allows.

        Args:
            changed: (V,) bool.

        Returns:
            False where it would be that of too many other atoms, so that new ones must be made.
        """
        self._changed[: len(changed)] |= changed
        if int(self._changed.sum()) * _FEW > len(self):
            return False
        tokens = changed.nonzero()[:, 0]
        for part in torch.split(tokens, max(1, _NUMBERS_AT_ONCE // self.width)):
            unit, sizes = self._unit(self._inputs(part))
            norms = sizes * (unit @ self._factor).norm(dim=1)
            self.sizes[part], self.usable[part] = sizes, sizes > 0
            self._scales[part] = (sizes > 0) / norms.clamp_min(1e-30)
        return True

    def __len__(self) -> int:
        """Return the number of atoms."""
        return len(self._scales)

    def _unit_blocks(self) -> Iterator[Tensor]:
        """Yield unit atoms in float32, and store what they were multiplied by (0: unusable)."""
        start = 0
        for block in self._blocks():
            unit, sizes = self._unit(block)
            self.sizes[start : start + len(block)] = sizes
            scales = self._scales[start : start + len(block)]
            torch.div(sizes > 0, sizes.clamp_min(1e-30), out=scales)
            start += len(block)
            yield unit

    def _unit(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return unit atoms of inputs in float32, and their sizes; zeros for those of no size."""
        flat = inputs.float()
        largest = flat.norm(dim=1)
        if len(self.beside):
            flat = flat - (flat @ self.beside.T.float()) @ self.beside.float()
        sizes = flat.norm(dim=1)
        sizes = sizes * (sizes > 1e-3 * largest)
        return flat * ((sizes > 0) / sizes.clamp_min(1e-30))[:, None], sizes

    def _blocks(self) -> Iterator[Tensor]:
        """Yield all inputs, some rows at a time."""
        for part in self._parts:
            yield from torch.split(part, max(1, _NUMBERS_AT_ONCE // self.width))

    def products(self, directions: Tensor, subset: Subset | None = None) -> Tensor:
        """Return (n, k) float32: products of whitened unit atoms with (k, d) directions.

        Args:
            directions: of the whitened space.
            subset: result of :meth:`subset`; by default of all atoms.
        """
        folded = self._factor @ directions.T.float()
        folded = folded - self.beside.T.float() @ (self.beside.float() @ folded)
        if subset is not None:
            rows, scales = subset
            products: Tensor = (rows @ folded) * scales[:, None]
            return products
        products = folded.new_empty(len(self), folded.shape[1])
        single = folded.new_empty(0)
        start = 0
        for block in self._blocks():
            if block.dtype != folded.dtype:  # into memory that is there already: twice as fast
                single = single if len(single) >= len(block) else block.float()
                block = single[: len(block)].copy_(block)
            torch.mm(block, folded, out=products[start : start + len(block)])
            start += len(block)
        products *= self._scales[:, None]
        return products

    def subset(self, types: Tensor) -> Subset:
        """Return some atoms for :meth:`products`, which is faster from the second call on."""
        return self._inputs(types).float(), self._scales[types]

    def _inputs(self, types: Tensor) -> Tensor:
        tokens, *further = self._parts
        rows = tokens[types.clamp(max=len(tokens) - 1)]
        for part in further:
            places = types - len(tokens)
            rows = torch.where(places[:, None] < 0, rows, part[places.clamp(min=0)])
        return rows

    def rows(self, types: Tensor) -> Tensor:
        """Return (n, d) float64 unit atoms."""
        x = self._inputs(types).double()
        return normalize(x - (x @ self.beside.T) @ self.beside)

    def whitened(self, types: Tensor) -> Tensor:
        """Return (n, d) float64 unit atoms after whitening."""
        return normalize(self.rows(types) @ self.whitening)


def normalize(rows: Tensor) -> Tensor:
    """Return rows of unit length; those of zeros stay."""
    return torch.nn.functional.normalize(rows, dim=1, eps=1e-300)


def most_kept(rows: Tensor) -> Tensor:
    """Return (m, d) float64, those of (n, d) rows of which most entries are not zero."""
    counts = (rows != 0).sum(1)
    best = counts.argsort(descending=True, stable=True)[:_MOST_ROWS]
    return rows[best[counts[best] > 1]].double()


def explain_kept(rows: Tensor, atoms: Tensor, beside: Tensor, log_odds: Tensor) -> Tensor | None:
    """Return the (k,) atoms that explain all kept entries of rows; None if there are none.

    Args:
        rows: (m, d) float64, zero where an entry was not sent.
        atoms: (V, d) of all tokens.
        beside: (b, d) directions that are no word, which any row may hold.
        log_odds: (V,) prior of each token being in the batch.
    """
    mask = rows != 0
    counts = mask.sum(1)
    parts = torch.split(atoms, _TOKENS_AT_ONCE)
    sizes = torch.cat([mask.float() @ part.float().square().T for part in parts], 1)
    outside, residual = sizes.clone(), rows

    def multiply(vectors: Tensor) -> Tensor:
        return torch.cat([vectors.float() @ part.float().T for part in parts], 1)

    bases = rows.new_zeros(len(rows), 0, rows.shape[1])
    chosen: list[int] = []
    directions = list(beside.double())
    while True:
        for direction in directions:
            new = mask * direction
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
    mask, needed = rows != 0, list(chosen)
    for token in chosen:
        others = [t for t in needed if t != token]
        columns = torch.cat([atoms[others].double(), beside.double()]) * mask[:, None]
        fit = torch.linalg.lstsq(columns.mT, rows[:, :, None]).solution
        left = rows - (columns.mT @ fit)[:, :, 0]
        if others and float(left.norm()) <= _EXPLAINED * float(rows.norm()):
            needed = others
    return torch.tensor(needed, device=rows.device)
