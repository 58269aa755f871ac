"""GradientCompression against NumPy in float64, and what error feedback owes to the server."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_fedleak import DPSGD, DefendedStrategy
from lightning_fedleak.defenses import (
    CanaryGradient,
    DefenseError,
    GradientCompression,
    GradientNoise,
)
from lightning_fedleak.model.snapshots import compression_error
from tests.callbacks.runs import fit
from tests.helpers.inputs import context
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.models import tiny_gpt2

METHODS = ("topk", "int8", "int4", "sign", "low_rank")


def updates(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (12, 9), "vector": (7,), "filter": (6, 2, 4), "thin": (10, 2)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def nearest(values: np.ndarray, levels: int) -> np.ndarray:
    """The nearest of 2 levels + 1 evenly spaced values from minus to plus the largest entry."""
    grid = np.linspace(-np.abs(values).max(), np.abs(values).max(), 2 * levels + 1)
    return grid[np.abs(values[..., None] - grid).argmin(-1)]


def largest(values: np.ndarray, share: float) -> np.ndarray:
    """All but the largest entries set to zero, one by one."""
    order = sorted(range(values.size), key=lambda i: -abs(values.flat[i]))
    selected = np.zeros_like(values)
    for i in order[: max(1, math.floor(share * values.size))]:
        selected.flat[i] = values.flat[i]
    return selected


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_topk_sends_the_largest_entries_as_they_are(share: float) -> None:
    sent = GradientCompression("topk", share=share, error_feedback=False).send(updates())
    for name, update in updates().items():
        assert np.array_equal(sent[name].numpy(), largest(update.numpy(), share)), name


@pytest.mark.parametrize(("method", "levels"), [("int8", 127), ("int4", 7)])
def test_rounding_sends_the_nearest_of_evenly_spaced_values(method, levels: int) -> None:
    big = {"large": torch.randn(4000, generator=torch.Generator().manual_seed(1)).double()}
    given = updates(dtype=torch.float64) | big
    sent = GradientCompression(method, error_feedback=False).send(given)
    for name, update in given.items():
        expected = nearest(update.numpy(), levels)
        np.testing.assert_allclose(sent[name].numpy(), expected, rtol=1e-12, atol=1e-15)
    assert levels < len(sent["large"].unique()) <= 2 * levels + 1


def projected(matrix: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """The part of a matrix whose columns lie in the span of (n, r) directions."""
    return directions @ np.linalg.lstsq(directions, matrix, rcond=None)[0]


def test_low_rank_is_a_step_of_the_power_iteration() -> None:
    rank, compression = 3, GradientCompression("low_rank", rank=3, error_feedback=False)
    for seed in range(4):
        update = updates(seed, torch.float64)
        before = {n.removeprefix("factor/"): t.numpy() for n, t in compression.memory.items()}
        sent = compression.send(update)
        for name in ("matrix", "filter"):
            matrix = update[name].numpy().reshape(len(update[name]), -1)
            got = sent[name].numpy().reshape(matrix.shape)
            if seed:
                expected = projected(matrix, matrix @ before[name])
            else:  # the first factor is random: whatever it was, the span is of this rank
                columns, sizes, _ = np.linalg.svd(got)
                assert sizes[rank - 1] > 1e-3
                assert sizes[rank:].max() < 1e-12
                expected = projected(matrix, columns[:, :rank])
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)
        for name in ("vector", "thin"):
            assert torch.equal(sent[name], update[name])


@given(
    method=st.sampled_from(METHODS),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    steps=st.integers(1, 5),
    seed=st.integers(0, 100),
)
def test_what_left_and_the_residual_are_all_updates(method, dtype, steps: int, seed: int) -> None:
    compression = GradientCompression(method, share=0.1, rank=2)
    sums = {name: np.zeros(t.shape) for name, t in updates().items()}
    for step in range(steps):
        update = updates(seed + step, dtype)
        for name, sent in compression.send(update).items():
            assert sent.dtype == dtype
            sums[name] += sent.double().numpy() - update[name].double().numpy()
    assert compression.memory.keys() >= {f"residual/{name}" for name in sums}
    for name, missing in sums.items():
        residual = compression.memory[f"residual/{name}"].double().numpy()
        np.testing.assert_allclose(residual, -missing, atol=1e-12 if dtype.itemsize == 8 else 1e-5)


def model_with(*gradients: torch.Tensor | None) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    return model


def test_it_replaces_gradients_and_flushes_what_has_none() -> None:
    compression = GradientCompression("topk", share=0.2)
    a, b = torch.randn(5, 6), torch.randn(4, 5)
    model = model_with(a.clone(), b.clone())
    compression.on_gradients([*model.parameters()], context(root=model))
    assert np.array_equal(model[0].weight.grad.numpy(), largest(a.numpy(), 0.2))
    remaining = b - model[1].weight.grad
    model[1].weight.grad = None  # this step's loss does not reach it
    compression.on_gradients([*model.parameters()], context(root=model))
    assert np.array_equal(model[1].weight.grad.numpy(), largest(remaining.numpy(), 0.2))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_refused_before_anything_changed(value: float) -> None:
    compression = GradientCompression("topk")
    broken = torch.ones(4, 5)
    broken[2, 3] = value
    model = model_with(torch.randn(5, 6), broken)
    untouched = model[0].weight.grad.clone()
    with pytest.raises(DefenseError, match=r"'1\.weight' holds NaN or infinity"):
        compression.on_gradients([*model.parameters()], context(root=model))
    assert torch.equal(model[0].weight.grad, untouched)
    assert compression.memory == {}


@pytest.mark.parametrize(
    "late", [GradientNoise(1.0, 1.0), DPSGD(1.0, noise_multiplier=1.0)], ids=["noise", "dpsgd"]
)
def test_nothing_that_rewrites_gradients_acts_behind_it(late) -> None:
    with pytest.raises(DefenseError, match=f"put 'gradient_compression' after {late.name}"):
        DefendedStrategy("auto", defenses=[GradientCompression("int8"), late])
    accepted = DefendedStrategy("auto", defenses=[late, GradientCompression("int8")])
    assert [d.name for d in accepted.defenses] == [late.name, "gradient_compression"]


def test_the_residual_behind_noise_holds_noised_values() -> None:
    shapes = [(5, 6), (4, 5)]
    gradients = [torch.randn(shape) for shape in shapes]
    noised, both = model_with(*gradients), model_with(*(g.clone() for g in gradients))
    GradientNoise(None, 1.0, seed=4).on_gradients([*noised.parameters()], context(root=noised))
    where, compression = context(root=both), GradientCompression("topk", share=0.1)
    for defense in (GradientNoise(None, 1.0, seed=4), compression):
        defense.on_gradients([*both.parameters()], where)
    for name, parameter in noised.named_parameters():
        selected = torch.from_numpy(largest(parameter.grad.numpy(), 0.1))
        assert torch.equal(compression.memory[f"residual/{name}"], parameter.grad - selected)


def run(root: Path, compression: GradientCompression, **settings):
    strategy = DefendedStrategy("auto", [compression])
    module = CausalLMModule(tiny_gpt2(dropout=0.0).train(), optimizer="sgd")
    trainer = fit([], root, module=module, n=16, strategy=strategy, **settings)
    return [p.detach().clone() for p in trainer.model.parameters()], trainer


def drop_memory(state: dict) -> bool:
    """Remove residuals and factors wherever a checkpoint holds them; whether there were any."""
    names = [n for n in state if str(n).startswith(("residual/", "factor/"))]
    for name in names:
        del state[name]
    inner = [drop_memory(value) for value in state.values() if isinstance(value, dict)]
    return bool(names) or any(inner)


def test_where_each_process_is_a_client_the_checkpoint_holds_nothing() -> None:
    compression = GradientCompression("topk")
    compression.send(updates())
    assert compression.state_dict().keys() == compression.memory.keys()
    compression.before_setup(context(clients=2))
    assert compression.state_dict() == {}


def test_a_resumed_fit_goes_on_with_residuals_and_factors(tmp_path: Path) -> None:
    for method in ("topk", "low_rank"):
        root = tmp_path / method
        whole, _ = run(root, GradientCompression(method, rank=2), max_epochs=2)
        _, first = run(root, GradientCompression(method, rank=2), max_epochs=1)
        first.save_checkpoint(root / "a.ckpt")
        resumed = GradientCompression(method, rank=2)
        again, _ = run(root, resumed, max_epochs=2, ckpt_path=str(root / "a.ckpt"))
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
        # Without the memory it ends elsewhere.
        state = torch.load(root / "a.ckpt", weights_only=False)
        assert drop_memory(state)
        torch.save(state, root / "b.ckpt")
        resumed = GradientCompression(method, rank=2)
        lost, _ = run(root, resumed, max_epochs=2, ckpt_path=str(root / "b.ckpt"))
        assert not all(torch.equal(a, b) for a, b in zip(whole, lost, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_a_canary_is_compressed_as_a_tensor_and_wholly_sent_in_time(method) -> None:
    generator = torch.Generator().manual_seed(0)
    canary = CanaryGradient(torch.randn(5, 3, 8, generator=generator, dtype=torch.float64))
    where, parameters = context(), [nn.Parameter(torch.zeros(2))]
    later = GradientCompression(method, share=0.3)
    assert later.on_canary(canary, parameters, where) is canary
    lost = GradientCompression(method, share=0.3, error_feedback=False)
    got = lost.on_canary(canary, parameters, where)
    errors = []
    for game in range(3):
        sent = lost.send({"game": canary.samples[:, game].sum(0)})["game"]
        torch.testing.assert_close(got.released[game], sent, rtol=1e-12, atol=1e-12)
        errors.append(compression_error(sent, method))
    assert got.noise_std == pytest.approx(np.sqrt(np.mean(np.square(errors))))
