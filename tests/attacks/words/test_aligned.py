"""AlignedFlatChat on trained models and closed forms; its public text and gradients."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from torch.nn import functional as F

import lightning_fedleak.model.model_runs as model_runs
from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.attacks.public_text import PublicText, gradient_of
from lightning_fedleak.attacks.words import aligned_rows
from lightning_fedleak.attacks.words.aligned import AlignedFlatChat
from lightning_fedleak.attacks.words.aligned_readout import _draw_pool, best_count, fit_readout
from lightning_fedleak.attacks.words.flatchat import FlatChat
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import Observation, Stage, UpdateSnapshot
from tests.attacks.words.language import VOCAB, WIDTH, generator, mean_f1, observation, rates
from tests.helpers import models


def test_it_beats_flatchat_with_the_oracle(learned, private):
    oracle = []
    for view, truth in private:
        guess = FlatChat(n_types=len(truth)).run(view)
        oracle.append(rates(guess.types, truth)[2])
    assert mean_f1(learned, private) > max(0.9, sum(oracle) / len(oracle))


def test_noise_that_hides_the_words_from_flatchat_does_not_hide_them(learned, private):
    view, truth = private[3]
    gradient = view.gradient("head.weight")
    plain = rates(learned.run(view).types, truth)
    for share in (1e-3, 1e-2):
        noise = torch.randn(gradient.shape, generator=generator(12))
        noised = gradient + share * gradient.norm(dim=1).quantile(0.5) * noise
        precision, _, f1 = rates(learned.run(observation(noised)).types, truth)
        assert f1 > plain[2] - 0.1
        assert precision > plain[0] - 0.1


def test_rounding_of_a_shared_weight_change_names_nobody(learned, trained, private):
    """(before - after) / lr in float32 loses the small rows to rounding."""
    view, truth = private[0]
    before, rate = trained.model.lm_head.weight.detach(), 1e-4
    after = before - rate * view.gradient("head.weight")
    plain = rates(learned.run(view).types, truth)
    change = {"head.weight": (before - after) / rate}
    snapshot = UpdateSnapshot(0, Stage.SHARED, change, learning_rate=rate)
    rounded = rates(learned.run(Observation((snapshot,))).types, truth)
    assert rounded[0] > plain[0] - 0.1
    assert rounded[2] > plain[2] - 0.1


def test_label_smoothing_is_found_and_given_back(learned, trained, language):
    rows = language.texts(2, 24, seed=15)
    leaf = copy.deepcopy(trained.model).eval()
    logits = leaf(input_ids=rows).logits[:, :-1].flatten(0, 1)
    truth = rows[:, 1:].unique()
    F.cross_entropy(logits, rows[:, 1:].flatten(), label_smoothing=0.1).backward()
    smoothed = observation(leaf.lm_head.weight.grad)
    batch = PublicText(rows).rows(range(2), 24, generator())
    plain = observation(gradient_of(trained, batch, ["head.weight"])["head.weight"])
    loss = rates(learned.run(plain).types, truth)[2] - rates(learned.run(smoothed).types, truth)[2]
    assert loss < 0.15


def test_noise_alone_names_next_to_nothing(learned):
    noise = observation(torch.randn(VOCAB, WIDTH, generator=generator(13)), noise_std=1.0)
    assert len(learned.run(noise).types) <= 0.05 * VOCAB


def test_a_gradient_without_a_negative_row_is_unknown_unless_noise_explains_it(learned):
    rows = learned.state_dict()["directions.u"].repeat(VOCAB, 1)
    for std in (0.0, math.nan):
        with pytest.raises(UnusableObservation, match="assigned to a used type"):
            learned.run(observation(rows, noise_std=std))
    guess = learned.run(observation(rows, noise_std=0.1))
    assert len(guess.types) == 0
    assert guess.n_types == 0


def test_calibration_is_the_seeds_alone_and_leaves_no_trace(trained, public):
    before = {k: v.clone() for k, v in trained.model.state_dict().items()}
    states = []
    for seed in (1, 2):  # of what else is drawn
        torch.manual_seed(seed)
        rng = torch.get_rng_state()
        attack = AlignedFlatChat(public, lengths=(8, 12), calibration_tokens=400)
        attack.prepare(trained)
        assert torch.equal(torch.get_rng_state(), rng)
        assert attack.calibration_seconds > 0
        states.append(attack.state_dict())
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    assert all(torch.equal(before[k], v) for k, v in trained.model.state_dict().items())
    assert all(p.grad is None for p in trained.model.parameters())


def test_refresh_turns_with_the_hidden_states(trained, public, language):
    """Hidden states and head change sides together: the model says the same as before.

    Only the directions turn; what was fitted beside them stays, so that not all words are read.
    """
    moved = find_anatomy(copy.deepcopy(trained.model))
    norm, head = moved.model.transformer.ln_f, moved.model.lm_head
    with torch.no_grad():
        norm.weight.neg_()
        norm.bias.neg_()
        head.weight = torch.nn.Parameter(-head.weight)
    moved = find_anatomy(moved.model)
    batch = PublicText(language.texts(16, 24, seed=9)).rows(range(16), 24, generator())
    view = observation(gradient_of(moved, batch, ["head.weight"])["head.weight"])
    truth = batch.target_ids().unique()
    attack = AlignedFlatChat(public, lengths=(12, 24), calibration_tokens=4000)
    attack.refresh_every = 10
    attack.prepare(trained)
    stale = attack.run(view).types
    attack.refresh(moved, 9)
    assert torch.equal(attack.run(view).types, stale)
    attack.refresh(moved, 10)
    assert rates(attack.run(view).types, truth)[2] > rates(stale, truth)[2] + 0.1
    attack.refresh(trained, 3)  # of another fit; rounding may exchange equally likely words
    assert set(attack.run(view).types.tolist()) == set(stale.tolist())


def test_refresh_learns_what_the_moved_model_expects(trained, public, language):
    moved = find_anatomy(copy.deepcopy(trained.model))
    optimizer = torch.optim.SGD(moved.model.parameters(), lr=0.3)
    for rows in language.texts(400, 24, seed=11).split(40):
        optimizer.zero_grad()
        moved.model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
    attack = AlignedFlatChat(public, lengths=(24,), calibration_tokens=600)
    attack.refresh_every = 10
    attack.prepare(trained)
    before = attack.state_dict()
    attack.refresh(moved, 10)
    after = attack.state_dict()
    (batch,) = attack._batches(moved)
    with torch.no_grad():
        logits = copy.deepcopy(moved.model).eval()(input_ids=batch.input_ids)["logits"][:, :-1]
    expected = logits.softmax(-1).mean((0, 1))
    torch.testing.assert_close(after["expected.probability"], expected, atol=1e-6, rtol=1e-3)
    assert not torch.allclose(before["expected.probability"], expected, atol=1e-6, rtol=1e-3)
    assert torch.equal(before["readout.weight0"], after["readout.weight0"])


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_masked_and_sequence_models_can_be_calibrated_on(name):
    make, kind = CALIBRATED[name]
    anatomy = find_anatomy(make())
    text = PublicText(torch.randint(5, models.VOCAB, (40, 12), generator=generator(6)))

    class Tokenizer:
        mask_token_id = 4

    attack = AlignedFlatChat(text, tokenizer=Tokenizer(), lengths=(6, 12), calibration_tokens=300)
    attack.prepare(anatomy)
    batch = rehearsed_batch(kind)
    gradient = gradient_of(anatomy, batch, ["head.weight"])["head.weight"]
    guess = attack.run(observation(gradient))
    assert guess.scores.shape == (models.VOCAB,)
    assert guess.types.unique().shape == guess.types.shape


def test_best_count_is_the_best_of_all_counts():
    """Against the exact expected F1 over every outcome of independent draws."""
    p = torch.tensor([0.95, 0.2, 0.7, 0.5, 0.05, 0.9])
    ordered = p.sort(descending=True).values.double().numpy()
    outcomes = np.array(np.meshgrid(*[[0, 1]] * 6)).reshape(6, -1).T
    chance = np.prod(np.where(outcomes, ordered, 1 - ordered), 1)
    exact = [
        (chance * 2 * outcomes[:, :k].sum(1) / np.maximum(1, k + outcomes.sum(1))).sum()
        for k in range(1, 7)
    ]
    assert int(best_count(p)) == 1 + int(np.argmax(exact))
    assert int(best_count(torch.zeros(4))) == 0


def test_direction_separates_what_can_be_separated():
    g = generator(7)
    hidden = torch.randn(400, 8, generator=g)
    hidden[:, 0] = hidden[:, 0].abs() * 0.3 + 0.4
    hidden[:, 1] += 1.0
    mean = F.normalize(F.normalize(hidden, dim=1).mean(0), dim=0)
    u = aligned_rows.separating_direction(hidden)
    assert (hidden @ u > 0).float().mean() > (hidden @ mean > 0).float().mean()
    assert (hidden @ u > 0).float().mean() > 0.99


def test_cluster_centres_are_as_tight_as_scikit_learns():
    g = generator(8)
    corners = F.normalize(torch.randn(5, 6, generator=g), dim=1)
    points = F.normalize(corners.repeat(40, 1) + 0.1 * torch.randn(200, 6, generator=g), dim=1)
    centres = aligned_rows.cluster_centres(points, 12, generator(1))
    theirs = KMeans(12, n_init=1, random_state=0).fit(points.numpy())
    ours = (1 - (points @ centres.T).max(1).values).sum() * 2
    assert ours < 1.3 * theirs.inertia_


def test_readout_learns_probabilities():
    g = generator(9)
    x = torch.randn(6000, 3, generator=g)
    chance = torch.sigmoid(2 * x[:, 0] - x[:, 1])
    used = torch.rand(6000, generator=g) < chance
    readout = fit_readout(x, used, torch.ones(6000), generator(2), passes=6)
    assert (readout.logits(x).sigmoid() - chance).abs().mean() < 0.05


def test_texts_that_share_their_opening_are_opened_both_ways():
    text = PublicText([[1, 5, 6], [1, 6, 7], [1, 8], [1, 9]]).with_and_without_start()
    assert [s.tolist() for s in text.sentences] == [[1, 5, 6], [6, 7], [1, 8], [1, 9]]
    varied = PublicText([[1, 5, 6], [2, 6, 7]])
    assert varied.with_and_without_start() is varied


# ---- short texts --------------------------------------------------------------------------------


def test_rehearsed_batches_are_of_like_lengths_half_the_time():
    by_length = torch.arange(60)  # sentence i is the i-th shortest
    draw = generator(1)
    alike = 0
    for _ in range(400):
        some = _draw_pool(by_length, 10, draw)
        assert len(some) in (20, 60)
        assert torch.equal(some, torch.arange(int(some[0]), int(some[0]) + len(some)))
        alike += len(some) == 20
    assert 120 < alike < 280  # of 400 fair draws: further off once in 10^15
    assert all(len(_draw_pool(by_length, 21, draw)) == 60 for _ in range(20))


@pytest.mark.parametrize("seed", range(2))
def test_non_negative_weights_are_the_best_of_all_supports(seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 5, generator=g, dtype=torch.float64)
    gram = x.T @ x + torch.eye(5, dtype=torch.float64)
    target = torch.randn(5, generator=g, dtype=torch.float64)
    best, least = torch.zeros(5, dtype=torch.float64), 0.0
    for support in itertools.product([False, True], repeat=5):
        inside = torch.tensor(support)
        y = torch.zeros(5, dtype=torch.float64)
        y[inside] = torch.linalg.solve(gram[inside][:, inside], target[inside])
        value = float(y @ gram @ y / 2 - target @ y)
        if bool((y >= 0).all()) and value < least:
            best, least = y, value
    torch.testing.assert_close(aligned_rows._non_negative(gram, target), best, rtol=1e-9, atol=1e-9)


CALIBRATED = {
    "gpt2": (models.tiny_gpt2, "causal"),
    "llama untied": (models.tiny_llama, "causal"),
    "bert": (models.tiny_bert_mlm, "masked"),
    "t5": (models.tiny_t5, "seq2seq"),
}


def public_text(n=12, seed=5):
    g = generator(seed)
    lengths = torch.randint(3, 14, (n,), generator=g).tolist()
    return PublicText([torch.randint(5, models.VOCAB, (k,), generator=g).tolist() for k in lengths])


def rehearsed_batch(kind, seed=1):
    return public_text().batch(5, 10, generator(seed), kind=kind, mask_token_id=4)


def autograd_gradients(model, batch, *names):
    """The same by the model's own loss, on a copy."""
    twin = copy.deepcopy(model).eval()
    out = twin(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels)
    out.loss.backward()
    return {
        "head.weight": twin.get_output_embeddings().weight.grad,
        "embedding.weight": twin.get_input_embeddings().weight.grad,
        **{name: twin.get_parameter(name).grad for name in names},
    }


@pytest.mark.parametrize("name", CALIBRATED)
@pytest.mark.parametrize("at_once", [1 << 26, 1])
def test_gradient_is_that_of_the_models_own_loss(name, at_once, monkeypatch):
    monkeypatch.setattr(model_runs, "LOGITS_AT_ONCE", at_once)
    make, kind = CALIBRATED[name]
    model = make()
    batch = rehearsed_batch(kind)
    inner = [n for n, p in model.named_parameters() if ".0." in n and p.dim() == 2][-1]
    result = gradient_of(find_anatomy(model), batch, ["head.weight", "embedding.weight", inner])
    for role, wanted in autograd_gradients(model, batch, inner).items():
        torch.testing.assert_close(result[role], wanted, atol=1e-6, rtol=1e-4)
        assert wanted.abs().max() > 1e-4


def test_batches_are_cut_padded_and_reproducible():
    text = PublicText([[5, 6, 7, 8], [9, 10], [11, 12, 13]])
    batch = text.batch(3, 3, generator(3))
    again = text.batch(3, 3, generator(3))
    assert torch.equal(batch.input_ids, again.input_ids)
    rows = {
        tuple(ids[mask.bool()].tolist())
        for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)
    }
    assert rows == {(5, 6, 7), (9, 10), (11, 12, 13)}
    assert torch.equal(batch.labels == -100, batch.attention_mask == 0)
    assert len(text.batch(7, 3, generator()).input_ids) == 7


def test_a_masked_batch_asks_for_what_it_hides():
    batch = rehearsed_batch("masked")
    asked = batch.labels != -100
    assert asked.any(1).all()
    assert (batch.input_ids[asked] == 4).all()
    assert (batch.labels[asked] != 4).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: PublicText([[3], []]), "at least 2 tokens"),
        (lambda: PublicText([[1, 2]], targets=[[1], [2]]), "one target for each text"),
        (lambda: public_text().batch(2, 1, generator()), "length must be an integer of at least 2"),
        (lambda: public_text().batch(2, 5, generator(), kind="masked"), "tokenizer="),
        (lambda: public_text().batch(2, 5, generator(), kind="classifier"), "classifier"),
        (
            lambda: PublicText.sampled_from(find_anatomy(models.tiny_bert_mlm()), 2, 5),
            "no text is sampled from",
        ),
        (lambda: AlignedFlatChat([[1, 2]], lengths=(1,)), "lengths"),
        (
            lambda: AlignedFlatChat([[1, 2]] * 3).prepare(find_anatomy(models.tiny_gpt2())),
            "public texts to learn from .*at least 4",
        ),
    ],
)
def test_refusals_say_what_to_do(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_batch_without_labels_left_has_no_gradient():
    ids = torch.tensor([[5, 6, 7]])
    batch = TokenBatch(ids, torch.full_like(ids, -100), torch.ones_like(ids), "causal")
    with pytest.raises(ValueError, match="all labels of this batch are ignored"):
        gradient_of(find_anatomy(models.tiny_gpt2()), batch, ["head.weight"])
    with pytest.raises(ValueError, match=r"head\.bias"):
        gradient_of(find_anatomy(models.tiny_gpt2()), batch, ["head.bias"])
