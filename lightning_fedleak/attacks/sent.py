"""Hidden states as they were sent, and how far others are from them; time that may be spent."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4}
ROUNDING_OTHERWISE = 2e-2

TINY = 1e-12


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


__all__ = ["TINY", "Deadline", "Sent", "rounding"]
