"""Gaussian noise that is never used twice, and what the Gaussian mechanism guarantees.

Noise is drawn from a secret base, a client and a release counter.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import log_ndtr
from torch import Tensor

_BLOCK = 1 << 16
"""Numbers that are made at once, few enough to stay in the cache."""

XTOL, RTOL = 1e-14, 1e-14
"""How exactly epsilon is found, absolute and relative."""


def base_of(entropy: bytes, seed: int | None) -> bytes:
    """The secret base of a run: fresh entropy, or for tests what follows from ``seed``."""
    return entropy if seed is None else hashlib.sha256(f"seed {seed}".encode()).digest()


def noise_key(
    base: bytes, client: int, release: int, index: int, name: str, stream: str = "gradient"
) -> bytes:
    """256 bits, different for every (stream, base, client, release, index, defence's name)."""
    message = b"".join(value.to_bytes(8, "big") for value in (client, release, index))
    domain = f"lightning-fedleak {stream} noise 1\0".encode()
    return hashlib.sha256(domain + base + message + name.encode()).digest()


def standard_normal(
    key: bytes, shape: torch.Size, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Independent standard normal numbers, a function of ``key`` alone.

    On CPU by Box and Muller's method from Philox4x64-10 (Salmon et al. 2011), of which all 256 bits
    of the key set the state. Not from torch's own generator: its seed has 32 bits, which can be
    tried out, and its Mersenne twister is linear over bits, so that whoever knows a few thousand
    numbers of a draw (rows of words that are not in the batch have no gradient, and show theirs)
    can work out all others. On other devices from that device's generator with a 64-bit seed.
    Neither is a cryptographic generator. The global generators are left alone.

    Args:
        key: 32 bytes, see :func:`noise_key`.
        shape: of the result.
        device: where to draw.
        dtype: float32 or float64.
    """
    if device.type != "cpu":
        seeded = torch.Generator(device=device).manual_seed(int.from_bytes(key[:8], "big"))
        return torch.randn(shape, generator=seeded, device=device, dtype=dtype)
    generator, result = _philox(key), torch.empty(shape, dtype=dtype)
    flat = result.view(-1)
    for begin in range(0, len(flat), _BLOCK):
        _fill(flat[begin : begin + _BLOCK], generator)
    return result


def add_standard_normal(key: bytes, onto: Tensor, scale: float) -> None:
    """Adds ``scale`` times the numbers of :func:`standard_normal`, in place, bit for bit.

    On CPU without room for all of them, which takes time to get.

    Args:
        key: as there.
        onto: float32 or float64.
        scale: standard deviation.
    """
    if onto.device.type != "cpu" or not onto.is_contiguous():
        onto.add_(standard_normal(key, onto.shape, onto.device, onto.dtype), alpha=scale)
        return
    generator, flat = _philox(key), onto.view(-1)
    room = torch.empty(min(len(flat), _BLOCK), dtype=onto.dtype)
    for begin in range(0, len(flat), _BLOCK):
        some = flat[begin : begin + _BLOCK]
        own = room[: len(some)]
        _fill(own, generator)
        some.add_(own, alpha=scale)


def _philox(key: bytes) -> np.random.Philox:
    secret, start = int.from_bytes(key[:16], "big"), int.from_bytes(key[16:32], "big")
    return np.random.Philox(key=secret, counter=start << 128)


def _fill(block: Tensor, generator: np.random.Philox) -> None:
    """Standard normal numbers, by pairs of signed integers of as many bits as the numbers have."""
    wide = block.dtype == torch.float64
    kind, bits = (np.int64, 63) if wide else (np.int32, 31)
    half = (len(block) + 1) // 2
    raw = generator.random_raw(2 * half if wide else half)
    words = torch.from_numpy(raw.view(kind)).to(block.dtype)
    # Distance from 0 is finest near 0: the tails reach 6.6 standard deviations (float64: 9.4).
    radius = words[:half].abs_().add_(0.5).mul_(2.0**-bits).log_().mul_(-2.0).sqrt_()
    angle = words[half:].mul_(math.pi * 2.0**-bits)
    torch.mul(radius, angle.cos(), out=block[:half])
    rest = len(block) - half
    torch.mul(radius[:rest], angle[:rest].sin_(), out=block[half:])


def gaussian_epsilon(*, sigma: float, delta: float) -> float:
    """The smallest epsilon of ``x + N(0, s^2 I)`` at ``delta`` (Balle and Wang 2018, Theorem 8).

    k such releases in a row, also where each depends on those before, are one of
    ``sigma / sqrt(k)`` (Dong et al. 2019, Corollary 3.3).

    Args:
        sigma: noise multiplier: ``s`` over how far two neighbouring inputs' ``x`` may be apart in
            2-norm; infinite where they are alike.
        delta: in (0, 1).

    Returns:
        Epsilon, rounded up; 0 where sigma is so large that delta alone covers it, infinite where it
        is beyond all numbers.

    Raises:
        ValueError: an argument out of range.
    """
    if not sigma > 0:
        raise ValueError(f"sigma must be positive, got {sigma!r}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie between 0 and 1, got {delta!r}")
    goal = math.log(delta)

    def excess(epsilon: float) -> float:
        return max(_log_delta(epsilon, 1 / sigma), 2 * goal - 1) - goal

    if math.isinf(sigma) or excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
        if math.isinf(high):
            return high
    found = float(brentq(excess, 0.0, high, xtol=XTOL, rtol=RTOL))
    return found + XTOL + RTOL * found


def _log_delta(epsilon: float, ratio: float) -> float:
    """The log of Phi(r/2 - e/r) - exp(e) Phi(-r/2 - e/r), where both may be tiny or huge."""
    first = float(log_ndtr(ratio / 2 - epsilon / ratio))
    second = epsilon + float(log_ndtr(-ratio / 2 - epsilon / ratio))
    if second >= first:
        return -math.inf
    return first + float(np.log1p(-np.exp(second - first)))


__all__ = ["add_standard_normal", "base_of", "gaussian_epsilon", "noise_key", "standard_normal"]
