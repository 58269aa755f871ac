"""The shared rows of several blocks, and how well hidden states explain them.

The rows of a gradient of a block's projections are combinations of the hidden states that the
block reads. :class:`BlockInputs` computes these states for any text, and :func:`shared_rows` takes
the rows from an observation, in units of their rounding and noise. During a search, a
:class:`Remainder` is the part of the rows that the chosen tokens do not explain: the new part of
the right next token's state lies in its span. After the search, :class:`Explained` regresses the
rows on the states of all texts together. A *certificate* tests this fit: it is the adversary's own
check that the texts are right.

An attack recovers texts token by token. The rows of the shared gradients are combinations of the
hidden states (d,) of the true texts, and the distinct tokens of the batch, the bag, are known from
an earlier attack. :class:`Candidates` computes the states of all tokens of the bag after some
prefixes. A :class:`Measure` whitens these states before the search compares them with the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks import row_space
from lightning_fedleak.attacks.base import RunFacts
from lightning_fedleak.attacks.local_steps import rounding_error
from lightning_fedleak.attacks.texts.base import WorkLimit
from lightning_fedleak.attacks.texts.bottom_model import BottomModel
from lightning_fedleak.attacks.texts.prefix.cache import Layout, Prefixes
from lightning_fedleak.model.anatomy import Anatomy, Place, text_blocks, unwrap
from lightning_fedleak.model.model_runs import stop_at, stop_behind
from lightning_fedleak.model.snapshots import Observation, UpdateSnapshot, whole_tensor


@dataclass(frozen=True)
class _CertificateLimits:
    """Limits of a certificate. None of the values was tuned.

    Tighter limits make wrong certificates rarer.
    """

    residual: float = 20.0  # max. residual of the rows, in units of rounding; more certifies noise
    necessary: float = 100.0  # min. residual without one token, in units of rounding
    exchange: float = 5.0  # min. residual with another token at a position, over the residual
    largest_share: float = 0.9  # max. states over the width of a state; near 1 any states fit
    outside: float = 0.02  # distance of a unit state from the texts' span, below which it may hide
    same: float = 1e-3  # distance from the texts' span, below which a token equals one of theirs
    gain: float = 3.0  # min. that a further token explains, over the noise along one direction


@dataclass(frozen=True)
class _FitLimits:
    """Limits of the share of a state outside of the rows' span. None of the values was tuned."""

    exact: float = 1e-6  # max. share of an exact token; with more, wrong tokens count as exact
    nearly: float = 1e-4  # max. share of a candidate that stays in the search
    floor: float = 1e-10  # min. share whose logarithm counts as evidence: float64 rounds lower ones
    explained: float = 1e-4  # norm of the new part of a unit state, below which it is explained


CERTIFICATE = _CertificateLimits()
FIT = _FitLimits()
SAMPLE = (16, 64)  # random texts and their tokens, for the states' whitening; not tuned


RecoveredText = tuple[int, ...]
"""The tokens of a text that a search recovered; -1 at positions without a token."""


class BlockInputs(BottomModel):
    """A copy of the model up to the deepest of some blocks, which returns the blocks' inputs.

    Its hidden states are the inputs of the projections of all blocks, concatenated:
    (B, L, blocks * d). :meth:`parts` separates them.

    Attributes:
        row_places: The block's index and the (k,) coordinates that were sent, for each row of a
            top-k compressed gradient. Each row then counts as a separate block. Empty for whole
            rows.
    """

    row_places: Sequence[tuple[int, Tensor]] = ()

    def __init__(
        self, anatomy: Anatomy, inputs: Sequence[row_space.SharedInput], facts: RunFacts
    ) -> None:
        self.inputs = tuple(inputs)
        names = [name for name, _ in text_blocks(anatomy)]
        deepest = names.index(row_space.block_name(inputs[-1].maps[0].name)) + 1
        super().__init__(anatomy, deepest, autocast=facts.autocast)

    def whitenings(self, seed: int) -> list[Tensor]:
        """Return for each block the whitening (d, d) of states of random texts."""
        generator = torch.Generator().manual_seed(seed)
        length = min(SAMPLE[1], self.context or SAMPLE[1])
        ids = torch.randint(self.vocab_size, (SAMPLE[0], length), generator=generator)
        states = self.parts(self.hidden(ids.to(self.device)))
        return [
            row_space.whitening_matrix(x.flatten(0, 1).mT @ x.flatten(0, 1)).double()
            for x in states
        ]

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Copy the weights, and stop the copy's forward behind the last of the inputs."""
        super().refresh(anatomy, step)
        places = [Place("", block.reader, "input") for block in self.inputs]
        run = stop_behind(anatomy.model, places)
        self._run: Callable[..., Any] = lambda **inputs: torch.cat(run(**inputs), -1)

    def next_tokens(self, texts: Sequence[Sequence[int]], tokens: Tensor) -> Tensor:
        """Return the log probabilities (B, n) of ``tokens`` as the next token of each text.

        Scales and caps that the model applies to its head's logits are not applied. They are
        normalised over the whole vocabulary. The model must be one for which
        :func:`~lightning_fedleak.attacks.texts.bottom_model.predicts_next` is true.

        Args:
            texts: B texts, as token ids.
            tokens: (n,) token ids.
        """
        assert self.anatomy.head is not None
        head = unwrap(self.anatomy.head)
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
    block: row_space.SharedInput, anatomy: Anatomy, view: Observation, autocast: torch.dtype | None
) -> row_space.SharedRows:
    """Return the rows that the trained maps of a block share, in units of their noise.

    Args:
        block: The input that the maps share.
        anatomy: The anatomy of the live model.
        view: The observation, whose newest gradients or update are used.
        autocast: The dtype of the client's autocast region, or None.

    Raises:
        UnusableObservation: they are not finite, or all zero.
        NotYet: only a LoRA's A is trained, and B is still zero.
    """
    snapshot = view.gradients[-1]
    maps = row_space.nonzero_gradients(view, block.trainable_maps(anatomy))
    gradients, noise = [g.to(anatomy.device) for g in maps.values()], []
    for linear in maps:
        weight_rounding = 0.0
        weight = anatomy.parameter(linear.name)
        if isinstance(snapshot, UpdateSnapshot) and weight is not None:
            additions = snapshot.local_steps + bool(snapshot.compression)
            weight_rounding = rounding_error(whole_tensor(weight)) * additions**0.5
            weight_rounding /= snapshot.learning_rate
        noise.append(math.hypot(snapshot.noise_on(linear.name), weight_rounding))
    if not gradients:
        row_space.refuse_zeros(block.trainable_maps(anatomy), "the second block's projections")
    dtypes = [*(g.dtype for g in gradients), autocast or torch.float32]
    no_rows = torch.zeros(0, block.width, dtype=torch.float64, device=gradients[0].device)
    rounding = max(math.sqrt(12) * snapshot.rounding, *(torch.finfo(d).eps for d in dtypes))
    return row_space.SharedRows.stack(gradients, no_rows, rounding=rounding, noise=noise)


def kept_rows(
    bottom: BlockInputs, view: Observation
) -> tuple[list[tuple[int, Tensor]], list[row_space.SharedRows]]:
    """Return :attr:`BlockInputs.row_places` and the rows for a top-k compressed gradient.

    Only rows of which most entries were sent are used. Such a row is a combination of the states at
    its kept coordinates only, so every row has its own space.

    Raises:
        UnusableObservation: they are not finite, or all zero.
    """
    rows, shared = [], []
    for number, block in enumerate(bottom.inputs):
        for row in row_space.select_densest(shared_rows(block, bottom.anatomy, view, None).whole):
            places = row.nonzero()[:, 0]
            rows.append((number, places))
            values = row[None, places] / row.norm() * len(places) ** 0.5
            values = values / torch.finfo(torch.float32).eps
            shared.append(row_space.SharedRows(values, values, values, exact=False))
    return rows, shared


# ---- the search: rows after the chosen tokens are removed ------------------------------------


@dataclass(frozen=True, eq=False)
class Remainder:
    """The part of a block's whitened rows that the tokens chosen so far do not explain.

    Attributes:
        rows: (m, d) the residual of the rows.
        directions: (k, d) orthonormal basis of the directions that are not yet explained.
        explained: (n, d) orthonormal basis of the chosen tokens' states.
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
        """Return the remainder at the start of a search.

        Args:
            rows: (m, d) rows, in units of their noise.
            whitening: (d, d) the matrix that rows are multiplied by.
            explained: (n, d) orthonormal whitened states to project out of the rows; None for none.
        """
        rows = rows @ whitening
        explained = rows[:0] if explained is None else explained
        rows = rows - (rows @ explained.T) @ explained
        directions = torch.linalg.qr(rows.T).Q.T.contiguous() if len(rows) else rows
        return cls(rows, directions, explained, whitening)

    def fits(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compare the new part of states (n, d) with the directions.

        The *new part* of a state is its part outside of the span of ``explained``.

        Returns:
            The share (n,) of the new part's squared norm that lies in the directions' span, the
            norm (n,) of the new part, and the new part at unit length (n, d).
        """
        new = states - (states @ self.explained.T) @ self.explained
        new = new - (new @ self.explained.T) @ self.explained  # again, against rounding
        norms = new.norm(dim=1)
        new = new / norms.clamp_min(1e-300)[:, None]
        return (new @ self.directions.T).square().sum(1).clamp(0, 1), norms, new

    def nearness(self, states: Tensor) -> Tensor:
        """Return the evidence (n,) of states (n, d) as in :class:`_Fits`; 0 without a new part."""
        new = 1 - (states @ self.explained.T).square().sum(1)
        share = (states @ self.directions.T).square().sum(1) / new.clamp_min(FIT.explained**2)
        near = -(1 - share.clamp(0, 1)).clamp_min(FIT.floor).log()
        return near.masked_fill(new < FIT.explained**2, 0.0)

    def explain(self, new: Tensor) -> Remainder:
        """Return the remainder after one more state, whose new part ``new`` (d,) has unit length.

        The direction nearest to ``new`` is removed: a Householder reflection maps the first
        direction to it. The part of this direction orthogonal to ``new`` is added again if the
        residual rows along it exceed the noise by the certificate's factor, because rounding errors
        of the states lie in few directions.
        """
        explained = torch.cat([self.explained, new[None]])
        rows = self.rows - torch.outer(self.rows @ new, new)
        components = self.directions @ new
        size = float(components.norm())
        if size < 1e-6:  # the new part has nothing along the directions
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
    """How candidates fit the remainders of all blocks.

    Attributes:
        evidence: (n,) minus the logarithm of the share of a state's new part outside of the
            directions, summed over blocks. Larger is a better fit; minus infinity for a state
            without a new part.
        worst: (n,) the smallest share inside of the directions over the blocks.
        new: The new part of the states (n, d), at unit length, for each block.
    """

    evidence: Tensor
    worst: Tensor
    new: tuple[Tensor, ...]

    @property
    def exact(self) -> bool:
        """Return whether at least one candidate fits up to rounding."""
        return bool((self.evidence.isfinite() & (1 - self.worst <= FIT.exact)).any())

    def best(self, evidence: Tensor, min_count: int) -> list[int]:
        """Return the candidates with most evidence (n,): ``min_count``, or all that nearly fit."""
        n_nearly = int((evidence.isfinite() & (1 - self.worst <= FIT.nearly)).sum())
        best = evidence.topk(min(max(min_count, n_nearly), len(evidence))).indices.tolist()
        return [i for i in best if math.isfinite(float(evidence[i]))]

    def explain(self, remainders: Sequence[Remainder], i: int) -> tuple[Remainder, ...]:
        """Return the remainders of the blocks after candidate ``i`` is chosen."""
        return tuple(r.explain(new[i]) for r, new in zip(remainders, self.new, strict=True))


def measure_fits(remainders: Sequence[Remainder], states: Sequence[Tensor]) -> _Fits:
    """Return how states (n, d), one tensor for each block, fit the remainders of the blocks."""
    evidence, worst, news = torch.zeros(()), torch.ones(()), []
    for remainder, x in zip(remainders, states, strict=True):
        share, norms, new = remainder.fits(x)
        nearness = -(1 - share).clamp_min(FIT.floor).log()
        evidence = evidence.to(share) + nearness.masked_fill(norms < FIT.explained, -math.inf)
        worst = torch.minimum(worst.to(share), share)
        news.append(new)
    return _Fits(evidence, worst, tuple(news))


# ---- the certificate: the residual after all states together ----------------------------


@dataclass(frozen=True, eq=False)
class Explained:
    """The least squares fit of states to the shared rows of a block, in units of the rows' noise.

    Attributes:
        residual: The root mean square of the rows outside of the states' span.
        losses: (n,) the size of the rows along ``unshared``, which only this state explains.
        basis: (n, d) an orthonormal basis of the states.
        unshared: (n, d) for each state the unit vector of its part orthogonal to all other states.
    """

    residual: float
    losses: Tensor
    basis: Tensor
    unshared: Tensor

    @classmethod
    def from_states(cls, shared: row_space.SharedRows, states: Tensor) -> Explained:
        """Fit states (n, d), n at most d, to the rows."""
        q, r = torch.linalg.qr(states.T)
        unit = torch.eye(r.shape[1], dtype=r.dtype, device=r.device)
        inverse = torch.linalg.solve_triangular(r[: len(unit)], unit, upper=True)
        size = inverse.norm(dim=1, keepdim=True)
        inside = shared.whole @ q
        losses = (inverse @ inside.T).norm(dim=1) / size[:, 0]
        residual_rows = shared.whole - inside @ q.T
        residual = float(residual_rows.norm()) / shared.noise_norm
        return cls(residual, losses / shared.noise_norm, q.T, inverse @ q.T / size)

    @property
    def exchange_limit(self) -> float:
        """Return the residual from which an exchange of states is certainly a worse fit."""
        return CERTIFICATE.exchange * max(1.0, self.residual)

    def further(self, shared: row_space.SharedRows, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """Return how far ``candidates`` (k, d) lie outside of the basis, and what they would add.

        Returns:
            The norms (k,) of the candidates' parts outside of the basis. And the size (k,) of the
            residual rows along these parts, in units of the noise along any direction.
        """
        outside = candidates - (candidates @ self.basis.T) @ self.basis
        size = outside.norm(dim=1)
        residual_rows = shared.whole - (shared.whole @ self.basis.T) @ self.basis
        gains = residual_rows @ (outside / size.clamp_min(1e-300)[:, None]).T
        return size, gains.norm(dim=0) / len(residual_rows) ** 0.5

    def exchanged(self, number: int, candidates: Tensor) -> Tensor:
        """Return the residual (k,) that an exchange of state ``number`` for each candidate adds."""
        outside = (candidates - (candidates @ self.basis.T) @ self.basis).square().sum(1)
        components = (candidates @ self.unshared[number]).square()
        return self.losses[number] * (outside / (outside + components).clamp_min(1e-300)).sqrt()


@dataclass(frozen=True)
class _SearchLimits:
    """Settings of the search. None of the values was tuned.

    Attributes:
        context_lengths: The lengths of the random prefixes that show what a candidate explains
            after any text; more prefixes estimate it better and cost time.
        mean_lengths: The lengths of the random prefixes for each token's mean state.
        prior: The weight of the model's log probability against the evidence of the rows.
        max_failures: The number of inexact texts after which the search ends.
        slack: An inexact text ends this many tokens after twice the size of the bag.
        alternatives: The number of other continuations that are stored at each position.
        max_repeats: The number of repetitions of a text's first token that are tried.
        max_length: The largest number of tokens of a text.
    """

    context_lengths: tuple[int, ...] = (8,) * 4
    mean_lengths: tuple[int, ...] = (1, 2, 4, 8) * 8
    prior: float = 0.5
    max_failures: int = 2
    slack: int = 8
    alternatives: int = 8
    max_repeats: int = 4
    max_length: int = 512


SEARCH = _SearchLimits()


@dataclass(frozen=True, eq=False)
class Measure:
    """How states are compared with the remainder of the rows.

    Attributes:
        whitening: (d, d) for each block, by which states and rows are multiplied from the right.
        means: (n, d) for each block, an orthonormal basis of the tokens' whitened mean states,
            which count as explained; n is 0 for a measure of whole states.
        contexts: Random prefixes that show what a candidate explains after any text.
    """

    whitening: Sequence[Tensor]
    means: Sequence[Tensor]
    contexts: tuple[tuple[int, ...], ...]

    def whiten(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return each block's whitened states (..., d), at unit length."""
        return [
            nn.functional.normalize(x @ white, dim=-1)
            for x, white in zip(parts, self.whitening, strict=True)
        ]

    def restore(self, states: Tensor, block: int) -> Tensor:
        """Return a block's whitened states (n, d) before whitening, at unit length."""
        plain: Tensor = torch.linalg.solve(self.whitening[block].T, states.T).T
        return nn.functional.normalize(plain, dim=1)


class Candidates:
    """The tokens of a bag, each tried as the next token of prefixes.

    Args:
        bottom: A copy of the model whose :meth:`session` is open.
        bag: (n,) the distinct token ids of the batch.
        seed: The seed of the random prefixes.

    Attributes:
        n_tried: The number of candidates tried so far.
        max_length: The largest number of tokens of a text.
    """

    def __init__(self, bottom: BlockInputs, bag: Tensor, seed: int) -> None:
        self.bottom, self.bag, self.seed = bottom, bag, seed
        self.max_length = min(bottom.context or SEARCH.max_length, SEARCH.max_length)
        self.n_tried = 0

    def random_prefixes(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return prefixes of tokens drawn from the bag, shorter than the longest text."""
        generator = torch.Generator().manual_seed(self.seed)
        bag = self.bag.cpu()
        counts = [min(n, self.max_length - 1) for n in lengths]
        draws = (torch.randint(len(bag), (n,), generator=generator) for n in counts)
        return tuple(tuple(bag[draw].tolist()) for draw in draws)

    def begin(self, prefixes: Sequence[tuple[int, ...]]) -> Prefixes:
        """Run the model on prefixes, whose keys and values it caches."""
        device = self.bottom.device
        layout = Layout.from_masks((len(prefixes), self.max_length), None, None)
        cached = Prefixes(self.bottom, layout)
        counts = torch.tensor([len(p) for p in prefixes], device=device)
        if int(counts.max()):
            ids = [torch.tensor(prefix, dtype=torch.int64, device=device) for prefix in prefixes]
            cached.follow(nn.utils.rnn.pad_sequence(ids, batch_first=True))
            cached.keep(counts)
        return cached

    def states(self, prefixes: Prefixes) -> list[Tensor]:
        """Return for each block the states (B, n, d) of each token after each prefix."""
        count = len(prefixes.lengths)
        self.n_tried += count * len(self.bag)
        return self.bottom.parts(prefixes.attempt(self.bag.expand(count, -1)))

    @cached_property
    def n_repeats(self) -> int:
        """The number of repetitions of a first token to try; 0 if their states differ from its."""
        if self.max_length <= SEARCH.max_repeats:
            return 0
        ids = self.bag[:1].expand(1, SEARCH.max_repeats + 1)
        states = self.bottom.parts(self.bottom.hidden(ids))
        distance = max(float((x[0] - x[0, :1]).norm(dim=-1).max()) for x in states)
        return SEARCH.max_repeats if distance < FIT.explained else 0

    def drop_repeats(self, prefix: tuple[int, ...]) -> tuple[int, ...]:
        """Return a prefix without repetitions of its first token, if their states equal its own."""
        if not self.n_repeats:
            return prefix
        changes = (n for n, token in enumerate(prefix) if token != prefix[0])
        return prefix[:1] + prefix[next(changes, len(prefix)) :]

    def contextual_measure(
        self, shared: row_space.SharedRows, whitenings: Sequence[Tensor], limit: WorkLimit
    ) -> Measure | None:
        """Return a measure of what a prefix adds to the state of its next token.

        Each token's mean state over random prefixes counts as explained; the difference from it
        is whitened.

        Args:
            shared: The first block's rows.
            whitenings: (d, d) for each block.
            limit: The limit after which the result is None.

        Returns:
            The measure; None if the bag's states fill their space, or prefixes add nothing.
        """
        rows, width = len(shared.principal), min(map(len, whitenings))
        if width < 2 * len(self.bag) + rows:
            return None
        prefixes = self.random_prefixes(SEARCH.mean_lengths)
        sums = [white.new_zeros(len(self.bag), len(white)) for white in whitenings]
        moments = [torch.zeros_like(white) for white in whitenings]
        for prefix in prefixes:
            if limit.reached:
                return None
            states = self.states(self.begin([prefix]))
            for total, moment, (x,) in zip(sums, moments, states, strict=True):
                total += x
                moment += x.mT @ x
        fitted, means = [], []
        for total, moment in zip(sums, moments, strict=True):
            basis = torch.linalg.qr(total.mT).Q
            moment = moment - total.mT @ total / len(prefixes)
            if not float(moment.trace()) > FIT.explained**2 * len(prefixes) * len(self.bag):
                return None
            moment = moment - basis @ (basis.mT @ moment)
            white = row_space.whitening_matrix(moment - (moment @ basis) @ basis.mT).double()
            fitted.append(white)
            means.append(torch.linalg.qr((total @ white).mT).Q.mT.contiguous())
        return Measure(fitted, means, prefixes[: len(prefixes) // 2])
