"""Federations on Flower's simulation: clients in workers of Ray."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("ray")

import ray
from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
from flwr.simulation import run_simulation

from lightning_fedleak.evidence import HOLDS, verify_run
from lightning_fedleak.federation import ClientDP, OutgoingUpdates, recording, trained_state
from tests.federation.rounds import lora, model
from tests.federation.test_observer import lines
from tests.flower.apps import FAULTS, client_app, observer, server_app, trained

RESOURCES = {
    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    "init_args": {"num_cpus": 2, "include_dashboard": False, "logging_level": 40},
}


@pytest.fixture(scope="module", autouse=True)
def _one_cluster() -> Iterator[None]:
    """All simulations have one Ray and one pool of workers, which import all once.

    Ray gives workers the lowest priority, at which they wait for whatever else a machine does.
    """
    backends: list[RayBackend] = []
    build, terminate = RayBackend.build, RayBackend.terminate

    def build_once(backend: RayBackend, app_fn) -> None:
        backends.append(backend)
        if backend is backends[0]:
            build(backend, app_fn)
        backend.pool, backend.app_fn = backends[0].pool, app_fn

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        patch.setattr(RayBackend, "build", build_once)
        patch.setattr(RayBackend, "terminate", lambda backend: None)
        yield
    if backends:
        terminate(backends[0])
    ray.shutdown()


def simulated(out, *, watched=None, watched_server=None, make=model, faulty_client=None, **server):
    looks = watched or watched_server
    run_simulation(
        server_app(out, watched=None if looks is None else looks / "server", make=make, **server),
        client_app(watched, make=make, faulty_client=faulty_client),
        num_supernodes=2,
        backend_config=RESOURCES,
    )
    return torch.load(out)


def of_clients(folder):
    return [x for place in folder.glob("process_*") for x in lines(place)]


def test_watching_a_federation_changes_no_bit_of_its_model(tmp_path):
    plain = simulated(tmp_path / "plain.pt")
    observed = simulated(tmp_path / "seen.pt", watched=tmp_path)
    assert plain.keys() == observed.keys()
    assert all(torch.equal(plain[n], observed[n]) for n in plain)
    result = sorted((x["round"], x["client"]) for x in of_clients(tmp_path))
    assert result == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(x["metrics"]["f1"]["value"] > 0.9 for x in of_clients(tmp_path))
    server = lines(tmp_path / "server")
    assert [x["client"] for x in server] == [0, 1, "sum"] * 2
    assert all(x["unknown"] for x in server)  # it does not hold the texts
    assert lines(tmp_path / "server", "run.jsonl")[-1]["how"] == "finished"
    check = verify_run(tmp_path / "server")
    assert check.status == HOLDS, check


def test_an_app_of_lora_trains_the_same_model_in_one_process_to_the_bit(tmp_path):
    """FedAvg with its weights, watched on the engine; and by FedAvg's own rule in a plain loop."""
    observed = simulated(tmp_path / "seen.pt", watched=tmp_path, make=lora)
    state = trained_state(lora())
    out = [OutgoingUpdates(observer(tmp_path / "one", lora), client=c) for c in range(2)]
    for round_ in (1, 2):
        returned = []
        for client, outgoing in enumerate(out):
            with recording() as batches:
                made, _ = trained(state, client, round_, lora)
            returned.append(outgoing.leaves(round_, state, made, batches).state)
        weights = [4 / 9, 5 / 9]  # num-examples of 4 and 5
        state = {
            n: torch.from_numpy(
                sum(r[n].numpy() * w for r, w in zip(returned, weights, strict=True))
            )
            for n in state
        }
    assert observed.keys() == state.keys()
    assert all("lora_" in name for name in observed)
    assert all(torch.equal(observed[n], t) for n, t in state.items())
    assert any(not torch.equal(t, trained_state(lora())[n]) for n, t in state.items())


def test_whatever_a_client_returns_no_round_hangs_and_no_release_is_forgotten(
    tmp_path, monkeypatch, caplog
):
    """One of two clients does each of FAULTS in turn; then the disk of the server is full."""
    account = {
        "clip": 0.5, "noise_multiplier": 1.0, "clients": 2, "target_delta": 1e-5,
        "ledger": tmp_path / "ledger", "accountant": "rdp",
    }  # fmt: skip
    caplog.set_level("INFO", "flwr")
    caplog.clear()
    write = os.write

    def full(descriptor, data):
        ledger = Path(os.readlink(f"/proc/self/fd/{descriptor}")) == tmp_path / "ledger"
        if ledger and (tmp_path / "ledger").stat().st_size >= len(FAULTS) * len(b"1.0 1.0 1\n"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(Exception, match=r"the release was not made: No space left"):
        simulated(
            tmp_path / "model.pt", watched_server=tmp_path, dp=account, rounds=len(FAULTS) + 2,
            faulty_client=1,
        )  # fmt: skip
    monkeypatch.undo()
    assert ClientDP(**account).privacy.releases == len(FAULTS)
    message = {
        round_: [x["unknown"] for x in lines(tmp_path / "server") if x["round"] == round_]
        for round_ in range(1, len(FAULTS) + 2)
    }
    words = {"last": "in round 1", "nan": "NaN", "shapes": "shape", "other": "only one of both has",
             "nothing": "only one of both has"}  # fmt: skip
    for round_, fault in enumerate(FAULTS, 1):
        assert len(message[round_]) == (
            2 if fault == "raises" else 3
        )  # two clients, and their mean
        assert fault not in words or any(words[fault] in why for why in message[round_]), fault
    counted = [r.getMessage() for r in caplog.records if "counts as zero" in r.getMessage()]
    assert len(counted) == len(FAULTS) - 2  # an update of an earlier round is clipped and counted
    assert len({place.split()[3] for place in counted}) == 1  # "sampled client 0 counts as zero"
    assert not (tmp_path / "model.pt").exists()
