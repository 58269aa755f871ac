"""The shared rows of several blocks: which states they combine, and what states leave of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks.base import RunFacts
from lightning_fedleak.attacks.local_steps import rounding_error
from lightning_fedleak.attacks.row_space import (
    SharedInput,
    SharedRows,
    block_name,
    most_kept,
    nonzero_gradients,
    refuse_zeros,
    whitening_matrix,
)
from lightning_fedleak.attacks.texts.bottom_model import BottomModel
from lightning_fedleak.model.anatomy import Anatomy, Place, text_blocks, unwrap
from lightning_fedleak.model.model_runs import stop_at, stop_behind
from lightning_fedleak.model.snapshots import Observation, UpdateSnapshot, whole_tensor


@dataclass(frozen=True)
class _CertificateLimits:
    """Limits of a certificate. None of the values was tuned.

    Tighter limits make wrong certificates rarer.
    """

    residual: float = 20.0  # max. residual of the rows, in roundings; more would certify noise
    necessary: float = 100.0  # min. residual without one token, in roundings
    exchange: float = 5.0  # min. residual with another token at a position, over the residual
    largest_share: float = 0.9  # max. states over the width of a state; near 1 any states fit
    outside: float = 0.02  # distance of a unit state from the texts' span, below which it may hide
    same: float = 1e-3  # distance from the texts' span, below which a token equals one of theirs
    gain: float = 3.0  # min. that a further token explains, over the noise along one direction


@dataclass(frozen=True)
class _FitLimits:
    """Limits of a state's share outside of the rows, by rounding. None of the values was tuned."""

    exact: float = 1e-6  # max. share of an exact token; with more, wrong tokens count as exact
    nearly: float = 1e-4  # max. share of a candidate that stays in the search
    floor: float = 1e-10  # min. share whose logarithm counts as evidence: float64 rounds lower ones
    explained: float = 1e-4  # norm of the new part of a unit state, below which it is explained


CERTIFICATE = _CertificateLimits()
FIT = _FitLimits()
SAMPLE = (16, 64)  # random texts and their tokens, for the states' whitening; not tuned


RecoveredText = tuple[int, ...]
"""The tokens of a text that the search has read, -1 where none was recovered."""


class BlockInputs(BottomModel):
    """A copy of the model up to some blocks, which returns what their projections read.

    The hidden states that it gives are those of all blocks side by side: (B, L, blocks * d).

    Attributes:
        row_places: The number of the block and the (k,) coordinates that were sent, for each row of
            a compressed gradient. Each row then counts as a block of its own.
    """

    row_places: Sequence[tuple[int, Tensor]] = ()

    def __init__(self, anatomy: Anatomy, inputs: Sequence[SharedInput], facts: RunFacts) -> None:
        self.inputs = tuple(inputs)
        names = [name for name, _ in text_blocks(anatomy)]
        deepest = names.index(block_name(inputs[-1].maps[0].name)) + 1
        super().__init__(anatomy, deepest, autocast=facts.autocast)

    def whitenings(self, seed: int) -> list[Tensor]:
        """Return for each block the whitening (d, d) of states of random texts."""
        generator = torch.Generator().manual_seed(seed)
        length = min(SAMPLE[1], self.context or SAMPLE[1])
        ids = torch.randint(self.vocab_size, (SAMPLE[0], length), generator=generator)
        states = self.parts(self.hidden(ids.to(self.device)))
        return [whitening_matrix(x.flatten(0, 1).mT @ x.flatten(0, 1)).double() for x in states]

    def _bind(self, anatomy: Anatomy, step: int) -> None:
        super()._bind(anatomy, step)
        places = [Place("", block.reader, "input") for block in self.inputs]
        run = stop_behind(anatomy.model, places)
        self._run: Callable[..., Any] = lambda **inputs: torch.cat(run(**inputs), -1)

    def next_tokens(self, texts: Sequence[Sequence[int]], tokens: Tensor) -> Tensor:
        """Return the model's log probabilities (B, n) of tokens (n,) as the next ones of texts.

        Scales and caps that a model puts on its head's logits are excluded.
        """
        head = unwrap(self.anatomy.head) if self.anatomy.head is not None else None
        if head is None:
            raise ValueError("this model has no head that predicts the next token")
        ends = torch.tensor([len(text) for text in texts], device=tokens.device)
        rows = [torch.tensor(text, dtype=torch.int64, device=tokens.device) for text in texts]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        run = stop_at(self.anatomy.model, Place("head", head, "input"))
        with self.session():
            states = copy_context().run(run, input_ids=ids, **self._no_cache)[:, -ids.shape[1] :]
            logits: Tensor = head(states[torch.arange(len(texts), device=ends.device), ends - 1])
        return logits.double().log_softmax(-1)[:, tokens]

    def parts(self, states: Tensor) -> list[Tensor]:
        """Return each block's part of states (..., blocks * d): (..., d) float64 of unit length."""
        parts: Sequence[Tensor] = states.double().chunk(len(self.inputs), -1)
        if self.row_places:
            parts = [parts[block][..., places] for block, places in self.row_places]
        return [nn.functional.normalize(x, dim=-1) for x in parts]


def shared_rows(
    block: SharedInput, anatomy: Anatomy, view: Observation, autocast: torch.dtype | None
) -> SharedRows:
    """Return the rows that the trained maps of a block share, in units of their noise.

    Args:
        block: the input of the maps.
        anatomy: The anatomy of the live model.
        view: the newest gradients or update are read.
        autocast: dtype of the client's autocast region, or None.

    Raises:
        UnusableObservation: they are not finite, or all zero.
        NotYet: only a LoRA's A is trained, and B is still zero.
    """
    snapshot = view.gradients[-1]
    maps = nonzero_gradients(view, block.trained_readers(anatomy))
    gradients, noise = [g.to(anatomy.device) for g in maps.values()], []
    for linear in maps:
        stored = 0.0
        weight = anatomy.parameter(linear.name)
        if isinstance(snapshot, UpdateSnapshot) and weight is not None:
            additions = snapshot.local_steps + bool(snapshot.compression)
            stored = rounding_error(whole_tensor(weight)) * additions**0.5
            stored /= snapshot.learning_rate
        noise.append(math.hypot(snapshot.noise_on(linear.name), stored))
    if not gradients:
        refuse_zeros(block.trained_readers(anatomy), "the second block's projections")
    dtypes = [*(g.dtype for g in gradients), autocast or torch.float32]
    nothing = torch.zeros(0, block.width, dtype=torch.float64, device=gradients[0].device)
    rounding = max(math.sqrt(12) * snapshot.rounding, *(torch.finfo(d).eps for d in dtypes))
    return SharedRows.stack(gradients, nothing, rounding=rounding, noise=noise)


def kept_rows(
    bottom: BlockInputs, view: Observation
) -> tuple[list[tuple[int, Tensor]], list[SharedRows]]:
    """Return rows of which most entries were sent: :attr:`BlockInputs.row_places`, and the rows.

    A row is a combination of states at its kept entries alone, so each has a space of its own.

    Raises:
        UnusableObservation: they are not finite, or all zero.
    """
    rows, shared = [], []
    for number, block in enumerate(bottom.inputs):
        for row in most_kept(shared_rows(block, bottom.anatomy, view, None).whole):
            places = row.nonzero()[:, 0]
            rows.append((number, places))
            values = row[None, places] / row.norm() * len(places) ** 0.5
            values = values / torch.finfo(torch.float32).eps
            shared.append(SharedRows(values, values, exact=False))
    return rows, shared


# ---- the search: what explained tokens leave of the rows ------------------------------------


@dataclass(frozen=True, eq=False)
class Remainder:
    """What is left of a block's rows when some tokens are explained.

    Attributes:
        rows: (m, d) what is left.
        directions: (k, d) orthonormal basis of what is left.
        explained: (n, d) orthonormal basis of the explained tokens' states.
        whitening: (d, d) that rows, in units of their noise, were multiplied by.
    """

    rows: Tensor
    directions: Tensor
    explained: Tensor
    whitening: Tensor

    @classmethod
    def from_rows(
        cls, rows: Tensor, whitening: Tensor, explained: Tensor | None = None
    ) -> Remainder:
        """Return what is left of rows (m, d) at the start of a search.

        Args:
            rows: in units of their noise.
            whitening: (d, d).
            explained: (n, d) orthonormal whitened states that are explained already.
        """
        rows = rows @ whitening
        explained = rows[:0] if explained is None else explained
        rows = rows - (rows @ explained.T) @ explained
        directions = torch.linalg.qr(rows.T).Q.T.contiguous() if len(rows) else rows
        return cls(rows, directions, explained, whitening)

    def fits(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return how much of what is new in states (n, d) lies along the directions.

        Returns:
            The share (n,), the norm of what is new (n,), and what is new at unit length (n, d).
        """
        new = states - (states @ self.explained.T) @ self.explained
        new = new - (new @ self.explained.T) @ self.explained  # again, against rounding
        norms = new.norm(dim=1)
        new = new / norms.clamp_min(1e-300)[:, None]
        return (new @ self.directions.T).square().sum(1).clamp(0, 1), norms, new

    def nearness(self, states: Tensor) -> Tensor:
        """Return (n,) how near the new part of states (n, d) is to the directions, 0 if none is."""
        new = 1 - (states @ self.explained.T).square().sum(1)
        share = (states @ self.directions.T).square().sum(1) / new.clamp_min(FIT.explained**2)
        near = -(1 - share.clamp(0, 1)).clamp_min(FIT.floor).log()
        return near.masked_fill(new < FIT.explained**2, 0.0)

    def explain(self, new: Tensor) -> Remainder:
        """Return the remainder after one more state, whose new part ``new`` (d,) has unit length.

        The direction nearest to the state is removed: a Householder reflection turns the first
        direction into it. The part of it that the state does not explain is added again if the
        rows there exceed what a certificate takes for rounding, because the states' own errors lie
        in few directions.
        """
        explained = torch.cat([self.explained, new[None]])
        rows = self.rows - torch.outer(self.rows @ new, new)
        components = self.directions @ new
        size = float(components.norm())
        if size < 1e-6:
            return Remainder(rows, self.directions, explained, self.whitening)
        nearest = components / size
        mirror = nearest.clone()
        mirror[0] += 1.0 if float(nearest[0]) >= 0 else -1.0
        mirror = mirror / mirror.norm()
        turned = self.directions - 2 * torch.outer(mirror, mirror @ self.directions)
        uncovered = nearest @ self.directions - size * new
        uncovered_size = float(uncovered.norm())
        directions = [turned[1:]]
        if uncovered_size > FIT.exact:
            uncovered = uncovered / uncovered_size
            noise = float((self.whitening @ uncovered).norm()) * rows.numel() ** 0.5
            if float((rows @ uncovered).norm()) > CERTIFICATE.exchange * noise:
                directions.append(uncovered[None])
        return Remainder(rows, torch.cat(directions), explained, self.whitening)


@dataclass(frozen=True, eq=False)
class _Fits:
    """How candidates fit what is left of all blocks.

    Attributes:
        evidence: (n,) summed over blocks; larger for candidates nearer to what is left, and minus
            infinity for those that are explained already.
        worst: (n,) share of a state that is explained, in the block that explains least.
        new: for each block (n, d), what is new in states, of unit length.
    """

    evidence: Tensor
    worst: Tensor
    new: tuple[Tensor, ...]

    @property
    def exact(self) -> bool:
        """Return whether one candidate fits up to rounding."""
        return bool((self.evidence.isfinite() & (1 - self.worst <= FIT.exact)).any())

    def best(self, evidence: Tensor, least: int) -> list[int]:
        """Return the ``least`` candidates with most evidence (n,), and all that nearly fit."""
        nearly = int((evidence.isfinite() & (1 - self.worst <= FIT.nearly)).sum())
        best = evidence.topk(min(max(least, nearly), len(evidence))).indices.tolist()
        return [i for i in best if math.isfinite(float(evidence[i]))]

    def explain(self, remainders: Sequence[Remainder], i: int) -> tuple[Remainder, ...]:
        """Return what is left of the blocks when candidate i is explained too."""
        return tuple(r.explain(new[i]) for r, new in zip(remainders, self.new, strict=True))


def measure_fits(remainders: Sequence[Remainder], states: Sequence[Tensor]) -> _Fits:
    """Return how states (n, d), one tensor for each block, fit what is left of the blocks."""
    evidence, worst, news = torch.zeros(()), torch.ones(()), []
    for remainder, x in zip(remainders, states, strict=True):
        share, norms, new = remainder.fits(x)
        nearness = -(1 - share).clamp_min(FIT.floor).log()
        evidence = evidence.to(share) + nearness.masked_fill(norms < FIT.explained, -math.inf)
        worst = torch.minimum(worst.to(share), share)
        news.append(new)
    return _Fits(evidence, worst, tuple(news))


# ---- the certificate: what all states together leave of the rows ----------------------------


@dataclass(frozen=True, eq=False)
class Explained:
    """Rows and the states that explain them, in units of the rows' noise.

    Attributes:
        residual: root mean square of what is left.
        losses: (n,) what leaving out one state would leave.
        basis: (n, d) orthonormal, of the states.
        unshared: (n, d) unit, for each state the part orthogonal to all others.
    """

    residual: float
    losses: Tensor
    basis: Tensor
    unshared: Tensor

    @classmethod
    def from_states(cls, shared: SharedRows, states: Tensor) -> Explained:
        """Return what states (n, d), n at most d, explain of the rows."""
        q, r = torch.linalg.qr(states.T)
        unit = torch.eye(r.shape[1], dtype=r.dtype, device=r.device)
        inverse = torch.linalg.solve_triangular(r[: len(unit)], unit, upper=True)
        size = inverse.norm(dim=1, keepdim=True)
        inside = shared.whole @ q
        losses = (inverse @ inside.T).norm(dim=1) / size[:, 0]
        rest = shared.whole - inside @ q.T
        residual = float(rest.norm()) / shared.noise_norm
        return cls(residual, losses / shared.noise_norm, q.T, inverse @ q.T / size)

    @property
    def exchange_limit(self) -> float:
        """Return what an exchange leaves at least if it is certainly worse than the residual."""
        return CERTIFICATE.exchange * max(1.0, self.residual)

    def further(self, shared: SharedRows, others: Tensor) -> tuple[Tensor, Tensor]:
        """Return how far other states (k, d) lie outside of these, and what more they explain.

        Returns:
            (k,) norms of what is outside of the basis, and (k,) what is left of the rows along it,
            in units of what noise leaves along any direction.
        """
        outside = others - (others @ self.basis.T) @ self.basis
        size = outside.norm(dim=1)
        rest = shared.whole - (shared.whole @ self.basis.T) @ self.basis
        gains = rest @ (outside / size.clamp_min(1e-300)[:, None]).T
        return size, gains.norm(dim=0) / len(rest) ** 0.5

    def exchanged(self, number: int, others: Tensor) -> Tensor:
        """Return the residual (k,) if others (k, d) replace state ``number``."""
        outside = (others - (others @ self.basis.T) @ self.basis).square().sum(1)
        components = (others @ self.unshared[number]).square()
        return self.losses[number] * (outside / (outside + components).clamp_min(1e-300)).sqrt()
