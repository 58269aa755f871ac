"""Non-zero embedding rows are the words read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, TrainableTokensConfig, get_peft_model
from torch import nn

from lightning_fedleak.attacks.base import RunFacts, UnusableObservation
from lightning_fedleak.attacks.words.direct import BagOfWords, bag_of_words
from lightning_fedleak.model.anatomy import EMBEDDING_WEIGHT, find_anatomy
from lightning_fedleak.model.snapshots import (
    GradientSnapshot,
    Inapplicable,
    Observation,
    Stage,
    UpdateSnapshot,
)
from tests.helpers.models import tiny_gpt2


def embedding_gradient(ids: torch.Tensor, sparse: bool, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    table = nn.Embedding.from_pretrained(
        torch.randn(60, 8, generator=generator), freeze=False, sparse=sparse
    )
    weights = torch.randn(8, generator=generator) * scale
    (table(ids).tanh() @ weights).sum().backward()
    assert table.weight.grad is not None
    return table.weight.grad


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_names_exactly_the_words_read(sparse: bool, scale: float) -> None:
    ids = torch.tensor([[3, 5, 5, 59], [0, 3, 17, 21]])
    guess = bag_of_words(embedding_gradient(ids, sparse, scale))
    assert sorted(guess.types.tolist()) == ids.unique().tolist()
    assert guess.surface == "input"
    assert guess.n_types == 6
    assert guess.scores is not None
    assert guess.scores.shape == (60,)
    assert bool((guess.scores[guess.types][:-1] >= guess.scores[guess.types][1:]).all())


def test_under_noise_half_a_type_is_named_by_chance_and_rows_above_it_are() -> None:
    """On 400 draws; words whose rows are 20 standard deviations long are always named."""
    generator = torch.Generator().manual_seed(1)
    named, std, used = 0, 3e-4, torch.tensor([3, 17, 250])
    for _ in range(400):
        gradient = torch.randn(500, 16, generator=generator)
        assert len(bag_of_words(gradient, 1.0).types) <= 8
        named += len(bag_of_words(gradient * std, std).types)
        directions = torch.nn.functional.normalize(torch.randn(3, 16, generator=generator))
        gradient[used] += 20 * directions
        types = bag_of_words(gradient * std, std).types[:3]
        assert sorted(types.tolist()) == used.tolist()
    assert 0.5 * 400 - 4 * 200**0.5 <= named <= 0.5 * 400 + 4 * 200**0.5  # a Poisson count


def test_noise_of_unknown_size_or_rows_that_all_exceed_it_are_unknown() -> None:
    gradient = torch.randn(500, 16, generator=torch.Generator().manual_seed(1))
    with pytest.raises(UnusableObservation, match="size of the noise"):
        bag_of_words(gradient, float("nan"))
    with pytest.raises(Inapplicable, match="500 of 500 rows"):
        bag_of_words(gradient, 1e-3)
    attack = BagOfWords()
    settings = {"lr": 1e-3, "weight_decay": 0.1}
    attack.meet(RunFacts(optimizer="AdamW", optimizer_settings=settings, local_steps=3))
    update = UpdateSnapshot(0, Stage.SHARED, {EMBEDDING_WEIGHT: gradient}, noise_std=1e-3)
    with pytest.raises(Inapplicable, match="weight decay alone"):
        attack.run(Observation((update,)))


@pytest.mark.parametrize(("lora", "tied"), [(False, False), (True, False), (True, True)])
def test_words_are_given_away_but_those_that_only_end_a_text(lora: bool, tied: bool) -> None:
    """By a LoRA on the embedding too, from its first step on."""
    model: nn.Module = tiny_gpt2(tied=tied).eval()
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["wte"])).eval()
    ids = torch.tensor([[4, 8, 15, 16, 23, 42], [7, 8, 9, 10, 11, 90]])
    model(input_ids=ids, labels=ids).loss.backward()
    anatomy, attack = find_anatomy(model), BagOfWords()
    (name,) = attack.needs(anatomy).gradients
    assert (".lora_embedding_A." in name) == lora != (name == EMBEDDING_WEIGHT)
    gradient = anatomy.parameter(name).grad
    view = Observation((GradientSnapshot(0, Stage.SHARED, {name: gradient}),))
    assert sorted(attack.run(view).types.tolist()) == ids[:, :-1].unique().tolist()


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("rates", [(0.0, 5e-4, 1e-3), (1e-3, 5e-3, 2e-2)])
def test_rounds_of_adamw_name_the_words_of_all_their_steps(lora, rates) -> None:
    model: nn.Module = tiny_gpt2(tied=False).eval()
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["wte"])).eval()
    anatomy, attack = find_anatomy(model), BagOfWords()
    (name,) = attack.needs(anatomy).gradients
    settings = {"lr": 1e-3, "weight_decay": 0.1}
    attack.meet(RunFacts(optimizer="AdamW", optimizer_settings=settings, local_steps=3))
    words = torch.arange(1, 25).view(3, 1, 8)
    for _ in range(2):  # of the first, a LoRA's A is zero
        weight = anatomy.parameter(name)
        before = weight.detach().clone()
        attack.refresh(anatomy, 0)
        optimizer = torch.optim.AdamW([weight], **settings)
        for rate, ids in zip(rates, words, strict=True):  # a warm-up
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        tensors = {name: (before - weight.detach()) / 1e-3}
        update = UpdateSnapshot(0, Stage.SHARED, tensors, local_steps=3, learning_rate=1e-3)
        guess = attack.run(Observation((update,)))
        assert sorted(guess.types.tolist()) == words[..., :-1].flatten().tolist()
        words = words + 1


@pytest.mark.parametrize(
    "config",
    [
        TrainableTokensConfig(token_indices=[7, 20, 9, 31], target_modules=["wte"]),
        LoraConfig(r=4, target_modules=["c_attn"], trainable_token_indices={"wte": [7, 20, 9, 31]}),
    ],
    ids=["tokens alone", "beside a LoRA"],
)
def test_the_rows_of_listed_tokens_show_which_of_them_were_read(config: Any) -> None:
    model = get_peft_model(tiny_gpt2(tied=False, dropout=0.0), config)
    anatomy, attack = find_anatomy(model), BagOfWords()
    (role,) = attack.needs(anatomy).gradients
    attack.prepare(anatomy)
    for ids, read in (([7, 9, 3, 3, 31], [7, 9]), ([4, 5, 6], [])):  # the last id is no input
        model.zero_grad()
        text = torch.tensor([ids])
        model(input_ids=text, labels=text).loss.backward()
        gradient = anatomy.parameter(role).grad
        snapshot = GradientSnapshot(0, Stage.SHARED, {role: gradient})
        guess = attack.run(Observation((snapshot,)))
        assert (sorted(guess.types.tolist()), guess.surface) == (read, "input")
    assert not attack.needs_control
    attack.needs(find_anatomy(tiny_gpt2(tied=False)))
    assert attack.needs_control


def test_a_tied_matrix_is_refused_at_setup() -> None:
    with pytest.raises(ValueError, match="this model ties head and embedding"):
        BagOfWords().needs(find_anatomy(tiny_gpt2(tied=True)))
