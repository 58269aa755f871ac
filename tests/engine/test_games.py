"""Membership games in a plain loop: which texts are queried, what is read, and what is unknown."""

import math
import re

import pytest
import torch
from torch import nn

from lightning_fedleak.attacks import PublicText
from lightning_fedleak.attacks.base import HONEST_BUT_CURIOUS
from lightning_fedleak.attacks.membership.base import CRAFTED, MembershipGuess
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.membership.gradients import GradientMembership
from lightning_fedleak.engine import Games
from lightning_fedleak.trainers import Threshold
from tests.callbacks.runs import Probe
from tests.helpers.lightning_modules import loss_by_blocks, random_token_loader
from tests.helpers.loops import lines_of, model_loss, still_gpt2, watched
from tests.helpers.models import tiny_bert_classifier, tiny_bert_mlm, tiny_gpt2

AUC = "leakage/recording/auc"


class RecordingAttack(FCMembership):
    """Keeps what it was given of the steps themselves."""

    default_name = "recording"
    needs_control = False

    def __init__(self, layer=1, **settings):
        super().__init__(layer, **settings)
        self.runs = []
        self.computed = []

    def gradient(self, targets, hidden, mask, upstream):
        out = super().gradient(targets, hidden, mask, upstream)
        self.computed.append((targets, hidden, mask, upstream, out))
        return out

    def run(self, view, query=None):
        snapshot = view.gradients[-1]
        self.runs.append((snapshot.step, str(snapshot.stage), snapshot, query))
        return super().run(view, query)

    def at(self, stage):
        return [s.tensors[CRAFTED] for _, name, s, _ in self.runs if name == stage]


def texts_of(query):
    rows = zip(query.input_ids, query.attention_mask, strict=True)
    return [ids[mask != 0].tolist() for ids, mask in rows]


def id_batches(n=32):
    return [batch["input_ids"].tolist() for batch in random_token_loader(n)]


# ---- which texts are queried --------------------------------------------------------------------


def test_half_of_the_targets_are_in_the_batch_and_half_in_an_earlier_one(tmp_path):
    attack = RecordingAttack()
    watch = watched(tmp_path, attack, still_gpt2(), every_n_steps=3)
    batches = id_batches()
    assert [step for step, *_ in attack.runs] == [1, 3, 6]
    for step, _, _, query in attack.runs:
        texts = texts_of(query)
        assert sorted(text for text in texts if text in batches[step]) == sorted(batches[step])
        outside = [text for text in texts if text not in batches[step]]
        assert len(outside) == 4
        earlier = {1: [0], 3: [0, 1], 6: [1, 3]}[step]  # of the looks before
        assert all(any(text in batches[n] for n in earlier) for text in outside)
    assert [line["n"] for line in watch.lines()] == [8, 16, 24]
    assert watch.latest[AUC] == 1
    assert watch.failures == 0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_looks_at_one_batch_again_have_non_members_of_another(tmp_path, accumulate):
    """The loader does not shuffle, and each look is a whole number of epochs behind another."""
    batches = list(random_token_loader(16 * accumulate)) * 5
    attack = RecordingAttack()
    watch = watched(tmp_path, attack, batches=batches, accumulate=accumulate, every_n_steps=4)
    assert [step for step, *_ in attack.runs] == [1, 4, 8, 12, 16]
    assert watch.failures == 0
    assert [line["unknown"] for line in watch.lines()] == [None] * 5


def test_held_out_texts_of_the_users_own_give_the_first_look_a_result(tmp_path):
    texts = torch.randint(3, 97, (30, 9), generator=torch.Generator().manual_seed(5)).tolist()
    [batch] = id_batches(4)
    attack = RecordingAttack()
    games = Games(held_out=PublicText([*texts, *batch]), targets=3)
    watch = watched(tmp_path, attack, n=4, games=games)
    [(step, _, _, query)] = attack.runs
    assert step == 0
    assert sum(text in batch for text in texts_of(query)) == 3
    assert sum(text in texts for text in texts_of(query)) == 3
    assert watch.latest[AUC] == 1


def test_accumulated_batches_are_samples_of_one_game(tmp_path):
    attack = RecordingAttack()
    games = Games(targets=8)
    watch = watched(tmp_path, attack, accumulate=2, every_n_steps=2, games=games)
    batches = id_batches()
    step, _, snapshot, query = attack.runs[0]
    assert step == 1
    members = batches[2] + batches[3]
    assert sorted(text for text in texts_of(query) if text in members) == sorted(members)
    expected = torch.cat([attack.computed[n][-1] for n in (1, 2)]).sum(0)
    torch.testing.assert_close(snapshot.tensors[CRAFTED], expected)
    assert watch.latest[AUC] == 1


def without_mask():
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 97, (4, n), generator=generator) for n in (5, 9, 7, 5, 12, 6)]
    return [{"input_ids": ids, "labels": ids} for ids in rows]


def classified():
    return [{"input_ids": b["input_ids"], "labels": torch.arange(4) % 3} for b in without_mask()]


@pytest.mark.parametrize(
    ("model", "batches"),
    [
        (tiny_gpt2, lambda: random_token_loader(32, padded=True)),
        (tiny_bert_mlm, lambda: random_token_loader(32, padded=True)),
        (tiny_gpt2, without_mask),
        (tiny_bert_classifier, classified),
    ],
    ids=["padded", "padded masked model", "several lengths without mask", "classifier"],
)
def test_members_are_distinguished_perfectly(tmp_path, model, batches):
    watch = watched(tmp_path, RecordingAttack(), model(), batches=batches(), every_n_steps=2)
    assert (watch.failures, watch.latest[AUC]) == (0, 1)


# ---- what is read -------------------------------------------------------------------------------


def test_the_hidden_states_are_those_of_eval_mode_and_the_upstream_that_of_the_step(tmp_path):
    attack, model, passes = RecordingAttack(), tiny_gpt2(dropout=0.3), []

    def keep(_, __, output):
        states = output[0] if isinstance(output, tuple) else output
        if torch.is_grad_enabled():
            passes.append([states, None])
            entry = passes[-1]
            states.register_hook(lambda gradient: entry.__setitem__(1, gradient.clone()))

    model.transformer.h[0].register_forward_hook(keep)
    games = Games(targets=2, scale=10.0)
    watched(tmp_path, attack, model, lr=0.0, every_n_steps=3, games=games)
    batch = list(random_token_loader(32))[1]
    with torch.no_grad():
        expected = model.eval()(**batch, output_hidden_states=True).hidden_states[1]
    targets, hidden, mask, upstream, _ = attack.computed[1]
    torch.testing.assert_close(hidden, expected)
    assert torch.equal(mask, batch["attention_mask"])
    unit = torch.randn(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit = (10 * unit / unit.norm()).float()
    torch.testing.assert_close(upstream, passes[1][1] @ unit, rtol=1e-5, atol=1e-9)
    assert (passes[1][0] - hidden).abs().max() > 0.01
    query = attack.runs[0][3]
    with torch.no_grad():
        states = model(query.input_ids, output_hidden_states=True).hidden_states[1]
    torch.testing.assert_close(targets, states[torch.arange(4), query.positions])


def test_games_are_pooled_over_the_window_and_a_look_has_its_own_values(tmp_path):
    class Sometimes(RecordingAttack):
        def run(self, view, query=None):
            guess = super().run(view, query)
            if view.gradients[-1].step in (4, 5):
                return MembershipGuess(-guess.scores, guess.members)
            return guess

    watch = watched(tmp_path, Sometimes(), still_gpt2(), lr=0.0, games=Games(window=3))
    lines = watch.lines()
    assert [line["n"] for line in lines] == [8, 16, 24, 24, 24, 24, 24]
    looks = [line["metrics"]["auc_of_this_look"]["value"] for line in lines]
    assert looks == [1, 1, 1, 0, 0, 1, 1]
    pooled = [line["metrics"]["auc"]["value"] for line in lines]
    assert pooled[2] == 1
    assert all(0 < value < 1 for value in pooled[3:])


# ---- what is unknown ----------------------------------------------------------------------------


def test_without_non_members_the_result_is_pending(tmp_path):
    gate = Threshold(AUC, at_most=1.0, action="raise")
    attacks = [RecordingAttack(), Probe()]
    watch = watched(tmp_path, attacks, still_gpt2(), gates=[gate], lr=0.0, every_n_steps=2)
    assert [(line["step"], line["attack"]) for line in watch.lines()][:3] == [
        (0, "probe"), (1, "recording"), (2, "recording"),
    ]  # fmt: skip
    assert (watch.failures, gate.fired) == (0, None)


def test_a_run_that_ends_before_there_was_a_result_is_unknown(tmp_path):
    gate = Threshold(AUC, at_most=1.0, action="raise")
    with (
        pytest.warns(UserWarning, match="unknown, not 0"),
        pytest.raises(RuntimeError, match="unknown"),
    ):
        watched(tmp_path, RecordingAttack(), n=4, gates=[gate])
    [line] = lines_of(tmp_path)
    assert line["unknown"].startswith("training ended before the first result")
    assert "games=Games(held_out=texts)" in line["unknown"]


def test_a_result_that_is_pending_for_too_long_is_unknown(tmp_path):
    ids = torch.arange(3, 12)[None].repeat(4, 1)
    with pytest.warns(UserWarning, match=r"outside this batch: .*, for more than 20 measurements"):
        watch = watched(
            tmp_path, RecordingAttack(), batches=[{"input_ids": ids, "labels": ids}] * 24
        )
    assert watch.failures == 4
    assert math.isnan(watch.latest[AUC])


def shallow_loss(model, batch):
    return model(**batch, output_hidden_states=True).hidden_states[1].square().mean()


def early_loss(model, batch):
    labels = batch["labels"].clone()
    labels[:, 6:] = -100
    return loss_by_blocks(model, {**batch, "labels": labels})


@pytest.mark.parametrize(
    ("layer", "loss", "words"),
    [
        (2, shallow_loss, "layer 2 had no gradient in some batch"),
        (1, early_loss, "not depend on .* at layer 1 of any of the 4"),
    ],
)
def test_a_loss_that_does_not_depend_on_the_targets_is_unknown(tmp_path, layer, loss, words):
    with pytest.warns(UserWarning, match=words):
        watch = watched(tmp_path, RecordingAttack(layer=layer), loss=loss, n=8)
    assert math.isnan(watch.latest[AUC])


def test_a_text_that_the_loss_ignores_is_not_queried(tmp_path):
    def loss(model, batch):
        labels = batch["labels"].clone()
        labels[0, 6:] = labels[2, 6:] = -100
        return loss_by_blocks(model, {**batch, "labels": labels})

    attack = RecordingAttack()
    watched(tmp_path, attack, loss=loss, every_n_steps=3)
    batches = id_batches()
    for step, _, snapshot, query in attack.runs:
        members = [text for text in texts_of(query) if text in batches[step]]
        assert sorted(members) == sorted([batches[step][1], batches[step][3]])
        assert len(texts_of(query)) == len(snapshot.tensors[CRAFTED]) == 4


class Crashing(RecordingAttack):
    """Crashes once it is in the loop."""

    default_name = "crashing"
    is_armed = False

    def gradient(self, *args):
        if self.is_armed:
            raise RuntimeError("secret")
        return super().gradient(*args)


class NoScore(RecordingAttack):
    default_name = "no_score"

    def run(self, view, query=None):
        return MembershipGuess(torch.full((8,), math.nan), torch.zeros(8, dtype=torch.bool))


class NoDecision(RecordingAttack):
    default_name = "no_decision"

    def run(self, view, query=None):
        return MembershipGuess(torch.zeros(8), torch.zeros(1, dtype=torch.bool))


def test_crashes_and_invalid_scores_count_as_failures(tmp_path):
    attacks = [Crashing(), NoScore(), NoDecision(), RecordingAttack()]

    def loss(model, batch):
        attacks[0].is_armed = True
        return model_loss(model, batch)

    with pytest.warns(UserWarning, match="gave no result") as caught:
        watch = watched(tmp_path, attacks, loss=loss, every_n_steps=3)
    messages = " ".join(str(w.message) for w in caught)
    assert "RuntimeError at test_games.py" in messages
    for name in ("no_score", "no_decision"):
        why = "the attack gave no score and decision for each target"
        assert re.search(rf"'{name}' gave no result at step \d: {why}", messages)
    assert "secret" not in messages
    assert math.isnan(watch.latest["leakage/crashing/auc"])
    assert math.isnan(watch.latest["leakage/no_score/auc"])
    assert (watch.latest[AUC], watch.failures) == (1, 9)


# ---- what is refused ----------------------------------------------------------------------------


class TruncatedEmbedding(RecordingAttack):
    def embed(self, hidden, query):
        return super().embed(hidden, query)[:, :7]


PUBLIC = PublicText([[1, 2, 3], [4, 5, 6]])
WITHOUT_BLOCKS = nn.Sequential(nn.Embedding(97, 16), nn.Linear(16, 97))


@pytest.mark.parametrize(
    ("attack", "settings", "words"),
    [
        (RecordingAttack, {"assume": HONEST_BUT_CURIOUS}, "chooses the modules"),
        (
            lambda: RecordingAttack(layer=3),
            {},
            "layer must be an integer from 0 to 2, got 3.*2 blocks",
        ),
        (TruncatedEmbedding, {}, "'recording' cannot run on this model"),
        (RecordingAttack, {"model": WITHOUT_BLOCKS}, "no transformer blocks"),
        (
            lambda: GradientMembership(PUBLIC),
            {"games": Games(held_out=PUBLIC)},
            "held_out= is the public text that 'gradient_memb",
        ),
    ],
)
def test_games_that_cannot_be_played_are_refused(tmp_path, attack, settings, words):
    with pytest.raises(ValueError, match=words):
        watched(tmp_path, attack(), **settings)
