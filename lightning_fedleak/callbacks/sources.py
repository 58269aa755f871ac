"""Where the targets of live membership games come from, and how many there are."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.callbacks.canary_scores import Reduction
from lightning_fedleak.callbacks.outcome import Waiting
from lightning_fedleak.callbacks.targets import Deal, Rows, Targets
from lightning_fedleak.canaries import CanarySet

EARLIER_BATCHES = 2
SCALE = 1e9
"""How strongly a dishonest server's layers feed the model, unless the user says otherwise.

Without clipping or noise it changes nothing. With them it is the worst case: a canary takes the
whole norm that it is clipped to. No server has to disturb the model for it: a trained factor that
is still zero has a gradient as large as one likes, and adds nothing.
"""


@dataclass(frozen=True)
class GameSettings:
    """The settings of a monitor's membership games, see :class:`LeakageMonitor`.

    Raises:
        ValueError: a number out of range.
    """

    targets: int = 16
    held_out: PublicText | None = None
    window: int = 100
    scale: float = SCALE
    canaries: CanarySet | None = None
    score_canaries: Reduction | None = None

    def __post_init__(self) -> None:
        for name in ("targets", "window"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} must be a positive integer, got {number!r}")
        if self.held_out is not None and not isinstance(self.held_out, PublicText):
            raise ValueError(
                "held_out must be a PublicText, as PublicText(texts, tokenizer) gives it; got a "
                f"{type(self.held_out).__name__}"
            )
        if not self.scale > 0 or math.isinf(self.scale):
            raise ValueError(f"canary_scale must be a positive number, got {self.scale!r}")
        if self.score_canaries is not None and self.canaries is None:
            raise ValueError("score_canaries= scores the texts of canaries=: give these too")


class Sources:
    """Draws the targets of each look.

    Args:
        settings: the monitor's.
        client: number of this process's client.
        causal: of the model.
        special: ids of tokens that are not asked for.
    """

    def __init__(
        self,
        settings: GameSettings,
        client: int,
        *,
        causal: bool,
        special: frozenset[int] = frozenset(),
    ) -> None:
        self._deal = Deal(settings.targets, causal=causal, special=special)
        self._held_out = None if settings.held_out is None else settings.held_out.sentences
        self._client = client
        self._earlier: deque[TokenBatch] = deque(maxlen=EARLIER_BATCHES)
        self._in: set[tuple[int, ...]] = set()
        if (canaries := settings.canaries) is not None:
            marked = list(zip(canaries.token_ids, canaries.included.tolist(), strict=True))
            self._all, self._included = canaries.token_ids, canaries.included
            self._in = {tuple(text.tolist()) for text, included in marked if included}
            self._out = [text for text, included in marked if not included]

    def wants_batch(self, steps_to_look: int) -> bool:
        """Whether a batch that is not looked at may serve the next look."""
        return self._held_out is None and steps_to_look <= EARLIER_BATCHES

    def remember(self, batch: TokenBatch) -> None:
        """Keeps a batch, by reference, as text that a later batch does not hold."""
        if self._held_out is None and batch.input_ids.numel():
            self._earlier.append(batch)

    def population(self, step: int, batches: Sequence[TokenBatch]) -> Targets | Waiting:
        """Sentences of the batch, and others.

        Raises:
            NoTargets: the batch's sentences are too short.
        """
        inside, generator, outside = Rows.of(batches), self._generator(step), None
        if self._held_out is not None:
            outside = self._deal.some(self._held_out, generator, like=inside)
        elif self._earlier:
            outside = Rows.of(list(self._earlier))
        targets = None
        if outside is not None:
            targets = self._deal.targets(inside, outside, generator)
        return targets or Waiting("no text is known that is not in the batch")

    def canaries(self, step: int, batches: Sequence[TokenBatch]) -> Targets | Waiting:
        """The user's own canaries that are in the batch, and others that are not in the data.

        Raises:
            NoTargets: the canaries are too short.
        """
        inside, generator = Rows.of(batches), self._generator(step)
        places = [i for i, text in enumerate(inside.tuples()) if text in self._in]
        if not places:
            return Waiting("no canary was in the batch")
        if not self._out:
            return Waiting("every canary is in the data")
        outside = self._deal.some(self._out, generator, like=inside)
        targets = self._deal.targets(inside, outside, generator, among=places)
        return targets or Waiting("every canary that was left out is in the batch")

    def all_canaries(self, batches: Sequence[TokenBatch]) -> Targets:
        """Every canary of the user's, included or not, in their order; the token asked for stays.

        Raises:
            NoTargets: a canary holds no token that may be asked for.
        """
        device = batches[0].input_ids.device
        texts = [TokenBatch(t.to(device)[None], None, None, "causal") for t in self._all]
        ones = [replace(t, attention_mask=torch.ones_like(t.input_ids)) for t in texts]
        masked = any(b.attention_mask is not None for b in batches)
        rows = replace(Rows.of(ones), masked=masked)
        return self._deal.as_they_are(rows, self._included, torch.Generator().manual_seed(0))

    def _generator(self, step: int) -> torch.Generator:
        """Depends on the step and the client alone, so that a resumed run draws the same."""
        return torch.Generator().manual_seed(1_000_003 * step + self._client)


__all__ = ["SCALE", "GameSettings", "Sources"]
