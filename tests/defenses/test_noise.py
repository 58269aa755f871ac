"""The generators behind the noise: their law, their state, and what they leave alone."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import scipy.stats
import torch

from lightning_fedleak.defenses import noise
from lightning_fedleak.defenses.noise import base_of, noise_key, standard_normal

CPU = torch.device("cpu")


def draw(key: bytes, n: int = 4096, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return standard_normal(key, torch.Size([n]), CPU, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("twister", [True, False])
def test_it_is_standard_normal(dtype, twister: bool, monkeypatch) -> None:
    monkeypatch.setattr(noise, "_twister_is_known", lambda: twister)
    sample = draw(b"k" * 32, 20_000, dtype)
    assert sample.dtype == dtype
    assert scipy.stats.kstest(sample.numpy(), "norm").pvalue > 1e-4


def test_the_twister_draws_what_numpy_draws_from_the_same_state() -> None:
    assert noise._twister_is_known()
    key = bytes(range(32))
    words = np.frombuffer(hashlib.shake_256(key).digest(4 * 624), dtype="<u4")
    reference = np.random.RandomState()
    reference.set_state(("MT19937", words, 624))
    expected = reference.randint(0, 2**32, 2000, dtype=np.uint32).astype(np.int64) % 2**20
    drawn = torch.empty(2000, dtype=torch.int64).random_(0, 2**20, generator=noise._twister(key))
    assert np.array_equal(drawn.numpy(), expected)


def test_every_byte_of_the_key_counts() -> None:
    keys = [bytes(32)] + [bytes(i) + b"\1" + bytes(31 - i) for i in range(32)]
    draws = torch.stack([draw(key, 64) for key in keys])
    assert len(draws.unique(dim=0)) == len(keys)
    again = draw(keys[5], 64)
    assert torch.equal(again, draws[5])


def test_keys_differ_in_every_field() -> None:
    keys = {
        noise_key(base, client, release, index, name, stream)
        for base in (b"a" * 32, b"b" * 32)
        for client in (0, 1)
        for release in (0, 1)
        for index in (0, 1)
        for name in ("x", "y")
        for stream in ("gradient", "canary")
    }
    assert len(keys) == 64
    assert base_of(b"e" * 32, None) == b"e" * 32
    assert base_of(b"e" * 32, 1) == base_of(b"f" * 32, 1) != base_of(b"e" * 32, 2)


def test_the_global_generators_are_left_alone() -> None:
    before, legacy = torch.get_rng_state(), np.random.get_state()[1].copy()
    noise._twister_is_known.cache_clear()
    draw(b"k" * 32)
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(legacy, np.random.get_state()[1])
