"""Defences that rewrite the hidden states at a split layer: noise, and fewer dimensions."""

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

from lightning_fedleak.defenses import noise
from lightning_fedleak.defenses.base import Defense, DefenseContext, DefenseError, State
from lightning_fedleak.defenses.checks import check_integer, check_number
from lightning_fedleak.defenses.processes import SHARD_BITS
from lightning_fedleak.model.anatomy import Anatomy, Place, find_anatomy, place_of
from lightning_fedleak.model.model_runs import is_observed, reset_compiled


class _ActivationDefense(Defense):
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
        hint = "0 for the input of the first block, k for the output of block k"
        self.layer = check_integer(f"{type(self).__name__}: layer", layer, at_least=0, hint=hint)
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


_REMEMBERED = 4096  # forwards of one step that a recomputation may repeat; older ones are refused
_SAMPLES = 64  # entries that distinguish hidden states; not tuned
_MAX_STATE = 1e28  # limit of a state's numbers, of which 10 billion add up in float32


class ActivationNoise(_ActivationDefense, noise.HardenedNoise):
    """Adds independent Gaussian noise to every number of the hidden states (Zheng 2023, Sect. 4.4).

    ``h + N(0, s^2)`` for the states h (B, L, d) that a client of split learning sends, padding
    included, drawn again in every forward. The noise is a constant to the gradient, which passes
    through. Noise is drawn and added in float32 (float64 for such states) and rounded with the sum.

    **Without a clip nothing is guaranteed**: nothing bounds a hidden state, so that noise
    does not hide a long one. With ``clip`` each token's state is first scaled to a 2-norm of at
    most ``clip`` (its gradient goes through the scaling), and the states of one token in one
    forward are a Gaussian mechanism: :meth:`epsilon`. A state that holds NaN or infinity, or whose
    norm overflows, counts as zero, and so does its gradient: what is sent of it is noise alone.
    Every forward is a release: a text that is trained on in ten epochs is sent ten times. The
    gradients of the client's own layers are another matter, which no activation noise covers.

    Noise of forward k on client c is a function of (secret base, c, k, layer), by the generators
    of :mod:`~lightning_fedleak.defenses.noise`. The base is fresh entropy of the operating system
    in every fit or evaluation and is never saved, so that no noise is used twice. Where gradient
    checkpointing runs a forward again, the states are recognised and get the noise of the first
    time, else the gradient would be wrong. On a CPU states that are not recognised are refused. The
    kernels of other devices may not repeat themselves to the last bit: there the nearest states of
    the step count, so that no text decides whether a run goes on.

    Examples:
        >>> from lightning_fedleak import ActivationNoise, DefendedStrategy
        >>> noise = ActivationNoise(layer=2, sigma=4.0, clip=10.0)
        >>> strategy = DefendedStrategy("auto", defenses=[noise])
        >>> round(noise.epsilon(delta=1e-5), 2)  # of one token's state in one forward
        1.99

    Args:
        layer: 0 for the input of the first block, k for the output of block k; of an
            encoder-decoder, of the encoder.
        sigma: standard deviation of the noise; with ``clip`` in units of it, with ``relative`` in
            units of the states' own.
        relative: the standard deviation of a dimension is ``sigma`` times that of the states in
            this dimension over the tokens of the forward, padding included, taken as a constant in
            the gradient. It depends on the data, and with it what the noise hides: no guarantee.
        clip: largest 2-norm of one token's state, or None for no clipping.
        anatomy: names of parts of the model that are not found, see
            :func:`~lightning_fedleak.model.anatomy.find_anatomy`.
        max_hardenings: how often a gate may double the noise (:meth:`harden`); None for no limit.
            Epsilon counts the first sigma: how much was added depended on the data.

    Raises:
        DefenseError: a setting out of range; ``relative`` with ``clip``, with a defence that works
            per sample, or on fewer than two tokens; a layer that the model does not have.
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
        hint = "None is for no clipping"
        check_number("ActivationNoise: sigma", sigma, at_least=0)
        check_number("ActivationNoise: clip", clip, above=0, optional=True, hint=hint)
        if relative and clip is not None:
            raise DefenseError(
                "ActivationNoise: relative noise guarantees nothing, whatever the clip. Give "
                "relative=False or clip=None."
            )
        self._allow_hardening(max_hardenings)
        self.sigma = sigma
        self.relative = relative
        self.clip = clip
        self.guarantee = _guarantee(sigma, clip)
        self._forwards = {"training": 0, "inference": 0}
        self._remembered = _Remembered()

    def check_order(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        """Raise an error for relative noise, one scale for all samples, beside per-sample
        defences.
        """
        super().check_order(before, after)
        if self.relative and (names := [d.name for d in (*before, *after) if d.per_sample]):
            raise DefenseError(
                f"ActivationNoise(relative=True) scales noise by all samples of a batch, which "
                f"{', '.join(names)} must keep apart. Use relative=False."
            )

    def epsilon(self, delta: float, *, positions: int = 1) -> float:
        """Return epsilon of what one forward sends of a text, in the local model.

        For any two texts of the client's, whatever else is in the batch. At layer 0 a token moves
        only its own state, so that ``positions=1`` bounds what is sent of one token. Above, a
        token moves all states after it (all at once in an encoder): for one token of a text of n,
        or for the whole text, it is ``positions=n``.

        Args:
            delta: in (0, 1).
            positions: how many states of the text differ, padding included.

        Returns:
            Epsilon; infinite without a clip or without noise.

        Raises:
            ValueError: an argument out of range.
        """
        check_integer("positions", positions, error=ValueError)
        if self.clip is None or self.sigma == 0:
            return math.inf
        return noise.gaussian_epsilon(sigma=self.sigma / (2 * math.sqrt(positions)), delta=delta)

    def on_training_step(
        self, training_step: Callable[[], Any], batch: Any, context: DefenseContext
    ) -> Any:
        """Run the step; forwards of earlier steps are forgotten."""
        self._remembered.clear()
        return super().on_training_step(training_step, batch, context)

    def rewrite(self, states: Tensor, *, recomputed: bool, training: bool) -> Tensor:
        """Return the states with noise."""
        number = self._number(states, recomputed, training)
        values = states if states.dtype == torch.float64 else states.float()
        if self.clip is not None:
            # Before the norm: zero times infinity is NaN, here and in the gradient.
            counts = torch.linalg.vector_norm(values.detach(), dim=-1, keepdim=True).isfinite()
            values = torch.where(counts, values, 0.0)
            norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
            values = values * (self.clip / norm.clamp(min=self.clip))
        if self.sigma:
            values = values + self._noise(values, number, "training" if training else "inference")
        return values.to(states.dtype)

    def teardown(self) -> None:
        """Remove the hook."""
        super().teardown()
        self._remembered.clear()

    def _number(self, states: Tensor, recomputed: bool, training: bool) -> int:
        """Return the number of this forward among its kind; a recomputation has that of the
        first.
        """
        if recomputed:
            return self._remembered.find(states, self.layer, exact=states.device.type == "cpu")
        kind = "training" if training else "inference"
        number = self._forwards[kind]
        self._forwards[kind] = number + 1
        if training:
            self._remembered.add(number, states)
        return number

    def _noise(self, states: Tensor, number: int, kind: str) -> Tensor:
        context = self._context
        assert context is not None
        place = self.layer + (context.process << SHARD_BITS)
        names = {"name": self.name, "stream": f"activation {kind}"}
        key = noise.noise_key(context.entropy, number, place, client=context.client, **names)
        standard = noise.standard_normal(key, states.shape, states.device, states.dtype)
        if not self.relative:
            return standard * (self._sigma_now * (self.clip or 1.0))
        if states.shape[0] * states.shape[1] < 2:
            raise DefenseError(
                "ActivationNoise: one token alone has no standard deviation. Use relative=False."
            )
        return standard * (self._sigma_now * states.detach().std(dim=(0, 1), correction=0))


def _guarantee(sigma: float, clip: float | None) -> str:
    if sigma == 0:
        return "none: sigma is 0"
    if clip is None:
        return "none: every number of the hidden states carries noise, but nothing bounds them"
    return (
        "against whoever sees the hidden states that are sent: local differential privacy with the "
        "epsilon that `epsilon(delta, positions=...)` gives, for one forward; many forwards add "
        "up. None for updates of the client's own layers."
    )


@dataclass
class _Forward:
    """What is remembered of one forward."""

    number: int
    shape: torch.Size
    dtype: torch.dtype
    marks: Tensor
    used_in: set[int] = field(default_factory=set)


class _Remembered:
    """The forwards of this training step, to be recognised by their hidden states."""

    def __init__(self) -> None:
        self._forwards: deque[_Forward] = deque(maxlen=_REMEMBERED)

    def clear(self) -> None:
        self._forwards.clear()

    def add(self, number: int, states: Tensor) -> None:
        self._forwards.append(_Forward(number, states.shape, states.dtype, _marks(states)))

    def find(self, states: Tensor, layer: int, *, exact: bool) -> int:
        """Return the number of the forward that had these states; of several, of the latest.

        That is the order in which backward comes to them.

        Args:
            states: The states of the recomputation.
            layer: where they pass, for the message.
            exact: whether kernels repeat themselves, so that other states are a mistake. Otherwise
                the nearest states count, whatever they hold.

        Raises:
            DefenseError: no forward had states of this shape or, with ``exact``, these states.
        """
        marks, task = _marks(states), torch._C._current_graph_task_id()
        forwards = [f for f in self._forwards if (f.shape, f.dtype) == (states.shape, states.dtype)]
        if exact:
            forwards = [f for f in forwards if torch.allclose(f.marks, marks, 1e-3, 1e-6)]
        if not forwards:
            raise DefenseError(
                f"ActivationNoise: backward runs the model again, and its hidden states at layer "
                f"{layer} are not those of one forward of this training step. Run both within one "
                "step, or switch gradient checkpointing off below the layer."
            )
        unused = [f for f in forwards if task not in f.used_in] or forwards
        nearest = min(reversed(unused), key=lambda f: float((f.marks - marks).abs().sum()))
        nearest.used_in.add(task)
        return nearest.number


@torch.no_grad()
def _marks(states: Tensor) -> Tensor:
    """Return a few numbers that distinguish hidden states (B, L, d): sums, and some entries."""
    # Bounded, so that no sum of them overflows: infinity less infinity would be near nothing.
    flat = states.detach().reshape(-1).float().clamp(-_MAX_STATE, _MAX_STATE).nan_to_num()
    if not flat.numel():
        return flat
    rows = flat.view(states.shape[0] * states.shape[1], -1).mean(1)
    order = torch.linspace(1, 2, len(rows), device=flat.device)
    entries = flat[:: max(1, len(flat) // _SAMPLES)]
    return torch.cat([torch.stack([rows.mean(), (rows * order).mean()]), entries])


class ActivationCompression(_ActivationDefense):
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
        seed: of the basis; client and server must have the same.
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
