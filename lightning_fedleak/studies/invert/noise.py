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
from lightning_fedleak.validate import check_number


def gaussian_noise(hidden: Tensor, sigma: float, *, relative: bool, seed: int = 0) -> Tensor:
    """Return noise of the shape, dtype and device of hidden states.

    Args:
        hidden: (B, L, d).
        sigma: standard deviation; with ``relative`` in units of the standard deviation that each of
            the d dimensions has over the B * L states, else absolute, as in the paper.
        relative: whether ``sigma`` is in these units.
        seed: of the draw, which is the same for every sigma.

    Raises:
        ValueError: a sigma that is negative or not finite.
    """
    check_number("sigma", sigma, at_least=0)
    generator = torch.Generator().manual_seed(seed)
    standard = torch.randn(hidden.shape, generator=generator).to(hidden.device)
    states = hidden.detach().flatten(0, 1).float()
    unit = states.std(0) if relative else states.new_ones(())
    return (sigma * standard * unit).to(hidden.dtype)


@contextmanager
def noised(anatomy: Anatomy, layer: int, noise: Tensor) -> Iterator[None]:
    """Let the model add ``noise`` (B, L, d) to its hidden states at ``layer``, within the context.

    Raises:
        ValueError: the model has no such layer.
    """
    place = place_of(anatomy, layer)

    def on_input(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return with_states_in(args, kwargs, states_in(args, kwargs) + noise)

    def on_output(_: nn.Module, __: Any, output: Any) -> Any:
        return with_states_out(output, states_out(output) + noise)

    if place.side == "input":
        handle = place.module.register_forward_pre_hook(on_input, with_kwargs=True)
    else:
        handle = place.module.register_forward_hook(on_output)
    try:
        yield
    finally:
        handle.remove()
