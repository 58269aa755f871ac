"""The map from the product of head and hidden states to the logits: scale, shift and softcap.

Gemma 2 caps its logits, ``c tanh(x / c)``, Cohere and Granite scale them, BART and Marian shift
them by a buffer. Attacks that compute the head's gradient in closed form need this map; it is found
by comparing the logits of one run with the head's product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.model.anatomy import without_peft

CHECKED_ROWS = 16  # rows of logits that the map is fitted to and checked on; not tuned
_ROUNDINGS = 4  # largest error of a map in roundings of the coarsest dtype; not tuned
_STRICT, _LOOSE = 2e-5, 1e-3
"""Largest error of a map as a share of the largest logit, in float32 and with TF32 products."""
_UNCAPPED = 0.95  # share of the softcap up to which a logit can be inverted; not tuned


@dataclass(frozen=True)
class LogitMap:
    """``logits = cap(scale * product + shift)`` with ``cap(x) = softcap * tanh(x / softcap)``.

    Attributes:
        scale: factor of the product ``W h + b``.
        shift: (V,) term that is added, or None.
        softcap: bound on the magnitude of a logit, or None.
    """

    scale: float = 1.0
    shift: Tensor | None = None
    softcap: float | None = None

    def __call__(self, product: Tensor, types: Tensor | None = None) -> Tensor:
        """Return the logits of products (..., V), or (..., k) for the k ``types``."""
        logits = product if self.scale == 1.0 else product * self.scale
        if self.shift is not None:
            logits = logits + (self.shift if types is None else self.shift[types])
        if self.softcap is None:
            return logits
        return self.softcap * (logits / self.softcap).tanh()

    def steepness(self, logits: Tensor) -> Tensor | float:
        """Return the cap's derivative at ``logits``; that of the map is ``scale`` times it."""
        return 1.0 if self.softcap is None else 1 - (logits / self.softcap).square()

    @classmethod
    def fit(
        cls, model: nn.Module, states: Tensor, logits: Tensor, product: Callable[[Tensor], Tensor]
    ) -> LogitMap:
        """Return the map from the head's product with (N, d) ``states`` to (N, V) ``logits``.

        The softcap comes from the model's configuration, scale and shift are fitted to some rows.
        The result is checked against the logits.

        Args:
            model: the model that computed the logits.
            states: inputs of its head.
            logits: the model's output.
            product: the head, from (n, d) to (n, V).

        Raises:
            ValueError: no such map gives the logits.
        """
        rounding = max(torch.finfo(t.dtype).eps for t in (states, logits))
        kind = logits.device.type
        if torch.is_autocast_enabled(kind):
            rounding = max(rounding, torch.finfo(torch.get_autocast_dtype(kind)).eps)
        rows = torch.linspace(0, len(logits) - 1, min(CHECKED_ROWS, len(logits))).long()
        rows = rows.to(logits.device)
        x, y = product(states[rows]).detach().double(), logits.detach()[rows].double()
        finite = (x.isfinite() & y.isfinite()).all(1)
        x, y = x[finite], y[finite]
        if not len(x):
            return PLAIN
        size = float(y.abs().max())
        tried: list[tuple[float, LogitMap]] = []
        strict, loose = (max(t, _ROUNDINGS * rounding) * size for t in (_STRICT, _LOOSE))
        for candidate in cls._candidates(model, x, y):  # most models have the first
            tried.append((float((candidate(x) - y).abs().max()), candidate))
            if tried[-1][0] <= strict:
                return candidate._in_single_precision()
        for error, candidate in tried:
            if error <= loose:
                return candidate._in_single_precision()
        raise ValueError("the logits are no scale, shift or softcap of the head's: use FlatChat")

    def _in_single_precision(self) -> LogitMap:
        return replace(self, shift=None if self.shift is None else self.shift.float())

    @classmethod
    def _candidates(cls, model: nn.Module, x: Tensor, y: Tensor) -> Iterator[LogitMap]:
        """Yield maps to try, fitted to products x and logits y; the simplest first."""
        for cap in (*_softcaps(model), None):
            yield cls(softcap=cap)
            inverse = y if cap is None else cap * (y / cap).clamp(-1, 1).atanh()
            usable = torch.ones_like(y, dtype=torch.bool)
            if cap is not None:
                usable = y.abs() < _UNCAPPED * cap
            squares = float(x[usable].square().sum())
            if squares > 0:  # the scale by least squares
                yield cls(float((x[usable] * inverse[usable]).sum()) / squares, softcap=cap)
        if len(x) >= 4:
            # Fitted to every second row; the other rows check it.
            mean, level = x[::2].mean(0), y[::2].mean(0)
            yield cls(shift=level - mean)
            deviation = x[::2] - mean
            squares = float(deviation.square().sum())
            if squares > 0:
                scale = float((deviation * (y[::2] - level)).sum()) / squares
                yield cls(scale, level - scale * mean)


PLAIN = LogitMap()  # the identity: logits are the head's product


def _softcaps(model: nn.Module) -> list[float]:
    """Return the values in the model's configuration that its logits may be capped at."""
    config = getattr(without_peft(model), "config", None)
    configs: list[Any] = [config]
    if config is not None and hasattr(config, "get_text_config"):
        configs.append(config.get_text_config())
    caps = [
        float(value)
        for config in configs
        for name, value in getattr(config, "__dict__", {}).items()
        if "logit" in name and "cap" in name and "att" not in name
        if isinstance(value, int | float) and value > 0
    ]
    return list(dict.fromkeys(caps))
