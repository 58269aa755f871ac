"""DefendedStrategy over FSDP2 on two gloo processes: cases, and what each must have found."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_fedleak.defenses import ActivationNoise, Defense, DefenseError, GradientNoise
from lightning_fedleak.defenses.processes import global_norm, local_part, shard_number
from lightning_fedleak.model.anatomy.blocks import states_out
from lightning_fedleak.model.snapshots import ON_THE_WAY, Stage
from lightning_fedleak.strategies import DefendedStrategy
from lightning_fedleak.strategies.seams import CHECKPOINT_KEY
from tests.helpers.cases import Case, Cases, gathered, of
from tests.helpers.lightning_modules import random_token_loader
from tests.helpers.models import tiny_gpt2
from tests.helpers.processes import launched
from tests.helpers.sharded import ShardedModule, whole
from tests.strategies.ddp_worker import Batches, distance, flat
from tests.strategies.test_stages import brute_force
from tests.strategies.toy import ManualLM, ToyLM, fit, same, trainer

CLIP, SIGMA = 0.05, 0.5
CASES = Cases()


class Sharding:
    """Shards the whole model, and its hidden layer by itself, once."""

    def configure_model(self) -> None:
        if not isinstance(self.head.weight, DTensor):
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.hidden, mesh=mesh)
            fully_shard(self, mesh=mesh)


class ShardedLM(Sharding, ToyLM):
    pass


class ShardedManualLM(Sharding, ManualLM):
    pass


def sgd() -> ToyLM:
    return ShardedLM("sgd")


def fsdp2(**settings: Any) -> ModelParallelStrategy:
    defaults = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    return ModelParallelStrategy(**{**defaults, **settings})


def defended(*defenses: Defense) -> DefendedStrategy:
    return DefendedStrategy(fsdp2(), list(defenses), client="world")


def state(model: ToyLM, run: Any) -> dict[str, Any]:
    optimizers = [
        [{k: whole(v) for k, v in entry.items() if isinstance(v, torch.Tensor)} for entry in o]
        for o in ([*optimizer.state.values()] for optimizer in run.optimizers)
    ]
    return {
        "weights": [whole(p) for p in model.parameters()],
        "optimizers": optimizers,
        "losses": model.losses,
        "logged": {name: float(value) for name, value in run.callback_metrics.items()},
        "rng": torch.get_rng_state(),
    }


# ----- without gradient defences: the plain strategy -----------------------------------------


def identity(build: Callable[[], ToyLM] = ShardedLM, **settings: Any) -> Case:
    def run(_: Path) -> dict[str, Any]:
        plain = state(*fit(fsdp2(), build, devices=2, **settings))
        strategy, taps, sharded = defended(), [], []

        def tap(stage: Stage, optimizer: torch.optim.Optimizer) -> None:
            taps.append(str(stage))
            groups = optimizer.param_groups
            sharded.extend(isinstance(p.grad, DTensor) for g in groups for p in g["params"])

        strategy.add_tap(tap)
        model, fitted = fit(strategy, build, devices=2, **settings)
        return {
            "same": same(plain, state(model, fitted)), "stages": sorted(set(taps)),
            "sharded": all(sharded), "steps": fitted.global_step,
        }  # fmt: skip

    return run


CASES["identity accumulation and clipping"] = identity(
    accumulate_grad_batches=2, gradient_clip_val=0.05
)
CASES["identity manual"] = identity(ShardedManualLM)


# ----- all ranks one client -------------------------------------------------------------------


class Recorder:
    """Whole gradients by stage, this rank's shards of them, and the weights before the step."""

    def __init__(self) -> None:
        self.whole: dict[Stage, list[torch.Tensor]] = {stage: [] for stage in ON_THE_WAY}
        self.shards: dict[Stage, list[list[torch.Tensor]]] = {stage: [] for stage in ON_THE_WAY}
        self.weights: list[list[torch.Tensor]] = []

    def __call__(self, stage: Stage, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.whole[stage].append(flat([whole(p.grad) for p in parameters]))
        self.shards[stage].append([local_part(p.grad).clone() for p in parameters])
        if stage is Stage.LOCAL:
            self.weights.append([whole(p) for p in parameters])


def noised(clip: float | None, accumulate: int = 1) -> Case:
    def run(_: Path) -> dict[str, Any]:
        noise, tap, batches = GradientNoise(clip, SIGMA), Recorder(), Batches()
        strategy = defended(noise)
        strategy.add_tap(tap)
        model, _run = fit(
            strategy, sgd, n=48, devices=2, callbacks=[batches], accumulate_grad_batches=accumulate
        )
        errors, own, replicas = [], [], []
        for step, weights in enumerate(tap.weights):
            micro = batches.kept[step * accumulate : (step + 1) * accumulate]
            mine = flat(brute_force(weights, micro))
            mean = sum(gathered(mine)) / 2
            local, shared = (tap.whole[stage][step] for stage in (Stage.LOCAL, Stage.SHARED))
            errors.append(distance(local, mean))
            scale = 1.0 if clip is None else min(1.0, clip / float(mean.norm()))
            replicas.append((shared - scale * mean) / noise.standard_deviation)
            shards = zip(tap.shards[Stage.LOCAL][step], tap.shards[Stage.SHARED][step], strict=True)
            parts = [(b.double() - scale * a.double()).flatten() for a, b in shards]
            own.append(parts)
        drawn = torch.cat(replicas)
        # An odd number of rows splits unevenly: the numbers that both ranks have are compared.
        first, second = gathered([part for step in own for part in step])
        both = [(a[: len(b)], b[: len(a)]) for a, b in zip(first, second, strict=True)]
        pairs = torch.stack([torch.cat(side) for side in zip(*both, strict=True)])
        everywhere = gathered(drawn)
        return {
            "local": max(errors),
            "noise mean square": float(drawn.square().mean()),
            "coordinates": drawn.numel(),
            "correlation of shards": float(torch.corrcoef(pairs)[0, 1]),
            "one update": same(*everywhere),
            "aggregate is shared": same(tap.whole[Stage.SHARED], tap.whole[Stage.AGGREGATE]),
            "releases": noise.releases,
            "finite": all(bool(whole(p).isfinite().all()) for p in model.parameters()),
        }

    return run


CASES["noise accumulated"] = noised(CLIP, accumulate=2)


@CASES.named("resume")
def resume(folder: Path) -> dict[str, Any]:
    folder = Path(gathered(str(folder))[0])
    found: dict[str, Any] = {}
    settings: dict[str, Any] = {"devices": 2, "shuffle": False}

    def momentum() -> ToyLM:
        return ShardedLM("sgd", momentum=0.9)

    for name, sharded in (("folder", True), ("file", False)):

        def strategy() -> DefendedStrategy:
            inner = fsdp2(save_distributed_checkpoint=sharded)  # noqa: B023
            return DefendedStrategy(inner, [GradientNoise(CLIP, SIGMA, seed=7)], client="world")

        uninterrupted, _ = fit(strategy(), momentum, max_epochs=2, **settings)
        keep = ModelCheckpoint(dirpath=folder / name, save_last=True)
        fit(strategy(), momentum, callbacks=[keep], enable_checkpointing=True, **settings)
        path = folder / name / "last.ckpt"
        saved = torch.load(path / "meta.pt" if sharded else path, weights_only=False)
        again, taps = strategy(), []
        again.add_tap(lambda stage, _, taps=taps: taps.append(stage))
        model, run = fit(again, momentum, max_epochs=2, ckpt_path=str(path), **settings)
        weights = zip(uninterrupted.parameters(), model.parameters(), strict=True)
        found[name] = {
            "saved": saved[CHECKPOINT_KEY],
            "same": all(torch.equal(whole(a), whole(b)) for a, b in weights),
            "releases": again.defenses[0].releases,
            "steps": run.global_step,
            "taps": len(taps),
        }
    return found


class ShardedGPT2(ShardedModule):
    """A sharded model with blocks, and the states that leave its first block."""

    def __init__(self) -> None:
        super().__init__(tiny_gpt2(layers=2, dropout=0.0, tied=False).train())
        self.sent: list[torch.Tensor] = []

    def on_train_start(self) -> None:
        block = self.model.transformer.h[0]
        block.register_forward_hook(
            lambda _, __, out: self.sent.append(states_out(out).detach().clone())
        )


@CASES.named("activation noise")
def activation_noise(_: Path) -> dict[str, Any]:
    """The same text on both ranks, in one step whose states are read with and without noise."""
    text = random_token_loader(n=1, batch_size=1, length=48)
    states = []
    for defenses in ([], [ActivationNoise(1, 0.5)]):
        strategy = DefendedStrategy(fsdp2(), defenses, client="world")
        model = ShardedGPT2()
        run = trainer(strategy, devices=2, max_steps=1, use_distributed_sampler=False)
        run.fit(model, text)
        states.append(model.sent[0].double().flatten())
    noise = states[1] - states[0]
    pair = torch.stack(gathered(noise))
    return {
        "std": float(noise.std()) / 0.5,
        "coordinates": noise.numel(),
        "correlation": float(torch.corrcoef(pair)[0, 1]),
    }


# ----- what is refused ------------------------------------------------------------------------


class Unsure(Defense):
    name, guarantee = "unsure", "none"
    activation_layers = (1,)

    def on_batch(self, batch: Any, context: Any) -> Any:
        return batch


class PartlySharded(ToyLM):
    def configure_model(self) -> None:
        if not isinstance(self.hidden.weight, DTensor):
            fully_shard(self.hidden, mesh=self.device_mesh["data_parallel"])


def message(strategy: DefendedStrategy, build: Callable[[], ToyLM]) -> str:
    try:
        fit(strategy, build, devices=2)
    except DefenseError as error:
        return str(error)
    return "nothing was refused"


@CASES.named("refused")
def refused(_: Path) -> dict[str, Any]:
    tensor_parallel = fsdp2(data_parallel_size=1, tensor_parallel_size=2)

    class Breaking(ShardedLM):
        def on_after_backward(self) -> None:
            if self.global_rank == 1:
                local_part(self.head.weight.grad).fill_(float("nan"))

    return {
        "partly": message(defended(GradientNoise(1.0, 1.0)), PartlySharded),
        "layers": message(DefendedStrategy(tensor_parallel, [Unsure()], client="world"), ToyLM),
        "nan": message(defended(GradientNoise(None, 1.0)), lambda: Breaking("sgd")),
        "nan, clipped": message(defended(GradientNoise(1.0, 1.0)), lambda: Breaking("sgd")),
    }


# ----- the arithmetic of shards ----------------------------------------------------------------


@CASES.named("shards")
def shards(_: Path) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(shape, generator=generator) for shape in ((5, 3), (7,), (4, 2))]
    mesh = init_device_mesh("cpu", (2,))
    grid = init_device_mesh("cpu", (2, 1))
    spread = [
        distribute_tensor(full[0], mesh, [Shard(0)]),
        distribute_tensor(full[1], mesh, [Replicate()]),
        full[2].clone(),
    ]
    return {
        "norm": global_norm(spread) / float(flat(full).norm()),
        "numbers": [shard_number(tensor) for tensor in spread],
        "grid": [
            shard_number(distribute_tensor(full[0], grid, places))
            for places in ([Shard(0), Replicate()], [Replicate(), Shard(0)], [Shard(1), Shard(0)])
        ],
        "rank": dist.get_rank(),
    }


pytestmark = [pytest.mark.ddp, pytest.mark.slow]


ranks = launched("tests.strategies.test_fsdp2", gpus=True)


@pytest.mark.parametrize(("name", "steps"), [("accumulation and clipping", 2), ("manual", 6)])
def test_without_defences_it_is_the_plain_strategy(ranks, name: str, steps: int) -> None:
    stages = ["aggregate", "local", "shared"]
    for found in of(ranks, f"identity {name}"):
        assert found == {"same": True, "stages": stages, "sharded": True, "steps": steps}


def test_one_client_shares_the_reduced_gradient_with_noise_of_every_shards_own(ranks) -> None:
    for found in of(ranks, "noise accumulated"):
        assert found["local"] < 1e-5
        n = found["coordinates"]
        low, high = scipy.stats.chi2.ppf([1e-9, 1 - 1e-9], n)
        assert low < n * found["noise mean square"] < high
        assert abs(found["correlation of shards"]) < 0.35  # about 0.55 if shards got the same noise
        assert found["releases"] == 3
        for fact in ("one update", "aggregate is shared", "finite"):
            assert found[fact], fact


def test_activation_noise_differs_between_the_processes_of_one_client(ranks) -> None:
    for facts in of(ranks, "activation noise"):
        assert facts["std"] == pytest.approx(1.0, abs=0.2)
        assert facts["coordinates"] == 48 * 16
        assert abs(facts["correlation"]) < 0.4  # 1 if both processes drew the same


def test_resume_restores_defences_and_making_optimizer_state_is_no_release(ranks) -> None:
    expected: dict[str, Any] = {
        "saved": {"gradient_noise": {"notches": 0, "releases": 3, "spent": math.inf}}, "same": True,
        "releases": 6, "steps": 6, "taps": 9,
    }  # fmt: skip
    for found in of(ranks, "resume"):
        assert found == {"folder": expected, "file": expected}


def test_refusals_when_the_model_is_known(ranks) -> None:
    for found in of(ranks, "refused"):
        assert "embedding.weight, head.weight, head.bias is not sharded" in found["partly"]
        assert "cannot act under tensor parallelism" in found["layers"]
        assert found["nan, clipped"] == "nothing was refused"
        assert "norm is not finite; nothing was released" in found["nan"]


def test_norm_and_numbers_of_shards(ranks) -> None:
    first, second = of(ranks, "shards")
    assert first["norm"] == second["norm"] == pytest.approx(1.0, rel=1e-6)
    assert (first["numbers"], second["numbers"]) == ([0, 0, 0], [1, 0, 0])
    assert (first["grid"], second["grid"]) == ([0, 0, 0], [1, 0, 1])


if __name__ == "__main__":
    CASES.run()
