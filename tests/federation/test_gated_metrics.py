"""What a gate of a round watches: a value that can be known, and does not pass what is certain."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from lightning_fedleak.attacks import AlignedFlatChat, BagOfWords, SubspaceWords
from lightning_fedleak.attacks.base import Surfaces
from lightning_fedleak.attacks.membership.base import MembershipGuess, PassiveMembership
from lightning_fedleak.callbacks import Games
from lightning_fedleak.engine.channels.membership import MembershipChannel
from lightning_fedleak.federation import OutgoingUpdates, RoundGate, trained_state
from tests.callbacks.runs import Probe
from tests.federation.rounds import ADAMW, batches, lora, model, train
from tests.federation.test_observer import lines, observer, texts

AUC = "leakage/asks/auc"
MEMBERSHIP, WORDS = "leakage/worst/membership", "leakage/worst/words"
MOMENTUM = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


class Asks(PassiveMembership):
    """Knows which texts are a client's, ranks them first (or last), and says no to all."""

    default_name = "asks"
    reads_adaptive_updates = True
    needs_control = False  # it reads nothing of an update

    def __init__(self, data, sign=1.0):
        super().__init__(texts(3))
        rows = torch.cat([batch["input_ids"] for batch in data]).tolist()
        self.known, self.sign = {tuple(row) for row in rows}, sign

    def needs(self, anatomy):
        return Surfaces(gradients=(anatomy.trainable_names()[0],))

    def run(self, view, query=None):
        known = [tuple(ids) in self.known for ids in query.input_ids.tolist()]
        scores = self.sign * torch.tensor(known).double()
        return MembershipGuess(scores=scores, members=torch.zeros(len(scores), dtype=torch.bool))


class Controlled(Asks):
    needs_control = True


def asked(folder, data, gate, *, sign=1.0, targets=16, kind=Asks):
    games = Games(targets=targets, held_out=texts(5, n=4 * targets))
    watched = observer(folder, attacks=[kind(data, sign)], steps=len(data), games=games)
    out, net = OutgoingUpdates(watched, [gate]), model()
    sent = trained_state(net)
    return out.leaves(0, sent, train(net, data), data)


# ---- membership ---------------------------------------------------------------------------------


def test_an_update_that_is_read_without_an_error_does_not_leave(tmp_path):
    """Though the attack's own threshold finds no member in it."""
    result = asked(tmp_path, batches(1, n=4, rows=4), RoundGate(MEMBERSHIP, at_most=0.9))
    assert result.look.now[AUC] == 1.0
    assert result.look.now["leakage/asks/advantage"] == 0.0
    [event] = result.events
    assert (result.withheld, event.value, event.source) == (True, 1.0, AUC)


@pytest.mark.parametrize("rate", [*MembershipChannel.own_threshold, "auc_low", "tpr_at_fpr_0.01"])
def test_rates_that_may_be_low_or_unknown_of_every_update_are_refused(tmp_path, rate):
    with pytest.raises(ValueError, match=f"watch one of .*{MEMBERSHIP}', '{AUC}"):
        asked(tmp_path, batches(1, n=4, rows=4), RoundGate(f"leakage/asks/{rate}", at_most=0.9))


def test_a_true_positive_rate_can_be_watched_where_a_round_has_games_enough(tmp_path):
    data = batches(1, n=4, rows=4)
    gate = RoundGate("leakage/asks/tpr_at_fpr_0.01", at_most=0.9)
    watched = observer(tmp_path, attacks=[Asks(data)], games=Games(targets=1000, held_out=texts(5)))
    OutgoingUpdates(watched, [gate])


def test_of_too_few_texts_an_update_can_be_found_to_leak_but_not_to_be_safe(tmp_path):
    with pytest.raises(ValueError, match=r"4 texts .* fewer than 16"):
        asked(tmp_path, batches(1), RoundGate(MEMBERSHIP, at_most=0.9), targets=4)
    data, gate = batches(1, n=3, rows=5), partial(RoundGate, MEMBERSHIP, at_most=0.9)
    leaks = asked(tmp_path / "leaks", data, gate())
    assert (leaks.withheld, leaks.events[0].value) == (True, 1.0)
    low = asked(tmp_path / "low", data, gate(), sign=-1.0)
    assert low.look.now[MEMBERSHIP] == 0.0
    assert low.withheld
    assert math.isnan(low.events[0].value)
    assert "15 texts of the update were queried" in low.events[0].why
    one_more = asked(tmp_path / "enough", batches(1, n=4, rows=4), gate(), sign=-1.0)
    assert not one_more.withheld


def test_a_low_value_whose_control_is_low_too_does_not_let_an_update_leave(tmp_path):
    gate = RoundGate(MEMBERSHIP, at_most=0.9)
    result = asked(tmp_path, batches(1, n=4, rows=4), gate, sign=-1.0, kind=Controlled)
    assert result.look.now[MEMBERSHIP] == 0.0
    assert result.withheld
    [event] = result.events
    assert math.isnan(event.value)
    assert event.read == 0.0
    assert "could not be checked on known" in event.why


# ---- what can never be known --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "attacks", "settings", "message"),
    [
        (
            lora,
            lambda: [SubspaceWords(capacity_seconds=0), AlignedFlatChat(texts())],
            {"optimizer": ADAMW},
            "rounds of AdamW are no combinations",
        ),
        (
            model,
            lambda: [SubspaceWords(capacity_seconds=0)],
            {"optimizer": MOMENTUM, "fresh": False},
            r"optimizer\.state\.clear\(\)",
        ),
        (lora, lambda: [BagOfWords()], {}, "not trained, so not shared"),
    ],
    ids=["adaptive steps", "no fresh optimizer", "a head that is not trained"],
)
def test_a_value_that_no_update_can_have_is_refused_with_one_that_can(
    tmp_path, made, attacks, settings, message
):
    games = Games(held_out=texts(5))
    listed = [*attacks(), Asks(batches(1))] if settings.get("fresh", True) else attacks()
    watched = observer(tmp_path, made(), listed, games=games, **settings)
    with pytest.raises(
        ValueError, match=f"(?s){message}.*It would withhold every update"
    ) as refused:
        OutgoingUpdates(watched, [RoundGate(WORDS, at_most=0.5)])
    if settings.get("fresh", True):
        assert f"watch one of {[MEMBERSHIP, AUC]}" in str(refused.value)
        OutgoingUpdates(watched, [RoundGate(MEMBERSHIP, at_most=0.5)])


def test_an_attack_that_is_not_made_for_several_adaptive_steps_leaves_the_worst_to_others(tmp_path):
    net, data = model(), batches(1)
    attacks = [SubspaceWords(capacity_seconds=0), BagOfWords()]
    watched = observer(tmp_path, net, attacks, optimizer=ADAMW)
    out = OutgoingUpdates(watched, [RoundGate(WORDS, at_most=0.5)])
    result = out.leaves(0, trained_state(net), train(net, data, ADAMW), data)
    assert result.look.now[WORDS] == result.look.now["leakage/bag_of_words/f1"] == 1.0
    assert "are no combinations" in result.look.unknown["leakage/subspace_words"]


# ---- a LoRA's first round -----------------------------------------------------------------------


def first_rounds(folder, gates, optimizer, n=2, net=None, attacks=(), repeats=False):
    """Rounds of one step that begin with the same model; the server may repeat their number."""
    net = lora(r=8) if net is None else net
    listed = [SubspaceWords(capacity_seconds=0), *attacks]
    games = Games(held_out=texts(5, n=96))
    watched = observer(folder, net, listed, steps=1, optimizer=optimizer, games=games)
    out = OutgoingUpdates(watched, gates)
    for round_ in range(n):
        data = batches(round_, n=1, rows=16)
        number = 0 if repeats else round_
        yield out.leaves(number, trained_state(net), train(net, data, optimizer), data)


@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, lr=0.05), ADAMW])
def test_one_update_leaves_before_words_can_be_read_and_no_second_one(tmp_path, optimizer):
    gate = RoundGate(WORDS, at_most=0.9)
    first, second = first_rounds(tmp_path, [gate], optimizer)
    assert WORDS not in first.look.now
    assert (first.withheld, second.withheld) == (False, True)
    assert "until B" in second.events[0].why
    report = [x for x in lines(tmp_path, "run.jsonl") if x["kind"] == "gate"]
    assert [(x["did"], x["measured"]) for x in report] == [("not yet", None), ("withheld", None)]


def test_a_server_that_repeats_a_round_gets_no_second_update(tmp_path):
    gate = RoundGate(WORDS, at_most=0.9)
    result = list(first_rounds(tmp_path, [gate], ADAMW, n=4, repeats=True))
    assert [leaving.withheld for leaving in result] == [False, True, True, True]


def test_membership_is_judged_in_a_first_round_and_what_it_holds_back_does_not_count(tmp_path):
    data = batches(0, n=1, rows=16)
    gates = [RoundGate(WORDS, at_most=0.9), RoundGate(MEMBERSHIP, at_most=0.9)]
    result = list(first_rounds(tmp_path, gates, ADAMW, attacks=[Asks(data)]))
    assert [[e.metric for e in leaving.events] for leaving in result] == [[MEMBERSHIP], []]
    assert [leaving.withheld for leaving in result] == [True, False]


def test_what_is_read_of_a_first_round_by_another_attack_is_judged(tmp_path):
    net = lora(r=8)
    net.base_model.model.lm_head.weight.requires_grad_(True)
    gate = RoundGate(WORDS, at_most=0.1)
    [result] = first_rounds(tmp_path, [gate], ADAMW, n=1, net=net, attacks=[Probe(k=30)])
    assert result.withheld
    assert result.events[0].source == "leakage/probe/f1"
