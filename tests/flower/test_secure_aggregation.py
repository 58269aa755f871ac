"""Flower's own SecAgg+ with a mod that looks before it masks, played out in this process."""

import copy
import io
import runpy
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from cryptography.fernet import InvalidToken
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import Key as Field
from flwr.common.secure_aggregation.secaggplus_constants import Stage
from flwr.compat.common import recorddict_compat as compat
from flwr.server import LegacyContext, ServerConfig, SimpleClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.supercore.task_identity import TaskIdentity

from lightning_fedleak import federation
from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.federation.flower import FedLeakMod
from tests.federation.rounds import model
from tests.federation.rounds import train as trained
from tests.federation.test_observer import lines
from tests.flower.apps import F1, ForClient, data_of
from tests.helpers.notices import announced

EXAMPLE = Path(__file__).parents[2] / "examples/flower/secure_aggregation/named_messages.py"
SecAggMessages = runpy.run_path(str(EXAMPLE))["SecAggMessages"]

CLIENTS = 3
ROUNDED = 2 * 16 / 2**22
"""Twice what SecAgg+ rounds a number to."""


@pytest.fixture(autouse=True)
def _in_a_task(monkeypatch):
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def arrays(state):
    return [t.numpy() for t in state.values()]


class Client(NumPyClient):
    def __init__(self, number: int, broken: bool = False) -> None:
        self.number = number
        self.broken = broken

    def fit(self, parameters, config):
        net = model()
        names = list(federation.trained_state(net))
        sent = {n: torch.tensor(a) for n, a in zip(names, parameters, strict=True)}
        net.load_state_dict(sent, strict=False)
        data = data_of(self.number, 1)
        for batch in data:
            federation.trained_on(batch)
        outcome = arrays(trained(net, data))
        if self.broken:
            outcome[0] = np.full_like(outcome[0], np.nan)
        return outcome, 1, {}


def a_context(number: int = 0) -> Context:
    return Context(1, 100 + number, {"partition-id": number}, RecordDict(), {})


def fit_asked(state) -> Message:
    sent = ndarrays_to_parameters(arrays(state))
    content = compat.fitins_to_recorddict(FitIns(sent, {}), True)
    return Message(content, dst_node_id=100, message_type="train", group_id="1")


def answer(message: Message, context: Context) -> Message:
    return ClientApp(client_fn=lambda where: Client(0).to_client())(message, context)


class Here:
    """A grid whose nodes answer at once."""

    def __init__(self, mods, broken=()) -> None:
        self.apps = {n: self.app(mods(n), broken) for n in range(CLIENTS)}
        self.contexts = {n: a_context(n) for n in range(CLIENTS)}
        self.asked: list[Message] = []
        self.replies: list[Message] = []

    def app(self, mods, broken) -> ClientApp:
        return ClientApp(
            client_fn=lambda where: Client(
                where.node_config["partition-id"], where.node_config["partition-id"] in broken
            ).to_client(),
            mods=mods,
        )

    def tampered(self, message: Message) -> Message:
        """What a server sends in place of a message of the protocol."""
        return message

    def answered(self, message: Message) -> Message:
        """The reply of a node to a message of the server's own."""
        node = message.metadata.dst_node_id
        return self.apps[node - 100](copy.deepcopy(message), self.contexts[node - 100])

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(map(self.tampered, map(copy.deepcopy, messages)))
        self.asked += messages
        outcome = []
        for message in messages:
            node = message.metadata.dst_node_id
            asked = copy.deepcopy(message)
            try:
                reply = self.apps[node - 100](asked, self.contexts[node - 100])
            except Exception as error:
                reply = Message(Error(2, str(error)), reply_to=asked)
            reply.metadata.__dict__["_src_node_id"] = node
            outcome.append(reply)
        self.replies += [copy.deepcopy(r) for r in outcome]
        return outcome


def names_sent(context: Context) -> dict[str, torch.Tensor]:
    return federation.trained_state(model())


class ByMessages(Here):
    """Its clients are functions of ``@app.train()``."""

    def app(self, mods, broken) -> ClientApp:
        app = ClientApp(mods=[*mods, SecAggMessages(names_sent)])

        @app.train()
        def train(message: Message, context: Context) -> Message:
            assert dict(message.content["config"]) == {"server-round": 1}
            number = context.node_config["partition-id"]
            net = model()
            net.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
            data = data_of(number, 1)
            for batch in data:
                federation.trained_on(batch)
            state = dict(reversed(trained(net, data).items()))  # any order will do
            if number in broken:
                name = next(iter(state))
                state[name] = torch.full_like(state[name], torch.nan)
            metrics = MetricRecord({"num-examples": 1, "train-loss": 0.1 * number})
            content = RecordDict({"arrays": ArrayRecord(state), "metrics": metrics})
            return Message(content, reply_to=message)

        app.train("other")(train)
        return app


def aggregated(mods, round_=1, grid=Here, **more):
    """The mean that a strategy gets of a round, by name, and the grid."""
    grid = grid(mods, **more)
    manager = SimpleClientManager()
    for number in range(CLIENTS):
        manager.register(GridClientProxy(100 + number, grid, 1))
    given = []

    class Seen(FedAvg):
        def aggregate_fit(self, server_round, results, failures):
            given.extend(parameters_to_ndarrays(r.parameters) for _, r in results)
            return super().aggregate_fit(server_round, results, failures)

    legacy = LegacyContext(Context(1, 1, {}, RecordDict(), {}), ServerConfig(1), Seen(), manager)
    legacy.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: round_})
    start = ndarrays_to_parameters(arrays(federation.trained_state(model())))
    legacy.state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(start, True)
    SecAggPlusWorkflow(CLIENTS, CLIENTS - 1, max_weight=1.0)(grid, legacy)
    if not given:
        return None, grid
    return dict(
        zip(federation.trained_state(model()), map(torch.tensor, given[0]), strict=True)
    ), grid


def wanted(taking_part):
    """The plain mean, in which others count as zero."""
    sent = federation.trained_state(model())
    each = [trained(model(), data_of(c, 1)) if c in taking_part else sent for c in range(CLIENTS)]
    return {n: torch.stack([s[n] for s in each]).double().mean(0) for n in sent}


def close(outcome, want):
    return all(torch.allclose(outcome[n].double(), want[n], rtol=0, atol=ROUNDED) for n in want)


def form(reply: Message):
    """All that tells one reply from another, but for the masked numbers."""
    return [
        (name, sorted(record), [len(v) if isinstance(v, list) else v for v in record.values()])
        for name, record in sorted(reply.content.items())
    ]


@pytest.mark.parametrize("grid", [Here, ByMessages])
def test_a_look_before_the_mask_sees_the_update_and_changes_nothing(tmp_path: Path, grid) -> None:
    mods = lambda number: [secaggplus_mod, FedLeakMod(ForClient(tmp_path / f"{number}"))]  # noqa: E731
    outcome, _ = aggregated(mods, grid=grid)
    assert close(outcome, wanted({0, 1, 2}))
    for number in range(CLIENTS):
        [line] = lines(next((tmp_path / f"{number}").glob("process_*")))
        assert (line["client"], line["round"]) == (number, 1)
        assert line["metrics"]["f1"]["value"] > 0.9


@pytest.mark.parametrize("grid", [Here, ByMessages])
@pytest.mark.parametrize("broken", [False, True])
def test_a_withheld_update_is_zero_in_the_sum_and_no_reply_tells_whose(tmp_path, broken, grid):
    def mods(number: int):
        gates = [federation.RoundGate(F1, at_most=0.1 if number == 1 and not broken else 1.0)]
        return [secaggplus_mod, FedLeakMod(ForClient(tmp_path / f"{number}"), gates)]

    with announced("holds NaN" if broken else "withheld the update") as report:
        outcome, grid = aggregated(mods, broken={1} if broken else (), grid=grid)
    assert not any("tells the server one bit" in text for text in report)
    assert close(outcome, wanted({0, 2}))
    assert not any(r.has_error() for r in grid.replies)
    masked = [r for r in grid.replies if "fitres.parameters" in r.content]
    assert len(masked) == CLIENTS
    assert all(form(r) == form(masked[0]) for r in masked)
    [decided] = [
        x
        for place in tmp_path.glob("*/process_*")
        for x in lines(place, "run.jsonl")
        if x["kind"] == "gate"
    ]
    assert (decided["did"], decided["client"]) == ("withheld", 1)


def account_in(folder: Path, dropouts: int = 1, **more):
    def account(where: Context) -> federation.ClientDP:
        given = {"trust": "secure_aggregation", "accountant": "rdp"}
        given |= {"release": federation.ClientReleaseSettings(dropouts=dropouts)} | more
        return federation.ClientDP(
            0.01, 2.0, clients=CLIENTS, target_delta=1e-5,
            ledger=folder / f"ledger_{where.node_config['partition-id']}", **given,
        )  # fmt: skip

    return account


def with_shares(folder: Path, **more):
    """The mods of clients that add a share of noise each."""

    def mods(number: int):
        return [
            secaggplus_mod,
            FedLeakMod(ForClient(folder / f"{number}"), dp=account_in(folder, **more)),
        ]

    return mods


def releases(folder: Path) -> list[int]:
    return [account_in(folder)(a_context(n)).accountant.steps for n in range(CLIENTS)]


@pytest.mark.parametrize("grid", [Here, ByMessages])
def test_shares_of_noise_add_up_in_the_masked_sum(tmp_path: Path, grid) -> None:
    """With a clip that leaves next to nothing of the updates, the sum is the noise.

    Two of three make the whole, as one may be missing.
    """
    outcome, grid = aggregated(with_shares(tmp_path), grid=grid)
    sent = federation.trained_state(model())
    shift = torch.cat([(outcome[n] - sent[n]).flatten() for n in sent])
    assert float(shift.std()) == pytest.approx(0.01 * 2.0 / CLIENTS * (3 / 2) ** 0.5, rel=0.1)
    masked = [r for r in grid.replies if "fitres.parameters" in r.content]
    assert [dict(r.content["fitres.num_examples"]) for r in masked] == [{"num_examples": 1}] * 3
    assert releases(tmp_path) == [1] * CLIENTS


# ---- a server that does not keep to the protocol ------------------------------------------------


class Stopped(Exception):
    """The server does not go on."""


class UpToTheMasks(Here):
    """Keeps to the protocol until each client shares its keys, and then to nothing."""

    def tampered(self, message: Message) -> Message:
        if message.content["secaggplus_configs"]["stage"] == Stage.COLLECT_MASKED_VECTORS:
            raise Stopped
        return message


@pytest.mark.parametrize("kind", ["train.default", "train"])
@pytest.mark.parametrize("claims", [None, {}, {"srcs": [101, 102], "ctxts": []}])
@pytest.mark.parametrize("when", ["before the masks", "after the round"])
def test_after_an_honest_set_up_no_share_of_noise_leaves_without_a_mask(
    tmp_path: Path, kind: str, claims: dict | None, when: str
) -> None:
    made = Here if when == "after the round" else UpToTheMasks
    grids: list[Here] = []
    with suppress(Stopped):
        aggregated(with_shares(tmp_path), grid=lambda mods: grids.append(made(mods)) or grids[-1])
    stage = grids[0].contexts[0].state.config_records["secaggplus_state"]["current_stage"]
    assert stage == (Stage.UNMASK if made is Here else Stage.SHARE_KEYS)
    before = releases(tmp_path)
    content = fit_asked(federation.trained_state(model())).content
    if claims is not None:
        content["secaggplus_configs"] = ConfigRecord(claims)
    asked = Message(content, dst_node_id=100, message_type=kind, group_id="2")
    # Of the type "train" it is Flower's own mod that finds no stage.
    with pytest.raises(DefenseError if "." in kind else KeyError):
        grids[0].answered(asked)
    assert releases(tmp_path) == before


def test_with_gates_alone_nothing_leaves_past_the_mask_either(tmp_path: Path) -> None:
    mods = lambda number: [secaggplus_mod, FedLeakMod(ForClient(tmp_path / f"{number}"))]  # noqa: E731
    _, grid = aggregated(mods)
    content = fit_asked(federation.trained_state(model())).content
    with pytest.raises(DefenseError, match="would not mask the reply to this message of type"):
        grid.answered(Message(content, dst_node_id=100, message_type="train.default"))


WELL_SET_UP = {
    Field.THRESHOLD: 2, Field.MOD_RANGE: 2**32, Field.MAX_WEIGHT: 1.0, Field.CLIPPING_RANGE: 8.0,
    Field.TARGET_RANGE: 2**22, "nid": 103,
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        (Field.THRESHOLD, 1, "unmask the sum of 1 clients. At least 2"),
        (Field.MOD_RANGE, 2, "by numbers below 2,"),
        (Field.CLIPPING_RANGE, 0.01, "clips numbers at 0.01"),
        (Field.CLIPPING_RANGE, float("nan"), "clips numbers at nan"),
        (Field.MAX_WEIGHT, 1e-6, "noise makes them as large as"),
        (Field.TARGET_RANGE, 2**40, "clips numbers at"),
        (Field.SOURCE_LIST, [100, 100], "among 1 clients"),
        (Field.SOURCE_LIST, [], "among 1 clients"),
    ],
)
def test_masks_that_a_server_makes_too_thin_are_refused(tmp_path, field, value, said) -> None:
    """Each setting is the server's. The reply never holds a number of the client's."""

    class Tampers(Here):
        def tampered(self, message: Message) -> Message:
            configs = message.content["secaggplus_configs"]
            if message.metadata.dst_node_id == 100 and field in configs:
                configs[field] = value
                if field == Field.SOURCE_LIST:
                    configs[Field.CIPHERTEXT_LIST] = [
                        configs[Field.CIPHERTEXT_LIST][0] for _ in value
                    ]
            if configs["stage"] == Stage.COLLECT_MASKED_VECTORS:
                configs.update(WELL_SET_UP)  # said too late
            return message

    _, grid = aggregated(with_shares(tmp_path), grid=Tampers)
    [refused] = [r for r in grid.replies if r.has_error() and r.metadata.src_node_id == 100][:1]
    assert said in refused.error.reason
    assert releases(tmp_path)[0] == 0


def test_a_sum_that_could_lack_more_noise_than_the_account_is_refused(tmp_path: Path) -> None:
    """Flower unmasks a sum of all but one at best, so that one share may always be missing."""
    outcome, grid = aggregated(with_shares(tmp_path, dropouts=0))
    assert outcome is None
    said = "unmask the sum of 2 clients. At least 3 clients"
    assert sum(said in r.error.reason for r in grid.replies if r.has_error()) == CLIENTS
    assert releases(tmp_path) == [0] * CLIENTS


def test_a_round_that_the_server_spoils_after_the_release_is_counted_each_time(tmp_path) -> None:
    """A key share that cannot be read fails the mask after the update was made and noised."""

    class Spoils(UpToTheMasks):
        def tampered(self, message: Message) -> Message:
            try:
                return super().tampered(message)
            except Stopped:
                self.asked.append(message)
                raise

    grids: list[Spoils] = []
    with pytest.raises(Stopped):
        aggregated(with_shares(tmp_path), grid=lambda mods: grids.append(Spoils(mods)) or grids[-1])
    [grid] = grids
    honest = grid.asked[-1]
    number = honest.metadata.dst_node_id - 100
    spoilt = copy.deepcopy(honest)
    ciphertexts = spoilt.content["secaggplus_configs"][Field.CIPHERTEXT_LIST]
    spoilt.content["secaggplus_configs"][Field.CIPHERTEXT_LIST] = [b"nothing"] * len(ciphertexts)
    for _ in range(2):
        with pytest.raises(InvalidToken):
            grid.answered(spoilt)
    assert releases(tmp_path)[number] == 2
    assert not grid.answered(honest).has_error()
    assert releases(tmp_path)[number] == 3


def test_a_share_of_noise_does_not_leave_unmasked(tmp_path: Path) -> None:
    asked, where = fit_asked(federation.trained_state(model())), a_context()
    claims = fit_asked(federation.trained_state(model()))
    claims.content["secaggplus_configs"] = ConfigRecord({"srcs": [1]})
    for unmasked in (asked, claims):
        with pytest.raises(DefenseError, match="nothing here masks"):
            FedLeakMod(ForClient(tmp_path), dp=account_in(tmp_path))(unmasked, where, answer)
    masks = FedLeakMod(ForClient(tmp_path), dp=account_in(tmp_path), secure_aggregation=True)
    assert not masks(asked, where, answer).has_error()


def test_without_masks_the_arrays_of_a_numpy_client_leave_as_they_are(tmp_path: Path) -> None:
    asked, where = fit_asked(federation.trained_state(model())), a_context()
    observed = FedLeakMod(ForClient(tmp_path))(asked, where, answer)
    plain = answer(asked, where)
    record = "fitres.parameters"
    assert observed.content[record] == plain.content[record]
    assert observed.content["fitres.num_examples"] == plain.content["fitres.num_examples"]
    [line] = lines(next(tmp_path.glob("process_*")))
    assert line["metrics"]["f1"]["value"] > 0.9
    gated = FedLeakMod(ForClient(tmp_path / "g"), [federation.RoundGate(F1, at_most=0.1)])
    with announced("tells the server one bit"):
        assert gated(asked, where, answer).has_error()


def test_a_mod_that_would_see_masked_numbers_is_refused(tmp_path: Path) -> None:
    mods = lambda number: [FedLeakMod(ForClient(tmp_path)), secaggplus_mod]  # noqa: E731
    outcome, grid = aggregated(mods)
    assert outcome is None
    assert all("mods=[secaggplus_mod, FedLeakMod" in r.error.reason for r in grid.replies)


# ---- functions of @app.train() behind the masks -------------------------------------------------


@pytest.mark.parametrize("kind", ["train", "train.default", "train.other"])
@pytest.mark.parametrize("claims", [None, {"srcs": [101, 102]}])
def test_a_function_is_not_called_where_nothing_masks_its_reply(kind, claims) -> None:
    content = fit_asked(federation.trained_state(model())).content
    if claims is not None:
        content["secaggplus_configs"] = ConfigRecord(claims)
    asked = Message(content, dst_node_id=100, message_type=kind)
    calls = []
    with pytest.raises(ValueError, match="nothing masks the reply to this message"):
        SecAggMessages(names_sent)(asked, a_context(), lambda *_: calls.append(1))
    after_a_round = ByMessages(lambda number: [secaggplus_mod])
    with pytest.raises(KeyError if kind == "train" else ValueError):
        after_a_round.answered(asked)
    assert not calls


def behind_masks(reply: dict, names=names_sent, sent=None) -> Message:
    """The reply that SecAgg+ reads, of a function that replies with these records."""
    asked = fit_asked(sent or federation.trained_state(model()))
    asked.content["secaggplus_configs"] = ConfigRecord({"srcs": [101, 102]})
    context = a_context()
    context.state["secaggplus_state"] = ConfigRecord({"current_stage": Stage.SHARE_KEYS})
    return SecAggMessages(names)(
        asked, context, lambda message, _: Message(RecordDict(reply), reply_to=message)
    )


@pytest.mark.parametrize(
    ("metrics", "weight"),
    [({"num-examples": 5}, 5), ({"num-examples": 5.0}, 5), ({"loss": 0.5}, 1), ({}, 1)],
)
def test_the_weight_alone_leaves(metrics: dict, weight: int) -> None:
    arrays = ArrayRecord(federation.trained_state(model()))
    reply = behind_masks({"arrays": arrays, "m": MetricRecord(metrics)})
    result = compat.recorddict_to_fitres(reply.content, keep_input=True)
    assert (result.num_examples, result.metrics) == (weight, {})


@pytest.mark.parametrize("weight", [0.5, float("nan"), [1, 2]])
def test_a_weight_that_is_no_whole_number_is_refused(weight) -> None:
    arrays = ArrayRecord(federation.trained_state(model()))
    with pytest.raises(ValueError, match="'num-examples' must be a whole number"):
        behind_masks({"arrays": arrays, "m": MetricRecord({"num-examples": weight})})


def test_arrays_that_were_not_sent_are_refused() -> None:
    state = federation.trained_state(model())
    fewer = dict(list(state.items())[1:])
    with pytest.raises(ValueError, match="must hold the arrays of names=, no others"):
        behind_masks({"arrays": ArrayRecord(fewer)})
    with pytest.raises(ValueError, match="zip"):
        behind_masks({"arrays": ArrayRecord(state)}, names=lambda _: list(fewer))
    with pytest.raises(federation.UpdateError, match="holds one model, and this one has 0"):
        behind_masks({})


LIES = {
    "keys": (Field.PUBLIC_KEY_1, b"no key"),
    "shares": (Field.CIPHERTEXT_LIST, [b"nothing"] * (CLIENTS - 1)),
    "numbers": (Field.MASKED_PARAMETERS, [b"torn"]),
    "unmasking": (Field.SHARE_LIST, [b"0" * 32] * CLIENTS),
}
"""What the last client answers in place of a field of one stage."""


@pytest.mark.parametrize("lie", LIES)
def test_a_client_that_lies_spoils_its_round_and_unmasks_nobody(tmp_path: Path, lie: str) -> None:
    key, content = LIES[lie]

    class Lying(Here):
        def send_and_receive(self, messages, *, timeout=None):
            replies = super().send_and_receive(messages, timeout=timeout)
            for reply in replies:
                if not reply.has_error() and reply.metadata.src_node_id == 100 + CLIENTS - 1:
                    for record in reply.content.config_records.values():
                        record.update({key: content} if key in record else {})
            return replies

    grids: list[Here] = []
    mods = lambda number: [secaggplus_mod, FedLeakMod(ForClient(tmp_path / f"{number}"))]  # noqa: E731
    with suppress(ValueError):  # of Flower's server
        outcome, _ = aggregated(mods, grid=lambda m: grids.append(Lying(m)) or grids[-1])
        assert outcome is None
    records = [r.content[c] for r in grids[0].replies if not r.has_error() for c in r.content]
    masked = [r[Field.MASKED_PARAMETERS] for r in records if Field.MASKED_PARAMETERS in r]
    assert masked
    for arrays_sent in masked:  # uniform in the range of the masks; an update is in its middle
        numbers = [np.load(io.BytesIO(array), allow_pickle=False) for array in arrays_sent[1:]]
        counts, _ = np.histogram(np.concatenate([n.ravel() for n in numbers]), 4, (0, 2**32))
        assert counts.min() > 0.2 * counts.sum()
    assert close(aggregated(mods, round_=2)[0], wanted({0, 1, 2}))
