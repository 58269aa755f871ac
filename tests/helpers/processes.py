"""Modules in processes of their own; two gloo processes of one, as a launcher would start them."""

import errno
import gc
import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
SECONDS = 900
"""What no machine needs, however slow or loaded: the longest takes one minute on a free core."""
AFTER_THE_OTHER = 300
CRASHES = {-signal.SIGABRT, -signal.SIGSEGV}
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


def _imported() -> ForkServerContext:
    """What starts processes in which the large packages and this one are imported already.

    That takes seven seconds of a core, and is done once for all launches of a test worker.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["lightning", "peft", "opacus", "torch.distributed.fsdp", "lightning_fedleak.callbacks"]
    )
    return context


def _run(module: str, arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    """``python -m module arguments``."""
    gc.freeze()  # what was imported is no garbage
    gc.set_threshold(20_000)  # as tests/conftest.py
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def process(
    module: str, arguments: Sequence[object], log: Path, **environment: str
) -> ForkServerProcess:
    """What runs ``python -m module arguments`` once started; what it prints goes to ``log``."""
    given = (module, list(map(str, arguments)), log, environment_of_own(**environment))
    return _imported().Process(target=_run, args=given)


def one_process(module: str, *arguments: object, log: Path) -> str:
    """Runs a module as ``python -m module arguments``.

    Returns:
        What it printed. The test fails, and shows it, where the module does.
    """
    running = process(module, arguments, log)
    running.start()
    running.join(SECONDS)
    ended = running.exitcode
    running.kill()
    running.join()
    output = log.read_text() if log.exists() else ""
    if ended != 0:
        pytest.fail(f"{output[-4000:]}\n{module}: exit status {ended}")
    return output


def spawn_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be spawned is forked from where the large packages are imported already.

    All else stays: what the process gets is pickled, and it has nothing else of this one.
    """
    original = multiprocessing.get_context

    def context(method: str | None = None) -> Any:
        return _imported() if method == "spawn" else original(method)

    monkeypatch.setattr(multiprocessing, "get_context", context)
    monkeypatch.setattr(torch.multiprocessing, "get_context", context)


def crashed(processes: Sequence[ForkServerProcess]) -> bool:
    """Whether native code has ended one of some processes."""
    return not CRASHES.isdisjoint(running.exitcode for running in processes)


def two_processes(
    module: str, folder: Path, *, seconds: float = SECONDS, gpus: bool = False, again: bool = True
) -> list[Found]:
    """Runs a module as ``python -m module folder rank`` for ranks 0 and 1 at once.

    Args:
        module: What is run.
        folder: For logs and results.
        seconds: How long both are waited for before they are killed. Once one has ended, the other
            is waited for AFTER_THE_OTHER seconds at most.
        gpus: Whether the processes see the machine's GPUs.
        again: Run both once more, with a warning, if one aborts in native code: torch was seen to
            end a run by "double free" on a loaded machine.

    Returns:
        What each has written to ``<folder>/<rank>.json``. The test fails where one has not, and
        shows both logs.
    """
    environment = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0",
        "WORLD_SIZE": "2", **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
    }  # fmt: skip
    logs = [folder / f"{rank}.log" for rank in range(2)]
    processes = [
        process(
            module, [folder, rank], logs[rank], **environment, LOCAL_RANK=str(rank), RANK=str(rank)
        )
        for rank in range(2)
    ]
    try:
        for running in processes:
            running.start()
        end = time.monotonic() + seconds
        while any(alive := [running.is_alive() for running in processes]):
            if not all(alive):
                end = min(end, time.monotonic() + AFTER_THE_OTHER)
            if time.monotonic() > end or crashed(processes):
                break
            time.sleep(0.05)
    finally:
        for running in processes:
            running.kill()
            running.join()
    results = [folder / f"{rank}.json" for rank in range(2)]
    if not all(path.exists() for path in results):
        output = "\n".join(log.read_text()[-4000:] for log in logs if log.exists())
        if again and crashed(processes):
            warnings.warn(f"{module} crashed, and is run once more:\n{output}", stacklevel=2)
            once_more = folder / "again"
            once_more.mkdir()
            return two_processes(module, once_more, seconds=seconds, gpus=gpus, again=False)
        pytest.fail(output)
    return [json.loads(path.read_text()) for path in results]


def launched(module: str, **settings: bool) -> Any:
    """Return a fixture: what each of two processes of a module found, by case, in one launch."""

    @pytest.fixture(scope="module")
    def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
        return two_processes(module, tmp_path_factory.mktemp("ranks"), **settings)

    return ranks


def _compute(rank: int, make: Callable[[int], Any], folder: str) -> None:
    store = f"file://{folder}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.save(make(rank).compute(), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def computed_together(make: Callable[[int], Any], folder: Path) -> list[Any]:
    """Return what the metrics that ``make`` gives two processes by rank compute together."""
    start = torch.multiprocessing.start_processes
    start(_compute, (make, str(folder)), nprocs=2, start_method="fork")
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]
