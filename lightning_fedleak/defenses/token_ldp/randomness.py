"""Replacements for words, from secret random numbers: fresh ones, or a row's own.

The numbers are SHAKE-128 of a 256-bit key that is hashed from the fit's secret entropy: whoever
lacks the key cannot distinguish them from uniform ones.

The reference path draws one value at a time by the clients of multi-freq-ldpy, which report values
and vectors; the decoding rules are those of :mod:`lightning_fedleak.defenses.token_ldp.mechanisms`.
It is slow (a second for every thousand tokens of a vocabulary of 50,000; dBitFlipPM with all bits
takes seconds a token), and its numbers come from numba's generator, which a seed of 32 bits starts:
a second opinion, no defence.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_fedleak.defenses.noise import noise_key
from lightning_fedleak.defenses.token_ldp.mechanisms import Randomizer, the_threshold
from lightning_fedleak.extras import install

Implementation = Literal["torch", "multi-freq-ldpy"]


def row_digests(rows: Sequence[Tensor], examples: Sequence[int] | None) -> list[bytes]:
    """Return 16 bytes that distinguish rows, by their words and their examples' ids.

    Args:
        rows: (n_i,) int64 words of each row, on the CPU.
        examples: one integer for each row.
    """
    ids = [0] * len(rows) if examples is None else examples
    return [
        hashlib.blake2b(
            row.numpy().tobytes(), digest_size=16, salt=i.to_bytes(16, "big", signed=True)
        ).digest()
        for row, i in zip(rows, ids, strict=True)
    ]


def row_keys(base: bytes, client: int, digests: Sequence[bytes], name: str) -> list[bytes]:
    """Return 32 bytes for each row: the same wherever this client has the row in this fit."""
    key = noise_key(base, client, 0, 0, name, stream="row")
    return [hashlib.blake2b(digest, key=key, digest_size=32).digest() for digest in digests]


def uniforms(keys: Sequence[bytes], counts: Sequence[int], columns: int) -> Tensor:
    """Return (n, columns) float64 in [0, 1), n the sum of ``counts``: a function of the keys alone.

    Args:
        keys: one for each stream.
        counts: draws of each stream, (len(keys),).
        columns: numbers of each draw.
    """
    streams = b"".join(
        hashlib.shake_128(key).digest(8 * columns * count)
        for key, count in zip(keys, counts, strict=True)
    )
    words = np.frombuffer(streams, dtype="<u8") >> np.uint64(11)
    return torch.from_numpy(words * 2.0**-53).reshape(-1, columns)


def draw_replacements(
    randomizer: Randomizer,
    index: Tensor,
    outside: Tensor | None,
    epsilon: float | Tensor,
    keys: Sequence[bytes],
    counts: Sequence[int],
    *,
    implementation: Implementation = "torch",
) -> Tensor:
    """Return one replacement for each word, as an index of the domain.

    Args:
        randomizer: mechanism, domain and decoding rule.
        index: (n,) int64, each word's index in the domain.
        outside: (n,) bool, words that the domain lacks: a uniform one of the domain enters the
            mechanism in their place. None where every word is in the domain.
        epsilon: of each draw: one number, or (n,) float64.
        keys: of the random streams, each used for ``counts`` words in turn.
        counts: likewise; they add up to n.
        implementation: ``"multi-freq-ldpy"`` draws one by one by that package's clients.

    Returns:
        (n,) int64.

    Raises:
        ImportError: multi-freq-ldpy is not installed.
    """
    k = randomizer.k
    numbers = uniforms(keys, counts, randomizer.n_uniforms + (outside is not None))
    if outside is not None:
        index = torch.where(outside, (numbers[:, -1] * k).long().clamp_(max=k - 1), index)
    if implementation == "torch":
        return randomizer.sample(index, epsilon, numbers)
    epsilons = torch.as_tensor(epsilon, dtype=torch.float64).expand(len(index))
    parts = zip(keys, *(torch.split(t, list(counts)) for t in (index, epsilons)), strict=True)
    return torch.cat(
        [reference_sample(randomizer, i, e, int.from_bytes(key, "big")) for key, i, e in parts]
    )


# ---- the reference path ---------------------------------------------------------------------


def reference_sample(
    randomizer: Randomizer, index: Tensor, epsilon: float | Tensor, seed: int
) -> Tensor:
    """Return one draw for each index, as :meth:`Randomizer.sample` does.

    Sets numba's generator, which is neither torch's nor numpy's.

    Args:
        randomizer: mechanism, domain and rule.
        index: (n,) int64 in [0, k), on the CPU.
        epsilon: of each draw: one number, or (n,) float64.
        seed: of this call; its lowest 32 bits count.

    Returns:
        (n,) int64.

    Raises:
        ImportError: multi-freq-ldpy is not installed.
    """
    clients()["seed"](seed % 2**32)
    rng = np.random.default_rng(seed)
    epsilons = torch.as_tensor(epsilon, dtype=torch.float64).expand(len(index)).tolist()
    indices = [
        _sample_one(randomizer, x, e, rng) for x, e in zip(index.tolist(), epsilons, strict=True)
    ]
    return torch.tensor(indices, dtype=torch.int64)


@functools.cache
def clients() -> dict[str, Any]:
    """Return the clients of multi-freq-ldpy, and the function that seeds their generator.

    Raises:
        ImportError: multi-freq-ldpy is not installed.
    """
    try:
        from multi_freq_ldpy.long_freq_est.dBitFlipPM import dBitFlipPM_Client
        from multi_freq_ldpy.pure_frequency_oracles.GRR import GRR_Client
        from multi_freq_ldpy.pure_frequency_oracles.HE import HE_Client
        from multi_freq_ldpy.pure_frequency_oracles.UE import UE_Client
        from numba import njit
    except ImportError as error:
        raise ImportError(
            f"implementation='multi-freq-ldpy' needs the package: {install('ldp')}, or leave "
            "`implementation` out"
        ) from error

    def seed(value: int) -> None:
        np.random.seed(value)  # compiled: numba's own generator

    return {
        "grr": GRR_Client,
        "rappor": UE_Client,
        "the": HE_Client,
        "dbitflip": dBitFlipPM_Client,
        "seed": njit(seed),
    }


def _sample_one(randomizer: Randomizer, x: int, epsilon: float, rng: np.random.Generator) -> int:
    client, k, b = clients()[randomizer.mechanism], randomizer.k, randomizer.buckets
    if randomizer.mechanism == "grr":
        return int(client(x, k, epsilon))
    if randomizer.mechanism == "rappor":
        return _decoded(client(x, k, epsilon, False) == 1, randomizer, rng)
    if randomizer.mechanism == "the":
        noised = client(x, k, epsilon)
        if randomizer.decode == "argmax":
            return int(noised.argmax())
        return _decoded(noised > the_threshold(epsilon), randomizer, rng)
    bucket = _decoded(client(x, k, b, randomizer.bits, epsilon) == 1, randomizer, rng)
    if b == k:
        return bucket
    values = [v for v in range(k) if v * b // k == bucket]
    return int(rng.choice(values))


def _decoded(
    set_bits: npt.NDArray[np.bool_], randomizer: Randomizer, rng: np.random.Generator
) -> int:
    if randomizer.decode == "first":
        return int(set_bits.argmax())
    places = np.flatnonzero(set_bits)
    return int(rng.choice(places) if len(places) else rng.integers(len(set_bits)))
