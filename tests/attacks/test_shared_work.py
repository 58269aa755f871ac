"""What attacks share at a look: results as each alone, and gradients that none can read."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from lightning_fedleak.attacks import (
    GradientMembership,
    PassiveMembership,
    Query,
    SubspaceMembership,
    SubspaceWords,
)
from lightning_fedleak.attacks.base import RunFacts, UnusableObservation
from lightning_fedleak.attacks.membership import token_parts
from lightning_fedleak.attacks.public_text import do_once, share_work
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.snapshots import (
    GradientSnapshot,
    NotYet,
    Observation,
    Stage,
    UpdateSnapshot,
)
from tests.attacks.test_clipping import TEXT, WORDS
from tests.helpers.models import VOCAB, tiny_gpt2


def test_an_unusable_gradient_is_not_tried_again_and_other_errors_are() -> None:
    tries: list[int] = []

    def fail(error: type[Exception]) -> int:
        tries.append(1)
        raise error("no")

    with share_work():
        for error in (NotYet, NotYet, ValueError, ValueError):
            with pytest.raises(error, match="no"):
                do_once(error.__name__, partial(fail, error))
    assert len(tries) == 3


def test_without_a_shared_block_all_is_computed_again() -> None:
    assert [do_once("key", iter([i]).__next__) for i in range(2)] == [0, 1]


def snapshot(ids: torch.Tensor, names: Any, model: torch.nn.Module) -> Observation:
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    anatomy = find_anatomy(model)
    tensors = {name: anatomy.parameter(name).grad.clone() for name in names}
    return Observation((GradientSnapshot(0, Stage.SHARED, tensors),))


def test_attacks_at_one_look_guess_as_each_would_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_gpt2(d=64).eval()
    anatomy = find_anatomy(model)
    ids = torch.randint(3, VOCAB, (24, 8), generator=torch.Generator().manual_seed(0))
    attacks = [
        SubspaceWords(capacity_seconds=0),
        SubspaceMembership(ids[8:], public_rows=8),
        GradientMembership(ids[8:], public_rows=8),
    ]
    names: dict[str, None] = {}
    for attack in attacks:
        attack.prepare(anatomy)
        attack.refresh(anatomy, 0)
        names |= dict.fromkeys(attack.needs(anatomy).gradients)
    views = [snapshot(ids[:2], names, model), snapshot(ids[2:4], names, model)]
    query = Query(ids[:8])
    runs: list[int] = []
    read_texts = token_parts.map_token_parts

    def counted(*arguments: Any) -> list[Any]:
        runs.append(1)
        return read_texts(*arguments)

    monkeypatch.setattr(token_parts, "map_token_parts", counted)

    def scores() -> list[torch.Tensor]:
        return [attack.run(view, query).scores for view in views for attack in attacks]

    alone = scores()
    assert len(runs) == 2  # candidates with public texts, for each gradient
    runs.clear()
    with share_work():
        shared = scores()
    assert len(runs) == 1
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))
    assert not torch.equal(shared[0], shared[3])


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
