"""The examples of Flower, run by its own commands on the simulation engine."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.federation.test_observer import lines

ROOT = Path(__file__).parents[2]
SECONDS = 400


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def ended(process: subprocess.Popen) -> None:
    """Kills a program and what it has started: its own group, by number."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=20)


class Deployed:
    """A SuperLink, and each app that runs on it, in a process group of its own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.port = free_port()
        self.environment = os.environ | {
            "FLWR_HOME": str(folder / "home"),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            '[superlink]\ndefault = "here"\n\n[superlink.here]\n'
            f'address = "127.0.0.1:{self.port}"\n'
            "insecure = true\n"
        )

    def start(self, name: str, program: str, *arguments: str) -> None:
        log = self.stack.enter_context((self.folder / f"{name}.log").open("w"))
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name(program)), *arguments], env=self.environment,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.stack.callback(ended, process)

    def superlink(self) -> None:
        port = str(self.port)
        self.start(
            "superlink", "flower-superlink", "--host", "127.0.0.1", "--port", port, "--insecure",
            "--simulation",
        )  # fmt: skip
        until(lambda: answers(self.port), self.logs)

    def run(self, name: str, app: Path, *more: str, **config: object) -> None:
        quoted = {k: f'"{v}"' if isinstance(v, Path | str) else v for k, v in config.items()}
        report = " ".join(f"{key.replace('_', '-')}={value}" for key, value in quoted.items())
        self.start(name, "flwr", "run", str(app), "here", "--stream", *more, "--run-config", report)

    def logs(self) -> str:
        return "\n".join(
            f"---- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.folder.glob("*.log"))
        )


def answers(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def until(holds, logs, seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, logs()
        time.sleep(0.2)


EXAMPLES = ROOT / "examples" / "flower"


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Deployed]:
    with ExitStack() as stack:
        yield Deployed(tmp_path, stack)


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
    deployed.superlink()
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
