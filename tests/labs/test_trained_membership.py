"""TrainedMembership: training against torch's autograd and Adam, closed forms, promises."""

import csv
import gzip

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_fedleak.attacks.base import Query, RunFacts
from lightning_fedleak.attacks.membership.base import sentence_rows
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.labs import trained_membership
from lightning_fedleak.labs.trained_membership import TrainedMembership, train_neuron
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from tests.attacks.membership.test_fc_membership import by_autograd, generator
from tests.games.crafted import craft
from tests.helpers import models

pytestmark = pytest.mark.slow

SMALL = {"hidden_units": 24, "steps": 40, "public_rows": 64}


@pytest.fixture(scope="module")
def anatomy():
    return find_anatomy(models.tiny_gpt2())


@pytest.fixture(scope="module")
def public():
    return PublicText(torch.randint(3, models.VOCAB, (30, 10), generator=generator(1)))


@pytest.fixture(scope="module", params=["token", "full"])
def attack(request, anatomy, public):
    made = TrainedMembership(1, public, request.param, tokens=8, **SMALL)
    made.prepare(anatomy)
    return made


def texts(anatomy, n=4, length=8, seed=2):
    ids = torch.randint(3, models.VOCAB, (n, length), generator=generator(seed))
    return hidden_states(anatomy, 1, ids).double()


# --- the training


def trained(target, samples, margin=2.0):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("_LEARNING_RATE", 1e-2), ("_MARGIN", margin), ("_BATCH", 999)):
            patch.setattr(trained_membership, name, value)
        return train_neuron(target, samples, generator(), hidden_units=32, steps=200)


def test_it_fires_on_the_target_and_stops_at_the_margin():
    g = generator(5)
    samples = 50 + torch.randn(300, 12, generator=g) * torch.logspace(-1, 3, 12)
    target = samples[0] + torch.randn(12, generator=g) * torch.logspace(-1, 3, 12)
    neuron = trained(target, samples)
    output = neuron(torch.cat([target[None], samples])) + neuron.offset
    assert output[0] > 1.99
    assert output[1:].max() < -1.99
    torch.testing.assert_close(output[0], neuron.on_target)
    torch.testing.assert_close(output[1:].max(), neuron.on_public)
    assert neuron.steps < 200
    assert trained(target, samples, margin=5.0).steps > neuron.steps
    assert trained(target, samples, margin=99.0).steps == 200


# --- closed form, determinism


@settings(max_examples=15)
@given(seed=st.integers(0, 2**20), length=st.integers(1, 9), masked=st.booleans())
def test_closed_form_is_what_backward_gives(attack, anatomy, seed, length, masked):
    hidden = texts(anatomy, n=3, length=length, seed=seed)
    mask = None
    if masked:
        mask = (torch.rand(3, length, generator=generator(seed)) < 0.7).long()
        mask[:, 0] = 1
    full = attack.granularity == "full"
    rows = sentence_rows(hidden, mask, 8) if full else hidden[:, 0]
    other = texts(anatomy, n=1, seed=seed + 1)
    targets = torch.cat([rows[:1], sentence_rows(other, None, 8) if full else other[:, 3]])
    upstream = torch.randn(3, 1 if full else length, generator=generator(seed)).double()
    ours = attack.gradient(targets, hidden, mask, upstream)
    exact = by_autograd(attack, targets, hidden, mask, upstream)
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-14)
    one, two = attack.guess(ours.sum(0)), attack.guess(exact.sum(0))
    assert torch.equal(one.members, two.members)
    assert torch.equal(one.scores, two.scores)
    assert one.members[0]


def test_training_is_the_seeds_alone_and_leaves_no_trace(anatomy, public):
    before = {k: v.clone() for k, v in anatomy.model.state_dict().items()}
    rng = torch.get_rng_state()
    target = texts(anatomy)[0, 3].float()
    crafted = []
    for seed in (0, 0, 1):
        attack = TrainedMembership(1, public, seed=seed, **SMALL)
        attack.prepare(anatomy)
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            crafted.append(attack.neuron(target).weight.clone())
    assert torch.equal(crafted[0], crafted[1])
    assert not torch.equal(crafted[0], crafted[2])
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(before[k], v) for k, v in anatomy.model.state_dict().items())
    assert all(p.grad is None for p in anatomy.model.parameters())


def test_against_a_defence_of_gradients_the_decisions_rung_alone_is_crafted(attack, anatomy):
    hidden = texts(anatomy, n=1)
    full = attack.granularity == "full"
    target = (sentence_rows(hidden, None, 8) if full else hidden[:, 0])[0]
    whole = craft(attack, target).bias[attack.guess_rung]
    attack.meet(RunFacts(defended=frozenset({"gradients"})))
    try:
        assert (attack.rungs, attack.guess_rung, attack.config()["rungs"]) == (1, 0, 1)
        assert torch.equal(craft(attack, target).bias, whole[None])
    finally:
        attack.meet(RunFacts())
    assert attack.rungs == 14


def test_only_the_rungs_are_trained_by_the_client(attack, anatomy):
    hidden = texts(anatomy, n=1)
    full = attack.granularity == "full"
    layers = craft(attack, (sentence_rows(hidden, None, 8) if full else hidden[:, 0])[0])
    assert [(n, tuple(p.shape)) for n, p in layers.named_parameters()] == [("bias", (14,))]
    assert (layers.bias.diff() > 0).all()


def test_refresh_follows_the_model(public):
    anatomy = find_anatomy(models.tiny_gpt2())
    attack = TrainedMembership(1, public, **SMALL)
    attack.prepare(anatomy)
    target = torch.randn(models.DIM, generator=generator())
    before = attack.neuron(target).weight
    with torch.no_grad():
        for p in anatomy.model.parameters():
            p.mul_(1.3)
    attack.refresh(anatomy, 10)
    later = attack.neuron(target).weight
    assert not torch.equal(later, before)
    attack.refresh(find_anatomy(models.tiny_gpt2()), 3)  # of another fit
    assert torch.equal(attack.neuron(target).weight, before)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda p, a: TrainedMembership(1, p, hidden_units=0), "hidden_units"),
        (lambda p, a: TrainedMembership(1, p, steps=0), "steps"),
        (lambda p, a: TrainedMembership(1, p, public_rows=2), "public_rows"),
        (
            lambda p, a: TrainedMembership(1, [[5, 6], [7, 8]], "full").prepare(a),
            "sentences of public text",
        ),
    ],
)
def test_refusals_say_what_to_do(build, words, public, anatomy):
    with pytest.raises(ValueError, match=words):
        build(public, anatomy)


@pytest.mark.assets
def test_on_a_real_model_members_score_higher(assets):
    """stories15M, batches of 20 sentences, other sentences of the same kind as public text."""
    folder = assets / "models/stories15M"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    anatomy = find_anatomy(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    with gzip.open(assets / "data/banking77/train.csv.gz", "rt") as lines:
        rows = [row[0] for row in csv.reader(lines)][1:]
    picks = torch.randperm(len(rows), generator=generator(7))[:300].tolist()
    ids = [[1, *tokenizer(rows[i], add_special_tokens=False)["input_ids"]][:24] for i in picks]
    public, pool = PublicText(ids[:100]), PublicText(ids[100:])
    attack = TrainedMembership(3, public, hidden_units=32, steps=50)
    attack.prepare(anatomy)
    scores, truth = [], []
    for game in range(4):
        batch = pool.rows(range(40 * game, 40 * game + 20), 24, generator())
        other = pool.rows(range(40 * game + 20, 40 * game + 24), 24, generator())
        hidden = hidden_states(anatomy, 3, batch.input_ids, batch.attention_mask)
        their = hidden_states(anatomy, 3, other.input_ids, other.attention_mask)
        targets = torch.cat(
            [
                attack.embed(hidden[:4], Query(batch.input_ids[:4], batch.attention_mask[:4])),
                attack.embed(their, Query(other.input_ids, other.attention_mask)),
            ]
        )
        gradient = attack.gradient(
            targets, hidden, batch.attention_mask, torch.ones(hidden.shape[:2])
        )
        scores.append(attack.guess(gradient.sum(0)).scores)
        truth.append(torch.arange(8) < 4)
    assert roc_auc_score(torch.cat(truth).numpy(), torch.cat(scores).numpy()) > 0.9
