"""Gaussian noise that is never used twice, a check of its size, and its epsilon.

Noise is a function of a secret base (random bytes of a fit), the client, the index of the release
and the index of the tensor. :func:`noise_key` hashes them to the key of a random stream, and
:func:`standard_normal` and :func:`add_noise` draw from it. :class:`NoiseGauge` measures the noise
that was added. :class:`HardenedNoise` is the base of defences whose noise a gate, a rule that acts
when a run leaks too much, may increase. :func:`gaussian_epsilon` returns the privacy cost.

The defence :class:`GradientNoise`: clip a client's whole update and add Gaussian noise to it.

With a clip this is local differential privacy of all data of a client at once. DP-SGD, which clips
the gradient of each sample instead, is in :mod:`lightning_fedleak.defenses.dpsgd`.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import log_ndtr
from torch import Tensor, nn

from lightning_fedleak import validate
from lightning_fedleak.defenses import processes
from lightning_fedleak.defenses.base import (
    CanaryGradient,
    Defense,
    DefenseContext,
    DefenseError,
    State,
    check_integer,
    check_number,
)

GAUGED = 1 << 16  # coordinates of each parameter whose noise is measured: its std within 2%
MIN_GAUGED = 50  # coordinates; with fewer, the variance of correct noise often looks wrong
MIN_RELATIVE_NOISE = 1e-4  # std over a sum's largest entry; below it, float32 rounds noise away
HARDEN_FACTOR = 2.0  # factor by which a gate multiplies the noise each time
_BLOCK = 1 << 16  # numbers drawn at once, few enough to stay in a CPU's cache
XTOL, RTOL = 1e-14, 1e-14  # absolute and relative error of epsilon, both added to the result


def base_of(entropy: bytes, seed: int | None) -> bytes:
    """Return the secret base of a run: fresh entropy, or for tests a function of ``seed``."""
    return entropy if seed is None else hashlib.sha256(f"seed {seed}".encode()).digest()


def noise_key(
    base: bytes, release: int, index: int, *, client: int, name: str, stream: str = "gradient"
) -> bytes:
    """Return a key of 256 bits, different for every combination of the arguments.

    Args:
        base: The secret base, see :func:`base_of`.
        release: The index of the release, from 0.
        index: The index of the tensor, or of the draw, in the release.
        client: The index of the client.
        name: The name of the defence.
        stream: The purpose of the random numbers.
    """
    message = b"".join(value.to_bytes(8, "big") for value in (client, release, index))
    domain = f"lightning-fedleak {stream} noise 1\0".encode()
    return hashlib.sha256(domain + base + message + name.encode()).digest()


def standard_normal(
    key: bytes, shape: torch.Size, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return independent standard normal numbers, which depend on ``key`` only.

    On a CPU they come from Philox4x64-10 (Salmon et al. 2011) by the Box-Muller transform, and all
    256 bits of the key set its state. Torch's CPU generator is not used. Its seed has 32 bits, so
    all seeds can be tried. Its Mersenne twister is linear over bits, so a few thousand numbers
    determine all others of a draw, and an adversary can read as many from embedding rows of words
    outside the batch, whose gradient is zero. On other devices the numbers come from the device's
    generator with a 64-bit seed. Neither generator is cryptographic. The global generators do not
    change.

    Args:
        key: 32 bytes, see :func:`noise_key`.
        shape: The shape of the result.
        device: The device on which to draw.
        dtype: The floating-point type of the result; on a CPU narrow ones are rounded from float32.
    """
    if device.type != "cpu":
        seeded = torch.Generator(device=device).manual_seed(int.from_bytes(key[:8], "big"))
        return torch.randn(shape, generator=seeded, device=device, dtype=dtype)
    result = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32))
    _add(key, result, 1.0)
    return result.to(dtype)


def add_noise(
    base: bytes, release: int, client: int, name: str, index: int, target: Tensor, std: float
) -> None:
    """Add noise of standard deviation ``std`` to ``target`` in place.

    The other arguments determine the key of the noise, see :func:`noise_key`.
    """
    key = noise_key(base, release, index, client=client, name=name)
    if target.device.type != "cpu" or not target.is_contiguous():
        target.add_(standard_normal(key, target.shape, target.device, target.dtype), alpha=std)
    else:
        _add(key, target, std)


class NoiseGauge:
    """Measures the standard deviation of the noise in a gradient that is about to be released.

    The gradient is a sum of clipped gradients plus noise, divided by a number. Call :meth:`before`
    with each parameter's sum, :meth:`after` with its released gradient, and :meth:`measured` last.

    Args:
        std: The standard deviation of the noise of the sum that the accountant assumes.
        divisor: The number by which the sum and its noise are divided.
    """

    def __init__(self, std: float, divisor: float) -> None:
        self.std = std
        self.divisor = divisor
        self._square = 0.0
        self._count = 0

    def before(self, total: Tensor) -> Tensor | None:
        """Return a copy of some coordinates of a sum; None if rounding would hide the noise."""
        if not self.std:
            return None
        exact = total.flatten()[:GAUGED].clone()
        largest = float(exact.abs().max()) if exact.numel() else 0.0
        return exact if self.std > MIN_RELATIVE_NOISE * largest else None

    def after(self, exact: Tensor, released: Tensor) -> None:
        """Measure the noise of the same coordinates in the released gradient.

        Args:
            exact: The coordinates that :meth:`before` returned.
            released: The gradient of the parameter, with noise and divided.
        """
        if released.dtype not in (torch.float32, torch.float64):
            return
        noise = released.flatten()[:GAUGED].double() * self.divisor - exact.double()
        self._square += float(noise.square().sum())
        self._count += noise.numel()

    def measured(self) -> float | None:
        """Return the standard deviation of the noise; None if too few coordinates were measured.

        Raises:
            DefenseError: The measured variance differs from the assumed one by more than 2% (1% of
                the standard deviation) plus six standard errors.
        """
        if self._count < MIN_GAUGED:
            return None
        variance_ratio = self._square / self._count / self.std**2
        if abs(variance_ratio - 1) > 6 * math.sqrt(2 / self._count) + 0.02:
            ratio = f"{variance_ratio**0.5:.4g} times the accounted one"
            raise DefenseError(f"DPSGD: the noise measured is {ratio}; nothing was released")
        return self.std * math.sqrt(variance_ratio)


class HardenedNoise(Defense):
    """A defence whose noise a gate may increase by :data:`HARDEN_FACTOR`, again and again.

    Attributes:
        sigma: The scale of the noise before any increase, in the units of the subclass.
        max_hardenings: The maximum number of increases; None for no limit.
        notches: The number of increases so far.
    """

    sigma: float
    max_hardenings: int | None
    notches: int
    _changing = ("notches", "releases")  # not settings, so the record of a run omits them

    def _allow_hardening(self, max_hardenings: int | None) -> None:
        """Set the maximum number of increases of the noise.

        Raises:
            DefenseError: The number is out of range.
        """
        name = f"{type(self).__name__}: max_hardenings"
        check_integer(name, max_hardenings, at_least=0, optional=True)
        self.max_hardenings, self.notches = max_hardenings, 0

    @property
    def can_harden(self) -> bool:
        """Return whether there is noise, and a gate may increase it."""
        return self.sigma > 0 and self.max_hardenings != 0

    @property
    def _sigma_now(self) -> float:
        """Return the scale of the noise after the increases so far."""
        return self.sigma * HARDEN_FACTOR**self.notches

    def harden(self) -> str | None:
        """Multiply the noise by :data:`HARDEN_FACTOR`; return a message, or None at the maximum."""
        if not self.can_harden or self.notches == self.max_hardenings:
            return None
        previous = self._sigma_now
        self.notches += 1
        return f"{self.name}: sigma {previous:g} -> {self._sigma_now:g}"

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Return the number of increases."""
        return {"notches": self.notches}

    def load_state_dict(self, state: State) -> None:
        """Continue with the noise of the checkpoint; it never decreases."""
        self.notches = max(self.notches, int(state.get("notches", 0)))


def _add(key: bytes, target: Tensor, std: float) -> None:
    """Add normal numbers times ``std`` to a contiguous tensor on a CPU, by Box-Muller in NumPy.

    A call of NumPy takes a fraction of torch's time, which for small parameters is most of it.
    """
    secret, start = int.from_bytes(key[:16], "big"), int.from_bytes(key[16:], "big")
    generator = np.random.Philox(key=secret, counter=start << 128)
    # Pairs of integers of the numbers' width become uniform numbers in (0, 1], down to 2^-32 (in
    # float64 2^-64), so that the normal numbers reach 6.66 standard deviations (in float64 9.42).
    kind, bits = (np.int64, 63) if target.dtype == torch.float64 else (np.int32, 31)
    for block in torch.split(target.view(-1), _BLOCK):
        half = (len(block) + 1) // 2
        words = generator.random_raw(2 * half if bits == 63 else half).view(kind)
        normal = np.empty((2, half), np.float64 if bits == 63 else np.float32)
        radius, angle = words.astype(normal.dtype).reshape(2, half)
        np.abs(radius, out=radius)
        radius += 0.5
        radius *= 2.0**-bits
        np.log(radius, out=radius)
        radius *= -2.0
        np.sqrt(radius, out=radius)
        angle *= math.pi * 2.0**-bits
        np.cos(angle, out=normal[0])
        np.sin(angle, out=normal[1])
        normal *= radius
        block.add_(torch.from_numpy(normal).view(-1)[: len(block)], alpha=std)


def gaussian_epsilon(*, sigma: float, delta: float) -> float:
    """Return the smallest epsilon of the Gaussian mechanism ``x + N(0, s^2 I)`` at ``delta``.

    See Balle and Wang 2018, Theorem 8. For k such releases, even if each depends on the results of
    those before, pass ``sigma / sqrt(k)`` (Dong et al. 2019, Corollary 3.3).

    Args:
        sigma: The noise multiplier: ``s`` divided by the sensitivity, which is the largest distance
            in 2-norm between the ``x`` of two neighbouring inputs; infinite if that distance is 0.
        delta: The delta, in (0, 1).

    Returns:
        Epsilon, rounded up; 0 if sigma is so large that ``delta`` covers the whole difference,
        infinite if epsilon is too large for a float.

    Raises:
        ValueError: An argument is out of range.
    """
    if sigma != math.inf:
        validate.check_number("sigma", sigma, above=0)
    validate.check_number("delta", delta, above=0, below=1)
    target = math.log(delta)

    def excess(epsilon: float) -> float:
        """Return the log of epsilon's smallest delta over the wanted delta."""
        # The lower limit replaces minus infinity, which the root finder cannot take.
        return max(_log_delta(epsilon, 1 / sigma), 2 * target - 1) - target

    if math.isinf(sigma) or excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
        if math.isinf(high):
            return high
    epsilon = float(brentq(excess, 0.0, high, xtol=XTOL, rtol=RTOL))
    return epsilon + XTOL + RTOL * epsilon


def _log_delta(epsilon: float, ratio: float) -> float:
    """Return the log of the smallest delta at an epsilon e, with r = 1 / sigma.

    delta = Phi(r/2 - e/r) - exp(e) Phi(-r/2 - e/r). Both terms may be tiny or huge, so their logs
    are subtracted. Minus infinity stands for a delta of 0.
    """
    first = float(log_ndtr(ratio / 2 - epsilon / ratio))
    second = epsilon + float(log_ndtr(-ratio / 2 - epsilon / ratio))
    if second >= first:
        return -math.inf
    return first + float(np.log1p(-np.exp(second - first)))


class GradientNoise(HardenedNoise):
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
        return gaussian_epsilon(sigma=sigma, delta=delta)

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
                add_noise(*source, shard, values, self.standard_deviation)
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
            key = noise_key(*ids, client=context.client, name=self.name, stream="canary")
            shape, device = canary.samples.shape[1:], canary.samples.device
            standard = standard_normal(key, shape, device, canary.samples.dtype)
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
        return base_of(context.entropy, self.seed if self._seeded else None)


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
