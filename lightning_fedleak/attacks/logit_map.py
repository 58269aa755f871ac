"""From the product of head and hidden states to the model's logits: scale, shift and softcap.

Gemma 2 caps its logits, ``c tanh(x / c)``, Cohere and Granite scale them, BART and Marian shift
them by a buffer. A gradient of the head in closed form needs to know, as the loss is of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.anatomy.wrappers import without_peft

_ROWS = 64
_ROUNDINGS = 4
_STRICT, _LOOSE = 2e-5, 1e-3
"""Of the largest logit: by how much a map may be off in float32, and with TF32's products."""


@dataclass(frozen=True)
class LogitMap:
    """``logits = cap(scale * product + shift)`` with ``cap(x) = softcap * tanh(x / softcap)``.

    Attributes:
        scale: of the product ``W h + b``.
        shift: (V,), or None.
        softcap: None without.
    """

    scale: float = 1.0
    shift: Tensor | None = None
    softcap: float | None = None

    def __call__(self, product: Tensor, types: Tensor | None = None) -> Tensor:
        """Logits of products (..., V), or (..., k) of the ``types``, which index the shift."""
        logits = product if self.scale == 1.0 else product * self.scale
        if self.shift is not None:
            logits = logits + (self.shift if types is None else self.shift[types])
        if self.softcap is None:
            return logits
        return self.softcap * (logits / self.softcap).tanh()

    def steepness(self, logits: Tensor) -> Tensor | float:
        """Derivative of the cap where it gives ``logits``; times ``scale`` that of the map."""
        return 1.0 if self.softcap is None else 1 - (logits / self.softcap).square()

    @classmethod
    def fit(
        cls,
        model: nn.Module,
        states: Tensor,
        logits: Tensor,
        product: Callable[[Tensor], Tensor],
    ) -> LogitMap:
        """The map that gave (N, V) ``logits`` of what the head makes of ``states`` (N, d).

        A softcap is read from the model's configuration, scale and shift off the numbers of some
        rows; that all of it together gives the logits is checked.

        Args:
            model: that computed them.
            states: inputs of its head.
            logits: as it returned them.
            product: the head's, (n, V) of (n, d).

        Raises:
            ValueError: there is no such map.
        """
        rounding = max(torch.finfo(t.dtype).eps for t in (states, logits))
        kind = logits.device.type
        if torch.is_autocast_enabled(kind):
            rounding = max(rounding, torch.finfo(torch.get_autocast_dtype(kind)).eps)
        if not len(logits):
            return PLAIN
        rows = torch.linspace(0, len(logits) - 1, min(_ROWS, len(logits))).long()
        rows = rows.to(logits.device)
        x, y = product(states[rows]).detach().double(), logits.detach()[rows].double()
        finite = (x.isfinite() & y.isfinite()).all(1)
        x, y = x[finite], y[finite]
        if not len(x):
            return PLAIN
        size = float(y.abs().max())
        found = list(cls._candidates(model, x, y))
        errors = [float((m(x) - y).abs().max()) for m in found]
        for least in (_STRICT, _LOOSE):
            for one, error in zip(found, errors, strict=True):
                if error <= max(least, _ROUNDINGS * rounding) * size:
                    return one if one.shift is None else replace(one, shift=one.shift.float())
        raise ValueError(
            f"{type(without_peft(model)).__name__} computes its logits from what its output head "
            f"gives by more than scale, shift and softcap (the nearest is off by {min(errors):.2g} "
            f"of {size:.2g}), so that the gradient of its head is unknown; FlatChat, or "
            "AlignedFlatChat(readout='sign'), needs no such knowledge"
        )

    @classmethod
    def _candidates(cls, model: nn.Module, x: Tensor, y: Tensor) -> Iterator[LogitMap]:
        for cap in (*_softcaps(model), None):
            yield cls(softcap=cap)
            near = y if cap is None else cap * (y / cap).clamp(-1, 1).atanh()
            seen = torch.ones_like(y, dtype=torch.bool) if cap is None else y.abs() < 0.95 * cap
            squares = float(x[seen].square().sum())
            if squares > 0:
                yield cls(float((x[seen] * near[seen]).sum()) / squares, softcap=cap)
        if len(x) >= 4:
            mean, level = x[::2].mean(0), y[::2].mean(0)
            yield cls(shift=level - mean)
            apart = x[::2] - mean
            squares = float(apart.square().sum())
            if squares > 0:
                scale = float((apart * (y[::2] - level)).sum()) / squares
                yield cls(scale, level - scale * mean)


PLAIN = LogitMap()


def _softcaps(model: nn.Module) -> list[float]:
    """Values in the model's configuration that its logits may be capped at."""
    config = getattr(without_peft(model), "config", None)
    holders: list[Any] = [config]
    if config is not None and hasattr(config, "get_text_config"):
        holders.append(config.get_text_config())
    found = [
        float(value)
        for holder in holders
        for name, value in getattr(holder, "__dict__", {}).items()
        if "logit" in name and "cap" in name and "att" not in name
        if isinstance(value, int | float) and value > 0
    ]
    return list(dict.fromkeys(found))
