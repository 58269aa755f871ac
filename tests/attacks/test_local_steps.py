"""What optimizers make of gradients, against torch's own and against sums done by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_fedleak.attacks.base import RunFacts, UnusableObservation
from lightning_fedleak.attacks.local_steps import LocalSteps


def facts(optimizer: str, steps: int = 1, **made: Any) -> RunFacts:
    return RunFacts(optimizer=optimizer, optimizer_settings=made, local_steps=steps)


def known(optimizer: str, steps: int = 1, **made: Any) -> LocalSteps:
    result = LocalSteps.from_facts(facts(optimizer, steps, **made))
    assert result is not None
    return result


def trained(kind: type, before: Tensor, gradients: list[Tensor], **made: Any) -> Tensor:
    moved = nn.Parameter(before.clone())
    optimizer = kind([moved], **made)
    for gradient in gradients:
        moved.grad = gradient
        optimizer.step()
    return moved.detach()


@given(
    steps=st.integers(1, 5),
    rate=st.floats(1e-3, 0.5),
    decay=st.floats(0.0, 0.3),
    momentum=st.floats(0.0, 0.95),
    dampening=st.floats(0.0, 0.5),
    seed=st.integers(0, 2**16),
)
def test_without_decay_an_update_of_sgd_is_a_combination_of_its_gradients(
    steps: int, rate: float, decay: float, momentum: float, dampening: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(4, 9, generator=generator, dtype=torch.float64) for _ in range(steps)]
    made = {"lr": rate, "weight_decay": decay, "momentum": momentum, "dampening": dampening}
    after = trained(torch.optim.SGD, before, gradients, **made)
    gradient = known("SGD", steps, **made).without_decay((before - after) / rate, before, rate)
    basis = torch.stack([g.flatten() for g in gradients], 1)
    weights = torch.linalg.lstsq(basis, gradient.flatten()[:, None]).solution
    assert torch.allclose(basis @ weights, gradient.flatten()[:, None], atol=1e-8)


@pytest.mark.parametrize("steps", [1, 3])
def test_decay_that_is_decoupled_is_undone(steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(steps)]
    plain = trained(torch.optim.AdamW, before, gradients, lr=1e-3, weight_decay=0.0)
    decayed = trained(torch.optim.AdamW, before, gradients, lr=1e-3, weight_decay=0.3)
    made = known("AdamW", steps, lr=1e-3, weight_decay=0.3)
    gradient = made.without_decay((before - decayed) / 1e-3, before, 1e-3)
    assert torch.allclose(gradient, (before - plain) / 1e-3, atol=4e-3)


@pytest.mark.parametrize(
    ("kind", "steps", "largest"),
    [
        ("Adam", 1, 1.0),
        ("AdamW", 4, 1.0),
        ("SGD", 4, 1.0),
        ("RMSprop", 1, 10.0),
        ("Adagrad", 1, 1.0),
        ("NAdam", 1, 1.0),
    ],
)
def test_the_largest_step(kind: str, steps: int, largest: float) -> None:
    settings = {"momentum_decay": 0.0} if kind == "NAdam" else {}
    result = known(kind, steps, lr=1e-3, weight_decay=0.1, **settings).largest
    assert result == pytest.approx(largest, rel=0.3 if kind == "NAdam" else 1e-6)


@pytest.mark.parametrize(
    ("kind", "steps", "made", "properties"),
    [
        ("SGD", 1, {}, "linear"),
        ("SGD", 1, {"momentum": 0.9}, "linear carries"),
        ("Adam", 1, {}, "carries invertible"),
        ("AdamW", 1, {}, "carries invertible"),
        ("AdamW", 2, {}, "carries"),
        ("RMSprop", 1, {}, "carries"),
    ],
)
def test_what_is_linear_what_carries_and_what_is_invertible(kind, steps, made, properties) -> None:
    found = known(kind, steps, lr=0.1, **made)
    for name in ("linear", "carries", "invertible"):
        assert getattr(found, name) == (name in properties)


def test_settings_of_a_group_make_the_optimizer_again() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad):
        optimizer = kind([parameter], lr=0.25)
        group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        made = known(kind.__name__, 2, **group, initial_lr=0.5)
        again = made.make_optimizer([parameter]).param_groups[0]
        assert {k: again[k] for k in group if k in again and k != "foreach"} == {
            k: v for k, v in group.items() if k in again and k != "foreach"
        }
    assert known("AdamW", lr=0.0, initial_lr=3e-4).rate == 3e-4


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (facts("Sophia"), "Sophia makes of gradients is not known"),
        (facts("LBFGS"), "not known"),
        (facts("Optimizer"), "not known"),
        (facts("SGD", lr=0.1, maximize=True), "ascends"),
    ],
)
def test_what_is_not_known_is_said(given: RunFacts, match: str) -> None:
    with pytest.raises(UnusableObservation, match=match):
        LocalSteps.from_facts(given)


@given(
    kind=st.sampled_from(["Adam", "AdamW"]),
    decay=st.sampled_from([0.0, 0.01, 0.3]),
    rate=st.floats(1e-5, 1e-2),
    eps=st.sampled_from([1e-8, 1e-6]),
    seed=st.integers(0, 2**16),
)
def test_a_first_step_of_adam_gives_its_gradient_back(kind, decay, rate, eps, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(8, 400, generator=generator) * 0.1
    size = 10 ** (8 * torch.rand(8, 400, generator=generator) - 10)
    gradient = size * torch.randn(8, 400, generator=generator).sign()
    made = {"lr": rate, "weight_decay": decay, "eps": eps}
    after = trained(getattr(torch.optim, kind), before, [gradient], **made)
    result, error = known(kind, **made).invert((before - after) / rate, before, rate)
    off = (result - gradient.double()).abs()
    visible = error < 0.1 * result.abs()
    assert bool((off <= 6 * error)[visible].all())
    # With a decay that Adam divides, a gradient far below that decay is not seen.
    small = (gradient.abs() < 30 * eps) & (torch.tensor(rate) > 1e-4)
    if decay == 0.0 or kind == "AdamW":
        assert float(visible[small].double().mean() if bool(small.any()) else 1.0) > 0.8
    assert bool((error > 0).all())
    beyond = ~error.isfinite()
    if decay == 0.0 or kind == "AdamW":
        assert bool((result.sign() == gradient.sign())[beyond].all())
        assert bool((gradient.abs() >= 0.2 * result.abs())[beyond].all())


def test_the_error_of_an_inverted_step_covers_noise() -> None:
    torch.manual_seed(0)
    before, gradient = torch.randn(40, 30), 1e-7 * torch.randn(40, 30)
    made = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0}
    after = trained(torch.optim.AdamW, before, [gradient], **made)
    update = (before - after) / 1e-3
    spoilt = update + 1e-2 * torch.randn(40, 30)
    result, error = known("AdamW", **made).invert(spoilt, before, 1e-3, 1e-2)
    observed = error.isfinite()
    assert 0.3 < float(observed.double().mean()) < 1.0
    off = (result - gradient.double()).abs()
    assert float((off <= 3 * error)[observed].double().mean()) > 0.95
    ignored = known("AdamW", **made).invert(spoilt, before, 1e-3)[1]
    assert float((off <= 3 * ignored)[observed].double().mean()) < 0.6
