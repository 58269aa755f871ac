"""Clips a client's whole update and adds Gaussian noise to it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_fedleak.defenses import noise, processes
from lightning_fedleak.defenses.base import (
    CanaryGradient,
    DefenseContext,
    DefenseError,
    State,
    parameter_name,
)
from lightning_fedleak.defenses.checks import check_number


class GradientNoise(noise.HardenedNoise):
    """Clips the 2-norm of a client's whole update, then adds Gaussian noise to every coordinate.

    The update is the joint gradient of all trainable parameters of one optimizer; with several
    optimizers each step of each is clipped by itself. A parameter whose gradient is None counts as
    zero and gets noise like the others, because which parameters a batch reached is information
    too. A parameter that is never reached then moves by noise alone.

    With a ``clip`` the update of a client, whatever data it holds, moves by at most ``2 * clip``.
    One that holds NaN or infinity, or whose norm overflows, counts as zero: noise alone is sent.
    So each release is a Gaussian mechanism for all of a client's data at once, and therefore for
    each sample in it: :meth:`epsilon` says what the releases so far add up to. That is the local
    model, where the server sees each client's update. It is weak (sigma 1: epsilon 10 at delta
    1e-5 after a single release), because one sample may fill the whole clipped update; DPSGD
    bounds each sample instead. Without a clip nothing bounds an update: no epsilon holds.

    A gate may turn the noise up (:meth:`harden`): each notch doubles it.
    Epsilon does not count the noise beyond the first sigma, because how much was added depended on
    the data.

    Under FSDP2 the norm is that of all shards together; shards get independent noise, replicas of
    one the same.

    Noise of release k on client c is a function of (secret base, c, k). The base is fresh entropy
    of the operating system in every fit and is never saved; k goes on over checkpoints. So no
    noise is used twice, neither by two clients nor after a resume. On CPU the noise comes from
    Philox4x64 with 256 secret bits (torch's CPU generator could be worked out from coordinates that
    an adversary knows), on other devices from that device's torch generator with a 64-bit seed.
    Neither is a cryptographic generator. Each release waits once for the device, for the norm.

    Examples:
        >>> from lightning_fedleak import DefendedStrategy, GradientNoise
        >>> noise = GradientNoise(clip=1.0, sigma=5.0)
        >>> strategy = DefendedStrategy("auto", defenses=[noise])
        >>> noise.epsilon(delta=1e-5)  # nothing was released yet
        0.0

    Args:
        clip: largest 2-norm of the update, or None for no clipping.
        sigma: noise multiplier: the noise's standard deviation is ``sigma * clip`` in every
            coordinate, or ``sigma`` itself where ``clip`` is None.
        seed: for tests only. The base is then derived from the seed: whoever knows or guesses it
            can subtract the noise, and a second run replays it on other gradients. A run that
            resumes from a checkpoint without this defence's state ignores the seed.
        max_hardenings: how often it may be turned up; None for no limit.

    Attributes:
        notches: how often it was turned up.

    Raises:
        DefenseError: a setting out of range; at setup, a guarantee under ``"16-mixed"``, whose
            loss scaler leaves out the release of a step by what the data hold.
    """

    name = "gradient_noise"
    guarantee = (
        "against whoever sees shared updates: the norm of a client's whole update is bounded by "
        "`clip` and every coordinate carries independent Gaussian noise of `sigma * clip` that is "
        "never reused. That is local differential privacy of a client's whole data, with the "
        "epsilon that `epsilon(delta)` gives, of all releases so far. No better bound for a sample."
    )
    takes_shards = True

    def __init__(
        self,
        clip: float | None,
        sigma: float,
        seed: int | None = None,
        *,
        max_hardenings: int | None = None,
    ) -> None:
        hint = "None is for no clipping"
        self.clip = check_number("GradientNoise: clip", clip, above=0, optional=True, hint=hint)
        self.sigma = check_number("GradientNoise: sigma", sigma, at_least=0)
        self.seed = seed
        self._allow_hardening(max_hardenings)
        self.releases = 0
        self._precision = 0.0  # sum of 1 / sigma^2 over releases
        if clip is None or sigma == 0 or seed is not None:
            self.guarantee = _why_none(clip, sigma)
        self._seeded = seed is not None
        self._canaries = 0

    @property
    def standard_deviation(self) -> float:
        """Return the standard deviation of the noise in every coordinate, hardening included."""
        return self._sigma_now if self.clip is None else self._sigma_now * self.clip

    def epsilon(self, delta: float) -> float:
        """Return epsilon of all of one client's data, replaced by any other, after these releases.

        Exact for Gaussian noise, also where later updates depend on earlier ones. The number of
        releases must not depend on the data. Releases of a run that was resumed count with the
        noise that they had.

        Args:
            delta: in (0, 1).

        Returns:
            Epsilon; infinite without a clip, without noise, or with a seed, now or in one of these
            releases.

        Raises:
            ValueError: an argument out of range.
        """
        if not self._private or math.isinf(self._precision):
            return math.inf
        sigma = math.sqrt(1 / self._precision) / 2 if self._precision else math.inf
        return noise.gaussian_epsilon(sigma=sigma, delta=delta)

    @property
    def _private(self) -> bool:
        return self.clip is not None and self.sigma > 0 and not self._seeded

    def before_setup(self, context: DefenseContext) -> None:
        """Raise an error for a guarantee where a loss scaler decides whether a step is taken."""
        if self._private and context.precision == "16-mixed":
            raise DefenseError(
                "GradientNoise: under precision='16-mixed' a loss scaler skips the steps whose "
                "gradients overflow, which tells what the data hold. Use 'bf16-mixed' or '32-true'."
            )

    def on_gradients(self, parameters: Sequence[nn.Parameter], context: DefenseContext) -> None:
        """Clip the update and add noise to it, in place.

        Raises:
            DefenseError: without a clip, a gradient is NaN or infinite; nothing is released then.
        """
        norm = self._norm(parameters, context.root)
        scale = 1.0 if self.clip is None or norm <= self.clip else self.clip / norm
        release, self.releases = self.releases, self.releases + 1
        self._precision += 1 / self.sigma**2 if self._private else math.inf
        self._canaries = 0
        for index, parameter in enumerate(parameters):
            if parameter.grad is None:
                if not self.sigma:
                    continue
                parameter.grad = torch.zeros_like(parameter)
            gradient = processes.local_part(parameter.grad)
            values = gradient if gradient.dtype == torch.float64 else gradient.float()
            if scale == 0.0:  # of an infinite norm: zero times NaN is NaN
                values.zero_()
            elif scale != 1.0:
                values.mul_(scale)
            if self.sigma:
                part = index + (processes.shard_number(parameter.grad) << processes.SHARD_BITS)
                key = self._key(context, release, part)
                standard = noise.standard_normal(key, gradient.shape, gradient.device, values.dtype)
                values.add_(standard, alpha=self.standard_deviation)
            if values is not gradient:
                gradient.copy_(values)

    def on_canary(
        self, canary: CanaryGradient, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> CanaryGradient:
        """Clip each game's numbers in one norm with the client's update, and add noise to them.

        The noise is drawn from a stream of its own: that of the update stays what it is.

        Raises:
            DefenseError: without a clip, a gradient is NaN or infinite.
        """
        norm = self._norm(parameters, context.root)
        if self.clip is not None:
            joint = torch.hypot(canary.released.norm(dim=1), canary.samples.new_tensor(norm))
            factors = self.clip / joint.clamp(min=self.clip)
            canary = canary.scaled(factors.where(joint.isfinite(), 0.0))
        if self.sigma:
            number, self._canaries = self._canaries, self._canaries + 1
            key = self._key(context, self.releases, number, stream="canary")
            shape, device = canary.samples.shape[1:], canary.samples.device
            standard = noise.standard_normal(key, shape, device, canary.samples.dtype)
            canary = canary.noised(standard * self.standard_deviation, self.standard_deviation)
        return canary

    def noise_std(self, context: DefenseContext) -> float:
        """Return the standard deviation as it is turned up now."""
        return self.standard_deviation

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Return the releases so far, what they cost, and how often the noise was turned up."""
        precision = {"spent": self._precision} if self.releases else {}
        return {**super().state_dict(), "releases": self.releases, **precision}

    def load_state_dict(self, state: State) -> None:
        """Continue the counters; none runs backwards, not even in one process.

        Releases whose noise the state does not hold may have had none.
        """
        super().load_state_dict(state)
        if int(state.get("releases", 0)):
            self._precision = max(self._precision, float(state.get("spent", math.inf)))
        if "releases" in state:
            self.releases = max(self.releases, int(state["releases"]))
        else:
            self._seeded = False

    def _norm(self, parameters: Sequence[nn.Parameter], root: nn.Module) -> float:
        """Return the joint 2-norm of the gradients, which become dense; with a clip, infinite for
        one that is not finite.
        """
        for parameter in parameters:
            if parameter.grad is not None:
                if parameter.grad.layout != torch.strided:
                    parameter.grad = parameter.grad.to_dense()
                processes.reduce_partial(parameter)
        total = processes.global_norm([p.grad for p in parameters if p.grad is not None])
        if math.isfinite(total) or self.clip is not None:
            return total if math.isfinite(total) else math.inf
        broken = [
            parameter_name(p, root)
            for p in parameters
            if p.grad is not None and not bool(torch.isfinite(processes.local_part(p.grad)).all())
        ]
        place = (
            f"in {', '.join(broken[:5])}"
            if broken
            else "in the norm itself (overflow), or in another process's shard"
        )
        raise DefenseError(
            f"GradientNoise: the update holds NaN or infinity {place}; it was not released. Lower "
            "the learning rate, check the loss, or train in 16-mixed on one device, where such "
            "steps are skipped."
        )

    def _key(
        self, context: DefenseContext, release: int, index: int, stream: str = "gradient"
    ) -> bytes:
        base = noise.base_of(context.entropy, self.seed if self._seeded else None)
        place = base, release, index
        return noise.noise_key(*place, client=context.client, name=self.name, stream=stream)


def _why_none(clip: float | None, sigma: float) -> str:
    if sigma == 0:
        return "none: the update is clipped, and nothing hides it" if clip else "none: sigma is 0"
    if clip is None:
        return (
            "none: every coordinate carries independent Gaussian noise that is never reused, but "
            "without `clip` nothing bounds an update, so no epsilon holds"
        )
    return "none: whoever knows or guesses `seed` can subtract the noise (for tests only)"
