"""Clipped sums of LoRA on quantized bases, against float64 on the numbers that these stand for.

``make test-quantized`` installs the packages that these tests need, and runs them.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lightning_fedleak.defenses import DPSGD, DefenseError
from tests.defenses.dpsgd.test_dpsgd import Pieces, clipped
from tests.defenses.dpsgd.test_logical import check_removal, exact_sum
from tests.engine import test_quantized_bases as bases
from tests.engine.test_quantized_bases import VOCAB, nf4, torchao
from tests.helpers.models import own_rng
from tests.trainers.hosts import trainer_of

folder = bases.folder  # of a tiny Llama

BASES = {"nf4": nf4, "nf4, double": partial(nf4, double=True), "torchao int8": torchao}
LORA = LoraConfig(
    r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
)


def adapted(base: nn.Module) -> nn.Module:
    with own_rng(1):
        return get_peft_model(base, LORA).train()


def dequantized(base: nn.Module) -> nn.Module:
    """Return the base in float64, each layer a plain one that maps the unit vectors as before."""
    for name, layer in [*base.train().model.layers.named_modules()]:
        if isinstance(layer, nn.Linear):
            plain = nn.Linear(layer.in_features, layer.out_features, dtype=torch.float64)
            zero, unit = torch.zeros(1, layer.in_features), torch.eye(layer.in_features)
            with torch.no_grad():
                plain.bias.copy_(layer(zero)[0])
                plain.weight.copy_((layer(unit) - layer(zero)).T)
            base.model.layers.set_submodule(name, plain.requires_grad_(False))
    return base.double()


def rows(*numbers: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, VOCAB, (33, 12), generator=generator)[list(numbers)]
    return {"input_ids": ids, "labels": ids}


def run_of(base: nn.Module, clip: float = 1.0) -> Pieces:
    run = Pieces(DPSGD(clip, noise_multiplier=0.0), root=adapted(base))
    run.loss = lambda batch: run.root(**batch).loss  # type: ignore[method-assign]
    return run


@pytest.mark.parametrize("name", BASES)
def test_clipped_sums_are_those_of_the_base_in_float64(folder: Path, name: str) -> None:
    twin, gradients = adapted(dequantized(BASES[name](folder))).double(), []
    trained = [p for p in twin.parameters() if p.requires_grad]
    for number in range(6):
        row = torch.autograd.grad(twin(**rows(number)).loss, trained)
        gradients.append(torch.cat([gradient.flatten() for gradient in row]))
    exact = torch.stack(gradients)
    clip = float(exact.norm(dim=1).median())
    expected = clipped(exact, clip).sum(0)
    run = run_of(BASES[name](folder), clip)
    assert all(map(torch.equal, run.parameters, (p.float() for p in trained)))
    total = exact_sum(run, rows(*range(6)))
    assert float((total - expected).norm()) < 1e-5 * float(expected.norm())


@pytest.mark.parametrize("name", BASES)
def test_a_step_that_writes_to_the_weights_of_the_base_is_refused(folder: Path, name: str) -> None:
    run = run_of(BASES[name](folder))
    weight: Any = run.root.model.model.layers[1].mlp.up_proj.base_layer.weight
    stored = weight.qdata if hasattr(weight, "qdata") else weight.data

    def loss(batch: dict[str, Tensor]) -> Tensor:
        stored.view(-1)[3] += 1
        return run.root(**batch).loss  # type: ignore[no-any-return]

    run.loss = loss  # type: ignore[method-assign]
    with pytest.raises(DefenseError, match=r"must not write to '.*up_proj\.base_layer"):
        run.backward(rows(0, 1))


def test_a_row_that_is_removed_leaves_the_others_where_four_bits_compute_in_half(
    folder: Path,
) -> None:
    run = run_of(nf4(folder, compute=torch.bfloat16), clip=0.3)
    check_removal(lambda *numbers: exact_sum(run, rows(*numbers)), clip=0.3)


def test_transformers_trainer_releases_the_same_sum(folder: Path, tmp_path: Path) -> None:
    model = adapted(nf4(folder))
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    examples = [{name: value[0] for name, value in rows(number).items()} for number in range(6)]
    trainer_of(
        tmp_path,
        model,
        [DPSGD(0.5, noise_multiplier=0.0)],
        lr=1.0,  # of SGD: weights move by the gradient
        train_dataset=examples,
        per_device_train_batch_size=6,  # of 6 rows: each is drawn
    ).train()
    run = run_of(nf4(folder), 0.5)
    expected = exact_sum(run, rows(*range(6)))
    moved = [a - b.detach() for a, b in zip(before, trained, strict=True)]
    total = 6 * torch.cat([one.flatten() for one in moved]).double()
    assert float((total - expected).norm()) < 1e-4 * float(expected.norm())
