"""Check the types (distinct tokens) that a pursuit chose to explain the rows of a gradient.

The rows are combinations of the atoms of the batch's types; an atom is the input vector of a token.
A pursuit is a greedy search for types whose atoms span the rows. :func:`prune` removes types that
the rows do not need. Twins are tokens with nearly equal atoms, for example tokens that were never
trained; :func:`exchange_twins` replaces a type by a twin that explains more. A result is certified
if the types explain the rows and no other tokens could. :func:`silent_tokens` returns the tokens
that prevent a certificate, because they would leave no trace in the rows.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lightning_fedleak.attacks.row_space.atoms import Atoms, normalize
from lightning_fedleak.attacks.row_space.shared_rows import MAX_NOISE_RATIO, SharedRows

_TWINS_AT_ONCE = 1024  # nearly equal atoms that are in float64 at once, which bounds the memory
_MAX_STORED = 1 << 23  # entries of twins' atoms stored for a round of exchanges, 64 MB; not tuned
_ROUNDED_COSINE = 1e-5  # 1 - cosine that is compared in float64: far above float32's rounding
_NO_SQUARE = 1e-15  # squared norm up to which a part of a unit atom is float64's rounding

# Thresholds; none was tuned.
DEPENDENT = 1e-2  # norm of a unit atom outside the chosen span up to which it nearly lies in it
_MAX_SHARE = 0.9  # largest share of types in directions; with more, other sets of types fit too
_EXCHANGES = 4  # rounds in which types are exchanged for nearly equal ones
_EQUAL = 1e-6  # 1 - cosine up to which two atoms are exchanged for each other
_TWINS = 1e-4  # distance of unit atoms up to which a certificate must distinguish them
_TWIN_GAIN = 3.0  # residual that a twin may explain in a certified result, in units of the noise


def residual_size(atoms: Atoms, shared: SharedRows, types: Tensor) -> float:
    """Return the root mean square of the rows' residual after types, in units of the noise."""
    residual = shared.whole
    if len(types):
        residual = _project_off(residual, torch.linalg.qr(atoms.rows(types).T).Q)
    return float(residual.norm()) / shared.noise_norm


def _project_off(rows: Tensor, basis: Tensor) -> Tensor:
    """Return (n, d) rows without their part in the span of a (d, k) orthonormal basis."""
    return rows - (rows @ basis) @ basis.T


def prune(atoms: Atoms, shared: SharedRows, types: Tensor) -> Tensor:
    """Remove types that alone explain less than rounding, by backward elimination."""
    while len(types):
        parts = _unique_parts(shared.principal, atoms.rows(types))
        count = int((parts < shared.noise_norm).sum())
        if not count:
            break
        types = types[parts.argsort()[-(-count // 2) :].sort().values]
    return types


def _unique_parts(rows: Tensor, atoms: Tensor) -> Tensor:
    """Return (n,) the norm by which the residual of rows grows if each atom alone is excluded.

    It is ``|m_j| / sqrt((X X^T)^-1_jj)``, with the coefficients m and the (n, d) atoms X.
    """
    q, r = torch.linalg.qr(atoms.T)
    unit = torch.eye(len(atoms), dtype=r.dtype, device=r.device)
    inverse = torch.linalg.solve_triangular(r, unit, upper=True)
    parts: Tensor = (inverse @ (rows @ q).T).norm(dim=1) / inverse.norm(dim=1)
    return parts


def exchange_twins(atoms: Atoms, shared: SharedRows, types: Tensor, others: Tensor) -> Tensor:
    """Return the types, pruned again, with twins instead of types that explain less.

    Tokens that were never trained have almost the same atom. Which of them was used becomes visible
    only after all other types are explained. There may be tens of thousands of them, so that their
    atoms are computed block by block.

    Args:
        atoms: The atoms of all tokens.
        shared: The rows.
        types: The chosen types, (k,).
        others: The tokens that may replace a type, (n,).
    """
    for _ in range(_EXCHANGES):
        previous, types = types, types.clone()
        is_twin = _nearly_equal(atoms, types, others, _EQUAL)
        has_twin = is_twin.any(0)
        is_twin, twins = is_twin[:, has_twin], others[has_twin]
        places = is_twin.any(1).nonzero()[:, 0].tolist()
        if not places:
            break
        # Each twin's part outside the chosen span: squared norm, and energy along the residual.
        basis = torch.linalg.qr(atoms.rows(types).T).Q
        residual = _project_off(shared.principal, basis)
        units = _UnitBlocks(atoms, twins)
        pairs = ((x @ basis, x @ residual.T) for x in units)
        sums = [(1 - x.square().sum(1), y.square().sum(1)) for x, y in pairs]
        norms, energy = map(torch.cat, zip(*sums, strict=True))
        for j in places:
            # Type j leaves the span: the residual, and the twins' parts outside, grow along
            # ``added``. The twin with the largest gain takes its place, and they shrink again.
            added, part, cosines, cross = _project_type(atoms, shared, types, j, units, residual)
            size = part.square().sum()
            sizes = norms + cosines.square()
            energies = energy + cosines * (cosines * size + 2 * cross)
            gain = energies / sizes.clamp_min(_NO_SQUARE)
            gain[~is_twin[j] | torch.isin(twins, types)] = 0
            if float(gain.max()) <= float(size):
                continue
            types[j] = twins[int(gain.argmax())]
            residual = residual + torch.outer(part, added)
            added, part, cosines, cross = _project_type(atoms, shared, types, j, units, residual)
            norms = sizes - cosines.square()
            energy = energies + cosines * (cosines * part.square().sum() - 2 * cross)
            residual = residual - torch.outer(part, added)
        types = prune(atoms, shared, torch.unique(types))
        if len(types) == len(previous) and bool((types.sort()[0] == previous.sort()[0]).all()):
            break
    return types


def _unit_atoms(atoms: Atoms, types: Tensor) -> Iterator[Tensor]:
    """Yield the unit atoms (n, d) float64 of types in blocks."""
    yield from (atoms.rows(part) for part in torch.split(types, _TWINS_AT_ONCE))


class _UnitBlocks:
    """The blocks of :func:`_unit_atoms`, for several passes; stored if they are small enough."""

    def __init__(self, atoms: Atoms, types: Tensor) -> None:
        self._atoms, self._types = atoms, types
        is_small = len(types) * atoms.width <= _MAX_STORED
        self._stored = [*_unit_atoms(atoms, types)] if is_small else None

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._stored or _unit_atoms(self._atoms, self._types))


def _project_type(
    atoms: Atoms,
    shared: SharedRows,
    types: Tensor,
    place: int,
    twins: Iterable[Tensor],
    residual: Tensor,
) -> tuple[Tensor, ...]:
    """Return the direction (d,) that the type at a place adds to the span, and projections on it.

    The projections are those of the rows (k,) and of the twins (n,). The last result is the product
    (n,) of the rows' projection with the inner products of each twin and ``residual``, (k, d) rows.
    """
    added = _added_direction(atoms.rows(types), place)
    part = shared.principal @ added
    columns = torch.stack([added, part @ residual], 1)
    cosines, cross = torch.cat([x @ columns for x in twins]).T
    return added, part, cosines, cross


def _nearly_equal(atoms: Atoms, types: Tensor, others: Tensor, limit: float) -> Tensor:
    """Return (k, n), whether 1 - cosine of a type's atom and another token's is below a limit."""
    chosen = atoms.rows(types)
    equal = torch.zeros(len(types), len(others), dtype=torch.bool, device=types.device)
    for block, part in zip(
        _unit_atoms(atoms, others), torch.split(equal, _TWINS_AT_ONCE, dim=1), strict=True
    ):
        near = (chosen.float() @ block.float().T > 1 - _ROUNDED_COSINE).any(1)
        part[near] = chosen[near] @ block.T > 1 - limit
    return equal


def _added_direction(atoms: Tensor, place: int) -> Tensor:
    """Return the unit vector (d,) of an atom's part outside the span of the (k - 1) other atoms."""
    remaining = torch.cat([atoms[:place], atoms[place + 1 :]])
    basis = torch.linalg.qr(remaining.T).Q
    direction = atoms[place : place + 1]
    for _ in range(2):  # the second projection removes the first one's rounding, for near twins
        direction = normalize(_project_off(direction, basis))
    return direction[0]


def _differ_from_twins(atoms: Atoms, shared: SharedRows, types: Tensor, others: Tensor) -> bool:
    """Return whether no twin of a type, a token that nearly equals it, could replace it.

    Two conditions must hold. No twin may explain more of the residual than noise would. And no type
    may be dispensable if all twins of the other types were used too, because a type explains little
    next to a twin, so that unrelated types could explain that little instead. The result is False
    if there are too many twins to decide.
    """
    others = others[~torch.isin(others, types)]
    twins = _nearly_equal(atoms, types, others, _TWINS**2 / 2)
    has_twin = twins.any(0)
    if not bool(has_twin.any()):
        return True
    directions = len(types) + int(has_twin.sum()) + len(atoms.nuisance)
    if directions > _MAX_SHARE * atoms.width:
        return False
    twins = twins[:, has_twin]
    chosen, candidates = atoms.rows(types), atoms.rows(others[has_twin])
    basis = torch.linalg.qr(chosen.T).Q
    residual = _project_off(shared.whole, basis)
    further = normalize(_project_off(candidates, basis))
    noise = max(len(residual) ** 0.5, float(residual.norm()) / atoms.width**0.5)
    if float((residual @ further.T).norm(dim=0).max()) > _TWIN_GAIN * noise:
        return False
    parts = _unique_parts(shared.whole, torch.cat([chosen, candidates]))[: len(chosen)]
    for j in twins.any(1).nonzero()[:, 0].tolist():
        without_twins = torch.cat([chosen, candidates[~twins[j]]])
        parts[j] = _unique_parts(shared.whole, without_twins)[j]
    return float(parts.min()) > MAX_NOISE_RATIO * shared.noise_norm


def silent_tokens(atoms: Atoms, shared: SharedRows, types: Tensor, others: Tensor) -> Tensor | None:
    """Return the (m,) tokens whose trace next to the types is no larger than rounding.

    A token's trace is the norm that the rows would have outside of the span of the types if the
    token were used with the median strength of a type. It is 0 if the token's input is zero, or is
    equal to a type's or a multiple of it.

    Args:
        atoms: The atoms of all tokens.
        shared: The rows.
        types: The types that explain them, (k,).
        others: The tokens whose atoms nearly lie in the span of the types, (n,).

    Returns:
        The tokens, or None if a twin could replace a type, or types fill too many directions.
    """
    share = (len(types) + len(atoms.nuisance)) / atoms.width
    # With no fewer rows than types, the rows determine the span of the types. With fewer rows,
    # other sets of types would fit too, unless enough directions are free.
    is_decidable = len(types) <= len(shared.principal) or share <= _MAX_SHARE
    if share >= 1 or not is_decidable or not _differ_from_twins(atoms, shared, types, others):
        return None
    q, r = torch.linalg.qr(atoms.rows(types).T)
    coefficients = torch.linalg.solve_triangular(r, (shared.whole @ q).T, upper=True)
    strength = (coefficients.norm(dim=1) / atoms.sizes[types]).median()
    sizes = atoms.sizes[: atoms.tokens] * strength
    min_size = MAX_NOISE_RATIO * shared.noise_norm
    min_twin_trace = _TWIN_GAIN * len(shared.whole) ** 0.5
    small = sizes * DEPENDENT < min_size  # other atoms than ``others`` differ by more
    small[others[others < atoms.tokens]] = True
    small[types[types < atoms.tokens]] = False
    tokens = small.nonzero()[:, 0]
    twins = _nearly_equal(atoms, types, tokens, _TWINS**2 / 2).any(0)  # with a lower limit below
    parts = [_project_off(x, q).norm(dim=1) for x in _unit_atoms(atoms, tokens)]
    traces = sizes[tokens] * torch.cat([sizes[:0], *parts])
    silent: Tensor = tokens[traces < torch.where(twins, min_twin_trace, min_size)]
    return silent
