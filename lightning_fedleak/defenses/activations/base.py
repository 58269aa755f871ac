"""What rewrites the hidden states at one layer, in every forward in which they leave the client."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_fedleak.defenses.base import Defense, DefenseContext, DefenseError
from lightning_fedleak.model.anatomy import Anatomy, Place, find_anatomy, place_of
from lightning_fedleak.model.model_runs import is_observed, reset_compiled
from lightning_fedleak.validate import check_integer


class ActivationDefense(Defense):
    """Rewrites the hidden states at one layer by a forward hook on the block.

    It acts in every forward of the model, in training, in evaluation and where the
    Trainer validates, tests or predicts without a fit; not where the model runs as the server's
    copy would (:meth:`~lightning_fedleak.model.model_runs.undisturbed`). A training step in which
    no hidden states passed the layer is refused. Under ``torch.compile`` the graph breaks at the
    hook; what was compiled before the fit is compiled again.

    Args:
        layer: 0 for the input of the first block, k for the output of block k; of an
            encoder-decoder, of the encoder.
        anatomy: arguments of :func:`~lightning_fedleak.model.anatomy.find_anatomy` that name parts
            of the model which are not found, ``{"blocks": "path.to.blocks"}`` say.

    Raises:
        DefenseError: a layer that is no number of one; at setup, one that the model does not have;
            in a forward, hidden states that are no (B, L, d) of numbers, or that do not pass there.
    """

    acts_in_inference = True

    def __init__(self, layer: int, *, anatomy: Mapping[str, str] | None = None) -> None:
        self.layer = check_integer(
            f"{type(self).__name__}: layer",
            layer,
            at_least=0,
            hint="0 for the input of the first block, k for the output of block k",
            error=DefenseError,
        )
        self.activation_layers = (layer,)
        self._anatomy_names = dict(anatomy or {})
        self._handle: RemovableHandle | None = None
        self._root: nn.Module | None = None
        self._context: DefenseContext | None = None
        self._passes = self._passes_before = 0
        self._in_step = False

    def check_order(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        """Raise an error where a per-sample defence comes later: it leaves out empty batches."""
        super().check_order(before, after)
        if late := [defense.name for defense in after if defense.per_sample]:
            raise DefenseError(
                f"{', '.join(late)} leaves out training steps of empty batches, which "
                f"{type(self).__name__} would refuse. Put '{self.name}' behind."
            )

    @abstractmethod
    def rewrite(self, states: Tensor, *, recomputed: bool, training: bool) -> Tensor:
        """Return what leaves the client in place of ``states``, of the same shape and dtype.

        Args:
            states: (B, L, d).
            recomputed: a checkpoint runs a forward again in backward: the result must be that of
                the first time.
            training: within a training step, or its backward.

        Raises:
            DefenseError: nothing that could leave holds the guarantee.
        """

    def before_setup(self, context: DefenseContext) -> None:
        """Find the layer and hook its block."""
        self.teardown()
        _, place = self._place(context.root)
        self._root, self._context = context.root, context
        reset_compiled(context.root)
        self._handle = place.on_states(self._pass)

    def on_training_step(
        self, training_step: Callable[[], Any], batch: Any, context: DefenseContext
    ) -> Any:
        """Run the step and check that hidden states passed the layer."""
        self._passes_before = self._passes
        self._in_step = True
        try:
            output = training_step()
        finally:
            self._in_step = False
        if output is not None:
            self._check_passed()
        return output

    def before_release(self) -> None:
        """Check the same in manual optimization, where the update leaves within the step."""
        if self._in_step:
            self._check_passed()

    def teardown(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._root is not None:
            reset_compiled(self._root)
        self._root = self._context = None

    def _place(self, root: nn.Module) -> tuple[Anatomy, Place]:
        """Return the model's anatomy, and where the states of the layer pass."""
        names: Mapping[str, Any] = self._anatomy_names
        try:
            anatomy = find_anatomy(root, **names)
            return anatomy, place_of(anatomy, self.layer)
        except ValueError as error:
            raise DefenseError(
                f"{type(self).__name__}: {error} (anatomy={{'model': 'model'}} names a part.)"
            ) from error

    def _check_passed(self) -> None:
        if self._passes == self._passes_before:
            raise DefenseError(
                f"{type(self).__name__}: no hidden states passed layer {self.layer} in this "
                "training step, so the model ran without the defence. Name the blocks that it "
                "calls with anatomy={'blocks': 'path.to.blocks'}."
            )

    def _pass(self, states: Any) -> Tensor | None:
        """Return what continues in place of ``states``; None for ``states`` themselves."""
        if self._handle is None:
            return None
        recomputed = torch._C._current_graph_task_id() != -1
        training = self._in_step or recomputed
        if not training and is_observed():
            return None
        if (
            not isinstance(states, Tensor)
            or isinstance(states, DTensor)
            or states.dim() != 3
            or not states.is_floating_point()
        ):
            form = f"{tuple(states.shape)} {states.dtype}" if isinstance(states, Tensor) else ""
            raise DefenseError(
                f"{type(self).__name__}: hidden states at layer {self.layer} should be a whole "
                f"(B, L, d) tensor of floats; found {type(states).__name__} {form}"
            )
        if not recomputed:
            self._passes += 1
        return self.rewrite(states, recomputed=recomputed, training=training)
