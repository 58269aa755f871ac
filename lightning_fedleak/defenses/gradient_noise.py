"""Clips a client's whole update and adds Gaussian noise to it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from lightning_fedleak.defenses.base import Defense, DefenseContext, DefenseError, State
from lightning_fedleak.defenses.canary import CanaryGradient


class GradientNoise(Defense):
    """Clips the 2-norm of a client's whole update, then adds Gaussian noise to every coordinate.

    The update is the joint gradient of all trainable parameters of one optimizer; with several
    optimizers each step of each is clipped by itself. A parameter whose gradient is None counts as
    zero and gets noise like the others, because which parameters a batch reached is information
    too: a parameter that is never reached then moves by noise alone.

    **No per-sample guarantee**: one sample may fill the whole clipped update, and no epsilon is
    accounted. This is the noise of an update-level Gaussian mechanism, nothing more.

    Noise of release k on client c is a function of (secret base, c, k). The base is fresh entropy
    of the operating system in every fit and is never saved; k goes on over checkpoints. So no
    noise is used twice, neither by two clients nor after a resume. On CPU the noise comes from
    Philox4x64 with a 128-bit key (torch's CPU generator uses only 32 bits of a seed, which an
    adversary can try out on coordinates it knows), on other devices from that device's torch
    generator with a 64-bit seed. Neither is a cryptographic generator. Each release waits once for
    the device: the norm must be known to be finite before anything leaves.

    Args:
        clip: largest 2-norm of the update, or None for no clipping.
        sigma: noise multiplier: the noise's standard deviation is ``sigma * clip`` in every
            coordinate, or ``sigma`` itself where ``clip`` is None.
        seed: for tests only. The base is then derived from the seed: whoever knows or guesses it
            can subtract the noise, and a second run replays it on other gradients. A run that
            resumes from a checkpoint without this defence's state ignores the seed.

    Raises:
        DefenseError: a setting out of range.
    """

    name = "gradient_noise"
    guarantee = (
        "against whoever sees shared updates: the norm of a client's whole update is bounded by "
        "`clip` and every coordinate carries independent Gaussian noise that is never reused. "
        "No per-sample guarantee and no accounted epsilon."
    )

    def __init__(self, clip: float | None, sigma: float, seed: int | None = None) -> None:
        if clip is not None and not (math.isfinite(clip) and clip > 0):
            raise DefenseError(
                f"GradientNoise: clip={clip!r} must be a positive number, or None for no clipping"
            )
        if not (math.isfinite(sigma) and sigma >= 0):
            raise DefenseError(f"GradientNoise: sigma={sigma!r} must be a number of at least 0")
        self.clip = clip
        self.sigma = sigma
        self.seed = seed
        self.releases = 0
        self._seeded = seed is not None
        self._canaries = 0

    @property
    def standard_deviation(self) -> float:
        """Standard deviation of the noise in every coordinate."""
        return self.sigma if self.clip is None else self.sigma * self.clip

    def on_gradients(self, parameters: Sequence[nn.Parameter], context: DefenseContext) -> None:
        """Clips and noises the update in place.

        Raises:
            DefenseError: a gradient is sparse, NaN or infinite; nothing is released then.
        """
        norm = _finite_norm(parameters, context.root)
        scale = 1.0 if self.clip is None or norm <= self.clip else self.clip / norm
        release, self.releases = self.releases, self.releases + 1
        self._canaries = 0
        for index, parameter in enumerate(parameters):
            if parameter.grad is None:
                if not self.sigma:
                    continue
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            wide = gradient if gradient.dtype == torch.float64 else gradient.float()
            if scale != 1.0:
                wide.mul_(scale)
            if self.sigma:
                key = self._key(context, release, index)
                noise = _standard_normal(key, gradient.shape, gradient.device, wide.dtype)
                wide.add_(noise, alpha=self.standard_deviation)
            if wide is not gradient:
                gradient.copy_(wide)

    def on_canary(
        self,
        canary: CanaryGradient,
        parameters: Sequence[nn.Parameter],
        context: DefenseContext,
    ) -> CanaryGradient:
        """Clips each game's numbers in one norm with the client's update, and noises them.

        The noise is drawn from a stream of its own: that of the update stays what it is.

        Raises:
            DefenseError: a gradient is sparse, NaN or infinite.
        """
        norm = _finite_norm(parameters, context.root)
        if self.clip is not None:
            joint = torch.hypot(canary.released.norm(dim=1), canary.samples.new_tensor(norm))
            canary = canary.scaled(self.clip / joint.clamp(min=self.clip))
        if self.sigma:
            number, self._canaries = self._canaries, self._canaries + 1
            key = self._key(context, self.releases, number, stream="canary")
            shape, device = canary.samples.shape[1:], canary.samples.device
            noise = _standard_normal(key, shape, device, canary.samples.dtype)
            canary = canary.noised(noise * self.standard_deviation, self.standard_deviation)
        return canary

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """The number of releases so far."""
        return {"releases": self.releases}

    def load_state_dict(self, state: State) -> None:
        """Goes on counting; the counter never runs backwards, not even in one process."""
        if "releases" in state:
            self.releases = max(self.releases, int(state["releases"]))
        else:
            self._seeded = False

    def _key(
        self, context: DefenseContext, release: int, index: int, stream: str = "gradient"
    ) -> bytes:
        """256 bits, different for every (stream, base, client, release, index, defence's name)."""
        base = context.entropy
        if self._seeded:
            base = hashlib.sha256(f"seed {self.seed}".encode()).digest()
        fields = (context.client, release, index)
        message = b"".join(value.to_bytes(8, "big") for value in fields) + self.name.encode()
        domain = f"lightning-fedleak {stream} noise 1\0".encode()
        return hashlib.sha256(domain + base + message).digest()


def _finite_norm(parameters: Sequence[nn.Parameter], root: nn.Module) -> float:
    """Joint 2-norm of the gradients; refuses what cannot be noised."""
    norms: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            raise DefenseError(
                f"GradientNoise: the gradient of '{_name(parameter, root)}' is sparse; which rows "
                "it holds would leave the client. Build the embedding with sparse=False."
            )
        dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        norms.append(torch.linalg.vector_norm(gradient, dtype=dtype))
    if not norms:
        return 0.0
    device = norms[0].device
    total = float(torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms])))
    if not math.isfinite(total):
        broken = [
            _name(p, root)
            for p in parameters
            if p.grad is not None and not bool(torch.isfinite(p.grad).all())
        ]
        found = f"in {', '.join(broken[:5])}" if broken else "in the norm itself (overflow)"
        raise DefenseError(
            f"GradientNoise: the update holds NaN or infinity {found}; it was not released. "
            "Lower the learning rate, check the loss, or train in 16-mixed on one device, where "
            "such steps are skipped."
        )
    return total


def _name(parameter: nn.Parameter, root: nn.Module) -> str:
    for name, candidate in root.named_parameters():
        if candidate is parameter:
            return name
    return f"a parameter of shape {tuple(parameter.shape)}"


def _standard_normal(
    key: bytes, shape: torch.Size, device: torch.device, dtype: torch.dtype
) -> Tensor:
    if device.type == "cpu":
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "big")))
        kind = np.float64 if dtype == torch.float64 else np.float32
        return torch.from_numpy(generator.standard_normal(tuple(shape), dtype=kind))
    seeded = torch.Generator(device=device).manual_seed(int.from_bytes(key[:8], "big"))
    return torch.randn(shape, generator=seeded, device=device, dtype=dtype)
