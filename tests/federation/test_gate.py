"""What leaves a client in a round: judged and defended before it leaves."""

import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lightning_fedleak import BagOfWords
from lightning_fedleak.attacks import AlignedFlatChat, SubspaceWords
from lightning_fedleak.attacks.base import Surfaces, WordGuess
from lightning_fedleak.attacks.membership.base import MembershipGuess, PassiveMembership
from lightning_fedleak.callbacks import Games, LeakageLimitExceeded
from lightning_fedleak.defenses import BudgetSpent, DefenseError
from lightning_fedleak.engine import GateEvent
from lightning_fedleak.engine.channels.membership import MembershipChannel
from lightning_fedleak.evidence import HOLDS, verify_run
from lightning_fedleak.federation import (
    ClientDP,
    ClientReleaseSettings,
    OutgoingUpdates,
    RoundGate,
    UpdateError,
    difference,
    trained_state,
)
from lightning_fedleak.federation.round_look import ClientEngine
from lightning_fedleak.report import findings, read
from tests.callbacks.runs import Probe
from tests.federation.rounds import ADAMW, batches, lora, model, train
from tests.federation.test_observer import lines, observer, texts
from tests.helpers.models import tiny_gpt2
from tests.helpers.notices import announced

F1 = "leakage/probe/f1"
WORST = "leakage/worst/words"


class Listening(Probe):
    """Names the batch's own words as long as it is told of no more noise than this."""

    def __init__(self, most: float = math.inf):
        super().__init__()
        self.most = most
        self.told = []

    def run(self, view, query=None):
        super().run(view, query)
        self.told.append(view.gradients[-1].noise_std)
        words = torch.cat([b["labels"][:, 1:].flatten() for b in batches(1)]).unique()
        return WordGuess(words if self.told[-1] <= self.most else words[:1])


def dp(noise=2.0, **more):
    return ClientDP(0.5, noise, clients=10, **({"target_delta": 1e-5, "trust": "local"} | more))


def client(folder, *gates, attack=None, dp=None, net=None):
    net = model() if net is None else net
    watched = observer(folder, net, [Probe(k=14) if attack is None else attack])
    return OutgoingUpdates(watched, gates, dp)


def rounds(out, net=None, n=1):
    net = model() if net is None else net
    sent, data = trained_state(net), batches(1)
    returned = train(net, data)
    for round_ in range(n):
        yield sent, returned, out.leaves(round_, sent, returned, data)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def decisions(folder):
    return [x for x in lines(folder, "run.jsonl") if x["kind"] == "gate"]


def test_a_client_whose_training_fails_is_in_the_record(tmp_path):
    out, sent = client(tmp_path), trained_state(model())

    def fails():
        raise RuntimeError("a private text")

    for round_ in range(2):
        leaving = out.answer(round_, sent, fails)
        assert (leaving.state, leaving.withheld) == (None, True)
    out.observer.end()
    record = lines(tmp_path, "run.jsonl")
    assert [x["kind"] for x in record] == ["begin", "gate", "gate", "end"]
    for round_, line in enumerate(decisions(tmp_path)):
        assert (line["did"], line["step"], line["client"]) == ("withheld", round_, 0)
        assert line["why"].startswith("training failed: RuntimeError at test_gate.py")
        assert "private" not in json.dumps(line)
    assert verify_run(tmp_path).status == HOLDS


def test_a_measured_look_counts_once_and_only_if_it_was_logged(tmp_path):
    watched, sent, data = observer(tmp_path), trained_state(model()), batches(1)
    watched.begin(0, sent)
    with watched.measure(train(model(), data), batches=data):
        pass
    results = watched._clients[0, "shared"].results
    assert (results.looks, results.latest) == (0, {})
    with watched.measure(train(model(), data), batches=data) as look:
        look.log()
    look.forget()
    assert results.looks == len(lines(tmp_path)) == 1
    assert results.latest[WORST] == look.values[WORST] == 1.0


# ---- without differential privacy ---------------------------------------------------------------


def test_what_is_allowed_leaves_as_it_is(tmp_path):
    out = client(tmp_path, RoundGate(F1, at_most=1.0))
    [(_, returned, result)] = rounds(out)
    assert same(result.state, returned)
    assert (result.withheld, result.events) == (False, ())
    assert result.look.values[F1] > 0.5
    assert [x["attack"] for x in lines(tmp_path)] == ["probe"]
    assert decisions(tmp_path) == []


@pytest.mark.parametrize(("at_most", "withheld"), [(1.0, False), (0.2, True)])
def test_a_client_is_the_worst_one_of_its_own_round(tmp_path, at_most, withheld):
    out = client(tmp_path, RoundGate(f"{F1}_worst_client", at_most=at_most))
    [(_, _, result)] = rounds(out)
    assert result.withheld == withheld
    assert [event.value for event in result.events] == [result.look.now[F1]] * withheld


def test_what_is_not_allowed_does_not_leave_and_that_tells_a_bit(tmp_path):
    out = client(tmp_path, RoundGate(WORST, at_most=0.2))
    with announced("tells the server one bit"):
        [(_, _, result)] = rounds(out)
    assert (result.state, result.withheld) == (None, True)
    [event] = result.events
    assert event.value == result.look.values[F1] > 0.5
    assert event.source == F1
    assert "at most 0.2" in str(event)
    [report] = decisions(tmp_path)
    assert (report["did"], report["gate"], report["client"]) == ("withheld", "worst/words", 0)
    assert report["measured"] == event.value


def test_in_a_masked_sum_what_is_withheld_is_zero_and_tells_no_bit(tmp_path):
    net = model()
    watched = observer(tmp_path, net, [Probe(k=14)])
    out = OutgoingUpdates(watched, [RoundGate(F1, at_most=0.2)], secure_aggregation=True)
    with announced("withheld") as report:
        [(sent, _, result)] = rounds(out, net)
    assert result.withheld
    assert same(result.state, sent)
    broken = {n: torch.full_like(t, math.nan) for n, t in sent.items()}
    with announced("NaN") as more:
        leaving = out.leaves(1, sent, broken, batches(1))
    assert leaving.withheld
    assert same(leaving.state, sent)
    assert not any("one bit" in text for text in [*report, *more])
    assert [x["did"] for x in decisions(tmp_path)] == ["withheld"] * 2


def test_the_decision_is_in_the_logs(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    net = model()
    watched = observer(tmp_path, net, [Probe(k=14)], tensorboard=True)
    out = OutgoingUpdates(watched, [RoundGate(F1, at_most=0.2, action="warn", name="g")])
    with announced("warns"):
        [(_, returned, result)] = rounds(out, net)
    watched.end()
    assert same(result.state, returned)
    board = EventAccumulator(str(tmp_path / "tensorboard" / "client_0")).Reload()
    assert [e.value for e in board.Scalars("gate/g")] == [1.0]
    [run] = findings(read([tmp_path])).runs
    assert [gate.name for gate in run.gates] == ["g"]
    assert [(d.gate, d.did, d.client) for d in run.decisions] == [("g", "warn", 0)]


def test_a_gate_counts_once_however_often_and_late_it_is_passed(tmp_path):
    watched, first, late = (
        observer(tmp_path, model(), [Probe(k=14)]),
        *(RoundGate(WORST, limit, action="warn", name=f"{limit}") for limit in (0.7, 0.9)),
    )
    list(rounds(OutgoingUpdates(watched, [first])))
    for _ in range(3):
        again = OutgoingUpdates(watched, [first, late])
    assert [gate.at_most for gate in watched.engine.gates] == [0.7, 0.9]
    with announced("warns"):
        list(rounds(again, n=2))
    [engine] = watched._clients.values()
    assert engine.current.controls.needs == {"words": 0.9}


def test_a_client_may_fail_instead(tmp_path):
    out = client(tmp_path, RoundGate(F1, at_most=0.2, action="raise"))
    with pytest.raises(LeakageLimitExceeded, match=r"probe/f1 = 0\.\d+"):
        list(rounds(out))
    assert [x["did"] for x in decisions(tmp_path)] == ["raise"]


def test_the_strongest_of_several_gates_decides(tmp_path):
    gates = [
        RoundGate(F1, at_most=0.2, action="warn", name="a"),
        RoundGate(F1, at_most=0.3, name="b"),
        RoundGate(F1, at_most=1.0, action="raise", name="c"),
    ]
    with announced("RoundGate 'b' withheld"):
        [(_, _, result)] = rounds(client(tmp_path, *gates))
    assert result.state is None
    assert [e.gate for e in result.events] == ["a", "b"]


# ---- unknown ------------------------------------------------------------------------------------


class Broken(Probe):
    def run(self, view, query=None, **more):
        raise RuntimeError("the private batch")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("local", [None, dp()])
def test_a_look_that_crashes_ends_no_round(tmp_path, monkeypatch, gated, local):
    """It does not say outside that it has: its error may be the data's doing."""

    def crashes(*args, **kwargs):
        raise RuntimeError("the word mangrove")

    out = client(tmp_path, *[RoundGate(F1, at_most=1.0)] * gated, dp=local)
    monkeypatch.setattr(ClientEngine, "read_update", crashes)
    with pytest.warns(UserWarning, match="gave no result in round 0: RuntimeError at") as report:
        [(_, returned, result)] = rounds(out)
    assert not any("mangrove" in str(warning.message) for warning in report)
    assert result.withheld == gated
    assert "RuntimeError at" in result.look.unknown["leakage/probe"]
    if local is None:
        assert result.state is None if gated else same(result.state, returned)
    else:
        assert float(result.state["lm_head.weight"].std()) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("gated", [True, False])
def test_a_look_that_cannot_be_made_withholds_only_before_a_gate(tmp_path, monkeypatch, gated):
    out = client(tmp_path, *[RoundGate(F1, at_most=1.0)] * gated)
    monkeypatch.setattr(out.observer, "measure", Broken().run)
    with announced("the measurement failed: RuntimeError"):
        [(_, returned, result)] = rounds(out)
    assert (result.withheld, result.look) == (gated, None)
    assert result.state is None if gated else same(result.state, returned)
    assert [x["did"] for x in decisions(tmp_path)] == ["withheld"] * gated


def test_unknown_fails_closed_when_patience_is_over(tmp_path):
    out = client(tmp_path, RoundGate(F1, at_most=1.0, patience=2), attack=Broken())
    sent, result = trained_state(model()), []
    with announced("treats unknown as a breach"):
        for round_ in range(4):
            data = batches(round_)
            result.append(out.leaves(round_, sent, train(model(), data), data))
    assert [leaving.withheld for leaving in result] == [False, False, True, True]
    assert result[3].state is None
    [event] = result[3].events
    assert math.isnan(event.value)
    assert "RuntimeError at test_gate.py" in event.why
    assert "private" not in event.why


def test_a_gate_on_a_surface_that_is_not_shared_is_refused(tmp_path):
    net = lora()
    watched = observer(
        tmp_path, net, [Probe(), Probe(name="b", role=next(iter(trained_state(net))))]
    )
    with pytest.raises(ValueError, match=r"watch one of \['leakage/worst/words', 'leakage/b/f1'"):
        OutgoingUpdates(watched, [RoundGate(F1, at_most=1.0)])


def test_an_update_that_cannot_be_read_does_not_leave(tmp_path):
    net = model()
    sent, data = trained_state(net), batches(1)
    nan = {n: torch.full_like(t, math.nan) for n, t in sent.items()}
    for local in (None, dp()):
        out = client(tmp_path, dp=local, net=net)
        with announced("did not leave: the client's update holds NaN"):
            result = out.leaves(0, sent, nan, data)
        assert result.withheld
        assert result.look is None
        if local is None:
            assert result.state is None
        else:
            assert all(bool(t.isfinite().all()) for t in result.state.values())
            assert local.accountant.steps == 1
    assert {x["why"][:23] for x in decisions(tmp_path)} == {"the client's update hol"}


def test_looks_cost_a_share_of_the_rounds_unless_a_gate_judges(tmp_path):
    def rounds_seen(*gates):
        net = model()
        observed = []
        out = OutgoingUpdates(
            observer(tmp_path / str(len(gates)), net, [Probe(k=14)], max_overhead=0.5), gates
        )
        result = out.observer.measure

        def dear(*args, **more):  # of 3 seconds in a round of one
            observed.append(out.observer.round_)
            made = result(*args, **more)
            made.look.seconds = 3.0
            return made

        out.observer.measure = dear
        for round_ in range(14):
            sent, data = trained_state(net), batches(round_)
            returned = train(net, data)
            leaving = out.leaves(round_, sent, returned, data, seconds=1.0)
            assert same(leaving.state, returned)
            assert (leaving.look is None) == (round_ not in observed)
        return observed

    assert rounds_seen() == [0, 6, 12]
    assert rounds_seen(RoundGate(F1, at_most=1.0)) == list(range(14))
    paid = observer(tmp_path / "paid", model(), max_overhead=0.5)
    for beside, expected in ((0.0, 6), (0.25, 12), (10.0, 600)):  # what rounds cost without a look
        paid.round_ = 0
        paid.paid(0, 3.0, 1.0, beside)
        assert paid.next_look == {0: expected}
    with pytest.raises(ValueError, match="max_overhead must be a number above 0"):
        observer(tmp_path, model(), max_overhead=5)


# ---- under differential privacy of the client ---------------------------------------------------


def test_a_withheld_update_is_zero_plus_the_same_noise(tmp_path):
    seeded = ClientReleaseSettings(seed=4)
    out = client(tmp_path, RoundGate(F1, at_most=0.0), dp=dp(release=seeded))
    with announced("withheld") as said:
        [(sent, _, result)] = rounds(out)
    assert not any("one bit" in text for text in said)
    twin = dp(release=seeded)
    twin.rehearsed(None, sent)
    expected = twin.privatized(None, sent)
    leaving = difference(sent, result.state)
    for name in sent:
        torch.testing.assert_close(leaving[name], expected[name], rtol=0, atol=1e-6)
    [looked] = [x for x in lines(tmp_path, "run.jsonl") if x["kind"] == "look"]
    assert [p["releases"] for p in looked["privacy"]] == [1]  # this round's own


def test_what_is_attacked_has_other_noise_than_what_leaves(tmp_path):
    attack, seeded = Listening(), dp(release=ClientReleaseSettings(seed=4))
    out = client(tmp_path, RoundGate(F1, at_most=1.0), attack=attack, dp=seeded)
    [(sent, returned, result)] = rounds(out)
    [(_, _, observed)] = attack.seen
    leaving = (sent["lm_head.weight"] - result.state["lm_head.weight"]) / 0.05
    noise = out.dp.own_noise_std / 0.05
    assert attack.told == pytest.approx([noise])
    assert float((observed - leaving).std()) == pytest.approx(noise * math.sqrt(2), rel=0.05)
    shift = (sent["lm_head.weight"] - returned["lm_head.weight"]) / 0.05
    assert float((leaving - shift).std()) == pytest.approx(noise, rel=0.1)
    assert out.dp.accountant.steps == 1


def test_an_update_leaves_whose_own_noise_hides_the_words(tmp_path):
    """The round that is made again is compared with the update before the noise."""
    gate = RoundGate(WORST, at_most=0.6)
    out = client(tmp_path, gate, attack=BagOfWords(), dp=dp(noise=20.0))
    [(_, _, result)] = rounds(out)
    assert not result.withheld
    assert result.look.values["leakage/bag_of_words/f1"] < 0.3
    assert result.look.values["leakage/bag_of_words/control"] > 0.9  # it has the words' rounding
    assert result.look.values["leakage/bag_of_words/bound"] < 0.6
    assert result.look.values["leakage/step/unexplained"] < 1e-4
    out = client(tmp_path / "less", gate, attack=BagOfWords(), dp=dp(noise=1e-3))
    with announced("withheld"):
        [(_, _, result)] = rounds(out)
    assert result.events[0].value > 0.9


def test_a_clients_own_account_is_in_the_record_with_what_it_guarantees(tmp_path):
    """Also where the observer, which several clients share, was not told of any."""
    net = model()
    watched = observer(tmp_path, net, [Probe(k=14)])
    for client in range(2):
        local = dp(accountant="rdp", ledger=tmp_path / f"client_{client}.ledger")
        list(rounds(OutgoingUpdates(watched, dp=local, client=client), net))
    watched.end()
    assert [x["kind"] for x in lines(tmp_path, "run.jsonl")].count("defense") == 2
    [run] = findings(read([tmp_path])).runs
    [account] = run.privacy
    assert (account.class_name, account.holds, account.unit) == ("ClientDP", True, "client")
    assert set(account.ledger) == {"client_0.ledger", "client_1.ledger"}
    assert len(run.defenses) == 1


def test_noise_is_turned_up_until_the_update_passes(tmp_path):
    local = dp(accountant="filter", target_epsilon=50.0)
    before = local.own_noise_std
    attack = Listening(most=3 * before / 0.05)
    out = client(tmp_path, RoundGate(F1, at_most=0.3, action="harden"), attack=attack, dp=local)
    result = [leaving for _, _, leaving in rounds(out, n=2)]
    assert [f.withheld for f in result] == [False, False]
    assert attack.told == pytest.approx([before / 0.05 * k for k in (1, 2, 4, 4)])
    assert local.accountant.history == ((4.0, 1.0, 2),)
    assert [x["did"] for x in decisions(tmp_path)] == ["hardened", "hardened"]
    assert [x["round"] for x in lines(tmp_path)] == [0, 1]
    assert out.observer._clients[0, "shared"].results.looks == 2


def test_a_spent_budget_lets_nothing_leave(tmp_path):
    local = dp(None, target_epsilon=2.0, rounds=1, accountant="rdp")
    out = client(tmp_path, dp=local)
    done = rounds(out, n=2)
    next(done)
    with pytest.raises(BudgetSpent, match="was not made"):
        next(done)


def test_a_tied_parameter_is_not_noised_twice(tmp_path):
    net = tiny_gpt2(dropout=0.0)
    sent = {n: t.clone() for n, t in net.state_dict().items()}
    out = client(tmp_path, dp=dp(), net=net)
    with pytest.raises(UpdateError, match="has two names"):
        out.leaves(0, sent, {n: t + 1 for n, t in sent.items()}, batches(1))


# ---- refusals -----------------------------------------------------------------------------------


SHARES = {"trust": "secure_aggregation", "target_epsilon": 1e3, "accountant": "filter"}
HARDENS = {"action": "harden"}


@pytest.mark.parametrize(
    ("gates", "local", "message"),
    [
        ([{"metric": "leakage/prob/f1"}], None, f"Did you mean '{F1}'"),
        ([{}, {}], None, "two RoundGates have"),
        ([{"action": "raise"}], dp(), "use action='withhold'"),
        ([HARDENS], None, "accountant='filter'"),
        ([HARDENS], dp(), "accountant='filter'"),
        ([HARDENS], dp(**SHARES), "accountant='filter'"),
        ([{"action": "stop"}], None, "action must be"),
        ([{"at_most": 30}], None, "shares, not percent"),
    ],
)
def test_gates_that_cannot_judge_or_act_are_refused(tmp_path, gates, local, message):
    with pytest.raises(ValueError, match=message):
        client(
            tmp_path,
            *(RoundGate(**({"metric": F1, "at_most": 0.3} | gate)) for gate in gates),
            dp=local,
        )


@pytest.mark.parametrize("attack", [Listening(most=-1.0), Broken()])
def test_where_noise_does_not_let_the_update_pass_it_is_withheld(tmp_path, attack):
    """The noise is turned up ten times at most, and where the value stays unknown not at all."""
    local = dp(accountant="filter", target_epsilon=50.0)
    gate = RoundGate(F1, at_most=-1.0, action="harden")
    with announced("withheld"):
        [(_, _, leaving)] = rounds(client(tmp_path, gate, attack=attack, dp=local))
    assert leaving.withheld
    assert leaving.state is not None
    hardened = 0 if isinstance(attack, Broken) else 10
    assert [x["did"] for x in decisions(tmp_path)] == ["hardened"] * hardened + ["withheld"]


def test_a_look_after_which_the_noise_was_turned_up_costs_no_patience(tmp_path):
    local = dp(accountant="filter", target_epsilon=50.0)
    before = local.own_noise_std
    attacks = [Listening(most=4 * before / 0.05 - 1e-6), Broken(name="broken")]
    patient = RoundGate("leakage/broken/f1", at_most=1.0, patience=2, name="patient")
    harden = RoundGate(F1, at_most=0.3, action="harden")
    out = OutgoingUpdates(observer(tmp_path, model(), attacks), [patient, harden], local)
    with announced("withheld"):
        result = [leaving.withheld for _, _, leaving in rounds(out, n=3)]
    assert result == [False, False, True]
    assert [x["did"] for x in decisions(tmp_path)] == ["hardened", "hardened", "withheld"]


def test_one_clients_share_is_not_turned_up():
    """The sum has the others' shares too, and would carry less than this client's account says."""
    local = dp(**SHARES)
    assert local.harden() is None
    assert (local.can_harden, local.noise_multiplier) == (False, 2.0)


@pytest.mark.parametrize(("trust", "refused"), [("secure_aggregation", True), ("local", False)])
def test_a_share_that_the_dtype_rounds_away_does_not_leave(tmp_path, trust, refused):
    """Whole noise is rounded after it was added; shares are rounded before they add up."""
    net = model()
    with torch.no_grad():
        net.lm_head.weight[0, 0] = 1e8  # its neighbours in float32 are 8 apart
    out = client(tmp_path, dp=dp(trust=trust), net=net)
    if refused:
        with pytest.raises(DefenseError, match=r"'lm_head.weight' was sent in float32 .* of 12,"):
            list(rounds(out, net))
        assert out.dp.accountant.steps == 0
    else:
        [(_, _, result)] = rounds(out, net)
        assert result.state is not None


# What a gate of a round watches: a value that can be known, and does not pass what is certain.


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
    [fact] = [f for f in findings(read([tmp_path])).overviews[0].facts if f.name == "Gate"]
    assert fact.value == "Acted at round 1: it kept updates back"


def test_no_update_leaves_undecided_where_an_attack_has_an_unknown_number(tmp_path):
    gate = RoundGate(WORST, at_most=0.9)
    out = client(tmp_path, gate)
    look = SimpleNamespace(not_yet={WORST: "until B has changed"})
    waits = GateEvent(WORST, 0, math.nan, math.nan, math.nan, 0.9, gate=gate.name)
    assert out._acting({gate: waits}, look) == ({}, [waits])
    doubted = replace(waits, source=F1, why=f"{F1}: it reads 0.00, and 0.00 of known words")
    assert out._acting({gate: doubted}, look) == ({gate: doubted}, [])


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
