"""Two gloo processes of one module, as a launcher would start them."""

from __future__ import annotations

import errno
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 1500
"""What no machine needs, however slow or loaded: the longest takes one minute on a free core."""
AFTER_THE_OTHER = 300
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


def environment_of_own(**more: str) -> dict[str, str]:
    """What a started process gets: of one thread, and not seeded by the tests before it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PL_")}
    return {**kept, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port()), **more}


def two_processes(
    module: str, folder: Path, *, seconds: float = SECONDS, gpus: bool = False
) -> list[Found]:
    """Runs ``python -m module folder rank`` for ranks 0 and 1 at once.

    Args:
        module: What is run.
        folder: For logs and results.
        seconds: How long both are waited for before they are killed. Once one has ended, the other
            is waited for AFTER_THE_OTHER seconds at most.
        gpus: Whether the processes see the machine's GPUs.

    Returns:
        What each has written to ``<folder>/<rank>.json``. The test fails where one has not, and
        shows both logs.
    """
    environment = environment_of_own(
        MASTER_ADDR="127.0.0.1",
        NODE_RANK="0",
        WORLD_SIZE="2",
        **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
    )
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
        end = time.monotonic() + seconds
        while any(running := [process.poll() is None for process in processes]):
            if not all(running):
                end = min(end, time.monotonic() + AFTER_THE_OTHER)
            if time.monotonic() > end:
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    results = [folder / f"{rank}.json" for rank in range(2)]
    if not all(path.exists() for path in results):
        pytest.fail("\n".join(log.read_text()[-4000:] for log in logs))
    return [json.loads(path.read_text()) for path in results]
