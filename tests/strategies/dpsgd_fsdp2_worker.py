"""What two gloo processes that together are one client run under FSDP2."""

from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_fedleak.defenses import DPSGD
from tests.strategies.dpsgd_runs import CLIP
from tests.strategies.dpsgd_world_runs import LM, Found, Own, Runs, cases, gpt2


class Sharded(LM):
    """Shards every block by itself, and the rest of the model together."""

    def __init__(self, model: nn.Module | None = None, lr: float = 0.05, **shard: Any) -> None:
        super().__init__(model, lr)
        self.shard = shard

    def configure_model(self) -> None:
        if any(isinstance(p, DTensor) for p in self.parameters()):
            return
        given = {"mesh": self.device_mesh["data_parallel"], **self.shard}
        for part in self.parts():
            fully_shard(part, **given)
        fully_shard(self.model, **given)

    def parts(self) -> list[nn.Module]:
        return [*next(m for m in self.model.modules() if isinstance(m, nn.ModuleList))]


class Whole(LM):
    """Shards the LightningModule itself, in one group."""

    def configure_model(self) -> None:
        if not any(isinstance(p, DTensor) for p in self.parameters()):
            fully_shard(self, mesh=self.device_mesh["data_parallel"])


class Replicated(Sharded):
    """Holds all of it on both, through a mesh of two dimensions (hybrid sharding)."""

    def configure_model(self) -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        self.shard = {"mesh": mesh}
        super().configure_model()


class Leaves(LM):
    """Also shards layers by themselves, of which FSDP2 changes the class."""

    def configure_model(self) -> None:
        if any(isinstance(p, DTensor) for p in self.parameters()):
            return
        mesh = self.device_mesh["data_parallel"]
        for module in self.model.modules():
            own = [*module.parameters(recurse=False)]
            if own and module not in (self.model.transformer.wte, self.model.lm_head):
                fully_shard(module, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def fsdp2(**sizes: int) -> ModelParallelStrategy:
    return ModelParallelStrategy(**{"data_parallel_size": 2, "tensor_parallel_size": 1, **sizes})


def checkpointed() -> nn.Module:
    model = gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def refusals() -> Found:
    tensor_parallel = Runs(lambda: fsdp2(data_parallel_size=1, tensor_parallel_size=2), Sharded)
    return {"tensor parallel": tensor_parallel.message(DPSGD(CLIP, noise_multiplier=1.0))}


RUNS = Runs(fsdp2, Sharded)
WHOLE = Runs(fsdp2, Whole)
LEAVES = Runs(fsdp2, Leaves)
REPLICATED = Runs(fsdp2, Replicated)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HALF = Runs(fsdp2, lambda *a, **k: Sharded(*a, **k, mp_policy=BF16))

CASES = cases(RUNS, "replicated", REPLICATED) | {
    "exact MixedPrecisionPolicy": lambda: HALF.exact("gpt2 tied"),
    "exact own model": lambda: RUNS.exact("", build=Own, twin=Own),
    "exact whole module": lambda: WHOLE.exact("gpt2 untied"),
    "exact leaves": lambda: LEAVES.exact("gpt2 tied"),
    "exact checkpointed": lambda: RUNS.exact("gpt2 tied", build=checkpointed),
    "noise replicated": REPLICATED.noise,
    "refusals": refusals,
}
