"""Input reconstruction from the activations at a split layer: what the attacks have in common.

In split learning (vertical federated learning) the client keeps the model's bottom and sends the
hidden states of the split layer; the server owns the whole model (Zheng, "Input Reconstruction
Attack against Vertical Federated Large Language Models", Sect. 3.2). These attacks read the input
text off the hidden states with the bottom model alone.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.anatomy.text_layers import place_of, text_blocks
from lightning_fedleak.attacks.base import (
    Attack,
    Guess,
    Query,
    RunFacts,
    Surfaces,
    UnusableObservation,
)
from lightning_fedleak.snapshots import ActivationSnapshot, Observation
from lightning_fedleak.threats import Capability, ThreatModel

if TYPE_CHECKING:
    from lightning_fedleak.attacks.texts.bottom_model import BottomModel


NOTHING = -1
"""Token id where nothing was guessed."""

ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4}
ROUNDING_OTHERWISE = 2e-2

TINY = 1e-12


@dataclass(frozen=True)
class TextGuess(Guess):
    """The texts that an attack says were sent.

    Attributes:
        tokens: (B, L) token ids; :data:`NOTHING` at padded positions, and at those that the time
            budget left open.
        confidence: (B, L) how sure the attack is of each, on a scale of its own, or None.
        finished: False where the time budget cut anything off: the tokens are the best found by
            then, and more time may find others.
        candidates: candidates that were verified against the observation, over all positions.
        certified: whether the adversary can tell by itself that these are the texts, and all of
            them (but for copies, and texts that another one begins with); None where the attack
            makes no certificate.
    """

    tokens: Tensor
    confidence: Tensor | None = None
    finished: bool = True
    candidates: int = 0
    certified: bool | None = None


class TextAttack(Attack):
    """An adversary that reconstructs whole texts: its guess is a :class:`TextGuess`.

    One that reads gradients is shown them as an attack on words is, and names its texts in any
    order.

    Attributes:
        last_token_open: whether it leaves the last token of a text open, which a causal model's
            gradients hold as a label alone; with it all that stands behind a text's last label.
    """

    last_token_open: ClassVar[bool] = False

    def age(self, step: int) -> float:
        """Optimizer steps that this adversary's copy of the model is behind at ``step``.

        NaN where it keeps none.
        """
        return math.nan


class InversionAttack(TextAttack):
    """A server that reconstructs the client's text from the hidden states at the split layer.

    Args:
        layer: the split, as in Hugging Face's ``hidden_states``: what is sent is the output of
            block ``layer`` (counted from 1); 0 is the output of the embeddings.
        budget_seconds: wall time that one observation may take; None for no bound. What is found
            by then is returned, and the guess says that it is not finished.
        name: in the logs.

    Raises:
        ValueError: a negative layer, or a budget that is not positive.
    """

    threat_model = ThreatModel.create(
        "the server of a split model, which owns the bottom model too",
        Capability.SEES_ACTIVATIONS,
        Capability.KNOWS_BOTTOM_MODEL,
    )

    def __init__(
        self, layer: int, budget_seconds: float | None = None, name: str | None = None
    ) -> None:
        super().__init__(name)
        if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
            raise ValueError(
                f"layer must be 0 (the embeddings' output) or the number of a block, got {layer!r}"
            )
        if budget_seconds is not None and not budget_seconds > 0:
            raise ValueError(f"budget_seconds must be positive or None, got {budget_seconds!r}")
        self.layer = layer
        self.budget_seconds = budget_seconds
        self._bottom: BottomModel | None = None
        self._met = RunFacts()

    def meet(self, facts: RunFacts) -> None:
        """Learns the precision that the client computes in, and where the fit begins.

        A copy of the bottom model that was taken before is of that step.
        """
        self._met = facts
        if self._bottom is not None:
            self._bottom.step = max(self._bottom.step, facts.step)

    @property
    def bottom(self) -> BottomModel:
        """The adversary's copy of the bottom model.

        Raises:
            RuntimeError: it has taken none, which those that keep one do in :meth:`prepare`.
        """
        if self._bottom is None:
            raise RuntimeError(f"{type(self).__name__} has no bottom model yet: call prepare()")
        return self._bottom

    def age(self, step: int) -> float:
        """Optimizer steps that the copy of the bottom model is behind; NaN without one."""
        return math.nan if self._bottom is None else float(self._bottom.age(step))

    def needs(self, anatomy: Anatomy) -> Surfaces:
        """The hidden states at the split.

        Raises:
            ValueError: the model has no such layer.
        """
        return Surfaces(layers=(place_of(anatomy, self.layer).name,))

    @abstractmethod
    def reconstruct(
        self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> TextGuess:
        """The text of hidden states that were sent.

        Args:
            hidden: (B, L, d) as they left the client, finite.
            attention_mask: (B, L), 0 where padded, or None; the server needs it for its own part of
                the model, and so is sent it.
            position_ids: (B, L) or None for the model's own.
        """

    def run(self, view: Observation, query: Query | None = None) -> TextGuess:
        """Reconstructs the newest activations of ``view`` at this attack's layer.

        Raises:
            UnusableObservation: they are not finite.
            KeyError: ``view`` holds no activations, or those of other layers.
        """
        if not view.activations:
            raise KeyError("no activations in this observation")
        snapshot = view.activations[-1]
        hidden = self._at_layer(snapshot)
        if not bool(torch.isfinite(hidden).all()):
            raise UnusableObservation("the activations are not finite")
        return self.reconstruct(hidden, snapshot.attention_mask, snapshot.position_ids)

    def _at_layer(self, snapshot: ActivationSnapshot) -> Tensor:
        """A single tensor may have a name of its own, but not that of another layer."""
        held = snapshot.tensors
        if self._layer_name in held:
            return held[self._layer_name]
        if len(held) == 1 and not self._other_layers.intersection(held):
            return next(iter(held.values()))
        raise KeyError(
            f"'{self.name}' reads '{self._layer_name}', but this observation holds {sorted(held)}"
        )

    _layer_name: str = ""
    _other_layers: frozenset[str] = frozenset()

    def prepare(self, anatomy: Anatomy) -> None:
        """Remembers the layers' names; subclasses take their copy of the bottom model here."""
        self._layer_name = place_of(anatomy, self.layer).name
        layers = range(len(text_blocks(anatomy)) + 1)
        self._other_layers = frozenset(place_of(anatomy, layer).name for layer in layers)


def rounding(dtype: torch.dtype) -> float:
    """Relative error up to which hidden states computed in ``dtype`` count as the same."""
    return ROUNDING.get(dtype, ROUNDING_OTHERWISE)


@dataclass(frozen=True)
class Sent:
    """Hidden states of B texts as they were sent.

    Attributes:
        hidden: (B, L, d) float32 or float64; 0 where padded.
        real: (B, L) bool, False where padded.
        attention_mask: (B, L) as sent, or None.
        position_ids: (B, L) as sent, or None.
    """

    hidden: Tensor
    real: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Sent:
        """In float32 at least."""
        hidden = hidden.detach()
        if attention_mask is None:
            real = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        else:
            real = attention_mask != 0
        wide = hidden if hidden.dtype == torch.float64 else hidden.float()
        # A number at padding that is not finite would be one in every gradient.
        wide = wide.masked_fill(~real[..., None], 0.0)
        return cls(wide, real, attention_mask, position_ids)

    def __len__(self) -> int:
        return len(self.hidden)

    def __getitem__(self, rows: Tensor | slice) -> Sent:
        """Of the texts ``rows``."""
        mask, positions = self.attention_mask, self.position_ids
        return Sent(
            self.hidden[rows],
            self.real[rows],
            None if mask is None else mask[rows],
            None if positions is None else positions[rows],
        )

    @property
    def norms(self) -> Tensor:
        """(B, L) of what was sent."""
        norms: Tensor = self.hidden.norm(dim=-1).clamp(min=TINY)
        return norms

    def squared_errors(self, hidden: Tensor) -> Tensor:
        """(B, L) squared distance of ``hidden`` from what was sent, 0 at padded positions."""
        difference = hidden.to(self.hidden.dtype) - self.hidden
        return difference.square().sum(-1).masked_fill(~self.real, 0.0)

    def relative_errors(self, hidden: Tensor) -> Tensor:
        """(B, L) distance from what was sent over the norm of what was sent."""
        return self.squared_errors(hidden).clamp(min=TINY**2).sqrt() * self.real / self.norms

    def cosines(self, hidden: Tensor) -> Tensor:
        """(B,) cosine of a text's hidden states, all positions as one vector, with those sent."""
        weights = self.real[..., None]
        one = (hidden.to(self.hidden.dtype) * weights).flatten(1)
        found: Tensor = F.cosine_similarity(one, (self.hidden * weights).flatten(1), dim=1)
        return found


class Deadline:
    """A point in time ``seconds`` from now, or none."""

    def __init__(self, seconds: float | None = None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        """Whether it is over."""
        return self._end is not None and time.monotonic() >= self._end

    def share(self, parts: int) -> Deadline:
        """The first of ``parts`` equal shares of what is left."""
        if self._end is None:
            return Deadline()
        return Deadline(max(0.0, self._end - time.monotonic()) / parts)


__all__ = [
    "NOTHING",
    "TINY",
    "Deadline",
    "InversionAttack",
    "Sent",
    "TextAttack",
    "TextGuess",
    "rounding",
]
