"""Compress each tensor of an update before the client sends it, as federations do to save traffic.

Compression keeps fewer entries, fewer bits or fewer directions of a tensor. It is no protection.
:class:`GradientCompression` is a ``Defense`` only so that it acts on updates in the same place.
"""

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
    check_choice,
    check_integer,
    check_number,
)
from lightning_fedleak.model.snapshots import Compression, Method, compression_error, low_rank

_RESIDUAL, _FACTOR = "residual/", "factor/"  # prefixes of the names of tensors in `memory`


class GradientCompression(Defense):
    """Compresses each tensor of an update that a client sends.

    It gives no epsilon, and attacks that know the compression take it into account. It exists so
    that the leakage of a run with compression can be measured. The methods:

    - ``"topk"``: the entries of largest absolute value are sent, a share of all; the others are
      zero (Aji & Heafield 2017, *Sparse communication for distributed gradient descent*).
    - ``"int8"``, ``"int4"``: entries are rounded to 255 or 15 evenly spaced values between minus
      and plus the largest absolute value.
    - ``"sign"``: the sign of each entry times the mean absolute value (Karimireddy et al. 2019,
      *Error feedback fixes SignSGD*).
    - ``"low_rank"``: a product of two thin matrices, the factors (PowerSGD, Vogels et al. 2019,
      algorithm 1, within one client: factors are not averaged over clients). Vectors, and matrices
      with at most ``rank`` rows or columns, are sent unchanged.

    With error feedback (Seide et al. 2014) a client adds to each update the residual: the part of
    earlier updates that compression has not sent. So one step sends a part of an update, and later
    steps the rest. A monitor then attacks the update *before* compression. Its metrics describe
    everything that is sent sooner or later, and compression does not lower them. If compressed
    updates of several clients are averaged, the metrics of the aggregate are *unknown*.

    It must act after every other defence that rewrites gradients, also after
    :class:`~lightning_fedleak.DPSGD`, so that the residual holds values with noise. A residual
    without noise would carry examples into steps whose batch they are not in, and no accountant
    covers that. Any other order is an error.

    A checkpoint holds the residuals and factors of one client. If each process is a client, it
    holds none, because only the first process saves it: a resumed run begins without residuals.

    Examples:
        >>> from lightning_fedleak import DefendedStrategy, GradientCompression
        >>> compression = GradientCompression("topk", share=0.01)
        >>> strategy = DefendedStrategy("auto", defenses=[compression])
        >>> compression.guarantee[:4]
        'none'

    Args:
        method: One of the methods above.
        share: The share of a tensor's entries that ``"topk"`` sends, in (0, 1].
        rank: The rank of the product of ``"low_rank"``.
        error_feedback: Whether to add the residual of earlier updates to each update.

    Attributes:
        memory: The residuals and the right factors, by ``"residual/"`` or ``"factor/"`` and the
            name of the tensor.

    Raises:
        DefenseError: A setting is out of range. In a step: a gradient is sparse or not finite.
    """

    name = "gradient_compression"
    guarantee = (
        "none: the sent values are computed from the data without noise. It has no epsilon, and "
        "attacks that know the compression take it into account"
    )

    def __init__(
        self, method: Method, *, share: float = 0.1, rank: int = 4, error_feedback: bool = True
    ) -> None:
        name = "GradientCompression: "
        self.method: Method = check_choice(f"{name}method", method, get_args(Method))
        self.share = check_number(f"{name}share", share, above=0, at_most=1)
        self.rank = check_integer(f"{name}rank", rank)
        self._compression = Compression(self.method, self.share, self.rank)
        self.error_feedback = error_feedback
        self.memory: dict[str, Tensor] = {}
        self._clients = 1

    @property
    def compression(self) -> Compression:
        """Return the method and its setting, which attacks may use."""
        return self._compression

    @property
    def defers(self) -> bool:
        """Return whether the part that is not sent now is sent in later updates."""
        return self.error_feedback

    def check_order(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        """Raise an error if another defence would rewrite gradients after this one."""
        super().check_order(before, after)
        if later := [d.name for d in after if type(d).on_gradients is not Defense.on_gradients]:
            raise DefenseError(
                f"put '{self.name}' after {', '.join(later)}, because its residual would carry "
                "undefended values into later steps"
            )

    def before_setup(self, context: DefenseContext) -> None:
        """Store the number of clients."""
        self._clients = context.clients

    def on_gradients(self, parameters: Sequence[nn.Parameter], context: DefenseContext) -> None:
        """Replace each gradient by the tensor that the server decompresses.

        Raises:
            DefenseError: A gradient is sparse or not finite.
        """
        names = {id(p): name for name, p in context.root.named_parameters()}
        named = {names.get(id(p), f"{i}"): p for i, p in enumerate(parameters)}
        for name, parameter in named.items():
            if parameter.grad is None and _RESIDUAL + name in self.memory:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise DefenseError(f"GradientCompression: build '{name}' with sparse=False")
        gradients = {n: p.grad for n, p in named.items() if p.grad is not None}
        for name, sent in self.send(gradients).items():
            gradients[name].copy_(sent)

    @torch.no_grad()
    def send(self, update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that the server decompresses, and store residuals and factors.

        Args:
            update: The tensors by name. Each is compressed separately.

        Raises:
            DefenseError: A tensor is not finite. Nothing is stored then.
        """
        sent, memory = {}, {}
        for name, tensor in update.items():
            values = tensor if tensor.dtype == torch.float64 else tensor.float()
            if self.error_feedback and _RESIDUAL + name in self.memory:
                values = values + self.memory[_RESIDUAL + name].to(values)
            if not bool(values.isfinite().all()):
                raise DefenseError(
                    f"GradientCompression: '{name}' holds NaN or infinity; nothing was released. "
                    "Lower the learning rate, or check the loss."
                )
            if self._compression.factors(values):
                factor = self.memory.get(_FACTOR + name)
                reduced, memory[_FACTOR + name] = low_rank(values, self.rank, factor)
            else:
                reduced = self._compression.reduce(values)
            sent[name] = reduced.to(tensor.dtype)
            if self.error_feedback:
                memory[_RESIDUAL + name] = values - sent[name].to(values.dtype)
        self.memory |= memory
        return sent

    def on_canary(
        self, canary: CanaryGradient, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> CanaryGradient:
        """Compress the gradient of layers that a dishonest server could add to the model.

        A monitor simulates several such additions, the games of the canary. The gradient of each
        game is compressed as one tensor. With error feedback it is unchanged, because all of it is
        sent sooner or later.
        """
        if self.error_feedback:
            return canary
        released = canary.released
        sent = torch.stack([self._compression.reduce(game) for game in released])
        errors = [compression_error(game, self.method) for game in sent]
        error_std = math.sqrt(sum(error**2 for error in errors) / len(errors))
        return replace(
            canary,
            noise=sent - canary.samples.sum(0),
            noise_std=math.hypot(canary.noise_std, error_std),  # to an attack the error is noise
        )

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Return the residuals and factors; nothing if the run has several clients."""
        return {} if self._clients > 1 else {n: t.clone() for n, t in self.memory.items()}

    def load_state_dict(self, state: State) -> None:
        """Continue with the residuals and factors of a checkpoint."""
        self.memory = {n: t.clone() for n, t in state.items() if isinstance(t, Tensor)}
