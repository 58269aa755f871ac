"""The attention adversary's layer as a real module: Algorithm 1 as written, and with projectors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks.whitening import Whitening


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


__all__ = ["CraftedAttention", "Heads", "algorithm_one", "left_out", "projector_heads"]
