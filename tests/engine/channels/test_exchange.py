"""What a process sends of its results, and from where."""

import pickle
from types import SimpleNamespace

import pytest
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
from lightning_fedleak.evaluation.metrics import WordRecovery
from lightning_fedleak.model.snapshots import Stage

SERIES = Series.at(Stage.SHARED, "subspace_words")
CHANNEL = WordsChannel([SubspaceWords()], Options(texts=1))
NUMBERS = [1.0] * WordRecovery.WIDTH
RESULTS = {
    "found": Found(NUMBERS),
    "controlled": Found(NUMBERS, Control({"f1": 0.9}, {}, "")),
    "controlled by part": Found(NUMBERS, Control({"f1": 0.4}, {"f1": 0.9}, "private")),
    "unknown": Unknown("private"),
    "waiting": Waiting("private and longer"),
    "nothing": NothingShared(),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_a_client_sends_scores_to_the_first_process_and_no_reason(monkeypatch, kind):
    sent = []
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "gather_object", lambda *sends, dst: sent.append((*sends, dst)))
    run = SimpleNamespace(processes=2, client="rank", broadcast=lambda value: (None, 7))
    exchange = Exchange(run, {SERIES: CHANNEL})
    assert exchange.outcomes({SERIES: RESULTS[kind]}, {SERIES: True}, 5) == (None, 7)
    [([result], destination, first)] = sent
    assert (destination, first) == (None, 0)
    assert type(result) is type(RESULTS[kind])
    assert b"private" not in pickle.dumps(result)
