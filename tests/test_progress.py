"""Measured seconds and memory; progress bars are tested with their callers."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_fedleak import progress


def test_processor_seconds_are_divided_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 18.0])
    monkeypatch.setattr(progress.time, "process_time", lambda: next(clock))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert progress.measure_seconds(lambda: None, torch.device("cpu")) == 2.0


def test_a_kernel_that_reports_no_peak_leaves_it_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.Path, "read_text", lambda *args, **kwargs: "VmRSS:\t 1024 kB\n")
    assert math.isnan(progress.peak_bytes(torch.device("cpu")))
