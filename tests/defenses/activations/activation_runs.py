"""A tiny model with a defence on its hidden states, run outside of a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_fedleak.defenses import Defense
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.anatomy.blocks import (
    place_of,
    states_in,
    states_out,
    with_states_in,
    with_states_out,
)
from tests.helpers.inputs import context
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.models import own_rng


class Passing:
    """Records what comes to a layer: ``local`` before the hooks that are there, ``shared`` after.

    ``local`` must be made before the defence's ``before_setup``, ``shared`` after it.
    """

    def __init__(self, model: nn.Module, layer: int) -> None:
        self.seen: list[Tensor] = []
        place = place_of(find_anatomy(model), layer)

        def entering(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.seen.append(states_in(args, kwargs).detach().clone())

        def leaving(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.seen.append(states_out(output).detach().clone())

        if place.side == "input":
            place.module.register_forward_pre_hook(entering, with_kwargs=True)
        else:
            place.module.register_forward_hook(leaving)


def rewriting(model: nn.Module, layer: int, rewrite: Callable[[Tensor], Tensor]) -> None:
    """The model with hidden states rewritten by a plain function: an independent reference."""
    place = place_of(find_anatomy(model), layer)
    forward = place.module.forward

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if place.side == "input":
            args, kwargs = with_states_in(args, kwargs, rewrite(states_in(args, kwargs)))
            return forward(*args, **kwargs)
        output = forward(*args, **kwargs)
        return with_states_out(output, rewrite(states_out(output)))

    place.module.forward = replaced


def step(model: nn.Module, *batches: dict[str, Tensor], defense: Defense | None = None) -> list:
    """Gradients after one training step whose loss is the sum over ``batches``, seed 5."""
    model.zero_grad()

    def forwards() -> Tensor:
        with own_rng(5):
            return sum(model(**inputs).loss for inputs in batches)

    if defense is None:
        loss = forwards()
    else:
        where = context(CausalLMModule(model), clients=2)
        loss = defense.on_training_step(forwards, batches, where)
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """Largest difference relative to the largest number of ``b``."""
    pairs = list(zip(a, b, strict=True))
    largest = max(float(y.abs().max()) for _, y in pairs)
    return max(float((x - y).abs().max()) for x, y in pairs) / largest
