"""Atoms: the direction of every token at a layer's input, compared with the rows of a gradient.

The adversary computes each atom from the model: the input vector of one token of the vocabulary,
scaled to norm 1. The rows of a linear layer's gradient are combinations of the layer's inputs. So
they lie in the span of the atoms of the batch's tokens.

Atoms are whitened before they are compared. Hidden states of a language model fill a narrow cone,
with a few directions of large variance. Any two of them have a large inner product, so that the
largest product does not find the matching token. In coordinates of unit covariance most products
are small. :class:`Atoms` are whitened by their own covariance. For other attacks,
:class:`Whitening` is fitted on public text.

Top-k compression leaves only the largest entries of each row; the other entries are zero.
:func:`explain_sparse` then fits each row on its non-zero entries only. The coefficients differ
between rows, but all rows share the atoms. It is an orthogonal matching pursuit on several rows: it
adds atoms one at a time, each the one that raises the rows' likelihood most, and needs more
non-zero entries in a row than there are atoms.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedleak.model.snapshots import UnusableObservation

RIDGE = 0.1
"""Share of the median (or mean) eigenvalue that is added to every eigenvalue of a covariance.

Not tuned. A smaller share gives more weight to directions in which the data hardly vary.
"""


@dataclass(frozen=True, repr=False)
class Whitening:
    """The map ``x -> matrix (x - mean)``.

    Attributes:
        mean: The mean of the public hidden states, (d,) float32.
        matrix: The inverse square root of their covariance plus a ridge, (d, d) float32, symmetric.
    """

    mean: Tensor
    matrix: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return whitened (..., d) hidden states, in the dtype and on the device of ``hidden``."""
        return (hidden - self.mean.to(hidden)) @ self.matrix.to(hidden)


def fit_whitening(hidden: Tensor, ridge: float = RIDGE) -> Whitening:
    """Return the whitening ``(C + ridge * median eigenvalue * I)^(-1/2)`` of a covariance C.

    The ridge is a share of the median eigenvalue and not of the mean: in a model with massive
    activations, one eigenvalue is a million times above all other ones, and a share of the mean
    would exceed those.

    Args:
        hidden: The hidden states of public text, (n, d).
        ridge: The share of the median eigenvalue that is added; 0 for no ridge.

    Returns:
        The whitening, on the device of ``hidden``.

    Raises:
        ValueError: There are fewer than d + 1 states, or they do not vary in half of their
            directions.
    """
    n, d = hidden.shape
    states = hidden.double()
    mean = states.mean(0)
    centred = states - mean
    spectrum = torch.linalg.eigh(centred.T @ centred / (n - 1)) if n > d else None
    if spectrum is None or not spectrum[0].median() > 1e-12 * spectrum[0][-1]:
        raise ValueError(
            f"{n} tokens of public text cannot whiten {d} dimensions: give at least {2 * d}, or "
            "set whiten=False"
        )
    values, vectors = spectrum
    scale = values.median()
    values = (values.clamp(min=0.0) + ridge * scale).clamp(min=1e-9 * float(scale))
    matrix = (vectors * values.rsqrt()) @ vectors.T
    return Whitening(mean.float(), matrix.float())


def whitening_matrix(moment: Tensor) -> Tensor:
    """Return W such that ``x W`` has the same second moment in all directions, up to the ridge.

    Args:
        moment: The second moments (d, d) of the rows x, or their diagonal (d,).

    Returns:
        The matrix (d, d) float32, or its diagonal (d,) if only the diagonal is given.
    """
    if moment.dim() == 1:
        return (moment + RIDGE * moment.mean()).rsqrt().float()
    return inverse_factor(moment).float()


def inverse_factor(moment: Tensor) -> Tensor:
    """Return the upper triangular (d, d) matrix that whitens rows of these second moments.

    It is the transposed inverse of the Cholesky factor of the moments with the ridge.

    Raises:
        UnusableObservation: The rows are not finite, or all zero.
    """
    eye = torch.eye(len(moment)).to(moment)
    lower, why = torch.linalg.cholesky_ex(moment + RIDGE * moment.diagonal().mean() * eye)
    if bool(why):
        raise UnusableObservation(
            "inputs of the model on the attack's own texts are NaN, infinite or all zero"
        )
    factor: Tensor = torch.linalg.solve_triangular(lower, eye, upper=False).T
    return factor


_NUMBERS_AT_ONCE = 1 << 20  # input entries per float32 block, 4 MiB; larger blocks are no faster
_STRIPES = 8  # column blocks of a triangular matrix, whose zeros are not multiplied; not tuned
_MAX_ROWS = 64  # compressed rows that are explained; more take more time, not tuned
_ENTRIES_PER_ATOM = 1.5  # non-zero entries a row needs per atom; at 1 any atoms fit. Not tuned
_RESIDUAL = 1e-3  # largest residual over the rows' norm: rounding leaves less, a missing type more
_TOKENS_AT_ONCE = 8192  # tokens whose atoms are in float32 at once, which bounds the memory
_ATOMS_PER_CHANGE = 8  # the whitening stays if at most 1 atom in 8 has changed; not tuned
_DEPENDENT = 1e-4  # squared share of an atom outside a span, up to which it counts as inside

Subset = tuple[Tensor, Tensor]
"""The inputs (n, d) of some atoms in float32, and factors (n,) that make whitened atoms unit."""


class Atoms:
    """The unit directions of all tokens at an input, ready to be compared with rows.

    The inputs are kept as they are and whitened block by block, because whitened inputs of a large
    vocabulary would take two or three times their memory. The product of a whitened atom with a
    direction is the product of the input with the whitened direction, over the atom's norm.

    Args:
        rows: The input of each token, (V, d).
        nuisance: Orthonormal directions that any row may hold and that are no token's, (b, d)
            float64. They are projected out.
        extra: Atoms of positions, not of tokens, (q, d). Their indices follow those of the tokens.

    Attributes:
        nuisance: The directions that are projected out.
        tokens: V, the number of atoms that are tokens.
        width: d, the width of the input.
        sizes: The norms of the inputs outside ``nuisance``, (V + q,) float32. 0 if an input has
            no such part.
        usable: Whether ``sizes`` is above 0, (V + q,) bool.
        whitening: The upper triangular matrix (d, d) float64 that whitens the unit atoms.
    """

    def __init__(self, rows: Tensor, nuisance: Tensor, extra: Tensor | None = None) -> None:
        # Inputs stay in these tensors. Without its part in ``nuisance`` and after whitening, an
        # input times its scale is a unit vector.
        self._parts = [rows] if extra is None or not len(extra) else [rows, extra]
        self.nuisance = nuisance
        self.tokens = len(rows)
        self.width = d = rows.shape[1]
        self.device = rows.device
        step = max(64, d // _STRIPES)
        stripes = [slice(start, start + step) for start in range(0, d, step)]
        covariance = torch.zeros(d, d, dtype=torch.float64, device=rows.device)
        # One tensor for all rows: small tensors allocated between large blocks would keep the
        # allocator from returning the blocks' memory.
        self._scales = torch.empty(sum(map(len, self._parts)), device=rows.device)
        self.sizes = torch.empty_like(self._scales)
        for unit in self._unit_blocks():
            for stripe in stripes:
                covariance[: stripe.stop, stripe] += unit[:, : stripe.stop].T @ unit[:, stripe]
        # The atoms that have changed since the whitening was fitted.
        self._changed = torch.zeros_like(self._scales, dtype=torch.bool)
        self.usable = self._scales > 0
        covariance = covariance.triu() + covariance.triu(1).T
        covariance /= max(1, int(self.usable.sum()))
        if not bool(self.usable.any()):  # the nuisance directions span all dimensions
            covariance.diagonal().fill_(1.0)
        self.whitening = inverse_factor(covariance).contiguous()
        self._factor = self.whitening.float()
        start = 0  # norms of the unit atoms after whitening, by which their scales are divided
        for unit in self._unit_blocks():
            parts = ((unit[:, : s.stop] @ self._factor[: s.stop, s]).square() for s in stripes)
            norms = torch.stack([part.sum(1) for part in parts]).sum(0).sqrt()
            self._scales[start : start + len(unit)] /= norms.clamp_min(1e-30)
            start += len(unit)

    def follow(self, changed: Tensor) -> bool:
        """Update the norms of tokens whose inputs were changed in place.

        The whitening stays: it only sharpens the comparison, for which any invertible matrix is
        valid.

        Args:
            changed: The tokens whose inputs were changed, (V,) bool.

        Returns:
            Whether the atoms are up to date. False if too many atoms have changed since the
            whitening was fitted: then nothing is updated, and new atoms must be created.
        """
        self._changed[: len(changed)] |= changed
        if int(self._changed.sum()) * _ATOMS_PER_CHANGE > len(self):
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
        """Yield unit atoms in float32, and store their sizes and scales (0 for unusable atoms)."""
        start = 0
        for block in self._blocks():
            unit, sizes = self._unit(block)
            self.sizes[start : start + len(block)] = sizes
            scales = self._scales[start : start + len(block)]
            torch.div(sizes > 0, sizes.clamp_min(1e-30), out=scales)
            start += len(block)
            yield unit

    def _unit(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return unit atoms of inputs in float32, and their sizes.

        Both are 0 if less than a thousandth of an input is outside the nuisance directions: float32
        would leave mostly rounding.
        """
        flat = inputs.float()
        largest = flat.norm(dim=1)
        if len(self.nuisance):
            flat = flat - (flat @ self.nuisance.T.float()) @ self.nuisance.float()
        sizes = flat.norm(dim=1)
        sizes = sizes * (sizes > 1e-3 * largest)
        return flat * ((sizes > 0) / sizes.clamp_min(1e-30))[:, None], sizes

    def _blocks(self) -> Iterator[Tensor]:
        """Yield all inputs, a block of rows at a time."""
        for part in self._parts:
            yield from torch.split(part, max(1, _NUMBERS_AT_ONCE // self.width))

    def products(self, directions: Tensor, subset: Subset | None = None) -> Tensor:
        """Return the inner products (n, k) float32 of whitened unit atoms with directions.

        Args:
            directions: The directions in the whitened space, (k, d).
            subset: The atoms, from :meth:`subset`; all by default.
        """
        folded = self._factor @ directions.T.float()
        folded = folded - self.nuisance.T.float() @ (self.nuisance.float() @ folded)
        if subset is not None:
            rows, scales = subset
            products: Tensor = (rows @ folded) * scales[:, None]
            return products
        products = folded.new_empty(len(self), folded.shape[1])
        buffer = folded.new_empty(0)
        start = 0
        for block in self._blocks():
            if block.dtype != folded.dtype:  # a reused buffer is twice as fast as a new one
                buffer = buffer if len(buffer) >= len(block) else block.float()
                block = buffer[: len(block)].copy_(block)
            torch.mm(block, folded, out=products[start : start + len(block)])
            start += len(block)
        products *= self._scales[:, None]
        return products

    def subset(self, types: Tensor) -> Subset:
        """Return some atoms for :meth:`products`, so that several calls gather them only once."""
        return self._inputs(types).float(), self._scales[types]

    def _inputs(self, types: Tensor) -> Tensor:
        """Return the inputs (n, d) of some atoms; indices above the tokens are extra atoms."""
        tokens, *extra = self._parts
        rows = tokens[types.clamp(max=len(tokens) - 1)]
        for atoms in extra:
            indices = types - len(tokens)
            rows = torch.where(indices[:, None] < 0, rows, atoms[indices.clamp(min=0)])
        return rows

    def rows(self, types: Tensor) -> Tensor:
        """Return the unit atoms (n, d) float64 of some types."""
        x = self._inputs(types).double()
        return normalize(x - (x @ self.nuisance.T) @ self.nuisance)

    def whitened(self, types: Tensor) -> Tensor:
        """Return the unit atoms (n, d) float64 of some types after whitening."""
        return normalize(self.rows(types) @ self.whitening)


def normalize(rows: Tensor) -> Tensor:
    """Return rows of unit length; a row of zeros stays a row of zeros."""
    return torch.nn.functional.normalize(rows, dim=1, eps=1e-300)


def select_densest(rows: Tensor) -> Tensor:
    """Return the rows with the most non-zero entries, (m, d) float64 with m <= 64.

    Rows with fewer than two such entries are omitted.

    Args:
        rows: The rows of a gradient after top-k compression, (n, d).
    """
    counts = (rows != 0).sum(1)
    best = counts.argsort(descending=True, stable=True)[:_MAX_ROWS]
    return rows[best[counts[best] > 1]].double()


def explain_sparse(
    rows: Tensor, atoms: Tensor, nuisance: Tensor, log_odds: Tensor
) -> Tensor | None:
    """Return the tokens whose atoms explain all non-zero entries of rows, (k,) indices.

    Args:
        rows: The rows (m, d) float64, zero for an entry that was not sent.
        atoms: The atoms of all tokens, (V, d).
        nuisance: Directions that any row may hold and that are no token's, (b, d).
        log_odds: The prior log odds of each token being in the batch, (V,).

    Returns:
        The tokens, or None if no set explains the rows, or only a set too large for their entries.
    """
    # For each row, only its non-zero entries count. ``bases`` (m, k, d) spans the nuisance and the
    # chosen atoms there, and ``residual`` is the row outside of that span.
    mask = rows != 0
    counts = mask.sum(1)
    parts = torch.split(atoms, _TOKENS_AT_ONCE)
    sizes = torch.cat([mask.float() @ part.float().square().T for part in parts], 1)
    outside, residual = sizes.clone(), rows  # squared norms of atoms outside the chosen span

    def multiply(vectors: Tensor) -> Tensor:
        return torch.cat([vectors.float() @ part.float().T for part in parts], 1)

    bases = rows.new_zeros(len(rows), 0, rows.shape[1])
    chosen: list[int] = []
    directions = list(nuisance.double())
    while True:
        for direction in directions:
            column = mask * direction
            for _ in range(2):  # the second Gram-Schmidt pass removes the first one's rounding
                column = column - torch.einsum("rd,rkd,rke->re", column, bases, bases)
            column = torch.nn.functional.normalize(column, dim=1, eps=1e-30)
            residual = residual - (residual * column).sum(1, keepdim=True) * column
            bases = torch.cat([bases, column[:, None]], 1)
            outside -= multiply(column).square()
        usable = counts > _ENTRIES_PER_ATOM * (bases.shape[1] + 1)
        if not bool(usable.any()):
            return None
        if float(residual[usable].norm()) <= _RESIDUAL * float(rows[usable].norm()):
            return _prune(rows[usable], atoms, nuisance, chosen)
        products = multiply(residual).square_()
        products /= outside.clamp_min(1e-30) * residual.square().sum(1, keepdim=True).float()
        products[outside < _DEPENDENT * sizes] = 0.0  # mostly rounding
        weights = ((counts - bases.shape[1]) * usable).float() / 2
        # A row of n free entries gains -n/2 log(1 - r^2) in log likelihood with unknown variance.
        gain = log_odds - weights @ products.clamp_(0, 1 - 1e-6).neg_().log1p_()
        gain[chosen] = -torch.inf
        chosen.append(int(gain.argmax()))
        directions = [atoms[chosen[-1]].double()]


def _prune(rows: Tensor, atoms: Tensor, nuisance: Tensor, chosen: list[int]) -> Tensor:
    """Return the chosen tokens, without those that are not needed to explain the rows."""
    mask, needed = rows != 0, list(chosen)
    for token in chosen:
        remaining = [t for t in needed if t != token]
        columns = torch.cat([atoms[remaining].double(), nuisance.double()]) * mask[:, None]
        fit = torch.linalg.lstsq(columns.mT, rows[:, :, None]).solution
        residual = rows - (columns.mT @ fit)[:, :, 0]
        if remaining and float(residual.norm()) <= _RESIDUAL * float(rows.norm()):
            needed = remaining
    return torch.tensor(needed, device=rows.device)
