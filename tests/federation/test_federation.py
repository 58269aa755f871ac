"""Whole federations of a few rounds, and what goes wrong in them."""

from __future__ import annotations

import copy
import json
import math

from lightning_fedleak.attacks import BagOfWords
from lightning_fedleak.federation import (
    ClientDP,
    RoundObserver,
    trained_state,
)
from tests.federation.rounds import SGD, batches, model, round_settings, train

CLIENTS, ROUNDS = 3, 2


def watched(folder, **settings):
    arguments, rare = round_settings({"attacks": [BagOfWords()]} | settings)
    return RoundObserver(copy.deepcopy(model()), SGD, 2, folder=folder, settings=rare, **arguments)


def test_a_report_says_what_clients_have_spent_and_for_whom_it_holds(tmp_path):
    """Two fits on the same clients, drawn without replacement, composed as such."""
    from lightning_fedleak.report import write

    net = model()
    for fit in range(2):
        dp = ClientDP(
            0.5, 4.0, clients=30, sampling="fixed", per_round=3, target_delta=1e-5,
            ledger=tmp_path / f"ledger{fit}",
        )  # fmt: skip
        server = watched(tmp_path / f"{fit}", defenses=[dp])
        for round_ in range(2):
            server.begin(round_, trained_state(net))
            data = batches(round_)
            server.look(train(net, data), batches=data)
            dp.mean(dict.fromkeys(range(3)), trained_state(net))
        server.end()
    page, result, *_ = write([tmp_path])
    report = json.loads(result.read_text())
    [spent] = report["runs"][1]["privacy"]
    assert spent["epsilon"] == math.ceil(dp.privacy.epsilon * 1e3) / 1e3  # three digits, up
    assert "one client, all of its data, replaced" in spent["statement"]
    assert "rounds are a fixed share of 0.1, drawn again each time" in spent["statement"]
    assert "client_dp" in page.read_text()
