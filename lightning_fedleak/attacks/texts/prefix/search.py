"""Exact recovery of a text from a causal model's hidden states, left to right, guessing ahead.

A token's state depends on what precedes it alone, so that with the beginning known the right token
is the one whose state *is* the observed one (the idea of SipIt, arXiv 2510.15511, with the nearest
candidate in place of a threshold). All remaining tokens are guessed, and the bottom model run once
over the guesses verifies every one up to the first mistake. There, more candidates are tried:
:mod:`~lightning_fedleak.attacks.texts.prefix.verification` says which, when one is believed, and
what is done where the model's precision hides which is right.

Where no token's state is the observed one, the states were noised or the copy of the bottom model
is stale; the rest is then left to :mod:`~lightning_fedleak.attacks.texts.prefix.beam`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_fedleak.attacks.texts.base import Deadline
from lightning_fedleak.attacks.texts.prefix.beam import beam_search
from lightning_fedleak.attacks.texts.prefix.cache import Prefixes
from lightning_fedleak.attacks.texts.prefix.table import StateTable
from lightning_fedleak.attacks.texts.prefix.verification import (
    AsSent,
    Effort,
    Place,
    Prior,
    Settling,
    Task,
    next_round,
    ranked_first,
)

AHEAD = 4, 48
"""Tokens guessed ahead: at least, at most."""
LOW_PRECISION = 1e-4
REOPENED = 8
"""Places of one text that may be opened again."""


@dataclass
class Recovered:
    """What the search found.

    Attributes:
        tokens: (B, N). Where time ran out, the one behind the last that is verified is the best of
            those looked at, and the others are ranked first and not looked at.
        verified: (B,) tokens that were found.
        confidence: (B, N) one minus the ratio of the distances of best and runner-up, where the
            runner-up not verified is estimated; 0 where only guessed.
        residuals: (B, N) distance of the best to the observed state, nan where only guessed.
        noised: whether it showed that no token's state is the observed one, or is assumed.
        finished: False if time ran out, or ended a look at all that could be right.
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
        spread: (d,) what noise adds, see :func:`~lightning_fedleak.attacks.texts.prefix.beam.
            beam_search`.
        noised: whether it is known that the observed states are none of any token's; None to find
            out, which takes the whole vocabulary at the first place where it is so, but no more
            than half of the time left. With False the nearest token is taken at every place, at
            that price.
        beam: beginnings kept where it is so.
        deadline: looked at before each forward; None for no bound.
    """
    noise = precision * observed.norm(dim=2)
    task = Task(prefixes, table, observed, prior, noise, deadline or Deadline())
    return _Search(task, precision > LOW_PRECISION, noised).run(beam, spread)


@dataclass(frozen=True)
class _Pass:
    """One forward over the guesses of all texts.

    Attributes:
        at: (B, w) places of the chain.
        inside: (B, w) whether they lie in the text.
        chain: (B, w) the tokens guessed, one behind the other.
        others: (B, k) more candidates for the first of these places.
        states: (B, w + k, d) of chain and others.
        target: (B, w, d) the observed states of the places.
        distances: (B, w) of the chain's states from these; 0 where a run as the client's agrees.
        noise: (B, w) at the places.
    """

    at: Tensor
    inside: Tensor
    chain: Tensor
    others: Tensor
    states: Tensor
    target: Tensor
    distances: Tensor
    noise: Tensor

    @property
    def width(self) -> int:
        return self.chain.shape[1]


class _Search:
    def __init__(self, task: Task, low_precision: bool, noised: bool | None) -> None:
        self.task = task
        self.prefixes, self.counts, self.deadline = task.prefixes, task.counts, task.deadline
        self.as_sent = AsSent(task, low_precision)
        self.settling = Settling(task, self.as_sent, noised)
        b, n = task.observed.shape[:2]
        self.rows = torch.arange(b, device=task.observed.device)
        self.opened_again: list[set[int]] = [set() for _ in range(b)]
        self.places = [Place() for _ in range(b)]
        self.confidence = task.observed.new_zeros(b, n)
        self.residuals = task.observed.new_full((b, n), float("nan"))
        self.run_length = float(AHEAD[1])
        self.first = ranked_first(task)
        self.guess = self.first[:, :, 0].clone()

    def run(self, beam: int, spread: Tensor) -> Recovered:
        while self._open() and not self.settling.noised and not self.deadline.passed:
            self._advance()
        tokens, known = self.prefixes.tokens.clone(), self.prefixes.known.clone()
        finished = True
        if self.settling.noised:
            finished = self._beams(tokens, known, beam, spread)
        finished &= bool((known >= self.counts).all())
        finished &= not (self.settling.cut or self.as_sent.cut)
        self._take_best(tokens, known)
        return Recovered(
            tokens=tokens,
            verified=known,
            confidence=self.confidence,
            residuals=self.residuals,
            noised=self.settling.noised,
            finished=finished,
            candidates=self.prefixes.computed + self.task.beside.computed,
            runs=self.prefixes.runs + self.task.beside.runs,
        )

    def _open(self) -> bool:
        """Whether a place is open, or is opened again since without cache its state is another."""
        if bool((self.prefixes.known < self.counts).any()):
            return True
        if not (self.as_sent.low_precision and self.as_sent.repeatable):
            return False
        if self.deadline.passed:
            self.as_sent.cut = True
            return False
        for i in range(len(self.counts)):
            self.confidence[i, self.as_sent.decide_twins(i)] = 1.0
        equal = self.as_sent.equal(self.rows, self.prefixes.tokens)
        for i in (equal < self.counts).nonzero().squeeze(1).tolist():
            at = int(equal[i])
            self.confidence[i, at] = 0.0
            if at in self.opened_again[i] or len(self.opened_again[i]) >= REOPENED:
                continue
            self.opened_again[i].add(at)
            self.guess[i, at:] = self.prefixes.tokens[i, at:]
            self.prefixes.known[i] = at
            self.places[i] = Place(certain=True)
        return bool((self.prefixes.known < self.counts).any())

    def _beams(self, tokens: Tensor, known: Tensor, width: int, spread: Tensor) -> bool:
        """Fills in the rest of each text; False if time ran out."""
        finished = True
        for i in (known < self.counts).nonzero().squeeze(1).tolist():
            n, start = int(self.counts[i]), int(known[i])
            left = int((known[i:] < self.counts[i:]).sum())
            found = beam_search(
                self.prefixes.of_rows(self.rows[i : i + 1]),
                self.task.table,
                self.task.observed[i, :n],
                self.first[i],
                partial(self.task.prior.all, i),
                width=width,
                spread=spread,
                deadline=self.deadline.share(left),
            )
            self.task.beside.add(Effort(found.computed, found.runs))
            end = known[i] = found.verified
            tokens[i, start:end] = found.tokens[start:end]
            self.confidence[i, start:end] = found.confidence[start:end]
            self.residuals[i, start:end] = found.residuals[start:end]
            finished &= found.finished
        return finished

    def _take_best(self, tokens: Tensor, known: Tensor) -> None:
        """Fills in the best so far at places that are open when time runs out."""
        for i in (known < self.counts).nonzero().squeeze(1).tolist():
            place, at = self.places[i], int(known[i])
            if self.opened_again[i]:
                continue
            tokens[i, at:] = self.guess[i, at:]
            if place.tokens and at == int(self.prefixes.known[i]):
                tokens[i, at] = place.tokens[place.best]
                self.residuals[i, at] = place.distances[place.best]

    def _advance(self) -> None:
        """One forward over the guesses; what it verifies becomes known."""
        seen = self._forward()
        states, distances = seen.states, seen.distances
        kept = self._kept(seen)
        other = torch.full_like(kept, -1)
        alone = (states[:, seen.width :] - seen.target[:, :1]).norm(dim=2)
        for i in (kept == 0).logical_and(seen.inside[:, 0]).nonzero().squeeze(1).tolist():
            place, others = self.places[i], seen.others[i].tolist()
            place.add(int(seen.chain[i, 0]), states[i, 0], float(distances[i, 0]))
            for j, (token, far) in enumerate(zip(others, alone[i].tolist(), strict=True)):
                place.add(token, states[i, seen.width + j], far)
            found = self.settling.look(i, place)
            if found is None:
                continue
            if found == int(seen.chain[i, 0]):
                kept[i] = 1
            elif found in others:
                other[i] = seen.width + others.index(found)
            else:
                place.settled = found
        self._note(seen, kept, other)
        self.prefixes.keep(kept, other)
        self._move_on(seen, kept, other)

    def _forward(self) -> _Pass:
        others = self._others()
        known = self.prefixes.known
        at = known[:, None] + torch.arange(self._width(), device=known.device)
        inside = at < self.counts[:, None]
        at = at.clamp(max=self.guess.shape[1] - 1)
        chain = self.guess.gather(1, at)
        states = self.prefixes.follow(chain, others).float()
        target = self.task.observed[self.rows[:, None], at]
        distances = (states[:, : chain.shape[1]] - target).norm(dim=2)
        noise = self.task.noise.gather(1, at)
        return _Pass(at, inside, chain, others, states, target, distances, noise)

    def _width(self) -> int:
        """Tokens to guess ahead: about twice what is usually right, less in a long search."""
        left = int((self.counts - self.prefixes.known).max())
        rounds = max((p.round for p in self.places), default=0)
        wanted = max(AHEAD[0], min(AHEAD[1], int(2 * self.run_length))) >> max(0, rounds - 1)
        return max(1, min(left, wanted))

    def _others(self) -> Tensor:
        """Candidates beside the head of the chain, for texts that are stuck; pads with others."""
        wanted: list[list[int]] = [[] for _ in self.places]
        heads = self.prefixes.known.clamp(max=self.first.shape[1] - 1).tolist()
        for i, (place, at) in enumerate(zip(self.places, heads, strict=True)):
            if place.settled is not None:
                self.guess[i, at] = place.settled
            elif place.tokens:
                self.guess[i, at], *wanted[i] = next_round(self.task, place, i, self.first[i, at])
        k = max(len(w) for w in wanted)
        for i, at in enumerate(heads):
            wanted[i] += self.first[i, at, : k - len(wanted[i])].tolist()
            wanted[i] += [0] * (k - len(wanted[i]))
        return torch.tensor(wanted, dtype=torch.int64, device=self.guess.device)

    def _kept(self, seen: _Pass) -> Tensor:
        """(B,) first tokens of the chain that are right."""
        device = seen.at.device
        believed = self.settling.believed(seen.chain, seen.distances, seen.noise) & seen.inside
        believed[:, 0] &= ~torch.tensor([p.certain for p in self.places], device=device)
        settled = torch.tensor([p.settled is not None for p in self.places], device=device)
        believed[:, 0] |= settled & seen.inside[:, 0]
        kept = believed.int().cumprod(1).sum(1)
        at = kept.clamp(max=seen.width - 1)[:, None]
        near = seen.distances.gather(1, at) <= 2.0 * seen.noise.gather(1, at)
        stopped = (kept < seen.width) & (seen.inside.gather(1, at) & near).squeeze(1)
        heads = zip(kept.tolist(), seen.chain[:, 0].tolist(), self.places, strict=True)
        new = [k > 0 or token not in place.run_again for k, token, place in heads]
        rows = (stopped & torch.tensor(new, device=device)).nonzero().squeeze(1)
        if not len(rows) or not self.as_sent.may_match(int(rows[0])):
            return kept
        equal = self.as_sent.equal_ahead(rows, seen.chain[rows])
        for i in rows[kept[rows] == 0].tolist():
            self.places[i].run_again.add(int(seen.chain[i, 0]))
        kept[rows] = torch.maximum(kept[rows], equal)
        ahead = torch.arange(seen.width, device=device)
        seen.distances[rows] = seen.distances[rows].masked_fill(ahead < equal[:, None], 0.0)
        return kept

    def _note(self, seen: _Pass, kept: Tensor, other: Tensor) -> None:
        """Residuals and confidences of what is kept."""
        table = self.task.table
        alone = other >= 0
        for i in (kept + alone.long()).nonzero().squeeze(1).tolist():
            place = self.places[i]
            for j in range(max(1, int(kept[i]))):
                column = int(seen.at[i, j])
                if j == 0:
                    if not bool(alone[i]):
                        far = float(seen.distances[i, 0])
                        place.add(int(seen.chain[i, 0]), seen.states[i, 0], far)
                    order = [*sorted(place.distances), float("inf")]
                    best, second = order[0], min(order[1], place.runner_up)
                    token = place.tokens[place.best]
                else:
                    best, second = float(seen.distances[i, j]), float("inf")
                    token = int(seen.chain[i, j])
                if len(place.seen) < table.distinct or j > 0:
                    second = min(second, float(table.alone(self.guess.new_tensor(token))))
                self.residuals[i, column] = best
                twins = j == 0 and len(place.twins) > 1
                if twins or self.as_sent.may_have_twins(i, column, token):
                    continue
                if not bool(table.doubtful[token]) and second > 0:
                    self.confidence[i, column] = max(0.0, 1.0 - best / second)

    def _move_on(self, seen: _Pass, kept: Tensor, other: Tensor) -> None:
        """Opens the next place of each text, and guesses again what the chain has shown wrong."""
        for i in (kept + (other >= 0).long()).nonzero().squeeze(1).tolist():
            self.places[i] = place = Place()
            m = int(kept[i])
            if m:
                self.run_length += 0.2 * (m - self.run_length)
                if m < seen.width and bool(seen.inside[i, m]):
                    far = float(seen.distances[i, m])
                    place.add(int(seen.chain[i, m]), seen.states[i, m], far)
        ahead = torch.arange(seen.width, device=kept.device)
        stale = seen.inside & (ahead > kept[:, None].clamp(min=1))
        stale &= seen.distances > 0.5 * self.task.table.alone(seen.chain)
        rows, columns = stale.nonzero(as_tuple=True)
        differences = (seen.target - seen.states[:, : seen.width])[rows, columns]
        self.guess[rows, seen.at[rows, columns]] = self.task.table.nearest(
            seen.chain[rows, columns], differences
        )


__all__ = ["Prior", "Recovered", "search"]
