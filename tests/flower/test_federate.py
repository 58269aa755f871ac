"""``fedleak federate`` on Flower's simulation trains the same model as in one process."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

pytest.importorskip("flwr")
pytest.importorskip("ray")

from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from lightning_fedleak.cli.commands.federate import FederateCommand
from tests.federation.test_observer import lines
from tests.helpers.folders import TEXTS, save_tiny_causal_lm


def test_both_engines_train_the_same_model(tmp_path: Path, caplog, capfd) -> None:
    """One of three clients has no text that a gate lets leave; all are watched."""
    (tmp_path / "text.txt").write_text("\n".join(f"{t} {i}" for i, t in enumerate(TEXTS * 4)))
    given = {
        "model": str(save_tiny_causal_lm(tmp_path / "model")),
        "text": str(tmp_path / "text.txt"),
        "clients": 3,
        "rounds": 2,
        "local_steps": 4,
        "batch_size": 4,
        "length": 8,
        "peft": "lora",
        "gate": 0.75,
    }
    models, tables = [], []
    for engine in ("local", "flower"):
        console = Console(file=io.StringIO(), width=160)
        command = FederateCommand(**given, engine=engine, out=tmp_path / engine)
        assert command.run(console) == 0
        [made] = (tmp_path / engine).iterdir()
        models.append(load_file(made / "model.safetensors"))
        said = console.file.getvalue()
        tables.append(said[said.index("\n round ") : said.index("\nLogs")])
    told = capfd.readouterr().err + caplog.text
    assert "DEPRECATED" not in told  # Flower's words to itself, of every level up to warnings
    assert "ServerApp" not in told
    one, other = models
    assert one.keys() == other.keys()
    assert all(torch.equal(one[n], other[n]) for n in one)
    assert tables[0] == tables[1]
    assert " updates did not leave" in tables[0]
    # Workers are not told of the end; the server is, and the report takes its word.
    [report] = (tmp_path / "flower").rglob("report.json")
    [run] = json.loads(report.read_text())["runs"]
    assert run["ended"] == "finished normally"
    ends = [x for path in report.parent.rglob("run.jsonl") for x in lines(path.parent, path.name)]
    assert [x["how"] for x in ends if x["kind"] == "end"] == ["finished"]


@pytest.mark.parametrize("trust", ["central", "local", "secure_aggregation"])
def test_a_client_tells_its_number_and_nothing_else_beside_training(
    tmp_path: Path, trust: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_fedleak.cli.studies.federation import Federation
    from lightning_fedleak.cli.studies.federation.simulation import _client_app

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    app = _client_app(Federation(noise_multiplier=2.0, trust=trust), tmp_path)  # type: ignore[arg-type]
    where = Context(1, 7, {"partition-id": 3}, RecordDict(), {})
    asked = Message(RecordDict(), dst_node_id=7, message_type="query")
    reply = app(asked, where)
    assert {n: dict(r) for n, r in reply.content.items()} == {"client": {"number": 3}}
