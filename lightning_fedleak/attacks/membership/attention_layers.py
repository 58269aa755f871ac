"""The attention adversary's heads (Vu et al. 2024, Sect. 4.2): in closed form, and as modules.

Algorithm 1's matrix of head 1 has orthonormal rows, so its pseudo-inverse is its transpose and
``W_K^T W_Q = beta (I - v v^T / |v|^2)``. Head 2's random matrix omits one random direction u in the
same way: ``beta (I - u u^T)``. Hence, with tokens as rows of X,
``Z1 - Z2 = [softmax beta(G - a a^T) - softmax beta(G - c c^T)] X`` with ``G = X X^T`` shared by all
targets, ``a = X v / |v|``, ``c = X u``. This costs O(d) per token for a target, and needs no QR and
no pseudo-inverse. ``beta`` multiplies the products: it is the paper's beta over ``sqrt(d_attn)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks.row_space import Whitening
from lightning_fedleak.validate import check_choice, check_integer, check_number

PAIRS_AT_ONCE = 1 << 20  # pairs of tokens, of all targets, in memory at once (4 MiB for a head)

Score = Literal["band", "ladder", "coordinates"]
Readout = Literal["matched", "token"]
Variant = Literal["projector", "paper"]

CALIBRATED_LEVELS = 16  # gammas of a ladder over coordinates; not tuned; more: a finer score


@dataclass(frozen=True, repr=False)
class Attention:
    """The attention of both heads in one sentence, for some of the targets.

    Attributes:
        sentence: number of the sentence in the batch.
        places: (n,) positions of its real tokens.
        targets: slice of the g targets.
        tokens: (n, d) hidden states.
        norms: (n,) norms of the hidden states.
        first: (g, n, n) attention of head 1, a row for each query.
        second: (n, n) attention of head 2.
    """

    sentence: int
    places: Tensor
    targets: slice
    tokens: Tensor
    norms: Tensor
    first: Tensor
    second: Tensor

    def project(self, rows: Tensor) -> Tensor:
        """Return Z1 - Z2 along each target's row of ``rows`` (G, d), as (g, n)."""
        projections = rows[self.targets] @ self.tokens.T
        return (self.first @ projections[..., None])[..., 0] - projections @ self.second.T

    def coordinates(self, at_least: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        """Return Z1 - Z2 in all coordinates, for tokens where one may exceed ``at_least``.

        No coordinate is larger than the sum of the attentions' absolute differences, each times
        the norm of its token.

        Returns:
            Numbers of targets (m,), the tokens' indices in ``places`` (m,), and Z1 - Z2 (m, d).
        """
        difference = self.first - self.second
        bound = (difference.abs() @ self.norms) * (1 + 1e-4)
        target, token = (~(bound < at_least)).nonzero(as_tuple=True)
        return target + self.targets.start, token, difference[target, token] @ self.tokens


@dataclass(frozen=True, repr=False)
class HeadPair:
    """The part of the two heads that does not depend on the target. Head 1 omits its direction.

    Attributes:
        beta: factor of the products.
        u: (d,) unit vector whose direction head 2 omits; None if it omits none.
        causal: whether tokens attend only to earlier ones.
    """

    beta: float
    u: Tensor | None = None
    causal: bool = False

    def attentions(
        self, hidden: Tensor, mask: Tensor | None, targets: Tensor
    ) -> Iterator[Attention]:
        """Yield both heads' attention in every sentence, for some of the targets at a time.

        Args:
            hidden: (B, L, d).
            mask: (B, L), 0 where padded, or None.
            targets: (G, d) the tokens v; a zero vector omits nothing.
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
                omitted, a = a[-1], a[:-1]
                second = products - self.beta * omitted[:, None] * omitted
            second = second.softmax(-1)
            size = max(1, PAIRS_AT_ONCE // (n * n))
            for start in range(0, len(targets), size):
                part = slice(start, start + size)
                v = a[part, :, None]
                logits = torch.baddbmm(
                    products.expand(len(v), n, n), v, v.mT, beta=1.0, alpha=-self.beta
                )
                yield Attention(b, places, part, x, norms, logits.softmax(-1), second)

    def expected_response(self, hidden: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        """Return Z1 - Z2 at the target token in its own sentence, ``mean(X) - Z2``.

        Head 1's query is zero there, so it attends to all tokens equally.

        Args:
            hidden: (G, L, d) of the target sentences.
            mask: (G, L), 0 where padded, or None.
            positions: (G,) of the target tokens.

        Returns:
            (G, d).
        """
        g, length = hidden.shape[:2]
        visible = torch.ones(g, length, dtype=torch.bool, device=hidden.device)
        if mask is not None:
            visible = mask.to(hidden.device) != 0
        if self.causal:
            places = torch.arange(length, device=hidden.device)
            visible = visible & (places <= positions[:, None])
        x = hidden.masked_fill(~visible[..., None], 0.0)
        tokens = tokens_at(x, positions)
        logits = (x @ tokens[..., None])[..., 0]
        if self.u is not None:
            logits = logits - (tokens @ self.u)[:, None] * (x @ self.u)
        attention = (self.beta * logits).masked_fill(~visible, -torch.inf).softmax(-1)
        uniform = visible.to(x.dtype) / visible.sum(1, keepdim=True)
        return ((uniform - attention)[:, None] @ x)[:, 0]

    def matched_rows(self, hidden: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        """Return rows of W_O, (G, d), that read 1 from a member's expected response.

        Rows are zero where no response is expected. The arguments are those of
        :meth:`expected_response`.
        """
        expected = self.expected_response(hidden, mask, positions)
        squared = expected.square().sum(1, keepdim=True)
        nonzero = squared > 1e-12 * tokens_at(hidden, positions).square().sum(1, keepdim=True)
        return torch.where(nonzero, expected / squared, 0.0)


def token_rows(v: Tensor) -> Tensor:
    """Return rows of W_O along minus the token, ``-v / |v|^2``, (G, d); 0 for a zero vector."""
    squared = v.square().sum(1, keepdim=True)
    return torch.where(squared > 0, -v / squared, 0.0)


def tokens_at(hidden: Tensor, positions: Tensor) -> Tensor:
    """Return (G, d): one token of each sentence (G, L, d)."""
    return hidden[torch.arange(len(hidden), device=hidden.device), positions]


def bias_gradients(responses: Tensor, thresholds: Tensor, upstream: Tensor) -> Tensor:
    """Return the gradient of biases ``-threshold`` before a ReLU.

    It is the sum of the upstream gradients of the tokens above each threshold.

    Args:
        responses: (..., n) over tokens.
        thresholds: (K,), or (..., K) for each response.
        upstream: (n,).

    Returns:
        (..., K). Two thresholds that the same tokens exceed get exactly the same number. NaN where
        a response is NaN.
    """
    above = responses[..., None, :] > thresholds[..., None]
    sums = torch.where(above, upstream, 0.0).sum(-1)
    return sums.masked_fill(responses.isnan().any(-1, keepdim=True), torch.nan)


def coordinate_gradients(
    attentions: Iterable[Attention], gammas: Tensor, weights: Tensor, targets: int, d: int
) -> Tensor:
    """Return the gradient of biases ``-gamma`` after a W_O of both signs of every coordinate.

    Args:
        attentions: the attention in the sentences of a batch.
        gammas: (R,) for every row of W_O.
        weights: (B, L) upstream gradients.
        targets: number of targets, G.
        d: width of the hidden states.

    Returns:
        (B, G, 2 d R).
    """
    gradient = weights.new_zeros((len(weights), targets, 2, d, len(gammas)))
    lowest = float(gammas.min())
    for attention in attentions:
        target, token, z = attention.coordinates(lowest)
        if len(target) == 0:
            continue
        weight = weights[attention.sentence, attention.places][token][:, None]
        for level, gamma in enumerate(gammas):
            for sign in (0, 1):
                above = -z > gamma if sign else z > gamma
                part = torch.where(z.isnan(), torch.nan, torch.where(above, weight, 0.0))
                gradient[attention.sentence, :, sign, :, level].index_add_(0, target, part)
    return gradient.flatten(2)


@dataclass(frozen=True, repr=False)
class Heads:
    """Queries and keys of H heads.

    Attributes:
        queries, keys: (H, d_attn, d).
        query_biases, key_biases: (H, d_attn).
        signs: factor of each head's output in Z1 - Z2, in the first and in the second half of the
            output's rows.
    """

    queries: Tensor
    keys: Tensor
    query_biases: Tensor
    key_biases: Tensor
    signs: tuple[tuple[float, float], ...]

    def fold(self, whitening: Whitening | None) -> Heads:
        """Return heads for hidden states that act as these (without biases) on whitened ones."""
        if whitening is None:
            return self
        queries, query_biases = whitening.folded(self.queries)
        keys, key_biases = whitening.folded(self.keys)
        return Heads(queries, keys, query_biases, key_biases, self.signs)

    def output(self, rows: Tensor) -> Tensor:
        """Return W_O (r, H d) that reads Z1 - Z2 along each of the ``rows`` (r, d)."""
        return torch.cat([sign[0] * rows for sign in self.signs], 1)

    def both_signs(self) -> Tensor:
        """Return W_O of line 11, (2 d, H d): Z1 - Z2 and its negative, coordinate by coordinate."""
        eye = torch.eye(self.queries.shape[-1]).to(self.queries)
        halves = [torch.cat([sign[i] * eye for sign in self.signs], 1) for i in (0, 1)]
        return torch.cat(halves)


def algorithm_one(target: Tensor, beta: float, generator: torch.Generator) -> Heads:
    """Return the heads of lines 1 to 9 of Algorithm 1: random matrices, QR, pseudo-inverses.

    Args:
        target: (d,) the token v, whitened if hidden states are.
        beta: factor of the products; the paper's beta divided by ``sqrt(d_attn)``.
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
    """Return two heads of the same attention, with ``I - v v^T / |v|^2`` and ``I - u u^T`` (or I).

    The third and the fourth head of Algorithm 1 are copies of these, and not needed. The whitening
    is folded in without a product of matrices.

    Args:
        target: (d,) the token v, whitened.
        beta: factor of the products.
        u: (d,) unit vector whose direction head 2 omits, or None.
        whitening: None for heads that read hidden states without whitening.
    """
    d = len(target)
    basis = torch.eye(d).to(target) if whitening is None else whitening.matrix.to(target)
    unit = nn.functional.normalize(target, dim=0, eps=torch.finfo(target.dtype).tiny)
    second = basis if u is None else basis - torch.outer(u, u @ basis)
    queries = torch.stack([basis - torch.outer(unit, unit @ basis), second])
    keys = (beta * math.sqrt(d) * basis).expand(2, d, d)
    mean = target.new_zeros(d) if whitening is None else whitening.mean.to(target)
    return Heads(queries, keys, -(queries @ mean), -(keys @ mean), ((1.0, -1.0), (-1.0, 1.0)))


def omitted_direction(d: int, generator: torch.Generator) -> Tensor:
    """Return the direction u, (d,) float64, that head 2 of :func:`algorithm_one` omits.

    It is the null direction of the first matrix that ``generator`` draws.
    """
    second = _random(d - 1, d, generator, torch.empty(0, dtype=torch.float64))
    q: Tensor = torch.linalg.qr(second.T, mode="complete")[0]
    return q[:, -1]


def _random(rows: int, columns: int, generator: torch.Generator, reference: Tensor) -> Tensor:
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(reference)


class CraftedAttention(nn.Module):
    """Self-attention of Eq. 1, W_O and ReLU for one target. Only ``bias`` (K,), b_O, is trained.

    The buffers are ``w_q``, ``w_k`` (H, d_attn, d) with biases ``b_q``, ``b_k`` (H, d_attn),
    ``w_v`` (H, d, d) and ``w_o`` (r, H d). Every row of W_O stands for ``K / r`` equal rows with
    different biases: a ladder of gammas. The module computes in its own dtype, also under autocast.
    No token attends to padded positions, whose output is 0.

    Args:
        heads: queries and keys.
        values: (d, d) W_V of all heads.
        output: (r, H d) W_O.
        gammas: (K,) the ladders of all rows of ``output``, row after row.
        causal: whether tokens attend only to earlier ones.
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
        """Return (B, L, K) for hidden states (B, L, d).

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
            projections = (self._heads(x, mask) @ self.w_o.T)[..., None]
            z = nn.functional.relu(projections + self.bias.view(len(self.w_o), -1)).flatten(2)
        return z if mask is None else z * (mask.to(z.device) != 0)[..., None].to(z.dtype)

    def _heads(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return Z of all heads side by side, (B, L, H d)."""
        q = torch.einsum("bld,hkd->bhlk", x, self.w_q) + self.b_q[:, None]
        k = torch.einsum("bld,hkd->bhlk", x, self.w_k) + self.b_k[:, None]
        logits = q @ k.mT / math.sqrt(self.w_q.shape[1])
        length = x.shape[1]
        blocked = torch.zeros(1, length, length, dtype=torch.bool, device=x.device)
        if self.causal:
            blocked = blocked | torch.ones_like(blocked[0]).triu(1)
        if mask is not None:
            blocked = blocked | (mask.to(x.device) == 0)[:, None]
        # A padded token attends to itself: a softmax over no token would be NaN.
        blocked = blocked & ~torch.eye(length, dtype=torch.bool, device=x.device)
        attention = logits.masked_fill(blocked[:, None], -torch.inf).softmax(-1)
        values = torch.einsum("bld,hkd->bhlk", x, self.w_v)
        return (attention @ values).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class AttentionSettings:
    """How an :class:`AttentionMembership` crafts and reads its layers.

    Attributes:
        beta: factor of the products: the paper's beta over ``sqrt(d_attn)``. ``"authors"``:
            2 / sqrt(d - 1), the value of their code. ``"auto"``: ``BETA``, and
            ``REPLACED_BETA`` against a defence that replaces batches.
        whiten: False for the model's own coordinates, as in the paper.
        score: how the biases' gradient is read. ``"ladder"``: the highest gamma that a token
            exceeds. ``"band"``: the narrowest band around 1 that holds a token's response, from the
            difference of the gradients of its two edges. ``"coordinates"``: the paper's rows, and
            the highest gamma that any of them exceeds. ``"auto"``: ``"coordinates"`` for the
            paper's variant, else ``"band"`` where a member's response is known and gamma is not the
            lemma's, else ``"ladder"``.
        readout: ``"matched"`` or ``"token"``, the row of W_O that is read along.
        variant: ``"projector"`` crafts two heads from projectors. ``"paper"`` is Algorithm 1 as
            written: four heads, random matrices, QR, pseudo-inverses; head 2 omits a random
            direction.
        omit_random: whether head 2 of the projector omits that random direction too.
        widths: half-widths w of the bands; the gammas of ``"ladder"`` are 1 - w (and 1 + w with
            ``readout="token"``). ``"auto"``: ``WIDTHS``; against a defence that replaces
            batches ``REPLACED_WIDTHS``; against one that acts on gradients
            ``DEFENDED_WIDTH`` alone, because rungs share the clip norm (a ``gamma`` that is a
            number keeps its ladder).
        causal: whether tokens attend only to earlier ones (the first token is then never found).
        calibration_tokens: approximate number of public tokens; None: 8192, or 4 d if that is more.
    """

    beta: float | Literal["authors", "auto"] = "auto"
    whiten: bool = True
    score: Score | Literal["auto"] = "auto"
    readout: Readout = "matched"
    variant: Variant = "projector"
    omit_random: bool = False
    widths: Sequence[float] | Literal["auto"] = "auto"
    causal: bool = False
    calibration_tokens: int | None = None

    def __post_init__(self) -> None:
        check_integer("calibration_tokens", self.calibration_tokens, optional=True)

    def resolved_score(self, gamma: float | str) -> Score:
        """Return the score that ``"auto"`` stands for."""
        if self.score != "auto":
            return self.score
        if self.variant == "paper":
            return "coordinates"
        return "ladder" if gamma == "lemma" or self.readout == "token" else "band"


@dataclass(frozen=True, kw_only=True)
class AttentionDesign(AttentionSettings):
    """Settings of an :class:`~lightning_fedleak.attacks.membership.attention.AttentionMembership`.

    None of them is ``"auto"``.

    Raises:
        ValueError: a setting outside of its range, or two that exclude each other.
    """

    beta: float | Literal["authors"]
    score: Score
    widths: tuple[float, ...]
    gamma: float | Literal["calibrated", "lemma"]
    batch: int
    false_positive_rate: float
    seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("score", self.score, get_args(Score))
        check_choice("readout", self.readout, get_args(Readout))
        check_choice("variant", self.variant, get_args(Variant))
        check_positive_or("beta", self.beta, ("authors",))
        check_positive_or("gamma", self.gamma, ("calibrated", "lemma"))
        check_integer("batch", self.batch)
        if self.score == "band" and self.gamma == "lemma":
            raise ValueError("the lemma's gamma is one threshold and no band: use score='ladder'")
        if not self.widths or not all(0 < w < 1 for w in self.widths):
            raise ValueError(f"widths must be numbers between 0 and 1, got {self.widths}")

    @property
    def matched(self) -> bool:
        """Return whether targets hold the token and the row of W_O that is read along."""
        return self.score != "coordinates" and self.readout == "matched"

    @property
    def levels(self) -> int:
        """Return the length of a ladder, or the number of bands."""
        if self.gamma == "lemma":
            return 1
        if self.score == "coordinates":
            return CALIBRATED_LEVELS if self.gamma == "calibrated" else 1
        return len(self.widths) if self.score == "band" else len(self.edges)

    @property
    def edges(self) -> tuple[float, ...]:
        """Return gammas in units of a member's response, one for each rung.

        With ``"band"`` they are the lower edges, narrowest first, then the upper ones. With
        ``"ladder"`` they are the same numbers from the highest down, without the upper edges where
        a member's response is known.
        """
        lower = [1.0 - w for w in self.widths]
        upper = [1.0 + w for w in self.widths]
        if self.score == "band":
            return (*lower, *upper)
        return tuple(lower) if self.matched else (*reversed(upper), *lower)

    @property
    def level_of_gamma(self) -> int:
        """Return the level of ``gamma``, a number whose half-width is among ``widths``."""
        if self.score == "coordinates":
            return 0
        return self.edges.index(1.0 - half_width(float(self.gamma)))

    def heads(self, d: int, reference: Tensor) -> HeadPair:
        """Return the heads for hidden states of d numbers, on ``reference``'s device and dtype."""
        beta = 2.0 / math.sqrt(d - 1) if isinstance(self.beta, str) else float(self.beta)
        u = _cached_direction(d, self.seed).to(reference) if self.omit_random else None
        return HeadPair(beta, u, self.causal)

    def generator(self) -> torch.Generator:
        """Return the generator of Algorithm 1's random matrices."""
        return torch.Generator().manual_seed(self.seed)


@cache
def _cached_direction(d: int, seed: int) -> Tensor:
    return omitted_direction(d, torch.Generator().manual_seed(seed))


def check_positive_or(argument: str, value: Any, words: tuple[str, ...]) -> None:
    """Raise an error unless ``value`` is a positive finite number, or one of ``words``."""
    if value not in words:
        check_number(argument, value, above=0, hint=f"or one of {', '.join(map(repr, words))}")


def half_width(gamma: float) -> float:
    """Return the half-width of the band whose lower edge is ``gamma``.

    Raises:
        ValueError: gamma is not below 1.
    """
    check_number("gamma", gamma, below=1, hint="it is a share of a member's response")
    return round(1.0 - gamma, 12)


def half_widths(widths: Sequence[float], gamma: float | None) -> tuple[float, ...]:
    """Return half-widths in ascending order, with that of ``gamma`` if it is given."""
    steps = {round(float(w), 12) for w in widths}
    return tuple(sorted(steps if gamma is None else steps | {half_width(gamma)}))
