"""Exact recovery of a text from a causal model's hidden states, left to right, guessing ahead.

A token's state depends on what precedes it alone, so that with the beginning known the right token
is the one whose state *is* the observed one (the idea of SipIt, arXiv 2510.15511, with the nearest
candidate in place of a threshold). Three things make it fast. All remaining tokens are guessed, and
the bottom model run once over the guesses verifies every one up to the first mistake. At a mistake
the failed candidate tells how this context shifts states, so that the next candidates are chosen
around the right place. And a candidate is believed as soon as no other token can be the right one:
were it another, that token's state would be as far from the candidate's as the observed one is.

Runs with and without cache differ by rounding, which in bf16 hides the difference between near
tokens. Where it might, the text is run once more as the client ran it, without cache: the right
token's state is then equal bit for bit, on the same kind of machine; whether it is shows on tokens
that are known already.

Where no token's state is the observed one, the states were noised or the copy of the bottom model
is stale; the rest is then left to :mod:`~lightning_fedleak.attacks.prefix_beam`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from lightning_fedleak.attacks.prefix_beam import beam_search
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
"""Candidates verified at once in the first, second, ... round at one place."""
SWEEP = 512
"""Candidates verified at once behind these rounds, until none is left that could be right."""
SURELY_NOISED = 1000
"""Tokens that could be right, of which none is: then no token is what was sent."""
LOW_PRECISION = 1e-4
SAME_AT_ONCE = 8
"""Candidates that are run without cache at one place."""
WITHIN_ROUNDING = 0.5
"""Of the rounding between runs with and without cache: nearer tokens may have equal states."""
MOST_TWINS = 64
"""Tokens with equal states among which the states that follow decide."""
REOPENED = 8
"""Places of one text that may be opened again."""
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
    run_again: set[int] = field(default_factory=set)
    runner_up: float = float("inf")
    twins: list[int] = field(default_factory=list)
    round: int = 0
    settled: int | None = None
    chosen: int | None = None
    certain: bool = False

    def add(self, token: int, state: Tensor, distance: float) -> None:
        if token not in self.seen:
            self.seen.add(token)
            self.tokens.append(token)
            self.states.append(state)
            self.distances.append(distance)

    def only_counted(self, tokens: list[int], distances: list[float]) -> None:
        """Takes in verified tokens that are farther than the nearest, without their states."""
        self.seen.update(tokens)
        self.runner_up = min(self.runner_up, *distances)

    @property
    def best(self) -> int:
        """Index of the nearest, or of one chosen among several."""
        if self.chosen is not None:
            return self.chosen
        return min(range(len(self.distances)), key=self.distances.__getitem__)


@dataclass
class Recovered:
    """What the search found.

    Attributes:
        tokens: (B, N); valid up to ``verified``.
        verified: (B,) tokens that are verified.
        confidence: (B, N) one minus the ratio of the distances of best and runner-up, where the
            runner-up not verified is estimated; 0 where only guessed.
        residuals: (B, N) distance of the best to the observed state, nan where only guessed.
        noised: whether it showed that no token's state is the observed one.
        finished: False if time ran out.
        candidates: tokens that went through the bottom model.
        runs: forwards of the bottom model.
    """

    tokens: Tensor
    verified: Tensor
    confidence: Tensor
    residuals: Tensor
    noised: bool
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
    spread: Tensor,
    noised: bool | None = None,
    beam: int = 4,
    deadline: Deadline | None = None,
) -> Recovered:
    """Recovers all texts of ``prefixes``, of which nothing is known yet.

    Args:
        prefixes: the texts' layout, and the bottom model.
        table: to rank candidates by.
        observed: (B, N, d) float32 states by real token.
        prior: of the next token.
        precision: share of a state's length by which two computations of it may differ.
        spread: (d,) what noise adds, see :func:`~lightning_fedleak.attacks.prefix_beam.
            beam_search`.
        noised: whether it is known that the observed states are none of any token's; None to find
            out, which takes the whole vocabulary at the first place where it is so. With False the
            nearest token is taken at every place, at that price.
        beam: beginnings kept where it is so.
        deadline: looked at before each forward; None for no bound.
    """
    search = _Search(prefixes, table, observed, prior, precision, noised, deadline or Deadline())
    return search.run(beam, spread)


class _Search:
    def __init__(
        self,
        prefixes: Prefixes,
        table: StateTable,
        observed: Tensor,
        prior: Prior,
        precision: float,
        noised: bool | None,
        deadline: Deadline,
    ) -> None:
        self.noised, self.may_be_noised = noised is True, noised is None
        self.low_precision = precision > LOW_PRECISION
        self.repeatable: bool | None = None
        self.twins: list[dict[int, list[int]]] = [{} for _ in range(len(observed))]
        self.opened_again: list[set[int]] = [set() for _ in range(len(observed))]
        self.extra_computed = self.extra_runs = 0
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

    def run(self, beam: int, spread: Tensor) -> Recovered:
        while self._open() and not self.noised and not self.deadline.passed:
            self._pass()
        known = self.prefixes.known
        tokens = self.prefixes.tokens
        if self.noised:
            tokens, known = self._beams(beam, spread)
        return Recovered(
            tokens=tokens,
            verified=known,
            confidence=self.confidence,
            residuals=self.residuals,
            noised=self.noised,
            finished=bool((known >= self.counts).all()),
            candidates=self.prefixes.computed + self.extra_computed,
            runs=self.prefixes.runs + self.extra_runs,
        )

    def _open(self) -> bool:
        """Whether a place is open, or is opened again since without cache its state is another."""
        if bool((self.prefixes.known < self.counts).any()):
            return True
        if not (self.low_precision and self.repeatable) or self.deadline.passed:
            return False
        for i in range(len(self.counts)):
            self._among_twins(i)
        equal = self._equal(self.rows, self.prefixes.tokens)
        for i in (equal < self.counts).nonzero().squeeze(1).tolist():
            at = int(equal[i])
            self.confidence[i, at] = 0.0
            if at in self.opened_again[i] or len(self.opened_again[i]) >= REOPENED:
                continue
            self.opened_again[i].add(at)
            self.guess[i, at:] = self.prefixes.tokens[i, at:]
            self.prefixes.known[i] = at
            self.places[i] = _Place(certain=True)
        return bool((self.prefixes.known < self.counts).any())

    def _equal(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """(n,) first tokens of texts (n, N) whose states without cache are those of ``rows``."""
        run = self._uncached(rows)
        run.known = torch.zeros_like(run.known)
        states = run.follow(tokens).float()
        self._count(run)
        ahead = torch.arange(states.shape[1], device=states.device)
        same = (states == self.observed[rows]).all(2) & (ahead < self.counts[rows][:, None])
        return same.int().cumprod(1).sum(1)

    def _among_twins(self, i: int) -> None:
        """Chooses among tokens with equal states by the states that follow."""
        for at, twins in self.twins[i].items():
            if self.deadline.passed:
                return
            texts = self.prefixes.tokens[i].repeat(len(twins), 1)
            texts[:, at] = texts.new_tensor(twins)
            equal = self._equal(self.rows[i].expand(len(twins)), texts)
            best = int(equal.argmax())
            self.prefixes.tokens[i, at] = twins[best]
            alone = int((equal == equal[best]).sum()) == 1 and int(equal[best]) > at
            if alone and not bool(self.table.doubtful[twins[best]]):
                self.confidence[i, at] = 1.0
        self.twins[i] = {}

    def _beams(self, width: int, spread: Tensor) -> tuple[Tensor, Tensor]:
        """The rest of each text, as far as time allows."""
        tokens, known = self.prefixes.tokens.clone(), self.prefixes.known.clone()
        for i in (known < self.counts).nonzero().squeeze(1).tolist():
            n, start = int(self.counts[i]), int(known[i])
            left = int((known[i:] < self.counts[i:]).sum())
            found = beam_search(
                self.prefixes.of_rows(self.rows[i : i + 1]),
                self.table,
                self.observed[i, :n],
                self.first[i],
                partial(self.prior.all, i),
                width=width,
                spread=spread,
                deadline=self.deadline.share(left),
            )
            self.extra_computed += found.computed
            self.extra_runs += found.runs
            end = known[i] = found.verified
            tokens[i, start:end] = found.tokens[start:end]
            self.confidence[i, start:end] = found.confidence[start:end]
            self.residuals[i, start:end] = found.residuals[start:end]
        return tokens, known

    def _uncached(self, rows: Tensor) -> Prefixes:
        """The texts ``rows`` as the client runs them."""
        again = Prefixes(self.prefixes.bottom, self.prefixes.layout[rows], cached=False)
        again.known, again.tokens = self.prefixes.known[rows], self.prefixes.tokens[rows]
        return again

    def _may_match(self, i: int) -> bool:
        """Whether a run without cache gives what the client sent, as far as known tokens tell."""
        if self.repeatable is None and int(self.prefixes.known[i]):
            again = self._uncached(self.rows[i : i + 1])
            again.known = torch.zeros_like(again.known)
            state = again.follow(again.tokens[:, :1]).float()[0, 0]
            self._count(again)
            self.repeatable = torch.equal(state, self.observed[i, 0])
        return self.repeatable is not False

    def _count(self, run: Prefixes) -> None:
        self.extra_computed += run.computed
        self.extra_runs += run.runs

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
        noise = self.noise.gather(1, at)
        believed = self._believed(chain, distances, noise) & inside
        certain = torch.tensor([p.certain for p in self.places], device=known.device)
        believed[:, 0] &= ~certain
        head = torch.tensor([p.settled is not None for p in self.places], device=known.device)
        believed[:, 0] |= head & inside[:, 0]
        kept = believed.int().cumprod(1).sum(1)
        kept = self._kept_uncached(kept, chain, distances, noise, inside)
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

    def _kept_uncached(
        self, kept: Tensor, chain: Tensor, distances: Tensor, noise: Tensor, inside: Tensor
    ) -> Tensor:
        """``kept``, and more where the chain stopped at a token that may well be right."""
        at = kept.clamp(max=chain.shape[1] - 1)[:, None]
        near = distances.gather(1, at) <= 2.0 * noise.gather(1, at)
        stopped = (kept < chain.shape[1]) & inside.gather(1, at).squeeze(1) & near.squeeze(1)
        stopped &= torch.tensor(
            [
                k > 0 or t not in p.run_again
                for k, t, p in zip(kept.tolist(), chain[:, 0].tolist(), self.places, strict=True)
            ],
            device=kept.device,
        )
        rows = stopped.nonzero().squeeze(1)
        if not len(rows) or not self._may_match(int(rows[0])):
            return kept
        again = self._uncached(rows)
        states = again.follow(chain[rows]).float()
        self._count(again)
        places = self.prefixes.known[rows][:, None] + torch.arange(
            chain.shape[1], device=rows.device
        )
        target = self.observed[rows[:, None], places.clamp(max=self.observed.shape[1] - 1)]
        same = (states == target).all(2) & inside[rows]
        equal = same.int().cumprod(1).sum(1)
        if bool(equal.any()):
            self.repeatable = True
        for i, k in zip(rows.tolist(), kept[rows].tolist(), strict=True):
            if k == 0:
                self.places[i].run_again.add(int(chain[i, 0]))
        out = kept.clone()
        out[rows] = torch.where(equal > kept[rows], equal, kept[rows])
        ahead = torch.arange(chain.shape[1], device=rows.device)
        distances[rows] = distances[rows].masked_fill(ahead < equal[:, None], 0.0)
        return out

    def _same_uncached(self, i: int, place: _Place, noise: float) -> int | None:
        """A candidate whose state, as the client computes it, is the observed one."""
        if not self._may_match(i):
            return None
        order = sorted(range(len(place.tokens)), key=place.distances.__getitem__)
        near = [place.tokens[o] for o in order if place.distances[o] <= 2.0 * noise]
        near = [t for t in near if t not in place.run_again][:SAME_AT_ONCE]
        if not near:
            return None
        again = self._uncached(self.rows[i : i + 1])
        states = again.attempt(self.guess.new_tensor([near]))[0].float()
        self._count(again)
        place.run_again.update(near)
        hits = (states == self.observed[i, int(self.prefixes.known[i])]).all(1).nonzero()
        if not len(hits):
            return None
        self.repeatable = True
        found = near[int(hits[0])]
        place.distances[place.tokens.index(found)] = 0.0
        return found

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
        noise = float(self.noise[i, self.prefixes.known[i]])
        radius = self._radius_of(distance, noise)
        if place.certain or radius >= float(self.table.alone(self.guess.new_tensor(token))):
            same = self._same_uncached(i, place, noise)
            if same is None:
                rivals = self.table.within(token, radius)
                place.rivals = rivals[self.table.rank[rivals].argsort()].tolist()
                unseen = any(r not in place.seen for r in place.rivals)
                hidden = distance <= 2.0 * noise and self.repeatable is True
                if unseen and place.round < len(ROUNDS):
                    return None
                if unseen or hidden:
                    self._sweep(i, place, noise)
                    return None
                if self._shows_noise(place, noise):
                    return None
                token = place.tokens[place.best]
            else:
                token = same
        if token == int(chain[i, 0]):
            return 0
        hits = (others[i] == token).nonzero().squeeze(1).tolist()
        if hits:
            return width + int(hits[0])
        place.settled = token
        return None

    def _radius_of(self, distance: float, noise: float) -> float:
        return float(self._radius(torch.tensor(distance), torch.tensor(noise)))

    def _sweep(self, i: int, place: _Place, noise: float) -> None:
        """Verifies all tokens that can still be right, and settles on the nearest."""
        target = self.observed[i, int(self.prefixes.known[i])]
        row = self.rows[i : i + 1]
        exact = place.distances[place.best] <= 2.0 * noise and self.repeatable is True
        run = self._uncached(row) if exact else self.prefixes.of_rows(row)
        open_ = torch.ones(self.table.size, dtype=torch.bool, device=target.device)
        done = place.run_again if exact else place.seen
        open_[torch.tensor(sorted(done), dtype=torch.int64, device=target.device)] = False
        rivals = self.guess.new_tensor(place.rivals)
        while True:
            left = rivals[open_[rivals]][:SWEEP]
            if not len(left) or self.deadline.passed:
                break
            states = run.attempt(left[None])[0].float()
            open_[left] = False
            far = (states - target).norm(dim=1)
            nearest = int(far.argmin())
            before = place.distances[place.best]
            place.only_counted(left.tolist(), far[far > far[nearest]].tolist() or [float("inf")])
            token, distance = int(left[nearest]), float(far[nearest])
            place.tokens.append(token)
            place.states.append(states[nearest])
            place.distances.append(distance)
            if exact:
                new = left[far == 0].tolist()
                if new and not place.twins:
                    apart = (self.table.entries[rivals] - self.table.entries[new[0]]).norm(dim=1)
                    rivals = rivals[apart.argsort()]
                if place.twins and not new:
                    break
                place.twins += new
            if distance < before and not exact:
                if self._same_uncached(i, place, noise) is not None:
                    break
                rivals = self.table.within(token, self._radius_of(distance, noise))
                rivals = rivals[self.table.rank[rivals].argsort()]
        self._count(run)
        if bool(open_[rivals].any()) and place.distances[place.best] > 0:
            return
        if place.twins:
            self._choose_twin(i, place)
        place.rivals = rivals.tolist()
        if not self._shows_noise(place, noise):
            place.settled = place.tokens[place.best]

    def _choose_twin(self, i: int, place: _Place) -> None:
        """Of tokens with the observed state, the one expected most is taken for now."""
        at = int(self.prefixes.known[i])
        expected = self.prior.all(i, at)
        if expected is not None:
            order = expected[place.twins].argsort(descending=True).tolist()
            place.twins = [place.twins[o] for o in order]
        if len(place.twins) > 1:
            self.twins[i][at] = place.twins[:MOST_TWINS]
        place.tokens.append(place.twins[0])
        place.states.append(self.observed[i, at])
        place.distances.append(0.0)
        place.chosen = len(place.tokens) - 1

    def _has_twins(self, i: int, at: int, token: int) -> bool:
        """Whether rounding hides the difference to other tokens; what follows is to decide then."""
        reach = WITHIN_ROUNDING * float(self.noise[i, at])
        if not self.low_precision or float(self.table.alone(self.rows.new_tensor(token))) >= reach:
            return False
        near = self.table.within(token, reach)
        apart = (self.table.entries[near] - self.table.entries[token]).norm(dim=1)
        nearest = near[apart.argsort()[:MOST_TWINS]].tolist()
        self.twins[i].setdefault(at, [token, *(t for t in nearest if t != token)])
        return True

    def _shows_noise(self, place: _Place, noise: float) -> bool:
        """Whether of many tokens that could be right, all verified, none is."""
        many = min(SURELY_NOISED, self.table.distinct // 2)
        off = place.distances[place.best] > 2.0 * noise
        self.noised = self.may_be_noised and off and len(place.rivals) > many
        return self.noised

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
                    order = [*sorted(place.distances), float("inf")]
                    best, second = order[0], min(order[1], place.runner_up)
                    token = place.tokens[place.best]
                else:
                    best, second = float(distances[i, j]), float("inf")
                    token = int(chain[i, j])
                if len(place.seen) < self.table.distinct or j > 0:
                    second = min(second, float(self.table.alone(self.guess.new_tensor(token))))
                self.residuals[i, column] = best
                if (j == 0 and len(place.twins) > 1) or self._has_twins(i, column, token):
                    continue
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
