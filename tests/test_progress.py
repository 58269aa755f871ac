"""Measured seconds and memory; progress bars are tested with their callers."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
import torch

from lightning_fedleak import progress


@pytest.mark.parametrize(
    ("passed", "processor", "seconds"),
    [
        pytest.param(8.0, 2.0, 2.0, id="other programs run"),
        pytest.param(2.0, 8.0, 2.0, id="four threads work"),
        pytest.param(62.0, 0.0, 0.0, id="the process is stopped"),
    ],
)
def test_work_takes_the_smaller_of_time_and_processor_time(passed, processor, seconds, monkeypatch):
    for name, end in {"perf_counter": 5 + passed, "process_time": 10 + processor}.items():
        readings = iter([end - (passed if name == "perf_counter" else processor), end])
        monkeypatch.setattr(progress.time, name, lambda readings=readings: next(readings))
    assert progress.measure_seconds(lambda: None, torch.device("cpu")) == seconds


PAUSED = """
import sys, time
from lightning_fedleak.progress import Stopwatch
watch, begin = Stopwatch(), time.perf_counter()
print("begun", flush=True)
while time.perf_counter() - begin < 3:
    time.sleep(0.01)
print(watch.seconds, flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_stopped_process_spends_no_time() -> None:
    child = subprocess.Popen([sys.executable, "-c", PAUSED], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "begun\n"
    child.send_signal(signal.SIGSTOP)
    time.sleep(3)
    child.send_signal(signal.SIGCONT)
    assert float(child.communicate(timeout=60)[0]) < 1.5
