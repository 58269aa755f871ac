"""What is unknown to every attack: gradients of zeros or with NaN, rounds that are not fresh."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_fedleak.attacks import PassiveMembership, Query
from lightning_fedleak.attacks.base import RunFacts, UnusableObservation
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage, UpdateSnapshot
from tests.attacks.test_clipping import TEXT, WORDS


@pytest.mark.parametrize("case", WORDS)
@pytest.mark.filterwarnings("ignore:attack 'aligned_flatchat'")
def test_gradients_of_zeros_or_with_nan_are_unknown(case: str) -> None:
    make_model, make = WORDS[case]
    anatomy, attack = find_anatomy(make_model().eval()), make()
    attack.meet(RunFacts())
    names = attack.needs(anatomy).gradients
    attack.prepare(anatomy)
    attack.refresh(anatomy, 0)
    query = Query(TEXT[:2]) if isinstance(attack, PassiveMembership) else None
    for value, said in (
        (0.0, "zero|no gradient until B"),
        (math.nan, "NaN"),
        (-math.inf, "NaN or infinity"),
    ):
        tensors = {name: torch.zeros_like(anatomy.parameter(name)) for name in names}
        tensors[names[0]].view(-1)[3] = value
        with pytest.raises(UnusableObservation, match=said):
            attack.run(Observation((GradientSnapshot(0, Stage.SHARED, tensors),)), query)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("case", ["rows", "lora", "texts", "own gradient", "row spaces"])
def test_a_round_that_goes_on_with_momentum_is_unknown(case: str, optimizer: str) -> None:
    make_model, make = WORDS[case]
    anatomy, attack = find_anatomy(make_model().eval()), make()
    made = {"momentum": 0.9} if optimizer == "SGD" else {}
    attack.meet(RunFacts(optimizer=optimizer, optimizer_settings=made, local_steps=1))
    attack.needs(anatomy)
    attack.prepare(anatomy)
    attack.refresh(anatomy, 0)
    tensors = {n: torch.randn_like(anatomy.parameter(n)) for n in attack.needs(anatomy).gradients}
    stale = UpdateSnapshot(0, Stage.SHARED, tensors, fresh=False)
    query = Query(TEXT[:2]) if isinstance(attack, PassiveMembership) else None
    with pytest.raises(UnusableObservation, match=r"optimizer\.state\.clear\(\)"):
        attack.run(Observation((stale,)), query)
