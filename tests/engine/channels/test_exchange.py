"""What a process sends of its results, and from where."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_fedleak.attacks import SubspaceWords
from lightning_fedleak.engine.channels import WordsChannel
from lightning_fedleak.engine.channels.exchange import Exchange
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
NUMBERS = [1.0] * CHANNEL.width
RESULTS = {
    "found": Found(NUMBERS),
    "controlled": Found(NUMBERS, Control({"f1": 0.9}, {}, "")),
    "controlled by part": Found(NUMBERS, Control({"f1": 0.4}, {"f1": 0.9}, "why")),
    "unknown": Unknown("why"),
    "waiting": Waiting("a longer reason"),
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
    assert kinds == {((1 + CHANNEL.width + 4 + 2 * 3,), torch.float64, device)}
    assert {(rows, dst) for _, rows, dst in sent} == {(None, 0)}
