"""What attacks know of the compression of an update."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_fedleak.attacks import AlignedFlatChat, SubspaceWords
from lightning_fedleak.attacks.base import WordGuess
from lightning_fedleak.defenses import GradientCompression
from lightning_fedleak.federation import (
    SUM,
    trained_state,
)
from lightning_fedleak.model.compression import AVERAGED
from tests.callbacks.runs import Probe
from tests.federation.rounds import ADAMW, SGD, batches, model, train
from tests.federation.test_observer import lines, observer, texts

F1, SHARE, LR = "leakage/probe/f1", 0.1, 0.05
WORDS = ("subspace_words", "aligned_flatchat")


class Reading(Probe):
    """Names the batch's own words, or none that are there while ``wrong``."""

    reads_compressed = frozenset(("topk", "low_rank"))

    def __init__(self):
        super().__init__()
        self.told = []
        self.wrong = False

    def run(self, view, query=None):
        super().run(view, query)
        self.told.append((view.gradients[-1].compression, view.gradients[-1].noise_std))
        data = batches(1 + view.gradients[-1].step)
        words = torch.cat([b["labels"][:, 1:].flatten() for b in data])
        return WordGuess(torch.tensor([0]) if self.wrong else words.unique())


def topk(**settings):
    return GradientCompression("topk", share=SHARE, **settings)


def test_an_attack_that_does_not_read_the_compression_is_unknown(tmp_path):
    watched = observer(tmp_path, attacks=[Probe(k=14)], defenses=[topk(error_feedback=False)])
    net = model()
    watched.begin(0, trained_state(net))
    look = watched.look(train(net, batches(1)), batches=batches(1))
    assert math.isnan(look.values[F1])
    [line] = lines(tmp_path)
    assert "compressed (method 'topk')" in line["unknown"]


@pytest.mark.parametrize(
    ("optimizer", "method", "unread"),
    [
        (SGD, "topk", {}),
        (SGD, "int4", {"subspace_words": "method 'int4'"}),
        (ADAMW, "topk", dict.fromkeys(WORDS, "not undone")),
    ],
)
def test_what_a_compression_hides_in_every_round_is_said_before_the_first(
    tmp_path, optimizer, method, unread
):
    compression = GradientCompression(method, share=SHARE, error_feedback=False)
    words = [SubspaceWords(capacity_seconds=0), AlignedFlatChat(texts(n=8))]
    watched = observer(tmp_path, None, words, 1, optimizer, defenses=[compression])
    for attack in words:
        why = watched.never_judged(f"leakage/{attack.name}/f1") or ""
        assert bool(why) == (attack.name in unread)
        assert unread.get(attack.name, "") in why


@pytest.mark.parametrize(
    ("defers", "who", "expected"),
    [(False, 0, "topk"), (True, 0, AVERAGED), (False, SUM, AVERAGED), (True, SUM, AVERAGED)],
)
def test_a_server_sees_one_update_or_a_mean_of_several(tmp_path, defers, who, expected):
    defenses = [topk(error_feedback=defers)]
    watched = observer(tmp_path, attacks=[Reading()], defenses=defenses, side="server")
    net = model()
    watched.begin(0, trained_state(net))
    watched.look(train(net, batches(1)), who, batches=batches(1))
    [line] = lines(tmp_path)
    unknown = line.get("unknown") or ""
    assert ("were compressed one by one" in unknown) == bool(unknown) == (expected == AVERAGED)
