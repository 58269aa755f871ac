"""GradientNoise by float64 arithmetic and the chi-square law; the generators behind it."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_fedleak.defenses import DefenseContext, DefenseError, GradientNoise, noise
from lightning_fedleak.defenses.activations import ActivationNoise
from lightning_fedleak.defenses.noise import add_noise, base_of, noise_key, standard_normal
from tests.helpers.inputs import context

SHAPES = [(40, 30), (30,), (7, 3, 5)]


def parameters_with(
    seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = (scale * gradient).to(dtype)
    return parameters


def flat(parameters: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([p.grad.double().flatten() for p in parameters])


def noise_of(defense: GradientNoise, where: DefenseContext) -> torch.Tensor:
    """The next release's noise: what it makes of a zero gradient."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    defense.on_gradients(parameters, where)
    return flat(parameters)


@given(
    seed=st.integers(0, 100),
    scale=st.floats(1e-4, 1e4),
    clip=st.floats(1e-3, 1e3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_clipping_is_exact(seed: int, scale: float, clip: float, dtype: torch.dtype) -> None:
    parameters = parameters_with(seed, dtype, scale)
    before = flat(parameters)
    norm = float(torch.linalg.vector_norm(before))
    expected = before * min(1.0, clip / norm)
    GradientNoise(clip=clip, sigma=0.0).on_gradients(parameters, context())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(flat(parameters), expected, rtol=tolerance, atol=1e-12)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_has_the_standard_deviation(clip: float | None, dtype: torch.dtype) -> None:
    defense = GradientNoise(clip=clip, sigma=0.8)
    assert defense.standard_deviation == (0.8 if clip is None else 0.4)
    residues = []
    for _ in range(20):
        parameters = parameters_with(dtype=dtype)
        before = flat(parameters)
        norm = float(torch.linalg.vector_norm(before))
        expected = before if clip is None else before * min(1.0, clip / norm)
        defense.on_gradients(parameters, context())
        residues.append(flat(parameters) - expected)
    residue = torch.cat(residues) / defense.standard_deviation
    n = residue.numel()
    statistic = float(residue.square().sum())
    if dtype == torch.float32:
        low, high = scipy.stats.chi2.ppf([1e-4, 1 - 1e-4], n)
        assert low < statistic < high
        assert scipy.stats.kstest(residue.numpy(), "norm").pvalue > 1e-4
    else:
        assert math.sqrt(statistic / n) == pytest.approx(1.0, abs=0.02)
    assert abs(float(residue.mean())) < 4 / math.sqrt(n)


def test_noise_differs_by_client_release_parameter_and_base() -> None:
    draws = [
        noise_of(GradientNoise(None, 1.0), context(client=client, entropy=entropy))
        for client in (0, 1, 2**40)
        for entropy in (b"a" * 32, b"b" * 32)
    ]
    defense = GradientNoise(None, 1.0)
    draws += [noise_of(defense, context(entropy=b"c" * 32)) for _ in range(3)]
    n = draws[0].numel()
    for i, first in enumerate(draws):
        assert len(first.unique()) > 0.98 * n
        for second in draws[:i]:
            assert abs(float((first * second).mean())) < 5 / math.sqrt(n)
            assert float(torch.isin(first, second).double().mean()) < 0.02


def test_a_gradient_of_none_counts_as_zero_and_is_noised() -> None:
    parameters = parameters_with()
    parameters[1].grad = None
    GradientNoise(clip=1.0, sigma=1.0).on_gradients(parameters, context())
    assert parameters[1].grad is not None
    assert float(parameters[1].grad.std()) == pytest.approx(1.0, rel=0.5)
    parameters[1].grad = None
    GradientNoise(clip=1.0, sigma=0.0).on_gradients(parameters, context())
    assert parameters[1].grad is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_update_is_not_released_where_nothing_bounds_it(value: float) -> None:
    root = nn.Linear(3, 2)
    root.weight.grad, root.bias.grad = torch.ones(2, 3), torch.ones(2)
    root.weight.grad[1, 2] = value
    defense = GradientNoise(clip=None, sigma=1.0)
    with pytest.raises(DefenseError, match="the norm is not finite; nothing was released"):
        defense.on_gradients(list(root.parameters()), context(root=root))
    assert torch.equal(root.bias.grad, torch.ones(2))
    assert defense.releases == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_broken_update_counts_as_zero_under_a_clip(value: float) -> None:
    root = nn.Linear(3, 2)
    root.weight.grad, root.bias.grad = torch.ones(2, 3), torch.ones(2)
    root.weight.grad[1, 2] = value
    defense, silent = GradientNoise(clip=1.0, sigma=1.0), nn.Linear(3, 2)
    defense.on_gradients([*root.parameters()], context(root=root))
    GradientNoise(clip=1.0, sigma=1.0).on_gradients([*silent.parameters()], context(root=silent))
    assert torch.equal(flat([*root.parameters()]), flat([*silent.parameters()]))
    assert defense.releases == 1


def test_an_overflow_is_told_and_a_sparse_gradient_becomes_dense() -> None:
    root = nn.Embedding(4, 2, sparse=True)
    root.weight.grad = torch.full((4, 2), 1e30)
    with pytest.raises(DefenseError, match="not finite"):
        GradientNoise(clip=None, sigma=1.0).on_gradients([root.weight], context(root=root))
    root.weight.grad = None
    root(torch.tensor([1, 1])).sum().backward()
    silent = nn.Embedding(4, 2)
    silent.weight.grad = torch.zeros(4, 2)
    for one in (root, silent):
        GradientNoise(clip=1.0, sigma=1.0).on_gradients([one.weight], context(root=one))
    assert root.weight.grad.layout == torch.strided
    expected = torch.zeros(4, 2)
    expected[1] = math.sqrt(0.5)
    torch.testing.assert_close(root.weight.grad - silent.weight.grad, expected)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("releases", [1, 37])
def test_epsilon_is_that_of_the_composed_gaussian_mechanism(sigma, releases) -> None:
    """Independent: Google's dp-accounting, one Gaussian event of the composed noise."""
    one = sigma * math.sqrt(1 / releases) / 2
    expected = dp_accounting.get_epsilon_gaussian(one, 1e-5)
    defense = GradientNoise(0.7, sigma)
    for _ in range(releases):
        noise_of(defense, context())
    assert defense.epsilon(1e-5) == pytest.approx(expected, rel=1e-6)


def test_epsilon_is_zero_without_a_release_and_infinite_where_nothing_holds() -> None:
    defense = GradientNoise(1.0, 2.0)
    assert defense.epsilon(1e-5) == 0
    for void in (
        GradientNoise(None, 1.0),
        GradientNoise(1.0, 0.0),
        GradientNoise(1.0, 1.0, seed=1),
    ):
        void.on_gradients([nn.Parameter(torch.zeros(3))], context())
        assert void.epsilon(1e-5) == math.inf
        assert void.guarantee.startswith("none")
    assert not GradientNoise(1.0, 1.0).guarantee.startswith("none")
    with pytest.raises(ValueError, match="delta"):
        defense.epsilon(0.0)


@pytest.mark.parametrize("kind", [GradientNoise, ActivationNoise])
def test_noise_is_turned_up_to_the_limit_of_hardenings(kind: type) -> None:
    defense = kind(1, 1.0, max_hardenings=1)
    assert defense.harden() is not None
    assert defense.harden() is None
    with pytest.raises(DefenseError, match=r"max_hardenings must be .* got -1"):
        kind(1, 1.0, max_hardenings=-1)


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
