"""Rank-aware matching pursuit: the atoms that the rows of a shared gradient are made of.

A gradient ``G = M^T X`` has few rows (a LoRA of rank r shares r of them for each map) that are
combinations of as many atoms as the batch holds types: multiple measurement vectors with a common
support. Where the rank reaches the number of types, the span test (MUSIC) finds them one by one.
Below it, rank-aware order-recursive matching pursuit does, which is the same test at full rank
(Davies & Eldar 2012, "Rank awareness in joint sparse recovery", algorithm RA-ORMP). Two things are
added. Atoms are whitened first, because the inputs of a language model share most of their
direction. Atoms are compared by a likelihood ratio that includes how frequent the token is.

Rows are in units of their noise: rounding, and what a defence is known to have added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedleak.attacks.row_space.atoms import Atoms, normalize

_TWINS_AT_ONCE = 1024  # nearly equal atoms that are in float64 at once, which bounds the memory
_ROUNDED_COSINE = 1e-5  # 1 - cosine that is compared in float64: far above float32's rounding
_NO_SQUARE = 1e-15  # squared norm of a part that is rounding in float64


# Thresholds of the pursuit; none was tuned.
NOISE_FLOOR = 4.0  # variance of a residual over the noise's, below which the pursuit ends
CERTIFIED = 4.0  # largest root mean square of a residual, over the noise's, for a certificate
NEARLY_CERTIFIED = 100.0  # the same, up to which pruning and exchanging are tried
LITTLE = 1e4  # the same, from which they are tried before all is explained; 1e-3 of the rows
EXCHANGES = 4  # rounds in which types are exchanged for nearly equal ones
EQUAL = 1e-6  # 1 - cosine up to which two atoms are exchanged for each other
CERTAIN = 1e-4  # share of an atom outside of the residual's span up to which it is surely used
DEPENDENT = 1e-2  # norm of an atom outside of the chosen ones up to which they nearly explain it
TWINS = 1e-4  # distance of unit atoms up to which a certificate must distinguish them
TWIN_GAIN = 3.0  # what an atom may explain of the residual in units of the noise, for the same
LARGEST_SHARE = 0.9  # types over directions up to which a certificate is given
GIVE_UP = 0.9  # the same, from which the pursuit ends without one: too many unused atoms fit then
CHOSEN_AT_ONCE = 8  # atoms that are chosen between two scorings of the whole vocabulary: for speed
SCREENED = 4096  # atoms that are compared between two such scorings: for speed
RESCORED = 32  # atoms that are compared in double precision: for speed
GAP = 30.0  # factor around the noise within which the widest gap of singular values is the rank


@dataclass(frozen=True, eq=False)
class SharedRows:
    """The shared rows that read one input, in units of the noise of an entry.

    Attributes:
        whole: (n, d) float64, all rows, with what is no word projected off.
        principal: (k, d) float64, their principal rows above the noise.
        exact: whether the noise is single precision's rounding alone, as a certificate needs.
    """

    whole: Tensor
    principal: Tensor
    exact: bool

    @classmethod
    def stack(
        cls, gradients: Sequence[Tensor], beside: Tensor, *, rounding: float, noise: Sequence[float]
    ) -> SharedRows:
        """Return the stacked gradients of maps that read the same input.

        Args:
            gradients: each (n_i, d), one row for each output; none all zero.
            beside: (b, d) float64 orthonormal, the directions that are no word.
            rounding: relative precision that the gradients were computed in.
            noise: standard deviation of the noise that was added to each gradient.
        """
        rows = []
        for gradient, added in zip(gradients, noise, strict=True):
            g = gradient.double()
            rows.append(g / math.hypot(rounding * float(g.square().mean().sqrt()), added))
        whole = torch.cat(rows)
        whole = whole - (whole @ beside.T) @ beside
        exact = rounding <= torch.finfo(torch.float32).eps and not any(noise)
        dims = beside.shape[1] - len(beside)
        return cls(whole, _above_noise(whole, dims, exact=exact), exact)

    @property
    def floor(self) -> float:
        """Return the norm of the noise of all rows together."""
        return math.sqrt(self.whole.numel())

    @property
    def silent(self) -> bool:
        """Return whether the rows hold nothing but noise."""
        return not len(self.principal) or float(self.whole.norm()) <= CERTIFIED * self.floor


def _above_noise(rows: Tensor, dims: int, *, exact: bool) -> Tensor:
    """Return the principal rows above the noise; near rounding the cut is the widest gap.

    A fall behind ``dims`` directions, to those that were projected off, is no gap.
    """
    n, d = rows.shape
    if n > d:
        rows = torch.linalg.qr(rows).R
    _, s, basis = torch.linalg.svd(rows, full_matrices=False)
    s = s[:dims]
    edge = math.sqrt(n) + math.sqrt(d)
    k = int((s > edge).sum())
    if exact and k:
        first = int((s > edge * GAP).sum())
        last = int((s > edge / GAP).sum())
        steps = s.clamp_min(edge / GAP / 10).log()
        falls = steps[:-1] - steps[1:]
        window = falls[max(first - 1, 0) : last]
        if len(window):
            k = max(first - 1, 0) + int(window.argmax()) + 1
    principal: Tensor = s[:k, None] * basis[:k]
    return principal


@dataclass(frozen=True, eq=False)
class PursuitResult:
    """The types that a pursuit chose.

    Attributes:
        types: (k,) token ids, the surest first.
        scores: (V,) the higher the surer.
        expected: estimated number of types; NaN where the directions ran out before the types.
        residual: root mean square of what the types leave of the rows, in units of the noise.
        certified: whether the types explain all that was shared, and every token leaves a trace.
            Then no type is missing whose part lies above rounding, and no type replaces another
            one that nearly equals it.
        silent: (m,) tokens that would leave no trace beside the types, because their inputs are
            zero, or equal to a type's; None where the types do not explain all that was shared.
    """

    types: Tensor
    scores: Tensor
    expected: float
    residual: float
    certified: bool
    silent: Tensor | None = None


def explain(atoms: Atoms, shared: SharedRows, log_odds: Tensor) -> PursuitResult:
    """Return the atoms that shared rows are combinations of.

    Args:
        atoms: of all tokens.
        shared: the rows.
        log_odds: (V,) prior of each token being in the batch.
    """
    path = _Pursuit(atoms, shared, log_odds)
    solved, types = _search(path, atoms, shared)
    chosen = path.tokens
    evidence = torch.tensor(path.evidence, dtype=torch.float64, device=log_odds.device)
    scores = path.scores.double().nan_to_num(nan=-1e9, posinf=0.0, neginf=-1e9)
    expected = float(len(types))
    if not solved:
        used = evidence.sigmoid()
        places = torch.arange(1, len(used) + 1, device=used.device)
        expected = float(used.sum())
        if len(used):
            types = chosen[: int((used.cumsum(0) / (places + expected)).argmax()) + 1]
        most = GIVE_UP * path.dims
        if len(chosen) > most:
            expected = math.nan
            if len(shared.principal) > most and not path.certain:
                types = chosen[:0]
    residual = _residual(atoms, shared, types)
    share = (len(types) + len(atoms.beside)) / atoms.width
    silent: Tensor | None = None
    if (
        shared.exact
        and solved
        and len(types) > 0
        and residual <= CERTIFIED
        and (len(types) <= len(shared.principal) or share <= LARGEST_SHARE)
        and share < 1
    ):
        others = torch.cat([chosen, path.dependent_tokens()])
        if _differ_from_twins(atoms, shared, types, others):
            silent = _silent_tokens(atoms, shared, types, others)
    certified = silent is not None and not len(silent)
    # Tokens that were chosen and then pruned are the least likely of all.
    scores[chosen] = -torch.arange(len(chosen), device=scores.device, dtype=scores.dtype) - 1e6
    scores[types] = torch.arange(len(types), 0, -1, device=scores.device, dtype=scores.dtype) + 1e6
    return PursuitResult(types, scores, expected, residual, certified, silent)


def _search(path: _Pursuit, atoms: Atoms, shared: SharedRows) -> tuple[bool, Tensor]:
    """Run a pursuit, and return whether it explains the rows, and the types without needless ones.

    Nearly equal types are exchanged when little is left, or else many unlike ones would be chosen,
    one by one, for what a wrong one among them leaves.
    """
    for early in (shared.exact, False):
        nearly, most = NEARLY_CERTIFIED, CERTIFIED
        if unfinished := path.run(early):
            free = 1 - len(path.chosen) / atoms.width
            nearly, most = LITTLE, math.sqrt(NOISE_FLOOR * free)
        if shared.exact and (path.at_floor or _residual(atoms, shared, path.tokens) <= nearly):
            fewer = prune(atoms, shared, path.tokens)
            fewer = _exchange_twins(atoms, shared, fewer, path.dependent_tokens())
            if path.at_floor or _residual(atoms, shared, fewer) <= most:
                return True, fewer
        if not unfinished:
            break
    return path.at_floor, path.tokens


def _residual(atoms: Atoms, shared: SharedRows, types: Tensor) -> float:
    """Return the root mean square of what types leave of the rows, in units of the noise."""
    residual = shared.whole
    if len(types):
        residual = _project_off(residual, torch.linalg.qr(atoms.rows(types).T).Q)
    return float(residual.norm()) / shared.floor


def _project_off(rows: Tensor, basis: Tensor) -> Tensor:
    """Return (n, d) rows without their part in the span of a (d, k) orthonormal basis."""
    return rows - (rows @ basis) @ basis.T


def prune(atoms: Atoms, shared: SharedRows, types: Tensor) -> Tensor:
    """Return types without those that alone explain less than rounding (backward elimination)."""
    while len(types):
        parts = _unique_parts(shared.principal, atoms.rows(types))
        count = int((parts < shared.floor).sum())
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


def _exchange_twins(atoms: Atoms, shared: SharedRows, types: Tensor, others: Tensor) -> Tensor:
    """Return types, each replaced by a nearly equal one that explains more, and pruned again.

    Tokens that were never trained have almost the same atom. Which of them was used shows only
    after all the rest is explained. There may be tens of thousands, which are read block by block.
    """
    for _ in range(EXCHANGES):
        previous, types = types, types.clone()
        equal = _nearly_equal(atoms, types, others, EQUAL)
        near = equal.any(0)
        equal, twins = equal[:, near], others[near]
        places = equal.any(1).nonzero()[:, 0].tolist()
        if not places:
            break
        # Of what no chosen atom explains of each: squared norm, and energy along the rows.
        basis = torch.linalg.qr(atoms.rows(types).T).Q
        residual = _project_off(shared.principal, basis)
        pairs = ((x @ basis, x @ residual.T) for x in _unit_atoms(atoms, twins))
        sums = [(1 - x.square().sum(1), y.square().sum(1)) for x, y in pairs]
        norms, energy = map(torch.cat, zip(*sums, strict=True))
        for j in places:
            added, part, cosines, cross = _place(atoms, shared, types, j, twins, residual)
            size = part.square().sum()
            sizes = norms + cosines.square()
            energies = energy + cosines * (cosines * size + 2 * cross)
            gain = energies / sizes.clamp_min(_NO_SQUARE)
            gain[~equal[j] | torch.isin(twins, types)] = 0
            if float(gain.max()) <= float(size):
                continue
            types[j] = twins[int(gain.argmax())]
            residual = residual + torch.outer(part, added)
            added, part, cosines, cross = _place(atoms, shared, types, j, twins, residual)
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


def _place(
    atoms: Atoms, shared: SharedRows, types: Tensor, place: int, twins: Tensor, residual: Tensor
) -> tuple[Tensor, ...]:
    """Return the direction (d,) that one of the types adds to the others, and the parts there.

    These are the rows' part (k,); the twins' part (n,); and the product (n,) of the rows' part with
    what ``residual``, (k, d) rows, holds of each twin.
    """
    added = _added_direction(atoms.rows(types), place)
    part = shared.principal @ added
    columns = torch.stack([added, part @ residual], 1)
    cosines, cross = torch.cat([x @ columns for x in _unit_atoms(atoms, twins)]).T
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
    twins = _nearly_equal(atoms, types, others, TWINS**2 / 2)
    has_twin = twins.any(0)
    if not bool(has_twin.any()):
        return True
    directions = len(types) + int(has_twin.sum()) + len(atoms.beside)
    if directions > LARGEST_SHARE * atoms.width:
        return False
    twins = twins[:, has_twin]
    chosen, candidates = atoms.rows(types), atoms.rows(others[has_twin])
    basis = torch.linalg.qr(chosen.T).Q
    residual = _project_off(shared.whole, basis)
    further = normalize(_project_off(candidates, basis))
    noise = max(len(residual) ** 0.5, float(residual.norm()) / atoms.width**0.5)
    if float((residual @ further.T).norm(dim=0).max()) > TWIN_GAIN * noise:
        return False
    parts = _unique_parts(shared.whole, torch.cat([chosen, candidates]))[: len(chosen)]
    for j in twins.any(1).nonzero()[:, 0].tolist():
        rest = torch.cat([chosen, candidates[~twins[j]]])
        parts[j] = _unique_parts(shared.whole, rest)[j]
    return float(parts.min()) > CERTIFIED * shared.floor


def _silent_tokens(atoms: Atoms, shared: SharedRows, types: Tensor, others: Tensor) -> Tensor:
    """Return the (m,) tokens whose trace beside types could be rounding.

    A token's trace is that of a type of median strength, at the token's input: its size, times the
    share of it that lies outside of the types' inputs. It is nothing for an input of zeros, and for
    one that equals a type's or is a multiple of it. ``others`` are tokens whose atoms the types
    nearly explain.
    """
    q, r = torch.linalg.qr(atoms.rows(types).T)
    coefficients = torch.linalg.solve_triangular(r, (shared.whole @ q).T, upper=True)
    strength = (coefficients.norm(dim=1) / atoms.sizes[types]).median()
    sizes = atoms.sizes[: atoms.tokens] * strength
    least = CERTIFIED * shared.floor
    alike = TWIN_GAIN * len(shared.whole) ** 0.5
    small = sizes * DEPENDENT < least  # others differ from the types by more than that
    small[others[others < atoms.tokens]] = True
    small[types[types < atoms.tokens]] = False
    tokens = small.nonzero()[:, 0]
    twins = _nearly_equal(atoms, types, tokens, TWINS**2 / 2).any(0)  # compared apart
    parts = [_project_off(x, q).norm(dim=1) for x in _unit_atoms(atoms, tokens)]
    traces = sizes[tokens] * torch.cat([sizes[:0], *parts])
    silent: Tensor = tokens[traces < torch.where(twins, alike, least)]
    return silent


class _Pursuit:
    """One run of the pursuit: the residual of the rows, and the atoms that were chosen.

    Atoms are compared after whitening. Whether to end is decided before whitening, where noise is
    equal in all directions.
    """

    def __init__(self, atoms: Atoms, shared: SharedRows, log_odds: Tensor) -> None:
        self.atoms = atoms
        self.residual = shared.principal @ atoms.whitening
        self._plain = shared.principal
        self._rows = len(shared.whole) if shared.exact else len(shared.principal)
        self._plain_basis = self.residual.new_zeros(0, atoms.width)
        self.log_odds = log_odds.float()
        self.noise = float(atoms.whitening.square().sum()) / atoms.width
        self.exact = shared.exact
        self.dims = atoms.width - len(atoms.beside)
        self.basis = self.residual.new_zeros(0, atoms.width)
        self.outside = torch.ones(len(log_odds), device=log_odds.device)
        self.alive = atoms.usable.clone()
        self.chosen: list[int] = []
        self.evidence: list[float] = []
        self.scores = torch.zeros_like(self.log_odds)
        self.at_floor = False
        self.certain = 0
        self._projected = 0

    def run(self, early: bool) -> bool:
        """Choose atoms until only noise remains, or no atom has evidence.

        Args:
            early: whether to end where little remains, which exchanges of nearly equal atoms may
                explain.

        Returns:
            Whether it ended early.
        """
        most = self.dims - 2
        little = LITTLE**2 * self._rows * self.atoms.width
        while len(self.chosen) < most and not self._is_noise():
            directions = self._directions()
            if not len(directions):
                self.at_floor = True
                return False
            if early and float(self._plain.square().sum()) <= little:
                return True
            chance = self._screen(directions)
            if self._choose_certain(directions, most):
                continue
            if len(self.chosen) > GIVE_UP * self.dims:
                return False
            if not self._choose_likeliest(directions, chance, most):
                return False
        return False

    @property
    def tokens(self) -> Tensor:
        """Return the (k,) tokens that were chosen."""
        return torch.tensor(self.chosen, dtype=torch.int64, device=self.log_odds.device)

    def dependent_tokens(self) -> Tensor:
        """Return the (n,) tokens not chosen whose atoms the chosen ones nearly explain."""
        self._compare(self.basis[:0])
        dependent = self.atoms.usable & (self.outside < DEPENDENT**2)
        dependent[self.tokens] = False
        tokens: Tensor = dependent.nonzero()[:, 0]
        return tokens

    def _is_noise(self) -> bool:
        """Return whether the residual is noise alone, and record it."""
        if not len(self.residual):
            self.at_floor = True
            return True
        dims = max(1, self.dims - len(self.chosen))
        chi_square = 1 + 3 * math.sqrt(2 / (len(self.residual) * dims))
        limit = NOISE_FLOOR if self.exact else chi_square
        self.at_floor = float(self._plain.square().sum()) <= limit * self._rows * dims
        return self.at_floor

    def _directions(self) -> Tensor:
        """Return (k, d) orthonormal directions of the residual above the noise."""
        values, vectors = torch.linalg.eigh(self.residual @ self.residual.T)
        dims = max(1, self.dims - len(self.chosen))
        above = values > NOISE_FLOOR * self.noise * dims
        basis = (vectors[:, above].T @ self.residual) / values[above, None].sqrt()
        directions: Tensor = torch.linalg.qr(basis.T).Q.T.contiguous()
        return directions

    def _compare(self, directions: Tensor) -> Tensor:
        """Update ``outside``, and return (V,) the square of each atom's part in (k, d) directions.

        ``outside`` is the share of each atom outside of the chosen ones.
        """
        new = len(self.basis) - self._projected
        rows = torch.cat([self.basis[self._projected :], directions])
        squares = self.atoms.products(rows).square_()
        self.outside -= squares[:, :new].sum(1)
        self._projected = len(self.basis)
        near = (self.alive & (self.outside < DEPENDENT)).nonzero()[:, 0]
        if 0 < len(near) <= SCREENED:
            self.outside[near] = self._orthogonal_parts(near).square().sum(1).float()
        shares: Tensor = squares[:, new:].sum(1)
        return shares

    def _orthogonal_parts(self, types: Tensor) -> Tensor:
        """Return atoms without their part in the chosen ones, (n, d) float64, not normalised."""
        x = self.atoms.whitened(types)
        for _ in range(2):
            x = x - (x @ self.basis.T) @ self.basis
        return x

    def _evidence(self, score: Tensor, chance: float, k: int) -> Tensor:
        """Return the log likelihood ratio of scores: uniform if used, Beta around chance if not.

        k of m orthogonal directions hold a share of an unused atom that is Beta(k/2, (m-k)/2)
        distributed; m = k / chance, because atoms fill fewer directions than there are.
        """
        a, b = k / 2, max(k / chance / 2 - k / 2, 1e-3)
        s = score.clamp(chance, 1 - 1e-6)
        constant = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
        return -(constant + (a - 1) * s.log() + (b - 1) * (-s).log1p())

    def _screen(self, directions: Tensor) -> float:
        """Score every atom, and return the mean score, which is that of chance."""
        share = self._compare(directions)
        score = (share / self.outside.clamp_min(1e-7)).clamp(0, 1)
        self.alive &= self.outside > 1e-9
        chance = float(score[self.alive].mean().clamp(1e-6, 0.999))
        self.scores = self._evidence(score, chance, len(directions)) + self.log_odds
        self.scores[~self.alive] = -math.inf
        self._raw = score.masked_fill(~self.alive, -1.0)
        return chance

    def _append(self, token: int, part: Tensor, evidence: float) -> None:
        q = part - self.basis.T @ (self.basis @ part)
        q = q / q.norm()
        self.basis = torch.cat([self.basis, q[None]])
        self.residual = self.residual - (self.residual @ q)[:, None] * q
        x = self.atoms.rows(torch.tensor([token], device=q.device))[0]
        for _ in range(2):
            x = x - self._plain_basis.T @ (self._plain_basis @ x)
        x = x / x.norm().clamp_min(1e-300)
        self._plain_basis = torch.cat([self._plain_basis, x[None]])
        self._plain = self._plain - (self._plain @ x)[:, None] * x
        self.chosen.append(token)
        self.evidence.append(evidence)
        self.alive[token] = False

    def _choose_certain(self, directions: Tensor, most: int) -> bool:
        """Choose all atoms within the residual's span that do not explain each other.

        Returns:
            Whether any was chosen.
        """
        types = (self._raw > 1 - CERTAIN).nonzero()[:, 0]
        if not len(types):
            return False
        # Of thousands that were never trained and equal a type, one is chosen, and then none.
        types = types[self.scores[types].topk(min(len(types), SCREENED)).indices]
        types = types[self._raw[types].argsort(descending=True, stable=True)]
        parts = self._orthogonal_parts(types)
        norms = parts.norm(dim=1)
        score = (parts @ directions.T).square().sum(1) / norms.square()
        start = len(self.basis)
        for i, token in enumerate(types.tolist()):
            if float(score[i]) < 1 - CERTAIN or len(self.chosen) >= most:
                continue
            x = parts[i]
            new = self.basis[start:]
            x = x - new.T @ (new @ x)
            dependent = float(x.norm()) < DEPENDENT * float(norms[i])
            if dependent or len(new) >= len(directions):
                continue
            self._append(token, x, 50.0)
            self.certain += 1
        return len(self.basis) > start

    def _choose_likeliest(self, directions: Tensor, chance: float, most: int) -> bool:
        """Choose a few atoms one by one, among those that scored best in the whole vocabulary.

        Returns:
            Whether the pursuit goes on.
        """
        subset = self.scores.topk(min(SCREENED, len(self.scores))).indices
        screen, outside = self.atoms.subset(subset), self.outside[subset].clone()
        odds = self.log_odds[subset]
        alive = self.alive[subset]
        for step in range(CHOSEN_AT_ONCE):
            if step:
                if len(self.chosen) >= most or self._is_noise():
                    return True
                directions = self._directions()
                if not len(directions):
                    return True
            k = len(directions)
            share = self.atoms.products(directions, screen).square().sum(1)
            score = (share / outside.clamp_min(1e-7)).clamp(0, 1)
            value = self._evidence(score, chance, k) + odds
            value[~alive] = -math.inf
            top = value.topk(min(RESCORED, len(value))).indices
            top = top[alive[top]]
            if not len(top):
                return bool(step)
            parts = self._orthogonal_parts(subset[top])
            norms = parts.square().sum(1)
            exact = (parts @ directions.T).square().sum(1) / norms.clamp_min(1e-30)
            exact[norms < 1e-14] = 0
            value = self._evidence(exact.float(), chance, k) + odds[top]
            best = int(value.argmax())
            if float(exact[best]) <= 0:
                return bool(step)
            place = int(top[best])
            alive[place] = False
            self._append(int(subset[place]), parts[best], float(value[best]))
            outside -= self.atoms.products(self.basis[-1:], screen)[:, 0].square()
        return True
