"""A table of every token's hidden state in a typical context, which ranks candidate tokens.

A hidden state at the split depends mostly on its token, and the context shifts it. An observed
state is compared with the table in units of the spread that contexts cause, along the directions
that distinguish tokens (Fisher's discriminants). A candidate that was verified after the correct
prefix shows the context's shift. The table's entries are then shifted alike before they are
compared again.
"""

import torch
from torch import Tensor

# None of the values was tuned.
SCORES_AT_ONCE = 1 << 25  # entries of a (positions, vocabulary) matrix; bounds the memory
SHRINKAGE = 1e-2  # share of the mean variance, added to the covariance over contexts
DIRECTIONS = 128  # discriminants; fewer are faster and distinguish fewer tokens
NEIGHBOURS = 64  # tokens near in the discriminants whose exact distance is computed
SHORT_LIST = 2048  # tokens near in the discriminants that are ranked by exact distance
LEARNED = 64  # max. number of verified tokens in a position's regression
LEARNED_RIDGE = 0.03  # added to the diagonal of that regression's Gram matrix of unit steps
ROUNDING = 1e-5  # share of a squared norm that float32 may lose in a product
RARE = 0.05  # occurrences that are added to each token's count in public text


class StateTable:
    """The states of all tokens in a typical context, and rankings of tokens by them.

    Args:
        states: (V, d) the state of each token in a typical context.
        words: (V, e) the word embeddings.
        public_states: (n, d) hidden states in public text.
        tokens: (n,) the tokens of the public states.
        seed: The seed of the choice of the origin.

    Attributes:
        origin: (d,) a state near which those of many tokens lie (tokens absent from training).
            Entries are relative to it, so that float32 resolves small differences among them.
        entries: (V, d) the states relative to the origin, float32.
        words: (V, e) the word embeddings relative to that of the origin's token.
        axes: (d, k) the discriminants, scaled so that the spread over contexts is 1 along each.
        points: (V, k) the entries along the axes, plus the mean shift of contexts.
        representative: (V,) the token that is tried instead of each token: among tokens with equal
            word embeddings, which no attack distinguishes, the commonest in public text.
        is_copy: (V,) whether another token is tried instead of each token.
        rank: (V,) the rank of each token by its count in public text, then by id.
    """

    def __init__(
        self, states: Tensor, words: Tensor, public_states: Tensor, tokens: Tensor, seed: int = 0
    ) -> None:
        states, public_states = states.float(), public_states.float()
        crowded = _crowded(states, seed)
        self.origin = states[crowded].clone()
        self.words = words.float() - words[crowded].float()
        self.entries = states - self.origin
        # Differences of states in public text from the entries, and their mean over contexts.
        self._spread = (public_states - self.origin - self.entries[tokens]).double()
        self._shift = self._spread.mean(0)
        self._spread -= self._shift
        counts = torch.bincount(tokens, minlength=len(words))
        commonest = (-counts).argsort(stable=True)
        self.rank = commonest.argsort()
        self.representative = _representatives(words, commonest)
        # Tokens with the word embedding of a commoner token, which is tried instead.
        self.is_copy = self.representative != torch.arange(len(words), device=words.device)
        self.axes = self._discriminants(tokens).float()
        self.points = (self.entries + self._shift.float()) @ self.axes
        self._lengths = self.entries.square().sum(1)
        self._squares = self.points.square().sum(1).masked_fill_(self.is_copy, float("inf"))
        self._isolation = self._squares.new_full((len(states),), -1.0)  # -1: not yet computed
        del self._spread

    def _discriminants(self, tokens: Tensor) -> Tensor:
        """Return the directions (d, k) with the largest variance between tokens over contexts'."""
        covariance = self._spread.T @ self._spread / max(1, len(self._spread))
        covariance.diagonal().add_(SHRINKAGE * float(covariance.diagonal().mean().clamp(min=1e-30)))
        whitening = torch.linalg.inv(torch.linalg.cholesky(covariance)).T
        share = torch.bincount(tokens, minlength=self.size).double() + RARE
        share /= share.sum()
        white = self.entries.double() @ whitening
        white -= share @ white
        between_types = white.T @ (white * share[:, None])
        _, directions = torch.linalg.eigh(between_types)
        axes: Tensor = whitening @ directions[:, -min(DIRECTIONS, directions.shape[1]) :]
        return axes

    @property
    def size(self) -> int:
        """The number of tokens in the vocabulary."""
        return len(self.entries)

    @property
    def distinct(self) -> int:
        """The number of tokens that are tried, which represent all others."""
        return int((~self.is_copy).sum())

    def best(self, scores: Tensor, k: int) -> Tensor:
        """Return the ``k`` representative tokens with the highest scores (V,)."""
        return scores.masked_fill(self.is_copy, -float("inf")).topk(min(k, self.distinct)).indices

    @property
    def _kappa(self) -> float:
        """The exponent of the likelihood, see :meth:`likeliest`."""
        return 10.0 + self.axes.shape[1] / 3.0

    @property
    def at_once(self) -> int:
        """The number of positions whose scores for the whole vocabulary fit into memory."""
        return max(1, SCORES_AT_ONCE // self.size)

    def likeliest(self, states: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the ``k`` likeliest tokens of each observed state (n, d), and log-likelihoods.

        The likelihood is a Student t distribution's, because contexts have heavy tails: up to a
        constant ``-kappa/2 log(distance^2)``, with kappa a third of the number of discriminants
        plus ten, which fitted stories15M and SmolLM2-135M at all depths.

        Returns:
            Token ids and scores, both (n, k), the likeliest first.
        """
        squared = self._squared((states.float() - self.origin) @ self.axes)
        smallest = squared.topk(min(k, self.distinct), dim=1, largest=False)
        return smallest.indices, smallest.values.clamp(min=1e-6).log() * (-0.5 * self._kappa)

    def near(self, token: int, difference: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return tokens whose entry is near that of ``token`` plus ``difference`` (d,).

        Args:
            token: A verified token.
            difference: The observed state minus the token's state after the prefix.
            k: The number of tokens.

        Returns:
            The k tokens (k,) with the smallest exact distance, among those nearest along the
            discriminants. And log-likelihoods (V,) along the discriminants as in
            :meth:`likeliest`, but with heavier tails, because the first candidates have failed.
        """
        k = min(k, self.distinct)
        squared = self._squared(self.points[token] + difference[None] @ self.axes)[0]
        rough = squared.topk(min(self.distinct, max(SHORT_LIST, k)), largest=False).indices
        offsets = self.entries[rough] - (self.entries[token] + difference)
        exact = rough[offsets.square().sum(1).topk(k, largest=False).indices]
        return exact, squared.clamp(min=1e-6).log() * (-0.25 * self._kappa)

    def like_verified(
        self, tokens: Tensor, states: Tensor, observed: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:
        """Return tokens whose predicted state after the prefix is near ``observed``.

        The shift of states from their entries is regressed on word embeddings. Both are relative to
        the best verified token, and per unit of distance from its embedding.

        Args:
            tokens: (n,) at least two verified tokens, the nearest first.
            states: (n, d) their states after the prefix.
            observed: (d,) the observed state.
            k: The number of tokens in each ranking.

        Returns:
            The ranking (k,) by the distance of predicted states from the observed one, and the
            ranking (k,) by the angle between their differences from the best token's state.
        """
        k = min(k, self.distinct)
        best, learned = tokens[0], tokens[1 : 1 + LEARNED]
        steps = self.words[learned] - self.words[best]
        lengths = steps.norm(dim=1, keepdim=True).clamp(min=1e-12)
        steps = steps / lengths
        shifts = states[1 : 1 + LEARNED] - states[0]
        shifts = (shifts - (self.entries[learned] - self.entries[best])) / lengths
        gram = steps @ steps.T
        gram.diagonal().add_(LEARNED_RIDGE)
        weights = torch.linalg.solve(gram, shifts)
        shares = self.words @ steps.T
        shares -= shares[best].clone()
        expected = torch.addmm(self.entries, shares, weights).sub_(self.entries[best])
        target = observed - states[0]
        norms = expected.square().sum(1)  # squared
        products = expected @ target
        squared = (norms - 2.0 * products).masked_fill_(self.is_copy, float("inf"))
        nearest = squared.topk(k, largest=False).indices
        cosine = products * norms.clamp(min=1e-30).rsqrt()
        aligned = cosine.masked_fill_(self.is_copy, -float("inf")).topk(k).indices
        return nearest, aligned

    def nearest(self, tokens: Tensor, differences: Tensor) -> Tensor:
        """Return tokens (n,) whose entry is nearest to that of ``tokens`` plus ``differences``."""
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

    def isolation(self, tokens: Tensor) -> Tensor:
        """Return the distance from each of ``tokens`` (any shape) to the nearest other entry."""
        missing = torch.unique(tokens[self._isolation[tokens] < 0])
        for part in torch.split(missing, self.at_once):
            squared = self._squared(self.points[part])
            squared.scatter_(1, part[:, None], float("inf"))
            near = squared.topk(min(NEIGHBOURS, self.distinct), dim=1, largest=False).indices
            distances = (self.entries[near] - self.entries[part][:, None]).norm(dim=2)
            distances = distances.masked_fill(near == part[:, None], float("inf"))
            self._isolation[part] = distances.amin(1)
        return self._isolation[tokens]

    def neighbours(self, token: int, radius: float) -> Tensor:
        """Return tokens, ``token`` included, whose entries lie within ``radius`` of its entry."""
        centre = self.entries[token]
        length = self._lengths[token]
        squared = self._lengths - 2.0 * (self.entries @ centre) + length
        close = (squared <= radius**2 + ROUNDING * float(length)) & ~self.is_copy
        rough = torch.nonzero(close).squeeze(1)
        return rough[(self.entries[rough] - centre).norm(dim=1) <= radius]

    def _squared(self, points: Tensor) -> Tensor:
        """Return squared distances (n, V) along the discriminants."""
        squares = points.square().sum(1, keepdim=True) + self._squares
        return torch.addmm(squares, points, self.points.T, alpha=-2.0).clamp_(min=0.0)


def _representatives(words: Tensor, commonest: Tensor) -> Tensor:
    """Return for each token (V,) the commonest token with an equal word embedding.

    Equal rows have equal hashes; rows that only share a hash are compared.
    """
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(words.shape[1], generator=generator, dtype=torch.float64)
    hashes = (words.cpu().double() * direction).sum(1).to(words.device)
    indices = torch.arange(len(words), device=words.device)
    _, group = torch.unique(hashes, return_inverse=True)
    first = torch.full_like(indices, len(indices)).scatter_reduce_(
        0, group[commonest], indices, reduce="amin", include_self=True
    )
    leader = commonest[first[group]]
    return torch.where((words == words[leader]).all(1), leader, indices)


def _crowded(states: Tensor, seed: int) -> int:
    """Return the token, of 256 random ones, whose third nearest neighbour is nearest.

    Tokens absent from training lie close together, so it is probably among them.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randperm(len(states), generator=generator)[:256].to(states.device)
    points = states[draw].double()
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    k = min(4, len(points))  # the point itself is the first
    return int(draw[int(distances.kthvalue(k, dim=1).values.argmin())])
