"""Weights that are computed from other parameters: pruned and parametrized layers."""

import pytest
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from lightning_fedleak import BagOfWords, FlatChat
from lightning_fedleak.model.snapshots import (
    GradientSnapshot,
    Observation,
    Stage,
    UnusableObservation,
)
from tests.helpers.loops import still_gpt2, watched


def pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", amount=0.3)


@pytest.mark.parametrize("change", [pruned, weight_norm])
@pytest.mark.parametrize(
    ("attack", "role"), [(FlatChat(), "head.weight"), (BagOfWords(), "embedding.weight")]
)
def test_an_attack_on_a_computed_weight_is_refused_with_the_reason(tmp_path, change, attack, role):
    model = still_gpt2(tied=False)
    change(model.lm_head if role == "head.weight" else model.transformer.wte)
    with pytest.raises(ValueError, match=f"reads {role}, which is no parameter here"):
        watched(tmp_path, attack, model)


def test_a_gradient_that_a_step_lacks_is_unknown_in_words() -> None:
    with pytest.raises(UnusableObservation, match="no gradient of 'w': was it pruned"):
        Observation((GradientSnapshot(0, Stage.SHARED, {}),)).gradient("w")
