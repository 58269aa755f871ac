"""The filter on NVFlare's own messages and workflows, without the processes of its simulator."""

import gc
import math
import weakref

import numpy as np
import pytest
import torch

pytest.importorskip("nvflare")

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.aggregators.intime_accumulate_model_aggregator import (
    InTimeAccumulateWeightedAggregator,
)
from nvflare.app_common.shareablegenerators.full_model_shareable_generator import (
    FullModelShareableGenerator,
)
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_common.workflows.scatter_and_gather import ScatterAndGather

from lightning_fedleak.defenses import DefenseError, GradientCompression
from lightning_fedleak.evidence import HOLDS, verify_run
from lightning_fedleak.federation import ClientDP, UpdateSum, difference, joint_norm, trained_state
from lightning_fedleak.federation.nvflare import FedLeakFilter, PrivateFedAvg
from tests.federation.rounds import model
from tests.federation.test_observer import lines
from tests.nvflare import jobs
from tests.nvflare.jobs import PATH, Site, make_observer, task_of

OBSERVER = f"{PATH}make_observer"
GATE = {"metric": "leakage/bag_of_words/f1", "at_most": 0.3}
OPEN = {"metric": "leakage/bag_of_words/f1", "at_most": 1.0}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv(jobs.FOLDER, str(tmp_path))


@pytest.fixture
def site(tmp_path):
    """A function that makes a site, and ends it when the test is over."""
    sites = []

    def make(*arguments, tasks=("train",), name="site-1", **settings):
        one = Site(name, tmp_path, FedLeakFilter(OBSERVER, *arguments, **settings), tasks)
        sites.append(one)
        one.begin()
        return one

    yield make
    for one in sites:
        one.end()


def values(shareable):
    return {n: np.asarray(v) for n, v in from_shareable(shareable).data.items()}


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


def meta(shareable):
    return from_shareable(shareable).meta


# ---- what leaves --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_without_a_gate_the_result_is_that_of_the_script(site, tmp_path, kind):
    watched = site([OPEN])
    watched.kind = kind
    task = task_of()
    plain = watched.train(task)
    watched.filter._hand_over.take()
    reply = watched.answer(task)
    assert same(values(reply), values(plain))
    assert from_shareable(reply).data_kind == kind
    [line] = lines(tmp_path / "site-1")
    assert (line["client"], line["round"], line["attack"]) == ("site-1", 0, "bag_of_words")
    assert line["metrics"]["f1"]["value"] > 0.9
    assert lines(tmp_path / "site-1", "run.jsonl")[0]["fit"] == "nvflare-job"


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_a_withheld_update_leaves_as_zero_and_takes_its_metrics_along(site, tmp_path, kind):
    gated = site([GATE])
    gated.kind, gated.meta = kind, {MetaKey.INITIAL_METRICS: {"loss": 1.0}}
    reply = gated.answer(task_of())
    zero = trained_state(model())
    if kind == DataKind.WEIGHT_DIFF:
        zero = {n: torch.zeros_like(t) for n, t in zero.items()}
    assert same(values(reply), jobs.arrays(zero))
    assert reply.get_return_code() == ReturnCode.OK
    leaving = {MetaKey.NUM_STEPS_CURRENT_ROUND, MetaKey.FILTER_HISTORY}
    assert meta(reply).keys() == leaving
    [decision] = [x for x in lines(tmp_path / "site-1", "run.jsonl") if x.get("did")]
    assert decision["did"] == "withheld"


def test_a_withheld_update_is_an_error_where_that_is_asked_for(site):
    reply = site([GATE], withheld="error").answer(task_of())
    assert reply.get_return_code() == ReturnCode.EXECUTION_RESULT_ERROR
    assert "DXO" not in reply


def test_another_filter_s_arrays_beside_the_model_do_not_pass_a_gate(site, tmp_path):
    """SCAFFOLD's control difference, say: another surface, which no attack reads."""
    gated = site([OPEN])
    gated.meta = {"scaffold_c_diff": {"weight": np.ones(3, np.float32)}}
    reply = gated.answer(task_of())
    assert same(values(reply), jobs.arrays(trained_state(model())))
    assert "scaffold_c_diff" not in meta(reply)
    [decision] = [x for x in lines(tmp_path / "site-1", "run.jsonl") if x.get("did")]
    assert "'scaffold_c_diff' is an array that no attack covers" in decision["why"]


def test_what_gates_remember_survives_the_process(site, tmp_path, monkeypatch):
    """A gate's patience is for the client: not for each of its processes."""
    monkeypatch.setattr(jobs, "trained_on", lambda batch: None)
    sent = jobs.arrays(trained_state(model()))
    for round_, leaves in enumerate((True, False)):
        one = site([OPEN | {"patience": 1}])
        assert same(values(one.answer(task_of(round_))), sent) != leaves
        one.end()


def compress(site, **settings):
    defenses = [GradientCompression("topk", share=0.1)]
    return make_observer(site, defenses=defenses, **settings)


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_a_compression_of_the_observer_is_applied_and_what_it_leaves_out_leaves_later(
    site, monkeypatch, kind
):
    monkeypatch.setattr(jobs, "make_observer", compress)
    compressed = site([OPEN])
    compressed.kind = kind
    sent, missing = trained_state(model()), {}
    for round_ in range(3):
        task = task_of(round_)
        whole, reply = values(compressed.train(task)), values(compressed.answer(task))
        for name, before in sent.items():
            start = 0.0 if kind == DataKind.WEIGHT_DIFF else before.numpy()
            moved = (reply[name] - start).astype(np.float64)
            assert np.count_nonzero(np.abs(moved) > 1e-9) <= max(1, int(0.1 * moved.size))
            missing[name] = missing.get(name, 0) + (whole[name] - start).astype(np.float64) - moved
    memory = compressed.filter._outgoing.compression.memory
    for name, residual in missing.items():
        np.testing.assert_allclose(memory[f"residual/{name}"].numpy(), residual, atol=1e-6)


def test_the_end_of_a_run_ends_the_observer_whatever_a_killed_script_left(site, tmp_path):
    watched = site([OPEN])
    watched.answer(task_of())
    folder = watched.filter._hand_over.folder
    (folder / ".000000000.0.7.safetensors.deadbeef").write_bytes(b"a piece of a batch")
    (folder / "000000001.0.7.safetensors").write_bytes(b"torn")
    watched.end()
    assert not folder.exists()
    assert lines(tmp_path / "site-1", "run.jsonl")[-1]["kind"] == "end"
    assert verify_run(tmp_path / "site-1").status == HOLDS


@pytest.mark.parametrize("withheld", ["zero", "error"])
def test_a_script_that_always_fails_is_in_the_record(site, tmp_path, withheld):
    watched = site([OPEN], withheld=withheld)

    def fails(net, data):
        raise RuntimeError("a private text")

    watched.trains = fails
    for round_ in range(2):
        reply = watched.answer(task_of(round_))
        assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    decisions = [x for x in lines(tmp_path / "site-1", "run.jsonl") if x.get("did")]
    assert [(x["did"], x["step"], x["why"]) for x in decisions] == [
        ("withheld", round_, "the training script returned no model (EXECUTION_EXCEPTION)")
        for round_ in range(2)
    ]


# ---- other tasks --------------------------------------------------------------------------------


def test_tasks_that_train_nothing(site):
    losses = DXO(DataKind.METRICS, {"loss": 1.0}).to_shareable()
    trained = task_of()
    gated = site([OPEN], tasks=("train", "validate", "submit_model"))
    assert gated.answer(task_of(), "validate", losses) is losses
    refused = gated.answer(task_of(), "submit_model", trained)
    assert refused.get_return_code() == ReturnCode.EXECUTION_RESULT_ERROR


def test_a_result_of_no_known_task_does_not_leave(site):
    watched = site()
    result = watched.train(task_of())
    reply = watched.filter.process(result, watched.engine.new_context())
    assert reply.get_return_code() == ReturnCode.EXECUTION_RESULT_ERROR
    task = task_of()
    task.set_header("current_round", None)
    assert watched.answer(task, result=result).get_return_code() != ReturnCode.OK


# ---- differential privacy by the client ---------------------------------------------------------


def test_a_client_s_own_noise_is_on_every_reply_and_in_its_account(site, tmp_path, caplog):
    """The law of what leaves: the clipped update, or zero, with noise of std 2 * clip * z."""
    one = site([GATE], dp=f"{PATH}local_dp")
    assert "site-1 has a ClientDP and sends a weight of 1 and no metrics" in caplog.text
    sent = trained_state(model())

    def crash(net, data):
        raise RuntimeError("this client fails")

    for round_, trains in enumerate((jobs.train, crash)):
        one.trains = trains
        reply = one.answer(task_of(round_))
        assert reply.get_return_code() == ReturnCode.OK
        assert meta(reply)[MetaKey.NUM_STEPS_CURRENT_ROUND] == 1
        noise = torch.cat(
            [(torch.as_tensor(values(reply)[n]) - t).flatten() for n, t in sent.items()]
        )
        std = one.filter._outgoing.dp.own_noise_std
        assert std == 0.5  # the clip times the noise multiplier
        assert float(noise.std()) == pytest.approx(std, rel=5 / math.sqrt(2 * len(noise)))
    assert one.filter._outgoing.dp.accountant.steps == 2
    assert len((tmp_path / "site-1.ledger").read_text().splitlines()) >= 2


def test_a_client_s_own_noise_covers_training_alone(site):
    one = site(dp=f"{PATH}local_dp", tasks=("train", "validate"))
    losses = DXO(DataKind.METRICS, {"loss": 1.0}).to_shareable()
    refused = one.answer(task_of(), "validate", losses)
    assert refused.get_return_code() == ReturnCode.EXECUTION_RESULT_ERROR
    assert not one.engine.panics
    one.answer(task_of(), "submit_model", task_of())
    assert "results of task 'submit_model' do not pass FedLeakFilter" in one.engine.panics[0]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"dp": f"{PATH}local_dp_without_ledger"}, "pass ClientDP\\(ledger="),
        ({"dp": f"{PATH}shared_dp"}, "secure_aggregation=True"),
        ({"gates": [GATE | {"metric": "leakage/nothing/f1"}]}, "does not log"),
    ],
)
def test_what_cannot_hold_ends_the_job_before_it_trains(tmp_path, settings, why):
    broken = Site("site-1", tmp_path, FedLeakFilter(OBSERVER, **settings))
    with pytest.raises((DefenseError, ValueError), match=why):
        broken.begin()
    assert broken.engine.panics
    with pytest.raises(AssertionError, match="not set up"):
        broken.answer(task_of())


def test_arguments_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="withheld"):
        FedLeakFilter(OBSERVER, withheld="nothing")
    with pytest.raises(TypeError):
        FedLeakFilter(OBSERVER, [{"metric": "leakage/bag_of_words/f1"}])


# ---- workflows ----------------------------------------------------------------------------------


def sites(folder, *gates, weights=(1, 3), kind=DataKind.WEIGHTS, **settings):
    result = []
    for number, (gate, weight) in enumerate(zip(gates, weights, strict=True), 1):
        filter_ = FedLeakFilter(f"{PATH}make_observer", [gate], **settings)
        one = Site(f"site-{number}", folder, filter_)
        one.kind, one.weight = kind, weight
        result.append(one)
    return result


class Average(FedAvg):
    """NVFlare's FedAvg, which keeps its last model where the test finds it."""

    def save_model(self, model):
        self.saved = model.params


def fed_avg(**settings):
    start = jobs.arrays(trained_state(model()))
    return Average(num_clients=2, num_rounds=1, model=start, **settings)


def of_model(workflow):
    model_params = getattr(workflow, "_global_weights", None)
    params = workflow.saved if model_params is None else model_params["weights"]
    return {n: torch.as_tensor(v) for n, v in params.items()}


class Gather(ScatterAndGather):
    """NVFlare's ScatterAndGather with the components that a job would give it."""

    def __init__(self, kind, **settings):
        super().__init__(num_rounds=1, persistor_id="", train_timeout=0, **settings)
        self.aggregator = InTimeAccumulateWeightedAggregator(expected_data_kind=kind)
        self.shareable_gen = FullModelShareableGenerator()
        start = jobs.arrays(trained_state(model()))
        self._global_weights = make_model_learnable(start, {})


def close(one, other):
    return all(torch.allclose(one[n].double(), t.double(), atol=1e-6) for n, t in other.items())


# ---- one withholds ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
@pytest.mark.parametrize("engine", ["fed_avg", "gather"])
@pytest.mark.parametrize("second", [OPEN, GATE])
def test_who_withholds_counts_as_zero_with_its_weight(tmp_path, kind, engine, second):
    """The strictest workflow goes on; the mean is diluted by the weight of who withheld.

    Where all withhold, the model stays what it was.
    """
    if engine == "fed_avg":
        workflow = fed_avg(ignore_result_error=False)
    else:
        workflow = Gather(kind, min_clients=2, ignore_result_error=False)
    engine = jobs.run(workflow, sites(tmp_path, GATE, second, kind=kind), tmp_path)
    assert not engine.panics
    trained, share = jobs.train(model(), jobs.data_of("site-2", 0)), 3 / 4 if second is OPEN else 0
    expected = {n: t + share * (trained[n] - t) for n, t in trained_state(model()).items()}
    assert close(of_model(workflow), expected)


def test_one_withholds_by_an_error_and_the_others_make_the_mean(tmp_path):
    workflow = fed_avg(ignore_result_error=True)
    engine = jobs.run(workflow, sites(tmp_path, GATE, OPEN, withheld="error"), tmp_path)
    assert not engine.panics
    assert close(of_model(workflow), jobs.train(model(), jobs.data_of("site-2", 0)))


# ---- the server noises --------------------------------------------------------------------------


class Private(PrivateFedAvg):
    save_model = Average.save_model


def private(rounds=1, **settings):
    start = jobs.arrays(trained_state(model()))
    return Private(f"{PATH}central_dp", num_rounds=rounds, model=start, **settings)


def test_a_trusted_server_noises_the_mean_of_clipped_updates(tmp_path, monkeypatch):
    """Against the law in float64; a client that withholds or fails counts as zero."""
    monkeypatch.setenv("FEDLEAK_CLIENTS", "3")
    workflow = private()
    clients = sites(tmp_path, OPEN, GATE, OPEN, weights=(1, 50, 9))
    engine = jobs.run(workflow, clients, tmp_path)
    assert not engine.panics
    sent = trained_state(model())
    total = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in sent.items()}
    for number in (1, 3):
        update = difference(sent, jobs.train(model(), jobs.data_of(f"site-{number}", 0)))
        scale = min(1.0, 0.5 / joint_norm(update))
        total = {n: t + scale * update[n].double() for n, t in total.items()}
    noise = torch.cat([
        (torch.as_tensor(workflow.saved[n]).double() - sent[n].double() - t / 3).flatten()
        for n, t in total.items()
    ])  # fmt: skip
    std = 0.5 * 1.0 / 3
    assert float(noise.std()) == pytest.approx(std, rel=5 / (2 * len(noise)) ** 0.5)
    assert abs(float(noise.mean())) < 5 * std / len(noise) ** 0.5
    assert workflow._client_dp.accountant.steps == 1


def test_a_trusted_server_holds_one_update_at_a_time(tmp_path, monkeypatch):
    """Of as many clients as there are, when the next one's is added."""
    monkeypatch.setenv("FEDLEAK_CLIENTS", "4")
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = []

    add = UpdateSum.add

    def add_noted(self, client, update):
        most.append(len(alive))
        alive.update(update.values())
        add(self, client, update)

    monkeypatch.setattr(UpdateSum, "add", add_noted)
    jobs.run(private(), sites(tmp_path, *[OPEN] * 4, weights=(1,) * 4), tmp_path)
    gc.collect()
    assert most == [0] * 4
    assert not alive


def test_a_round_that_draws_nobody_is_noise_and_a_release(tmp_path, monkeypatch):
    monkeypatch.setattr(ClientDP, "drawn", lambda self, clients: [])
    workflow = private(rounds=2)
    jobs.run(workflow, sites(tmp_path, OPEN, OPEN), tmp_path)
    sent = trained_state(model())
    assert all(not np.array_equal(workflow.saved[n], t.numpy()) for n, t in sent.items())
    assert workflow._client_dp.accountant.steps == 2


def test_another_number_of_sites_than_the_account_s_ends_the_job(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLEAK_CLIENTS", "5")
    workflow = private()
    assert "5" in jobs.run(workflow, sites(tmp_path, OPEN, OPEN), tmp_path).panics[0]


@pytest.mark.parametrize(
    "settings",
    [{"aggregation_weights": {"site-1": 2.0}}, {"stop_cond": "loss <= 1"},
     {"ignore_result_error": False}],
)  # fmt: skip
def test_what_voids_the_account_is_refused(settings):
    with pytest.raises(DefenseError, match="PrivateFedAvg"):
        PrivateFedAvg(f"{PATH}central_dp", **settings)
