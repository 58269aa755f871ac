"""Which tokens are tried at the first open place of a text, and when one is believed.

At first a place is ranked by its state alone. Once candidates failed behind the true beginning, the
nearest of them tells how this context shifts states, and the next are ranked around the right
place, in several ways in turn.

Runs with and without cache differ by rounding, which in bf16 hides the difference between near
tokens. Where it might, the text is run once more as the client ran it, without cache: the right
token's state is then equal bit for bit, on the same kind of machine; whether it is shows on tokens
that are known already. Where several tokens have the observed state even so, the states that follow
decide between them.

A candidate is believed as soon as no other token can be the right one: were it another, that
token's state would be as far from the candidate's as the observed one is. Where many rounds of
candidates have not come so far, all tokens that can still be right are verified. If of very many
none is, no token is what was sent; the same is assumed where half of the time that is left has not
sufficed to find one, so that the other half is left for a search that does not expect one. What is
found on that assumption is unfinished.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lightning_fedleak.attacks.texts.base import Deadline
from lightning_fedleak.attacks.texts.prefix.cache import Prefixes
from lightning_fedleak.attacks.texts.prefix.table import StateTable

FIRST = 64
"""Candidates per position that are kept of the first ranking."""
READ = 256
"""Of the table's likeliest tokens, those whose prior is asked for."""
ROUNDS = 8, 16, 32, 64, 128, 256
"""Candidates verified at once in the first, second, ... round at one place."""
LEARN_FROM, LEARN_MOST = 25, 65
"""Verified candidates at one place from which on they are learned from; at most so many."""

SAME_AT_ONCE = 8
"""Candidates that are run without cache at one place."""
WITHIN_ROUNDING = 0.5
"""Of the rounding between runs with and without cache: nearer tokens may have equal states."""
MOST_TWINS = 64
"""Tokens with equal states among which the states that follow decide."""

SWEEP = 512
"""Candidates verified at once when all that could be right are."""
SURELY_NOISED = 1000
"""Tokens that could be right, of which none is: then no token is what was sent."""
FAR = 20.0
"""A token's distance to a candidate may differ so many times from that in the typical context."""


class Prior(Protocol):
    """What is expected at a place before its state is looked at."""

    def of(self, rows: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities (n, k), up to a constant for each place, of ``tokens`` (n, k)."""

    def all(self, row: int, place: int) -> Tensor | None:
        """The same (V,) for the whole vocabulary; None where nothing is known."""


@dataclass
class Effort:
    """Tokens that went through the bottom model, and its forwards."""

    computed: int = 0
    runs: int = 0

    def add(self, other: Effort | Prefixes) -> None:
        """Counts what ``other`` took too."""
        self.computed += other.computed
        self.runs += other.runs


@dataclass(frozen=True)
class Task:
    """What a search is given.

    Attributes:
        prefixes: the texts' layout, what is known of them so far, and the bottom model.
        table: to rank candidates by.
        observed: (B, N, d) float32 states by real token.
        prior: of the next token.
        noise: (B, N) by how much two computations of a state may differ.
        deadline: looked at before each forward.
        beside: effort of runs other than those of ``prefixes``.
    """

    prefixes: Prefixes
    table: StateTable
    observed: Tensor
    prior: Prior
    noise: Tensor
    deadline: Deadline
    beside: Effort = field(default_factory=Effort)

    @property
    def counts(self) -> Tensor:
        """(B,) tokens of each text."""
        return self.prefixes.layout.counts

    @property
    def known(self) -> Tensor:
        """(B,) tokens known of each text."""
        return self.prefixes.known


@dataclass
class Place:
    """What is known of one text's first open token.

    Attributes:
        tokens: verified, each with its state and its distance to the observed one.
        states: (d,) each.
        distances: from the observed state.
        seen: all that were verified, also those that are only counted.
        runner_up: the smallest distance among those only counted.
        rivals: tokens that could still be right when last looked at.
        run_again: those that were also run as the client runs them.
        twins: tokens whose state, run so, is the observed one.
        round: of candidates.
        settled: the token on which the search has settled.
        chosen: index of the one chosen among several with the observed state.
        certain: the token must be shown anew to have the observed state, run as the client does.
    """

    tokens: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    runner_up: float = float("inf")
    rivals: list[int] = field(default_factory=list)
    run_again: set[int] = field(default_factory=set)
    twins: list[int] = field(default_factory=list)
    round: int = 0
    settled: int | None = None
    chosen: int | None = None
    certain: bool = False

    def add(self, token: int, state: Tensor, distance: float) -> None:
        """Takes in a verified token, once."""
        if token not in self.seen:
            self.seen.add(token)
            self.keep(token, state, distance)

    def keep(self, token: int, state: Tensor, distance: float) -> None:
        """Takes in a verified token, also one that is counted already."""
        self.tokens.append(token)
        self.states.append(state)
        self.distances.append(distance)

    def only_counted(self, tokens: list[int], distances: list[float]) -> None:
        """Takes in verified tokens without their states, and the ``distances`` of the farther."""
        self.seen.update(tokens)
        self.runner_up = min(self.runner_up, *distances)

    @property
    def order(self) -> list[int]:
        """Indices of the verified tokens, the nearest first."""
        return sorted(range(len(self.distances)), key=self.distances.__getitem__)

    @property
    def best(self) -> int:
        """Index of the nearest, or of one chosen among several."""
        if self.chosen is not None:
            return self.chosen
        return min(range(len(self.distances)), key=self.distances.__getitem__)


def ranked_first(task: Task) -> Tensor:
    """(B, N, k) candidates for each place by its state and the prior alone, the likeliest first."""
    b, n = task.observed.shape[:2]
    k = min(FIRST, task.table.distinct)
    out = torch.zeros(b, n, k, dtype=torch.int64, device=task.observed.device)
    real = torch.arange(n, device=out.device) < task.counts[:, None]
    rows, places = real.nonzero(as_tuple=True)
    step = task.table.at_once
    for r, p in zip(torch.split(rows, step), torch.split(places, step), strict=True):
        tokens, scores = task.table.likeliest(task.observed[r, p], READ)
        scores = scores + task.prior.of(r, p, tokens)
        out[r, p] = tokens.gather(1, scores.topk(k, dim=1).indices)
    return out


def next_round(task: Task, place: Place, i: int, first: Tensor) -> list[int]:
    """Candidates of the next round at text ``i``'s open place.

    Args:
        task: the search.
        place: what is known there, at least one verified token.
        i: the text.
        first: (k,) of the first ranking.
    """
    k = ROUNDS[min(place.round, len(ROUNDS) - 1)]
    place.round += 1
    at = int(task.known[i])
    reach = min(task.table.size, k + 1 + len(place.seen))
    best = place.best
    difference = task.observed[i, at] - place.states[best]
    near, scores = task.table.near(place.tokens[best], difference, reach)
    expected = task.prior.all(i, at)
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
        rankings += task.table.like_verified(tokens, states, task.observed[i, at], reach)
    rankings.append(first)
    return _in_turn([*(r.tolist() for r in rankings), place.rivals], place.seen, k + 1)


def _in_turn(rankings: list[list[int]], seen: set[int], k: int) -> list[int]:
    """The first ``k`` different tokens not ``seen``, one from each ranking in turn."""
    out: dict[int, None] = {}
    turn = [iter(ranking) for ranking in rankings]
    while turn and len(out) < k:
        for ranking in list(turn):
            token = next((t for t in ranking if t not in seen and t not in out), None)
            if token is None:
                turn.remove(ranking)
            else:
                out[token] = None
            if len(out) == k:
                break
    return list(out)


class AsSent:
    """Runs of texts as the client runs them.

    Args:
        task: the search.
        low_precision: whether rounding may hide what tells tokens apart.

    Attributes:
        repeatable: whether such a run gives what was sent, bit for bit; None until it is known.
        twins: by text and place, tokens among which what follows is to decide.
        cut: whether time ended a run that was still to decide.
    """

    def __init__(self, task: Task, low_precision: bool) -> None:
        self.task = task
        self.low_precision = low_precision
        self.repeatable: bool | None = None
        self.twins: list[dict[int, list[int]]] = [{} for _ in task.observed]
        self.cut = False

    def begun(self, rows: Tensor) -> Prefixes:
        """The texts ``rows`` without cache, known as far as they are."""
        prefixes = self.task.prefixes
        again = Prefixes(prefixes.bottom, prefixes.layout[rows], cached=False)
        again.known, again.tokens = prefixes.known[rows], prefixes.tokens[rows]
        return again

    def equal(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """(n,) first tokens of texts (n, N) that have the observed states of ``rows`` (n,)."""
        run = self.begun(rows)
        run.known = torch.zeros_like(run.known)
        states = run.follow(tokens).float()
        self.task.beside.add(run)
        ahead = torch.arange(states.shape[1], device=states.device)
        same = (states == self.task.observed[rows]).all(2)
        same &= ahead < self.task.counts[rows][:, None]
        return same.int().cumprod(1).sum(1)

    def may_match(self, i: int) -> bool:
        """Whether such a run gives what was sent, as far as the known tokens of text ``i`` tell."""
        if self.repeatable is None and int(self.task.known[i]):
            row = torch.tensor([i], device=self.task.known.device)
            again = self.begun(row)
            again.known = torch.zeros_like(again.known)
            state = again.follow(again.tokens[:, :1]).float()[0, 0]
            self.task.beside.add(again)
            self.repeatable = torch.equal(state, self.task.observed[i, 0])
        return self.repeatable is not False

    def equal_ahead(self, rows: Tensor, chain: Tensor) -> Tensor:
        """(n,) first tokens of ``chain`` (n, k) that continue the texts ``rows`` as observed."""
        again = self.begun(rows)
        states = again.follow(chain).float()
        self.task.beside.add(again)
        ahead = torch.arange(chain.shape[1], device=rows.device)
        places = self.task.known[rows][:, None] + ahead
        inside = places < self.task.counts[rows][:, None]
        target = self.task.observed[
            rows[:, None], places.clamp(max=self.task.observed.shape[1] - 1)
        ]
        same = (states == target).all(2) & inside
        found = same.int().cumprod(1).sum(1)
        if bool(found.any()):
            self.repeatable = True
        return found

    def same(self, i: int, place: Place) -> int | None:
        """A verified candidate of text ``i``'s open place that has the observed state."""
        if not self.may_match(i):
            return None
        at = int(self.task.known[i])
        noise = float(self.task.noise[i, at])
        near = [place.tokens[o] for o in place.order if place.distances[o] <= 2.0 * noise]
        near = [t for t in near if t not in place.run_again][:SAME_AT_ONCE]
        if not near:
            return None
        device = self.task.known.device
        again = self.begun(torch.tensor([i], device=device))
        states = again.attempt(torch.tensor([near], device=device))[0].float()
        self.task.beside.add(again)
        place.run_again.update(near)
        hits = (states == self.task.observed[i, at]).all(1).nonzero()
        if not len(hits):
            return None
        self.repeatable = True
        found = near[int(hits[0])]
        place.distances[place.tokens.index(found)] = 0.0
        return found

    def choose_twin(self, i: int, place: Place) -> None:
        """Of the place's twins, the one expected most is taken for now."""
        at = int(self.task.known[i])
        expected = self.task.prior.all(i, at)
        if expected is not None:
            order = expected[place.twins].argsort(descending=True).tolist()
            place.twins = [place.twins[o] for o in order]
        if len(place.twins) > 1:
            self.twins[i][at] = place.twins[:MOST_TWINS]
        place.keep(place.twins[0], self.task.observed[i, at], 0.0)
        place.chosen = len(place.tokens) - 1

    def may_have_twins(self, i: int, at: int, token: int) -> bool:
        """Whether rounding may hide other tokens; what follows is to decide then."""
        table = self.task.table
        reach = WITHIN_ROUNDING * float(self.task.noise[i, at])
        if not self.low_precision or float(table.alone(self.task.known.new_tensor(token))) >= reach:
            return False
        near = table.within(token, reach)
        apart = (table.entries[near] - table.entries[token]).norm(dim=1)
        nearest = near[apart.argsort()[:MOST_TWINS]].tolist()
        self.twins[i].setdefault(at, [token, *(t for t in nearest if t != token)])
        return True

    def decide_twins(self, i: int) -> list[int]:
        """Has what follows decide between the twins of text ``i``; the places that are sure now."""
        sure: list[int] = []
        tokens = self.task.prefixes.tokens
        for at, twins in self.twins[i].items():
            if self.task.deadline.passed:
                self.cut = True
                return sure
            texts = tokens[i].repeat(len(twins), 1)
            texts[:, at] = texts.new_tensor(twins)
            equal = self.equal(torch.full_like(texts[:, 0], i), texts)
            best = int(equal.argmax())
            tokens[i, at] = twins[best]
            alone = int((equal == equal[best]).sum()) == 1 and int(equal[best]) > at
            if alone and not bool(self.task.table.doubtful[twins[best]]):
                sure.append(at)
        self.twins[i] = {}
        return sure


class Settling:
    """Decides on tokens that were verified.

    Args:
        task: the search.
        as_sent: runs as the client runs them.
        noised: whether it is known that no token's state is the observed one; None to find out.

    Attributes:
        noised: whether it is known, has shown, or is assumed for want of time.
        cut: whether time ended a look at all that can be right.
    """

    def __init__(self, task: Task, as_sent: AsSent, noised: bool | None) -> None:
        self.task = task
        self.as_sent = as_sent
        self.noised = noised is True
        self.cut = False
        self._may_be_noised = noised is None

    def believed(self, tokens: Tensor, distances: Tensor, noise: Tensor) -> Tensor:
        """Whether no token other than each of ``tokens`` can be the right one (any shape)."""
        found: Tensor = self._radius(distances, noise) < self.task.table.alone(tokens)
        return found

    def look(self, i: int, place: Place) -> int | None:
        """The token of text ``i``'s open place, if what was verified there tells.

        Verifies all that can still be right where rounds of candidates have not sufficed.
        """
        at = int(self.task.known[i])
        token, distance = place.tokens[place.best], place.distances[place.best]
        noise = float(self.task.noise[i, at])
        radius = self._radius_of(distance, noise)
        alone = float(self.task.table.alone(self.task.known.new_tensor(token)))
        if not place.certain and radius < alone:
            return token
        same = self.as_sent.same(i, place)
        if same is not None:
            return same
        place.rivals = self._rivals(token, radius).tolist()
        unseen = any(r not in place.seen for r in place.rivals)
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
        """How far from a candidate, in the typical context, the right token can still be."""
        excess = (distances.square() - 2.0 * noise.square()).clamp(min=0).sqrt()
        radius: Tensor = FAR * excess + 2.0 * noise
        return radius

    def _radius_of(self, distance: float, noise: float) -> float:
        return float(self._radius(torch.tensor(distance), torch.tensor(noise)))

    def _rivals(self, token: int, radius: float) -> Tensor:
        """Tokens that can be right with ``token`` verified, the commonest first."""
        rivals = self.task.table.within(token, radius)
        return rivals[self.task.table.rank[rivals].argsort()]

    def _sweep(self, i: int, place: Place, noise: float) -> None:
        """Verifies all tokens that can still be right, and settles on the nearest."""
        table, prefixes = self.task.table, self.task.prefixes
        target = self.task.observed[i, self.task.known[i]]
        row = torch.tensor([i], device=target.device)
        exact = place.distances[place.best] <= 2.0 * noise and self.as_sent.repeatable is True
        run = self.as_sent.begun(row) if exact else prefixes.of_rows(row)
        whole = self.task.deadline
        limit = whole.share(2) if self._may_be_noised and not exact else whole
        open_ = torch.ones(table.size, dtype=torch.bool, device=target.device)
        done = place.run_again if exact else place.seen
        open_[torch.tensor(sorted(done), dtype=torch.int64, device=target.device)] = False
        rivals = torch.tensor(place.rivals, dtype=torch.int64, device=target.device)
        while True:
            left = rivals[open_[rivals]][:SWEEP]
            if not len(left):
                break
            if limit.passed:
                self.cut = True
                break
            states = run.attempt(left[None])[0].float()
            open_[left] = False
            far = (states - target).norm(dim=1)
            nearest = int(far.argmin())
            before = place.distances[place.best]
            place.only_counted(left.tolist(), far[far > far[nearest]].tolist() or [float("inf")])
            token, distance = int(left[nearest]), float(far[nearest])
            place.keep(token, states[nearest], distance)
            if exact:
                new = left[far == 0].tolist()
                if new and not place.twins:
                    apart = (table.entries[rivals] - table.entries[new[0]]).norm(dim=1)
                    rivals = rivals[apart.argsort()]
                if place.twins and not new:
                    break
                place.twins += new
            elif distance < before:
                if self.as_sent.same(i, place) is not None:
                    break
                rivals = self._rivals(token, self._radius_of(distance, noise))
        self.task.beside.add(run)
        cut = bool(open_[rivals].any()) and place.distances[place.best] > 0
        if cut and whole.passed:
            return
        if place.twins:
            self.as_sent.choose_twin(i, place)
        place.rivals = rivals.tolist()
        if not self._shows_noise(place, noise, cut):
            place.settled = place.tokens[place.best]

    def _shows_noise(self, place: Place, noise: float, cut: bool = False) -> bool:
        """Whether of many tokens that could be right, all verified unless ``cut``, none is."""
        many = min(SURELY_NOISED, self.task.table.distinct // 2)
        off = place.distances[place.best] > 2.0 * noise
        self.noised = self._may_be_noised and off and (cut or len(place.rivals) > many)
        return self.noised


__all__ = ["AsSent", "Effort", "Place", "Prior", "Settling", "Task", "next_round", "ranked_first"]
