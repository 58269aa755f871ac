"""Gaussian noise that is never used twice, from a secret base, a client and a release counter."""

from __future__ import annotations

import functools
import hashlib
import math

import numpy as np
import torch
from torch import Tensor

_WORDS = 624
_STATE = slice(24, 24 + 8 * _WORDS)


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

    On CPU from a Mersenne twister whose whole state of 19,937 bits is hashed from the key: torch's
    own seeding keeps only 32 bits, which an adversary can try out on coordinates it knows. On
    other devices from that device's generator with a 64-bit seed. Neither is a cryptographic
    generator. The global generators are left alone.

    Args:
        key: 32 bytes, see :func:`noise_key`.
        shape: of the result.
        device: where to draw.
        dtype: float32 or float64.
    """
    if device.type != "cpu":
        seeded = torch.Generator(device=device).manual_seed(int.from_bytes(key[:8], "big"))
        return torch.randn(shape, generator=seeded, device=device, dtype=dtype)
    if _twister_is_known() and math.prod(shape) >= 16:
        return torch.empty(shape, dtype=dtype).normal_(generator=_twister(key))
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "big")))
    kind = np.float64 if dtype == torch.float64 else np.float32
    return torch.from_numpy(np.asarray(generator.standard_normal(tuple(shape), dtype=kind)))


def _twister(key: bytes) -> torch.Generator:
    """A CPU generator with 624 words of state from the key."""
    generator = torch.Generator()
    state = generator.get_state()
    words = np.frombuffer(hashlib.shake_256(key).digest(4 * _WORDS), dtype="<u4")
    state[_STATE] = torch.from_numpy(words.astype(np.uint64).view(np.uint8))
    generator.set_state(state)
    return generator


@functools.cache
def _twister_is_known() -> bool:
    """Whether torch lays out the state of its CPU generator as this file writes it.

    The state after seeding must be that of NumPy's Mersenne twister with the same seed, and a
    state that was written must give the numbers that NumPy's gives.
    """
    fresh = torch.Generator().manual_seed(5489).get_state()
    reference = np.random.RandomState(5489)
    words = np.asarray(reference.get_state(legacy=False)["state"]["key"]).astype(np.uint64)
    if len(fresh) < _STATE.stop or not np.array_equal(fresh[_STATE].numpy().view(np.uint64), words):
        return False
    key = bytes(range(32))
    words = np.frombuffer(hashlib.shake_256(key).digest(4 * _WORDS), dtype="<u4")
    reference.set_state(("MT19937", words.astype(np.uint32), _WORDS, 0, 0.0))
    drawn = torch.empty(8, dtype=torch.int64).random_(0, 2**20, generator=_twister(key))
    expected = reference.randint(0, 2**32, 8, dtype=np.uint32).astype(np.int64) % 2**20
    return bool(np.array_equal(drawn.numpy(), expected))


__all__ = ["base_of", "noise_key", "standard_normal"]
