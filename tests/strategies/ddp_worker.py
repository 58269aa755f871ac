"""One of two gloo processes; started by test_ddp.py. Writes what each case found as JSON.

Every case runs on both ranks and returns numbers and booleans; test_ddp.py says what they must be.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from lightning_fedleak.defenses import Defense, DefenseContext, GradientNoise
from lightning_fedleak.defenses.noise import noise_key
from lightning_fedleak.defenses.noise import standard_normal as _standard_normal
from lightning_fedleak.model.snapshots import ON_THE_WAY, Stage
from lightning_fedleak.strategies import DefendedStrategy
from tests.helpers.cases import Case, Cases, gathered
from tests.strategies.test_stages import Recorder, brute_force
from tests.strategies.toy import ManualLM, ToyLM, fit, same, state_of

CLIP, SIGMA = 0.05, 0.5
CASES = Cases()


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference relative to the largest entry of ``b``."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def ranks_agree(tensors: list[torch.Tensor]) -> bool:
    first, second = gathered([t.detach().clone() for t in tensors])
    return same(first, second)


def all_reduces(profile: torch.profiler.profile) -> int:
    """All that the process group did, DDP's own reducer included."""
    return sum(event.key == "gloo:all_reduce" for event in profile.events())


class Batches(Callback):
    """Keeps the batches of this rank, and whether the model is wrapped."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.wrapped = False

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self.kept.append(batch)
        self.wrapped = isinstance(trainer.strategy.model, DistributedDataParallel)


def sgd() -> ToyLM:
    return ToyLM("sgd")


class Probe(Defense):
    """Keeps where it acts."""

    name, guarantee = "probe", "none"
    context: DefenseContext

    def before_setup(self, context: DefenseContext) -> None:
        self.context = context


# ----- without gradient defences: the plain strategy -----------------------------------------


def identity(build: Callable[[], ToyLM] = ToyLM, **settings: Any) -> Case:
    def run(_: Path) -> dict[str, Any]:
        plain = state_of(*fit("ddp", build, devices=2, **settings))
        taps: list[Stage] = []
        strategy = DefendedStrategy("auto")
        strategy.add_tap(lambda stage, _: taps.append(stage))
        batches = Batches()
        ours = state_of(*fit(strategy, build, devices=2, callbacks=[batches], **settings))
        return {
            "same": same(plain, ours),
            "wrapped": batches.wrapped,
            "stages": sorted({str(stage) for stage in taps}),
            "separates": strategy.separates_stages,
        }

    return run


CASES["identity accumulation and clipping"] = identity(
    accumulate_grad_batches=2, gradient_clip_val=0.05
)
CASES["identity manual"] = identity(ManualLM)


@CASES.named("processes of one client")
def processes(_: Path) -> dict[str, Any]:
    found = {}
    for client in ("rank", "world"):
        probe = Probe()
        fit(DefendedStrategy("ddp", [probe], client), sgd, devices=2, max_steps=1)
        found[client] = [probe.context.client, probe.context.process]
        entropies = gathered(probe.context.entropy)
        found[f"{client} entropy alike"] = entropies[0] == entropies[1]
    return found


# ----- each rank a client ---------------------------------------------------------------------


def rank_clients(build=sgd, accumulate=1, clip=None, ddp=None, **settings) -> Case:
    """Local, shared and aggregate of every step against brute force."""

    def run(_: Path) -> dict[str, Any]:
        strategy = DefendedStrategy(DDPStrategy(**(ddp or {})), [GradientNoise(CLIP, SIGMA, 3)])
        tap, batches = Recorder(), Batches()
        strategy.add_tap(tap)
        settings.update(accumulate_grad_batches=accumulate, gradient_clip_val=clip)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model, fitted = fit(strategy, build, devices=2, callbacks=[batches], **settings)
            distributed.barrier()  # an all-reduce is recorded a little after it is waited for
        rank, parameters = fitted.global_rank, list(model.parameters())
        local, shared, aggregate = (tap.at(stage) for stage in ON_THE_WAY)
        found: dict[str, list[float]] = {"local": [], "shared": [], "aggregate": []}
        for step, weights in enumerate(tap.weights):
            micro = batches.kept[step * accumulate : (step + 1) * accumulate]
            own = flat(brute_force(weights, micro))
            if clip is not None:
                own *= min(1.0, clip / float(own.norm()))
            found["local"].append(distance(flat(local[step]), own))
            noise = GradientNoise(CLIP, SIGMA, 3)
            ids = {"client": CONTEXT[rank].client, "name": noise.name}
            drawn = [
                _standard_normal(
                    noise_key(noise._base(CONTEXT[rank]), step, i, **ids),
                    p.shape,
                    p.device,
                    torch.float32,
                )
                for i, p in enumerate(parameters)
            ]
            clipped = own * min(1.0, CLIP / float(own.norm()))
            expected = clipped + CLIP * SIGMA * flat(drawn)
            found["shared"].append(distance(flat(shared[step]), expected))
            mean = sum(gathered(expected)) / 2
            found["aggregate"].append(distance(flat(aggregate[step]), mean))
        ours, theirs = gathered(flat([t for update in shared for t in update]))
        return {
            "steps": len(local),
            **{name: max(errors) for name, errors in found.items()},
            "ranks share different updates": distance(ours, theirs) > 0.1,
            "ranks agree": ranks_agree(parameters),
            "ranks saw different data": not ranks_agree([b[0] for b in batches.kept]),
            "wrapped": batches.wrapped,
            "separates": strategy.separates_stages,
            "all-reduces": all_reduces(profile),
            "parameters": len(parameters),
        }

    return run


class _Client:
    """The only fields of a context that a seeded noise key depends on."""

    entropy = bytes(32)

    def __init__(self, client: int) -> None:
        self.client = client


CONTEXT: Any = [_Client(0), _Client(1)]
VALIDATION = {"limit_val_batches": 0, "logger": False}


def differing() -> ToyLM:
    """Weights of each process's own, until the first one's are taken by all."""
    torch.manual_seed(100 + int(os.environ["LOCAL_RANK"]))
    return ToyLM("sgd")


CASES["rank clipping"] = rank_clients(differing, clip=0.02, **VALIDATION)
CASES["rank reducer settings"] = rank_clients(
    ddp={"find_unused_parameters": True, "static_graph": True, "gradient_as_bucket_view": True},
    accumulate=3,
    **VALIDATION,
)


@CASES.named("control: plain DDP reduces")
def control(_: Path) -> dict[str, Any]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _, run = fit("ddp", sgd, devices=2, **VALIDATION)
        distributed.barrier()
    return {"all-reduces": all_reduces(profile), "steps": run.global_step}


# ----- all ranks one client -------------------------------------------------------------------


@CASES.named("world")
def world(_: Path) -> dict[str, Any]:
    tap, batches = Recorder(), Batches()
    strategy = DefendedStrategy("ddp", [GradientNoise(CLIP, SIGMA)], client="world")
    strategy.add_tap(tap)
    model, _run = fit(strategy, sgd, devices=2, callbacks=[batches])
    local, shared, aggregate = (tap.at(stage) for stage in ON_THE_WAY)
    errors, noises = [], []
    for step, weights in enumerate(tap.weights):
        own = flat(brute_force(weights, [batches.kept[step]]))
        mean = sum(gathered(own)) / 2
        errors.append(distance(flat(local[step]), mean))
        clipped = mean * min(1.0, CLIP / float(mean.norm()))
        noises.append((flat(shared[step]) - clipped) / (CLIP * SIGMA))
    noise = torch.cat(noises)
    return {
        "local": max(errors),
        "noise mean square": float(noise.square().mean()),
        "coordinates": noise.numel(),
        "same noise": ranks_agree([t for update in shared for t in update]),
        "aggregate is shared": same(shared, aggregate),
        "ranks agree": ranks_agree(list(model.parameters())),
        "wrapped": batches.wrapped,
        "separates": strategy.separates_stages,
    }


if __name__ == "__main__":
    from tests.strategies import dpsgd_worker, token_ldp_worker

    Cases(CASES | dpsgd_worker.CASES | token_ldp_worker.CASES).run()
