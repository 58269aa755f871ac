"""Verification of candidates at a text's first open position, and the choice of the right one.

*Ranking.* The first candidates are ranked by the position's observed state alone. After candidates
have failed, the nearest of them shows how this context shifts states. The next candidates are taken
in turn from several rankings that use this shift (:func:`next_round`).

*Acceptance.* A candidate is accepted once no other token can be right (:class:`Decision`). The
distance to the observed state bounds how far the right token's state is from the candidate's, and
no other token may be that near. If no candidate is accepted after all rounds, a sweep verifies all
tokens that can still be right.

*Noise.* If more than min(1000, half the vocabulary) tokens fail, the states are assumed to be
noisy. Noise is also assumed if the sweep would take more than half of the remaining time, so that
the other half remains for a search that expects noise. The guess is then unfinished.

*Rounding.* Runs with and without cache differ by rounding, which in bf16 hides the difference
between near tokens. The nearest candidate is therefore accepted, though another may be right, if it
is within rounding of the observed state and one more round brings no nearer one.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_fedleak.attacks.texts.base import WorkLimit
from lightning_fedleak.attacks.texts.bottom_model import NextTokens
from lightning_fedleak.attacks.texts.prefix.cache import Prefixes
from lightning_fedleak.attacks.texts.prefix.table import StateTable

# None of the values was tuned.
FIRST = 64  # candidates of the first ranking at each position
RERANKED = 256  # likeliest tokens of the table that the prior ranks again
# Candidates in the first, second, ... round, besides the one that the chain of guesses takes.
ROUNDS = 8, 16, 32, 64, 128, 256
MIN_LEARN, MAX_LEARN = 25, 65  # verified candidates of a position's regression
SWEEP = 512  # candidates verified at once in a sweep of all possible tokens
NOISE_THRESHOLD = 1000  # failed tokens above which the states are taken as noisy
# Largest ratio of a distance in the typical context to the same distance in this context.
MAX_STRETCH = 20.0


@dataclass
class Task:
    """The input of a search, and the current prefixes of the texts.

    Attributes:
        prefixes: The texts' layout, their current prefixes, and the bottom model.
        table: The table that ranks candidates.
        observed: (B, N, d) the float32 states of the real tokens.
        top: The top model, which predicts all tokens of a text but the first; None without one.
        noise: (B, N) the distance by which two computations of a state may differ by rounding.
        limit: The limit, which is checked before each forward.
        computed: The number of tokens that the bottom model computed outside of ``prefixes``.
    """

    prefixes: Prefixes
    table: StateTable
    observed: Tensor
    top: NextTokens | None
    noise: Tensor
    limit: WorkLimit
    computed: int = 0
    _cached_prior: tuple[int, int, Tensor] | None = None

    @property
    def counts(self) -> Tensor:
        """The number of tokens (B,) of each text."""
        return self.prefixes.layout.counts

    @property
    def lengths(self) -> Tensor:
        """The number of tokens (B,) of each prefix."""
        return self.prefixes.lengths

    def prior(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
        """Return the top model's prediction of ``tokens`` (n, k) at n positions.

        Returns:
            Log-probabilities (n, k), up to a constant for each position.
        """
        scores = torch.zeros(tokens.shape, device=tokens.device)
        later = positions > 0
        if self.top is not None and bool(later.any()):
            rows, positions = rows[later], positions[later]
            columns = self.prefixes.layout.columns[rows, positions - 1]
            scores[later] = self.top.token_logits(rows, columns, tokens[later])
        return scores

    def prior_of_all(self, row: int, position: int) -> Tensor | None:
        """Return the prediction (V,) of the whole vocabulary; None if there is none."""
        if self.top is None or position == 0:
            return None
        if self._cached_prior is None or self._cached_prior[:2] != (row, position):
            column = self.prefixes.layout.columns[row : row + 1, position - 1]
            rows = torch.full_like(column, row)
            self._cached_prior = (row, position, self.top.logits(rows, column)[0])
        return self._cached_prior[2]


@dataclass
class OpenPosition:
    """A text's first open position, at which candidates are verified.

    Attributes:
        tokens: The verified tokens whose states are stored.
        states: The state (d,) of each of ``tokens``.
        distances: The distance of each state from the observed one.
        verified: All verified tokens, also those whose state was not stored.
        rivals: The tokens that could still be right at the last check.
        round: The number of rounds of candidates so far.
        before: The number of ``tokens`` before the last round.
        settled: The token that was chosen but is not yet appended; None before.
    """

    tokens: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    verified: set[int] = field(default_factory=set)
    rivals: list[int] = field(default_factory=list)
    round: int = 0
    before: int = 0
    settled: int | None = None

    def add(self, token: int, state: Tensor, distance: float) -> None:
        """Store a verified token, unless it is counted already."""
        if token not in self.verified:
            self.verified.add(token)
            self.keep(token, state, distance)

    def keep(self, token: int, state: Tensor, distance: float) -> None:
        """Store a verified token, also one that is counted already."""
        self.tokens.append(token)
        self.states.append(state)
        self.distances.append(distance)

    def add_nearest(self, tokens: Tensor, states: Tensor, distances: Tensor) -> int:
        """Count n verified tokens, store only the nearest with its state, and return its index."""
        nearest = int(distances.argmin())
        self.verified.update(tokens.tolist())
        self.keep(int(tokens[nearest]), states[nearest], float(distances[nearest]))
        return nearest

    @property
    def order(self) -> list[int]:
        """The indices of the verified tokens, the nearest first."""
        return sorted(range(len(self.distances)), key=self.distances.__getitem__)

    @property
    def best(self) -> int:
        """The index of the nearest token."""
        return self.order[0]


def ranked_first(task: Task) -> Tensor:
    """Return the likeliest candidates (B, N, k) for each position by its state and the prior."""
    b, n = task.observed.shape[:2]
    k = min(FIRST, task.table.distinct)
    ranked = torch.zeros(b, n, k, dtype=torch.int64, device=task.observed.device)
    real = torch.arange(n, device=ranked.device) < task.counts[:, None]
    rows, positions = real.nonzero(as_tuple=True)
    step = task.table.at_once
    for r, p in zip(torch.split(rows, step), torch.split(positions, step), strict=True):
        tokens, scores = task.table.likeliest(task.observed[r, p], RERANKED)
        scores = scores + task.prior(r, p, tokens)
        ranked[r, p] = tokens.gather(1, scores.topk(k, dim=1).indices)
    return ranked


def next_round(task: Task, position: OpenPosition, i: int, first: Tensor) -> list[int]:
    """Return the candidates of the next round at text ``i``'s open position.

    At least one token is verified there; ``first`` (k,) is the position's first ranking.
    """
    k = ROUNDS[min(position.round, len(ROUNDS) - 1)]
    position.round += 1
    position.before = len(position.tokens)
    column = int(task.lengths[i])
    reach = min(task.table.size, k + 1 + len(position.verified))
    best = position.best
    difference = task.observed[i, column] - position.states[best]
    near, scores = task.table.near(position.tokens[best], difference, reach)
    prior = task.prior_of_all(i, column)
    rankings = [near]
    if prior is None:
        rankings.append(task.table.best(scores, reach))
    else:
        rankings.append(task.table.best(scores + prior, reach))
        rankings.append(task.table.best(prior, reach))
    if len(position.tokens) >= MIN_LEARN:
        order = position.order[:MAX_LEARN]
        tokens = near.new_tensor([position.tokens[o] for o in order])
        states = torch.stack([position.states[o] for o in order])
        rankings += task.table.like_verified(tokens, states, task.observed[i, column], reach)
    rankings.append(first)
    return _in_turn([*(r.tolist() for r in rankings), position.rivals], position.verified, k + 1)


def _in_turn(rankings: list[list[int]], verified: set[int], k: int) -> list[int]:
    """Return the first ``k`` tokens that are not ``verified``, one from each ranking in turn."""
    chosen: dict[int, None] = {}
    turn = [iter(ranking) for ranking in rankings]
    while turn and len(chosen) < k:
        for ranking in list(turn):
            token = next((t for t in ranking if t not in verified and t not in chosen), None)
            if token is None:
                turn.remove(ranking)
            else:
                chosen[token] = None
            if len(chosen) == k:
                break
    return list(chosen)


class Decision:
    """Decides whether a verified token is right.

    Args:
        task: The input of the search.
        noised: Whether no token's state equals the observed one; None if unknown.

    Attributes:
        noised: Whether the states are treated as noisy: by the argument, by a sweep, or because
            the limit was reached in a sweep.
        cut: Whether the limit was reached within a sweep of all possible tokens.
    """

    def __init__(self, task: Task, noised: bool | None) -> None:
        self.task = task
        self.noised = noised is True
        self.cut = False
        self._may_be_noised = noised is None

    def accepted(self, tokens: Tensor, distances: Tensor, noise: Tensor) -> Tensor:
        """Return for each of ``tokens`` (any shape) whether no other token can be right."""
        is_certain: Tensor = self._radius(distances, noise) < self.task.table.isolation(tokens)
        return is_certain

    def decide(self, i: int, position: OpenPosition) -> int | None:
        """Return the token of text ``i``'s open position, or None if it is not decided yet.

        After the last round of candidates, all tokens that can still be right are verified.
        """
        column, best = int(self.task.lengths[i]), position.best
        token, distance = position.tokens[best], position.distances[best]
        noise = float(self.task.noise[i, column])
        if distance <= 2.0 * noise and best < position.before:
            return token
        position.rivals = self._rivals(token, self._radius_of(distance, noise)).tolist()
        if all(r in position.verified for r in position.rivals):
            return None if self._shows_noise(position, noise) else token
        if position.round >= len(ROUNDS):
            self._sweep(i, position, noise)
        return None

    def _radius(self, distances: Tensor, noise: Tensor) -> Tensor:
        """Return how far from a candidate, in the typical context, the right token can be."""
        excess = (distances.square() - 2.0 * noise.square()).clamp(min=0).sqrt()
        radius: Tensor = MAX_STRETCH * excess + 2.0 * noise
        return radius

    def _radius_of(self, distance: float, noise: float) -> float:
        """Return :meth:`_radius` of one candidate."""
        return float(self._radius(torch.tensor(distance), torch.tensor(noise)))

    def _rivals(self, token: int, radius: float) -> Tensor:
        """Return the tokens that can still be right, given the nearest one, the commonest first."""
        rivals = self.task.table.neighbours(token, radius)
        return rivals[self.task.table.rank[rivals].argsort()]

    def _sweep(self, i: int, position: OpenPosition, noise: float) -> None:
        """Verify all tokens that can still be right; choose the nearest unless states are noisy."""
        table = self.task.table
        target = self.task.observed[i, self.task.lengths[i]]
        run = self.task.prefixes.select(torch.tensor([i], device=target.device))
        whole = self.task.limit
        limit = whole.share(2) if self._may_be_noised else whole
        rivals = torch.tensor(position.rivals, dtype=torch.int64, device=target.device)
        open_ = torch.ones(table.size, dtype=torch.bool, device=target.device)
        open_[rivals.new_tensor(sorted(position.verified))] = False
        while True:
            batch = rivals[open_[rivals]][:SWEEP]
            if not len(batch):
                break
            if limit.reached:
                self.cut = True
                break
            states = run.attempt(batch[None])[0].float()
            open_[batch] = False
            distances = (states - target).norm(dim=1)
            smallest = position.distances[position.best]
            nearest = position.add_nearest(batch, states, distances)
            token, distance = int(batch[nearest]), float(distances[nearest])
            if distance < smallest:
                rivals = self._rivals(token, self._radius_of(distance, noise))
        self.task.computed += run.computed
        cut = bool(open_[rivals].any())
        if cut and whole.reached:
            return
        position.rivals = rivals.tolist()
        if not self._shows_noise(position, noise, cut):
            position.settled = position.tokens[position.best]

    def _shows_noise(self, position: OpenPosition, noise: float, cut: bool = False) -> bool:
        """Return whether the states are treated as noisy, because too many tokens failed.

        ``cut``: not all tokens that can be right were verified, which also counts.
        """
        limit = min(NOISE_THRESHOLD, self.task.table.distinct // 2)
        wrong = position.distances[position.best] > 2.0 * noise
        self.noised = self._may_be_noised and wrong and (cut or len(position.rivals) > limit)
        return self.noised
