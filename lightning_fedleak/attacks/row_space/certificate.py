"""Types that explain shared rows: without needless ones, with the right twins, and certified.

Twins are tokens whose atoms are nearly equal, as those of tokens that were never trained are. A
certificate says that the types explain all that was shared, and that no other tokens could.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lightning_fedleak.attacks.row_space.atoms import Atoms, normalize
from lightning_fedleak.attacks.row_space.shared_rows import CERTIFIED, SharedRows

_TWINS_AT_ONCE = 1024  # nearly equal atoms that are in float64 at once, which bounds the memory
_MAX_STORED = 1 << 23  # numbers of chosen atoms stored for a round of exchanges, 64 MB; not tuned
_ROUNDED_COSINE = 1e-5  # 1 - cosine that is compared in float64: far above float32's rounding
_NO_SQUARE = 1e-15  # squared norm of a part that is rounding in float64

# Thresholds; none was tuned.
DEPENDENT = 1e-2  # norm of an atom outside of the chosen ones up to which they nearly explain it
_MAX_SHARE = 0.9  # types over directions; with more, other sets of types fit too
_EXCHANGES = 4  # rounds in which types are exchanged for nearly equal ones
_EQUAL = 1e-6  # 1 - cosine up to which two atoms are exchanged for each other
_TWINS = 1e-4  # distance of unit atoms up to which a certificate must distinguish them
_TWIN_GAIN = 3.0  # what an atom may explain of the residual in units of the noise, for the same


def residual_size(atoms: Atoms, shared: SharedRows, types: Tensor) -> float:
    """Return the root mean square of what types leave of the rows, in units of the noise."""
    residual = shared.whole
    if len(types):
        residual = _project_off(residual, torch.linalg.qr(atoms.rows(types).T).Q)
    return float(residual.norm()) / shared.noise_norm


def _project_off(rows: Tensor, basis: Tensor) -> Tensor:
    """Return (n, d) rows without their part in the span of a (d, k) orthonormal basis."""
    return rows - (rows @ basis) @ basis.T


def prune(atoms: Atoms, shared: SharedRows, types: Tensor) -> Tensor:
    """Return types without those that alone explain less than rounding (backward elimination)."""
    while len(types):
        parts = _unique_parts(shared.principal, atoms.rows(types))
        count = int((parts < shared.noise_norm).sum())
        if not count:
            break
        types = types[parts.argsort()[-(-count // 2) :].sort().values]
    return types


def _unique_parts(rows: Tensor, atoms: Tensor) -> Tensor:
    """Return (n,) by how much the residual of rows grows if each of n atoms alone is excluded.

    That is ``|m_j| / sqrt((X X^T)^-1_jj)``, with coefficients m.
    """
    q, r = torch.linalg.qr(atoms.T)
    unit = torch.eye(len(atoms), dtype=r.dtype, device=r.device)
    inverse = torch.linalg.solve_triangular(r, unit, upper=True)
    parts: Tensor = (inverse @ (rows @ q).T).norm(dim=1) / inverse.norm(dim=1)
    return parts


def exchange_twins(atoms: Atoms, shared: SharedRows, types: Tensor, others: Tensor) -> Tensor:
    """Return types, each replaced by a nearly equal one that explains more, and pruned again.

    Tokens that were never trained have almost the same atom. Which of them was used shows only
    after all the rest is explained. There may be tens of thousands, which are read block by block.
    """
    for _ in range(_EXCHANGES):
        previous, types = types, types.clone()
        equal = _nearly_equal(atoms, types, others, _EQUAL)
        near = equal.any(0)
        equal, twins = equal[:, near], others[near]
        places = equal.any(1).nonzero()[:, 0].tolist()
        if not places:
            break
        # Of what no chosen atom explains of each: squared norm, and energy along the rows.
        basis = torch.linalg.qr(atoms.rows(types).T).Q
        residual = _project_off(shared.principal, basis)
        units = _KeptUnits(atoms, twins)
        pairs = ((x @ basis, x @ residual.T) for x in units)
        sums = [(1 - x.square().sum(1), y.square().sum(1)) for x, y in pairs]
        norms, energy = map(torch.cat, zip(*sums, strict=True))
        for j in places:
            added, part, cosines, cross = _place(atoms, shared, types, j, units, residual)
            size = part.square().sum()
            sizes = norms + cosines.square()
            energies = energy + cosines * (cosines * size + 2 * cross)
            gain = energies / sizes.clamp_min(_NO_SQUARE)
            gain[~equal[j] | torch.isin(twins, types)] = 0
            if float(gain.max()) <= float(size):
                continue
            types[j] = twins[int(gain.argmax())]
            residual = residual + torch.outer(part, added)
            added, part, cosines, cross = _place(atoms, shared, types, j, units, residual)
            norms = sizes - cosines.square()
            energy = energies + cosines * (cosines * part.square().sum() - 2 * cross)
            residual = residual - torch.outer(part, added)
        types = prune(atoms, shared, torch.unique(types))
        if len(types) == len(previous) and bool((types.sort()[0] == previous.sort()[0]).all()):
            break
    return types


def _unit_atoms(atoms: Atoms, types: Tensor) -> Iterator[Tensor]:
    """Yield unit atoms, (n, d) float64, some at a time."""
    yield from (atoms.rows(part) for part in torch.split(types, _TWINS_AT_ONCE))


class _KeptUnits:
    """Unit atoms, (n, d) float64, some at a time, as often as they are asked; kept where few."""

    def __init__(self, atoms: Atoms, types: Tensor) -> None:
        self._atoms, self._types = atoms, types
        is_small = len(types) * atoms.width <= _MAX_STORED
        self._kept = [*_unit_atoms(atoms, types)] if is_small else None

    def __iter__(self) -> Iterator[Tensor]:
        return _unit_atoms(self._atoms, self._types) if self._kept is None else iter(self._kept)


def _place(
    atoms: Atoms,
    shared: SharedRows,
    types: Tensor,
    place: int,
    twins: Iterable[Tensor],
    residual: Tensor,
) -> tuple[Tensor, ...]:
    """Return the direction (d,) that one of the types adds to the others, and the parts there.

    These are the rows' part (k,); the twins' part (n,); and the product (n,) of the rows' part with
    what ``residual``, (k, d) rows, holds of each twin.
    """
    added = _added_direction(atoms.rows(types), place)
    part = shared.principal @ added
    columns = torch.stack([added, part @ residual], 1)
    cosines, cross = torch.cat([x @ columns for x in twins]).T
    return added, part, cosines, cross


def _nearly_equal(atoms: Atoms, types: Tensor, others: Tensor, most: float) -> Tensor:
    """Return (k, n), whether 1 - cosine of types' atoms and of others' is below ``most``."""
    chosen = atoms.rows(types)
    equal = torch.zeros(len(types), len(others), dtype=torch.bool, device=types.device)
    for block, part in zip(
        _unit_atoms(atoms, others), torch.split(equal, _TWINS_AT_ONCE, dim=1), strict=True
    ):
        near = (chosen.float() @ block.float().T > 1 - _ROUNDED_COSINE).any(1)
        part[near] = chosen[near] @ block.T > 1 - most
    return equal


def _added_direction(atoms: Tensor, place: int) -> Tensor:
    """Return (d,) unit vector along which one of (k, d) atoms lies outside of the others' span."""
    rest = torch.cat([atoms[:place], atoms[place + 1 :]])
    basis = torch.linalg.qr(rest.T).Q
    direction = atoms[place : place + 1]
    for _ in range(2):  # once leaves rounding that another atom of nearly the same input would feel
        direction = normalize(_project_off(direction, basis))
    return direction[0]


def _differ_from_twins(atoms: Atoms, shared: SharedRows, types: Tensor, others: Tensor) -> bool:
    """Return whether no token that nearly equals a type could replace it.

    A type explains little beside a token that nearly equals it, and unrelated types could explain
    that little. So no such token may explain more of the residual than noise would, and no type may
    be dispensable if all such tokens were there too. False if there are too many of them to tell.
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
        rest = torch.cat([chosen, candidates[~twins[j]]])
        parts[j] = _unique_parts(shared.whole, rest)[j]
    return float(parts.min()) > CERTIFIED * shared.noise_norm


def silent_tokens(atoms: Atoms, shared: SharedRows, types: Tensor, others: Tensor) -> Tensor | None:
    """Return the (m,) tokens whose trace beside types could be rounding.

    A token's trace is that of a type of median strength, at the token's input: its size, times the
    share of it that lies outside of the types' inputs. It is nothing for an input of zeros, and for
    one that equals a type's or is a multiple of it. ``others`` are tokens whose atoms the types
    nearly explain. None where one of these could replace a type, or types fill too many directions.
    """
    share = (len(types) + len(atoms.nuisance)) / atoms.width
    few = len(types) <= len(shared.principal) or share <= _MAX_SHARE
    if share >= 1 or not few or not _differ_from_twins(atoms, shared, types, others):
        return None
    q, r = torch.linalg.qr(atoms.rows(types).T)
    coefficients = torch.linalg.solve_triangular(r, (shared.whole @ q).T, upper=True)
    strength = (coefficients.norm(dim=1) / atoms.sizes[types]).median()
    sizes = atoms.sizes[: atoms.tokens] * strength
    min_size = CERTIFIED * shared.noise_norm
    alike = _TWIN_GAIN * len(shared.whole) ** 0.5
    small = sizes * DEPENDENT < min_size  # others differ from the types by more than that
    small[others[others < atoms.tokens]] = True
    small[types[types < atoms.tokens]] = False
    tokens = small.nonzero()[:, 0]
    twins = _nearly_equal(atoms, types, tokens, _TWINS**2 / 2).any(0)  # compared apart
    parts = [_project_off(x, q).norm(dim=1) for x in _unit_atoms(atoms, tokens)]
    traces = sizes[tokens] * torch.cat([sizes[:0], *parts])
    silent: Tensor = tokens[traces < torch.where(twins, alike, min_size)]
    return silent
