"""Which atoms the rows of a shared gradient are made of: rank-aware matching pursuit.

A gradient ``G = M^T X`` has few rows (a LoRA of rank r shares r of them for each map) that are
combinations of as many atoms as the batch holds types: multiple measurement vectors with a common
support. Where the rank reaches the number of types, the span test (MUSIC) finds them one by one.
Below it, rank-aware order-recursive matching pursuit does, which is the same test at full rank
(Davies & Eldar 2012, "Rank awareness in joint sparse recovery", algorithm RA-ORMP). Two things are
added. Atoms are whitened first, since the inputs of a language model share most of their direction.
And what is compared is not the score but how unlikely it is for an atom that was not used, joined
with how likely the token is.

Rows are in units of their noise: rounding, and what a defence is known to have added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_RIDGE = 0.1
_AT_FLOOR = 4.0
_CERTIFIED = 4.0
_NEARLY = 100.0
_EXCHANGES = 4
_EQUAL = 1e-6
_CERTAIN = 1e-4
_ALIKE = 1e-2
_NEARLY_EQUAL = 1e-4
_GAIN = 3.0
_LARGEST_SHARE = 0.9
_REFRESH = 8
_SCREENED = 4096
_RESCORED = 32
_WINDOW = 30.0
_GIVEN_UP = 0.9


@dataclass(frozen=True, eq=False)
class SharedRows:
    """The shared rows that read one input, in units of the noise of an entry.

    Attributes:
        whole: (n, d) float64, all rows, less what is no word.
        principal: (k, d) float64, their principal rows that stand out of the noise.
        exact: whether the noise is single precision's rounding alone, so that a certificate can be.
    """

    whole: Tensor
    principal: Tensor
    exact: bool

    @classmethod
    def stack(
        cls,
        gradients: Sequence[Tensor],
        beside: Tensor,
        *,
        rounding: float,
        noise: Sequence[float],
    ) -> SharedRows:
        """Stacks the gradients of maps that read the same input.

        Args:
            gradients: each (n_i, d), one row for each output; none all zero.
            beside: (b, d) float64 orthonormal, what is no word.
            rounding: relative precision that the gradients were computed in.
            noise: standard deviation that was added to each entry of each, besides.
        """
        rows = []
        for gradient, added in zip(gradients, noise, strict=True):
            g = gradient.double()
            rows.append(g / math.hypot(rounding * float(g.square().mean().sqrt()), added))
        whole = torch.cat(rows)
        whole = whole - (whole @ beside.T) @ beside
        exact = rounding <= torch.finfo(torch.float32).eps and not any(noise)
        return cls(whole, _above_noise(whole, exact=exact), exact)

    @property
    def floor(self) -> float:
        """Norm of the noise of all rows together."""
        return math.sqrt(self.whole.numel())

    @property
    def silent(self) -> bool:
        """Whether the rows hold nothing but noise."""
        return not len(self.principal) or float(self.whole.norm()) <= _CERTIFIED * self.floor


def _above_noise(rows: Tensor, *, exact: bool) -> Tensor:
    """Principal rows above what noise alone gives; near rounding the cut is the widest gap."""
    n, d = rows.shape
    if n > d:
        rows = torch.linalg.qr(rows).R
    _, s, basis = torch.linalg.svd(rows, full_matrices=False)
    edge = math.sqrt(n) + math.sqrt(d)
    k = int((s > edge).sum())
    if exact and k:
        first = int((s > edge * _WINDOW).sum())
        last = int((s > edge / _WINDOW).sum())
        steps = s.clamp_min(edge / _WINDOW / 10).log()
        falls = steps[:-1] - steps[1:]
        window = falls[max(first - 1, 0) : last]
        if len(window):
            k = max(first - 1, 0) + int(window.argmax()) + 1
    kept: Tensor = s[:k, None] * basis[:k]
    return kept


class Atoms:
    """The words' directions, ready to be compared with rows.

    Args:
        rows: (V, d) the input of each token.
        beside: (b, d) float64 orthonormal, what is no word.
        ridge: added to the atoms' covariance, as a share of its mean eigenvalue: more where noise
            hides the directions in which atoms vary least.
    """

    def __init__(self, rows: Tensor, beside: Tensor, ridge: float = _RIDGE) -> None:
        self._raw = rows
        self.beside = beside
        self.width = rows.shape[1]
        flat = rows.float()
        if len(beside):
            flat = flat - (flat @ beside.T.float()) @ beside.float()
        norms = flat.norm(dim=1)
        self.usable = norms > 1e-3 * rows.float().norm(dim=1).clamp_min(1e-30)
        flat = flat / norms.clamp_min(1e-30)[:, None]
        flat[~self.usable] = 0
        covariance = (flat.T @ flat).double() / max(1, int(self.usable.sum()))
        if not bool(self.usable.any()):  # what is no word fills all directions
            covariance.diagonal().fill_(1.0)
        covariance.diagonal().add_(ridge * covariance.diagonal().mean())
        lower = torch.linalg.cholesky(covariance)
        eye = torch.eye(self.width, dtype=torch.float64, device=rows.device)
        self.whitening = torch.linalg.solve_triangular(lower, eye, upper=False).T.contiguous()
        self.screen = flat @ self.whitening.float()
        self.screen /= self.screen.norm(dim=1, keepdim=True).clamp_min(1e-30)

    def rows(self, types: Tensor) -> Tensor:
        """(n, d) float64 unit atoms."""
        x = self._raw[types].double()
        return _unit(x - (x @ self.beside.T) @ self.beside)

    def whitened(self, types: Tensor) -> Tensor:
        """(n, d) float64 unit atoms after whitening."""
        return _unit(self.rows(types) @ self.whitening)


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=1, eps=1e-300)


@dataclass(frozen=True, eq=False)
class PursuitResult:
    """What a pursuit ended with.

    Attributes:
        types: (k,) token ids, the surest first.
        scores: (V,) the higher the surer.
        expected: how many types there are, as far as can be said.
        residual: what the types leave of the rows, in units of the noise.
        certified: the types explain all that was shared, so that none is missing whose part of the
            rows lies above rounding, but for types with equal atoms, and none stands in for one
            that nearly equals another.
    """

    types: Tensor
    scores: Tensor
    expected: float
    residual: float
    certified: bool


def explain(atoms: Atoms, shared: SharedRows, log_odds: Tensor) -> PursuitResult:
    """Finds the atoms that shared rows are combinations of.

    Args:
        atoms: of all tokens.
        shared: the rows.
        log_odds: (V,) of each token being in the batch, before anything is seen.
    """
    path = _Pursuit(atoms, shared, log_odds)
    path.run()
    chosen = torch.tensor(path.chosen, dtype=torch.int64, device=log_odds.device)
    evidence = torch.tensor(path.evidence, dtype=torch.float64, device=log_odds.device)
    scores = path.scores.double().nan_to_num(nan=-1e9, posinf=0.0, neginf=-1e9)
    kept, expected, solved = chosen, float(len(chosen)), path.at_floor
    if shared.exact and (solved or _residual(atoms, shared, chosen) <= _NEARLY):
        fewer = prune(atoms, shared, chosen)
        fewer = _exchanged(atoms, shared, fewer, path.nearly_explained())
        if solved or _residual(atoms, shared, fewer) <= _CERTIFIED:
            kept, expected, solved = fewer, float(len(fewer)), True
    if not solved:
        used = evidence.sigmoid()
        places = torch.arange(1, len(used) + 1, device=used.device)
        expected = float(used.sum())
        if len(used):
            kept = chosen[: int((used.cumsum(0) / (places + expected)).argmax()) + 1]
    residual = _residual(atoms, shared, kept)
    share = (len(kept) + len(atoms.beside)) / atoms.width
    certified = (
        shared.exact
        and solved
        and len(kept) > 0
        and residual <= _CERTIFIED
        and (len(kept) <= len(shared.principal) or share <= _LARGEST_SHARE)
        and share < 1
        and _told_from_alike(atoms, shared, kept, torch.cat([chosen, path.nearly_explained()]))
    )
    # What was taken up and dropped again is the least likely of all.
    scores[chosen] = -torch.arange(len(chosen), device=scores.device, dtype=scores.dtype) - 1e6
    scores[kept] = torch.arange(len(kept), 0, -1, device=scores.device, dtype=scores.dtype) + 1e6
    return PursuitResult(kept, scores, expected, residual, certified)


def _residual(atoms: Atoms, shared: SharedRows, types: Tensor) -> float:
    """Root mean square of what types leave of the rows, in units of the noise."""
    left = shared.whole
    if len(types):
        basis = torch.linalg.qr(atoms.rows(types).T).Q
        left = left - (left @ basis) @ basis.T
    return float(left.norm()) / shared.floor


def prune(atoms: Atoms, shared: SharedRows, types: Tensor) -> Tensor:
    """Types without those that could be left out: what they alone explain is below rounding.

    Backward elimination.
    """
    while len(types):
        own = _left_without(shared.principal, atoms.rows(types))
        idle = own < shared.floor
        count = int(idle.sum())
        if not count:
            break
        out = own.argsort()[: -(-count // 2)]
        stays = torch.ones(len(types), dtype=torch.bool, device=types.device)
        stays[out] = False
        types = types[stays]
    return types


def _left_without(rows: Tensor, atoms: Tensor) -> Tensor:
    """(n,) what leaving out each of n atoms alone adds to what they leave of rows.

    That is ``|m_j| / sqrt((X X^T)^-1_jj)``, with coefficients m.
    """
    q, r = torch.linalg.qr(atoms.T)
    unit = torch.eye(len(atoms), dtype=r.dtype, device=r.device)
    inverse = torch.linalg.solve_triangular(r, unit, upper=True)
    own: Tensor = (inverse @ (rows @ q).T).norm(dim=1) / inverse.norm(dim=1)
    return own


def _exchanged(atoms: Atoms, shared: SharedRows, types: Tensor, others: Tensor) -> Tensor:
    """Types, each exchanged for a nearly equal one where that explains more, and pruned again.

    Tokens that were never trained have almost one atom. Which of them it was shows only once all
    the rest is explained.
    """
    if not len(others):
        return types
    candidates = atoms.rows(others)
    for _ in range(_EXCHANGES):
        before, types = types, types.clone()
        alike = atoms.rows(types) @ candidates.T > 1 - _EQUAL
        for j in alike.any(1).nonzero()[:, 0].tolist():
            rest = torch.cat([types[:j], types[j + 1 :]])
            basis = torch.linalg.qr(atoms.rows(rest).T).Q
            left = shared.principal - (shared.principal @ basis) @ basis.T
            tokens = torch.cat([types[j : j + 1], others[alike[j]]])
            x = atoms.rows(tokens)
            x = x - (x @ basis) @ basis.T
            gain = (x @ left.T).square().sum(1) / x.square().sum(1)
            types[j] = tokens[int(gain.argmax())]
        types = prune(atoms, shared, torch.unique(types))
        if len(types) == len(before) and bool((types.sort()[0] == before.sort()[0]).all()):
            break
    return types


def _told_from_alike(atoms: Atoms, shared: SharedRows, types: Tensor, others: Tensor) -> bool:
    """Whether types are right as far as those tell that nearly equal one of them.

    What a type explains beside another that nearly equals it is little, and unlike types that are
    not there may explain that. So none of these explains more of what is left than noise would, and
    no type could be left out, were they all there too. False where they are too many to see.
    """
    others = others[~torch.isin(others, types)]
    own, candidates = atoms.rows(types), atoms.rows(others)
    alike = torch.cdist(own, candidates, compute_mode="donot_use_mm_for_euclid_dist")
    alike = alike < _NEARLY_EQUAL
    near = alike.any(0)
    if not bool(near.any()):
        return True
    if len(types) + int(near.sum()) + len(atoms.beside) > _LARGEST_SHARE * atoms.width:
        return False
    alike, candidates = alike[:, near], candidates[near]
    basis = torch.linalg.qr(own.T).Q
    left = shared.whole - (shared.whole @ basis) @ basis.T
    further = _unit(candidates - (candidates @ basis) @ basis.T)
    noise = max(len(left) ** 0.5, float(left.norm()) / atoms.width**0.5)
    if float((left @ further.T).norm(dim=0).max()) > _GAIN * noise:
        return False
    without = _left_without(shared.whole, torch.cat([own, candidates]))[: len(own)]
    for j in alike.any(1).nonzero()[:, 0].tolist():
        rest = torch.cat([own, candidates[~alike[j]]])
        without[j] = _left_without(shared.whole, rest)[j]
    return float(without.min()) > _CERTIFIED * shared.floor


class _Pursuit:
    """One run of the pursuit: what is left of the rows, and the atoms chosen so far.

    Atoms are compared after whitening; when to end is seen before it, where noise is alike in all
    directions.
    """

    def __init__(self, atoms: Atoms, shared: SharedRows, log_odds: Tensor) -> None:
        self.atoms = atoms
        self.left = shared.principal @ atoms.whitening
        self._plain = shared.principal
        self._rows = len(shared.whole) if shared.exact else len(shared.principal)
        self._plain_basis = self.left.new_zeros(0, atoms.width)
        self.log_odds = log_odds.float()
        self.noise = float(atoms.whitening.square().sum()) / atoms.width
        self.exact = shared.exact
        d = atoms.width
        self.room = d - len(atoms.beside)
        self.basis = self.left.new_zeros(0, d)
        self.rest = torch.ones(len(log_odds), device=log_odds.device)
        self.alive = atoms.usable.clone()
        self.chosen: list[int] = []
        self.evidence: list[float] = []
        self.scores = torch.zeros_like(self.log_odds)
        self.at_floor = False
        self._done = 0

    def run(self) -> None:
        """Chooses atoms until nothing but noise is left, or the evidence ends."""
        most = self.room - 2
        while len(self.chosen) < most and not self._ended():
            directions = self._directions()
            if not len(directions):
                self.at_floor = True
                return
            self._refresh()
            chance = self._screen(directions)
            if self._take_certain(directions, most):
                continue
            if len(self.chosen) > _GIVEN_UP * self.room:
                return
            if not self._take_best(directions, chance, most):
                return

    def nearly_explained(self) -> Tensor:
        """(n,) tokens that were not chosen and whose atoms the chosen ones nearly explain."""
        self._refresh()
        near = self.atoms.usable & (self.rest < _ALIKE * _ALIKE)
        near[torch.tensor(self.chosen, dtype=torch.int64, device=near.device)] = False
        tokens: Tensor = near.nonzero()[:, 0]
        return tokens

    def _ended(self) -> bool:
        """Whether what is left is noise."""
        if not len(self.left):
            self.at_floor = True
            return True
        dims = max(1, self.room - len(self.chosen))
        limit = _AT_FLOOR if self.exact else 1 + 3 * math.sqrt(2 / (len(self.left) * dims))
        self.at_floor = float(self._plain.square().sum()) <= limit * self._rows * dims
        return self.at_floor

    def _directions(self) -> Tensor:
        """(k, d) orthonormal directions of what is left that stand out of the noise."""
        values, vectors = torch.linalg.eigh(self.left @ self.left.T)
        dims = max(1, self.room - len(self.chosen))
        above = values > _AT_FLOOR * self.noise * dims
        basis = (vectors[:, above].T @ self.left) / values[above, None].sqrt()
        directions: Tensor = torch.linalg.qr(basis.T).Q.T.contiguous()
        return directions

    def _refresh(self) -> None:
        """Brings ``rest`` up to date: the share of each atom outside of the chosen ones."""
        new = self.basis[self._done :]
        if len(new):
            self.rest -= (self.atoms.screen @ new.T.float()).square().sum(1)
            self._done = len(self.basis)
        near = (self.alive & (self.rest < _ALIKE)).nonzero()[:, 0]
        if 0 < len(near) <= _SCREENED:
            self.rest[near] = self._outside(near).square().sum(1).float()

    def _outside(self, types: Tensor) -> Tensor:
        """What atoms have outside of the chosen ones, (n, d) float64, not normalised."""
        x = self.atoms.whitened(types)
        for _ in range(2):
            x = x - (x @ self.basis.T) @ self.basis
        return x

    def _evidence(self, score: Tensor, chance: float, k: int) -> Tensor:
        """Log likelihood ratio of scores: any score alike if used, Beta around ``chance`` if not.

        k of m orthogonal directions hold a share of an unused atom that is Beta(k/2, (m-k)/2)
        distributed; m = k / chance, since atoms fill fewer directions than there are.
        """
        a, b = k / 2, max(k / chance / 2 - k / 2, 1e-3)
        s = score.clamp(chance, 1 - 1e-6)
        constant = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
        return -(constant + (a - 1) * s.log() + (b - 1) * (-s).log1p())

    def _screen(self, directions: Tensor) -> float:
        """Scores every atom; returns the mean score, which is chance's."""
        share = (self.atoms.screen @ directions.T.float()).square().sum(1)
        score = (share / self.rest.clamp_min(1e-7)).clamp(0, 1)
        self.alive &= self.rest > 1e-9
        chance = float(score[self.alive].mean().clamp(1e-6, 0.999))
        self.scores = self._evidence(score, chance, len(directions)) + self.log_odds
        self.scores[~self.alive] = -math.inf
        self._raw = score.masked_fill(~self.alive, -1.0)
        return chance

    def _append(self, token: int, outside: Tensor, evidence: float) -> None:
        q = outside - self.basis.T @ (self.basis @ outside)
        q = q / q.norm()
        self.basis = torch.cat([self.basis, q[None]])
        self.left = self.left - (self.left @ q)[:, None] * q
        x = self.atoms.rows(torch.tensor([token], device=q.device))[0]
        for _ in range(2):
            x = x - self._plain_basis.T @ (self._plain_basis @ x)
        x = x / x.norm().clamp_min(1e-300)
        self._plain_basis = torch.cat([self._plain_basis, x[None]])
        self._plain = self._plain - (self._plain @ x)[:, None] * x
        self.chosen.append(token)
        self.evidence.append(evidence)
        self.alive[token] = False

    def _take_certain(self, directions: Tensor, most: int) -> bool:
        """Takes all atoms that lie in what is left, as far as they do not explain each other."""
        types = (self._raw > 1 - _CERTAIN).nonzero()[:, 0]
        if not 0 < len(types) <= _SCREENED:
            return False
        types = types[self._raw[types].argsort(descending=True, stable=True)]
        outside = self._outside(types)
        norms = outside.norm(dim=1)
        score = (outside @ directions.T).square().sum(1) / norms.square()
        taken = False
        start = len(self.basis)
        for i, token in enumerate(types.tolist()):
            if float(score[i]) < 1 - _CERTAIN or len(self.chosen) >= most:
                continue
            x = outside[i]
            new = self.basis[start:]
            x = x - new.T @ (new @ x)
            if float(x.norm()) < _ALIKE * float(norms[i]) or len(new) >= len(directions):
                continue
            self._append(token, x, 50.0)
            taken = True
        return taken

    def _take_best(self, directions: Tensor, chance: float, most: int) -> bool:
        """Takes the likeliest atoms one by one, compared among those that were likely before."""
        subset = self.scores.topk(min(_SCREENED, len(self.scores))).indices
        screen, rest = self.atoms.screen[subset], self.rest[subset].clone()
        odds = self.log_odds[subset]
        alive = self.alive[subset]
        for step in range(_REFRESH):
            if step:
                if len(self.chosen) >= most or self._ended():
                    return True
                directions = self._directions()
                if not len(directions):
                    return True
            k = len(directions)
            share = (screen @ directions.T.float()).square().sum(1)
            score = (share / rest.clamp_min(1e-7)).clamp(0, 1)
            value = self._evidence(score, chance, k) + odds
            value[~alive] = -math.inf
            top = value.topk(min(_RESCORED, len(value))).indices
            top = top[alive[top]]
            if not len(top):
                return bool(step)
            outside = self._outside(subset[top])
            norms = outside.square().sum(1)
            exact = (outside @ directions.T).square().sum(1) / norms.clamp_min(1e-30)
            exact[norms < 1e-14] = 0
            value = self._evidence(exact.float(), chance, k) + odds[top]
            best = int(value.argmax())
            if float(exact[best]) <= 0:
                return bool(step)
            place = int(top[best])
            alive[place] = False
            self._append(int(subset[place]), outside[best], float(value[best]))
            rest -= (screen @ self.basis[-1].float()).square()
        return True
