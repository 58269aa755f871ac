"""The generators behind the noise: their law, their state, and what they leave alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_fedleak.defenses import noise
from lightning_fedleak.defenses.noise import (
    add_noise,
    base_of,
    noise_key,
    standard_normal,
)

CPU = torch.device("cpu")


def draw(key: bytes, n: int = 4096, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return standard_normal(key, torch.Size([n]), CPU, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2 * noise._BLOCK + 1,)])
def test_what_is_added_is_bit_for_bit_the_same(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    key = noise_key(b"k" * 32, 3, 2, client=1, name="n")
    for form in (lambda x: x, lambda x: x.mT if x.dim() == 2 else x):
        onto = form(torch.linspace(-1, 1, int(np.prod(shape)), dtype=dtype).reshape(shape))
        expected = onto.clone()
        expected.add_(standard_normal(key, onto.shape, CPU, dtype), alpha=0.3)
        add_noise(b"k" * 32, 3, 1, "n", 2, onto, 0.3)
        assert torch.equal(onto, expected)


def test_it_is_box_and_muller_of_philox() -> None:
    # Not of a generator that is linear over bits, whose state follows from numbers it has drawn.
    key, n = bytes(range(32)), 1000
    counter = int.from_bytes(key[16:], "big") << 128
    philox = np.random.Philox(key=int.from_bytes(key[:16], "big"), counter=counter)
    words = philox.random_raw(n // 2).view(np.int32).astype(np.float64)
    radius = np.sqrt(-2 * np.log((np.abs(words[: n // 2]) + 0.5) / 2**31))
    angle = np.pi * words[n // 2 :] / 2**31
    expected = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    assert np.allclose(draw(key, n).numpy(), expected, atol=2e-6)


def test_every_byte_of_the_key_counts() -> None:
    keys = [bytes(32)] + [bytes(i) + b"\1" + bytes(31 - i) for i in range(32)]
    draws = torch.stack([draw(key, 64) for key in keys])
    assert len(draws.unique(dim=0)) == len(keys)
    again = draw(keys[5], 64)
    assert torch.equal(again, draws[5])


def test_keys_differ_in_every_field() -> None:
    keys = {
        noise_key(base, release, index, client=client, name=name, stream=stream)
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
