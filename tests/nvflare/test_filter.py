"""The filter on NVFlare's own messages and workflows, without the processes of its simulator."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("nvflare")

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.fl_constant import ReturnCode

from lightning_fedleak.defenses import DefenseError, GradientCompression
from lightning_fedleak.federation import trained_state
from lightning_fedleak.federation.nvflare import FedLeakFilter
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


def test_a_script_that_reports_no_batch_is_unknown_and_passes_no_gate(site, monkeypatch):
    monkeypatch.setattr(jobs, "trained_on", lambda batch: None)
    assert same(values(site([OPEN]).answer(task_of())), jobs.arrays(trained_state(model())))


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


def test_a_client_s_own_noise_is_on_every_reply_and_in_its_account(site, tmp_path):
    """The law of what leaves: the clipped update, or zero, with noise of std 2 * clip * z."""
    one = site([GATE], dp=f"{PATH}local_dp")
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
