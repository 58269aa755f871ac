"""Sends less of the hidden states at a split layer: fewer dimensions, or no early tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_fedleak.defenses.activations.base import ActivationDefense
from lightning_fedleak.defenses.activations.noise import ActivationNoise
from lightning_fedleak.defenses.base import Defense, DefenseError, State, refuse
from lightning_fedleak.validate import check_integer


class ActivationCompression(ActivationDefense):
    """Shrinks what a client of split learning sends of each text (Zheng 2023, Sect. 6.1).

    The paper names two ways in which a new backbone could give less away, and tries neither: hidden
    embeddings that get smaller from layer to layer, and embeddings of early tokens that are dropped
    on the way. Both are done here at one layer of a backbone as it is, which may then be trained
    with it:

    - ``keep_dims=k``: of each state h (d numbers) leave ``V^T h``, k numbers, for an orthonormal
      V (d, k) that is drawn at random, fixed and known to the server, which continues with
      ``V V^T h``.
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
        seed: of the basis; client and server must have the same.
        inference: also where no gradient is computed outside of training steps.
        anatomy: names of parts of the model that are not found, see
            :func:`~lightning_fedleak.model.anatomy.find_anatomy`.

    Raises:
        DefenseError: a setting out of range, or nothing to do; at setup, a layer that the model
            does not have; in a forward, states of no more than ``keep_dims`` dimensions or
            ``drop_early`` positions; a checkpoint that was trained with principal components.
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
        self.keep_dims = keep_dims
        self.drop_early = drop_early
        self.seed = seed
        self._span: Tensor | None = None

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

    def rewrite(self, states: Tensor, *, recomputed: bool, training: bool) -> Tensor:
        """Return the states that the server computes from the numbers that are sent."""
        values = states if states.dtype == torch.float64 else states.float()
        if self.keep_dims is not None:
            span = self._basis_for(values)
            with torch.autocast(values.device.type, enabled=False):
                values = (values @ span) @ span.T
        if self.drop_early is not None:
            length = values.shape[1]
            early = torch.arange(length, device=values.device) < self.drop_early
            values = values.masked_fill(early[:, None], 0.0)
        return values.to(states.dtype)

    def load_state_dict(self, state: State) -> None:
        """Refuse a checkpoint that was trained with principal components."""
        message = "the principal basis of the checkpoint is gone. Begin a new run."
        refuse("ActivationCompression: ", {message: "span" in state})

    def _basis_for(self, states: Tensor) -> Tensor:
        """Return V (d, k), of the dtype and device of ``states`` (B, L, d)."""
        assert self.keep_dims is not None
        # A validation runs in inference mode, whose tensors no gradient can come through later.
        with torch.inference_mode(False):
            if self._span is None:
                generator = torch.Generator().manual_seed(self.seed)
                shape = states.shape[-1], self.keep_dims
                matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
                self._span = torch.linalg.qr(matrix)[0]
            if (self._span.dtype, self._span.device) != (states.dtype, states.device):
                self._span = self._span.to(states.device, states.dtype)
            return self._span
