"""Exact recovery of a text from a causal model's hidden states, left to right, guessing ahead.

A token's state depends on what precedes it alone, so that with the beginning known the right token
is the one whose state *is* the observed one (the idea of SipIt, arXiv 2510.15511, with the nearest
candidate in place of a threshold). Three things make it fast. All remaining tokens are guessed, and
the bottom model run once over the guesses verifies every one up to the first mistake. At a mistake
the failed candidate tells how this context shifts states, so that the next candidates are chosen
around the right place. And a candidate is believed as soon as no other token can be the right one:
were it another, that token's state would be as far from the candidate's as the observed one is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lightning_fedleak.attacks.prefix_cache import Prefixes
from lightning_fedleak.attacks.sent import Deadline
from lightning_fedleak.attacks.state_table import StateTable

FIRST = 64
"""Candidates per position that are kept of the first ranking."""
READ = 256
"""Of the table's likeliest tokens, those whose prior is asked for."""
AHEAD = 4, 48
"""Tokens guessed ahead: at least, at most."""
ROUNDS = 8, 16, 32, 64, 128, 256
"""Candidates verified at once in the first, second, ... round at one place; then the last."""
LEARN_FROM, LEARN_MOST = 25, 65
"""Verified candidates at one place from which on they are learned from; at most so many."""
FAR = 20.0
"""A token's distance to a candidate may differ so many times from that in the typical context."""


class Prior(Protocol):
    """What is expected at a place before its state is looked at."""

    def of(self, rows: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities (n, k), up to a constant for each place, of ``tokens`` (n, k)."""

    def all(self, row: int, place: int) -> Tensor | None:
        """The same (V,) for the whole vocabulary; None where nothing is known."""


@dataclass
class _Place:
    """What is known of one text's first open token."""

    tokens: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    rivals: list[int] = field(default_factory=list)
    round: int = 0
    settled: int | None = None

    def add(self, token: int, state: Tensor, distance: float) -> None:
        if token not in self.seen:
            self.seen.add(token)
            self.tokens.append(token)
            self.states.append(state)
            self.distances.append(distance)

    @property
    def best(self) -> int:
        """Index of the nearest."""
        return min(range(len(self.distances)), key=self.distances.__getitem__)


@dataclass
class Recovered:
    """What the search found.

    Attributes:
        tokens: (B, N); beyond what was verified the best guess.
        verified: (B,) tokens that are verified.
        confidence: (B, N) one minus the ratio of the distances of best and runner-up, where the
            runner-up not verified is estimated; 0 where only guessed.
        residuals: (B, N) distance of the best to the observed state, nan where only guessed.
        finished: False if time ran out.
        candidates: tokens that went through the bottom model.
        runs: forwards of the bottom model.
    """

    tokens: Tensor
    verified: Tensor
    confidence: Tensor
    residuals: Tensor
    finished: bool
    candidates: int
    runs: int


def search(
    prefixes: Prefixes,
    table: StateTable,
    observed: Tensor,
    prior: Prior,
    *,
    precision: float,
    deadline: Deadline | None = None,
) -> Recovered:
    """Recovers all texts of ``prefixes``, of which nothing is known yet.

    Args:
        prefixes: the texts' layout, and the bottom model.
        table: to rank candidates by.
        observed: (B, N, d) float32 states by real token.
        prior: of the next token.
        precision: share of a state's length by which two computations of it may differ.
        deadline: looked at before each forward; None for no bound.
    """
    return _Search(prefixes, table, observed, prior, precision, deadline or Deadline()).run()


class _Search:
    def __init__(
        self,
        prefixes: Prefixes,
        table: StateTable,
        observed: Tensor,
        prior: Prior,
        precision: float,
        deadline: Deadline,
    ) -> None:
        self.prefixes = prefixes
        self.table = table
        self.observed = observed
        self.prior = prior
        self.deadline = deadline
        self.noise = precision * observed.norm(dim=2)
        self.counts = prefixes.layout.counts
        b, n = observed.shape[:2]
        self.rows = torch.arange(b, device=observed.device)
        self.places = [_Place() for _ in range(b)]
        self.confidence = observed.new_zeros(b, n)
        self.residuals = observed.new_full((b, n), float("nan"))
        self.run_length = float(AHEAD[1])
        self.first = self._ranked_first()
        self.guess = self.first[:, :, 0].clone()

    def _ranked_first(self) -> Tensor:
        b, n = self.observed.shape[:2]
        k = min(FIRST, self.table.distinct)
        out = torch.zeros(b, n, k, dtype=torch.int64, device=self.observed.device)
        real = torch.arange(n, device=out.device) < self.counts[:, None]
        rows, places = real.nonzero(as_tuple=True)
        step = self.table.at_once
        for r, p in zip(torch.split(rows, step), torch.split(places, step), strict=True):
            tokens, scores = self.table.likeliest(self.observed[r, p], READ)
            scores = scores + self.prior.of(r, p, tokens)
            out[r, p] = tokens.gather(1, scores.topk(k, dim=1).indices)
        return out

    def run(self) -> Recovered:
        finished = True
        while bool((self.prefixes.known < self.counts).any()):
            if self.deadline.passed:
                finished = False
                break
            self._pass()
        known = self.prefixes.known
        ahead = torch.arange(self.guess.shape[1], device=known.device) >= known[:, None]
        return Recovered(
            tokens=torch.where(ahead, self.guess, self.prefixes.tokens),
            verified=known,
            confidence=self.confidence,
            residuals=self.residuals,
            finished=finished,
            candidates=self.prefixes.computed,
            runs=self.prefixes.runs,
        )

    def _pass(self) -> None:
        known = self.prefixes.known
        others = self._others()
        width = self._width()
        at = known[:, None] + torch.arange(width, device=known.device)
        inside = at < self.counts[:, None]
        at = at.clamp(max=self.guess.shape[1] - 1)
        chain = self.guess.gather(1, at)
        states = self.prefixes.follow(chain, others).float()
        target = self.observed[self.rows[:, None], at]
        distances = (states[:, :width] - target).norm(dim=2)
        believed = self._believed(chain, distances, self.noise.gather(1, at)) & inside
        head = torch.tensor([p.settled is not None for p in self.places], device=known.device)
        believed[:, 0] |= head & inside[:, 0]
        kept = believed.int().cumprod(1).sum(1)
        other = torch.full_like(kept, -1)
        alone = (states[:, width:] - target[:, :1]).norm(dim=2)
        for i in (kept == 0).logical_and(inside[:, 0]).nonzero().squeeze(1).tolist():
            found = self._look(i, chain, others, states, distances, alone)
            if found == 0:
                kept[i] = 1
            elif found is not None:
                other[i] = found
        self._note(kept, other, at, chain, states, distances)
        self.prefixes.keep(kept, other)
        self._move_on(kept, other, at, chain, states[:, :width], target, distances, inside)

    def _width(self) -> int:
        """Tokens to guess ahead: about twice what is usually right, less in a long search."""
        left = int((self.counts - self.prefixes.known).max())
        rounds = max((p.round for p in self.places), default=0)
        wanted = max(AHEAD[0], min(AHEAD[1], int(2 * self.run_length))) >> max(0, rounds - 1)
        return max(1, min(left, wanted))

    def _radius(self, distances: Tensor, noise: Tensor) -> Tensor:
        """How far from a candidate, in the typical context, the right token can still be."""
        excess = (distances.square() - 2.0 * noise.square()).clamp(min=0).sqrt()
        radius: Tensor = FAR * excess + 2.0 * noise
        return radius

    def _believed(self, tokens: Tensor, distances: Tensor, noise: Tensor) -> Tensor:
        alone = self.table.alone(tokens)
        believed: Tensor = self._radius(distances, noise) < alone
        return believed

    def _look(
        self,
        i: int,
        chain: Tensor,
        others: Tensor,
        states: Tensor,
        distances: Tensor,
        alone: Tensor,
    ) -> int | None:
        """Takes in what was run at text ``i``'s open place; where its token is, if it is found."""
        place, width = self.places[i], chain.shape[1]
        place.add(int(chain[i, 0]), states[i, 0], float(distances[i, 0]))
        for j, (token, far) in enumerate(zip(others[i].tolist(), alone[i].tolist(), strict=True)):
            place.add(token, states[i, width + j], far)
        best = place.best
        token, distance = place.tokens[best], place.distances[best]
        noise = self.noise[i, self.prefixes.known[i]]
        radius = float(self._radius(torch.tensor(distance), noise.cpu()))
        if distance > 0 and radius >= float(self.table.alone(self.guess.new_tensor(token))):
            rivals = self.table.within(token, radius)
            place.rivals = rivals[self.table.rank[rivals].argsort()].tolist()
            if any(r not in place.seen for r in place.rivals):
                return None
        if token == int(chain[i, 0]):
            return 0
        hits = (others[i] == token).nonzero().squeeze(1).tolist()
        if hits:
            return width + int(hits[0])
        place.settled = token
        return None

    def _others(self) -> Tensor:
        """Candidates beside the head of the chain, for texts that are stuck; pads with token 0."""
        wanted: dict[int, list[int]] = {}
        for i, place in enumerate(self.places):
            if place.settled is not None:
                self.guess[i, self.prefixes.known[i]] = place.settled
            elif place.tokens:
                k = ROUNDS[min(place.round, len(ROUNDS) - 1)]
                head, *rest = self._ranked(i, place, k + 1)
                self.guess[i, self.prefixes.known[i]] = head
                wanted[i] = rest
                place.round += 1
        k = max((len(w) for w in wanted.values()), default=0)
        out = torch.zeros(len(self.places), k, dtype=torch.int64, device=self.guess.device)
        for i in range(len(self.places)):
            first = self.first[i, min(int(self.prefixes.known[i]), self.first.shape[1] - 1)]
            fill = wanted.get(i, [])
            fill = fill + first[: k - len(fill)].tolist() if len(fill) < k else fill
            out[i, : len(fill)] = torch.tensor(fill, dtype=torch.int64)
        return out

    def _ranked(self, i: int, place: _Place, k: int) -> list[int]:
        """The ``k`` best candidates not verified yet, from several rankings in turn."""
        at = int(self.prefixes.known[i])
        best = place.best
        difference = self.observed[i, at] - place.states[best]
        reach = min(self.table.size, k + len(place.seen))
        near, scores = self.table.near(place.tokens[best], difference, reach)
        expected = self.prior.all(i, at)
        lists = [near]
        if expected is not None:
            lists += [self.table.best(scores + expected, reach), self.table.best(expected, reach)]
        else:
            lists.append(self.table.best(scores, reach))
        if len(place.tokens) >= LEARN_FROM:
            order = sorted(range(len(place.tokens)), key=place.distances.__getitem__)[:LEARN_MOST]
            tokens = near.new_tensor([place.tokens[o] for o in order])
            states = torch.stack([place.states[o] for o in order])
            lists += self.table.like_verified(tokens, states, self.observed[i, at], reach)
        lists.append(self.first[i, at])
        if place.rivals:
            lists.append(near.new_tensor(place.rivals))
        out: dict[int, None] = {}
        turn = [iter(entries.tolist()) for entries in lists]
        while turn and len(out) < k:
            for entries in list(turn):
                for token_id in entries:
                    if token_id not in place.seen and token_id not in out:
                        out[token_id] = None
                        break
                else:
                    turn.remove(entries)
                if len(out) == k:
                    break
        return list(out)

    def _note(
        self,
        kept: Tensor,
        other: Tensor,
        at: Tensor,
        chain: Tensor,
        states: Tensor,
        distances: Tensor,
    ) -> None:
        """Residuals and confidences of what is kept."""
        alone = other >= 0
        for i in (kept + alone.long()).nonzero().squeeze(1).tolist():
            place = self.places[i]
            for j in range(max(1, int(kept[i]))):
                column = int(at[i, j])
                if j == 0:
                    if not bool(alone[i]):
                        place.add(int(chain[i, 0]), states[i, 0], float(distances[i, 0]))
                    order = sorted(place.distances)
                    best, second = order[0], order[1] if len(order) > 1 else float("inf")
                    token = place.tokens[place.best]
                else:
                    best, second = float(distances[i, j]), float("inf")
                    token = int(chain[i, j])
                if len(place.seen) < self.table.distinct or j > 0:
                    second = min(second, float(self.table.alone(self.guess.new_tensor(token))))
                self.residuals[i, column] = best
                if not bool(self.table.doubtful[token]) and second > 0:
                    self.confidence[i, column] = max(0.0, 1.0 - best / second)

    def _move_on(
        self,
        kept: Tensor,
        other: Tensor,
        at: Tensor,
        chain: Tensor,
        states: Tensor,
        target: Tensor,
        distances: Tensor,
        inside: Tensor,
    ) -> None:
        """Opens the next place of each text, and guesses again what the chain has shown wrong."""
        width = chain.shape[1]
        for i in (kept + (other >= 0).long()).nonzero().squeeze(1).tolist():
            self.places[i] = place = _Place()
            m = int(kept[i])
            if m:
                self.run_length += 0.2 * (m - self.run_length)
                if m < width and bool(inside[i, m]):
                    place.add(int(chain[i, m]), states[i, m], float(distances[i, m]))
        ahead = torch.arange(width, device=kept.device)
        stale = inside & (ahead > kept[:, None].clamp(min=1))
        stale &= distances > 0.5 * self.table.alone(chain)
        rows, columns = stale.nonzero(as_tuple=True)
        differences = (target - states)[rows, columns]
        self.guess[rows, at[rows, columns]] = self.table.nearest(chain[rows, columns], differences)


__all__ = ["Prior", "Recovered", "search"]
