"""NVFlare's own workflows with clients that withhold, a server that looks, and one that noises."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

pytest.importorskip("nvflare")

from nvflare.apis.dxo import DataKind
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.aggregators.intime_accumulate_model_aggregator import (
    InTimeAccumulateWeightedAggregator,
)
from nvflare.app_common.shareablegenerators.full_model_shareable_generator import (
    FullModelShareableGenerator,
)
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_common.workflows.scatter_and_gather import ScatterAndGather

from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.federation import ClientDP, UpdateSum, difference, joint_norm, trained_state
from lightning_fedleak.federation.nvflare import FedLeakFilter, PrivateFedAvg
from tests.federation.rounds import model
from tests.nvflare import jobs
from tests.nvflare.jobs import PATH, Site

GATE = {"metric": "leakage/bag_of_words/f1", "at_most": 0.3}
OPEN = GATE | {"at_most": 1.0}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv(jobs.FOLDER, str(tmp_path))


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
def test_one_withholds_and_counts_as_zero_with_its_weight(tmp_path, kind, engine):
    """The strictest workflow goes on; the mean is diluted by the weight of who withheld."""
    weights = (1, 3)
    if engine == "fed_avg":
        workflow = fed_avg(ignore_result_error=False)
    else:
        workflow = Gather(kind, min_clients=2, ignore_result_error=False)
    engine = jobs.run(workflow, sites(tmp_path, GATE, OPEN, weights=weights, kind=kind), tmp_path)
    assert not engine.panics
    sent = trained_state(model())
    trained = jobs.train(model(), jobs.data_of("site-2", 0))
    expected = {n: t + 3 / 4 * (trained[n] - t) for n, t in sent.items()}
    assert close(of_model(workflow), expected)


def test_one_withholds_by_an_error_and_the_others_make_the_mean(tmp_path):
    workflow = fed_avg(ignore_result_error=True)
    engine = jobs.run(workflow, sites(tmp_path, GATE, OPEN, withheld="error"), tmp_path)
    assert not engine.panics
    assert close(of_model(workflow), jobs.train(model(), jobs.data_of("site-2", 0)))


# ---- all withhold -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
@pytest.mark.parametrize("engine", ["fed_avg", "gather"])
def test_all_withhold_and_the_model_stays_what_it_was(tmp_path, kind, engine):
    if engine == "fed_avg":
        workflow = fed_avg(ignore_result_error=False)
    else:
        workflow = Gather(kind, min_clients=2, ignore_result_error=False)
    engine = jobs.run(workflow, sites(tmp_path, GATE, GATE, kind=kind), tmp_path)
    assert not engine.panics
    assert close(of_model(workflow), trained_state(model()))


# ---- the server noises --------------------------------------------------------------------------


class Private(PrivateFedAvg):
    def save_model(self, model):
        self.saved = model.params


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
