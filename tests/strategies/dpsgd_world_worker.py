"""One of two gloo processes that together are one client; see test_dpsgd_world.py."""

from __future__ import annotations

import sys
from pathlib import Path

from lightning.pytorch.strategies import DDPStrategy

from tests.helpers.cases import Cases
from tests.strategies import dpsgd_fsdp2_worker as fsdp2
from tests.strategies.dpsgd_world_runs import BREAKS, MODELS, Runs

RUNS = Runs(DDPStrategy)
STATIC = Runs(lambda: DDPStrategy(static_graph=True))

CASES = {
    **{f"exact {name}": lambda name=name: RUNS.exact(name) for name in MODELS},
    **{
        f"bf16-mixed {name}": lambda name=name: RUNS.exact(
            name, precision="bf16-mixed", max_steps=2
        )
        for name in ("gpt2 tied", "lora")
    },
    "exact static_graph": lambda: STATIC.exact("gpt2 tied"),
    "exact one by one": RUNS.one_by_one,
    "pieces gpt2 tied": lambda: RUNS.exact("gpt2 tied", most=2),
    "pieces lora": lambda: RUNS.exact("lora", most=2, max_steps=2),
    "pieces static_graph": lambda: STATIC.exact("gpt2 untied", most=2, max_steps=2),
    "no stand-in": RUNS.no_stand_in,
    "changed": RUNS.changed,
    "mixed": RUNS.mixed,
    "noise": RUNS.noise,
    "rare": RUNS.rare,
    "rare pieces": lambda: RUNS.rare(most=1),
    "resume": lambda: RUNS.resume(Path(sys.argv[1])),
    "users": RUNS.users,
    "hardened apart": RUNS.hardened_apart,
    "shares": RUNS.shares,
    **{f"refused {name}": lambda b=b: RUNS.refused(b) for name, b in BREAKS.items()},
}

if __name__ == "__main__":
    both = {"ddp": CASES, "fsdp2": fsdp2.CASES}
    Cases(
        {
            f"{kind} {name}": lambda _, case=case: case()
            for kind, cases in both.items()
            for name, case in cases.items()
        }
    ).run()
