"""Replacements for words that multi-freq-ldpy's clients draw: a second opinion on TokenLDP's laws.

One value is drawn at a time. The clients report values and vectors; the decoding rules are those of
:mod:`lightning_fedleak.defenses.token_ldp.mechanisms`. The clients run as plain Python: for a few
thousand draws numba's compiler would take longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from multi_freq_ldpy.long_freq_est.dBitFlipPM import dBitFlipPM_Client
from multi_freq_ldpy.long_freq_est.L_SUE import L_SUE_Client
from multi_freq_ldpy.pure_frequency_oracles.GRR import GRR_Client
from multi_freq_ldpy.pure_frequency_oracles.HE import HE_Client
from multi_freq_ldpy.pure_frequency_oracles.UE import UE_Client
from torch import Tensor

from lightning_fedleak.defenses.token_ldp.mechanisms import Randomizer, the_threshold

CLIENTS: dict[str, Any] = {
    "grr": GRR_Client.py_func,
    "rappor": UE_Client.py_func,
    "the": HE_Client.py_func,
    "dbitflip": dBitFlipPM_Client.py_func,
    "longitudinal": L_SUE_Client.py_func,
}
"""Clients of multi-freq-ldpy, not compiled."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed numpy's global generator, from which the clients draw, within this context."""
    state = np.random.get_state()
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        np.random.set_state(state)


def reference_sample(randomizer: Randomizer, index: Tensor, epsilon: float, seed: int) -> Tensor:
    """Return one draw for each index, as :meth:`Randomizer.sample` does.

    Args:
        randomizer: mechanism, domain and rule.
        index: (n,) int64 in [0, k), on the CPU.
        epsilon: of each draw.
        seed: of this call.

    Returns:
        (n,) int64.
    """
    rng = np.random.default_rng(seed)
    with seeded(seed):
        indices = [_sample_one(randomizer, x, epsilon, rng) for x in index.tolist()]
    return torch.tensor(indices, dtype=torch.int64)


def _sample_one(randomizer: Randomizer, x: int, epsilon: float, rng: np.random.Generator) -> int:
    client, k = CLIENTS[randomizer.mechanism], randomizer.k
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
