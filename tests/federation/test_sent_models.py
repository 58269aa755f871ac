"""A client asks the model that it is sent about its own texts, and nobody learns what it found."""

from __future__ import annotations

import copy
import json
import math
import stat
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_fedleak.attacks import BagOfWords
from lightning_fedleak.attacks.memorization import Combined, LossRatio
from lightning_fedleak.engine import options
from lightning_fedleak.engine.options import selected
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.federation import (
    SUM,
    OutgoingUpdates,
    RoundGate,
    RoundObserver,
    RoundSettings,
    trained_state,
)
from lightning_fedleak.report import findings, read
from tests.federation.rounds import model, train

ADAMW = partial(torch.optim.AdamW, lr=3e-3)
AUC = "leakage/loss_ratio/auc"
STEPS = 12


def client_rows(seed: int, n: int = 90, length: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (length,), generator=generator) for _ in range(n)]


def collate(rows):
    ids = torch.stack([*rows])
    return {"input_ids": ids, "labels": ids.clone()}


def client_loader(client: int | str) -> DataLoader:
    rows, _ = leave_out(client_rows(int(client)), 40, seed=int(client))
    return DataLoader(rows, batch_size=10, collate_fn=collate)


def drawn(client: int, round_: int) -> list[dict[str, torch.Tensor]]:
    """The batches of a round: every row of the client, in an order of the round's own."""
    rows = client_loader(client).dataset
    order = torch.Generator().manual_seed(100 * round_ + client)
    batches = []
    while len(batches) < STEPS:
        chosen = torch.randperm(len(rows), generator=order).split(10)
        batches += [collate([rows[i] for i in part.tolist()]) for part in chosen]
    return batches[:STEPS]


def observer(folder, attacks=None, **arguments):
    rare = {"data": arguments.pop("data", client_loader), **arguments.pop("settings", {})}
    settings = RoundSettings(tensorboard=False, **rare)
    return RoundObserver(
        model(),
        ADAMW,
        STEPS,
        attacks=[LossRatio(), BagOfWords()] if attacks is None else attacks,
        folder=folder,
        settings=settings,
        **arguments,
    )


def lines(folder):
    every = (folder / "leakage.jsonl").read_text().splitlines()
    return [json.loads(line) for line in every]


def test_a_client_whose_texts_are_memorized_sees_it_and_another_does_not(tmp_path):
    net, watch, sent_models = model(), observer(tmp_path), []
    found = {0: [], 1: []}
    for round_ in range(4):
        sent = trained_state(net)
        sent_models.append(copy.deepcopy(net))
        watch.begin(round_, sent)
        returned = {client: train(net, drawn(client, round_), ADAMW) for client in (0, 1)}
        for client, update in returned.items():
            watch.look(update, client, batches=drawn(client, round_))
        watch.look(returned[0], SUM, batches=drawn(0, round_))
        net.load_state_dict(returned[0], strict=False)  # the server uses the first client's alone
    watch.begin(4, trained_state(net))
    for client in (0, 1):
        last = watch.ask(client)
        assert watch.ask(client) is None  # once in a round
        found[client] = last.values[AUC]
    watch.end()
    assert found[0] > 0.9
    assert 0.3 < found[1] < 0.7

    # The same by hand: the loss of every text at the first model, less that at the last.
    rows, others = leave_out(client_rows(0), 40, seed=0)
    with torch.no_grad():
        drops = [
            [
                float(
                    sent_models[0].eval()(**collate([row])).loss - net.eval()(**collate([row])).loss
                )
                for row in side
            ]
            for side in ([rows[i] for i in range(len(rows))], [others[i] for i in range(40)])
        ]
    pairs = [(a > b) + 0.5 * (a == b) for a in drops[0] for b in drops[1]]
    assert found[0] == pytest.approx(sum(pairs) / len(pairs), abs=0.02)

    written = [line for line in lines(tmp_path) if line["stage"] == "released"]
    assert {line["client"] for line in written} == {0, 1}  # none of the sum
    assert [line["step"] for line in written if line["client"] == 0] == [1, 2, 3, 4]
    report = findings(read([tmp_path]))
    assert any(a.name == "loss_ratio" for a in report.runs[0].attacks)


def test_before_anything_has_left_there_is_nobody_to_compare(tmp_path):
    watch = observer(tmp_path)
    watch.begin(0, trained_state(watch.model))
    first = watch.ask(0)
    assert AUC not in first.values
    assert "has left it" in first.not_yet["leakage/loss_ratio"]
    assert first.values["monitor/failures"] == 0


def test_texts_of_an_update_that_was_withheld_are_not_in_the_model(tmp_path):
    watch = observer(tmp_path)
    out = OutgoingUpdates(watch, [RoundGate("leakage/bag_of_words/f1", at_most=0.0)])
    sent = trained_state(watch.model)
    for round_ in range(2):
        update = train(watch.model, drawn(0, round_), ADAMW)
        assert out.leaves(round_, sent, update, drawn(0, round_)).withheld
    watch.begin(2, sent)
    assert "leakage/loss_ratio" in watch.ask(0).not_yet
    open_ = OutgoingUpdates(watch, [RoundGate("leakage/bag_of_words/f1", at_most=1.0)])
    assert not open_.leaves(3, sent, train(watch.model, drawn(0, 3), ADAMW), drawn(0, 3)).withheld
    watch.begin(4, sent)
    assert not math.isnan(watch.ask(0).values[AUC])


def test_a_round_without_a_look_counts_what_left(tmp_path):
    watch = observer(tmp_path, max_overhead=1e-6)
    out = OutgoingUpdates(watch)
    sent = trained_state(watch.model)
    for round_ in range(3):
        update = train(watch.model, drawn(0, round_), ADAMW)
        out.leaves(round_, sent, update, drawn(0, round_), seconds=0.01)
    assert {line["step"] for line in lines(tmp_path)} == {0}  # the one look was dear
    watch.begin(3, sent)
    assert watch.ask(0).values[AUC] == 0.5  # the model is that of the first round


@pytest.mark.parametrize("named", [True, False])
def test_another_process_goes_on_where_the_federation_has_a_name(tmp_path, named):
    """As Flower may run each round of a client in a process of its own."""
    net = model()
    settings = {"federation": "ward-7"} if named else {}
    one = observer(tmp_path / "one")
    for round_ in range(3):
        sent, data = trained_state(net), drawn(0, round_)
        update = train(net, data, ADAMW)
        watch = observer(tmp_path / "many", settings=settings)
        for each in (one, watch):
            each.begin(round_, sent)
            each.look(update, 0, batches=data)
        net.load_state_dict(update, strict=False)
    for each in (one, watch):
        each.begin(3, trained_state(net))
    alone = one.ask(0).values[AUC]
    fresh = observer(tmp_path / "many", settings=settings)
    fresh.begin(3, trained_state(net))
    resumed = fresh.ask(0)
    assert alone > 0.9
    if named:
        assert resumed.values[AUC] == alone
        folder = tmp_path / "many" / "client_0"
        assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
        assert len([*folder.iterdir()]) == 2
    else:  # the model of round 3 is no base, and nobody says what the base was
        assert math.isnan(resumed.values[AUC])
        assert "not known" in resumed.unknown["leakage/loss_ratio"]


def test_a_process_that_lacks_the_memory_of_others_knows_no_base(tmp_path):
    """As where each has a folder of its own."""
    net = model()
    for took_part, known in ((None, False), (True, False), (False, True)):
        watch = observer(tmp_path / str(took_part), settings={"federation": "ward-7"})
        if took_part is not None:  # as Flower's node knows
            watch.took_part[0] = took_part
        watch.begin(2, trained_state(net))
        watch.leaves(0, drawn(0, 2))
        watch.begin(3, trained_state(net))
        assert math.isnan(watch.ask(0).values[AUC]) is not known


def test_a_base_that_could_not_be_asked_stays_unknown(tmp_path):
    tries = []

    def flaky(client):
        tries.append(client)
        if len(tries) <= 2:
            raise OSError("the disk is away")
        return client_loader(client)

    watch = observer(tmp_path, data=flaky, settings={"federation": "ward-7"})
    out = OutgoingUpdates(watch)
    sent = trained_state(watch.model)
    update = train(watch.model, drawn(0, 0), ADAMW)
    assert out.leaves(0, sent, update, drawn(0, 0)).state is not None
    for again in (watch, observer(tmp_path, settings={"federation": "ward-7"})):
        again.begin(1, trained_state(watch.model))
        assert "not known" in again.ask(0).unknown["leakage/loss_ratio"]


def test_what_cannot_be_asked_is_refused_with_the_mend(tmp_path):
    with pytest.raises(ValueError, match=r"give settings=RoundSettings\(data="):
        observer(tmp_path, attacks=[Combined()], data=None)
    with pytest.raises(ValueError, match="on the client's side"):
        observer(tmp_path, side="server")
    whole = observer(tmp_path, data=lambda client: DataLoader(client_rows(0), collate_fn=collate))
    whole.begin(0, trained_state(whole.model))
    with pytest.raises(ValueError, match="add leave_out"):
        whole.ask(0)
    watch = observer(tmp_path)
    with pytest.raises(ValueError, match="of no client's update"):
        OutgoingUpdates(watch, [RoundGate(AUC, at_most=0.6)])


def test_attacks_that_choose_themselves_ask_where_they_can(tmp_path, monkeypatch):
    with_data = {attack.name for attack in selected("auto", rounds=True, weights=True).attacks}
    without = {attack.name for attack in selected("auto", rounds=True, weights=False).attacks}
    assert with_data - without == {"combined", "extraction"}
    quick = [BagOfWords(), Combined()]  # others take long to calibrate
    monkeypatch.setattr(options, "candidates", lambda *args, **named: quick)
    whole = observer(
        tmp_path,
        attacks="auto",
        data=lambda client: DataLoader(client_rows(0), collate_fn=collate),
    )
    whole.begin(0, trained_state(whole.model))
    assert whole.ask(0) is None
    skipped = [line for line in lines(tmp_path) if line["attack"] == "combined"]
    assert "add leave_out" in skipped[0]["unknown"]
