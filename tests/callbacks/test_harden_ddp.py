"""A gate that turns defences up on two gloo processes, each of which runs all cases."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lightning_fedleak.callbacks import LeakageMonitor, RiskGate
from lightning_fedleak.defenses import DPSGD, Defense, Freeze, GradientNoise, ReleaseSettings
from lightning_fedleak.strategies import DefendedStrategy
from tests.callbacks.runs import Probe, fit
from tests.helpers.cases import Case, Cases, of
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.models import tiny_gpt2
from tests.helpers.processes import launched
from tests.strategies.ddp_worker import ranks_agree
from tests.strategies.dpsgd_runs import CausalLM

F1 = "leakage/probe/f1"
CASES = Cases()


class Notches(L.Callback):
    """What each step began with, and where the run stopped."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int]]] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        notches = [
            int(getattr(d, "notches", getattr(d, "active", 0))) for d in trainer.strategy.defenses
        ]
        self.seen.append((trainer.global_step, notches))


def dp() -> DPSGD:
    return DPSGD(
        1.0, noise_multiplier=2.0, target_epsilon=200.0, target_delta=1e-3, accountant="filter",
        release=ReleaseSettings(max_hardenings=2),
    )  # fmt: skip


DEFENSES: dict[str, Callable[[], list[Defense]]] = {
    "noise": lambda: [GradientNoise(1.0, 0.01, seed=3, max_hardenings=2)],
    "freeze": lambda: [Freeze("head", when="hardened")],
    "dpsgd": lambda: [dp()],
}


def module(defense: str) -> L.LightningModule:
    model = tiny_gpt2(tied=False, dropout=0.0).train()
    return CausalLM(model) if defense == "dpsgd" else CausalLMModule(model, optimizer="adamw")


def watched(
    root: Path,
    defense: str,
    client: str,
    *,
    metric: str = F1,
    gate: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[L.Trainer, RiskGate, LeakageMonitor, list[Any], tuple[Defense, ...]]:
    monitor = LeakageMonitor(Probe(k=20), every_n_steps=1)
    given = {"at_most": -1.0, "action": "harden"} | (gate or {})
    found, notches = RiskGate(metric, **given), Notches()  # type: ignore[arg-type]
    strategy = DefendedStrategy("ddp", DEFENSES[defense](), client=client)  # type: ignore[arg-type]
    # Six steps an epoch. A Poisson batch of 10 of 60 is never empty on both processes, which would
    # put a look off.
    size = {"n": 120, "batch_size": 10} if defense == "dpsgd" else {"n": 48}
    trainer = fit(
        [found, monitor, notches], root, module=module(defense), strategy=strategy, devices=2,
        loader=random_token_loader(**size), **settings,
    )  # fmt: skip
    return trainer, found, monitor, notches.seen, strategy.defenses


def rows(trainer: L.Trainer, name: str) -> list[tuple[int, float]]:
    """(step, value) as rank 0 logged them."""
    if not trainer.is_global_zero:
        return []
    with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
        return [(int(r["step"]), float(r[name])) for r in csv.DictReader(file) if r.get(name)]


def weights(trainer: L.Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.lightning_module.parameters()]


def hardened(defense: str, client: str) -> Case:
    """Hardens at every look until nothing is left, which stops the run; then resumes it."""

    def run(folder: Path) -> dict[str, Any]:
        trainer, gate, monitor, seen, _ = watched(folder, defense, client)
        assert gate.fired is not None
        path = folder / f"{defense}-{client}.ckpt"
        trainer.save_checkpoint(path)
        stopped = weights(trainer)
        out = {
            "seen": seen,
            "steps": trainer.global_step,
            "looks": monitor.looks,
            "unknown": monitor.failures,
            "notches": gate.notches,
            "equal": ranks_agree(stopped),
            "fired": [step for step, value in rows(trainer, f"gate/{gate.name}") if value],
            "rows": len(rows(trainer, f"gate/{gate.name}")),
            "noted": rows(trainer, f"gate/{gate.name}_notches"),
            "saved": len(list(folder.rglob(f"gate-*step={monitor.last_step}.ckpt"))),
        }
        trainer, gate, monitor, seen, _ = watched(
            folder, defense, client, gate={"at_most": 1.0, "strict": False}, max_epochs=2,
            ckpt_path=str(path),
        )  # fmt: skip
        names = [name for name, _ in trainer.lightning_module.named_parameters()]
        now = zip(names, stopped, weights(trainer), strict=True)
        return out | {
            "resumed": seen,
            "resumed notches": gate.notches,
            "resumed failures": monitor.failures,
            "resumed equal": ranks_agree(weights(trainer)),
            "still": [name for name, a, b in now if torch.equal(a, b)],
            "exposed": monitor.latest["leakage/probe/exposed"],
        }

    return run


for client in ("rank", "world"):
    CASES[f"noise {client}"] = hardened("noise", client)
CASES["freeze rank"] = hardened("freeze", "rank")
CASES["dpsgd rank"] = hardened("dpsgd", "rank")
CASES["dpsgd world"] = hardened("dpsgd", "world")


@CASES.named("one decides")
def one_decides(folder: Path) -> dict[str, Any]:
    """Of a value that each process has its own of, the first process's counts."""
    gate = {"at_most": 0.0, "patience": 1}
    _, found, monitor, seen, _ = watched(
        folder, "noise", "rank", metric="monitor/seconds", gate=gate
    )
    assert found.fired is not None
    return {"seen": seen, "value": found.fired.value, "own": monitor.latest["monitor/seconds"]}


@CASES.named("refused")
def refused(folder: Path) -> dict[str, Any]:
    found = {}
    try:
        watched(folder, "freeze", "world")
    except ValueError as error:
        found["freeze"] = str(error)
    return found


pytestmark = [pytest.mark.ddp, pytest.mark.slow]
HEAD = "model.lm_head.weight"


ranks = launched("tests.callbacks.test_harden_ddp")


TWO_NOTCHES = [f"{d} {c}" for d in ("noise", "dpsgd") for c in ("rank", "world")]
ONE_NOTCH = ["freeze rank"]


@pytest.mark.parametrize("name", [*TWO_NOTCHES, *ONE_NOTCH])
def test_every_rank_is_turned_up_at_the_same_steps_stops_and_resumes_so(ranks, name: str) -> None:
    """Weights stay equal between ranks, and what was frozen stays where it was."""
    most = 1 if name in ONE_NOTCH else 2
    for found in of(ranks, name):
        assert found["seen"] == [[step, [step]] for step in range(most + 1)]
        assert found["steps"] == found["looks"] == most + 1
        assert (found["notches"], found["unknown"], found["saved"]) == (most, 0, 1)
        assert found["equal"]
        assert found["resumed equal"]
        assert [step for step, _ in found["resumed"]] == list(range(most + 1, most + 7))
        assert all(set(notches) == {most} for _, notches in found["resumed"])
        assert (found["resumed notches"], found["resumed failures"]) == (most, 0)
        assert found["still"] == ([HEAD] if name in ONE_NOTCH else [])
        assert found["exposed"] == (0 if name in ONE_NOTCH else 1)


@pytest.mark.parametrize("name", [*TWO_NOTCHES, *ONE_NOTCH])
def test_the_gate_is_logged_once_for_all_ranks(ranks, name: str) -> None:
    first, second = of(ranks, name)
    steps = list(range(first["steps"]))
    assert first["fired"] == steps
    assert first["rows"] == len(steps)
    most = first["notches"]
    assert first["noted"] == [[step, min(step + 1.0, most)] for step in steps]
    assert second["rows"] == 0


def test_the_first_process_decides_for_all(ranks) -> None:
    first, second = of(ranks, "one decides")
    assert first["own"] != second["own"]
    assert first["value"] == second["value"]
    assert first["seen"] == second["seen"] == [[s, [s // 2]] for s in range(6)]


def test_freezing_in_mid_run_is_refused_where_a_reducer_would_wait(ranks) -> None:
    for found in of(ranks, "refused"):
        assert "cannot freeze in the middle of a run of one client under DDP" in found["freeze"]
        assert "Use DefendedStrategy(client='rank'), or Freeze(when='always')" in found["freeze"]


if __name__ == "__main__":
    CASES.run()
