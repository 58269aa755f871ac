"""One of two gloo processes that together are one client; see test_dpsgd_world.py."""

from lightning.pytorch.strategies import DDPStrategy

from tests.helpers.cases import Cases
from tests.strategies import dpsgd_fsdp2_worker as fsdp2
from tests.strategies.dpsgd_world_runs import Runs, cases

RUNS = Runs(DDPStrategy)
STATIC = Runs(lambda: DDPStrategy(static_graph=True))

CASES = cases(RUNS, "static_graph", STATIC) | {
    "hardened apart": RUNS.hardened_apart,
    "shares": RUNS.shares,
}

if __name__ == "__main__":
    both = {"ddp": CASES, "fsdp2": fsdp2.CASES}
    Cases(
        {
            f"{kind} {name}": lambda _, case=case: case()
            for kind, found in both.items()
            for name, case in found.items()
        }
    ).run()
