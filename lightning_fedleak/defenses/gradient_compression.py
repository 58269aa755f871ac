"""Compresses what a client sends, tensor by tensor: fewer entries, fewer bits, fewer directions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor, nn

from lightning_fedleak.defenses.base import (
    CanaryGradient,
    Defense,
    DefenseContext,
    DefenseError,
    State,
)
from lightning_fedleak.defenses.checks import check_choice, check_integer, check_number
from lightning_fedleak.model.compression import Compression, Method, compression_error, low_rank

_RESIDUAL, _FACTOR = "residual/", "factor/"


class GradientCompression(Defense):
    """Compresses each tensor that leaves the client, as federations do to save traffic.

    It is no protection: it has no epsilon, and attacks that know of it read through it. It is here
    so that a run that compresses is measured as it is. The methods:

    - ``"topk"``: the share of entries that are largest in size; the others are zero (Aji &
      Heafield 2017, *Sparse communication for distributed gradient descent*).
    - ``"int8"``, ``"int4"``: 255 or 15 evenly spaced values up to the largest entry.
    - ``"sign"``: signs, times the mean size (Karimireddy et al. 2019, *Error feedback fixes
      SignSGD*).
    - ``"low_rank"``: the product of two factors (PowerSGD, Vogels et al. 2019, algorithm 1, by each
      client alone: no client's factors are averaged with another's). Vectors, and matrices with at
      most ``rank`` rows or columns, leave as they are.

    With error feedback (Seide et al. 2014) a client adds to each update what compression left out
    of the ones before. So all of an update leaves in time, and one step shows a part. A monitor
    then reads the update *before* compression: its numbers describe all that leaves sooner or
    later, and compression never lowers them. Where several clients' compressed updates
    are averaged, the aggregate is *unknown*.

    It acts after every other defence of gradients, :class:`~lightning_fedleak.DPSGD` too. The
    residual then holds noised values. Any other order is refused: a residual without noise would
    carry examples into steps for which they were not drawn, which no account covers.

    Residuals and factors are in the checkpoint. Where each process is a client the checkpoint is
    the first one's and holds none: a resumed run begins without residuals.

    Examples:
        >>> from lightning_fedleak import DefendedStrategy, GradientCompression
        >>> compression = GradientCompression("topk", share=0.01)
        >>> strategy = DefendedStrategy("auto", defenses=[compression])
        >>> compression.guarantee[:4]
        'none'

    Args:
        method: one of those above.
        share: The share of a tensor's entries that ``"topk"`` keeps.
        rank: The rank of ``"low_rank"``.
        error_feedback: add to each update what was left out of earlier ones.

    Attributes:
        memory: residuals and factors by the names of their tensors.

    Raises:
        DefenseError: a setting out of range; in a step, a gradient that is sparse or not finite.
    """

    name = "gradient_compression"
    guarantee = (
        "none: what is sent is computed from the data without noise. It has no epsilon, and "
        "attacks that know of the compression read through it"
    )

    def __init__(
        self, method: Method, *, share: float = 0.1, rank: int = 4, error_feedback: bool = True
    ) -> None:
        name = "GradientCompression: "
        self.method: Method = check_choice(f"{name}method", method, get_args(Method))
        self.share = check_number(f"{name}share", share, above=0, at_most=1)
        self.rank = check_integer(f"{name}rank", rank)
        self._rule = Compression(self.method, self.share, self.rank)
        self.error_feedback = error_feedback
        self.memory: dict[str, Tensor] = {}
        self._clients = 1

    @property
    def compression(self) -> Compression:
        """Return the method and its setting, which attacks know."""
        return self._rule

    @property
    def defers(self) -> bool:
        """Return whether what is left out now leaves later."""
        return self.error_feedback

    def check_order(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        """Raise an error where another defence of gradients would act behind this one."""
        super().check_order(before, after)
        if late := [d.name for d in after if type(d).on_gradients is not Defense.on_gradients]:
            raise DefenseError(
                f"GradientCompression acts before {', '.join(late)}: its residual would carry "
                f"undefended values into later steps. Put '{self.name}' last among the defenses of "
                "gradients."
            )

    def before_setup(self, context: DefenseContext) -> None:
        """Note how many clients there are."""
        self._clients = context.clients

    def on_gradients(self, parameters: Sequence[nn.Parameter], context: DefenseContext) -> None:
        """Replace each gradient by the value that the server decompresses."""
        names = {id(p): name for name, p in context.root.named_parameters()}
        named = {names.get(id(p), f"{i}"): p for i, p in enumerate(parameters)}
        for name, parameter in named.items():
            if parameter.grad is None and _RESIDUAL + name in self.memory:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise DefenseError(
                    f"GradientCompression: the gradient of '{name}' is sparse. Build the embedding "
                    "with sparse=False."
                )
        gradients = {n: p.grad for n, p in named.items() if p.grad is not None}
        for name, sent in self.send(gradients).items():
            gradients[name].copy_(sent)

    @torch.no_grad()
    def send(self, update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what leaves of an update, and remember what does not.

        Args:
            update: tensors by name, which are compressed one by one.

        Raises:
            DefenseError: one is not finite; nothing is remembered then.
        """
        sent, memory = {}, {}
        for name, tensor in update.items():
            values = tensor if tensor.dtype == torch.float64 else tensor.float()
            if self.error_feedback and _RESIDUAL + name in self.memory:
                values = values + self.memory[_RESIDUAL + name].to(values)
            if not bool(values.isfinite().all()):
                raise DefenseError(
                    f"GradientCompression: '{name}' holds NaN or infinity; the update was not "
                    "released. Lower the learning rate, or check the loss."
                )
            if self._rule.factors(values):
                factor = self.memory.get(_FACTOR + name)
                reduced, memory[_FACTOR + name] = low_rank(values, self.rank, factor)
            else:
                reduced = self._rule.reduce(values)
            sent[name] = reduced.to(tensor.dtype)
            if self.error_feedback:
                memory[_RESIDUAL + name] = values - sent[name].to(values.dtype)
        self.memory |= memory
        return sent

    def on_canary(
        self, canary: CanaryGradient, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> CanaryGradient:
        """Compress each game's numbers as a tensor; with error feedback they leave unchanged."""
        if self.error_feedback:
            return canary
        released = canary.released
        sent = torch.stack([self._rule.reduce(game) for game in released])
        errors = [compression_error(game, self.method) for game in sent]
        level = math.sqrt(sum(error**2 for error in errors) / len(errors))
        return replace(
            canary,
            noise=sent - canary.samples.sum(0),
            noise_std=math.hypot(canary.noise_std, level),  # an adversary sees the error as noise
        )

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Return residuals and factors; none where each process is a client."""
        return {} if self._clients > 1 else {n: t.clone() for n, t in self.memory.items()}

    def load_state_dict(self, state: State) -> None:
        """Continue with residuals and factors of a checkpoint."""
        self.memory = {n: t.clone() for n, t in state.items() if isinstance(t, Tensor)}
