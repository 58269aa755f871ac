"""Programs of Flower on loopback over TLS, each ended by its process id."""

from __future__ import annotations

import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

ROOT = Path(__file__).parents[2]
SECONDS = 400


def certificates(folder: Path) -> None:
    """A root, and a server's certificate for 127.0.0.1 that it has signed."""
    now = datetime.datetime.now(datetime.UTC)
    root_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    def signed(subject: str, public, *extensions) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named("root"))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        made = builder.sign(root_key, hashes.SHA256())
        return made.public_bytes(serialization.Encoding.PEM)

    root = (x509.BasicConstraints(ca=True, path_length=None), True)
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    (folder / "root.pem").write_bytes(signed("root", root_key.public_key(), root))
    (folder / "server.pem").write_bytes(signed("server", key.public_key(), (here, False)))
    (folder / "server.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


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
    """A SuperLink and SuperNodes, each with the programs that it starts in a group of its own."""

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
        certificates(folder)
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            '[superlink]\ndefault = "here"\n\n[superlink.here]\n'
            f'address = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{folder / "root.pem"}"\n'
        )

    def start(self, name: str, program: str, *arguments: str) -> subprocess.Popen:
        log = self.stack.enter_context((self.folder / f"{name}.log").open("w"))
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name(program)), *arguments],
            env=self.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.stack.callback(ended, process)
        return process

    def superlink(self, *more: str) -> subprocess.Popen:
        result = self.start(
            "superlink", "flower-superlink", "--host", "127.0.0.1", "--port", str(self.port),
            "--ssl-ca-certfile", str(self.folder / "root.pem"),
            "--ssl-certfile", str(self.folder / "server.pem"),
            "--ssl-keyfile", str(self.folder / "server.key"), *more,
        )  # fmt: skip
        until(lambda: answers(self.port), self.logs)
        return result

    def supernode(self, number: int) -> subprocess.Popen:
        return self.start(
            f"supernode_{number}", "flower-supernode", "--superlink", f"127.0.0.1:{self.port}",
            "--root-certificates", str(self.folder / "root.pem"), "--port", str(free_port()),
            "--node-config", f"partition-id={number} num-partitions=2",
        )  # fmt: skip

    def all(self) -> tuple[subprocess.Popen, subprocess.Popen, subprocess.Popen]:
        return self.superlink(), self.supernode(0), self.supernode(1)

    def run(self, name: str, app: Path, *more: str, **config: object) -> subprocess.Popen:
        quoted = {k: f'"{v}"' if isinstance(v, Path | str) else v for k, v in config.items()}
        report = " ".join(f"{key.replace('_', '-')}={value}" for key, value in quoted.items())
        return self.start(
            name, "flwr", "run", str(app), "here", "--stream", *more, "--run-config", report
        )

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
