"""Rounds with crafted values, scored against counts of sets and plain losses."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn import functional as F

from lightning_fedleak.attacks import PublicText, RunFacts
from lightning_fedleak.evaluation.games import GameError
from lightning_fedleak.labs.crafted_rows import RowSettings
from lightning_fedleak.labs.crafted_words import (
    CraftedAdapterWords,
    RoundShape,
    play_crafted_rounds,
)
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import Observation
from tests.helpers.bottlenecks import EMBEDDING_ADAPTER, adapted_llama, zipf_texts

pytestmark = pytest.mark.slow

TYPES, STEPS = 120, 2
FACTS = RunFacts(optimizer="AdamW", optimizer_settings={"lr": 1e-3}, local_steps=STEPS)


def batch(seed: int, texts: int = 2) -> TokenBatch:
    ids = zipf_texts(texts, 12, TYPES, seed)
    return TokenBatch(ids, ids, None, "causal")


def server(clients: int = 1) -> CraftedAdapterWords:
    public = PublicText(zipf_texts(120, 12, TYPES, seed=50))
    rows = RowSettings(frequent=6)
    return CraftedAdapterWords(
        EMBEDDING_ADAPTER, public, shape=RoundShape(2, 12, clients), rounds=1, rows=rows
    )


@pytest.fixture(scope="module")
def model():
    model = adapted_llama(TYPES)
    model.get_submodule(EMBEDDING_ADAPTER).requires_grad_(True)
    return model


def loss(model, held_out: TokenBatch) -> float:
    logits = model(input_ids=held_out.input_ids).logits[:, :-1]
    return float(F.cross_entropy(logits.flatten(0, 1), held_out.input_ids[:, 1:].flatten()))


def test_scores_are_counts_of_sets_and_losses_those_of_the_model(model) -> None:
    anatomy, attack, held_out = find_anatomy(model), server(), batch(7, 4)
    clients = [[batch(seed) for seed in (1, 2)]]
    (played,) = play_crafted_rounds(anatomy, attack, [clients], FACTS, held_out=held_out)
    guess = attack.run(Observation((attack.mean_update(anatomy, clients),)))
    truth = {t for one in clients[0] for t in one.input_ids[:, :-1].flatten().tolist()}
    presence = attack.crafted.rows.presence.tolist()
    usual = {t for t, p in enumerate(presence) if p > 0.5}
    named, read = set(guess.types.tolist()), set(guess.read.tolist())
    blind = set(sorted(range(TYPES), key=lambda t: -presence[t])[: len(truth)])
    for counts, guessed, used in (
        (played.words, named, truth),
        (played.rare, read - usual, truth - usual),
        (played.usual, usual, truth),
        (played.blind, blind, truth),
    ):
        assert (counts.tp, counts.fp, counts.fn) == (
            len(guessed & used),
            len(guessed - used),
            len(used - guessed),
        )
    crafted = copy.deepcopy(model)
    crafted.load_state_dict(attack.values, strict=False)
    assert played.losses["before"] == pytest.approx(loss(model, held_out), rel=1e-5)
    assert played.losses["crafted"] == pytest.approx(loss(crafted, held_out), rel=1e-5)
    for name, start in (("honest", model), ("trapped", crafted)):
        client = copy.deepcopy(start)
        optimizer = torch.optim.AdamW([p for p in client.parameters() if p.requires_grad], lr=1e-3)
        for one in clients[0]:
            optimizer.zero_grad()
            client(input_ids=one.input_ids, labels=one.input_ids).loss.backward()
            optimizer.step()
        assert played.losses[name] == pytest.approx(loss(client, held_out), rel=1e-4)


def test_the_mean_of_several_clients_is_read(model) -> None:
    clients = [[batch(10 * c + seed) for seed in (1, 2)] for c in range(3)]
    anatomy, attack = find_anatomy(model), server(clients=3)
    (played,) = play_crafted_rounds(anatomy, attack, [clients], FACTS)
    used = torch.cat([b.context_ids() for batches in clients for b in batches]).unique()
    assert played.words.tp + played.words.fn == len(used)
    assert math.isnan(played.losses["trapped"])
    alone = [attack.mean_update(anatomy, [batches]).tensors for batches in clients]
    for name, mean in attack.mean_update(anatomy, clients).tensors.items():
        torch.testing.assert_close(mean, sum(t[name] for t in alone) / 3, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("clients", [[[batch(1)]], [[batch(1), batch(2)]] * 2])
def test_rounds_of_another_form_are_refused(model, clients) -> None:
    with pytest.raises(GameError, match="a round needs 1 clients"):
        play_crafted_rounds(find_anatomy(model), server(), [clients], FACTS)
