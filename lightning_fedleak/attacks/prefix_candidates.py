"""Which tokens are tried at the first open place of a text, and what those tried have shown.

At first a place is ranked by its state alone. Once candidates failed behind the true beginning, the
nearest of them tells how this context shifts states, and the next are ranked around the right
place, in several ways in turn.
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
ROUNDS = 8, 16, 32, 64, 128, 256
"""Candidates verified at once in the first, second, ... round at one place."""
LEARN_FROM, LEARN_MOST = 25, 65
"""Verified candidates at one place from which on they are learned from; at most so many."""


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


__all__ = ["Effort", "Place", "Prior", "Task", "next_round", "ranked_first"]
