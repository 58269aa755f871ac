"""Two sites fine-tune a language model on NVFlare; each update is looked at before it leaves.

One trains with Lightning, in a thread of NVFlare's; the other with transformers' Trainer, in a
process of its own. With ``--at-most`` below 1, the first holds back what leaks more::

    python examples/nvflare/job.py
    python examples/nvflare/job.py --at-most 0.3

NVFlare's simulator runs it. Results are below ``--out``; ``fedleak report`` reads them.
"""

import argparse
import os
import sys
from pathlib import Path

from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_opt.pt.job_config.base_fed_job import BaseFedJob
from nvflare.job_config.script_runner import ScriptRunner

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from watch import SITES, Module  # noqa: E402

from lightning_fedleak.federation.nvflare import FedLeakFilter  # noqa: E402


def make_job(at_most: float, rounds: int) -> BaseFedJob:
    """Return the job: a workflow, two training scripts, and who looks at their results."""
    job = BaseFedJob(initial_model=Module(), name="fedleak", min_clients=len(SITES))
    job.to_server(FedAvg(num_clients=len(SITES), num_rounds=rounds))
    first, second = SITES
    process = {"launch_external_process": True, "command": f"{sys.executable} -u"}
    job.to(ScriptRunner(script=str(HERE / "lightning_client.py")), first)
    job.to(ScriptRunner(script=str(HERE / "transformers_client.py"), **process), second)
    for site in SITES:
        most = at_most if site == first else 1.0
        gates = [{"metric": "leakage/worst/words", "at_most": most}] if most < 1 else []
        job.to(FedLeakFilter("watch.make_observer", gates), site)
    return job


def main() -> None:
    """Run the job in the simulator."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at-most", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("fedleak_runs/nvflare"))
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    os.environ["FEDLEAK_OUT"] = str(out)
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    job = make_job(arguments.at_most, arguments.rounds)
    sys.exit(job.simulator_run(str(out / "workspace"), threads=len(SITES)))


if __name__ == "__main__":
    main()
