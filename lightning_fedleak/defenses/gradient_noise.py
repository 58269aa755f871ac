"""The defence :class:`GradientNoise`: clip a client's whole update and add Gaussian noise to it.

With a clip this is local differential privacy of all data of a client at once. DP-SGD, which clips
the gradient of each sample instead, is in :mod:`lightning_fedleak.defenses.dpsgd`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_fedleak.defenses import noise, processes
from lightning_fedleak.defenses.base import CanaryGradient, DefenseContext, DefenseError, State
from lightning_fedleak.defenses.checks import check_number


class GradientNoise(noise.HardenedNoise):
    """Clips the 2-norm of a client's whole update, then adds Gaussian noise to every coordinate.

    The update consists of the gradients of all trainable parameters of one optimizer. With several
    optimizers, each step of each optimizer is clipped separately. A parameter whose gradient is
    None counts as zero and gets noise too, because it would be visible otherwise which parameters
    a batch reached. So noise also changes a parameter that no batch ever reaches.

    With a ``clip``, two updates that a client could send differ by at most ``2 * clip`` before the
    noise, whatever data it holds. An update that holds NaN or infinity, or whose norm overflows,
    counts as zero: only noise is sent. So each release is a Gaussian mechanism for all of a
    client's data at once, and therefore for each sample in it. :meth:`epsilon` returns the cost of
    the releases so far, in the local model, where the server sees each client's update. The
    guarantee is weak (sigma 1: epsilon 10 at delta 1e-5 after a single release), because one sample
    may fill the whole clipped update; DPSGD bounds each sample instead. Without a clip an update
    may have any norm, and no epsilon holds.

    A gate, a rule that acts when a run leaks too much, may double the noise (:meth:`harden`).
    Epsilon remains that of the first sigma, because the decision to add more depends on the data.

    Under FSDP2 the norm is that of all shards together. Shards get independent noise, and replicas
    of a shard get the same noise.

    The noise of release k on client c is a function of (secret base, c, k). The base is fresh
    entropy of the operating system in every fit and is never saved, and k continues from
    checkpoints. So no noise is used twice, neither by two clients nor after a resume. On a CPU the
    noise comes from Philox4x64 with 256 secret bits, because the state of torch's CPU generator
    could be computed from coordinates that an adversary knows. On other devices it comes from the
    device's torch generator with a 64-bit seed. Neither generator is cryptographic. Each release
    waits once for the device, to read the norm.

    Examples:
        >>> from lightning_fedleak import DefendedStrategy, GradientNoise
        >>> noise = GradientNoise(clip=1.0, sigma=5.0)
        >>> strategy = DefendedStrategy("auto", defenses=[noise])
        >>> noise.epsilon(delta=1e-5)  # nothing was released yet
        0.0

    Args:
        clip: The maximum 2-norm of the update; None for no clipping.
        sigma: The noise multiplier: the standard deviation of the noise is ``sigma * clip`` in
            every coordinate, or ``sigma`` itself if ``clip`` is None.
        seed: For tests only. The secret base is then derived from the seed. Whoever knows or
            guesses the seed can subtract the noise, and a second run adds the same noise to other
            gradients. A run that resumes from a checkpoint without this defence's state ignores the
            seed.
        max_hardenings: The number of times that a gate may double the noise; None for no limit.

    Attributes:
        notches: The number of times that a gate has doubled the noise.
        releases: The number of releases so far, earlier fits included.

    Raises:
        DefenseError: A setting is out of range. At setup: an epsilon would be accounted under
            ``"16-mixed"``, whose loss scaler skips releases depending on the data.
    """

    name = "gradient_noise"
    guarantee = (
        "against whoever sees shared updates: the norm of a client's whole update is bounded by "
        "`clip` and every coordinate carries independent Gaussian noise of `sigma * clip` that is "
        "never reused. That is local differential privacy of a client's whole data, with the "
        "epsilon that `epsilon(delta)` gives, of all releases so far. No better bound for a sample."
    )
    takes_shards = True  # it supports FSDP2, where a process holds a part of each gradient

    def __init__(
        self,
        clip: float | None,
        sigma: float,
        seed: int | None = None,
        *,
        max_hardenings: int | None = None,
    ) -> None:
        self.clip = check_number("GradientNoise: clip", clip, above=0, optional=True)
        self.sigma = check_number("GradientNoise: sigma", sigma, at_least=0)
        self.seed = seed
        self._allow_hardening(max_hardenings)
        self.releases = 0
        # The sum of 1 / sigma^2 over the releases; infinite if one had no guarantee.
        self._inverse_variance = 0.0
        if clip is None or sigma == 0 or seed is not None:
            self.guarantee = _no_guarantee(clip, sigma)
        self._seeded = seed is not None
        self._n_canaries = 0

    @property
    def standard_deviation(self) -> float:
        """Return the current standard deviation of the noise in every coordinate."""
        return self._sigma_now if self.clip is None else self._sigma_now * self.clip

    def epsilon(self, delta: float) -> float:
        """Return the epsilon of the releases so far, for replacing all data of one client.

        It is exact for Gaussian noise, also if later updates depend on earlier ones. The number of
        releases must not depend on the data. Releases before a resume count with the sigma that
        they had.

        Args:
            delta: The delta, in (0, 1).

        Returns:
            Epsilon; infinite without a clip, without noise, or with a seed, now or in one of the
            releases.

        Raises:
            ValueError: ``delta`` is out of range.
        """
        if not self._is_private or math.isinf(self._inverse_variance):
            return math.inf
        sigma = math.sqrt(1 / self._inverse_variance) / 2 if self._inverse_variance else math.inf
        return noise.gaussian_epsilon(sigma=sigma, delta=delta)

    @property
    def _is_private(self) -> bool:
        """Return whether a release under the current settings has a finite epsilon."""
        return self.clip is not None and self.sigma > 0 and not self._seeded

    def before_setup(self, context: DefenseContext) -> None:
        """Raise an error if a loss scaler decides which updates with a guarantee are released."""
        if self._is_private and context.precision == "16-mixed":
            raise DefenseError(
                "GradientNoise: the loss scaler of precision='16-mixed' skips steps depending on "
                "the data. Use 'bf16-mixed' or '32-true'."
            )

    def on_gradients(self, parameters: Sequence[nn.Parameter], context: DefenseContext) -> None:
        """Clip the update and add noise to it, in place.

        Raises:
            DefenseError: There is no clip, and the update holds NaN or infinity, or its norm
                overflows. Nothing is released.
        """
        norm = self._norm(parameters)
        scale = 1.0 if self.clip is None or norm <= self.clip else self.clip / norm
        source = self._base(context), self.releases, context.client, self.name
        self.releases += 1
        self._inverse_variance += 1 / self.sigma**2 if self._is_private else math.inf
        self._n_canaries = 0
        for index, parameter in enumerate(parameters):
            if parameter.grad is None:
                if not self.sigma:
                    continue
                parameter.grad = torch.zeros_like(parameter)
            gradient = processes.local_part(parameter.grad)
            values = gradient if gradient.dtype == torch.float64 else gradient.float()
            if scale == 0.0:  # the norm is infinite; a product would keep NaN
                values.zero_()
            elif scale != 1.0:
                values.mul_(scale)
            if self.sigma:
                shard = index + (processes.shard_number(parameter.grad) << processes.SHARD_BITS)
                noise.add_noise(*source, shard, values, self.standard_deviation)
            if values is not gradient:
                gradient.copy_(values)

    def on_canary(
        self, canary: CanaryGradient, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> CanaryGradient:
        """Clip and noise the gradient of layers that a dishonest server could add to the model.

        A monitor simulates several such additions, the games of the canary. The gradient of each
        game counts in the clipped norm as a part of the client's update. Its noise comes from a
        separate random stream, so the noise of the update does not change.

        Raises:
            DefenseError: There is no clip, and the update holds NaN or infinity, or its norm
                overflows.
        """
        norm = self._norm(parameters)
        if self.clip is not None:
            norms = torch.hypot(canary.released.norm(dim=1), canary.samples.new_tensor(norm))
            factors = self.clip / norms.clamp(min=self.clip)
            canary = canary.scaled(factors.where(norms.isfinite(), 0.0))
        if self.sigma:
            index, self._n_canaries = self._n_canaries, self._n_canaries + 1
            ids = self._base(context), self.releases, index
            key = noise.noise_key(*ids, client=context.client, name=self.name, stream="canary")
            shape, device = canary.samples.shape[1:], canary.samples.device
            standard = noise.standard_normal(key, shape, device, canary.samples.dtype)
            canary = canary.noised(standard * self.standard_deviation, self.standard_deviation)
        return canary

    def noise_std(self, context: DefenseContext) -> float:
        """Return :attr:`standard_deviation`."""
        return self.standard_deviation

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Return the number of releases, the sum of 1 / sigma^2 over them, and the notches."""
        precision = {"spent": self._inverse_variance} if self.releases else {}
        return {**super().state_dict(), "releases": self.releases, **precision}

    def load_state_dict(self, state: State) -> None:
        """Continue the counts of a checkpoint; a count that is larger here stays.

        If the state holds releases without their sigma, they may have had no noise, and epsilon is
        infinite. If it holds no count at all, this defence is new in the run, and the seed is
        ignored.
        """
        super().load_state_dict(state)
        if int(state.get("releases", 0)):
            self._inverse_variance = max(
                self._inverse_variance, float(state.get("spent", math.inf))
            )
        if "releases" in state:
            self.releases = max(self.releases, int(state["releases"]))
        else:
            self._seeded = False

    def _norm(self, parameters: Sequence[nn.Parameter]) -> float:
        """Return the 2-norm of all gradients together, and make sparse gradients dense.

        Returns:
            The norm; infinite if it is NaN or overflows, and there is a clip.

        Raises:
            DefenseError: The norm is not finite, and there is no clip.
        """
        for parameter in parameters:
            if parameter.grad is not None:
                if parameter.grad.layout != torch.strided:
                    parameter.grad = parameter.grad.to_dense()
                processes.reduce_partial(parameter)
        total = processes.global_norm([p.grad for p in parameters if p.grad is not None])
        if math.isfinite(total):
            return total
        if self.clip is None:
            raise DefenseError(
                "GradientNoise: the norm is not finite; nothing was released. Lower the learning "
                "rate, or check the loss."
            )
        return math.inf

    def _base(self, context: DefenseContext) -> bytes:
        """Return the secret base of the noise."""
        return noise.base_of(context.entropy, self.seed if self._seeded else None)


def _no_guarantee(clip: float | None, sigma: float) -> str:
    """Return the text of ``guarantee`` if nothing is guaranteed: without noise, clip or secret."""
    if sigma == 0:
        return "none: the update is clipped, but has no noise" if clip else "none: sigma is 0"
    if clip is None:
        return (
            "none: every coordinate carries independent Gaussian noise that is never reused, but "
            "without `clip` an update may have any norm, so no epsilon holds"
        )
    return "none: whoever knows or guesses `seed` can subtract the noise (for tests only)"
