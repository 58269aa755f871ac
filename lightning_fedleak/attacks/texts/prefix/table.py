"""Which tokens a hidden state may come from: every token's state in a typical context, as a table.

A token's hidden state at the split is mostly its own doing; the context shifts it. An observed
state is compared with the table under the spread that contexts cause, in the directions that tell
tokens apart (Fisher's discriminants). Once a candidate has been verified behind the true beginning,
the context's shift is known where it matters, and the table is read shifted.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCORES_AT_ONCE = 1 << 25
"""Numbers of a (positions, vocabulary) matrix held at once."""
SHRINKAGE = 1e-2
"""Of the mean variance, added to the covariance of what contexts do."""
DIRECTIONS = 128
NEIGHBOURS = 64
"""Tokens near in the discriminants, among which the nearest neighbour is looked for."""
SHORT_LIST = 2048
LEARNED = 64
"""Verified tokens that a place's own regression learns from, at most."""
LEARNED_RIDGE = 0.03
ROUNDING = 1e-5
"""Of a squared length, that float32 may lose in a product over the vocabulary."""
RARE = 0.05
"""Times that a token is taken to occur in public text beyond what it does."""


class StateTable:
    """States of all tokens in a typical context.

    Args:
        states: (V, d).
        words: (V, e) word embeddings.
        seen: (n, d) hidden states in public text.
        tokens: (n,) the tokens there.
        seed: of the choice of the origin.

    Attributes:
        origin: (d,) a state where many tokens crowd (those that training never saw), which all
            entries are relative to, so that their small differences survive.
        entries: (V, d) float32.
        words: (V, e) word embeddings relative to the origin's.
        axes: (d, k) discriminants: the mean spread of contexts along each is 1.
        points: (V, k) the entries, shifted by what contexts add on average, along the axes.
        stands_for: (V,) the token that is tried in each one's place: another where their word
            embeddings are equal, since nothing tells them apart. The commonest in public text.
        doubtful: (V,) bool, tokens with such a twin.
        rank: (V,) place of each token by its number in public text, then by id.
    """

    def __init__(
        self, states: Tensor, words: Tensor, seen: Tensor, tokens: Tensor, seed: int = 0
    ) -> None:
        states, seen = states.float(), seen.float()
        crowded = _crowded(states, seed)
        self.origin = states[crowded].clone()
        self.words = words.float() - words[crowded].float()
        self.entries = states - self.origin
        self._spread = (seen - self.origin - self.entries[tokens]).double()
        self._shift = self._spread.mean(0)
        self._spread -= self._shift
        counts = torch.bincount(tokens, minlength=len(words))
        commonest = (-counts).argsort(stable=True)
        self.rank = commonest.argsort()
        self.stands_for = _representatives(words, commonest)
        self.doubtful = torch.bincount(self.stands_for, minlength=len(words))[self.stands_for] > 1
        self._idle = self.stands_for != torch.arange(len(words), device=words.device)
        self.axes = self._discriminants(tokens).float()
        self.points = (self.entries + self._shift.float()) @ self.axes
        self._lengths = self.entries.square().sum(1)
        self._squares = self.points.square().sum(1).masked_fill_(self._idle, float("inf"))
        self._alone = self._squares.new_full((len(states),), -1.0)
        del self._spread

    def _discriminants(self, tokens: Tensor) -> Tensor:
        within = self._spread.T @ self._spread / max(1, len(self._spread))
        within.diagonal().add_(SHRINKAGE * float(within.diagonal().mean().clamp(min=1e-30)))
        whitening = torch.linalg.inv(torch.linalg.cholesky(within)).T
        share = torch.bincount(tokens, minlength=self.size).double() + RARE
        share /= share.sum()
        white = self.entries.double() @ whitening
        white -= share @ white
        between = white.T @ (white * share[:, None])
        _, directions = torch.linalg.eigh(between)
        axes: Tensor = whitening @ directions[:, -min(DIRECTIONS, directions.shape[1]) :]
        return axes

    @property
    def size(self) -> int:
        """Tokens in the vocabulary."""
        return len(self.entries)

    @property
    def distinct(self) -> int:
        """Tokens that are tried at all."""
        return int((~self._idle).sum())

    def best(self, scores: Tensor, k: int) -> Tensor:
        """The ``k`` tokens with the highest of (V,) scores, of those that are tried."""
        return scores.masked_fill(self._idle, -float("inf")).topk(min(k, self.distinct)).indices

    def only_tried(self, scores: Tensor) -> Tensor:
        """(..., V) scores, in place minus infinity for tokens that another stands for."""
        return scores.masked_fill_(self._idle, -float("inf"))

    @property
    def _kappa(self) -> float:
        return 10.0 + self.axes.shape[1] / 3.0

    @property
    def at_once(self) -> int:
        """Positions whose scores for the whole vocabulary are held at once."""
        return max(1, SCORES_AT_ONCE // self.size)

    def likeliest(self, states: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The ``k`` likeliest tokens of each of (n, d) observed states, and log-likelihoods.

        Of a Student t distribution, since contexts have heavy tails: up to a constant,
        ``-kappa/2 log(distance^2)``, with kappa a third of the number of discriminants and ten
        more, which fitted stories15M and SmolLM2-135M at all depths.

        Returns:
            Token ids and scores, both (n, k), the likeliest first.
        """
        squared = self._squared((states.float() - self.origin) @ self.axes)
        found = squared.topk(min(k, self.distinct), dim=1, largest=False)
        return found.indices, found.values.clamp(min=1e-6).log() * (-0.5 * self._kappa)

    def near(self, token: int, difference: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Tokens whose entry is near that of ``token`` plus ``difference`` (d,).

        Args:
            token: one whose state behind the true beginning is known.
            difference: the observed state minus that one.
            k: tokens wanted.

        Returns:
            (k,) by the length of what is left over, among those nearest along the discriminants,
            and (V,) log-likelihoods along the discriminants, as in :meth:`likeliest` but of tails
            half as light, since the place is a hard one.
        """
        k = min(k, self.distinct)
        squared = self._squared(self.points[token] + difference[None] @ self.axes)[0]
        rough = squared.topk(min(self.distinct, max(SHORT_LIST, k)), largest=False).indices
        left = self.entries[rough] - (self.entries[token] + difference)
        exact = rough[left.square().sum(1).topk(k, largest=False).indices]
        return exact, squared.clamp(min=1e-6).log() * (-0.25 * self._kappa)

    def like_verified(
        self, tokens: Tensor, states: Tensor, observed: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:
        """Tokens whose state behind the true beginning is likely ``observed``, by regression.

        How states differ from entries there is regressed on word embeddings, relative to the best
        of the verified tokens and per unit of distance from it.

        Args:
            tokens: (n,) verified, the nearest first, at least 2.
            states: (n, d) theirs.
            observed: (d,).
            k: tokens in each list.

        Returns:
            (k,) by what is left over, and (k,) by the angle of the differences.
        """
        k = min(k, self.distinct)
        best, others = tokens[0], tokens[1 : 1 + LEARNED]
        steps = self.words[others] - self.words[best]
        lengths = steps.norm(dim=1, keepdim=True).clamp(min=1e-12)
        steps = steps / lengths
        moved = states[1 : 1 + LEARNED] - states[0]
        moved = (moved - (self.entries[others] - self.entries[best])) / lengths
        gram = steps @ steps.T
        gram.diagonal().add_(LEARNED_RIDGE)
        weights = torch.linalg.solve(gram, moved)
        shares = self.words @ steps.T
        shares -= shares[best].clone()
        expected = torch.addmm(self.entries, shares, weights).sub_(self.entries[best])
        target = observed - states[0]
        lengths = expected.square().sum(1)
        along = expected @ target
        far = (lengths - 2.0 * along).masked_fill_(self._idle, float("inf"))
        left = far.topk(k, largest=False).indices
        cosine = along * lengths.clamp(min=1e-30).rsqrt()
        angle = cosine.masked_fill_(self._idle, -float("inf")).topk(k).indices
        return left, angle

    def nearest(self, tokens: Tensor, differences: Tensor) -> Tensor:
        """(n,) the token whose entry is nearest to that of ``tokens`` (n,) plus ``differences``."""
        parts = []
        for token, difference in zip(
            torch.split(tokens, self.at_once), torch.split(differences, self.at_once), strict=True
        ):
            squared = self._squared(self.points[token] + difference @ self.axes)
            near = squared.topk(min(NEIGHBOURS, self.distinct), dim=1, largest=False).indices
            point = self.entries[token] + difference
            best = (self.entries[near] - point[:, None]).square().sum(2).argmin(1, keepdim=True)
            parts.append(near.gather(1, best).squeeze(1))
        return torch.cat(parts) if parts else tokens

    def alone(self, tokens: Tensor) -> Tensor:
        """Distance from each of ``tokens`` (any shape) to the entry nearest to its own."""
        missing = torch.unique(tokens[self._alone[tokens] < 0])
        for part in torch.split(missing, self.at_once):
            squared = self._squared(self.points[part])
            squared.scatter_(1, part[:, None], float("inf"))
            near = squared.topk(min(NEIGHBOURS, self.distinct), dim=1, largest=False).indices
            left = (self.entries[near] - self.entries[part][:, None]).norm(dim=2)
            self._alone[part] = left.masked_fill(near == part[:, None], float("inf")).amin(1)
        return self._alone[tokens]

    def within(self, token: int, radius: float) -> Tensor:
        """Tokens whose entries lie within ``radius`` of that of ``token``, itself among them."""
        centre = self.entries[token]
        own = self._lengths[token]
        squared = self._lengths - 2.0 * (self.entries @ centre) + own
        close = (squared <= radius**2 + ROUNDING * float(own)) & ~self._idle
        rough = torch.nonzero(close).squeeze(1)
        return rough[(self.entries[rough] - centre).norm(dim=1) <= radius]

    def _squared(self, points: Tensor) -> Tensor:
        """Squared distances (n, V) along the discriminants."""
        squares = points.square().sum(1, keepdim=True) + self._squares
        return torch.addmm(squares, points, self.points.T, alpha=-2.0).clamp_(min=0.0)


def _representatives(words: Tensor, commonest: Tensor) -> Tensor:
    """(V,) for each token the commonest of those with an equal word embedding; the first of them.

    Equal rows have equal hashes; unequal ones that share a hash are told apart.
    """
    generator = torch.Generator().manual_seed(0)
    turn = torch.randn(words.shape[1], generator=generator, dtype=torch.float64)
    hashes = (words.cpu().double() * turn).sum(1).to(words.device)
    own = torch.arange(len(words), device=words.device)
    _, group = torch.unique(hashes, return_inverse=True)
    first = torch.full_like(own, len(own)).scatter_reduce_(
        0, group[commonest], own, reduce="amin", include_self=True
    )
    leader = commonest[first[group]]
    return torch.where((words == words[leader]).all(1), leader, own)


def _crowded(states: Tensor, seed: int) -> int:
    """The token, of a few hundred drawn, to whose state the third nearest of theirs is nearest."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randperm(len(states), generator=generator)[:256].to(states.device)
    points = states[draw].double()
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    k = min(4, len(points))
    return int(draw[int(distances.kthvalue(k, dim=1).values.argmin())])


__all__ = ["StateTable"]
