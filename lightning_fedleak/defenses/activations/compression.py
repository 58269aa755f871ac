"""Sends less of the hidden states at a split layer: fewer dimensions, or no early tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fedleak.defenses.activations.base import ActivationDefense
from lightning_fedleak.defenses.activations.noise import ActivationNoise
from lightning_fedleak.defenses.base import Defense, DefenseContext, DefenseError, State
from lightning_fedleak.model.anatomy import Place
from lightning_fedleak.model.model_runs import undisturbed
from lightning_fedleak.validate import check_choice, check_integer

Basis = Literal["random", "principal"]
_ROWS_AT_ONCE = 8  # texts of one forward; not tuned, more take more memory


class ActivationCompression(ActivationDefense):
    """Shrinks what a client of split learning sends of each text (Zheng 2023, Sect. 6.1).

    The paper names two ways in which a new backbone could give less away, and tries neither: hidden
    embeddings that get smaller from layer to layer, and embeddings of early tokens that are dropped
    on the way. Both are done here at one layer of a backbone as it is, which may then be trained
    with it:

    - ``keep_dims=k``: of each state h (d numbers) leave ``V^T (h - m)``, k numbers, for an
      orthonormal V (d, k) that is fixed and known to the server, which continues with
      ``V V^T (h - m) + m``. V is drawn at random (m = 0), or spans the first principal components
      around the mean m of the states of public text.
    - ``drop_early=n``: of the first n positions nothing leaves; the server continues with zeros.
      The model's predictions there mean nothing, and neither does a loss that counts them.
      Positions are columns of the batch: with padding on the left they may be padding.

    Both are linear, and so is the gradient's way back: through the projection, and zero at dropped
    positions. Numbers are computed in float32 (float64 for such states), whatever autocast says.

    Examples:
        >>> from lightning_fedleak import ActivationCompression, DefendedStrategy
        >>> compression = ActivationCompression(layer=2, keep_dims=64)
        >>> strategy = DefendedStrategy("auto", defenses=[compression])
        >>> compression.activation_layers
        (2,)

    Args:
        layer: 0 for the input of the first block, k for the output of block k; of an
            encoder-decoder, of the encoder.
        keep_dims: dimensions that are kept, or None for all.
        drop_early: first positions that are dropped, or None for none.
        basis: of the dimensions kept, ``"random"`` or ``"principal"``.
        public_ids: for ``"principal"``, (n, L) token ids of public text without padding, with more
            than ``keep_dims`` tokens.
        seed: of the random basis; client and server must have the same.
        inference: also where no gradient is computed outside of training steps.
        anatomy: names of parts of the model that are not found, see
            :func:`~lightning_fedleak.model.anatomy.find_anatomy`.

    Raises:
        DefenseError: a setting out of range, or nothing to do; at setup, a layer that the model
            does not have; in a forward, states of no more than ``keep_dims`` dimensions or
            ``drop_early`` positions.
    """

    name = "activation_compression"
    guarantee = (
        "none: fewer numbers leave the client, but nothing bounds what they give away; measure it "
        "with an inversion attack"
    )

    def __init__(
        self,
        layer: int,
        keep_dims: int | None = None,
        drop_early: int | None = None,
        basis: Basis = "random",
        public_ids: Tensor | None = None,
        seed: int = 0,
        inference: bool = True,
        anatomy: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(layer, inference=inference, anatomy=anatomy)
        for name, number in (("keep_dims", keep_dims), ("drop_early", drop_early)):
            check_integer(
                f"ActivationCompression: {name}", number, optional=True, error=DefenseError
            )
        if keep_dims is None and drop_early is None:
            raise DefenseError(
                "ActivationCompression: nothing is left out; give keep_dims, drop_early or both"
            )
        check_choice("ActivationCompression: basis", basis, get_args(Basis), error=DefenseError)
        if keep_dims is not None and basis == "principal":
            _check_public(public_ids, keep_dims)
        self.keep_dims = keep_dims
        self.drop_early = drop_early
        self.basis: Basis = basis
        self.seed = seed
        self._public = public_ids
        self._span: Tensor | None = None
        self._mean: Tensor | None = None

    def check_order(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        """Raise an error where noise at the same layer comes later and fills what was left out."""
        super().check_order(before, after)
        for defense in after:
            if isinstance(defense, ActivationNoise) and defense.layer == self.layer:
                raise DefenseError(
                    f"'{defense.name}' after '{self.name}' at layer {self.layer} puts noise in "
                    "what was left out: nothing would be smaller, the server could remove that "
                    "noise again, and the model would train with it. Put "
                    f"'{defense.name}' before '{self.name}'."
                )

    def before_setup(self, context: DefenseContext) -> None:
        """Find the principal components, once, and hook the block."""
        if self.keep_dims is not None and self.basis == "principal" and self._span is None:
            assert self._public is not None
            anatomy, place = self._place(context.root)
            with undisturbed(anatomy) as model, torch.no_grad():
                ids = self._public.to(anatomy.device)
                self._mean, self._span = _principal(model, place, ids, self.keep_dims)
            if dist.is_initialized():
                self._mean = self._mean.to(context.device)
                self._span = self._span.to(context.device)
                for tensor in (self._mean, self._span):
                    dist.broadcast(tensor, src=0)
        super().before_setup(context)

    def rewrite(self, states: Tensor, *, recomputed: bool, training: bool) -> Tensor:
        """Return the states that the server computes from the numbers that are sent."""
        values = states if states.dtype == torch.float64 else states.float()
        if self.keep_dims is not None:
            span, mean = self._basis_of(values)
            with torch.autocast(values.device.type, enabled=False):
                values = ((values - mean) @ span) @ span.T + mean
        if self.drop_early is not None:
            length = values.shape[1]
            early = torch.arange(length, device=values.device) < self.drop_early
            values = values.masked_fill(early[:, None], 0.0)
        return values.to(states.dtype)

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Return the principal components, which a model that was trained with them needs."""
        if self.basis == "random" or self._span is None or self._mean is None:
            return {}
        return {"span": self._span.cpu(), "mean": self._mean.cpu()}

    def load_state_dict(self, state: State) -> None:
        """Continue with the components of the checkpoint."""
        if "span" not in state or self.basis == "random":
            return
        span, mean = state["span"], state["mean"]
        if not (isinstance(span, Tensor) and isinstance(mean, Tensor)) or (
            span.shape[-1] != self.keep_dims
        ):
            raise DefenseError(
                f"ActivationCompression: the checkpoint was trained with other components than "
                f"keep_dims={self.keep_dims}. Give what it was trained with."
            )
        self._span, self._mean = span, mean

    def _basis_of(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return V (d, k) and m (d,), of the dtype and device of ``states`` (B, L, d)."""
        d = states.shape[-1]
        assert self.keep_dims is not None
        # A validation runs in inference mode, whose tensors no gradient can come through later.
        with torch.inference_mode(False):
            if self._span is None or self._mean is None:
                generator = torch.Generator().manual_seed(self.seed)
                matrix = torch.randn(d, self.keep_dims, generator=generator, dtype=torch.float64)
                self._span = torch.linalg.qr(matrix)[0]
                self._mean = torch.zeros(d, dtype=torch.float64)
            if (self._span.dtype, self._span.device) != (states.dtype, states.device):
                self._span = self._span.to(states.device, states.dtype)
                self._mean = self._mean.to(states.device, states.dtype)
            return self._span, self._mean


def _check_public(ids: Tensor | None, keep_dims: int) -> None:
    usable = isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point()
    if not usable or ids is None or ids.numel() <= keep_dims:
        raise DefenseError(
            "ActivationCompression: basis='principal' needs public_ids, token ids (n, L) of public "
            f"text with more than keep_dims={keep_dims} tokens; basis='random' needs none"
        )


def _principal(model: nn.Module, place: Place, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return mean (d,) and first k principal components (d, k) of the hidden states of texts."""
    outputs: list[Tensor] = []
    handle = place.on_states(outputs.append)
    count, total, square = 0, torch.zeros(()), torch.zeros(())
    try:
        for rows in torch.split(ids, _ROWS_AT_ONCE):
            outputs.clear()
            model(input_ids=rows)
            tokens = outputs[0].flatten(0, 1).cpu().double()  # not all devices have float64
            count += len(tokens)
            total = total + tokens.sum(0)
            square = square + tokens.T @ tokens
    finally:
        handle.remove()
    mean = total / count
    _, vectors = torch.linalg.eigh(square / count - mean.outer(mean))
    return mean, vectors.flip(1)[:, :k].contiguous()
