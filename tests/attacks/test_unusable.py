"""Gradients of zeros alone, or with NaN or infinity: unknown to every attack that reads them."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_fedleak.attacks import PassiveMembership, Query
from lightning_fedleak.attacks.base import RunFacts, UnusableObservation
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage
from tests.attacks.test_clipping import TEXT, WORDS


@pytest.mark.parametrize("case", WORDS)
@pytest.mark.filterwarnings("ignore:attack 'aligned_flatchat'")
def test_they_are_unknown(case: str) -> None:
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
