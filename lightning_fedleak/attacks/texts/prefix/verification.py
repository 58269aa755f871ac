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
between near tokens. If that is possible, the text is run again without cache, as the client ran it
(:class:`_ExactRuns`). On the same kind of machine the right token's state is then equal bit for
bit; tokens that are verified already show whether it is. *Twins* are tokens that all have the
observed state even so. The states of later positions decide between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_fedleak.attacks.texts.base import Deadline
from lightning_fedleak.attacks.texts.bottom_model import NextTokens
from lightning_fedleak.attacks.texts.prefix.cache import Prefixes
from lightning_fedleak.attacks.texts.prefix.table import StateTable

# None of the values was tuned.
FIRST = 64  # candidates of the first ranking at each position
RERANKED = 256  # likeliest tokens of the table that the prior ranks again
# Candidates in the first, second, ... round, besides the one that the chain of guesses takes.
ROUNDS = 8, 16, 32, 64, 128, 256
MIN_LEARN, MAX_LEARN = 25, 65  # verified candidates of a position's regression
SAME_AT_ONCE = 8  # candidates that are run without cache at one position
# Share of the rounding error between cached and uncached runs; tokens closer than this may have
# equal states.
WITHIN_ROUNDING = 0.5
MAX_TWINS = 64  # tokens with equal states between which later states decide
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
        deadline: The deadline, which is checked before each forward.
        computed: The number of tokens that the bottom model computed outside of ``prefixes``.
    """

    prefixes: Prefixes
    table: StateTable
    observed: Tensor
    top: NextTokens | None
    noise: Tensor
    deadline: Deadline
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
        rerun: The tokens that were also run without cache, as the client runs them.
        twins: The tokens whose state in an uncached run equals the observed one.
        round: The number of rounds of candidates so far.
        settled: The token that was chosen but is not yet appended; None before.
        chosen: The index of the token that was chosen among twins; None without twins.
        needs_exact_run: Whether a token may be accepted only by an uncached run.
    """

    tokens: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    verified: set[int] = field(default_factory=set)
    rivals: list[int] = field(default_factory=list)
    rerun: set[int] = field(default_factory=set)
    twins: list[int] = field(default_factory=list)
    round: int = 0
    settled: int | None = None
    chosen: int | None = None
    needs_exact_run: bool = False

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
        """The index of the nearest token, or of the one chosen among several."""
        return self.order[0] if self.chosen is None else self.chosen


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


class _ExactRuns:
    """Uncached runs of texts, as the client runs them.

    Args:
        task: The input of the search.
        low_precision: Whether rounding may hide the difference between tokens.

    Attributes:
        repeatable: Whether an uncached run reproduces the observed states bit for bit; None if not
            yet tested.
        twins: For each text, the tokens by position between which later states decide.
        cut: Whether time ran out before later states decided.
    """

    def __init__(self, task: Task, low_precision: bool) -> None:
        self.task = task
        self.low_precision = low_precision
        self.repeatable: bool | None = None
        self.twins: list[dict[int, list[int]]] = [{} for _ in task.observed]
        self.cut = False

    def restart(self, rows: Tensor) -> Prefixes:
        """Return copies of the prefixes of the texts ``rows``, without cache."""
        prefixes = self.task.prefixes
        again = Prefixes(prefixes.bottom, prefixes.layout[rows], cached=False)
        again.lengths, again.tokens = prefixes.lengths[rows], prefixes.tokens[rows]
        return again

    def equal(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Return how many first tokens (n,) of texts (n, N) have the states of ``rows``."""
        return self._equal(rows, tokens, torch.zeros_like(rows))

    def _equal(self, rows: Tensor, chain: Tensor, lengths: Tensor) -> Tensor:
        """Return how many first tokens (n,) of ``chain`` (n, k) have the states after a prefix."""
        run = self.restart(rows)
        run.lengths = lengths
        states = run.follow(chain).float()
        self.task.computed += run.computed
        positions = lengths[:, None] + torch.arange(chain.shape[1], device=rows.device)
        end = self.task.observed.shape[1] - 1
        same = (states == self.task.observed[rows[:, None], positions.clamp(max=end)]).all(2)
        same &= positions < self.task.counts[rows][:, None]
        return same.int().cumprod(1).sum(1)

    def may_match(self, i: int) -> bool:
        """Return whether uncached runs may reproduce states; test text ``i``'s first token."""
        if self.repeatable is None and int(self.task.lengths[i]):
            row = torch.tensor([i], device=self.task.lengths.device)
            self.repeatable = bool(self.equal(row, self.task.prefixes.tokens[row, :1]))
        return self.repeatable is not False

    def equal_ahead(self, rows: Tensor, chain: Tensor) -> Tensor:
        """Return how many first tokens (n,) of ``chain`` (n, k) continue ``rows`` as observed."""
        counts = self._equal(rows, chain, self.task.lengths[rows])
        if bool(counts.any()):
            self.repeatable = True
        return counts

    def same(self, i: int, position: OpenPosition) -> int | None:
        """Return a verified candidate of text ``i`` that has the observed state, or None."""
        if not self.may_match(i):
            return None
        column = int(self.task.lengths[i])
        noise = float(self.task.noise[i, column])
        near = [position.tokens[o] for o in position.order if position.distances[o] <= 2.0 * noise]
        near = [t for t in near if t not in position.rerun][:SAME_AT_ONCE]
        if not near:
            return None
        device = self.task.lengths.device
        again = self.restart(torch.tensor([i], device=device))
        states = again.attempt(torch.tensor([near], device=device))[0].float()
        self.task.computed += again.computed
        position.rerun.update(near)
        hits = (states == self.task.observed[i, column]).all(1).nonzero()
        if not len(hits):
            return None
        self.repeatable = True
        token = near[int(hits[0])]
        position.distances[position.tokens.index(token)] = 0.0
        return token

    def choose_twin(self, i: int, position: OpenPosition) -> None:
        """Provisionally choose the twin that the prior ranks highest."""
        column = int(self.task.lengths[i])
        prior = self.task.prior_of_all(i, column)
        if prior is not None:
            order = prior[position.twins].argsort(descending=True).tolist()
            position.twins = [position.twins[o] for o in order]
        if len(position.twins) > 1:
            self.twins[i][column] = position.twins[:MAX_TWINS]
        position.keep(position.twins[0], self.task.observed[i, column], 0.0)
        position.chosen = len(position.tokens) - 1

    def note_twins(self, i: int, column: int, token: int) -> None:
        """Store the tokens that rounding may hide here; later states decide between them."""
        table = self.task.table
        reach = WITHIN_ROUNDING * float(self.task.noise[i, column])
        isolation = float(table.isolation(self.task.lengths.new_tensor(token)))
        if not self.low_precision or isolation >= reach:
            return
        near = table.neighbours(token, reach)
        gaps = (table.entries[near] - table.entries[token]).norm(dim=1)
        nearest = near[gaps.argsort()[:MAX_TWINS]].tolist()
        self.twins[i].setdefault(column, [token, *(t for t in nearest if t != token)])

    def decide_twins(self, i: int) -> None:
        """Choose between text ``i``'s twins by later states."""
        tokens = self.task.prefixes.tokens
        for column, twins in self.twins[i].items():
            if self.task.deadline.passed:
                self.cut = True
                return
            texts = tokens[i].repeat(len(twins), 1)
            texts[:, column] = texts.new_tensor(twins)
            equal = self.equal(torch.full_like(texts[:, 0], i), texts)
            tokens[i, column] = twins[int(equal.argmax())]
        self.twins[i] = {}


class Decision:
    """Decides whether a verified token is right.

    Args:
        task: The input of the search.
        low_precision: Whether rounding may hide the difference between tokens.
        noised: Whether no token's state equals the observed one; None if unknown.

    Attributes:
        exact_runs: The uncached runs, as the client makes them.
        noised: Whether the states are treated as noisy: by the argument, by a sweep, or because
            time ran out in a sweep.
        cut: Whether time ran out within a sweep of all possible tokens.
    """

    def __init__(self, task: Task, low_precision: bool, noised: bool | None) -> None:
        self.task = task
        self.exact_runs = _ExactRuns(task, low_precision)
        self.noised = noised is True
        self.cut = False
        self._may_be_noised = noised is None

    def accepted(self, tokens: Tensor, distances: Tensor, noise: Tensor) -> Tensor:
        """Return for each of ``tokens`` (any shape) whether no other token can be right."""
        is_certain: Tensor = self._radius(distances, noise) < self.task.table.isolation(tokens)
        return is_certain

    def decide(self, i: int, position: OpenPosition) -> int | None:
        """Return the token of text ``i``'s open position, or None if it is not certain yet.

        After the last round of candidates, all tokens that can still be right are verified.
        """
        column = int(self.task.lengths[i])
        token, distance = position.tokens[position.best], position.distances[position.best]
        noise = float(self.task.noise[i, column])
        radius = self._radius_of(distance, noise)
        isolation = float(self.task.table.isolation(self.task.lengths.new_tensor(token)))
        if not position.needs_exact_run and radius < isolation:
            return token
        same = self.exact_runs.same(i, position)
        if same is not None:
            return same
        position.rivals = self._rivals(token, radius).tolist()
        unverified = any(r not in position.verified for r in position.rivals)
        within_rounding = distance <= 2.0 * noise and self.exact_runs.repeatable is True
        # More rounds first, then a sweep, which also seeks twins; else noise or the nearest token.
        if unverified and position.round < len(ROUNDS):
            return None
        if unverified or within_rounding:
            self._sweep(i, position, noise, within_rounding)
            return None
        if self._shows_noise(position, noise):
            return None
        return position.tokens[position.best]

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

    def _sweep(self, i: int, position: OpenPosition, noise: float, uncached: bool) -> None:
        """Verify all tokens that can still be right; choose the nearest unless states are noisy.

        ``uncached``: whether they are run as the client runs them, which also finds twins.
        """
        table, prefixes = self.task.table, self.task.prefixes
        target = self.task.observed[i, self.task.lengths[i]]
        row = torch.tensor([i], device=target.device)
        run = self.exact_runs.restart(row) if uncached else prefixes.select(row)
        deadline = self.task.deadline
        limit = deadline.share(2) if self._may_be_noised and not uncached else deadline
        open_ = torch.ones(table.size, dtype=torch.bool, device=target.device)
        verified = position.rerun if uncached else position.verified
        open_[torch.tensor(sorted(verified), dtype=torch.int64, device=target.device)] = False
        rivals = torch.tensor(position.rivals, dtype=torch.int64, device=target.device)
        while True:
            batch = rivals[open_[rivals]][:SWEEP]
            if not len(batch):
                break
            if limit.passed:
                self.cut = True
                break
            states = run.attempt(batch[None])[0].float()
            open_[batch] = False
            distances = (states - target).norm(dim=1)
            smallest = position.distances[position.best]
            nearest = position.add_nearest(batch, states, distances)
            token, distance = int(batch[nearest]), float(distances[nearest])
            if uncached:
                new = batch[distances == 0].tolist()
                if position.twins and not new:
                    break
                rivals = self._add_twins(position, new, rivals)
            elif distance < smallest:
                if self.exact_runs.same(i, position) is not None:
                    break
                rivals = self._rivals(token, self._radius_of(distance, noise))
        self.task.computed += run.computed
        cut = bool(open_[rivals].any()) and position.distances[position.best] > 0
        if cut and deadline.passed:
            return
        if position.twins:
            self.exact_runs.choose_twin(i, position)
        position.rivals = rivals.tolist()
        if not self._shows_noise(position, noise, cut):
            position.settled = position.tokens[position.best]

    def _add_twins(self, position: OpenPosition, twins: list[int], rivals: Tensor) -> Tensor:
        """Add a position's twins; return its rivals, the nearest to the first twin first."""
        if twins and not position.twins:
            entries = self.task.table.entries
            rivals = rivals[(entries[rivals] - entries[twins[0]]).norm(dim=1).argsort()]
        position.twins += twins
        return rivals

    def _shows_noise(self, position: OpenPosition, noise: float, cut: bool = False) -> bool:
        """Return whether the states are treated as noisy, because too many tokens failed.

        ``cut``: time ran out before all tokens that can be right were verified, which also counts.
        """
        limit = min(NOISE_THRESHOLD, self.task.table.distinct // 2)
        wrong = position.distances[position.best] > 2.0 * noise
        self.noised = self._may_be_noised and wrong and (cut or len(position.rivals) > limit)
        return self.noised
