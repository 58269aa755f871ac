"""Exact recovery of a text from a causal model's hidden states, left to right, guessing ahead.

A token's state depends only on the tokens before it. After the correct prefix the right token is
the one whose state equals the observed one (the idea of SipIt, arXiv 2510.15511, with the nearest
candidate instead of a threshold). All remaining tokens are guessed, and one run of the bottom
model over the guesses verifies them up to the first mistake. There more candidates are tried:
:mod:`~lightning_fedleak.attacks.texts.prefix.verification` chooses and accepts them.

Where no token's state equals the observed one, the states were noised or the copy of the bottom
model is stale. Then beams read the rest (:class:`_BeamSearch`). The true text is then the one whose
states are nearest to the observed ones in sum, and a wrong token changes all later states a little.
So several prefixes are continued, each candidate is verified after each of them, and those with
the smallest total distance stay, as far as noise explains their distance from the best.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_fedleak.attacks.texts.base import Deadline, TextGuess
from lightning_fedleak.attacks.texts.bottom_model import NextTokens
from lightning_fedleak.attacks.texts.prefix import verification
from lightning_fedleak.attacks.texts.prefix.cache import Prefixes
from lightning_fedleak.attacks.texts.prefix.table import StateTable

# None of the values was tuned.
AHEAD = 4, 48  # tokens guessed ahead, at least and at most; more waste work after a mistake
LOW_PRECISION = 1e-4  # relative rounding above which it may hide which token is right
REOPENED = 8  # positions of one text that may be opened again; bounds the time

# Of beams.
BEAM = 4  # prefixes that are continued side by side; more find more behind noise, and cost time
OPENING = 16  # candidates of the first ranking that are verified first
ROUNDS = 32, 64, 128, 256  # more candidates in each round; a round without a nearer one is the last
GAP = 12.0  # nats by which a prefix may be less likely than the best; less drops true ones
LEARN_AT = 4  # positions after which the noise's spread is learned; then at twice as many, ...
DOUBT = 16.0  # positions that the assumed spread counts for, next to the learned one


@dataclass(frozen=True)
class _Pass:
    """One forward over the guesses of all texts.

    Attributes:
        positions: (B, w) positions of the chain.
        inside: (B, w) whether they lie in the text.
        chain: (B, w) the guessed tokens, in sequence.
        others: (B, k) more candidates for the first of these positions.
        states: (B, w + k, d) of chain and others.
        target: (B, w, d) the observed states of the positions.
        distances: (B, w) of the chain's states from these; 0 where a run of the whole text, as the
            client makes it, gives the observed state.
        noise: (B, w) of the observed states.
    """

    positions: Tensor
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


class PrefixSearch:
    """The search for all texts of ``prefixes``, which are empty at first.

    Args:
        prefixes: the texts' layout, and the bottom model.
        table: ranks candidates.
        observed: (B, N, d) float32 states by real token.
        top: the top model, which ranks the next token, or None.
        precision: share of a state's length by which two computations of it may differ.
        noised: whether no token's state equals the observed one. None finds out, which verifies
            the whole vocabulary at the first such position, for half of the remaining time at most.
            With False every position takes the nearest token of the whole vocabulary.
        deadline: checked before each forward.
    """

    def __init__(
        self,
        prefixes: Prefixes,
        table: StateTable,
        observed: Tensor,
        top: NextTokens | None,
        precision: float,
        noised: bool | None,
        deadline: Deadline,
    ) -> None:
        prior = verification.Prior(top, prefixes.layout.columns)
        noise = precision * observed.norm(dim=2)
        self.task = task = verification.Task(prefixes, table, observed, prior, noise, deadline)
        self.prefixes, self.counts, self.deadline = prefixes, task.counts, deadline
        self.exact_runs = verification.ExactRuns(task, precision > LOW_PRECISION)
        self.decision = verification.Decision(task, self.exact_runs, noised)
        b = len(task.observed)
        self.rows = torch.arange(b, device=task.observed.device)
        self.opened_again: list[set[int]] = [set() for _ in range(b)]
        self.positions = [verification.OpenPosition() for _ in range(b)]
        self.run_length = float(AHEAD[1])
        self.first = verification.ranked_first(task)
        self.guess = self.first[:, :, 0].clone()

    def run(self, spread: Tensor) -> TextGuess:
        """Return all texts, packed to the left.

        Where time ran out, the token after the last verified one is the best of the candidates so
        far, and the others are the first of the ranking.

        Args:
            spread: (d,) what noise adds, as in :class:`_BeamSearch`.
        """
        while self._open() and not self.decision.noised and not self.deadline.passed:
            self._advance()
        tokens, lengths = self.prefixes.tokens.clone(), self.prefixes.lengths.clone()
        finished = True
        if self.decision.noised:
            finished = self._beams(tokens, lengths, spread)
        finished &= bool((lengths >= self.counts).all())
        finished &= not (self.decision.cut or self.exact_runs.cut)
        self._take_best(tokens, lengths)
        candidates = self.prefixes.computed + self.task.computed
        return TextGuess(tokens, finished, candidates)

    def _open(self) -> bool:
        """Return whether a position is open; open those again whose state differs without cache."""
        if bool((self.prefixes.lengths < self.counts).any()):
            return True
        if not (self.exact_runs.low_precision and self.exact_runs.repeatable):
            return False
        if self.deadline.passed:
            self.exact_runs.cut = True
            return False
        for i in range(len(self.counts)):
            self.exact_runs.decide_twins(i)
        equal = self.exact_runs.equal(self.rows, self.prefixes.tokens)
        for i in (equal < self.counts).nonzero().squeeze(1).tolist():
            column = int(equal[i])
            if column in self.opened_again[i] or len(self.opened_again[i]) >= REOPENED:
                continue
            self.opened_again[i].add(column)
            self.guess[i, column:] = self.prefixes.tokens[i, column:]
            self.prefixes.lengths[i] = column
            self.positions[i] = verification.OpenPosition(needs_exact_run=True)
        return bool((self.prefixes.lengths < self.counts).any())

    def _beams(self, tokens: Tensor, lengths: Tensor, spread: Tensor) -> bool:
        """Fill in the rest of each text; return False if time ran out."""
        finished = True
        for i in (lengths < self.counts).nonzero().squeeze(1).tolist():
            n, start = int(self.counts[i]), int(lengths[i])
            texts = int((lengths[i:] < self.counts[i:]).sum())
            search = _BeamSearch(
                self.prefixes.select(self.rows[i : i + 1]),
                self.task.table,
                self.task.observed[i, :n],
                self.first[i],
                partial(self.task.prior.all_scores, i),
                BEAM,
                spread,
            )
            finished &= search.run(self.deadline.share(texts))
            self.task.computed += search.computed + search.prefixes.computed
            end = lengths[i] = search.position
            tokens[i, start:end] = search.tokens[start:end]
        return finished

    def _take_best(self, tokens: Tensor, lengths: Tensor) -> None:
        """Fill in the best tokens so far at positions that are open when time runs out."""
        for i in (lengths < self.counts).nonzero().squeeze(1).tolist():
            position, column = self.positions[i], int(lengths[i])
            if self.opened_again[i]:
                continue
            tokens[i, column:] = self.guess[i, column:]
            if position.tokens and column == int(self.prefixes.lengths[i]):
                tokens[i, column] = position.tokens[position.best]

    def _advance(self) -> None:
        """Run one forward over the guesses, and append the tokens that it verifies."""
        forward = self._forward()
        states, distances = forward.states, forward.distances
        correct = self._correct(forward)
        other = torch.full_like(correct, -1)
        other_distances = (states[:, forward.width :] - forward.target[:, :1]).norm(dim=2)
        for i in (correct == 0).logical_and(forward.inside[:, 0]).nonzero().squeeze(1).tolist():
            position, others = self.positions[i], forward.others[i].tolist()
            position.add(int(forward.chain[i, 0]), states[i, 0], float(distances[i, 0]))
            pairs = zip(others, other_distances[i].tolist(), strict=True)
            for j, (token, distance) in enumerate(pairs):
                position.add(token, states[i, forward.width + j], distance)
            chosen = self.decision.decide(i, position)
            if chosen is None:
                continue
            if chosen == int(forward.chain[i, 0]):
                correct[i] = 1
            elif chosen in others:
                other[i] = forward.width + others.index(chosen)
            else:
                position.settled = chosen
        self._note_twins(forward, correct, other)
        self.prefixes.keep(correct, other)
        self._move_on(forward, correct, other)

    def _forward(self) -> _Pass:
        others = self._others()
        lengths = self.prefixes.lengths
        positions = lengths[:, None] + torch.arange(self._width(), device=lengths.device)
        inside = positions < self.counts[:, None]
        positions = positions.clamp(max=self.guess.shape[1] - 1)
        chain = self.guess.gather(1, positions)
        states = self.prefixes.follow(chain, others).float()
        target = self.task.observed[self.rows[:, None], positions]
        distances = (states[:, : chain.shape[1]] - target).norm(dim=2)
        noise = self.task.noise.gather(1, positions)
        return _Pass(positions, inside, chain, others, states, target, distances, noise)

    def _width(self) -> int:
        """Return how many tokens to guess: twice what is usually right, fewer in long searches."""
        open_tokens = int((self.counts - self.prefixes.lengths).max())
        rounds = max((p.round for p in self.positions), default=0)
        width = max(AHEAD[0], min(AHEAD[1], int(2 * self.run_length))) >> max(0, rounds - 1)
        return max(1, min(open_tokens, width))

    def _others(self) -> Tensor:
        """Return (B, k) candidates beside the first of the chain, padded for texts without some."""
        candidates: list[list[int]] = [[] for _ in self.positions]
        heads = self.prefixes.lengths.clamp(max=self.first.shape[1] - 1).tolist()
        for i, (position, column) in enumerate(zip(self.positions, heads, strict=True)):
            if position.settled is not None:
                self.guess[i, column] = position.settled
            elif position.tokens:
                first = self.first[i, column]
                self.guess[i, column], *candidates[i] = verification.next_round(
                    self.task, position, i, first
                )
        k = max(len(w) for w in candidates)
        for i, column in enumerate(heads):
            candidates[i] += self.first[i, column, : k - len(candidates[i])].tolist()
            candidates[i] += [0] * (k - len(candidates[i]))
        return torch.tensor(candidates, dtype=torch.int64, device=self.guess.device)

    def _correct(self, forward: _Pass) -> Tensor:
        """Return how many first tokens (B,) of the chain are right."""
        device = forward.positions.device
        accepted = self.decision.accepted(forward.chain, forward.distances, forward.noise)
        accepted &= forward.inside
        accepted[:, 0] &= ~torch.tensor([p.needs_exact_run for p in self.positions], device=device)
        settled = torch.tensor([p.settled is not None for p in self.positions], device=device)
        accepted[:, 0] |= settled & forward.inside[:, 0]
        correct = accepted.int().cumprod(1).sum(1)
        wrong = correct.clamp(max=forward.width - 1)[:, None]
        near = forward.distances.gather(1, wrong) <= 2.0 * forward.noise.gather(1, wrong)
        stopped = (correct < forward.width) & (forward.inside.gather(1, wrong) & near).squeeze(1)
        heads = zip(correct.tolist(), forward.chain[:, 0].tolist(), self.positions, strict=True)
        new = [k > 0 or token not in position.rerun for k, token, position in heads]
        rows = (stopped & torch.tensor(new, device=device)).nonzero().squeeze(1)
        if not len(rows) or not self.exact_runs.may_match(int(rows[0])):
            return correct
        equal = self.exact_runs.equal_ahead(rows, forward.chain[rows])
        for i in rows[correct[rows] == 0].tolist():
            self.positions[i].rerun.add(int(forward.chain[i, 0]))
        correct[rows] = torch.maximum(correct[rows], equal)
        ahead = torch.arange(forward.width, device=device)
        forward.distances[rows] = forward.distances[rows].masked_fill(ahead < equal[:, None], 0.0)
        return correct

    def _note_twins(self, forward: _Pass, correct: Tensor, other: Tensor) -> None:
        """Note which right tokens may have twins, between which later states decide."""
        is_other = other >= 0
        for i in (correct + is_other.long()).nonzero().squeeze(1).tolist():
            position = self.positions[i]
            for j in range(max(1, int(correct[i]))):
                token = int(forward.chain[i, j])
                if j == 0:
                    if not bool(is_other[i]):
                        distance = float(forward.distances[i, 0])
                        position.add(token, forward.states[i, 0], distance)
                    token = position.tokens[position.best]
                if j > 0 or len(position.twins) <= 1:
                    self.exact_runs.note_twins(i, int(forward.positions[i, j]), token)

    def _move_on(self, forward: _Pass, correct: Tensor, other: Tensor) -> None:
        """Open each text's next position, and replace guesses that the chain has shown wrong."""
        for i in (correct + (other >= 0).long()).nonzero().squeeze(1).tolist():
            self.positions[i] = position = verification.OpenPosition()
            m = int(correct[i])
            if m:
                self.run_length += 0.2 * (m - self.run_length)
                if m < forward.width and bool(forward.inside[i, m]):
                    distance = float(forward.distances[i, m])
                    position.add(int(forward.chain[i, m]), forward.states[i, m], distance)
        ahead = torch.arange(forward.width, device=correct.device)
        stale = forward.inside & (ahead > correct[:, None].clamp(min=1))
        stale &= forward.distances > 0.5 * self.task.table.isolation(forward.chain)
        rows, columns = stale.nonzero(as_tuple=True)
        differences = (forward.target - forward.states[:, : forward.width])[rows, columns]
        self.guess[rows, forward.positions[rows, columns]] = self.task.table.nearest(
            forward.chain[rows, columns], differences
        )


# ---- beams, where states are noised ---------------------------------------------------------


class _BeamSearch:
    """The search for the rest of one text.

    Args:
        prefixes: the text's prefix, which stays.
        table: ranks candidates.
        observed: (N, d) float32 states by real token.
        first: (N, k) candidates for each position from its observed state, the likeliest first.
        prior: returns the log-probabilities (V,) of the token at a position, up to a constant; None
            if there is no prediction.
        width: prefixes that are continued, at most.
        spread: (d,) standard deviation of observed states about the true ones, up to a factor;
            distances count in these units.

    Attributes:
        position: number of tokens that were recovered; the last one may be the nearest of fewer
            candidates.
        computed: tokens that went through the bottom model, but for those of ``prefixes``.
    """

    def __init__(
        self,
        prefixes: Prefixes,
        table: StateTable,
        observed: Tensor,
        first: Tensor,
        prior: Callable[[int], Tensor | None],
        width: int,
        spread: Tensor,
    ) -> None:
        one = torch.zeros(1, dtype=torch.int64, device=observed.device)
        self.prefixes = prefixes.select(one)
        self.table, self.observed, self.first = table, observed, first
        self.prior, self.width = prior, width
        self.position = self.start = int(prefixes.lengths[0])
        self.squares = observed.new_zeros(1, observed.shape[1])
        self.last: Tensor | None = None
        self.computed = 0
        self.assumed = spread
        self._set_spread(spread)

    def _set_spread(self, spread: Tensor) -> None:
        self.spread = spread
        self.entries = self.table.entries / spread
        self.lengths = self.entries.square().sum(1)

    @property
    def tokens(self) -> Tensor:
        """Return the tokens (N,) of the best text, valid up to ``position``."""
        tokens = self.prefixes.tokens[0].clone()
        if self.last is not None:
            tokens[self.position - 1] = self.last[0]
        return tokens

    def run(self, deadline: Deadline, *, learn: bool = True) -> bool:
        """Read the rest of the text; return False if time ran out.

        Args:
            deadline: checked before each forward.
            learn: improve the spread by the distances of recovered tokens.
        """
        n, due, whole = len(self.observed), LEARN_AT, True
        while whole and self.position < n and not deadline.passed:
            whole = self._step(deadline)
            if learn and self.position - self.start >= due:
                due *= 2
                self._learn()
        return whole and self.position == n

    def _step(self, deadline: Deadline) -> bool:
        """Choose the token at one position; return False if time ran out before all rounds."""
        rows = torch.arange(len(self.squares), device=self.observed.device)
        target = self.observed[self.position]
        tokens = self.first[self.position, :OPENING].expand(len(rows), -1)
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
        """Return new candidates (W, k) whose predicted states are nearest to the observed one.

        A quarter are the likeliest by the top model.
        """
        free = self.table.distinct - tokens.shape[1]
        count = min(count, free)
        points = (self.observed[self.position] - states) / self.spread + self.entries[best]
        far = self.lengths + points.square().sum(1, keepdim=True)
        far = torch.addmm(far, points, self.entries.T, alpha=-2.0).clamp_(min=1e-12)
        far = self.table.only_tried(far.neg_()).scatter_(1, tokens, -float("inf"))
        prior = self.prior(self.position)
        if prior is None or count < 4:
            return far.topk(count, dim=1).indices
        near = far.topk(count - count // 4, dim=1).indices
        likely = far.neg_().log_().mul_(-0.125 * self.observed.shape[1]).add_(prior)
        likely = likely.nan_to_num_(nan=-float("inf")).scatter_(1, near, -float("inf"))
        return torch.cat([near, likely.topk(count // 4, dim=1).indices], 1)

    def _choose(self, tokens: Tensor, states: Tensor, squares: Tensor) -> None:
        """Keep the best prefixes, each with its token at this position."""
        totals = (self.squares / self.spread.square()).sum(1, keepdim=True) + squares
        ranked = totals.flatten().topk(min(self.width, totals.numel()), largest=False)
        unit = float(ranked.values[0]) / ((self.position - self.start + 1) * len(self.spread))
        near = ranked.values - ranked.values[0] <= 2.0 * GAP * max(unit, 1e-30)
        best_ranked = ranked.indices[near]
        rows, columns = best_ranked // tokens.shape[1], best_ranked % tokens.shape[1]
        differences = states[rows, columns] - self.observed[self.position]
        self.squares = self.squares[rows] + differences.square()
        self.last = tokens[rows, columns]
        if not torch.equal(rows, torch.arange(len(self.prefixes.lengths), device=rows.device)):
            self.computed += self.prefixes.computed
            self.prefixes = self.prefixes.select(rows)
        self.position += 1

    def _learn(self) -> None:
        """Learn the spread by dimension from the best prefix's residuals and the assumption."""
        positions = self.position - self.start
        assumed = self.assumed.square()
        level = (self.squares[0] / assumed).mean() / positions
        learned = (self.squares[0] + DOUBT * level * assumed) / (positions + DOUBT)
        self._set_spread(learned.clamp(min=1e-30).sqrt())
