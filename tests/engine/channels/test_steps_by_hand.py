"""Channels and controls on steps that are written by hand: no training runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.papers.baselines import reveal_labels
from lightning_fedleak.attacks import BagOfWords, SubspaceTexts, SubspaceWords, Surfaces, WordGuess
from lightning_fedleak.engine.channels.control import Controls
from lightning_fedleak.engine.channels.remainder import remainder_of
from lightning_fedleak.engine.outcomes import Found, NothingShared, Unknown, Waiting
from lightning_fedleak.engine.run import Look
from lightning_fedleak.evaluation.metrics import Counts
from lightning_fedleak.model.anatomy import HEAD_WEIGHT
from lightning_fedleak.model.snapshots import GradientSnapshot, NotYet, Stage, UnusableObservation
from lightning_fedleak.model.taps import ModelCall, Step
from tests.helpers.models import VOCAB, own_rng, tiny_gpt2, tiny_llama
from tests.helpers.steps import look_at, make_step, open_channel

IDS = torch.tensor([[5, 9, 17, 23, 31, 44], [7, 9, 61, 70, 31, 12]])


def untied() -> torch.nn.Module:
    return tiny_gpt2(tied=False, dropout=0.0, seed=3).train()


def wide() -> torch.nn.Module:
    """Return a model with more dimensions than a batch has words."""
    with own_rng(1):
        return tiny_llama(vocab=96, d=40).train()


class LabelsOfHead(BagOfWords):
    """Names the labels, by the baseline RLG."""

    default_name = "labels_of_head"

    def needs(self, anatomy):
        return Surfaces(gradients=(HEAD_WEIGHT,))

    def run(self, view, query=None):
        return WordGuess(reveal_labels(view.gradient(HEAD_WEIGHT)))


@pytest.mark.parametrize("attack", [BagOfWords(), LabelsOfHead()], ids=lambda a: a.name)
def test_words_of_a_step_are_counted_against_its_batch(attack) -> None:
    model = untied()
    _, result = look_at(open_channel(attack, model), make_step(model, IDS))
    read = IDS[:, :-1] if attack.name == "bag_of_words" else IDS[:, 1:]
    counts = Counts(*result.trials[0].tolist())
    assert counts.tp + counts.fn == len(torch.unique(read))
    assert (counts.tp, counts.fp) == (len(torch.unique(read)), 0)


def test_other_texts_than_those_of_the_gradient_score_low() -> None:
    model = untied()
    step, other = make_step(model, IDS), make_step(model, IDS + 20)
    channel = open_channel(BagOfWords(), model)
    _, result = look_at(channel, replace(step, gradients=other.gradients))
    assert Counts(*result.trials[0].tolist()).tp <= 1


class NamesMost(BagOfWords):
    """Names all types but some that the batch uses, whatever the gradient."""

    def __init__(self, n_left_out: int) -> None:
        super().__init__("names_most")
        self.n_left_out = n_left_out

    def run(self, view, query=None):
        types = torch.cat([torch.tensor([0]), torch.arange(self.n_left_out + 1, VOCAB)])
        return WordGuess(types, surface="input")


@pytest.mark.parametrize(
    ("n_left_out", "noise_std", "is_known"),
    [(0, 0.0, True), (0, 0.1, False), (2, 0.1, False), (2, math.nan, False), (70, 0.1, True)],
)
def test_under_noise_naming_the_vocabulary_is_no_result(n_left_out, noise_std, is_known) -> None:
    model, attack = untied(), NamesMost(n_left_out)
    ids = torch.arange(1, VOCAB).view(8, -1)  # uses up most of the vocabulary
    step, channel = make_step(model, ids), open_channel(attack, model)
    gradients = replace(step.view(Stage.SHARED), noise_std=noise_std)
    _, result = look_at(channel, replace(step, gradients={Stage.SHARED: gradients}))
    assert isinstance(result, Found) == is_known
    if not is_known:
        assert f"it names {VOCAB - n_left_out} of {VOCAB} types" in result.why
    everything, used = set(range(VOCAB)), set(ids[:, 1:].flatten().tolist())
    assert len(used) == len(set(ids[:, :-1].flatten().tolist()))
    expected = 2 * len(everything & used) / (len(everything) + len(used))
    assert channel.uninformed == pytest.approx(expected)


def test_whole_texts_of_a_step() -> None:
    model = wide()
    step = make_step(model, IDS)
    channel = open_channel(SubspaceTexts(), model)
    _, result = look_at(channel, step)
    assert isinstance(result, Found)
    assert channel.rates(result.trials)["token_accuracy"].value == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NotYet("the rate is 0"), Waiting("the rate is 0")),
        (UnusableObservation("all zero"), Unknown("UnusableObservation: all zero")),
    ],
)
def test_a_gradient_that_cannot_be_taken_has_no_result(error, expected) -> None:
    model, taken = untied(), []

    def take() -> GradientSnapshot:
        taken.append(1)
        raise error

    stages = dict.fromkeys((Stage.SHARED, Stage.AGGREGATE), take)
    step = replace(make_step(model, IDS), gradients=stages)
    assert look_at(open_channel(BagOfWords(), model), step)[1] == expected
    with pytest.raises(type(error)):
        step.view(Stage.AGGREGATE)
    assert taken == [1]


def test_what_a_batch_could_not_be_read_for_is_its_result() -> None:
    model = untied()
    step = replace(make_step(model, IDS), error="BatchError: no ids")
    _, result = look_at(open_channel(BagOfWords(), model), step)
    assert result == Unknown("the batch could not be read: BatchError: no ids")


def test_nothing_is_shared_where_no_optimizer_steps_or_no_label_counts() -> None:
    model = untied()
    channel, step = open_channel(BagOfWords(), model), make_step(model, IDS)
    look = Look(0, step, (Stage.SHARED,), (Stage.SHARED,))
    channel.at_stages(look)
    assert look.stepped == set()
    unlabelled = [ModelCall(batch=replace(call.texts, labels=IDS * 0 - 100)) for call in step.calls]
    assert look_at(channel, replace(step, calls=unlabelled))[1] == NothingShared()


# ---- controls ----------------------------------------------------------------------------------


def controlled(attack, step: Step, model) -> tuple[Look, Found]:
    """Return a look whose attack was given its control, and the result."""
    channel = open_channel(attack, model)
    look, _ = look_at(channel, step)
    look.stages = (Stage.LOCAL, Stage.SHARED, Stage.AGGREGATE)
    step.gradients |= dict.fromkeys(look.stages, step.view(Stage.SHARED))
    Controls(channel.run, dict.fromkeys(channel.all_series, channel)).play(look, channel.plans)
    return look, look.controls[attack.name]


def test_the_step_made_again_explains_its_gradient_and_the_control_is_read() -> None:
    model = wide()
    look, control = controlled(SubspaceWords(), make_step(model, IDS), model)
    # The sizes of a call that is known by its batch alone are those before a label is predicted.
    assert look.training_step.unexplained < 0.1
    assert control.rates["f1"] == 1


def test_a_gradient_of_other_words_is_doubted() -> None:
    model = untied()
    other = make_step(model, (IDS * 7 + 3) % 90)
    step = replace(make_step(model, IDS), gradients=other.gradients)
    look, control = controlled(BagOfWords(), step, model)
    assert look.training_step.unexplained > 0.5
    assert "may not be those of this step" in control.why


def test_what_is_added_to_a_gradient_is_left_unexplained() -> None:
    gradient, added = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(0))
    again = {"w": gradient}
    assert remainder_of(again, again) == (0, {})
    share, rest = remainder_of({"w": 3 * gradient}, again)  # 3 g is rounded
    assert share < 1e-7
    assert all(x.abs().max() < 1e-6 for x in rest.values())
    twice, tiny = torch.cat([gradient, gradient]), torch.cat([1e-6 * added, 0 * added])
    share, rest = remainder_of({"w": 3 * gradient, "a": 3 * (twice + tiny)}, again | {"a": twice})
    assert rest["a"][:40].norm() == pytest.approx(1e-6 * added.norm(), rel=0.5)
    share, rest = remainder_of({"w": gradient + 0.1 * added}, again)
    assert share == pytest.approx(0.1, rel=0.3)
    cosine = torch.cosine_similarity(rest["w"].flatten(), added.flatten(), dim=0)
    assert cosine > 0.98
