"""Beam search from left to right where no token's state equals the observed one.

That is so under noise, or with a stale copy of the model. The true text is then the one whose
states are nearest to the observed ones in sum, and a wrong token changes all later states a little.
So several beginnings are continued, each candidate is verified after each of them, and those with
the smallest total distance stay, as far as noise explains their distance from the best.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedleak.attacks.texts.base import Deadline
from lightning_fedleak.attacks.texts.prefix.cache import Prefixes
from lightning_fedleak.attacks.texts.prefix.table import StateTable

# None of the values was tuned.
OPENING = 16  # candidates of the first ranking that are verified first
ROUNDS = 32, 64, 128, 256  # more candidates in each round; a round without a nearer one is the last
GAP = 12.0  # nats by which a beginning may be less likely than the best; less drops true ones
LEARN_AT = 4  # places after which the noise's spread is learned, then at twice as many, and so on
DOUBT = 16.0  # places that the assumed spread counts for beside the learned one


@dataclass
class Beam:
    """The text that the search has read.

    Attributes:
        tokens: (N,); valid up to ``verified``.
        verified: number of tokens that were recovered before time ran out; the last one may be the
            nearest of fewer candidates.
        confidence: (N,) one minus the ratio of the distances of the chosen token and the nearest
            other one, after the best beginning; 0 where nothing was recovered.
        computed: number of tokens that went through the bottom model.
        finished: False if time ran out.
    """

    tokens: Tensor
    verified: int
    confidence: Tensor
    computed: int
    finished: bool


class BeamSearch:
    """The search for the rest of one text.

    Args:
        prefixes: the text's beginning, which stays.
        table: ranks candidates.
        observed: (N, d) float32 states by real token.
        first: (N, k) candidates for each place from the observed state alone, the likeliest first.
        expected: returns the log-probabilities (V,) of the token at a place, up to a constant; None
            where nothing is expected.
        width: beginnings that are continued, at most.
        spread: (d,) standard deviation of observed states about the true ones, up to a factor;
            distances count in these units.
    """

    def __init__(
        self,
        prefixes: Prefixes,
        table: StateTable,
        observed: Tensor,
        first: Tensor,
        expected: Callable[[int], Tensor | None],
        width: int,
        spread: Tensor,
    ) -> None:
        one = torch.zeros(1, dtype=torch.int64, device=observed.device)
        self.prefixes = prefixes.select(one)
        self.table, self.observed, self.first = table, observed, first
        self.expected, self.width = expected, width
        self.place = self.start = int(prefixes.lengths[0])
        self.squares = observed.new_zeros(1, observed.shape[1])
        self.confidence = observed.new_zeros(1, len(observed))
        self.last: Tensor | None = None
        self.computed = 0
        self.assumed = spread
        self._set_spread(spread)

    def _set_spread(self, spread: Tensor) -> None:
        self.spread = spread
        self.entries = self.table.entries / spread
        self.lengths = self.entries.square().sum(1)

    def run(self, deadline: Deadline, *, learn: bool = True) -> Beam:
        """Return the rest of the text.

        Args:
            deadline: checked before each forward.
            learn: improve the spread by the distances of recovered tokens.
        """
        n, due, whole = len(self.observed), LEARN_AT, True
        while whole and self.place < n and not deadline.passed:
            whole = self._step(deadline)
            if learn and self.place - self.start >= due:
                due *= 2
                self._learn()
        tokens = self.prefixes.tokens[0].clone()
        if self.last is not None:
            tokens[self.place - 1] = self.last[0]
        return Beam(
            tokens,
            self.place,
            self.confidence[0],
            self.computed + self.prefixes.computed,
            whole and self.place == n,
        )

    def _step(self, deadline: Deadline) -> bool:
        """Choose the token at one place; return False if time ran out before all rounds.

        Then it is the nearest of fewer candidates, and its confidence is 0.
        """
        rows = torch.arange(len(self.squares), device=self.observed.device)
        target = self.observed[self.place]
        tokens = self.first[self.place, :OPENING].expand(len(rows), -1)
        states = self._open(tokens)
        squares = ((states - target) / self.spread).square().sum(2)
        whole = True
        for count in ROUNDS:
            best = squares.argmin(1)
            more = self._more(tokens, states[rows, best], tokens[rows, best], count)
            if not more.shape[1]:
                break
            whole = not deadline.passed
            if not whole:
                break
            more_states = self.prefixes.attempt(more).float()
            far = ((more_states - target) / self.spread).square().sum(2)
            nearer = far.amin(1) < squares[rows, best]
            tokens, states = torch.cat([tokens, more], 1), torch.cat([states, more_states], 1)
            squares = torch.cat([squares, far], 1)
            if not bool(nearer.any()):
                break
        self._choose(tokens, states, squares)
        if not whole:
            self.confidence[:, self.place - 1] = 0.0
        return whole

    def _open(self, candidates: Tensor) -> Tensor:
        """Return the states of the first candidates after the tokens that were chosen last."""
        if self.last is None:
            return self.prefixes.attempt(candidates).float()
        depths = candidates.new_ones(candidates.shape[1])
        states = self.prefixes.follow(self.last[:, None], candidates, depths)[:, 1:]
        self.prefixes.keep(torch.ones_like(self.prefixes.lengths))
        self.last = None
        return states.float()

    def _more(self, tokens: Tensor, states: Tensor, best: Tensor, count: int) -> Tensor:
        """Return new candidates (W, k) whose expected states are nearest to the observed one.

        A quarter are those that the model's top expects.
        """
        free = self.table.distinct - tokens.shape[1]
        count = min(count, free)
        points = (self.observed[self.place] - states) / self.spread + self.entries[best]
        far = self.lengths + points.square().sum(1, keepdim=True)
        far = torch.addmm(far, points, self.entries.T, alpha=-2.0).clamp_(min=1e-12)
        far = self.table.only_tried(far.neg_()).scatter_(1, tokens, -float("inf"))
        prior = self.expected(self.place)
        if prior is None or count < 4:
            return far.topk(count, dim=1).indices
        near = far.topk(count - count // 4, dim=1).indices
        likely = far.neg_().log_().mul_(-0.125 * self.observed.shape[1]).add_(prior)
        likely = likely.nan_to_num_(nan=-float("inf")).scatter_(1, near, -float("inf"))
        return torch.cat([near, likely.topk(count // 4, dim=1).indices], 1)

    def _choose(self, tokens: Tensor, states: Tensor, squares: Tensor) -> None:
        """Keep the best beginnings, each with its token at this place."""
        totals = (self.squares / self.spread.square()).sum(1, keepdim=True) + squares
        ranked = totals.flatten().topk(min(self.width, totals.numel()), largest=False)
        unit = float(ranked.values[0]) / ((self.place - self.start + 1) * len(self.spread))
        near = ranked.values - ranked.values[0] <= 2.0 * GAP * max(unit, 1e-30)
        best_ranked = ranked.indices[near]
        rows, columns = best_ranked // tokens.shape[1], best_ranked % tokens.shape[1]
        differences = states[rows, columns] - self.observed[self.place]
        best = squares[rows, columns]
        others = squares[rows].scatter(1, columns[:, None], float("inf")).amin(1)
        sure = 1.0 - (best / others.clamp(min=1e-30)).sqrt()
        doubtful = self.table.doubtful[tokens[rows, columns]]
        self.squares = self.squares[rows] + differences.square()
        self.confidence = self.confidence[rows]
        self.confidence[:, self.place] = sure.clamp(min=0.0).masked_fill(doubtful, 0.0)
        self.last = tokens[rows, columns]
        if not torch.equal(rows, torch.arange(len(self.prefixes.lengths), device=rows.device)):
            self.computed += self.prefixes.computed
            self.prefixes = self.prefixes.select(rows)
        self.place += 1

    def _learn(self) -> None:
        """Learn the spread by dimension from the best beginning's residuals and the assumption."""
        places = self.place - self.start
        assumed = self.assumed.square()
        level = (self.squares[0] / assumed).mean() / places
        learned = (self.squares[0] + DOUBT * level * assumed) / (places + DOUBT)
        self._set_spread(learned.clamp(min=1e-30).sqrt())
