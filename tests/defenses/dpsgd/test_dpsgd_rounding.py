"""The comparison with autograd where products are rounded: no example's content stops a run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_fedleak.defenses import DPSGD, DefenseError, mean_of_sample_means
from lightning_fedleak.defenses.dpsgd import loss_graph
from tests.defenses.dpsgd.test_dpsgd import CLIP, Run, first
from tests.defenses.dpsgd.test_logical import Pieces
from tests.helpers.models import tiny_gpt2

LAYER = "transformer.h.0.mlp.c_fc.weight"
ACROSS = [16, 17, 27, 56, 73, 165, 186, 190, 212, 226, 246, 293]
"""Rows with a gradient that lies across the random direction along which it is compared."""


def in_bf16(
    defense: DPSGD | None = None,
    precision: str = "bf16-mixed",
    root: nn.Module | None = None,
    **model: float,
) -> Pieces:
    root = (root or tiny_gpt2(**model)).train()  # type: ignore[arg-type]
    run = Pieces(defense or DPSGD(CLIP, 0.0), root=root, precision=precision)

    def loss(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return run.root(**batch).loss  # type: ignore[no-any-return]

    run.loss = loss  # type: ignore[method-assign]
    return run


def rows(*numbers: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = tiny_gpt2().config.vocab_size
    ids = torch.randint(5, vocabulary, (300, 12), generator=generator)[list(numbers)]
    return {"input_ids": ids, "labels": ids}


def test_no_ordinary_row_stops_a_run_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_graph, "CHECK_EVERY", 1)
    run = in_bf16()
    for number in ACROSS:
        run.backward(rows(number))
        run.release()
    assert run.defense.releases == len(ACROSS)


@pytest.mark.parametrize("factor", [0.0, 1.3, 2.0])
@pytest.mark.parametrize("samples", [1, 32])
def test_a_hook_that_changes_a_gradient_is_noticed_in_bf16(factor: float, samples: int) -> None:
    run = in_bf16()
    run.root.get_parameter(LAYER).register_hook(lambda gradient: factor * gradient)
    run.backward(rows(*range(samples)))
    with pytest.raises(DefenseError, match="is not the sum of its recorded per-sample gradients"):
        run.release()


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_products_that_a_card_may_round_are_compared_less_closely(precision: str) -> None:
    """What TF32 may do to a gradient is too much of a difference in float32."""
    run = Run(DPSGD(CLIP, noise_multiplier=0.0))
    run.root.above.weight.register_hook(lambda gradient: 1.03 * gradient)
    run.backward(first(5))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        if precision == "highest":
            with pytest.raises(DefenseError, match=r"'above\.weight' is not the sum"):
                run.release()
        else:
            run.release()
    finally:
        torch.set_float32_matmul_precision(before)


def check_removal(total: Callable[..., Tensor], clip: float = CLIP) -> None:
    """Of 33 rows, one that is removed takes away its own clipped gradient, and no more."""
    whole = total(*range(33))
    for removed in (0, 32):
        rest = total(*(number for number in range(33) if number != removed))
        assert float((whole - rest - total(removed)).norm()) < 1e-3 * clip
        assert float((whole - rest).norm()) < (1 + 1e-3) * clip


@pytest.mark.parametrize("form", ["sample means", "token mean"])
@pytest.mark.parametrize("most", [None, 7])
def test_a_row_that_is_removed_leaves_the_others_as_they_were(form: str, most: int | None) -> None:
    """With a mean over 33 rows each of them was rounded otherwise than in one over 32."""
    run = in_bf16(DPSGD(CLIP, 0.0, max_physical_batch_size=most), dropout=0.0)
    batch = rows(*range(33))
    batch["labels"] = batch["labels"].clone()
    for number, length in enumerate(torch.arange(33) % 10 + 2):
        batch["labels"][number, int(length) :] = -100

    def loss(given: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            if form == "token mean":
                return run.root(**given).loss  # type: ignore[no-any-return]
            logits = run.root(input_ids=given["input_ids"]).logits
            return mean_of_sample_means(logits, given["labels"], causal=True)

    run.loss = loss  # type: ignore[method-assign]

    def clipped_sum(*numbers: int) -> Tensor:
        run.backward({key: value[list(numbers)] for key, value in batch.items()})
        return run.release().double() * 8

    check_removal(clipped_sum)


def exact_sum(run: Pieces, batch: dict[str, Tensor]) -> Tensor:
    """Return the clipped sum of a step, (d,) float64, before it is stored in the weights' type."""
    run.backward(batch)
    clipped = run.defense._step.clipped(run.parameters, run.context)
    total = torch.cat([clipped.sum_of(p).double().flatten() for p in run.parameters])
    run.release()
    return total


@pytest.mark.parametrize("half", ["weights", "autocast"])
def test_removal_holds_where_no_precision_flag_says_half(half: str) -> None:
    """Lightning calls it 32-true where weights are in bf16, or training_step has an autocast."""
    run = in_bf16(precision="32-true", dropout=0.0)
    if half == "weights":
        run = Pieces(DPSGD(CLIP, 0.0), root=run.root.bfloat16(), precision="32-true")
        run.loss = lambda batch: run.root(**batch).loss  # type: ignore[method-assign]
    check_removal(lambda *numbers: exact_sum(run, rows(*numbers)))
