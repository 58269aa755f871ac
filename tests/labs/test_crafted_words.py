"""Reading a round that was trained on crafted values: against plain training, and planted rows."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.attacks import PublicText, RunFacts
from lightning_fedleak.labs.crafted_rows import CraftedRows, RowSettings
from lightning_fedleak.labs.crafted_words import CraftedAdapterWords, RoundShape, read_rows
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import (
    Observation,
    Stage,
    UnusableObservation,
    UpdateSnapshot,
)
from lightning_fedleak.threats import HONEST_BUT_CURIOUS, Capability, ThreatModelError, missing
from tests.helpers.bottlenecks import EMBEDDING_ADAPTER, adapted_llama, zipf_texts
from tests.helpers.models import tiny_bert_mlm

pytestmark = pytest.mark.slow

TYPES, STEPS, TEXTS, LENGTH, RATE = 300, 4, 2, 12, 1e-3
FACTS = RunFacts(
    optimizer="AdamW", optimizer_settings={"lr": RATE, "weight_decay": 0.01}, local_steps=STEPS
)


def batches(seed: int) -> list[TokenBatch]:
    ids = zipf_texts(STEPS * TEXTS, LENGTH, TYPES, seed).split(TEXTS)
    return [TokenBatch(rows, rows, None, "causal") for rows in ids]


@pytest.fixture(scope="module")
def model():
    model = adapted_llama(TYPES, width=32, rank=24).train()
    model.get_submodule(EMBEDDING_ADAPTER).requires_grad_(True)
    return model


@pytest.fixture(scope="module")
def attack(model) -> CraftedAdapterWords:
    public = PublicText(zipf_texts(300, LENGTH, TYPES, seed=99))
    attack = CraftedAdapterWords(
        EMBEDDING_ADAPTER,
        public,
        shape=RoundShape(TEXTS, LENGTH),
        rounds=4,
        rows=RowSettings(frequent=12),
    )
    attack.meet(FACTS)
    attack.prepare(find_anatomy(model))
    return attack


def test_it_is_for_a_server_that_chooses_weights_and_no_modules() -> None:
    threat = CraftedAdapterWords.threat_model
    assert missing(threat, HONEST_BUT_CURIOUS) == (Capability.CHOOSES_WEIGHTS,)


def test_a_round_on_copies_is_the_round_of_a_client_that_loads_the_values(model, attack) -> None:
    before = {n: t.clone() for n, t in model.state_dict().items()}
    client = copy.deepcopy(model)
    client.load_state_dict(attack.values, strict=False)
    start = {n: p.detach().clone() for n, p in client.named_parameters()}
    trained = [p for p in client.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.01)
    for batch in batches(5):
        optimizer.zero_grad()
        client(input_ids=batch.input_ids, labels=batch.labels).loss.backward()
        optimizer.step()
    update = attack.mean_update(find_anatomy(model), [batches(5)])
    for name, parameter in client.named_parameters():
        if parameter.requires_grad:
            expected = start[name] - parameter.detach()
            torch.testing.assert_close(update.tensors[name] * RATE, expected, rtol=0, atol=2e-5)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model.training


def f1(named: Tensor, truth: Tensor) -> float:
    hits = len(set(named.tolist()) & set(truth.tolist()))
    return 2 * hits / (len(named) + len(truth))


def test_types_are_read_that_no_frequency_tells(model, attack) -> None:
    presence = attack.crafted.rows.presence
    reads, usual = [], []
    for seed in range(10, 16):
        data = batches(seed)
        update = attack.mean_update(find_anatomy(model), [data])
        guess = attack.run(Observation((update,)))
        truth = torch.cat([batch.context_ids() for batch in data]).unique()
        assert guess.surface == "input"
        assert set(guess.read.tolist()) <= set(guess.types.tolist())
        reads.append(f1(guess.types, truth))
        usual.append(f1((presence > 0.5).nonzero()[:, 0], truth))
    assert sum(reads) / 6 > sum(usual) / 6 + 0.15


def test_an_update_in_which_no_row_moves_is_unknown(attack) -> None:
    zeros = {EMBEDDING_ADAPTER + ".down.weight": torch.zeros(24, 32)}
    twin = copy.copy(attack)
    twin.meet(dataclasses.replace(FACTS, optimizer_settings={"lr": RATE, "weight_decay": 0.0}))
    update = UpdateSnapshot(0, Stage.SHARED, zeros, local_steps=STEPS, learning_rate=RATE)
    with pytest.raises(UnusableObservation, match="nothing was trained on"):
        twin.run(Observation((update,)))


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"optimizer": "Lion"}, "Lion"),
        ({"local_steps": None}, "local_steps"),
        ({"clip_value": 0.01}, "clip_value"),
    ],
)
def test_unknown_rounds_are_refused(model, attack, facts, why) -> None:
    twin = copy.copy(attack)
    twin.meet(dataclasses.replace(FACTS, **facts))
    with pytest.raises(UnusableObservation, match=why):
        twin.mean_update(find_anatomy(model), [batches(1)])


def test_models_that_predict_no_next_tokens_are_refused() -> None:
    with pytest.raises(ThreatModelError, match="next tokens"):
        CraftedAdapterWords("bert").needs(find_anatomy(tiny_bert_mlm()))


# ---- planted rows ---------------------------------------------------------------------------


def planted(width: int = 64, types: int = 40, rows: int = 8) -> CraftedRows:
    """Rows that each fire for five types of their own."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(types, width, generator=generator)
    own = torch.eye(rows).repeat_interleave(types // rows, 0)
    directions = F.normalize(torch.linalg.lstsq(inputs, own).solution.T, dim=1)
    thresholds = (inputs @ directions.T)[own.bool()].view(rows, -1).amin(1) / 2
    presence = torch.full((types,), 0.1)
    yes = torch.ones(types, dtype=torch.bool)
    return CraftedRows("down", inputs, True, yes, directions, thresholds, presence)


def test_planted_combinations_are_taken_apart() -> None:
    rows = planted()
    change = torch.zeros(8, 64)
    change[0] = 2.0 * rows.inputs[1] - rows.inputs[3]
    change[5] = rows.inputs[26]
    readings = read_rows(change, change.norm(dim=1) == 0, rows)
    assert set(readings.above(0.3).tolist()) == {1, 3, 26}
    still = [t for row in range(8) if row not in (0, 5) for t in range(5 * row, 5 * row + 5)]
    assert readings.absent.nonzero()[:, 0].tolist() == still


def test_a_row_at_rest_excludes_nothing_where_the_text_around_matters() -> None:
    rows = dataclasses.replace(planted(), exact=False)
    change = torch.zeros(8, 64)
    change[5] = rows.inputs[26]
    assert not read_rows(change, change.norm(dim=1) == 0, rows).absent.any()
