"""What a client reports of its round: its batches, how many steps they made, and at which rate."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch

from lightning_fedleak.federation import SUM, TrainedOn, recording, trained_on, trained_state
from tests.callbacks.runs import Probe, fit
from tests.federation.rounds import SGD, batches, model, train
from tests.federation.test_observer import F1, loader, observer
from tests.helpers.lightning_modules import CausalLMModule


class Annealing(CausalLMModule):
    """SGD whose rate falls with each step, as FlowerTune's does with each round."""

    several = False

    def configure_optimizers(self):
        first, *others = self.parameters()
        groups = [{"params": [first], "lr": 0.02}, {"params": others}]
        optimizer = torch.optim.SGD(groups if self.several else [first, *others], lr=0.04)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def reported(tmp_path, module, **trainer):
    with recording() as found:
        fit([TrainedOn()], tmp_path, module=module, loader=loader(batches(4, 4)), **trainer)
    return found


def test_a_trainer_reports_each_batch_and_each_step_with_its_rate(tmp_path):
    found = reported(tmp_path / "a", Annealing(model()))
    assert [len(found), *found.rates] == [4, 0.04, 0.02, pytest.approx(0.04 / 3), 0.01]
    assert found.learning_rate == pytest.approx(0.04 * (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    found = reported(tmp_path / "b", Annealing(model()), accumulate_grad_batches=2)
    assert [len(found), *found.rates] == [4, 0.04, 0.02]
    several = Annealing(model())
    several.several = True
    assert math.isnan(reported(tmp_path / "c", several).learning_rate)


def test_a_loop_reports_a_rate_for_each_step_or_for_none():
    with recording() as found:
        trained_on("one", step=False)
        trained_on("two", learning_rate=0.2)
        assert (list(found), found.rates, found.learning_rate) == (["one", "two"], [0.2], 0.2)
        trained_on("three")
        assert math.isnan(found.learning_rate)
    with recording() as found:
        trained_on("one")
    assert found.learning_rate is None
    trained_on("where nobody looks")


def test_the_rate_that_a_client_reports_scales_its_update(tmp_path):
    """The observer's optimizer knows the first round's rate alone."""
    net, data = model(), batches(4, 2)
    slow = partial(torch.optim.SGD, lr=0.01)
    seen = []
    for optimizer, rate in ((slow, None), (SGD, 0.01)):
        probe = Probe()
        rounds = observer(tmp_path / str(rate), net, [probe], optimizer=optimizer)
        rounds.begin(0, trained_state(net))
        with recording() as found:
            for batch in data:
                trained_on(batch, learning_rate=rate)
        rounds.look(train(net, data, slow), batches=found)
        seen.append(probe.seen[0][2])
    torch.testing.assert_close(*seen)


@pytest.mark.parametrize("taken", [1, 3])
def test_a_round_of_another_length_is_unknown_with_both_numbers(tmp_path, taken):
    net, data = model(), batches(4, taken)
    rounds = observer(tmp_path, net, steps=2)
    sent = trained_state(net)
    rounds.begin(0, sent)
    returned = train(net, data)
    look = rounds.look(returned, batches=data)
    assert math.isnan(look.values[F1])
    why = look.unknown["leakage/bag_of_words"]
    assert f"took {taken} optimizer steps" in why
    assert "local_steps=2" in why
    assert not math.isnan(
        rounds.look(returned, SUM, batches=data).now[f"leakage_aggregate{F1[7:]}"]
    )


def test_accumulated_batches_are_one_step(tmp_path):
    net, data = model(), batches(4, 4)
    rounds = observer(tmp_path, net, steps=2)
    rounds.begin(0, trained_state(net))
    own = copy.deepcopy(net)
    stepping = SGD(own.parameters())
    with recording() as found:
        for number, batch in enumerate(data):
            trained_on(batch, step=number % 2 == 1)
            (own(**batch).loss / 2).backward()
            if number % 2:
                stepping.step()
                stepping.zero_grad()
    assert rounds.look(trained_state(own), batches=found).values[F1] > 0.8
