"""Whole texts off an encoder's gradients, which are exact for one text, and a certificate."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_fedleak.attacks.texts.base import WorkLimit
from lightning_fedleak.attacks.texts.subspace import SubspaceTexts
from lightning_fedleak.attacks.texts.subspace_encoders import EncoderSearch
from lightning_fedleak.attacks.texts.subspace_rows import shared_rows
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.snapshots import GradientSnapshot, NotYet, Observation
from tests.attacks.row_space import models
from tests.attacks.row_space.models import classifier
from tests.attacks.texts.test_subspace_texts import answer, certified, prepared, read, shared

RANKS = [None, 12]


def made(family: Callable[[], nn.Module], rank: int | None) -> nn.Module:
    torch.manual_seed(0)
    model = models.ready(family())
    return model if rank is None else models.with_lora(model, rank, ["query", "key", "value"])


# ---- what is read ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "rank"), [(models.bert, None), (models.bert, 12), (models.roberta, 12)]
)
def test_one_text_is_given_away_whole(family: Any, rank: int | None) -> None:
    model = made(family, rank)
    attack, anatomy = prepared(model)
    ids = models.texts(1, 12)
    models.backward(model, ids)
    guess = attack.run(shared(anatomy, attack))
    assert answer(guess) == ids.tolist(), "the last token too: all places are attended to"
    assert guess.certified
    assert guess.finished


@pytest.mark.parametrize("rank", RANKS)
def test_one_label_of_a_classifier_gives_the_text_away(rank: int | None) -> None:
    model = made(classifier, rank)
    for label in range(2):
        ids = models.texts(1, 12, kinds=6)
        guess = read(model, ids, labels=torch.tensor([label]))
        assert answer(guess) == ids.tolist()
        assert guess.certified


@pytest.mark.parametrize(("family", "rank"), [(models.bert, None), (classifier, 12)])
def test_two_texts_are_distinguished(family: Any, rank: int | None) -> None:
    model, ids = made(family, rank), models.texts(2, 6)
    labels = torch.tensor([0, 1]) if family is classifier else ids
    guess = read(model, ids, labels=labels)
    assert answer(guess) == sorted(ids.tolist())
    assert guess.certified


def test_padded_texts_of_two_lengths() -> None:
    """They end alike, as behind a tokenizer with an end of its own."""
    model, ids = made(models.bert, None), models.texts(2, 8)
    mask = torch.ones_like(ids)
    ids[0, 7] = ids[1, 4] = 3
    mask[1, 5:] = 0
    guess = read(model, ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    assert answer(guess) == sorted([ids[0].tolist(), ids[1, :5].tolist()])
    assert guess.certified


# ---- what takes the certificate -------------------------------------------------------------


def bfloat16(g: Tensor) -> Tensor:
    return g.bfloat16()


def noised(share: float) -> Callable[[Tensor], Tensor]:
    return lambda g: g + share * g.square().mean().sqrt() * torch.randn_like(g)


@pytest.fixture(scope="module", params=RANKS)
def clients(request: pytest.FixtureRequest) -> list[tuple[SubspaceTexts, GradientSnapshot]]:
    """What a client with one text, and with two, shared, and an attack that can read it."""
    model, both = made(models.bert, request.param), []
    for rows in (1, 2):
        attack, anatomy = prepared(model)
        models.backward(model, models.texts(rows, 6))
        both.append((attack, shared(anatomy, attack).gradients[0]))
    return both


@pytest.mark.parametrize(
    ("change", "declared"),
    [
        (noised(1e-3), True),
        (noised(1e-3), False),
        (bfloat16, False),
        (lambda g: bfloat16(g).float(), False),
    ],
    ids=["noise", "noise, not declared", "bf16", "bf16 as fp32"],
)
def test_noise_and_rounding_take_the_certificate(clients, change, declared) -> None:
    for attack, snapshot in clients:
        tensors = {n: change(g) for n, g in snapshot.tensors.items()}
        std = 1e-3 * float(torch.cat([g.flatten() for g in tensors.values()]).float().std())
        spoilt = replace(snapshot, tensors=tensors, noise_std=std if declared else 0.0)
        view = Observation((spoilt,))
        assert not certified(lambda attack=attack, view=view: attack.run(view))


@pytest.mark.parametrize("family", [models.bert, classifier])
def test_dropout_takes_the_certificate(family: Any) -> None:
    model = made(family, None)
    attack, anatomy = prepared(model, budget_seconds=1)
    model.train()
    ids = models.texts(1, 8)
    models.backward(model, ids, **({"labels": torch.tensor([1])} if family is classifier else {}))
    assert not certified(lambda: attack.run(shared(anatomy, attack)))


def test_the_first_step_of_a_lora_is_not_known_yet() -> None:
    model = made(models.bert, 8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    with pytest.raises(NotYet, match="until B"):
        read(model, models.texts(1, 8))


@cache
@torch.no_grad()
def certificate(rows: int) -> tuple[Callable[[list[list[int]]], bool], list[list[int]], list[int]]:
    """The check alone, of any texts; the true ones; and the tokens of the batch."""
    model = made(models.bert, None)
    ids = models.texts(rows, 7)
    attack, anatomy = prepared(model)
    with torch.enable_grad():
        models.backward(model, ids)
    bottom, view = attack._copy, shared(anatomy, attack)
    assert bottom is not None
    first = attack._readable.get(anatomy)[0]
    assert first is not None
    rows_of = [shared_rows(known, anatomy, view, None) for known in bottom.inputs]
    bag = ids.unique()
    search = EncoderSearch(bottom, first, attack._whitenings, rows_of, bag, 0)
    pairs = search._pairs(WorkLimit())

    def certain(answer: list[list[int]]) -> bool:
        result = [tuple(text) for text in answer]
        with torch.no_grad(), bottom.session():
            return search._certain(result, pairs)

    return certain, ids.tolist(), bag.tolist()


@pytest.mark.parametrize("rows", [1, 3])
def test_the_true_texts_are_certified(rows: int) -> None:
    certain, true, _ = certificate(rows)
    assert certain(true)


@given(data=st.data())
@pytest.mark.parametrize("rows", [1, 3])
def test_no_other_texts_are(rows: int, data: st.DataObject) -> None:
    certain, true, bag = certificate(rows)
    tampered = [list(row) for row in true]
    row = data.draw(st.sampled_from(tampered))
    place = data.draw(st.integers(0, len(row) - 1))
    kind = data.draw(st.sampled_from(["exchanged", "removed", "doubled", "crossed"]))
    if kind == "exchanged":
        row[place] = data.draw(st.sampled_from([t for t in bag if t != row[place]]))
    elif kind == "removed":
        del row[place]
    elif kind == "doubled":
        row.insert(place, row[place])
    else:  # of two texts, all that follows
        other = data.draw(st.sampled_from(tampered))
        row[place:], other[place:] = other[place:], row[place:]
    assert sorted(tampered) == sorted(true) or not certain(tampered)


# ---- what is refused ------------------------------------------------------------------------


def modernbert() -> nn.Module:
    """Positions turn queries and keys."""
    special = {f"{which}_token_id": 0 for which in ("pad", "bos", "eos", "cls", "sep")}
    return transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(**models.SIZES, **special)
    )


def deberta() -> nn.Module:
    """Positions are relative, and added to none of the embeddings."""
    config = transformers.DebertaV2Config(
        **models.SIZES,
        relative_attention=True,
        position_biased_input=False,
        pos_att_type=["p2c", "c2p"],
        max_position_embeddings=models.LENGTH,
    )
    return transformers.DebertaV2ForMaskedLM(config)


@pytest.mark.parametrize("family", [modernbert, deberta])
def test_encoders_whose_positions_are_not_added_are_refused(family: Any) -> None:
    with pytest.raises(ValueError, match="finds no added positions"):
        SubspaceTexts().needs(find_anatomy(models.ready(family())))


def test_an_encoder_without_its_first_block_is_not_exposed() -> None:
    model = models.ready(models.bert())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layer.1." in name)
    anatomy = find_anatomy(model)
    needs = SubspaceTexts().needs(anatomy)
    assert needs.gradients
    assert not all(anatomy.trainable(name) for name in needs.gradients)
