"""Verification of candidates at the first open place of a text, and the choice of the right one.

At first tokens are ranked by the place's state alone. Once candidates failed after the correct
prefix, the nearest of them shows how this context shifts states, and the next ones are ranked
with that shift, in several ways in turn.

Runs with and without cache differ by rounding, which in bf16 hides the difference between near
tokens. Where that is possible, the text is run again as the client ran it, without cache. On the
same kind of machine the right token's state is then equal bit for bit, which tokens that are
verified already show. Where several tokens have the observed state even so, the states that follow
decide between them.

A candidate is accepted as soon as no other token can be right: the right token's state would be as
far from the candidate's as the observed one is. After many rounds of candidates without one, all
tokens that can still be right are verified. If none of very many is right, the states are noised.
The same is assumed where half of the remaining time does not suffice for these tokens, so that the
other half remains for a search that expects noise. A result on that assumption is unfinished.
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
FIRST = 64  # candidates of the first ranking at each place
READ = 256  # likeliest tokens of the table that the prior ranks again
ROUNDS = 8, 16, 32, 64, 128, 256  # candidates verified at once in the first, second, ... round
LEARN_FROM, LEARN_MOST = 25, 65  # verified candidates of a place's regression, least and most
SAME_AT_ONCE = 8  # candidates that are run without cache at one place
WITHIN_ROUNDING = 0.5  # of the rounding with and without cache; nearer tokens may have equal states
MOST_TWINS = 64  # tokens with equal states among which the states that follow decide
SWEEP = 512  # candidates verified at once in a sweep of all possible tokens
SURELY_NOISED = 1000  # possible tokens; if so many were verified and none is right, there is noise
FAR = 20.0  # factor between a distance in the typical context and in this one, at most


class Prior:
    """Log-probabilities of the tokens at a place before its state is read.

    Args:
        top: the top model, which expects nothing at the first place of a text; None for no model.
        columns: (B, N) column of each text's i-th real token.
    """

    def __init__(self, top: NextTokens | None, columns: Tensor) -> None:
        self._top, self._columns = top, columns
        self._last: tuple[int, int, Tensor] | None = None

    def scores(self, rows: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
        """Return log-probabilities (n, k) of ``tokens``, up to a constant for each place."""
        scores = torch.zeros(tokens.shape, device=tokens.device)
        later = places > 0
        if self._top is not None and bool(later.any()):
            rows, places = rows[later], places[later]
            columns = self._columns[rows, places - 1]
            scores[later] = self._top.token_logits(rows, columns, tokens[later])
        return scores

    def all_scores(self, row: int, place: int) -> Tensor | None:
        """Return those (V,) of the whole vocabulary; None where nothing is expected."""
        if self._top is None or place == 0:
            return None
        if self._last is None or self._last[:2] != (row, place):
            column = self._columns[row : row + 1, place - 1]
            rows = torch.full_like(column, row)
            self._last = (row, place, self._top.logits(rows, column)[0])
        return self._last[2]


@dataclass
class Task:
    """The input of a search, and the texts' prefixes so far.

    Attributes:
        prefixes: the texts' layout, their prefixes so far, and the bottom model.
        table: ranks candidates.
        observed: (B, N, d) float32 states by real token.
        prior: of the next token.
        noise: (B, N) distance by which two computations of a state may differ.
        deadline: checked before each forward.
        computed: tokens that went through the bottom model beside those of ``prefixes``.
    """

    prefixes: Prefixes
    table: StateTable
    observed: Tensor
    prior: Prior
    noise: Tensor
    deadline: Deadline
    computed: int = 0

    @property
    def counts(self) -> Tensor:
        """The number of tokens (B,) of each text."""
        return self.prefixes.layout.counts

    @property
    def lengths(self) -> Tensor:
        """The number of tokens (B,) of each prefix."""
        return self.prefixes.lengths


@dataclass
class OpenPlace:
    """One text's first open token.

    Attributes:
        tokens: verified tokens, each with its state and its distance to the observed one.
        states: (d,) each.
        distances: from the observed state.
        verified: all verified tokens, also those whose state was not stored.
        runner_up: the smallest distance of tokens whose state was not stored.
        rivals: tokens that could still be right at the last check.
        rerun: tokens that were also run as the client runs them.
        twins: tokens whose state in such a run equals the observed one.
        round: number of the round of candidates.
        settled: the token on which the search has settled.
        chosen: index of the one chosen among several with the observed state.
        certain: whether only a run as the client's may accept a token.
    """

    tokens: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    verified: set[int] = field(default_factory=set)
    runner_up: float = float("inf")
    rivals: list[int] = field(default_factory=list)
    rerun: set[int] = field(default_factory=set)
    twins: list[int] = field(default_factory=list)
    round: int = 0
    settled: int | None = None
    chosen: int | None = None
    certain: bool = False

    def add(self, token: int, state: Tensor, distance: float) -> None:
        """Add a verified token, once."""
        if token not in self.verified:
            self.verified.add(token)
            self.keep(token, state, distance)

    def keep(self, token: int, state: Tensor, distance: float) -> None:
        """Add a verified token, also one that is counted already."""
        self.tokens.append(token)
        self.states.append(state)
        self.distances.append(distance)

    def count(self, tokens: list[int], distances: list[float]) -> None:
        """Count verified tokens without their states; ``distances`` are those of the farther."""
        self.verified.update(tokens)
        self.runner_up = min(self.runner_up, *distances)

    @property
    def order(self) -> list[int]:
        """The indices of the verified tokens, the nearest first."""
        return sorted(range(len(self.distances)), key=self.distances.__getitem__)

    @property
    def best(self) -> int:
        """The index of the nearest token, or of the one chosen among several."""
        if self.chosen is not None:
            return self.chosen
        return min(range(len(self.distances)), key=self.distances.__getitem__)


def ranked_first(task: Task) -> Tensor:
    """Return the likeliest candidates (B, N, k) for each place by its state and the prior."""
    b, n = task.observed.shape[:2]
    k = min(FIRST, task.table.distinct)
    ranked = torch.zeros(b, n, k, dtype=torch.int64, device=task.observed.device)
    real = torch.arange(n, device=ranked.device) < task.counts[:, None]
    rows, places = real.nonzero(as_tuple=True)
    step = task.table.at_once
    for r, p in zip(torch.split(rows, step), torch.split(places, step), strict=True):
        tokens, scores = task.table.likeliest(task.observed[r, p], READ)
        scores = scores + task.prior.scores(r, p, tokens)
        ranked[r, p] = tokens.gather(1, scores.topk(k, dim=1).indices)
    return ranked


def next_round(task: Task, place: OpenPlace, i: int, first: Tensor) -> list[int]:
    """Return the candidates of the next round at text ``i``'s open place.

    Args:
        task: the search.
        place: the open place, with at least one verified token.
        i: the text.
        first: (k,) candidates of the first ranking.
    """
    k = ROUNDS[min(place.round, len(ROUNDS) - 1)]
    place.round += 1
    column = int(task.lengths[i])
    reach = min(task.table.size, k + 1 + len(place.verified))
    best = place.best
    difference = task.observed[i, column] - place.states[best]
    near, scores = task.table.near(place.tokens[best], difference, reach)
    expected = task.prior.all_scores(i, column)
    rankings = [near]
    if expected is None:
        rankings.append(task.table.best(scores, reach))
    else:
        rankings.append(task.table.best(scores + expected, reach))
        rankings.append(task.table.best(expected, reach))
    if len(place.tokens) >= LEARN_FROM:
        order = place.order[:LEARN_MOST]
        tokens = near.new_tensor([place.tokens[o] for o in order])
        states = torch.stack([place.states[o] for o in order])
        rankings += task.table.like_verified(tokens, states, task.observed[i, column], reach)
    rankings.append(first)
    return _in_turn([*(r.tolist() for r in rankings), place.rivals], place.verified, k + 1)


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


class AsSent:
    """Runs of texts as the client runs them.

    Args:
        task: the search.
        low_precision: whether rounding may hide the difference between tokens.

    Attributes:
        repeatable: whether such a run gives what was sent, bit for bit; None until one has shown.
        twins: by text and place, tokens among which the states that follow decide.
        cut: whether time ran out before they decided.
    """

    def __init__(self, task: Task, low_precision: bool) -> None:
        self.task = task
        self.low_precision = low_precision
        self.repeatable: bool | None = None
        self.twins: list[dict[int, list[int]]] = [{} for _ in task.observed]
        self.cut = False

    def restart(self, rows: Tensor) -> Prefixes:
        """Return the prefixes of the texts ``rows``, without cache."""
        prefixes = self.task.prefixes
        again = Prefixes(prefixes.bottom, prefixes.layout[rows], cached=False)
        again.lengths, again.tokens = prefixes.lengths[rows], prefixes.tokens[rows]
        return again

    def equal(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Return how many first tokens (n,) of texts (n, N) have the states of ``rows``."""
        return self._equal(rows, tokens, torch.zeros_like(rows))

    def _equal(self, rows: Tensor, chain: Tensor, lengths: Tensor) -> Tensor:
        """Return how many first tokens (n,) of ``chain`` (n, k) have the states from a place on."""
        run = self.restart(rows)
        run.lengths = lengths
        states = run.follow(chain).float()
        self.task.computed += run.computed
        places = lengths[:, None] + torch.arange(chain.shape[1], device=rows.device)
        last = self.task.observed.shape[1] - 1
        same = (states == self.task.observed[rows[:, None], places.clamp(max=last)]).all(2)
        same &= places < self.task.counts[rows][:, None]
        return same.int().cumprod(1).sum(1)

    def may_match(self, i: int) -> bool:
        """Return whether such a run may give what was sent, by the first token of text ``i``."""
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

    def same(self, i: int, place: OpenPlace) -> int | None:
        """Return a verified candidate of text ``i`` that has the observed state, or None."""
        if not self.may_match(i):
            return None
        column = int(self.task.lengths[i])
        noise = float(self.task.noise[i, column])
        near = [place.tokens[o] for o in place.order if place.distances[o] <= 2.0 * noise]
        near = [t for t in near if t not in place.rerun][:SAME_AT_ONCE]
        if not near:
            return None
        device = self.task.lengths.device
        again = self.restart(torch.tensor([i], device=device))
        states = again.attempt(torch.tensor([near], device=device))[0].float()
        self.task.computed += again.computed
        place.rerun.update(near)
        hits = (states == self.task.observed[i, column]).all(1).nonzero()
        if not len(hits):
            return None
        self.repeatable = True
        token = near[int(hits[0])]
        place.distances[place.tokens.index(token)] = 0.0
        return token

    def choose_twin(self, i: int, place: OpenPlace) -> None:
        """Choose the most expected one of the place's twins for the time being."""
        column = int(self.task.lengths[i])
        expected = self.task.prior.all_scores(i, column)
        if expected is not None:
            order = expected[place.twins].argsort(descending=True).tolist()
            place.twins = [place.twins[o] for o in order]
        if len(place.twins) > 1:
            self.twins[i][column] = place.twins[:MOST_TWINS]
        place.keep(place.twins[0], self.task.observed[i, column], 0.0)
        place.chosen = len(place.tokens) - 1

    def may_have_twins(self, i: int, column: int, token: int) -> bool:
        """Return whether rounding may hide other tokens, among which later states decide."""
        table = self.task.table
        reach = WITHIN_ROUNDING * float(self.task.noise[i, column])
        isolation = float(table.isolation(self.task.lengths.new_tensor(token)))
        if not self.low_precision or isolation >= reach:
            return False
        near = table.neighbours(token, reach)
        apart = (table.entries[near] - table.entries[token]).norm(dim=1)
        nearest = near[apart.argsort()[:MOST_TWINS]].tolist()
        self.twins[i].setdefault(column, [token, *(t for t in nearest if t != token)])
        return True

    def decide_twins(self, i: int) -> list[int]:
        """Choose between text ``i``'s twins by later states; return the places that are sure."""
        sure: list[int] = []
        tokens = self.task.prefixes.tokens
        for column, twins in self.twins[i].items():
            if self.task.deadline.passed:
                self.cut = True
                return sure
            texts = tokens[i].repeat(len(twins), 1)
            texts[:, column] = texts.new_tensor(twins)
            equal = self.equal(torch.full_like(texts[:, 0], i), texts)
            best = int(equal.argmax())
            tokens[i, column] = twins[best]
            alone = int((equal == equal[best]).sum()) == 1 and int(equal[best]) > column
            if alone and not bool(self.task.table.doubtful[twins[best]]):
                sure.append(column)
        self.twins[i] = {}
        return sure


class Settling:
    """The decision whether a verified token is right.

    Args:
        task: the search.
        as_sent: runs as the client runs them.
        noised: whether no token's state equals the observed one; None to find out.

    Attributes:
        noised: whether that is so by the argument, by a sweep, or by assumption for lack of time.
        cut: whether time ran out within a sweep of all possible tokens.
    """

    def __init__(self, task: Task, as_sent: AsSent, noised: bool | None) -> None:
        self.task = task
        self.as_sent = as_sent
        self.noised = noised is True
        self.cut = False
        self._may_be_noised = noised is None

    def accepted(self, tokens: Tensor, distances: Tensor, noise: Tensor) -> Tensor:
        """Return whether no token other than each of ``tokens`` (any shape) can be right."""
        certain: Tensor = self._radius(distances, noise) < self.task.table.isolation(tokens)
        return certain

    def look(self, i: int, place: OpenPlace) -> int | None:
        """Return the token of text ``i``'s open place, or None if it is not certain yet.

        All tokens that can still be right are verified where rounds of candidates did not suffice.
        """
        column = int(self.task.lengths[i])
        token, distance = place.tokens[place.best], place.distances[place.best]
        noise = float(self.task.noise[i, column])
        radius = self._radius_of(distance, noise)
        alone = float(self.task.table.isolation(self.task.lengths.new_tensor(token)))
        if not place.certain and radius < alone:
            return token
        same = self.as_sent.same(i, place)
        if same is not None:
            return same
        place.rivals = self._rivals(token, radius).tolist()
        unseen = any(r not in place.verified for r in place.rivals)
        hidden = distance <= 2.0 * noise and self.as_sent.repeatable is True
        if unseen and place.round < len(ROUNDS):
            return None
        if unseen or hidden:
            self._sweep(i, place, noise)
            return None
        if self._shows_noise(place, noise):
            return None
        return place.tokens[place.best]

    def _radius(self, distances: Tensor, noise: Tensor) -> Tensor:
        """Return how far from a candidate, in the typical context, the right token can be."""
        excess = (distances.square() - 2.0 * noise.square()).clamp(min=0).sqrt()
        radius: Tensor = FAR * excess + 2.0 * noise
        return radius

    def _radius_of(self, distance: float, noise: float) -> float:
        return float(self._radius(torch.tensor(distance), torch.tensor(noise)))

    def _rivals(self, token: int, radius: float) -> Tensor:
        """Return the tokens that can be right with ``token`` verified, the commonest first."""
        rivals = self.task.table.neighbours(token, radius)
        return rivals[self.task.table.rank[rivals].argsort()]

    def _sweep(self, i: int, place: OpenPlace, noise: float) -> None:
        """Verify all tokens that can still be right, and settle on the nearest."""
        table, prefixes = self.task.table, self.task.prefixes
        target = self.task.observed[i, self.task.lengths[i]]
        row = torch.tensor([i], device=target.device)
        exact = place.distances[place.best] <= 2.0 * noise and self.as_sent.repeatable is True
        run = self.as_sent.restart(row) if exact else prefixes.select(row)
        whole = self.task.deadline
        limit = whole.share(2) if self._may_be_noised and not exact else whole
        open_ = torch.ones(table.size, dtype=torch.bool, device=target.device)
        verified = place.rerun if exact else place.verified
        open_[torch.tensor(sorted(verified), dtype=torch.int64, device=target.device)] = False
        rivals = torch.tensor(place.rivals, dtype=torch.int64, device=target.device)
        while True:
            part = rivals[open_[rivals]][:SWEEP]
            if not len(part):
                break
            if limit.passed:
                self.cut = True
                break
            states = run.attempt(part[None])[0].float()
            open_[part] = False
            far = (states - target).norm(dim=1)
            nearest = int(far.argmin())
            before = place.distances[place.best]
            place.count(part.tolist(), far[far > far[nearest]].tolist() or [float("inf")])
            token, distance = int(part[nearest]), float(far[nearest])
            place.keep(token, states[nearest], distance)
            if exact:
                new = part[far == 0].tolist()
                if place.twins and not new:
                    break
                rivals = self._add_twins(place, new, rivals)
            elif distance < before:
                if self.as_sent.same(i, place) is not None:
                    break
                rivals = self._rivals(token, self._radius_of(distance, noise))
        self.task.computed += run.computed
        cut = bool(open_[rivals].any()) and place.distances[place.best] > 0
        if cut and whole.passed:
            return
        if place.twins:
            self.as_sent.choose_twin(i, place)
        place.rivals = rivals.tolist()
        if not self._shows_noise(place, noise, cut):
            place.settled = place.tokens[place.best]

    def _add_twins(self, place: OpenPlace, twins: list[int], rivals: Tensor) -> Tensor:
        """Add a place's twins; return its rivals, the nearest to the first twin first."""
        if twins and not place.twins:
            entries = self.task.table.entries
            rivals = rivals[(entries[rivals] - entries[twins[0]]).norm(dim=1).argsort()]
        place.twins += twins
        return rivals

    def _shows_noise(self, place: OpenPlace, noise: float, cut: bool = False) -> bool:
        """Return whether none of many possible tokens is right; all are verified unless ``cut``."""
        many = min(SURELY_NOISED, self.task.table.distinct // 2)
        wrong = place.distances[place.best] > 2.0 * noise
        self.noised = self._may_be_noised and wrong and (cut or len(place.rivals) > many)
        return self.noised
