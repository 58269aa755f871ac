"""Two gloo processes of one module, as a launcher would start them."""

from __future__ import annotations

import errno
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 400
WORKERS = 16
Found = dict[str, dict[str, Any]]


def free_port() -> int:
    """A port that stays free until processes that are started now listen on it.

    One that the system hands out can be taken by any other connection in the seconds between.
    These lie below the range it hands out from, and each worker of ``pytest-xdist`` has its own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % WORKERS
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(20_000, 32_000, WORKERS) + worker
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port


def two_processes(
    module: str, folder: Path, *, seconds: float = SECONDS, gpus: bool = False
) -> list[Found]:
    """Runs ``python -m module folder rank`` for ranks 0 and 1 at once.

    Args:
        module: What is run.
        folder: For logs and results.
        seconds: How long each process is waited for before both are killed.
        gpus: Whether the processes see the machine's GPUs.

    Returns:
        What each has written to ``<folder>/<rank>.json``. The test fails where one has not, and
        shows both logs.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "NODE_RANK": "0",
        "WORLD_SIZE": "2",
        **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
    }
    logs = [folder / f"{rank}.log" for rank in range(2)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, str(folder), str(rank)],
                    cwd=ROOT,
                    env={**environment, "LOCAL_RANK": str(rank)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        for process in processes:
            process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.kill()
            process.wait()
    results = [folder / f"{rank}.json" for rank in range(2)]
    if not all(path.exists() for path in results):
        pytest.fail("\n".join(log.read_text()[-4000:] for log in logs))
    return [json.loads(path.read_text()) for path in results]
