"""The example in NVFlare's simulator: one script in a thread, and one in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("nvflare")

from tests.federation.test_observer import lines

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Two rounds in which the first site withholds."""
    folder = tmp_path_factory.mktemp("example")
    command = [sys.executable, ROOT / "examples/nvflare/job.py", "--at-most", "0.3"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [*command, "--out", folder], env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-5000:]
    return folder


@pytest.mark.parametrize("site", ["site-1", "site-2"])
def test_batches_reach_the_filter_from_a_thread_and_from_a_process(out, site):
    result = lines(out / site)
    assert [(x["client"], x["round"]) for x in result] == [(site, 0), (site, 1)]
    assert all(x["metrics"]["recall"]["value"] > 0.9 for x in result)  # scored by the right truth
    assert not list(out.glob("**/fedleak_local_steps"))
    assert lines(out / site, "run.jsonl")[-1]["how"] == "finished"


def test_one_site_withholds_and_the_job_goes_on(out):
    did = {s: [x.get("did") for x in lines(out / s, "run.jsonl")] for s in ("site-1", "site-2")}
    assert did["site-1"].count("withheld") == 2
    assert did["site-2"].count("withheld") == 0


def test_the_final_model_is_that_of_the_site_that_trained(out):
    [path] = out.glob("workspace/server/simulate_job/app_server/FL_global_model.pt")
    final = torch.load(path, weights_only=True)
    state = final.get("model", final)
    sys.path.insert(0, str(ROOT / "examples/nvflare"))
    try:
        from watch import Module
    finally:
        sys.path.pop(0)
    sent = Module().state_dict()
    assert state.keys() == sent.keys()
    assert all(bool(torch.as_tensor(t).isfinite().all()) for t in state.values())
    assert any(not torch.equal(torch.as_tensor(state[n]), t) for n, t in sent.items())


def test_the_job_carries_no_copy_of_this_package(out):
    assert list(out.glob("workspace/**/custom/watch.py"))
    assert not list(out.glob("workspace/**/custom/lightning_fedleak"))
