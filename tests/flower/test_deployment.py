"""Flower's deployment engine on loopback: a SuperLink and two SuperNodes over TLS, and faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from lightning_fedleak.federation import ClientDP
from tests.federation.test_observer import lines
from tests.flower.engine import ROOT, SECONDS, Deployed, ended, until

APP = Path(__file__).parent / "deployed"
EXAMPLES = ROOT / "examples" / "flower"


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Deployed]:
    with ExitStack() as stack:
        yield Deployed(tmp_path, stack)


@pytest.mark.timeout(2 * SECONDS)
def test_federation_survives_faults_and_counts_every_release(deployed: Deployed) -> None:
    """FAULTS of deployed/deployed_app.py; server and clients restart between the two runs."""
    folder = deployed.folder
    link, first, second = deployed.all()
    deployed.run("first", APP, out=folder)
    until(lambda: (folder / "kill_me").exists(), deployed.logs)
    ended(second)
    until(lambda: (folder / "done.txt").exists(), deployed.logs)

    def spent() -> int:
        return ClientDP(
            0.5, 1.0, clients=2, target_delta=1e-5, accountant="rdp", ledger=folder / "ledger"
        ).accountant.steps

    assert spent() == 2
    assert all(bool(t.isfinite().all()) for t in torch.load(folder / "model.pt").values())
    by_round = {x["round"]: x["unknown"] for x in lines(folder / "server") if x["client"] != "sum"}
    assert "does not hold the client's texts" in by_round[1]  # the second client's never arrived
    assert "the same state as in round 1" in by_round[2]
    decisions = [
        x["why"]
        for place in folder.glob("client_1_*")
        for x in lines(place, "run.jsonl")
        if x["kind"] == "gate"
    ]
    assert len(decisions) == 1
    assert "holds NaN" in decisions[0]
    (folder / "done.txt").unlink()
    (folder / "kill_me").unlink()
    ended(first)
    ended(link)
    deployed.all()
    n_before = len(lines(folder / "server"))
    log = folder / "server" / "run.jsonl"
    log.unlink()
    log.symlink_to("/dev/full")
    deployed.run("second", APP, out=folder, run="second")
    until(lambda: (folder / "done.txt").exists(), deployed.logs)
    assert spent() == 4
    assert all(bool(t.isfinite().all()) for t in torch.load(folder / "model.pt").values())
    result = [x for x in lines(folder / "server")[n_before:] if x["client"] != "sum"]
    assert {x["client"] for x in result} == {0, 1}
    reasons = {round_: [x["unknown"] for x in result if x["round"] == round_] for round_ in (1, 2)}
    for round_, why in (
        (1, "shape"),
        (1, "only one of both has"),
        (2, "only one of both has"),
        (2, "client's texts"),
    ):
        assert any(why in one for one in reasons[round_]), (round_, why)
    logs = "".join(path.read_text() for path in folder.glob("*.log"))
    assert logs.count("counts as zero: failed or withheld") >= 2  # NaN was withheld, one killed
    assert "return each tensor in the shape and dtype in which it was sent" in logs
    full = [p.parent.name for p in folder.glob("*/leakage.jsonl") if p.is_symlink()]
    assert full
    assert all(name.startswith("client_0_") for name in full)
    assert "leakage.jsonl cannot be written: No space left on device" in logs
    assert "run.jsonl cannot be written: No space left on device" in logs
    assert "tensor(" not in logs  # no update
    assert "array(" not in logs


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(
    ("app", "config"),
    [("lora", {"at_most": 0.5}), ("secure_aggregation", {}), ("flowertune", {"at_most": 0.5})],
)
def test_an_example_runs_as_it_is(deployed: Deployed, app: str, config: dict) -> None:
    """On the simulation engine, with two rounds of one step."""
    if app == "flowertune":
        pytest.importorskip("trl", reason="TRL is not in Flower's environment")
    out = deployed.folder / "out"
    deployed.superlink("--simulation")
    simulated = ("--federation-config", "num-supernodes=3")
    deployed.run(app, EXAMPLES / app, *simulated, out=out, rounds=2, local_steps=1, **config)
    until(lambda: (out / "done.txt").exists(), deployed.logs)
    log = (deployed.folder / f"{app}.log").read_text()
    result = [x for place in out.rglob("leakage.jsonl") for x in lines(place.parent)]
    assert {x["round"] for x in result} >= {1, 2}
    if app != "secure_aggregation":
        assert "withheld (worst/membership)" in log
    else:
        assert log.count("3 clients, 1 model to be seen") == 2
        server = [x for place in out.glob("server_*") for x in lines(place)]
        assert {x["client"] for x in server} == {"all", "sum"}
        assert any(x["metrics"].get("auc", {}).get("value") for x in server)
        clients = [x for place in out.glob("client_*") for x in lines(place)]
        assert {x["client"] for x in clients} == {"all", 0, 1, 2}
        assert any(x["metrics"].get("f1", {}).get("value") for x in clients)
