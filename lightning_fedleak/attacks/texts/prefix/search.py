"""Exact recovery of a text from a causal model's hidden states, left to right with lookahead.

A token's state depends only on the tokens before it. After the correct prefix the right token is
the one whose state equals the observed one (the idea of SipIt, arXiv 2510.15511, with the nearest
candidate instead of a threshold). All remaining tokens are guessed, and one run of the bottom
model over the guesses verifies them up to the first mistake. There more candidates are tried:
:mod:`~lightning_fedleak.attacks.texts.prefix.verification` chooses and accepts them.

If no token's state equals the observed one, the states were noised or the copy of the bottom model
is stale. A beam search (:class:`_BeamSearch`) then recovers the rest. The true text has the
smallest sum of distances to the observed states, and a wrong token changes all later states a
little. So several prefixes are continued, and each candidate is verified after each of them. The
prefixes with the smallest sums stay, if noise can explain how far they are from the best. The
stronger the noise, the more counts how likely the top model finds a text.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedleak.attacks.texts.base import TextGuess, WorkLimit
from lightning_fedleak.attacks.texts.bottom_model import NextTokens
from lightning_fedleak.attacks.texts.prefix import verification
from lightning_fedleak.attacks.texts.prefix.cache import Prefixes
from lightning_fedleak.attacks.texts.prefix.table import StateTable

# None of the values was tuned.
AHEAD = 4, 48  # the fewest and most tokens guessed ahead; more waste work after a mistake

# Constants of the beam search.
BEAM = 4  # the most prefixes that are continued; more recover more noised text, and cost time
OPENING = 16  # the candidates of the first ranking that are verified first
ROUNDS = 32, 64, 128, 256  # candidates of each round; one without a likelier one is the last
GAP = 12.0  # nats by which a kept prefix may be less likely than the best; less drops true ones
LEARN_AT = 4  # positions after which the noise's spread is learned; again at each doubling
DOUBT = 16.0  # the weight of the assumed spread against the learned one, in positions


@dataclass(frozen=True)
class _Pass:
    """One forward over the guesses of all texts.

    Attributes:
        positions: (B, w) the positions of the chain.
        inside: (B, w) whether each position lies in the text.
        chain: (B, w) the guessed tokens, in sequence.
        alternatives: (B, k) more candidates for the first of these positions.
        states: (B, w + k, d) the states of the chain, then of the alternatives.
        target: (B, w, d) the observed states of the positions.
        distances: (B, w) the distances of the chain's states from the observed ones.
        noise: (B, w) the distances that two computations of the observed states may have.
    """

    positions: Tensor
    inside: Tensor
    chain: Tensor
    alternatives: Tensor
    states: Tensor
    target: Tensor
    distances: Tensor
    noise: Tensor

    @property
    def width(self) -> int:
        """Return w, the length of the chain."""
        return self.chain.shape[1]


class PrefixSearch:
    """The search for all texts of ``prefixes``, which are empty at first.

    Args:
        prefixes: The layout of the texts, with the bottom model.
        table: The table that ranks candidates.
        observed: (B, N, d) the float32 states of the real tokens.
        top: The top model, which ranks the next token; None without one.
        precision: The share of a state's norm by which two computations of it may differ.
        noised: Whether no token's state equals the observed one. None to find out, which verifies
            the full vocabulary at the first such position and takes up to half of the remaining
            time. With False noise is never assumed: where no candidate matches, the nearest token
            of the full vocabulary is taken.
        limit: The limit, which is checked before each forward.
    """

    def __init__(
        self,
        prefixes: Prefixes,
        table: StateTable,
        observed: Tensor,
        top: NextTokens | None,
        precision: float,
        noised: bool | None,
        limit: WorkLimit,
    ) -> None:
        noise = precision * observed.norm(dim=2)
        self.task = task = verification.Task(prefixes, table, observed, top, noise, limit)
        self.prefixes, self.counts, self.limit = prefixes, task.counts, limit
        self.decision = verification.Decision(task, noised)
        b = len(task.observed)
        self.rows = torch.arange(b, device=task.observed.device)
        # The first open position of each text.
        self.positions = [verification.OpenPosition() for _ in range(b)]
        self.run_length = float(AHEAD[1])  # the mean number of right guesses in a row
        # (B, N, k) the first candidates at each position, and (B, N) the current guesses.
        self.first = verification.ranked_first(task)
        self.guess = self.first[:, :, 0].clone()

    def run(self, spread: Tensor) -> TextGuess:
        """Return all texts, packed to the left.

        If the limit ended it, the token after the last verified one is the best candidate, and
        later tokens are the current guesses.

        Args:
            spread: (d,) the spread of the noise, as in :class:`_BeamSearch`.
        """
        while bool((self.prefixes.lengths < self.counts).any()):
            if self.decision.noised or self.limit.reached:
                break
            self._advance()
        tokens, lengths = self.prefixes.tokens.clone(), self.prefixes.lengths.clone()
        finished = True
        if self.decision.noised:
            finished = self._beams(tokens, lengths, spread)
        finished &= bool((lengths >= self.counts).all())
        finished &= not self.decision.cut
        self._take_best(tokens, lengths)
        candidates = self.prefixes.computed + self.task.computed
        return TextGuess(tokens, finished, candidates)

    def _beams(self, tokens: Tensor, lengths: Tensor, spread: Tensor) -> bool:
        """Recover the rest of each text in place by beams; return False if the limit ended it."""
        finished = True
        for i in (lengths < self.counts).nonzero().squeeze(1).tolist():
            n, start = int(self.counts[i]), int(lengths[i])
            texts = int((lengths[i:] < self.counts[i:]).sum())
            search = _BeamSearch(
                self.prefixes.select(self.rows[i : i + 1]),
                self.task.table,
                self.task.observed[i, :n],
                self.first[i],
                self.task.top,
                BEAM,
                spread,
            )
            finished &= search.run(self.limit.share(texts))
            self.task.computed += search.computed + search.prefixes.computed
            end = lengths[i] = search.position
            tokens[i, start:end] = search.tokens[start:end]
        return finished

    def _take_best(self, tokens: Tensor, lengths: Tensor) -> None:
        """Fill in the best tokens so far at positions that are open when time runs out."""
        for i in (lengths < self.counts).nonzero().squeeze(1).tolist():
            position, column = self.positions[i], int(lengths[i])
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
            position, tokens = self.positions[i], forward.alternatives[i].tolist()
            position.add(int(forward.chain[i, 0]), states[i, 0], float(distances[i, 0]))
            pairs = zip(tokens, other_distances[i].tolist(), strict=True)
            for j, (token, distance) in enumerate(pairs):
                position.add(token, states[i, forward.width + j], distance)
            chosen = self.decision.decide(i, position)
            if chosen is None:
                continue
            if chosen == int(forward.chain[i, 0]):
                correct[i] = 1
            elif chosen in tokens:
                other[i] = forward.width + tokens.index(chosen)
            else:
                position.settled = chosen
        self.prefixes.keep(correct, other)
        self._move_on(forward, correct, other)

    def _forward(self) -> _Pass:
        """Run one forward over the guesses and the alternatives of all texts."""
        alternatives = self._alternatives()
        lengths = self.prefixes.lengths
        positions = lengths[:, None] + torch.arange(self._width(), device=lengths.device)
        inside = positions < self.counts[:, None]
        positions = positions.clamp(max=self.guess.shape[1] - 1)
        chain = self.guess.gather(1, positions)
        states = self.prefixes.follow(chain, alternatives).float()
        target = self.task.observed[self.rows[:, None], positions]
        distances = (states[:, : chain.shape[1]] - target).norm(dim=2)
        noise = self.task.noise.gather(1, positions)
        return _Pass(positions, inside, chain, alternatives, states, target, distances, noise)

    def _width(self) -> int:
        """Return the number of tokens to guess: twice the mean run of right guesses.

        It is halved in every round after the first that a position stays open.
        """
        open_tokens = int((self.counts - self.prefixes.lengths).max())
        rounds = max((p.round for p in self.positions), default=0)
        width = max(AHEAD[0], min(AHEAD[1], int(2 * self.run_length))) >> max(0, rounds - 1)
        return max(1, min(open_tokens, width))

    def _alternatives(self) -> Tensor:
        """Choose the chains' first tokens, and return alternatives (B, k) to them.

        Texts with fewer alternatives are padded by the first ranking, then by token 0.
        """
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
        """Return the number (B,) of right tokens at the start of each chain."""
        device = forward.positions.device
        accepted = self.decision.accepted(forward.chain, forward.distances, forward.noise)
        accepted &= forward.inside
        settled = torch.tensor([p.settled is not None for p in self.positions], device=device)
        accepted[:, 0] |= settled & forward.inside[:, 0]
        correct: Tensor = accepted.int().cumprod(1).sum(1)
        return correct

    def _move_on(self, forward: _Pass, correct: Tensor, other: Tensor) -> None:
        """Open each text's next position, and replace guesses that the chain has shown wrong."""
        for i in (correct + (other >= 0).long()).nonzero().squeeze(1).tolist():
            self.positions[i] = position = verification.OpenPosition()
            m = int(correct[i])
            if m:
                self.run_length += 0.2 * (m - self.run_length)  # a mean over about 5 chains
                if m < forward.width and bool(forward.inside[i, m]):
                    distance = float(forward.distances[i, m])
                    position.add(int(forward.chain[i, m]), forward.states[i, m], distance)
        ahead = torch.arange(forward.width, device=correct.device)
        stale = forward.inside & (ahead > correct[:, None].clamp(min=1))
        # More than half way to another entry: another token is nearer.
        stale &= forward.distances > 0.5 * self.task.table.isolation(forward.chain)
        rows, columns = stale.nonzero(as_tuple=True)
        differences = (forward.target - forward.states[:, : forward.width])[rows, columns]
        self.guess[rows, forward.positions[rows, columns]] = self.task.table.nearest(
            forward.chain[rows, columns], differences
        )


# ---- beams for noised states ----------------------------------------------------------------


class _BeamSearch:
    """The beam search for the rest of one text.

    Args:
        prefixes: The prefix of the text, which the search continues.
        table: The table that ranks candidates.
        observed: (N, d) the float32 states of the real tokens.
        first: (N, k) the candidates for each position by its observed state, the likeliest first.
        top: The top model, which predicts each token from the ones before it; None without one.
        width: The largest number of prefixes that are continued.
        spread: (d,) the standard deviation of observed states from the true ones, up to a factor.
            Distances are measured in these units.

    Attributes:
        position: The number of recovered tokens. If the limit ended it, the last may be chosen from
            fewer candidates.
        newest: (W,) the last token of each prefix, which is not yet appended; None if all are.
        computed: The number of tokens that the bottom model has computed in prefixes that were
            replaced since; ``prefixes`` counts the rest.
    """

    def __init__(
        self,
        prefixes: Prefixes,
        table: StateTable,
        observed: Tensor,
        first: Tensor,
        top: NextTokens | None,
        width: int,
        spread: Tensor,
    ) -> None:
        self.prefixes = prefixes
        self.table, self.observed, self.first = table, observed, first
        self.top, self.width = top, width
        self.position = self.start = int(prefixes.lengths[0])
        # (W, d) each prefix's sum over positions of squared differences from the observed states.
        self.squares = observed.new_zeros(1, observed.shape[1])
        self.likely = observed.new_zeros(1, 1)  # (W, 1) each prefix's log-probability
        self.newest: Tensor | None = None
        self.computed = 0
        self.assumed = spread  # before residuals correct it
        self._set_spread(spread)

    def _set_spread(self, spread: Tensor) -> None:
        """Set the spread, and the entries of the table in its units."""
        self.spread = spread
        self.entries = self.table.entries / spread
        self.squared_norms = self.entries.square().sum(1)

    @property
    def tokens(self) -> Tensor:
        """Return the tokens (N,) of the best text, valid up to ``position``."""
        tokens = self.prefixes.tokens[0].clone()
        if self.newest is not None:
            tokens[self.position - 1] = self.newest[0]
        return tokens

    def run(self, limit: WorkLimit, *, learn: bool = True) -> bool:
        """Recover the rest of the text; return False if the limit ended it.

        Args:
            limit: The limit, which is checked before each forward.
            learn: Whether to improve the spread by the distances of recovered tokens.
        """
        n, learn_at, in_time = len(self.observed), LEARN_AT, True
        while in_time and self.position < n and not limit.reached:
            in_time = self._step(limit)
            if learn and self.position - self.start >= learn_at:
                learn_at *= 2
                self._learn()
        return in_time and self.position == n

    def _step(self, limit: WorkLimit) -> bool:
        """Choose the token at one position; return False if the limit ended it early."""
        rows = torch.arange(len(self.squares), device=self.observed.device)
        target = self.observed[self.position]
        tokens = self.first[self.position, :OPENING].expand(len(rows), -1)
        states = self._open(tokens)
        # (W, V) the log-probability of each prefix with each token after it.
        self.prior = self.likely.expand(-1, self.table.size)
        if self.top is not None and self.position:
            # A token that the top model excludes may have been sent all the same.
            predicted = self.prefixes.predicted(self.top).nan_to_num(nan=0.0)
            self.prior = self.likely + predicted.clamp(min=-30.0)
        squares = ((states - target) / self.spread).square().sum(2)
        in_time = True
        for count in ROUNDS:
            best = self._scores(tokens, squares).argmax(1)
            new = self._new_candidates(tokens, states[rows, best], tokens[rows, best], count)
            if not new.shape[1]:
                break
            in_time = not limit.reached
            if not in_time:
                break
            new_states = self.prefixes.attempt(new).float()
            tokens, states = torch.cat([tokens, new], 1), torch.cat([states, new_states], 1)
            squares = ((states - target) / self.spread).square().sum(2)
            if bool((self._scores(tokens, squares).argmax(1) == best).all()):
                break
        self._choose(tokens, states, squares)
        return in_time

    def _scores(self, tokens: Tensor, squares: Tensor) -> Tensor:
        """Return the log-likelihood (W, k) of each prefix with each token, up to a constant.

        The best text's mean square is taken as the noise's variance, in units of the spread: that
        at this position if it is smaller, so that one far position lets no prior decide the rest.
        """
        totals = (self.squares / self.spread.square()).sum(1, keepdim=True) + squares
        means = totals.min() / (self.position - self.start + 1), squares.min()
        unit = torch.minimum(*means) / len(self.spread)
        return self.prior.gather(1, tokens) - totals / (2.0 * unit.clamp(min=1e-30))

    def _open(self, candidates: Tensor) -> Tensor:
        """Return the states of the first candidates after the tokens that were chosen last."""
        if self.newest is None:
            return self.prefixes.attempt(candidates).float()
        depths = candidates.new_ones(candidates.shape[1])
        states = self.prefixes.follow(self.newest[:, None], candidates, depths)[:, 1:]
        self.prefixes.keep(torch.ones_like(self.prefixes.lengths))
        self.newest = None
        return states.float()

    def _new_candidates(self, tokens: Tensor, states: Tensor, best: Tensor, count: int) -> Tensor:
        """Return new candidates (W, k) whose predicted states are nearest to the observed one.

        A token's state is predicted from the best candidate's state: it differs by the difference
        of their entries in the table. With a top model, half of the candidates are those with the
        highest sum of its log-probability and a score that falls with the distance.

        Args:
            tokens: (W, n) the candidates that were verified.
            states: (W, d) the states of the best candidates.
            best: (W,) the best candidates.
            count: The largest number of new candidates.
        """
        count = min(count, self.table.distinct - tokens.shape[1])
        points = (self.observed[self.position] - states) / self.spread + self.entries[best]
        squares = self.squared_norms + points.square().sum(1, keepdim=True)
        squares = torch.addmm(squares, points, self.entries.T, alpha=-2.0).clamp_(min=1e-12)
        scores = squares.neg_().masked_fill_(self.table.is_copy, -float("inf"))
        scores.scatter_(1, tokens, -float("inf"))
        if self.top is None or count < 4:
            return scores.topk(count, dim=1).indices
        near = scores.topk(count // 2, dim=1).indices
        # d / 4 nats for each factor e of the squared distance: half of a Gaussian's d / 2, since
        # the noise is unknown and predicted states are only near the true ones.
        likely = scores.neg_().log_().mul_(-0.25 * self.observed.shape[1]).add_(self.prior)
        likely = likely.nan_to_num_(nan=-float("inf")).scatter_(1, near, -float("inf"))
        return torch.cat([near, likely.topk(count - count // 2, dim=1).indices], 1)

    def _choose(self, tokens: Tensor, states: Tensor, squares: Tensor) -> None:
        """Keep the best prefixes, each with its token at this position.

        Args:
            tokens: (W, k) the verified candidates.
            states: (W, k, d) their states.
            squares: (W, k) their squared distances from the observed state, in units of the spread.
        """
        ranked = self._scores(tokens, squares).flatten().topk(min(self.width, squares.numel()))
        best_ranked = ranked.indices[ranked.values[0] - ranked.values <= GAP]
        rows, columns = best_ranked // tokens.shape[1], best_ranked % tokens.shape[1]
        differences = states[rows, columns] - self.observed[self.position]
        self.squares = self.squares[rows] + differences.square()
        self.newest = tokens[rows, columns]
        self.likely = self.prior[rows, self.newest][:, None]
        if not torch.equal(rows, torch.arange(len(self.prefixes.lengths), device=rows.device)):
            self.computed += self.prefixes.computed
            self.prefixes = self.prefixes.select(rows)
        self.position += 1

    def _learn(self) -> None:
        """Learn the spread of each dimension from the best prefix's residuals.

        The assumed spread, scaled to the residuals' mean, counts as DOUBT positions.
        """
        positions = self.position - self.start
        assumed = self.assumed.square()
        level = (self.squares[0] / assumed).mean() / positions
        learned = (self.squares[0] + DOUBT * level * assumed) / (positions + DOUBT)
        self._set_spread(learned.clamp(min=1e-30).sqrt())
