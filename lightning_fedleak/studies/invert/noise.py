"""Gaussian noise on the hidden states that a client sends (Zheng, Sect. 5.2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.anatomy.text_layers import (
    place_of,
    states_in,
    states_out,
    with_states_in,
    with_states_out,
)


def gaussian_noise(hidden: Tensor, sigma: float, *, relative: bool, seed: int = 0) -> Tensor:
    """Noise of the shape, dtype and device of hidden states.

    Args:
        hidden: (B, L, d).
        sigma: standard deviation; with ``relative`` in units of the standard deviation that each of
            the d dimensions has over the B * L states, else absolute, as in the paper.
        relative: see there.
        seed: of the draw, which is the same for every sigma.

    Raises:
        ValueError: a sigma that is negative or not finite.
    """
    if not 0 <= sigma < float("inf"):
        raise ValueError(f"sigma must be a finite number of at least 0, got {sigma!r}")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(hidden.shape, generator=generator).to(hidden.device)
    wide = hidden.detach().flatten(0, 1).float()
    unit = wide.std(0) if relative else wide.new_ones(())
    return (sigma * drawn * unit).to(hidden.dtype)


@contextmanager
def noised(anatomy: Anatomy, layer: int, noise: Tensor) -> Iterator[None]:
    """Within it the model adds ``noise`` (B, L, d) to its hidden states at ``layer``.

    Raises:
        ValueError: the model has no such layer.
    """
    place = place_of(anatomy, layer)

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return with_states_in(args, kwargs, states_in(args, kwargs) + noise)

    def behind(_: nn.Module, __: Any, output: Any) -> Any:
        return with_states_out(output, states_out(output) + noise)

    if place.side == "input":
        handle = place.module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        handle = place.module.register_forward_hook(behind)
    try:
        yield
    finally:
        handle.remove()


__all__ = ["gaussian_noise", "noised"]
