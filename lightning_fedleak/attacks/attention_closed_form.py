"""What the attention adversary's heads compute, without building them (Vu et al. 2024, Sect. 4.2).

The matrix whose rows Algorithm 1 gives to head 1 is orthonormal, so that its pseudo-inverse is its
transpose and ``W_K^T W_Q = beta (I - v v^T / |v|^2)``. Head 2's random matrix leaves out one random
direction u in the same way: ``beta (I - u u^T)``. Hence, with tokens as rows of X,
``Z1 - Z2 = [softmax beta(G - a a^T) - softmax beta(G - c c^T)] X`` with ``G = X X^T`` shared by all
targets, ``a = X v / |v|``, ``c = X u``: O(d) per token for a target, and no QR, no pseudo-inverse.
``beta`` is what multiplies the products: the paper's, divided by ``sqrt(d_attn)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

PAIRS_AT_ONCE = 1 << 20
"""Pairs of tokens, over all targets, whose attention is held at a time."""


@dataclass(frozen=True, repr=False)
class Attention:
    """Attention of one sentence by both heads, for some of the targets.

    Attributes:
        sentence: its number.
        places: (n,) of its real tokens.
        targets: which targets.
        tokens: (n, d).
        norms: (n,) of the tokens.
        first: (g, n, n) of head 1, a row for each query.
        second: (n, n) of head 2.
    """

    sentence: int
    places: Tensor
    targets: slice
    tokens: Tensor
    norms: Tensor
    first: Tensor
    second: Tensor

    def along(self, rows: Tensor) -> Tensor:
        """Z1 - Z2 along one direction for each target, (g, n) for all ``rows`` (G, d)."""
        read = rows[self.targets] @ self.tokens.T
        return (self.first @ read[..., None])[..., 0] - read @ self.second.T

    def coordinates(self, at_least: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        """Z1 - Z2 in all coordinates, of those tokens where one may exceed ``at_least``.

        No coordinate is larger than the sum of the attentions' absolute differences, each times
        the norm of the token attended to.

        Returns:
            Target's number (m,), token's index in ``places`` (m,), and (m, d).
        """
        difference = self.first - self.second
        bound = (difference.abs() @ self.norms) * (1 + 1e-4)
        target, token = (~(bound < at_least)).nonzero(as_tuple=True)
        return target + self.targets.start, token, difference[target, token] @ self.tokens


@dataclass(frozen=True, repr=False)
class HeadPair:
    """The two heads, but for the target that head 1 leaves out.

    Attributes:
        beta: what multiplies the products.
        u: (d,) unit vector that head 2 leaves out; None: it leaves out nothing.
        causal: whether tokens attend to earlier ones alone.
    """

    beta: float
    u: Tensor | None = None
    causal: bool = False

    def attentions(
        self, hidden: Tensor, mask: Tensor | None, targets: Tensor
    ) -> Iterator[Attention]:
        """What both heads attend to in every sentence for every target, a part at a time.

        Args:
            hidden: (B, L, d).
            mask: (B, L), 0 where padded, or None.
            targets: (G, d) the tokens v; a zero vector leaves nothing out.
        """
        norms = targets.norm(dim=1, keepdim=True)
        tiny = torch.finfo(norms.dtype).tiny
        units = torch.where(norms > 0, targets / norms.clamp(min=tiny), 0.0)
        if self.u is not None:
            units = torch.cat([units, self.u[None]])
        for b in range(len(hidden)):
            places, x = torch.arange(hidden.shape[1], device=hidden.device), hidden[b]
            if mask is not None:
                places = places[mask[b].to(hidden.device) != 0]
                x = x[places]
            n = len(places)
            if n == 0:
                continue
            products = x @ x.T
            norms = products.diagonal().clamp(min=0.0).sqrt()
            products *= self.beta
            if self.causal:
                ahead = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
                products = products.masked_fill(ahead, -torch.inf)
            second = products
            a = units @ x.T
            if self.u is not None:
                along, a = a[-1], a[:-1]
                second = products - self.beta * along[:, None] * along
            second = second.softmax(-1)
            size = max(1, PAIRS_AT_ONCE // (n * n))
            for start in range(0, len(targets), size):
                part = slice(start, start + size)
                left = a[part, :, None]
                logits = torch.baddbmm(
                    products.expand(len(left), n, n), left, left.mT, beta=1.0, alpha=-self.beta
                )
                yield Attention(b, places, part, x, norms, logits.softmax(-1), second)

    def expected(self, hidden: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        """Z1 - Z2 at the target token of its own sentence, ``mean(X) - Z2``.

        Head 1 cannot see the target, so that it attends to all tokens alike.

        Args:
            hidden: (G, L, d) of the target sentences.
            mask: (G, L), 0 where padded, or None.
            positions: (G,) of the target tokens.

        Returns:
            (G, d).
        """
        g, length = hidden.shape[:2]
        seen = torch.ones(g, length, dtype=torch.bool, device=hidden.device)
        if mask is not None:
            seen = mask.to(hidden.device) != 0
        if self.causal:
            places = torch.arange(length, device=hidden.device)
            seen = seen & (places <= positions[:, None])
        x = hidden.masked_fill(~seen[..., None], 0.0)
        own = tokens_at(x, positions)
        logits = (x @ own[..., None])[..., 0]
        if self.u is not None:
            logits = logits - (own @ self.u)[:, None] * (x @ self.u)
        attention = (self.beta * logits).masked_fill(~seen, -torch.inf).softmax(-1)
        uniform = seen.to(x.dtype) / seen.sum(1, keepdim=True)
        return ((uniform - attention)[:, None] @ x)[:, 0]

    def matched_rows(self, hidden: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        """Rows of W_O along what is expected, on which a member's response is 1, (G, d).

        Zero where nothing is to be expected. Arguments as of :meth:`expected`.
        """
        expected = self.expected(hidden, mask, positions)
        squared = expected.square().sum(1, keepdim=True)
        visible = squared > 1e-12 * tokens_at(hidden, positions).square().sum(1, keepdim=True)
        return torch.where(visible, expected / squared, 0.0)

    def strongest(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """(G,) the token of each sentence (G, L, d) with the largest difference expected."""
        g, length = hidden.shape[:2]
        sizes = []
        for i in range(length):
            here = torch.full((g,), i, device=hidden.device)
            sizes.append(self.expected(hidden, mask, here).norm(dim=1))
        strength = torch.stack(sizes, 1)
        if mask is not None:
            strength = strength.masked_fill(mask.to(hidden.device) == 0, -torch.inf)
        return strength.argmax(1)


def token_rows(v: Tensor) -> Tensor:
    """Rows of W_O along minus the token, ``-v / |v|^2``, (G, d); 0 for a zero vector."""
    squared = v.square().sum(1, keepdim=True)
    return torch.where(squared > 0, -v / squared, 0.0)


def tokens_at(hidden: Tensor, positions: Tensor) -> Tensor:
    """(G, d) one token of each sentence (G, L, d)."""
    return hidden[torch.arange(len(hidden), device=hidden.device), positions]


def fired(responses: Tensor, thresholds: Tensor, upstream: Tensor) -> Tensor:
    """Gradient of biases ``-threshold`` behind a ReLU: the upstream gradients of those above.

    Args:
        responses: (..., n) over tokens.
        thresholds: (K,), or (..., K) of their own for each.
        upstream: (n,).

    Returns:
        (..., K). Two thresholds that the same tokens exceed get the very same number. NaN where a
        response is.
    """
    above = responses[..., None, :] > thresholds[..., None]
    sums = torch.where(above, upstream, 0.0).sum(-1)
    return sums.masked_fill(responses.isnan().any(-1, keepdim=True), torch.nan)


def coordinates_fired(
    parts: Iterable[Attention], gammas: Tensor, weights: Tensor, targets: int, d: int
) -> Tensor:
    """Gradient of biases ``-gamma`` behind W_O of both signs of every coordinate.

    Args:
        parts: attentions of a batch.
        gammas: (R,) for every row of W_O.
        weights: (B, L) upstream.
        targets: how many, G.
        d: of the hidden states.

    Returns:
        (B, G, 2 d R).
    """
    out = weights.new_zeros((len(weights), targets, 2, d, len(gammas)))
    lowest = float(gammas.min())
    for seen in parts:
        target, token, z = seen.coordinates(lowest)
        if len(target) == 0:
            continue
        weight = weights[seen.sentence, seen.places][token][:, None]
        for level, gamma in enumerate(gammas):
            for sign in (0, 1):
                above = -z > gamma if sign else z > gamma
                part = torch.where(z.isnan(), torch.nan, torch.where(above, weight, 0.0))
                out[seen.sentence, :, sign, :, level].index_add_(0, target, part)
    return out.flatten(2)


__all__ = [
    "PAIRS_AT_ONCE",
    "Attention",
    "HeadPair",
    "coordinates_fired",
    "fired",
    "token_rows",
    "tokens_at",
]
