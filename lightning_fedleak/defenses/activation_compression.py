"""Fewer dimensions of the hidden states at a split layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_fedleak.defenses.activations import ActivationDefense, ActivationNoise
from lightning_fedleak.defenses.base import Defense, DefenseError, State
from lightning_fedleak.defenses.checks import check_integer


class ActivationCompression(ActivationDefense):
    """Shrinks what a client of split learning sends of each text (Zheng 2023, Sect. 6.1).

    The paper names hidden embeddings that get smaller from layer to layer as a way in which a new
    backbone could leak less, and does not try it. Here it is done at one layer of a backbone as it
    is, which may then be trained with it: of each state h (d numbers) leave ``V^T h``, k numbers,
    for an orthonormal V (d, k) that is drawn at random, fixed and known to the server, which
    continues with ``V V^T h``.

    It is linear, and the gradient goes back through the projection. Numbers are computed in float32
    (float64 for such states), whatever autocast says.

    Examples:
        >>> from lightning_fedleak import ActivationCompression, DefendedStrategy
        >>> compression = ActivationCompression(layer=2, keep_dims=64)
        >>> strategy = DefendedStrategy("auto", defenses=[compression])
        >>> compression.activation_layers
        (2,)

    Args:
        layer: 0 for the input of the first block, k for the output of block k; of an
            encoder-decoder, of the encoder.
        keep_dims: dimensions that are kept.
        seed: The seed of the basis; client and server must have the same.
        anatomy: names of parts of the model that are not found, see
            :func:`~lightning_fedleak.model.anatomy.find_anatomy`.

    Raises:
        DefenseError: a setting out of range; at setup, a layer that the model does not have; in a
            forward, states of no more than ``keep_dims`` dimensions.
    """

    name = "activation_compression"
    guarantee = (
        "none: fewer numbers leave the client, but nothing bounds what they leak; measure it "
        "with an inversion attack"
    )

    def __init__(
        self, layer: int, keep_dims: int, *, seed: int = 0, anatomy: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(layer, anatomy=anatomy)
        name = "ActivationCompression: keep_dims"
        self.keep_dims = check_integer(name, keep_dims)
        self.seed = seed
        self._span: Tensor | None = None

    def check_order(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        """Raise an error where noise at the same layer comes later and fills what was left out."""
        super().check_order(before, after)
        for defense in after:
            if isinstance(defense, ActivationNoise) and defense.layer == self.layer:
                raise DefenseError(
                    f"'{defense.name}' after '{self.name}' at layer {self.layer} puts noise in "
                    "what was left out, which the server can remove again. Put "
                    f"'{defense.name}' before '{self.name}'."
                )

    def load_state_dict(self, state: State) -> None:
        """Refuse a checkpoint that was trained with principal components."""
        if "span" in state:
            raise DefenseError(
                "ActivationCompression: the checkpoint's basis is gone. Begin a new run."
            )

    def rewrite(self, states: Tensor, *, recomputed: bool, training: bool) -> Tensor:
        """Return the states that the server computes from the numbers that are sent."""
        values = states if states.dtype == torch.float64 else states.float()
        span = self._basis_for(values)
        with torch.autocast(values.device.type, enabled=False):
            return ((values @ span) @ span.T).to(states.dtype)

    def _basis_for(self, states: Tensor) -> Tensor:
        """Return V (d, k), of the dtype and device of ``states`` (B, L, d)."""
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
