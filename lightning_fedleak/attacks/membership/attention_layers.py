"""The attention adversary's heads (Vu et al. 2024, Sect. 4.2): in closed form, and as modules.

The matrix whose rows Algorithm 1 gives to head 1 is orthonormal, so that its pseudo-inverse is its
transpose and ``W_K^T W_Q = beta (I - v v^T / |v|^2)``. Head 2's random matrix leaves out one random
direction u in the same way: ``beta (I - u u^T)``. Hence, with tokens as rows of X,
``Z1 - Z2 = [softmax beta(G - a a^T) - softmax beta(G - c c^T)] X`` with ``G = X X^T`` shared by all
targets, ``a = X v / |v|``, ``c = X u``: O(d) per token for a target, and no QR, no pseudo-inverse.
``beta`` is what multiplies the products: the paper's, divided by ``sqrt(d_attn)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks.membership.whitening import Whitening

PAIRS_AT_ONCE = 1 << 20
"""Pairs of tokens, over all targets, whose attention is held at a time."""

Score = Literal["band", "ladder", "coordinates"]
Readout = Literal["matched", "token"]
Variant = Literal["projector", "paper"]

LEVELS = 16
"""Gammas of a calibrated ladder over coordinates."""


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


@dataclass(frozen=True, repr=False)
class Heads:
    """Queries and keys of H heads.

    Attributes:
        queries, keys: (H, d_attn, d).
        query_biases, key_biases: (H, d_attn).
        signs: what each head's output counts for in Z1 - Z2, in the first and in the second half of
            the output's rows.
    """

    queries: Tensor
    keys: Tensor
    query_biases: Tensor
    key_biases: Tensor
    signs: tuple[tuple[float, float], ...]

    def reading(self, whitening: Whitening | None) -> Heads:
        """Of heads without biases, those that do to a state what these do to the whitened one."""
        if whitening is None:
            return self
        queries, query_biases = whitening.folded(self.queries)
        keys, key_biases = whitening.folded(self.keys)
        return Heads(queries, keys, query_biases, key_biases, self.signs)

    def output(self, rows: Tensor) -> Tensor:
        """W_O, (r, H d), that reads ``rows @ (Z1 - Z2)``, (r, d), in as many heads as it needs."""
        return torch.cat([sign[0] * rows for sign in self.signs], 1)

    def both_signs(self) -> Tensor:
        """W_O of line 11, (2 d, H d): Z1 - Z2 and its negative, coordinate by coordinate."""
        eye = torch.eye(self.queries.shape[-1]).to(self.queries)
        halves = [torch.cat([sign[i] * eye for sign in self.signs], 1) for i in (0, 1)]
        return torch.cat(halves)


def algorithm_one(target: Tensor, beta: float, generator: torch.Generator) -> Heads:
    """Lines 1 to 9 of Algorithm 1, as written: random matrices, QR, pseudo-inverses, four heads.

    Args:
        target: (d,) the token v, whitened where hidden states are.
        beta: what multiplies the products; the paper's divided by ``sqrt(d_attn)``.
        generator: on the CPU. The first matrix drawn is W_Q of head 2.
    """
    d = len(target)
    scale = beta * math.sqrt(d - 1)
    second = _random(d - 1, d, generator, target)
    w = _random(d, d, generator, target)
    w[:, 0] = target
    q, _ = torch.linalg.qr(w)
    first = q[:, 1:].T
    queries = torch.stack([first, second, first, second])
    keys = torch.stack([scale * torch.linalg.pinv(m).T for m in (first, second)]).repeat(2, 1, 1)
    none = queries.new_zeros(4, d - 1)
    signs = ((1.0, 0.0), (-1.0, 0.0), (0.0, -1.0), (0.0, 1.0))
    return Heads(queries, keys, none, none, signs)


def projector_heads(
    target: Tensor, beta: float, u: Tensor | None = None, whitening: Whitening | None = None
) -> Heads:
    """Two heads with the same attention: ``I - v v^T / |v|^2`` and ``I - u u^T`` (or I) as queries.

    The third and the fourth head of Algorithm 1 are copies of these, and not needed. The whitening
    is folded in without a product of matrices.

    Args:
        target: (d,) the token v, whitened.
        beta: what multiplies the products.
        u: (d,) unit vector that head 2 leaves out, or None.
        whitening: None for heads that read hidden states as they are.
    """
    d = len(target)
    basis = torch.eye(d).to(target) if whitening is None else whitening.matrix.to(target)
    unit = nn.functional.normalize(target, dim=0, eps=torch.finfo(target.dtype).tiny)
    second = basis if u is None else basis - torch.outer(u, u @ basis)
    queries = torch.stack([basis - torch.outer(unit, unit @ basis), second])
    keys = (beta * math.sqrt(d) * basis).expand(2, d, d)
    mean = target.new_zeros(d) if whitening is None else whitening.mean.to(target)
    return Heads(queries, keys, -(queries @ mean), -(keys @ mean), ((1.0, -1.0), (-1.0, 1.0)))


def left_out(d: int, generator: torch.Generator) -> Tensor:
    """The direction u, (d,) float64, that head 2 of :func:`algorithm_one` leaves out.

    The null direction of the first matrix that ``generator`` draws.
    """
    second = _random(d - 1, d, generator, torch.empty(0, dtype=torch.float64))
    q: Tensor = torch.linalg.qr(second.T, mode="complete")[0]
    return q[:, -1]


def _random(rows: int, columns: int, generator: torch.Generator, like: Tensor) -> Tensor:
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(like)


class CraftedAttention(nn.Module):
    """Self-attention of Eq. 1, W_O and ReLU for one target; ``bias`` (K,) is b_O, all else frozen.

    ``w_q``, ``w_k`` (H, d_attn, d) with biases ``b_q``, ``b_k`` (H, d_attn), ``w_v``
    (H, d, d), ``w_o`` (r, H d). Every row of W_O stands for ``K / r`` rows that are alike and
    differ in their bias: a ladder of gamma. Computes in its own dtype, whatever surrounds it
    (autocast). Padded positions are not attended to and give 0.

    Args:
        heads: queries and keys.
        values: (d, d) W_V of all heads.
        output: (r, H d).
        gammas: (K,), for each row of ``output`` its ladder, row after row.
        causal: whether tokens attend to earlier ones alone.
    """

    def __init__(
        self, heads: Heads, values: Tensor, output: Tensor, gammas: Tensor, causal: bool = False
    ) -> None:
        super().__init__()
        for name, value in {
            "w_q": heads.queries,
            "b_q": heads.query_biases,
            "w_k": heads.keys,
            "b_k": heads.key_biases,
            "w_v": values.to(heads.queries).expand(len(heads.queries), -1, -1),
            "w_o": output,
        }.items():
            self.register_buffer(name, value.detach().contiguous())
        self.w_q: Tensor
        self.b_q: Tensor
        self.w_k: Tensor
        self.b_k: Tensor
        self.w_v: Tensor
        self.w_o: Tensor
        self.causal = causal
        self.bias = nn.Parameter(-gammas.detach().to(heads.queries))

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, L, K) for hidden states (B, L, d).

        Raises:
            ValueError: hidden states of another width.
        """
        if hidden.shape[-1] != self.w_q.shape[-1]:
            raise ValueError(
                f"these layers were crafted for hidden states of {self.w_q.shape[-1]} numbers, got "
                f"{hidden.shape[-1]}"
            )
        with torch.autocast(hidden.device.type, enabled=False):
            x = hidden.to(self.bias.dtype)
            read = (self._heads(x, mask) @ self.w_o.T)[..., None]
            z = nn.functional.relu(read + self.bias.view(len(self.w_o), -1)).flatten(2)
        return z if mask is None else z * (mask.to(z.device) != 0)[..., None].to(z.dtype)

    def _heads(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Z of all heads side by side, (B, L, H d)."""
        q = torch.einsum("bld,hkd->bhlk", x, self.w_q) + self.b_q[:, None]
        k = torch.einsum("bld,hkd->bhlk", x, self.w_k) + self.b_k[:, None]
        logits = q @ k.mT / math.sqrt(self.w_q.shape[1])
        length = x.shape[1]
        hidden = torch.zeros(1, length, length, dtype=torch.bool, device=x.device)
        if self.causal:
            hidden = hidden | torch.ones_like(hidden[0]).triu(1)
        if mask is not None:
            hidden = hidden | (mask.to(x.device) == 0)[:, None]
        # A padded token attends to itself, so that its softmax is of something.
        hidden = hidden & ~torch.eye(length, dtype=torch.bool, device=x.device)
        attention = logits.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
        values = torch.einsum("bld,hkd->bhlk", x, self.w_v)
        return (attention @ values).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class AttentionDesign:
    """Settings, as :class:`~lightning_fedleak.attacks.membership.attention.AttentionMembership`'s.

    Raises:
        ValueError: one outside of its range, or two that exclude each other.
    """

    beta: float | Literal["authors"]
    gamma: float | Literal["calibrated", "lemma"]
    whiten: bool
    score: Score
    readout: Readout
    variant: Variant
    omit_random: bool
    widths: tuple[float, ...]
    causal: bool
    ridge: float
    batch: int
    false_positive_rate: float
    seed: int

    def __post_init__(self) -> None:
        choices: dict[str, tuple[str, ...]] = {
            "score": ("band", "ladder", "coordinates"),
            "readout": ("matched", "token"),
            "variant": ("projector", "paper"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        check_positive("beta", self.beta, ("authors",))
        check_positive("gamma", self.gamma, ("calibrated", "lemma"))
        check_positive("batch", self.batch)
        if self.score == "band" and self.gamma == "lemma":
            raise ValueError("the lemma's gamma is one threshold and no band: use score='ladder'")
        if not self.widths or not all(0 < w < 1 for w in self.widths):
            raise ValueError(f"widths must be numbers between 0 and 1, got {self.widths}")

    @property
    def matched(self) -> bool:
        """Whether targets hold the row to read along, behind the token."""
        return self.score != "coordinates" and self.readout == "matched"

    @property
    def levels(self) -> int:
        """Length of a ladder, or number of bands."""
        if self.gamma == "lemma":
            return 1
        if self.score == "coordinates":
            return LEVELS if self.gamma == "calibrated" else 1
        return len(self.widths) if self.score == "band" else len(self.edges)

    @property
    def edges(self) -> tuple[float, ...]:
        """Gammas in units of a member's response, one for each rung.

        Of ``"band"`` the lower edges, narrowest first, then the upper ones. Of ``"ladder"`` the
        same from the highest down, without the upper ones where a member's response is known.
        """
        lower = [1.0 - w for w in self.widths]
        upper = [1.0 + w for w in self.widths]
        if self.score == "band":
            return (*lower, *upper)
        return tuple(lower) if self.matched else (*reversed(upper), *lower)

    @property
    def level_of_gamma(self) -> int:
        """The level of a gamma that is a number; its width is among ``widths``."""
        if self.score == "coordinates":
            return 0
        return self.edges.index(1.0 - width_of(float(self.gamma)))

    def heads(self, d: int, like: Tensor) -> HeadPair:
        """The heads for hidden states of d numbers, on the device and in the dtype of ``like``."""
        beta = 2.0 / math.sqrt(d - 1) if isinstance(self.beta, str) else float(self.beta)
        u = _left_out(d, self.seed).to(like) if self.omit_random else None
        return HeadPair(beta, u, self.causal)

    def generator(self) -> torch.Generator:
        """Of Algorithm 1's random matrices."""
        return torch.Generator().manual_seed(self.seed)


@cache
def _left_out(d: int, seed: int) -> Tensor:
    return left_out(d, torch.Generator().manual_seed(seed))


def check_positive(argument: str, value: Any, words: tuple[str, ...] = ()) -> None:
    """Whether ``value`` is a positive finite number, or one of ``words``.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, str) and value in words:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        said = "".join(f"'{w}', " for w in words)
        raise ValueError(f"{argument} must be {said}{'or ' if said else ''}positive, got {value!r}")


def width_of(gamma: float) -> float:
    """Half-width of the band whose lower edge is ``gamma``.

    Raises:
        ValueError: gamma is not below 1.
    """
    if gamma >= 1:
        raise ValueError(f"gamma is a share of a member's response, below 1: got {gamma}")
    return round(1.0 - gamma, 12)


def widths_of(widths: Sequence[float], gamma: float | None) -> tuple[float, ...]:
    """Half-widths ascending, with that of ``gamma`` among them."""
    steps = {round(float(w), 12) for w in widths}
    return tuple(sorted(steps if gamma is None else steps | {width_of(gamma)}))
