"""Weights that something else than the optimizer's step writes, and weights that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.defenses.dpsgd.writes import Buffers, fingerprint
from tests.defenses.dpsgd.test_dpsgd import Run, first
from tests.defenses.dpsgd.test_dpsgd_silent import noisy

Write = Callable[[nn.Module], None]


class Optimized(Run):
    """Steps a real optimizer, as training does."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)

    def step(self, batch: Any, lr: float = 0.1, between: Write | None = None) -> Tensor:
        self.backward(batch)
        if between is not None:
            between(self.root)
        update = self.release()
        self.optimizer.step()
        return update


@pytest.fixture
def runs() -> Iterator[Callable[[], Optimized]]:
    made: list[Optimized] = []

    def make() -> Optimized:
        made.append(Optimized(noisy()))
        return made[-1]

    yield make
    for run in made:
        run.defense.teardown()


def by_data(root: nn.Module) -> None:
    root.above.bias.data[1] += 1e-6  # type: ignore[index, operator, union-attr]


def in_place(root: nn.Module) -> None:
    with torch.no_grad():
        root.above.bias[1] += 1e-6  # type: ignore[index, operator]


def replaced(root: nn.Module) -> None:
    root.above.bias.data = root.above.bias.data + 1e-6  # type: ignore[union-attr, operator]


WRITES = [by_data, in_place, replaced]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("after_backward", [True, False])
def test_weights_written_outside_of_the_optimizers_step_are_refused(
    write: Write, after_backward: bool, runs: Any
) -> None:
    run = runs()
    for _ in range(3):
        run.step(first(5))
    if not after_backward:
        write(run.root)
    with pytest.raises(DefenseError, match=r"'above.bias' was written to since"):
        run.step(first(5), between=write if after_backward else None)
    assert run.defense.releases == 3


def average(root: nn.Module) -> list[Tensor]:
    return [p.detach().clone() * 0.5 for p in root.parameters()]


def swapped_by_copy(root: nn.Module) -> None:
    copies = [p.detach().clone() for p in root.parameters()]
    with torch.no_grad():
        for p, mean in zip(root.parameters(), average(root), strict=True):
            p.copy_(mean)
        for p, old in zip(root.parameters(), copies, strict=True):
            p.copy_(old)


def swapped_by_pointer(root: nn.Module) -> None:
    copies = [p.data for p in root.parameters()]
    for p, mean in zip(root.parameters(), average(root), strict=True):
        p.data = mean
    for p, old in zip(root.parameters(), copies, strict=True):
        p.data = old.clone()


@pytest.mark.parametrize("swap", [swapped_by_copy, swapped_by_pointer])
def test_averages_may_be_swapped_in_and_back(swap: Write, runs: Any) -> None:
    run = runs()
    for _ in range(4):
        run.step(first(5))
        swap(run.root)
    assert run.defense.releases == 4


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_after_a_release_stop_the_run(value: float, runs: Any) -> None:
    run = runs()
    run.step(first(5))
    run.optimizer.param_groups[0]["lr"] = value
    run.step(first(5))
    with pytest.raises(DefenseError, match=r"'below.weight' is not finite.*learning rate"):
        run.backward(first(5))
    assert run.defense.releases == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64])
@pytest.mark.parametrize("written", [None, 0, 1])
def test_a_write_in_one_piece_of_a_batch_is_not_forgotten_in_the_next(
    written: int | None, dtype: torch.dtype
) -> None:
    root = nn.Module()
    first_number = math.nan if dtype.is_floating_point else 1
    root.register_buffer("kept", torch.tensor([first_number, 2, 3], dtype=dtype))
    buffers = Buffers(root)
    for piece in (0, 1):
        buffers.read(all_contents=False)
        if piece == written:
            root.kept.data[2] = 4  # type: ignore[union-attr, operator]
        buffers.check_unchanged()
    equal = [bool(is_equal) for is_equal in buffers.comparisons.values()]
    if written is None:
        buffers.check(equal)
    else:
        with pytest.raises(DefenseError, match="changed the buffer 'kept'"):
            buffers.check(equal)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (16, 8)])
def test_a_print_tells_any_number_that_changes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(1, math.prod(shape) + 1).reshape(shape).to(dtype)
    before = fingerprint(tensor)
    for i in range(tensor.numel()):
        other = tensor.clone()
        other.view(-1)[i] += 1
        assert not torch.equal(fingerprint(other), before)
    if len(shape) == 2:
        across = torch.empty(shape[::-1], dtype=dtype).t().copy_(tensor)
        assert torch.equal(fingerprint(across), before)
        assert torch.equal(fingerprint(torch.cat([tensor, tensor])[shape[0] :]), before)


def test_a_print_tells_a_change_of_any_tensor_that_a_quantized_weight_consists_of() -> None:
    values = torch.arange(6.0).view(2, 3)
    before = fingerprint(TwoTensor(values, values))
    assert torch.equal(fingerprint(TwoTensor(values.clone(), values.clone())), before)
    for pair in ((values + 1, values), (values, values + 1)):
        assert not torch.equal(fingerprint(TwoTensor(*pair)), before)
