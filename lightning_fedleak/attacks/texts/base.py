"""Attacks that reconstruct whole texts: their guesses, base classes and common tools.

:class:`TextAttack` is the base of all attacks that return texts. :class:`InversionAttack` is the
base of those that invert the activations at a split layer. In split learning (vertical
federated learning) the client keeps the model's bottom and sends the hidden states of the split
layer; the server owns the whole model (Zheng, "Input Reconstruction Attack against Vertical
Federated Large Language Models", Sect. 3.2). It recovers the input text from the hidden states with
its copy of the bottom model.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.attacks import base
from lightning_fedleak.attacks.base import Capability, ThreatModel
from lightning_fedleak.attacks.texts.bottom_model import RUN_TOKENS, BottomModel
from lightning_fedleak.messages import rank_zero_info
from lightning_fedleak.model.anatomy import Anatomy, place_of
from lightning_fedleak.model.snapshots import Observation, check_finite
from lightning_fedleak.progress import Stopwatch
from lightning_fedleak.validate import check_integer, check_number

NOTHING = -1
"""The token id at positions without a guess."""

TINY = 1e-12  # the least norm to divide by; below any norm that occurs
PLANNED = 1 / 8
"""Share of ``budget_seconds`` in which a search shows how much work they are. More: a first search
of many texts gives the first ones more. Less: the plan is measured on less."""
PLANNED_RUNS = 8
"""Runs of the bottom model after which work is planned at the earliest: the first are slow."""


@dataclass(frozen=True)
class TextGuess(base.Guess):
    """The texts that an attack reconstructs.

    Attributes:
        tokens: (B, L) token ids; :data:`NOTHING` at padded positions, and at positions that the
            attack did not reach in time.
        finished: False if the time budget ended the search, so that more time may give other
            tokens.
        candidates: The number of candidates that were verified against the observation, over all
            positions.
        certified: Whether the adversary's own check shows that these are all texts of the batch,
            up to copies and prefixes of another text; None if the attack makes no certificate.
    """

    tokens: Tensor
    finished: bool = True
    candidates: int = 0
    certified: bool | None = None


def join_guesses(parts: Sequence[TextGuess], device: torch.device) -> TextGuess:
    """Return the guesses about groups of texts, of one length L, as one guess about all texts.

    The joint guess has no certificate: ``certified`` is None.
    """
    return TextGuess(
        torch.cat([part.tokens for part in parts]).to(device),
        all(part.finished for part in parts),
        sum(part.candidates for part in parts),
    )


class TextAttack(base.Attack):
    """An adversary that reconstructs whole texts: its guess is a :class:`TextGuess`.

    Attacks on gradients use the newest gradient that was shared, summed over a batch, or the update
    of a round. They return the texts in any order.

    Attributes:
        last_token_open: Whether the guess omits the token of a text's last label and all tokens
            after it. A causal model's gradients depend on the first only as a label, and on the
            later ones not at all.
    """

    last_token_open: ClassVar[bool] = False
    _work: int | None = None  # see WorkLimit; None before it is planned
    _copy: BottomModel | None = None  # the adversary's copy of the model's bottom, if it needs one

    def __init__(self, name: str | None = None, budget_seconds: float | None = None) -> None:
        super().__init__(name)
        self.budget_seconds = check_number("budget_seconds", budget_seconds, above=0, optional=True)

    @property
    def bottom(self) -> BottomModel:
        """Return the copy of the bottom model that a subclass's :meth:`prepare` made."""
        assert self._copy is not None
        return self._copy

    def plan_work(self, seconds: float, work: int) -> float:
        """Return the work of a search, see :class:`WorkLimit`; infinite before it is planned.

        Args:
            seconds: The time that the current search has taken.
            work: Its work in that time.
        """
        if self.budget_seconds is None:
            return math.inf
        shows = work >= PLANNED_RUNS * RUN_TOKENS or seconds >= self.budget_seconds
        if self._work is None and shows and seconds >= PLANNED * self.budget_seconds:
            self._work = 2 ** round(math.log2(max(1.0, work * self.budget_seconds / seconds)))
            rank_zero_info(
                f"'{self.name}': a search ends after {self._work:,} tokens of runs of the model, "
                f"about {self.budget_seconds:g} s"
            )
        return math.inf if self._work is None else self._work

    def age(self, step: int) -> float:
        """Return the age of the adversary's copy of the weights in steps; NaN without a copy."""
        return math.nan if self._copy is None else float(self._copy.age(step))


class InversionAttack(TextAttack):
    """A server that reconstructs the client's text from the hidden states at the split layer.

    Args:
        layer: The split, as in Hugging Face's ``hidden_states``: the client sends the output of
            block ``layer`` (counted from 1); 0 is the output of the embeddings.
        budget_seconds: About the time for one observation; None for no limit. It is counted as
            work (:class:`WorkLimit`), after which the best texts so far are returned, and the guess
            is marked as unfinished.
        name: The name in the logs.

    Raises:
        ValueError: a negative layer, or a budget that is not positive.
    """

    threat_model = ThreatModel.create(
        "the server of a split model, which owns the bottom model too",
        Capability.SEES_ACTIVATIONS,
        Capability.KNOWS_BOTTOM_MODEL,
    )

    refresh_every = 1  # optimizer steps after which the bottom model is copied again

    def __init__(
        self, layer: int, budget_seconds: float | None = None, name: str | None = None
    ) -> None:
        super().__init__(name, budget_seconds)
        self.layer = check_integer("layer", layer, at_least=0)

    def meet(self, facts: base.RunFacts) -> None:
        """Store the client's precision and the step at which the fit begins.

        A copy of the bottom model that exists already counts as a copy of that step, or keeps its
        step if that is later. :meth:`refresh` then copies the weights again.
        """
        super().meet(facts)
        if self._copy is not None:
            self._copy.step = max(self._copy.step, facts.step)

    def prepare(self, anatomy: Anatomy) -> None:
        """Store the layer's name. A subclass must also call ``_copy_bottom`` here.

        Raises:
            ValueError: the model has no such layer.
        """
        self._layer_name, self._work = place_of(anatomy, self.layer).name, None

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Copy the weights again if the copy is too old, or from an earlier fit."""
        if self._copy is not None and not 0 <= self._copy.age(step) < self.refresh_every:
            with torch.inference_mode(False):
                self._copy.refresh(anatomy, step)

    def _copy_bottom(self, anatomy: Anatomy) -> None:
        """Copy the bottom model's weights, in the client's precision."""
        # Weights copied in inference mode could never take part in autograd.
        with torch.inference_mode(False):
            self._copy = BottomModel(anatomy, self.layer, autocast=self._facts.autocast)

    def needs(self, anatomy: Anatomy) -> base.Surfaces:
        """Return the name of the hidden states at the split.

        Raises:
            ValueError: the model has no such layer.
        """
        return base.Surfaces(layers=(place_of(anatomy, self.layer).name,))

    @abstractmethod
    def reconstruct(
        self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> TextGuess:
        """Reconstruct the texts from the hidden states that were sent.

        Args:
            hidden: (B, L, d) finite hidden states, as the client sent them.
            attention_mask: (B, L), 0 at padding, or None. The client sends it because the server
                needs it for the top model.
            position_ids: (B, L), or None if the model computes them.
        """

    def run(self, view: Observation, query: base.Query | None = None) -> TextGuess:
        """Reconstruct the texts of the newest activations of ``view`` at this attack's layer.

        ``query`` is not used: the attack gets no candidate texts.

        Raises:
            UnusableObservation: they are not finite.
        """
        snapshot = view.activations[-1]
        # A split protocol names its activations by the layer's number, a hook by the module.
        by_number = snapshot.tensors.get(f"layer {self.layer}")
        hidden = snapshot.tensors[self._layer_name] if by_number is None else by_number
        check_finite(hidden, "the activations")
        return self.reconstruct(hidden, snapshot.attention_mask, snapshot.position_ids)


@dataclass(frozen=True)
class Sent:
    """The hidden states of B texts as the client sent them.

    Attributes:
        hidden: (B, L, d) float32 or float64; 0 at padding.
        real: (B, L) bool, False at padding.
        attention_mask: (B, L) the mask that was sent, or None.
        position_ids: (B, L) the position ids that were sent, or None.
    """

    hidden: Tensor
    real: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None

    @classmethod
    def from_states(
        cls,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Sent:
        """Return hidden states (B, L, d) in float32 at least, 0 where padded."""
        hidden = hidden.detach()
        if attention_mask is None:
            real = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        else:
            real = attention_mask != 0
        wide = hidden if hidden.dtype == torch.float64 else hidden.float()
        # A value at padding that is not finite would make every gradient not finite.
        wide = wide.masked_fill(~real[..., None], 0.0)
        return cls(wide, real, attention_mask, position_ids)

    def __len__(self) -> int:
        return len(self.hidden)

    def __getitem__(self, rows: Tensor | slice) -> Sent:
        """Return the texts ``rows``."""
        mask, positions = self.attention_mask, self.position_ids
        return Sent(
            self.hidden[rows],
            self.real[rows],
            None if mask is None else mask[rows],
            None if positions is None else positions[rows],
        )

    @property
    def norms(self) -> Tensor:
        """Return the norms (B, L) of what was sent."""
        norms: Tensor = self.hidden.norm(dim=-1).clamp(min=TINY)
        return norms

    def squared_errors(self, hidden: Tensor) -> Tensor:
        """Return the squared distance (B, L) of ``hidden`` from what was sent, 0 where padded."""
        difference = hidden.to(self.hidden.dtype) - self.hidden
        return difference.square().sum(-1).masked_fill(~self.real, 0.0)

    def relative_errors(self, hidden: Tensor) -> Tensor:
        """Return the distance (B, L) from what was sent over its norm, 0 where padded."""
        # The root of zero would have an infinite gradient.
        return self.squared_errors(hidden).clamp(min=TINY**2).sqrt() * self.real / self.norms

    def cosines(self, hidden: Tensor) -> Tensor:
        """Return the cosine (B,) of each text's hidden states, as one vector, with those sent."""
        weights = self.real[..., None]
        states = (hidden.to(self.hidden.dtype) * weights).flatten(1)
        cosines: Tensor = F.cosine_similarity(states, (self.hidden * weights).flatten(1), dim=1)
        return cosines


class WorkLimit:
    """A limit of the work of one search, which does not depend on what else the machine computes.

    Work is counted by :attr:`.BottomModel.work`. How much of it an attack's ``budget_seconds`` are
    is planned in the first search that takes :data:`PLANNED` of them. That plan is rounded to a
    power of two, so that its measurement changes it rarely, and kept until the attack is prepared
    again.

    Args:
        attack: The attack that searches; None for no limit.
        parent: The limit of which this one is a share.
        parts: The number of equal shares of the parent's remaining work.
    """

    def __init__(
        self, attack: TextAttack | None = None, parent: WorkLimit | None = None, parts: int = 1
    ) -> None:
        self._attack, self._parent, self._parts = attack, parent, parts
        self._watch, self._start = Stopwatch(), self._work

    @property
    def _work(self) -> int:
        """Return the work of the attack's bottom model so far."""
        return 0 if self._attack is None else self._attack.bottom.work

    @property
    def reached(self) -> bool:
        """Return whether as much work was done as the limit allows."""
        return self._attack is not None and self._work - self._start >= self._amount

    @property
    def _amount(self) -> float:
        """Return the work that the limit allows; infinite before it is planned."""
        assert self._attack is not None
        if self._parent is not None:
            return max(0.0, self._parent._amount - self._start + self._parent._start) / self._parts
        return self._attack.plan_work(self._watch.seconds, self._work - self._start)

    def share(self, parts: int) -> WorkLimit:
        """Return a limit for the first of ``parts`` equal shares of the remaining work."""
        return WorkLimit(self._attack, self, parts)
