"""Replacements for words that multi-freq-ldpy's clients draw: a second opinion on TokenLDP's laws.

One value is drawn at a time. The clients report values and vectors; the decoding rules are those of
:mod:`lightning_fedleak.defenses.token_ldp.mechanisms`. It is slow (a second for every thousand
tokens of a vocabulary of 50,000; dBitFlipPM with all bits takes seconds a token), and its numbers
come from numba's generator, which a seed of 32 bits starts: it is no defence.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from multi_freq_ldpy.long_freq_est.dBitFlipPM import dBitFlipPM_Client
from multi_freq_ldpy.pure_frequency_oracles.GRR import GRR_Client
from multi_freq_ldpy.pure_frequency_oracles.HE import HE_Client
from multi_freq_ldpy.pure_frequency_oracles.UE import UE_Client
from numba import njit
from torch import Tensor

from lightning_fedleak.defenses.token_ldp.mechanisms import Randomizer, the_threshold


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
    """Return the clients of multi-freq-ldpy, and the function that seeds their generator."""

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
    client, k = clients()[randomizer.mechanism], randomizer.k
    if randomizer.mechanism == "grr":
        return int(client(x, k, epsilon))
    if randomizer.mechanism == "rappor":
        return _decoded(client(x, k, epsilon, False) == 1, randomizer, rng)
    if randomizer.mechanism == "the":
        noised = client(x, k, epsilon)
        if randomizer.decode == "argmax":
            return int(noised.argmax())
        return _decoded(noised > the_threshold(epsilon), randomizer, rng)
    return _decoded(client(x, k, k, randomizer.bits, epsilon) == 1, randomizer, rng)


def _decoded(
    set_bits: npt.NDArray[np.bool_], randomizer: Randomizer, rng: np.random.Generator
) -> int:
    if randomizer.decode == "first":
        return int(set_bits.argmax())
    places = np.flatnonzero(set_bits)
    return int(rng.choice(places) if len(places) else rng.integers(len(set_bits)))
