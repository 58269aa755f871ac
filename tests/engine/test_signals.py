"""An error of a signal's handler, such as a queue's time limit, ends training also in a look."""

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_fedleak.attacks.base import Query, WordGuess
from lightning_fedleak.federation import OutgoingUpdates, trained_state
from lightning_fedleak.model.snapshots import Observation
from tests.callbacks.runs import Probe, fit, monitor_with
from tests.federation.rounds import batches, model, train
from tests.federation.test_observer import observer
from tests.helpers import loops
from tests.helpers.models import tiny_gpt2

NUMBER = signal.SIGUSR1


class TimeLimit(Exception):
    """What a queue's time limit raises."""


def stop(number: int, frame: object) -> None:
    raise TimeLimit(f"signal {number}")


class Handler:
    """A handler that is a method, and one that is an object."""

    def stop(self, number: int, frame: object) -> None:
        stop(number, frame)

    def __call__(self, number: int, frame: object) -> None:
        stop(number, frame)


HANDLERS = [stop, Handler().stop, Handler(), partial(lambda a, *rest: stop(*rest), 1)]


@pytest.fixture
def _handled(request: pytest.FixtureRequest) -> Iterator[None]:
    before = signal.signal(NUMBER, getattr(request, "param", stop))
    yield
    signal.signal(NUMBER, before)


class Slow(Probe):
    """An attack during which a signal arrives, in its second look."""

    def __init__(self, arrives: Callable[[], object]) -> None:
        super().__init__()
        self.arrives = arrives

    def run(self, view: Observation, query: Query | None = None) -> WordGuess:
        if len(self.seen) == 1:
            self.seen.append(None)
            self.arrives()
        return super().run(view, query)


def signalled() -> None:
    signal.raise_signal(NUMBER)


def own_error() -> None:
    raise TimeLimit("of the attack itself")


@pytest.mark.parametrize(
    "_handled", HANDLERS, ids=["function", "method", "object", "partial"], indirect=True
)
@pytest.mark.usefixtures("_handled")
def test_it_leaves_the_look_of_a_loop_and_the_state_is_put_back(tmp_path: Path) -> None:
    expected: list[torch.Tensor] = []  # of the last step before its optimizer steps

    def before_step(net: nn.Module) -> None:
        expected[:] = [*(p.detach().clone() for p in net.parameters()), torch.get_rng_state()]

    loops.train(tmp_path / "plain", [Probe()], n=8, before_step=before_step)
    net = tiny_gpt2()
    with pytest.raises(TimeLimit):
        loops.train(tmp_path / "stopped", [Slow(signalled)], net, n=8)
    state = [*net.parameters(), torch.get_rng_state()]
    assert all(torch.equal(one, other) for one, other in zip(state, expected, strict=True))
    for module in net.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(not p._backward_hooks for p in net.parameters())


@pytest.mark.usefixtures("_handled")
def test_it_leaves_the_look_of_a_trainer(tmp_path: Path) -> None:
    with pytest.raises(TimeLimit):
        fit([monitor_with([Slow(signalled)], every_n_steps=1)], tmp_path, n=16)


@pytest.mark.usefixtures("_handled")
def test_it_leaves_the_look_of_a_round(tmp_path: Path) -> None:
    net = model()
    out = OutgoingUpdates(observer(tmp_path, net, [Slow(signalled)]))
    results = []
    for round_ in range(2):
        data = batches(round_)
        arguments = round_, trained_state(net), train(net, data), data
        if round_ == 1:
            with pytest.raises(TimeLimit):
                out.leaves(*arguments)
        else:
            results.append(out.leaves(*arguments))
    assert not results[0].withheld


@pytest.mark.usefixtures("_handled")
def test_the_same_error_of_an_attack_is_unknown_and_training_goes_on(tmp_path: Path) -> None:
    training = loops.train(tmp_path, [Slow(own_error)], n=16)
    assert training.steps == 4
    unknown = [line["unknown"] for line in loops.lines_of(tmp_path)]
    assert "TimeLimit at test_signals.py" in unknown[1]
    assert [why is None for why in unknown] == [True, False, True, True]
