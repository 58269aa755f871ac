"""The comparison with autograd where products are rounded: no example's content stops a run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_fedleak.defenses import DPSGD, DefenseError
from lightning_fedleak.defenses.dpsgd import step
from tests.defenses.dpsgd.test_dpsgd import CLIP, Run, first
from tests.helpers.models import tiny_gpt2

LAYER = "transformer.h.0.mlp.c_fc.weight"
ACROSS = [16, 17, 27, 56, 73, 165, 186, 190, 212, 226, 246, 293]
"""Rows with a gradient that lies across the random direction along which it is compared."""


def in_bf16() -> Run:
    run = Run(DPSGD(CLIP, noise_multiplier=0.0), tiny_gpt2(), precision="bf16-mixed")

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
    monkeypatch.setattr(step, "CHECK_EVERY", 1)
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
    with pytest.raises(DefenseError, match="is not the sum of what its layer was seen to add"):
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
