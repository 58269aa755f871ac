"""The attention adversary with the choices of Vu et al. 2024, in closed form.

The heads read raw hidden states, W_O reads all coordinates with both signs (Algorithm 1, line 11),
and a target is guessed to be a member if any of them exceeds gamma.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.crafted_layers import CraftedAttention
from lightning_fedleak.attacks import (
    AttentionMembership,
    MembershipGuess,
    PublicText,
    Query,
    RunFacts,
)
from lightning_fedleak.attacks.membership.attention_calibration import (
    MAX_TARGETS,
    Calibration,
    PublicStates,
    false_positive_rate,
)
from lightning_fedleak.attacks.membership.attention_layers import (
    Attention,
    attentions,
    tokens_at,
)
from lightning_fedleak.attacks.membership.base import MembershipAttack, read_rungs
from lightning_fedleak.attacks.row_space import Whitening
from lightning_fedleak.model.anatomy import Anatomy

LEVELS = 16  # gammas of a ladder; not tuned; more: a finer score


class PublishedAttention(AttentionMembership):
    """Algorithm 1 with the paper's coordinates.

    Args:
        layer: that the crafted layers read.
        public_text: text like the clients'.
        beta: factor of the products; ``"authors"``: 2 / sqrt(d - 1), the value of their code.
        gamma: ``"lemma"``: 2 Delta-bar (Lemma 2). ``"calibrated"``: the lowest of a ladder that
            public batches exceed for at most ``false_positive_rate`` of public tokens.
        arguments: of :class:`~lightning_fedleak.attacks.AttentionMembership`.
    """

    def __init__(
        self,
        layer: int,
        public_text: PublicText,
        *,
        beta: float | Literal["authors"] = "authors",
        gamma: Literal["calibrated", "lemma"] = "calibrated",
        **arguments: Any,
    ) -> None:
        super().__init__(layer, public_text, **arguments)
        self.paper_beta, self.gamma, self.gammas = beta, gamma, torch.zeros(0)
        self.beta, self.widths = math.nan, []

    def meet(self, facts: RunFacts) -> None:
        """Store the facts: the paper's choices do not depend on them."""
        MembershipAttack.meet(self, facts)

    def set_width(self, d: int) -> None:
        """Choose beta for hidden states of d numbers."""
        authors = self.paper_beta == "authors"
        self.beta = 2.0 / math.sqrt(d - 1) if authors else float(self.paper_beta)
        self.width = d

    def prepare(self, anatomy: Anatomy) -> None:
        """Choose gamma on the hidden states of public text."""
        states = self._public_states(anatomy)
        self.set_width(states.hidden.shape[-1])
        level = 0
        if self.gamma == "lemma":
            self.gammas = torch.tensor([lemma_gamma(states, self.beta)])
        else:
            self.gammas, level = self.ladder(states)
        self._calibration = Calibration(identity(self.width), level)

    def ladder(self, states: PublicStates) -> tuple[Tensor, int]:
        """Return gammas, hardest to exceed first, and the index of the one that decides."""
        places = states.mask.nonzero()
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(self.seed))
        sentence, position = places[order[:MAX_TARGETS]].T
        v = tokens_at(states.hidden[sentence], position)
        best = v.new_full((len(v), len(states.hidden)), -torch.inf)
        for attention in attentions(states.hidden, states.mask, v, self.beta):
            target, _, z = coordinates(attention)
            best[:, attention.sentence].scatter_reduce_(0, target, z.abs().amax(1), "amax")
        with_target = best.gather(1, sentence[:, None])[:, 0]
        distances = torch.cdist(v.double(), states.hidden.double().flatten(0, 1))
        same = distances < 1e-3 * v.double().norm(dim=1, keepdim=True)
        same = (same & states.mask.flatten()).view(len(v), *states.mask.shape).any(2)
        best = best.masked_fill(same, -torch.inf)
        generator = torch.Generator().manual_seed(self.seed)
        picks = torch.randint(len(states.hidden), (8, len(v), self.batch), generator=generator)
        without = best.expand(8, *best.shape).gather(2, picks).amax(2)
        maxima = torch.cat([without, torch.maximum(without, with_target)])
        maxima = maxima[maxima.isfinite()].sort(descending=True).values
        gammas = maxima[torch.linspace(0, len(maxima) - 1, LEVELS).long()].float()
        gammas[0] *= 0.999  # the largest of all would never be exceeded
        rates = [false_positive_rate(best, gamma, self.batch) for gamma in gammas.tolist()]
        decisive = [i for i, rate in enumerate(rates) if rate <= self.false_positive_rate]
        return gammas, max(decisive, default=0)

    @property
    def rungs(self) -> int:
        """Return K: a ladder for each row of W_O."""
        return 2 * self.width * len(self.gammas)

    def reads(self, position: int) -> slice | None:
        """Return None: the target token alone."""
        return None

    def embed(self, hidden: Tensor, query: Query) -> Tensor:
        """Return the target tokens, (G, d)."""
        return MembershipAttack.embed(self, hidden, query)

    def craft(self, target: Tensor) -> CraftedAttention:
        """Run Algorithm 1 for one target, (d,)."""
        eye = torch.eye(len(target)).to(target)
        rows, gammas = torch.cat([eye, -eye]), self.gammas.to(target).repeat(2 * len(target))
        return CraftedAttention(target, self.beta, self.calibration.whitening, rows, gammas)

    @torch.no_grad()
    def gradient(
        self, targets: Tensor, hidden: Tensor, mask: Tensor | None, upstream: Tensor
    ) -> Tensor:
        """Return (B, G, K): upstream gradients of tokens above each gamma, summed per sample."""
        x = hidden.to(torch.promote_types(targets.dtype, hidden.dtype))
        (g, d), weights, gammas = targets.shape, upstream.to(x), self.gammas.to(x)
        gradient = x.new_zeros((len(x), g, 2, d, len(gammas)))
        for attention in attentions(x, mask, targets.to(x), self.beta):
            target, token, z = coordinates(attention, float(gammas.min()))
            weight = weights[attention.sentence, attention.places][token][:, None]
            for level, gamma in enumerate(gammas):
                for sign in (0, 1):
                    above = -z > gamma if sign else z > gamma
                    part = torch.where(z.isnan(), torch.nan, torch.where(above, weight, 0.0))
                    gradient[attention.sentence, :, sign, :, level].index_add_(0, target, part)
        return gradient.flatten(2)

    def guess(self, gradient: Tensor, noise_std: float = 0.0) -> MembershipGuess:
        """Run A_guess: the largest number of all rows counts."""
        best = gradient.view(len(gradient), -1, len(self.gammas)).abs().amax(1)
        if noise_std == 0:
            return read_rungs(best, 0.0, self.guess_rung)
        rungs = 2 * self.width * (self.guess_rung + 1)
        scores = best[:, : self.guess_rung + 1].amax(1) / noise_std
        level = (1 + (1 - self.false_positive_rate) ** (1 / rungs)) / 2
        threshold = torch.special.ndtri(torch.tensor(level, dtype=torch.float64))
        return MembershipGuess(scores, scores > float(threshold))


def identity(d: int) -> Whitening:
    """Return the whitening that leaves hidden states as they are."""
    return Whitening(torch.zeros(d), torch.eye(d))


def coordinates(attention: Attention, at_least: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return Z1 - Z2 in all coordinates, for tokens where one may exceed ``at_least``.

    No coordinate is larger than the sum of the attentions' absolute differences, each times the
    norm of its token.

    Returns:
        Numbers of targets (m,), the tokens' indices in ``places`` (m,), and Z1 - Z2 (m, d).
    """
    difference = attention.first - attention.second
    bound = (difference.abs() @ attention.tokens.norm(dim=1)) * (1 + 1e-4)
    target, token = (~(bound < at_least)).nonzero(as_tuple=True)
    z = difference[target, token] @ attention.tokens
    return target + attention.targets.start, token, z


def lemma_gamma(states: PublicStates, beta: float) -> float:
    """Return 2 Delta-bar = ``4 M (l - 1) exp(2 / l - beta Delta)`` of public text (Lemma 2).

    Delta is the separation (Definition 2) and M the largest norm of a token, l the longest
    sentence's length. It is infinite where it overflows.
    """
    delta, longest, largest = math.inf, 1, 0.0
    for x, keep in zip(states.hidden.double(), states.mask, strict=True):
        x = x[keep]
        products = x @ x.T
        squares = products.diagonal().clone()
        longest, largest = max(longest, len(x)), max(largest, float(squares.max()))
        if len(x) > 1:
            products.fill_diagonal_(-torch.inf)
            delta = min(delta, float((squares - products.amax(1)).min()))
    try:
        decay = math.exp(2 / longest - beta * delta)
    except OverflowError:
        return math.inf
    return 4 * math.sqrt(largest) * (longest - 1) * decay
