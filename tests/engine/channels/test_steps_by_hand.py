"""Channels and controls on steps that are written by hand: no training runs."""

import math
from dataclasses import replace

import pytest
import torch

from lightning_fedleak.attacks import BagOfWords, WordGuess
from lightning_fedleak.engine.channels.control import Controls
from lightning_fedleak.engine.outcomes import Found, NothingShared, Unknown, Waiting
from lightning_fedleak.engine.run import Look
from lightning_fedleak.evaluation.metrics import Counts
from lightning_fedleak.model.snapshots import GradientSnapshot, NotYet, Stage, UnusableObservation
from lightning_fedleak.model.taps import ModelCall, Step
from tests.helpers.models import VOCAB, tiny_gpt2
from tests.helpers.steps import look_at, make_step, open_channel

IDS = torch.tensor([[5, 9, 17, 23, 31, 44], [7, 9, 61, 70, 31, 12]])


def untied() -> torch.nn.Module:
    return tiny_gpt2(tied=False, dropout=0.0, seed=3).train()


def test_words_of_a_step_are_counted_against_its_batch() -> None:
    model = untied()
    _, result = look_at(open_channel(BagOfWords(), model), make_step(model, IDS))
    counts = Counts(*result.trials[0].tolist())
    assert (counts.tp, counts.fp, counts.fn) == (len(torch.unique(IDS[:, :-1])), 0, 0)


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


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NotYet("the rate is 0"), Waiting("the rate is 0")),
        (UnusableObservation("all zero"), Unknown("all zero")),
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
    step = replace(make_step(model, IDS), error="no ids")
    _, result = look_at(open_channel(BagOfWords(), model), step)
    assert result == Unknown("the batch could not be read: no ids")


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


def test_a_gradient_of_other_words_is_doubted() -> None:
    model = untied()
    other = make_step(model, (IDS * 7 + 3) % 90)
    step = replace(make_step(model, IDS), gradients=other.gradients)
    look, control = controlled(BagOfWords(), step, model)
    assert look.training_step.unexplained > 0.5
    assert "may not be those of this step" in control.why
