"""The mod and the strategies, on Flower's own messages, without an engine."""

import copy
import errno
import gc
import itertools
import os
import tracemalloc
from functools import partial

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from lightning_fedleak.attacks import BagOfWords
from lightning_fedleak.defenses import DefenseError, GradientCompression
from lightning_fedleak.federation import (
    ClientDP,
    RoundGate,
    RoundObserver,
    RoundSettings,
    difference,
    trained_state,
)
from lightning_fedleak.federation.flower import FedLeakMod, Observed, PrivateMean
from tests.callbacks.runs import Probe
from tests.federation.rounds import SGD, model
from tests.federation.rounds import train as trained
from tests.federation.test_observer import lines
from tests.flower.apps import F1, ForClient, data_of, faulty, observer, train
from tests.helpers.models import tiny_gpt2
from tests.helpers.notices import announced


@pytest.fixture(autouse=True)
def _in_a_task(monkeypatch):
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def message(round_=1, kind="train", node=7, state=None):
    sent = trained_state(model()) if state is None else state
    config = ConfigRecord({} if round_ is None else {"server-round": round_})
    content = RecordDict({"arrays": ArrayRecord(sent), "config": config})
    return Message(content=content, message_type=kind, dst_node_id=node)


def context(number=0, run=1):
    return Context(run, 7 + number, {"partition-id": number}, RecordDict(), {})


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def asked_state(asked):
    return asked.content["arrays"].to_torch_state_dict()


def arrays(reply):
    return reply.content["arrays"].to_torch_state_dict()


# ---- the mod ------------------------------------------------------------------------------------


def test_without_a_gate_the_reply_is_that_of_the_client(tmp_path):
    asked = message()
    plain = train(asked, context())
    watched = FedLeakMod(ForClient(tmp_path))(asked, context(), train)
    assert same(arrays(plain), arrays(watched))
    assert watched.content["metrics"] == plain.content["metrics"]
    [line] = lines(next(tmp_path.glob("process_*")))
    assert (line["client"], line["round"], line["attack"]) == (0, 1, "bag_of_words")
    assert line["metrics"]["f1"]["value"] > 0.9
    begin, *_ = lines(next(tmp_path.glob("process_*")), "run.jsonl")
    assert begin["fit"] == f"flower-{context().run_id}"


def test_a_withheld_update_is_answered_with_an_error_that_holds_no_number(tmp_path):
    mod = FedLeakMod(ForClient(tmp_path), [RoundGate(F1, at_most=0.3)])
    with announced("tells the server one bit"):
        reply = mod(message(), context(), train)
    assert reply.has_error()
    assert reply.error.reason == "lightning-fedleak: withheld (bag_of_words/f1)"


def test_a_gate_that_raises_tells_the_server_no_number(tmp_path):
    mod = FedLeakMod(ForClient(tmp_path), [RoundGate(F1, at_most=0.3, action="raise")])
    reply = mod(message(), context(), train)
    assert reply.error.reason == "lightning-fedleak: a gate ended this client's round"


def test_patience_is_kept_where_each_round_has_a_process_of_its_own(tmp_path):
    def silent(asked, where):
        content = RecordDict({"arrays": ArrayRecord(trained(model(), data_of(0, 1)))})
        return Message(content=content, reply_to=asked)

    node = context()
    refused = []
    for round_ in (1, 2):
        mod = FedLeakMod(
            ForClient(tmp_path), lambda where: [RoundGate(F1, at_most=1.0, patience=1)]
        )
        refused.append(mod(message(round_), node, silent).has_error())
    assert refused == [False, True]


@pytest.mark.parametrize("method", ["topk", "low_rank"])
def test_residuals_are_kept_where_each_round_has_a_process_of_its_own(tmp_path, method):
    sent = trained_state(model())
    nodes, missing, replies = {name: context() for name in ("one", "many")}, {}, {}
    compression = partial(GradientCompression, method, share=0.05, rank=2)
    lasting = FedLeakMod(lambda where: observer(tmp_path, defenses=[compression()]))
    for round_ in (1, 2, 3):
        made = observer(tmp_path / str(round_), defenses=[compression()])
        mods = {"one": lasting, "many": FedLeakMod(lambda where, made=made: made)}
        for name, mod in mods.items():
            replies[name] = arrays(mod(message(round_), nodes[name], train))
        assert same(replies["one"], replies["many"])
        update = difference(sent, arrays(train(message(round_), context())))
        left = difference(sent, replies["many"])
        missing = {n: missing.get(n, 0) + t.double() - left[n] for n, t in update.items()}
    stored = nodes["many"].state.array_records["lightning-fedleak-compression"]
    memory = stored.to_torch_state_dict()
    for name, residual in missing.items():
        torch.testing.assert_close(memory[f"residual/{name}"].double(), residual, rtol=0, atol=1e-6)
    assert max(float(t.abs().max()) for t in missing.values()) > 1e-4


def test_copies_of_a_mod_calibrate_once_in_a_process(tmp_path):
    made = []

    def counting(where):
        made.append(where.run_id)
        return observer(tmp_path / str(len(made)))

    mod = FedLeakMod(counting)
    for round_, run in ((1, 1), (2, 1), (1, 2)):
        copy.copy(mod)(message(round_), context(run=run), train)
    assert made == [1, 2]


def test_noise_of_the_clients_own_leaves_with_no_metrics(tmp_path):
    mod = FedLeakMod(ForClient(tmp_path), [RoundGate(F1, at_most=0.01)], ForClient(tmp_path, "dp"))
    for round_ in (1, 2):
        with announced("withheld"):
            reply = mod(message(round_), context(), train)
        assert not reply.has_error()
        assert dict(reply.content["metrics"]) == {"num-examples": 1.0}
        leaving = difference(trained_state(model()), arrays(reply))
        assert float(leaving["lm_head.weight"].std()) == pytest.approx(1.0, rel=0.1)
    assert ForClient(tmp_path, "dp")(context()).accountant.steps == 2
    assert ForClient(tmp_path, "dp")(context(1)).accountant.steps == 0


@pytest.mark.parametrize("how", ["raises", "answers with an error", "sends no model"])
def test_under_noise_of_its_own_a_client_that_fails_does_not_show(tmp_path, how):
    word = "".join(["man", "grove"])

    def fails(asked, where):
        if how == "raises":
            raise ValueError(f"the word {word} cannot be read")
        if how == "sends no model":
            return Message(RecordDict({"note": ConfigRecord({"why": "mangrove"})}), reply_to=asked)
        return Message(Error(0, "mangrove"), reply_to=asked)

    mod = FedLeakMod(ForClient(tmp_path), dp=ForClient(tmp_path, "dp"))
    with announced("round 1 did not leave: ") as report:
        failed = mod(message(), context(), fails)
    assert not any("mangrove" in text for text in report)
    works = mod(message(2), context(), train)
    assert {n: type(r) for n, r in failed.content.items()} == {
        n: type(r) for n, r in works.content.items()
    }
    assert failed.content["metrics"] == works.content["metrics"]
    leaving = difference(trained_state(model()), arrays(failed))
    assert float(leaving["lm_head.weight"].std()) == pytest.approx(1.0, rel=0.1)
    assert ForClient(tmp_path, "dp")(context()).accountant.steps == 2


def test_the_words_of_a_failure_are_in_no_log(tmp_path, caplog):
    word = "".join(["man", "grove"])

    def fails(asked, where):
        raise ValueError(f"the word {word} cannot be read")

    reply = FedLeakMod(ForClient(tmp_path))(message(), context(), fails)
    assert reply.error.reason.startswith("lightning-fedleak: training failed: ValueError at ")
    assert "mangrove" not in reply.error.reason
    assert "mangrove" not in caplog.text
    assert "test_mod.py" in caplog.text  # where it was


@pytest.mark.parametrize(
    ("fault", "said"),
    [("shapes", "came back with shape"), ("other", "only one of both"), ("nan", "NaN"),
     ("same", "exactly what it was sent")],
)  # fmt: skip
def test_what_cannot_be_read_does_not_leave(tmp_path, fault, said):
    def broken(asked, where):
        reply = train(asked, where)
        reply.content["arrays"] = ArrayRecord(
            trained_state(model()) if fault == "same" else faulty(fault, arrays(reply))
        )
        return reply

    mod = FedLeakMod(ForClient(tmp_path), [RoundGate(F1, at_most=1.0)])
    with announced(said):
        reply = mod(message(), context(), broken)
    assert reply.error.reason.startswith("lightning-fedleak: withheld (")


def test_an_account_without_a_ledger_is_refused(tmp_path):
    def forgets(where):
        return ClientDP(0.5, 1.0, clients=10, target_delta=1e-5, trust="local")

    with pytest.raises(DefenseError, match=r"ledger=\.\.\."):
        FedLeakMod(ForClient(tmp_path), dp=forgets)(message(), context(), train)


EXACT = ["evaluate", "evaluate.more", "query", "query.size", "get_parameters", "get_properties"]


@pytest.mark.parametrize("trust", ["local", "secure_aggregation"])
@pytest.mark.parametrize("kind", EXACT)
def test_under_noise_of_its_own_a_client_answers_training_alone(tmp_path, kind, trust):
    def account(where):
        return ClientDP(
            0.5, 2.0, clients=10, target_delta=1e-5, trust=trust, ledger=tmp_path / "ledger"
        )

    def never(asked, where):
        raise AssertionError("an exact loss of a model that the server chose")

    reply = FedLeakMod(ForClient(tmp_path), dp=account)(message(kind=kind), context(), never)
    assert reply.has_error()
    assert f"answers only training, and not '{kind}'" in reply.error.reason
    assert account(None).accountant.steps == 0


def test_without_noise_of_the_clients_own_other_messages_pass(tmp_path):
    def central(where):
        return ClientDP(0.5, 2.0, clients=10, target_delta=1e-5)

    for dp in (None, central, lambda where: None):
        for kind in EXACT:
            asked = message(kind=kind)
            assert FedLeakMod(ForClient(tmp_path), dp=dp)(asked, context(), lambda m, c: m) is asked
    assert not list(tmp_path.iterdir())


def test_whatever_the_order_of_messages_no_release_is_forgotten(tmp_path):
    """The same again, a run that begins again, and what is refused, between others."""
    mod = FedLeakMod(ForClient(tmp_path), dp=ForClient(tmp_path, "dp"))
    another = {n: t + 1 for n, t in trained_state(model()).items()}
    leaving = []
    for asked, run in (
        (message(3), 1), (message(3), 1), (message(3, state=another), 1), (message(2), 1),
        (message(4, kind="train.default"), 1), (message(1), 2), (message(3), 1),
    ):  # fmt: skip
        try:
            reply = mod(asked, context(run=run), train)
        except ValueError:  # another model in one round, or a round that is over
            continue
        leaving.append(arrays(reply)["lm_head.weight"] - asked_state(asked)["lm_head.weight"])
    assert len(leaving) == 5
    assert all(float(x.std()) == pytest.approx(1.0, rel=0.1) for x in leaving)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(leaving, 2))
    assert ForClient(tmp_path, "dp")(context()).accountant.steps == len(leaving)


def test_a_failed_client_stays_failed(tmp_path):
    def fails(asked, where):
        return Message(Error(0, "mine"), reply_to=asked)

    reply = FedLeakMod(ForClient(tmp_path))(message(), context(), fails)
    assert reply.error.reason == "mine"
    [path] = tmp_path.rglob("run.jsonl")
    [line] = [x for x in lines(path.parent, "run.jsonl") if x.get("did")]
    assert (line["did"], line["step"]) == ("withheld", 1)
    assert "training failed" in line["why"]


def test_a_client_with_noise_of_its_own_says_what_others_need(tmp_path):
    """Flower's strategies end a run whose replies have different metrics."""
    own = FedLeakMod(ForClient(tmp_path), dp=lambda where: private(tmp_path, trust="local"))
    with pytest.warns(UserWarning, match=r"client 4 has a ClientDP .* give all clients a ClientDP"):
        own(message(), context(4), train)


# ---- the server ---------------------------------------------------------------------------------


class Nodes:
    def __init__(self, n):
        self.ids = range(100, 100 + n)

    def get_node_ids(self):
        return self.ids


class Grid(Nodes):
    """Whose nodes answer at once."""

    def __init__(self, n, by):
        super().__init__(n)
        self.by = by

    def send_and_receive(self, messages, *, timeout=None):
        return answered(list(messages), self.by)


def answered(asked, by=train):
    return [by(one, context(number)) for number, one in enumerate(asked)]


def a_round(strategy, nodes=3, by=train, round_=1):
    sent = ArrayRecord(trained_state(model()))
    asked = strategy.configure_train(round_, sent, ConfigRecord(), Nodes(nodes))
    result, metrics = strategy.aggregate_train(round_, answered(list(asked), by))
    return result.to_torch_state_dict(), metrics


def test_a_watched_strategy_gives_the_same_model(tmp_path):
    plain, metrics = a_round(FedAvg())
    observed, watched = a_round(Observed(FedAvg(), observer(tmp_path, side="server")))
    assert same(plain, observed)
    assert metrics == watched
    outcome = [(x["client"], x["stage"]) for x in lines(tmp_path)]
    assert outcome == [(0, "shared"), (1, "shared"), (2, "shared"), ("sum", "aggregate")]
    assert all(x["unknown"] for x in lines(tmp_path))


def test_which_clients_send_other_metrics_is_said_before_flower_ends_the_run(tmp_path, caplog):
    """The clients of nodes 100 and 102 have a ClientDP whose noise they add, the third has none."""
    own = FedLeakMod(ForClient(tmp_path), dp=lambda where: private(tmp_path, trust="local"))
    plain = FedLeakMod(ForClient(tmp_path))

    def mixed(asked, where):
        return (plain if asked.metadata.dst_node_id == 101 else own)(asked, where, train)

    strategy = Observed(FedAvg(), observer(tmp_path / "server", side="server"))
    with pytest.raises(InconsistentMessageReplies):
        a_round(strategy, by=mixed)
    assert "round 1: nodes [100, 102] send a weight as their only metric" in caplog.text
    assert "and nodes [101] do not" in caplog.text
    caplog.clear()
    a_round(strategy)
    assert "their only metric" not in caplog.text


def test_where_every_client_withholds_the_model_that_was_sent_is_kept(tmp_path, caplog):
    def withholds(asked, where):
        return Message(Error(0, "withheld"), reply_to=asked)

    result, metrics = a_round(Observed(FedAvg(), observer(tmp_path)), by=withholds)
    assert same(result, trained_state(model()))
    assert metrics is None
    assert "round 1 trained nothing: of 3 replies 3 are errors" in caplog.text
    sent = ArrayRecord(trained_state(model()))
    strategy = Observed(FedAvg(fraction_evaluate=0.0), observer(tmp_path / "all"))
    result = strategy.start(Grid(3, withholds), sent, num_rounds=2)
    assert same(result.arrays.to_torch_state_dict(), trained_state(model()))


def test_a_rate_that_anneals_over_rounds_scales_what_the_server_sees(tmp_path):
    observed = []
    for rate in (None, lambda round_: 0.1 / round_):
        probe = Probe()
        watching = observer(tmp_path / str(len(observed)), attacks=[probe])
        a_round(Observed(FedAvg(), watching, learning_rate=rate), round_=4)
        observed.append(probe.seen[0][2])
    torch.testing.assert_close(observed[0] * 0.05, observed[1] * 0.025)


def private(folder, **more):
    given = {
        "clip": 1e3, "noise_multiplier": 1e-11, "clients": 4, "target_delta": 1e-5,
        "accountant": "rdp", "ledger": folder / "ledger",
    }  # fmt: skip
    return ClientDP(**(given | more))


def test_a_client_that_is_gone_keeps_its_place(tmp_path):
    nodes = Nodes(4)
    strategy = PrivateMean(FedAvg(), private(tmp_path))
    sent = ArrayRecord(trained_state(model()))

    def asked(round_):
        outcome = strategy.configure_train(round_, sent, ConfigRecord(), nodes)
        return [m.metadata.dst_node_id for m in outcome]

    assert asked(1) == [100, 101, 102, 103]
    nodes.ids = [100, 102, 103]
    assert asked(2) == [100, 102, 103]
    strategy.aggregate_train(2, [])  # still of four
    nodes.ids = [100, 102, 103, 200]
    assert asked(3) == [100, 200, 102, 103]
    nodes.ids = [100, 102, 103, 200, 201]
    assert asked(4) == [100, 200, 102, 103]  # for one there is no place
    nodes.ids = [100, 102, 103, 201]
    assert asked(5) == [100, 201, 102, 103]
    late = PrivateMean(FedAvg(), private(tmp_path), minutes=0.001)
    with pytest.raises(DefenseError, match="but 5 are there"):
        late.configure_train(1, sent, ConfigRecord(), Nodes(5))


def test_the_mean_of_a_trusted_server_is_over_all_that_were_drawn(tmp_path):
    """Replies that are errors or hold no model are zero, and unknown to who watches."""

    def odd(asked, where):
        client = where.node_config["partition-id"]
        if client == 0:
            return Message(RecordDict({"note": ConfigRecord({"a": 1})}), reply_to=asked)
        if client == 1:
            state = trained(model(), data_of(1, 1)) | {"lm_head.weight": torch.zeros(2, 3)}
            return Message(RecordDict({"arrays": ArrayRecord(state)}), reply_to=asked)
        return Message(Error(0, "gone"), reply_to=asked) if client == 2 else train(asked, where)

    sent = trained_state(model())
    strategy = Observed(PrivateMean(FedAvg(), private(tmp_path)), observer(tmp_path / "logs"))
    result, metrics = a_round(strategy, 4, odd)
    there = trained(model(), data_of(3, 1))
    for name, before in sent.items():
        want = before + (there[name] - before) / 4
        torch.testing.assert_close(result[name], want, rtol=1e-4, atol=1e-6)
    assert metrics is None
    assert private(tmp_path).accountant.steps == 1  # a server that begins again knows
    outcome = lines(tmp_path / "logs")
    assert "only one of both" in outcome[0]["unknown"]
    assert "shape" in outcome[1]["unknown"]
    assert len(outcome) == 4


def test_the_mean_that_is_watched_is_that_of_the_strategy(tmp_path):
    """Replies of train() count 4 + client examples."""
    strategy = Observed(FedAvg(), observer(tmp_path, side="server"))
    observed = []
    strategy.observer.look = lambda state, client, **more: observed.append(state)
    result, _ = a_round(strategy)
    for name, tensor in observed[-1].items():
        torch.testing.assert_close(tensor, result[name])


def peak_of_a_look(folder, replies):
    """Bytes of what was read off messages that lay in memory at once, and those of a model."""
    net = tiny_gpt2(tied=False, layers=6, d=64, dropout=0.0)
    watching = RoundObserver(
        copy.deepcopy(net), SGD, 2, attacks=[BagOfWords()], folder=folder, side="server",
        settings=RoundSettings(tensorboard=False),
    )  # fmt: skip
    strategy = Observed(FedAvg(), watching)
    strategy.configure_train(1, ArrayRecord(trained_state(net)), ConfigRecord(), Nodes(2))
    returned = {n: t + 1e-3 for n, t in trained_state(net).items()}
    arrived = []
    for number in range(replies):
        content = RecordDict({"arrays": ArrayRecord(returned)})
        asked = message(1, node=7 + number, state={"x": torch.zeros(1)})
        arrived.append(Message(content=content, reply_to=asked))
    strategy._look(1, arrived[:1])  # modules are loaded, caches filled
    threshold = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's own: tests search for garbage less often
    tracemalloc.start()
    try:
        strategy._look(1, arrived)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.set_threshold(*threshold)
    assert len(strategy._indices) == replies
    return peak, sum(t.nbytes for t in returned.values())


def test_a_watched_server_holds_one_update_at_most_of_what_arrives(tmp_path):
    few, size = peak_of_a_look(tmp_path / "few", 1)
    many, _ = peak_of_a_look(tmp_path / "many", 4)
    assert size > 1_000_000
    assert few < size / 2
    assert many - few < size / 4


def test_a_full_disk_lets_no_release_out_and_forgets_none(tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    a_round(PrivateMean(FedAvg(), private(tmp_path)), 4)
    mod = FedLeakMod(ForClient(tmp_path), dp=ForClient(tmp_path, "dp"))
    mod(message(), context(), train)
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        for releases in (
            lambda: a_round(PrivateMean(FedAvg(), private(tmp_path)), 4, round_=2),
            lambda: mod(message(2), context(), train),
        ):
            with pytest.raises(DefenseError, match=r"the release was not made: No space left"):
                releases()
    assert private(tmp_path).accountant.steps == 1
    assert ForClient(tmp_path, "dp")(context()).accountant.steps == 1
    assert not mod(message(3), context(), train).has_error()  # there is room again
    assert ForClient(tmp_path, "dp")(context()).accountant.steps == 2


def test_the_account_hangs_on_the_number_of_clients(tmp_path):
    strategy = PrivateMean(FedAvg(), private(tmp_path), minutes=0.001)
    with pytest.raises(DefenseError, match="3 are there"):
        a_round(strategy, 3)
    for more in ({"trust": "local"}, {"ledger": None}):
        with pytest.raises(DefenseError, match="adds the noise on the server"):
            PrivateMean(FedAvg(), private(tmp_path / "x", **{"ledger": None} | more))


def test_a_trusted_server_may_watch_itself_from_outside_alone(tmp_path):
    def watching(strategy):
        return Observed(strategy, observer(tmp_path / "logs", side="server"))

    with pytest.raises(DefenseError, match="would see nothing"):
        PrivateMean(watching(FedAvg()), private(tmp_path))
    plain, _ = a_round(PrivateMean(FedAvg(), private(tmp_path, ledger=tmp_path / "a")), 4)
    observed, _ = a_round(watching(PrivateMean(FedAvg(), private(tmp_path))), 4)
    for name in plain:  # but for noise that is next to nothing
        torch.testing.assert_close(plain[name], observed[name], rtol=1e-4, atol=1e-5)
    assert [x["client"] for x in lines(tmp_path / "logs")] == [0, 1, 2, 3, "sum"]
