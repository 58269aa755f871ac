"""What a process sends of its results, and from where."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_fedleak.attacks import SubspaceWords
from lightning_fedleak.engine.channels import WordsChannel
from lightning_fedleak.engine.channels.exchange import Exchange, _read_row, _row
from lightning_fedleak.engine.options import Options
from lightning_fedleak.engine.outcomes import (
    Control,
    Found,
    NothingShared,
    Series,
    Unknown,
    Waiting,
)
from lightning_fedleak.model.snapshots import Stage

SERIES = Series.at(Stage.SHARED, "subspace_words")
CHANNEL = WordsChannel([SubspaceWords()], Options(texts=1))
TRIALS = torch.ones(1, CHANNEL.width)
RATES, PART = ({"precision": x, "recall": x / 3, "f1": x / 7} for x in (0.4, 0.9))
RESULTS = {
    "found": Found(TRIALS),
    "controlled": Found(TRIALS, Control(RATES)),
    "controlled by part": Found(TRIALS, Control(RATES, PART, "why", 0.1, 0.2)),
    "unknown": Unknown("why"),
    "inapplicable": Unknown("why", applies=False),
    "waiting": Waiting("a longer reason", soon=False),
    "soon": Waiting("a longer reason", zeros=("head.weight",)),
    "nothing": NothingShared(),
}


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_every_result_is_a_row_of_equally_many_numbers_on_the_runs_device(monkeypatch, backend):
    """Nothing else is sent: no object of a client's, whose size would speak of it too."""
    sent = []
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "gather", lambda row, rows, dst: sent.append((row, rows, dst)))
    run = SimpleNamespace(
        processes=2, client="rank", device=torch.device("meta"), broadcast=lambda value: (None, 7)
    )
    exchange = Exchange(run, {SERIES: CHANNEL})
    for result in RESULTS.values():
        assert exchange.outcomes({SERIES: result}, {SERIES: True}, 5) == (None, 7)
    device = {"nccl": "meta", "gloo": "cpu"}[backend]
    kinds = {(row.shape, row.dtype, row.device.type) for row, *_ in sent}
    assert kinds == {((2 + CHANNEL.width + 3 + 2 * 3,), torch.float64, device)}
    assert {(rows, dst) for _, rows, dst in sent} == {(None, 0)}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_a_row_is_read_as_what_was_written_without_reasons(result):
    read = _read_row(_row(result, CHANNEL, SERIES), CHANNEL, SERIES)
    assert type(read) is type(result)
    for name in ("applies", "soon"):
        assert getattr(read, name, None) == getattr(result, name, None)
    assert not getattr(read, "why", "")
    if isinstance(result, Found):
        assert read.trials == result.trials.flatten().tolist()
        assert str(read.control) == str(result.control and replace(result.control, why=""))


def test_of_several_clients_the_lowest_control_counts(monkeypatch):
    monkeypatch.setattr(CHANNEL, "_n_types", 9, raising=False)  # as of a fit
    run = SimpleNamespace(processes=1, client="rank")
    controls = Control(RATES, {}, "", 0.1), Control(PART, RATES, "", 0.3, 0.5), None
    clients = [Found([1.0] * CHANNEL.width, control) for control in controls]
    outcome = Exchange(run, {SERIES: CHANNEL})._outcome(SERIES, clients, clients[0])
    assert outcome.control.rates == RATES
    assert set(map(math.isnan, outcome.control.part.values())) == {True}  # one has no part
    assert (outcome.control.unexplained, outcome.control.bound) == (0.3, 0.5)
    assert outcome.n == 3 * 2
