"""Rank-aware matching pursuit: the atoms that the rows of a shared gradient are made of.

An atom is the input vector of one token of the vocabulary at a weight matrix. The matrix's gradient
``G = M^T X`` has few rows (with a LoRA of rank r, r for each matrix). They are combinations of as
many atoms as the batch has types (distinct tokens): multiple measurement vectors with a common
support. If the rank reaches the number of types, the span test (MUSIC) finds them one by one. For a
lower rank there is rank-aware order-recursive matching pursuit, which is the same test at full rank
(Davies & Eldar 2012, "Rank awareness in joint sparse recovery", algorithm RA-ORMP). Two things are
added. Atoms are whitened first, because the inputs of a language model share most of their
direction. Atoms are compared by a likelihood ratio that includes the token's prior probability.

:func:`explain` runs the pursuit: it chooses atoms until only noise remains of the rows. Chosen
atoms that are not needed are then removed, and the result is certified if no other types could
explain the rows (:mod:`~lightning_fedleak.attacks.row_space.certificate`). Rows are in units of
their noise, which is rounding and the declared noise of a defence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedleak.attacks.row_space import certificate
from lightning_fedleak.attacks.row_space.atoms import Atoms, Subset
from lightning_fedleak.attacks.row_space.shared_rows import MAX_NOISE_RATIO, SharedRows
from lightning_fedleak.progress import operations_per_second

# Thresholds of the pursuit; none was tuned.
NOISE_FLOOR = 4.0  # ratio of the residual's variance to the noise's at which the pursuit ends
NEARLY_CERTIFIED = 100.0  # ratio of residual to noise up to which types are pruned, exchanged
LITTLE = 1e4  # ratio of residual to noise at which that is tried early; about 1e-3 of the rows
CERTAIN = 1e-4  # share of an atom outside the residual's span up to which it is surely used
GIVE_UP = 0.9  # types over directions above which it ends uncertified: too many atoms fit then
CHOSEN_AT_ONCE = 8  # atoms that are chosen between two scorings of a pool: for speed
# Number of atoms with the best scores in the vocabulary, which form a pool.
#
# For speed, only they are scored until the whole vocabulary is scored again. F1 did not fall: it
# was .69, .68 with a pool of 2,048 of 32,000, and .66 without one (14 measurements as for
# SCREENED).
POOL = 4096
POOL_SCORINGS = 4  # scorings of a pool, that of the whole vocabulary among them; 8 are no faster
# Number of atoms of the pool that are compared between two scorings, for speed.
#
# With 4,096, the pursuit took 10% longer, and F1 was .770 instead of .774 (7 measurements of a LoRA
# of stories15M, batches of 8 texts x 64 tokens of IMDB, November 2026).
SCREENED = 1024
RESCORED = 8  # atoms that are compared in double precision: for speed
# Choices in a row without evidence, by which a pursuit has lost the types.
#
# With 4 or 5, F1 after undeclared changes of 240 gradients of tiny Llamas was .03 and .05 lower
# (November 2026).
LOST = 3
# Residual after all choices over that after the first ones, in units of what chance explains, above
# which later ones explain only noise.
#
# It was .12 to 1.1 in 22 looks at tiny Llamas and stories15M whose later choices were noise, and up
# to .0014 in 6 whose later choices were used (November 2026). Larger: used types are left out.
# Smaller: more of the named types are noise.
ONLY_NOISE = 0.02
FULL = 0.95  # share of the directions above which any types explain any rows, so that nothing shows
# Operations per second of a pursuit over those of a large matrix product.
#
# It was fitted for :func:`pursuit_seconds`, with the two numbers below, to runs on one core of
# x86-64 with 74 to 512 types, LoRAs of rank 8 and 64 and whole matrices, vocabularies of 1,000 to
# 50,000, and widths of 256 to 1,024. Single runs had .18 to .4 (November 2026).
EFFICIENCY = 0.25
# Time of the pursuits of a look over that of one: it goes on after an early end, and reads the rows
# above a gap again.
#
# Looks at 8 x 64 random tokens had 2.0 to 6.8 (six LoRAs of rank 1 to 64, widths of 64 to 256,
# vocabularies of 1,000 to 64,000, one core, November 2026). Smaller: looks take longer than
# ``look_seconds``. Larger: attacks that would fit are left out.
PURSUITS = 4.5
# A product of all atoms with k directions takes the time of .33 (k + 60) directions: memory bounds
# the speed of products with few columns.
_FREE_ROWS, _COLUMNS_PER_ROW = 60, 0.33


@dataclass(frozen=True, eq=False)
class PursuitResult:
    """The types that a pursuit chose.

    Attributes:
        types: (k,) token ids, in order of descending certainty.
        scores: (V,) certainty of each token, higher is more certain.
        expected: estimated number of types; NaN if there may be more than the rows distinguish.
        residual: root mean square of the rows' residual after the types, in units of the noise.
        certified: whether the types explain the rows, and every other token would leave a trace
            (a residual above rounding). Then no type is missing whose part of the rows is above
            rounding, and no type is mistaken for another one with a nearly equal atom.
        silent: (m,) tokens that would leave no trace next to the types, because their inputs are
            zero or equal to the input of a type; None if the types do not explain the rows.
        evident: number of types whose evidence was beyond what chance gives any unused token.
    """

    types: Tensor
    scores: Tensor
    expected: float
    residual: float
    certified: bool
    silent: Tensor | None = None
    evident: int = 0


def explain(atoms: Atoms, shared: SharedRows, log_odds: Tensor) -> PursuitResult:
    """Return the atoms that shared rows are combinations of.

    A pursuit ends at the noise if its size is known. Otherwise types that do not fully explain the
    rows are cut where the evidence of them ends.

    Args:
        atoms: The atoms of all tokens.
        shared: The rows.
        log_odds: The prior log odds that each token is in the batch, (V,).
    """
    pursuit = _Pursuit(atoms, shared, log_odds)
    solved, types = _search(pursuit, atoms, shared)
    chosen = pursuit.tokens
    evidence = torch.tensor(pursuit.evidence, dtype=torch.float64, device=log_odds.device)
    scores = pursuit.scores.double().nan_to_num(nan=-1e9, posinf=0.0, neginf=-1e9)
    silent: Tensor | None = None
    residual = certificate.residual_size(atoms, shared, types)
    # Each unused token has the evidence x by chance with a probability of at most exp(-x) times its
    # prior odds, so that the log of all odds is exceeded by one of them at most, on average.
    by_chance = log_odds.double().exp().sum().log()
    # If as many types as rows are certain, and the next is not, they span the rows. Types beyond
    # them fit a change of the rows.
    rank = len(shared.principal)
    is_certain = evidence.isinf()
    beyond_span = len(types) > rank and bool(is_certain[:rank].all() & ~is_certain[rank])
    explained = solved and shared.exact and residual <= MAX_NOISE_RATIO
    if explained and len(types) > 0 and not beyond_span:
        replacements = torch.cat([chosen, pursuit.dependent_tokens()])
        silent = certificate.silent_tokens(atoms, shared, types, replacements)
    places = torch.isin(chosen, types).nonzero()[:, 0]
    if silent is None and shared.noise != "declared":
        left = pursuit.left[places] / pursuit.left[-1].clamp_min(1e-300)
        if len(chosen) > FULL * pursuit.dims:
            left = torch.ones_like(left)
        count = _count_evident(evidence[places], left, shared, by_chance)
        count = rank if beyond_span else count
        if count < len(places):
            places = places[:count]
            types = chosen[places]
    expected = float(len(types))
    if not solved:
        probabilities = evidence[places].sigmoid()
        ranks = torch.arange(1, len(probabilities) + 1, device=probabilities.device)
        expected = float(probabilities.sum())
        if len(probabilities):
            count = int((probabilities.cumsum(0) / (ranks + expected)).argmax()) + 1
            types = chosen[places[:count]]
        max_types = GIVE_UP * pursuit.dims
        if len(chosen) > min(max_types, pursuit.dims - 1 - len(shared.principal)):
            expected = math.nan
            if len(shared.principal) > max_types and not pursuit.certain:
                types = chosen[:0]
    residual = certificate.residual_size(atoms, shared, types)
    certified = silent is not None and not len(silent)
    # Tokens that were chosen and then pruned are the least likely of all.
    scores[chosen] = -torch.arange(len(chosen), device=scores.device, dtype=scores.dtype) - 1e6
    scores[types] = torch.arange(len(types), 0, -1, device=scores.device, dtype=scores.dtype) + 1e6
    evident = int((evidence[places] > by_chance).sum())
    return PursuitResult(types, scores, expected, residual, certified, silent, evident)


def _count_evident(evidence: Tensor, left: Tensor, shared: SharedRows, by_chance: Tensor) -> int:
    """Return how many types a pursuit chose before it had only noise to explain.

    It is lost after :data:`LOST` choices in a row by chance, unless its later choices explain far
    more of the rows than chance does. The evidence that chance gives some unused token is below
    ``by_chance`` in most batches; if n types are used, by about log n. Noise that nobody declared
    may be anything, so that n counts as 1 there.

    Args:
        evidence: (n,) the evidence of each choice.
        left: (n,) what was left of the rows before each choice over what is left in the end, as
            squares in each direction that is not explained.
        shared: The rows.
        by_chance: () the evidence that chance gives an unused token.
    """
    n = len(evidence)
    if shared.noise == "estimated":
        by_chance = by_chance - torch.arange(n, device=evidence.device).clamp_min(1).log()
    lost = (evidence < by_chance).unfold(0, min(LOST, n), 1).all(1)
    runs = (lost & (left[: len(lost)] < ONLY_NOISE**-2)).nonzero()
    return int(runs[0]) if n >= LOST and len(runs) else n


def _search(pursuit: _Pursuit, atoms: Atoms, shared: SharedRows) -> tuple[bool, Tensor]:
    """Run a pursuit; return whether its types explain the rows, and the types, then pruned.

    If a type was mistaken for a nearly equal one, a small residual remains. Types are therefore
    exchanged once the residual is small; otherwise the pursuit would choose many unrelated types to
    explain it.
    """
    # An exact pursuit first ends early, at a small residual. If exchanges do not reduce that to
    # noise, the same pursuit goes on to its end.
    for early in (shared.exact, False):
        limit, max_residual = NEARLY_CERTIFIED, MAX_NOISE_RATIO
        if ended_early := pursuit.run(early):
            free = 1 - len(pursuit.chosen) / atoms.width
            limit, max_residual = LITTLE, math.sqrt(NOISE_FLOOR * free)
        if shared.exact and (
            pursuit.at_floor or certificate.residual_size(atoms, shared, pursuit.tokens) <= limit
        ):
            types = certificate.prune(atoms, shared, pursuit.tokens)
            types = certificate.exchange_twins(atoms, shared, types, pursuit.dependent_tokens())
            if pursuit.at_floor or certificate.residual_size(atoms, shared, types) <= max_residual:
                return True, types
        if not ended_early:
            break
    return pursuit.at_floor, pursuit.tokens


class _Pursuit:
    """The state of a pursuit: the residual of the rows, and the chosen atoms.

    Atoms are compared after whitening. The decision to end is made before whitening (``_plain``),
    where noise is equal in all directions.

    Attributes:
        residual: (k, d) the whitened rows outside of the span of the chosen atoms.
        basis: (n, d) orthonormal, the span of the n chosen atoms after whitening.
        noise: variance of the noise of an entry after whitening.
        dims: number of directions that tokens can have.
        outside: (V,) squared norm of each unit atom outside of the span of the chosen ones.
        alive: (V,) whether an atom may still be chosen.
        chosen: the chosen tokens, in order.
        evidence: for each chosen token, the log odds that it is used, when it was chosen.
        scores: (V,) these log odds of each token at its latest scoring.
        at_floor: whether only noise remains of the rows.
        certain: number of tokens that were chosen because they lie in the residual's span.
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
        self.dims = atoms.width - len(atoms.nuisance)
        self.basis = self.residual.new_zeros(0, atoms.width)
        self.outside = torch.ones(len(log_odds), device=log_odds.device)
        self.alive = atoms.usable.clone()
        self.chosen: list[int] = []
        self.evidence: list[float] = []
        self._squares = [float(self._plain.square().sum())]
        self.scores = torch.zeros_like(self.log_odds)
        self.at_floor = False
        self.certain = 0
        self._projected = 0  # number of chosen atoms that ``outside`` takes into account
        self._pool: _Pool | None = None  # None: the whole vocabulary is scored next

    def run(self, early: bool) -> bool:
        """Choose atoms until only noise remains, or no atom has evidence.

        Args:
            early: whether to end already at a small residual, which exchanges of nearly equal atoms
                may explain.

        Returns:
            Whether it ended early.
        """
        max_types = self.dims - 2
        little = LITTLE**2 * self._rows * self.atoms.width
        while len(self.chosen) < max_types and not self._is_noise():
            directions = self._directions()
            if not len(directions):
                self.at_floor = True
                return False
            if len(directions) >= self.dims - len(self.chosen):
                return False  # all atoms lie in the residual's span
            if early and float(self._plain.square().sum()) <= little:
                return True
            pool = self._screen(directions)
            if self._choose_certain(directions, max_types):
                self._pool = None  # it may be full of tokens that nearly equal a chosen one
                continue
            if len(self.chosen) > GIVE_UP * self.dims:
                return False
            if not self._choose_likeliest(directions, pool, max_types):
                if pool.scorings == 1:
                    return False
                self._pool = None  # tokens outside of the pool may have evidence
        return False

    @property
    def tokens(self) -> Tensor:
        """Return the (k,) tokens that were chosen."""
        return torch.tensor(self.chosen, dtype=torch.int64, device=self.log_odds.device)

    @property
    def left(self) -> Tensor:
        """Return (k + 1,) the mean square of the residual before each choice, and in the end.

        The mean is over the directions that tokens have outside of the chosen ones.
        """
        squares = torch.tensor(self._squares, dtype=torch.float64, device=self.log_odds.device)
        free = self.dims - torch.arange(len(squares), device=squares.device)
        return squares / free.clamp_min(1)

    def dependent_tokens(self) -> Tensor:
        """Return the (n,) tokens that were not chosen and nearly lie in the span of the chosen."""
        self._compare(self.basis[:0])
        dependent = self.atoms.usable & (self.outside < certificate.DEPENDENT**2)
        dependent[self.tokens] = False
        return dependent.nonzero()[:, 0]

    def _is_noise(self) -> bool:
        """Return whether the residual is only noise, and store the result in ``at_floor``."""
        if not len(self.residual):
            self.at_floor = True
            return True
        dims = max(1, self.dims - len(self.chosen))
        # A mean of n squared standard normals has the standard deviation sqrt(2 / n).
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
        """Update ``outside``, and return (V,) each atom's squared projection on (k, d) directions.

        ``outside`` is each atom's squared norm outside of the span of the chosen ones.
        """
        new = len(self.basis) - self._projected
        rows = torch.cat([self.basis[self._projected :], directions])
        squares = self.atoms.products(rows).square_()
        self.outside -= squares[:, :new].sum(1)
        self._projected = len(self.basis)
        near = (self.alive & (self.outside < certificate.DEPENDENT)).nonzero()[:, 0]
        if 0 < len(near) <= SCREENED:
            self.outside[near] = self._orthogonal_parts(near).square().sum(1).float()
        return squares[:, new:].sum(1)

    def _orthogonal_parts(self, types: Tensor) -> Tensor:
        """Return atoms minus their projection on the span of the chosen, (n, d) float64."""
        x = self.atoms.whitened(types)
        for _ in range(2):  # the second projection removes the first one's rounding
            x = x - (x @ self.basis.T) @ self.basis
        return x

    def _evidence(self, score: Tensor, chance: float, k: int) -> Tensor:
        """Return the log likelihood ratio of scores: uniform if used, Beta around chance if not.

        A score is the share of an atom's squared norm in k directions. For an unused atom in m
        dimensions it has the distribution Beta(k/2, (m-k)/2). The effective dimension is
        m = k / chance, with the mean score ``chance``, because atoms do not fill all dimensions.
        """
        a, b = k / 2, max(k / chance / 2 - k / 2, 1e-3)
        s = score.clamp(chance, 1 - 1e-6)
        constant = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
        return -(constant + (a - 1) * s.log() + (b - 1) * (-s).log1p())

    def _screen(self, directions: Tensor) -> _Pool:
        """Score the atoms of the current pool, or all atoms for a new pool, and return the pool."""
        pool = self._pool
        if pool is not None and pool.scorings < POOL_SCORINGS and len(self.scores) > POOL:
            pool.score(self, directions)
            return pool
        share = self._compare(directions)
        score = (share / self.outside.clamp_min(1e-7)).clamp(0, 1)
        self.alive &= self.outside > 1e-9
        chance = float(score[self.alive].mean().clamp(1e-6, 0.999))
        self.scores = self._evidence(score, chance, len(directions)) + self.log_odds
        self.scores[~self.alive] = -math.inf
        self._raw = score.masked_fill(~self.alive, -1.0)  # shares of the atoms in the directions
        types = self.scores.topk(min(POOL, len(self.scores))).indices
        self._pool = _Pool(types, self.atoms.subset(types), self.outside[types], chance)
        self._pool.projected = self._projected
        return self._pool

    def _append(self, token: int, part: Tensor, evidence: float) -> None:
        """Add a token to the chosen ones, given its part outside of their span."""
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
        self._squares.append(float(self._plain.square().sum()))
        self.chosen.append(token)
        self.evidence.append(evidence)
        self.alive[token] = False

    def _choose_certain(self, directions: Tensor, max_types: int) -> bool:
        """Choose all linearly independent atoms that lie in the span of the residual.

        Returns:
            Whether any was chosen.
        """
        types = ((self._raw > 1 - CERTAIN) & self.alive).nonzero()[:, 0]
        if not len(types):
            return False
        # Thousands of untrained tokens may have the atom of a used one: only one is chosen.
        types = types[self.scores[types].topk(min(len(types), SCREENED)).indices]
        types = types[self._raw[types].argsort(descending=True, stable=True)]
        parts = self._orthogonal_parts(types)
        norms = parts.norm(dim=1)
        score = (parts @ directions.T).square().sum(1) / norms.square()
        start = len(self.basis)
        for i, token in enumerate(types.tolist()):
            if float(score[i]) < 1 - CERTAIN or len(self.chosen) >= max_types:
                continue
            x = parts[i]
            new = self.basis[start:]
            x = x - new.T @ (new @ x)
            dependent = float(x.norm()) < certificate.DEPENDENT * float(norms[i])
            if dependent or len(new) >= len(directions):
                continue
            self._append(token, x, math.inf)  # log odds without doubt
            self.certain += 1
        return len(self.basis) > start

    def _choose_likeliest(self, directions: Tensor, pool: _Pool, max_types: int) -> bool:
        """Choose up to :data:`CHOSEN_AT_ONCE` atoms among those that scored best in the pool.

        Returns:
            Whether the pursuit continues; False if no atom was chosen.
        """
        best_places = self.scores[pool.types].topk(min(SCREENED, len(pool.types))).indices
        subset, screen, outside = pool.select(best_places)
        odds, chance = self.log_odds[subset], pool.chance
        alive = self.alive[subset]
        for step in range(CHOSEN_AT_ONCE):
            if step:
                if len(self.chosen) >= max_types or self._is_noise():
                    return True
                directions = self._directions()
                if not len(directions):
                    return True
            k = len(directions)
            share = self.atoms.products(directions, screen).square().sum(1)
            score = (share / outside.clamp_min(1e-7)).clamp(0, 1)
            value = self._evidence(score, chance, k) + odds
            value[~alive] = -math.inf
            shortlist = value.topk(min(RESCORED, len(value))).indices
            shortlist = shortlist[alive[shortlist]]
            if not len(shortlist):
                return bool(step)
            parts = self._orthogonal_parts(subset[shortlist])
            norms = parts.square().sum(1)
            exact = (parts @ directions.T).square().sum(1) / norms.clamp_min(1e-30)
            exact[norms < 1e-14] = 0  # an atom in the span of the chosen: its part is rounding
            value = self._evidence(exact.float(), chance, k) + odds[shortlist]
            best = int(value.argmax())
            if float(exact[best]) <= 0:
                return bool(step)
            place = int(shortlist[best])
            alive[place] = False
            self._append(int(subset[place]), parts[best], float(value[best]))
            outside -= self.atoms.products(self.basis[-1:], screen)[:, 0].square()
        return True


@dataclass(eq=False)
class _Pool:
    """The atoms that are scored until the whole vocabulary is scored again.

    Attributes:
        types: (n,) the tokens of the atoms.
        screen: the gathered atoms, for :meth:`Atoms.products`.
        outside: (n,) squared norm of each atom outside of the span of the chosen ones.
        chance: mean score in the whole vocabulary.
        projected: number of chosen atoms that ``outside`` takes into account.
        scorings: number of times that the pool was scored, with that of the whole vocabulary.
    """

    types: Tensor
    screen: Subset
    outside: Tensor
    chance: float
    projected: int = 0
    scorings: int = 1

    def select(self, places: Tensor) -> tuple[Tensor, Subset, Tensor]:
        """Return the types, the atoms and the outside norms at some places of the pool."""
        rows, scales = self.screen
        return self.types[places], (rows[places], scales[places]), self.outside[places].clone()

    def score(self, path: _Pursuit, directions: Tensor) -> None:
        """Score the atoms of the pool again, after the latest choices of the pursuit ``path``."""
        new = path.basis[self.projected :]
        squares = path.atoms.products(torch.cat([new, directions]), self.screen).square_()
        self.outside -= squares[:, : len(new)].sum(1)
        self.projected, self.scorings = len(path.basis), self.scorings + 1
        score = (squares[:, len(new) :].sum(1) / self.outside.clamp_min(1e-7)).clamp(0, 1)
        alive = path.alive[self.types] & (self.outside > 1e-9)
        values = path._evidence(score, self.chance, len(directions)) + path.log_odds[self.types]
        path.scores[self.types] = values.masked_fill(~alive, -math.inf)
        path._raw[self.types] = score.masked_fill(~alive, -1.0)


def pursuit_seconds(
    device: torch.device, width: int, tokens: int, rows: int, types: float
) -> float:
    """Return an estimate of the seconds of a look's pursuits that choose ``types`` types.

    The pursuit (:mod:`~lightning_fedleak.attacks.row_space.pursuit`) goes in cycles. It scores all
    tokens of the vocabulary, of which the :data:`POOL` best form a pool. The pool is
    scored ``POOL_SCORINGS`` times in a cycle. After each scoring ``CHOSEN_AT_ONCE`` types are
    chosen, each after a comparison of the ``SCREENED`` best. The estimate counts the operations of
    these products, and divides them by :data:`EFFICIENCY` times the device's operations per second.

    Args:
        device: the device of the arithmetic.
        width: dimensions of the input.
        tokens: size of the vocabulary.
        rows: number of shared rows.
        types: number of types in the batch; counted up to the share
            :data:`GIVE_UP` of the width.
    """
    if rows >= width:  # one product compares all tokens with the span of the rows
        operations = 2.0 * tokens * width**2
    else:
        types = min(types, GIVE_UP * width)
        columns = (min(rows, types) + _FREE_ROWS) * _COLUMNS_PER_ROW
        pool_size, n_scorings = min(tokens, POOL), POOL_SCORINGS
        n_scored = tokens + (n_scorings - 1) * pool_size  # in one cycle of the pool
        n_compared = n_scored / n_scorings / CHOSEN_AT_ONCE + min(tokens, SCREENED)
        operations = 2 * types * width * columns * n_compared
        # For each choice the best atoms are compared again in float64, with the rows and with the
        # types so far, and the basis of the types grows. The 4 and the 40 are rough counts.
        operations += 4 * types * RESCORED * width * (width + types)
        operations = PURSUITS * (operations + 40 * width * types**2)
    return operations / (EFFICIENCY * operations_per_second(device))
