"""Whole federations of a few rounds, and what goes wrong in them."""

from __future__ import annotations

import copy
import json
import math

import torch

from lightning_fedleak.attacks import BagOfWords
from lightning_fedleak.federation import (
    SUM,
    ClientDP,
    OutgoingUpdates,
    RoundGate,
    RoundObserver,
    difference,
    moved,
    trained_state,
)
from tests.federation.rounds import SGD, batches, model, round_settings, train
from tests.federation.test_observer import lines
from tests.helpers.notices import announced

CLIENTS, ROUNDS = 3, 2


def federation(send, combine):
    """Plain federated averaging: what each client sends goes through ``send``."""
    net = model()
    for round_ in range(ROUNDS):
        sent = trained_state(net)
        leaving = []
        for client in range(CLIENTS):
            data = batches(10 * round_ + client)
            leaving.append(send(round_, client, sent, train(net, data), data))
        with torch.no_grad():
            for name, tensor in combine(round_, sent, leaving).items():
                net.get_parameter(name).copy_(tensor)
    return trained_state(net)


def mean(round_, sent, leaving):
    there = [state for state in leaving if state is not None]
    return {n: torch.stack([s[n] for s in there]).mean(0) for n in sent} if there else sent


def watched(folder, **settings):
    arguments, rare = round_settings({"attacks": [BagOfWords()]} | settings)
    return RoundObserver(copy.deepcopy(model()), SGD, 2, folder=folder, settings=rare, **arguments)


def test_watching_changes_no_bit_of_the_model(tmp_path):
    plain = federation(lambda r, c, sent, returned, data: returned, mean)
    outs = [OutgoingUpdates(watched(tmp_path / f"{c}"), client=c) for c in range(CLIENTS)]
    server = watched(tmp_path / "server", side="server")

    def send(round_, client, sent, returned, data):
        leaving = outs[client].leaves(round_, sent, returned, data).state
        server.begin(round_, sent)
        server.look(leaving, client)
        return leaving

    observed = federation(send, mean)
    assert all(torch.equal(plain[n], observed[n]) for n in plain)
    assert all(len(lines(tmp_path / f"{c}")) == ROUNDS for c in range(CLIENTS))
    assert len(lines(tmp_path / "server")) == ROUNDS * CLIENTS


def test_a_trusted_server_with_next_to_no_noise_gives_the_plain_model(tmp_path):
    plain = federation(lambda r, c, sent, returned, data: returned, mean)
    dp = ClientDP(
        1e3, 1e-9, clients=CLIENTS, target_delta=1e-5, ledger=tmp_path / "ledger", accountant="rdp"
    )

    def combine(round_, sent, leaving):
        updates = {c: difference(sent, state) for c, state in enumerate(leaving)}
        return moved(sent, dp.mean(updates, sent).update)

    private = federation(lambda r, c, sent, returned, data: returned, combine)
    for name, tensor in plain.items():
        torch.testing.assert_close(private[name], tensor, rtol=1e-4, atol=1e-5)
    assert dp.privacy.releases == ROUNDS
    assert dp.privacy.epsilon == math.inf  # such noise hides nothing, and the account says so


def test_whatever_a_client_returns_the_round_ends_and_says_what_happened(tmp_path):
    """One client is gone, one returns NaN, one another model, one nothing."""
    net = model()
    sent = trained_state(net)
    data = batches(1)
    good = train(net, data)
    returned = {
        "good": good,
        "gone": None,
        "nan": {n: torch.full_like(t, math.nan) for n, t in sent.items()},
        "other": {n: torch.zeros(2, 2) for n in sent},
        "nothing": {},
        "same": sent,
    }
    server = watched(tmp_path)
    server.begin(0, sent)
    message = {
        client: server.look(state, client, batches=data).unknown.get("leakage/bag_of_words", "")
        for client, state in returned.items()
        if state is not None
    }
    words = {
        "good": "",
        "nan": "NaN or infinity",
        "other": "shape",
        "nothing": "only one of both",
        "same": "exactly what it was sent",
    }
    assert all(words[c] in message[c] for c in words)
    assert not message["good"]
    dp = ClientDP(1e3, 1e-9, clients=10, target_delta=1e-5, accountant="rdp")
    updates = {}
    for client, state in returned.items():
        try:
            updates[client] = None if state is None else difference(sent, state)
        except ValueError:
            updates[client] = None
    result = dp.mean(updates, sent)
    assert result.zeros.keys() == {"gone", "nan", "other", "nothing"}
    for name, tensor in result.update.items():
        want = (good[name] - sent[name]) / 10
        torch.testing.assert_close(tensor, want, rtol=1e-3, atol=1e-6)


def test_the_sum_of_many_shows_less_than_one(tmp_path):
    net = model()
    sent = trained_state(net)
    data = [batches(c, 2) for c in range(4)]
    returned = [train(net, of) for of in data]
    server = watched(tmp_path)
    server.begin(0, sent)
    each = [
        server.look(r, c, batches=of) for c, (r, of) in enumerate(zip(returned, data, strict=True))
    ]
    whole = server.look(mean(0, sent, returned), SUM, batches=[b for of in data for b in of])
    assert all(look.values["leakage/bag_of_words/f1"] > 0.9 for look in each)
    # Nothing says any more whose word it was: all clients' words are in the sum.
    assert whole.values["leakage_aggregate/bag_of_words/f1"] > 0.9
    counts = {line["client"]: line["n"] for line in lines(tmp_path)}
    assert counts[SUM] > max(counts[c] for c in range(4))


def test_a_gate_of_each_client_leaves_the_round_to_the_others(tmp_path):
    gates = {
        c: [RoundGate("leakage/worst/words", at_most=0.0 if c == 1 else 1.0)] for c in range(3)
    }
    outs = [OutgoingUpdates(watched(tmp_path / f"{c}"), gates[c], client=c) for c in range(3)]
    plain = federation(lambda r, c, sent, returned, data: None if c == 1 else returned, mean)

    def send(round_, client, sent, returned, data):
        return outs[client].leaves(round_, sent, returned, data).state

    with announced("withheld") as messages:
        gated = federation(send, mean)
    assert sum("withheld" in text for text in messages) == ROUNDS
    assert all(torch.equal(plain[n], gated[n]) for n in plain)


def test_a_report_says_what_clients_have_spent_and_for_whom_it_holds(tmp_path):
    """Two fits on the same clients, drawn without replacement, composed as such."""
    from lightning_fedleak.defenses.accounting.accounting import epsilon_of
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
    [together] = report["privacy_together"]
    expected = epsilon_of([(2.0, 0.1, 4)], 1e-5, "prv", "without_replacement")
    assert 0 <= together["epsilon"] / expected - 1 < 1e-2  # three digits, up
    assert "client_dp" in page.read_text()
