"""Defences of split learning: noise on the hidden states that a client sends, and fewer dimensions.

In split learning the client runs the model up to one layer, the split layer, and sends the hidden
states there to the server, which runs the rest. The defences of this file rewrite these states:
:class:`ActivationNoise` adds Gaussian noise, :class:`ActivationCompression` projects them. Hidden
states have the shape (B, L, d): B texts of L tokens, with d numbers for each token.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_fedleak.defenses import base, noise
from lightning_fedleak.defenses.processes import SHARD_BITS
from lightning_fedleak.model.anatomy import Place, find_anatomy, place_of
from lightning_fedleak.model.model_runs import is_observed
from lightning_fedleak.model.model_state import reset_compiled


class _ActivationDefense(base.Defense):
    """A base class that rewrites the hidden states at one layer, by a forward hook on a block.

    The hook acts in every forward pass of the model: in training, in evaluation, and when the
    Trainer validates, tests or predicts without a fit. It does not act while an attack runs the
    model in place of the server (:func:`~lightning_fedleak.model.model_runs.undisturbed`). A
    training step whose forward pass did not reach the layer is an error. Under ``torch.compile``
    the graph breaks at the hook, and a model that was compiled before the fit is compiled again.

    Args:
        layer: 0 for the input of the first block, k for the output of block k. In an
            encoder-decoder the blocks are those of the encoder.
        anatomy: Arguments of :func:`~lightning_fedleak.model.anatomy.find_anatomy` that name parts
            of the model which it cannot find, such as ``{"blocks": "path.to.blocks"}``.

    Raises:
        DefenseError: ``layer`` is not an integer from 0. At setup: the model has no such layer. In
            a training step: the hidden states are not a (B, L, d) tensor of floats, or the forward
            pass did not reach the layer.
    """

    acts_in_inference = True  # the hook also acts in validation, test and prediction

    def __init__(self, layer: int, *, anatomy: Mapping[str, str] | None = None) -> None:
        self.layer = base.check_integer(f"{type(self).__name__}: layer", layer, at_least=0)
        self.activation_layers = (layer,)
        self._anatomy_names: dict[str, Any] = dict(anatomy or {})
        self._handle: RemovableHandle | None = None
        self._root: nn.Module | None = None
        self._context: base.DefenseContext | None = None
        # The number of forward passes so far, and that before the current training step.
        self._passes = self._passes_before = 0
        self._in_step = False

    def check_order(self, before: Sequence[base.Defense], after: Sequence[base.Defense]) -> None:
        """Raise an error if a per-sample defence follows: it skips steps of empty batches."""
        super().check_order(before, after)
        if per_sample := [defense.name for defense in after if defense.per_sample]:
            raise base.DefenseError(
                f"{', '.join(per_sample)} skips empty batches: put '{self.name}' after it"
            )

    @abstractmethod
    def rewrite(self, states: Tensor, *, recomputed: bool, training: bool) -> Tensor:
        """Return the states that leave the client instead, of the same shape and dtype.

        Args:
            states: (B, L, d), the hidden states at the layer.
            recomputed: Whether gradient checkpointing repeats an earlier forward pass during
                backward. The result must then equal that of the earlier pass.
            training: Whether the pass belongs to a training step, or to its backward.

        Raises:
            DefenseError: No result keeps the guarantee.
        """

    def before_setup(self, context: base.DefenseContext) -> None:
        """Find the layer, and register the hook on its block."""
        self.teardown()
        place = self._place(context.root)
        self._root, self._context = context.root, context
        reset_compiled(context.root)
        self._handle = place.on_states(self._pass)

    def on_training_step(
        self, training_step: Callable[[], Any], batch: Any, context: base.DefenseContext
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
        """Make the same check in manual optimization, where updates leave within the step."""
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

    def _place(self, root: nn.Module) -> Place:
        """Return the input or output of a block that holds the states."""
        try:
            return place_of(find_anatomy(root, **self._anatomy_names), self.layer)
        except ValueError as error:
            raise base.DefenseError(
                f"{type(self).__name__}: {error} (anatomy={{'model': 'model'}} names a part.)"
            ) from error

    def _check_passed(self) -> None:
        """Raise an error if the hook was not called in this training step."""
        if self._passes == self._passes_before:
            raise base.DefenseError(
                f"{type(self).__name__}: no hidden states passed layer {self.layer} in this step: "
                "name the blocks that run with anatomy={'blocks': 'path.to.blocks'}"
            )

    def _pass(self, states: Any) -> Tensor | None:
        """Return the rewritten states, or None to leave them unchanged; the hook calls this.

        States are rewritten in every pass, except those that an attack runs outside of a training
        step. A recomputed pass is one that gradient checkpointing repeats during backward.
        """
        if self._handle is None:
            return None
        recomputed = torch._C._current_graph_task_id() != -1  # -1: no backward is running
        training = self._in_step or recomputed
        if not training and is_observed():
            return None
        if (
            not isinstance(states, Tensor)
            or isinstance(states, DTensor)
            or states.dim() != 3
            or not states.is_floating_point()
        ):
            place = f"{self.name}: states at layer {self.layer}"
            raise base.DefenseError(f"{place} must be a whole (B, L, d) tensor of floats")
        if not recomputed:
            self._passes += 1
        return self.rewrite(states, recomputed=recomputed, training=training)


# A recomputed forward pass is matched to the latest so many passes of the step.
_MAX_FORWARDS = 4096
_N_SAMPLES = 64  # entries of hidden states in a sketch; not tuned
_MAX_STATE = 1e28  # entries are clamped to it: a sum of 1e10 of them is still finite in float32


class ActivationNoise(_ActivationDefense, noise.HardenedNoise):
    """Adds independent Gaussian noise to every number of the hidden states (Zheng 2023, Sect. 4.4).

    For the states h (B, L, d), padding included, the client sends ``h + N(0, s^2)``, with new noise
    in every forward pass. The gradient passes through unchanged, because the noise is a constant.
    The noise is drawn and added in float32 (in float64 if the states are float64), and the sum is
    rounded to the type of the states.

    **Without a clip nothing is guaranteed**, because a hidden state may have any length, and noise
    does not hide a long one. With ``clip`` each token's state is first scaled to a 2-norm of at
    most ``clip``, and the gradient includes the scaling. The state of one token in one forward pass
    is then a Gaussian mechanism, and :meth:`epsilon` returns its cost. A state that holds NaN or
    infinity, or whose norm overflows, counts as zero, and so does its gradient: only noise is sent
    for it. Every forward pass is a release, so a text that is trained on in ten epochs is sent ten
    times. The noise does not protect the gradients of the client's own layers.

    The noise of forward pass k on client c is a function of (secret base, c, k, layer), drawn by
    :mod:`~lightning_fedleak.defenses.noise`. The base is fresh entropy of the operating system in
    every fit or evaluation and is never saved, so no noise is used twice. Gradient checkpointing
    repeats a forward pass during backward, and the gradient would be wrong with different noise.
    So the repeated states are matched to those of an earlier pass, and get its noise. On a CPU,
    states without a match are an error. On other devices, whose kernels may not give the same bits
    twice, the nearest states of the step count as the match, so that a text's content cannot stop
    the run.

    Examples:
        >>> from lightning_fedleak import ActivationNoise, DefendedStrategy
        >>> noise = ActivationNoise(layer=2, sigma=4.0, clip=10.0)
        >>> strategy = DefendedStrategy("auto", defenses=[noise])
        >>> round(noise.epsilon(delta=1e-5), 2)  # of one token's state in one forward
        1.99

    Args:
        layer: 0 for the input of the first block, k for the output of block k. In an
            encoder-decoder the blocks are those of the encoder.
        sigma: The standard deviation of the noise, in units of ``clip`` if that is set, and in
            units of the states' standard deviation with ``relative``.
        relative: Whether the noise of each dimension has ``sigma`` times the standard deviation of
            the states in this dimension, over the tokens of the forward pass, padding included. It
            is a constant in the gradient. Nothing is guaranteed, because it depends on the data.
        clip: The maximum 2-norm of one token's state; None for no clipping.
        anatomy: The names of parts of the model that cannot be found automatically, see
            :func:`~lightning_fedleak.model.anatomy.find_anatomy`.
        max_hardenings: The number of times that a gate may double the noise (:meth:`harden`); None
            for no limit. A gate is a rule that acts when a run leaks too much. Epsilon is that of
            the first sigma, because the decision to add more depends on the data.

    Raises:
        DefenseError: A setting is out of range; ``relative`` is combined with ``clip`` or with a
            defence that works per sample, or meets fewer than two tokens; or the model has no such
            layer.
    """

    name = "activation_noise"

    def __init__(
        self,
        layer: int,
        sigma: float,
        relative: bool = False,
        clip: float | None = None,
        anatomy: Mapping[str, str] | None = None,
        *,
        max_hardenings: int | None = None,
    ) -> None:
        super().__init__(layer, anatomy=anatomy)
        base.check_number("ActivationNoise: sigma", sigma, at_least=0)
        base.check_number("ActivationNoise: clip", clip, above=0, optional=True)
        if relative and clip is not None:
            raise base.DefenseError("ActivationNoise: pass relative=False or clip=None")
        self._allow_hardening(max_hardenings)
        self.sigma = sigma
        self.relative = relative
        self.clip = clip
        self.guarantee = _guarantee(sigma, clip)
        self._n_forwards = {"training": 0, "inference": 0}
        self._forwards: deque[_Forward] = deque(maxlen=_MAX_FORWARDS)  # of this training step

    def check_order(self, before: Sequence[base.Defense], after: Sequence[base.Defense]) -> None:
        """Raise an error if a per-sample defence is used with relative noise.

        The scale of relative noise depends on all samples of a batch together.
        """
        super().check_order(before, after)
        if self.relative and (names := [d.name for d in (*before, *after) if d.per_sample]):
            raise base.DefenseError(
                f"ActivationNoise: {', '.join(names)} treats samples separately: use relative=False"
            )

    def epsilon(self, delta: float, *, positions: int = 1) -> float:
        """Return the epsilon of local differential privacy of the states that one pass sends.

        It holds for replacing one text of the client by any other, whatever else is in the batch.
        At layer 0 a token affects only its own state, so ``positions=1`` is the cost of one token.
        At higher layers a token affects all states after it, and in an encoder all states of the
        text. There the cost of one token, or of a whole text of n tokens, is ``positions=n``.

        Args:
            delta: The delta, in (0, 1).
            positions: The number of the text's states that may differ, padding included.

        Returns:
            Epsilon; infinite without a clip or without noise.

        Raises:
            ValueError: An argument is out of range.
        """
        base.check_integer("positions", positions, error=ValueError)
        if self.clip is None or self.sigma == 0:
            return math.inf
        return noise.gaussian_epsilon(sigma=self.sigma / (2 * math.sqrt(positions)), delta=delta)

    def on_training_step(
        self, training_step: Callable[[], Any], batch: Any, context: base.DefenseContext
    ) -> Any:
        """Forget the forward passes of the step before, and run the step."""
        self._forwards.clear()
        return super().on_training_step(training_step, batch, context)

    def rewrite(self, states: Tensor, *, recomputed: bool, training: bool) -> Tensor:
        """Return the states with noise, clipped first if there is a clip."""
        index = self._forward_index(states, recomputed, training)
        values = states if states.dtype == torch.float64 else states.float()
        if self.clip is not None:
            # Such states become zero before the norm is taken: zero times infinity would be NaN,
            # in the values and in the gradient.
            is_finite = torch.linalg.vector_norm(values.detach(), dim=-1, keepdim=True).isfinite()
            values = torch.where(is_finite, values, 0.0)
            norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
            values = values * (self.clip / norm.clamp(min=self.clip))
        if self.sigma:
            values = values + self._noise(values, index, "training" if training else "inference")
        return values.to(states.dtype)

    def teardown(self) -> None:
        """Remove the hook."""
        super().teardown()
        self._forwards.clear()

    def _forward_index(self, states: Tensor, recomputed: bool, training: bool) -> int:
        """Return the index of this forward pass among those of training, or those of inference.

        A recomputed pass has the index of the pass that it repeats.
        """
        if recomputed:
            return self._index_of_states(states, exact=states.device.type == "cpu")
        mode = "training" if training else "inference"
        index = self._n_forwards[mode]
        self._n_forwards[mode] = index + 1
        if training:
            self._forwards.append(_Forward(index, states.shape, states.dtype, _sketch(states)))
        return index

    def _index_of_states(self, states: Tensor, *, exact: bool) -> int:
        """Return the index of the pass that had these states.

        If several had, it is the latest that this backward has not yet recomputed, because backward
        goes through the passes from the last to the first.

        Args:
            states: (B, L, d), the states of the recomputation.
            exact: Whether the device gives the same numbers twice, so that states without a match
                are an error. Otherwise the nearest states count as the match.

        Raises:
            DefenseError: No pass had states of this shape or, with ``exact``, these states.
        """
        sketch, task = _sketch(states), torch._C._current_graph_task_id()
        forwards = [f for f in self._forwards if (f.shape, f.dtype) == (states.shape, states.dtype)]
        if exact:
            forwards = [f for f in forwards if torch.allclose(f.sketch, sketch, 1e-3, 1e-6)]
        if not forwards:
            raise base.DefenseError(
                "ActivationNoise: backward runs the model again with other hidden states: run both "
                f"in one step, or switch gradient checkpointing off below layer {self.layer}"
            )
        unused = [f for f in forwards if task not in f.used_in] or forwards
        nearest = min(reversed(unused), key=lambda f: float((f.sketch - sketch).abs().sum()))
        nearest.used_in.add(task)
        return nearest.index

    def _noise(self, states: Tensor, index: int, mode: str) -> Tensor:
        """Return the noise of a forward pass, of the shape and dtype of ``states``."""
        context = self._context
        assert context is not None
        source = self.layer + (context.process << SHARD_BITS)  # differs between processes
        names = {"name": self.name, "stream": f"activation {mode}"}
        key = noise.noise_key(context.entropy, index, source, client=context.client, **names)
        standard = noise.standard_normal(key, states.shape, states.device, states.dtype)
        if not self.relative:
            return standard * (self._sigma_now * (self.clip or 1.0))
        if states.shape[0] * states.shape[1] < 2:
            raise base.DefenseError(
                "ActivationNoise: a single token has no standard deviation. Use relative=False."
            )
        return standard * (self._sigma_now * states.detach().std(dim=(0, 1), correction=0))


def _guarantee(sigma: float, clip: float | None) -> str:
    """Return the text of ``guarantee``; it begins with "none" without a clip or noise."""
    if sigma == 0:
        return "none: sigma is 0"
    if clip is None:
        return "none: every number of the hidden states carries noise, which may have any size"
    return (
        "against whoever sees the hidden states that are sent: local differential privacy with the "
        "epsilon that `epsilon(delta, positions=...)` gives, for one forward; many forwards add "
        "up. None for updates of the client's own layers."
    )


@dataclass
class _Forward:
    """One forward pass of a training step.

    Attributes:
        index: The index of the pass among those of training, by which its noise is drawn.
        shape: The shape of its hidden states.
        dtype: The type of its hidden states.
        sketch: The numbers by which its hidden states are found, see :func:`_sketch`.
        used_in: The ids of the backward passes in which it was recomputed.
    """

    index: int
    shape: torch.Size
    dtype: torch.dtype
    sketch: Tensor
    used_in: set[int] = field(default_factory=set)


@torch.no_grad()
def _sketch(states: Tensor) -> Tensor:
    """Return two weighted means and some entries of hidden states (B, L, d), to compare them by."""
    # Entries are clamped so that the means are finite: the difference of infinities is NaN, and
    # no pass would be the nearest.
    flat = states.detach().reshape(-1).float().clamp(-_MAX_STATE, _MAX_STATE).nan_to_num()
    if not flat.numel():
        return flat
    rows = flat.view(states.shape[0] * states.shape[1], -1).mean(1)
    order = torch.linspace(1, 2, len(rows), device=flat.device)
    entries = flat[:: max(1, len(flat) // _N_SAMPLES)]
    return torch.cat([torch.stack([rows.mean(), (rows * order).mean()]), entries])


class ActivationCompression(_ActivationDefense):
    """Reduces the dimensions of the hidden states that a client sends (Zheng 2023, Sect. 6.1).

    The paper suggests, without an experiment, that a new model whose hidden size shrinks from layer
    to layer may leak less. Here the size is reduced at one layer of an existing model, which may
    then be trained with it. V (d, k) is an orthonormal basis of a random subspace, which is fixed
    and known to the server. For each state h of d numbers the client sends the k numbers ``V^T h``,
    and the server continues with ``V V^T h``.

    The projection is linear, and the gradient passes through it. It is computed in float32 (in
    float64 if the states are float64), also under autocast.

    Examples:
        >>> from lightning_fedleak import ActivationCompression, DefendedStrategy
        >>> compression = ActivationCompression(layer=2, keep_dims=64)
        >>> strategy = DefendedStrategy("auto", defenses=[compression])
        >>> compression.activation_layers
        (2,)

    Args:
        layer: 0 for the input of the first block, n for the output of block n. In an
            encoder-decoder the blocks are those of the encoder.
        keep_dims: k, the number of dimensions that are sent.
        seed: The seed of the basis, which client and server must share.
        anatomy: The names of parts of the model that cannot be found automatically, see
            :func:`~lightning_fedleak.model.anatomy.find_anatomy`.

    Raises:
        DefenseError: A setting is out of range. At setup: the model has no such layer.
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
        self.keep_dims = base.check_integer(name, keep_dims)
        self.seed = seed
        self._basis: Tensor | None = None

    def check_order(self, before: Sequence[base.Defense], after: Sequence[base.Defense]) -> None:
        """Raise an error if noise at the same layer follows: some of it could be removed again."""
        super().check_order(before, after)
        for defense in after:
            if isinstance(defense, ActivationNoise) and defense.layer == self.layer:
                raise base.DefenseError(
                    f"the server could remove noise after '{self.name}' at layer {self.layer}: put "
                    f"'{defense.name}' before it"
                )

    def rewrite(self, states: Tensor, *, recomputed: bool, training: bool) -> Tensor:
        """Return ``V V^T h`` for each state h, as the server computes it from the sent numbers."""
        values = states if states.dtype == torch.float64 else states.float()
        basis = self._basis_for(values)
        with torch.autocast(values.device.type, enabled=False):
            return ((values @ basis) @ basis.T).to(states.dtype)

    def _basis_for(self, states: Tensor) -> Tensor:
        """Return V (d, k), drawn at the first call, of the type and device of states (B, L, d)."""
        # Validation runs in inference mode. A basis created there could not be used in training.
        with torch.inference_mode(False):
            if self._basis is None:
                generator = torch.Generator().manual_seed(self.seed)
                shape = states.shape[-1], self.keep_dims
                matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
                self._basis = torch.linalg.qr(matrix)[0]
            if (self._basis.dtype, self._basis.device) != (states.dtype, states.device):
                self._basis = self._basis.to(states.device, states.dtype)
            return self._basis
