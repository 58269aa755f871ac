"""Whole texts off crafted bottlenecks, against a client that loads the values."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lightning_fedleak.attacks import PublicText, RunFacts
from lightning_fedleak.evaluation.games import GameError
from lightning_fedleak.labs.crafted_texts import (
    ABSENT,
    CraftedTexts,
    TextSearch,
    _Server,
    play_crafted_texts,
)
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import TokenBatch
from tests.helpers.bottlenecks import EMBEDDING_ADAPTER, adapted_llama, zipf_texts

pytestmark = pytest.mark.slow

TYPES, LENGTH = 40, 6
ADAPTERS = [EMBEDDING_ADAPTER, "model.layers.0.mlp.adapter", "model.layers.1.mlp.adapter"]
PUBLIC = PublicText(zipf_texts(ABSENT + 200, LENGTH, TYPES, seed=50))


def facts(steps: int) -> RunFacts:
    return RunFacts(optimizer="AdamW", optimizer_settings={"lr": 1e-3}, local_steps=steps)


def batch(seed: int, texts: int = 1, length: int = LENGTH) -> TokenBatch:
    ids = zipf_texts(texts, length, TYPES, seed)
    return TokenBatch(ids, ids, None, "causal")


@pytest.fixture
def model():
    model = adapted_llama(TYPES, rank=12, behind_blocks=True)
    for adapter in ADAPTERS:
        model.get_submodule(adapter).requires_grad_(True)
    return model


@pytest.fixture
def server(model):
    server = _Server(copy.deepcopy(find_anatomy(model)), ADAPTERS, facts(2), 1, TextSearch())
    server.craft(PUBLIC.batch(200, LENGTH, torch.Generator()).input_ids)
    return server


def test_texts_are_read_that_the_model_would_not_write_and_the_model_stays(model) -> None:
    before = copy.deepcopy(model.state_dict())
    rounds = [[batch(seed)] for seed in range(8)]
    search = TextSearch(beam=64, candidates=1024, threshold=-20)
    arguments = (find_anatomy(model), ADAPTERS, rounds, facts(1), PUBLIC, search)
    played = play_crafted_texts(*arguments)
    shares = {"guesses": 0.0, "alone": 0.0}
    for one, kind in itertools.product(played, shares):
        same = (getattr(one, kind) == one.texts).float().mean(1)
        shares[kind] += float(same.max()) / len(played)
    assert shares["guesses"] > shares["alone"] + 0.2
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())


def test_an_update_is_that_of_a_client_that_loads_the_values(server) -> None:
    ids = zipf_texts(2, LENGTH, TYPES, seed=3)
    client = copy.deepcopy(server.model)
    optimizer = torch.optim.AdamW([p for p in client.parameters() if p.requires_grad], lr=1e-3)
    for text in ids:
        optimizer.zero_grad()
        client(input_ids=text[None], labels=text[None]).loss.backward()
        optimizer.step()
    first, second = server.play(ids)
    for i, adapter in enumerate(ADAPTERS):
        trained, sent = client.get_submodule(adapter), server.model.get_submodule(adapter)
        change = (trained.down.weight - sent.down.weight).detach()
        active = change.abs().amax(1) > 1e-4
        assert torch.equal(first.active[i] | second.active[i], active)
        assert torch.equal(first.inputs[i][active], -change[active].sign())
        middle = second.second[f"{adapter}.up.bias"]
        torch.testing.assert_close(middle, (sent.up.bias + trained.up.bias) / 2)
        assert torch.equal(first.second[f"{adapter}.up.bias"], sent.up.bias)


def test_the_size_of_a_change_tells_the_step(server) -> None:
    ids = zipf_texts(2, LENGTH, TYPES, seed=3)
    states = [server.states(text[None]).flatten(1, 2) for text in ids]
    steps = server.play(ids)
    fires = [server._votes(steps[0], one)[0].any(1) for one in states]
    assert bool((fires[0] != fires[1]).any())
    for step, other in ((0, 1), (1, 0)):
        clear = steps[other].active & ~steps[step].active
        assert not bool((clear & fires[step] & ~fires[other]).any())


def test_a_row_fires_for_kappa_tokens_of_a_round(server) -> None:
    public = PUBLIC.batch(200, LENGTH, torch.Generator()).input_ids
    states = server.states(public)
    down, bias = torch.stack(list(server.down)), torch.stack(list(server.bias))
    share = (states.flatten(1, 2) @ down.mT + bias[:, None] > 0).float().mean(1)
    tokens = 2 * (LENGTH - 1)
    assert float((share * tokens).mean()) == pytest.approx(1.0, abs=0.3)


def test_exact_texts_are_counted() -> None:
    texts = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    played = CraftedTexts(texts, torch.tensor([[5, 6, 7, 8], [1, 2, 9, 9]]), texts[:0])
    assert played.exact == 0.5
    assert CraftedTexts(texts, texts[:0], texts).exact == 0.0


@pytest.mark.parametrize(
    ("rounds", "public", "why"),
    [
        ([[batch(1)]], PUBLIC, "each of its 2 steps"),
        ([[batch(1), batch(2, length=4)]], PUBLIC, "one length"),
        ([[batch(1, texts=4), batch(2, texts=4)]], PUBLIC, "the same token"),
        ([[batch(1), batch(2)]], PublicText(zipf_texts(50, LENGTH, TYPES)), "50 public texts"),
    ],
)
def test_rounds_of_another_form_are_refused(model, rounds, public, why) -> None:
    with pytest.raises(GameError, match=why):
        play_crafted_texts(find_anatomy(model), ADAPTERS, rounds, facts(2), public)


def test_rounds_of_sgd_are_refused(model) -> None:
    sgd = RunFacts(optimizer="SGD", optimizer_settings={"lr": 0.1}, local_steps=1)
    with pytest.raises(GameError, match="not off SGD"):
        play_crafted_texts(find_anatomy(model), ADAPTERS, [[batch(1)]], sgd, PUBLIC)


def test_texts_are_not_read_off_a_lora() -> None:
    model = adapted_llama(TYPES)
    lora = LoraConfig(r=4, target_modules=["gate_proj", "up_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    name = "base_model.model.model.layers.0.mlp"
    with pytest.raises(GameError, match="not off a LoRA"):
        play_crafted_texts(find_anatomy(model), [name], [[batch(1)]], facts(1), PUBLIC)
