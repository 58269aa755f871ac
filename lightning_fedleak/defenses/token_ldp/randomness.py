"""Replacements for words, from secret random numbers: fresh ones, or a row's own.

The numbers are SHAKE-128 of a 256-bit key that is hashed from the fit's secret entropy: whoever
lacks the key cannot distinguish them from uniform ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_fedleak.defenses.noise import noise_key
from lightning_fedleak.defenses.token_ldp.mechanisms import Randomizer


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

    Returns:
        (n,) int64.
    """
    k = randomizer.k
    numbers = uniforms(keys, counts, 2 + (outside is not None))
    if outside is not None:
        index = torch.where(outside, (numbers[:, -1] * k).long().clamp_(max=k - 1), index)
    return randomizer.sample(index, epsilon, numbers)
