"""Words are told up to tokens that have one embedding."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fedleak.attacks import Attack, WordGuess
from lightning_fedleak.attacks.base import Query, Surfaces, ThreatModel
from lightning_fedleak.engine.channels.words import _find_twins
from lightning_fedleak.model.anatomy import HEAD_WEIGHT, Anatomy
from lightning_fedleak.model.snapshots import Observation
from tests.helpers.loops import still_gpt2, watched


class Names(Attack):
    """Names given types."""

    threat_model = ThreatModel.create("a test")
    default_name = "names"
    needs_control = False

    def __init__(self, types: list[int]) -> None:
        super().__init__()
        self.types = types

    def needs(self, anatomy: Anatomy) -> Surfaces:
        return Surfaces(gradients=(HEAD_WEIGHT,))

    def run(self, view: Observation, query: Query | None = None) -> WordGuess:
        types = torch.tensor(self.types)
        scores = torch.zeros(64).index_fill(0, types, 1.0)
        return WordGuess(types=types, scores=scores, n_types=float(len(types)), surface="input")


@pytest.mark.parametrize(
    ("unlike", "is_trained", "f1"),
    [((), False, 1.0), ((10,), False, 0.5), ((30, 31), False, 1.0), ((), True, 0.5)],
)
def test_a_word_counts_as_found_where_its_twin_is_named(tmp_path, unlike, is_trained, f1) -> None:
    """Where the embedding is trained, its gradient tells them apart."""
    model: Any = still_gpt2(vocab=64, tied=False)
    weight: Tensor = model.get_input_embeddings().weight.requires_grad_(is_trained)
    with torch.no_grad():
        weight[10:40] = weight[0] * (1 + 1e-6 * torch.randn(30, 1))
        for token in unlike:
            weight[token] += 0.1 * torch.randn(weight.shape[1])
    # The last place of a text has no part in the gradient.
    ids = torch.tensor([[10, 50, 50, 51]])
    batches = [{"input_ids": ids, "labels": ids}]
    watch = watched(tmp_path, [Names([20, 50])], model, batches=batches)
    assert watch.latest["leakage/names/f1"] == f1


def test_classes_of_twins_are_those_of_all_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(400, 24, generator=generator)
    owners = torch.randint(0, 60, (300,), generator=generator)
    matrix[:300] = matrix[300 + owners] * (1 + 1e-6 * torch.randn(300, 1, generator=generator))
    matrix[7] = matrix[11] = 0.0
    near = torch.cdist(matrix.double(), matrix.double()) <= 1e-4 * matrix.double().norm(dim=1)
    numbers = torch.arange(400)
    expected = torch.where(near, numbers, -1).amax(1)
    found = _find_twins(matrix)
    assert found is not None
    assert torch.equal(found, expected)
    assert _find_twins(torch.randn(400, 24, generator=generator)) is None
